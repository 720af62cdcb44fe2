// SPDX-License-Identifier: Apache-2.0

// A cluster of eight blocks truncates a row; each block loads an eighth of its ids into shared
// memory once. Without clusters one block reads the row again and again. All logits below one
// threshold are excluded. For top-k and for top-p the threshold is the highest key (a logit as an
// ordered integer) such that the count, or the sum of weights, of the keys from it on reaches the
// target. The search goes digit by digit: a histogram of the digit among the keys that are still
// possible, summed over the blocks, and the bin in which the sum from above passes the target.
// Counts and weights are integers, so the order of sums does not matter and rows are invariant.

#include "base/check.h"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "sample/logits.h"
#include "sample/row_pieces.cuh"
#include "sample/truncate_rules.h"
#include "wire/limits.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kGroupBins = 32;
constexpr int32_t kMaxGroups = kMaxDigitValues / kGroupBins;
static_assert(kMaxGroups == 2 * 32);  // two per lane

struct alignas(16) Histogram {
  uint32_t low[kMaxDigitValues];  // of 64-bit sums
  uint32_t high[kMaxDigitValues];
  uint64_t groups[kMaxGroups];  // sums of kGroupBins bins

  __device__ __forceinline__ void add(int32_t bin, uint64_t amount) {
    const auto low_amount = static_cast<uint32_t>(amount);
    const uint32_t before = atomicAdd(&low[bin], low_amount);
    const uint32_t carry = before + low_amount < before ? 1 : 0;
    const uint32_t high_amount = static_cast<uint32_t>(amount >> 32) + carry;
    if (high_amount != 0) atomicAdd(&high[bin], high_amount);
  }
};

// Shared memory besides the block's logits. Other blocks of the cluster read the first two members
// after a cluster_barrier; there are two of each, used in alternation, so that the values remain
// until the next barrier.
struct Shared {
  Histogram histograms[2];
  uint32_t highest[2];  // key of the block's highest logit
  // Only this block uses the following.
  uint32_t warp_words[kWarps];
  uint64_t found_above;
  int32_t found_bin;
};

// The sum of the lane's amount and those of the lanes above it.
__device__ __forceinline__ uint64_t sum_from_lane(uint64_t amount) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t higher = __shfl_down_sync(kAllLanes, amount, step);
    if (lane + step < 32) amount += higher;
  }
  return amount;
}

// Searches thresholds, one row after the other. The histogram of turn `turn_` is clear when a digit
// begins; that of the previous digit is cleared after the barrier that follows its last reads.
template <int32_t kBlocks>
class Search {
 public:
  // A barrier must follow.
  __device__ __forceinline__ explicit Search(Shared& shared) : shared_(shared) {
    clear(shared_.histograms[turn_], 0);
  }

  // As `search` of the CPU. All threads of the cluster call it and get the same result.
  template <class P, class Measure, class Target>
  __device__ __forceinline__ uint32_t run(const P& piece, uint32_t floor, const Measure& measure,
                                          const Target& target_of) {
    uint32_t prefix = 0;
    uint64_t target = 0;
    uint64_t above = 0;
#pragma unroll 1
    for (int32_t digit = 0; digit < kNumDigits; ++digit) {
      Histogram& histogram = shared_.histograms[turn_];
      turn_ ^= 1;
      const auto add = [&](float logit) {
        const uint64_t amount = measure(logit);
        if (amount != 0) histogram.add(digit_of(to_ordered(logit), digit), amount);
      };
      const uint32_t lowest = max(max(floor, prefix), kNoLogitKey + 1);
      const uint32_t span = (prefix | ~bits_before(digit)) - lowest;
      const auto is_possible = [&](float logit) { return to_ordered(logit) - lowest <= span; };
      if (digit == 0) {
        piece.for_quads([&](int32_t, const float (&four)[4]) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (is_possible(four[j])) add(four[j]);
          }
        });
      } else {
        piece.for_matches(is_possible, add);
      }
      __syncthreads();
      add_groups(histogram, digit_values(digit) / kGroupBins);
      cluster_barrier();
      if (threadIdx.x < 32) {
        find(histogram, digit, above, [&](uint64_t total) {
          if (digit == 0) target = target_of(total);
          return target;
        });
      } else {
        clear(shared_.histograms[turn_], 32);
      }
      __syncthreads();
      if (shared_.found_bin < 0) return floor;
      prefix |= static_cast<uint32_t>(shared_.found_bin) << digit_shift(digit);
      above = shared_.found_above;
    }
    return prefix;
  }

 private:
  // The threads from `first_thread` on call it.
  __device__ __forceinline__ static void clear(Histogram& histogram, int32_t first_thread) {
    const int32_t thread = static_cast<int32_t>(threadIdx.x) - first_thread;
    for (int32_t i = thread * 4; i < kMaxDigitValues; i += (kThreads - first_thread) * 4) {
      *reinterpret_cast<uint4*>(histogram.low + i) = {};
      *reinterpret_cast<uint4*>(histogram.high + i) = {};
    }
  }

  // Each group has as many threads as quads of bins.
  __device__ __forceinline__ static void add_groups(Histogram& histogram, int32_t num_groups) {
    constexpr int32_t kGroupThreads = kGroupBins / 4;
    static_assert(kMaxGroups * kGroupThreads == kThreads);
    const int32_t thread = static_cast<int32_t>(threadIdx.x);
    const uint4 low = *reinterpret_cast<const uint4*>(histogram.low + thread * 4);
    const uint4 high = *reinterpret_cast<const uint4*>(histogram.high + thread * 4);
    uint64_t sum = uint64_t{low.x} + low.y + low.z + low.w;
    sum += (uint64_t{high.x} + high.y + high.z + high.w) << 32;
#pragma unroll
    for (int step = 1; step < kGroupThreads; step *= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, step);
    }
    const int32_t group = thread / kGroupThreads;
    if (thread % kGroupThreads == 0 && group < num_groups) histogram.groups[group] = sum;
  }

  // Writes found_bin, the bin in which the sum from above passes the target, and found_above, the
  // sum of the bins above it. found_bin is -1 if all bins together do not reach the target. One
  // warp calls it.
  template <class Target>
  __device__ __forceinline__ void find(const Histogram& histogram, int32_t digit, uint64_t above,
                                       const Target& target_of) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    // The lane's groups, a lower one and the one above it.
    uint64_t lower = 0;
    uint64_t upper = 0;
    if (lane * 2 * kGroupBins < digit_values(digit)) {
      const auto* const pair = reinterpret_cast<const ulonglong2*>(histogram.groups + lane * 2);
#pragma unroll
      for (int32_t rank = 0; rank < kBlocks; ++rank) {
        const ulonglong2 sums = *in_cluster(pair, rank);
        lower += sums.x;
        upper += sums.y;
      }
    }
    uint64_t from_here = above + sum_from_lane(lower + upper);
    const uint64_t target = target_of(__shfl_sync(kAllLanes, from_here, 0));
    const uint32_t passed = __ballot_sync(kAllLanes, from_here >= target);
    if (passed == 0) {
      if (lane == 0) shared_.found_bin = -1;
      return;
    }
    // The highest lane that passed has the group.
    const int32_t owner = 31 - __clz(static_cast<int>(passed));
    const bool is_lower = from_here - lower < target;
    from_here -= is_lower ? lower : lower + upper;
    const int32_t group =
        owner * 2 + (__shfl_sync(kAllLanes, static_cast<int32_t>(is_lower), owner) != 0 ? 0 : 1);
    above = __shfl_sync(kAllLanes, from_here, owner);

    const int32_t bin = group * kGroupBins + lane;
    uint64_t low = 0;
    uint64_t high = 0;
#pragma unroll
    for (int32_t rank = 0; rank < kBlocks; ++rank) {
      low += *in_cluster(&histogram.low[bin], rank);
      high += *in_cluster(&histogram.high[bin], rank);
    }
    const uint64_t amount = low + (high << 32);
    from_here = above + sum_from_lane(amount);
    if (from_here >= target && from_here - amount < target) {
      shared_.found_bin = bin;
      shared_.found_above = from_here - amount;
    }
  }

  Shared& shared_;
  int32_t turn_ = 0;
};

template <int32_t kBlocks, bool kIsVector>
__device__ __forceinline__ void exclude_below(const Piece<kBlocks, kIsVector>& piece,
                                              float threshold, float* logits) {
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

// The key of the lowest logit that is not excluded; 0 if all stay.
template <int32_t kBlocks, bool kIsVector>
__device__ __forceinline__ uint32_t threshold_key_of(const RowLimits& limits, int32_t vocab_limit,
                                                     const Piece<kBlocks, kIsVector>& piece,
                                                     uint32_t highest, Search<kBlocks>& search) {
  const float highest_logit = from_ordered(highest);
  if (!(highest_logit > negative_infinity() && highest_logit < -negative_infinity())) return 0;
  uint32_t threshold_key = 0;
  if (limits.top_k > 0 && limits.top_k < vocab_limit) {
    threshold_key = search.run(
        piece, threshold_key, [](float) { return uint64_t{1}; },
        [&](uint64_t) { return static_cast<uint64_t>(limits.top_k); });
  }
  if (limits.top_p < 1.0f) {
    const SoftmaxWeights weights = softmax_weights_of(highest_logit, limits.temperature);
    threshold_key = search.run(
        piece, threshold_key, [&](float logit) { return weight_of(weights, logit); },
        [&](uint64_t total) { return top_p_target(limits.top_p, total); });
  }
  if (limits.min_p > 0.0f) {
    threshold_key = max(threshold_key, min_p_key(highest_logit, limits.temperature, limits.min_p));
  }
  return threshold_key;
}

template <int32_t kBlocks, bool kIsVector>
__global__ void PACELINE_CLUSTER_DIMS(kBlocks) __launch_bounds__(kThreads, kBlocksPerSm)
    truncate_kernel(const __grid_constant__ TruncateLogitsParams p, const int32_t piece_size) {
  extern __shared__ __align__(16) float values[];  // [piece_size]
  __shared__ Shared shared;
  __shared__ uint32_t bounded[kWarps];
  let_successor_start();
  wait_for_predecessor();
  const int32_t rank = static_cast<int32_t>(blockIdx.x);
  const int32_t first_id = rank * piece_size;
  const int32_t count = max(min(p.vocab_limit - first_id, piece_size), 0);
  Search<kBlocks> search(shared);
  int32_t turn = 0;
  for_wanted_rows(
      min(*p.num_rows, p.max_rows), bounded,
      [&](int32_t row) { return row_limits(p, row).temperature > 0.0f; },
      [&](int32_t row) {
        float* const logits = p.logits + row * p.logits_stride + first_id;
        const Piece<kBlocks, kIsVector> piece = {
            .logits = logits, .count = count, .values = values, .size = piece_size, .rank = rank};
        const float highest_of_thread = load_piece(piece, values);
        const uint32_t highest =
            highest_key<kBlocks>(highest_of_thread, shared.highest[turn], shared.warp_words);
        turn ^= 1;
        const uint32_t threshold_key =
            threshold_key_of(row_limits(p, row), p.vocab_limit, piece, highest, search);
        if (threshold_key != 0) exclude_below(piece, from_ordered(threshold_key), logits);
        __syncthreads();  // `values` is written again
      });
  cluster_barrier();  // no block exits while others read its shared memory
}

}  // namespace
}  // namespace cuda

void truncate_logits(CudaContext& ctx, const TruncateLogitsParams& p) {
  using namespace cuda;
  PACELINE_CHECK(p.vocab_limit <= kMaxTruncatedVocab, p.vocab_limit, " ids; at most ",
                 kMaxTruncatedVocab);
  const auto launch_with = [&]<bool kIsVector>() {
    constexpr const char* kName = "truncate_logits";
    if (!ctx.has_clusters) {
      return launch_whole_rows<&truncate_kernel<1, kIsVector>>(ctx, kName, p.vocab_limit,
                                                               p.max_rows, p);
    }
    launch_row_pieces<&truncate_kernel<kClusterBlocks, kIsVector>>(ctx, kName, p.vocab_limit,
                                                                   p.max_rows, p);
  };
  const bool is_vector = p.logits_stride % 4 == 0 && is_vector_aligned(p.logits);
  is_vector ? launch_with.operator()<true>() : launch_with.operator()<false>();
}

}  // namespace paceline
