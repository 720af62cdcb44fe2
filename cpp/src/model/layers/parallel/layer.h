// SPDX-License-Identifier: Apache-2.0
#pragma once

// The scratch and the forward pass of a dense MLP with a mixture beside it.

#include <cstdint>
#include <optional>

#include "model/forward/layer_pass.h"
#include "model/layers/moe/layer.h"
#include "model/layers/parallel/config.h"
#include "model/layers/parallel/weights.h"
#include "ops/moe.h"

namespace paceline {

// Null in models without this kind.
struct ParallelScratch {
  MoeScratch mixture;
  float* sum;  // [rows, hidden] of the normed branches
};
struct ParallelWidths {
  using Scratch = ParallelScratch;
  MoeWidths mixture;
  int64_t hidden = 0;  // 0: no layer is of this kind

  void merge(const ParallelMlp& mlp, const ScratchSizes& sizes);
  [[nodiscard]] ParallelScratch allocate(DeviceArena& arena, int64_t rows, DType dtype) const;
};
template <>
struct KindWidths<ParallelMlp> {
  using Type = ParallelWidths;
};

// Returns nothing: the sum of the branches is complete.
template <class Ctx>
[[nodiscard]] std::optional<CombineExpertsParams> run_mlp(Ctx& ctx, const ParallelMlp& mlp,
                                                          const WeightsOf<ParallelMlp>& weights,
                                                          const MlpPass& pass);

}  // namespace paceline
