// SPDX-License-Identifier: Apache-2.0
#pragma once

// The op cases of the ops around latent_attention.

#include <cstdint>
#include <vector>

#include <paceline/dtype.h>

#include "support/op_cases.h"

namespace paceline::testing {

struct LatentSpec {
  int32_t num_heads = 0;
  int32_t qk_nope_head_dim = 0;
  int32_t qk_rope_head_dim = 0;
  int32_t v_head_dim = 0;
  int32_t kv_lora_rank = 0;
  int32_t q_width = 0;    // of append_latents
  int32_t q_padding = 0;  // of absorb_queries
  int32_t block_size = 16;
  DType dtype = DType::kBFloat16;
  bool is_interleaved = true;
  bool has_q_norm = true;
};

[[nodiscard]] OpInstance make_append_latents(const LatentSpec& spec, const Rows& rows,
                                             uint64_t seed);
[[nodiscard]] OpInstance make_absorb_queries(const LatentSpec& spec, const Rows& rows,
                                             uint64_t seed);
[[nodiscard]] OpInstance make_project_values(const LatentSpec& spec, const Rows& rows,
                                             uint64_t seed);
[[nodiscard]] std::vector<RowWiseCase> latent_row_wise_cases();

}  // namespace paceline::testing
