// SPDX-License-Identifier: Apache-2.0
#pragma once

// Packed weights (cuda/gemm/packed_weights.h) by their definition, an element at a time: packs
// row-major rows on the host, and unpacks them, but for the scales of nvfp4, which packing changes.
// It shares no code with the kernel that packs.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/float_types.h"
#include "device/packed_tiles.h"

namespace paceline::testing {

// The bits of the elements a0 to a3 (of kFp8 a0 and a2) of an even column in a word, from the
// lowest bit of an element up. Those of odd columns are 16 further on, modulo 32.
inline constexpr std::array<std::array<int32_t, 4>, 4> kMxfp4Bits = {
    {{6, 7, 8, 15}, {10, 11, 12, 19}, {0, 1, 2, 9}, {4, 5, 14, 13}}};
inline constexpr std::array<std::array<int32_t, 8>, 2> kFp8Bits = {
    {{4, 5, 6, 7, 8, 9, 10, 15}, {0, 1, 2, 3, 12, 13, 14, 11}}};

// What a word has of every value of an element.
struct ElementBits {
  std::array<uint32_t, 256> of = {};
  uint32_t mask = 0;

  template <size_t num_bits>
  constexpr ElementBits(const std::array<int32_t, num_bits>& bits, bool is_odd) {
    for (size_t value = 0; value < size_t{1} << num_bits; ++value) {
      for (size_t i = 0; i < num_bits; ++i) {
        if ((value >> i & 1) != 0) of[value] |= uint32_t{1} << (bits[i] + (is_odd ? 16 : 0)) % 32;
      }
    }
    mask = of[(size_t{1} << num_bits) - 1];
  }
  [[nodiscard]] int32_t value_of(uint32_t word) const {
    return static_cast<int32_t>(std::find(of.begin(), of.end(), word & mask) - of.begin());
  }
};
template <size_t num_bits>
constexpr std::array<ElementBits, 2> even_and_odd(const std::array<int32_t, num_bits>& bits) {
  return {ElementBits(bits, false), ElementBits(bits, true)};
}
inline constexpr std::array<std::array<int32_t, 4>, 4> kInt4Bits = {
    {{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}}};
inline constexpr std::array kInt4Words = {even_and_odd(kInt4Bits[0]), even_and_odd(kInt4Bits[1]),
                                          even_and_odd(kInt4Bits[2]), even_and_odd(kInt4Bits[3])};
inline constexpr std::array kMxfp4Words = {even_and_odd(kMxfp4Bits[0]), even_and_odd(kMxfp4Bits[1]),
                                           even_and_odd(kMxfp4Bits[2]),
                                           even_and_odd(kMxfp4Bits[3])};
inline constexpr std::array kFp8Words = {even_and_odd(kFp8Bits[0]), even_and_odd(kFp8Bits[1])};

// A place in packed memory: the byte at which a word begins, and what the word has.
struct PackedPlace {
  int64_t at = 0;
  const ElementBits* bits = nullptr;
};

inline bool has_two_a_byte(PackedKind kind) {
  return kind == PackedKind::kMxfp4 || kind == PackedKind::kInt4;
}
// Whether bytes are moved whole.
inline bool is_of_scales(PackedKind kind) {
  return kind == PackedKind::kMxfp4Scales || kind == PackedKind::kInt4Scales;
}

// Where the element of a row and column lies in a packed matrix of `cols` columns.
inline PackedPlace packed_place(PackedKind kind, int64_t cols, int64_t row, int64_t col) {
  const int64_t tiles = (cols + 63) / 64;
  const int64_t tile = row / 16 * tiles + col / 64;
  const auto r = static_cast<size_t>(row % 16);
  const auto c = static_cast<size_t>(col % 64);
  const size_t step = c / 16;
  const bool is_late = c % 16 >= 8;  // a2 and a3
  const size_t lane = r % 8 * 4 + c % 8 / 2;
  if (has_two_a_byte(kind)) {
    const int64_t word = tile * 128 + static_cast<int64_t>(lane * 4 + step);
    const auto& words = kind == PackedKind::kInt4 ? kInt4Words : kMxfp4Words;
    return {.at = word * 4, .bits = &words[r / 8 + (is_late ? 2 : 0)][c % 2]};
  }
  const int64_t word =
      tile * 256 + static_cast<int64_t>(step / 2 * 128 + lane * 4 + step % 2 * 2 + r / 8);
  return {.at = word * 4, .bits = &kFp8Words[is_late ? 1 : 0][c % 2]};
}

// Where byte `col` of the scales of a row lies, of which there are `cols`. A byte is the scale of
// 32 columns, or half of that of a group.
inline int64_t packed_scale_at(PackedKind kind, int64_t cols, int64_t row, int64_t col) {
  const int64_t tile = row / 16 * ((cols + 1) / 2) + col / 2;
  const int64_t in_word =
      kind == PackedKind::kInt4Scales ? row % 16 / 8 * 2 + col % 2 : col % 2 * 2 + row % 16 / 8;
  return tile * 32 + row % 8 * 4 + in_word;
}

// The line that a scale of nvfp4 becomes: two bfloat16.
struct Nvfp4Line {
  uint16_t slope = 0;
  uint16_t offset = 0;
};
inline Nvfp4Line nvfp4_line(float scale) {
  const float of_1 = bf16_to_float(float_to_bf16(scale));
  const float of_1_5 = bf16_to_float(float_to_bf16(1.5f * scale));
  const float slope = (of_1_5 - of_1) * 2;
  return {.slope = float_to_bf16(slope), .offset = float_to_bf16(of_1 - slope)};
}
// Writes the lines of a row's scales.
inline void pack_nvfp4_scales(const uint8_t* from, int64_t row_bytes, int64_t row,
                              std::span<uint8_t> to) {
  for (int64_t i = 0; i < row_bytes / 4; ++i) {
    float scale = 0;
    std::memcpy(&scale, from + 4 * i, sizeof(scale));
    const Nvfp4Line line = nvfp4_line(scale);
    const int64_t tile = row / 16 * ((row_bytes + 15) / 16) + i / 4;
    uint8_t* const at = to.data() + tile * 256 + row % 8 * 32 + i % 4 * 8 + row % 16 / 8 * 2;
    std::memcpy(at, &line.slope, sizeof(line.slope));
    std::memcpy(at + 4, &line.offset, sizeof(line.offset));
  }
}

// Bytes of a packed matrix whose rows have `row_bytes`.
inline int64_t packed_bytes(PackedKind kind, int64_t rows, int64_t row_bytes) {
  const int64_t tile_bytes = kind == PackedKind::kFp8           ? 1024
                             : has_two_a_byte(kind)             ? 512
                             : kind == PackedKind::kNvfp4Scales ? 256
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
      if (has_two_a_byte(kind)) f(row, byte, 1);
    }
  }
}

// Writes row-major rows into a packed matrix, from row `first_row`; other rows stay as they are.
inline void pack_into(PackedKind kind, std::span<const uint8_t> from, int64_t row_bytes,
                      int64_t first_row, std::span<uint8_t> to) {
  const int64_t rows = row_bytes == 0 ? 0 : std::ssize(from) / row_bytes;
  if (kind == PackedKind::kNvfp4Scales) {
    for (int64_t row = 0; row < rows; ++row) {
      pack_nvfp4_scales(from.data() + row * row_bytes, row_bytes, first_row + row, to);
    }
    return;
  }
  for_elements(kind, rows, row_bytes, [&](int64_t row, int64_t byte, int32_t half) {
    const uint8_t value = from[static_cast<size_t>(row * row_bytes + byte)];
    if (is_of_scales(kind)) {
      to[static_cast<size_t>(packed_scale_at(kind, row_bytes, first_row + row, byte))] = value;
      return;
    }
    const bool has_two = has_two_a_byte(kind);
    const int64_t per_byte = has_two ? 2 : 1;
    const PackedPlace place =
        packed_place(kind, row_bytes * per_byte, first_row + row, byte * per_byte + half);
    const int32_t element = has_two ? value >> (4 * half) & 15 : value;
    uint32_t word = 0;
    std::memcpy(&word, to.data() + place.at, sizeof(word));
    word = (word & ~place.bits->mask) | place.bits->of[static_cast<size_t>(element)];
    std::memcpy(to.data() + place.at, &word, sizeof(word));
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
    if (is_of_scales(kind)) {
      out = from[static_cast<size_t>(packed_scale_at(kind, row_bytes, row, byte))];
      return;
    }
    const int64_t per_byte = has_two_a_byte(kind) ? 2 : 1;
    const PackedPlace place = packed_place(kind, row_bytes * per_byte, row, byte * per_byte + half);
    uint32_t word = 0;
    std::memcpy(&word, from.data() + place.at, sizeof(word));
    const int32_t element = place.bits->value_of(word);
    out = static_cast<uint8_t>(out | element << (4 * half));
  });
  return to;
}

}  // namespace paceline::testing
