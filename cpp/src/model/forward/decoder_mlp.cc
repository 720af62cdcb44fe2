// SPDX-License-Identifier: Apache-2.0

// The MLP of a layer: dense, or a mixture of experts.

#include <optional>
#include <variant>

#include "base/overloaded.h"
#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "model/forward/decoder.h"
#include "model/forward/layer_ops.h"
#include "ops/moe.h"

namespace paceline {

template <class Ctx>
std::optional<CombineExpertsParams> Decoder::mlp(Ctx& ctx, int32_t layer, const PassRows& rows,
                                                 const Activations& activations) const {
  using Rest = std::optional<CombineExpertsParams>;
  const LayerWeights& lw = weights().layers[layer];
  return std::visit(
      Overloaded{[&](const DenseMlp& m) -> Rest {
                   dense_mlp(ctx, m, std::get<DenseMlpWeights>(lw.mlp), rows, activations);
                   return std::nullopt;
                 },
                 [&](const MoeMlp& m) -> Rest {
                   return mixture(ctx, m, std::get<MoeMlpWeights>(lw.mlp), rows, activations);
                 }},
      config().layers[layer].mlp);
}

template <class Ctx>
void Decoder::dense_mlp(Ctx& ctx, const DenseMlp& m, const DenseMlpWeights& w, const PassRows& rows,
                        const Activations& activations) const {
  ctx.run(activated_gemm,
          ActivatedGemmParams{.product = gemm_params(row_count(rows), w.gate_up,
                                                     {.x = activations.normed,
                                                      .y = activations.gate_up,
                                                      .x_dtype = activations.dtype,
                                                      .y_dtype = activations.dtype}),
                              .activation = {.num_rows = rows.num_rows,
                                             .max_rows = rows.capacity,
                                             .x = activations.gate_up,
                                             .y = activations.activated,
                                             .intermediate = m.intermediate,
                                             .activation = m.activation,
                                             .dtype = activations.dtype,
                                             .alpha = m.alpha,
                                             .limit = m.limit}});
  project(ctx, row_count(rows), w.down,
          {.x = activations.activated,
           .y = activations.branch,
           .x_dtype = activations.dtype,
           .y_dtype = activations.dtype});
}

template <class Ctx>
CombineExpertsParams Decoder::mixture(Ctx& ctx, const MoeMlp& m, const MoeMlpWeights& w,
                                      const PassRows& rows, const Activations& activations) const {
  const ExpertActivations& a = activations.experts;
  const DType dtype = activations.dtype;
  const bool is_joined = m.joins_shared() && rows.capacity <= kMaxJoinedRows;
  const int32_t num_experts = m.num_experts + (is_joined ? 1 : 0);
  const int32_t max_expert_rows = rows.capacity * (m.top_k + (is_joined ? 1 : 0));
  // First, because it uses the buffers of the experts.
  if (m.shared && !is_joined) dense_mlp(ctx, *m.shared, w.shared, rows, activations);
  ctx.run(run_router, RouterParams{.product = {.num_rows = rows.num_rows,
                                               .max_rows = rows.capacity,
                                               .x = activations.normed,
                                               .x_stride = w.router.weight.k,
                                               .weight = w.router.weight,
                                               .bias = w.router.bias,
                                               .y = a.logits,
                                               .y_stride = m.num_experts,
                                               .x_dtype = dtype,
                                               .y_dtype = DType::kFloat32},
                                   .route = {.num_rows = rows.num_rows,
                                             .max_rows = rows.capacity,
                                             .logits = a.logits,
                                             .num_experts = m.num_experts,
                                             .top_k = m.top_k,
                                             .rule = m.router,
                                             .experts = a.experts,
                                             .weights = a.weights,
                                             .scoring = m.scoring,
                                             .correction = w.correction,
                                             .token_experts = w.token_experts,
                                             .token_ids = rows.token_ids,
                                             .vocab_size = config().vocab_size},
                                   .sort = {.num_rows = rows.num_rows,
                                            .max_rows = rows.capacity,
                                            .experts = a.experts,
                                            .num_experts = m.num_experts,
                                            .top_k = m.top_k,
                                            .expert_begin = a.expert_begin,
                                            .source_row = a.source_row,
                                            .expert_row = a.expert_row,
                                            .counters = expert_counters_,
                                            .has_shared = is_joined}});
  const auto product = [&](const ExpertLinears& linears, const void* x, const int32_t* x_rows,
                           int32_t num_x_rows, void* y) {
    const WeightMatrix& first = linears.weight.first;
    ExpertMatrices weight = linears.weight;
    weight.num_experts = num_experts;
    return ExpertGemmParams{.expert_begin = a.expert_begin,
                            .max_rows = max_expert_rows,
                            .x = x,
                            .x_stride = first.k,
                            .x_rows = x_rows,
                            .num_x_rows = num_x_rows,
                            .weight = weight,
                            .bias = linears.bias,
                            .y = y,
                            .y_stride = first.n,
                            .x_dtype = dtype,
                            .y_dtype = dtype,
                            .shared_expert = is_joined ? m.num_experts : -1};
  };
  ctx.run(activated_experts,
          ActivatedExpertsParams{.product = product(w.gate_up, activations.normed, a.source_row,
                                                    rows.capacity, activations.gate_up),
                                 .activation = {.num_rows = a.expert_begin + num_experts,
                                                .max_rows = max_expert_rows,
                                                .x = activations.gate_up,
                                                .y = activations.activated,
                                                .intermediate = m.expert.intermediate,
                                                .activation = m.expert.activation,
                                                .dtype = dtype,
                                                .alpha = m.expert.alpha,
                                                .limit = m.expert.limit,
                                                .is_interleaved = m.is_interleaved}});
  ExpertGemmParams down =
      product(w.down, activations.activated, /*x_rows=*/nullptr, max_expert_rows, a.output);
  down.follows_product = w.gate_up.weight.first.format != WeightFormat::kFp8;
  ctx.run(expert_gemm, down);
  return {.num_rows = rows.num_rows,
          .max_rows = rows.capacity,
          .top_k = m.top_k,
          .x = a.output,
          .expert_row = a.expert_row,
          .weights = a.weights,
          .y = activations.branch,
          .hidden = config().hidden,
          .dtype = dtype,
          .base = m.shared && !is_joined ? activations.branch : nullptr,
          .has_shared = is_joined};
}

template std::optional<CombineExpertsParams> Decoder::mlp<CpuContext>(CpuContext&, int32_t,
                                                                      const PassRows&,
                                                                      const Activations&) const;
#ifdef PACELINE_CUDA
template std::optional<CombineExpertsParams> Decoder::mlp<CudaContext>(CudaContext&, int32_t,
                                                                       const PassRows&,
                                                                       const Activations&) const;
#endif

}  // namespace paceline
