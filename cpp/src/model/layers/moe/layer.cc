// SPDX-License-Identifier: Apache-2.0
#include "model/layers/moe/layer.h"

#include <algorithm>
#include <optional>

#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "model/forward/activations.h"
#include "model/forward/layer_ops.h"
#include "model/layers/dense/layer.h"
#include "ops/moe.h"

namespace paceline {

void MoeWidths::merge(const MoeMlp& mlp, const ScratchSizes& sizes) {
  const int64_t places = mlp.top_k;
  hidden = std::max(hidden, sizes.hidden);
  num_experts = std::max<int64_t>(num_experts, mlp.num_experts);
  num_logits = std::max<int64_t>(num_logits, mlp.num_experts + (mlp.has_shared_gate ? 1 : 0));
  top_k = std::max(top_k, places);
  expert_output = std::max(expert_output, places * sizes.hidden);
  has_joined = has_joined || mlp.joins_shared();
}

MoeScratch MoeWidths::allocate(DeviceArena& arena, int64_t rows, DType dtype) const {
  if (top_k == 0) return {};
  const auto ints = [&](int64_t count) { return arena.allocate<int32_t>(count, "activations"); };
  const auto floats = [&](int64_t count) { return arena.allocate<float>(count, "activations"); };
  const int64_t joined_rows = has_joined ? std::min<int64_t>(rows, kMaxJoinedRows) : 0;
  const int64_t outputs = rows * expert_output + joined_rows * hidden;
  return {.logits = floats(rows * num_logits),
          .experts = ints(rows * top_k),
          .weights = floats(rows * top_k),
          .expert_begin = ints(num_experts + 2),
          .source_row = ints(rows * top_k + joined_rows),
          .expert_row = ints(rows * top_k),
          .output = arena.allocate<std::byte>(outputs * dtype_bytes(dtype), "activations")};
}

namespace {

// Whether the shared expert is computed with the others.
[[nodiscard]] bool is_joined(const MoeMlp& m, const PassRows& rows) {
  return m.joins_shared() && rows.capacity <= kMaxJoinedRows;
}

}  // namespace

template <class Ctx>
void route_rows(Ctx& ctx, const MoeMlp& m, const MoeMlpWeights& w, const MlpPass& pass,
                const MoeScratch& a) {
  const PassRows& rows = pass.rows;
  const Activations& activations = pass.activations;
  ctx.run(run_router, RouterParams{.product = {.num_rows = rows.num_rows,
                                               .max_rows = rows.capacity,
                                               .x = activations.normed,
                                               .x_stride = w.router.weight.k,
                                               .weight = w.router.weight,
                                               .bias = w.router.bias,
                                               .y = a.logits,
                                               .y_stride = w.router.weight.n,
                                               .x_dtype = activations.dtype,
                                               .y_dtype = DType::kFloat32},
                                   .route = {.num_rows = rows.num_rows,
                                             .max_rows = rows.capacity,
                                             .logits = a.logits,
                                             .logits_stride = w.router.weight.n,
                                             .num_experts = m.num_experts,
                                             .top_k = m.top_k,
                                             .rule = m.router,
                                             .experts = a.experts,
                                             .weights = a.weights,
                                             .scoring = m.scoring,
                                             .correction = w.correction,
                                             .token_experts = w.token_experts,
                                             .token_ids = rows.token_ids,
                                             .vocab_size = pass.config.vocab_size,
                                             .logit_scale = m.logit_scale,
                                             .expert_scales = w.expert_scales},
                                   .sort = {.num_rows = rows.num_rows,
                                            .max_rows = rows.capacity,
                                            .experts = a.experts,
                                            .num_experts = m.num_experts,
                                            .top_k = m.top_k,
                                            .expert_begin = a.expert_begin,
                                            .source_row = a.source_row,
                                            .expert_row = a.expert_row,
                                            .counters = pass.expert_counters,
                                            .has_shared = is_joined(m, rows)}});
}

template <class Ctx>
ExpertsOutput run_experts(Ctx& ctx, const MoeMlp& m, const MoeMlpWeights& w, const MlpPass& pass,
                          const MoeScratch& a) {
  const PassRows& rows = pass.rows;
  const Activations& activations = pass.activations;
  const DType dtype = activations.dtype;
  const bool has_joined = is_joined(m, rows);
  const int32_t num_experts = m.num_experts + (has_joined ? 1 : 0);
  const int32_t max_expert_rows = rows.capacity * (m.top_k + (has_joined ? 1 : 0));
  // `y_stride`: 0: as wide as the product.
  const auto product = [&](const ExpertLinears& linears, const void* x, const int32_t* x_rows,
                           int32_t num_x_rows, void* y, int64_t y_stride = 0) {
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
                            .y_stride = y_stride > 0 ? y_stride : first.n,
                            .x_dtype = dtype,
                            .y_dtype = dtype,
                            .shared_expert = has_joined ? m.num_experts : -1,
                            .bias_stride = linears.bias_stride};
  };
  const GatedActivationParams activation = {.num_rows = a.expert_begin + num_experts,
                                            .max_rows = max_expert_rows,
                                            .x = activations.gate_up,
                                            .y = activations.activated,
                                            .intermediate = m.expert.intermediate,
                                            .activation = m.expert.activation,
                                            .dtype = dtype,
                                            .alpha = m.expert.alpha,
                                            .limit = m.expert.limit,
                                            .is_interleaved = m.is_interleaved};
  if (w.gate_up.rows.empty()) {
    ctx.run(activated_experts,
            ActivatedExpertsParams{.product = product(w.gate_up, activations.normed, a.source_row,
                                                      rows.capacity, activations.gate_up),
                                   .activation = activation});
  } else {
    void* y = activations.gate_up;
    for (const LinearRange& range : w.gate_up.rows) {
      ctx.run(expert_gemm, product(rows_of(w.gate_up, range), activations.normed, a.source_row,
                                   rows.capacity, y, w.gate_up.weight.first.n));
      y = element(y, range.count, dtype);
    }
    ctx.run(gated_activation, activation);
  }
  CombineExpertsParams places = {
      .num_rows = rows.num_rows,
      .max_rows = rows.capacity,
      .top_k = m.top_k,
      .x = a.output,
      .expert_row = a.expert_row,
      .weights = a.weights,
      .y = activations.branch,
      .hidden = pass.config.hidden,
      .dtype = dtype,
      .base = m.shared && !has_joined ? activations.branch : nullptr,
      .has_shared = has_joined,
      .base_gate = m.has_shared_gate ? a.logits + m.num_experts : nullptr,
      .base_gate_stride = w.router.weight.n};
  if (!w.down.is_gathered()) {
    ExpertGemmParams down =
        product(w.down, activations.activated, /*x_rows=*/nullptr, max_expert_rows, a.output);
    down.follows_product = w.gate_up.weight.first.format != WeightFormat::kFp8;
    ctx.run(expert_gemm, down);
    return {.places = places, .exchange = std::nullopt};
  }
  const RowCount expert_rows = {.num_rows = a.expert_begin + num_experts,
                                .max_rows = max_expert_rows};
  const int32_t rank = activations.ranks.rank;
  const LinearRange own = w.down.outputs.of(rank);
  const int32_t all_outputs = w.down.outputs.total();
  gather_ranks(ctx, expert_rows, activations,
               {.x = activations.activated,
                .x_stride = w.down.inputs.of(rank).count,
                .columns = w.down.inputs,
                .y = activations.gathered,
                .dtype = dtype});
  void* const own_output = element(a.output, own.first, dtype);
  ctx.run(expert_gemm, product(w.down, activations.gathered, /*x_rows=*/nullptr, max_expert_rows,
                               own_output, all_outputs));
  // A sum needs the rank's columns only, and is exchanged in fewer bytes than its places.
  places.x = own_output;
  places.y = element(activations.branch, own.first, dtype);
  if (places.base != nullptr) places.base = places.y;
  places.hidden = own.count;
  places.stride = all_outputs;
  return {
      .places = places,
      .exchange = gather_params({.num_rows = rows.num_rows, .max_rows = rows.capacity}, activations,
                                {.x = places.y,
                                 .x_stride = all_outputs,
                                 .columns = w.down.outputs,
                                 .y = activations.branch,
                                 .dtype = dtype})};
}

template <class Ctx>
std::optional<CombineExpertsParams> run_mlp(Ctx& ctx, const MoeMlp& m, const MoeMlpWeights& w,
                                            const MlpPass& pass) {
  const auto& scratch = pass.activations.of<MoeScratch>();
  // First, because it uses the buffers of the experts.
  if (m.shared && !is_joined(m, pass.rows)) {
    // The sum reads this rank's columns of the output, so that is not exchanged if the experts'
    // columns are the same.
    std::optional<GatherColumnsParams> unneeded;
    MlpPass shared = pass;
    shared.ends = {};
    if (w.shared.down.outputs.first == w.down.outputs.first) shared.ends.exchange = &unneeded;
    static_cast<void>(run_mlp(ctx, *m.shared, w.shared, shared));
  }
  route_rows(ctx, m, w, pass, scratch);
  const ExpertsOutput output = run_experts(ctx, m, w, pass, scratch);
  if (!output.exchange || pass.ends.exchange != nullptr) {
    if (output.exchange) *pass.ends.exchange = output.exchange;
    return output.places;
  }
  ctx.run(combine_experts, output.places);
  ctx.run(gather_columns, *output.exchange);
  return std::nullopt;
}

#define PACELINE_INSTANTIATE_MIXTURE(Ctx)                                                  \
  template void route_rows<Ctx>(Ctx&, const MoeMlp&, const MoeMlpWeights&, const MlpPass&, \
                                const MoeScratch&);                                        \
  template ExpertsOutput run_experts<Ctx>(Ctx&, const MoeMlp&, const MoeMlpWeights&,       \
                                          const MlpPass&, const MoeScratch&);              \
  template std::optional<CombineExpertsParams> run_mlp<Ctx>(                               \
      Ctx&, const MoeMlp&, const WeightsOf<MoeMlp>&, const MlpPass&)
PACELINE_INSTANTIATE_MIXTURE(CpuContext);
#ifdef PACELINE_CUDA
PACELINE_INSTANTIATE_MIXTURE(CudaContext);
#endif
#undef PACELINE_INSTANTIATE_MIXTURE

}  // namespace paceline
