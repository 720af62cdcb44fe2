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
#include "support/row_values.h"

namespace paceline::testing {

OpInstance make_gemm(const GemmSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int64_t x_width = int64_t{s.num_groups} * s.k;
  const int64_t x_stride = x_width + s.x_padding;
  const int64_t y_stride = s.n + s.y_padding;
  const DType dtype = s.weight.dtype;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle x = op.add(normal_rows("x", element_of(dtype), rows, x_width, x_stride, seed, kX));
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
                         .weight = weight.matrix(ctx, at),
                         .bias = at.get<float>(bias),
                         .y = at.raw(y),
                         .y_stride = y_stride,
                         .x_dtype = activation_dtype(ctx, dtype),
                         .y_dtype = activation_dtype(ctx, s.y_dtype),
                         .num_groups = s.num_groups});
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
  const Handle x =
      op.add(normal_rows("x", element_of(s.x_dtype), rows, s.hidden, x_stride, seed, kX,
                         /*varies_in_scale=*/true, is_in_place ? Role::kInOut : Role::kInput));
  const Handle residual =
      has_residual
          ? op.add(normal_rows("residual", Element::kF32, rows, s.hidden, s.hidden, seed, kResidual,
                               /*varies_in_scale=*/true, Role::kInOut))
          : kNoArray;
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
  const bool has_limit =
      s.activation == Activation::kSwigluOai || s.activation == Activation::kClampedSilu;
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
        if (id < 6 && has_limit && !has_up) {
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

OpInstance make_activated_gemm(const ActivatedGemmSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const DType dtype = s.weight.dtype;
  const Element element = element_of(dtype);
  const int64_t width = 2 * int64_t{s.intermediate};
  const Handle num_rows = add_num_rows(op, rows);
  const Handle x = op.add(normal_rows("x", element, rows, s.k, s.k, seed, kX));
  const WeightArrays weight(op, s.weight, static_cast<int32_t>(width), s.k, seed);
  const Handle bias =
      s.has_bias ? op.add(normal_constant("bias", Element::kF32, width, seed, kBias)) : kNoArray;
  const Handle halves = op.add(intermediate_array("gate_and_up", element, rows.max_rows * width));
  OpArray out = output_array("y", Element::kF32, element, int64_t{rows.max_rows} * s.intermediate,
                             s.intermediate);
  out.rms_bound *= 2;  // gates and ups are rounded
  const Handle y = op.add(std::move(out));
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    const DType on_device = activation_dtype(ctx, dtype);
    const ActivatedGemmParams both = {.product = {.num_rows = at.get<int32_t>(num_rows),
                                                  .max_rows = max_rows,
                                                  .x = at.raw(x),
                                                  .x_stride = s.k,
                                                  .weight = weight.matrix(ctx, at),
                                                  .bias = at.get<float>(bias),
                                                  .y = at.raw(halves),
                                                  .y_stride = width,
                                                  .x_dtype = on_device,
                                                  .y_dtype = on_device},
                                      .activation = {.num_rows = at.get<int32_t>(num_rows),
                                                     .max_rows = max_rows,
                                                     .x = at.raw(halves),
                                                     .y = at.raw(y),
                                                     .intermediate = s.intermediate,
                                                     .activation = s.activation,
                                                     .dtype = on_device,
                                                     .alpha = 1.702f,
                                                     .limit = 7.0f}};
    if (s.activates_alone) {
      gemm(ctx, both.product);
      gated_activation(ctx, both.activation);
    } else {
      activated_gemm(ctx, both);
    }
  });
  return op;
}

OpInstance make_normed_gemm(const NormedGemmSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const DType dtype = s.weight.dtype;
  const Element element = element_of(dtype);
  const int64_t width = (s.has_activation ? 2 : 1) * int64_t{s.n};
  const Handle num_rows = add_num_rows(op, rows);
  const Handle x = op.add(normal_rows("x", Element::kF32, rows, s.k, s.k, seed, kX,
                                      /*varies_in_scale=*/true));
  const Handle norm = op.add(normal_constant("norm", Element::kF32, s.k, seed, kXWeight));
  const WeightArrays weight(op, s.weight, static_cast<int32_t>(width), s.k, seed);
  const Handle bias =
      s.has_bias ? op.add(normal_constant("bias", Element::kF32, width, seed, kBias)) : kNoArray;
  const Handle normed = op.add(intermediate_array("normed", element, int64_t{rows.max_rows} * s.k));
  const Handle halves =
      s.has_activation ? op.add(intermediate_array("gate_and_up", element, rows.max_rows * width))
                       : kNoArray;
  OpArray out = output_array("y", Element::kF32, element, int64_t{rows.max_rows} * s.n, s.n);
  out.rms_bound *= s.has_activation ? 3 : 2;  // the norm is rounded, and gates and ups
  const Handle y = op.add(std::move(out));
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    const DType on_device = activation_dtype(ctx, dtype);
    const NormedGemmParams all = {.norm = {.num_rows = at.get<int32_t>(num_rows),
                                           .max_rows = max_rows,
                                           .x = at.raw(x),
                                           .x_stride = s.k,
                                           .residual = nullptr,
                                           .weight = at.get<float>(norm),
                                           .weight_offset = 1.0f,
                                           .eps = 1e-6f,
                                           .y = at.raw(normed),
                                           .y_stride = s.k,
                                           .hidden = s.k,
                                           .y_dtype = on_device},
                                  .product = {.num_rows = at.get<int32_t>(num_rows),
                                              .max_rows = max_rows,
                                              .x = at.raw(normed),
                                              .x_stride = s.k,
                                              .weight = weight.matrix(ctx, at),
                                              .bias = at.get<float>(bias),
                                              .y = at.raw(s.has_activation ? halves : y),
                                              .y_stride = width,
                                              .x_dtype = on_device,
                                              .y_dtype = on_device},
                                  .activation = {.num_rows = at.get<int32_t>(num_rows),
                                                 .max_rows = max_rows,
                                                 .x = at.raw(halves),
                                                 .y = at.raw(y),
                                                 .intermediate = s.n,
                                                 .activation = Activation::kSilu,
                                                 .dtype = on_device},
                                  .has_activation = s.has_activation};
    if (!s.norms_alone) return normed_gemm(ctx, all);
    rms_norm(ctx, all.norm);
    if (s.has_activation) {
      activated_gemm(ctx, {.product = all.product, .activation = all.activation});
    } else {
      gemm(ctx, all.product);
    }
  });
  return op;
}

OpInstance make_added_gemm(const AddedGemmSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const DType dtype = s.weight.dtype;
  const Element element = element_of(dtype);
  const Handle num_rows = add_num_rows(op, rows);
  const Handle x = op.add(normal_rows("x", element, rows, s.k, s.k, seed, kX));
  const WeightArrays weight(op, s.weight, s.n, s.k, seed);
  const Handle bias =
      s.has_bias ? op.add(normal_constant("bias", Element::kF32, s.n, seed, kBias)) : kNoArray;
  const Handle product =
      op.add(intermediate_array("product", element, int64_t{rows.max_rows} * s.n));
  OpArray residual = normal_rows("y", Element::kF32, rows, s.n, s.n, seed, kResidual,
                                 /*varies_in_scale=*/true, Role::kInOut);
  // What is added is rounded to `element`.
  residual.rms_bound = output_array("", Element::kF32, element, 0, s.n).rms_bound;
  const Handle y = op.add(std::move(residual));
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    const DType on_device = activation_dtype(ctx, dtype);
    const AddedGemmParams both = {.product = {.num_rows = at.get<int32_t>(num_rows),
                                              .max_rows = max_rows,
                                              .x = at.raw(x),
                                              .x_stride = s.k,
                                              .weight = weight.matrix(ctx, at),
                                              .bias = at.get<float>(bias),
                                              .y = at.raw(product),
                                              .y_stride = s.n,
                                              .x_dtype = on_device,
                                              .y_dtype = on_device},
                                  .residual = at.get<float>(y)};
    if (!s.adds_alone) return added_gemm(ctx, both);
    gemm(ctx, both.product);
    rms_norm(ctx, addition_of(both));
  });
  return op;
}

OpInstance make_per_layer(const PerLayerSpec& s, const Rows& rows, uint64_t seed) {
  constexpr int32_t kVocab = 53;
  OpInstance op;
  const int64_t width = int64_t{s.num_layers} * s.size;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle x = op.add(normal_rows("x", element_of(s.dtype), rows, width, width, seed, kX,
                                      /*varies_in_scale=*/true, Role::kInOut));
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
  const auto values = [=](int64_t id, float* to) {
    Stream(seed, kX, static_cast<uint64_t>(id)).fill(to, s.n, 40.0f);
    const float edges[] = {-kInf, kInf, 0.0f, 1e-3f, -1e30f, 1e30f};
    if (id < 6) to[s.n - 1] = edges[id];
  };
  const Handle logits =
      op.add(row_array("logits", Element::kF32, Element::kF32, rows, s.n, values, Role::kInOut));
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    soft_cap(ctx, SoftCapParams{.num_rows = at.get<int32_t>(num_rows),
                                .max_rows = max_rows,
                                .logits = at.get<float>(logits),
                                .cap = s.cap,
                                .n = s.n,
                                .scale = s.scale});
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
