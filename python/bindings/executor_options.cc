// SPDX-License-Identifier: Apache-2.0
#include "executor_options.h"

#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include "guide.h"
#include "messages.h"

namespace paceline::python {
namespace {

// ---- names of enum values --------------------------------------------------------------------

template <class Enum>
struct EnumName {
  Enum value;
  const char* name;
};

constexpr std::array kAcceptMethodNames = {
    EnumName<AcceptMethod>{AcceptMethod::kCoupled, "coupled"},
    EnumName<AcceptMethod>{AcceptMethod::kStandard, "standard"},
    EnumName<AcceptMethod>{AcceptMethod::kBlock, "block"},
    EnumName<AcceptMethod>{AcceptMethod::kSynthetic, "synthetic"}};
constexpr std::array kDraftDriverNames = {EnumName<DraftDriver>{DraftDriver::kUnrolled, "unrolled"},
                                          EnumName<DraftDriver>{DraftDriver::kReplay, "replay"},
                                          EnumName<DraftDriver>{DraftDriver::kWhile, "while"},
                                          EnumName<DraftDriver>{DraftDriver::kEager, "eager"}};
constexpr std::array kDraftPositionNames = {EnumName<DraftPosition>{DraftPosition::kLast, "last"},
                                            EnumName<DraftPosition>{DraftPosition::kNext, "next"}};

template <class Enum>
constexpr const auto& enum_names() {
  if constexpr (std::is_same_v<Enum, AcceptMethod>) {
    return kAcceptMethodNames;
  } else if constexpr (std::is_same_v<Enum, DraftPosition>) {
    return kDraftPositionNames;
  } else {
    return kDraftDriverNames;
  }
}

// ---- fields ----------------------------------------------------------------------------------

[[noreturn]] void refuse_option(const char* name, py::handle value, const std::string& allowed) {
  throw py::value_error("executor option '" + std::string(name) + "' is " + shorten(value) +
                        "; allowed: " + allowed);
}

template <class T>
void read_option(const char* name, py::handle value, T& field) {
  if constexpr (std::is_enum_v<T>) {
    std::string allowed;
    for (const auto& entry : enum_names<T>()) {
      if (py::isinstance<py::str>(value) && value.cast<std::string>() == entry.name) {
        field = entry.value;
        return;
      }
      allowed += allowed.empty() ? "'" : ", '";
      allowed += entry.name;
      allowed += "'";
    }
    refuse_option(name, value, allowed);
  } else if constexpr (std::is_same_v<T, bool>) {
    if (!py::isinstance<py::bool_>(value)) {
      refuse_option(name, value, "True or False");
    }
    field = value.cast<bool>();
  } else if constexpr (std::is_same_v<T, std::optional<bool>>) {
    if (!value.is_none() && !py::isinstance<py::bool_>(value)) {
      refuse_option(name, value, "True, False or None");
    }
    field = value.cast<std::optional<bool>>();
  } else if constexpr (std::is_same_v<T, std::shared_ptr<HostDrafter>>) {
    if (PyCallable_Check(value.ptr()) == 0) {
      refuse_option(name, value, "a function of token ids and a number of drafts");
    }
    field = make_drafter(py::reinterpret_borrow<py::object>(value));
  } else {
    const char* allowed = std::is_floating_point_v<T>    ? "a number"
                          : sizeof(T) == sizeof(int32_t) ? "an integer of 32 bits"
                                                         : "an integer of 64 bits";
    if (py::isinstance<py::bool_>(value)) {
      refuse_option(name, value, allowed);
    }
    py::detail::make_caster<T> caster;
    if (!caster.load(value, /*convert=*/true)) {
      PyErr_Clear();
      refuse_option(name, value, allowed);
    }
    field = py::detail::cast_op<T>(caster);
  }
}

template <class T>
py::object write_option(const T& field) {
  if constexpr (std::is_enum_v<T>) {
    for (const auto& entry : enum_names<T>()) {
      if (entry.value == field) {
        return py::str(entry.name);
      }
    }
    return py::none();
  } else if constexpr (std::is_same_v<T, std::shared_ptr<HostDrafter>>) {
    return object_of(field);
  } else {
    return py::cast(field);
  }
}

struct OptionField {
  const char* name;
  void (*read)(ExecutorOptions& options, const char* name, py::handle value);
  py::object (*write)(const ExecutorOptions& options);
};

// Access: a stateless lambda from options to one of its members.
template <class Access>
constexpr OptionField option_field(const char* name, Access /*access*/) {
  return {name,
          [](ExecutorOptions& options, const char* field_name, py::handle value) {
            read_option(field_name, value, Access{}(options));
          },
          [](const ExecutorOptions& options) { return write_option(Access{}(options)); }};
}

constexpr std::array kOptionFields = {
    option_field("max_model_len", [](auto& o) -> auto& { return o.max_model_len; }),
    option_field("max_num_seqs", [](auto& o) -> auto& { return o.max_num_seqs; }),
    option_field("max_num_batched_tokens",
                 [](auto& o) -> auto& { return o.max_num_batched_tokens; }),
    option_field("prefill_chunk_size", [](auto& o) -> auto& { return o.prefill_chunk_size; }),
    option_field("max_waiting_requests", [](auto& o) -> auto& { return o.max_waiting_requests; }),
    option_field("kv_cache_bytes", [](auto& o) -> auto& { return o.kv_cache_bytes; }),
    option_field("gpu_memory_utilization",
                 [](auto& o) -> auto& { return o.gpu_memory_utilization; }),
    option_field("log_interval_s", [](auto& o) -> auto& { return o.log_interval_s; }),
    option_field("hang_timeout_s", [](auto& o) -> auto& { return o.hang_timeout_s; }),
    option_field("block_size", [](auto& o) -> auto& { return o.block_size; }),
    option_field("enable_prefix_caching", [](auto& o) -> auto& { return o.enable_prefix_caching; }),
    option_field("num_threads", [](auto& o) -> auto& { return o.num_threads; }),
    option_field("max_logprobs", [](auto& o) -> auto& { return o.max_logprobs; }),
    option_field("num_speculative_tokens",
                 [](auto& o) -> auto& { return o.speculative.num_speculative_tokens; }),
    option_field("accept_method", [](auto& o) -> auto& { return o.speculative.accept_method; }),
    option_field("synthetic_acceptance_length",
                 [](auto& o) -> auto& { return o.speculative.synthetic_acceptance_length; }),
    option_field("samples_drafts", [](auto& o) -> auto& { return o.speculative.samples_drafts; }),
    option_field("num_draft_proposals",
                 [](auto& o) -> auto& { return o.speculative.num_draft_proposals; }),
    option_field("draft_stop_threshold",
                 [](auto& o) -> auto& { return o.speculative.draft_stop_threshold; }),
    option_field("ngram_min", [](auto& o) -> auto& { return o.speculative.ngram_min; }),
    option_field("ngram_max", [](auto& o) -> auto& { return o.speculative.ngram_max; }),
    option_field("host_drafter", [](auto& o) -> auto& { return o.speculative.host_drafter; }),
    option_field("draft_position", [](auto& o) -> auto& { return o.speculative.draft_position; }),
    option_field("draft_driver", [](auto& o) -> auto& { return o.draft_driver; }),
    option_field("device_lateness", [](auto& o) -> auto& { return o.device_lateness; }),
    option_field("host_delay_max_us", [](auto& o) -> auto& { return o.host_delay_max_us; }),
    option_field("adaptive", [](auto& o) -> auto& { return o.speculative.adaptive; }),
    option_field("draft_schedule_seed", [](auto& o) -> auto& { return o.draft_schedule_seed; }),
    option_field("use_null_device", [](auto& o) -> auto& { return o.use_null_device; }),
    option_field("poison_freed_blocks", [](auto& o) -> auto& { return o.poison_freed_blocks; }),
};

}  // namespace

ExecutorOptions options_from_dict(const py::dict& dict) {
  ExecutorOptions options;
  for (const auto& [key, value] : dict) {
    const std::string name = py::str(key).cast<std::string>();
    bool is_known = false;
    for (const OptionField& field : kOptionFields) {
      if (name == field.name) {
        field.read(options, field.name, value);
        is_known = true;
        break;
      }
    }
    if (!is_known) {
      std::string allowed;
      for (const OptionField& field : kOptionFields) {
        allowed += allowed.empty() ? "" : ", ";
        allowed += field.name;
      }
      throw py::value_error("unknown executor option " + shorten(key) + "; allowed: " + allowed);
    }
  }
  return options;
}

py::dict options_to_dict(const ExecutorOptions& options) {
  py::dict dict;
  for (const OptionField& field : kOptionFields) {
    dict[field.name] = field.write(options);
  }
  return dict;
}

}  // namespace paceline::python
