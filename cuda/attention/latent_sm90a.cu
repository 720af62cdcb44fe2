// SPDX-License-Identifier: Apache-2.0

// The launch of latent_kernel.cuh.

#include <algorithm>
#include <cstdint>

#include "attention/latent_kernel.cuh"
#include "attention/latent_launch.h"
#include "gemm/tensor_map.h"

namespace paceline::cuda::latent {
namespace {

EntryMap entry_map_of(const PagedAttentionParams& p) {
  EntryMap entries = {};
  entries.box_tokens = paged_box_tokens(p.kv.block_size, kChunk);
  if (entries.box_tokens == 0) return entries;
  entries.num_boxes = kChunk / entries.box_tokens;
  entries.map = paged_map(p.kv.base + p.kv.k_offset, p.kv.block_bytes, p.kv.block_size,
                          /*heads=*/1, kWidth, entries.box_tokens);
  return entries;
}

template <int32_t rows>
void run(CudaContext& ctx, const char* name, const PagedAttentionParams& p) {
  using S = Shape<rows>;
  constexpr auto* kKernel = &latent_attention_kernel<S>;
  static OncePerDevice allow;
  allow([] { allow_shared_bytes(kKernel, S::kSharedBytes, "latent_attention_kernel"); });

  const paged::Tiles of_launch(p, S::kRows);
  const int64_t tiles = of_launch.count;
  if (tiles == 0) return;
  // One block a multiprocessor. Each block decides on the device how its tile's context is split.
  const int64_t max_chunks = (int64_t{ctx.max_model_len} + kChunk - 1) / kChunk;
  const int64_t splits = tiles > ctx.num_counters
                             ? 1
                             : std::clamp<int64_t>(ctx.num_sms / tiles, 1,
                                                   std::clamp<int64_t>(max_chunks, 1, kMaxSplits));
  const int64_t blocks = std::min<int64_t>(tiles, ctx.num_sms);
  constexpr int64_t kStateBytes = S::kStateFloats * int64_t{sizeof(float)};
  // Contexts of several segments that one block takes need room for a total.
  const int64_t total_bytes = max_chunks > kSegmentChunks ? blocks * splits * kStateBytes : 0;
  PACELINE_CHECK(total_bytes <= ctx.workspace_bytes, "the workspace has ", ctx.workspace_bytes,
                 " bytes; ", name, " needs ", total_bytes);
  const int64_t room = (ctx.workspace_bytes - total_bytes) / (tiles * kStateBytes);
  const Plan plan = {.num_tiles = static_cast<int32_t>(tiles),
                     .tiles_per_seq = static_cast<int32_t>(of_launch.per_seq),
                     .splits = static_cast<int32_t>(splits),
                     .capacity = static_cast<int32_t>(std::min(room, max_chunks)),
                     .states = reinterpret_cast<float*>(ctx.workspace + total_bytes),
                     .totals = reinterpret_cast<float*>(ctx.workspace),
                     .counters = reinterpret_cast<uint32_t*>(ctx.counters)};
  launch(ctx, name, kKernel, dim3(static_cast<uint32_t>(blocks), static_cast<uint32_t>(splits)),
         dim3(kThreads), S::kSharedBytes, p, entry_map_of(p), plan);
}

}  // namespace

void run_sm90a(CudaContext& ctx, const char* name, const PagedAttentionParams& p) {
  const int64_t packed_rows = int64_t{p.max_rows_per_seq} * p.num_qo_heads;
  // The narrowest tile that holds all rows of a sequence, or the widest one. Batches that leave
  // most multiprocessors idle even with 8 chunks a sequence take narrow tiles, which end earlier,
  // though each of them reads the entries.
  const int64_t narrow_tiles = p.max_seqs * ((packed_rows + 31) / 32);
  if (8 * narrow_tiles <= ctx.num_sms) return run<32>(ctx, name, p);
  if (packed_rows <= 32) return run<32>(ctx, name, p);
  if (packed_rows <= 64) return run<64>(ctx, name, p);
  run<80>(ctx, name, p);
}

}  // namespace paceline::cuda::latent
