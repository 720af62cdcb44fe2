// SPDX-License-Identifier: Apache-2.0
#pragma once

// Random tensors for a description with formats, and the values that they stand for by
// docs/model-format.md.

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <paceline/model.h>

#include "base/float_types.h"
#include "model/weights/model_impl.h"
#include "model/weights/visit_weights.h"
#include "model/weights/weight_layout.h"
#include "support/described_model.h"

namespace paceline::testing {

struct FormatTensor {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  std::string bytes;  // row-major
};
using FormatTensors = std::map<std::string, FormatTensor>;

// Every tensor of a description. scale_dtype: of fp8 scales, kFloat32 or kBFloat16. Numbers are
// stored as `stored`. has_exact_scales: fp8 scales are powers of two.
inline FormatTensors format_tensors(const std::string& json, uint64_t seed,
                                    DType stored = DType::kBFloat16,
                                    DType scale_dtype = DType::kFloat32,
                                    bool has_exact_scales = false) {
  const DecoderConfig config = parse_decoder_config(json);
  DecoderWeights weights;
  Carver carver(DType::kBFloat16, Device::kCpu, /*base=*/nullptr);
  lay_out(config, carver, weights);
  std::mt19937_64 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); };
  FormatTensors tensors;
  for (const NamedWeight& named : carver.take_named_weights()) {
    FormatTensor tensor = {.dtype = stored,
                           .shape = {named.dims().begin(), named.dims().end()},
                           .bytes = std::string(static_cast<size_t>(named.elements()), '\0')};
    std::vector<float> values(static_cast<size_t>(named.elements()));
    switch (named.kind) {
      case WeightKind::kNumbers:
      case WeightKind::kTransposed:  // eighths, which every dtype holds
        for (float& value : values) value = static_cast<float>(below(255) - 127) / 128;
        tensor.bytes = encode(values, stored);
        break;
      case WeightKind::kCodes:
        tensor.dtype = named.dtype;
        for (char& byte : tensor.bytes) {
          byte =
              static_cast<char>(below(127) + (named.dtype == DType::kUInt8 ? 0 : 128 * below(2)));
        }
        break;
      case WeightKind::kMxfp4Scales:
        tensor.dtype = named.dtype;
        for (char& byte : tensor.bytes) byte = static_cast<char>(118 + below(5));
        break;
      case WeightKind::kNvfp4Scales:
        tensor.dtype = named.dtype;
        for (float& value : values) value = 0.003f * static_cast<float>(1 + below(7));
        tensor.bytes = encode(values, tensor.dtype);
        break;
      case WeightKind::kFp8Scales:
        tensor.dtype = scale_dtype;
        for (float& value : values) {
          value =
              std::ldexp(has_exact_scales ? 1.0f : 1.0f + 0.125f * static_cast<float>(1 + below(7)),
                         -10 - below(4));
        }
        tensor.bytes = encode(values, scale_dtype);
        break;
      case WeightKind::kInt4Codes:
        tensor.dtype = named.dtype;
        for (char& byte : tensor.bytes) byte = static_cast<char>(below(256));
        break;
      case WeightKind::kInt4Scales:
        tensor.dtype = stored == DType::kFloat16 ? stored : DType::kBFloat16;
        for (float& value : values) value = 0.01f * static_cast<float>(1 + below(7));
        tensor.bytes = encode(values, tensor.dtype);
        break;
      case WeightKind::kInt4Zeros:
        tensor.dtype = named.dtype;
        for (char& byte : tensor.bytes) byte = static_cast<char>(below(16));
        break;
      case WeightKind::kInt4Order: {
        tensor.dtype = named.dtype;
        std::vector<int32_t> order(static_cast<size_t>(named.elements()));
        const int64_t cols = named.dims().back();  // no multiple of 7
        for (size_t i = 0; i < order.size(); ++i) {
          order[i] = static_cast<int32_t>(static_cast<int64_t>(i) * 7 % cols);
        }
        tensor.bytes.assign(reinterpret_cast<const char*>(order.data()), order.size() * 4);
        break;
      }
      case WeightKind::kIds:
        throw std::logic_error("no tokens here");
    }
    tensors[named.name] = std::move(tensor);
  }
  return tensors;
}

// The tensors as an update of a model takes them.
inline std::vector<NamedTensor> named_tensors(const FormatTensors& tensors) {
  std::vector<NamedTensor> named;
  for (const auto& [name, t] : tensors) {
    named.push_back({.name = name, .dtype = t.dtype, .shape = t.shape, .data = t.bytes.data()});
  }
  return named;
}

inline void put_all(ModelBuilder& builder, const FormatTensors& tensors) {
  for (const auto& [name, t] : tensors) {
    builder.put(name, t.dtype, t.shape, {}, t.bytes.data());
  }
}

// Element `index` of a tensor of numbers.
inline double number_at(const FormatTensor& tensor, int64_t index) {
  const char* const from = tensor.bytes.data() + index * dtype_bytes(tensor.dtype);
  if (tensor.dtype == DType::kFloat32) {
    float value = 0;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, from, sizeof(bits));
  return tensor.dtype == DType::kBFloat16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

// What X.weight and X.scales say of a row and a column; `expert` is 0 of a matrix without experts.
inline double described_value(const FormatTensors& tensors, const std::string& name,
                              const MatrixFormat& format, bool is_transposed, int64_t expert,
                              int64_t row, int64_t col) {
  const FormatTensor& weight = tensors.at(name + ".weight");
  std::vector<int64_t> shape = weight.shape;
  if (format.format == WeightFormat::kMxfp4 || format.format == WeightFormat::kNvfp4) {
    const int64_t rows = shape[shape.size() - 3];
    const int64_t blocks = shape[shape.size() - 2];
    const int64_t columns = 2 * shape.back();  // of a block
    const int64_t block = (expert * rows + row) * blocks + col / columns;
    const auto byte = static_cast<uint8_t>(
        weight.bytes[static_cast<size_t>(block * columns / 2 + col % columns / 2)]);
    const float element = e2m1_to_float(col % 2 == 0 ? byte & 15 : byte >> 4);
    const FormatTensor& scales = tensors.at(name + ".scales");
    if (format.format == WeightFormat::kNvfp4) {
      const auto scale = static_cast<float>(number_at(scales, block));
      return bf16_to_float(float_to_bf16(element * scale));
    }
    return double{element} *
           e8m0_to_float(static_cast<uint8_t>(scales.bytes[static_cast<size_t>(block)]));
  }
  const int64_t rows = shape[shape.size() - 2];
  const int64_t cols = shape[shape.size() - 1];
  if (format.format == WeightFormat::kInt4) {
    const FormatTensor& its_scales = tensors.at(name + ".scales");
    const int64_t group = format.group == 0 ? 2 * cols : format.group;
    const int64_t index = (expert * rows + row) * its_scales.shape.back() + col / group;
    const auto byte = static_cast<uint8_t>(
        weight.bytes[static_cast<size_t>((expert * rows + row) * cols + col / 2)]);
    const int code = col % 2 == 0 ? byte & 15 : byte >> 4;
    const int zero =
        format.has_zeros ? tensors.at(name + ".zeros").bytes[static_cast<size_t>(index)] : 8;
    return bf16_to_float(
        float_to_bf16(static_cast<float>((code - zero) * number_at(its_scales, index))));
  }
  if (is_transposed) return number_at(weight, (expert * rows + col) * cols + row);
  if (format.format == WeightFormat::kPlain) {
    return number_at(weight, (expert * rows + row) * cols + col);
  }
  const FormatTensor& scales = tensors.at(name + ".scales");
  const int64_t index = scales.shape.size() == 1 ? 0
                        : scales.shape[1] == 1 && scales.shape[0] == rows
                            ? row
                            : row / 128 * scales.shape[1] + col / 128;
  const auto element = static_cast<uint8_t>(weight.bytes[static_cast<size_t>(row * cols + col)]);
  return double{e4m3_to_float(element)} * number_at(scales, index);
}

// The value of a matrix in memory, by ops/weight_matrix.h.
inline double value_in_memory(const WeightMatrix& matrix, int64_t row, int64_t col) {
  const std::byte* const data = matrix.data + row * matrix.row_bytes();
  switch (matrix.format) {
    case WeightFormat::kPlain: {
      if (matrix.dtype == DType::kFloat32) return reinterpret_cast<const float*>(data)[col];
      return bf16_to_float(reinterpret_cast<const uint16_t*>(data)[col]);
    }
    case WeightFormat::kFp8: {
      const int64_t tile =
          row / matrix.scale_rows * matrix.num_scale_cols() + col / matrix.scale_cols;
      return double{e4m3_to_float(static_cast<uint8_t>(data[col]))} *
             reinterpret_cast<const float*>(matrix.scales)[tile];
    }
    case WeightFormat::kMxfp4: {
      const auto byte = static_cast<uint8_t>(data[col / 2]);
      const auto scale =
          static_cast<uint8_t>(matrix.scales[row * matrix.num_scale_cols() + col / kMxfp4Columns]);
      return double{e2m1_to_float(col % 2 == 0 ? byte & 15 : byte >> 4)} * e8m0_to_float(scale);
    }
    case WeightFormat::kNvfp4: {
      const auto byte = static_cast<uint8_t>(data[col / 2]);
      const float scale = reinterpret_cast<const float*>(
          matrix.scales)[row * matrix.num_scale_cols() + col / kNvfp4Columns];
      return bf16_to_float(
          float_to_bf16(e2m1_to_float(col % 2 == 0 ? byte & 15 : byte >> 4) * scale));
    }
    case WeightFormat::kInt4: {
      const auto byte = static_cast<uint8_t>(data[col / 2]);
      const int64_t group = row * matrix.num_scale_cols() + col / matrix.scale_cols;
      const uint16_t bits = reinterpret_cast<const uint16_t*>(matrix.scales)[group];
      const float scale =
          matrix.scale_dtype == DType::kFloat16 ? fp16_to_float(bits) : bf16_to_float(bits);
      const int code = col % 2 == 0 ? byte & 15 : byte >> 4;
      const int zero = matrix.has_zeros ? matrix.zeros[group] : 8;
      return bf16_to_float(float_to_bf16(static_cast<float>(code - zero) * scale));
    }
  }
  return 0;
}

// Matrix `expert` of a mixture.
inline WeightMatrix expert_matrix(const ExpertMatrices& experts, int64_t expert) {
  return experts.of(expert);
}

// Whether the values of a matrix have the mean and the deviation of dummy weights.
inline void expect_about_normal(const WeightMatrix& matrix, const std::string& name) {
  double sum = 0;
  double squares = 0;
  for (int64_t row = 0; row < matrix.n; ++row) {
    for (int64_t col = 0; col < matrix.k; ++col) {
      const double value = value_in_memory(matrix, row, col);
      sum += value;
      squares += value * value;
    }
  }
  const double count = static_cast<double>(matrix.n) * matrix.k;
  EXPECT_NEAR(sum / count, 0, 0.12 / std::sqrt(count)) << name;
  EXPECT_NEAR(std::sqrt(squares / count), 0.02, 0.0005 + 0.12 / std::sqrt(count)) << name;
}

// The weights of a description as they lie on a GPU, by name; nothing is allocated.
inline std::map<std::string, NamedWeight> lay_out_on_gpu(const DecoderConfig& config, DType dtype,
                                                         DecoderWeights& weights) {
  Carver carver(dtype, Device::kCuda, /*base=*/nullptr);
  lay_out(config, carver, weights);
  std::map<std::string, NamedWeight> named;
  for (NamedWeight& weight : carver.take_named_weights()) named[weight.name] = std::move(weight);
  return named;
}

}  // namespace paceline::testing
