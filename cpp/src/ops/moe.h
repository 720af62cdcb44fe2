// SPDX-License-Identifier: Apache-2.0
#pragma once

// The ops of a mixture of experts. A row of the pass has top_k places, one for each expert that it
// chose, the best first. A (row, place) pair is an *expert row*: a row of its own in the products
// of its expert. Expert rows are sorted by expert and, within an expert, by row. Their order thus
// depends on the whole batch, but their bits do not. A shared expert can be expert num_experts,
// which every row visits without a place: the expert row of row r is then num_rows * top_k + r.
// The rules of ops.h hold.

#include <cstdint>

#include "ops/ops.h"
#include "ops/weight_matrix.h"

namespace paceline {

// How the chosen experts and their weights follow from the router's logits. NaN counts as -inf.
// Among equals the lower number comes first.
enum class RouterRule : uint8_t {
  // GPT-OSS: the experts with the highest logits. Their weights are the softmax over the chosen
  // logits, exp(logit - best logit) over the sum of these in the order of the places. Where the
  // best logit is infinite, every weight is NaN.
  kSoftmaxOfChosen,
  // Qwen3-MoE without "norm_topk_prob": the same experts. Their weights are the softmax over the
  // logits of all experts.
  kSoftmax,
  // DeepSeek-V3: the experts with the highest score + correction, the score being the sigmoid of
  // the logit. Their weights are the scores alone, as ScoreRouting says. Both backends compute
  // the same bits.
  kSigmoid,
  // DeepSeek-V4: the same with the score sqrt(log(1 + exp(logit))).
  kSqrtSoftplus,
};

// Whether the weights of a rule are those of a softmax.
[[nodiscard]] constexpr bool has_softmax(RouterRule rule) {
  return rule == RouterRule::kSoftmaxOfChosen || rule == RouterRule::kSoftmax;
}

// The settings of the rules that have scores.
struct ScoreRouting {
  // The experts are num_groups groups of the same size, in order. Only those of the top_groups best
  // groups can be chosen. A group is as good as the sum of its two highest score + correction, of
  // which it has two where there are several groups.
  int32_t num_groups = 1;   // divides num_experts; at most kMaxExpertGroups
  int32_t top_groups = 1;   // at most num_groups; the groups have at least top_k experts
  bool normalises = false;  // weight = score / (sum of the chosen in the order of places + 1e-20)
  float scale = 1.0f;       // the last factor of every weight
};
inline constexpr int32_t kMaxExpertGroups = 32;

// The top_k best experts, best first, or those of a table.
struct RouteExpertsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* logits;    // [max_rows, num_experts], rows logits_stride apart
  int64_t logits_stride;  // at least num_experts
  int32_t num_experts;
  int32_t top_k;  // 1 to num_experts, at most kMaxTopK
  RouterRule rule;
  int32_t* experts;                   // [max_rows, top_k]
  float* weights;                     // [max_rows, top_k]
  ScoreRouting scoring = {};          // of rules with scores
  const float* correction = nullptr;  // [num_experts], of rules with scores and without a table
  // A table of experts by token, of kSqrtSoftplus without groups: the experts of a row are those of
  // its token, in the order of the table; rows whose token is outside [0, vocab_size) have those of
  // token 0. Their weights are the scores as above.
  const int32_t* token_experts = nullptr;  // [vocab_size, top_k], or null
  const int32_t* token_ids = nullptr;      // [max_rows], with a table
  int32_t vocab_size = 0;                  // with a table
  // Of softmax rules (Gemma 4): the softmax is that of logits times logit_scale, which is above 0,
  // and expert_scales are factors on the weights.
  float logit_scale = 1.0f;
  const float* expert_scales = nullptr;  // [num_experts], or null
};
inline constexpr int32_t kMaxExperts = 1024;
inline constexpr int32_t kMaxTopK = 32;
// Throws InternalError where the rule does not fit the experts.
void check_routing(const RouteExpertsParams& p);
void route_experts(CpuContext&, const RouteExpertsParams&);
void route_experts(CudaContext&, const RouteExpertsParams&);

// The expert rows in the order of their experts.
struct SortExpertRowsParams {
  const int32_t* num_rows;  // [1] rows of the pass
  int32_t max_rows;
  const int32_t* experts;  // [max_rows, top_k]
  int32_t num_experts;
  int32_t top_k;
  int32_t* expert_begin;  // [num_experts + 1] expert e has the expert rows [begin[e], begin[e + 1])
  int32_t* source_row;    // [max_rows * top_k] the row of the pass of each expert row
  int32_t* expert_row;    // [max_rows, top_k] the expert row of each place
  // [2] counters of the pass's model, for reports: += experts that have rows, without a shared one;
  // += 1. Null: none.
  int64_t* counters;
  // Whether a shared expert follows the others: expert_begin has one number more, and source_row
  // max_rows more.
  bool has_shared = false;
};
void sort_expert_rows(CpuContext&, const SortExpertRowsParams&);
void sort_expert_rows(CudaContext&, const SortExpertRowsParams&);

// route_experts, and sort_expert_rows of the chosen experts: one kernel if there are few rows.
struct RouteAndSortParams {
  RouteExpertsParams route;
  SortExpertRowsParams sort;
};
void route_and_sort(CpuContext&, const RouteAndSortParams&);
void route_and_sort(CudaContext&, const RouteAndSortParams&);

// The router of a mixture: `gemm`, then route_and_sort with its y as the logits. Rows of the matrix
// after those of the experts give numbers that other ops read.
struct RouterParams {
  GemmParams product;  // [at least num_experts, k]; y is route.logits, float32
  RouteExpertsParams route;
  SortExpertRowsParams sort;
};
void run_router(CpuContext&, const RouterParams&);
void run_router(CudaContext&, const RouterParams&);

// y = x W_e^T (+ bias_e) for every expert row, e being its expert. Each output is one sum in the
// order of `gemm`, so that an expert row has the bits that `gemm` gives it alone.
struct ExpertGemmParams {
  const int32_t* expert_begin;  // [num_experts + 1]
  int32_t max_rows;             // capacity in expert rows
  const void* x;  // [*, k] x_dtype, rows x_stride apart; on CUDA rows are 16 B aligned
  int64_t x_stride;
  const int32_t* x_rows;  // [max_rows] row of x of each expert row; null: row i of row i
  int32_t num_x_rows;     // capacity of x in rows
  ExpertMatrices weight;
  const float* bias;  // [num_experts, n], rows bias_stride apart, or null
  void* y;            // [max_rows, n] y_dtype, rows y_stride apart
  int64_t y_stride;
  DType x_dtype = DType::kFloat32;  // on CUDA the dtype of the weights
  DType y_dtype = DType::kFloat32;
  int32_t num_groups = 1;  // of a single matrix, as in GemmParams; not of expert_gemm
  // Whether expert_begin has been read by an earlier expert_gemm of weights other than fp8, so that
  // it is complete even before the op's predecessor is.
  bool follows_product = false;
  // The expert that every row visits: its weights may be fetched before expert_begin is known.
  // -1: none.
  int32_t shared_expert = -1;
  int64_t bias_stride = 0;  // 0: n, as always on CUDA
};
void expert_gemm(CpuContext&, const ExpertGemmParams&);
void expert_gemm(CudaContext&, const ExpertGemmParams&);

// expert_gemm, and gated_activation with its y as x. That y may stay unwritten, because a backend
// may fuse the two.
struct ActivatedExpertsParams {
  ExpertGemmParams product;  // [num_experts, 2 * intermediate, k]
  GatedActivationParams activation;
};
// Throws InternalError where the activation does not read the product.
void check_activation(const ActivatedExpertsParams& p);
void activated_experts(CpuContext&, const ActivatedExpertsParams&);
void activated_experts(CudaContext&, const ActivatedExpertsParams&);

// y = base + sum over the places of a row of weight * x[expert row], by fused multiply-adds in the
// order of the places from base, in float32.
struct CombineExpertsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  int32_t top_k;
  const void* x;              // [max_rows * top_k, hidden] dtype
  const int32_t* expert_row;  // [max_rows, top_k]
  const float* weights;       // [max_rows, top_k]
  void* y;                    // [max_rows, hidden] dtype
  int32_t hidden;
  DType dtype = DType::kFloat32;
  const void* base = nullptr;  // [max_rows, hidden] dtype, may be y; null: 0
  // The base of a row is the output of the shared expert, an expert row of x; `base` is null.
  bool has_shared = false;
  // The base of a row is multiplied by sigmoid_same_bits(base_gate[row * base_gate_stride]).
  const float* base_gate = nullptr;  // [max_rows], with a base; or null
  int64_t base_gate_stride = 0;
  // Elements between rows of x, y and base, which may have more than `hidden`; 0: hidden.
  int64_t stride = 0;
};
void combine_experts(CpuContext&, const CombineExpertsParams&);
void combine_experts(CudaContext&, const CombineExpertsParams&);

// combine_experts, and rms_norm with its y as x and with a residual. That y may stay unwritten,
// because a backend may fuse the two.
struct CombineAndNormParams {
  CombineExpertsParams combine;
  RmsNormParams norm;
};
void combine_and_norm(CpuContext&, const CombineAndNormParams&);
void combine_and_norm(CudaContext&, const CombineAndNormParams&);

}  // namespace paceline
