// SPDX-License-Identifier: Apache-2.0
//
// The op cases of residual streams.

#include "support/op_cases_streams.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "ops/streams.h"
#include "support/op_case_table.h"
#include "support/row_arrays.h"
#include "support/row_values.h"

namespace paceline::testing {
namespace {

Handle add_streams(OpInstance& op, const char* name, Role role, const StreamsSpec& s,
                   const Rows& rows, uint64_t seed) {
  const int64_t width = int64_t{s.num_streams} * s.hidden;
  return op.add(normal_rows(name, Element::kF32, rows, width, width, seed, kX,
                            /*varies_in_scale=*/true, role));
}

// The mix of rows. It is positive, as that of mix_streams is, so that sums cancel no more than they
// do in a model.
Handle add_mix(OpInstance& op, Role role, const StreamsSpec& s, const Rows& rows, uint64_t seed) {
  const int32_t width = mix_width(s.num_streams, s.is_end);
  const auto values = [width, seed](int64_t id, float* to) {
    Stream stream(seed, kScale, static_cast<uint64_t>(id));
    for (int32_t i = 0; i < width; ++i) to[i] = 0.05f + std::fabs(stream.normal());
  };
  return op.add(row_array("mix", Element::kF32, Element::kF32, rows, width, values, role));
}

}  // namespace

OpInstance make_spread_streams(const StreamsSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int64_t width = int64_t{s.num_streams} * s.hidden;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle x =
      op.add(normal_rows("x", Element::kF32, rows, s.hidden, s.hidden, seed, kResidual));
  const int32_t max_rows = rows.max_rows;
  Handle y = kNoArray;
  if (s.adds) {
    y = add_streams(op, "y", Role::kInOut, s, rows, seed);
  } else {
    OpArray out = output_array("y", Element::kF32, Element::kF32, max_rows * width, width);
    out.compare = Compare::kExact;  // copies
    y = op.add(std::move(out));
  }
  op.set_run([=](auto& ctx, const Addresses& at) {
    spread_streams(ctx, SpreadStreamsParams{.num_rows = at.get<int32_t>(num_rows),
                                            .max_rows = max_rows,
                                            .x = at.get<float>(x),
                                            .y = at.get<float>(y),
                                            .num_streams = s.num_streams,
                                            .hidden = s.hidden,
                                            .adds = s.adds});
  });
  return op;
}

OpInstance make_mix_streams(const StreamsSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int64_t size = int64_t{s.num_streams} * s.hidden;
  const int32_t width = mix_width(s.num_streams, s.is_end);
  const Handle num_rows = add_num_rows(op, rows);
  const Handle x = add_streams(op, "x", Role::kInput, s, rows, seed);
  const Handle weight = op.add(normal_constant("weight", Element::kF32, width * size, seed, kWeight,
                                               1.0f / std::sqrt(static_cast<float>(size))));
  const Handle base = op.add(normal_constant("base", Element::kF32, width, seed, kBias));
  const Handle scale = op.add(normal_constant("scale", Element::kF32, 3, seed, kNoise));
  const int32_t max_rows = rows.max_rows;
  const Handle mix =
      op.add(output_array("mix", Element::kF32, Element::kF32, int64_t{max_rows} * width, width));
  op.set_run([=](auto& ctx, const Addresses& at) {
    mix_streams(ctx, MixStreamsParams{.num_rows = at.get<int32_t>(num_rows),
                                      .max_rows = max_rows,
                                      .x = at.get<float>(x),
                                      .weight = at.get<float>(weight),
                                      .base = at.get<float>(base),
                                      .scale = at.get<float>(scale),
                                      .mix = at.get<float>(mix),
                                      .num_streams = s.num_streams,
                                      .hidden = s.hidden,
                                      .is_end = s.is_end,
                                      .sinkhorn_iterations = 20,
                                      .norm_eps = 1e-6f,
                                      .eps = 1e-6f});
  });
  return op;
}

OpInstance make_read_streams(const StreamsSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const Element element = element_of(s.dtype);
  const Handle num_rows = add_num_rows(op, rows);
  const Handle x = add_streams(op, "x", Role::kInput, s, rows, seed);
  const Handle mix = add_mix(op, Role::kInput, s, rows, seed);
  const Handle weight = op.add(normal_constant("weight", Element::kF32, s.hidden, seed, kWeight));
  const int32_t max_rows = rows.max_rows;
  const Handle y =
      op.add(output_array("y", Element::kF32, element, int64_t{max_rows} * s.hidden, s.hidden));
  op.set_run([=](auto& ctx, const Addresses& at) {
    read_streams(ctx, ReadStreamsParams{.num_rows = at.get<int32_t>(num_rows),
                                        .max_rows = max_rows,
                                        .x = at.get<float>(x),
                                        .mix = at.get<float>(mix),
                                        .mix_stride = mix_width(s.num_streams, s.is_end),
                                        .weight = at.get<float>(weight),
                                        .eps = 1e-6f,
                                        .y = at.raw(y),
                                        .num_streams = s.num_streams,
                                        .hidden = s.hidden,
                                        .y_dtype = activation_dtype(ctx, s.dtype)});
  });
  return op;
}

OpInstance make_sum_streams(const StreamsSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle x = add_streams(op, "x", Role::kInput, s, rows, seed);
  const Handle mix = add_mix(op, Role::kInput, s, rows, seed);
  const int32_t max_rows = rows.max_rows;
  const Handle y = op.add(
      output_array("y", Element::kF32, Element::kF32, int64_t{max_rows} * s.hidden, s.hidden));
  op.set_run([=](auto& ctx, const Addresses& at) {
    sum_streams(ctx, SumStreamsParams{.num_rows = at.get<int32_t>(num_rows),
                                      .max_rows = max_rows,
                                      .x = at.get<float>(x),
                                      .mix = at.get<float>(mix),
                                      .mix_stride = mix_width(s.num_streams, s.is_end),
                                      .y = at.get<float>(y),
                                      .num_streams = s.num_streams,
                                      .hidden = s.hidden});
  });
  return op;
}

OpInstance make_write_streams(const StreamsSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const Element element = element_of(s.dtype);
  const Handle num_rows = add_num_rows(op, rows);
  const Handle x = op.add(normal_rows("x", element, rows, s.hidden, s.hidden, seed, kUp));
  const Handle mix = add_mix(op, Role::kInput, s, rows, seed);
  const Handle y = add_streams(op, "y", Role::kInOut, s, rows, seed);
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    write_streams(ctx, WriteStreamsParams{.num_rows = at.get<int32_t>(num_rows),
                                          .max_rows = max_rows,
                                          .x = at.raw(x),
                                          .mix = at.get<float>(mix),
                                          .y = at.get<float>(y),
                                          .num_streams = s.num_streams,
                                          .hidden = s.hidden,
                                          .x_dtype = activation_dtype(ctx, s.dtype)});
  });
  return op;
}

OpInstance make_join_streams(const StreamsSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const Element element = element_of(s.dtype);
  const int64_t size = int64_t{s.num_streams} * s.hidden;
  const int32_t width = mix_width(s.num_streams, s.is_end);
  const Handle num_rows = add_num_rows(op, rows);
  const Handle branch =
      s.adds ? op.add(normal_rows("branch", element, rows, s.hidden, s.hidden, seed, kUp))
             : kNoArray;
  const Handle x = add_streams(op, "x", s.adds ? Role::kInOut : Role::kInput, s, rows, seed);
  const Handle mix = add_mix(op, Role::kInOut, s, rows, seed);
  const Handle weight = op.add(normal_constant("weight", Element::kF32, width * size, seed, kWeight,
                                               1.0f / std::sqrt(static_cast<float>(size))));
  const Handle base = op.add(normal_constant("base", Element::kF32, width, seed, kBias));
  const Handle scale = op.add(normal_constant("scale", Element::kF32, 3, seed, kNoise));
  const Handle norm = op.add(normal_constant("norm", Element::kF32, s.hidden, seed, kXWeight));
  const int32_t max_rows = rows.max_rows;
  const Handle y =
      op.add(output_array("y", Element::kF32, element, int64_t{max_rows} * s.hidden, s.hidden));
  op.set_run([=](auto& ctx, const Addresses& at) {
    JoinStreamsParams p = {.write = std::nullopt,
                           .mix = {.num_rows = at.get<int32_t>(num_rows),
                                   .max_rows = max_rows,
                                   .x = at.get<float>(x),
                                   .weight = at.get<float>(weight),
                                   .base = at.get<float>(base),
                                   .scale = at.get<float>(scale),
                                   .mix = at.get<float>(mix),
                                   .num_streams = s.num_streams,
                                   .hidden = s.hidden,
                                   .is_end = s.is_end,
                                   .sinkhorn_iterations = 20,
                                   .norm_eps = 1e-6f,
                                   .eps = 1e-6f},
                           .read = {.num_rows = at.get<int32_t>(num_rows),
                                    .max_rows = max_rows,
                                    .x = at.get<float>(x),
                                    .mix = at.get<float>(mix),
                                    .mix_stride = width,
                                    .weight = at.get<float>(norm),
                                    .eps = 1e-6f,
                                    .y = at.raw(y),
                                    .num_streams = s.num_streams,
                                    .hidden = s.hidden,
                                    .y_dtype = activation_dtype(ctx, s.dtype)}};
    if (s.adds) {
      p.write = {.num_rows = at.get<int32_t>(num_rows),
                 .max_rows = max_rows,
                 .x = at.raw(branch),
                 .mix = at.get<float>(mix),
                 .y = at.get<float>(x),
                 .num_streams = s.num_streams,
                 .hidden = s.hidden,
                 .x_dtype = activation_dtype(ctx, s.dtype)};
    }
    join_streams(ctx, p);
  });
  return op;
}

OpInstance make_norm_streams(const StreamsSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const Element element = element_of(s.dtype);
  const int64_t width = int64_t{s.num_streams} * s.hidden;
  const Handle num_rows = add_num_rows(op, rows);
  const int32_t max_rows = rows.max_rows;
  // With an index, row i of y has the identity of i but lies elsewhere in x.
  std::vector<int32_t> index(static_cast<size_t>(max_rows), 0);
  std::vector<int64_t> place_of(rows.ids.size());
  for (size_t i = 0; i < rows.ids.size(); ++i) {
    place_of[i] =
        s.has_index ? static_cast<int64_t>(rows.ids.size() - 1 - i) : static_cast<int64_t>(i);
    index[i] = static_cast<int32_t>(place_of[i]);
  }
  OpArray in =
      float_array("x", Element::kF32, element, max_rows * width,
                  [rows, place_of, width, max_rows, seed](float* to) {
                    std::fill_n(to, max_rows * width, kNan);
                    for (size_t i = 0; i < rows.ids.size(); ++i) {
                      Stream(seed, kX, static_cast<uint64_t>(rows.ids[i]))
                          .fill(to + place_of[i] * width, width, scale_of_row(rows.ids[i]));
                    }
                  });
  const Handle x = op.add(std::move(in));
  const Handle row_index =
      s.has_index ? op.add(int_array("row_index", Role::kInput, index)) : kNoArray;
  const Handle weight = op.add(normal_constant("weight", Element::kF32, s.hidden, seed, kWeight));
  const Handle y =
      op.add(output_array("y", Element::kF32, element, int64_t{max_rows} * width, width));
  const Handle count = op.add(output_array("num_stream_rows", Element::kI32, Element::kI32, 1, 0));
  op.set_run([=](auto& ctx, const Addresses& at) {
    norm_streams(ctx, NormStreamsParams{.num_rows = at.get<int32_t>(num_rows),
                                        .max_rows = max_rows,
                                        .row_index = at.get<int32_t>(row_index),
                                        .x = at.raw(x),
                                        .weight = at.get<float>(weight),
                                        .eps = 1e-6f,
                                        .y = at.raw(y),
                                        .num_streams = s.num_streams,
                                        .hidden = s.hidden,
                                        .num_stream_rows = at.get<int32_t>(count),
                                        .x_dtype = activation_dtype(ctx, s.dtype),
                                        .y_dtype = activation_dtype(ctx, s.dtype)});
  });
  return op;
}

OpInstance make_mean_streams(const StreamsSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle x = add_streams(op, "x", Role::kInput, s, rows, seed);
  const int32_t max_rows = rows.max_rows;
  const Handle y = op.add(output_array("y", Element::kF32, element_of(s.dtype),
                                       int64_t{max_rows} * s.hidden, s.hidden));
  op.set_run([=](auto& ctx, const Addresses& at) {
    mean_streams(ctx, MeanStreamsParams{.num_rows = at.get<int32_t>(num_rows),
                                        .max_rows = max_rows,
                                        .x = at.get<float>(x),
                                        .y = at.raw(y),
                                        .y_stride = s.hidden,
                                        .num_streams = s.num_streams,
                                        .hidden = s.hidden,
                                        .y_dtype = activation_dtype(ctx, s.dtype)});
  });
  return op;
}

std::vector<RowWiseCase> streams_row_wise_cases() {
  TableBuilder table;
  for (const auto& [num_streams, hidden] : {std::pair{4, 4096},
                                            {4, 64},
                                            {4, 1056},
                                            {4, 8192},
                                            {2, 33},
                                            {3, 40},
                                            {8, 100},
                                            {5, 1003},
                                            {4, 9216}}) {
    const bool is_invariance_case = hidden == 4096 || hidden == 1003;
    const std::string shape = std::to_string(num_streams) + "x" + std::to_string(hidden);
    StreamsSpec s = {.num_streams = num_streams, .hidden = hidden, .dtype = DType::kFloat32};
    for (const bool is_set : {false, true}) {
      s.adds = is_set;
      table.add("streams_" + std::string(is_set ? "add_" : "spread_") + shape, make_spread_streams,
                s, is_invariance_case && is_set);
      s.is_end = is_set;
      const std::string of_end = is_set ? "end_" : "";
      table.add("streams_mix_" + of_end + shape, make_mix_streams, s, is_invariance_case);
      table.add("streams_sum_" + of_end + shape, make_sum_streams, s, is_invariance_case);
    }
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      s.dtype = dtype;
      s.is_end = hidden == 64;
      table.add("streams_read_" + shape + dtype_suffix(dtype), make_read_streams, s,
                is_invariance_case);
      s.is_end = false;
      table.add("streams_mean_" + shape + dtype_suffix(dtype), make_mean_streams, s,
                is_invariance_case);
      table.add("streams_write_" + shape + dtype_suffix(dtype), make_write_streams, s,
                is_invariance_case);
      for (const auto& [adds, is_end] : {std::pair{true, false}, {false, false}, {false, true}}) {
        s.adds = adds;
        s.is_end = is_end;
        table.add("streams_join_" +
                      std::string(adds     ? "branch_"
                                  : is_end ? "end_"
                                           : "") +
                      shape + dtype_suffix(dtype),
                  make_join_streams, s, is_invariance_case);
      }
      for (const bool has_index : {false, true}) {
        s.has_index = has_index;
        table.add(
            "streams_norm_" + std::string(has_index ? "index_" : "") + shape + dtype_suffix(dtype),
            make_norm_streams, s, is_invariance_case && has_index);
      }
    }
  }
  return table.cases;
}

}  // namespace paceline::testing
