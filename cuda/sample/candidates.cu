// SPDX-License-Identifier: Apache-2.0

// Drafts that are chosen from a few candidates each. All pairs of candidates of neighbouring drafts
// are scored at once, a block for each draft of each sequence; then one warp of each sequence walks
// over its drafts, with a candidate in each lane. So a window takes two launches, not two for each
// draft, and what is left to do in turn are a few loads and a maximum over the warp.

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "ops/candidates.h"
#include "sample/draw_keys.cuh"

namespace paceline {
namespace cuda {
namespace {

// --- score_pairs ---------------------------------------------------------------------------------

constexpr int32_t kThreads = 256;
constexpr int32_t kMaxPairs = kMaxCandidates * kMaxCandidates / kThreads;  // of a thread
constexpr int32_t kChunk = 64;          // columns of the codebooks in shared memory at once
constexpr int32_t kPitch = kChunk + 1;  // rows of different candidates lie in different banks

// Loads columns [first, first + kChunk) of the rows of some tokens, times `factors` where there are
// any. Rows of no token, and columns beyond the last, are zero.
template <class T>
__device__ __forceinline__ void load_rows(const ScorePairsParams& p, const void* codebook,
                                          const int32_t* tokens, int32_t count, int32_t first,
                                          const float* factors, float* to) {
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count * kChunk; i += kThreads) {
    const int32_t token = tokens[i / kChunk];
    const int32_t column = first + i % kChunk;
    float value = 0.0f;
    if (token >= 0 && token < p.vocab_size && column < p.rank) {
      value = widen(static_cast<const T*>(codebook)[int64_t{token} * p.rank + column]);
      if (factors != nullptr) value *= factors[column];
    }
    to[i / kChunk * kPitch + i % kChunk] = value;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    score_pairs_kernel(const __grid_constant__ ScorePairsParams p) {
  __shared__ float weighed[kMaxCandidates * kPitch];
  __shared__ float successors[kMaxCandidates * kPitch];
  let_successor_start();
  wait_for_predecessor();
  const auto seq = static_cast<int32_t>(blockIdx.x);
  const auto draft = static_cast<int32_t>(blockIdx.y);
  if (seq >= *p.num_seqs) return;
  const int32_t count = p.lists.count;
  const int64_t row = int64_t{draft} * p.max_seqs + seq;
  const int32_t* const ids = p.lists.ids + row * count;
  const int32_t* const before =
      draft == 0 ? p.newest + seq : p.lists.ids + (row - p.max_seqs) * count;
  const int32_t num_before = draft == 0 ? 1 : count;
  const int32_t num_pairs = num_before * count;
  const float* const projected = p.projected + row * p.rank;
  float sums[kMaxPairs] = {};
  for (int32_t first = 0; first < p.rank; first += kChunk) {
    if (first > 0) __syncthreads();  // the chunk before has been read
    load_rows<T>(p, p.predecessors, before, num_before, first, projected, weighed);
    load_rows<T>(p, p.successors, ids, count, first, nullptr, successors);
    __syncthreads();
#pragma unroll
    for (int32_t i = 0; i < kMaxPairs; ++i) {
      const int32_t pair = static_cast<int32_t>(threadIdx.x) + i * kThreads;
      if (pair >= num_pairs) break;
      const float* const a = weighed + pair / count * kPitch;
      const float* const c = successors + pair % count * kPitch;
#pragma unroll 8
      for (int32_t column = 0; column < kChunk; ++column) {
        sums[i] = fmaf(a[column], c[column], sums[i]);
      }
    }
  }
  const float* const logits = p.lists.logits + row * count;
  float* const scores = p.lists.scores + row * count * count;
#pragma unroll
  for (int32_t i = 0; i < kMaxPairs; ++i) {
    const int32_t pair = static_cast<int32_t>(threadIdx.x) + i * kThreads;
    if (pair < num_pairs) scores[pair] = __fadd_rn(logits[pair % count], sums[i]);
  }
}

// --- follow_candidates ---------------------------------------------------------------------------

// A warp for each sequence.
__global__ void __launch_bounds__(32)
    follow_candidates_kernel(const __grid_constant__ FollowCandidatesParams p) {
  let_successor_start();
  wait_for_predecessor();
  const auto seq = static_cast<int32_t>(blockIdx.x);
  const auto lane = static_cast<int32_t>(threadIdx.x);
  if (seq >= *p.num_seqs) return;
  int32_t from = 0;
  if (p.before != nullptr) {
    const bool is_it = lane < p.count && p.before[int64_t{seq} * p.count + lane] == p.previous[seq];
    const uint32_t found = __ballot_sync(kAllLanes, is_it ? 1 : 0);
    if (found != 0) from = __ffs(static_cast<int>(found)) - 1;
  }
  if (lane >= p.count) return;
  p.y[int64_t{seq} * p.count + lane] = p.scores[(int64_t{seq} * p.count + from) * p.count + lane];
}

// --- walk_candidates -----------------------------------------------------------------------------

// The best of all candidates of a draft; 0: none can be drawn. All lanes call it.
__device__ __forceinline__ uint64_t draw_of_lanes(const DrawParams& d, float score, int32_t token,
                                                  int32_t lane, int32_t seq_slot,
                                                  int32_t pass_row) {
  const float temperature = d.temperatures != nullptr ? d.temperatures[seq_slot] : 0.0f;
  const bool is_valid = score > negative_infinity() && token < d.token_limit;
  if (!(temperature > 0.0f)) return warp_max(is_valid ? candidate(score, lane) : 0);
  const NoiseKey key = noise_key(d, seq_slot, d.seeds[seq_slot], drawn_position(d, pass_row));
  uint64_t own = 0;
  if (is_valid) {
    uint32_t words[4];
    philox_words(key, static_cast<uint32_t>(token) / 4, words);
    own = candidate(fmaf(temperature, gumbel(pick(words, token % 4)), score), lane);
  }
  return warp_max(own);
}

__global__ void __launch_bounds__(32)
    walk_candidates_kernel(const __grid_constant__ WalkCandidatesParams p) {
  let_successor_start();
  wait_for_predecessor();
  const auto seq = static_cast<int32_t>(blockIdx.x);
  const auto lane = static_cast<int32_t>(threadIdx.x);
  if (seq >= *p.num_seqs) return;
  const int32_t count = p.lists.count;
  const DrawParams& d = p.draw;
  int32_t from = 0;
  for (int32_t j = 0; j < p.num_drafts; ++j) {
    const int64_t row = int64_t{j} * p.max_seqs + seq;
    const int32_t pass_row = d.row_index[row];
    const int32_t seq_slot = d.seq_slot[pass_row];
    int32_t token = -1;
    float score = negative_infinity();
    if (lane < count) {
      token = p.lists.ids[row * count + lane];
      score = p.lists.scores[(row * count + from) * count + lane];
    }
    int32_t drawn = kInertRow;
    if (seq_slot >= 0) {
      const uint64_t best = draw_of_lanes(d, score, token, lane, seq_slot, pass_row);
      drawn = best != 0 ? __shfl_sync(kAllLanes, token, id_of(best)) : kNoValidLogit;
    }
    if (lane == 0) d.tokens[row] = drawn;
    const uint32_t found = __ballot_sync(kAllLanes, lane < count && token == drawn ? 1 : 0);
    from = found != 0 ? __ffs(static_cast<int>(found)) - 1 : 0;
  }
}

}  // namespace
}  // namespace cuda

void score_pairs(CudaContext& ctx, const ScorePairsParams& p) {
  using namespace cuda;
  check_pairs(p);
  const dim3 grid(static_cast<unsigned>(p.max_seqs), static_cast<unsigned>(p.num_drafts));
  with_element_type(p.dtype, "codebooks", [&](auto element) {
    launch(ctx, "score_pairs", score_pairs_kernel<decltype(element)>, grid, dim3(kThreads), 0, p);
  });
}

void follow_candidates(CudaContext& ctx, const FollowCandidatesParams& p) {
  PACELINE_CHECK(p.count <= kMaxCandidates, p.count, " candidates; at most ", kMaxCandidates);
  cuda::launch(ctx, "follow_candidates", cuda::follow_candidates_kernel,
               dim3(static_cast<unsigned>(p.max_seqs)), dim3(32), 0, p);
}

void walk_candidates(CudaContext& ctx, const WalkCandidatesParams& p) {
  check_walk(p);
  cuda::launch(ctx, "walk_candidates", cuda::walk_candidates_kernel,
               dim3(static_cast<unsigned>(p.max_seqs)), dim3(32), 0, p);
}

}  // namespace paceline
