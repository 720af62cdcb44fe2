// SPDX-License-Identifier: Apache-2.0
//
// The op cases of a block drafter's heads.

#include "support/op_cases_markov.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "ops/markov.h"
#include "support/draw_arrays.h"
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

OpInstance make_chain(const ChainSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const DrawArrays draws = add_draw(op, s.draw, rows, seed);
  const int32_t rank = s.rank;
  const auto n = static_cast<int32_t>(draws.stride());
  constexpr int32_t kNumTokens = 40;  // rows of W1
  const Element element = element_of(s.dtype);
  const float scale = 1.0f / std::sqrt(static_cast<float>(rank));
  const Handle weight =
      op.add(normal_constant("weight", element, int64_t{n} * rank, seed, kWeight, scale));
  Handle factors = kNoArray;
  Handle table = kNoArray;
  Handle previous = kNoArray;
  if (s.has_factors) {
    factors = op.add(normal_rows("factors", element, rows, rank, rank, seed, kX));
  } else {
    table = op.add(normal_constant("table", element, int64_t{kNumTokens} * rank, seed, kX));
    previous = op.add(row_ints<int32_t>("previous", rows, [=](int64_t id) {
      return static_cast<int32_t>(id_hash(seed, id) % (kNumTokens + 3)) - 1;
    }));
  }
  const auto values = [=](int64_t id, float* to) {
    fill_draw_logits(s.draw, id, seed, to);
    // A sum with NaN has other bits on a GPU.
    std::replace_if(to, to + n, [](float x) { return std::isnan(x); }, -kInf);
  };
  const auto add_logits = [&](const char* name) {
    OpArray logits = row_array(name, Element::kF32, Element::kF32, rows, n, values, Role::kInOut);
    logits.rms_bound = kTensorCoreBound;
    return op.add(std::move(logits));
  };
  const Handle logits = add_logits("logits");
  const Handle undefined = add_logits("undefined");
  op.arrays[static_cast<size_t>(undefined)].compare = Compare::kByCase;
  OpArray apart = output_array("tokens_apart", Element::kI32, Element::kI32, rows.max_rows, 1);
  apart.compare = Compare::kByCase;
  const Handle tokens_apart = op.add(std::move(apart));
  op.set_run([=](auto& ctx, const Addresses& at) {
    MarkovDraftParams p{.num_rows = at.get<int32_t>(draws.num_rows),
                        .max_rows = rows.max_rows,
                        .factors = at.raw(factors),
                        .previous = at.get<int32_t>(previous),
                        .table = at.raw(table),
                        .vocab_size = kNumTokens,
                        .weight = plain_matrix(at.raw(weight), n, rank, s.dtype),
                        .logits = at.get<float>(undefined),
                        .dtype = activation_dtype(ctx, s.dtype),
                        .draws = true};
    p.draw = draws.params(at, p.logits);
    p.draw.logit_rows = nullptr;
    markov_draft(ctx, p);
    if (s.is_alone) return;
    DrawParams apart = p.draw;
    p.draws = false;
    p.draw = {};
    p.logits = at.get<float>(logits);
    markov_draft(ctx, p);
    apart.logits = p.logits;
    apart.tokens = at.get<int32_t>(tokens_apart);
    draw(ctx, apart);
  });
  if (s.is_alone) return op;
  op.check = [=](const ArrayBytes& cpu, const ArrayBytes& cuda, int64_t* num_different) {
    const auto of = [](const ArrayBytes& all, Handle array) -> const std::vector<std::byte>& {
      return all[static_cast<size_t>(array)];
    };
    for (const ArrayBytes* const own : {&cpu, &cuda}) {
      if (of(*own, draws.tokens) != of(*own, tokens_apart)) {
        return std::string(own == &cpu ? "the CPU" : "CUDA") + " draws otherwise alone";
      }
    }
    const auto logits_of = [&](size_t row, float* to) {
      const auto bytes = static_cast<size_t>(n) * sizeof(float);
      std::memcpy(to, of(cpu, logits).data() + row * bytes, bytes);
    };
    return judge_draws(draws, logits_of, /*are_exact=*/false, cpu, cuda, num_different);
  };
  return op;
}

namespace {

void add_chains(TableBuilder& table) {
  const auto add = [&](const std::string& name, const ChainSpec& s, bool is_invariance_case) {
    table.add("chain_" + name + "_r" + std::to_string(s.rank) + dtype_suffix(s.dtype) + "_v" +
                  std::to_string(s.draw.vocab_limit),
              make_chain, s, is_invariance_case);
  };
  // Ranks of whole pieces of eight, and of none.
  for (const int32_t rank : {1, 16, 40, 96, 100, 256}) {
    for (const bool has_factors : {false, true}) {
      const std::string source = has_factors ? "factors_" : "table_";
      const bool is_invariance_case = rank == 40 || rank == 256;
      const auto add_draws = [&](const std::string& name, const DrawSpec& draw) {
        add(source + name, {.rank = rank, .has_factors = has_factors, .draw = draw},
            is_invariance_case);
      };
      if (has_factors) {
        add_draws("mapped_mixed",
                  {.vocab_limit = 257, .padding = 1, .temperature = -1.0f, .is_mapped = true});
      } else {
        add_draws("greedy", {.vocab_limit = 300, .padding = 4});
      }
      add_draws("mixed", {.vocab_limit = 1003, .temperature = -1.0f});
    }
  }
  for (const int32_t vocab : {3, 1003}) {
    const auto add_draws = [&](const std::string& name, DrawSpec draw) {
      draw.vocab_limit = vocab;
      add(name, {.rank = 16, .draw = draw}, false);
      add(name, {.rank = 20, .dtype = DType::kFloat32, .has_factors = true, .draw = draw}, false);
    };
    add_draws("holes_mixed", {.padding = 5, .temperature = -1.0f, .logits = LogitKind::kHoles});
    add_draws("infinite_mixed", {.temperature = -1.0f, .logits = LogitKind::kInfinite});
    add_draws("peaked_t1", {.temperature = 1.0f, .logits = LogitKind::kPeaked});
    add_draws("t1em5", {.padding = 3, .temperature = 1e-5f});
    add_draws("own_noise_mixed", {.temperature = -1.0f, .has_own_noise = true});
    add_draws("row_maps_steps_mixed",
              {.temperature = -1.0f, .is_mapped = true, .has_row_maps = true, .steps_ahead = 5});
    add_draws("mapped_ties_greedy", {.logits = LogitKind::kTies, .is_mapped = true});
  }
  // Ranks of more columns than a block holds at once; an op of its own, so that the emulation,
  // which takes a sample of each op, has cases of them in several batches.
  for (const int32_t rank : {520, 1100}) {
    for (const bool has_factors : {false, true}) {
      table.add(
          "chunks_" + std::string(has_factors ? "factors" : "table") + "_r" + std::to_string(rank),
          make_chain,
          ChainSpec{.rank = rank,
                    .has_factors = has_factors,
                    .draw = {.vocab_limit = 150, .temperature = -1.0f}},
          /*is_invariance_case=*/true);
    }
  }
  // More rows than the counters of an H100's context have winners for, so that two launches draw.
  table.add("chain_roomy_r16_v5", make_chain,
            ChainSpec{.rank = 16, .draw = {.vocab_limit = 5, .temperature = -1.0f}},
            /*is_invariance_case=*/false, /*roomy_rows=*/2300, /*num_in_room=*/2100);
  add("qwen3_t1", {.rank = 256, .draw = {.vocab_limit = 151936, .temperature = 1.0f}}, false);
}

}  // namespace

std::vector<RowWiseCase> markov_row_wise_cases() {
  TableBuilder table;
  add_chains(table);
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
