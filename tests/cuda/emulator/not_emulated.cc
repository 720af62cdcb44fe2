// SPDX-License-Identifier: Apache-2.0
//
// The ops whose kernels are not in the list of emulator.cmake.

#include "not_emulated.h"

#include "attention/prefill_attention.h"
#include "device/cuda_context.h"
#include "ops/latent.h"
#include "ops/moe.h"
#include "ops/ops.h"

namespace paceline {

#define PACELINE_NOT_EMULATED(op, Params) \
  void op(CudaContext&, const Params&) { throw emulator::NotEmulated(#op); }

PACELINE_NOT_EMULATED(absorb_queries, AbsorbQueriesParams)
PACELINE_NOT_EMULATED(activated_experts, ActivatedExpertsParams)
PACELINE_NOT_EMULATED(activated_gemm, ActivatedGemmParams)
PACELINE_NOT_EMULATED(append_latents, AppendLatentsParams)
PACELINE_NOT_EMULATED(expert_gemm, ExpertGemmParams)
PACELINE_NOT_EMULATED(gemm, GemmParams)
PACELINE_NOT_EMULATED(latent_attention, LatentAttentionParams)
PACELINE_NOT_EMULATED(project_values, ProjectValuesParams)

#undef PACELINE_NOT_EMULATED

namespace cuda {

// The decode kernel takes all rows.
int32_t prefill_min_rows(const CudaContext&, const PagedAttentionParams&) { return 0; }
void prefill_attention(CudaContext&, const char*, const PagedAttentionParams&, int32_t) {
  throw emulator::NotEmulated("prefill_attention");
}

}  // namespace cuda
}  // namespace paceline
