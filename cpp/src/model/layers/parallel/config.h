// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/json.h"
#include "model/layers/dense/config.h"
#include "model/layers/moe/config.h"

namespace paceline {

struct DecoderConfig;

// Gemma 4's feed-forward block with experts: a dense MLP and a mixture, each with norms of its own.
// With x, the residual stream, and y, what the layer's norm before the MLP makes of it:
//   output = dense_norm(dense y) + mixture_norm(mixture)
// The experts of the mixture read expert_norm(x), and its router router_norm(x).
struct ParallelMlp {
  DenseMlp dense;
  MoeMlp mixture;  // without a shared expert

  // The branches run one after the other.
  [[nodiscard]] constexpr int64_t projected_width() const {
    return std::max(dense.projected_width(), mixture.projected_width());
  }
  [[nodiscard]] static int64_t joined_width() { return 0; }
  [[nodiscard]] static bool has_experts() { return true; }
};

[[nodiscard]] ParallelMlp read_parallel(const Json& json, const DecoderConfig& config);

}  // namespace paceline
