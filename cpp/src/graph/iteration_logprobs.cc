// SPDX-License-Identifier: Apache-2.0

// The two ops that logprobs add to an iteration. The first saves the logits that the logits
// pipeline is about to change. The second computes the logprobs of the tokens that acceptance has
// emitted.

#include <algorithm>

#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "graph/iteration.h"
#include "wire/batch_shape.h"

namespace paceline {

LogprobBuffers allocate_logprobs(DeviceArena& arena, const BatchShape& shape, int32_t vocab_size) {
  // Sequences that draw come first in a batch, so no row after these is saved.
  const int64_t num_saved = int64_t{shape.max_seqs} * (shape.num_draft_tokens + 1);
  const int64_t row_entries = 1 + int64_t{shape.max_logprobs};
  return {.raw_logits = arena.allocate<float>(num_saved * vocab_size, "logprobs"),
          .entries = arena.allocate<TokenLogprob>(shape.max_logit_rows * row_entries, "logprobs")};
}

template <class Ctx>
void Iteration::save_logits(Ctx& ctx, const IterationExtent& extent) const {
  const IterationBuffers& b = buffers_;
  const BatchShape& shape = options_.shape;
  if (shape.max_logprobs == 0) return;
  const int32_t max_window_rows = shape.max_seqs * (shape.num_draft_tokens + 1);
  ctx.run(save_raw_logits,
          SaveRawLogitsParams{.num_rows = &b.staged.counts->num_logit_rows,
                              .max_rows = std::min(extent.num_logit_rows, max_window_rows),
                              .logits = b.logits,
                              .raw_logits = b.logprobs.raw_logits,
                              .logits_stride = target_.config().vocab_size,
                              .row_index = b.staged.logit_rows,
                              .seq_slot = b.verify_rows.seq_slot,
                              .sampling = b.sampling,
                              .all_change = b.rejection.is_used()});
}

template <class Ctx>
void Iteration::compute_logprobs(Ctx& ctx, const IterationExtent& extent) const {
  const IterationBuffers& b = buffers_;
  const BatchShape& shape = options_.shape;
  if (shape.max_logprobs == 0) return;
  ctx.run(token_logprobs, TokenLogprobsParams{.inputs = b.staged,
                                              .results = b.results,
                                              .seq_slot = b.verify_rows.seq_slot,
                                              .logits = b.logits,
                                              .raw_logits = b.logprobs.raw_logits,
                                              .logits_stride = target_.config().vocab_size,
                                              .max_seqs = extent.num_seqs,
                                              .max_window_rows = shape.num_draft_tokens + 1,
                                              .max_prompt_rows = extent.num_prompt_rows,
                                              .max_logprobs = shape.max_logprobs,
                                              .sampling = b.sampling,
                                              .logprobs = b.logprobs.entries,
                                              .all_change = b.rejection.is_used()});
}

template void Iteration::save_logits<CpuContext>(CpuContext&, const IterationExtent&) const;
template void Iteration::compute_logprobs<CpuContext>(CpuContext&, const IterationExtent&) const;
#ifdef PACELINE_CUDA
template void Iteration::save_logits<CudaContext>(CudaContext&, const IterationExtent&) const;
template void Iteration::compute_logprobs<CudaContext>(CudaContext&, const IterationExtent&) const;
#endif

}  // namespace paceline
