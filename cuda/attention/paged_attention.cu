// SPDX-License-Identifier: Apache-2.0

// Paged attention over K and V: the kernels of paged_attention_kernel.cuh and prefill_kernel.cuh,
// or the plain one.

#include "attention/attention_common.cuh"
#include "attention/paged_attention_launch.cuh"
#include "attention/prefill_attention.h"

namespace paceline {
namespace {

void run_decode(CudaContext& ctx, const char* name, const PagedAttentionParams& p) {
  switch (p.head_dim) {
    case 64:
      return cuda::paged::run_head_dim<64, 4>(ctx, name, p);
    case 128:
      return cuda::paged::run_head_dim<128, 4>(ctx, name, p);
    case 256:
      return cuda::paged::run_head_dim<256, 2>(ctx, name, p);
    case 512:
      return cuda::paged::run_head_dim<512, 1>(ctx, name, p);
    default:
      break;
  }
}

}  // namespace

void paged_attention(CudaContext& ctx, const PagedAttentionParams& params) {
  constexpr const char* kName = "paged_attention";
  PagedAttentionParams p = params;
  cuda::check_attention_params(p);
  // The plain kernel serves any other head size: correct, but not fast.
  const bool has_instance =
      p.head_dim == 64 || p.head_dim == 128 || p.head_dim == 256 || p.head_dim == 512;
  if (p.dtype != DType::kBFloat16 || p.kv.dtype != DType::kBFloat16 || !has_instance) {
    const cuda::PagedKeys keys = {.seq_slot = p.seq_slot,
                                  .kv_begin = p.kv_begin,
                                  .kv_end = p.kv_end,
                                  .block_table = p.block_table,
                                  .block_table_stride = p.block_table_stride};
    cuda::run_plain_attention(ctx, kName, p, p.head_dim, p.soft_cap, p.sinks, keys);
    return;
  }
  cuda::paged::prepare(p);
  // Where the prompts' kernel does not run, this one takes their rows, with the same bits.
  const int32_t min_rows = ctx.is_portable ? 0 : cuda::prefill_min_rows(ctx, p);
  if (min_rows > 0) {
    // A batch of one sequence is the prefill kernel's, whatever rows it has.
    cuda::prefill_attention(ctx, kName, p, p.max_seqs == 1 ? 1 : min_rows);
    if (p.max_seqs == 1) return;
    p.max_rows_per_seq = min_rows - 1;
  }
  run_decode(ctx, kName, p);
}

}  // namespace paceline
