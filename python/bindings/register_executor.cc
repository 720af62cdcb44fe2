// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <array>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <paceline/executor.h>

#include "bindings.h"

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

py::object finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return py::none();
    case FinishReason::kStop:
      return py::str("stop");
    case FinishReason::kLength:
      return py::str("length");
    case FinishReason::kCancelled:
      return py::str("cancelled");
    case FinishReason::kError:
      return py::str("error");
  }
  return py::none();
}

// ---- options: a dict <-> ExecutorOptions -----------------------------------------------------

[[noreturn]] void refuse_option(const char* name, py::handle value, const std::string& allowed) {
  throw py::value_error("executor option '" + std::string(name) + "' is " +
                        py::repr(value).cast<std::string>() + "; allowed: " + allowed);
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
    option_field("block_size", [](auto& o) -> auto& { return o.block_size; }),
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
    option_field("draft_position", [](auto& o) -> auto& { return o.speculative.draft_position; }),
    option_field("draft_driver", [](auto& o) -> auto& { return o.draft_driver; }),
    option_field("device_lateness", [](auto& o) -> auto& { return o.device_lateness; }),
    option_field("use_window_lists", [](auto& o) -> auto& { return o.use_window_lists; }),
    option_field("host_delay_max_us", [](auto& o) -> auto& { return o.host_delay_max_us; }),
    option_field("use_null_device", [](auto& o) -> auto& { return o.use_null_device; }),
    option_field("poison_freed_blocks", [](auto& o) -> auto& { return o.poison_freed_blocks; }),
};

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
      throw py::value_error("unknown executor option '" + name + "'; allowed: " + allowed);
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

// ---- results ---------------------------------------------------------------------------------

py::dict counters_to_dict(const SpeculationCounters& counters) {
  py::dict dict;
  dict["num_iterations"] = counters.num_iterations;
  dict["num_draft_tokens"] = counters.num_draft_tokens;
  dict["num_accepted_tokens"] = counters.num_accepted_tokens;
  dict["num_discarded_tokens"] = counters.num_discarded_tokens;
  dict["accepted_per_position"] = counters.accepted_per_position;
  dict["drafted_per_position"] = counters.drafted_per_position;
  return dict;
}

py::dict memory_report_to_dict(const MemoryReport& report) {
  py::list groups;
  for (const MemoryReport::Group& group : report.groups) {
    py::dict entry;
    entry["owner"] = group.owner;
    entry["kind"] = group.kind;
    entry["window"] = group.window;
    entry["num_layers"] = group.num_layers;
    entry["num_kv_heads"] = group.num_kv_heads;
    entry["head_dim"] = group.head_dim;
    entry["block_size"] = group.block_size;
    entry["block_bytes"] = group.block_bytes;
    entry["padding_bytes"] = group.padding_bytes;
    entry["held_blocks"] = group.held_blocks;
    entry["quarantined_blocks"] = group.quarantined_blocks;
    groups.append(std::move(entry));
  }
  py::dict dict;
  dict["target_weight_bytes"] = report.target_weight_bytes;
  dict["draft_weight_bytes"] = report.draft_weight_bytes;
  dict["kv_pool_bytes"] = report.kv_pool_bytes;
  dict["kv_slab_bytes"] = report.kv_slab_bytes;
  dict["kv_num_slabs"] = report.kv_num_slabs;
  dict["kv_free_slabs"] = report.kv_free_slabs;
  dict["workspace_bytes"] = report.workspace_bytes;
  dict["graph_bytes"] = report.graph_bytes;
  dict["groups"] = std::move(groups);
  return dict;
}

py::dict stats_to_dict(const ExecutorStats& stats) {
  py::dict dict;
  dict["num_iterations"] = stats.num_iterations;
  dict["num_preemptions"] = stats.num_preemptions;
  dict["num_shared_tokens"] = stats.num_shared_tokens;
  dict["num_emitted_tokens"] = stats.num_emitted_tokens;
  dict["num_draft_tokens"] = stats.num_draft_tokens;
  dict["num_accepted_tokens"] = stats.num_accepted_tokens;
  dict["num_running"] = stats.num_running;
  dict["num_waiting"] = stats.num_waiting;
  dict["host_us"] = stats.host_us;
  dict["iteration_us"] = stats.iteration_us;
  dict["iteration_idle_us"] = stats.iteration_idle_us;
  dict["iteration_num_decoding"] = stats.iteration_num_decoding;
  dict["iteration_num_prefill"] = stats.iteration_num_prefill;
  return dict;
}

// A read-only view [rows, vocab] that shares ownership of the values: no copy.
py::object logits_array(const RequestEvent& event, int32_t vocab_size) {
  if (event.logits == nullptr || vocab_size <= 0) {
    return py::none();
  }
  using Values = std::shared_ptr<const std::vector<float>>;
  auto owner = std::make_unique<Values>(event.logits);
  const std::vector<float>& values = **owner;
  py::capsule base(owner.get(), [](void* pointer) { delete static_cast<Values*>(pointer); });
  (void)owner.release();
  const auto num_rows = static_cast<py::ssize_t>(values.size()) / vocab_size;
  py::array_t<float> array({num_rows, static_cast<py::ssize_t>(vocab_size)}, values.data(), base);
  array.attr("setflags")(py::arg("write") = false);
  return array;
}

// A list a token of tuples (token id, logprob, rank).
py::list logprobs_list(const std::vector<std::vector<TokenLogprob>>& tokens) {
  py::list result;
  for (const std::vector<TokenLogprob>& entries : tokens) {
    py::list list;
    for (const TokenLogprob& entry : entries) {
      list.append(py::make_tuple(entry.token, entry.logprob, entry.rank));
    }
    result.append(std::move(list));
  }
  return result;
}

// An event with what is needed to show it.
struct PyRequestEvent {
  RequestEvent event;
  int32_t vocab_size;  // columns of logits
};

std::string event_repr(const PyRequestEvent& self) {
  const RequestEvent& event = self.event;
  std::ostringstream out;
  out << "RequestEvent(id=" << event.id << ", sample=" << event.sample
      << ", num_token_ids=" << event.token_ids.size()
      << ", finish_reason=" << py::repr(finish_reason_name(event.finish_reason)).cast<std::string>()
      << ", num_drafted=" << event.num_drafted << ", num_accepted=" << event.num_accepted;
  if (!event.error.empty()) {
    out << ", error=" << py::repr(py::str(event.error)).cast<std::string>();
  }
  out << ")";
  return out.str();
}

// ---- the executor ----------------------------------------------------------------------------

// An Executor that can be closed while other threads call it: new calls are refused, close() waits
// for those under way, then joins. All methods run without the GIL.
class PyExecutor {
 public:
  PyExecutor(std::shared_ptr<const Model> target, std::shared_ptr<const Model> draft,
             const ExecutorOptions& options, const Executor::Progress& progress)
      : executor_(
            std::make_unique<Executor>(std::move(target), std::move(draft), options, progress)) {}

  ~PyExecutor() { close(); }

  PyExecutor(const PyExecutor&) = delete;
  PyExecutor& operator=(const PyExecutor&) = delete;

  template <class Function>
  auto call(Function function) {
    py::gil_scoped_release release;
    const Call call(*this);
    return function(*executor_);
  }

  // The caller has released the GIL.
  void close() {
    std::unique_lock lock(mutex_);
    is_closed_ = true;
    idle_.wait(lock, [this] { return num_calls_ == 0; });
    executor_.reset();
  }

  bool is_closed() const {
    const std::lock_guard lock(mutex_);
    return is_closed_;
  }

 private:
  // A call under way.
  class Call {
   public:
    explicit Call(PyExecutor& owner) : owner_(owner) {
      const std::lock_guard lock(owner_.mutex_);
      if (owner_.is_closed_) {
        throw std::runtime_error("the executor is closed");
      }
      ++owner_.num_calls_;
    }
    ~Call() {
      const std::lock_guard lock(owner_.mutex_);
      if (--owner_.num_calls_ == 0) {
        owner_.idle_.notify_all();
      }
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    PyExecutor& owner_;
  };

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  int64_t num_calls_ = 0;
  bool is_closed_ = false;
  std::unique_ptr<Executor> executor_;
};

// Calls back into Python from a constructor that runs without the GIL. Copies hold no reference, so
// that the library may copy and drop them without the GIL; `callback` outlives the constructor.
// What the callback raises leaves the constructor.
Executor::Progress progress_caller(py::handle callback) {
  if (callback.is_none()) {
    return {};
  }
  return [callback](int32_t done, int32_t total) {
    const py::gil_scoped_acquire acquire;
    callback(done, total);
  };
}

std::string executor_repr(PyExecutor& self) {
  if (self.is_closed()) {
    return "<paceline._core.Executor, closed>";
  }
  const ExecutorOptions options = self.call([](Executor& executor) { return executor.options(); });
  std::ostringstream out;
  out << "<paceline._core.Executor, max_model_len=" << options.max_model_len
      << ", max_num_seqs=" << options.max_num_seqs << ", block_size=" << options.block_size
      << ", kv_cache_bytes=" << options.kv_cache_bytes
      << ", num_speculative_tokens=" << options.speculative.num_speculative_tokens << ">";
  return out.str();
}

void register_event(py::module_& module) {
  py::class_<PyRequestEvent>(
      module, "RequestEvent",
      "What one iteration emitted for one sample of a request, or its end. The event of a sample "
      "whose `finish_reason` is not None is its last.")
      .def_property_readonly(
          "id", [](const PyRequestEvent& self) { return self.event.id; },
          "Id that `Executor.add_request` returned.")
      .def_property_readonly(
          "sample", [](const PyRequestEvent& self) { return self.event.sample; },
          "Which of the request's samples, from 0.")
      .def_property_readonly(
          "token_ids", [](const PyRequestEvent& self) { return self.event.token_ids; },
          "Newly emitted token ids, a new list at each access.")
      .def_property_readonly(
          "logprobs", [](const PyRequestEvent& self) { return logprobs_list(self.event.logprobs); },
          "With `logprobs`, for each of `token_ids` a list of tuples (token id, logprob, rank): "
          "of the token itself, then of the most probable ones, best first. Else empty.")
      .def_property_readonly(
          "prompt_logprobs",
          [](const PyRequestEvent& self) -> py::object {
            if (self.event.prompt_logprobs == nullptr) {
              return py::none();
            }
            return logprobs_list(*self.event.prompt_logprobs);
          },
          "With `prompt_logprobs`, the same for the prompt's tokens from the second on, in the "
          "event of the first token; else None.")
      .def_property_readonly(
          "finish_reason",
          [](const PyRequestEvent& self) { return finish_reason_name(self.event.finish_reason); },
          "None while the sample goes on, else \"stop\", \"length\", \"cancelled\" or \"error\".")
      .def_property_readonly(
          "error", [](const PyRequestEvent& self) { return self.event.error; },
          "What happened, for \"error\"; else empty.")
      .def_property_readonly(
          "num_drafted", [](const PyRequestEvent& self) { return self.event.num_drafted; },
          "Drafts verified in this iteration.")
      .def_property_readonly(
          "num_accepted", [](const PyRequestEvent& self) { return self.event.num_accepted; },
          "Of those, kept.")
      .def_property_readonly(
          "counters",
          [](const PyRequestEvent& self) { return counters_to_dict(self.event.counters); },
          "Totals of the sample, filled in its last event: a dict with num_iterations, "
          "num_draft_tokens, num_accepted_tokens, num_discarded_tokens, accepted_per_position [k] "
          "and drafted_per_position [k].")
      .def_property_readonly(
          "logits",
          [](const PyRequestEvent& self) { return logits_array(self.event, self.vocab_size); },
          "Read-only float32 array [prompt_len, vocab_size] in the last event of a request with "
          "`score_prompt`, else None. Shares the event's memory and outlives it.")
      .def_property_readonly(
          "arrival_us", [](const PyRequestEvent& self) { return self.event.arrival_us; },
          "Steady clock in microseconds; last event only.")
      .def_property_readonly(
          "first_token_us", [](const PyRequestEvent& self) { return self.event.first_token_us; },
          "Steady clock in microseconds; last event only, 0 without tokens.")
      .def_property_readonly(
          "finish_us", [](const PyRequestEvent& self) { return self.event.finish_us; },
          "Steady clock in microseconds; last event only.")
      .def("__repr__", &event_repr);
}

}  // namespace

void register_executor(py::module_& module) {
  register_event(module);

  py::class_<PyExecutor, Holder<PyExecutor>>(module, "Executor",
                                             "The engine: requests in, events out, on a thread of "
                                             "its own. All methods are thread-safe and "
                                             "release the GIL.")
      .def(py::init([](const PyModel& target, const PyModel* draft, const py::dict& options,
                       const py::object& progress) {
             if (!progress.is_none() && PyCallable_Check(progress.ptr()) == 0) {
               throw py::value_error("progress is " + py::repr(progress).cast<std::string>() +
                                     "; allowed: None or a callable of (done, total)");
             }
             const ExecutorOptions parsed = options_from_dict(options);
             std::shared_ptr<const Model> target_model = target.model;
             std::shared_ptr<const Model> draft_model = draft == nullptr ? nullptr : draft->model;
             const Executor::Progress report = progress_caller(progress);
             py::gil_scoped_release release;
             return Holder<PyExecutor>(
                 new PyExecutor(std::move(target_model), std::move(draft_model), parsed, report));
           }),
           py::arg("target"), py::arg("draft").none(true), py::arg("options"),
           py::arg("progress") = py::none(),
           R"doc(Allocates the KV pool and the workspace and starts the engine's thread.

It runs on the device that the models lie on.

Args:
    target: The model whose output is wanted.
    draft: The drafter; None for plain decoding.
    options: Fields of ExecutorOptions, those of its SpeculativeOptions flattened. Absent keys keep
        their default; max_model_len (tokens) and kv_cache_bytes have none.
    progress: Called as (done, total) on this thread while programs are captured, which only CUDA
        takes time for. What it raises ends the start and is raised here.

Raises:
    ValueError: An unknown key, or a value that is not allowed.
    NotImplementedError: A combination that does not exist yet.
    paceline.OutOfMemoryError: The pool or the workspace could not be allocated.
    paceline.DeviceError: The device failed.
)doc")
      .def(
          "add_request",
          [](PyExecutor& self, std::vector<int32_t> prompt, double temperature, uint64_t seed,
             int32_t max_tokens, std::vector<int32_t> stop_token_ids, bool score_prompt,
             int32_t top_k, double top_p, double min_p, double repetition_penalty,
             double presence_penalty, double frequency_penalty, int32_t min_tokens,
             const std::vector<std::pair<int32_t, float>>& logit_bias,
             std::vector<std::vector<int32_t>> bad_words, std::vector<int32_t> allowed_token_ids,
             int32_t logprobs, int32_t prompt_logprobs, int32_t num_samples) {
            Request request;
            request.prompt = std::move(prompt);
            request.sampling.temperature = temperature;
            request.sampling.seed = seed;
            request.sampling.max_tokens = max_tokens;
            request.sampling.stop_token_ids = std::move(stop_token_ids);
            request.sampling.top_k = top_k;
            request.sampling.top_p = top_p;
            request.sampling.min_p = min_p;
            request.sampling.repetition_penalty = repetition_penalty;
            request.sampling.presence_penalty = presence_penalty;
            request.sampling.frequency_penalty = frequency_penalty;
            request.sampling.min_tokens = min_tokens;
            for (const auto& [token, bias] : logit_bias) {
              request.sampling.logit_bias.push_back({.token = token, .bias = bias});
            }
            request.sampling.bad_words = std::move(bad_words);
            request.sampling.allowed_token_ids = std::move(allowed_token_ids);
            request.sampling.logprobs = logprobs;
            request.sampling.prompt_logprobs = prompt_logprobs;
            request.score_prompt = score_prompt;
            request.num_samples = num_samples;
            return self.call(
                [&](Executor& executor) { return executor.add_request(std::move(request)); });
          },
          py::arg("prompt"), py::kw_only(), py::arg("temperature") = 1.0, py::arg("seed") = 0,
          py::arg("max_tokens") = 16, py::arg("stop_token_ids") = std::vector<int32_t>{},
          py::arg("score_prompt") = false, py::arg("top_k") = 0, py::arg("top_p") = 1.0,
          py::arg("min_p") = 0.0, py::arg("repetition_penalty") = 1.0,
          py::arg("presence_penalty") = 0.0, py::arg("frequency_penalty") = 0.0,
          py::arg("min_tokens") = 0,
          py::arg("logit_bias") = std::vector<std::pair<int32_t, float>>{},
          py::arg("bad_words") = std::vector<std::vector<int32_t>>{},
          py::arg("allowed_token_ids") = std::vector<int32_t>{}, py::arg("logprobs") = -1,
          py::arg("prompt_logprobs") = -1, py::arg("num_samples") = 1, R"doc(Queues a request.

Args:
    prompt: Token ids, at least one, each in [0, vocab_size).
    temperature: 0 = greedy; finite and >= 0.
    seed: Same seed, same output, whatever else runs.
    max_tokens: Most tokens to emit, >= 1; prompt and output together are capped by max_model_len.
    stop_token_ids: At most 8; a stop token is emitted, then the request ends.
    score_prompt: Instead of generating, return the target's logits of every prompt position.
    top_k: Only the most probable so many tokens; 0 = all.
    top_p: Of those, the fewest that make up this probability; in (0, 1], 1 = all.
    min_p: Of those, the ones at least this many times as probable as the best; in [0, 1], 0 = all.
    repetition_penalty: Logits of tokens in the prompt or output are divided by it where positive,
        multiplied where negative; > 0, 1 = off.
    presence_penalty: Taken off the logits of tokens in the output.
    frequency_penalty: The same, times how often they are there.
    min_tokens: Stop tokens are ruled out for the first so many output tokens; at most max_tokens.
    logit_bias: (token, bias) pairs, added first; at most 1024, each token once.
    bad_words: Sequences of tokens that are never completed; at most 128, of 1024 tokens in all.
    allowed_token_ids: Everything else is ruled out; empty: nothing is.
    logprobs: Of every emitted token, and of the most probable so many at its place, from the
        target's logits before all of the above; at most the option max_logprobs, -1 = none.
    prompt_logprobs: The same of the prompt's tokens, but for the first.
    num_samples: Independent outputs, 1 to 128; sample i draws with seed + i, modulo 2**64.

Returns:
    The request's id, or None when the queue is full.

Raises:
    ValueError: A request that can never run; nothing else is affected.
    RuntimeError: The executor is closed.
)doc")
      .def(
          "cancel",
          [](PyExecutor& self, RequestId id, std::optional<int32_t> sample) {
            return self.call([&](Executor& executor) { return executor.cancel(id, sample); });
          },
          py::arg("id"), py::arg("sample") = py::none(),
          R"doc(Ends a request, or one of its samples.

An event with "cancelled" follows for each sample that had not already ended.

Args:
    id: What `add_request` returned.
    sample: Which; None = all.

Returns:
    False when no sample of such a request runs or waits.

Raises:
    ValueError: A sample that the request never had.
)doc")
      .def(
          "poll",
          [](PyExecutor& self, int32_t timeout_ms) {
            std::vector<RequestEvent> events;
            int32_t vocab_size = 0;
            self.call([&](Executor& executor) {
              events = executor.poll(timeout_ms);
              vocab_size = executor.vocab_size();
            });
            py::list result;
            for (RequestEvent& event : events) {
              result.append(py::cast(PyRequestEvent{std::move(event), vocab_size}));
            }
            return result;
          },
          py::arg("timeout_ms") = 0, R"doc(Takes the events there are.

Args:
    timeout_ms: Longest wait for the first event in milliseconds; 0 = do not wait.

Returns:
    Events, those of one request in order; empty when none came in time.

Raises:
    RuntimeError: The executor is closed. The cause, if the engine has failed.
)doc")
      .def(
          "memory_report",
          [](PyExecutor& self) {
            return memory_report_to_dict(
                self.call([](Executor& executor) { return executor.memory_report(); }));
          },
          R"doc(Bytes by purpose.

Returns:
    A dict of bytes and counts; "groups" has one dict a KV group.
)doc")
      .def(
          "stats",
          [](PyExecutor& self) {
            return stats_to_dict(self.call([](Executor& executor) { return executor.stats(); }));
          },
          R"doc(Counters and times since start or the last `reset_stats()`.

Returns:
    A dict; durations in microseconds.
)doc")
      .def(
          "reset_stats",
          [](PyExecutor& self) { self.call([](Executor& executor) { executor.reset_stats(); }); },
          "Sets all of `stats()` back to zero.")
      .def(
          "trace_iteration",
          [](PyExecutor& self, int32_t timeout_ms) {
            const std::vector<KernelTime> times =
                self.call([&](Executor& executor) { return executor.trace_iteration(timeout_ms); });
            py::list rows;
            for (const KernelTime& time : times) {
              py::dict row;
              row["name"] = time.name;
              row["count"] = time.count;
              row["total_us"] = time.total_us;
              rows.append(row);
            }
            return rows;
          },
          py::arg("timeout_ms") = 5000,
          R"doc(Times the kernels of the next iteration without prefill rows, one by one.

Args:
    timeout_ms: How long to wait for such an iteration.

Returns:
    A list of dicts with `name`, `count` and `total_us`, the longest first; empty when no such
    iteration came in time. Kernels do not overlap while they are timed, so the sum exceeds what
    the iteration takes.

Raises:
    NotImplementedError: The device is not cuda.
)doc")
      .def(
          "check_integrity",
          [](PyExecutor& self) {
            return self.call([](Executor& executor) { return executor.check_integrity(); });
          },
          R"doc(Blocks until nothing runs or waits, then checks every invariant of the block pool.

Returns:
    An empty string, or what is broken.
)doc")
      .def_property_readonly(
          "vocab_size",
          [](PyExecutor& self) {
            return self.call([](Executor& executor) { return executor.vocab_size(); });
          },
          "The target's vocabulary size.")
      .def_property_readonly(
          "options",
          [](PyExecutor& self) {
            return options_to_dict(
                self.call([](Executor& executor) { return executor.options(); }));
          },
          "The options in effect, as a dict.")
      .def("close", &PyExecutor::close, py::call_guard<py::gil_scoped_release>(),
           "Cancels what runs and joins the engine's thread. Later calls raise RuntimeError; "
           "closing "
           "twice is fine.")
      .def("__repr__", &executor_repr);
}

}  // namespace paceline::python
