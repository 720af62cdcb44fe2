// SPDX-License-Identifier: Apache-2.0
#include "model/weight_layout.h"

#include "base/aligned_buffer.h"

namespace paceline {
namespace {

[[nodiscard]] DummyKind dummy_kind(VectorKind kind) {
  switch (kind) {
    case VectorKind::kNorm:
      return DummyKind::kNeutralNorm;
    case VectorKind::kBias:
      return DummyKind::kZero;
    case VectorKind::kScale:
      return DummyKind::kOne;
  }
  return DummyKind::kZero;
}

[[nodiscard]] const char* vector_suffix(VectorKind kind) {
  switch (kind) {
    case VectorKind::kNorm:
      return ".weight";
    case VectorKind::kBias:
      return ".bias";
    case VectorKind::kScale:
      return "";
  }
  return "";
}

}  // namespace

const std::byte* Carver::open() {
  bytes_ = (bytes_ + kWeightAlignment - 1) / kWeightAlignment * kWeightAlignment;
  return base_ == nullptr ? nullptr : base_ + bytes_;
}

void Carver::add(NamedWeight named) {
  named.offset = bytes_;
  // No sum overflows: parse_decoder_config bounds the bytes of a whole model.
  bytes_ += checked_mul(named.elements(), dtype_bytes(named.dtype));
  named_weights_.push_back(std::move(named));
}

void Carver::add_matrix(const WeightPart& part, int64_t cols) {
  add({.name = part.name + ".weight", .shape = {part.rows, cols}, .rank = 2, .dtype = dtype_});
}

void Carver::linear(Linear& linear, const LinearShape& shape) {
  linear.weight = plain_matrix(/*data=*/nullptr, static_cast<int32_t>(shape.num_rows()),
                               static_cast<int32_t>(shape.cols), dtype_);
  linear.shard = shape.shard;
  if (!shape.is_owned) return;
  linear.weight.data = open();
  for (const WeightPart& part : shape.parts) add_matrix(part, shape.cols);
}

void Carver::vector(const float*& vector, VectorKind kind, const std::vector<WeightPart>& parts) {
  vector = reinterpret_cast<const float*>(open());
  for (const WeightPart& part : parts) {
    add({.name = part.name + vector_suffix(kind),
         .shape = {part.rows, 0},
         .rank = 1,
         .dummy = dummy_kind(kind)});
  }
}

void Carver::table(const std::byte*& table, const WeightPart& part, int64_t cols) {
  table = open();
  add_matrix(part, cols);
}

void Carver::tokens(const int32_t*& tokens, const WeightPart& part, bool is_optional) {
  tokens = reinterpret_cast<const int32_t*>(open());
  add({.name = part.name,
       .shape = {part.rows, 0},
       .rank = 1,
       .dtype = DType::kInt32,
       .dummy = DummyKind::kSpreadTokens,
       .is_optional = is_optional});
}

void size_weights(const DecoderConfig& config, DecoderWeights& weights) {
  weights.layers.resize(config.layers.size());
  const bool has_fc_norms = config.drafter && config.drafter->has_fc_norm;
  weights.head.fc_norms.resize(has_fc_norms ? config.drafter->aux_layers.size() : 0);
}

void lay_out(const DecoderConfig& config, Carver& carver, DecoderWeights& weights) {
  size_weights(config, weights);
  visit_weights(config, weights, carver);
  if (config.ties_lm_head) weights.lm_head.weight.data = weights.embed;
}

}  // namespace paceline
