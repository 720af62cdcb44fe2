// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/json.h"
#include "model/layers/dense/config.h"
#include "ops/moe.h"

namespace paceline {

// A mixture of experts: a router gives every row its top_k experts, and the row's output is the sum
// of theirs, by weight.
struct MoeMlp {
  int32_t num_experts = 0;  // at most kMaxExperts
  int32_t top_k = 0;        // at most num_experts and kMaxTopK
  DenseMlp expert;          // each of them
  // A further expert that every row visits. The sum begins with its output.
  std::optional<DenseMlp> shared;
  bool has_shared_gate = false;  // that output is multiplied by sigmoid(shared_gate x), a number
  RouterRule router = RouterRule::kSoftmaxOfChosen;
  ScoreRouting scoring;      // of rules with scores
  float logit_scale = 1.0f;  // of rules with a softmax: a factor on the logits
  bool has_expert_scales =
      false;  // of rules with a softmax: each expert has a factor on its weights
  // kSqrtSoftplus: a table has the experts of each token, instead of a correction.
  bool has_token_experts = false;
  bool has_router_bias = false;
  bool is_interleaved = false;  // rows of gate and up alternate, gate first
  bool is_transposed = false;   // a checkpoint stores the experts' matrices [in, out]
  bool is_per_expert = false;   // a checkpoint has a gate, an up and a down tensor for each expert

  // Of all places of a row.
  [[nodiscard]] constexpr int64_t projected_width() const {
    const int64_t of_places = int64_t{top_k} * expert.projected_width();
    return shared ? std::max(of_places, shared->projected_width()) : of_places;
  }
  [[nodiscard]] static bool has_experts() { return true; }
  // The matrices of the shared expert follow those of the last expert, so that passes of up to
  // kMaxJoinedRows rows compute it in the same products.
  [[nodiscard]] bool joins_shared() const {
    return shared == expert && !is_interleaved && !expert.has_bias;
  }
  // Elements that the shared expert has in the scratch of the others.
  [[nodiscard]] int64_t joined_width() const { return joins_shared() ? shared->intermediate : 0; }
};
// In larger passes, the tiles that fit the other experts are too narrow for the shared one's rows.
inline constexpr int32_t kMaxJoinedRows = 32;

[[nodiscard]] MoeMlp read_mixture(const Json& json, int32_t hidden);

}  // namespace paceline
