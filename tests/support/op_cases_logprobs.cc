// SPDX-License-Identifier: Apache-2.0
//
// Builders of the ops that compute logprobs. Both backends choose the same tokens and ranks; a
// logprob takes one logarithm, which may differ in its last bit.

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "sample/logprobs.h"
#include "support/host_batch.h"
#include "support/op_cases.h"
#include "support/row_arrays.h"
#include "support/sampling_handles.h"
#include "wire/sequence_result.h"

namespace paceline::testing {
namespace {

enum Purpose : uint64_t { kRated = 300, kKept };

constexpr int32_t kWindowRows = 3;
constexpr int32_t kFirstPromptRow = 2;  // rows of logits that lie before those of prompts

// Sequence slots in another order than the rows; no row has slot 0.
std::vector<int32_t> slots_of(const Rows& rows) {
  std::vector<int32_t> slots(static_cast<size_t>(rows.max_rows));
  std::iota(slots.begin(), slots.end(), 1);
  std::rotate(slots.begin(), slots.begin() + rows.max_rows / 3, slots.end());
  return slots;
}

bool is_inert(int64_t id) { return id % 17 == 9; }
bool wants_nothing(int64_t id) { return id % 6 == 4; }

// The number of top tokens that are wanted besides the given one.
int32_t num_best(const LogprobSpec& s, Stream& stream) {
  const int32_t choices[] = {0, 1, std::min(5, s.max_logprobs), s.max_logprobs};
  return choices[stream.below(4)];
}

// Logits of a sequence's windows: the raw ones or the processed ones.
void fill_row(const LogprobSpec& s, int64_t id, uint64_t seed, float* to) {
  fill_logits(s.logits, s.vocab_size, id, seed, to);
  std::fill_n(to + s.vocab_size, s.padding, std::numeric_limits<float>::infinity());
}

// Tokens and ranks are equal; logprobs up to rounding.
void compare_entries(OpInstance& op, Handle entries) {
  const auto which = static_cast<size_t>(entries);
  op.arrays[which].compare = Compare::kByCase;
  op.check = [which, count = op.arrays[which].count, length = op.arrays[which].row_length](
                 const ArrayBytes& cpu, const ArrayBytes& cuda, int64_t*) -> std::string {
    constexpr int64_t kEntryWords = sizeof(TokenLogprob) / 4;
    constexpr int64_t kLogprobWord = offsetof(TokenLogprob, logprob) / 4;
    for (int64_t i = 0; i < count; ++i) {
      int32_t want = 0;
      int32_t got = 0;
      std::memcpy(&want, cpu[which].data() + 4 * i, 4);
      std::memcpy(&got, cuda[which].data() + 4 * i, 4);
      if (want == got) continue;
      float want_logprob = 0;
      float got_logprob = 0;
      std::memcpy(&want_logprob, &want, 4);
      std::memcpy(&got_logprob, &got, 4);
      const float bound = 2 * std::numeric_limits<float>::epsilon() * std::fabs(want_logprob);
      const bool is_close = is_near(want_logprob, got_logprob, bound) ||
                            (std::isnan(want_logprob) && std::isnan(got_logprob));
      if (i % kEntryWords == kLogprobWord && is_close) continue;
      return "row " + std::to_string(i / length) + ", word " + std::to_string(i % length) + ": " +
             std::to_string(got) + " (" + std::to_string(got_logprob) + "), the CPU has " +
             std::to_string(want) + " (" + std::to_string(want_logprob) + ")";
    }
    return {};
  };
}

struct StagedHandles {
  Handle counts, seq_slot, logit_indptr, logit_rows, prompt_targets;
};

// The op on arrays that the builders below have made; a row of `rows` has `rows_per_id` rows of
// logits and of entries, from `first_row` on.
void set_op(OpInstance& op, const LogprobSpec& s, const Rows& rows, int32_t first_row,
            int32_t rows_per_id, const StagedHandles& staged, Handle pass_slots, Handle results,
            Handle logits, Handle raw_logits, const SamplingArrays& arrays, int32_t max_seqs,
            int32_t max_prompt_rows) {
  const int64_t stride = s.vocab_size + s.padding;
  const int64_t row_words = (1 + s.max_logprobs) * int64_t{sizeof(TokenLogprob) / 4};
  const int64_t num_rows = first_row + int64_t{rows.max_rows} * rows_per_id;
  OpArray output = output_array("entries", Element::kI32, Element::kI32, num_rows * row_words,
                                rows_per_id * row_words);
  if (first_row > 0) {
    for (size_t i = 0; i < rows.ids.size(); ++i) {
      output.row_at.push_back(first_row + static_cast<int64_t>(i));
    }
  }
  const Handle entries = op.add(std::move(output));
  const SamplingHandles sampling(op, arrays, Role::kInput);
  op.set_run([=](auto& ctx, const Addresses& at) {
    token_logprobs(ctx, TokenLogprobsParams{
                            .inputs = {.counts = at.get<IterationCounts>(staged.counts),
                                       .seq_slot = at.get<int32_t>(staged.seq_slot),
                                       .logit_indptr = at.get<int32_t>(staged.logit_indptr),
                                       .logit_rows = at.get<int32_t>(staged.logit_rows),
                                       .prompt_targets = at.get<int32_t>(staged.prompt_targets)},
                            .results = at.get<SequenceResult>(results),
                            .seq_slot = at.get<int32_t>(pass_slots),
                            .logits = at.get<float>(logits),
                            .raw_logits = at.get<float>(raw_logits),
                            .logits_stride = stride,
                            .max_seqs = max_seqs,
                            .max_window_rows = kWindowRows,
                            .max_prompt_rows = max_prompt_rows,
                            .max_logprobs = s.max_logprobs,
                            .sampling = sampling.at(at),
                            .logprobs = at.get<TokenLogprob>(entries),
                            .all_change = s.all_change});
  });
  compare_entries(op, entries);
}

}  // namespace

OpInstance make_emitted_logprobs(const LogprobSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  op.num_rows = static_cast<int32_t>(rows.ids.size());
  const int64_t stride = s.vocab_size + s.padding;
  const auto max_rows = static_cast<size_t>(rows.max_rows);
  // Entries that no row may read hold values that would show in the output.
  const auto windows = [&](const char* name, bool is_saved) {
    return op.add(row_array(name, Element::kF32, Element::kF32, rows, kWindowRows * stride,
                            [=](int64_t id, float* to) {
                              const bool is_changed = s.all_change || id % 2 == 1;
                              for (int32_t j = 0; j < kWindowRows; ++j) {
                                if (is_changed == is_saved) {
                                  fill_row(s, id * kWindowRows + j, seed, to + j * stride);
                                } else {
                                  std::fill_n(to + j * stride, stride, 7.0f);
                                }
                              }
                            }));
  };
  const Handle logits = windows("logits", false);
  const Handle raw_logits = windows("raw_logits", true);
  SamplingArrays arrays(rows.max_rows + 1, /*vocab_size=*/s.vocab_size);
  std::vector<SequenceResult> results(max_rows);
  std::vector<int32_t> logit_indptr(max_rows + 1);
  for (size_t i = 0; i <= max_rows; ++i) logit_indptr[i] = static_cast<int32_t>(i) * kWindowRows;
  const std::vector<int32_t> slots = slots_of(rows);
  for (size_t i = 0; i < rows.ids.size(); ++i) {
    const int64_t id = rows.ids[i];
    const auto slot = static_cast<size_t>(slots[i]);
    Stream stream(seed, kRated, static_cast<uint64_t>(id));
    if (!wants_nothing(id)) arrays.num_logprobs[slot] = num_best(s, stream);
    // Either of the two flags says that the logits were changed.
    arrays.adjusts[slot] = id % 4 == 1 ? 1 : 0;
    arrays.truncates[slot] = id % 4 == 3 ? 1 : 0;
    SequenceResult& result = results[i];
    result.emitted_len = is_inert(id) ? 0 : 1 + stream.below(kWindowRows);
    for (int32_t j = 0; j < kWindowRows; ++j) {
      result.tokens[j] = stream.one_in(4)   ? 0
                         : stream.one_in(3) ? s.vocab_size - 1
                                            : stream.below(s.vocab_size);
    }
  }
  constexpr size_t kResultWords = sizeof(SequenceResult) / 4;
  std::vector<int32_t> result_words(max_rows * kResultWords);
  std::memcpy(result_words.data(), results.data(), result_words.size() * 4);
  const auto ints = [&](const char* name, const std::vector<int32_t>& values) {
    return op.add(int_array(name, Role::kInput, values));
  };
  const int32_t num_logit_rows = rows.max_rows * kWindowRows;
  const IterationCounts counts = {.num_seqs = rows.claimed,
                                  .num_logit_rows = num_logit_rows,
                                  .num_all_logit_rows = num_logit_rows};
  const StagedHandles staged = {.counts = ints("counts", words_of(counts)),
                                .seq_slot = ints("staged_slots", slots),
                                .logit_indptr = ints("logit_indptr", logit_indptr),
                                .logit_rows = ints("logit_rows", {-1}),
                                .prompt_targets = ints("prompt_targets", {-1})};
  const Handle at_results = ints("results", result_words);
  set_op(op, s, rows, /*first_row=*/0, kWindowRows, staged, ints("pass_slots", {-1}), at_results,
         logits, raw_logits, arrays, rows.max_rows, /*max_prompt_rows=*/0);
  return op;
}

OpInstance make_prompt_logprobs(const LogprobSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  op.num_rows = static_cast<int32_t>(rows.ids.size());
  const int64_t stride = s.vocab_size + s.padding;
  const auto max_rows = static_cast<size_t>(rows.max_rows);
  const int64_t count = (kFirstPromptRow + int64_t{rows.max_rows}) * stride;
  OpArray array = float_array("logits", Element::kF32, Element::kF32, count, [=](float* to) {
    std::fill_n(to, count, std::numeric_limits<float>::quiet_NaN());
    for (size_t i = 0; i < rows.ids.size(); ++i) {
      const int64_t row = kFirstPromptRow + static_cast<int64_t>(i);
      fill_row(s, rows.ids[i], seed, to + row * stride);
    }
  });
  const Handle logits = op.add(std::move(array));
  const Handle raw_logits = op.add(float_array("raw_logits", Element::kF32, Element::kF32, 4,
                                               [](float* to) { std::fill_n(to, 4, 7.0f); }));
  SamplingArrays arrays(rows.max_rows + 1, s.vocab_size);
  // Row i belongs to pass row max - 1 - i; what is not computed to the first, which is live.
  std::vector<int32_t> logit_rows(max_rows + kFirstPromptRow, 0);
  std::vector<int32_t> pass_slots(max_rows, 0);
  std::vector<int32_t> targets(max_rows, 0);
  const std::vector<int32_t> slots = slots_of(rows);
  for (size_t i = 0; i < rows.ids.size(); ++i) {
    const int64_t id = rows.ids[i];
    Stream stream(seed, kRated, static_cast<uint64_t>(id));
    const size_t pass_row = max_rows - 1 - i;
    logit_rows[kFirstPromptRow + i] = static_cast<int32_t>(pass_row);
    pass_slots[pass_row] = is_inert(id) ? -1 : slots[i];
    targets[i] = stream.one_in(4) ? s.vocab_size - 1 : stream.below(s.vocab_size);
    const auto slot = static_cast<size_t>(slots[i]);
    if (!wants_nothing(id)) arrays.num_prompt_logprobs[slot] = num_best(s, stream);
    arrays.adjusts[slot] = id % 2 == 1 ? 1 : 0;  // irrelevant for a prompt
  }
  const auto ints = [&](const char* name, const std::vector<int32_t>& values) {
    return op.add(int_array(name, Role::kInput, values));
  };
  const IterationCounts counts = {.num_logit_rows = kFirstPromptRow,
                                  .num_all_logit_rows = kFirstPromptRow + rows.claimed};
  const StagedHandles staged = {.counts = ints("counts", words_of(counts)),
                                .seq_slot = ints("staged_slots", {0}),
                                .logit_indptr = ints("logit_indptr", {0, 0}),
                                .logit_rows = ints("logit_rows", logit_rows),
                                .prompt_targets = ints("prompt_targets", targets)};
  const Handle at_slots = ints("pass_slots", pass_slots);
  const Handle at_results = ints("results", std::vector<int32_t>(sizeof(SequenceResult) / 4, 0));
  set_op(op, s, rows, kFirstPromptRow, /*rows_per_id=*/1, staged, at_slots, at_results, logits,
         raw_logits, arrays, /*max_seqs=*/1, rows.max_rows);
  return op;
}

OpInstance make_save_raw_logits(const LogprobSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int64_t stride = s.vocab_size + s.padding;
  const int32_t max_rows = rows.max_rows;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle logits =
      op.add(row_array("logits", Element::kF32, Element::kF32, rows, stride,
                       [=](int64_t id, float* to) { fill_row(s, id, seed, to); }));
  // Float bits that are copied: NaN and infinities among them.
  const Handle raw_logits =
      op.add(output_array("raw_logits", Element::kI32, Element::kI32, max_rows * stride, stride));
  SamplingArrays arrays(max_rows + 1, s.vocab_size);
  std::vector<int32_t> row_index(static_cast<size_t>(max_rows), 0);
  std::vector<int32_t> pass_slots(static_cast<size_t>(max_rows), 0);
  const std::vector<int32_t> slots = slots_of(rows);
  for (size_t i = 0; i < rows.ids.size(); ++i) {
    const int64_t id = rows.ids[i];
    Stream stream(seed, kKept, static_cast<uint64_t>(id));
    const auto pass_row = static_cast<size_t>(max_rows) - 1 - i;
    row_index[i] = static_cast<int32_t>(pass_row);
    pass_slots[pass_row] = is_inert(id) ? -1 : slots[i];
    const auto slot = static_cast<size_t>(slots[i]);
    if (!wants_nothing(id)) arrays.num_logprobs[slot] = num_best(s, stream);
    arrays.adjusts[slot] = stream.below(2);
    arrays.truncates[slot] = stream.below(2);
  }
  const Handle at_index = op.add(int_array("row_index", Role::kInput, row_index));
  const Handle at_slots = op.add(int_array("pass_slots", Role::kInput, pass_slots));
  const SamplingHandles sampling(op, arrays, Role::kInput);
  op.set_run([=](auto& ctx, const Addresses& at) {
    save_raw_logits(ctx, SaveRawLogitsParams{.num_rows = at.get<int32_t>(num_rows),
                                             .max_rows = max_rows,
                                             .logits = at.get<float>(logits),
                                             .raw_logits = at.get<float>(raw_logits),
                                             .logits_stride = stride,
                                             .row_index = at.get<int32_t>(at_index),
                                             .seq_slot = at.get<int32_t>(at_slots),
                                             .sampling = sampling.at(at),
                                             .all_change = s.all_change});
  });
  return op;
}

}  // namespace paceline::testing
