// SPDX-License-Identifier: Apache-2.0

// A cluster of eight blocks has a row, each block an eighth of its ids, which it loads into shared
// memory once. What is excluded lies below one threshold. For top-k and for top-p it is the highest
// key (a logit as an ordered integer) such that the keys from it on count, or weigh, enough; it is
// found digit by digit: a histogram of the digit among the keys that are still possible, the bins
// of all blocks added up, and the bin in which the sum from above passes the target. Counts and
// weights are integers, so that sums have no order and rows are invariant.
//
// The grid is only as large as the machine, and clusters go through the rows: a batch in which no
// row has a bound costs one look at all of them.

#include <algorithm>

#include "base/check.h"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "sample/logits.h"
#include "sample/row_pieces.cuh"
#include "sample/truncate_rules.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kMaxBins = kMaxDigitValues / kBlocks;  // that a block adds up
static_assert(kMaxBins <= kThreads && kMaxBins % 32 == 0);

// Beside the block's logits. What other blocks of the cluster read is written before one
// cluster_barrier and, between that one and the next, only read.
struct Shared {
  uint32_t low[kMaxDigitValues];  // histogram: the lower words of 64-bit sums
  uint32_t high[kMaxDigitValues];
  uint64_t bins[kMaxBins];  // this block's share of the bins, summed over the cluster
  uint64_t sum_of_bins;
  uint32_t highest;  // key of the block's highest logit
  // The block's own.
  uint64_t warp_sums[kWarps];
  uint32_t warp_words[kWarps];
  uint64_t found_above;
  int32_t found_bin;
};

__device__ __forceinline__ void add(Shared& shared, int32_t bin, uint64_t amount) {
  const auto low = static_cast<uint32_t>(amount);
  const uint32_t before = atomicAdd(&shared.low[bin], low);
  const uint32_t carry = before + low < before ? 1 : 0;
  const uint32_t high = static_cast<uint32_t>(amount >> 32) + carry;
  if (high != 0) atomicAdd(&shared.high[bin], high);
}

// As `search` of the CPU. All threads of the cluster call it and get the same.
template <class Measure, class Target>
__device__ __forceinline__ uint32_t search(const Piece& piece, Shared& shared, uint32_t floor,
                                           const Measure& measure, const Target& target_of) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / 32;
  const int32_t lane = thread % 32;
  uint32_t prefix = 0;
  uint64_t target = 0;
  uint64_t above = 0;
#pragma unroll 1
  for (int32_t digit = 0; digit < kNumDigits; ++digit) {
    for (int32_t i = thread; i < digit_values(digit); i += kThreads) {
      shared.low[i] = shared.high[i] = 0;
    }
    __syncthreads();
    const uint32_t before = bits_before(digit);
    piece.for_quads([&](int32_t, const float (&four)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t key = to_ordered(four[j]);
        if (key <= kNoLogitKey || key < floor || ((key ^ prefix) & before) != 0) continue;
        const uint64_t amount = measure(four[j]);
        if (amount != 0) add(shared, digit_of(key, digit), amount);
      }
    });
    cluster_barrier();

    // The bins of the digit are shared out: each block adds up its own over the cluster.
    const int32_t num_bins = digit_values(digit) / kBlocks;
    const bool has_bin = thread < num_bins;  // the same for all of a warp
    if (has_bin) {
      const int32_t bin = piece.rank * num_bins + thread;
      uint64_t low = 0;
      uint64_t high = 0;
#pragma unroll
      for (int32_t rank = 0; rank < kBlocks; ++rank) {
        low += *in_cluster(&shared.low[bin], rank);
        high += *in_cluster(&shared.high[bin], rank);
      }
      const uint64_t sum = low + (high << 32);
      shared.bins[thread] = sum;
      const uint64_t of_warp = warp_sum(sum);
      if (lane == 0) shared.warp_sums[warp] = of_warp;
    }
    __syncthreads();
    if (thread == 0) {
      uint64_t sum = 0;
      for (int32_t i = 0; i < num_bins / 32; ++i) sum += shared.warp_sums[i];
      shared.sum_of_bins = sum;
    }
    cluster_barrier();

    // In whose bins is the target passed?
    uint64_t sums[kBlocks];
    uint64_t total = 0;
#pragma unroll
    for (int32_t rank = 0; rank < kBlocks; ++rank) {
      sums[rank] = *in_cluster(&shared.sum_of_bins, rank);
      total += sums[rank];
    }
    if (digit == 0) {
      target = target_of(total);
      if (total < target) return floor;
    }
    int32_t owner = 0;
    bool is_passed = false;
#pragma unroll
    for (int32_t rank = kBlocks - 1; rank >= 0; --rank) {
      if (!is_passed && above + sums[rank] >= target) {
        is_passed = true;
        owner = rank;
      }
      if (!is_passed) above += sums[rank];
    }
    // In which of them? `from_here` is the sum of the bin and of those above it.
    uint64_t amount = 0;
    uint64_t from_here = 0;
    if (has_bin) {
      amount = *in_cluster(&shared.bins[thread], owner);
      from_here = amount;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint64_t higher = __shfl_down_sync(kAllLanes, from_here, step);
        if (lane + step < 32) from_here += higher;
      }
      if (lane == 0) shared.warp_sums[warp] = from_here;
    }
    __syncthreads();
    if (has_bin) {
      for (int32_t i = warp + 1; i < num_bins / 32; ++i) from_here += shared.warp_sums[i];
      from_here += above;
      if (from_here >= target && from_here - amount < target) {
        shared.found_bin = owner * num_bins + thread;
        shared.found_above = from_here - amount;
      }
    }
    __syncthreads();
    prefix |= static_cast<uint32_t>(shared.found_bin) << digit_shift(digit);
    above = shared.found_above;
  }
  return prefix;
}

template <bool kIsVector>
__device__ __forceinline__ void exclude_below(const Piece& piece, float threshold, float* logits) {
  piece.for_quads([&](int32_t i, const float (&four)[4]) {
    const bool is_excluded[4] = {!(four[0] >= threshold), !(four[1] >= threshold),
                                 !(four[2] >= threshold), !(four[3] >= threshold)};
    const bool are_all = is_excluded[0] && is_excluded[1] && is_excluded[2] && is_excluded[3];
    if (kIsVector && are_all && i + 4 <= piece.count) {
      const float none = negative_infinity();
      store_vector({none, none, none, none}, logits + i);
      return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (is_excluded[j] && i + j < piece.count) logits[i + j] = negative_infinity();
    }
  });
}

template <bool kIsVector>
__device__ void truncate_row(const RowLimits& limits, int32_t vocab_limit, const Piece& piece,
                             float* logits, float* values, Shared& shared) {
  const uint32_t highest = highest_key(load_piece<kIsVector>(piece, values), shared);
  const float highest_logit = from_ordered(highest);
  if (highest_logit > negative_infinity() && highest_logit < -negative_infinity()) {
    uint32_t lowest_kept = 0;
    if (limits.top_k > 0 && limits.top_k < vocab_limit) {
      lowest_kept = search(
          piece, shared, lowest_kept, [](float) { return uint64_t{1}; },
          [&](uint64_t) { return static_cast<uint64_t>(limits.top_k); });
    }
    if (limits.top_p < 1.0f) {
      const Weigher weigher = weigher_of(highest_logit, limits.temperature);
      lowest_kept = search(
          piece, shared, lowest_kept, [&](float logit) { return weight_of(weigher, logit); },
          [&](uint64_t total) { return top_p_target(limits.top_p, total); });
    }
    if (limits.min_p > 0.0f) {
      lowest_kept = max(lowest_kept, min_p_key(highest_logit, limits.temperature, limits.min_p));
    }
    if (lowest_kept != 0) exclude_below<kIsVector>(piece, from_ordered(lowest_kept), logits);
  }
  // Nobody goes on, or leaves, while others read what it shares.
  cluster_barrier();
}

template <bool kIsVector>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, kBlocksPerSm)
    truncate_kernel(const __grid_constant__ TruncateLogitsParams p, const int32_t piece_size) {
  extern __shared__ __align__(16) float values[];  // [piece_size]
  __shared__ Shared shared;
  __shared__ uint32_t bounded[kWarps];
  let_successor_start();
  wait_for_predecessor();
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t rank = static_cast<int32_t>(blockIdx.x);
  const int32_t num_clusters = static_cast<int32_t>(gridDim.y);
  const int32_t num_rows = min(*p.num_rows, p.max_rows);
  const int32_t first_id = rank * piece_size;
  const int32_t count = max(min(p.vocab_limit - first_id, piece_size), 0);
  for (int64_t first = blockIdx.y; first < num_rows; first += int64_t{num_clusters} * kThreads) {
    // A thread looks at a row each.
    const int64_t own = first + int64_t{thread} * num_clusters;
    bool is_bounded = false;
    if (own < num_rows) {
      is_bounded = row_limits(p, static_cast<int32_t>(own)).temperature > 0.0f;
    }
    const uint32_t votes = __ballot_sync(kAllLanes, is_bounded);
    if (__syncthreads_or(is_bounded) == 0) continue;
    if (thread % 32 == 0) bounded[thread / 32] = votes;
    __syncthreads();
    for (int32_t word = 0; word < kWarps; ++word) {
      for (uint32_t bits = bounded[word]; bits != 0; bits &= bits - 1) {
        const int32_t at = word * 32 + __ffs(static_cast<int>(bits)) - 1;
        const auto row = static_cast<int32_t>(first + int64_t{at} * num_clusters);
        float* const logits = p.logits + row * p.logits_stride + first_id;
        const Piece piece = {
            .logits = logits, .count = count, .values = values, .size = piece_size, .rank = rank};
        truncate_row<kIsVector>(row_limits(p, row), p.vocab_limit, piece, logits, values, shared);
      }
    }
  }
}

template <bool kIsVector>
void run(CudaContext& ctx, const TruncateLogitsParams& p) {
  constexpr auto* kKernel = &truncate_kernel<kIsVector>;
  constexpr size_t kMaxValueBytes = kMaxSharedBytes - sizeof(Shared) - 1024;
  static const bool is_set_up = [] {
    allow_shared_bytes(kKernel, kMaxValueBytes, "truncate_logits");
    return true;
  }();
  static_cast<void>(is_set_up);
  const int32_t ids_per_block = (p.vocab_limit + kBlocks - 1) / kBlocks;
  const int32_t piece_size = (ids_per_block + 3) / 4 * 4;
  const size_t value_bytes = sizeof(float) * static_cast<size_t>(piece_size);
  PACELINE_CHECK(value_bytes <= kMaxValueBytes, "truncate_logits of ", p.vocab_limit,
                 " ids; at most ", kBlocks * (kMaxValueBytes / 16 * 4));
  const bool has_room = kBlocksPerSm * (value_bytes + sizeof(Shared) + 2048) <= kMaxSharedBytes;
  const int32_t num_clusters = num_row_clusters(ctx, has_room ? kBlocksPerSm : 1);
  launch(ctx, "truncate_logits", kKernel,
         dim3(kBlocks, static_cast<unsigned>(std::min(p.max_rows, num_clusters))), dim3(kThreads),
         value_bytes, p, piece_size);
}

}  // namespace
}  // namespace cuda

void truncate_logits(CudaContext& ctx, const TruncateLogitsParams& p) {
  PACELINE_CHECK(p.vocab_limit <= kMaxTruncatedVocab, p.vocab_limit, " ids; at most ",
                 kMaxTruncatedVocab);
  const bool is_vector = p.logits_stride % 4 == 0 && cuda::is_vector_aligned(p.logits);
  if (is_vector) {
    cuda::run<true>(ctx, p);
  } else {
    cuda::run<false>(ctx, p);
  }
}

}  // namespace paceline
