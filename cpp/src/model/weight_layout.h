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

#include "model/decoder_config.h"
#include "model/visit_weights.h"
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

// Hands out aligned regions of the arena in the order in which visit_weights visits. The caller of
// lay_out runs it twice: first without a base to learn the size, then with one to set the pointers.
// Size and layout thus cannot disagree.
class Carver final {
 public:
  Carver(DType dtype, std::byte* base) : dtype_(dtype), base_(base) {}

  // The rows of all parts follow each other.
  void linear(Linear& linear, const LinearShape& shape);
  void vector(const float*& vector, VectorKind kind, const std::vector<WeightPart>& parts);
  void table(const std::byte*& table, const WeightPart& part, int64_t cols);
  void tokens(const int32_t*& tokens, const WeightPart& part, bool is_optional);

  [[nodiscard]] int64_t bytes() const { return bytes_; }
  [[nodiscard]] std::vector<NamedWeight> take_named_weights() { return std::move(named_weights_); }

 private:
  // Begins a region. Its address is null without a base.
  const std::byte* open();
  void add(NamedWeight named);
  void add_matrix(const WeightPart& part, int64_t cols);

  DType dtype_;
  std::byte* base_;
  int64_t bytes_ = 0;
  std::vector<NamedWeight> named_weights_;
};

// Carves regions for all weights of the decoder and sets the pointers of `weights`.
void lay_out(const DecoderConfig& config, Carver& carver, DecoderWeights& weights);

}  // namespace paceline
