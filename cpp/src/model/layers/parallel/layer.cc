// SPDX-License-Identifier: Apache-2.0
#include "model/layers/parallel/layer.h"

#include <algorithm>
#include <optional>

#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "model/forward/activations.h"
#include "model/forward/layer_ops.h"
#include "model/layers/dense/layer.h"
#include "ops/moe.h"

namespace paceline {

void ParallelWidths::merge(const ParallelMlp& mlp, const ScratchSizes& sizes) {
  mixture.merge(mlp.mixture, sizes);
  hidden = std::max(hidden, sizes.hidden);
}

ParallelScratch ParallelWidths::allocate(DeviceArena& arena, int64_t rows, DType dtype) const {
  if (hidden == 0) return {};
  return {.mixture = mixture.allocate(arena, rows, dtype),
          .sum = arena.allocate<float>(rows * hidden, "activations")};
}

template <class Ctx>
std::optional<CombineExpertsParams> run_mlp(Ctx& ctx, const ParallelMlp& m,
                                            const ParallelMlpWeights& w, const MlpPass& pass) {
  const PassRows& rows = pass.rows;
  const Activations& activations = pass.activations;
  const DecoderConfig& c = pass.config;
  const auto& scratch = activations.of<ParallelScratch>();
  const auto norm_of = [&](const void* x, DType x_dtype, const float* weight, void* y,
                           DType y_dtype) {
    normalise(ctx, row_count(rows), c,
              {.x = x,
               .x_stride = c.hidden,
               .weight = weight,
               .y = y,
               .y_stride = c.hidden,
               .hidden = c.hidden,
               .x_dtype = x_dtype,
               .y_dtype = y_dtype});
  };
  const auto norm_of_residual = [&](const float* weight) {
    norm_of(activations.residual, DType::kFloat32, weight, activations.normed, activations.dtype);
  };
  MlpPass dense = pass;
  dense.ends = {};  // those of the whole MLP
  static_cast<void>(run_mlp(ctx, m.dense, w.dense, dense));
  norm_of(activations.branch, activations.dtype, w.dense_norm, scratch.sum, DType::kFloat32);
  norm_of_residual(w.router_norm);
  route_rows(ctx, m.mixture, w.mixture, pass, scratch.mixture);
  norm_of_residual(w.expert_norm);
  const ExpertsOutput output = run_experts(ctx, m.mixture, w.mixture, pass, scratch.mixture);
  const RmsNormParams norm = {.num_rows = rows.num_rows,
                              .max_rows = rows.capacity,
                              .x = activations.branch,
                              .x_stride = c.hidden,
                              .residual = scratch.sum,
                              .weight = nullptr,
                              .weight_offset = c.norm_weight_offset,
                              .eps = c.norm_eps,
                              .y = activations.branch,
                              .y_stride = c.hidden,
                              .hidden = c.hidden,
                              .x_weight = w.mixture_norm,
                              .x_dtype = activations.dtype,
                              .y_dtype = activations.dtype};
  if (output.exchange) {
    ctx.run(gathered_norm,
            GatheredNormParams{.gather = *output.exchange, .norm = norm, .places = output.places});
  } else {
    ctx.run(combine_and_norm, CombineAndNormParams{.combine = output.places, .norm = norm});
  }
  return std::nullopt;
}

template std::optional<CombineExpertsParams> run_mlp<CpuContext>(CpuContext&, const ParallelMlp&,
                                                                 const WeightsOf<ParallelMlp>&,
                                                                 const MlpPass&);
#ifdef PACELINE_CUDA
template std::optional<CombineExpertsParams> run_mlp<CudaContext>(CudaContext&, const ParallelMlp&,
                                                                  const WeightsOf<ParallelMlp>&,
                                                                  const MlpPass&);
#endif

}  // namespace paceline
