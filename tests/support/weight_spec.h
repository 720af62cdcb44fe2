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
  int32_t scale_cols = 0;  // of kFp8; 0: k
  bool has_exact_scales = false;
  // The same values as plain numbers. Only of formats that are exact.
  bool is_dequantized = false;

  // Whether every value is a number of `dtype`.
  [[nodiscard]] bool is_exact() const { return format == WeightFormat::kMxfp4 || has_exact_scales; }
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
    case WeightFormat::kInt4:
      return "_int4" + dtype + plain;
  }
  return "";
}

}  // namespace paceline::testing
