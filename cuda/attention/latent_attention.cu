// SPDX-License-Identifier: Apache-2.0

// Latent attention is paged attention with one KV head, whose values are the first columns of its
// keys. The kernel loads them as keys and then again as values, from L2.

#include "attention/attention_common.cuh"
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
                            .kv_inputs = KvInputs::kNone};
  cuda::check_attention_params(p);
  // The shape of DeepSeek-V3 and of what follows it. The plain kernel serves any other: correct,
  // but not fast.
  const bool has_instance = latent.kv_lora_rank == 512 && latent.qk_rope_head_dim == 64;
  if (p.dtype != DType::kBFloat16 || p.kv.dtype != DType::kBFloat16 || !has_instance) {
    const cuda::PagedKeys keys = {.seq_slot = p.seq_slot,
                                  .kv_begin = nullptr,
                                  .kv_end = p.kv_end,
                                  .block_table = p.block_table,
                                  .block_table_stride = p.block_table_stride};
    cuda::run_plain_attention(ctx, kName, p, latent.kv_lora_rank, p.soft_cap, p.sinks, keys);
    return;
  }
  cuda::paged::prepare(p);
  cuda::paged::run_head_dim<576, 1, 512>(ctx, kName, p);
}

}  // namespace paceline
