// SPDX-License-Identifier: Apache-2.0
#pragma once

// Merges the states that blocks of latent_attention_kernel have stored: chunks into segments, and
// segments into the results, in ascending order and by the operations of that kernel.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/latent_kernel.cuh"
#include "attention/latent_shape.cuh"
#include "common/launch.cuh"

namespace paceline::cuda::latent {

inline constexpr int32_t kMergers = 4;  // states or segments merged side by side
inline constexpr int32_t kMergeThreads = kMergers * 128;
inline constexpr int32_t kMergeBatch = 8;  // states whose loads are in flight together

// What a thread merges: four accumulators of two rows, and those rows' maxima and sums.
struct Part {
  float values[4] = {};
  float max[2] = {negative_infinity(), negative_infinity()};
  float sum[2] = {};

  __device__ __forceinline__ void add(const float4& part, const float4& max_sums) {
    const Factors low = merge_factors(max[0], max_sums.x);
    const Factors high = merge_factors(max[1], max_sums.z);
    max[0] = low.max;
    max[1] = high.max;
    sum[0] = merged(sum[0], max_sums.y, low.keep, low.take);
    sum[1] = merged(sum[1], max_sums.w, high.keep, high.take);
    values[0] = merged(values[0], part.x, low.keep, low.take);
    values[1] = merged(values[1], part.y, high.keep, high.take);
    values[2] = merged(values[2], part.z, low.keep, low.take);
    values[3] = merged(values[3], part.w, high.keep, high.take);
  }
};

// Grid: x tiles, y row tiles times groups of `slices` slices of the values.
template <class S>
__global__ void __launch_bounds__(kMergeThreads)
    latent_merge_kernel(const __grid_constant__ PagedAttentionParams p,
                        const __grid_constant__ Plan plan, int32_t slices) {
  __shared__ int32_t row_begin[S::kRows];
  __shared__ int32_t row_end[S::kRows];
  __shared__ int32_t row_index[S::kRows];
  __shared__ int32_t row_head[S::kRows];
  __shared__ float4 values[kMergers][128];
  __shared__ float4 max_sums[kMergers][128];
  const TileRows rows = {.begin = row_begin, .end = row_end, .index = row_index, .head = row_head};
  let_successor_start();
  wait_for_predecessor();
  const auto at = static_cast<int32_t>(blockIdx.x);
  Tile tile;
  if (!find_tile(p, plan, S::kRows, at, &tile)) return;
  const int32_t num_rows = min(*p.num_rows, p.max_rows);
  const TileKeys keys = paged::read_rows<S>(p, tile, num_rows, p.num_qo_heads, rows);
  const Work work = divide(plan, keys.end);
  if (!work.stores_states) return;

  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t merger = thread / 128;
  const int32_t lane = thread % 32;
  const int32_t warp = thread % 128 / 32;
  const int32_t row_tile = static_cast<int32_t>(blockIdx.y) % S::kRowTiles;
  const int32_t first_slice = static_cast<int32_t>(blockIdx.y) / S::kRowTiles * slices;
  const float* const states =
      plan.states + int64_t{at} * plan.capacity * static_cast<int64_t>(S::kStateFloats);
  const int32_t row = 8 * row_tile + 2 * (lane % 4);
  // Pieces of a segment.
  const int32_t of_segment = kSegmentChunks / work.piece_chunks;
  const int32_t num_segments = (work.num_pieces + of_segment - 1) / of_segment;

  for (int32_t slice = first_slice; slice < first_slice + slices; ++slice) {
    const int32_t offset = state_at<S>(slice, row_tile, warp, lane);
    Part result;
    for (int32_t first = 0; first < num_segments; first += kMergers) {
      const int32_t segment = first + merger;
      const int32_t begin = segment * of_segment;
      const int32_t count = min(of_segment, work.num_pieces - begin);
      Part part;
      if (count > 0) {
        const float* const from = states + int64_t{begin} * S::kStateFloats;
        for (int32_t done = 0; done < count; done += kMergeBatch) {
          float4 loaded[kMergeBatch];
          float4 loaded_sums[kMergeBatch];
#pragma unroll
          for (int32_t i = 0; i < kMergeBatch; ++i) {
            // Beyond the last state the last one is loaded again, and dropped below.
            const float* const state = from + int64_t{min(done + i, count - 1)} * S::kStateFloats;
            loaded[i] = __ldcg(reinterpret_cast<const float4*>(state + offset));
            loaded_sums[i] =
                __ldcg(reinterpret_cast<const float4*>(state + S::kStateValues + 2 * row));
          }
#pragma unroll
          for (int32_t i = 0; i < kMergeBatch; ++i) {
            if (done + i < count) part.add(loaded[i], loaded_sums[i]);
          }
        }
      }
      values[merger][thread % 128] =
          make_float4(part.values[0], part.values[1], part.values[2], part.values[3]);
      max_sums[merger][thread % 128] =
          make_float4(part.max[0], part.sum[0], part.max[1], part.sum[1]);
      __syncthreads();
      if (merger == 0) {
        for (int32_t i = 0; i < min(kMergers, num_segments - first); ++i) {
          result.add(values[i][thread], max_sums[i][thread]);
        }
      }
      __syncthreads();
    }
    if (merger != 0) continue;
#pragma unroll
    for (int32_t e = 0; e < 2; ++e) {
      if (rows.index[row + e] < 0) continue;
      const bool is_live = rows.is_live(row + e);
      const float normal = __fdiv_rn(1.0f, result.sum[e]);
      __nv_bfloat16* const y =
          output_of(p, rows, row + e) + slice * kSliceColumns + warp * 16 + lane / 4;
      store_as(y, is_live ? __fmul_rn(result.values[e], normal) : 0.0f);
      store_as(y + 8, is_live ? __fmul_rn(result.values[e + 2], normal) : 0.0f);
    }
  }
}

}  // namespace paceline::cuda::latent
