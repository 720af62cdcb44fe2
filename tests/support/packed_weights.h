// SPDX-License-Identifier: Apache-2.0
#pragma once

// Packed weights (cuda/gemm/packed_weights.h) by their definition, an element at a time: packs
// row-major rows on the host, and unpacks them. It shares no code with the kernel that packs.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "device/packed_tiles.h"

namespace paceline::testing {

// The bits of the elements a0 to a3 (of kFp8 a0 and a2) in the half of a word, from the lowest bit
// of an element up.
inline constexpr std::array<std::array<int32_t, 4>, 4> kMxfp4Bits = {
    {{6, 7, 8, 15}, {3, 4, 5, 12}, {0, 1, 2, 9}, {10, 11, 13, 14}}};
inline constexpr std::array<std::array<int32_t, 8>, 2> kFp8Bits = {
    {{4, 5, 6, 7, 8, 9, 10, 15}, {0, 1, 2, 3, 12, 13, 14, 11}}};

// What the half of a word has of every value of an element.
struct ElementHalves {
  std::array<uint16_t, 256> of = {};
  uint16_t mask = 0;

  template <size_t num_bits>
  explicit constexpr ElementHalves(const std::array<int32_t, num_bits>& bits) {
    for (size_t value = 0; value < size_t{1} << num_bits; ++value) {
      for (size_t i = 0; i < num_bits; ++i) {
        if ((value >> i & 1) != 0) of[value] = static_cast<uint16_t>(of[value] | 1 << bits[i]);
      }
    }
    mask = of[(size_t{1} << num_bits) - 1];
  }
  [[nodiscard]] int32_t value_of(uint16_t half) const {
    return static_cast<int32_t>(
        std::find(of.begin(), of.end(), static_cast<uint16_t>(half & mask)) - of.begin());
  }
};
inline constexpr std::array kMxfp4Halves = {
    ElementHalves(kMxfp4Bits[0]), ElementHalves(kMxfp4Bits[1]), ElementHalves(kMxfp4Bits[2]),
    ElementHalves(kMxfp4Bits[3])};
inline constexpr std::array kFp8Halves = {ElementHalves(kFp8Bits[0]), ElementHalves(kFp8Bits[1])};

// A place in packed memory: the byte at which the half of a word begins, and what it has.
struct PackedPlace {
  int64_t at = 0;
  const ElementHalves* halves = nullptr;
};

// Where the element of a row and column lies in a packed matrix of `cols` columns.
inline PackedPlace packed_place(PackedKind kind, int64_t cols, int64_t row, int64_t col) {
  const int64_t tiles = (cols + 63) / 64;
  const int64_t tile = row / 16 * tiles + col / 64;
  const auto r = static_cast<int32_t>(row % 16);
  const auto c = static_cast<int32_t>(col % 64);
  const int32_t step = c / 16;
  const bool is_late = c % 16 >= 8;  // a2 and a3
  const int32_t lane = r % 8 * 4 + c % 8 / 2;
  if (kind == PackedKind::kMxfp4) {
    const int64_t word = tile * 128 + lane * 4 + step;
    return {.at = word * 4 + c % 2 * 2,
            .halves = &kMxfp4Halves[static_cast<size_t>(r / 8 + (is_late ? 2 : 0))]};
  }
  const int64_t word = tile * 256 + step / 2 * 128 + lane * 4 + step % 2 * 2 + r / 8;
  return {.at = word * 4 + c % 2 * 2, .halves = &kFp8Halves[is_late ? 1 : 0]};
}

// The byte of the scale of a row and of 32 columns, of which there are `cols`.
inline int64_t packed_scale_at(int64_t cols, int64_t row, int64_t col) {
  const int64_t tile = row / 16 * ((cols + 1) / 2) + col / 2;
  return tile * 32 + row % 8 * 4 + col % 2 * 2 + row % 16 / 8;
}

// Bytes of a packed matrix whose rows have `row_bytes`.
inline int64_t packed_bytes(PackedKind kind, int64_t rows, int64_t row_bytes) {
  const int64_t tile_bytes = kind == PackedKind::kFp8     ? 1024
                             : kind == PackedKind::kMxfp4 ? 512
                                                          : 32;
  const int64_t row_bytes_of_tile = tile_bytes / 16;
  return (rows + 15) / 16 * ((row_bytes + row_bytes_of_tile - 1) / row_bytes_of_tile) * tile_bytes;
}

// Calls f(row, byte, element of the byte: 0 or 1) for all elements of rows in row-major order.
template <class Function>
void for_elements(PackedKind kind, int64_t rows, int64_t row_bytes, const Function& f) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t byte = 0; byte < row_bytes; ++byte) {
      f(row, byte, 0);
      if (kind == PackedKind::kMxfp4) f(row, byte, 1);
    }
  }
}

// Writes row-major rows into a packed matrix, from row `first_row`; other rows stay as they are.
inline void pack_into(PackedKind kind, std::span<const uint8_t> from, int64_t row_bytes,
                      int64_t first_row, std::span<uint8_t> to) {
  const int64_t rows = row_bytes == 0 ? 0 : std::ssize(from) / row_bytes;
  for_elements(kind, rows, row_bytes, [&](int64_t row, int64_t byte, int32_t half) {
    const uint8_t value = from[static_cast<size_t>(row * row_bytes + byte)];
    if (kind == PackedKind::kMxfp4Scales) {
      to[static_cast<size_t>(packed_scale_at(row_bytes, first_row + row, byte))] = value;
      return;
    }
    const bool is_mxfp4 = kind == PackedKind::kMxfp4;
    const int64_t per_byte = is_mxfp4 ? 2 : 1;
    const PackedPlace place =
        packed_place(kind, row_bytes * per_byte, first_row + row, byte * per_byte + half);
    const int32_t element = is_mxfp4 ? value >> (4 * half) & 15 : value;
    uint16_t bits = 0;
    std::memcpy(&bits, to.data() + place.at, sizeof(bits));
    bits = static_cast<uint16_t>((bits & ~place.halves->mask) |
                                 place.halves->of[static_cast<size_t>(element)]);
    std::memcpy(to.data() + place.at, &bits, sizeof(bits));
  });
}

inline std::vector<uint8_t> packed(PackedKind kind, std::span<const uint8_t> from,
                                   int64_t row_bytes) {
  const int64_t rows = std::ssize(from) / row_bytes;
  std::vector<uint8_t> to(static_cast<size_t>(packed_bytes(kind, rows, row_bytes)));
  pack_into(kind, from, row_bytes, 0, to);
  return to;
}

inline std::vector<uint8_t> unpacked(PackedKind kind, std::span<const uint8_t> from, int64_t rows,
                                     int64_t row_bytes) {
  std::vector<uint8_t> to(static_cast<size_t>(rows * row_bytes));
  for_elements(kind, rows, row_bytes, [&](int64_t row, int64_t byte, int32_t half) {
    uint8_t& out = to[static_cast<size_t>(row * row_bytes + byte)];
    if (kind == PackedKind::kMxfp4Scales) {
      out = from[static_cast<size_t>(packed_scale_at(row_bytes, row, byte))];
      return;
    }
    const int64_t per_byte = kind == PackedKind::kMxfp4 ? 2 : 1;
    const PackedPlace place = packed_place(kind, row_bytes * per_byte, row, byte * per_byte + half);
    uint16_t bits = 0;
    std::memcpy(&bits, from.data() + place.at, sizeof(bits));
    const int32_t element = place.halves->value_of(bits);
    out = static_cast<uint8_t>(out | element << (4 * half));
  });
  return to;
}

}  // namespace paceline::testing
