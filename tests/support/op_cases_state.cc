// SPDX-License-Identifier: Apache-2.0
//
// The op cases of the state of sequences between iterations, of their rows and of metadata.

#include <algorithm>
#include <numeric>

#include "support/op_cases_world.h"

namespace paceline::testing {
namespace {

template <class Ctx>
void build_all(Ctx& ctx, const PassRows& rows, const std::vector<GroupMetadata>& groups,
               int32_t padded_rows) {
  for (const GroupMetadata& group : groups) build(ctx, rows, group, padded_rows);
}

OpInstance make_assemble(World world, const StateSpec& s, StateOp kind) {
  const bool is_verify = kind == StateOp::kAssembleVerifyRows;
  const int32_t num_rows = is_verify ? world.num_verify_rows() : world.num_first_rows();
  const auto rows = world.unwritten_rows(
      num_rows + 5, is_verify ? world.verify_indptr() : world.first_indptr(), 32);
  static_assert(offsetof(SequenceResult, emitted_len) == 0);
  const Handle results = is_verify ? kNoArray : world.results();
  const Handle last_row = is_verify ? kNoArray : world.poison("last_row", s.max_seqs);
  const bool is_fixed = s.drafted_by == DraftedBy::kFixed;
  const Handle hidden_rows = is_fixed ? world.poison("hidden_rows", rows.capacity) : kNoArray;
  const FirstRows first_rows = is_fixed                           ? FirstRows::kLast
                               : s.drafted_by == DraftedBy::kHead ? FirstRows::kWindow
                                                                  : FirstRows::kNewest;
  OpInstance op = world.op;
  op.set_run([=](auto& ctx, const Addresses& at) {
    if (is_verify) {
      assemble_verify_rows(ctx, AssembleVerifyRowsParams{.inputs = world.inputs(at),
                                                         .sequences = world.sequences(at),
                                                         .rows = rows.at(at)});
    } else {
      assemble_first_rows(ctx,
                          AssembleFirstRowsParams{.inputs = world.inputs(at),
                                                  .sequences = world.sequences(at),
                                                  .rows = rows.at(at),
                                                  .first_rows = first_rows,
                                                  .results = at.get<SequenceResult>(results),
                                                  .last_row = at.get<int32_t>(last_row),
                                                  .hidden_rows = at.get<int32_t>(hidden_rows)});
    }
  });
  return op;
}

OpInstance make_ngram(const World& world, const StateSpec& s) {
  OpInstance op = world.op;
  op.set_run([=](auto& ctx, const Addresses& at) {
    propose_ngram(ctx, ProposeNgramParams{.inputs = world.inputs(at),
                                          .sequences = world.sequences(at),
                                          .max_seqs = s.max_seqs,
                                          .min_tokens = 2,
                                          .max_tokens = 5,
                                          .keeps_drafts = s.drafted_by == DraftedBy::kHead});
  });
  return op;
}

OpInstance make_accept(World world, const StateSpec& s, AcceptMethod method) {
  static_assert(sizeof(SequenceResult) % 4 == 0);
  const Handle target = world.target_tokens();
  const bool is_judged = method == AcceptMethod::kStandard;
  const Handle num_accepted = is_judged ? world.num_accepted() : kNoArray;
  const Handle recovered_tokens = is_judged ? world.drawn("recovered_tokens") : kNoArray;
  const Handle results =
      world.poison("results", s.max_seqs * static_cast<int64_t>(sizeof(SequenceResult) / 4));
  AcceptParams params{};
  params.max_seqs = s.max_seqs;
  params.method = method;
  for (float& rate : params.synthetic_rate) {
    rate = static_cast<float>(world.stream().below(1001)) * 1e-3f;
  }
  OpInstance op = world.op;
  op.set_run([=](auto& ctx, const Addresses& at) {
    AcceptParams p = params;
    p.inputs = world.inputs(at);
    p.sequences = world.sequences(at);
    p.target_tokens = at.get<int32_t>(target);
    p.num_accepted = at.get<int32_t>(num_accepted);
    p.recovered_tokens = at.get<int32_t>(recovered_tokens);
    p.results = at.get<SequenceResult>(results);
    accept(ctx, p);
  });
  return op;
}

OpInstance make_count(World world, const StateSpec& s) {
  const SamplingHandles sampling = world.sampling();
  const Handle results = world.emitted_results();
  std::vector<int32_t> slots = world.some_slots();
  const Handle num_seqs = world.ints<int32_t>("num_seqs", {static_cast<int32_t>(slots.size())});
  slots.resize(static_cast<size_t>(s.max_seqs), 0);  // not to be cleared
  const Handle cleared = world.ints("cleared", slots);
  OpInstance op = world.op;
  op.set_run([=](auto& ctx, const Addresses& at) {
    const SamplingState state = sampling.at(at);
    clear_counts(ctx, ClearCountsParams{.num_seqs = at.get<int32_t>(num_seqs),
                                        .max_seqs = s.max_seqs,
                                        .seq_slots = at.get<int32_t>(cleared),
                                        .sampling = state});
    count_prefill_tokens(
        ctx, CountPrefillTokensParams{
                 .inputs = world.inputs(at), .sampling = state, .max_seqs = s.max_seqs});
    count_emitted_tokens(ctx, CountEmittedTokensParams{.inputs = world.inputs(at),
                                                       .sampling = state,
                                                       .results = at.get<SequenceResult>(results),
                                                       .max_seqs = s.max_seqs});
  });
  return op;
}

OpInstance make_metadata(World world, const StateSpec& s) {
  const int32_t num_rows = 3 * s.num_seqs;
  const int32_t capacity = 3 * s.max_seqs + 7;
  const auto rows = world.random_rows(num_rows, capacity);
  const auto metadata = world.metadata(capacity);
  OpInstance op = world.op;
  op.set_run([=](auto& ctx, const Addresses& at) {
    build_all(ctx, rows.at(at), metadata.at(at), capacity - 2);
  });
  return op;
}

// All ops between the first pass and the end of drafting, on random draws.
OpInstance make_draft_steps(World world, const StateSpec& s) {
  const int32_t k = s.num_draft_tokens;
  const int32_t draw_ahead = s.drafted_by == DraftedBy::kModel ? 1 : 2;
  const bool advances_positions = s.drafted_by != DraftedBy::kFixed;
  std::vector<int32_t> indptr(static_cast<size_t>(s.max_seqs) + 1);
  std::iota(indptr.begin(), indptr.end(), 0);
  const auto rows = world.unwritten_rows(s.max_seqs, world.ints("step_indptr", indptr), 1);
  const auto metadata = world.metadata(s.max_seqs);
  const Handle step = world.poison("current_draft_step", 1);
  const Handle keeps = s.stops_early ? world.poison("keep_drafting", 1) : kNoArray;
  std::vector<Handle> drawn;
  std::vector<Handle> probabilities;
  for (int32_t j = 0; j < k; ++j) {
    drawn.push_back(world.drawn("drawn"));
    probabilities.push_back(s.stops_early ? world.probabilities() : kNoArray);
  }
  OpInstance op = world.op;
  op.set_run([=](auto& ctx, const Addresses& at) {
    const SequenceState sequences = world.sequences(at);
    const std::vector<GroupMetadata> groups = metadata.at(at);
    AdvanceParams advance{};
    advance.current_draft_step = at.get<int32_t>(step);
    advance.rows = rows.at(at);
    advance.sequences = sequences;
    advance.draw_ahead = draw_ahead;
    advance.advances_positions = advances_positions;
    for (const GroupMetadata& group : groups) {
      advance.groups[advance.num_groups++] = advance_group(group);
    }
    for (int32_t j = 0; j < k; ++j) {
      const auto i = static_cast<size_t>(j);
      const auto* const tokens = at.get<int32_t>(drawn[i]);
      const DraftStop stop{.probabilities = at.get<float>(probabilities[i]),
                           .threshold = 0.2f,
                           .keep_drafting = at.get<int32_t>(keeps)};
      if (j == 0) {
        begin_draft_steps(ctx, BeginDraftStepsParams{.inputs = world.inputs(at),
                                                     .sequences = sequences,
                                                     .drawn = tokens,
                                                     .rows = rows.at(at),
                                                     .current_draft_step = at.get<int32_t>(step),
                                                     .stop = stop,
                                                     .draw_ahead = draw_ahead,
                                                     .advances_positions = advances_positions});
        build_all(ctx, rows.at(at), groups, s.max_seqs);
        continue;
      }
      store_draft(ctx, StoreDraftParams{.current_draft_step = at.get<int32_t>(step),
                                        .rows = rows.at(at),
                                        .sequences = sequences,
                                        .drawn = tokens,
                                        .stop = stop});
      advance.drawn = tokens;
      advance.stop = stop;
      advance_draft_step(ctx, advance);
    }
  });
  return op;
}

// The ops around the pass over blocks, on random draws.
OpInstance make_draft_blocks(World world, const StateSpec& s) {
  const int32_t k = s.num_draft_tokens;
  const int32_t num_seqs = s.max_seqs;
  const bool from_anchor = s.drafted_by == DraftedBy::kHead;
  const int32_t rows_per_seq = from_anchor ? k : k + 1;
  const int32_t capacity = num_seqs * rows_per_seq;
  const Handle indptr = world.poison("block_indptr", num_seqs + 1);
  const auto rows = world.unwritten_rows(capacity, indptr, rows_per_seq);
  const Handle first = world.poison("block_first", capacity);
  const Handle last = world.poison("block_last", capacity);
  const Handle predicting = world.poison("predicting_rows", k * num_seqs);
  const Handle num_predicting = world.poison("num_predicting", 1);
  const Handle newest = world.poison("newest_tokens", num_seqs);
  const Handle keeps = world.poison("keep_drafting", 1);
  const auto metadata = world.metadata(capacity);
  const Handle drawn = world.drawn("drawn", k);
  const Handle probabilities = s.stops_early ? world.probabilities(k) : kNoArray;
  OpInstance op = world.op;
  op.set_run([=](auto& ctx, const Addresses& at) {
    PassRows block_rows = rows.at(at);
    block_rows.block_first = at.get<int32_t>(first);
    block_rows.block_last = at.get<int32_t>(last);
    assemble_block_rows(ctx,
                        AssembleBlockRowsParams{.inputs = world.inputs(at),
                                                .sequences = world.sequences(at),
                                                .rows = block_rows,
                                                .row_indptr = at.get<int32_t>(indptr),
                                                .predicting_rows = at.get<int32_t>(predicting),
                                                .num_predicting = at.get<int32_t>(num_predicting),
                                                .newest_tokens = at.get<int32_t>(newest),
                                                .num_seqs = num_seqs,
                                                .num_drafts = k,
                                                .rows_per_seq = rows_per_seq,
                                                .mask_token = 3,
                                                .first_predicting_row = from_anchor ? 0 : 1});
    const std::vector<GroupMetadata> groups = metadata.at(at);
    FullMetadata full = std::get<FullMetadata>(groups[0]);
    SlidingMetadata sliding = std::get<SlidingMetadata>(groups[1]);
    full.block.sees_all = true;
    sliding.block = {.sees_all = from_anchor, .is_anchored = !s.stops_early};
    build_all(ctx, block_rows, {full, sliding}, capacity);
    store_block_drafts(
        ctx, StoreBlockDraftsParams{.inputs = world.inputs(at),
                                    .sequences = world.sequences(at),
                                    .drawn = at.get<int32_t>(drawn),
                                    .stop = {.probabilities = at.get<float>(probabilities),
                                             .threshold = 0.2f,
                                             .keep_drafting = at.get<int32_t>(keeps)},
                                    .stops_before = from_anchor,
                                    .num_seqs = num_seqs,
                                    .num_drafts = k});
  });
  return op;
}

}  // namespace

OpInstance make_state(StateOp kind, const StateSpec& spec, uint64_t seed) {
  World world(spec, kind, seed);
  switch (kind) {
    case StateOp::kAssembleVerifyRows:
    case StateOp::kAssembleFirstRows:
      return make_assemble(std::move(world), spec, kind);
    case StateOp::kAccept:
      return make_accept(std::move(world), spec, AcceptMethod::kCoupled);
    case StateOp::kAcceptSynthetic:
      return make_accept(std::move(world), spec, AcceptMethod::kSynthetic);
    case StateOp::kAcceptJudged:
      return make_accept(std::move(world), spec, AcceptMethod::kStandard);
    case StateOp::kBuildMetadata:
      return make_metadata(std::move(world), spec);
    case StateOp::kDraftSteps:
      return make_draft_steps(std::move(world), spec);
    case StateOp::kDraftBlocks:
      return make_draft_blocks(std::move(world), spec);
    case StateOp::kProposeNgram:
      return make_ngram(world, spec);
    case StateOp::kCountTokens:
      return make_count(std::move(world), spec);
  }
  return {};
}

std::vector<OpCase> state_op_cases() {
  std::vector<OpCase> cases;
  const struct {
    DraftedBy drafted_by;
    bool stops_early;
    const char* suffix;
  } variants[] = {{DraftedBy::kModel, false, ""},
                  {DraftedBy::kModel, true, "_stops"},
                  {DraftedBy::kHead, false, "_head"},
                  {DraftedBy::kFixed, false, "_fixed"},
                  {DraftedBy::kFixed, true, "_fixed_stops"}};
  for (const StateOp op : {StateOp::kAssembleVerifyRows, StateOp::kAssembleFirstRows,
                           StateOp::kAccept, StateOp::kAcceptSynthetic, StateOp::kAcceptJudged,
                           StateOp::kBuildMetadata, StateOp::kDraftSteps, StateOp::kDraftBlocks,
                           StateOp::kProposeNgram, StateOp::kCountTokens}) {
    const char* const names[] = {"assemble_verify_rows",
                                 "assemble_first_rows",
                                 "accept",
                                 "accept_synthetic",
                                 "accept_judged",
                                 "build_metadata",
                                 "draft_steps",
                                 "draft_blocks",
                                 "propose_ngram",
                                 "counts"};
    const StateSpec specs[] = {{1, 0, 1, 16},      {1, 1, 1, 16},   {12, 12, 4, 16},
                               {64, 40, 3, 24},    {64, 64, 16, 1}, {300, 300, 7, 256},
                               {1024, 1000, 2, 16}};
    for (StateSpec spec : specs) {
      for (const auto& [drafted_by, stops_early, suffix] : variants) {
        const bool is_plain = drafted_by == DraftedBy::kModel && !stops_early;
        const bool has_variant = op == StateOp::kDraftSteps ||
                                 (op == StateOp::kAssembleFirstRows && !stops_early) ||
                                 (op == StateOp::kDraftBlocks && drafted_by != DraftedBy::kFixed) ||
                                 (op == StateOp::kProposeNgram && drafted_by == DraftedBy::kHead);
        if (!is_plain && !has_variant) continue;
        spec.drafted_by = drafted_by;
        spec.stops_early = stops_early;
        cases.push_back({std::string(names[static_cast<size_t>(op)]) + "_seqs" +
                             std::to_string(spec.num_seqs) + "of" + std::to_string(spec.max_seqs) +
                             "_k" + std::to_string(spec.num_draft_tokens) + suffix,
                         [op, spec](uint64_t seed) { return make_state(op, spec, seed); }});
      }
    }
  }
  // 8,266 ids: several blocks clear the counts of a slot, and two of them the words of its mask.
  for (const StateSpec& counted :
       {StateSpec{.max_seqs = 12, .num_seqs = 12, .num_draft_tokens = 4, .spread = 285},
        StateSpec{.max_seqs = 64, .num_seqs = 40, .num_draft_tokens = 3, .spread = 285}}) {
    cases.push_back(
        {"counts_seqs" + std::to_string(counted.num_seqs) + "of" +
             std::to_string(counted.max_seqs) + "_k" + std::to_string(counted.num_draft_tokens) +
             "_v" + std::to_string(vocab_size_of(counted)),
         [counted](uint64_t seed) { return make_state(StateOp::kCountTokens, counted, seed); }});
  }
  return cases;
}

}  // namespace paceline::testing
