// SPDX-License-Identifier: Apache-2.0
#pragma once

// Divides an instance of the paged attention kernel into blocks and launches it.

#include <algorithm>
#include <bit>
#include <cstdint>

#include "attention/attention_common.cuh"
#include "attention/paged_attention_kernel.cuh"
#include "attention/paged_attention_shape.cuh"
#include "common/launch.cuh"

namespace paceline::cuda::paged {

// Checks what the kernel requires of the arguments, and makes every row its own sequence where
// sequences are not given. Throws InternalError.
inline void prepare(PagedAttentionParams& p) {
  PACELINE_CHECK(p.kv.block_bytes % 16 == 0 && p.kv.k_offset % 16 == 0 && p.kv.v_offset % 16 == 0,
                 "K and V must be 16 B aligned; block_bytes ", p.kv.block_bytes, ", k_offset ",
                 p.kv.k_offset, ", v_offset ", p.kv.v_offset);
  PACELINE_CHECK(reinterpret_cast<uintptr_t>(p.qkv) % 16 == 0 &&
                     reinterpret_cast<uintptr_t>(p.y) % 16 == 0 &&
                     reinterpret_cast<uintptr_t>(p.kv.base) % 16 == 0,
                 "qkv, y and the KV pool must be 16 B aligned");
  if (p.max_seqs == 0 || p.row_indptr == nullptr) {
    // Every row is its own sequence.
    p.row_indptr = nullptr;
    p.max_seqs = p.max_rows;
    p.max_rows_per_seq = 1;
  }
  PACELINE_CHECK(p.row_indptr == nullptr || p.num_seqs != nullptr, "row_indptr without num_seqs");
  PACELINE_CHECK(p.max_seqs >= 0 && p.max_rows_per_seq >= 0, "max_seqs ", p.max_seqs,
                 ", max_rows_per_seq ", p.max_rows_per_seq);
}

template <int kHeadDim, int kMTiles, Ring kRing>
void launch_tiles(CudaContext& ctx, const char* name, const PagedAttentionParams& p) {
  using S = Shape<kHeadDim, kMTiles, kRing>;
  constexpr auto* kKernel = &paged_attention_kernel<kHeadDim, kMTiles, kRing>;
  static OncePerDevice allow;
  allow([] { allow_shared_bytes(kKernel, S::kMaxSharedBytes, "paged_attention_kernel"); });

  const int64_t heads_per_group = p.num_qo_heads / p.num_kv_heads;
  const int64_t packed_rows = p.max_rows_per_seq * heads_per_group;
  const Tiles tiles(p, S::kRows);
  Plan plan = {.tiles_per_seq = static_cast<int32_t>(tiles.per_seq),
               .partials = nullptr,
               .counters = nullptr,
               .chunk_capacity = 0,
               .partial_rows = static_cast<int32_t>(std::min<int64_t>(packed_rows, S::kRows)),
               .cluster_blocks = 1,
               .has_result_stage = false,
               .takes_turns = false,
               .max_seq_rows = std::max(p.max_rows_per_seq, 1)};

  // Enough splits to give every SM two blocks, if it has room for two. Each block decides on the
  // device whether its tile is split: one block takes a tile whose chunks exceed the workspace.
  const int64_t blocks = tiles.count * p.num_kv_heads;
  constexpr int64_t kBlocksPerSm = std::min(S::kMinBlocks, 2);
  const int64_t max_chunks = (int64_t{ctx.max_model_len} + kChunk - 1) / kChunk;
  const int64_t max_splits = blocks == 0 ? 1 : kBlocksPerSm * ctx.num_sms / blocks;
  int64_t splits = S::kMaySplit ? std::min(max_splits, max_chunks) : 1;
  const int64_t chunk_bytes =
      partial_floats(plan.partial_rows, kHeadDim) * static_cast<int64_t>(sizeof(float));
  if (splits > 1 && blocks <= ctx.num_counters && ctx.workspace != nullptr) {
    const int64_t capacity = std::min(ctx.workspace_bytes / (blocks * chunk_bytes), max_chunks + 1);
    plan.partials = reinterpret_cast<float*>(ctx.workspace);
    plan.counters = ctx.counters;
    plan.chunk_capacity = static_cast<int32_t>(capacity);
    if (capacity < 2) splits = 1;
  } else {
    splits = 1;
  }
  if (ctx.has_clusters && splits > 1) {
    // All chunks of a short context in one cluster, if possible: it needs no workspace.
    constexpr uint64_t kMaxClusterBlocks = 8;
    const auto wanted = std::bit_ceil(static_cast<uint64_t>(splits));
    const auto blocks_of_cluster =
        std::min({wanted, std::bit_floor(static_cast<uint64_t>(max_splits)), kMaxClusterBlocks});
    plan.cluster_blocks = static_cast<int32_t>(blocks_of_cluster);
    plan.has_result_stage = S::kHasResultStage && chunk_bytes <= S::kSliceBytes;
    splits = std::max<int64_t>(splits / plan.cluster_blocks, 1) * plan.cluster_blocks;
    plan.takes_turns = S::kMayTakeTurns && splits == 2 && plan.cluster_blocks == 2;
  }
  launch_clusters(ctx, name, kKernel,
                  dim3(static_cast<uint32_t>(tiles.count), static_cast<uint32_t>(p.num_kv_heads),
                       static_cast<uint32_t>(splits)),
                  dim3(kThreads), dim3(1, 1, static_cast<uint32_t>(plan.cluster_blocks)),
                  static_cast<size_t>(plan.takes_turns ? S::kMaxSharedBytes : S::kTurnsOffset), p,
                  plan);
}

// Heads of 64 have room for a chunk in any case, and a long ring of larger ones than 128 gained
// nothing.
template <int kHeadDim, int kMTiles>
void run_tiles(CudaContext& ctx, const char* name, const PagedAttentionParams& p) {
  using Short = Shape<kHeadDim, kMTiles, Ring::kShort>;
  const int64_t blocks = Tiles(p, Short::kRows).count * p.num_kv_heads;
  if constexpr (kHeadDim == 128) {
    using Long = Shape<kHeadDim, kMTiles, Ring::kLong>;
    // The tiles are few enough to be split. Where two blocks share a multiprocessor, it is enough
    // that all run at once.
    const int64_t at_once = int64_t{Long::kMinBlocks} * ctx.num_sms;
    if ((Long::kMinBlocks > 1 ? blocks : 2 * blocks) <= at_once &&
        Long::kBlockBytes <= ctx.block_shared_bytes) {
      return launch_tiles<kHeadDim, kMTiles, Ring::kLong>(ctx, name, p);
    }
  }
  if constexpr (kHeadDim * kMTiles <= 128) {  // with more, four blocks need too many registers
    // More than run at once.
    if (blocks > int64_t{Short::kMinBlocks} * ctx.num_sms) {
      return launch_tiles<kHeadDim, kMTiles, Ring::kThin>(ctx, name, p);
    }
  }
  launch_tiles<kHeadDim, kMTiles, Ring::kShort>(ctx, name, p);
}

// Whether a block of the device has room for an instance.
template <int kHeadDim, int kMTiles>
bool has_room(const CudaContext& ctx) {
  return Shape<kHeadDim, kMTiles, Ring::kShort>::kBlockBytes <= ctx.block_shared_bytes;
}

// Runs the smallest tile that holds the rows of a sequence, or the largest tile; of few sequences
// with up to 32 rows, two tiles of 16 each. With 99 KB of shared memory a block has no room for the
// largest tile of heads of 128, nor for the smallest one of heads of 256, whose ring is longer.
template <int kHeadDim, int kMaxMTiles>
void run_head_dim(CudaContext& ctx, const char* name, const PagedAttentionParams& p) {
  const int64_t packed_rows = int64_t{p.max_rows_per_seq} * (p.num_qo_heads / p.num_kv_heads);
  if constexpr (kMaxMTiles >= 4) {
    if (packed_rows > 32 && has_room<kHeadDim, 4>(ctx)) {
      return run_tiles<kHeadDim, 4>(ctx, name, p);
    }
  }
  if constexpr (kMaxMTiles >= 2) {
    // Two tiles of 16 rows take less time than one of 32 if each has the blocks of a cluster.
    constexpr int64_t kBlocksOfTile = 8;
    const bool is_few = Tiles(p, 16).count * p.num_kv_heads * kBlocksOfTile <= 2 * ctx.num_sms;
    if ((packed_rows > 16 && !is_few) || !has_room<kHeadDim, 1>(ctx)) {
      return run_tiles<kHeadDim, 2>(ctx, name, p);
    }
  }
  run_tiles<kHeadDim, 1>(ctx, name, p);
}

}  // namespace paceline::cuda::paged
