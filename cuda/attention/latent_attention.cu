// SPDX-License-Identifier: Apache-2.0

// Latent attention: the kernel of latent_kernel.cuh, that of latent_portable.cu, or the plain one,
// for which it is paged attention with one KV head whose values are the first columns of its keys.

#include "attention/attention_common.cuh"
#include "attention/latent_launch.h"
#include "attention/latent_shape.cuh"
#include "attention/paged_attention_launch.cuh"
#include "ops/latent.h"

namespace paceline {
static_assert(kMaxCudaLatentRank == cuda::kMaxPlainValueDim);
static_assert(kMaxCudaEntryWidth == cuda::kMaxPlainHeadDim);

void latent_attention(CudaContext& ctx, const LatentAttentionParams& latent) {
  constexpr const char* kName = "latent_attention";
  PACELINE_CHECK(latent.entries.v_offset == latent.entries.k_offset,
                 "entries have no values of their own");
  PagedAttentionParams p = {.num_rows = latent.num_rows,
                            .max_rows = latent.max_rows,
                            .qkv = latent.q,
                            .seq_slot = latent.seq_slot,
                            .kv_begin = nullptr,
                            .kv_end = latent.kv_end,
                            .block_table = latent.block_table,
                            .block_table_stride = latent.block_table_stride,
                            .kv = latent.entries,
                            .scale = latent.scale,
                            .soft_cap = 0.0f,
                            .sinks = nullptr,
                            .y = latent.y,
                            .num_qo_heads = latent.num_heads,
                            .num_kv_heads = 1,
                            .head_dim = latent.kv_lora_rank + latent.qk_rope_head_dim,
                            .dtype = latent.dtype,
                            .num_seqs = latent.num_seqs,
                            .row_indptr = latent.row_indptr,
                            .max_seqs = latent.max_seqs,
                            .max_rows_per_seq = latent.max_rows_per_seq,
                            .kv_inputs = KvInputs::kNone,
                            .reads_early = latent.reads_early};
  cuda::check_attention_params(p);
  // The shape of DeepSeek-V3 and of what follows it. The plain kernel serves any other: correct,
  // but not fast.
  const bool has_kernel = latent.kv_lora_rank == cuda::latent::kRank &&
                          latent.qk_rope_head_dim == cuda::latent::kWidth - cuda::latent::kRank;
  if (p.dtype != DType::kBFloat16 || p.kv.dtype != DType::kBFloat16 || !has_kernel) {
    const cuda::PagedKeys keys = {.seq_slot = p.seq_slot,
                                  .kv_begin = nullptr,
                                  .kv_end = p.kv_end,
                                  .block_table = p.block_table,
                                  .block_table_stride = p.block_table_stride};
    cuda::run_plain_attention(ctx, kName, p, latent.kv_lora_rank, p.soft_cap, p.sinks, keys);
    return;
  }
  cuda::paged::prepare(p);
  PACELINE_CHECK(p.scale > 0.0f, "scale ", p.scale, " is not positive");
  if (ctx.is_portable) return cuda::latent::run_portable(ctx, kName, p);
  cuda::latent::run_sm90a(ctx, kName, p);
}

}  // namespace paceline
