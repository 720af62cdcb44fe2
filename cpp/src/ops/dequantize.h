// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows of a matrix with scales as plain numbers, for the CPU ops.

#include <cstdint>

#include "ops/weight_matrix.h"

namespace paceline {

// Whether an element times its scale is the value that products read. Otherwise they read the
// element, and the scale multiplies a sum of products.
[[nodiscard]] constexpr bool has_exact_values(const WeightMatrix& weight) {
  return weight.format != WeightFormat::kFp8 || weight.has_exact_scales;
}

// Writes rows [row, row + num_rows) to `to`, whose elements are float (weight.dtype kFloat32) or
// the bits of a bfloat16 (kBFloat16): elements times their scales, or just elements, as above.
// Columns stay in the order of the matrix.
// prefetch: null, or memory that is fetched meanwhile, as many bytes as the rows have.
template <class Value>
void dequantize_rows(const WeightMatrix& weight, int32_t row, int32_t num_rows, Value* to,
                     const std::byte* prefetch);
extern template void dequantize_rows(const WeightMatrix&, int32_t, int32_t, float*,
                                     const std::byte*);
extern template void dequantize_rows(const WeightMatrix&, int32_t, int32_t, uint16_t*,
                                     const std::byte*);

// Writes `count` scales of a kInt4 matrix as floats, from its scale `first` on.
void int4_scales(const WeightMatrix& weight, int64_t first, int32_t count, float* to);

// The scales of a row of a kFp8 matrix, one for each scale_cols columns.
[[nodiscard]] const float* fp8_scales(const WeightMatrix& weight, int32_t row);

}  // namespace paceline
