// SPDX-License-Identifier: Apache-2.0

// sample/count_rules.h, shared with the CPU, decides which tokens count. Counts are sums of
// integers, whose order does not matter.

#include <algorithm>

#include "common/launch.cuh"
#include "sample/count_rules.h"
#include "sample/logits.h"
#include "wire/sequence_state.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kClearThreads = 256;
constexpr int32_t kIdsPerClearThread = 16;
constexpr int32_t kMaxSequencesAtOnce = 8;  // few sequence slots are reset in an iteration
constexpr int32_t kPrefillThreads = 256;
constexpr int32_t kEmittedThreads = 32;

__global__ void __launch_bounds__(kClearThreads)
    clear_counts_kernel(const __grid_constant__ ClearCountsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const SamplingState& s = p.sampling;
  const int32_t num_seqs = min(*p.num_seqs, p.max_seqs);
  const int32_t first = static_cast<int32_t>(blockIdx.x * kClearThreads + threadIdx.x);
  const int32_t step = static_cast<int32_t>(gridDim.x) * kClearThreads;
  const int32_t num_words = mask_words(s.vocab_size);
  for (int32_t i = static_cast<int32_t>(blockIdx.y); i < num_seqs;
       i += static_cast<int32_t>(gridDim.y)) {
    const int64_t seq_slot = p.seq_slots[i];
    if (s.adjusts[seq_slot] == 0) continue;
    for (int32_t id = first; id < s.vocab_size; id += step)
      s.counts[seq_slot * s.vocab_size + id] = 0;
    for (int32_t word = first; word < num_words; word += step)
      s.seen[seq_slot * num_words + word] = 0;
  }
}

// One block per sequence.
template <class Params>
__global__ void count_kernel(const __grid_constant__ Params p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t i = static_cast<int32_t>(blockIdx.x);
  if (i >= p.inputs.counts->num_seqs) return;
  const SamplingState& s = p.sampling;
  const CountedSequence sequence = counted_sequence(p, i);
  const int64_t seq_slot = sequence.seq_slot;
  for (int32_t index = static_cast<int32_t>(threadIdx.x); index < sequence.num_tokens;
       index += static_cast<int32_t>(blockDim.x)) {
    const CountedToken counted = counted_token(p, i, index);
    if (counted.token < 0) continue;
    atomicOr(s.seen + seq_slot * mask_words(s.vocab_size) + counted.token / 32,
             uint32_t{1} << counted.token % 32);
    if (counted.is_output) atomicAdd(s.counts + seq_slot * s.vocab_size + counted.token, 1);
  }
}

}  // namespace
}  // namespace cuda

void clear_counts(CudaContext& ctx, const ClearCountsParams& p) {
  using namespace cuda;
  constexpr int32_t kIdsPerBlock = kClearThreads * kIdsPerClearThread;
  const int32_t num_pieces = (p.sampling.vocab_size + kIdsPerBlock - 1) / kIdsPerBlock;
  const int32_t num_seqs = std::min(p.max_seqs, kMaxSequencesAtOnce);
  launch(ctx, "clear_counts", clear_counts_kernel,
         dim3(static_cast<unsigned>(num_pieces), static_cast<unsigned>(num_seqs)),
         dim3(kClearThreads), 0, p);
}

void count_prefill_tokens(CudaContext& ctx, const CountPrefillTokensParams& p) {
  cuda::launch(ctx, "count_prefill_tokens", cuda::count_kernel<CountPrefillTokensParams>,
               dim3(static_cast<unsigned>(p.max_seqs)), dim3(cuda::kPrefillThreads), 0, p);
}

void count_emitted_tokens(CudaContext& ctx, const CountEmittedTokensParams& p) {
  cuda::launch(ctx, "count_emitted_tokens", cuda::count_kernel<CountEmittedTokensParams>,
               dim3(static_cast<unsigned>(p.max_seqs)), dim3(cuda::kEmittedThreads), 0, p);
}

}  // namespace paceline
