// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "base/json.h"
#include "model/description/matrix_format.h"
#include "ops/ops.h"

namespace paceline {

// A gated unit: down (activation(gate x) * up x).
struct DenseMlp {
  int32_t intermediate = 0;
  Activation activation = Activation::kSilu;
  float alpha = 0;        // kSwigluOai
  float limit = 0;        // kSwigluOai, kClampedSilu
  bool has_bias = false;  // of gate, up and down
  MatrixFormat gate_up;
  MatrixFormat down;

  [[nodiscard]] constexpr int64_t projected_width() const { return 2 * int64_t{intermediate}; }
  [[nodiscard]] static int64_t joined_width() { return 0; }
  [[nodiscard]] static bool has_experts() { return false; }

  friend bool operator==(const DenseMlp&, const DenseMlp&) = default;
};

// Reads a dense MLP over `hidden` elements, and the keys that it shares with an expert. Joined: a
// tensor has the matrices of all experts, which cannot be fp8.
[[nodiscard]] DenseMlp read_dense(const Json& json, int32_t hidden);
[[nodiscard]] DenseMlp read_gated_unit(const Json& json, int32_t hidden, bool is_joined);

}  // namespace paceline
