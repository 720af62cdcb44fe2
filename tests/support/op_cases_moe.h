// SPDX-License-Identifier: Apache-2.0
#pragma once

// The op cases of a mixture of experts.

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "ops/moe.h"
#include "support/op_cases.h"
#include "support/op_weights.h"

namespace paceline::testing {

struct RouteSpec {
  int32_t num_experts = 0;
  int32_t top_k = 0;
  LogitKind logits = LogitKind::kPlain;  // kHoles: rows without a valid logit have NaN weights
  RouterRule rule = RouterRule::kSoftmaxOfChosen;
  ScoreRouting scoring = {};
  int32_t vocab_size = 0;  // not 0: experts by token
  float logit_scale = 1.0f;
  bool has_expert_scales = false;
  int32_t logits_padding = 0;  // between rows: the best logits
};

// A router, from its rows to the order of the expert rows.
struct RouterSpec {
  int32_t num_experts = 0;
  int32_t top_k = 0;
  int32_t k = 0;
  DType dtype = DType::kBFloat16;
  // kPlain, kTies, kHoles or kInfinite. Every sum is exact in any order, so that backends agree in
  // the choice of experts.
  LogitKind logits = LogitKind::kPlain;
  bool has_bias = true;
  int32_t x_padding = 0;
  RouterRule rule = RouterRule::kSoftmaxOfChosen;
  ScoreRouting scoring = {};
  float logit_scale = 1.0f;
  bool has_expert_scales = false;
  bool has_gate = false;  // in one more row of the matrix

  [[nodiscard]] int32_t outputs() const { return num_experts + (has_gate ? 1 : 0); }
};

// Where the rows of a batch go.
enum class Routed : uint8_t {
  kRandom,
  kTogether,  // every row chooses the same experts
  kSpread,    // rows with consecutive identities share experts as little as they can
};

struct SortSpec {
  int32_t num_experts = 0;
  int32_t top_k = 0;
  Routed routed = Routed::kRandom;
  bool has_counters = true;
  bool has_shared = false;
};
struct ExpertGemmSpec {
  int32_t num_experts = 0;
  int32_t top_k = 0;
  int32_t n = 0;
  int32_t k = 0;
  WeightSpec weight = {};
  DType y_dtype = DType::kBFloat16;
  bool has_bias = false;
  bool is_gathered = true;  // x has a row for each row of the pass, else for each expert row
  Routed routed = Routed::kRandom;
  int32_t shift = 0;  // as in WeightArrays
  int32_t x_padding = 0;
  int32_t y_padding = 0;
};
struct CombineSpec {
  int32_t hidden = 0;
  int32_t top_k = 0;
  DType dtype = DType::kBFloat16;
  bool only_adds = false;  // of make_combine_and_norm: to the residual
  bool has_base = false;   // which is y
  bool has_shared = false;
  int32_t base_gate_stride = 0;  // 0: no gate
};
// From the router's logits to the combined rows.
struct MixtureSpec {
  int32_t hidden = 0;
  int32_t num_experts = 0;
  int32_t top_k = 0;
  int32_t intermediate = 0;
  WeightSpec weight = {};
  bool is_interleaved = true;
  Routed routed = Routed::kRandom;
  int32_t shift = 0;  // as in WeightArrays
  Activation activation = Activation::kSwigluOai;
  bool activates_alone = false;  // by an op of its own, after the product
};

[[nodiscard]] OpInstance make_route(const RouteSpec& spec, const Rows& rows, uint64_t seed);
// A row has its experts and weights; the order of the expert rows depends on the batch.
[[nodiscard]] OpInstance make_route_and_sort(const RouteSpec& spec, const Rows& rows,
                                             uint64_t seed);
// The same of run_router.
[[nodiscard]] OpInstance make_router(const RouterSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_sort(const SortSpec& spec, const Rows& rows, uint64_t seed);
// A row is one of the pass; of its expert rows, that of place id % top_k stands for it.
[[nodiscard]] OpInstance make_expert_gemm(const ExpertGemmSpec& spec, const Rows& rows,
                                          uint64_t seed);
// The same arrays; `gemm` computes the expert rows one by one.
[[nodiscard]] OpInstance make_gemms_of_expert_rows(const ExpertGemmSpec& spec, const Rows& rows,
                                                   uint64_t seed);
[[nodiscard]] OpInstance make_combine(const CombineSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_combine_and_norm(const CombineSpec& spec, const Rows& rows,
                                               uint64_t seed);
[[nodiscard]] OpInstance make_mixture(const MixtureSpec& spec, const Rows& rows, uint64_t seed);

[[nodiscard]] std::vector<RowWiseCase> moe_row_wise_cases();
// Sorting, whose results depend on the batch, and the large batches of real shapes.
[[nodiscard]] std::vector<OpCase> moe_op_cases();

// The products of experts in the table, for tests that compare them with other products.
struct ExpertGemmCase {
  std::string name;
  ExpertGemmSpec spec;
};
[[nodiscard]] std::vector<ExpertGemmCase> expert_gemm_cases();

}  // namespace paceline::testing
