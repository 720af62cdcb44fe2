// SPDX-License-Identifier: Apache-2.0

// One warp per head of q, k and v, so that one launch handles all of them. Where v is k, two warps
// read the same head, which stays unchanged. A warp reduces its head in a fixed order and depends
// on no other head, so rows are invariant.

#include <cuda_bf16.h>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "ops/ops.h"

namespace paceline {
namespace cuda {
namespace {

// The number of heads that the kernel writes: q in place, k and v to the cache.
__host__ __device__ __forceinline__ int32_t written_heads(const QkNormRopeAppendParams& p) {
  return p.num_qo_heads + (p.kv_inputs == KvInputs::kNone ? 0 : 2 * p.num_kv_heads);
}

constexpr int32_t kWarps = 4;  // per block, one head each
constexpr int32_t kMaxHeadDim = 1024;

// The elements of one half of a head that a lane holds: kPairs consecutive ones when the half is
// 32 * kPairs long (kIsExact), else every 32nd. Element d of the lower half rotates with element d
// of the upper half.
template <int kPairs, bool kIsExact>
struct HalfHead {
  int32_t half;
  int32_t lane;

  // Where value i is in the half.
  __device__ __forceinline__ int32_t at(int i) const {
    return kIsExact ? lane * kPairs + i : lane + 32 * i;
  }

  template <class T>
  __device__ __forceinline__ void load(const T* from, float (&to)[kPairs]) const {
    if constexpr (kIsExact) {
      load_vector(from + lane * kPairs, to);
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int32_t d = at(i);
        to[i] = d < half ? widen(from[d]) : 0.0f;
      }
    }
  }

  template <class T>
  __device__ __forceinline__ void store(const float (&from)[kPairs], T* to) const {
    if constexpr (kIsExact) {
      store_vector(from, to + lane * kPairs);
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int32_t d = at(i);
        if (d < half) narrow(from[i], to + d);
      }
    }
  }
};

// Rotates the first rope_head_dim elements of a head, of which element d and element d +
// rope_head_dim / 2 are a pair. Pairs lie in several lanes and meet in `head`, shared memory of the
// warp.
template <int kPairs, bool kIsExact>
__device__ __forceinline__ void rotate_first(const QkNormRopeAppendParams& p, int32_t position,
                                             const HalfHead<kPairs, kIsExact>& lanes, float* head,
                                             float (&low)[kPairs], float (&high)[kPairs]) {
  const int32_t num_pairs = p.rope_head_dim / 2;
  const float* const cos = p.rope_cos + int64_t{position} * num_pairs;
  const float* const sin = p.rope_sin + int64_t{position} * num_pairs;
  lanes.store(low, head);
  lanes.store(high, head + lanes.half);
  __syncwarp();
  const auto rotate = [&](int32_t d, float& value) {
    if (d >= 2 * num_pairs) return;
    const int32_t pair = d < num_pairs ? d : d - num_pairs;
    const float a = head[pair];
    const float b = head[pair + num_pairs];
    const float c = cos[pair];
    const float s = sin[pair];
    value = d < num_pairs ? a * c - b * s : b * c + a * s;
  };
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if (lanes.at(i) >= lanes.half) break;
    rotate(lanes.at(i), low[i]);
    rotate(lanes.at(i) + lanes.half, high[i]);
  }
}

template <class T, class Kv, int kPairs, bool kIsExact, bool kIsPartial>
__global__ void __launch_bounds__(kWarps * 32)
    qk_norm_rope_append_kernel(const __grid_constant__ QkNormRopeAppendParams p) {
  __shared__ __align__(16) float heads[kIsPartial ? kWarps : 1][kIsPartial ? 64 * kPairs : 1];
  let_successor_start();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t head = static_cast<int32_t>(blockIdx.y * kWarps + threadIdx.x / 32);
  const int32_t num_heads = written_heads(p);
  const int32_t row_heads = qkv_heads(p.num_qo_heads, p.num_kv_heads, p.kv_inputs);
  const int32_t half = kIsExact ? 32 * kPairs : p.head_dim / 2;
  const HalfHead<kPairs, kIsExact> lanes = {half, static_cast<int32_t>(threadIdx.x % 32)};
  const bool is_q = head < p.num_qo_heads;
  const bool is_v = head >= p.num_qo_heads + p.num_kv_heads;
  const float* const weight = is_v || head >= num_heads ? nullptr : is_q ? p.q_norm : p.k_norm;
  // The weights are constants, so they load while the previous kernel still runs.
  float low_weight[kPairs] = {};
  float high_weight[kPairs] = {};
  if (weight != nullptr) {
    lanes.load(weight, low_weight);
    lanes.load(weight + half, high_weight);
  }
  if (!p.reads_early) wait_for_predecessor();
  if (head >= num_heads) return wait_for_predecessor();

  // Loads that depend on no other load, even if the row turns out not to exist. Past L1, which may
  // have what an earlier kernel read.
  const int32_t num_rows = __ldcg(p.num_rows);
  const int32_t position = __ldcg(p.positions + row) + p.position_offset;
  const int64_t slot = p.kv_inputs == KvInputs::kNone ? 0 : __ldcg(p.slot_mapping + row);
  // Skip the null block: no kernel reads it, and rows would race on it.
  if (row >= num_rows || (!is_q && slot < p.kv.block_size)) return wait_for_predecessor();

  float cos[kPairs];
  float sin[kPairs];
  if (!kIsPartial && !is_v) {
    lanes.load(p.rope_cos + int64_t{position} * half, cos);
    lanes.load(p.rope_sin + int64_t{position} * half, sin);
  }
  wait_for_predecessor();
  const int32_t source = is_v && p.kv_inputs == KvInputs::kKeys ? head - p.num_kv_heads : head;
  T* const qkv = static_cast<T*>(p.qkv) + (int64_t{row} * row_heads + source) * (2 * half);
  float low[kPairs];
  float high[kPairs];
  lanes.load(qkv, low);
  lanes.load(qkv + half, high);
  if (is_v ? p.has_v_norm : weight != nullptr) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      squares = fmaf(low[i], low[i], squares);
      squares = fmaf(high[i], high[i], squares);
    }
    const float factor = rsqrtf(warp_sum(squares) / static_cast<float>(2 * half) + p.norm_eps);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      low[i] *= is_v ? factor : factor * (low_weight[i] + p.norm_weight_offset);
      high[i] *= is_v ? factor : factor * (high_weight[i] + p.norm_weight_offset);
    }
  }
  if constexpr (kIsPartial) {
    if (!is_v) rotate_first(p, position, lanes, heads[threadIdx.x / 32], low, high);
  } else if (!is_v) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float a = low[i];
      const float b = high[i];
      low[i] = a * cos[i] - b * sin[i];
      high[i] = b * cos[i] + a * sin[i];
    }
  }
  if (is_q) {
    lanes.store(low, qkv);
    lanes.store(high, qkv + half);
    return;
  }
  const int32_t kv_head = head - p.num_qo_heads - (is_v ? p.num_kv_heads : 0);
  const int64_t block = slot / p.kv.block_size;
  const int64_t offset = slot - block * p.kv.block_size;
  std::byte* const base =
      p.kv.base + block * p.kv.block_bytes + (is_v ? p.kv.v_offset : p.kv.k_offset);
  Kv* const to = reinterpret_cast<Kv*>(base) + (offset * p.num_kv_heads + kv_head) * (2 * half);
  lanes.store(low, to);
  lanes.store(high, to + half);
}

// Whether every half of a head starts at an aligned address in each buffer. True for halves of 32
// elements or more if the buffers and blocks themselves are aligned.
bool is_aligned(const QkNormRopeAppendParams& p) {
  const bool is_row_aligned = is_vector_aligned(p.qkv) && is_vector_aligned(p.q_norm) &&
                              is_vector_aligned(p.k_norm) && is_vector_aligned(p.rope_cos) &&
                              is_vector_aligned(p.rope_sin);
  if (p.kv_inputs == KvInputs::kNone) return is_row_aligned;
  return is_row_aligned && is_vector_aligned(p.kv.base) && p.kv.block_bytes % kVectorBytes == 0 &&
         p.kv.k_offset % kVectorBytes == 0 && p.kv.v_offset % kVectorBytes == 0;
}

template <class T, class Kv, bool kIsPartial>
auto kernel_of(const QkNormRopeAppendParams& p) {
  if (is_aligned(p)) {
    switch (p.head_dim) {
      case 64:
        return qk_norm_rope_append_kernel<T, Kv, 1, true, kIsPartial>;
      case 128:
        return qk_norm_rope_append_kernel<T, Kv, 2, true, kIsPartial>;
      case 256:
        return qk_norm_rope_append_kernel<T, Kv, 4, true, kIsPartial>;
      case 512:
        return qk_norm_rope_append_kernel<T, Kv, 8, true, kIsPartial>;
      default:
        break;
    }
  }
  return p.head_dim <= 256 ? qk_norm_rope_append_kernel<T, Kv, 4, false, kIsPartial>
                           : qk_norm_rope_append_kernel<T, Kv, kMaxHeadDim / 64, false, kIsPartial>;
}

}  // namespace
}  // namespace cuda

void qk_norm_rope_append(CudaContext& ctx, const QkNormRopeAppendParams& p) {
  PACELINE_CHECK(p.head_dim > 0 && p.head_dim % 2 == 0 && p.head_dim <= cuda::kMaxHeadDim,
                 "head_dim ", p.head_dim, " is odd or above ", cuda::kMaxHeadDim);
  PACELINE_CHECK(p.rope_head_dim % 2 == 0 && p.rope_head_dim <= p.head_dim, "rope_head_dim ",
                 p.rope_head_dim, " is odd or above head_dim ", p.head_dim);
  const int32_t num_heads = cuda::written_heads(p);
  const dim3 grid(static_cast<unsigned>(p.max_rows),
                  static_cast<unsigned>((num_heads + cuda::kWarps - 1) / cuda::kWarps));
  cuda::with_element_type(p.qkv_dtype, "qkv", [&](auto element) {
    cuda::with_element_type(p.kv.dtype, "KV cache", [&](auto kv_element) {
      using T = decltype(element);
      using Kv = decltype(kv_element);
      const bool is_partial = p.rope_head_dim > 0 && p.rope_head_dim < p.head_dim;
      cuda::launch(ctx, "qk_norm_rope_append",
                   is_partial ? cuda::kernel_of<T, Kv, true>(p) : cuda::kernel_of<T, Kv, false>(p),
                   grid, dim3(cuda::kWarps * 32), 0, p);
    });
  });
}

}  // namespace paceline
