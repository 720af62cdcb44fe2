// SPDX-License-Identifier: Apache-2.0
#pragma once

// The layout of a decoder's weights in their arena, tensor by tensor. This file knows no values.

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

// The values that fill_dummy gives a weight.
enum class DummyKind : uint8_t { kNormal, kNeutralNorm, kOne, kZero, kSpreadTokens };

// One tensor of the canonical names, and its location in the arena.
struct NamedWeight {
  std::string name;
  std::array<int64_t, 2> shape = {};  // a vector has the first only
  size_t rank = 0;
  DType dtype = DType::kFloat32;
  DummyKind dummy = DummyKind::kNormal;
  int64_t offset = 0;        // bytes from the start of the arena
  bool is_optional = false;  // the model is complete without it
  bool is_filled = false;

  [[nodiscard]] int64_t elements() const { return rank == 2 ? shape[0] * shape[1] : shape[0]; }
  [[nodiscard]] std::span<const int64_t> dims() const { return std::span(shape).first(rank); }
};

// One tensor of a region: `rows` rows of a matrix, or elements of a vector.
struct WeightPart {
  std::string name;
  int64_t rows;
};

// Hands out aligned regions of the arena in order. The caller of lay_out runs it twice: first
// without a base to learn the size, then with one to set the pointers. Size and layout thus cannot
// disagree.
class Carver final {
 public:
  Carver(DType dtype, std::byte* base) : dtype_(dtype), base_(base) {}

  // The rows of all parts follow each other.
  const std::byte* matrix(const std::vector<WeightPart>& parts, int64_t cols) {
    const int64_t begin = open();
    for (const WeightPart& part : parts) {
      add({.name = part.name, .shape = {part.rows, cols}, .rank = 2, .dtype = dtype_});
    }
    return base_ == nullptr ? nullptr : base_ + begin;
  }
  const float* vector(const std::vector<WeightPart>& parts, DummyKind dummy) {
    const int64_t begin = open();
    for (const WeightPart& part : parts) {
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
         .dummy = DummyKind::kSpreadTokens,
         .is_optional = is_optional});
    return base_ == nullptr ? nullptr : reinterpret_cast<const int32_t*>(base_ + begin);
  }

  [[nodiscard]] int64_t bytes() const { return bytes_; }
  [[nodiscard]] std::vector<NamedWeight> take_named_weights() { return std::move(named_weights_); }

 private:
  int64_t open() {
    return bytes_ = (bytes_ + kWeightAlignment - 1) / kWeightAlignment * kWeightAlignment;
  }
  void add(NamedWeight named) {
    named.offset = bytes_;
    // No sum overflows: parse_decoder_config bounds the bytes of a whole model.
    bytes_ += checked_mul(named.elements(), dtype_bytes(named.dtype));
    named_weights_.push_back(std::move(named));
  }

  DType dtype_;
  std::byte* base_;
  int64_t bytes_ = 0;
  std::vector<NamedWeight> named_weights_;
};

// Carves regions for all weights of the decoder and sets the pointers of `weights`.
void lay_out(const DecoderConfig& config, Carver& carver, DecoderWeights& weights);

}  // namespace paceline
