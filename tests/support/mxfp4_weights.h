// SPDX-License-Identifier: Apache-2.0
#pragma once

// Weights in the format of GPT-OSS's experts, for models of tests.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <paceline/model.h>

namespace paceline::testing {

inline constexpr float kE2m1[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

struct Mxfp4Tensor {
  std::vector<uint8_t> blocks;  // two values a byte, the first in the low four bits
  std::vector<uint8_t> scales;  // 2^(byte - 127), of 32 values
};

// The nearest values; a scale is the largest power of two that fits the block.
inline Mxfp4Tensor to_mxfp4(const std::vector<float>& values) {
  Mxfp4Tensor tensor;
  for (size_t block = 0; block < values.size(); block += 32) {
    float largest = 0;
    for (size_t i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(values[block + i]));
    const int exponent = largest > 0 ? std::ilogb(largest) - 2 : 0;
    tensor.scales.push_back(static_cast<uint8_t>(127 + exponent));
    for (size_t i = 0; i < 32; ++i) {
      const float magnitude = std::ldexp(std::fabs(values[block + i]), -exponent);
      const auto* const nearest = std::min_element(
          std::begin(kE2m1), std::end(kE2m1),
          [&](float a, float b) { return std::fabs(a - magnitude) < std::fabs(b - magnitude); });
      const auto code = static_cast<uint8_t>((nearest - kE2m1) | (values[block + i] < 0 ? 8 : 0));
      if (i % 2 == 0) {
        tensor.blocks.push_back(code);
      } else {
        tensor.blocks.back() = static_cast<uint8_t>(tensor.blocks.back() | code << 4);
      }
    }
  }
  return tensor;
}

inline std::vector<float> mxfp4_values(const Mxfp4Tensor& tensor) {
  std::vector<float> values;
  for (size_t i = 0; i < 2 * tensor.blocks.size(); ++i) {
    const int code = tensor.blocks[i / 2] >> (i % 2 == 0 ? 0 : 4) & 15;
    const float value = std::ldexp(kE2m1[code & 7], tensor.scales[i / 32] - 127);
    values.push_back(code & 8 ? -value : value);
  }
  return values;
}

// Puts X.weight, of `shape`, and X.scales.
inline void put_mxfp4(ModelBuilder& builder, const std::string& weight_name,
                      std::vector<int64_t> shape, const std::vector<float>& values) {
  const Mxfp4Tensor tensor = to_mxfp4(values);
  shape.back() /= 32;
  const std::string scales_name =
      weight_name.substr(0, weight_name.size() - std::string("weight").size()) + "scales";
  builder.put(scales_name, DType::kUInt8, shape, {}, tensor.scales.data());
  shape.push_back(16);
  builder.put(weight_name, DType::kUInt8, shape, {}, tensor.blocks.data());
}

}  // namespace paceline::testing
