// SPDX-License-Identifier: Apache-2.0

// One block per row finds the lowest chosen score by three digits of ordered bits (a score as an
// integer of the same order): a histogram of a digit among the scores that are still possible, and
// the bin in which the count from above passes top_k. Then each warp writes the chosen entries of
// its part of the row, at the index given by the number of chosen entries before them. Counts are
// integers, so the order of sums does not matter.

#include <cstdint>

#include "base/ordered.h"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "ops/compressed.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kThreads = 1024;
constexpr int32_t kWarps = kThreads / 32;
static_assert(kWarps == 32, "one lane for each warp");
constexpr int32_t kBins = 2048;
constexpr int32_t kDigits = 3;
// The lowest bit of a digit; the last one shares its highest bit with the one before.
__device__ constexpr int32_t shift_of(int32_t digit) {
  return digit == 0 ? 21 : digit == 1 ? 10 : 0;
}

struct Shared {
  int32_t bins[kBins];
  int32_t of_warps[kWarps];
  int32_t found_bin;
  int32_t found_above;
};

__device__ __forceinline__ uint32_t key_of(float score) { return to_ordered(comparable(score)); }

// Finds the bin in which the count from above passes `wanted`, and the count above it. The row has
// that many. Ends with a barrier.
__device__ __forceinline__ void find_bin(Shared& shared, int32_t wanted) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const int32_t warp = thread / 32;
  constexpr int32_t kOwn = kBins / kThreads;
  static_assert(kOwn == 2);
  // Threads count from above: thread 0 has the two highest bins.
  const int32_t high = kBins - 1 - 2 * thread;
  const int32_t in_high = shared.bins[high];
  const int32_t in_low = shared.bins[high - 1];
  const int32_t own = in_high + in_low;
  const int32_t up_to_lane = sum_up_to_lane(own, lane);
  if (lane == 31) shared.of_warps[warp] = up_to_lane;
  __syncthreads();
  const int32_t of_warp = shared.of_warps[lane];
  const int32_t up_to_warp = sum_up_to_lane(of_warp, lane);
  const int32_t before_warp = __shfl_sync(kAllLanes, up_to_warp - of_warp, warp);
  const int32_t above = before_warp + up_to_lane - own;
  if (above < wanted && above + own >= wanted) {
    const bool is_high = above + in_high >= wanted;
    shared.found_bin = is_high ? high : high - 1;
    shared.found_above = is_high ? above : above + in_high;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads)
    choose_entries_kernel(const __grid_constant__ ChooseEntriesParams p) {
  __shared__ Shared shared;
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  if (row >= min(*p.num_rows, p.max_rows)) return;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const int32_t warp = thread / 32;
  const int32_t end = p.seq_slot[row] < 0 ? 0 : p.entry_end[row];
  int32_t* const chosen = p.chosen + int64_t{row} * p.top_k;
  if (thread == 0) p.num_chosen[row] = min(end, p.top_k);
  if (end <= p.top_k) {
    for (int32_t i = thread; i < end; i += kThreads) chosen[i] = i;
    return;
  }
  const float* const scores = p.scores + row * p.scores_stride;

  uint32_t prefix = 0;
  int32_t above = 0;  // scores above all that have the prefix
#pragma unroll
  for (int32_t digit = 0; digit < kDigits; ++digit) {
    const int32_t shift = shift_of(digit);
    for (int32_t i = thread; i < kBins; i += kThreads) shared.bins[i] = 0;
    __syncthreads();
    for (int32_t i = thread; i < end; i += kThreads) {
      const uint32_t key = key_of(scores[i]);
      const bool is_possible = digit == 0 || (key ^ prefix) >> shift_of(digit - 1) == 0;
      if (is_possible) atomicAdd(&shared.bins[key >> shift & (kBins - 1)], 1);
    }
    __syncthreads();
    find_bin(shared, p.top_k - above);
    prefix |= static_cast<uint32_t>(shared.found_bin) << shift;
    above += shared.found_above;
  }
  // Of the scores that equal the lowest chosen one, the first `num_equal` entries are chosen.
  const int32_t num_equal = p.top_k - above;
  const int32_t per_warp = (end + kThreads - 1) / kThreads * 32;
  const int32_t warp_begin = min(warp * per_warp, end);
  const int32_t warp_end = min(warp_begin + per_warp, end);
  __syncthreads();  // found_above has been read, and of_warps is free
  // Of the warp's part: the scores above the threshold, and those that equal it.
  int32_t num_above = 0;
  int32_t num_same = 0;
  for (int32_t first = warp_begin; first < warp_end; first += 32) {
    const uint32_t key = first + lane < warp_end ? key_of(scores[first + lane]) : 0;
    num_above += __popc(__ballot_sync(kAllLanes, key > prefix));
    num_same += __popc(__ballot_sync(kAllLanes, key == prefix));
  }
  if (lane == 0) {
    shared.of_warps[warp] = num_above;
    shared.bins[warp] = num_same;
  }
  __syncthreads();
  const int32_t above_of_lane = shared.of_warps[lane];
  const int32_t same_of_lane = shared.bins[lane];
  const int32_t above_before = sum_up_to_lane(above_of_lane, lane) - above_of_lane;
  const int32_t same_before = sum_up_to_lane(same_of_lane, lane) - same_of_lane;
  int32_t at_above = __shfl_sync(kAllLanes, above_before, warp);
  int32_t at_same = __shfl_sync(kAllLanes, same_before, warp);
  const uint32_t lower_lanes = (1u << lane) - 1u;
  for (int32_t first = warp_begin; first < warp_end; first += 32) {
    const uint32_t key = first + lane < warp_end ? key_of(scores[first + lane]) : 0;
    const uint32_t are_above = __ballot_sync(kAllLanes, key > prefix);
    const uint32_t are_same = __ballot_sync(kAllLanes, key == prefix);
    const int32_t same = at_same + __popc(are_same & lower_lanes);
    const int32_t index = at_above + __popc(are_above & lower_lanes) + min(same, num_equal);
    if (key > prefix || (key == prefix && same < num_equal)) chosen[index] = first + lane;
    at_above += __popc(are_above);
    at_same += __popc(are_same);
  }
}

}  // namespace
}  // namespace cuda

void choose_entries(CudaContext& ctx, const ChooseEntriesParams& p) {
  PACELINE_CHECK(p.top_k >= 1 && p.top_k <= kMaxIndexTopK, "top_k ", p.top_k, " is not in 1 to ",
                 kMaxIndexTopK);
  cuda::launch(ctx, "choose_entries", cuda::choose_entries_kernel,
               dim3(static_cast<uint32_t>(p.max_rows)), dim3(cuda::kThreads), 0, p);
}

}  // namespace paceline
