// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tiles of packed weights: elements of 4 and 8 bits as the products of a GPU read them.
// cuda/gemm/packed_weights.h has the bits of a tile.

#include <cstddef>
#include <cstdint>

namespace paceline {

inline constexpr int32_t kPackedRows = 16;     // of a tile
inline constexpr int32_t kPackedColumns = 64;  // of a tile

// What lies in tiles. Zero points of int4 are bytes, as the scales of mxfp4 are, and lie as they
// do.
enum class PackedKind : uint8_t {
  kFp8,
  kMxfp4,  // and the elements of nvfp4
  kMxfp4Scales,
  kInt4,
  kInt4Scales,
  kNvfp4Scales  // become lines (cuda/gemm/packed_weights.h)
};

struct PackedTile {
  int32_t row_bytes;  // of a row of the tile, row-major
  [[nodiscard]] constexpr int32_t bytes() const { return kPackedRows * row_bytes; }
};
[[nodiscard]] constexpr PackedTile packed_tile(PackedKind kind) {
  switch (kind) {
    case PackedKind::kFp8:
      return {.row_bytes = kPackedColumns};
    case PackedKind::kMxfp4:
    case PackedKind::kInt4:
      return {.row_bytes = kPackedColumns / 2};
    case PackedKind::kMxfp4Scales:
      return {.row_bytes = kPackedColumns / 32};
    case PackedKind::kInt4Scales:  // of one group of columns
      return {.row_bytes = 2};
    case PackedKind::kNvfp4Scales:
      return {.row_bytes = kPackedColumns / 16 * 4};
  }
  return {.row_bytes = 0};
}

// A tensor whose rows go into packed memory: rows of one matrix, or the same rows of the matrices
// of several experts.
struct PackedTensor {
  std::byte* matrix = nullptr;  // packed; of expert 0
  int64_t matrix_stride = 0;    // bytes from one expert's matrix to the next
  int64_t first_row = 0;        // of the tensor in each matrix
  int64_t num_rows = 0;         // of the tensor in each matrix
  int64_t row_bytes = 0;        // of a row of the tensor, row-major
  PackedKind kind = PackedKind::kFp8;

  // Bytes of the tiles of kPackedRows rows.
  [[nodiscard]] constexpr int64_t tile_row_bytes() const {
    const PackedTile tile = packed_tile(kind);
    return (row_bytes + tile.row_bytes - 1) / tile.row_bytes * tile.bytes();
  }
};

}  // namespace paceline
