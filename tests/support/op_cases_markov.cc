// SPDX-License-Identifier: Apache-2.0
//
// The op cases of a block drafter's heads.

#include "support/op_cases_markov.h"

#include <cmath>
#include <string>
#include <utility>

#include "ops/markov.h"
#include "support/op_case_table.h"
#include "support/row_arrays.h"
#include "support/row_values.h"

namespace paceline::testing {
namespace {

// Rows with gates that are open, closed and between.
Handle add_mix(OpInstance& op, const Rows& rows, int32_t width, uint64_t seed) {
  return op.add(row_array("mix", Element::kF32, Element::kF32, rows, width,
                          [width, seed](int64_t id, float* to) {
                            Stream(seed, kScale, static_cast<uint64_t>(id)).fill(to, width, 3.0f);
                            const float edges[] = {-150.0f, 150.0f, 0.0f, -1e-6f, -88.0f, 88.0f};
                            if (id < 6) to[0] = edges[id];
                          }));
}

Handle add_output(OpInstance& op, const MarkovSpec& s, const Rows& rows, int64_t width) {
  return op.add(
      output_array("y", Element::kF32, element_of(s.dtype), rows.max_rows * width, width));
}

}  // namespace

OpInstance make_join_parts(const MarkovSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int32_t max_rows = rows.max_rows;
  const int32_t rank = s.rank;
  const int32_t h_stride = s.hidden + 8;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle e = op.add(normal_rows("e", Element::kF32, rows, rank, rank, seed, kX));
  const Handle h =
      op.add(normal_rows("h", element_of(s.dtype), rows, s.hidden, h_stride, seed, kResidual));
  const Handle y = add_output(op, s, rows, s.hidden + (s.has_state ? 2 : 1) * int64_t{rank});
  op.set_run([=](auto& ctx, const Addresses& at) {
    const DType dtype = activation_dtype(ctx, s.dtype);
    const RowPart own_e{.x = at.raw(e), .stride = rank, .width = rank};
    const RowPart own_h{.x = at.raw(h), .stride = h_stride, .width = s.hidden, .dtype = dtype};
    JoinPartsParams p{.num_rows = at.get<int32_t>(num_rows),
                      .max_rows = max_rows,
                      .parts = {own_h, own_e},
                      .y = at.raw(y),
                      .y_dtype = dtype};
    if (s.has_state) {
      p.parts[0] = {.x = nullptr, .stride = rank, .width = rank};
      p.parts[1] = own_e;
      p.parts[2] = own_h;
    }
    join_parts(ctx, p);
  });
  return op;
}

OpInstance make_gate_embeddings(const MarkovSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int32_t max_rows = rows.max_rows;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle gate = add_mix(op, rows, s.rank, seed);
  const Handle e = op.add(normal_rows("e", Element::kF32, rows, s.rank, s.rank, seed, kX));
  const Handle y = add_output(op, s, rows, s.rank);
  op.set_run([=](auto& ctx, const Addresses& at) {
    gate_embeddings(ctx, GateEmbeddingsParams{.num_rows = at.get<int32_t>(num_rows),
                                              .max_rows = max_rows,
                                              .gate = at.get<float>(gate),
                                              .e = at.get<float>(e),
                                              .y = at.raw(y),
                                              .rank = s.rank,
                                              .y_dtype = activation_dtype(ctx, s.dtype)});
  });
  return op;
}

OpInstance make_advance_markov(const MarkovSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int32_t max_rows = rows.max_rows;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle mix = add_mix(op, rows, 3 * s.rank, seed);
  const Handle state = op.add(normal_rows("state", Element::kF32, rows, s.rank, s.rank, seed, kX,
                                          /*varies_in_scale=*/false, Role::kInOut));
  const Handle y = add_output(op, s, rows, s.rank);
  op.set_run([=](auto& ctx, const Addresses& at) {
    advance_markov(ctx, AdvanceMarkovParams{.num_rows = at.get<int32_t>(num_rows),
                                            .max_rows = max_rows,
                                            .mix = at.get<float>(mix),
                                            .state = at.get<float>(state),
                                            .is_first = !s.has_state,
                                            .y = at.raw(y),
                                            .rank = s.rank,
                                            .y_dtype = activation_dtype(ctx, s.dtype)});
  });
  return op;
}

OpInstance make_estimate_acceptance(const MarkovSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int32_t max_rows = rows.max_rows;
  const int32_t width = s.hidden + s.rank;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle h =
      op.add(normal_rows("h", element_of(s.dtype), rows, s.hidden, s.hidden, seed, kResidual));
  const Handle e = s.rank > 0
                       ? op.add(normal_rows("e", Element::kF32, rows, s.rank, s.rank, seed, kX))
                       : kNoArray;
  const Handle weight = op.add(normal_constant("weight", Element::kF32, width, seed, kWeight,
                                               1.0f / std::sqrt(static_cast<float>(width))));
  const Handle bias =
      s.has_bias ? op.add(normal_constant("bias", Element::kF32, 1, seed, kBias)) : kNoArray;
  const Handle probability =
      op.add(output_array("probability", Element::kF32, Element::kF32, max_rows, 1));
  op.set_run([=](auto& ctx, const Addresses& at) {
    estimate_acceptance(ctx, EstimateAcceptanceParams{.num_rows = at.get<int32_t>(num_rows),
                                                      .max_rows = max_rows,
                                                      .h = at.raw(h),
                                                      .e = at.get<float>(e),
                                                      .weight = at.get<float>(weight),
                                                      .bias = at.get<float>(bias),
                                                      .probability = at.get<float>(probability),
                                                      .hidden = s.hidden,
                                                      .rank = s.rank,
                                                      .dtype = activation_dtype(ctx, s.dtype)});
  });
  return op;
}

std::vector<RowWiseCase> markov_row_wise_cases() {
  TableBuilder table;
  for (const auto& [hidden, rank] : {std::pair{1, 1}, {37, 20}, {640, 64}, {4096, 256}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const std::string shape =
          std::to_string(hidden) + "_r" + std::to_string(rank) + dtype_suffix(dtype);
      const bool is_invariance_case = hidden == 640;
      MarkovSpec s = {.hidden = hidden, .rank = rank, .dtype = dtype};
      table.add("markov_gate_h" + shape, make_gate_embeddings, s, is_invariance_case);
      for (const bool has_state : {false, true}) {
        s.has_state = has_state;
        const std::string name = has_state ? "state_h" + shape : "h" + shape;
        table.add("markov_join_" + name, make_join_parts, s, is_invariance_case);
        table.add("markov_advance_" + name, make_advance_markov, s, is_invariance_case);
      }
      table.add("confidence_h" + shape, make_estimate_acceptance, s, is_invariance_case);
      s.has_bias = false;
      table.add("confidence_unbiased_h" + shape, make_estimate_acceptance, s, false);
      s.has_bias = true;
      s.rank = 0;
      table.add("confidence_alone_h" + shape, make_estimate_acceptance, s, false);
    }
  }
  return table.cases;
}

}  // namespace paceline::testing
