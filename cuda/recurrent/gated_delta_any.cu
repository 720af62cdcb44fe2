// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include "common/convert.cuh"
#include "recurrent/gated_delta_kernel.cuh"
#include "recurrent/gated_delta_portable.h"

namespace paceline::cuda {

void gated_delta_of_any_size(CudaContext& ctx, const GatedDeltaParams& p) {
  const bool is_small = std::max(p.shape.key_dim, p.shape.value_dim) <= kPiece;
  with_element_type(p.dtype, "rows", [&](auto input) {
    with_element_type(p.records.dtype, "records", [&](auto stored) {
      using Input = decltype(input);
      using Stored = decltype(stored);
      if (is_small) return launch_variant<Variant<Input, Stored, 16, 2, 16>>(ctx, p);
      launch_variant<Variant<Input, Stored, 32, 4, 16>>(ctx, p);
    });
  });
}

}  // namespace paceline::cuda
