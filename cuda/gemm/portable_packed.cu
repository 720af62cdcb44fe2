// SPDX-License-Identifier: Apache-2.0

// Products of weights with scales on every GPU since sm_80: of any number of rows, in tiles of up
// to
// 16. Later tiles read their weights from the L2 cache.

#include "gemm/packed_warps.cuh"
#include "gemm/portable_gemm.h"

namespace paceline::cuda {
namespace {

template <bool kHasTileSums>
void launch_fp8(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  if (rows_to_expect(p) <= 8) {
    return launch_narrow<NarrowShape<WeightFormat::kFp8, 1, 4>, kHasTileSums>(ctx, p, call);
  }
  launch_narrow<NarrowShape<WeightFormat::kFp8, 2, 4>, kHasTileSums>(ctx, p, call);
}

}  // namespace

void launch_portable_packed(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  if (p.weight.first.format == WeightFormat::kMxfp4) {
    return launch_warps<WeightFormat::kMxfp4, false>(ctx, p, call);
  }
  if (p.weight.first.format == WeightFormat::kNvfp4) {
    return launch_warps<WeightFormat::kNvfp4, false>(ctx, p, call);
  }
  if (p.weight.first.format == WeightFormat::kInt4) {
    return launch_warps<WeightFormat::kInt4, false>(ctx, p, call);
  }
  if (scale_args(p.weight).use != ScaleUse::kTileSums) return launch_fp8<false>(ctx, p, call);
  // For 16 tokens this kernel needs more shared memory than a block of every GPU has.
  using Parts = PartsShape<1>;
  if (p.expert_begin == nullptr && rows_to_expect(p) <= Parts::kTokens &&
      row_tiles_per_sm(ctx, p) < 5) {
    return launch_parts<Parts>(ctx, p, call);
  }
  launch_fp8<true>(ctx, p, call);
}

}  // namespace paceline::cuda
