// SPDX-License-Identifier: Apache-2.0
//
// Builders of the ops that process logits. Both backends compute the same bits.

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "sample/logits.h"
#include "support/op_cases.h"
#include "support/row_arrays.h"
#include "support/sampling_handles.h"
#include "wire/limits.h"
#include "wire/sequence_result.h"

namespace paceline::testing {
namespace {

constexpr int32_t kMaxLen = 64;
constexpr int32_t kWindowRows = kMaxDraftTokens + 1;

enum Purpose : uint64_t { kSequence = 200, kSampling };

template <class T>
T one_of(Stream& stream, std::initializer_list<T> values) {
  return values.begin()[stream.below(static_cast<int32_t>(values.size()))];
}

// Sequence slots in another order than the rows; no row has slot 0.
std::vector<int32_t> slots_of(const Rows& rows) {
  std::vector<int32_t> slots(static_cast<size_t>(rows.max_rows));
  std::iota(slots.begin(), slots.end(), 1);
  std::rotate(slots.begin(), slots.begin() + rows.max_rows / 3, slots.end());
  return slots;
}

bool is_inert(int64_t id) { return id % 17 == 9; }

// Logits are compared bit for bit; a NaN is like any other.
void compare_by_case(OpInstance& op, Handle logits) {
  const auto which = static_cast<size_t>(logits);
  OpArray& array = op.arrays[which];
  array.compare = Compare::kByCase;
  op.check = [which, count = array.count, row_length = array.row_length](
                 const ArrayBytes& cpu, const ArrayBytes& cuda, int64_t*) -> std::string {
    const auto* const want = reinterpret_cast<const float*>(cpu[which].data());
    const auto* const got = reinterpret_cast<const float*>(cuda[which].data());
    for (int64_t i = 0; i < count; ++i) {
      const bool is_same = std::isnan(want[i]) ? std::isnan(got[i])
                                               : std::memcmp(want + i, got + i, sizeof(float)) == 0;
      if (is_same) continue;
      return "row " + std::to_string(i / row_length) + ", id " + std::to_string(i % row_length) +
             ": " + std::to_string(got[i]) + ", the CPU has " + std::to_string(want[i]);
    }
    return {};
  };
}

// --- adjust_logits -------------------------------------------------------------------------------

// The tokens before row `id`: settled tokens, then drafts up to the row's own.
struct RowSequence {
  std::vector<int32_t> tokens;
  int32_t num_drafts;
};

RowSequence sequence_of(const AdjustSpec& s, int64_t id, uint64_t seed) {
  Stream stream(seed, kSequence, static_cast<uint64_t>(id));
  RowSequence of;
  of.tokens.resize(static_cast<size_t>(2 + stream.below(kMaxLen - 2)));
  const int32_t most = std::min<int32_t>(static_cast<int32_t>(of.tokens.size()), kWindowRows);
  of.num_drafts = stream.one_in(3) ? 0 : stream.below(most);
  // Few different tokens, so that they repeat; some at the edges of the vocabulary.
  const int32_t spread = std::min(s.vocab_size, 20);
  for (int32_t& token : of.tokens) {
    token = stream.one_in(4) ? s.vocab_size - 1 - stream.below(spread) : stream.below(spread);
  }
  return of;
}

Sampling adjustment_of(const AdjustSpec& s, const RowSequence& sequence, int64_t id,
                       uint64_t seed) {
  Stream stream(seed, kSampling, static_cast<uint64_t>(id));
  const int32_t settled = static_cast<int32_t>(sequence.tokens.size()) - sequence.num_drafts;
  Sampling of = {.prompt_len = 1 + stream.below(settled)};
  const bool is_mixed = s.kind == AdjustKind::kMixed;
  if (!is_mixed || stream.one_in(2)) of.repetition_penalty = one_of(stream, {0.7f, 1.1f, 1.3f});
  if (!is_mixed || stream.one_in(2)) of.presence_penalty = one_of(stream, {-1.5f, 0.1f, 0.7f});
  if (!is_mixed || stream.one_in(2)) of.frequency_penalty = one_of(stream, {-0.3f, 0.2f, 0.9f});
  if (!is_mixed) return of;
  if (stream.one_in(2)) {
    const int32_t most = std::min(s.vocab_size, kMaxLogitBias);
    const int32_t count = stream.one_in(3) ? most : stream.below(most + 1);
    const int32_t first = stream.below(s.vocab_size - count + 1);
    for (int32_t i = 0; i < count; ++i) of.bias.emplace_back(first + i, 3.0f * stream.normal());
    if (count > 0) of.bias[0].first = -1;
  }
  if (stream.one_in(3)) {
    const int32_t rare = stream.one_in(2) ? 100 : 2;
    for (int32_t token = 0; token < s.vocab_size; ++token) {
      if (stream.one_in(rare)) of.allowed.push_back(token);
    }
  }
  const int32_t num_bad_words = stream.one_in(4) ? kMaxBadWords : stream.below(6);
  for (int32_t i = 0; i < num_bad_words; ++i) {
    const int32_t length = static_cast<int32_t>(sequence.tokens.size());
    const int32_t before = std::min(stream.below(8), length);
    const int64_t last = stream.one_in(3) ? stream.below(length - before + 1) : 0;
    const auto end = sequence.tokens.end() - last;
    std::vector<int32_t> word(end - before, end);
    word.push_back(stream.below(s.vocab_size + 3));
    of.bad_words.push_back(std::move(word));
  }
  of.min_tokens = stream.below(kMaxLen);
  of.stop_ids.resize(static_cast<size_t>(stream.below(kMaxStopIds + 1)));
  for (int32_t& token : of.stop_ids) token = stream.below(s.vocab_size + 3);
  if (stream.one_in(3)) {
    of.masks.resize(static_cast<size_t>(sequence.num_drafts) + 1);
    const int32_t rare = stream.one_in(2) ? 100 : 2;
    for (int32_t token = 0; token < s.vocab_size; ++token) {
      if (stream.one_in(rare)) of.masks.back().push_back(token);
    }
  }
  return of;
}

}  // namespace

OpInstance make_adjust(const AdjustSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int64_t stride = s.vocab_size + s.padding;
  const int32_t max_rows = rows.max_rows;
  const Handle num_rows = add_num_rows(op, rows);
  const auto values = [=](int64_t id, float* to) {
    fill_logits(id % 3 == 1 ? LogitKind::kHoles : LogitKind::kPlain, s.vocab_size, id, seed, to);
    std::fill_n(to + s.vocab_size, s.padding, 1.0f);
  };
  const Handle logits =
      op.add(row_array("logits", Element::kF32, Element::kF32, rows, stride, values, Role::kInOut));
  const auto num_slots = static_cast<size_t>(max_rows) + 1;
  SamplingArrays arrays(max_rows + 1, s.vocab_size);
  std::vector<int32_t> known_len(num_slots, 1);
  std::vector<int32_t> num_stop_ids(num_slots, kMaxStopIds);
  std::vector<int32_t> stop_ids(num_slots * kMaxStopIds, 0);
  std::vector<int32_t> history(num_slots * kMaxLen, 0);
  // Row i belongs to the last row of its window, and windows lie in the opposite order. What is not
  // computed points to the first, which is live.
  const auto first_of = [&](size_t i) {
    return (static_cast<size_t>(max_rows) - 1 - i) * kWindowRows;
  };
  std::vector<int32_t> row_index(static_cast<size_t>(max_rows), 0);
  const size_t num_pass_rows = static_cast<size_t>(max_rows) * kWindowRows;
  std::vector<int32_t> seq_slot(num_pass_rows, 0);
  std::vector<int32_t> positions(num_pass_rows, 0);
  std::vector<int32_t> token_ids(num_pass_rows, 0);
  const std::vector<int32_t> slots = slots_of(rows);
  for (size_t i = 0; i < rows.ids.size(); ++i) {
    const int64_t id = rows.ids[i];
    const int32_t slot = slots[i];
    const auto at = static_cast<size_t>(slot);
    const RowSequence sequence = sequence_of(s, id, seed);
    const auto length = static_cast<int32_t>(sequence.tokens.size());
    known_len[at] = length - sequence.num_drafts;
    const auto known_end = sequence.tokens.begin() + known_len[at];
    std::copy(sequence.tokens.begin(), known_end, history.begin() + slot * kMaxLen);
    const Sampling sampling = adjustment_of(s, sequence, id, seed);
    const bool is_plain =
        s.kind == AdjustKind::kNone || (s.kind == AdjustKind::kMixed && id % 4 == 2);
    if (!is_plain) arrays.set(slot, sampling);
    arrays.settle(slot, std::vector<int32_t>(sequence.tokens.begin(), known_end));
    num_stop_ids[at] = static_cast<int32_t>(sampling.stop_ids.size());
    std::copy(sampling.stop_ids.begin(), sampling.stop_ids.end(),
              stop_ids.begin() + slot * kMaxStopIds);
    for (int32_t r = 0; r <= sequence.num_drafts; ++r) {
      const size_t pass_row = first_of(i) + static_cast<size_t>(r);
      const int32_t position = known_len[at] - 1 + r;
      seq_slot[pass_row] = is_inert(id) ? -1 : slot;
      positions[pass_row] = is_inert(id) ? 0 : position;
      token_ids[pass_row] = sequence.tokens[static_cast<size_t>(position)];
      row_index[i] = static_cast<int32_t>(pass_row);
    }
  }
  for (size_t i = rows.ids.size(); i < row_index.size(); ++i) row_index[i] = row_index[0];

  const auto ints = [&](const char* name, const std::vector<int32_t>& values) {
    return op.add(int_array(name, Role::kInput, values));
  };
  const Handle at_index = ints("row_index", row_index);
  const Handle at_slot = ints("seq_slot", seq_slot);
  const Handle at_position = ints("positions", positions);
  const Handle at_token = ints("token_ids", token_ids);
  const Handle at_known_len = ints("known_len", known_len);
  const Handle at_num_stop_ids = ints("num_stop_ids", num_stop_ids);
  const Handle at_stop_ids = ints("stop_ids", stop_ids);
  const Handle at_history = ints("history", history);
  const SamplingHandles sampling(op, arrays, Role::kInput);
  op.set_run([=](auto& ctx, const Addresses& at) {
    adjust_logits(ctx,
                  AdjustLogitsParams{.num_rows = at.get<int32_t>(num_rows),
                                     .max_rows = max_rows,
                                     .logits = at.get<float>(logits),
                                     .logits_stride = stride,
                                     .row_index = at.get<int32_t>(at_index),
                                     .seq_slot = at.get<int32_t>(at_slot),
                                     .positions = at.get<int32_t>(at_position),
                                     .token_ids = at.get<int32_t>(at_token),
                                     .sequences = {.known_len = at.get<int32_t>(at_known_len),
                                                   .num_stop_ids = at.get<int32_t>(at_num_stop_ids),
                                                   .stop_ids = at.get<int32_t>(at_stop_ids),
                                                   .history = at.get<int32_t>(at_history),
                                                   .history_stride = kMaxLen},
                                     .sampling = sampling.at(at)});
  });
  compare_by_case(op, logits);
  return op;
}

// --- truncate_logits -----------------------------------------------------------------------------

namespace {

Sampling truncation_of(const TruncateSpec& s, int64_t id, uint64_t seed) {
  Stream stream(seed, kSampling, static_cast<uint64_t>(id));
  const bool is_mixed = s.kind == TruncateKind::kMixed;
  const auto has = [&](TruncateKind one, TruncateKind other) {
    return s.kind == one || s.kind == other || (is_mixed && stream.one_in(2));
  };
  Sampling of;
  if (s.kind == TruncateKind::kReached) {
    of.temperature = 1.44269504f;
    const float reached = one_of(stream, {0.5f, 0.75f, 1.0f - 0x1p-10f, 1.0f - 0x1p-20f});
    of.top_p = stream.one_in(2) ? reached : std::nextafter(reached, 1.0f);
    return of;
  }
  of.temperature = is_mixed ? one_of(stream, {0.0f, 0.1f, 0.7f, 1.0f, 1.5f, 30.0f}) : 0.8f;
  if (has(TruncateKind::kTopK, TruncateKind::kTopKTopP)) {
    of.top_k = is_mixed ? 1 + stream.below(stream.one_in(2) ? 60 : s.vocab_limit + 5) : 50;
  }
  if (has(TruncateKind::kTopP, TruncateKind::kTopKTopP)) {
    of.top_p =
        is_mixed ? one_of(stream, {1e-6f, 0.1f, 0.5f, 0.9f, 0.95f, 0.999f, 0.999999f}) : 0.9f;
  }
  if (has(TruncateKind::kMinP, TruncateKind::kMinP)) {
    of.min_p = is_mixed ? one_of(stream, {1e-6f, 0.01f, 0.1f, 0.5f, 1.0f}) : 0.05f;
  }
  return of;
}

}  // namespace

OpInstance make_truncate(const TruncateSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int64_t stride = s.vocab_limit + s.padding;
  const int32_t max_rows = rows.max_rows;
  const Handle num_rows = add_num_rows(op, rows);
  const auto values = [=](int64_t id, float* to) {
    fill_logits(s.logits, s.vocab_limit, id, seed, to);
    std::fill_n(to + s.vocab_limit, s.padding, std::numeric_limits<float>::infinity());
  };
  const auto logit_rows = [&](const char* name, Role role) {
    return op.add(row_array(name, Element::kF32, Element::kF32, rows, stride, values, role));
  };
  const Handle logits = logit_rows("logits", Role::kInOut);
  const Handle original = s.copies_logits ? logit_rows("original", Role::kInput) : kNoArray;
  SamplingArrays arrays(max_rows + 1, /*vocab_size=*/1);
  const std::vector<int32_t> slots = slots_of(rows);
  // Row i belongs to pass row 2 (max - 1 - i); what is not computed to the first, which is live.
  std::vector<int32_t> row_index(static_cast<size_t>(max_rows), 0);
  std::vector<int32_t> seq_slot(2 * static_cast<size_t>(max_rows), -1);
  for (size_t i = 0; i < rows.ids.size(); ++i) {
    const int64_t id = rows.ids[i];
    const auto pass_row = 2 * (static_cast<size_t>(max_rows) - 1 - i);
    row_index[i] = static_cast<int32_t>(pass_row);
    const bool is_mixed = s.kind == TruncateKind::kMixed;
    seq_slot[pass_row] = is_mixed && is_inert(id) ? -1 : slots[i];
    if (is_mixed && id % 6 == 4) continue;  // nothing to do there
    if (s.kind != TruncateKind::kNone) arrays.set(slots[i], truncation_of(s, id, seed));
  }
  for (size_t i = rows.ids.size(); i < row_index.size(); ++i) row_index[i] = row_index[0];
  const Handle at_index = op.add(int_array("row_index", Role::kInput, row_index));
  const Handle at_slot = op.add(int_array("seq_slot", Role::kInput, seq_slot));
  const SamplingHandles sampling(op, arrays, Role::kInput);
  op.set_run([=](auto& ctx, const Addresses& at) {
    if (original != kNoArray) {
      copy_rows(ctx, CopyRowsParams{.num_rows = at.get<int32_t>(num_rows),
                                    .max_rows = max_rows,
                                    .row_index = nullptr,
                                    .x = at.raw(original),
                                    .x_stride = stride,
                                    .y = at.raw(logits),
                                    .y_stride = stride,
                                    .width = static_cast<int32_t>(stride)});
    }
    truncate_logits(ctx, TruncateLogitsParams{.num_rows = at.get<int32_t>(num_rows),
                                              .max_rows = max_rows,
                                              .logits = at.get<float>(logits),
                                              .logits_stride = stride,
                                              .vocab_limit = s.vocab_limit,
                                              .row_index = at.get<int32_t>(at_index),
                                              .seq_slot = at.get<int32_t>(at_slot),
                                              .temperatures = at.get<float>(sampling.temperature),
                                              .sampling = sampling.at(at)});
  });
  compare_by_case(op, logits);
  return op;
}

}  // namespace paceline::testing
