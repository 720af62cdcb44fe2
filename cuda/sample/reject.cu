// SPDX-License-Identifier: Apache-2.0

// softmax_sums: one block per row makes two passes, for the highest logit and for the sum of the
// weights, which are integers, so that the order of the sum does not matter.
//
// reject_drafts: one warp per sequence; its lanes share the proposals of a draft. The rules are in
// rejection_window.h, which the CPU shares, including the order of the sums.

#include "base/check.h"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "sample/reject.h"
#include "sample/rejection_window.h"
#include "sample/truncate_rules.h"
#include "wire/limits.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kSumsThreads = 512;
constexpr int32_t kSumsWarps = kSumsThreads / 32;

// Calls visit(logit) for every logit of the row, made comparable().
template <bool kIsVector, class Visit>
__device__ __forceinline__ void for_logits(const float* logits, int32_t n, const Visit& visit) {
  for (int32_t first = static_cast<int32_t>(threadIdx.x) * 4; first < n;
       first += kSumsThreads * 4) {
    float values[4];
    if (kIsVector && first + 4 <= n) {
      load_vector(logits + first, values);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = first + i < n ? logits[first + i] : negative_infinity();
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) visit(comparable(values[i]));
  }
}

template <bool kIsVector>
__global__ void __launch_bounds__(kSumsThreads)
    softmax_sums_kernel(const __grid_constant__ SoftmaxSumsParams p) {
  __shared__ uint32_t highest_of_warp[kSumsWarps];
  __shared__ uint64_t sum_of_warp[kSumsWarps];
  let_successor_start();
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  if (row >= *p.num_rows) return;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t seq_slot = p.seq_slot[p.row_index[row]];
  const float temperature = seq_slot < 0 ? 0.0f : p.temperatures[seq_slot];
  float highest = negative_infinity();
  if (temperature > 0.0f) {
    const float* const logits = p.logits + row * p.logits_stride;
    for_logits<kIsVector>(logits, p.vocab_limit,
                          [&](float logit) { highest = fmaxf(highest, logit); });
    const uint32_t of_warp = __reduce_max_sync(kAllLanes, to_ordered(highest));
    if (lane == 0) highest_of_warp[warp] = of_warp;
    __syncthreads();
    uint32_t of_row = 0;
    for (int32_t i = 0; i < kSumsWarps; ++i) of_row = max(of_row, highest_of_warp[i]);
    highest = from_ordered(of_row);
  }
  const bool has_distribution = highest > negative_infinity() && highest < -negative_infinity();
  if (!has_distribution) {  // the same for all threads
    if (threadIdx.x == 0) {
      p.highest[row] = negative_infinity();
      p.sums[row] = 0;
    }
    return;
  }
  const SoftmaxWeights weights = softmax_weights_of(highest, temperature);
  uint64_t sum = 0;
  for_logits<kIsVector>(p.logits + row * p.logits_stride, p.vocab_limit,
                        [&](float logit) { sum += weight_of(weights, logit); });
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (lane == 0) sum_of_warp[warp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  uint64_t of_row = 0;
  for (int32_t i = 0; i < kSumsWarps; ++i) of_row += sum_of_warp[i];
  p.highest[row] = highest;
  p.sums[row] = of_row;
}

// The lanes of a warp. All of them must call every function.
struct WarpTeam {
  int32_t lane;

  template <class Of>
  [[nodiscard]] __device__ float max(int32_t n, const Of& of) const {
    float highest = negative_infinity();
    for (int32_t j = lane; j < n; j += 32) highest = fmaxf(highest, of(j));
    return from_ordered(__reduce_max_sync(kAllLanes, to_ordered(highest)));
  }
  template <class Of>
  [[nodiscard]] __device__ uint64_t count(int32_t n, const Of& of) const {
    uint64_t sum = 0;
    for (int32_t j = lane; j < n; j += 32) sum += of(j);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    return sum;
  }
  template <class Of>
  [[nodiscard]] __device__ double sum(int32_t n, const Of& of) const {
    double sum = 0.0;
    for (int32_t j = lane; j < n; j += 32) sum += of(j);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    return sum;
  }
  template <class Do>
  __device__ void for_each(int32_t n, const Do& visit) const {
    for (int32_t j = lane; j < n; j += 32) visit(j);
  }
  [[nodiscard]] __device__ bool is_leader() const { return lane == 0; }
};

__global__ void __launch_bounds__(32)
    reject_drafts_kernel(const __grid_constant__ RejectDraftsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t i = static_cast<int32_t>(blockIdx.x);
  if (i >= p.inputs.counts->num_seqs) return;
  reject_sequence(p, i, WarpTeam{static_cast<int32_t>(threadIdx.x)});
}

}  // namespace
}  // namespace cuda

void softmax_sums(CudaContext& ctx, const SoftmaxSumsParams& p) {
  PACELINE_CHECK(p.vocab_limit <= kMaxTruncatedVocab, p.vocab_limit, " ids; at most ",
                 kMaxTruncatedVocab);
  const bool is_vector = p.logits_stride % 4 == 0 && cuda::is_vector_aligned(p.logits);
  cuda::launch(ctx, "softmax_sums",
               is_vector ? cuda::softmax_sums_kernel<true> : cuda::softmax_sums_kernel<false>,
               dim3(static_cast<unsigned>(p.max_rows)), dim3(cuda::kSumsThreads), 0, p);
}

void reject_drafts(CudaContext& ctx, const RejectDraftsParams& p) {
  cuda::launch(ctx, "reject_drafts", cuda::reject_drafts_kernel,
               dim3(static_cast<unsigned>(p.max_seqs)), dim3(32), 0, p);
}

}  // namespace paceline
