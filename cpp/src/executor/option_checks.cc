// SPDX-License-Identifier: Apache-2.0
#include "executor/option_checks.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "base/check.h"
#include "kv/kv_layout.h"
#include "model/weights/model_impl.h"
#include "speculate/speculator.h"
#include "wire/limits.h"

namespace paceline {
namespace {

// The device has arrays of these extents.
static_assert(largest::num_speculative_tokens == kMaxDraftTokens);
static_assert(largest::num_draft_proposals == kMaxDraftProposals);
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
};

void check_ngram(const SpeculativeOptions& s, const Model* draft) {
  if (s.ngram_min == 0 && s.ngram_max == 0) return;
  check_range("ngram_max", s.ngram_max, 1, largest::ngram_max);
  check_range("ngram_min", s.ngram_min, 1, s.ngram_max);
  if (draft != nullptr) {
    throw InvalidArgument(concat("ngram_max is ", s.ngram_max, " and the drafter ",
                                 draft->config.name, " is given; allowed: one of them"));
  }
  if (s.draft_stop_threshold > 0) {
    throw InvalidArgument(concat("draft_stop_threshold is ", s.draft_stop_threshold,
                                 " and prompt lookup has no probabilities; set it to 0"));
  }
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

void check_host_drafter(const ExecutorOptions& o, const Model* draft) {
  const SpeculativeOptions& s = o.speculative;
  if (s.host_drafter == nullptr) return;
  if (draft != nullptr || s.ngram_max > 0) {
    throw InvalidArgument(
        concat("host_drafter and ",
               draft != nullptr ? concat("the drafter ", draft->config.name) : "ngram_max",
               " are given; allowed: one of them"));
  }
  if (s.draft_stop_threshold > 0) {
    throw InvalidArgument(concat("draft_stop_threshold is ", s.draft_stop_threshold,
                                 " and a host drafter gives no probabilities; set it to 0"));
  }
  if (o.use_null_device) {
    throw InvalidArgument(
        "host_drafter is given and use_null_device is true, which accepts no draft; allowed: one "
        "of them");
  }
}

void check_rejection(const SpeculativeOptions& s) {
  const bool rejects =
      s.accept_method == AcceptMethod::kStandard || s.accept_method == AcceptMethod::kBlock;
  if (!rejects && !s.samples_drafts) {
    throw InvalidArgument(
        "samples_drafts is false, but with this accept_method the drafter draws with the "
        "target's noise; set it to true, or accept_method to 'standard' or 'block'");
  }
  if (rejects && s.samples_drafts && (s.ngram_max > 0 || s.host_drafter != nullptr)) {
    throw InvalidArgument(concat("samples_drafts is true, but ",
                                 s.ngram_max > 0 ? "prompt lookup" : "a host drafter",
                                 " has no distribution to sample drafts from; set it to false"));
  }
  if (s.num_draft_proposals > 0 && !(rejects && s.samples_drafts && s.num_speculative_tokens > 0)) {
    throw InvalidArgument(concat("num_draft_proposals is ", s.num_draft_proposals,
                                 "; allowed: 0, unless accept_method is 'standard' or 'block', "
                                 "samples_drafts is true and there is a drafter"));
  }
}

void check_adaptive(const ExecutorOptions& o) {
  const SpeculativeOptions& s = o.speculative;
  if (!s.adaptive.value_or(false)) return;
  const char* const cause = s.num_speculative_tokens == 0 ? "num_speculative_tokens is 0"
                            : s.host_drafter != nullptr
                                ? "host_drafter is given, whose time the engine does not know"
                            : o.use_null_device ? "use_null_device is true"
                                                : nullptr;
  if (cause == nullptr) return;
  throw InvalidArgument(concat("adaptive is true, but ", cause, "; allowed then: false"));
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

}  // namespace

void check_options(const ExecutorOptions& o, const Model& target, const Model* draft) {
  const SpeculativeOptions& s = o.speculative;
  visit_options(o, RangeCheck{});
  check_ngram(s, draft);
  check_rejection(s);
  check_host_drafter(o, draft);
  check_adaptive(o);
  const bool drafts = draft != nullptr || s.ngram_max > 0 || s.host_drafter != nullptr;
  if (s.num_speculative_tokens > 0 && !drafts) {
    throw InvalidArgument(concat("num_speculative_tokens is ", s.num_speculative_tokens,
                                 " but there is no drafter; give one, or ngram_min and ngram_max, "
                                 "or set it to 0"));
  }
  if (s.num_speculative_tokens == 0 && drafts) {
    throw InvalidArgument(concat(
        "num_speculative_tokens is 0 but a drafter is given; allowed: 1 to ", kMaxDraftTokens));
  }
  if (s.accept_method == AcceptMethod::kSynthetic) {
    const double longest = s.num_speculative_tokens + 1;
    if (!std::isfinite(s.synthetic_acceptance_length) || s.synthetic_acceptance_length < 1 ||
        s.synthetic_acceptance_length > longest) {
      throw InvalidArgument(concat("synthetic_acceptance_length is ", s.synthetic_acceptance_length,
                                   "; allowed: 1 to ", longest));
    }
  } else if (s.synthetic_acceptance_length != 0) {
    throw InvalidArgument(concat("synthetic_acceptance_length is ", s.synthetic_acceptance_length,
                                 "; allowed: 0, unless accept_method is 'synthetic'"));
  }
  if (!(s.draft_stop_threshold >= 0 && s.draft_stop_threshold < 1)) {
    throw InvalidArgument(concat("draft_stop_threshold is ", s.draft_stop_threshold,
                                 "; allowed: 0 (off) to below 1"));
  }
  if (!drafts && s.draft_stop_threshold > 0) {
    throw InvalidArgument(concat("draft_stop_threshold is ", s.draft_stop_threshold,
                                 " but there is no drafter; set it to 0"));
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
  if (draft != nullptr) {
    check_drafter(*draft, target);
    check_block(o, draft->config);
  }
  const SpecTraits traits =
      traits_for(draft != nullptr ? &draft->config : nullptr, model_free_options(s));
  if (s.draft_stop_threshold > 0 && !traits.drafts_in_blocks &&
      o.draft_driver != DraftDriver::kWhile) {
    throw InvalidArgument(concat("draft_stop_threshold is ", s.draft_stop_threshold,
                                 ", but only the draft driver 'while' can end the steps of this "
                                 "drafter early; set draft_driver to 'while' or "
                                 "draft_stop_threshold to 0"));
  }
  if (s.draft_position != DraftPosition::kLast) {
    if (!traits.drafts || !traits.takes_target_hidden || traits.advances_positions) {
      throw InvalidArgument(
          "draft_position is 'next', but only Gemma 4 MTP drafts from a fixed position; allowed: "
          "'last' with other drafters and without one");
    }
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
  const int32_t decode_rows = o.max_num_seqs * (s.num_speculative_tokens + 1);
  if (o.max_num_batched_tokens < decode_rows ||
      o.max_num_batched_tokens > largest::max_num_batched_tokens) {
    throw InvalidArgument(concat("max_num_batched_tokens is ", o.max_num_batched_tokens,
                                 "; allowed: ", decode_rows, " (max_num_seqs ", o.max_num_seqs,
                                 " x ", s.num_speculative_tokens + 1, " rows) to ",
                                 largest::max_num_batched_tokens));
  }
}

}  // namespace paceline
