// SPDX-License-Identifier: Apache-2.0
#pragma once

// Random matrices of weights with scales, and the values that they stand for.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "base/float_types.h"
#include "ops/weight_matrix.h"
#include "support/op_checks.h"

namespace paceline::testing {

struct ScaledFormat {
  WeightFormat format = WeightFormat::kMxfp4;
  int32_t scale_rows = 0;
  int32_t scale_cols = 0;  // 0: all of K
  bool has_exact_scales = false;
  DType scale_dtype = DType::kBFloat16;  // of kInt4
  bool has_zeros = false;                // of kInt4
  bool has_order = false;                // of kInt4
};

inline std::string name_of(const ScaledFormat& f) {
  if (f.format == WeightFormat::kPlain) return "plain";
  if (f.format == WeightFormat::kMxfp4) return "mxfp4";
  if (f.format == WeightFormat::kNvfp4) return "nvfp4";
  if (f.format == WeightFormat::kInt4) {
    return "int4 " + (f.scale_cols == 0 ? "K" : std::to_string(f.scale_cols)) + " " +
           std::string(dtype_name(f.scale_dtype)) + (f.has_zeros ? " zeros" : "") +
           (f.has_order ? " order" : "");
  }
  return "fp8 " + std::to_string(f.scale_rows) + "x" +
         (f.scale_cols == 0 ? "K" : std::to_string(f.scale_cols)) +
         (f.has_exact_scales ? " exact" : "");
}

// Formats whose values are exact in bfloat16, and those whose scales multiply sums.
inline std::vector<ScaledFormat> exact_formats() {
  return {{WeightFormat::kMxfp4},
          {WeightFormat::kNvfp4, 1, kNvfp4Columns},
          {WeightFormat::kFp8, 1, 0, true},
          {WeightFormat::kFp8, 128, 128, true},
          {WeightFormat::kFp8, 16, 32, true},
          {.format = WeightFormat::kInt4, .scale_cols = 32, .has_zeros = true},
          {.format = WeightFormat::kInt4, .scale_cols = 32, .has_zeros = true, .has_order = true},
          {.format = WeightFormat::kInt4, .scale_cols = 32, .has_order = true},
          {.format = WeightFormat::kInt4, .scale_dtype = DType::kFloat16},
          {.format = WeightFormat::kInt4,
           .scale_dtype = DType::kFloat16,
           .has_zeros = true,
           .has_order = true}};
}
inline std::vector<ScaledFormat> inexact_formats() {
  return {{WeightFormat::kFp8, 1, 0, false},
          {WeightFormat::kFp8, 128, 128, false},
          {WeightFormat::kFp8, 2, 64, false}};
}

struct ScaledArray {
  std::vector<uint8_t> data;
  std::vector<std::byte> scales;
  std::vector<uint8_t> zeros;
  std::vector<int32_t> order;
  std::vector<double> values;  // [n, k] element * scale, in the order of the columns
  WeightMatrix matrix;         // of data and scales
};

// Values are about as large as those of N(0, 0.05).
inline ScaledArray scaled_array(Random& random, const ScaledFormat& f, int32_t n, int32_t k,
                                DType dtype) {
  ScaledArray array;
  array.matrix = plain_matrix(nullptr, n, k, dtype);
  WeightMatrix& matrix = array.matrix;
  matrix.format = f.format;
  matrix.has_exact_scales = f.has_exact_scales;
  matrix.scale_rows = f.scale_rows;
  matrix.scale_cols = f.scale_cols == 0 ? k : f.scale_cols;
  array.values.resize(static_cast<size_t>(n) * static_cast<size_t>(k));
  array.data.resize(static_cast<size_t>(matrix.row_bytes() * n));
  const auto at = [&](int64_t row, int64_t column) -> double& {
    return array.values[static_cast<size_t>(row * k + column)];
  };
  if (f.format == WeightFormat::kMxfp4) {
    for (uint8_t& byte : array.data) byte = static_cast<uint8_t>(random.below(256));
    array.scales.resize(static_cast<size_t>(n) * static_cast<size_t>(k / kMxfp4Columns));
    for (std::byte& scale : array.scales) scale = static_cast<std::byte>(119 + random.below(4));
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t column = 0; column < k; ++column) {
        const int64_t element = row * k + column;
        const uint8_t byte = array.data[static_cast<size_t>(element / 2)];
        const std::byte scale = array.scales[static_cast<size_t>(element / kMxfp4Columns)];
        at(row, column) = double{e2m1_to_float(column % 2 == 0 ? byte & 15 : byte >> 4)} *
                          e8m0_to_float(static_cast<uint8_t>(scale));
      }
    }
  } else if (f.format == WeightFormat::kNvfp4) {
    for (uint8_t& byte : array.data) byte = static_cast<uint8_t>(random.below(256));
    std::vector<float> scales(static_cast<size_t>(n) * static_cast<size_t>(k / kNvfp4Columns));
    for (float& scale : scales) scale = random.normal(0.02f);
    array.scales = typed_array(DType::kFloat32, scales).bytes;
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t column = 0; column < k; ++column) {
        const int64_t element = row * k + column;
        const uint8_t byte = array.data[static_cast<size_t>(element / 2)];
        const float scale = scales[static_cast<size_t>(element / kNvfp4Columns)];
        at(row, column) = bf16_to_float(
            float_to_bf16(e2m1_to_float(column % 2 == 0 ? byte & 15 : byte >> 4) * scale));
      }
    }
  } else if (f.format == WeightFormat::kInt4) {
    matrix.scale_rows = 1;
    matrix.scale_dtype = f.scale_dtype;
    for (uint8_t& byte : array.data) byte = static_cast<uint8_t>(random.below(256));
    const int64_t groups = matrix.num_scale_cols();
    std::vector<float> scales(static_cast<size_t>(n * groups));
    for (float& scale : scales) scale = random.normal(0.01f);
    TypedArray typed = typed_array(f.scale_dtype, scales);
    array.scales = std::move(typed.bytes);
    matrix.has_zeros = f.has_zeros;
    if (f.has_zeros) {
      array.zeros.resize(scales.size());
      for (uint8_t& zero : array.zeros) zero = static_cast<uint8_t>(random.below(16));
    }
    matrix.has_order = f.has_order;
    if (f.has_order) {
      array.order.resize(static_cast<size_t>(k));
      std::iota(array.order.begin(), array.order.end(), 0);
      for (int32_t i = k - 1; i > 0; --i) {
        std::swap(array.order[static_cast<size_t>(i)],
                  array.order[static_cast<size_t>(random.below(i + 1))]);
      }
    }
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t column = 0; column < k; ++column) {
        const auto group = static_cast<size_t>(row * groups + column / matrix.scale_cols);
        const uint8_t byte = array.data[static_cast<size_t>((row * k + column) / 2)];
        const int code = column % 2 == 0 ? byte & 15 : byte >> 4;
        const int zero = f.has_zeros ? array.zeros[group] : 8;
        at(row, column) =
            bf16_to_float(float_to_bf16(static_cast<float>(code - zero) * typed.rounded[group]));
      }
    }
  } else {
    for (uint8_t& byte : array.data) {
      do byte = static_cast<uint8_t>(random.below(256));
      while ((byte & 0x7f) == 0x7f);  // NaN
    }
    const int64_t tile_rows = (n + f.scale_rows - 1) / f.scale_rows;
    const int64_t tile_cols = (k + matrix.scale_cols - 1) / matrix.scale_cols;
    std::vector<float> scales(static_cast<size_t>(tile_rows * tile_cols));
    for (float& scale : scales) {
      scale = f.has_exact_scales ? std::ldexp(1.0f, -9 - random.below(4))
                                 : 0.001f + std::fabs(random.normal(0.001f));
    }
    array.scales.resize(scales.size() * sizeof(float));
    std::memcpy(array.scales.data(), scales.data(), array.scales.size());
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t column = 0; column < k; ++column) {
        const int64_t tile = row / f.scale_rows * tile_cols + column / matrix.scale_cols;
        at(row, column) = double{e4m3_to_float(array.data[static_cast<size_t>(row * k + column)])} *
                          scales[static_cast<size_t>(tile)];
      }
    }
  }
  array.matrix.data = reinterpret_cast<const std::byte*>(array.data.data());
  array.matrix.scales = array.scales.data();
  if (f.has_zeros) array.matrix.zeros = array.zeros.data();
  if (f.has_order) array.matrix.order = array.order.data();
  return array;
}

// Rows of x in the order of the columns of a matrix.
inline std::vector<float> in_order(const ScaledArray& array, const std::vector<float>& x) {
  if (array.order.empty()) return x;
  std::vector<float> ordered(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t column = i % array.order.size();
    ordered[i] = x[i - column + static_cast<size_t>(array.order[column])];
  }
  return ordered;
}

// The values as a plain matrix of the same dtype, which must hold them exactly.
inline TypedArray dequantized(const ScaledArray& array) {
  return typed_array(array.matrix.dtype,
                     std::vector<float>(array.values.begin(), array.values.end()));
}

}  // namespace paceline::testing
