// SPDX-License-Identifier: Apache-2.0

// A block applies the rules of adjust_rules.h, in their order, to a range of a row's ids. The work
// is sparse: bias and bad words are lists, and masks give the tokens that the sequence contains or
// must not sample. A warp reads the masks of 1,024 ids at once and then visits the words with any
// bit set, one id per lane.

#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "sample/adjust_rules.h"
#include "sample/logits.h"
#include "wire/limits.h"
#include "wire/sequence_state.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;
constexpr int32_t kIdsPerBlock = 32768;

// Applies penalties, the allowed tokens and the mask of the row, if it is not null, to ids [begin,
// end).
__device__ __forceinline__ void adjust_by_masks(const SamplingState& s, const AdjustedRow& row,
                                                const Penalties& penalties, bool has_allowed,
                                                const uint32_t* mask, int32_t begin, int32_t end,
                                                float* logits) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const uint32_t* const allowed = s.allowed + int64_t{row.seq_slot} * mask_words(s.vocab_size);
  for (int32_t first = begin / 32 + warp * 32; first * 32 < end; first += kWarps * 32) {
    const int32_t word = first + lane;
    const bool is_word = word * 32 < end;
    const uint32_t seen = is_word && penalties.is_any() ? seen_bits(s, row, word) : 0;
    uint32_t banned = is_word && has_allowed ? ~allowed[word] : 0;
    if (is_word && mask != nullptr) banned |= ~__ldcv(mask + word);
    uint32_t concerned = __ballot_sync(kAllLanes, (seen | banned) != 0);
    while (concerned != 0) {
      const int32_t i = __ffs(static_cast<int>(concerned)) - 1;
      concerned &= concerned - 1;
      const uint32_t seen_here = __shfl_sync(kAllLanes, seen, i);
      const uint32_t banned_here = __shfl_sync(kAllLanes, banned, i);
      const int32_t token = (first + i) * 32 + lane;
      if (token >= end) continue;
      if ((banned_here >> lane & 1) != 0) {
        logits[token] = negative_infinity();
      } else if ((seen_here >> lane & 1) != 0) {
        logits[token] = penalised(penalties, logits[token], output_count(s, row, token));
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    adjust_kernel(const __grid_constant__ AdjustLogitsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t i = static_cast<int32_t>(blockIdx.x);
  if (i >= *p.num_rows) return;
  const AdjustedRow row = adjusted_row(p, i);
  if (row.seq_slot < 0) return;
  const SamplingState& s = p.sampling;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t begin = static_cast<int32_t>(blockIdx.y) * kIdsPerBlock;
  const int32_t end = min(begin + kIdsPerBlock, s.vocab_size);
  float* const logits = p.logits + i * p.logits_stride;

  const int64_t first_bias = int64_t{row.seq_slot} * kMaxLogitBias;
  const int32_t num_bias = s.num_bias[row.seq_slot];
  for (int32_t j = thread; j < num_bias; j += kThreads) {
    const int32_t id = s.bias_ids[first_bias + j];
    if (id >= begin && id < end) logits[id] += s.bias_values[first_bias + j];
  }
  __syncthreads();
  const Penalties penalties = penalties_of(s, row.seq_slot);
  const bool has_allowed = s.has_allowed[row.seq_slot] != 0;
  const uint32_t* const mask = mask_of(s, row);
  if (penalties.is_any() || has_allowed || mask != nullptr) {
    adjust_by_masks(s, row, penalties, has_allowed, mask, begin, end, logits);
  }
  __syncthreads();
  const auto ban = [&](int32_t id) {
    if (id >= begin && id < end) logits[id] = negative_infinity();
  };
  const int32_t num_bad_words = s.num_bad_words[row.seq_slot];
  for (int32_t word = thread; word < num_bad_words; word += kThreads) {
    ban(token_banned_by(s, row, word));
  }
  if (bans_stop_ids(s, row) && thread < p.sequences.num_stop_ids[row.seq_slot]) {
    ban(p.sequences.stop_ids[int64_t{row.seq_slot} * kMaxStopIds + thread]);
  }
}

}  // namespace
}  // namespace cuda

void adjust_logits(CudaContext& ctx, const AdjustLogitsParams& p) {
  using namespace cuda;
  const int32_t num_pieces = (p.sampling.vocab_size + kIdsPerBlock - 1) / kIdsPerBlock;
  launch(ctx, "adjust_logits", adjust_kernel,
         dim3(static_cast<unsigned>(p.max_rows), static_cast<unsigned>(num_pieces)), dim3(kThreads),
         0, p);
}

}  // namespace paceline
