// SPDX-License-Identifier: Apache-2.0
#include "model/weights/weight_scales.h"

#include <paceline/error.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "base/check.h"
#include "base/float_types.h"
#include "base/json.h"

namespace paceline {
namespace {

// "[3, 17, 2]" of element `index`.
[[nodiscard]] std::string index_text(std::span<const int64_t> dims, int64_t index) {
  std::string text;
  for (size_t axis = dims.size(); axis-- > 0;) {
    text = concat(axis == 0 ? "[" : ", ", index % dims[axis], text);
    index /= dims[axis];
  }
  return text + "]";
}

// Calls f(index, number) for the elements of a matrix of numbers, row by row; the first one has the
// index `first`.
template <class Function>
void for_each_number(int64_t first, const SourceMatrix& source, DType dtype, const Function& f) {
  for (int64_t index = 0; index < source.rows * source.cols; ++index) {
    const int64_t offset =
        index / source.cols * source.row_stride + index % source.cols * source.col_stride;
    const std::byte* const from = source.data + offset * dtype_bytes(dtype);
    float number = 0;
    uint16_t bits = 0;
    if (dtype == DType::kFloat32) {
      std::memcpy(&number, from, sizeof(number));
    } else if (dtype == DType::kUInt8) {  // e8m0, where 255 is NaN
      number = e8m0_to_float(static_cast<uint8_t>(*from));
    } else {
      PACELINE_CHECK(dtype == DType::kBFloat16 || dtype == DType::kFloat16, dtype_name(dtype));
      std::memcpy(&bits, from, sizeof(bits));
      number = dtype == DType::kBFloat16 ? bf16_to_float(bits) : fp16_to_float(bits);
    }
    f(first + index, number);
  }
}

constexpr std::byte kNanScale{0xff};

[[noreturn]] void refuse_mxfp4_scale(const NamedWeight& named, int64_t index) {
  throw InvalidArgument(concat(quoted(named.name), index_text(named.dims(), index),
                               " is 255, which is NaN; allowed: 0 to 254"));
}

}  // namespace

void check_finite(const NamedWeight& named, int64_t first, const SourceMatrix& source,
                  DType dtype) {
  for_each_number(first, source, dtype, [&](int64_t index, float number) {
    if (std::isfinite(number)) return;
    throw InvalidArgument(concat(quoted(named.name), index_text(named.dims(), index), " is ",
                                 number,
                                 "; allowed: finite numbers. The tensor is damaged: "
                                 "download or convert it again"));
  });
}

void check_mxfp4_scales(const NamedWeight& named, int64_t first,
                        std::span<const std::byte> scales) {
  const void* const found = std::memchr(scales.data(), 0xff, scales.size());
  if (found == nullptr) return;
  refuse_mxfp4_scale(named, first + (static_cast<const std::byte*>(found) - scales.data()));
}

void check_mxfp4_scales(const NamedWeight& named, int64_t first, const SourceMatrix& source) {
  const auto span_of = [](const std::byte* data, int64_t count) {
    return std::span(data, static_cast<size_t>(count));
  };
  if (source.col_stride == 1 && source.row_stride == source.cols) {
    return check_mxfp4_scales(named, first, span_of(source.data, source.rows * source.cols));
  }
  for (int64_t row = 0; row < source.rows; ++row, first += source.cols) {
    const std::byte* const scales = source.data + row * source.row_stride;
    if (source.col_stride == 1) {
      check_mxfp4_scales(named, first, span_of(scales, source.cols));
      continue;
    }
    for (int64_t col = 0; col < source.cols; ++col) {
      if (scales[col * source.col_stride] == kNanScale) {
        refuse_mxfp4_scale(named, first + col);
      }
    }
  }
}

void check_nvfp4_scales(const NamedWeight& named, int64_t first, const SourceMatrix& source) {
  // Elements are from 0.5 to 6: the values are normal numbers or 0.
  constexpr float kLeast = 0x1p-125f;
  constexpr float kMost = 0x1p125f;
  for_each_number(first, source, DType::kFloat32, [&](int64_t index, float scale) {
    const float magnitude = std::fabs(scale);
    if (scale == 0 || (magnitude >= kLeast && magnitude <= kMost)) return;
    throw InvalidArgument(concat(quoted(named.name), index_text(named.dims(), index), " is ", scale,
                                 "; allowed: 0, and magnitudes from 2^-125 to 2^125. The tensor is "
                                 "damaged: download or convert it again"));
  });
}

void read_fp8_scales(const NamedWeight& named, int64_t first, const SourceMatrix& source,
                     DType dtype, std::span<float> scales) {
  const int64_t width = named.scale_cols();
  for_each_number(first, source, dtype, [&](int64_t index, float scale) {
    if (!std::isfinite(scale)) {
      throw InvalidArgument(concat(quoted(named.name), index_text(named.dims(), index), " is ",
                                   scale, "; allowed: finite scales"));
    }
    if (named.needs_exact_scales && !are_exact_scales({&scale, 1})) {
      throw InvalidArgument(concat(quoted(named.name), index_text(named.dims(), index), " is ",
                                   scale, "; allowed: powers of two from 2^-117 to 2^119"));
    }
    const int64_t first_row = index / width * named.repeats;
    const int64_t last_row = std::min(first_row + named.repeats, named.arena_rows);
    for (int64_t row = first_row; row < last_row; ++row) {
      scales[static_cast<size_t>(row * width + index % width)] = scale;
    }
  });
}

void read_int4_bytes(const NamedWeight& named, int64_t first, const SourceMatrix& source,
                     DType dtype, std::span<std::byte> bytes) {
  const auto refuse = [&](int64_t index, auto value, const std::string& allowed) {
    throw InvalidArgument(concat(quoted(named.name), index_text(named.dims(), index), " is ", value,
                                 "; allowed: ", allowed));
  };
  const int64_t cols = named.dims().back();
  std::vector<int64_t> last_of(named.kind == WeightKind::kInt4Order ? cols : 0, -1);
  const int64_t size = dtype_bytes(dtype);
  for (int64_t i = 0; i < source.rows * source.cols; ++i) {
    const int64_t offset =
        i / source.cols * source.row_stride + i % source.cols * source.col_stride;
    const int64_t index = first + i;
    const std::byte* const from = source.data + offset * size;
    std::byte* const to = bytes.data() + index * dtype_bytes(named.dtype);
    if (named.kind == WeightKind::kInt4Scales) {
      uint16_t bits = 0;
      std::memcpy(&bits, from, sizeof(bits));
      const float scale = dtype == DType::kFloat16 ? fp16_to_float(bits) : bf16_to_float(bits);
      // A subnormal scale would make values that processors take for zero.
      if (!std::isnormal(scale) && scale != 0) {
        refuse(index, scale, "finite scales, of at least 2^-126 or 0");
      }
      std::memcpy(to, &bits, sizeof(bits));
    } else if (named.kind == WeightKind::kInt4Zeros) {
      const auto zero = static_cast<uint8_t>(*from);
      if (zero > 15) refuse(index, int{zero}, "0 to 15");
      *to = *from;
    } else {
      int64_t input = 0;
      if (dtype == DType::kInt64) {
        std::memcpy(&input, from, sizeof(input));
      } else {
        int32_t narrow = 0;
        std::memcpy(&narrow, from, sizeof(narrow));
        input = narrow;
      }
      if (input < 0 || input >= cols) refuse(index, input, concat("0 to ", cols - 1, " (inputs)"));
      int64_t& last = last_of[static_cast<size_t>(input)];
      if (last >= index / cols * cols) refuse(index, input, "each input once");
      last = index;
      const auto narrow = static_cast<int32_t>(input);
      std::memcpy(to, &narrow, sizeof(narrow));
    }
  }
}

bool are_exact_scales(std::span<const float> scales) {
  // The smallest element is 2^-9 and the largest 448, below 2^9.
  constexpr int kMinExponent = -126 + 9;
  constexpr int kMaxExponent = 127 - 8;
  return std::ranges::all_of(scales, [](float scale) {
    const auto bits = std::bit_cast<uint32_t>(scale);
    const int exponent = static_cast<int>(bits >> 23) - 127;  // of a positive number
    return bits << 9 == 0 && exponent >= kMinExponent && exponent <= kMaxExponent;
  });
}

}  // namespace paceline
