// SPDX-License-Identifier: Apache-2.0
#include "model/weights/weight_layout.h"

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
    while (first_row % rows != 0 || part.first_row % rows != 0) rows /= 2;
    first_row += part.rows;
  }
  return rows;
}

// The matrix of a shape, without data.
[[nodiscard]] WeightMatrix matrix_of(const LinearShape& shape, DType dtype, Device device) {
  WeightMatrix matrix = plain_matrix(/*data=*/nullptr, static_cast<int32_t>(shape.num_rows()),
                                     static_cast<int32_t>(shape.cols), dtype);
  matrix.format = shape.format.format;
  matrix.layout = layout_on(device, matrix.format, dtype);
  if (matrix.format == WeightFormat::kFp8) {
    const bool is_block = shape.format.scales == Fp8Scales::kBlock;
    matrix.scale_rows = is_block ? block_scale_rows(shape.parts) : 1;
    matrix.scale_cols = is_block ? std::min(kFp8Block, matrix.k) : matrix.k;
  }
  if (matrix.format == WeightFormat::kInt4) {
    matrix.scale_rows = 1;
    matrix.scale_cols = shape.format.group == 0 ? matrix.k : shape.format.group;
    matrix.has_zeros = shape.format.has_zeros;
    matrix.has_order = shape.format.has_order;
  }
  if (matrix.format == WeightFormat::kNvfp4) {
    matrix.scale_rows = 1;
    matrix.scale_cols = kNvfp4Columns;
  }
  return matrix;
}

}  // namespace

const std::byte* Carver::open() {
  return open_at((bytes_ + kWeightAlignment - 1) / kWeightAlignment * kWeightAlignment);
}

const std::byte* Carver::open_at(int64_t begin) {
  bytes_ = begin;
  region_ = begin;
  return base_ == nullptr ? nullptr : base_ + begin;
}

template <class AddPart>
void Carver::for_parts(const LinearShape& shape, Place place, const AddPart& add_part) {
  for (const WeightPart& part : shape.parts) {
    add_part(part, place);
    place.first_row += part.rows;
  }
}

void Carver::close(bool has_rest, int64_t bytes) {
  if (has_rest) bytes_ = region_ + bytes;
}

void Carver::add(NamedWeight named, int64_t begin) {
  named.offset = named.packed ? region_ + begin : bytes_;
  // No sum overflows: check_weight_bytes bounds those of a whole model.
  if (!named.packed) bytes_ += checked_mul(named.arena_elements(), dtype_bytes(named.dtype));
  named_weights_.push_back(std::move(named));
}

void Carver::add_matrix(const WeightPart& part, int64_t cols) {
  add({.name = part.name + ".weight", .shape = {part.rows, cols}, .rank = 2, .dtype = dtype_});
}

void Carver::linear(Linear& linear, const LinearShape& shape) {
  linear.shard = shape.shard;
  linear.num_groups = shape.num_groups;
  WeightMatrix& weight = linear.weight;
  weight = matrix_of(shape, dtype_, device_);
  if (!shape.is_owned) return;
  const bool is_in_room = !shape.room_of.empty();
  const Room room = is_in_room ? rooms_.at(shape.room_of) : Room{};
  const int64_t end = bytes_;
  weight.data = is_in_room ? open_at(room.data) : open();
  for_parts(shape, {}, [&](const WeightPart& part, const Place& place) {
    add_elements(part, shape, weight, place);
  });
  close(weight.is_packed(), weight.data_bytes());
  if (weight.format != WeightFormat::kPlain) {
    weight.scales = is_in_room ? open_at(room.scales) : open();
    for_parts(shape, {}, [&](const WeightPart& part, const Place& place) {
      add_scales(part, weight, shape.format, place);
    });
    close(weight.has_packed_scales(), weight.scales_bytes());
  }
  if (weight.has_zeros) {
    const std::byte* const zeros = is_in_room ? open_at(room.zeros) : open();
    weight.zeros = reinterpret_cast<const uint8_t*>(zeros);
    for_parts(shape, {}, [&](const WeightPart& part, const Place& place) {
      add_int4(part, weight, WeightKind::kInt4Zeros, place);
    });
    close(weight.is_packed(), weight.zeros_bytes());
  }
  if (weight.has_order) {
    const std::byte* const order = is_in_room ? open_at(room.order) : open();
    weight.order = reinterpret_cast<const int32_t*>(order);
    add_order(shape.name, shape.cols, /*num_experts=*/0);
  }
  if (is_in_room) bytes_ = end;
}

void Carver::experts(ExpertLinears& experts, const LinearShape& shape) {
  ExpertMatrices& all = experts.weight;
  WeightMatrix& first = all.first;
  experts.shard = shape.shard;
  first = matrix_of(shape, dtype_, device_);
  all.num_experts = shape.num_experts();
  all.data_stride = first.data_bytes();
  all.scales_stride = first.scales_bytes();
  const auto for_tensors = [&](int64_t stride, const auto& add_tensor) {
    if (!shape.is_per_expert) {
      return for_parts(shape, {.matrix_stride = stride}, add_tensor);
    }
    for (int32_t expert = 0; expert < all.num_experts; ++expert) {
      for_parts(shape, {.begin = expert * stride}, [&](const WeightPart& part, const Place& place) {
        add_tensor(WeightPart{concat(part.name, ".", expert), part.rows}, place);
      });
    }
  };
  const int32_t num_matrices = all.num_experts + (shape.has_room ? 1 : 0);
  Room room;
  first.data = open();
  room.data = region_ + all.num_experts * all.data_stride;
  for_tensors(all.data_stride, [&](const WeightPart& part, const Place& place) {
    add_elements(part, shape, first, place);
  });
  close(first.is_packed() || shape.has_room, num_matrices * all.data_stride);
  if (first.format != WeightFormat::kPlain) {
    first.scales = open();
    room.scales = region_ + all.num_experts * all.scales_stride;
    for_tensors(all.scales_stride, [&](const WeightPart& part, const Place& place) {
      add_scales(part, first, shape.format, place);
    });
    close(first.has_packed_scales() || shape.has_room, num_matrices * all.scales_stride);
  }
  if (first.has_zeros) {
    first.zeros = reinterpret_cast<const uint8_t*>(open());
    room.zeros = region_ + all.num_experts * first.zeros_bytes();
    for_tensors(first.zeros_bytes(), [&](const WeightPart& part, const Place& place) {
      add_int4(part, first, WeightKind::kInt4Zeros, place);
    });
    close(first.is_packed() || shape.has_room, num_matrices * first.zeros_bytes());
  }
  if (first.has_order) {
    first.order = reinterpret_cast<const int32_t*>(open());
    room.order = region_ + all.num_experts * first.order_bytes();
    if (shape.is_per_expert) {
      for (int32_t expert = 0; expert < all.num_experts; ++expert) {
        add_order(concat(shape.name, ".", expert), shape.cols, /*num_experts=*/0);
      }
    } else {
      add_order(shape.name, shape.cols, all.num_experts);
    }
    close(shape.has_room, num_matrices * first.order_bytes());
  }
  if (shape.has_room) rooms_[shape.name] = room;
}

void Carver::add_elements(const WeightPart& part, const LinearShape& shape,
                          const WeightMatrix& matrix, const Place& place) {
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
    case WeightFormat::kNvfp4: {
      const int32_t block =
          shape.format.format == WeightFormat::kMxfp4 ? kMxfp4Columns : kNvfp4Columns;
      named.dtype = DType::kUInt8;
      named.kind = WeightKind::kCodes;
      add_dim(part.rows);
      add_dim(shape.cols / block);
      add_dim(block / 2);
      break;
    }
    case WeightFormat::kInt4:
      named.dtype = DType::kUInt8;
      named.kind = WeightKind::kInt4Codes;
      add_dim(part.rows);
      add_dim(shape.cols / 2);
      break;
  }
  if (matrix.is_packed()) {
    named.packed = {.matrix_stride = place.matrix_stride,
                    .first_row = place.first_row,
                    .num_rows = part.rows,
                    .row_bytes = matrix.row_bytes(),
                    .kind = packed_kind(matrix.format)};
  }
  add(std::move(named), place.begin);
}

void Carver::add_scales(const WeightPart& part, const WeightMatrix& matrix,
                        const MatrixFormat& format, const Place& place) {
  if (matrix.format == WeightFormat::kInt4) {
    return add_int4(part, matrix, WeightKind::kInt4Scales, place);
  }
  NamedWeight named = {.name = part.name + ".scales"};
  const auto add_dim = [&](int64_t size) { named.shape[named.rank++] = size; };
  if (part.num_experts > 0) add_dim(part.num_experts);
  if (matrix.format != WeightFormat::kFp8) {
    const bool is_mxfp4 = matrix.format == WeightFormat::kMxfp4;
    named.dtype = is_mxfp4 ? DType::kUInt8 : DType::kFloat32;
    named.kind = is_mxfp4 ? WeightKind::kMxfp4Scales : WeightKind::kNvfp4Scales;
    add_dim(part.rows);
    add_dim(matrix.num_scale_cols());
    if (matrix.has_packed_scales()) {
      named.packed = {.matrix_stride = place.matrix_stride,
                      .first_row = place.first_row,
                      .num_rows = part.rows,
                      .row_bytes = matrix.num_scale_cols() * dtype_bytes(named.dtype),
                      .kind = is_mxfp4 ? PackedKind::kMxfp4Scales : PackedKind::kNvfp4Scales};
    }
    return add(std::move(named), place.begin);
  }
  named.kind = WeightKind::kFp8Scales;
  named.needs_exact_scales = format.has_exact_scales;
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

void Carver::add_int4(const WeightPart& part, const WeightMatrix& matrix, WeightKind kind,
                      const Place& place) {
  const bool is_zeros = kind == WeightKind::kInt4Zeros;
  NamedWeight named = {.name = part.name + (is_zeros ? ".zeros" : ".scales"),
                       .dtype = is_zeros ? DType::kUInt8 : DType::kBFloat16,
                       .kind = kind};
  if (part.num_experts > 0) named.shape[named.rank++] = part.num_experts;
  named.shape[named.rank++] = part.rows;
  named.shape[named.rank++] = matrix.num_scale_cols();
  if (matrix.is_packed()) {
    named.packed = {.matrix_stride = place.matrix_stride,
                    .first_row = place.first_row,
                    .num_rows = part.rows,
                    .row_bytes = matrix.num_scale_cols() * dtype_bytes(named.dtype),
                    .kind = is_zeros ? PackedKind::kMxfp4Scales : PackedKind::kInt4Scales};
  }
  add(std::move(named), place.begin);
}

void Carver::add_order(const std::string& name, int64_t cols, int32_t num_experts) {
  NamedWeight named = {
      .name = name + ".order", .dtype = DType::kInt32, .kind = WeightKind::kInt4Order};
  if (num_experts > 0) named.shape[named.rank++] = num_experts;
  named.shape[named.rank++] = cols;
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

void Carver::floats(const float*& matrix, const WeightPart& part, int64_t cols) {
  matrix = reinterpret_cast<const float*>(open());
  NamedWeight named = {.name = part.name, .needs_finite = part.needs_finite};
  if (part.num_experts > 0) named.shape[named.rank++] = part.num_experts;
  named.shape[named.rank++] = part.rows;
  // One column is a vector.
  if (cols > 1) named.shape[named.rank++] = cols;
  add(std::move(named));
}

void Carver::tokens(const int32_t*& tokens, const WeightPart& part, bool is_optional) {
  tokens = reinterpret_cast<const int32_t*>(open());
  add({.name = part.name,
       .shape = {part.rows},
       .rank = 1,
       .dtype = DType::kInt32,
       .kind = WeightKind::kIds,
       .dummy = DummyKind::kSpreadIds,
       .is_optional = is_optional});
}

void Carver::experts_of_tokens(const int32_t*& table, const WeightPart& part, int32_t top_k,
                               int32_t num_experts) {
  table = reinterpret_cast<const int32_t*>(open());
  add({.name = part.name,
       .shape = {part.rows, top_k},
       .rank = 2,
       .dtype = DType::kInt32,
       .kind = WeightKind::kIds,
       .dummy = DummyKind::kCycledIds,
       .num_experts = num_experts});
}

void size_weights(const DecoderConfig& config, DecoderWeights& weights) {
  weights.layers.resize(config.layers.size());
  for (size_t i = 0; i < config.layers.size(); ++i) {
    LayerWeights& layer = weights.layers[i];
    std::visit([&]<class Kind>(const Kind&) { layer.attention.emplace<WeightsOf<Kind>>(); },
               config.layers[i].attention);
    std::visit([&]<class Kind>(const Kind&) { layer.mlp.emplace<WeightsOf<Kind>>(); },
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
