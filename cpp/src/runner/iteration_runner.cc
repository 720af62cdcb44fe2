// SPDX-License-Identifier: Apache-2.0
#include "runner/iteration_runner.h"

#include <algorithm>

#include "base/check.h"
#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "graph/cpu_graph.h"
#include "model/weights/model_impl.h"
#ifdef PACELINE_CUDA
#include "graph/cuda_graph.h"
#endif

namespace paceline {

std::vector<int32_t> decode_buckets(int32_t max_seqs) {
  // Buckets are close together where batches are small, since padding is a larger part of these.
  std::vector<int32_t> buckets;
  for (int32_t n = 1; n < max_seqs; n += n < 4 ? 1 : n < 16 ? 4 : n < 64 ? 8 : n < 256 ? 32 : 128) {
    buckets.push_back(n);
  }
  buckets.push_back(max_seqs);
  return buckets;
}

namespace {

std::shared_ptr<const DeviceBuffer> pool_memory(const std::shared_ptr<const DeviceBuffer>& given,
                                                DeviceMemory& memory, const KvLayout& layout) {
  if (given == nullptr) {
    return std::make_shared<const DeviceBuffer>(memory, layout.pool_bytes, "the KV pool");
  }
  PACELINE_CHECK(given->bytes() >= layout.pool_bytes, "the KV pool has ", given->bytes(),
                 " bytes, its layout ", layout.pool_bytes);
  return given;
}

}  // namespace

IterationExtent extent_of(const Batch& batch) {
  const IterationCounts& counts = batch.counts();
  const StagedInputs& inputs = batch.inputs;
  IterationExtent extent = {.num_drafts = batch.num_drafts,
                            .num_seqs = counts.num_seqs,
                            .num_drafting = counts.num_drafting,
                            .num_verify_rows = counts.num_verify_rows,
                            .num_first_rows = counts.num_first_rows,
                            .num_logit_rows = counts.num_logit_rows,
                            .num_prompt_rows = counts.num_prompt_rows,
                            .num_forks = counts.num_forks,
                            .num_block_copies = counts.num_block_copies,
                            .gathers_hidden = batch.gathers_hidden,
                            .keeps_hidden = batch.keeps_hidden,
                            .has_logit_work = batch.has_logit_work,
                            .returns_logits = batch.returns_logits};
  for (int32_t i = 0; i < counts.num_seqs; ++i) {
    extent.verify_rows_per_seq =
        std::max(extent.verify_rows_per_seq, inputs.verify_indptr[i + 1] - inputs.verify_indptr[i]);
    extent.logit_rows_per_seq =
        std::max(extent.logit_rows_per_seq, inputs.logit_indptr[i + 1] - inputs.logit_indptr[i]);
    extent.first_rows_per_seq =
        std::max(extent.first_rows_per_seq, inputs.first_indptr[i + 1] - inputs.first_indptr[i]);
  }
  return extent;
}

template <class Ctx, class Graph>
IterationRunner<Ctx, Graph>::IterationRunner(Ctx& ctx, DeviceMemory& memory, DeviceArena& arena,
                                             std::shared_ptr<const Model> target,
                                             std::shared_ptr<const Model> draft,
                                             const KvLayout& layout, const RunnerOptions& options,
                                             DType activation_dtype)
    : ctx_(ctx),
      layout_(layout),
      options_(options),
      pool_(pool_memory(options.kv_pool, memory, layout)),
      buffers_(allocate_iteration_buffers(arena, options.iteration, layout, target->config,
                                          draft != nullptr ? &draft->config : nullptr,
                                          activation_dtype)),
      target_(target, layout, KvOwner::kTarget, pool_->data(), options.iteration.max_model_len,
              arena),
      speculator_(make_speculator(std::move(draft), options.iteration.model_free,
                                  options.iteration.draft_position, target_, layout, pool_->data(),
                                  options.iteration.max_model_len, arena)),
      iteration_(options_.iteration, layout_, target_, speculator_, buffers_),
      ring_(memory, options.iteration.shape, layout, options.iteration.max_model_len,
            target->config.vocab_size, options.max_in_flight + 1, arena) {
  std::vector<int32_t>& lengths = options_.draft_lengths;
  const int32_t k = options_.iteration.shape.num_draft_tokens;
  if (lengths.empty()) lengths = k > 0 ? std::vector<int32_t>{0, k} : std::vector<int32_t>{0};
  buffers_.kv_pool = pool_->data();
  buffers_.activations.ranks = options.ranks;
  buffers_.sampling.masks = ring_.inputs(0).masks;
}

template <class Ctx, class Graph>
ExpertCounters IterationRunner<Ctx, Graph>::expert_counters() const {
  const Decoder* const draft = decoder_of(speculator_);
  return {target_.expert_counters(), draft != nullptr ? draft->expert_counters() : nullptr};
}

template <class Ctx, class Graph>
void IterationRunner<Ctx, Graph>::begin() {
  ctx_.run(begin_iteration,
           ring_.begin_params(buffers_.staged, buffers_.sequences, buffers_.sampling,
                              buffers_.block_tables, expert_counters()));
}

template <class Ctx, class Graph>
void IterationRunner<Ctx, Graph>::end(bool has_logit_work) {
  ctx_.run(end_iteration, ring_.end_params(buffers_.staged, buffers_.sequences, buffers_.sampling,
                                           buffers_.results, buffers_.logprobs.entries,
                                           expert_counters(), /*has_masks=*/has_logit_work));
}

template <class Ctx, class Graph>
auto IterationRunner<Ctx, Graph>::capture_graphs(const IterationExtent& extent) -> Graphs {
  const int32_t num_steps = iteration_.num_draft_steps(extent.num_drafts);
  const auto until_first_draft = [&] {
    begin();
    iteration_.verify(ctx_, extent);
    if (extent.num_drafts > 0) iteration_.first_draft_pass(ctx_, extent);
  };
  const auto step = [&] { iteration_.draft_step(ctx_, extent); };
  const auto all_steps = [&] {
    for (int32_t i = 0; i < num_steps; ++i) step();
  };
  const auto nothing = [] {};
  const auto last = [&] {
    if (extent.num_drafts > 0) iteration_.look_up(ctx_, extent.num_drafting);
    end(extent.has_logit_work);
  };
  const bool has_steps = num_steps > 0;
  Graphs graphs;
  switch (has_steps ? options_.driver : DraftDriver::kUnrolled) {
    case DraftDriver::kUnrolled:
      graphs.decode = Graph::capture(ctx_, [&] {
        until_first_draft();
        all_steps();
        last();
      });
      if (has_steps) graphs.draft_steps = Graph::capture(ctx_, all_steps);
      break;
    case DraftDriver::kReplay:
      graphs.decode = Graph::capture(ctx_, until_first_draft);
      graphs.draft_steps = Graph::capture(ctx_, step);
      break;
    case DraftDriver::kWhile: {
      const int32_t* keep_drafting = buffers_.draft_stop.keep_drafting;
      graphs.decode = Graph::capture_while(ctx_, until_first_draft, step, last, keep_drafting);
      graphs.draft_steps = Graph::capture_while(ctx_, nothing, step, nothing, keep_drafting);
      break;
    }
    case DraftDriver::kEager:
      break;
  }
  return graphs;
}

template <class Ctx, class Graph>
void IterationRunner<Ctx, Graph>::capture(
    std::span<const int32_t> buckets,
    const std::function<void(int32_t done, int32_t total)>& on_capture) {
  if (options_.driver == DraftDriver::kEager) return;
  const auto total = static_cast<int32_t>(buckets.size());
  for (const int32_t num_seqs : buckets) {
    if (on_capture) on_capture(static_cast<int32_t>(buckets_.size()), total);
    Bucket& bucket = buckets_.emplace_back();
    bucket.num_seqs = num_seqs;
    const auto variant = [&](int32_t num_drafts, bool keeps_hidden) -> Variant {
      const auto graphs = [&](bool has_logit_work) {
        return capture_graphs(decode_extent(options_.iteration.shape, num_seqs, num_drafts,
                                            has_logit_work, keeps_hidden));
      };
      return {.plain = graphs(false), .full = graphs(true)};
    };
    for (const int32_t num_drafts : options_.draft_lengths) {
      bucket.variants.push_back(variant(num_drafts, /*keeps_hidden=*/false));
    }
    if (buffers_.kept_hidden.num_tokens > 0) bucket.keeping = variant(0, /*keeps_hidden=*/true);
  }
  if (on_capture) on_capture(total, total);
}

template <class Ctx, class Graph>
auto IterationRunner<Ctx, Graph>::graphs_of(int32_t num_seqs, const Batch& batch) const
    -> const Graphs& {
  const auto found =
      std::lower_bound(buckets_.begin(), buckets_.end(), num_seqs,
                       [](const Bucket& bucket, int32_t n) { return bucket.num_seqs < n; });
  PACELINE_CHECK(found != buckets_.end(), "no graph is captured for ", num_seqs, " sequences");
  const std::vector<int32_t>& lengths = options_.draft_lengths;
  const auto length = std::find(lengths.begin(), lengths.end(), batch.num_drafts);
  PACELINE_CHECK(length != lengths.end(), "no graph is captured for ", batch.num_drafts, " drafts");
  // Beside chunks hidden states are kept with any k'; their verify pass is no graph.
  const Variant& variant = batch.keeps_hidden && batch.num_drafts == 0
                               ? found->keeping
                               : found->variants[static_cast<size_t>(length - lengths.begin())];
  return batch.has_logit_work ? variant.full : variant.plain;
}

template <class Ctx, class Graph>
std::vector<Graph*> IterationRunner<Ctx, Graph>::graphs() {
  std::vector<Graph*> all;
  for (Bucket& bucket : buckets_) {
    std::vector<Variant*> variants = {&bucket.keeping};
    for (Variant& variant : bucket.variants) variants.push_back(&variant);
    for (Variant* variant : variants) {
      for (Graphs* graphs : {&variant->plain, &variant->full}) {
        all.push_back(&graphs->decode);
        all.push_back(&graphs->draft_steps);
      }
    }
  }
  return all;
}

template <class Ctx, class Graph>
void IterationRunner<Ctx, Graph>::bind(Batch& batch) const {
  batch.inputs = ring_.inputs(batch.iteration);
  batch.capacity = ring_.capacity();
}

template <class Ctx, class Graph>
void IterationRunner<Ctx, Graph>::run(const Batch& batch) {
  if (batch.needs_eager_run() || options_.driver == DraftDriver::kEager) {
    run_eagerly(batch);
    return;
  }
  const int32_t num_seqs = batch.counts().num_seqs;
  graphs_of(num_seqs, batch).decode.launch(ctx_);
  if (options_.driver == DraftDriver::kReplay && iteration_.num_draft_steps(batch.num_drafts) > 0) {
    run_draft_steps(num_seqs, batch, /*extent=*/{});
    iteration_.look_up(ctx_, num_seqs);
    end(batch.has_logit_work);
  }
}

template <class Ctx, class Graph>
void IterationRunner<Ctx, Graph>::run_eagerly(const Batch& batch) {
  const IterationExtent extent = extent_of(batch);
  begin();
  if (batch.has_prefill) iteration_.begin_prefill(ctx_, extent);
  std::vector<HiddenCapture> captures;
  for (const HiddenCopy& copy : batch.hidden_copies) {
    const int64_t hidden = target_.config().hidden;
    float* const to = copy.destination.data.get();
    captures.push_back({.first_row = copy.first_verify_row,
                        .num_rows = copy.num_rows,
                        .layers = copy.layers,
                        .to = to != nullptr ? to + copy.destination_row * hidden : nullptr,
                        .layer_stride = copy.destination.shape[1] * hidden});
  }
  iteration_.verify(ctx_, extent, captures);
  copy_scores(batch);  // before the drafter overwrites the logits
  if (extent.num_first_rows > 0 || extent.num_drafting > 0) {
    iteration_.first_draft_pass(ctx_, extent);
    if (extent.num_drafting > 0) {
      run_draft_steps(extent.num_drafting, batch, extent);
      iteration_.look_up(ctx_, extent.num_drafting);
    }
  }
  end(batch.has_logit_work);
}

template <class Ctx, class Graph>
void IterationRunner<Ctx, Graph>::run_draft_steps(int32_t num_drafting, const Batch& batch,
                                                  const IterationExtent& extent) {
  const int32_t num_steps = iteration_.num_draft_steps(batch.num_drafts);
  if (num_steps == 0) return;
  if (options_.driver == DraftDriver::kEager) {
    for (int32_t i = 0; i < num_steps; ++i) iteration_.draft_step(ctx_, extent);
    return;
  }
  const Graph& steps = graphs_of(num_drafting, batch).draft_steps;
  const int32_t num_launches = options_.driver == DraftDriver::kReplay ? num_steps : 1;
  for (int32_t i = 0; i < num_launches; ++i) steps.launch(ctx_);
}

template <class Ctx, class Graph>
void IterationRunner<Ctx, Graph>::enqueue_decode(const IterationExtent& extent) {
  begin();
  iteration_.verify(ctx_, extent);
  if (extent.num_drafts > 0) iteration_.first_draft_pass(ctx_, extent);
  const int32_t num_steps = iteration_.num_draft_steps(extent.num_drafts);
  for (int32_t i = 0; i < num_steps; ++i) iteration_.draft_step(ctx_, extent);
  if (extent.num_drafts > 0) iteration_.look_up(ctx_, extent.num_drafting);
  end(extent.has_logit_work);
}

template <class Ctx, class Graph>
void IterationRunner<Ctx, Graph>::copy_scores(const Batch& batch) {
  const int64_t vocab = target_.config().vocab_size;
  for (const ScoreCopy& copy : batch.score_copies) {
    const float* const from = buffers_.logits + copy.first_logit_row * vocab;
    const int64_t offset = copy.destination_row * vocab;
    const int64_t bytes = copy.num_rows * vocab * static_cast<int64_t>(sizeof(float));
    if (copy.device_destination.data != nullptr) {
      copy_on_device(ctx_, copy.device_destination.data.get() + offset, from, bytes);
    } else {
      copy_to_host(ctx_, copy.destination->data() + offset, from, bytes);
    }
  }
}

template <class Ctx, class Graph>
std::span<const SequenceResult> IterationRunner<Ctx, Graph>::results(int64_t iteration) const {
  const int32_t num_seqs = ring_.inputs(iteration).counts->num_seqs;
  return {ring_.results(iteration), static_cast<size_t>(num_seqs)};
}

template <class Ctx, class Graph>
std::span<const TokenLogprob> IterationRunner<Ctx, Graph>::logprobs(int64_t iteration) const {
  const BatchShape& shape = options_.iteration.shape;
  if (shape.max_logprobs == 0) return {};
  const auto count =
      static_cast<size_t>(shape.max_logit_rows) * static_cast<size_t>(1 + shape.max_logprobs);
  return {ring_.logprobs(iteration), count};
}

template <class Ctx, class Graph>
std::span<const ProposedDrafts> IterationRunner<Ctx, Graph>::drafts(int64_t iteration) const {
  return {ring_.drafts(iteration), results(iteration).size()};
}

template <class Ctx, class Graph>
Runner::Timing IterationRunner<Ctx, Graph>::timing(int64_t iteration) const {
  const CompletionRecord& record = ring_.completion(iteration);
  Runner::Timing timing{.us = static_cast<float>(record.end_ns - record.begin_ns) * 1e-3f};
  if (iteration > 0) {
    const uint64_t last_end_ns = ring_.completion(iteration - 1).end_ns;
    timing.idle_us = static_cast<float>(record.begin_ns - last_end_ns) * 1e-3f;
  }
  return timing;
}

template <class Ctx, class Graph>
std::array<ExpertCounts, kNumModels> IterationRunner<Ctx, Graph>::experts(int64_t iteration) const {
  return std::to_array(ring_.completion(iteration).experts);
}

template <class Ctx, class Graph>
std::span<std::byte> IterationRunner<Ctx, Graph>::kv_block(GroupId group, BlockId block) const {
  const int64_t bytes = layout_.groups[group].block_bytes;
  return {pool_->data() + block * bytes, static_cast<size_t>(bytes)};
}

template class IterationRunner<CpuContext, CpuGraph>;
#ifdef PACELINE_CUDA
template class IterationRunner<CudaContext, CudaGraph>;
#endif

}  // namespace paceline
