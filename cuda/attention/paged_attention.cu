// SPDX-License-Identifier: Apache-2.0

// Paged attention over K and V: the kernel of paged_attention_kernel.cuh, or the plain one.

#include "attention/attention_common.cuh"
#include "attention/paged_attention_launch.cuh"

namespace paceline {

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
  switch (p.head_dim) {
    case 64:
      return cuda::paged::run_head_dim<64, 4>(ctx, kName, p);
    case 128:
      return cuda::paged::run_head_dim<128, 4>(ctx, kName, p);
    case 256:
      return cuda::paged::run_head_dim<256, 2>(ctx, kName, p);
    case 512:
      return cuda::paged::run_head_dim<512, 1>(ctx, kName, p);
    default:
      break;
  }
}

}  // namespace paceline
