// SPDX-License-Identifier: Apache-2.0
#include "model/weight_layout.h"

#include <algorithm>

#include "base/aligned_buffer.h"

namespace paceline {
namespace {

[[nodiscard]] DummyKind dummy_kind(VectorKind kind) {
  switch (kind) {
    case VectorKind::kNorm:
      return DummyKind::kNeutralNorm;
    case VectorKind::kBias:
    case VectorKind::kSinks:
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
    case VectorKind::kSinks:
    case VectorKind::kScale:
      return "";
  }
  return "";
}

[[nodiscard]] int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The most rows, a power of two, that tiles of scales can have without reaching over the first row
// of a part.
[[nodiscard]] int32_t block_scale_rows(const std::vector<WeightPart>& parts) {
  int32_t rows = kFp8Block;
  int64_t first_row = 0;
  for (const WeightPart& part : parts) {
    while (first_row % rows != 0) rows /= 2;
    first_row += part.rows;
  }
  return rows;
}

// The matrix of a shape, without data.
[[nodiscard]] WeightMatrix matrix_of(const LinearShape& shape, DType dtype) {
  WeightMatrix matrix = plain_matrix(/*data=*/nullptr, static_cast<int32_t>(shape.num_rows()),
                                     static_cast<int32_t>(shape.cols), dtype);
  matrix.format = shape.format.format;
  if (matrix.format == WeightFormat::kFp8) {
    const bool is_block = shape.format.scales == Fp8Scales::kBlock;
    matrix.scale_rows = is_block ? block_scale_rows(shape.parts) : 1;
    matrix.scale_cols = is_block ? std::min(kFp8Block, matrix.k) : matrix.k;
  }
  return matrix;
}

}  // namespace

const std::byte* Carver::open() {
  bytes_ = (bytes_ + kWeightAlignment - 1) / kWeightAlignment * kWeightAlignment;
  return base_ == nullptr ? nullptr : base_ + bytes_;
}

void Carver::add(NamedWeight named) {
  named.offset = bytes_;
  // No sum overflows: parse_decoder_config bounds the bytes of a whole model.
  bytes_ += checked_mul(named.arena_elements(), dtype_bytes(named.dtype));
  named_weights_.push_back(std::move(named));
}

void Carver::add_matrix(const WeightPart& part, int64_t cols) {
  add({.name = part.name + ".weight", .shape = {part.rows, cols}, .rank = 2, .dtype = dtype_});
}

void Carver::linear(Linear& linear, const LinearShape& shape) {
  linear.shard = shape.shard;
  linear.weight = matrix_of(shape, dtype_);
  if (!shape.is_owned) return;
  linear.weight.data = open();
  for (const WeightPart& part : shape.parts) add_elements(part, shape);
  if (shape.format.format == WeightFormat::kPlain) return;
  linear.weight.scales = open();
  for (const WeightPart& part : shape.parts) add_scales(part, linear.weight, shape.format);
}

void Carver::experts(ExpertLinears& experts, const LinearShape& shape) {
  WeightMatrix& first = experts.weight.first;
  experts.shard = shape.shard;
  first = matrix_of(shape, dtype_);
  experts.weight.num_experts = shape.num_experts();
  experts.weight.data_stride = first.n * first.row_bytes();
  experts.weight.scales_stride = first.scales_bytes();
  std::vector<WeightPart> tensors = shape.parts;
  if (shape.is_per_expert) {
    tensors.clear();
    for (int32_t expert = 0; expert < shape.num_experts(); ++expert) {
      for (const WeightPart& part : shape.parts) {
        tensors.push_back({concat(part.name, ".", expert), part.rows});
      }
    }
  }
  first.data = open();
  for (const WeightPart& tensor : tensors) add_elements(tensor, shape);
  if (shape.format.format == WeightFormat::kPlain) return;
  first.scales = open();
  for (const WeightPart& tensor : tensors) add_scales(tensor, first, shape.format);
}

void Carver::add_elements(const WeightPart& part, const LinearShape& shape) {
  NamedWeight named = {.name = part.name + ".weight", .dtype = dtype_};
  const auto add_dim = [&](int64_t size) { named.shape[named.rank++] = size; };
  if (part.num_experts > 0) add_dim(part.num_experts);
  switch (shape.format.format) {
    case WeightFormat::kPlain:
      if (shape.is_transposed) named.kind = WeightKind::kTransposed;
      add_dim(shape.is_transposed ? shape.cols : part.rows);
      add_dim(shape.is_transposed ? part.rows : shape.cols);
      break;
    case WeightFormat::kFp8:
      named.dtype = DType::kFloat8E4M3;
      named.kind = WeightKind::kCodes;
      add_dim(part.rows);
      add_dim(shape.cols);
      break;
    case WeightFormat::kMxfp4:
      named.dtype = DType::kUInt8;
      named.kind = WeightKind::kCodes;
      add_dim(part.rows);
      add_dim(shape.cols / kMxfp4Columns);
      add_dim(kMxfp4Columns / 2);
      break;
  }
  add(std::move(named));
}

void Carver::add_scales(const WeightPart& part, const WeightMatrix& matrix,
                        const MatrixFormat& format) {
  NamedWeight named = {.name = part.name + ".scales"};
  const auto add_dim = [&](int64_t size) { named.shape[named.rank++] = size; };
  if (part.num_experts > 0) add_dim(part.num_experts);
  if (matrix.format == WeightFormat::kMxfp4) {
    named.dtype = DType::kUInt8;
    named.kind = WeightKind::kMxfp4Scales;
    add_dim(part.rows);
    add_dim(matrix.num_scale_cols());
    return add(std::move(named));
  }
  named.kind = WeightKind::kFp8Scales;
  named.arena_rows = divide_up(part.rows, matrix.scale_rows);
  switch (format.scales) {
    case Fp8Scales::kTensor:
      add_dim(1);
      named.repeats = part.rows;
      break;
    case Fp8Scales::kRow:
      add_dim(part.rows);
      add_dim(1);
      break;
    case Fp8Scales::kBlock:
      add_dim(divide_up(part.rows, kFp8Block));
      add_dim(matrix.num_scale_cols());
      named.repeats = kFp8Block / matrix.scale_rows;
      break;
  }
  add(std::move(named));
}

void Carver::vector(const float*& vector, VectorKind kind, const std::vector<WeightPart>& parts) {
  vector = reinterpret_cast<const float*>(open());
  for (const WeightPart& part : parts) {
    NamedWeight named = {.name = part.name + vector_suffix(kind), .dummy = dummy_kind(kind)};
    if (part.num_experts > 0) named.shape[named.rank++] = part.num_experts;
    named.shape[named.rank++] = part.rows;
    add(std::move(named));
  }
}

void Carver::table(const std::byte*& table, const WeightPart& part, int64_t cols) {
  table = open();
  add_matrix(part, cols);
}

void Carver::tokens(const int32_t*& tokens, const WeightPart& part, bool is_optional) {
  tokens = reinterpret_cast<const int32_t*>(open());
  add({.name = part.name,
       .shape = {part.rows},
       .rank = 1,
       .dtype = DType::kInt32,
       .kind = WeightKind::kTokens,
       .dummy = DummyKind::kSpreadTokens,
       .is_optional = is_optional});
}

void size_weights(const DecoderConfig& config, DecoderWeights& weights) {
  weights.layers.resize(config.layers.size());
  for (size_t i = 0; i < config.layers.size(); ++i) {
    auto& attention = weights.layers[i].attention;
    std::visit(
        Overloaded{
            [&](const MultiHeadAttention&) { attention.emplace<MultiHeadAttentionWeights>(); },
            [&](const LatentAttention&) { attention.emplace<LatentAttentionWeights>(); }},
        config.layers[i].attention);
    auto& mlp = weights.layers[i].mlp;
    std::visit(Overloaded{[&](const DenseMlp&) { mlp.emplace<DenseMlpWeights>(); },
                          [&](const MoeMlp&) { mlp.emplace<MoeMlpWeights>(); }},
               config.layers[i].mlp);
  }
  weights.head.fc_norms.resize(config.drafter ? config.drafter->num_fc_norms() : 0);
}

void lay_out(const DecoderConfig& config, Carver& carver, DecoderWeights& weights) {
  size_weights(config, weights);
  visit_weights(config, weights, carver);
  if (config.ties_lm_head) weights.lm_head.weight.data = weights.embed;
}

}  // namespace paceline
