// SPDX-License-Identifier: Apache-2.0
#pragma once

// Random weights of every format for op cases: one matrix, or the matrices of experts.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/float_types.h"
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
    if (spec.format == WeightFormat::kInt4) {
      m.scale_rows = 1;
      m.scale_cols = spec.scale_cols > 0 && k % spec.scale_cols == 0 ? spec.scale_cols : k;
      m.scale_dtype = spec.scale_dtype;
      m.has_zeros = spec.has_zeros;
      m.has_order = spec.has_order;
    }
    if (spec.format == WeightFormat::kNvfp4) {
      m.scale_rows = 1;
      m.scale_cols = kNvfp4Columns;
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
    stream.fill_bits(data);
    if (m.format == WeightFormat::kFp8) {
      // e4m3 has no infinity, and its NaN is all ones.
      std::ranges::replace_if(data, [](uint8_t byte) { return (byte & 0x7f) == 0x7f; }, 0x80);
    }
    if (m.format == WeightFormat::kMxfp4) {
      add_mxfp4_scales(op, name, shift, seed);
    } else if (m.format == WeightFormat::kInt4) {
      add_int4_scales(op, name, shift, seed);
    } else if (m.format == WeightFormat::kNvfp4) {
      add_nvfp4_scales(op, name, shift, seed);
    } else {
      add_fp8_scales(op, name, seed);
    }
    if (spec.is_dequantized) {
      dequantize(op, name, data, shift);
      on_cuda_ = experts_;
    } else {
      OpArray array = int_array(name, Role::kInput, data);
      array.is_constant = true;
      pack_for_cuda(array, packed_kind(m.format), m.row_bytes(), experts_.data_stride, shift,
                    on_cuda_.data_stride);
      data_ = op.add(std::move(array));
    }
  }

  // As an op of this context sees them.
  template <class Ctx>
  [[nodiscard]] ExpertMatrices experts(const Ctx&, const Addresses& at) const {
    ExpertMatrices experts = std::is_same_v<Ctx, CudaContext> ? on_cuda_ : experts_;
    experts.first.data = at.raw(data_);
    experts.first.scales = at.raw(scales_);
    experts.first.zeros = at.get<uint8_t>(zeros_);
    experts.first.order = at.get<int32_t>(order_);
    return experts;
  }
  template <class Ctx>
  [[nodiscard]] WeightMatrix matrix(const Ctx& ctx, const Addresses& at, int32_t expert = 0) const {
    return experts(ctx, at).of(expert);
  }

 private:
  enum Purpose : uint64_t { kBits = 201, kScales, kZeros, kOrder };

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

  void add_nvfp4_scales(OpInstance& op, const std::string& name, int32_t shift, uint64_t seed) {
    const WeightMatrix& m = experts_.first;
    const int64_t per_row = m.num_scale_cols();
    experts_.scales_stride = (shift > 0 ? shift : m.n) * per_row * 4;
    const int64_t count = (experts_.num_experts - 1) * experts_.scales_stride / 4 + m.n * per_row;
    // e2m1 has an RMS of 2.9.
    const float middle = 1.0f / (2.9f * std::sqrt(static_cast<float>(m.k)));
    Stream stream(seed, kScales);
    for (int64_t i = 0; i < count; ++i) float_scales_.push_back(middle * stream.normal());
    const auto* const bytes = reinterpret_cast<const uint8_t*>(float_scales_.data());
    OpArray array =
        int_array(name + "_scales", Role::kInput, std::vector<uint8_t>(bytes, bytes + 4 * count));
    array.is_constant = true;
    pack_for_cuda(array, PackedKind::kNvfp4Scales, 4 * per_row, experts_.scales_stride, shift,
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
      float_scales_.push_back(m.has_exact_scales
                                  ? std::ldexp(1.0f, std::ilogb(middle) + stream.below(3))
                                  : middle * (0.5f + std::fabs(stream.normal())));
    }
    OpArray array = float_array(
        name + "_scales", Element::kF32, Element::kF32, std::ssize(float_scales_),
        [scales = float_scales_](float* to) { std::copy(scales.begin(), scales.end(), to); });
    array.is_constant = true;
    scales_ = op.add(std::move(array));
  }

  // The scales, zero points and orders of kInt4.
  void add_int4_scales(OpInstance& op, const std::string& name, int32_t shift, uint64_t seed) {
    if (shift > 0) throw std::logic_error("matrices of int4 have no shift");
    const WeightMatrix& m = experts_.first;
    const int64_t per_row = m.num_scale_cols();
    const int64_t num_scales = experts_.num_experts * m.n * per_row;
    experts_.scales_stride = m.n * per_row * 2;
    // Differences of codes and zero points have an RMS of about 5.
    const float middle = 1.0f / (5.0f * std::sqrt(static_cast<float>(m.k)));
    Stream stream(seed, kScales);
    std::vector<uint16_t> scales;
    for (int64_t i = 0; i < num_scales; ++i) {
      const float scale = middle * stream.normal();
      scales.push_back(m.scale_dtype == DType::kFloat16 ? nearest_fp16(scale)
                                                        : float_to_bf16(scale));
      int4_scales_.push_back(m.scale_dtype == DType::kFloat16 ? fp16_to_float(scales.back())
                                                              : bf16_to_float(scales.back()));
    }
    const auto* const bytes = reinterpret_cast<const uint8_t*>(scales.data());
    OpArray array = int_array(name + "_scales", Role::kInput,
                              std::vector<uint8_t>(bytes, bytes + 2 * num_scales));
    array.is_constant = true;
    pack_for_cuda(array, PackedKind::kInt4Scales, 2 * per_row, experts_.scales_stride, shift,
                  on_cuda_.scales_stride);
    scales_ = op.add(std::move(array));
    if (m.has_zeros) {
      Stream of_zeros(seed, kZeros);
      for (int64_t i = 0; i < num_scales; ++i) {
        int4_zeros_.push_back(static_cast<uint8_t>(of_zeros.below(16)));
      }
      OpArray zeros = int_array(name + "_zeros", Role::kInput, int4_zeros_);
      zeros.is_constant = true;
      int64_t cuda_stride = 0;  // zeros_bytes()
      pack_for_cuda(zeros, PackedKind::kMxfp4Scales, per_row, m.n * per_row, shift, cuda_stride);
      zeros_ = op.add(std::move(zeros));
    }
    if (m.has_order) {
      Stream of_order(seed, kOrder);
      std::vector<int32_t> order;
      for (int32_t e = 0; e < experts_.num_experts; ++e) {
        for (int32_t i = 0; i < m.k; ++i) {
          order.push_back(i);
          std::swap(order.back(),
                    order[order.size() - 1 - static_cast<size_t>(of_order.below(i + 1))]);
        }
      }
      OpArray all = int_array(name + "_order", Role::kInput, order);
      all.is_constant = true;
      order_ = op.add(std::move(all));
    }
  }

  // The float16 nearest to a number that is normal in both.
  [[nodiscard]] static uint16_t nearest_fp16(float value) {
    const auto bits = std::bit_cast<uint32_t>(value * 0x1p-112f);
    const uint32_t rounded = (bits & 0x7fffffffu) + 0xfffu + (bits >> 13 & 1u);
    return static_cast<uint16_t>((bits >> 16 & 0x8000u) | rounded >> 13);
  }

  // Replaces the matrices by plain ones. With a shift, experts share plain rows as they share rows
  // of the format and their scales.
  void dequantize(OpInstance& op, const std::string& name, const std::vector<uint8_t>& data,
                  int32_t shift) {
    const ExpertMatrices from = experts_;
    const WeightMatrix& m = from.first;
    if (shift > 0 && m.format != WeightFormat::kMxfp4 && m.format != WeightFormat::kNvfp4) {
      throw std::logic_error("with a shift only mxfp4 and nvfp4 have plain matrices");
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
    if (zeros_ != kNoArray) op.arrays.pop_back();
    op.arrays.pop_back();  // the scales
    zeros_ = scales_ = kNoArray;
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
             float_scales_[static_cast<size_t>(expert * experts_.scales_stride / 4 + tile)];
    }
    const int32_t byte = data[static_cast<size_t>(begin + column / 2)];
    if (m.format == WeightFormat::kInt4) {
      const auto group = static_cast<size_t>((int64_t{expert} * m.n + row) * m.num_scale_cols() +
                                             column / m.scale_cols);
      const int32_t zero = m.has_zeros ? int4_zeros_[group] : 8;
      const int32_t code = column % 2 == 0 ? byte & 15 : byte >> 4;
      return bf16_to_float(float_to_bf16(static_cast<float>(code - zero) * int4_scales_[group]));
    }
    const float element = e2m1_value(column % 2 == 0 ? byte & 15 : byte >> 4);
    if (m.format == WeightFormat::kNvfp4) {
      const int64_t at =
          expert * experts_.scales_stride / 4 + row * m.num_scale_cols() + column / kNvfp4Columns;
      return bf16_to_float(float_to_bf16(element * float_scales_[static_cast<size_t>(at)]));
    }
    const int64_t scale =
        expert * experts_.scales_stride + row * (m.k / kMxfp4Columns) + column / kMxfp4Columns;
    return std::ldexp(element, scale_bits_[static_cast<size_t>(scale)] - 127);
  }

  ExpertMatrices experts_;
  ExpertMatrices on_cuda_;
  std::vector<uint8_t> scale_bits_;  // of kMxfp4
  std::vector<float> float_scales_;  // of kFp8 and kNvfp4
  std::vector<float> int4_scales_;
  std::vector<uint8_t> int4_zeros_;
  Handle data_ = kNoArray;
  Handle scales_ = kNoArray;
  Handle zeros_ = kNoArray;
  Handle order_ = kNoArray;
};

}  // namespace paceline::testing
