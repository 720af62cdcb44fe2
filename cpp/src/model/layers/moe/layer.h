// SPDX-License-Identifier: Apache-2.0
#pragma once

// The scratch and the forward pass of a mixture of experts.

#include <cstdint>
#include <optional>

#include "model/forward/layer_pass.h"
#include "model/layers/moe/config.h"
#include "model/layers/moe/weights.h"
#include "ops/moe.h"

namespace paceline {

// Scratch buffers of a mixture of experts; null in models without one. Expert rows are those of
// ops/moe.h, and in mixtures with MoeMlp::joins_shared one for each of up to kMaxJoinedRows rows.
struct MoeScratch {
  float* logits;          // [rows, num_experts] of the router, or one more with a shared gate
  int32_t* experts;       // [rows, top_k]
  float* weights;         // [rows, top_k]
  int32_t* expert_begin;  // [num_experts + 2]
  int32_t* source_row;    // [expert rows]
  int32_t* expert_row;    // [rows, top_k]
  void* output;           // [expert rows, hidden] dtype of the activations
};
struct MoeWidths {
  using Scratch = MoeScratch;
  int64_t hidden = 0;
  int64_t num_experts = 0;
  int64_t num_logits = 0;  // of a row
  int64_t top_k = 0;
  int64_t expert_output = 0;  // of all places of a row
  bool has_joined = false;    // whether a shared expert has expert rows

  void merge(const MoeMlp& mlp, const ScratchSizes& sizes);
  [[nodiscard]] MoeScratch allocate(DeviceArena& arena, int64_t rows, DType dtype) const;
};
template <>
struct KindWidths<MoeMlp> {
  using Type = MoeWidths;
};

// What remains to be done of a mixture: the sum of the places and, where ranks share the experts,
// the exchange of this sum, of which each rank makes its columns.
struct ExpertsOutput {
  CombineExpertsParams places;
  std::optional<GatherColumnsParams> exchange;
};

// The two halves of a mixture without a shared expert that has buffers of its own. The router and
// the experts read activations.normed, which may change between them.
template <class Ctx>
void route_rows(Ctx& ctx, const MoeMlp& mlp, const MoeMlpWeights& weights, const MlpPass& pass,
                const MoeScratch& scratch);
template <class Ctx>
[[nodiscard]] ExpertsOutput run_experts(Ctx& ctx, const MoeMlp& mlp, const MoeMlpWeights& weights,
                                        const MlpPass& pass, const MoeScratch& scratch);

// A mixture leaves its last op to the caller, and its exchange where the caller takes it
// (BranchEnds::exchange).
template <class Ctx>
[[nodiscard]] std::optional<CombineExpertsParams> run_mlp(Ctx& ctx, const MoeMlp& mlp,
                                                          const WeightsOf<MoeMlp>& weights,
                                                          const MlpPass& pass);

}  // namespace paceline
