// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where every named tensor of a decoder lies in the arena of its weights. Knows no values.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <paceline/dtype.h>

#include "base/aligned_buffer.h"
#include "model/decoder_config.h"
#include "model/weights.h"

namespace paceline {

inline constexpr int64_t kWeightAlignment = 64;  // bytes, of every region of the arena

// What fill_dummy gives a weight.
enum class Dummy : uint8_t { kNormal, kNeutralNorm, kOne, kZero, kSpreadTokens };

// Where one named tensor lies in the arena.
struct Slot {
  std::string name;
  std::array<int64_t, 2> shape = {};  // of a vector: the first only
  size_t rank = 0;
  DType dtype = DType::kFloat32;
  Dummy dummy = Dummy::kNormal;
  int64_t offset = 0;
  bool is_optional = false;  // of a model that is complete without it
  bool is_filled = false;

  [[nodiscard]] int64_t elements() const { return rank == 2 ? shape[0] * shape[1] : shape[0]; }
  [[nodiscard]] std::span<const int64_t> dims() const { return std::span(shape).first(rank); }
};

// One tensor of a region: `rows` rows of a matrix, or elements of a vector.
struct Part {
  std::string name;
  int64_t rows;
};

// Hands out aligned regions of the arena in order. Run over the model twice by lay_out's caller,
// first without a base to learn the size and then to set the pointers, so that size and layout
// cannot disagree.
class Carver final {
 public:
  Carver(DType dtype, std::byte* base) : dtype_(dtype), base_(base) {}

  // The rows of all parts, one after the other.
  const std::byte* matrix(const std::vector<Part>& parts, int64_t cols) {
    const int64_t begin = open();
    for (const Part& part : parts) {
      add({.name = part.name, .shape = {part.rows, cols}, .rank = 2, .dtype = dtype_});
    }
    return base_ == nullptr ? nullptr : base_ + begin;
  }
  const float* vector(const std::vector<Part>& parts, Dummy dummy) {
    const int64_t begin = open();
    for (const Part& part : parts) {
      add({.name = part.name, .shape = {part.rows, 0}, .rank = 1, .dummy = dummy});
    }
    return base_ == nullptr ? nullptr : reinterpret_cast<const float*>(base_ + begin);
  }

  const int32_t* tokens(const std::string& name, int64_t count, bool is_optional) {
    const int64_t begin = open();
    add({.name = name,
         .shape = {count, 0},
         .rank = 1,
         .dtype = DType::kInt32,
         .dummy = Dummy::kSpreadTokens,
         .is_optional = is_optional});
    return base_ == nullptr ? nullptr : reinterpret_cast<const int32_t*>(base_ + begin);
  }

  [[nodiscard]] int64_t bytes() const { return bytes_; }
  [[nodiscard]] std::vector<Slot> take_slots() { return std::move(slots_); }

 private:
  int64_t open() {
    return bytes_ = (bytes_ + kWeightAlignment - 1) / kWeightAlignment * kWeightAlignment;
  }
  void add(Slot slot) {
    slot.offset = bytes_;
    // No sum overflows: parse_decoder_config bounds the bytes of a whole model.
    bytes_ += checked_mul(slot.elements(), dtype_bytes(slot.dtype));
    slots_.push_back(std::move(slot));
  }

  DType dtype_;
  std::byte* base_;
  int64_t bytes_ = 0;
  std::vector<Slot> slots_;
};

void lay_out(const DecoderConfig& config, Carver& carver, DecoderWeights& weights);

}  // namespace paceline
