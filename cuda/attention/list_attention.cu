// SPDX-License-Identifier: Apache-2.0

#include "attention/attention_common.cuh"

namespace paceline {

void list_attention(CudaContext& ctx, const ListAttentionParams& p) {
  cuda::check_attention_params(p);
  PACELINE_CHECK(p.window >= 0, "window ", p.window, " is negative");
  const cuda::ListKeys keys = {
      .window_slots = p.window_slots, .window_count = p.window_count, .window = p.window};
  cuda::run_plain_attention(ctx, "list_attention", p, p.head_dim, /*soft_cap=*/0.0f, p.sinks, keys);
}

}  // namespace paceline
