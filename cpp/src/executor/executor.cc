// SPDX-License-Identifier: Apache-2.0
#include <paceline/executor.h>
#include <paceline/version.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "base/check.h"
#include "executor/cpu_runner.h"
#ifdef PACELINE_CUDA
#include "executor/cuda_runner.h"
#endif
#include "executor/engine.h"
#include "executor/null_runner.h"
#include "executor/option_limits.h"
#include "metadata/group_metadata.h"
#include "model/model_impl.h"
#include "sample/reject.h"
#include "wire/limits.h"

namespace paceline {
namespace {

// Rows of scored or rated prompts that one iteration may add to its logits buffer.
constexpr int32_t kMaxScoreRows = 64;

template <class T>
void check_range(const char* name, T value, T low, T high) {
  if (value < low || value > high) {
    throw InvalidArgument(concat(name, " is ", value, "; allowed: ", low, " to ", high));
  }
}

void check_ngram(const SpeculativeOptions& s, const Model* draft) {
  if (s.ngram_min == 0 && s.ngram_max == 0) return;
  check_range("ngram_max", s.ngram_max, 1, kMaxNgram);
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

void check_rejection(const SpeculativeOptions& s) {
  check_range("num_draft_proposals", s.num_draft_proposals, 0, kMaxDraftProposals);
  const bool rejects =
      s.accept_method == AcceptMethod::kStandard || s.accept_method == AcceptMethod::kBlock;
  if (!rejects && !s.samples_drafts) {
    throw InvalidArgument(
        "samples_drafts is false, but accept_method is one by which the drafter draws with the "
        "target's own noise; set it to true, or accept_method to 'standard' or 'block'");
  }
  if (rejects && s.samples_drafts && s.ngram_max > 0) {
    throw InvalidArgument(
        "samples_drafts is true, but what prompt lookup drafts has no law to be drawn from; set it "
        "to false");
  }
  if (s.num_draft_proposals > 0 && !(rejects && s.samples_drafts && s.num_speculative_tokens > 0)) {
    throw InvalidArgument(concat("num_draft_proposals is ", s.num_draft_proposals,
                                 "; allowed: 0, but with accept_method 'standard' or 'block', "
                                 "samples_drafts and a drafter"));
  }
}

// Whether a sliding layer caps its scores.
bool has_capped_window(const DecoderConfig& config) {
  return std::any_of(config.layers.begin(), config.layers.end(), [](const auto& layer) {
    return layer.attention.kind == KvKind::kSliding && layer.attention.soft_cap > 0;
  });
}

void check_options(const ExecutorOptions& o, const Model& target, const Model* draft) {
  const SpeculativeOptions& s = o.speculative;
  check_range("num_speculative_tokens", s.num_speculative_tokens, 0, kMaxDraftTokens);
  check_ngram(s, draft);
  check_rejection(s);
  const bool drafts = draft != nullptr || s.ngram_max > 0;
  if (s.num_speculative_tokens > 0 && !drafts) {
    throw InvalidArgument(concat("num_speculative_tokens is ", s.num_speculative_tokens,
                                 " but there is no drafter; give one, or ngram_min and ngram_max, "
                                 "or set 0"));
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
                                 "; allowed: 0, but with accept_method 'synthetic'"));
  }
  if (!(s.draft_stop_threshold >= 0 && s.draft_stop_threshold < 1)) {
    throw InvalidArgument(concat("draft_stop_threshold is ", s.draft_stop_threshold,
                                 "; allowed: 0 (off) to below 1"));
  }
  if (s.draft_stop_threshold > 0 && o.draft_driver != DraftDriver::kWhile) {
    throw InvalidArgument(concat("draft_stop_threshold is ", s.draft_stop_threshold,
                                 ", but only the draft driver 'while' can stop early; set "
                                 "draft_driver to 'while' or draft_stop_threshold to 0"));
  }
  if (!drafts && s.draft_stop_threshold > 0) {
    throw InvalidArgument(concat("draft_stop_threshold is ", s.draft_stop_threshold,
                                 " but there is no drafter; set it to 0"));
  }
  check_range("max_logprobs", o.max_logprobs, 0, kMaxLogprobs);
  if (o.max_logprobs > 0 && o.use_null_device) {
    throw InvalidArgument(concat("max_logprobs is ", o.max_logprobs,
                                 " and the null device has no logits; allowed with it: 0"));
  }
  check_range("host_delay_max_us", o.host_delay_max_us, 0, 1'000'000);
  check_range("max_num_seqs", o.max_num_seqs, 1, kMaxNumSeqs);
  check_range("block_size", o.block_size, 1, kMaxBlockSize);
  check_range("num_threads", o.num_threads, 0, kMaxNumThreads);
  check_range("device_lateness", o.device_lateness, 0, 2);
  if (draft != nullptr && draft->device != target.device) {
    throw InvalidArgument(concat("the target lies on device ", device_name(target.device),
                                 " and the drafter on ", device_name(draft->device),
                                 "; load both to one device"));
  }
  if (target.device == Device::kCuda && o.device_lateness != 0) {
    throw InvalidArgument(concat("device_lateness is ", o.device_lateness,
                                 "; allowed on device cuda: 0, a GPU is as late as it is"));
  }
  if (target.config.drafter) {
    throw InvalidArgument(concat("the target ", target.config.name,
                                 " is a head, which only drafts; give the model that it was "
                                 "trained for, and the head as the drafter"));
  }
  if (draft != nullptr) check_drafter(*draft, target);
  if (s.draft_position != DraftPosition::kLast) {
    const NgramOptions ngram = {.min_tokens = s.ngram_min, .max_tokens = s.ngram_max};
    const SpecTraits traits = traits_for(draft != nullptr ? &draft->config : nullptr, ngram);
    if (!traits.drafts || !traits.takes_target_hidden || traits.advances_positions) {
      throw InvalidArgument(
          "draft_position is 'next', but only Gemma 4 MTP drafts from a fixed position; allowed: "
          "'last' with other drafters and without one");
    }
  }
  for (const Model* const model : {&target, draft}) {
    if (!o.use_window_lists || model == nullptr || !has_capped_window(model->config)) continue;
    throw InvalidArgument(concat("use_window_lists is true, but ", model->config.name,
                                 " has sliding layers with a soft cap, which lists do not apply; "
                                 "set it to false"));
  }
  if (o.kv_cache_bytes < 0) {
    throw InvalidArgument(concat("kv_cache_bytes is ", o.kv_cache_bytes,
                                 "; allowed: 0 (as default_kv_cache_size() chooses) to the bytes "
                                 "that the device has"));
  }
  check_range("prefill_chunk_size", o.prefill_chunk_size, 0, kMaxBatchedTokens);
  check_range("max_waiting_requests", o.max_waiting_requests, 0, 1 << 30);
  check_range("max_model_len", o.max_model_len, 1, target.config.max_position);
  // A head goes as far as its target: its own number is that of its training data.
  if (draft != nullptr && !draft->config.drafter && o.max_model_len > draft->config.max_position) {
    throw InvalidArgument(concat("max_model_len is ", o.max_model_len,
                                 ", but the drafter was made for ", draft->config.max_position,
                                 " positions; lower max_model_len"));
  }
  const int32_t decode_rows = o.max_num_seqs * (s.num_speculative_tokens + 1);
  if (o.max_num_batched_tokens < decode_rows || o.max_num_batched_tokens > kMaxBatchedTokens) {
    throw InvalidArgument(concat("max_num_batched_tokens is ", o.max_num_batched_tokens,
                                 "; allowed: ", decode_rows, " (max_num_seqs ", o.max_num_seqs,
                                 " x ", s.num_speculative_tokens + 1, " rows) to ",
                                 kMaxBatchedTokens));
  }
}

IterationOptions iteration_options(const ExecutorOptions& o, const Model* draft) {
  const int32_t k = o.speculative.num_speculative_tokens;
  const NgramOptions ngram = {.min_tokens = o.speculative.ngram_min,
                              .max_tokens = o.speculative.ngram_max};
  const SpecTraits traits = traits_for(draft != nullptr ? &draft->config : nullptr, ngram);
  return {.shape = {.max_seqs = o.max_num_seqs,
                    .max_verify_rows = o.max_num_batched_tokens,
                    .max_logit_rows = o.max_num_seqs * (k + 1) + kMaxScoreRows,
                    .num_draft_tokens = k,
                    .first_rows = traits.first_rows,
                    .max_prompt_rows = o.max_logprobs > 0 ? kMaxScoreRows : 0,
                    .max_logprobs = o.max_logprobs},
          .max_model_len = o.max_model_len,
          .accept_method = o.speculative.accept_method,
          .synthetic_acceptance_length = o.speculative.synthetic_acceptance_length,
          .samples_drafts = o.speculative.samples_drafts,
          .num_draft_proposals = o.speculative.num_draft_proposals,
          .draft_stop_threshold = o.speculative.draft_stop_threshold,
          .use_window_lists = o.use_window_lists,
          .ngram = ngram,
          .draft_position = o.speculative.draft_position};
}

// Iterations launched and unread at most: one ahead, or as many as a late device needs.
int32_t max_in_flight(const ExecutorOptions& o) { return std::max(2, o.device_lateness + 1); }

EngineOptions engine_options(const ExecutorOptions& o, int32_t vocab_size, const Model* draft) {
  const IterationOptions iteration = iteration_options(o, draft);
  return {.shape = iteration.shape,
          .scheduler = {.max_num_seqs = o.max_num_seqs,
                        .max_num_batched_tokens = o.max_num_batched_tokens,
                        .prefill_chunk_size = o.prefill_chunk_size > 0 ? o.prefill_chunk_size
                                                                       : o.max_num_batched_tokens,
                        .max_score_rows = kMaxScoreRows,
                        .num_draft_tokens = o.speculative.num_speculative_tokens,
                        .max_in_flight = max_in_flight(o)},
          .max_model_len = o.max_model_len,
          .vocab_size = vocab_size,
          .max_waiting_requests = o.max_waiting_requests,
          .host_delay_max_us = o.host_delay_max_us,
          .poisons_freed_blocks = o.poison_freed_blocks};
}

std::unique_ptr<Runner> make_runner(const std::shared_ptr<const Model>& target,
                                    const std::shared_ptr<const Model>& draft,
                                    const KvLayout& layout, const ExecutorOptions& o,
                                    [[maybe_unused]] const Executor::Progress& progress) {
  const RunnerOptions runner = {.iteration = iteration_options(o, draft.get()),
                                .driver = o.draft_driver,
                                .max_in_flight = max_in_flight(o)};
  if (o.use_null_device) {
    const InputCapacity capacity =
        input_capacity(runner.iteration.shape, layout, o.max_model_len, target->config.vocab_size);
    return std::make_unique<NullRunner>(o.max_num_seqs, capacity, max_in_flight(o));
  }
#ifdef PACELINE_CUDA
  if (target->device == Device::kCuda) {
    return std::make_unique<CudaRunner>(
        target, draft, layout,
        CudaRunnerOptions{
            .runner = runner, .poison_pool = o.poison_freed_blocks, .on_capture = progress});
  }
#endif
  const int32_t num_threads = o.num_threads > 0 ? o.num_threads : build_info().num_cores;
  return std::make_unique<CpuRunner>(target, draft, layout,
                                     CpuRunnerOptions{.runner = runner,
                                                      .num_threads = num_threads,
                                                      .lateness = o.device_lateness,
                                                      .poison_pool = o.poison_freed_blocks});
}

KvLayout layout_of(const ExecutorOptions& o, const Model& target, const Model* draft) {
  const std::vector<KvLayerShape> draft_shapes =
      draft != nullptr ? draft_kv_layer_shapes(draft->config, target.config)
                       : std::vector<KvLayerShape>{};
  KvLayout layout = plan_kv_layout(kv_layer_shapes(target.config), draft_shapes, o.block_size,
                                   target.weights.dtype, o.kv_cache_bytes);
  if (layout.groups.size() > kMaxKvGroups) {
    throw Unsupported(concat("target and drafter have ", layout.groups.size(),
                             " KV groups, one for each kind, window and shape of a layer's KV; "
                             "allowed: at most ",
                             kMaxKvGroups));
  }
  return layout;
}

// Fills in kv_cache_bytes where they are 0; returns why they are what they are.
std::string choose_kv_cache_bytes(ExecutorOptions& o, const Model& target, const Model* draft) {
  if (o.kv_cache_bytes != 0) return "as given";
  KvCacheSize size = default_kv_cache_size(target, draft, o);
  o.kv_cache_bytes = size.bytes;
  return std::move(size.reason);
}

}  // namespace

struct Executor::Impl {
  Impl(std::shared_ptr<const Model> target_model, std::shared_ptr<const Model> draft_model,
       const ExecutorOptions& executor_options, const Progress& progress)
      : target(std::move(target_model)),
        draft(std::move(draft_model)),
        options(executor_options),
        kv_cache_rule(choose_kv_cache_bytes(options, *target, draft.get())),
        layout(layout_of(options, *target, draft.get())) {
    std::unique_ptr<Runner> runner = make_runner(target, draft, layout, options, progress);
    workspace = runner->workspace_bytes();
    graph_bytes = runner->graph_bytes();
    engine.emplace(engine_options(options, target->config.vocab_size, draft.get()), layout,
                   std::move(runner));
  }

  std::shared_ptr<const Model> target;
  std::shared_ptr<const Model> draft;
  ExecutorOptions options;
  std::string kv_cache_rule;
  KvLayout layout;
  std::map<std::string, int64_t, std::less<>> workspace;
  int64_t graph_bytes = 0;
  std::optional<Engine> engine;
};

Executor::Executor(std::shared_ptr<const Model> target, std::shared_ptr<const Model> draft,
                   const ExecutorOptions& options, const Progress& progress) {
  if (target == nullptr) throw InvalidArgument("target is null; give a model");
  check_options(options, *target, draft.get());
  impl_ = std::make_unique<Impl>(std::move(target), std::move(draft), options, progress);
}

Executor::~Executor() = default;

std::optional<RequestId> Executor::add_request(Request request) {
  return impl_->engine->add_request(std::move(request));
}
std::optional<std::vector<RequestId>> Executor::add_requests(std::vector<Request> requests) {
  return impl_->engine->add_requests(std::move(requests));
}
bool Executor::cancel(RequestId id, std::optional<int32_t> sample) {
  return impl_->engine->cancel(id, sample);
}
std::vector<RequestEvent> Executor::poll(int32_t timeout_ms) {
  return impl_->engine->poll(timeout_ms);
}
ExecutorStats Executor::stats() const { return impl_->engine->stats(); }
std::vector<KernelTime> Executor::trace_iteration(int32_t timeout_ms) {
  if (impl_->target->device != Device::kCuda || impl_->options.use_null_device) {
    throw Unsupported("kernels are timed on device cuda only");
  }
  return impl_->engine->trace_iteration(timeout_ms);
}
void Executor::reset_stats() { impl_->engine->reset_stats(); }
std::string Executor::check_integrity() { return impl_->engine->check_integrity(); }
int32_t Executor::vocab_size() const { return impl_->target->config.vocab_size; }
const ExecutorOptions& Executor::options() const { return impl_->options; }

MemoryReport Executor::memory_report() const {
  const Engine::KvUsage usage = impl_->engine->kv_usage();
  const KvLayout& layout = impl_->layout;
  MemoryReport report{
      .target_weight_bytes = impl_->target->weights.arena.bytes(),
      .draft_weight_bytes = impl_->draft != nullptr ? impl_->draft->weights.arena.bytes() : 0,
      .kv_pool_bytes = layout.pool_bytes,
      .kv_cache_rule = impl_->kv_cache_rule,
      .kv_slab_bytes = layout.slab_bytes,
      .kv_num_slabs = layout.num_slabs,
      .kv_free_slabs = usage.free_slabs,
      .workspace = impl_->workspace,
      .graph_bytes = impl_->graph_bytes};
  for (const auto& [purpose, bytes] : report.workspace) report.workspace_bytes += bytes;
  for (size_t g = 0; g < layout.groups.size(); ++g) {
    const KvGroup& group = layout.groups[g];
    report.groups.push_back({.owner = std::string(kv_owner_name(group.owner)),
                             .kind = std::string(kv_kind_name(group.kind)),
                             .window = group.window,
                             .num_layers = static_cast<int32_t>(group.layers.size()),
                             .num_kv_heads = group.num_kv_heads,
                             .head_dim = group.head_dim,
                             .block_size = group.block_size,
                             .block_bytes = group.block_bytes,
                             .padding_bytes = group.block_bytes - group.content_bytes,
                             .held_blocks = usage.held_blocks[g],
                             .quarantined_blocks = usage.quarantined_blocks[g]});
  }
  return report;
}

}  // namespace paceline
