// SPDX-License-Identifier: Apache-2.0
//
// The ops whose kernels are not in the list of emulator.cmake.

#include "not_emulated.h"

#include "attention/prefill_attention.h"
#include "device/cuda_context.h"
#include "gemm/expert_launch.h"
#include "gemm/gemm_planner.h"
#include "gemm/gemm_tiles.h"
#include "ops/latent.h"
#include "ops/moe.h"
#include "ops/ops.h"

namespace paceline {

#define PACELINE_NOT_EMULATED(op, Params) \
  void op(CudaContext&, const Params&) { throw emulator::NotEmulated(#op); }

PACELINE_NOT_EMULATED(absorb_queries, AbsorbQueriesParams)
PACELINE_NOT_EMULATED(append_latents, AppendLatentsParams)
PACELINE_NOT_EMULATED(latent_attention, LatentAttentionParams)
PACELINE_NOT_EMULATED(project_values, ProjectValuesParams)

#undef PACELINE_NOT_EMULATED

// A context without a planner asks for no library.
bool GemmPlanner::run_library(CudaContext&, const GemmParams&) { return false; }
const GemmPlanner::Plan* GemmPlanner::plan_of(const GemmParams&) const { return nullptr; }

namespace cuda {

// Products are those of every GPU (portable_gemm.cu); formats with scales have only the kernels of
// sm_90a.
void launch_tiles(CudaContext&, const GemmParams&, const GatedActivationParams*) {
  throw emulator::NotEmulated("gemm_of_sm_90a");
}
bool takes_activation(const CudaContext&, const GemmParams&) { return false; }

#define PACELINE_FORMAT_NOT_EMULATED(format, name)                                     \
  template <>                                                                          \
  void launch_expert_gemm<WeightFormat::format>(CudaContext&, const ExpertGemmParams&, \
                                                const ProductCall&) {                  \
    throw emulator::NotEmulated(name);                                                 \
  }

PACELINE_FORMAT_NOT_EMULATED(kPlain, "expert_gemm_of_sm_90a")
PACELINE_FORMAT_NOT_EMULATED(kFp8, "products_of_fp8")
PACELINE_FORMAT_NOT_EMULATED(kMxfp4, "products_of_mxfp4")
PACELINE_FORMAT_NOT_EMULATED(kInt4, "products_of_int4")

#undef PACELINE_FORMAT_NOT_EMULATED

// The decode kernel takes all rows.
int32_t prefill_min_rows(const CudaContext&, const PagedAttentionParams&) { return 0; }
void prefill_attention(CudaContext&, const char*, const PagedAttentionParams&, int32_t) {
  throw emulator::NotEmulated("prefill_attention");
}

}  // namespace cuda
}  // namespace paceline
