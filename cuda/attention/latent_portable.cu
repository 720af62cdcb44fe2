// SPDX-License-Identifier: Apache-2.0

// Latent attention in bfloat16 for entries of 512 + 64 elements, on every GPU since sm_80: the sums
// of latent_kernel.cuh by mma.sync, so that the bits are equal. A block takes 16 packed rows (row
// of the sequence x head) and has a chunk of 64 entries in shared memory, which serve as keys and
// as values:
//   1. S^T = E Q^T: a warp scores 16 entries for eight rows
//   2. maxima and weights of all rows; P goes to shared memory
//   3. O^T = V^T P^T: a warp has a slice of 64 columns of the values, of all rows
// The state of a segment, and the total of the segments, stay in registers. Contexts are split over
// blocks, and states merged, as in latent_merge.cuh.

#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "attention/latent_launch.h"
#include "attention/latent_merge.cuh"
#include "attention/latent_shape.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"

namespace paceline::cuda::latent {
namespace {

constexpr int32_t kPortableThreads = kAdders;
constexpr int32_t kUnits = kWidth / 8;  // of 16 bytes

struct PortableShape {
  static constexpr int32_t kRows = 16;
  static constexpr int32_t kRowTiles = kRows / 8;
  static constexpr int32_t kStateValues = kRows * kRank;
  static constexpr int32_t kStateFloats = kStateValues + 2 * kRows;
  // Dynamic shared memory: entries, queries, weights.
  static constexpr int32_t kQOffset = kChunk * kWidth * 2;
  static constexpr int32_t kPOffset = kQOffset + kRows * kWidth * 2;
  static constexpr int32_t kSharedBytes = kPOffset + kRows * kChunk * 2;
};
using S = PortableShape;
// A warp scores 16 entries for a tile of rows, and has one slice of the values.
static_assert(kPortableThreads / 32 == kChunk / 16 * S::kRowTiles);
static_assert(kPortableThreads / 32 == kValueSlices);

struct PortableArrays {
  alignas(16) float warp_max[S::kRows][4];
  // As in latent_chunk.cuh: subtracted from scores, factor of the chunk. Behind a segment: factors
  // of the total and of the segment.
  alignas(16) float2 weights[S::kRows];
  alignas(16) float keep[S::kRows];  // factor of the segment's accumulators
  alignas(16) float sums[S::kRows];  // of the segment; at last, of the result
  const std::byte* addresses[kChunk];
  Work work;
};

// Four accumulators for each 16 columns of the warp's slice and tile of rows, as state_at says.
using Accumulators = float[4][S::kRowTiles][4];

struct Chunked {
  const PagedAttentionParams& p;
  const TileRows& rows;
  int32_t seq_slot;
  int32_t end;  // no row sees an entry from here on
  float scale;
  uint32_t memory;  // address of the dynamic shared memory
};

// Copies a chunk's entries, zeros for those that no row sees.
__device__ __forceinline__ void load_entries(const Chunked& of, int32_t chunk,
                                             PortableArrays& shared) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const PagedAttentionParams& p = of.p;
  if (thread < kChunk) {
    const int32_t key = chunk * kChunk + thread;
    const std::byte* address = nullptr;
    if (key < of.end) {
      const int64_t block =
          p.block_table[of.seq_slot * p.block_table_stride + key / p.kv.block_size];
      address = p.kv.base + p.kv.k_offset + block * p.kv.block_bytes +
                int64_t{key % p.kv.block_size} * (kWidth * 2);
    }
    shared.addresses[thread] = address;
  }
  __syncthreads();
#pragma unroll 6
  for (int32_t i = thread; i < kChunk * kUnits; i += kPortableThreads) {
    const int32_t entry = i / kUnits;
    const int32_t unit = i % kUnits;
    const std::byte* const from = shared.addresses[entry];
    cp_async_16(of.memory + paged::swizzled(entry, unit, kUnits),
                from != nullptr ? from + unit * 16 : p.kv.base, from != nullptr);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
}

__device__ __forceinline__ void load_queries(const Chunked& of) {
  const auto* const q = static_cast<const __nv_bfloat16*>(of.p.qkv);
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < S::kRows * kUnits;
       i += kPortableThreads) {
    const int32_t packed = i / kUnits;
    const int32_t unit = i % kUnits;
    const bool is_live = of.rows.is_live(packed);
    const int64_t row = int64_t{of.rows.index[packed]} * of.p.num_qo_heads + of.rows.head[packed];
    cp_async_16(of.memory + S::kQOffset + paged::swizzled(packed, unit, kUnits),
                is_live ? q + row * kWidth + unit * 8 : q, is_live);
  }
  cp_async_commit();
}

// The scores of the warp's entries for its rows, -inf where a row does not see an entry.
__device__ __forceinline__ void score(const Chunked& of, int32_t chunk, int32_t warp, int32_t lane,
                                      float (&s)[4]) {
  const int32_t first = warp % 4 * 16;  // entry of the chunk
  const int32_t row = warp / 4 * 8;
#pragma unroll 6
  for (int32_t k = 0; k < kUnits; k += 4) {
    uint32_t b[4];
    ldmatrix_x4(b, of.memory + S::kQOffset + paged::swizzled(row + lane % 8, k + lane / 8, kUnits));
#pragma unroll
    for (int32_t step = 0; step < 2; ++step) {
      uint32_t a[4];
      ldmatrix_x4(a,
                  of.memory + paged::swizzled(first + lane % 16, k + 2 * step + lane / 16, kUnits));
      mma_16x8x16(s, a, b[2 * step], b[2 * step + 1]);
    }
  }
  const int32_t key = chunk * kChunk + first + lane / 4;
#pragma unroll
  for (int32_t e = 0; e < 4; ++e) {
    if (key + e / 2 * 8 >= of.rows.end[row + lane % 4 * 2 + e % 2]) s[e] = negative_infinity();
  }
}

// Makes the chunk's weights, adds them to the sums, and writes their factors.
__device__ __forceinline__ void weigh(const Chunked& of, const float (&s)[4], int32_t warp,
                                      int32_t lane, float& segment_max, std::byte* memory,
                                      PortableArrays& shared) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t row = warp / 4 * 8 + lane % 4 * 2;  // and the next one
  float highest[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
#pragma unroll
  for (int32_t step = 4; step < 32; step *= 2) {
#pragma unroll
    for (float& value : highest) value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, step));
  }
  if (lane < 4) {
    shared.warp_max[row][warp % 4] = highest[0];
    shared.warp_max[row + 1][warp % 4] = highest[1];
  }
  __syncthreads();
  if (thread < S::kRows) {
    const float* const of_warps = shared.warp_max[thread];
    const float score = fmaxf(fmaxf(of_warps[0], of_warps[1]), fmaxf(of_warps[2], of_warps[3]));
    const float max = ceilf(__fmul_rn(score, of.scale));
    const Factors factors = merge_factors(segment_max, max);
    segment_max = factors.max;
    // A row that sees no entry of the chunk has scores of -inf, and -inf - -inf would be NaN.
    shared.weights[thread] = make_float2(max == negative_infinity() ? 0.0f : max, factors.take);
    shared.keep[thread] = factors.keep;
  }
  __syncthreads();
#pragma unroll
  for (int32_t e = 0; e < 4; ++e) {
    const float2 of_row = shared.weights[row + e % 2];
    const float exponent = __fmaf_rn(s[e], of.scale, -of_row.x);
    const float weight = exponent < kLeastPower ? 0.0f : exp2_approx(exponent);
    const int32_t entry = warp % 4 * 16 + lane / 4 + e / 2 * 8;
    store_as(reinterpret_cast<__nv_bfloat16*>(memory + S::kPOffset +
                                              paged::swizzled(row + e % 2, entry / 8, kChunk / 8)) +
                 entry % 8,
             __fmul_rn(weight, of_row.y));
  }
  __syncthreads();
}

// The columns of P^T of a tile of rows, as operands of the products with four times 16 entries.
__device__ __forceinline__ void load_weights(uint32_t memory, int32_t row_tile, int32_t lane,
                                             uint32_t (&b)[2][4]) {
#pragma unroll
  for (int32_t half = 0; half < 2; ++half) {
    ldmatrix_x4(b[half],
                memory + S::kPOffset +
                    paged::swizzled(8 * row_tile + lane % 8, 4 * half + lane / 8, kChunk / 8));
  }
}

// Adds the chunk to the sums and to the warp's columns of the segment.
__device__ __forceinline__ void add_values(const Chunked& of, int32_t warp, int32_t lane,
                                           PortableArrays& shared, Accumulators& state) {
  constexpr uint32_t kOnes[4] = {0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0x3F803F80u};
  const int32_t of_lane = lane % 4 * 2;
#pragma unroll
  for (int32_t row_tile = 0; row_tile < S::kRowTiles; ++row_tile) {
    uint32_t b[2][4];
    load_weights(of.memory, row_tile, lane, b);
    const int32_t row = 8 * row_tile + of_lane;
    const float keep[2] = {shared.keep[row], shared.keep[row + 1]};
    if (warp == row_tile) {
      float sums[4] = {};
#pragma unroll
      for (int32_t k = 0; k < 4; ++k) {
        mma_16x8x16(sums, kOnes, b[k / 2][k % 2 * 2], b[k / 2][k % 2 * 2 + 1]);
      }
      if (lane < 4) {
        shared.sums[row] = merged(shared.sums[row], sums[0], keep[0], 1.0f);
        shared.sums[row + 1] = merged(shared.sums[row + 1], sums[1], keep[1], 1.0f);
      }
    }
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      float fresh[4] = {};
#pragma unroll
      for (int32_t k = 0; k < 4; ++k) {
        uint32_t a[4];
        ldmatrix_x4_transposed(
            a, of.memory + paged::swizzled(16 * k + lane / 16 * 8 + lane % 8,
                                           8 * warp + 2 * i + lane / 8 % 2, kUnits));
        mma_16x8x16(fresh, a, b[k / 2][k % 2 * 2], b[k / 2][k % 2 * 2 + 1]);
      }
#pragma unroll
      for (int32_t e = 0; e < 4; ++e) {
        float& value = state[i][row_tile][e];
        value = __fadd_rn(__fmul_rn(value, keep[e % 2]), fresh[e]);
      }
    }
  }
}

// Merges the segment into the total of those before it.
__device__ __forceinline__ void add_to_total(bool is_first, int32_t lane, float max,
                                             float& total_max, float& total_sum,
                                             PortableArrays& shared, const Accumulators& state,
                                             Accumulators& total) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread < S::kRows) {
    const Factors factors = merge_factors(total_max, max);
    total_max = factors.max;
    total_sum =
        merged(is_first ? 0.0f : total_sum, shared.sums[thread], factors.keep, factors.take);
    shared.weights[thread] = make_float2(factors.keep, factors.take);
  }
  __syncthreads();
#pragma unroll
  for (int32_t row_tile = 0; row_tile < S::kRowTiles; ++row_tile) {
    const int32_t row = 8 * row_tile + lane % 4 * 2;
    const float2 factors[2] = {shared.weights[row], shared.weights[row + 1]};
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
#pragma unroll
      for (int32_t e = 0; e < 4; ++e) {
        float& value = total[i][row_tile][e];
        value = merged(is_first ? 0.0f : value, state[i][row_tile][e], factors[e % 2].x,
                       factors[e % 2].y);
      }
    }
  }
  __syncthreads();
}

// Grid: tiles, splits of the context.
__global__ void __launch_bounds__(kPortableThreads)
    latent_portable_kernel(const __grid_constant__ PagedAttentionParams p,
                           const __grid_constant__ Plan plan) {
  extern __shared__ __align__(1024) std::byte storage[];
  __shared__ PortableArrays shared;
  __shared__ int32_t row_begin[S::kRows];
  __shared__ int32_t row_end[S::kRows];
  __shared__ int32_t row_index[S::kRows];
  __shared__ int32_t row_head[S::kRows];
  const TileRows rows = {.begin = row_begin, .end = row_end, .index = row_index, .head = row_head};
  let_successor_start();
  wait_for_predecessor();
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const int32_t warp = thread / 32;
  const auto tile_index = static_cast<int32_t>(blockIdx.x);
  const auto split = static_cast<int32_t>(blockIdx.y);
  Tile tile;
  if (!find_tile(p, plan, S::kRows, tile_index, &tile)) return;
  const TileKeys keys =
      paged::read_rows<S>(p, tile, min(*p.num_rows, p.max_rows), p.num_qo_heads, rows);
  if (thread == 0) {
    shared.work = divide(plan, keys.end);
    if (shared.work.stores_states && split < shared.work.num_splits) {
      count_begun(plan.counters + tile_index);
    }
  }
  __syncthreads();
  const Work& work = shared.work;
  if (split >= work.num_splits) return;
  if (work.num_chunks == 0) {
    // No row sees anything.
    for (int32_t i = thread; i < S::kRows * (kRank / 8); i += kPortableThreads) {
      const int32_t packed = i / (kRank / 8);
      if (rows.index[packed] < 0) continue;
      reinterpret_cast<uint4*>(output_of(p, rows, packed))[i % (kRank / 8)] =
          make_uint4(0, 0, 0, 0);
    }
    return;
  }
  const Chunked of = {.p = p,
                      .rows = rows,
                      .seq_slot = keys.seq_slot,
                      .end = keys.end,
                      .scale = __fmul_rn(p.scale, kLog2E),
                      .memory = shared_address(storage)};
  load_queries(of);
  float total_max = negative_infinity();  // of a thread's row, as the two that follow
  float total_sum = 0.0f;
  Accumulators state;
  Accumulators total = {};
  for (int32_t piece = split; piece < work.num_pieces; piece += work.num_splits) {
    float max = negative_infinity();
    if (thread < S::kRows) shared.sums[thread] = 0.0f;
#pragma unroll
    for (auto& of_columns : state) {
#pragma unroll
      for (auto& values : of_columns) {
#pragma unroll
        for (float& value : values) value = 0.0f;
      }
    }
    const int32_t end = work.end_chunk(piece);
#pragma unroll 1
    for (int32_t chunk = work.first_chunk(piece); chunk < end; ++chunk) {
      load_entries(of, chunk, shared);
      float s[4] = {};
      score(of, chunk, warp, lane, s);
      weigh(of, s, warp, lane, max, storage, shared);
      add_values(of, warp, lane, shared, state);
      __syncthreads();  // entries, weights and factors have been read
    }
    if (work.stores_states) {
      float* const to =
          plan.states + (int64_t{tile_index} * plan.capacity + piece) * S::kStateFloats;
#pragma unroll
      for (int32_t row_tile = 0; row_tile < S::kRowTiles; ++row_tile) {
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) {
          const float (&v)[4] = state[i][row_tile];
          *reinterpret_cast<float4*>(to + state_at<S>(warp, row_tile, i, lane)) =
              make_float4(v[0], v[1], v[2], v[3]);
        }
      }
      if (thread < S::kRows) {
        to[S::kStateValues + 2 * thread] = max;
        to[S::kStateValues + 2 * thread + 1] = shared.sums[thread];
      }
    } else if (work.num_pieces > 1) {
      add_to_total(piece == 0, lane, max, total_max, total_sum, shared, state, total);
    }
  }
  if (work.stores_states) {
    __threadfence();
    __syncthreads();
    const Position at = {.group = thread / 128,
                         .thread = thread % 128,
                         .warp = thread % 128 / 32,
                         .lane = lane,
                         .quad_row = lane / 4,
                         .quad_lane = lane % 4};
    merge_states<S>(p, plan, work, tile_index, rows, at, reinterpret_cast<float4*>(storage));
    return;
  }
  const bool has_total = work.num_pieces > 1;
  if (has_total && thread < S::kRows) shared.sums[thread] = total_sum;
  __syncthreads();
#pragma unroll
  for (int32_t row_tile = 0; row_tile < S::kRowTiles; ++row_tile) {
#pragma unroll
    for (int32_t odd = 0; odd < 2; ++odd) {
      const int32_t packed = 8 * row_tile + lane % 4 * 2 + odd;
      if (rows.index[packed] < 0) continue;
      const bool is_live = rows.is_live(packed);
      const float normal = __fdiv_rn(1.0f, shared.sums[packed]);
      __nv_bfloat16* const y = output_of(p, rows, packed) + warp * kSliceColumns + lane / 4;
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
#pragma unroll
        for (int32_t half = 0; half < 2; ++half) {
          const int32_t e = 2 * half + odd;
          const float value = has_total ? total[i][row_tile][e] : state[i][row_tile][e];
          store_as(y + 16 * i + 8 * half, is_live ? __fmul_rn(value, normal) : 0.0f);
        }
      }
    }
  }
}

}  // namespace

void run_portable(CudaContext& ctx, const char* name, const PagedAttentionParams& p) {
  static OncePerDevice allow;
  allow([] {
    allow_shared_bytes(latent_portable_kernel, S::kSharedBytes, "latent_attention_kernel");
  });
  const paged::Tiles of_launch(p, S::kRows);
  const int64_t tiles = of_launch.count;
  if (tiles == 0) return;
  const int64_t max_chunks =
      std::max<int64_t>((int64_t{ctx.max_model_len} + kChunk - 1) / kChunk, 1);
  constexpr int32_t kBlockBytes = S::kSharedBytes + 4096;  // with static arrays
  const int64_t blocks_at_once =
      int64_t{std::max(ctx.sm_shared_bytes / kBlockBytes, 1)} * ctx.num_sms;
  const int64_t splits = tiles > ctx.num_counters
                             ? 1
                             : std::clamp<int64_t>(blocks_at_once / tiles, 1,
                                                   std::min<int64_t>(max_chunks, kMaxSplits));
  constexpr int64_t kStateBytes = S::kStateFloats * int64_t{sizeof(float)};
  const Plan plan = {.num_tiles = static_cast<int32_t>(tiles),
                     .tiles_per_seq = static_cast<int32_t>(of_launch.per_seq),
                     .splits = static_cast<int32_t>(splits),
                     .capacity = static_cast<int32_t>(
                         std::min(ctx.workspace_bytes / (tiles * kStateBytes), max_chunks)),
                     .states = reinterpret_cast<float*>(ctx.workspace),
                     .totals = nullptr,
                     .counters = reinterpret_cast<uint32_t*>(ctx.counters)};
  launch(ctx, name, latent_portable_kernel,
         dim3(static_cast<uint32_t>(tiles), static_cast<uint32_t>(splits)), dim3(kPortableThreads),
         S::kSharedBytes, p, plan);
}

}  // namespace paceline::cuda::latent
