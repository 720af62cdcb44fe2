// SPDX-License-Identifier: Apache-2.0
#pragma once

// A matrix of a model together with its bias: y = x W^T + bias.

#include <cstdint>

#include "ops/weight_matrix.h"

namespace paceline {

// How a matrix would be split over several devices.
enum class ShardAxis : uint8_t {
  kNone,
  kRows,     // each device computes a part of the outputs
  kColumns,  // each device sums over a part of the inputs
};

struct Linear {
  WeightMatrix weight;          // data is null in a model that has no such matrix
  const float* bias = nullptr;  // [n], or null
  ShardAxis shard = ShardAxis::kNone;
  int32_t num_groups = 1;  // GemmParams::num_groups

  [[nodiscard]] bool is_present() const { return weight.data != nullptr; }
};

// The same matrix of every expert of a mixture, with its bias.
struct ExpertLinears {
  ExpertMatrices weight;
  const float* bias = nullptr;  // [num_experts, n], or null
  ShardAxis shard = ShardAxis::kNone;
};

}  // namespace paceline
