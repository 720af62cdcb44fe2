// SPDX-License-Identifier: Apache-2.0
#include "model/layers/dense/layer.h"

#include <optional>

#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "model/forward/activations.h"
#include "model/forward/layer_ops.h"

namespace paceline {

template <class Ctx>
std::optional<CombineExpertsParams> run_mlp(Ctx& ctx, const DenseMlp& m, const DenseMlpWeights& w,
                                            const MlpPass& pass) {
  const PassRows& rows = pass.rows;
  const Activations& activations = pass.activations;
  const Projection projection = {.x = activations.normed,
                                 .y = activations.gate_up,
                                 .x_dtype = activations.dtype,
                                 .y_dtype = activations.dtype};
  const GatedActivationParams activation = {.num_rows = rows.num_rows,
                                            .max_rows = rows.capacity,
                                            .x = activations.gate_up,
                                            .y = activations.activated,
                                            .intermediate = m.intermediate,
                                            .activation = m.activation,
                                            .dtype = activations.dtype,
                                            .alpha = m.alpha,
                                            .limit = m.limit};
  if (pass.ends.norm) {
    ctx.run(normed_gemm,
            NormedGemmParams{.norm = *pass.ends.norm,
                             .product = gemm_params(row_count(rows), w.gate_up, projection),
                             .activation = activation,
                             .has_activation = true});
  } else if (w.gate_up.rows.empty()) {
    ctx.run(activated_gemm,
            ActivatedGemmParams{.product = gemm_params(row_count(rows), w.gate_up, projection),
                                .activation = activation});
  } else {
    project(ctx, row_count(rows), w.gate_up, projection);
    ctx.run(gated_activation, activation);
  }
  project_branch(ctx, row_count(rows), w.down,
                 {.x = activations.activated,
                  .y = activations.branch,
                  .x_dtype = activations.dtype,
                  .y_dtype = activations.dtype},
                 activations, pass.ends);
  return std::nullopt;
}

template std::optional<CombineExpertsParams> run_mlp<CpuContext>(CpuContext&, const DenseMlp&,
                                                                 const WeightsOf<DenseMlp>&,
                                                                 const MlpPass&);
#ifdef PACELINE_CUDA
template std::optional<CombineExpertsParams> run_mlp<CudaContext>(CudaContext&, const DenseMlp&,
                                                                  const WeightsOf<DenseMlp>&,
                                                                  const MlpPass&);
#endif

}  // namespace paceline
