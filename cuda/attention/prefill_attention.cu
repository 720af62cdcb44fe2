// SPDX-License-Identifier: Apache-2.0

#include "attention/prefill_attention.h"

#include <algorithm>
#include <cstdint>

#include "attention/prefill_kernel.cuh"
#include "common/launch.cuh"
#include "gemm/tensor_map.h"

namespace paceline::cuda {
namespace {

// A verify window has at most 17 rows.
constexpr int32_t kMinRows = 32;

// Warpgroups with 64 packed rows each. The registers suffice for three with heads of up to 128
// elements, but for a cap of scores with 128.
constexpr int32_t num_groups(int32_t head_dim, bool has_cap) {
  return head_dim == 64 || (head_dim == 128 && !has_cap) ? 3 : 2;
}
template <int head_dim, bool has_cap>
using Shape = prefill::Shape<head_dim, num_groups(head_dim, has_cap), has_cap>;

prefill::KvMaps maps_of(const PagedAttentionParams& p) {
  prefill::KvMaps maps = {};
  maps.box_tokens = paged_box_tokens(p.kv.block_size, kAttentionChunk);
  if (maps.box_tokens == 0) return maps;
  maps.num_boxes = kAttentionChunk / maps.box_tokens;
  const auto map = [&](int64_t offset) {
    return paged_map(p.kv.base + offset, p.kv.block_bytes, p.kv.block_size, p.num_kv_heads,
                     p.head_dim, maps.box_tokens);
  };
  maps.keys = map(p.kv.k_offset);
  maps.values = map(p.kv.v_offset);
  return maps;
}

template <class S>
void run(CudaContext& ctx, const char* name, const PagedAttentionParams& p, int32_t min_rows) {
  constexpr auto* kKernel = &prefill::prefill_attention_kernel<S>;
  static OncePerDevice allow;
  allow([] { allow_shared_bytes(kKernel, S::kSharedBytes, "prefill_attention_kernel"); });
  const int64_t heads_per_group = p.num_qo_heads / p.num_kv_heads;
  const int64_t tiles_per_seq = (p.max_rows_per_seq * heads_per_group + S::kRows - 1) / S::kRows;
  // An upper bound for every batch: each sequence rounds up at most once.
  const int64_t max_seqs = std::min<int64_t>(p.max_seqs, p.max_rows / min_rows);
  const int64_t tiles =
      std::min(max_seqs * tiles_per_seq, p.max_rows * heads_per_group / S::kRows + max_seqs);
  // With more tiles than multiprocessors, blocks take equal shares.
  const int64_t blocks = tiles * p.num_kv_heads;
  const int64_t state_bytes = ctx.num_sms * S::kGroups * S::kStateFloats * int64_t{sizeof(float)};
  const bool is_shared = blocks > ctx.num_sms && state_bytes <= ctx.workspace_bytes &&
                         2 + ctx.num_sms * S::kGroups <= ctx.num_counters &&
                         tiles * int64_t{sizeof(int32_t)} <= S::kSharedBytes;
  const prefill::SharePlan plan = {.is_shared = is_shared,
                                   .max_tiles = static_cast<int32_t>(tiles),
                                   .counters = reinterpret_cast<uint32_t*>(ctx.counters),
                                   .states = reinterpret_cast<float*>(ctx.workspace)};
  launch(ctx, name, kKernel, dim3(static_cast<uint32_t>(is_shared ? ctx.num_sms : blocks)),
         dim3(S::kThreads), S::kSharedBytes, p, maps_of(p), plan, min_rows);
}

template <bool kHasCap>
void run_head_dim(CudaContext& ctx, const char* name, const PagedAttentionParams& p,
                  int32_t min_rows) {
  switch (p.head_dim) {
    case 64:
      return run<Shape<64, kHasCap>>(ctx, name, p, min_rows);
    case 128:
      return run<Shape<128, kHasCap>>(ctx, name, p, min_rows);
    case 256:
      return run<Shape<256, kHasCap>>(ctx, name, p, min_rows);
    default:
      break;
  }
}

}  // namespace

int32_t prefill_min_rows(const CudaContext& ctx, const PagedAttentionParams& p) {
  const bool has_instance = p.head_dim == 64 || p.head_dim == 128 || p.head_dim == 256;
  if (!has_instance || p.row_indptr == nullptr) return 0;
  const int32_t tile_rows = 64 * num_groups(p.head_dim, p.soft_cap > 0.0f);
  // A sequence fills a tile.
  const int32_t min_rows = std::max(kMinRows, tile_rows / (p.num_qo_heads / p.num_kv_heads));
  if (p.max_rows_per_seq < min_rows) return 0;
  // Rows that such sequences have for sure, where the bounds are exact. With fewer blocks, the
  // chunks of a tile are better split over multiprocessors, which only the other kernel can.
  const int64_t rows =
      std::max<int64_t>(p.max_rows_per_seq, p.max_rows - int64_t{p.max_seqs} * (min_rows - 1));
  const int64_t blocks = rows * p.num_qo_heads / tile_rows;
  // Other sequences cost a second launch, which waits for this one; estimated at 20 us.
  const int64_t tenths = p.max_seqs == 1 ? 3 : 10;
  return blocks * 10 >= ctx.num_sms * tenths ? min_rows : 0;
}

void prefill_attention(CudaContext& ctx, const char* name, const PagedAttentionParams& p,
                       int32_t min_rows) {
  if (p.soft_cap > 0.0f) {
    run_head_dim<true>(ctx, name, p, min_rows);
  } else {
    run_head_dim<false>(ctx, name, p, min_rows);
  }
}

}  // namespace paceline::cuda
