// SPDX-License-Identifier: Apache-2.0
#include "executor/setup.h"

#include <paceline/version.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "runner/cpu_runner.h"
#include "runner/dtypes.h"
#ifdef PACELINE_CUDA
#include "runner/cuda_runner.h"
#endif
#include "graph/iteration_ring.h"
#include "model/description/kv_shapes.h"
#include "model/weights/model_impl.h"
#include "model/weights/rank_model.h"
#include "runner/null_runner.h"
#include "runner/ranked_runner.h"
#include "sample/synthetic_rates.h"
#include "speculate/speculator.h"
#include "wire/limits.h"

namespace paceline {
namespace {

// Rows that scored prompts and prompt logprobs may add to the logits buffer of an iteration.
constexpr int32_t kMaxScoreRows = 64;

// Tokens that sequences may take over from the prefix cache in an iteration, or the length of one
// sequence if that is more.
constexpr int32_t kAdoptedTokens = 1 << 16;

int32_t max_adopted_tokens(const ExecutorOptions& o) {
  if (!o.enable_prefix_caching) return 0;
  const int64_t all = int64_t{o.max_num_seqs} * o.max_model_len;
  return static_cast<int32_t>(std::min<int64_t>(all, std::max(kAdoptedTokens, o.max_model_len)));
}

// Whether k' may differ from k while a sequence drafts.
bool varies_drafts(const ExecutorOptions& o) {
  return o.speculative.adaptive.value_or(false) || o.draft_schedule_seed != 0;
}

// The values of k' for which there are graphs: 0, k and, if it varies, the powers of two between.
// Graphs cost time to capture and memory, and a k' between two of these gains little.
std::vector<int32_t> draft_lengths(const ExecutorOptions& o) {
  const int32_t k = o.speculative.num_speculative_tokens;
  std::vector<int32_t> lengths = {0};
  if (varies_drafts(o)) {
    for (int32_t length = 1; length < k; length *= 2) lengths.push_back(length);
  }
  if (k > 0) lengths.push_back(k);
  return lengths;
}

// A drafter with sliding windows that has missed more tokens of a sequence would need KV of
// positions that have left its windows.
constexpr int32_t kMaxMissedWithWindows = 64;

// On a GPU, products of many rows are computed in tiles of this many rows.
constexpr int32_t kRowStep = 128;

bool has_windows(const Model& target, const Model* draft) {
  if (draft == nullptr) return false;
  const std::vector<KvLayerShape> shapes = draft_kv_layer_shapes(draft->config, target.config);
  return std::any_of(shapes.begin(), shapes.end(),
                     [](const KvLayerShape& shape) { return kv_window(shape.kind) > 0; });
}

// Tokens of each sequence whose hidden states are kept for a drafter that has missed them.
int32_t kept_hidden_tokens(const ExecutorOptions& o, const Model& target, const Model* draft,
                           const SpecTraits& traits) {
  if (!varies_drafts(o) || traits.first_rows != FirstRows::kWindow) return 0;
  constexpr int64_t kBytes = int64_t{64} << 20;
  const size_t num_parts = std::max<size_t>(draft->config.drafter->aux_layers.size(), 1);
  const int64_t token_bytes = static_cast<int64_t>(num_parts) * target.config.residual_width() *
                              dtype_bytes(activation_dtype(target, draft)) * o.max_num_seqs;
  return static_cast<int32_t>(std::clamp<int64_t>(kBytes / token_bytes, 8, 64));
}

bool samples_drafts(const SpeculativeOptions& s) {
  return s.draft_sample_method == DraftSampleMethod::kProbabilistic;
}

std::array<float, kMaxDraftTokens> imposed_rates(const SpeculativeOptions& s) {
  if (s.rejection_sample_method != AcceptMethod::kSynthetic) return {};
  // A choice of k' needs to see what fewer drafts would give.
  return synthetic_rates(s.synthetic_acceptance_length, s.num_speculative_tokens,
                         /*is_even=*/s.adaptive.value_or(false));
}

IterationOptions iteration_options(const ExecutorOptions& o, const Model& target,
                                   const Model* draft) {
  const int32_t k = o.speculative.num_speculative_tokens;
  const ModelFreeOptions model_free = model_free_options(o.speculative);
  const SpecTraits traits = traits_for(draft != nullptr ? &draft->config : nullptr, model_free);
  return {.shape = {.max_seqs = o.max_num_seqs,
                    .max_verify_rows = o.max_num_batched_tokens,
                    .max_logit_rows = o.max_num_seqs * (k + 1) + kMaxScoreRows,
                    .num_draft_tokens = k,
                    .first_rows = traits.first_rows,
                    .follows_windows =
                        traits.first_rows == FirstRows::kNewest && model_free.ngram.max_tokens > 0,
                    .max_prompt_rows = o.max_logprobs > 0 ? kMaxScoreRows : 0,
                    .max_logprobs = o.max_logprobs,
                    .max_adopted_tokens = max_adopted_tokens(o)},
          .max_model_len = o.max_model_len,
          .rejection_sample_method = o.speculative.rejection_sample_method,
          .synthetic_rates = imposed_rates(o.speculative),
          .samples_drafts = samples_drafts(o.speculative),
          .draft_proposals = o.speculative.draft_proposals,
          .draft_stop_threshold = o.speculative.draft_stop_threshold,
          .model_free = model_free,
          .draft_position = o.speculative.draft_position.value_or(DraftPosition::kLast),
          .kept_hidden_tokens = kept_hidden_tokens(o, target, draft, traits)};
}

WindowMakerOptions window_options(const ExecutorOptions& o, const Model& target,
                                  const Model* draft) {
  const SpeculativeOptions& s = o.speculative;
  const bool is_coupled = s.rejection_sample_method == AcceptMethod::kCoupled;
  // Each thread makes the windows of one sample at a time. A host drafter is called by one.
  constexpr int32_t kCoresPerThread = 4;
  constexpr int32_t kMostThreads = 4;
  const int32_t share = build_info().num_cores / kCoresPerThread;
  return {.vocab_size = target.config.vocab_size,
          .rule = draft == nullptr || is_coupled ? DraftRule::kReplace
                  : samples_drafts(s)            ? DraftRule::kKeepRejected
                                                 : DraftRule::kCut,
          .num_threads = s.drafter != nullptr ? 1 : std::clamp(share, 1, kMostThreads)};
}

// The most iterations that are launched and not yet read: one ahead, or more for a late device.
int32_t max_in_flight(const ExecutorOptions& o) { return std::max(2, o.device_lateness + 1); }

RunnerOptions runner_options(const ExecutorOptions& o, const Model& target, const Model* draft) {
  RunnerOptions options = {.iteration = iteration_options(o, target, draft),
                           .driver = o.speculative.draft_driver,
                           .max_in_flight = max_in_flight(o)};
  options.draft_lengths = draft_lengths(o);
  return options;
}

// Whether tokens follow from the lengths of verify windows, beside the seed.
bool depends_on_windows(const ExecutorOptions& o) {
  const AcceptMethod method = o.speculative.rejection_sample_method;
  return method == AcceptMethod::kStandard || method == AcceptMethod::kBlock;
}

PromptRows prompt_rows(const ExecutorOptions& o) {
  if (o.prefill_chunk_size > 0) return PromptRows::kAll;
  // The sizes of chunks may cause preemption, on which tokens of these methods depend. So the sizes
  // must not depend on times.
  return depends_on_windows(o) ? PromptRows::kFixed : PromptRows::kMeasured;
}

// Whether prompts may be computed without the drafter: it can catch up with them, since its KV
// stays in memory. That of a draft model is then exact. A draft head gets zeros instead of the
// hidden states. Windows are shorter until it has caught up.
bool may_miss_prompts(const ExecutorOptions& o, const Model& target, const Model* draft,
                      const IterationOptions& iteration) {
  const FirstRows first_rows = iteration.shape.first_rows;
  const bool catches_up = first_rows == FirstRows::kNewest ||
                          (first_rows == FirstRows::kWindow && iteration.kept_hidden_tokens > 0);
  return catches_up && !has_windows(target, draft) && !depends_on_windows(o);
}

}  // namespace

EngineOptions engine_options(const ExecutorOptions& o, const Model& target, const Model* draft) {
  const IterationOptions iteration = iteration_options(o, target, draft);
  const FirstRows first_rows = iteration.shape.first_rows;
  const SpecTraits traits =
      traits_for(draft != nullptr ? &draft->config : nullptr, iteration.model_free);
  const int32_t num_kept = iteration.kept_hidden_tokens;
  EngineOptions options = {
      .shape = iteration.shape,
      .scheduler = {.max_num_seqs = o.max_num_seqs,
                    .max_num_batched_tokens = o.max_num_batched_tokens,
                    .prefill_chunk_size =
                        o.prefill_chunk_size > 0 ? o.prefill_chunk_size : o.max_num_batched_tokens,
                    .row_step = target.device == Device::kCuda ? kRowStep : 1,
                    .max_score_rows = kMaxScoreRows,
                    .num_draft_tokens = o.speculative.num_speculative_tokens,
                    .drafter_falls_behind =
                        first_rows == FirstRows::kNewest || first_rows == FirstRows::kWindow,
                    .may_miss_prompts = may_miss_prompts(o, target, draft, iteration),
                    .max_missed =
                        varies_drafts(o) && has_windows(target, draft) ? kMaxMissedWithWindows : 0,
                    .max_exact_missed = num_kept > 0 ? num_kept - 1 : INT32_MAX,
                    .max_in_flight = max_in_flight(o),
                    .enable_prefix_caching = o.enable_prefix_caching,
                    .state_interval = o.state_interval,
                    .kv_lookahead = traits.kv_looks_ahead ? 1 : 0,
                    .follows_hidden = first_rows == FirstRows::kWindow,
                    .max_adopted_tokens = max_adopted_tokens(o)},
      .max_model_len = o.max_model_len,
      .vocab_size = target.config.vocab_size,
      .hidden_size = target.config.hidden,
      .num_layers = static_cast<int32_t>(target.config.layers.size()),
      .num_streams = target.config.streams.count,
      .device = target.device,
      .max_waiting_requests = o.max_waiting_requests,
      .host_delay_max_us = o.host_delay_max_us,
      .poisons_freed_blocks = o.poison_freed_blocks,
      .log_interval_s = o.log_interval_s,
      .hang_timeout_s = o.hang_timeout_s,
      .host_drafter = o.speculative.drafter,
      .methods = source_methods(draft != nullptr ? &draft->config : nullptr, iteration.model_free),
      .windows = window_options(o, target, draft),
      .allows_constraints =
          o.speculative.rejection_sample_method != AcceptMethod::kSynthetic && !o.use_null_device,
      .is_adaptive = o.speculative.adaptive.value_or(false),
      .prompt_rows = prompt_rows(o),
      .draft_schedule_seed = o.draft_schedule_seed};
  options.scheduler.draft_lengths = draft_lengths(o);
  return options;
}

int64_t workspace_bytes(const ExecutorOptions& given, const Model& target, const Model* draft) {
  ExecutorOptions o = given;
  // Any pool: the workspace does not depend on its size.
  if (o.kv_cache_bytes == 0) o.kv_cache_bytes = int64_t{1} << 40;
  const KvLayout layout = plan_layout(o, target, draft);
  const RunnerOptions runner = runner_options(o, target, draft);
  // The models outlive the call, so these need not own them.
  const std::shared_ptr<const Model> shared_target(std::shared_ptr<void>(), &target);
  const std::shared_ptr<const Model> shared_draft(std::shared_ptr<void>(), draft);
#ifdef PACELINE_CUDA
  if (target.device == Device::kCuda) {
    return CudaRunner::count_workspace(shared_target, shared_draft, layout, runner);
  }
#endif
  return count_workspace<CpuContext, CpuGraph>(shared_target, shared_draft, layout, runner,
                                               activation_dtype(target, draft));
}

namespace {

// The part of a model on the CPU that each rank computes.
RankModels rank_parts(const Model& whole, int32_t num_ranks) {
  RankModels parts;
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    parts.push_back(rank_model(whole, {.rank = rank, .num_ranks = num_ranks}));
  }
  return parts;
}

// Elements of the longest row that the ranks of two models exchange.
int64_t exchanged_width(const Model& target, const Model* draft) {
  const int64_t of_target = exchanged_width(target.config);
  return draft != nullptr ? std::max(of_target, exchanged_width(draft->config)) : of_target;
}

}  // namespace

RankModels rank_targets(const std::shared_ptr<const Model>& whole, const ExecutorOptions& o) {
  if (!whole->ranks.empty()) return whole->ranks;
  const int32_t num_ranks = o.tensor_parallel_size;
  if (num_ranks == 1) return {whole};
  return rank_parts(*whole, num_ranks);
}

RankModels rank_drafts(const std::shared_ptr<const Model>& whole, const ExecutorOptions& o) {
  if (whole != nullptr && !whole->ranks.empty()) return whole->ranks;
  const int32_t num_ranks = o.tensor_parallel_size;
  if (whole != nullptr &&
      shares_drafter(*whole, num_ranks, o.speculative.draft_tensor_parallel_size)) {
    return rank_parts(*whole, num_ranks);
  }
  return RankModels(static_cast<size_t>(std::max(num_ranks, 1)), whole);
}

#ifdef PACELINE_CUDA
namespace {

// Each rank of several captures its graphs and is launched on a thread of its own.
std::unique_ptr<Runner> make_gpu_runner(const RankModels& targets, const RankModels& drafts,
                                        const KvLayout& layout, const ExecutorOptions& o,
                                        const RunnerOptions& runner,
                                        const Executor::Progress& progress,
                                        const Runner::KvPools& kv_pools) {
  const bool shares_gpu = targets.size() > 1 && targets.front()->gpu == targets.back()->gpu;
  const auto make_rank = [&](const RankHandle& ranks) {
    const auto rank = static_cast<size_t>(ranks.rank);
    CudaRunnerOptions options = {
        .runner = runner, .poison_pool = o.poison_freed_blocks, .shares_gpu = shares_gpu};
    options.runner.ranks = ranks;
    if (!kv_pools.empty()) options.runner.kv_pool = kv_pools[rank];
    // One rank reports for all.
    if (rank == 0) options.on_capture = progress;
    return std::make_unique<CudaRunner>(targets[rank], drafts[rank], layout, options);
  };
  if (targets.size() == 1) return make_rank({});
  std::vector<DeviceMemory*> memories;
  for (const auto& target : targets) memories.push_back(&cuda_memory(target->gpu));
  const int64_t row_bytes =
      exchanged_width(*targets.front(), drafts.front().get()) * dtype_bytes(DType::kFloat32);
  return std::make_unique<RankedRunner>(std::make_unique<RankGroup>(memories, row_bytes),
                                        max_in_flight(o), make_rank, /*has_threads=*/true);
}

}  // namespace
#endif

std::unique_ptr<Runner> make_runner(const RankModels& targets, const RankModels& drafts,
                                    const KvLayout& layout, const ExecutorOptions& o,
                                    [[maybe_unused]] const Executor::Progress& progress,
                                    const Runner::KvPools& kv_pools) {
  const std::shared_ptr<const Model>& target = targets.front();
  const RunnerOptions runner = runner_options(o, *target, drafts.front().get());
  if (o.use_null_device) {
    const InputCapacity capacity =
        input_capacity(runner.iteration.shape, layout, o.max_model_len, target->config.vocab_size);
    return std::make_unique<NullRunner>(o.max_num_seqs, capacity, max_in_flight(o));
  }
#ifdef PACELINE_CUDA
  if (target->device == Device::kCuda) {
    return make_gpu_runner(targets, drafts, layout, o, runner, progress, kv_pools);
  }
#endif
  const int32_t num_threads = o.num_threads > 0 ? o.num_threads : build_info().num_cores;
  const auto num_ranks = static_cast<int32_t>(targets.size());
  const auto make_rank = [&](const RankHandle& ranks) {
    CpuRunnerOptions options = {
        .runner = runner, .lateness = o.device_lateness, .poison_pool = o.poison_freed_blocks};
    options.runner.ranks = ranks;
    const RankShare share = {.rank = ranks.rank, .num_ranks = num_ranks};
    options.num_threads = std::max(share.of(num_threads).count, 1);
    const auto rank = static_cast<size_t>(ranks.rank);
    if (!kv_pools.empty()) options.runner.kv_pool = kv_pools[rank];
    return std::make_unique<CpuRunner>(targets[rank], drafts[rank], layout, options);
  };
  if (num_ranks == 1) return make_rank({});
  const int64_t row_bytes =
      exchanged_width(*target, drafts.front().get()) * dtype_bytes(DType::kFloat32);
  return std::make_unique<RankedRunner>(
      std::make_unique<RankGroup>(num_ranks, row_bytes, o.hang_timeout_s), max_in_flight(o),
      make_rank, /*has_threads=*/false);
}

KvLayout plan_layout(const ExecutorOptions& o, const Model& target, const Model* draft,
                     int64_t least_slab_bytes) {
  const std::vector<KvLayerShape> draft_shapes =
      draft != nullptr ? draft_kv_layer_shapes(draft->config, target.config)
                       : std::vector<KvLayerShape>{};
  KvLayout layout = plan_kv_layout(kv_layer_shapes(target.config), draft_shapes, o.block_size,
                                   kv_dtype(target), o.kv_cache_bytes, least_slab_bytes);
  if (layout.groups.size() > kMaxKvGroups) {
    throw Unsupported(concat("target and drafter have ", layout.groups.size(),
                             " KV groups, one for each kind, window and shape of a layer's KV; "
                             "allowed: at most ",
                             kMaxKvGroups));
  }
  return layout;
}

}  // namespace paceline
