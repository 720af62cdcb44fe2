// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include <paceline/dtype.h>

#include "ops/weight_matrix.h"

namespace paceline::testing {

// The weights of a product, which op_weights.h makes.
struct WeightSpec {
  DType dtype = DType::kBFloat16;
  WeightFormat format = WeightFormat::kPlain;
  int32_t scale_rows = 0;  // of kFp8
  int32_t scale_cols = 0;  // of kFp8 and kInt4; 0, or of kInt4 no divisor of k: k
  bool has_exact_scales = false;
  // Of kInt4.
  DType scale_dtype = DType::kBFloat16;
  bool has_zeros = false;
  bool has_order = false;
  // The same values as plain numbers. Only where is_exact() holds.
  bool is_dequantized = false;

  // Whether every value is a number of `dtype`, and products sum over the columns in the order of
  // the inputs.
  [[nodiscard]] bool is_exact() const {
    return format == WeightFormat::kMxfp4 || format == WeightFormat::kNvfp4 || has_exact_scales ||
           (format == WeightFormat::kInt4 && !has_order);
  }
};

// Tells such weights apart in the names of cases.
[[nodiscard]] inline std::string weight_suffix(const WeightSpec& s) {
  const std::string dtype = s.dtype == DType::kFloat32 ? "_f32" : "_bf16";
  const std::string plain = s.is_dequantized ? "_plain" : "";
  switch (s.format) {
    case WeightFormat::kPlain:
      return dtype;
    case WeightFormat::kMxfp4:
      return "_mxfp4" + dtype + plain;
    case WeightFormat::kFp8:
      return "_fp8_" + std::to_string(s.scale_rows) + "x" + std::to_string(s.scale_cols) +
             (s.has_exact_scales ? "_exact" : "") + dtype + plain;
    case WeightFormat::kNvfp4:
      return "_nvfp4" + dtype + plain;
    case WeightFormat::kInt4:
      return "_int4_" + std::to_string(s.scale_cols) +
             (s.scale_dtype == DType::kFloat16 ? "_f16" : "") + (s.has_zeros ? "_zeros" : "") +
             (s.has_order ? "_order" : "") + dtype + plain;
  }
  return "";
}

}  // namespace paceline::testing
