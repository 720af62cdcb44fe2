// SPDX-License-Identifier: Apache-2.0
#pragma once

// Softmax attention over a paged KV cache in bfloat16. One block (128 threads) takes a tile of
// packed rows (row of the sequence, query head of the group) against one KV head, so that a key is
// loaded once for all of them, and walks chunks of 128 keys aligned at absolute positions:
//   1. S = Q K^T: warp w scores keys [32 w, 32 w + 32) of the chunk for all rows of the tile
//   2. row maxima and sums: in each warp, then over the four warps in order through shared memory
//   3. O = P V: warp w takes a quarter of the columns, over all 128 keys
//   4. (max, sum, O) of the chunk is merged into the running state, in ascending order
// K and V come through a ring of slices (128 keys x up to 128 columns) filled by cp.async.
//
// Why a row's bits depend on its query and visible keys alone:
// - A key's place in the fragments of an MMA comes from its absolute position, and each output row
//   of an MMA comes from its own row of A. The order over k is ascending everywhere.
// - Keys that a row does not see weigh exactly 0, and a chunk in which it sees none is left out.
// - With split KV each chunk's state goes to the workspace, and the last blocks to arrive merge
//   them in the same order by the same functions (attention_common.cuh) as in registers.
//
// That merge reads as many bytes as the tile has live rows times chunks, which would keep a single
// SM busy for as long as the rest of the kernel takes. Hence the splits of a tile form clusters:
// the last cluster to arrive merges, and its blocks share out the rows.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "attention/attention_common.cuh"
#include "attention/paged_attention_loader.cuh"
#include "attention/paged_attention_merge.cuh"
#include "attention/paged_attention_rows.cuh"
#include "attention/paged_attention_shape.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "ops/ops.h"

namespace paceline::cuda::paged {

template <int kHeadDim, int kMTiles>
__global__ void __launch_bounds__(kThreads, (Shape<kHeadDim, kMTiles>::kMinBlocks))
    paged_attention_kernel(const __grid_constant__ PagedAttentionParams p,
                           const __grid_constant__ Plan plan) {
  using S = Shape<kHeadDim, kMTiles>;
  extern __shared__ __align__(1024) std::byte shared[];
  __shared__ int32_t row_begin[S::kRows];  // visible keys; both 0: inert
  __shared__ int32_t row_end[S::kRows];
  __shared__ int32_t row_index[S::kRows];  // row of the batch, -1: there is none
  __shared__ int32_t row_head[S::kRows];   // query head in the group
  __shared__ float warp_max[kWarps][S::kRows];
  __shared__ float warp_sum[kWarps][S::kRows];
  __shared__ int32_t is_last;

  let_successor_start();
  wait_for_predecessor();

  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const int32_t warp = thread / 32;
  const int32_t kv_head = static_cast<int32_t>(blockIdx.y);
  const int32_t heads_per_group = p.num_qo_heads / p.num_kv_heads;

  // ---- Which rows. Every warp works it out for itself, which saves waiting for one another. Loads
  // that do not depend on each other come before the branches on them: the way from here to the
  // first key is a chain of latencies.
  const int32_t num_rows = min(*p.num_rows, p.max_rows);
  Tile tile;
  if (p.row_indptr == nullptr) {
    tile = {.first_row = static_cast<int32_t>(blockIdx.x), .num_rows = 1, .index = 0};
    if (plan.tiles_per_seq > 1) {
      tile.first_row = static_cast<int32_t>(blockIdx.x) / plan.tiles_per_seq;
      tile.index = static_cast<int32_t>(blockIdx.x) % plan.tiles_per_seq;
    }
    if (tile.first_row >= num_rows) return;
  } else {
    const int32_t num_seqs = min(*p.num_seqs, p.max_seqs);
    if (plan.tiles_per_seq == 1) {
      const int32_t seq = static_cast<int32_t>(blockIdx.x);  // below max_seqs
      const int32_t first_row = p.row_indptr[seq];
      const int32_t end_row = p.row_indptr[seq + 1];
      if (seq >= num_seqs) return;
      tile = {.first_row = first_row, .num_rows = end_row - first_row, .index = 0};
    } else {
      // Later tiles of a prompt see more keys; they go first, so that nobody waits long for them.
      const int32_t at = static_cast<int32_t>(gridDim.x - 1 - blockIdx.x);
      if (!find_tile(p.row_indptr, num_seqs, heads_per_group, S::kRows, at, &tile)) return;
    }
  }
  const int32_t first_packed = tile.index * S::kRows;
  if (first_packed >= tile.num_rows * heads_per_group) return;

  int32_t tile_begin = kIntMax;  // over the live rows: first visible key of any,
  int32_t tile_end = 0;          // one past the last of any,
  int32_t common_begin = 0;      // and the keys that all of them see
  int32_t common_end = kIntMax;
  int32_t slot = -1;
#pragma unroll
  for (int32_t packed = lane; packed < S::kRows; packed += 32) {
    const int32_t row_of_seq = (first_packed + packed) / heads_per_group;
    const int32_t row = tile.first_row + row_of_seq;
    const bool exists = row_of_seq < tile.num_rows && row < num_rows;
    int32_t begin = 0;
    int32_t end = 0;
    if (exists) {
      const int32_t slot_of_row = p.seq_slot[row];
      end = p.kv_end[row];
      if (p.kv_begin != nullptr) begin = max(p.kv_begin[row], 0);
      if (slot_of_row < 0 || begin >= end) {
        begin = 0;
        end = 0;
      } else {
        slot = slot_of_row;
        tile_begin = min(tile_begin, begin);
        tile_end = max(tile_end, end);
        common_begin = max(common_begin, begin);
        common_end = min(common_end, end);
      }
    }
    if (warp == 0) {
      row_begin[packed] = begin;
      row_end[packed] = end;
      row_index[packed] = exists ? row : -1;
      row_head[packed] = (first_packed + packed) - row_of_seq * heads_per_group;
    }
  }
  __syncwarp();
  tile_begin = __reduce_min_sync(kFullWarp, tile_begin);
  tile_end = __reduce_max_sync(kFullWarp, tile_end);
  common_begin = __reduce_max_sync(kFullWarp, common_begin);
  common_end = __reduce_min_sync(kFullWarp, common_end);
  slot = __reduce_max_sync(kFullWarp, slot);
  __syncthreads();

  auto* const y_base = static_cast<__nv_bfloat16*>(p.y);
  // Where a packed row's result goes.
  const auto y_of = [&](int32_t packed) {
    const int64_t head = int64_t{kv_head} * heads_per_group + row_head[packed];
    return y_base + (int64_t{row_index[packed]} * p.num_qo_heads + head) * kHeadDim;
  };
  // Rows that exist but see nothing become zero.
  const auto zero_inert_rows = [&] {
    for (int32_t at = thread; at < S::kRows * (kHeadDim / 8); at += kThreads) {
      const int32_t packed = at / (kHeadDim / 8);
      if (row_index[packed] < 0 || row_end[packed] > 0) continue;
      reinterpret_cast<uint4*>(y_of(packed))[at % (kHeadDim / 8)] = make_uint4(0, 0, 0, 0);
    }
  };

  // ---- Which chunks.
  const bool is_live = tile_begin < tile_end;
  const int32_t first_chunk = is_live ? tile_begin / kChunk : 0;
  const int32_t end_chunk = is_live ? (tile_end - 1) / kChunk + 1 : 0;
  const int32_t num_chunks = end_chunk - first_chunk;
  const int32_t split = static_cast<int32_t>(blockIdx.z);
  int32_t num_splits = 1;
  if (gridDim.z > 1 && num_chunks <= plan.chunk_capacity) {
    num_splits = max(min(static_cast<int32_t>(gridDim.z), num_chunks), 1);
  }
  // Blocks of a cluster leave together, or else stay for its barriers even without a chunk.
  const int32_t cluster_rank = split % plan.cluster_blocks;
  if (num_splits == 1 ? split > 0 : split - cluster_rank >= num_splits) return;
  if (split == 0) zero_inert_rows();
  if (!is_live) return;

  // ---- Q, zeros where there is no live row.
  const uint32_t ring = shared_address(shared);
  const uint32_t q_shared = ring + S::kStages * S::kSliceBytes;
  const uint32_t p_shared = q_shared + S::kQBytes;
  {
    const auto* const qkv = static_cast<const __nv_bfloat16*>(p.qkv);
    const int64_t row_stride =
        int64_t{qkv_heads(p.num_qo_heads, p.num_kv_heads, p.kv_inputs)} * kHeadDim;
    constexpr int32_t kUnits = kHeadDim / 8;
#pragma unroll
    for (int32_t i = 0; i < S::kRows * kUnits / kThreads; ++i) {
      const int32_t at = thread + i * kThreads;
      const int32_t packed = at / kUnits;
      const int32_t unit = at % kUnits;
      const bool is_live_row = row_end[packed] > 0;
      const int64_t head = int64_t{kv_head} * heads_per_group + row_head[packed];
      const int64_t from = row_index[packed] * row_stride + head * kHeadDim + unit * 8;
      cp_async_16(q_shared + swizzled(packed, unit, kUnits), is_live_row ? qkv + from : qkv,
                  is_live_row);
    }
  }

  // ---- The ring. Items are the K slices, then the V slices of each chunk; item i is in group i.
  SliceLoader<S::kSliceUnits> loader(p, p.block_table + slot * p.block_table_stride, tile_begin,
                                     tile_end);
  int32_t load_chunk = first_chunk + split;
  int32_t load_item = 0;
  uint32_t load_slot = 0;
  loader.look_up(load_chunk);
  const auto load_next = [&] {
    if (load_chunk < end_chunk) {
      if (load_item == 0) {
        loader.enter();
        loader.look_up(load_chunk + num_splits);
      }
      const bool is_value = load_item >= S::kSlices;
      const int32_t slice = is_value ? load_item - S::kSlices : load_item;
      loader.copy(ring + load_slot * S::kSliceBytes,
                  (is_value ? p.kv.v_offset : p.kv.k_offset) + slice * (S::kSlice * 2));
      if (++load_item == 2 * S::kSlices) {
        load_item = 0;
        load_chunk += num_splits;
      }
      if (++load_slot == S::kStages) load_slot = 0;
    }
    cp_async_commit();  // an empty group at the end keeps the count right
  };
#pragma unroll
  for (int32_t i = 0; i < S::kStages - 1; ++i) load_next();
  uint32_t slot_to_use = 0;
  // Waits for the next item. Past the barrier nobody reads the item before it any more, so that
  // its slot can be filled again.
  const auto next_item = [&]() -> uint32_t {
    cp_async_wait<S::kStages - 2>();
    __syncthreads();
    load_next();
    const uint32_t at = ring + slot_to_use * S::kSliceBytes;
    if (++slot_to_use == S::kStages) slot_to_use = 0;
    return at;
  };

  // ---- What this thread holds: rows g and g + 8 of every MMA tile of rows.
  const int32_t quad_row = lane / 4;
  const int32_t quad_lane = lane % 4;
  float running_max[kMTiles][2];
  float running_sum[kMTiles][2];
  float running[S::kSlices][kMTiles][S::kWarpColumnTiles][4];
#pragma unroll
  for (int32_t m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      running_max[m][half] = negative_infinity();
      running_sum[m][half] = 0.0f;
    }
#pragma unroll
    for (int32_t slice = 0; slice < S::kSlices; ++slice) {
#pragma unroll
      for (int32_t n = 0; n < S::kWarpColumnTiles; ++n) {
#pragma unroll
        for (int32_t e = 0; e < 4; ++e) running[slice][m][n][e] = 0.0f;
      }
    }
  }
  const int64_t chunk_floats = partial_floats(plan.partial_rows, kHeadDim);
  const int64_t tile_at = int64_t{blockIdx.x} * gridDim.y + blockIdx.y;
  // With splits: this tile's chunks, each the accumulators of all rows, then (max, sum) of each.
  float* const partials = plan.partials + tile_at * plan.chunk_capacity * chunk_floats;
  const float scale = p.soft_cap > 0.0f ? p.scale : __fmul_rn(p.scale, kLog2E);

  for (int32_t chunk = first_chunk + split; chunk < end_chunk; chunk += num_splits) {
    // ---- S = Q K^T.
    float s[kMTiles][kKeyTiles][4] = {};
#pragma unroll
    for (int32_t slice = 0; slice < S::kSlices; ++slice) {
      const uint32_t keys = next_item();
#pragma unroll
      for (int32_t k = 0; k < S::kSlice / 16; ++k) {
        uint32_t b[kKeyTiles / 2][4];
#pragma unroll
        for (int32_t n = 0; n < kKeyTiles / 2; ++n) {
          const int32_t key = warp * kWarpKeys + n * 16 + lane % 8 + lane / 16 * 8;
          ldmatrix_x4(b[n], keys + swizzled(key, 2 * k + lane / 8 % 2, S::kSliceUnits));
        }
#pragma unroll
        for (int32_t m = 0; m < kMTiles; ++m) {
          uint32_t a[4];
          ldmatrix_x4(
              a, q_shared + swizzled(m * 16 + lane % 16, slice * S::kSliceUnits + 2 * k + lane / 16,
                                     kHeadDim / 8));
#pragma unroll
          for (int32_t n = 0; n < kKeyTiles; ++n) {
            mma_16x8x16(s[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
          }
        }
      }
    }

    // ---- Scores times log2(e), -inf where the row does not see the key.
    const int32_t chunk_key = chunk * kChunk;
    const bool is_full = chunk_key >= common_begin && chunk_key + kChunk <= common_end;
    const int32_t first_key = chunk_key + warp * kWarpKeys + 2 * quad_lane;  // of this thread's
    // Whether the row sees any key of the chunk.
    const auto sees_chunk = [&](int32_t packed) {
      return row_begin[packed] < chunk_key + kChunk && row_end[packed] > chunk_key;
    };
#pragma unroll
    for (int32_t m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int32_t n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int32_t e = 0; e < 4; ++e) s[m][n][e] = __fmul_rn(s[m][n][e], scale);
      }
    }
    if (p.soft_cap > 0.0f) {
#pragma unroll
      for (int32_t m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int32_t n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int32_t e = 0; e < 4; ++e) {
            const float capped = __fmul_rn(p.soft_cap, tanhf(__fdiv_rn(s[m][n][e], p.soft_cap)));
            s[m][n][e] = __fmul_rn(capped, kLog2E);
          }
        }
      }
    }
    if (!is_full) {
#pragma unroll
      for (int32_t m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int32_t half = 0; half < 2; ++half) {
          const int32_t packed = m * 16 + half * 8 + quad_row;
          const int32_t begin = row_begin[packed] - first_key;
          const int32_t end = row_end[packed] - first_key;
#pragma unroll
          for (int32_t n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int32_t e = 0; e < 2; ++e) {
              const int32_t key = n * 8 + e;
              if (key < begin || key >= end) s[m][n][2 * half + e] = negative_infinity();
            }
          }
        }
      }
    }

    // ---- Maxima over the warp's keys, then over the chunk.
#pragma unroll
    for (int32_t m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        float highest = negative_infinity();
#pragma unroll
        for (int32_t n = 0; n < kKeyTiles; ++n) {
          highest = fmaxf(highest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        }
        highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 2));
        if (quad_lane == 0) warp_max[warp][m * 16 + half * 8 + quad_row] = highest;
      }
    }
    __syncthreads();

    // ---- P = 2^(S - max), rounded to bfloat16; the sums are of the rounded values, which are what
    // the values are weighed with. Order: ascending in the thread, the quad, the warps.
    float chunk_max[kMTiles][2];
#pragma unroll
    for (int32_t m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t packed = m * 16 + half * 8 + quad_row;
        const float max = fmaxf(fmaxf(warp_max[0][packed], warp_max[1][packed]),
                                fmaxf(warp_max[2][packed], warp_max[3][packed]));
        chunk_max[m][half] = max;
        // A row that sees nothing here has max -inf, and -inf - -inf is not what is wanted.
        const float subtract = is_full || sees_chunk(packed) ? max : 0.0f;
        float sum = 0.0f;
#pragma unroll
        for (int32_t n = 0; n < kKeyTiles; ++n) {
          const float p0 = exp2_approx(__fsub_rn(s[m][n][2 * half], subtract));
          const float p1 = exp2_approx(__fsub_rn(s[m][n][2 * half + 1], subtract));
          const __nv_bfloat162 pair = __floats2bfloat162_rn(p0, p1);
          sum = __fadd_rn(sum, __low2float(pair));
          sum = __fadd_rn(sum, __high2float(pair));
          const uint32_t at = S::kStages * S::kSliceBytes + S::kQBytes +
                              swizzled(packed, warp * (kWarpKeys / 8) + n, kChunk / 8) +
                              quad_lane * 4;
          *reinterpret_cast<__nv_bfloat162*>(shared + at) = pair;
        }
        sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, 2));
        if (quad_lane == 0) warp_sum[warp][packed] = sum;
      }
    }

    // ---- O = P V, slice by slice, and the merge.
    float* const partial = partials + (chunk - first_chunk) * chunk_floats;
    MergeWeights merge[kMTiles][2];
#pragma unroll
    for (int32_t slice = 0; slice < S::kSlices; ++slice) {
      const uint32_t values = next_item();  // its barrier also publishes P and the sums
      if (slice == 0) {
#pragma unroll
        for (int32_t m = 0; m < kMTiles; ++m) {
#pragma unroll
          for (int32_t half = 0; half < 2; ++half) {
            const int32_t packed = m * 16 + half * 8 + quad_row;
            const float sum = __fadd_rn(
                __fadd_rn(__fadd_rn(warp_sum[0][packed], warp_sum[1][packed]), warp_sum[2][packed]),
                warp_sum[3][packed]);
            if (num_splits > 1) {
              if (warp == 0 && quad_lane == 0 && row_end[packed] > 0) {
                reinterpret_cast<float2*>(partial + plan.partial_rows * kHeadDim)[packed] =
                    make_float2(chunk_max[m][half], sum);
              }
            } else {
              merge[m][half] = merge_weights(running_max[m][half], chunk_max[m][half]);
              if (is_full || sees_chunk(packed)) {
                running_max[m][half] = merge[m][half].max;
                running_sum[m][half] = merge_value(running_sum[m][half], sum, merge[m][half]);
              }
            }
          }
        }
      }
      float o[kMTiles][S::kWarpColumnTiles][4] = {};
#pragma unroll
      for (int32_t k = 0; k < kChunk / 16; ++k) {
        uint32_t b[S::kWarpColumnTiles / 2][4];
#pragma unroll
        for (int32_t n = 0; n < S::kWarpColumnTiles / 2; ++n) {
          const int32_t unit = warp * S::kWarpColumnTiles + 2 * n + lane / 16;
          ldmatrix_x4_transposed(b[n], values + swizzled(k * 16 + lane % 16, unit, S::kSliceUnits));
        }
#pragma unroll
        for (int32_t m = 0; m < kMTiles; ++m) {
          uint32_t a[4];
          ldmatrix_x4(a, p_shared + swizzled(m * 16 + lane % 16, 2 * k + lane / 16, kChunk / 8));
#pragma unroll
          for (int32_t n = 0; n < S::kWarpColumnTiles; ++n) {
            mma_16x8x16(o[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
          }
        }
      }
#pragma unroll
      for (int32_t m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int32_t half = 0; half < 2; ++half) {
          const int32_t packed = m * 16 + half * 8 + quad_row;
          if (num_splits > 1) {
            if (row_end[packed] == 0) continue;
            float* const to = partial + packed * kHeadDim + slice * S::kSlice +
                              warp * (S::kSlice / kWarps) + quad_lane * 2;
#pragma unroll
            for (int32_t n = 0; n < S::kWarpColumnTiles; ++n) {
              *reinterpret_cast<float2*>(to + n * 8) =
                  make_float2(o[m][n][2 * half], o[m][n][2 * half + 1]);
            }
          } else if (is_full || sees_chunk(packed)) {
#pragma unroll
            for (int32_t n = 0; n < S::kWarpColumnTiles; ++n) {
#pragma unroll
              for (int32_t e = 2 * half; e < 2 * half + 2; ++e) {
                running[slice][m][n][e] =
                    merge_value(running[slice][m][n][e], o[m][n][e], merge[m][half]);
              }
            }
          }
        }
      }
    }
  }

  const float* const sinks =
      p.sinks == nullptr ? nullptr : p.sinks + int64_t{kv_head} * heads_per_group;
  if (num_splits == 1) {
#pragma unroll
    for (int32_t m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t packed = m * 16 + half * 8 + quad_row;
        if (row_end[packed] == 0) continue;
        const float factor = final_factor(running_max[m][half], running_sum[m][half],
                                          sinks == nullptr ? nullptr : sinks + row_head[packed]);
        __nv_bfloat16* const to = y_of(packed) + warp * (S::kSlice / kWarps) + quad_lane * 2;
#pragma unroll
        for (int32_t slice = 0; slice < S::kSlices; ++slice) {
#pragma unroll
          for (int32_t n = 0; n < S::kWarpColumnTiles; ++n) {
            const float y0 = __fmul_rn(running[slice][m][n][2 * half], factor);
            const float y1 = __fmul_rn(running[slice][m][n][2 * half + 1], factor);
            *reinterpret_cast<__nv_bfloat162*>(to + slice * S::kSlice + n * 8) =
                __floats2bfloat162_rn(y0, y1);
          }
        }
      }
    }
    return;
  }

  // ---- The last cluster of the tile to arrive merges all chunks.
  __threadfence();
  cluster_barrier();
  if (cluster_rank == 0 && thread == 0) {
    const int32_t num_clusters = (num_splits - 1) / plan.cluster_blocks + 1;
    bool is_last_cluster = true;
    if (num_clusters > 1) {
      int32_t* const counter = plan.counters + tile_at;
      __threadfence();
      is_last_cluster = atomicAdd(counter, 1) == num_clusters - 1;
      if (is_last_cluster) *counter = 0;
      __threadfence();
    }
    for (int32_t rank = 0; rank < plan.cluster_blocks; ++rank) {
      store_to_cluster(&is_last, rank, is_last_cluster ? 1 : 0);
    }
  }
  cluster_barrier();
  if (is_last == 0) return;
  constexpr int32_t kRowThreads = kHeadDim / 4;
  constexpr int32_t kRowsAtOnce = kThreads / kRowThreads;
  const int32_t column = thread % kRowThreads * 4;
  // Neighbouring rows go to different blocks, so that few rows still occupy all of them.
  for (int32_t packed = thread / kRowThreads * plan.cluster_blocks + cluster_rank;
       packed < plan.partial_rows; packed += kRowsAtOnce * plan.cluster_blocks) {
    if (row_end[packed] == 0) continue;
    const int32_t row_first_chunk = row_begin[packed] / kChunk;
    const int32_t row_chunks = (row_end[packed] - 1) / kChunk + 1 - row_first_chunk;
    const float* const first = partials + (row_first_chunk - first_chunk) * chunk_floats;
    merge_partials(first + packed * kHeadDim + column,
                   first + plan.partial_rows * kHeadDim + packed * 2, chunk_floats, row_chunks,
                   sinks == nullptr ? nullptr : sinks + row_head[packed], y_of(packed) + column);
  }
}
}  // namespace paceline::cuda::paged
