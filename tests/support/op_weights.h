// SPDX-License-Identifier: Apache-2.0
#pragma once

// Random weights of every format for op cases: one matrix, or the matrices of experts.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "ops/weight_matrix.h"
#include "support/op_cases.h"
#include "support/packed_weights.h"
#include "support/weight_spec.h"

namespace paceline::testing {

// The values of the bits, from the definitions of OCP MX and of float8 e4m3.
[[nodiscard]] inline float e2m1_value(int32_t bits) {
  constexpr float kMagnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return bits & 8 ? -kMagnitudes[bits & 7] : kMagnitudes[bits & 7];
}
[[nodiscard]] inline float e4m3_value(int32_t bits) {
  const int32_t exponent = bits >> 3 & 15;
  const auto mantissa = static_cast<float>(bits & 7);
  const float magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8.0f + mantissa, exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

// The arrays "weight" and "scales" of an instance, and the matrices in them. A CUDA op sees them in
// the layout that weights have on a GPU.
class WeightArrays {
 public:
  // Outputs are about as large as x. With a `shift`, the matrix of an expert begins that many rows
  // after the one before it, so that all of them take little memory; 0: each has its own.
  WeightArrays(OpInstance& op, const WeightSpec& spec, int32_t n, int32_t k, uint64_t seed,
               const std::string& name = "weight", int32_t num_experts = 1, int32_t shift = 0) {
    experts_.num_experts = num_experts;
    WeightMatrix& m = experts_.first;
    m = {.n = n, .k = k, .dtype = spec.dtype, .format = spec.format};
    if (spec.format == WeightFormat::kFp8) {
      m.scale_rows = spec.scale_rows;
      m.scale_cols = spec.scale_cols > 0 ? std::min(spec.scale_cols, k) : k;
      m.has_exact_scales = spec.has_exact_scales;
    }
    if (spec.format == WeightFormat::kPlain) {
      add_plain(op, name, shift, [=](float* to, int64_t count) {
        Stream(seed, kBits).fill(to, count, 1.0f / std::sqrt(static_cast<float>(k)));
      });
      on_cuda_ = experts_;
      return;
    }
    experts_.data_stride = stride_of(m.row_bytes(), shift);
    on_cuda_ = experts_;
    on_cuda_.first.layout = layout_on(Device::kCuda, m.format, m.dtype);
    std::vector<uint8_t> data(static_cast<size_t>(data_bytes(m.row_bytes())));
    Stream stream(seed, kBits);
    for (uint8_t& byte : data) {
      byte = static_cast<uint8_t>(stream.next() >> 40);
      // e4m3 has no infinity, and its NaN is all ones.
      if (m.format == WeightFormat::kFp8 && (byte & 0x7f) == 0x7f) byte = 0x80;
    }
    if (m.format == WeightFormat::kMxfp4) {
      add_mxfp4_scales(op, name, shift, seed);
    } else {
      add_fp8_scales(op, name, seed);
    }
    if (spec.is_dequantized) {
      dequantize(op, name, data, shift);
      on_cuda_ = experts_;
    } else {
      OpArray array = int_array(name, Role::kInput, data);
      array.is_constant = true;
      const PackedKind kind =
          m.format == WeightFormat::kFp8 ? PackedKind::kFp8 : PackedKind::kMxfp4;
      pack_for_cuda(array, kind, m.row_bytes(), experts_.data_stride, shift, on_cuda_.data_stride);
      data_ = op.add(std::move(array));
    }
  }

  // As an op of this context sees them.
  template <class Ctx>
  [[nodiscard]] ExpertMatrices experts(const Ctx&, const Addresses& at) const {
    ExpertMatrices experts = std::is_same_v<Ctx, CudaContext> ? on_cuda_ : experts_;
    experts.first.data = at.raw(data_);
    experts.first.scales = at.raw(scales_);
    return experts;
  }
  template <class Ctx>
  [[nodiscard]] WeightMatrix matrix(const Ctx& ctx, const Addresses& at, int32_t expert = 0) const {
    const ExpertMatrices all = experts(ctx, at);
    WeightMatrix matrix = all.first;
    matrix.data += expert * all.data_stride;
    if (matrix.scales != nullptr) matrix.scales += expert * all.scales_stride;
    return matrix;
  }

 private:
  enum Purpose : uint64_t { kBits = 201, kScales };

  [[nodiscard]] int64_t stride_of(int64_t row_bytes, int32_t shift) const {
    return shift > 0 ? shift * row_bytes : (experts_.first.n * row_bytes + 63) / 64 * 64;
  }
  [[nodiscard]] int64_t data_bytes(int64_t row_bytes) const {
    return (experts_.num_experts - 1) * experts_.data_stride + experts_.first.n * row_bytes;
  }

  // Lets a CUDA op see the rows of an array packed, if its matrices are: those of each expert, or
  // with a shift those of all experts as one matrix. Sets the bytes from one expert to the next.
  void pack_for_cuda(OpArray& array, PackedKind kind, int64_t row_bytes, int64_t stride,
                     int32_t shift, int64_t& cuda_stride) {
    cuda_stride = stride;
    if (!on_cuda_.first.is_packed()) return;
    if (shift % kPackedRows != 0 || (shift > 0 && experts_.first.n % kPackedRows != 0)) {
      throw std::logic_error("a shift of packed matrices is one of whole tiles");
    }
    const int64_t num_experts = experts_.num_experts;
    const int64_t n = experts_.first.n + (shift > 0 ? (num_experts - 1) * shift : 0);
    const int64_t matrix_bytes = packed_bytes(kind, n, row_bytes);
    cuda_stride = shift > 0 ? packed_bytes(kind, shift, row_bytes) : matrix_bytes;
    const int64_t num_matrices = shift > 0 ? 1 : num_experts;
    array.num_cuda_bytes = num_matrices * matrix_bytes;
    array.cuda_bits = [=, rows = array.bits] {
      std::vector<std::byte> all(static_cast<size_t>(num_matrices * matrix_bytes));
      for (int64_t i = 0; i < num_matrices; ++i) {
        const auto* const from = reinterpret_cast<const uint8_t*>(rows.data()) + i * stride;
        auto* const to = reinterpret_cast<uint8_t*>(all.data()) + i * matrix_bytes;
        pack_into(kind, {from, static_cast<size_t>(n * row_bytes)}, row_bytes, /*first_row=*/0,
                  {to, static_cast<size_t>(matrix_bytes)});
      }
      return all;
    };
  }

  template <class Fill>
  void add_plain(OpInstance& op, const std::string& name, int32_t shift, const Fill& fill) {
    WeightMatrix& m = experts_.first;
    m = {.n = m.n, .k = m.k, .dtype = m.dtype};
    experts_.data_stride = stride_of(m.row_bytes(), shift);
    const int64_t count = data_bytes(m.row_bytes()) / dtype_bytes(m.dtype);
    const Element element = element_of(m.dtype);
    OpArray array = float_array(name, element, element, count, [=](float* to) { fill(to, count); });
    array.is_constant = true;
    data_ = op.add(std::move(array));
  }

  void add_mxfp4_scales(OpInstance& op, const std::string& name, int32_t shift, uint64_t seed) {
    const WeightMatrix& m = experts_.first;
    const int64_t per_row = m.k / kMxfp4Columns;
    experts_.scales_stride = (shift > 0 ? shift : m.n) * per_row;
    // e2m1 has an RMS of 2.9.
    const int32_t middle = 127 - static_cast<int32_t>(std::lround(std::log2(2.9 * std::sqrt(m.k))));
    Stream stream(seed, kScales);
    std::vector<uint8_t> scales(
        static_cast<size_t>((experts_.num_experts - 1) * experts_.scales_stride + m.n * per_row));
    for (uint8_t& scale : scales) scale = static_cast<uint8_t>(middle - 1 + stream.below(3));
    scale_bits_ = scales;
    OpArray array = int_array(name + "_scales", Role::kInput, scales);
    array.is_constant = true;
    pack_for_cuda(array, PackedKind::kMxfp4Scales, per_row, experts_.scales_stride, shift,
                  on_cuda_.scales_stride);
    scales_ = op.add(std::move(array));
  }

  void add_fp8_scales(OpInstance& op, const std::string& name, uint64_t seed) {
    const WeightMatrix& m = experts_.first;
    const int64_t num_scales = int64_t{(m.n + m.scale_rows - 1) / m.scale_rows} *
                               ((m.k + m.scale_cols - 1) / m.scale_cols);
    experts_.scales_stride = on_cuda_.scales_stride = num_scales * 4;
    // Random bits of e4m3 have an RMS of about 120.
    const float middle = 1.0f / (120.0f * std::sqrt(static_cast<float>(m.k)));
    Stream stream(seed, kScales);
    for (int64_t i = 0; i < experts_.num_experts * num_scales; ++i) {
      fp8_scales_.push_back(m.has_exact_scales
                                ? std::ldexp(1.0f, std::ilogb(middle) + stream.below(3))
                                : middle * (0.5f + std::fabs(stream.normal())));
    }
    OpArray array = float_array(
        name + "_scales", Element::kF32, Element::kF32, std::ssize(fp8_scales_),
        [scales = fp8_scales_](float* to) { std::copy(scales.begin(), scales.end(), to); });
    array.is_constant = true;
    scales_ = op.add(std::move(array));
  }

  // Replaces the matrices by plain ones. With a shift, experts share plain rows as they share rows
  // of the format and their scales.
  void dequantize(OpInstance& op, const std::string& name, const std::vector<uint8_t>& data,
                  int32_t shift) {
    const ExpertMatrices from = experts_;
    const WeightMatrix& m = from.first;
    if (shift > 0 && m.format != WeightFormat::kMxfp4) {
      throw std::logic_error("with a shift only mxfp4 has plain matrices");
    }
    const int64_t per_expert = stride_of(m.k * dtype_bytes(m.dtype), 0) / dtype_bytes(m.dtype);
    std::vector<float> values;
    for (int32_t e = 0; e < (shift > 0 ? 1 : from.num_experts); ++e) {
      values.resize(static_cast<size_t>(e * per_expert));
      const int64_t num_rows = m.n + int64_t{shift} * (from.num_experts - 1);
      for (int64_t row = 0; row < num_rows; ++row) {
        for (int64_t column = 0; column < m.k; ++column) {
          values.push_back(value_at(data, e, row, column));
        }
      }
    }
    op.arrays.pop_back();  // the scales
    scales_ = kNoArray;
    experts_.scales_stride = 0;
    add_plain(op, name, shift,
              [values](float* to, int64_t) { std::copy(values.begin(), values.end(), to); });
  }

  [[nodiscard]] float value_at(const std::vector<uint8_t>& data, int32_t expert, int64_t row,
                               int64_t column) const {
    const WeightMatrix& m = experts_.first;
    const int64_t begin = expert * experts_.data_stride + row * m.row_bytes();
    if (m.format == WeightFormat::kFp8) {
      const int64_t tiles_per_row = (m.k + m.scale_cols - 1) / m.scale_cols;
      const int64_t tile = row / m.scale_rows * tiles_per_row + column / m.scale_cols;
      return e4m3_value(data[static_cast<size_t>(begin + column)]) *
             fp8_scales_[static_cast<size_t>(expert * experts_.scales_stride / 4 + tile)];
    }
    const int32_t byte = data[static_cast<size_t>(begin + column / 2)];
    const int64_t scale =
        expert * experts_.scales_stride + row * (m.k / kMxfp4Columns) + column / kMxfp4Columns;
    return std::ldexp(e2m1_value(column % 2 == 0 ? byte & 15 : byte >> 4),
                      scale_bits_[static_cast<size_t>(scale)] - 127);
  }

  ExpertMatrices experts_;
  ExpertMatrices on_cuda_;
  std::vector<uint8_t> scale_bits_;  // of kMxfp4
  std::vector<float> fp8_scales_;
  Handle data_ = kNoArray;
  Handle scales_ = kNoArray;
};

}  // namespace paceline::testing
