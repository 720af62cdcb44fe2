// SPDX-License-Identifier: Apache-2.0
#pragma once

// The kernel of gated_delta for bfloat16, heads of 128 elements, four taps and blocks of whole
// chunks: the chunked form of the rule (Yang et al., Gated Delta Networks, 2024), on tensor cores.
//
// A chunk has 16 positions, from a multiple of 16 on. With S the state before it, G_t the product
// of the decays of its rows up to t, and G_tj that of the rows after j up to t, the rule is
//
//   d   = (I + M)^-1 b    b_t = beta_t (v_t - G_t S^T k_t),  M_tj = beta_t G_tj (k_t k_j) for j < t
//   o_t = G_t S^T q_t + sum over j <= t of W_tj d_j,         W_tj = G_tj (q_t k_j)
//   S'  = G_15 S + sum over j of G_15,j k_j d_j^T
//
// So a row depends on S and on the rows of its chunk up to it. Those before it are in the pass or
// are replayed, all of them and in the same places of the same products. Hence its bits are the
// same in every pass. Later rows meet factors of zero, and rows that the pass does not have are
// zero.
//
// A chunk of a value head passes four steps:
//   make     a warp convolves q, k and v of some rows, and normalises q and k
//   relate   one warp makes (I + M)^-1, one W, and two arrange k by keys
//   consume  a warp has 16 columns of S in registers, as the accumulators of products of 16 columns
//            and 8 keys. These are operands of the next products as they are, since the keys' order
//            in a sum is free: the tile (m, c) of S has in its column 2 t + e the key
//            32 m + 8 t + 2 c + e.
//   finish   the gated norm
// For windows a block has a value head of a sequence. All its warps take each step in turn, for all
// chunks; two blocks share a multiprocessor. For prompts a cluster of two blocks has it: one makes
// chunks and sends them to the other one, four of whose warps relate the rows of a chunk while
// eight consume and finish the chunk before it. Without clusters a block takes all steps of two
// chunks at a time.
//
// Factors of products are cut to TF32; S and all sums are float32. The kernel reads records and
// entries of positions before the sequence's first row only, and writes those of its rows. So no
// block reads what another one writes.

#include <cstdint>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/ordering.cuh"
#include "common/reduce.cuh"
#include "gemm/wgmma.cuh"
#include "ops/recurrent.h"
#include "recurrent/chunk_relate.cuh"
#include "recurrent/chunk_rows.cuh"
#include "recurrent/pass_rows.cuh"

namespace paceline::cuda {
namespace {

// A block that takes all steps.
struct WindowVariant {
  static constexpr bool kIsCluster = false;
  static constexpr bool kIsLoop = false;
  static constexpr int32_t kNumWarps = kChunkWarps;
  static constexpr int32_t kBlocks = 1;
  static constexpr int32_t kPlaces = 2;  // chunks in shared memory: all there are
  static constexpr int32_t kMinBlocks = 2;
};
// A block that takes all steps of some chunks, then of the next ones.
struct LoopVariant {
  static constexpr bool kIsCluster = false;
  static constexpr bool kIsLoop = true;
  static constexpr int32_t kNumWarps = kChunkWarps;
  static constexpr int32_t kBlocks = 1;
  static constexpr int32_t kPlaces = 2;
  static constexpr int32_t kMinBlocks = 1;  // few devices without clusters have room for two
};
// Block 0 of a cluster relates and consumes what block 1 makes.
struct PromptVariant {
  static constexpr bool kIsCluster = true;
  static constexpr bool kIsLoop = false;
  static constexpr int32_t kNumWarps = kChunkWarps + kRelaters;
  static constexpr int32_t kBlocks = 2;
  static constexpr int32_t kPlaces = 3;
  static constexpr int32_t kMinBlocks = 1;
};

// Shared memory of a block. The mbarriers are those of a cluster.
template <class V>
struct ChunkShared {
  Chunk chunks[V::kPlaces];
  RowRange range;
  uint64_t are_made[V::kPlaces];     // in block 0: the bytes of a chunk
  uint64_t are_related[V::kPlaces];  // in block 0
  uint64_t are_free[V::kPlaces];     // in block 1: consumed by block 0
};
// What is sent of a row: q, k, v, the gate, b and a.
constexpr uint32_t kSentBytes = sizeof(float) * (4 * kHeadDim + 2);

// --- consume -------------------------------------------------------------------------------------

// Two adjacent tiles of eight rows by this warp's columns: i % 2 of a lane's row 2 t, i / 2 * 8 of
// its column g.
using RowTiles = float[2][4];

__device__ __forceinline__ Tf32Operand operand_of(const float (&tile)[4]) {
  return {before_tf32_cut(tile[0]), before_tf32_cut(tile[2]), before_tf32_cut(tile[1]),
          before_tf32_cut(tile[3])};
}

// Where a lane is in the products of its warp.
struct LanePlace {
  int32_t g;
  int32_t t;
  int32_t column;  // of S, the first of two

  __device__ __forceinline__ LanePlace(int32_t warp, int32_t lane)
      : g(lane / 4), t(lane % 4), column(warp * kWarpColumns + g) {}
};

// 16 columns of S: s[m][c][2 * h + e] is the key 32 m + 8 t + 2 c + e of column g + 8 h.
struct WarpState {
  float s[kHeadDim / 32][4][4] = {};

  __device__ __forceinline__ void load(const ChunkRowsOf& rows, int32_t value_head, int64_t block,
                                       const LanePlace& at) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* const from = rows.entry_at(block, value_head, at.column + 8 * h) + 8 * at.t;
#pragma unroll
      for (int m = 0; m < kHeadDim / 32; ++m) {
#pragma unroll
        for (int c = 0; c < 4; c += 2) {
          float keys[4];
          load_vector(from + 32 * m + 2 * c, keys);
#pragma unroll
          for (int i = 0; i < 4; ++i) s[m][c + i / 2][2 * h + i % 2] = keys[i];
        }
      }
    }
  }
  __device__ __forceinline__ void store(const ChunkRowsOf& rows, int32_t value_head, int64_t block,
                                        const LanePlace& at) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float* const to = rows.entry_at(block, value_head, at.column + 8 * h) + 8 * at.t;
#pragma unroll
      for (int m = 0; m < kHeadDim / 32; ++m) {
#pragma unroll
        for (int c = 0; c < 4; c += 2) {
          store_global_16(to + 32 * m + 2 * c, s[m][c][2 * h], s[m][c][2 * h + 1],
                          s[m][c + 1][2 * h], s[m][c + 1][2 * h + 1]);
        }
      }
    }
  }

  // The products with k and with q of all rows.
  __device__ __forceinline__ void read(const Chunk& chunk, const LanePlace& at, RowTiles& with_k,
                                       RowTiles& with_q) const {
#pragma unroll
    for (int m = 0; m < kHeadDim / 32; ++m) {
#pragma unroll
      for (int c = 0; c < 4; c += 2) {
        float k[2][4];
        float q[2][4];
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const int32_t key = 32 * m + 8 * at.t + 2 * c;
          load_vector(chunk.k[8 * tile + at.g] + key, k[tile]);
          load_vector(chunk.q[8 * tile + at.g] + key, q[tile]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const Tf32Operand a = operand_of(s[m][c + i]);
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
            mma_16x8x8(a, k[tile][2 * i], k[tile][2 * i + 1], with_k[tile]);
            mma_16x8x8(a, q[tile][2 * i], q[tile][2 * i + 1], with_q[tile]);
          }
        }
      }
    }
  }

  // The state after the chunk.
  __device__ __forceinline__ void advance(const Chunk& chunk, const LanePlace& at,
                                          const RowTiles& corrections) {
    float to_end[4];
    load_vector(chunk.to_end + 4 * at.t, to_end);
    Tf32Operand a[2];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      float scaled[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scaled[i] = __fmul_rn(corrections[tile][i], to_end[2 * tile + i % 2]);
      }
      a[tile] = operand_of(scaled);
    }
    const float decay = chunk.from_start[place_of(kChunkRows - 1)];
    // Key 32 m + 2 c + first_key: its key_place depends on c / 2 alone.
    const int32_t first_key = 8 * (at.g / 2) + at.g % 2;
    const float* keys[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      keys[half] = chunk.keys[first_key] + key_place(first_key + 4 * half, at.t);
    }
#pragma unroll
    for (int m = 0; m < kHeadDim / 32; ++m) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float k[4];
        load_vector(keys[c / 2] + (32 * m + 2 * c) * kChunkRows, k);
#pragma unroll
        for (float& value : s[m][c]) value = __fmul_rn(value, decay);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          mma_16x8x8(a[tile], k[2 * tile], k[2 * tile + 1], s[m][c]);
        }
      }
    }
  }
};

// The products of the rows' factors (place_of) with `rows`, added to `to`.
__device__ __forceinline__ void mix_rows(const float (&factors)[kChunkRows][kChunkRows],
                                         const Tf32Operand (&rows)[2], const LanePlace& at,
                                         RowTiles& to) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    float of_row[4];
    load_vector(factors[8 * tile + at.g] + 4 * at.t, of_row);
    mma_16x8x8(rows[0], of_row[0], of_row[1], to[tile]);
    mma_16x8x8(rows[1], of_row[2], of_row[3], to[tile]);
  }
}

// From the products with S: the corrections d of the chunk's rows, and their outputs, in the place
// of v.
__device__ __forceinline__ void correct(Chunk& chunk, const LanePlace& at, const RowTiles& reads,
                                        RowTiles& outputs, RowTiles& corrections) {
  float from_start[4];
  float beta[4];
  load_vector(chunk.from_start + 4 * at.t, from_start);
  load_vector(chunk.beta + 4 * at.t, beta);
  Tf32Operand rows[2];
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    float wanted[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int of_lane = 2 * tile + i % 2;
      const float v = chunk.v[8 * tile + 2 * at.t + i % 2][at.column + i / 2 * 8];
      wanted[i] = __fmul_rn(beta[of_lane], __fmaf_rn(-from_start[of_lane], reads[tile][i], v));
      outputs[tile][i] = __fmul_rn(from_start[of_lane], outputs[tile][i]);
    }
    rows[tile] = operand_of(wanted);
  }
  mix_rows(chunk.inverse, rows, at, corrections);
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) rows[tile] = operand_of(corrections[tile]);
  mix_rows(chunk.weights, rows, at, outputs);
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      chunk.v[8 * tile + 2 * at.t + i % 2][at.column + i / 2 * 8] = outputs[tile][i];
    }
  }
}

// --- finish --------------------------------------------------------------------------------------

// The gated norm of kWarpRows rows, by a warp.
__device__ __forceinline__ void finish_rows(const ChunkRowsOf& rows, int32_t value_head,
                                            int32_t position, int32_t lane, const Chunk& chunk) {
  const GatedDeltaParams& p = rows.p;
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    if (position + r < rows.start || position + r >= rows.end()) continue;
    const int32_t row = position % kChunkRows + r;
    float x[4];
    float gate[4];
    load_vector(chunk.v[row] + 4 * lane, x);
    load_vector(chunk.gates[row] + 4 * lane, gate);
    const float mean = __fmul_rn(product_of(x, x), 1.0f / kHeadDim);  // exact, a power of two
    const float factor = rsqrtf(__fadd_rn(mean, p.norm_eps));
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __fmul_rn(__fmul_rn(x[i], factor), gate[i]);
    store_vector(
        x,
        static_cast<__nv_bfloat16*>(p.y) +
            (int64_t{rows.row_at(position + r)} * p.shape.num_value_heads + value_head) * kHeadDim +
            4 * lane);
  }
}

// --- the kernel ----------------------------------------------------------------------------------

// The outputs of chunk `index`, and the state after it if something needs it. By kChunkWarps warps.
__device__ __forceinline__ void consume_and_finish(const ChunkRowsOf& rows, int32_t value_head,
                                                   int32_t index, int32_t warp, int32_t lane,
                                                   Chunk& chunk, WarpState& state) {
  const LanePlace at(warp, lane);
  const int32_t first = rows.first + index * kChunkRows;
  RowTiles reads = {};
  RowTiles outputs = {};
  state.read(chunk, at, reads, outputs);
  RowTiles corrections = {};
  correct(chunk, at, reads, outputs, corrections);
  const int32_t entry = chunk.entry;
  __syncwarp();  // so that the compiler does not mix the steps, which takes registers
  if (entry > 0 || first + kChunkRows < rows.end()) state.advance(chunk, at, corrections);
  if (entry > 0) state.store(rows, value_head, entry, at);
  sync_some_threads<1, 32 * kChunkWarps>();
  if (first + warp * kWarpRows < rows.end()) {
    finish_rows(rows, value_head, first + warp * kWarpRows, lane, chunk);
  }
}

// Grid: blocks of a cluster, value heads, sequences.
template <class V>
__global__ void __launch_bounds__(32 * V::kNumWarps, V::kMinBlocks)
    chunk_kernel(const __grid_constant__ GatedDeltaParams p) {
  extern __shared__ __align__(16) std::byte shared[];
  auto& own = *reinterpret_cast<ChunkShared<V>*>(shared);
  let_successor_start();
  wait_for_predecessor();
  const auto rank = static_cast<int32_t>(blockIdx.x);
  const auto value_head = static_cast<int32_t>(blockIdx.y);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  // Tells the compiler that a warp has one number, so that it does not provide for divergence.
  const int32_t warp = __shfl_sync(kAllLanes, thread / 32, 0);
  const int32_t lane = thread % 32;
  RowRange range;
  // Blocks of a cluster have the same sequence, and leave together.
  if (!find_rows<V::kNumWarps, __nv_bfloat16>(p, static_cast<int32_t>(blockIdx.z), value_head, rank,
                                              V::kBlocks, range)) {
    return;
  }
  if (thread == 0) own.range = range;  // for consumers, whose registers have no room for it
  const ChunkRowsOf rows(range, p);
  const HeadChannels channels(p.shape, value_head, lane);
  const HeadRates rates = {p.a_log[value_head], p.dt_bias[value_head]};
  const int32_t num_chunks = (rows.end() - rows.first + kChunkRows - 1) / kChunkRows;
  const int32_t entry = rows.first > 0 ? rows.first_entry() : 0;
  if (rows.first > 0 && rank == 0) {
    constexpr int32_t kLine = 32;  // floats
    const float* const from = rows.entry_at(entry, value_head, 0);
    for (int32_t i = thread; i < kHeadDim * kHeadDim / kLine; i += 32 * V::kNumWarps) {
      prefetch_to_l2(from + i * kLine);
    }
  }

  if constexpr (V::kIsLoop) {
    WarpState state;
    if (rows.first > 0) state.load(rows, value_head, entry, LanePlace(warp, lane));
    __syncthreads();  // `own.range` is there
#pragma unroll 1
    for (int32_t first = 0; first < num_chunks; first += V::kPlaces) {
      const int32_t count = min(num_chunks - first, V::kPlaces);
      for (int32_t i = 0; i < count; ++i) {
        const ChunkRowsOf same_rows(own.range, p);
        const int32_t position = rows.first + (first + i) * kChunkRows + warp * kWarpRows;
        RowSources<kWarpRows> inputs;
        begin_rows(same_rows, channels, position, lane, inputs);
        make_rows(same_rows, channels, position, lane, inputs,
                  ChunkTarget<false>{own.chunks[i], nullptr});
      }
      __syncthreads();
      for (int32_t i = 0; i < count; ++i) {
        relate(rows, rates, rows.first + (first + i) * kChunkRows,
               (warp + kRelaters * i) % kChunkWarps, lane, own.chunks[i]);
      }
      __syncthreads();
#pragma unroll 1
      for (int32_t i = 0; i < count; ++i) {
        const ChunkRowsOf same_rows(own.range, p);
        consume_and_finish(same_rows, value_head, first + i, warp, in_register(lane), own.chunks[i],
                           state);
      }
      __syncthreads();  // the chunks have been read
    }
  } else if constexpr (!V::kIsCluster) {
    for (int32_t i = 0; i < num_chunks; ++i) {
      const int32_t position = rows.first + i * kChunkRows + warp * kWarpRows;
      RowSources<kWarpRows> inputs;
      begin_rows(rows, channels, position, lane, inputs);
      make_rows(rows, channels, position, lane, inputs, ChunkTarget<false>{own.chunks[i], nullptr});
    }
    __syncthreads();
    for (int32_t i = 0; i < num_chunks; ++i) {
      // Another warp begins with each chunk.
      relate(rows, rates, rows.first + i * kChunkRows, (warp + kRelaters * i) % kChunkWarps, lane,
             own.chunks[i]);
    }
    WarpState state;
    if (rows.first > 0) state.load(rows, value_head, entry, LanePlace(warp, lane));
    __syncthreads();
#pragma unroll 1
    for (int32_t i = 0; i < num_chunks; ++i) {
      const ChunkRowsOf same_rows(own.range, p);
      consume_and_finish(same_rows, value_head, i, warp, in_register(lane), own.chunks[i], state);
    }
  } else {
    if (thread < V::kPlaces) {
      barrier_init(own.are_made + thread, 1);
      barrier_init(own.are_related + thread, kRelaters);
      barrier_init(own.are_free + thread, kChunkWarps);
      barrier_init_fence();
    }
    cluster_barrier();
    if (rank == 1) {
      // Pairs of rows go to the warps by turns.
      const int32_t num_rows = num_chunks * kChunkRows;
      constexpr int32_t kStep = V::kNumWarps * kWarpRows;
      int32_t row = warp * kWarpRows;
      RowSources<kWarpRows> inputs;
      begin_rows(rows, channels, rows.first + row, lane, inputs);
#pragma unroll 1
      for (; row < num_rows; row += kStep) {
        RowSources<kWarpRows> next;
        if (row + kStep < num_rows) {
          begin_rows(rows, channels, rows.first + row + kStep, lane, next);
        }
        const int32_t place = row / kChunkRows % V::kPlaces;
        const int32_t turn = row / kChunkRows / V::kPlaces;
        if (turn > 0) barrier_wait(own.are_free + place, static_cast<uint32_t>(turn - 1) % 2);
        make_rows(rows, channels, rows.first + row, lane, inputs,
                  ChunkTarget<true>{own.chunks[place], own.are_made + place});
        inputs = next;
      }
    } else if (warp >= kChunkWarps) {
#pragma unroll 1
      for (int32_t i = 0; i < num_chunks; ++i) {
        const int32_t place = i % V::kPlaces;
        if (thread == 32 * kChunkWarps) {
          barrier_expect(own.are_made + place, kChunkRows * kSentBytes);
        }
        barrier_wait(own.are_made + place, static_cast<uint32_t>(i / V::kPlaces) % 2);
        relate(rows, rates, rows.first + i * kChunkRows, warp - kChunkWarps, lane,
               own.chunks[place]);
        __syncwarp();
        if (lane == 0) barrier_arrive(own.are_related + place);
      }
    } else {
      WarpState state;
      if (rows.first > 0) state.load(rows, value_head, entry, LanePlace(warp, lane));
#pragma unroll 1
      for (int32_t i = 0; i < num_chunks; ++i) {
        const int32_t place = i % V::kPlaces;
        barrier_wait(own.are_related + place, static_cast<uint32_t>(i / V::kPlaces) % 2);
        const ChunkRowsOf same_rows(own.range, p);
        consume_and_finish(same_rows, value_head, i, warp, in_register(lane), own.chunks[place],
                           state);
        __syncwarp();
        if (lane == 0) barrier_arrive_in_cluster(own.are_free + place, 1);
      }
    }
    cluster_barrier();  // no block leaves while the other one writes to its memory
  }
}

template <class V>
void launch_chunks(CudaContext& ctx, const GatedDeltaParams& p) {
  constexpr auto* kKernel = &chunk_kernel<V>;
  constexpr size_t kBytes = sizeof(ChunkShared<V>);
  static OncePerDevice allow;
  allow([] { allow_shared_bytes(kKernel, kBytes, "gated_delta"); });
  launch_clusters(ctx, "gated_delta", kKernel,
                  dim3(V::kBlocks, static_cast<uint32_t>(p.shape.num_value_heads),
                       static_cast<uint32_t>(p.max_seqs)),
                  dim3(32 * V::kNumWarps), dim3(V::kBlocks), kBytes, p);
}

}  // namespace
}  // namespace paceline::cuda
