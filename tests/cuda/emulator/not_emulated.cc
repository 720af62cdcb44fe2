// SPDX-License-Identifier: Apache-2.0
//
// The ops whose kernels are not in the list of emulator.cmake.

#include "not_emulated.h"

#include "attention/latent_launch.h"
#include "attention/prefill_attention.h"
#include "device/cuda_context.h"
#include "gemm/converted_gemm.h"
#include "gemm/expert_launch.h"
#include "gemm/gemm_planner.h"
#include "gemm/gemm_tiles.h"
#include "gemm/normed_gemm.h"
#include "ops/moe.h"
#include "ops/ops.h"

namespace paceline {

// A context without a planner asks for no library.
bool GemmPlanner::run_library(CudaContext&, const GemmParams&) { return false; }
const GemmPlanner::Plan* GemmPlanner::plan_of(const GemmParams&) const { return nullptr; }

namespace cuda {

// Products are those of every GPU (portable_gemm.cu); formats with scales have only the kernels of
// sm_90a.
void launch_tiles(CudaContext&, const GemmParams&, const ProductEnd&) {
  throw emulator::NotEmulated("gemm_of_sm_90a");
}
bool takes_residual(const GemmParams&) { return false; }
bool takes_activation(const CudaContext&, const GemmParams&) { return false; }
bool takes_converted(const CudaContext&, const GemmParams&) { return false; }
bool has_converted_ends(const CudaContext&, const GemmParams&) { return false; }
bool takes_converted_activation(const CudaContext&, const GemmParams&) { return false; }
void launch_converted(CudaContext&, const GemmParams&, const ProductEnd&) {
  throw emulator::NotEmulated("converted_gemm_of_sm_90a");
}
bool takes_norm(const CudaContext&, const NormedGemmParams&) { return false; }
void launch_normed_gemm(CudaContext&, const NormedGemmParams&) {
  throw emulator::NotEmulated("normed_gemm_of_sm_90a");
}

#define PACELINE_FORMAT_NOT_EMULATED(format, name)                                     \
  template <>                                                                          \
  void launch_expert_gemm<WeightFormat::format>(CudaContext&, const ExpertGemmParams&, \
                                                const ProductCall&) {                  \
    throw emulator::NotEmulated(name);                                                 \
  }

PACELINE_FORMAT_NOT_EMULATED(kPlain, "expert_gemm_of_sm_90a")
PACELINE_FORMAT_NOT_EMULATED(kFp8, "products_of_fp8")
PACELINE_FORMAT_NOT_EMULATED(kMxfp4, "products_of_mxfp4")
PACELINE_FORMAT_NOT_EMULATED(kNvfp4, "products_of_nvfp4")
PACELINE_FORMAT_NOT_EMULATED(kInt4, "products_of_int4")

#undef PACELINE_FORMAT_NOT_EMULATED

// The decode kernel takes all rows, and the portable kernel those of latent attention.
int32_t prefill_min_rows(const CudaContext&, const PagedAttentionParams&) { return 0; }
void prefill_attention(CudaContext&, const char*, const PagedAttentionParams&, int32_t) {
  throw emulator::NotEmulated("prefill_attention");
}
namespace latent {
void run_sm90a(CudaContext&, const char*, const PagedAttentionParams&) {
  throw emulator::NotEmulated("latent_attention_of_sm_90a");
}
}  // namespace latent

}  // namespace cuda
}  // namespace paceline
