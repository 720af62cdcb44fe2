// SPDX-License-Identifier: Apache-2.0
//
// The op cases of DFlash2.

#include "support/op_cases_candidates.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "ops/block_conv.h"
#include "ops/candidates.h"
#include "support/op_case_table.h"
#include "support/row_arrays.h"
#include "support/row_values.h"

namespace paceline::testing {
namespace {

constexpr int32_t kNumTokens = 50;  // rows of the codebooks
constexpr uint64_t kIds = 700;      // purposes of random streams
constexpr uint64_t kScores = 701;
constexpr uint64_t kDraws = 702;

size_t at(int64_t index) { return static_cast<size_t>(index); }

// The rows of all drafts, draft by draft: `width` elements of draft j of a sequence are what
// of_draft(id, j, to) writes. Rows of other sequences hold `rest`.
template <class T, class OfDraft>
std::vector<T> draft_rows(const Rows& rows, int32_t num_drafts, int64_t width, T rest,
                          const OfDraft& of_draft) {
  std::vector<T> values(at(num_drafts * rows.max_rows * width), rest);
  for (int32_t j = 0; j < num_drafts; ++j) {
    for (size_t i = 0; i < rows.ids.size(); ++i) {
      const int64_t row = int64_t{j} * rows.max_rows + static_cast<int64_t>(i);
      of_draft(rows.ids[i], j, values.data() + row * width);
    }
  }
  return values;
}

Handle add_floats(OpInstance& op, const char* name, const std::vector<float>& values) {
  return op.add(float_array(name, Element::kF32, Element::kF32, static_cast<int64_t>(values.size()),
                            [values](float* to) { std::copy(values.begin(), values.end(), to); }));
}

// Ascending tokens; every fifth list is short, and some tokens are beyond the codebooks.
std::vector<int32_t> candidates_of(const CandidateSpec& s, int64_t id, int32_t draft,
                                   uint64_t seed) {
  Stream stream(seed, kIds, static_cast<uint64_t>(id), static_cast<uint64_t>(draft));
  std::vector<int32_t> tokens(at(s.count), -1);
  const bool is_short = (id + draft) % 5 == 4;
  const int32_t num = is_short ? stream.below(s.count + 1) : s.count;
  int32_t token = stream.below(3);
  for (int32_t c = 0; c < num; ++c) {
    tokens[at(c)] = token;
    token += 1 + stream.below(2);
  }
  return tokens;
}

Handle add_candidates(OpInstance& op, const CandidateSpec& s, const Rows& rows, uint64_t seed) {
  return op.add(int_array("ids", Role::kInput,
                          draft_rows<int32_t>(rows, s.num_drafts, s.count, 1 << 29,
                                              [&](int64_t id, int32_t j, int32_t* to) {
                                                const std::vector<int32_t> own =
                                                    candidates_of(s, id, j, seed);
                                                std::copy(own.begin(), own.end(), to);
                                              })));
}

int32_t newest_of(int64_t id) { return static_cast<int32_t>(id % (kNumTokens + 3)) - 1; }

}  // namespace

OpInstance make_convolve_blocks(const ConvolveSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int32_t max_rows = rows.max_rows;
  const Handle num_rows = add_num_rows(op, rows);
  const int64_t deltas = int64_t{s.num_taps} * (s.hidden / s.group);
  const int64_t stride = 2 * deltas;  // delta_in, then delta_out
  std::vector<int32_t> starts;
  for (int32_t i = 0; i <= max_rows; ++i) starts.push_back(i * s.rows_per_seq);
  const Handle row_indptr = op.add(int_array("row_indptr", Role::kInput, starts));
  const Handle x = op.add(normal_rows("x", element_of(s.dtype), rows, s.rows_per_seq * s.hidden,
                                      s.rows_per_seq * s.hidden, seed, kX,
                                      /*varies_in_scale=*/false, Role::kInOut));
  const Handle delta = op.add(normal_rows("delta", Element::kF32, rows, s.rows_per_seq * stride,
                                          s.rows_per_seq * stride, seed, kResidual));
  const Handle base =
      op.add(normal_constant("base", Element::kF32, int64_t{s.num_taps} * s.hidden, seed, kWeight));
  op.set_run([=](auto& ctx, const Addresses& at) {
    convolve_blocks(ctx, ConvolveBlocksParams{.num_seqs = at.get<int32_t>(num_rows),
                                              .max_seqs = max_rows,
                                              .row_indptr = at.get<int32_t>(row_indptr),
                                              .max_rows_per_seq = s.rows_per_seq,
                                              .x = at.raw(x),
                                              .base = at.get<float>(base),
                                              .delta = at.get<float>(delta) + deltas,
                                              .delta_stride = stride,
                                              .num_taps = s.num_taps,
                                              .group = s.group,
                                              .hidden = s.hidden,
                                              .dtype = activation_dtype(ctx, s.dtype)});
  });
  return op;
}

OpInstance make_score_pairs(const CandidateSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int32_t max_rows = rows.max_rows;
  const Element element = element_of(s.dtype);
  const Handle num_rows = add_num_rows(op, rows);
  const Handle ids = add_candidates(op, s, rows, seed);
  const Handle newest = op.add(row_ints<int32_t>("newest", rows, newest_of));
  const Handle logits = add_floats(
      op, "logits",
      draft_rows<float>(rows, s.num_drafts, s.count, kInf, [&](int64_t id, int32_t j, float* to) {
        const std::vector<int32_t> own = candidates_of(s, id, j, seed);
        Stream stream(seed, kScores, static_cast<uint64_t>(id), static_cast<uint64_t>(j));
        for (int32_t c = 0; c < s.count; ++c) to[c] = own[at(c)] < 0 ? -1e3f : stream.normal();
      }));
  const Handle projected = add_floats(
      op, "projected",
      draft_rows<float>(rows, s.num_drafts, s.rank, kInf, [&](int64_t id, int32_t j, float* to) {
        Stream(seed, kX, static_cast<uint64_t>(id), static_cast<uint64_t>(j)).fill(to, s.rank);
      }));
  const float scale = 1.0f / std::sqrt(std::sqrt(static_cast<float>(s.rank)));
  const auto add_codebook = [&](const char* name, uint64_t own_seed) {
    return op.add(
        normal_constant(name, element, int64_t{kNumTokens} * s.rank, own_seed, kWeight, scale));
  };
  const Handle predecessors = add_codebook("predecessors", seed);
  const Handle successors = add_codebook("successors", seed + 1);
  const int64_t pairs = int64_t{s.count} * s.count;
  OpArray written =
      output_array("scores", Element::kF32, Element::kF32, s.num_drafts * max_rows * pairs, pairs);
  const Handle scores = op.add(std::move(written));
  op.set_run([=](auto& ctx, const Addresses& at) {
    score_pairs(ctx, ScorePairsParams{.num_seqs = at.get<int32_t>(num_rows),
                                      .max_seqs = max_rows,
                                      .num_drafts = s.num_drafts,
                                      .lists = {.ids = at.get<int32_t>(ids),
                                                .logits = at.get<float>(logits),
                                                .scores = at.get<float>(scores),
                                                .count = s.count},
                                      .newest = at.get<int32_t>(newest),
                                      .projected = at.get<float>(projected),
                                      .predecessors = at.raw(predecessors),
                                      .successors = at.raw(successors),
                                      .vocab_size = kNumTokens,
                                      .rank = s.rank,
                                      .dtype = s.dtype});
  });
  return op;
}

OpInstance make_walk(const CandidateSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int32_t max_rows = rows.max_rows;
  const int64_t pairs = int64_t{s.count} * s.count;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle ids = add_candidates(op, s, rows, seed);
  const Handle scores = add_floats(
      op, "scores",
      draft_rows<float>(rows, s.num_drafts, pairs, kInf, [&](int64_t id, int32_t j, float* to) {
        const std::vector<int32_t> own = candidates_of(s, id, j, seed);
        Stream stream(seed, kScores, static_cast<uint64_t>(id), static_cast<uint64_t>(j));
        for (int64_t i = 0; i < pairs; ++i) {
          to[i] = 2.0f * stream.normal();
          if (s.has_ties) to[i] = std::round(to[i] / 2.0f);
          if (stream.one_in(40)) to[i] = std::numeric_limits<float>::quiet_NaN();
          if (own[at(i % s.count)] < 0) to[i] = -kInf;
        }
      }));
  // Row i of a draft is that of the sequence's own pass row, and some drafts of a sequence are
  // inert.
  const int32_t num_drafts = s.num_drafts;
  std::vector<int32_t> row_index(at(num_drafts * max_rows));
  std::vector<int32_t> seq_slot(at(num_drafts * max_rows), -1);
  std::vector<int32_t> positions(at(num_drafts * max_rows), 0);
  std::vector<uint64_t> seeds(at(max_rows), 99);
  std::vector<float> temperatures(at(max_rows), 0.0f);
  for (int32_t j = 0; j < num_drafts; ++j) {
    for (int32_t i = 0; i < max_rows; ++i) {
      row_index[at(j * max_rows + i)] = i * num_drafts + j;
      if (at(i) >= rows.ids.size()) continue;
      const int64_t id = rows.ids[at(i)];
      Stream stream(seed, kDraws, static_cast<uint64_t>(id));
      seeds[at(max_rows - 1 - i)] = stream.next();
      const float by_turns[] = {0.0f, 0.3f, 1.0f, 2.0f};
      temperatures[at(max_rows - 1 - i)] = by_turns[id % 4];
      const bool is_inert = id % 7 == 5 && j >= num_drafts / 2;
      seq_slot[at(i * num_drafts + j)] = is_inert ? -1 : max_rows - 1 - i;
      positions[at(i * num_drafts + j)] = stream.below(1000) + j;
    }
  }
  const Handle index = op.add(int_array("row_index", Role::kInput, row_index));
  const Handle slots = op.add(int_array("seq_slot", Role::kInput, seq_slot));
  const Handle at_position = op.add(int_array("positions", Role::kInput, positions));
  const Handle of_slot = op.add(int_array("seeds", Role::kInput, seeds));
  const Handle warm = add_floats(op, "temperatures", temperatures);
  const auto add_scratch = [&](const char* name) {
    return op.add(intermediate_array(name, Element::kF32, int64_t{max_rows} * s.count));
  };
  const Handle followed = add_scratch("followed");
  const Handle followed_apart = add_scratch("followed_apart");
  const auto add_tokens = [&](const char* name) {
    OpArray tokens = output_array(name, Element::kI32, Element::kI32, num_drafts * max_rows, 1);
    tokens.compare = Compare::kExact;
    return op.add(std::move(tokens));
  };
  const Handle tokens = add_tokens("tokens");
  const Handle tokens_apart = add_tokens("tokens_apart");
  op.set_run([=](auto& ctx, const Addresses& at) {
    WalkCandidatesParams p{.num_seqs = at.get<int32_t>(num_rows),
                           .max_seqs = max_rows,
                           .num_drafts = num_drafts,
                           .lists = {.ids = at.get<int32_t>(ids),
                                     .logits = nullptr,
                                     .scores = at.get<float>(scores),
                                     .count = s.count},
                           .followed = at.get<float>(followed),
                           .draw = {}};
    p.draw.row_index = at.get<int32_t>(index);
    p.draw.seq_slot = at.get<int32_t>(slots);
    p.draw.positions = at.get<int32_t>(at_position);
    p.draw.seeds = at.get<uint64_t>(of_slot);
    p.draw.temperatures = at.get<float>(warm);
    p.draw.tokens = at.get<int32_t>(tokens);
    p.draw.token_limit = kNumTokens;
    walk_candidates(ctx, p);
    p.followed = at.get<float>(followed_apart);
    p.draw.tokens = at.get<int32_t>(tokens_apart);
    for (int32_t j = 0; j < num_drafts; ++j) {
      const int64_t row = int64_t{j} * max_rows;
      const int64_t before = row - max_rows;
      follow_candidates(
          ctx, FollowCandidatesParams{.num_seqs = p.num_seqs,
                                      .max_seqs = max_rows,
                                      .count = s.count,
                                      .scores = p.lists.scores + row * pairs,
                                      .before = j > 0 ? p.lists.ids + before * s.count : nullptr,
                                      .previous = j > 0 ? p.draw.tokens + before : nullptr,
                                      .y = p.followed});
      draw(ctx, draw_of_draft(p, j));
    }
  });
  op.check = [=](const ArrayBytes& cpu, const ArrayBytes& cuda, int64_t*) {
    for (const ArrayBytes* const own : {&cpu, &cuda}) {
      if ((*own)[at(tokens)] != (*own)[at(tokens_apart)]) {
        return std::string(own == &cpu ? "the CPU" : "CUDA") + " walks otherwise in one op";
      }
    }
    return std::string();
  };
  return op;
}

std::vector<RowWiseCase> candidate_row_wise_cases() {
  TableBuilder table;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const ConvolveSpec& shape :
         {ConvolveSpec{.hidden = 64, .group = 16, .num_taps = 2, .rows_per_seq = 8},
          {.hidden = 33, .group = 11, .num_taps = 3, .rows_per_seq = 5},
          {.hidden = 20, .group = 1, .num_taps = 1, .rows_per_seq = 1},
          {.hidden = 7, .group = 7, .num_taps = 16, .rows_per_seq = 17},
          {.hidden = 4096, .group = 16, .num_taps = 2, .rows_per_seq = 4}}) {
      ConvolveSpec s = shape;
      s.dtype = dtype;
      table.add("convolve_h" + std::to_string(s.hidden) + "_g" + std::to_string(s.group) + "_t" +
                    std::to_string(s.num_taps) + "_rows" + std::to_string(s.rows_per_seq) +
                    dtype_suffix(dtype),
                make_convolve_blocks, s, /*is_invariance_case=*/s.hidden < 4096);
    }
    for (const auto& [count, rank] :
         {std::pair{16, 256}, {1, 1}, {4, 5}, {13, 65}, {32, 100}, {20, 1024}}) {
      table.add(
          "pairs_c" + std::to_string(count) + "_r" + std::to_string(rank) + dtype_suffix(dtype),
          make_score_pairs,
          CandidateSpec{.count = count, .num_drafts = 4, .rank = rank, .dtype = dtype});
    }
  }
  for (const int32_t count : {1, 4, 16, 32}) {
    for (const bool has_ties : {false, true}) {
      for (const int32_t num_drafts : {1, 5}) {
        table.add("walk_c" + std::to_string(count) + "_k" + std::to_string(num_drafts) +
                      (has_ties ? "_ties" : ""),
                  make_walk,
                  CandidateSpec{.count = count, .num_drafts = num_drafts, .has_ties = has_ties});
      }
    }
  }
  return table.cases;
}

}  // namespace paceline::testing
