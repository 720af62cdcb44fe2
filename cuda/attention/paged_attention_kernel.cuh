// SPDX-License-Identifier: Apache-2.0
#pragma once

// Softmax attention over a paged KV cache in bfloat16. One block (128 threads) takes a tile of
// packed rows (row of the sequence, query head of the group) against one KV head, so that a key is
// loaded once for all of them, and walks chunks of 128 keys aligned at absolute positions:
//   1. S = Q K^T: warp w scores keys [32 w, 32 w + 32) of the chunk for all rows of the tile
//   2. row maxima and sums: in each warp, then over the four warps in order through shared memory
//   3. O = P V: warp w takes a quarter of the columns, over all 128 keys
//   4. (max, sum, O) of the chunk is merged into the running state, in ascending order
// cp.async fills a ring of slices of K and V (128 keys x up to 128 columns).
//
// Why a row's bits depend only on its query and its visible keys:
// - A key's position in the fragments of an MMA comes from its absolute position, and each output
// row
//   of an MMA comes from its own row of A. The order over k is ascending everywhere.
// - Keys that a row does not see have weight exactly 0, and chunks without a visible key are
// skipped.
// - With split KV each chunk's state goes to the workspace, and the last blocks to arrive merge
//   them in the same order by the same functions (attention_common.cuh) as in registers.
// - Where a tile has two blocks, they take the chunks by turns, and the first one merges them in
//   that order (paged_attention_turns.cuh).
// - Where the blocks of one cluster have a chunk each, its state stays in their shared memory, and
//   all of them merge in that order.
//
// The merge from the workspace reads as many bytes as the tile has live rows times chunks, which
// would keep a single SM busy for as long as the rest of the kernel takes. Hence the splits of a
// tile form clusters: the last cluster to arrive merges, and its blocks share the rows.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "attention/attention_common.cuh"
#include "attention/paged_attention_chunk.cuh"
#include "attention/paged_attention_loader.cuh"
#include "attention/paged_attention_merge.cuh"
#include "attention/paged_attention_rows.cuh"
#include "attention/paged_attention_shape.cuh"
#include "attention/paged_attention_turns.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "ops/ops.h"

namespace paceline::cuda::paged {

template <int kHeadDim, int kMTiles, Ring kRing>
__global__ void __launch_bounds__(kThreads, (Shape<kHeadDim, kMTiles, kRing>::kMinBlocks))
    paged_attention_kernel(const __grid_constant__ PagedAttentionParams p,
                           const __grid_constant__ Plan plan) {
  using S = Shape<kHeadDim, kMTiles, kRing>;
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ int32_t row_begin[S::kRows];
  __shared__ int32_t row_end[S::kRows];
  __shared__ int32_t row_index[S::kRows];
  __shared__ int32_t row_head[S::kRows];
  __shared__ float warp_max[kWarps][S::kRows];
  __shared__ float warp_sum[kWarps][S::kRows];
  __shared__ int32_t is_last;
  __shared__ TurnBarriers turn_barriers;

  // Separate arrays: as members of one struct they cost other registers.
  const TileRows rows = {.begin = row_begin, .end = row_end, .index = row_index, .head = row_head};
  const WarpResults<S> results = {.max = warp_max, .sum = warp_sum};

  let_successor_start();
  if (!p.reads_early) wait_for_predecessor();

  // Computed here and not by a function, because the compiler then allocates more registers.
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const ThreadPosition at = {.thread = thread,
                             .lane = lane,
                             .warp = thread / 32,
                             .quad_row = lane / 4,
                             .quad_lane = lane % 4};
  const int32_t kv_head = static_cast<int32_t>(blockIdx.y);
  const int32_t heads_per_group = p.num_qo_heads / p.num_kv_heads;

  // Loads that do not depend on each other come before the branches on them: the path from here to
  // the first key is a chain of latencies.
  const int32_t num_rows = min(__ldcg(p.num_rows), p.max_rows);
  Tile tile;
  if (p.row_indptr == nullptr) {
    tile = {.first_row = static_cast<int32_t>(blockIdx.x), .num_rows = 1, .index = 0};
    if (plan.tiles_per_seq > 1) {
      tile.first_row = static_cast<int32_t>(blockIdx.x) / plan.tiles_per_seq;
      tile.index = static_cast<int32_t>(blockIdx.x) % plan.tiles_per_seq;
    }
    if (tile.first_row >= num_rows) return wait_for_predecessor();
  } else {
    const int32_t num_seqs = min(__ldcg(p.num_seqs), p.max_seqs);
    if (plan.tiles_per_seq == 1) {
      const int32_t seq = static_cast<int32_t>(blockIdx.x);  // below max_seqs
      const int32_t first_row = __ldcg(p.row_indptr + seq);
      const int32_t end_row = __ldcg(p.row_indptr + seq + 1);
      if (seq >= num_seqs || end_row - first_row > plan.max_seq_rows) return wait_for_predecessor();
      tile = {.first_row = first_row, .num_rows = end_row - first_row, .index = 0};
    } else {
      // Later tiles of a prompt see more keys and take longer, so they go first.
      const int32_t index = static_cast<int32_t>(gridDim.x - 1 - blockIdx.x);
      if (!find_tile(p.row_indptr, num_seqs, heads_per_group, S::kRows, index, &tile, 0,
                     plan.max_seq_rows)) {
        return wait_for_predecessor();
      }
    }
  }
  if (tile.index * S::kRows >= tile.num_rows * heads_per_group) return wait_for_predecessor();
  const TileKeys keys = read_rows<S>(p, tile, num_rows, heads_per_group, rows);
  const TileOutput<S> output = {
      .p = p, .kv_head = kv_head, .heads_per_group = heads_per_group, .rows = rows};
  Chunks chunks = chunks_of_block(plan, keys);
  if constexpr (!S::kMaySplit) chunks.num_splits = 1;
  // Blocks of a cluster leave together, or else stay for its barriers even without a chunk.
  const int32_t cluster_rank = chunks.split % plan.cluster_blocks;
  if (chunks.num_splits == 1 ? chunks.split > 0
                             : chunks.split - cluster_rank >= chunks.num_splits) {
    return wait_for_predecessor();
  }
  if (keys.begin >= keys.end) {
    wait_for_predecessor();
    if (chunks.split == 0) output.zero_inert_rows();
    return;
  }

  // Whether two blocks take the chunks by turns; the first one merges them.
  bool takes_turns = false;
#if PACELINE_HAS_CLUSTERS
  if constexpr (S::kMayTakeTurns) takes_turns = plan.takes_turns && chunks.num_splits == 2;
#endif
  ChunkTurns<S> turns(shared, turn_barriers);
  if (takes_turns) turns.begin();
  const bool gives = takes_turns && cluster_rank > 0;
  const bool merges = chunks.num_splits == 1 || (takes_turns && cluster_rank == 0);

  const uint32_t stages = shared_address(shared);
  const uint32_t q_shared = stages + S::kQOffset;
  const uint32_t p_shared = stages + S::kPOffset;
  // Keys before the rows' own are in the cache, whatever the predecessor still does.
  const bool has_old = p.reads_early && p.row_indptr != nullptr;
  SliceRing<S> ring(p, keys, chunks, stages, has_old ? keys.end - tile.num_rows : 0);
  wait_for_predecessor();
  if (chunks.split == 0) output.zero_inert_rows();
  load_queries<S>(p, kv_head, heads_per_group, rows, q_shared);
  ring.fill();

  PerRow<S, float> running_max;
  PerRow<S, float> running_sum;
  Products<S> running[S::kSlices];
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
  const int64_t chunk_floats = partial_floats(plan.partial_rows, S::kHeadDim);
  const int64_t tile_index = int64_t{blockIdx.x} * gridDim.y + blockIdx.y;
  const Partials<S> partials = {
      .data = plan.partials + tile_index * plan.chunk_capacity * chunk_floats,
      .chunk_floats = chunk_floats,
      .num_rows = plan.partial_rows};
  const bool merges_in_cluster =
      S::kHasResultStage && plan.has_result_stage && chunks.num_splits > 1 &&
      chunks.num_splits <= plan.cluster_blocks && chunks.end - chunks.first <= chunks.num_splits;
  auto* const result = reinterpret_cast<float*>(shared + S::kResultOffset);
  const float scale = weight_scale(p.scale, p.soft_cap);
  const auto view_of = [&](int32_t chunk) {
    const int32_t first_key = chunk * kChunk;
    return ChunkView<S>{
        .rows = rows,
        .first_key = first_key,
        .is_full = first_key >= keys.common_begin && first_key + kChunk <= keys.common_end};
  };
  // Merges a chunk of the other block.
  const auto take_turn = [&](int32_t chunk) {
    turns.take(view_of(chunk), at, /*gives_more=*/chunk + 2 < chunks.end, running_max, running_sum,
               running);
  };
  if (takes_turns) turns.meet();

  for (int32_t chunk = chunks.first + chunks.split; chunk < chunks.end;
       chunk += chunks.num_splits) {
    Scores<S> s = {};
    score_keys<S>(ring, q_shared, at, s);
    const ChunkView<S> view = view_of(chunk);
    if (p.soft_cap > 0.0f) cap_scores<S>(p.scale, p.soft_cap, s);
    mask_scores<S>(view, at, s);
    store_warp_maxima<S>(s, at, results);
    __syncthreads();
    PerRow<S, float> chunk_max;
    store_probabilities<S>(s, scale, view, at, shared, results, chunk_max);

    float* const partial = merges_in_cluster ? result : partials.chunk(chunk - chunks.first);
    PerRow<S, MergeWeights> merge;
#pragma unroll
    for (int32_t slice = 0; slice < S::kSlices; ++slice) {
      const uint32_t values = ring.next();  // its barrier also publishes P and the sums
      if (slice == 0) {
        if (takes_turns) {
          if (gives) {
            turns.wait_for_room();
          } else if (chunk > chunks.first) {
            take_turn(chunk - 1);
          }
        }
#pragma unroll
        for (int32_t m = 0; m < kMTiles; ++m) {
#pragma unroll
          for (int32_t half = 0; half < 2; ++half) {
            const int32_t packed = packed_row(m, half, at);
            const float max = chunk_max[m][half];
            const float sum = results.chunk_sum(packed);
            if (merges) {
              merge_sum<S>(packed, max, sum, view, running_max[m][half], running_sum[m][half],
                           merge[m][half]);
            } else if (gives) {
              turns.give_sum(packed, at, max, sum);
            } else if (at.warp == 0 && at.quad_lane == 0 && rows.is_live(packed)) {
              auto* const to = reinterpret_cast<float2*>(partial + plan.partial_rows * kHeadDim);
              to[packed] = make_float2(max, sum);
            }
          }
        }
      }
      Products<S> o = {};
      multiply_values<S>(values, p_shared, at, o);
      if (gives) {
        turns.give_products(slice, o);
        continue;
      }
#pragma unroll
      for (int32_t m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int32_t half = 0; half < 2; ++half) {
          const int32_t packed = packed_row(m, half, at);
          if (merges) {
            merge_products<S>(packed, half, o[m], merge[m][half], view, running[slice][m]);
          } else {
            store_products<S>(packed, half, o[m], slice, view, at, partial);
          }
        }
      }
    }
  }
  if (gives) return;
  if (takes_turns && (chunks.end - chunks.first) % 2 == 0) take_turn(chunks.end - 1);

  const float* const sinks =
      p.sinks == nullptr ? nullptr : p.sinks + int64_t{kv_head} * heads_per_group;
  if (merges) {
    store_running<S>(running_max, running_sum, running, sinks, output, at);
    return;
  }
  if constexpr (S::kHasResultStage) {
    if (merges_in_cluster) {
      cluster_barrier();
      merge_chunks<S>(
          [&](int32_t chunk) { return ClusterChunks{.own = result, .first_rank = chunk}; },
          plan.partial_rows, chunks.first, cluster_rank, plan.cluster_blocks, sinks, output);
      cluster_barrier();  // until then others read this block's result
      return;
    }
  }
  if (!is_last_to_arrive(plan, cluster_rank, chunks.num_splits, tile_index, is_last)) return;
  merge_chunks<S>(
      [&](int32_t chunk) {
        return WorkspaceChunks{.first = partials.chunk(chunk), .chunk_floats = chunk_floats};
      },
      plan.partial_rows, chunks.first, cluster_rank, plan.cluster_blocks, sinks, output);
}

}  // namespace paceline::cuda::paged
