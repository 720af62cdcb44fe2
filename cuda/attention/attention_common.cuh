// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shared by the attention kernels: the merge of chunks, and a plain kernel with one block per (row,
// query head) for float32.
//
// A row's bits must not depend on which kernel or split computes it, so the merge uses intrinsics
// only: the compiler may contract a * b + c, but never these.

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "ops/ops.h"

namespace paceline::cuda {

inline constexpr int32_t kAttentionThreads = 128;
inline constexpr int32_t kMaxPlainHeadDim = 640;  // of queries and keys
inline constexpr int32_t kMaxPlainValueDim = 512;
inline constexpr float kLog2E = 1.4426950408889634f;

static_assert(kAttentionChunk == kAttentionThreads);

// The number of the thread. The compiler computes what follows from it here, not before a loop
// around, where it would take registers.
__device__ __forceinline__ int32_t thread_here() {
  auto thread = static_cast<int32_t>(threadIdx.x);
  asm volatile("" : "+r"(thread));
  return thread;
}

// Two numbers rounded to bfloat16, the first in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}

// Adds the sums of the rows of a, which is as in mma_16x8x16: a product with ones. sums[0] and
// sums[1] are of row lane / 4, sums[2] and sums[3] of row lane / 4 + 8.
__device__ __forceinline__ void add_row_sums(float (&sums)[4], const uint32_t (&a)[4]) {
  constexpr uint32_t kOnes = 0x3F803F80u;
  mma_16x8x16(sums, a, kOnes, kOnes);
}

// With what weight_of multiplies a product of query and key. soft_cap: 0 for none.
__device__ __forceinline__ float weight_scale(float scale, float soft_cap) {
  return __fmul_rn(soft_cap > 0.0f ? soft_cap : scale, kLog2E);
}

// A score with a cap is soft_cap tanh(product scale / soft_cap). The tanh takes the place of the
// product, as 1 - 2 / (1 + e^2x).
__device__ __forceinline__ float capped_product(float product, float scale, float soft_cap) {
  const float twice = __fmul_rn(__fdiv_rn(scale, soft_cap), 2.0f * kLog2E);
  const float power = exp2_approx(__fmul_rn(product, twice));
  return __fmaf_rn(-2.0f, reciprocal_approx(__fadd_rn(power, 1.0f)), 1.0f);
}

// The weight of a key before it is rounded to bfloat16: 2^(product scale - max), with the maximum
// of the scaled products.
__device__ __forceinline__ float weight_of(float product, float scale, float max) {
  return exp2_approx(__fmaf_rn(product, scale, -max));
}

// The factors that merge one more chunk into a running state. Maxima are of scores times log2(e).
// Callers skip chunks in which the row sees no key: only skipping leaves the state unchanged
// exactly.
struct MergeWeights {
  float max;
  float keep;  // factor of the running sum and accumulator
  float take;  // factor of the chunk's sum and accumulator
};

__device__ __forceinline__ MergeWeights merge_weights(float running_max, float chunk_max) {
  const float max = fmaxf(running_max, chunk_max);
  return {.max = max,
          .keep = exp2_approx(__fsub_rn(running_max, max)),
          .take = exp2_approx(__fsub_rn(chunk_max, max))};
}

// Merges the sum or one element of the accumulator.
__device__ __forceinline__ float merge_value(float running, float chunk, const MergeWeights& w) {
  return __fmaf_rn(chunk, w.take, __fmul_rn(running, w.keep));
}

// The factor of the accumulator of a row that sees a key. `sink` is the head's extra logit, or
// null.
__device__ __forceinline__ float final_factor(float max, float sum, const float* sink) {
  float factor = 1.0f;
  if (sink != nullptr) {
    const float scaled_sink = __fmul_rn(*sink, kLog2E);
    const float new_max = fmaxf(max, scaled_sink);
    factor = exp2_approx(__fsub_rn(max, new_max));
    sum = __fmaf_rn(sum, factor, exp2_approx(__fsub_rn(scaled_sink, new_max)));
  }
  return __fdiv_rn(factor, sum);
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void store_as(float* to, float x) { *to = x; }
__device__ __forceinline__ void store_as(__nv_bfloat16* to, float x) {
  *to = __float2bfloat16_rn(x);
}

// The plain kernel's arguments besides the locations of the keys.
struct PlainAttention {
  const int32_t* num_rows;
  int32_t max_rows;
  const void* qkv;
  KvLayerView kv;
  float scale;
  float soft_cap;
  const float* sinks;
  void* y;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t value_dim;
  int32_t row_heads;  // of qkv
};

// Visible keys of a row of PagedAttentionParams and their locations in the cache.
struct PagedKeys {
  const int32_t* seq_slot;
  const int32_t* kv_begin;
  const int32_t* kv_end;
  const int32_t* block_table;
  int64_t block_table_stride;

  __device__ int32_t begin(int32_t row) const {
    return kv_begin == nullptr ? 0 : max(kv_begin[row], 0);
  }
  __device__ int32_t end(int32_t row) const { return seq_slot[row] < 0 ? 0 : kv_end[row]; }
  __device__ int64_t block(int32_t row, int32_t key, int32_t block_size) const {
    return block_table[seq_slot[row] * block_table_stride + key / block_size];
  }
  __device__ int32_t offset(int32_t, int32_t key, int32_t block_size) const {
    return key % block_size;
  }
};

// One block per (row, query head): thread i scores key i of the chunk, then thread d takes columns
// d, d + 128, ... of the values. Meant for tests: correct and simple, not fast.
template <class T, class Kv, class Keys>
__global__ void __launch_bounds__(kAttentionThreads)
    plain_attention_kernel(const __grid_constant__ PlainAttention a,
                           const __grid_constant__ Keys keys) {
  constexpr int32_t kColumns = kMaxPlainValueDim / kAttentionThreads;
  __shared__ float q[kMaxPlainHeadDim];
  __shared__ float weights[kAttentionChunk];
  __shared__ const Kv* values[kAttentionChunk];
  __shared__ float warp_results[kAttentionThreads / 32];
  let_successor_start();
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t head = static_cast<int32_t>(blockIdx.y);
  if (row >= min(*a.num_rows, a.max_rows)) return;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  T* const y = static_cast<T*>(a.y) + (int64_t{row} * a.num_qo_heads + head) * a.value_dim;
  const int32_t begin = keys.begin(row);
  const int32_t end = keys.end(row);
  if (end <= begin) {
    for (int32_t d = thread; d < a.value_dim; d += kAttentionThreads) store_as(y + d, 0.0f);
    return;
  }
  const T* const row_q =
      static_cast<const T*>(a.qkv) + (int64_t{row} * a.row_heads + head) * a.head_dim;
  for (int32_t d = thread; d < a.head_dim; d += kAttentionThreads) q[d] = to_float(row_q[d]);
  const int32_t kv_head = head / (a.num_qo_heads / a.num_kv_heads);

  float running_max = negative_infinity();
  float running_sum = 0.0f;
  float running[kColumns] = {};
  for (int32_t chunk = begin / kAttentionChunk * kAttentionChunk; chunk < end;
       chunk += kAttentionChunk) {
    __syncthreads();  // q is written; all threads are done with the last chunk's weights and
                      // pointers
    const int32_t key = chunk + thread;
    const bool is_visible = key >= begin && key < end;
    float score = negative_infinity();
    if (is_visible) {
      const int64_t block = keys.block(row, key, a.kv.block_size);
      const int64_t offset = keys.offset(row, key, a.kv.block_size);
      const int64_t at = (offset * a.num_kv_heads + kv_head) * a.head_dim;
      const std::byte* const base = a.kv.base + block * a.kv.block_bytes;
      const Kv* const k = reinterpret_cast<const Kv*>(base + a.kv.k_offset) + at;
      values[thread] = reinterpret_cast<const Kv*>(base + a.kv.v_offset) + at;
      score = 0.0f;
      for (int32_t d = 0; d < a.head_dim; ++d) score = __fmaf_rn(q[d], to_float(k[d]), score);
      score = __fmul_rn(score, a.scale);
      if (a.soft_cap > 0.0f) score = __fmul_rn(a.soft_cap, tanhf(__fdiv_rn(score, a.soft_cap)));
      score = __fmul_rn(score, kLog2E);
    }
    float chunk_max = score;
    for (int32_t step = 1; step < 32; step *= 2) {
      chunk_max = fmaxf(chunk_max, __shfl_xor_sync(~0u, chunk_max, step));
    }
    if (thread % 32 == 0) warp_results[thread / 32] = chunk_max;
    __syncthreads();
    chunk_max =
        fmaxf(fmaxf(warp_results[0], warp_results[1]), fmaxf(warp_results[2], warp_results[3]));
    const float weight = is_visible ? exp2f(__fsub_rn(score, chunk_max)) : 0.0f;
    weights[thread] = weight;
    float chunk_sum = weight;
    for (int32_t step = 1; step < 32; step *= 2) {
      chunk_sum = __fadd_rn(chunk_sum, __shfl_xor_sync(~0u, chunk_sum, step));
    }
    __syncthreads();  // the maxima have been read
    if (thread % 32 == 0) warp_results[thread / 32] = chunk_sum;
    __syncthreads();
    chunk_sum = __fadd_rn(__fadd_rn(__fadd_rn(warp_results[0], warp_results[1]), warp_results[2]),
                          warp_results[3]);
    const MergeWeights merge = merge_weights(running_max, chunk_max);
    const int32_t first = max(begin - chunk, 0);
    const int32_t last = min(end - chunk, kAttentionChunk);
    for (int32_t i = 0; i < kColumns; ++i) {
      const int32_t d = thread + i * kAttentionThreads;
      if (d >= a.value_dim) break;
      float sum = 0.0f;
      for (int32_t j = first; j < last; ++j) {
        sum = __fmaf_rn(weights[j], to_float(values[j][d]), sum);
      }
      running[i] = merge_value(running[i], sum, merge);
    }
    running_sum = merge_value(running_sum, chunk_sum, merge);
    running_max = merge.max;
  }
  const float factor =
      final_factor(running_max, running_sum, a.sinks == nullptr ? nullptr : a.sinks + head);
  for (int32_t i = 0; i < kColumns; ++i) {
    const int32_t d = thread + i * kAttentionThreads;
    if (d < a.value_dim) store_as(y + d, __fmul_rn(running[i], factor));
  }
}

// Checks the arguments of both ops; throws InternalError.
template <class Params>
void check_attention_params(const Params& p) {
  PACELINE_CHECK(p.max_rows >= 0, "max_rows ", p.max_rows, " is negative");
  PACELINE_CHECK(p.num_kv_heads > 0 && p.num_qo_heads > 0 && p.num_qo_heads % p.num_kv_heads == 0,
                 "num_qo_heads ", p.num_qo_heads, " is not a multiple of num_kv_heads ",
                 p.num_kv_heads);
  PACELINE_CHECK(p.kv.block_size > 0, "block_size ", p.kv.block_size, " is not positive");
  PACELINE_CHECK(p.head_dim > 0, "head_dim ", p.head_dim, " is not positive");
  // Maxima are found before scores are scaled.
  PACELINE_CHECK(p.scale > 0.0f, "scale ", p.scale, " is not positive");
}

// Throws Unsupported for head sizes and dtypes that the plain kernel does not support.
template <class Keys, class Params>
void run_plain_attention(CudaContext& ctx, const char* name, const Params& p, int32_t value_dim,
                         float soft_cap, const float* sinks, const Keys& keys) {
  if (p.head_dim > kMaxPlainHeadDim || value_dim > kMaxPlainValueDim) {
    throw Unsupported(concat(name, ": keys of ", p.head_dim, " and values of ", value_dim,
                             " elements on a GPU; they can have 1 to ", kMaxPlainHeadDim,
                             " and 1 to ", kMaxPlainValueDim));
  }
  const PlainAttention a = {.num_rows = p.num_rows,
                            .max_rows = p.max_rows,
                            .qkv = p.qkv,
                            .kv = p.kv,
                            .scale = p.scale,
                            .soft_cap = soft_cap,
                            .sinks = sinks,
                            .y = p.y,
                            .num_qo_heads = p.num_qo_heads,
                            .num_kv_heads = p.num_kv_heads,
                            .head_dim = p.head_dim,
                            .value_dim = value_dim,
                            .row_heads = qkv_heads(p.num_qo_heads, p.num_kv_heads, p.kv_inputs)};
  const auto run = [&](void (*kernel)(PlainAttention, Keys)) {
    launch(ctx, name, kernel, dim3(p.max_rows, p.num_qo_heads), dim3(kAttentionThreads), 0, a,
           keys);
  };
  if (p.dtype == DType::kFloat32 && p.kv.dtype == DType::kFloat32) {
    run(plain_attention_kernel<float, float, Keys>);
  } else if (p.dtype == DType::kFloat32 && p.kv.dtype == DType::kBFloat16) {
    run(plain_attention_kernel<float, __nv_bfloat16, Keys>);
  } else if (p.dtype == DType::kBFloat16 && p.kv.dtype == DType::kBFloat16) {
    run(plain_attention_kernel<__nv_bfloat16, __nv_bfloat16, Keys>);
  } else {
    throw Unsupported(concat(name, ": ", dtype_name(p.dtype), " with a KV cache of ",
                             dtype_name(p.kv.dtype),
                             " on a GPU; it can be bfloat16 with bfloat16, or float32 with float32 "
                             "or bfloat16"));
  }
}

}  // namespace paceline::cuda
