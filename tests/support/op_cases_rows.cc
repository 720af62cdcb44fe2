// SPDX-License-Identifier: Apache-2.0
//
// Builders of the ops whose rows are independent.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>

#include "base/philox.h"
#include "support/op_cases.h"
#include "support/op_weights.h"
#include "support/row_arrays.h"

namespace paceline::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int32_t kMinInt = std::numeric_limits<int32_t>::min();
constexpr int32_t kMaxInt = std::numeric_limits<int32_t>::max();

// Purposes of random streams.
enum Purpose : uint64_t {
  kX = 1,
  kWeight,
  kBias,
  kResidual,
  kXWeight,
  kKeys,
  kIndex,
  kNoise,
  kScale,
  kUp,
  kOrdering
};

// Tensor cores cut what they add below the last bit instead of rounding it: half an ulp of bias for
// each of K / 16 steps.
constexpr double kTensorCoreBound = 5e-5;

// Most rows are of order one, some are tiny or large.
float scale_of_row(int64_t id) { return id % 7 == 3 ? 1e-3f : id % 11 == 5 ? 50.0f : 1.0f; }

OpArray normal_rows(std::string name, Element cuda, const Rows& rows, int64_t width, int64_t stride,
                    uint64_t seed, Purpose purpose, bool varies_in_scale = false) {
  return row_array(std::move(name), Element::kF32, cuda, rows, stride, [=](int64_t id, float* to) {
    Stream(seed, purpose, static_cast<uint64_t>(id))
        .fill(to, width, varies_in_scale ? scale_of_row(id) : 1.0f);
  });
}

OpArray normal_constant(std::string name, Element element, int64_t count, uint64_t seed,
                        Purpose purpose, float scale = 1.0f) {
  OpArray array = float_array(std::move(name), element, element, count,
                              [=](float* to) { Stream(seed, purpose).fill(to, count, scale); });
  array.is_constant = true;
  return array;
}

// One integer for each row, by identity; rows that are not computed hold a stale one of row 0.
template <class T, class OfRow>
OpArray row_ints(std::string name, const Rows& rows, const OfRow& of_row) {
  std::vector<T> values(static_cast<size_t>(rows.max_rows), static_cast<T>(of_row(int64_t{0})));
  for (size_t i = 0; i < rows.ids.size(); ++i) values[i] = static_cast<T>(of_row(rows.ids[i]));
  return int_array<T>(std::move(name), Role::kInput, values);
}

uint64_t id_hash(uint64_t seed, int64_t id) {
  return Stream(seed, kIndex, static_cast<uint64_t>(id)).next() >> 1;
}

}  // namespace

OpInstance make_gemm(const GemmSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int64_t x_stride = s.k + s.x_padding;
  const int64_t y_stride = s.n + s.y_padding;
  const DType dtype = s.weight.dtype;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle x = op.add(normal_rows("x", element_of(dtype), rows, s.k, x_stride, seed, kX));
  const WeightArrays weight(op, s.weight, s.n, s.k, seed);
  const Handle bias =
      s.has_bias ? op.add(normal_constant("bias", Element::kF32, s.n, seed, kBias)) : kNoArray;
  OpArray out =
      output_array("y", Element::kF32, element_of(s.y_dtype), rows.max_rows * y_stride, y_stride);
  if (dtype == DType::kBFloat16) out.rms_bound = std::max(out.rms_bound, kTensorCoreBound);
  const Handle y = op.add(std::move(out));
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    gemm(ctx, GemmParams{.num_rows = at.get<int32_t>(num_rows),
                         .max_rows = max_rows,
                         .x = at.raw(x),
                         .x_stride = x_stride,
                         .weight = weight.matrix(at),
                         .bias = at.get<float>(bias),
                         .y = at.raw(y),
                         .y_stride = y_stride,
                         .x_dtype = activation_dtype(ctx, dtype),
                         .y_dtype = activation_dtype(ctx, s.y_dtype)});
  });
  return op;
}

OpInstance make_embed(const EmbedSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle tokens = op.add(row_ints<int32_t>("token_ids", rows, [&](int64_t id) -> int32_t {
    const int32_t edges[] = {0, s.vocab_size - 1, s.vocab_size, -1, kMinInt, kMaxInt};
    return id < 6 ? edges[id]
                  : static_cast<int32_t>(id_hash(seed, id) % static_cast<uint64_t>(s.vocab_size));
  }));
  const Handle table = op.add(normal_constant("table", element_of(s.dtype),
                                              int64_t{s.vocab_size} * s.hidden, seed, kWeight));
  OpArray out =
      output_array("y", Element::kF32, Element::kF32, int64_t{rows.max_rows} * s.hidden, s.hidden);
  out.compare = Compare::kExact;  // one product
  const Handle y = op.add(std::move(out));
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    embed(ctx, EmbedParams{.num_rows = at.get<int32_t>(num_rows),
                           .max_rows = max_rows,
                           .token_ids = at.get<int32_t>(tokens),
                           .table = at.raw(table),
                           .table_dtype = s.dtype,
                           .scale = 25.25f,
                           .y = at.get<float>(y),
                           .vocab_size = s.vocab_size,
                           .hidden = s.hidden});
  });
  return op;
}

OpInstance make_rms_norm(const RmsNormSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const bool is_in_place = s.kind == NormKind::kInPlace;
  const bool is_copy = s.kind == NormKind::kCopy || s.kind == NormKind::kResidualCopy;
  const bool has_residual = s.kind != NormKind::kPlain && s.kind != NormKind::kCopy && !is_in_place;
  const bool has_scale =
      s.kind == NormKind::kResidualScale || s.kind == NormKind::kResidualScaleOnly;
  const bool has_x_weight = s.kind == NormKind::kResidualXWeight ||
                            s.kind == NormKind::kResidualXWeightOnly ||
                            s.kind == NormKind::kResidualCopy || has_scale;
  const bool has_y = s.kind != NormKind::kResidualOnly &&
                     s.kind != NormKind::kResidualXWeightOnly &&
                     s.kind != NormKind::kResidualScaleOnly;
  const int64_t x_stride = s.hidden + s.x_padding;
  const int64_t y_stride = is_in_place ? x_stride : s.hidden + s.y_padding;
  const Handle num_rows = add_num_rows(op, rows);
  OpArray in = normal_rows("x", element_of(s.x_dtype), rows, s.hidden, x_stride, seed, kX,
                           /*varies_in_scale=*/true);
  if (is_in_place) in.role = Role::kInOut;
  const Handle x = op.add(std::move(in));
  Handle residual = kNoArray;
  if (has_residual) {
    OpArray sum = normal_rows("residual", Element::kF32, rows, s.hidden, s.hidden, seed, kResidual,
                              /*varies_in_scale=*/true);
    sum.role = Role::kInOut;
    residual = op.add(std::move(sum));
  }
  // Without y the weight is not read, and decoders give none.
  const Handle weight =
      has_y && !is_copy ? op.add(normal_constant("weight", Element::kF32, s.hidden, seed, kWeight))
                        : kNoArray;
  const Handle scale =
      has_scale ? op.add(normal_constant("residual_scale", Element::kF32, 1, seed, kScale))
                : kNoArray;
  const Handle x_weight =
      has_x_weight ? op.add(normal_constant("x_weight", Element::kF32, s.hidden, seed, kXWeight))
                   : kNoArray;
  Handle y = kNoArray;
  if (is_in_place) {
    y = x;
  } else if (has_y) {
    y = op.add(output_array("y", Element::kF32, element_of(s.y_dtype), rows.max_rows * y_stride,
                            y_stride));
  }
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    rms_norm(ctx, RmsNormParams{.num_rows = at.get<int32_t>(num_rows),
                                .max_rows = max_rows,
                                .x = at.raw(x),
                                .x_stride = x_stride,
                                .residual = at.get<float>(residual),
                                .weight = at.get<float>(weight),
                                .weight_offset = has_x_weight ? 1.0f : 0.0f,
                                .eps = 1e-6f,
                                .y = at.raw(y),
                                .y_stride = y_stride,
                                .hidden = s.hidden,
                                .x_weight = at.get<float>(x_weight),
                                .residual_scale = at.get<float>(scale),
                                .x_dtype = activation_dtype(ctx, s.x_dtype),
                                .y_dtype = activation_dtype(ctx, s.y_dtype)});
  });
  return op;
}

OpInstance make_gated(const GatedSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const Element element = element_of(s.dtype);
  const bool has_up = s.up_stride > 0;
  const int64_t width = (has_up ? int64_t{1} : int64_t{2}) * s.intermediate;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle up =
      has_up ? op.add(normal_rows("up", element, rows, s.up_stride, s.up_stride, seed, kUp))
             : kNoArray;
  const Handle x =
      op.add(row_array("x", Element::kF32, element, rows, width, [=](int64_t id, float* to) {
        Stream(seed, kX, static_cast<uint64_t>(id)).fill(to, width, 3.0f);
        const float edges[] = {-150.0f, 150.0f, 0.0f, -1e-6f, -88.0f, 88.0f};
        if (id < 6) to[0] = edges[id];
        if (id < 6 && s.activation == Activation::kSwigluOai && !has_up) {
          const float ups[] = {7.0f, -150.0f, 150.0f, -1.0f, -7.0f, 0.0f};
          to[s.is_interleaved ? 1 : s.intermediate] = ups[id];
        }
      }));
  const Handle y = op.add(output_array("y", Element::kF32, element,
                                       int64_t{rows.max_rows} * s.intermediate, s.intermediate));
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    gated_activation(ctx, GatedActivationParams{.num_rows = at.get<int32_t>(num_rows),
                                                .max_rows = max_rows,
                                                .x = at.raw(x),
                                                .y = at.raw(y),
                                                .intermediate = s.intermediate,
                                                .activation = s.activation,
                                                .dtype = activation_dtype(ctx, s.dtype),
                                                .up = at.raw(up),
                                                .up_stride = s.up_stride,
                                                .alpha = 1.702f,
                                                .limit = 7.0f,
                                                .is_interleaved = s.is_interleaved});
  });
  return op;
}

OpInstance make_per_layer(const PerLayerSpec& s, const Rows& rows, uint64_t seed) {
  constexpr int32_t kVocab = 53;
  OpInstance op;
  const int64_t width = int64_t{s.num_layers} * s.size;
  const Handle num_rows = add_num_rows(op, rows);
  OpArray inout = normal_rows("x", element_of(s.dtype), rows, width, width, seed, kX,
                              /*varies_in_scale=*/true);
  inout.role = Role::kInOut;
  const Handle x = op.add(std::move(inout));
  const Handle tokens = op.add(row_ints<int32_t>("token_ids", rows, [&](int64_t id) -> int32_t {
    const int32_t edges[] = {0, kVocab - 1, kVocab, -1, kMinInt, kMaxInt};
    return id < 6 ? edges[id] : static_cast<int32_t>(id_hash(seed, id) % uint64_t{kVocab});
  }));
  const Handle table =
      op.add(normal_constant("table", element_of(s.table_dtype), kVocab * width, seed, kKeys));
  const Handle weight = op.add(normal_constant("weight", Element::kF32, s.size, seed, kWeight));
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    per_layer_inputs(ctx, PerLayerInputsParams{.num_rows = at.get<int32_t>(num_rows),
                                               .max_rows = max_rows,
                                               .x = at.raw(x),
                                               .token_ids = at.get<int32_t>(tokens),
                                               .table = at.raw(table),
                                               .table_dtype = s.table_dtype,
                                               .vocab_size = kVocab,
                                               .weight = at.get<float>(weight),
                                               .weight_offset = 0.0f,
                                               .eps = 1e-6f,
                                               .x_scale = 0.0255f,
                                               .table_scale = 16.0f,
                                               .scale = 0.70710678f,
                                               .num_layers = s.num_layers,
                                               .size = s.size,
                                               .dtype = activation_dtype(ctx, s.dtype)});
  });
  return op;
}

OpInstance make_rope(const RopeSpec& s, const Rows& rows, uint64_t seed) {
  constexpr int32_t kMaxPositions = 777;
  OpInstance op;
  const Element element = element_of(s.dtype);
  const int64_t width =
      int64_t{qkv_heads(s.num_qo_heads, s.num_kv_heads, s.kv_inputs)} * s.head_dim;
  const int64_t half = s.head_dim / 2;
  const int64_t num_positions = kMaxPositions + s.position_offset;  // of the tables
  const auto is_inert = [](int64_t id) { return id % 13 == 6; };
  // Every row has its own KV slot, past the null block.
  const int32_t num_blocks =
      1 + (static_cast<int32_t>(kMaxRowId) + s.block_size - 1) / s.block_size;
  const int64_t part = int64_t{s.block_size} * s.num_kv_heads * s.head_dim;
  const int64_t gap = 64;  // elements before, between and behind K and V: other layers'
  const int64_t block = 2 * part + 3 * gap;

  const Handle num_rows = add_num_rows(op, rows);
  OpArray fused = normal_rows("qkv", element, rows, width, width, seed, kX,
                              /*varies_in_scale=*/s.has_norms);
  fused.role = Role::kInOut;
  const Handle qkv = op.add(std::move(fused));
  const Handle positions = op.add(row_ints<int32_t>("positions", rows, [&](int64_t id) -> int32_t {
    if (id < 2) return id == 0 ? 0 : kMaxPositions - 1;
    return is_inert(id) ? 0 : static_cast<int32_t>(id_hash(seed, id) % kMaxPositions);
  }));
  const auto slot_of = [&](int64_t id) -> int64_t { return is_inert(id) ? 0 : s.block_size + id; };
  const Handle slots = s.kv_inputs == KvInputs::kNone
                           ? kNoArray
                           : op.add(row_ints<int64_t>("slot_mapping", rows, slot_of));
  Handle q_norm = kNoArray;
  Handle k_norm = kNoArray;
  if (s.has_norms) {
    q_norm = op.add(normal_constant("q_norm", Element::kF32, s.head_dim, seed, kWeight));
    k_norm = op.add(normal_constant("k_norm", Element::kF32, s.head_dim, seed, kXWeight));
  }
  const auto table = [=](bool is_sin) {
    return [=](float* to) {
      for (int64_t position = 0; position < num_positions; ++position) {
        for (int64_t i = 0; i < half; ++i) {
          const double exponent = -static_cast<double>(i) / static_cast<double>(half);
          const double angle = static_cast<double>(position) * std::pow(10000.0, exponent);
          *to++ = static_cast<float>(is_sin ? std::sin(angle) : std::cos(angle));
        }
      }
    };
  };
  const auto add_table = [&](const char* name, bool is_sin) {
    OpArray angles =
        float_array(name, Element::kF32, Element::kF32, num_positions * half, table(is_sin));
    angles.is_constant = true;
    return op.add(std::move(angles));
  };
  const Handle cos = add_table("cos", false);
  const Handle sin = add_table("sin", true);
  const int64_t pool_count = num_blocks * block;
  OpArray kv = float_array("pool", element, element, pool_count,
                           [=](float* to) { std::fill_n(to, pool_count, kNan); });
  kv.role = Role::kInOut;
  kv.num_ignored = block;
  if (s.block_size == 1) {  // a row of the pool is the slot of one row
    kv.row_length = block;
    for (const int64_t id : rows.ids) kv.row_at.push_back(is_inert(id) ? 0 : id + 1);
  }
  const Handle pool = op.add(std::move(kv));
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    const int64_t bytes = element_bytes(element);
    qk_norm_rope_append(ctx, QkNormRopeAppendParams{.num_rows = at.get<int32_t>(num_rows),
                                                    .max_rows = max_rows,
                                                    .qkv = at.raw(qkv),
                                                    .positions = at.get<int32_t>(positions),
                                                    .slot_mapping = at.get<int64_t>(slots),
                                                    .q_norm = at.get<float>(q_norm),
                                                    .k_norm = at.get<float>(k_norm),
                                                    .norm_weight_offset = 1.0f,
                                                    .norm_eps = 1e-6f,
                                                    .rope_cos = at.get<float>(cos),
                                                    .rope_sin = at.get<float>(sin),
                                                    .kv = {.base = at.raw(pool),
                                                           .block_bytes = block * bytes,
                                                           .k_offset = gap * bytes,
                                                           .v_offset = (2 * gap + part) * bytes,
                                                           .block_size = s.block_size,
                                                           .dtype = s.dtype},
                                                    .num_qo_heads = s.num_qo_heads,
                                                    .num_kv_heads = s.num_kv_heads,
                                                    .head_dim = s.head_dim,
                                                    .qkv_dtype = activation_dtype(ctx, s.dtype),
                                                    .kv_inputs = s.kv_inputs,
                                                    .has_v_norm = s.has_v_norm,
                                                    .position_offset = s.position_offset});
  });
  return op;
}

OpInstance make_list_attention(const ListSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const Element element = element_of(s.dtype);
  const int64_t width =
      int64_t{qkv_heads(s.num_qo_heads, s.num_kv_heads, s.kv_inputs)} * s.head_dim;
  const int64_t y_width = int64_t{s.num_qo_heads} * s.head_dim;
  const int64_t q_width = y_width;
  const int32_t num_blocks = 2 + 700 / s.block_size;
  const int64_t part = int64_t{s.block_size} * s.num_kv_heads * s.head_dim;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle qkv =
      op.add(row_array("qkv", Element::kF32, element, rows, width,
                       [=](int64_t id, float* to) {  // its own k and v stay NaN
                         Stream(seed, kX, static_cast<uint64_t>(id)).fill(to, q_width);
                       }));
  const auto count_of = [=](int64_t id) -> int32_t {
    const int32_t counts[] = {s.window, 0, 1, 127, 128, 129};
    return std::min(s.window, counts[id % 6]);
  };
  // Behind the valid entries lie stale ones of earlier lists: the null block, all NaN.
  std::vector<int64_t> lists(static_cast<size_t>(int64_t{rows.max_rows} * s.window), 0);
  for (size_t i = 0; i < rows.ids.size(); ++i) {
    Stream stream(seed, kIndex, static_cast<uint64_t>(rows.ids[i]));
    for (int32_t at = 0; at < count_of(rows.ids[i]); ++at) {
      lists[i * static_cast<size_t>(s.window) + static_cast<size_t>(at)] =
          s.block_size + stream.below((num_blocks - 1) * s.block_size);
    }
  }
  const Handle slots = op.add(int_array("window_slots", Role::kInput, lists));
  const Handle counts = op.add(row_ints<int32_t>("window_count", rows, count_of));
  const Handle pool =
      op.add(float_array("pool", element, element, num_blocks * 2 * part, [=](float* to) {
        std::fill_n(to, 2 * part, kNan);
        Stream(seed, kKeys).fill(to + 2 * part, (num_blocks - 1) * 2 * part);
      }));
  const Handle sinks =
      s.has_sinks
          ? op.add(normal_constant("sinks", Element::kF32, s.num_qo_heads, seed, kBias, 2.0f))
          : kNoArray;
  const Handle y =
      op.add(output_array("y", Element::kF32, element, rows.max_rows * y_width, y_width));
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    const int64_t part_bytes = part * element_bytes(element);
    list_attention(ctx,
                   ListAttentionParams{.num_rows = at.get<int32_t>(num_rows),
                                       .max_rows = max_rows,
                                       .qkv = at.raw(qkv),
                                       .window_slots = at.get<int64_t>(slots),
                                       .window_count = at.get<int32_t>(counts),
                                       .window = s.window,
                                       .kv = {.base = at.raw(pool),
                                              .block_bytes = 2 * part_bytes,
                                              .k_offset = 0,
                                              .v_offset = part_bytes,
                                              .block_size = s.block_size,
                                              .dtype = s.dtype},
                                       .scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim)),
                                       .sinks = at.get<float>(sinks),
                                       .y = at.raw(y),
                                       .num_qo_heads = s.num_qo_heads,
                                       .num_kv_heads = s.num_kv_heads,
                                       .head_dim = s.head_dim,
                                       .dtype = activation_dtype(ctx, s.dtype),
                                       .kv_inputs = s.kv_inputs});
  });
  return op;
}

OpInstance make_gather(const GatherSpec& s, const Rows& rows, uint64_t seed) {
  constexpr int32_t kSourceRows = 37;
  OpInstance op;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle index = op.add(row_ints<int32_t>("row_index", rows, [&](int64_t id) -> int32_t {
    return id == 0 ? kSourceRows - 1 : static_cast<int32_t>(id_hash(seed, id) % kSourceRows);
  }));
  const Handle x =
      op.add(normal_constant("x", Element::kF32, int64_t{kSourceRows} * s.hidden, seed, kX));
  OpArray out =
      output_array("y", Element::kF32, Element::kF32, int64_t{rows.max_rows} * s.hidden, s.hidden);
  out.compare = Compare::kExact;
  const Handle y = op.add(std::move(out));
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    gather_rows(ctx, GatherRowsParams{.num_rows = at.get<int32_t>(num_rows),
                                      .max_rows = max_rows,
                                      .row_index = at.get<int32_t>(index),
                                      .x = at.get<float>(x),
                                      .y = at.get<float>(y),
                                      .hidden = s.hidden});
  });
  return op;
}

OpInstance make_copy(const CopySpec& s, const Rows& rows, uint64_t seed) {
  constexpr int32_t kSourceRows = 37;
  OpInstance op;
  const int64_t x_stride = s.width + s.x_padding;
  const int64_t y_stride = s.width + s.y_padding;
  const Handle num_rows = add_num_rows(op, rows);
  Handle index = kNoArray;
  Handle x = kNoArray;
  if (s.has_index) {
    index = op.add(row_ints<int32_t>("row_index", rows, [&](int64_t id) -> int32_t {
      return id == 0 ? kSourceRows - 1 : static_cast<int32_t>(id_hash(seed, id) % kSourceRows);
    }));
    OpArray source = normal_constant("x", element_of(s.x_dtype), kSourceRows * x_stride, seed, kX);
    source.cpu = Element::kF32;  // an activation
    x = op.add(std::move(source));
  } else {
    x = op.add(normal_rows("x", element_of(s.x_dtype), rows, s.width, x_stride, seed, kX,
                           /*varies_in_scale=*/true));
  }
  const Handle y = op.add(
      output_array("y", Element::kF32, element_of(s.y_dtype), rows.max_rows * y_stride, y_stride));
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    copy_rows(ctx, CopyRowsParams{.num_rows = at.get<int32_t>(num_rows),
                                  .max_rows = max_rows,
                                  .row_index = at.get<int32_t>(index),
                                  .x = at.raw(x),
                                  .x_stride = x_stride,
                                  .y = at.raw(y),
                                  .y_stride = y_stride,
                                  .width = s.width,
                                  .x_dtype = activation_dtype(ctx, s.x_dtype),
                                  .y_dtype = activation_dtype(ctx, s.y_dtype)});
  });
  return op;
}

OpInstance make_soft_cap(const SoftCapSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const Handle num_rows = add_num_rows(op, rows);
  OpArray inout =
      row_array("logits", Element::kF32, Element::kF32, rows, s.n, [=](int64_t id, float* to) {
        Stream(seed, kX, static_cast<uint64_t>(id)).fill(to, s.n, 40.0f);
        const float edges[] = {-kInf, kInf, 0.0f, 1e-3f, -1e30f, 1e30f};
        if (id < 6) to[s.n - 1] = edges[id];
      });
  inout.role = Role::kInOut;
  const Handle logits = op.add(std::move(inout));
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    soft_cap(ctx, SoftCapParams{.num_rows = at.get<int32_t>(num_rows),
                                .max_rows = max_rows,
                                .logits = at.get<float>(logits),
                                .cap = s.cap,
                                .n = s.n});
  });
  return op;
}

OpInstance make_select_clusters(const SelectClustersSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle scores = op.add(row_array(
      "scores", Element::kF32, Element::kF32, rows, s.num_clusters,
      [=](int64_t id, float* to) { fill_logits(s.scores, s.num_clusters, id, seed, to); }));
  const Handle clusters = op.add(output_array("clusters", Element::kI32, Element::kI32,
                                              int64_t{rows.max_rows} * s.top, s.top));
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    select_clusters(ctx, SelectClustersParams{.num_rows = at.get<int32_t>(num_rows),
                                              .max_rows = max_rows,
                                              .scores = at.get<float>(scores),
                                              .num_clusters = s.num_clusters,
                                              .top = s.top,
                                              .clusters = at.get<int32_t>(clusters)});
  });
  return op;
}

OpInstance make_cluster_logits(const ClusterLogitsSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int32_t num_tokens = s.num_clusters * s.cluster_size;
  const int64_t num_logits = int64_t{s.top} * s.cluster_size;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle x =
      op.add(normal_rows("x", element_of(s.x_dtype), rows, s.hidden, s.hidden, seed, kX));
  // Different clusters in any order; rows that are not computed hold stale ones.
  const auto top = static_cast<size_t>(s.top);
  std::vector<int32_t> chosen(static_cast<size_t>(rows.max_rows) * top, s.num_clusters - 1);
  std::vector<int32_t> all(static_cast<size_t>(s.num_clusters));
  for (size_t i = 0; i < rows.ids.size(); ++i) {
    Stream stream(seed, kIndex, static_cast<uint64_t>(rows.ids[i]));
    std::iota(all.begin(), all.end(), 0);
    for (size_t rank = 0; rank < top; ++rank) {
      const auto left = static_cast<int32_t>(all.size() - rank);
      std::swap(all[rank], all[rank + static_cast<size_t>(stream.below(left))]);
      chosen[i * top + rank] = all[rank];
    }
  }
  const Handle clusters = op.add(int_array("clusters", Role::kInput, chosen));
  std::vector<int32_t> ordering(static_cast<size_t>(num_tokens));
  std::iota(ordering.begin(), ordering.end(), 0);
  Stream stream(seed, kOrdering);
  for (size_t i = ordering.size(); i > 1; --i) {
    std::swap(ordering[i - 1],
              ordering[static_cast<size_t>(stream.below(static_cast<int32_t>(i)))]);
  }
  OpArray tokens_by_cluster = int_array("token_ordering", Role::kInput, ordering);
  tokens_by_cluster.is_constant = true;
  const Handle token_ordering = op.add(std::move(tokens_by_cluster));
  const Handle weight =
      op.add(normal_constant("weight", element_of(s.weight_dtype), int64_t{num_tokens} * s.hidden,
                             seed, kWeight, 1.0f / std::sqrt(static_cast<float>(s.hidden))));
  const Handle logits = op.add(
      output_array("logits", Element::kF32, Element::kF32, rows.max_rows * num_logits, num_logits));
  const Handle tokens = op.add(
      output_array("tokens", Element::kI32, Element::kI32, rows.max_rows * num_logits, num_logits));
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    cluster_logits(ctx, ClusterLogitsParams{.num_rows = at.get<int32_t>(num_rows),
                                            .max_rows = max_rows,
                                            .x = at.raw(x),
                                            .clusters = at.get<int32_t>(clusters),
                                            .top = s.top,
                                            .token_ordering = at.get<int32_t>(token_ordering),
                                            .cluster_size = s.cluster_size,
                                            .weight = at.raw(weight),
                                            .logits = at.get<float>(logits),
                                            .tokens = at.get<int32_t>(tokens),
                                            .hidden = s.hidden,
                                            .x_dtype = activation_dtype(ctx, s.x_dtype),
                                            .weight_dtype = s.weight_dtype});
  });
  return op;
}

}  // namespace paceline::testing
