// SPDX-License-Identifier: Apache-2.0
#pragma once

// A matrix of weights as the ops read it: plain numbers, or numbers of fewer bits with scales.

#include <cstddef>
#include <cstdint>

#include <paceline/device.h>
#include <paceline/dtype.h>

#include "device/packed_tiles.h"

namespace paceline {

enum class WeightFormat : uint8_t {
  kPlain,  // elements of WeightMatrix::dtype
  // float8 e4m3: one byte an element. A scale is a float for a tile of scale_rows x scale_cols
  // elements; value = element * scale.
  kFp8,
  // OCP MXFP4: e2m1, two elements a byte, the lower column in the low four bits. A scale is a byte,
  // 2^(byte - 127), for 32 columns of a row; value = element * scale.
  kMxfp4,
  // Integers of four bits, two codes a byte, the lower column in the low four bits. A scale is two
  // bytes, float16 or bfloat16, for scale_cols columns of a row, and so is a zero point, one byte;
  // value = bfloat16((code - zero) * scale), rounded once.
  kInt4,
  // NVFP4: e2m1 as kMxfp4 has it. A scale is a float for 16 columns of a row;
  // value = bfloat16(float(element * scale)).
  kNvfp4,
};

// The order of the elements in memory.
enum class WeightLayout : uint8_t {
  kRowMajor,
  // Scaled formats as the bfloat16 products of a GPU read them: in tiles of kPackedRows rows and
  // kPackedColumns columns, padded with zeros, tiles of the same rows one after the other. The
  // scales of kMxfp4, kNvfp4 and kInt4 and the zero points are packed in the same way; the scales
  // of kFp8 stay row-major.
  kPacked,
};

inline constexpr int32_t kMxfp4Columns = 32;           // that share a scale
inline constexpr int32_t kNvfp4Columns = 16;           // that share a scale
inline constexpr int32_t kInt4Columns = 32;            // divide those that share a scale
inline constexpr int32_t kInt4Zero = 8;                // of a matrix without zero points
inline constexpr int32_t kMaxScaledColumns = 1 << 17;  // of a matrix with scales

// The tiles of a format's elements.
[[nodiscard]] constexpr PackedKind packed_kind(WeightFormat format) {
  switch (format) {
    case WeightFormat::kMxfp4:
    case WeightFormat::kNvfp4:
      return PackedKind::kMxfp4;
    case WeightFormat::kInt4:
      return PackedKind::kInt4;
    case WeightFormat::kPlain:
    case WeightFormat::kFp8:
      break;
  }
  return PackedKind::kFp8;
}

// Bytes of a tile of elements; of a tile of the scales of kMxfp4, or of the zero points of two
// groups of kInt4; of a tile of the scales of a group of kInt4; and of one of those of kNvfp4.
[[nodiscard]] constexpr int32_t packed_tile_bytes(WeightFormat format) {
  return packed_tile(packed_kind(format)).bytes();
}
inline constexpr int32_t kPackedScaleBytes = packed_tile(PackedKind::kMxfp4Scales).bytes();
inline constexpr int32_t kPackedInt4ScaleBytes = packed_tile(PackedKind::kInt4Scales).bytes();
inline constexpr int32_t kPackedNvfp4ScaleBytes = packed_tile(PackedKind::kNvfp4Scales).bytes();

// W, [n, k]. Ops multiply values of `dtype`: scaled formats are converted to it first,
// which is exact where every scale is a power of two. Otherwise the products are those of the
// unscaled elements, and a scale multiplies their float32 sum:
//   scale_cols >= k:  y = scale * sum over k + bias
//   scale_cols < k:   y = fma(scale_b, sum over the columns of tile b, ...) from b = 0 up, + bias
// The values of kInt4 and kNvfp4 are bfloat16 numbers with either dtype, so their products are
// plain ones. On the CPU, whose sums have sixteen lanes, that is how each lane is computed. On CUDA
// rows of data take a multiple of 16 bytes, and of kFp8 scale_cols is k or 128, and in bfloat16 a
// NaN of e4m3 counts as 480.
struct WeightMatrix {
  const std::byte* data = nullptr;  // 64 B aligned; row-major, a row takes row_bytes()
  // kFp8: float [ceil(n / scale_rows), ceil(k / scale_cols)]; kMxfp4: uint8_t [n, k / 32], or
  // packed; kInt4: scale_dtype [n, k / scale_cols], or packed; kNvfp4: float [n, k / 16], or
  // packed; else null.
  const std::byte* scales = nullptr;
  // kInt4: [n, k / scale_cols], or packed, 0 to 15; null: all are kInt4Zero
  const uint8_t* zeros = nullptr;
  // kInt4: [k] the input that each column multiplies, a permutation; null: column i multiplies
  // input i. Products sum over the columns in their order in memory.
  const int32_t* order = nullptr;
  int32_t n = 0;
  int32_t k = 0;                  // kMxfp4, kInt4, kNvfp4: a multiple of 32
  DType dtype = DType::kFloat32;  // kFloat32 or kBFloat16
  WeightFormat format = WeightFormat::kPlain;
  WeightLayout layout = WeightLayout::kRowMajor;  // kPacked: not of kPlain
  int32_t scale_rows = 0;                         // kFp8: a power of two
  int32_t scale_cols = 0;  // kFp8: k (one scale a row), or a multiple of 32 below it; kInt4: as
                           // kFp8, a divisor of k; kNvfp4: 16
  DType scale_dtype = DType::kBFloat16;  // kInt4: kFloat16 or kBFloat16
  bool has_zeros = false;                // kInt4
  bool has_order = false;                // kInt4
  // kFp8: every scale is a power of two, and every element times its scale is a bfloat16.
  bool has_exact_scales = false;

  [[nodiscard]] constexpr bool is_packed() const { return layout == WeightLayout::kPacked; }
  [[nodiscard]] constexpr bool has_packed_scales() const {
    return is_packed() && format != WeightFormat::kFp8;
  }
  // Tiles of a packed matrix along n and along k, and in all.
  [[nodiscard]] constexpr int64_t packed_tile_rows() const {
    return (int64_t{n} + kPackedRows - 1) / kPackedRows;
  }
  [[nodiscard]] constexpr int64_t packed_tile_cols() const {
    return (int64_t{k} + kPackedColumns - 1) / kPackedColumns;
  }
  [[nodiscard]] constexpr int64_t packed_tiles() const {
    return packed_tile_rows() * packed_tile_cols();
  }

  // Bytes of a row of row-major elements.
  [[nodiscard]] constexpr int64_t row_bytes() const {
    switch (format) {
      case WeightFormat::kPlain:
        return k * dtype_bytes(dtype);
      case WeightFormat::kFp8:
        return k;
      case WeightFormat::kMxfp4:
      case WeightFormat::kInt4:
      case WeightFormat::kNvfp4:
        return k / 2;
    }
    return 0;
  }

  // Scales along n and along k; 0 without scales.
  [[nodiscard]] constexpr int64_t num_scale_rows() const {
    if (format == WeightFormat::kPlain) return 0;
    return format == WeightFormat::kFp8 ? (n + scale_rows - 1) / scale_rows : n;
  }
  [[nodiscard]] constexpr int64_t num_scale_cols() const {
    if (format == WeightFormat::kPlain) return 0;
    return format == WeightFormat::kMxfp4 ? k / kMxfp4Columns : (k + scale_cols - 1) / scale_cols;
  }
  // Bytes of all elements, padding included.
  [[nodiscard]] constexpr int64_t data_bytes() const {
    return is_packed() ? packed_tiles() * packed_tile_bytes(format) : n * row_bytes();
  }
  // Bytes of all scales, padding included.
  [[nodiscard]] constexpr int64_t scales_bytes() const {
    if (has_packed_scales() && format == WeightFormat::kInt4) {
      return packed_tile_rows() * num_scale_cols() * kPackedInt4ScaleBytes;
    }
    if (has_packed_scales()) {
      return packed_tiles() *
             (format == WeightFormat::kNvfp4 ? kPackedNvfp4ScaleBytes : kPackedScaleBytes);
    }
    const bool has_floats = format == WeightFormat::kFp8 || format == WeightFormat::kNvfp4;
    const int64_t bytes = has_floats ? 4 : format == WeightFormat::kInt4 ? 2 : 1;
    return num_scale_rows() * num_scale_cols() * bytes;
  }
  [[nodiscard]] constexpr int64_t zeros_bytes() const {
    if (!has_zeros) return 0;
    if (is_packed()) return packed_tile_rows() * ((num_scale_cols() + 1) / 2) * kPackedScaleBytes;
    return num_scale_rows() * num_scale_cols();
  }
  [[nodiscard]] constexpr int64_t order_bytes() const { return has_order ? int64_t{4} * k : 0; }
  [[nodiscard]] constexpr int64_t bytes() const {
    return data_bytes() + scales_bytes() + zeros_bytes() + order_bytes();
  }
};

[[nodiscard]] constexpr WeightMatrix plain_matrix(const void* data, int32_t n, int32_t k,
                                                  DType dtype) {
  return {.data = static_cast<const std::byte*>(data), .n = n, .k = k, .dtype = dtype};
}

// The layout of weights in the memory of a device.
[[nodiscard]] constexpr WeightLayout layout_on(Device device, WeightFormat format, DType dtype) {
  const bool is_packed =
      format != WeightFormat::kPlain && device == Device::kCuda && dtype == DType::kBFloat16;
  return is_packed ? WeightLayout::kPacked : WeightLayout::kRowMajor;
}

// The same matrix of every expert of a mixture, one after the other.
struct ExpertMatrices {
  WeightMatrix first;  // of expert 0
  int32_t num_experts = 0;
  int64_t data_stride = 0;    // bytes from one expert's data to the next; a multiple of 64
  int64_t scales_stride = 0;  // bytes from one expert's scales to the next

  // The matrix of an expert.
  [[nodiscard]] WeightMatrix of(int64_t expert) const {
    WeightMatrix matrix = first;
    matrix.data += expert * data_stride;
    if (matrix.scales != nullptr) matrix.scales += expert * scales_stride;
    if (matrix.zeros != nullptr) matrix.zeros += expert * matrix.zeros_bytes();
    if (matrix.order != nullptr) matrix.order += expert * matrix.k;
    return matrix;
  }
};

}  // namespace paceline
