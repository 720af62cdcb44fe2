// SPDX-License-Identifier: Apache-2.0
#include "executor/option_checks.h"

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include "base/check.h"
#include "kv/kv_layout.h"
#include "model/weights/model_impl.h"
#include "model/weights/rank_model.h"
#include "wire/limits.h"

namespace paceline {
namespace {

// The device has arrays of these extents.
static_assert(largest::num_speculative_tokens == kMaxDraftTokens);
static_assert(largest::draft_proposals == kMaxDraftProposals);
static_assert(largest::max_logprobs == kMaxLogprobs);
static_assert(largest::block_size == kMaxBlockSize);

template <class T>
void check_range(const char* name, T value, T low, T high) {
  if (!(value >= low && value <= high)) {  // NaN is refused
    const char* const off = std::is_floating_point_v<T> && low == 0 ? " (off)" : "";
    throw InvalidArgument(concat(name, " is ", value, "; allowed: ", low, off, " to ", high));
  }
}

// The options whose range depends on nothing else.
struct RangeCheck {
  template <class T>
  void operator()(const char* /*name*/, const T& /*value*/) const {}
  template <class T>
  void operator()(const char* name, T value, std::type_identity_t<T> low,
                  std::type_identity_t<T> high) const {
    check_range(name, value, low, high);
  }
  void operator()(const char* name, double value, double low, Below high) const {
    if (!(value >= low && value < high.value)) {
      throw InvalidArgument(
          concat(name, " is ", value, "; allowed: ", low, " (off) to below ", high.value));
    }
  }
};

template <class Enum>
  requires std::is_enum_v<Enum>
std::string shown(Enum value) {
  return concat("'", option_names<Enum>[static_cast<size_t>(value)], "'");
}
template <class Number>
  requires std::is_arithmetic_v<Number>
std::string shown(Number value) {
  return concat(value);
}
std::string shown(const std::shared_ptr<HostDrafter>& /*value*/) { return "given"; }
template <class T>
std::string shown(const std::optional<T>& value) {
  return shown(*value);
}

[[nodiscard]] bool samples(const SpeculativeOptions& s) {
  return s.draft_sample_method == DraftSampleMethod::kProbabilistic;
}

[[nodiscard]] bool rejects(const SpeculativeOptions& s) {
  return s.rejection_sample_method == AcceptMethod::kStandard ||
         s.rejection_sample_method == AcceptMethod::kBlock;
}

// Prompt lookup and a drafter of the host have no model, and their drafts no probabilities.
[[nodiscard]] bool has_model(const DraftMethod& method) {
  return method.traits.first_rows != FirstRows::kNone;
}

// Options that only some methods accept, as options.toml says. Python does the same for the keys
// that it has alone (Option.check_method).
void check_methods(const SpeculativeOptions& s, const DraftMethod& method) {
  const std::string quoted = concat("'", method.name, "'");
  visit_methods(s, [&]<class T>(const char* name, const T& value, const char* reason,
                                std::string_view methods) {
    if (value == T{} || methods.find(quoted) != std::string_view::npos) return;
    if (!method.traits.drafts) {
      throw InvalidArgument(
          concat(name, " is ", shown(value), " but there is no drafter; leave it out"));
    }
    throw InvalidArgument(concat(name, " is ", shown(value), ", but method is ", quoted,
                                 *reason == '\0' ? "" : ", ", reason, "; allowed: only with ",
                                 methods, ", otherwise ",
                                 std::is_same_v<T, double> ? "0 (off)" : "leave it out"));
  });
}

// `method` is null if it is not known yet.
void check_prompt_lookup(const SpeculativeOptions& s, const DraftMethod* method) {
  if (s.prompt_lookup_min == 0 && s.prompt_lookup_max == 0) return;
  if (method != nullptr && has_model(*method) &&
      s.rejection_sample_method != AcceptMethod::kCoupled) {
    throw InvalidArgument(concat(
        "prompt_lookup_max is ", s.prompt_lookup_max, " with a model, and rejection_sample_method ",
        shown(s.rejection_sample_method),
        ", which compares distributions that looked up drafts do not have; allowed: 'coupled', or "
        "leave prompt_lookup_min and prompt_lookup_max out"));
  }
  if (s.prompt_lookup_max == 0) {
    throw InvalidArgument(
        concat("prompt_lookup_max is 0; allowed: prompt_lookup_min = ", s.prompt_lookup_min, " to ",
               largest::prompt_lookup_max, ", or both 0"));
  }
  if (s.prompt_lookup_min < 1 || s.prompt_lookup_min > s.prompt_lookup_max) {
    throw InvalidArgument(
        concat("prompt_lookup_min is ", s.prompt_lookup_min,
               "; allowed: an integer from 1 to prompt_lookup_max = ", s.prompt_lookup_max));
  }
}

// In these checks `method` is null if it is not known yet.
void check_synthetic_length(const SpeculativeOptions& s, const DraftMethod* method) {
  const double length = s.synthetic_acceptance_length;
  const std::string named = concat("synthetic_acceptance_length is ", length);
  if (s.rejection_sample_method != AcceptMethod::kSynthetic) {
    if (length == 0) return;
    throw InvalidArgument(concat(named, ", but rejection_sample_method is ",
                                 shown(s.rejection_sample_method),
                                 "; allowed: only with 'synthetic', otherwise leave it out"));
  }
  const bool is_plain = method != nullptr && !method->traits.drafts;
  // Otherwise 0 stands for the k of the drafter's folder.
  const int32_t k = s.num_speculative_tokens;
  const int32_t longest = (k > 0 || is_plain ? k : largest::num_speculative_tokens) + 1;
  if (!(length >= 1 && length <= longest)) {  // NaN is refused
    throw InvalidArgument(
        concat(named, "; allowed: a number from 1 to num_speculative_tokens + 1 = ", longest));
  }
}

void check_draft_sampling(const SpeculativeOptions& s, const DraftMethod* method) {
  const std::string rejection = shown(s.rejection_sample_method);
  if (!rejects(s) && !samples(s)) {
    throw InvalidArgument(concat(
        "draft_sample_method is 'greedy', but with rejection_sample_method ", rejection,
        " the drafter samples with the target's noise, at the request's temperature; allowed: "
        "'probabilistic' (at temperature 0 both are greedy), or rejection_sample_method "
        "'standard' or 'block'"));
  }
  const bool has_no_model = method != nullptr && method->traits.drafts && !has_model(*method);
  if (rejects(s) && samples(s) && has_no_model) {
    throw InvalidArgument(concat("draft_sample_method is 'probabilistic', but method is '",
                                 method->name,
                                 "', whose drafts have no distribution; allowed with "
                                 "rejection_sample_method ",
                                 rejection, ": 'greedy'"));
  }
  if (s.draft_proposals > 0 && !(rejects(s) && samples(s))) {
    throw InvalidArgument(concat("draft_proposals is ", s.draft_proposals,
                                 ", but rejection_sample_method is ", rejection,
                                 " and draft_sample_method ", shown(s.draft_sample_method),
                                 "; allowed: only with 'standard' or 'block' and "
                                 "'probabilistic', otherwise leave it out"));
  }
}

void check_draft_stop(const SpeculativeOptions& s, const DraftMethod& method) {
  // A block drafter has no steps.
  if (s.draft_stop_threshold == 0 || method.traits.drafts_in_blocks ||
      s.draft_driver == DraftDriver::kWhile) {
    return;
  }
  throw InvalidArgument(concat("draft_stop_threshold is ", s.draft_stop_threshold,
                               ", but draft_driver is ", shown(s.draft_driver),
                               "; allowed: with method '", method.name,
                               "' only 'while', the only driver that can end draft steps early"));
}

void check_adaptive(const ExecutorOptions& o, const DraftMethod& method) {
  const SpeculativeOptions& s = o.speculative;
  if (!s.adaptive.value_or(false)) return;
  const char* const cause =
      !method.traits.drafts && s.num_speculative_tokens == 0 ? "num_speculative_tokens is 0"
      : s.drafter != nullptr ? "method is 'custom', whose time the engine does not know"
      : o.use_null_device    ? "use_null_device is true"
                             : nullptr;
  if (cause == nullptr) return;
  throw InvalidArgument(concat("adaptive is true, but ", cause, "; allowed: false"));
}

void check_batched_tokens(const ExecutorOptions& o) {
  const int32_t rows = o.max_num_seqs * (o.speculative.num_speculative_tokens + 1);
  if (o.max_num_batched_tokens == 0 || o.max_num_batched_tokens >= rows) return;
  throw InvalidArgument(
      concat("max_num_batched_tokens is ", o.max_num_batched_tokens,
             "; allowed: an integer >= max_num_seqs * (num_speculative_tokens + 1) = ", rows));
}

void check_block(const ExecutorOptions& o, const DecoderConfig& draft) {
  if (!draft.drafter || draft.drafter->kind != DrafterKind::kBlock) return;
  const BlockConfig& block = draft.drafter->block;
  const int32_t k = o.speculative.num_speculative_tokens;
  if (k > block.max_drafts()) {
    const char* const reason =
        block.samples_from_anchor ? "" : ", of which the first is known and not drafted";
    throw InvalidArgument(concat("num_speculative_tokens is ", k,
                                 ", but the drafter was trained for blocks of ", block.size,
                                 " tokens", reason, "; allowed: 1 to ", block.max_drafts()));
  }
}

void check_state_interval(const ExecutorOptions& o) {
  check_range("state_interval", o.state_interval, 1, largest::state_interval);
  if (o.state_interval % o.block_size != 0) {
    throw InvalidArgument(concat("state_interval is ", o.state_interval,
                                 "; allowed: a multiple of block_size, ", o.block_size));
  }
}

void check_gpu_memory_utilization(const ExecutorOptions& o, Device device) {
  const double share = o.gpu_memory_utilization;
  if (!(share >= 0 && share <= 1)) {
    throw InvalidArgument(
        concat("gpu_memory_utilization is ", share,
               "; allowed: above 0 to 1, or 0 for kv_cache_bytes or the default"));
  }
  if (share > 0 && device != Device::kCuda) {
    throw InvalidArgument(concat("gpu_memory_utilization is ", share,
                                 ", but the models are on device ", device_name(device),
                                 "; allowed there: 0; set kv_cache_bytes instead"));
  }
  if (share > 0 && o.kv_cache_bytes > 0) {
    throw InvalidArgument(concat("gpu_memory_utilization is ", share, " and kv_cache_bytes is ",
                                 o.kv_cache_bytes, "; allowed: one of them"));
  }
}

// Refuses a model that lies on another number of GPUs than there are ranks.
void check_gpus(const ExecutorOptions& o, const Model& model) {
  if (model.device != Device::kCuda) return;
  const auto num_gpus = std::max<int32_t>(static_cast<int32_t>(model.ranks.size()), 1);
  if (num_gpus == o.tensor_parallel_size) return;
  throw InvalidArgument(concat("tensor_parallel_size is ", o.tensor_parallel_size, ", but ",
                               model.config.name, " was loaded to ", num_gpus,
                               num_gpus == 1 ? " GPU" : " GPUs", "; allowed: ", num_gpus,
                               ", or a model that was loaded with as many gpus (ModelBuilder, "
                               "load_model_folder, split_model)"));
}

// Refuses a drafter that ranks cannot share as the options ask, or that was loaded to GPUs in
// another way.
void check_draft_share(const ExecutorOptions& o, const Model& draft) {
  const int32_t size = o.speculative.draft_tensor_parallel_size;
  if (draft.ranks.size() < 2) {
    static_cast<void>(shares_drafter(draft, o.tensor_parallel_size, size));
    return;
  }
  const bool has_parts = draft.share == GpuShare::kPart;
  const int32_t allowed = has_parts ? o.tensor_parallel_size : 1;
  if (size == 0 || size == allowed) return;
  throw InvalidArgument(concat("draft_tensor_parallel_size is ", size, ", but each of ",
                               draft.ranks.size(), " GPUs has ", has_parts ? "a part" : "all",
                               " of the drafter ", draft.config.name, "; allowed: ", allowed,
                               ", 0, or a drafter that was loaded with the share that "
                               "drafter_share() returns"));
}

// Refuses a target and a drafter on different GPUs.
void check_shared_gpus(const Model& target, const Model& draft) {
  const auto gpus_of = [](const Model& model) {
    std::string gpus;
    for (const auto& rank : model.ranks) gpus += concat(gpus.empty() ? "" : ", ", rank->gpu);
    return gpus.empty() ? std::string("0") : gpus;
  };
  if (const std::string of_target = gpus_of(target), of_draft = gpus_of(draft);
      of_target != of_draft) {
    throw InvalidArgument(concat("the target is on the GPUs ", of_target, " and the drafter on ",
                                 of_draft, "; allowed: the same GPUs in the same order"));
  }
}

void check_ranks(const ExecutorOptions& o, const Model& target, const Model* draft) {
  const int32_t num_ranks = o.tensor_parallel_size;
  check_gpus(o, target);
  if (draft != nullptr) check_gpus(o, *draft);
  if (target.device == Device::kCuda && draft != nullptr) check_shared_gpus(target, *draft);
  if (num_ranks == 1 && draft != nullptr) check_draft_share(o, *draft);
  if (num_ranks == 1) return;
  const std::string named = concat("tensor_parallel_size is ", num_ranks);
  if (o.use_null_device) {
    throw InvalidArgument(
        concat(named, " and use_null_device is true, which computes nothing; allowed with it: 1"));
  }
  if (target.ranks.empty()) check_ranks(target, num_ranks);
  if (draft == nullptr) return;
  for (const LayerConfig& layer : draft->config.layers) {
    const bool reads_target =
        std::visit([](const auto& attention) { return attention.reads_target; }, layer.attention);
    if (!reads_target) continue;
    throw Unsupported(concat(named, ", but the drafter ", draft->config.name,
                             " reads the KV of the target, of which each rank has a part; allowed "
                             "with this drafter: 1"));
  }
  check_draft_share(o, *draft);
}

}  // namespace

void check_options(const ExecutorOptions& o, const DraftMethod* method) {
  const SpeculativeOptions& s = o.speculative;
  visit_options(o, RangeCheck{});
  check_batched_tokens(o);
  if (method != nullptr) check_methods(s, *method);
  check_prompt_lookup(s, method);
  check_synthetic_length(s, method);
  check_draft_sampling(s, method);
  if (method == nullptr) return;
  check_draft_stop(s, *method);
  check_adaptive(o, *method);
}

void check_options(const ExecutorOptions& o, const Model& target, const Model* draft) {
  const SpeculativeOptions& s = o.speculative;
  const DraftMethod method =
      draft_method(draft != nullptr ? &draft->config : nullptr, model_free_options(s));
  check_options(o, &method);
  if (s.num_speculative_tokens > 0 && !method.traits.drafts) {
    throw InvalidArgument(concat("num_speculative_tokens is ", s.num_speculative_tokens,
                                 " but there is no drafter; give one, or prompt_lookup_min and "
                                 "prompt_lookup_max, or set it to 0"));
  }
  if (s.num_speculative_tokens == 0 && method.traits.drafts) {
    throw InvalidArgument(concat(
        "num_speculative_tokens is 0 but a drafter is given; allowed: 1 to ", kMaxDraftTokens));
  }
  if (s.drafter != nullptr && o.use_null_device) {
    throw InvalidArgument(
        "drafter is given and use_null_device is true, which accepts no draft; allowed: one of "
        "them");
  }
  if (o.max_logprobs > 0 && o.use_null_device) {
    throw InvalidArgument(concat("max_logprobs is ", o.max_logprobs,
                                 " and the null device has no logits; allowed with it: 0"));
  }
  if (draft != nullptr && draft->device != target.device) {
    throw InvalidArgument(concat("the target is on device ", device_name(target.device),
                                 " and the drafter on ", device_name(draft->device),
                                 "; load both onto one device"));
  }
  if (target.device == Device::kCuda && o.device_lateness != 0) {
    throw InvalidArgument(
        concat("device_lateness is ", o.device_lateness,
               "; allowed on device cuda: 0, since only the CPU device can be made late"));
  }
  if (target.config.drafter) {
    throw InvalidArgument(concat("the target ", target.config.name,
                                 " is a draft head; give the model that it was trained for as the "
                                 "target, and the draft head as the drafter"));
  }
  check_ranks(o, target, draft);
  if (draft != nullptr) {
    check_drafter(*draft, target);
    check_block(o, draft->config);
  }
  if (o.kv_cache_bytes < 0) {
    throw InvalidArgument(concat("kv_cache_bytes is ", o.kv_cache_bytes,
                                 "; allowed: 0 (default_kv_cache_size() chooses) to the bytes "
                                 "that the device has"));
  }
  check_state_interval(o);
  check_gpu_memory_utilization(o, target.device);
  check_range("max_model_len", o.max_model_len, 1, target.config.max_position);
  // A draft head supports all positions of its target; its own max_position describes its training.
  if (draft != nullptr && !draft->config.drafter && o.max_model_len > draft->config.max_position) {
    throw InvalidArgument(concat("max_model_len is ", o.max_model_len,
                                 ", but the drafter supports ", draft->config.max_position,
                                 " positions; lower max_model_len"));
  }
}

}  // namespace paceline
