// SPDX-License-Identifier: Apache-2.0

// One block per row. It finds the lowest selected logit digit by digit, on the logits as ordered
// integers: a histogram of the digit among the logits that are still possible, and the bin in which
// the count from above passes the number of proposals. Then one pass over the ids in order puts
// each selected id at its rank, the number of selected ids before it. Counts are integers, so the
// order of the threads does not matter.

#include <algorithm>

#include "base/check.h"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "sample/reject.h"
#include "sample/truncate_rules.h"
#include "wire/limits.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kThreads = 1024;
constexpr int32_t kWarps = kThreads / 32;
constexpr int32_t kIdsPerThread = 4;
constexpr int32_t kIdsPerRound = kThreads * kIdsPerThread;
static_assert(kMaxDigitValues == 2 * kThreads);  // two bins a thread
static_assert(kIdsPerRound < 1 << 16);           // two counts share a word

struct Shared {
  uint32_t bins[kMaxDigitValues];
  uint32_t warp_sums[kWarps];
  int32_t found_bin;
  uint32_t found_above;
};

struct Row {
  const float* logits;
  const int32_t* token_map;  // or null
  int32_t token_limit;
  int32_t vocab_limit;

  // The keys of four ids; kNoLogitKey where an id may not be selected.
  template <bool kIsVector>
  __device__ __forceinline__ void load(int32_t first, uint32_t (&keys)[kIdsPerThread]) const {
    float values[kIdsPerThread];
    if (kIsVector && first + kIdsPerThread <= vocab_limit) {
      load_vector(logits + first, values);
    } else {
#pragma unroll
      for (int i = 0; i < kIdsPerThread; ++i) {
        values[i] = first + i < vocab_limit ? logits[first + i] : negative_infinity();
      }
    }
#pragma unroll
    for (int i = 0; i < kIdsPerThread; ++i) {
      keys[i] = to_ordered(comparable(values[i]));
      if (token_map != nullptr && first + i < vocab_limit && token_map[first + i] >= token_limit) {
        keys[i] = kNoLogitKey;
      }
    }
  }
};

// The selected keys: all above `lowest`, and the first `num_equal` of those equal to it.
struct Selection {
  uint32_t lowest;
  uint32_t num_equal;
};

template <bool kIsVector>
__device__ Selection select(const Row& row, uint32_t wanted, Shared& shared) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / 32;
  const int32_t lane = thread % 32;
  uint32_t prefix = 0;
  uint32_t above = 0;  // keys above those of the prefix
#pragma unroll 1
  for (int32_t digit = 0; digit < kNumDigits; ++digit) {
    shared.bins[2 * thread] = shared.bins[2 * thread + 1] = 0;
    if (thread == 0) shared.found_bin = -1;
    __syncthreads();
    const uint32_t before = bits_before(digit);
    for (int32_t first = thread * kIdsPerThread; first < row.vocab_limit; first += kIdsPerRound) {
      uint32_t keys[kIdsPerThread];
      row.load<kIsVector>(first, keys);
#pragma unroll
      for (int i = 0; i < kIdsPerThread; ++i) {
        if (keys[i] <= kNoLogitKey || ((keys[i] ^ prefix) & before) != 0) continue;
        atomicAdd(&shared.bins[digit_of(keys[i], digit)], 1u);
      }
    }
    __syncthreads();
    // Thread t has the bins 2 t' and 2 t' + 1 of t' = last - t: the counts run from above.
    const int32_t low_bin = 2 * (kThreads - 1 - thread);
    const uint32_t of_high = shared.bins[low_bin + 1];
    const uint32_t of_low = shared.bins[low_bin];
    uint32_t up_to = sum_up_to_lane(of_high + of_low, lane);
    if (lane == 31) shared.warp_sums[warp] = up_to;
    __syncthreads();
    for (int32_t i = 0; i < warp; ++i) up_to += shared.warp_sums[i];
    up_to += above;
    // The bin in which the count passes; none if there are fewer keys than wanted.
    const uint32_t past_high = up_to - of_low;
    const uint32_t before_high = past_high - of_high;
    if (before_high < wanted && past_high >= wanted) {
      shared.found_bin = low_bin + 1;
      shared.found_above = before_high;
    } else if (past_high < wanted && up_to >= wanted) {
      shared.found_bin = low_bin;
      shared.found_above = past_high;
    }
    __syncthreads();
    const int32_t bin = shared.found_bin;
    if (bin < 0) return {.lowest = kNoLogitKey, .num_equal = 0};
    prefix |= static_cast<uint32_t>(bin) << digit_shift(digit);
    above = shared.found_above;
    __syncthreads();  // all threads read before any clears
  }
  return {.lowest = prefix, .num_equal = wanted - above};
}

template <bool kIsVector>
__global__ void __launch_bounds__(kThreads)
    select_proposals_kernel(const __grid_constant__ SelectProposalsParams p) {
  __shared__ Shared shared;
  let_successor_start();
  wait_for_predecessor();
  const int32_t index = static_cast<int32_t>(blockIdx.x);
  if (index >= *p.num_rows) return;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / 32;
  const int32_t lane = thread % 32;
  const int32_t seq_slot = p.seq_slot[p.row_index[index]];
  if (seq_slot < 0 && !p.is_by_row) {
    if (thread == 0) p.proposal_rows[index] = -1;
    return;
  }
  const int32_t draft = p.draft_step != nullptr ? *p.draft_step : 0;
  const int32_t proposal_row = p.is_by_row ? index : seq_slot * p.num_draft_tokens + draft;
  const Row row = {
      .logits = p.logits + index * p.logits_stride,
      .token_map = p.token_map != nullptr ? p.token_map + index * p.token_map_stride : nullptr,
      .token_limit = p.token_limit,
      .vocab_limit = seq_slot < 0 ? 0 : p.vocab_limit};
  const int32_t per_draft = p.proposals.per_draft;
  int32_t* const ids = p.proposals.ids + int64_t{proposal_row} * per_draft;
  float* const logits = p.proposals.logits + int64_t{proposal_row} * per_draft;

  const Selection selection = select<kIsVector>(row, static_cast<uint32_t>(per_draft), shared);
  // Numbers of keys above the lowest and of keys equal to it among the ids so far.
  uint32_t num_above = 0;
  uint32_t num_equal = 0;
  for (int32_t round = 0; round < row.vocab_limit; round += kIdsPerRound) {
    const int32_t first = round + thread * kIdsPerThread;
    uint32_t keys[kIdsPerThread];
    row.load<kIsVector>(first, keys);
    uint32_t own = 0;
#pragma unroll
    for (int i = 0; i < kIdsPerThread; ++i) {
      own += keys[i] > selection.lowest ? 1u : 0u;
      own += keys[i] == selection.lowest && keys[i] > kNoLogitKey ? 1u << 16 : 0u;
    }
    if (__syncthreads_or(static_cast<int>(own)) == 0) continue;
    const uint32_t up_to_lane = sum_up_to_lane(own, lane);
    if (lane == 31) shared.warp_sums[warp] = up_to_lane;
    __syncthreads();
    uint32_t before = up_to_lane - own;
    uint32_t total = 0;
    for (int32_t i = 0; i < kWarps; ++i) {
      const uint32_t of_warp = shared.warp_sums[i];
      if (i < warp) before += of_warp;
      total += of_warp;
    }
    uint32_t above = num_above + (before & 0xffffu);
    uint32_t equal = num_equal + (before >> 16);
#pragma unroll
    for (int i = 0; i < kIdsPerThread; ++i) {
      const bool is_above = keys[i] > selection.lowest;
      const bool is_equal = keys[i] == selection.lowest && keys[i] > kNoLogitKey;
      if (is_above || (is_equal && equal < selection.num_equal)) {
        const uint32_t rank = above + min(equal, selection.num_equal);
        const int32_t id = first + i;
        ids[rank] = row.token_map != nullptr ? row.token_map[id] : id;
        logits[rank] = row.logits[id];
      }
      above += is_above ? 1u : 0u;
      equal += is_equal ? 1u : 0u;
    }
    num_above += total & 0xffffu;
    num_equal += total >> 16;
    __syncthreads();  // all threads read the sums before any writes the next
  }
  const auto count = static_cast<int32_t>(num_above + min(num_equal, selection.num_equal));
  for (int32_t rank = count + thread; rank < per_draft; rank += kThreads) {
    ids[rank] = -1;
    logits[rank] = negative_infinity();
  }
  if (thread == 0 && !p.is_by_row) p.proposal_rows[index] = proposal_row;
}

}  // namespace
}  // namespace cuda

void select_proposals(CudaContext& ctx, const SelectProposalsParams& p) {
  PACELINE_CHECK(p.proposals.per_draft >= 1 && p.proposals.per_draft <= kMaxDraftProposals,
                 p.proposals.per_draft, " proposals; at most ", kMaxDraftProposals);
  const bool is_vector = p.logits_stride % 4 == 0 && cuda::is_vector_aligned(p.logits);
  cuda::launch(
      ctx, "select_proposals",
      is_vector ? cuda::select_proposals_kernel<true> : cuda::select_proposals_kernel<false>,
      dim3(static_cast<unsigned>(p.max_rows)), dim3(cuda::kThreads), 0, p);
}

}  // namespace paceline
