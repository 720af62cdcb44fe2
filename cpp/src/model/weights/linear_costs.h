// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the products of a model cost, from its description alone.

#include <cstdint>
#include <string>
#include <vector>

#include <paceline/device.h>
#include <paceline/dtype.h>

#include "model/description/decoder_config.h"
#include "model/weights/linear.h"

namespace paceline {

// One matrix of products, y = x W^T, or one that mixes residual streams (in float32).
struct LinearCost {
  std::string name;  // e.g. "layers.0.attn.qkv"
  int64_t rows = 0;  // outputs that are computed for a row of x, a multiply-add for each of `cols`
  int64_t cols = 0;
  int64_t bytes = 0;           // that a product reads, scales and padding included
  bool is_for_logits = false;  // computed only for rows whose logits are needed
  ShardAxis shard = ShardAxis::kNone;
  // Of a mixture: the number of experts; rows, cols and bytes are those of one expert. Else 0.
  int32_t num_experts = 0;
  int32_t top_k = 0;  // experts that a row chooses; 0 outside of a mixture
};

// Every matrix whose product a pass computes, those that a draft head takes from its target
// included. `dtype`: of plain matrices.
[[nodiscard]] std::vector<LinearCost> linear_costs(const DecoderConfig& config, DType dtype,
                                                   Device device);

}  // namespace paceline
