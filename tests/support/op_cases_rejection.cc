// SPDX-License-Identifier: Apache-2.0
//
// Builders of the ops of `standard` and `block` acceptance. Both backends compute the same bits,
// except for the logits of the residual, which take a logarithm.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "sample/reject.h"
#include "support/host_batch.h"
#include "support/op_cases.h"
#include "support/row_arrays.h"
#include "wire/batch_shape.h"
#include "wire/staged_inputs.h"

namespace paceline::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

enum Purpose : uint64_t { kMap = 300, kTemperature, kWindow };

bool is_inert(int64_t id) { return id % 17 == 9; }

float temperature_of(int64_t id) {
  const float by_turns[] = {1.0f, 0.0f, 0.3f, 2.0f, 0.7f};
  return by_turns[id % 5];
}

// Sequence slots in another order than the rows; no row has slot 0.
std::vector<int32_t> slots_of(const Rows& rows) {
  std::vector<int32_t> slots(static_cast<size_t>(rows.max_rows));
  std::iota(slots.begin(), slots.end(), 1);
  std::rotate(slots.begin(), slots.begin() + rows.max_rows / 3, slots.end());
  return slots;
}

// Row i belongs to pass row 2 (max - 1 - i), and that to its slot.
struct PassOf {
  Handle row_index;
  Handle seq_slot;
};
PassOf add_pass(OpInstance& op, const Rows& rows, const std::vector<int32_t>& slots) {
  const auto size = static_cast<size_t>(rows.max_rows);
  std::vector<int32_t> row_index(size);
  std::vector<int32_t> seq_slot(2 * size, -1);
  for (size_t i = 0; i < size; ++i) {
    const size_t pass_row = 2 * (size - 1 - i);
    row_index[i] = static_cast<int32_t>(pass_row);
    if (i < rows.ids.size() && !is_inert(rows.ids[i])) seq_slot[pass_row] = slots[i];
  }
  return {op.add(int_array("row_index", Role::kInput, row_index)),
          op.add(int_array("seq_slot", Role::kInput, seq_slot))};
}

Handle add_logits(OpInstance& op, LogitKind kind, int32_t count, int32_t padding, const Rows& rows,
                  uint64_t seed) {
  return op.add(row_array("logits", Element::kF32, Element::kF32, rows, count + padding,
                          [=](int64_t id, float* to) {
                            fill_logits(kind, count, id, seed, to);
                            std::fill_n(to + count, padding, kInf);
                          }));
}

Handle add_floats(OpInstance& op, const char* name, const std::vector<float>& values) {
  return op.add(float_array(name, Element::kF32, Element::kF32, static_cast<int64_t>(values.size()),
                            [values](float* to) { std::copy(values.begin(), values.end(), to); }));
}

// An output compared bit for bit, infinities too; `row_length` 0: not made of rows.
Handle add_exact(OpInstance& op, const char* name, Element element, int64_t count,
                 int64_t row_length) {
  OpArray array = output_array(name, element, element, count, row_length);
  array.compare = is_float(element) ? Compare::kByCase : Compare::kExact;
  return op.add(std::move(array));
}

std::string same_bits(const OpArray& array, const std::vector<std::byte>& want,
                      const std::vector<std::byte>& got) {
  for (int64_t i = 0; i < array.count; ++i) {
    const size_t at = static_cast<size_t>(i) * sizeof(float);
    if (std::memcmp(want.data() + at, got.data() + at, sizeof(float)) == 0) continue;
    return array.name + "[" + std::to_string(i) +
           "]: " + std::to_string(float_at(array.cuda, got.data(), i)) + ", the CPU has " +
           std::to_string(float_at(array.cpu, want.data(), i));
  }
  return {};
}

void compare_bits(OpInstance& op, Handle handle) {
  const auto which = static_cast<size_t>(handle);
  op.check = [which, array = op.arrays[which]](const ArrayBytes& cpu, const ArrayBytes& cuda,
                                               int64_t*) {
    return same_bits(array, cpu[which], cuda[which]);
  };
}

}  // namespace

OpInstance make_proposals(const ProposalsSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  constexpr int32_t kDrafts = 4;
  const int32_t max_rows = rows.max_rows;
  const int64_t stride = s.vocab_limit + s.padding;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle logits = add_logits(op, s.logits, s.vocab_limit, s.padding, rows, seed);
  const std::vector<int32_t> slots = slots_of(rows);
  const PassOf pass = add_pass(op, rows, slots);
  Handle map = kNoArray;
  if (s.is_mapped) {
    // Tokens in random order, a few beyond the limit.
    const size_t num_maps = s.has_row_maps ? static_cast<size_t>(max_rows) : 1;
    std::vector<int32_t> all(num_maps * static_cast<size_t>(stride), 0);
    for (size_t i = 0; i < (s.has_row_maps ? rows.ids.size() : 1); ++i) {
      Stream stream(seed, kMap, s.has_row_maps ? static_cast<uint64_t>(rows.ids[i]) : 0);
      const auto first = all.begin() + static_cast<int64_t>(i) * stride;
      std::iota(first, first + s.vocab_limit, 3);
      for (int32_t id = s.vocab_limit; id > 1; --id) {
        std::swap(first[id - 1], first[stream.below(id)]);
      }
    }
    map = op.add(int_array("token_map", Role::kInput, all));
  }
  const Handle step = s.draft_step > 0
                          ? op.add(int_array<int32_t>("draft_step", Role::kInput, {s.draft_step}))
                          : kNoArray;
  std::vector<int64_t> places(rows.ids.size());
  for (size_t i = 0; i < places.size(); ++i) {
    places[i] = s.is_by_row ? static_cast<int64_t>(i) : slots[i] * kDrafts + s.draft_step;
  }
  const int64_t count = (max_rows + 1) * int64_t{kDrafts} * s.per_draft;
  const Handle ids = add_exact(op, "ids", Element::kI32, count, s.per_draft);
  const Handle proposed = add_exact(op, "proposed", Element::kF32, count, s.per_draft);
  for (const Handle handle : {ids, proposed}) {
    op.arrays[static_cast<size_t>(handle)].row_at = places;
  }
  const Handle proposal_rows = add_exact(op, "proposal_rows", Element::kI32, max_rows, 0);
  op.set_run([=](auto& ctx, const Addresses& at) {
    select_proposals(ctx, SelectProposalsParams{.num_rows = at.get<int32_t>(num_rows),
                                                .max_rows = max_rows,
                                                .logits = at.get<float>(logits),
                                                .logits_stride = stride,
                                                .vocab_limit = s.vocab_limit,
                                                .row_index = at.get<int32_t>(pass.row_index),
                                                .seq_slot = at.get<int32_t>(pass.seq_slot),
                                                .token_map = at.get<int32_t>(map),
                                                .token_limit = 3 + s.vocab_limit / 10 * 9,
                                                .token_map_stride = s.has_row_maps ? stride : 0,
                                                .draft_step = at.get<int32_t>(step),
                                                .num_draft_tokens = kDrafts,
                                                .proposals = {.ids = at.get<int32_t>(ids),
                                                              .logits = at.get<float>(proposed),
                                                              .per_draft = s.per_draft},
                                                .proposal_rows = at.get<int32_t>(proposal_rows),
                                                .is_by_row = s.is_by_row});
  });
  compare_bits(op, proposed);
  return op;
}

OpInstance make_softmax_sums(const SoftmaxSumsSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int32_t max_rows = rows.max_rows;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle logits = add_logits(op, s.logits, s.vocab_limit, s.padding, rows, seed);
  const std::vector<int32_t> slots = slots_of(rows);
  const PassOf pass = add_pass(op, rows, slots);
  std::vector<float> temperatures(static_cast<size_t>(max_rows) + 1, 1.0f);
  for (size_t i = 0; i < rows.ids.size(); ++i) {
    temperatures[static_cast<size_t>(slots[i])] = temperature_of(rows.ids[i]);
  }
  const Handle at_temperature = add_floats(op, "temperatures", temperatures);
  const Handle highest = add_exact(op, "highest", Element::kF32, max_rows, 1);
  const Handle sums = add_exact(op, "sums", Element::kU64, max_rows, 1);
  op.set_run([=](auto& ctx, const Addresses& at) {
    softmax_sums(ctx, SoftmaxSumsParams{.num_rows = at.get<int32_t>(num_rows),
                                        .max_rows = max_rows,
                                        .logits = at.get<float>(logits),
                                        .logits_stride = s.vocab_limit + s.padding,
                                        .vocab_limit = s.vocab_limit,
                                        .row_index = at.get<int32_t>(pass.row_index),
                                        .seq_slot = at.get<int32_t>(pass.seq_slot),
                                        .temperatures = at.get<float>(at_temperature),
                                        .highest = at.get<float>(highest),
                                        .sums = at.get<uint64_t>(sums)});
  });
  compare_bits(op, highest);
  return op;
}

namespace {

// A window of drafts: the proposals they were drawn from, and the target's logits at their
// positions.
struct WindowOf {
  bool is_decoding;
  bool is_active;
  int32_t num_drafts;
  int32_t known_len;
  uint64_t seed;
  std::vector<int32_t> drafts;
  std::vector<int32_t> ids;    // [k, per_draft]
  std::vector<float> logits;   // [k, per_draft]
  std::vector<int32_t> draws;  // [k + 1]
  std::vector<float> targets;  // [k + 1, vocab_size]
};

WindowOf window_of(const RejectSpec& s, int64_t id, uint64_t seed) {
  Stream stream(seed, kWindow, static_cast<uint64_t>(id));
  const int32_t k = s.num_draft_tokens;
  WindowOf of = {.is_decoding = !stream.one_in(8),
                 .is_active = !stream.one_in(9),
                 .num_drafts = stream.one_in(3) ? stream.below(k + 1) : k,
                 .known_len = 1 + stream.below(5000),
                 .seed = stream.next(),
                 .drafts = {},
                 .ids = {},
                 .logits = {},
                 .draws = {},
                 .targets = std::vector<float>(static_cast<size_t>((k + 1) * s.vocab_size))};
  for (int32_t at = 0; at <= k; ++at) {
    float* const target = of.targets.data() + at * s.vocab_size;
    const bool has_unknown = s.has_unknown_ids && stream.one_in(2);
    const int32_t num_known = (has_unknown ? 2 : 1) * s.vocab_size;
    fill_logits(s.logits, s.vocab_size, id * 32 + at, seed, target);
    of.draws.push_back(stream.one_in(20) ? -2 : stream.below(s.vocab_size));
    if (at == k) break;
    // Every id or every other one from a random one on; the drafter nearly agrees with the target.
    const int32_t step = 1 + stream.below(2);
    int32_t next = stream.below(3);
    const size_t first = of.ids.size();
    for (int32_t j = 0; j < s.per_draft; ++j, next += step) {
      const bool is_id = next < num_known && !(stream.one_in(40) && j > 0);
      of.ids.push_back(is_id ? next : -1);
      const bool is_targets = is_id && next < s.vocab_size;
      const float near = is_targets && std::isfinite(target[next]) ? target[next] : 0.0f;
      of.logits.push_back(is_id ? near + 0.5f * stream.normal() : -kInf);
    }
    if (s.per_draft > 0 && stream.one_in(12)) of.logits[first] = kInf;
    const int32_t of_list =
        s.per_draft > 0 ? of.ids[first + static_cast<size_t>(stream.below(s.per_draft))] : -1;
    const int32_t draft = of_list >= 0 ? of_list : stream.below(num_known);
    // Often the target's draw; sometimes no token.
    of.drafts.push_back(stream.one_in(25) ? -2 : draft);
    if (stream.one_in(2) && draft < s.vocab_size) of.draws.back() = draft;
  }
  return of;
}

}  // namespace

OpInstance make_reject(const RejectSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int32_t max_rows = rows.max_rows;
  const int32_t k = s.num_draft_tokens;
  const int32_t width = k + 1;
  const auto size = static_cast<size_t>(max_rows);
  const auto num_slots = size + 1;
  const auto per_slot = static_cast<size_t>(k * s.per_draft);
  const std::vector<int32_t> slots = slots_of(rows);
  const Handle counts =
      op.add(int_array("counts", Role::kInput, words_of({.num_seqs = rows.claimed})));
  const auto claimed = static_cast<int32_t>(rows.ids.size());
  const Handle num_logit_rows =
      op.add(int_array<int32_t>("num_logit_rows", Role::kInput, {claimed * width}));
  const auto values = [=](int64_t id, float* to) {
    const std::vector<float> targets = window_of(s, id, seed).targets;
    std::copy(targets.begin(), targets.end(), to);
  };
  const Handle logits = op.add(row_array("logits", Element::kF32, Element::kF32, rows,
                                         width * s.vocab_size, values, Role::kInOut));
  std::vector<int32_t> kinds(size, 0);
  std::vector<int32_t> logit_indptr(size + 1);
  std::vector<int32_t> verify_indptr(size + 1);
  std::vector<int32_t> row_index(size * static_cast<size_t>(width), 0);
  std::vector<int32_t> seq_slot(row_index.size() + 5, -1);
  std::vector<int32_t> draws(row_index.size(), -1);
  std::vector<int32_t> known_len(num_slots, 1);
  std::vector<int32_t> is_active(num_slots, 1);
  std::vector<uint64_t> seeds(num_slots, 1);
  std::vector<float> temperatures(num_slots, 1.0f);
  std::vector<int32_t> draft_len(num_slots, k);
  std::vector<int32_t> drafts(num_slots * static_cast<size_t>(k), 0);
  std::vector<int32_t> ids(num_slots * per_slot, 0);
  std::vector<float> proposed(num_slots * per_slot, kInf);
  for (size_t i = 0; i < size; ++i) {
    const auto first = static_cast<int32_t>(i) * width;
    logit_indptr[i + 1] = first + width;
    verify_indptr[i] = first + 5;  // other rows of the pass come first
    verify_indptr[i + 1] = first + width + 5;
    if (i >= rows.ids.size()) continue;
    const WindowOf of = window_of(s, rows.ids[i], seed);
    const auto slot = static_cast<size_t>(slots[i]);
    kinds[i] = static_cast<int32_t>(of.is_decoding ? RowKind::kDecode : RowKind::kPrefillFinal);
    known_len[slot] = of.known_len;
    is_active[slot] = of.is_active ? 1 : 0;
    seeds[slot] = of.seed;
    temperatures[slot] = temperature_of(rows.ids[i]);
    draft_len[slot] = of.num_drafts;
    for (int32_t r = 0; r < width; ++r) {
      const auto row = static_cast<size_t>(first + r);
      row_index[row] = first + r + 5;
      seq_slot[row + 5] = of.is_active && r <= of.num_drafts ? slots[i] : -1;
      draws[row] = of.draws[static_cast<size_t>(r)];
    }
    std::copy(of.drafts.begin(), of.drafts.end(), drafts.begin() + slots[i] * k);
    std::copy(of.ids.begin(), of.ids.end(), ids.begin() + static_cast<int64_t>(slot * per_slot));
    std::copy(of.logits.begin(), of.logits.end(),
              proposed.begin() + static_cast<int64_t>(slot * per_slot));
  }
  const auto ints = [&](const char* name, const std::vector<int32_t>& values) {
    return op.add(int_array(name, Role::kInput, values));
  };
  const Handle at_slot = ints("batch_slot", slots);
  const Handle at_kind = ints("kind", kinds);
  const Handle at_logit_indptr = ints("logit_indptr", logit_indptr);
  const Handle at_verify_indptr = ints("verify_indptr", verify_indptr);
  const Handle at_index = ints("row_index", row_index);
  const Handle at_seq_slot = ints("seq_slot", seq_slot);
  const Handle at_draws = ints("draws", draws);
  const Handle at_known_len = ints("known_len", known_len);
  const Handle at_active = ints("is_active", is_active);
  const Handle at_seed = op.add(int_array("seed", Role::kInput, seeds));
  const Handle at_temperature = add_floats(op, "temperatures", temperatures);
  const Handle at_draft_len = ints("draft_len", draft_len);
  const Handle at_drafts = ints("draft_tokens", drafts);
  const Handle at_ids = s.per_draft > 0 ? ints("ids", ids) : kNoArray;
  const Handle at_proposed = s.per_draft > 0 ? add_floats(op, "proposed", proposed) : kNoArray;
  const Handle highest =
      add_exact(op, "highest", Element::kF32, static_cast<int64_t>(row_index.size()), width);
  const Handle sums =
      add_exact(op, "sums", Element::kU64, static_cast<int64_t>(row_index.size()), width);
  const Handle num_accepted = add_exact(op, "num_accepted", Element::kI32, max_rows, 1);
  const Handle residual_rows = add_exact(op, "residual_rows", Element::kI32, max_rows, 0);
  const Handle pass_rows = add_exact(op, "residual_pass_rows", Element::kI32, max_rows, 0);
  op.set_run([=](auto& ctx, const Addresses& at) {
    const StagedInputs inputs = {.counts = at.get<IterationCounts>(counts),
                                 .seq_slot = at.get<int32_t>(at_slot),
                                 .kind = at.get<int32_t>(at_kind),
                                 .verify_indptr = at.get<int32_t>(at_verify_indptr),
                                 .logit_indptr = at.get<int32_t>(at_logit_indptr)};
    softmax_sums(ctx, SoftmaxSumsParams{.num_rows = at.get<int32_t>(num_logit_rows),
                                        .max_rows = max_rows * width,
                                        .logits = at.get<float>(logits),
                                        .logits_stride = s.vocab_size,
                                        .vocab_limit = s.vocab_size,
                                        .row_index = at.get<int32_t>(at_index),
                                        .seq_slot = at.get<int32_t>(at_seq_slot),
                                        .temperatures = at.get<float>(at_temperature),
                                        .highest = at.get<float>(highest),
                                        .sums = at.get<uint64_t>(sums)});
    reject_drafts(ctx,
                  RejectDraftsParams{.inputs = inputs,
                                     .sequences = {.known_len = at.get<int32_t>(at_known_len),
                                                   .is_active = at.get<int32_t>(at_active),
                                                   .seed = at.get<uint64_t>(at_seed),
                                                   .temperature = at.get<float>(at_temperature),
                                                   .draft_tokens = at.get<int32_t>(at_drafts),
                                                   .draft_len = at.get<int32_t>(at_draft_len),
                                                   .num_draft_tokens = k},
                                     .method = s.method,
                                     .target_tokens = at.get<int32_t>(at_draws),
                                     .logits = at.get<float>(logits),
                                     .logits_stride = s.vocab_size,
                                     .vocab_limit = s.vocab_size,
                                     .highest = at.get<float>(highest),
                                     .sums = at.get<uint64_t>(sums),
                                     .proposals = {.ids = at.get<int32_t>(at_ids),
                                                   .logits = at.get<float>(at_proposed),
                                                   .per_draft = s.per_draft},
                                     .num_accepted = at.get<int32_t>(num_accepted),
                                     .residual_rows = at.get<int32_t>(residual_rows),
                                     .residual_pass_rows = at.get<int32_t>(pass_rows),
                                     .max_seqs = max_rows});
  });
  const auto updated = static_cast<size_t>(logits);
  op.arrays[updated].compare = Compare::kByCase;
  op.check = [updated, weighed = static_cast<size_t>(highest),
              array = op.arrays[static_cast<size_t>(highest)], row_length = s.vocab_size](
                 const ArrayBytes& cpu, const ArrayBytes& cuda, int64_t*) -> std::string {
    const std::string wrong = same_bits(array, cpu[weighed], cuda[weighed]);
    if (!wrong.empty()) return wrong;
    const auto* const want = reinterpret_cast<const float*>(cpu[updated].data());
    const auto* const got = reinterpret_cast<const float*>(cuda[updated].data());
    for (size_t i = 0; i < cpu[updated].size() / sizeof(float); ++i) {
      const bool is_same = want[i] == got[i] || (std::isnan(want[i]) && std::isnan(got[i]));
      if (is_same || is_near(want[i], got[i], 1e-6f * std::fabs(want[i]))) continue;
      return "logit " + std::to_string(i % static_cast<size_t>(row_length)) + " of row " +
             std::to_string(i / static_cast<size_t>(row_length)) + ": " + std::to_string(got[i]) +
             ", the CPU has " + std::to_string(want[i]);
    }
    return {};
  };
  return op;
}

}  // namespace paceline::testing
