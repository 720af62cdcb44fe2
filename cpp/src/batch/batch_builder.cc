// SPDX-License-Identifier: Apache-2.0
#include "batch/batch_builder.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "batch/iteration_inputs.h"
#include "request/sequence.h"
#include "scheduler/iteration_plan.h"
#include "wire/batch_shape.h"
#include "wire/sequence_state.h"

namespace paceline {
namespace {

bool drafts(RowKind kind) { return kind == RowKind::kDecode || kind == RowKind::kPrefillFinal; }

// Rows of a sequence in the drafter's first pass: its prefill rides along with the target's.
int32_t num_first_rows(const PlannedSequence& planned, const BatchShape& shape) {
  if (shape.num_draft_tokens == 0 || shape.first_rows == FirstRows::kNone) return 0;
  if (shape.first_rows == FirstRows::kLast) return drafts(planned.kind) ? 1 : 0;
  switch (planned.kind) {
    case RowKind::kDecode:
      return shape.first_rows_per_decode();
    case RowKind::kPrefillFinal:
      return planned.num_rows + (shape.first_rows == FirstRows::kNewest ? 1 : 0);
    case RowKind::kPrefillPartial:
      return planned.num_rows;
    case RowKind::kScore:
      return 0;
  }
  return 0;
}

bool adjusts(const Sequence& sequence) {
  const SamplingOptions& s = sequence.sampling;
  const bool has_penalty =
      s.repetition_penalty != 1 || s.presence_penalty != 0 || s.frequency_penalty != 0;
  const bool has_bans = !s.bad_words.empty() || !sequence.allowed.empty() || s.min_tokens > 0;
  // Scores are the target's logits as they are.
  return !sequence.is_score && (has_penalty || has_bans || !s.logit_bias.empty());
}

bool truncates(const Sequence& sequence) {
  const SamplingOptions& s = sequence.sampling;
  return !sequence.is_score && (s.top_k > 0 || s.top_p < 1 || s.min_p > 0);
}

bool wants_logprobs(const Sequence& sequence) {
  return sequence.sampling.logprobs >= 0 || sequence.sampling.prompt_logprobs >= 0;
}

// Appends the sequence's lists to `lists`.
SequenceReset reset_of(const Sequence& sequence, std::vector<int32_t>& lists) {
  const SamplingOptions& s = sequence.sampling;
  if (sequence.is_score) return {.seq_slot = sequence.seq_slot, .limit = sequence.limit};
  SequenceReset reset{.seq_slot = sequence.seq_slot,
                      .limit = sequence.limit,
                      .seed = s.seed,
                      .temperature = static_cast<float>(s.temperature),
                      .num_stop_ids = static_cast<int32_t>(s.stop_token_ids.size()),
                      .adjusts = adjusts(sequence) ? 1 : 0,
                      .truncates = truncates(sequence) ? 1 : 0,
                      .prompt_len = sequence.prompt_len,
                      .min_tokens = s.min_tokens,
                      .top_k = s.top_k,
                      .top_p = static_cast<float>(s.top_p),
                      .min_p = static_cast<float>(s.min_p),
                      .repetition_penalty = static_cast<float>(s.repetition_penalty),
                      .presence_penalty = static_cast<float>(s.presence_penalty),
                      .frequency_penalty = static_cast<float>(s.frequency_penalty),
                      .num_logprobs = s.logprobs,
                      .num_prompt_logprobs = s.prompt_logprobs,
                      .first_list_word = static_cast<int32_t>(lists.size()),
                      .num_bias = static_cast<int32_t>(s.logit_bias.size()),
                      .num_bad_words = static_cast<int32_t>(s.bad_words.size()),
                      .has_allowed = sequence.allowed.empty() ? 0 : 1};
  std::copy(s.stop_token_ids.begin(), s.stop_token_ids.end(), reset.stop_ids);
  for (const LogitBias& bias : s.logit_bias) lists.push_back(bias.token);
  for (const LogitBias& bias : s.logit_bias) lists.push_back(std::bit_cast<int32_t>(bias.bias));
  for (const std::vector<int32_t>& word : s.bad_words) {
    reset.num_bad_word_tokens += static_cast<int32_t>(word.size());
    lists.push_back(reset.num_bad_word_tokens);
  }
  for (const std::vector<int32_t>& word : s.bad_words) {
    lists.insert(lists.end(), word.begin(), word.end());
  }
  for (const uint32_t bits : sequence.allowed) lists.push_back(std::bit_cast<int32_t>(bits));
  return reset;
}

// Appends the rows whose next token is rated to the rows of logits, behind those that draw.
void add_prompt_rows(const IterationPlan& plan, const BatchShape& shape, IterationInputs& inputs) {
  inputs.num_prompt_rows = 0;
  for (int32_t i = 0; i < inputs.num_seqs; ++i) {
    const PlannedSequence& planned = plan.sequences[i];
    for (int32_t row = 0; row < planned.num_prompt_rows; ++row) {
      const int32_t at = inputs.num_prompt_rows++;
      PACELINE_CHECK(
          at < shape.max_prompt_rows && inputs.num_logit_rows + at < shape.max_logit_rows,
          inputs.num_logit_rows, " + ", at, " rows of logits of ", shape.max_logit_rows,
          ", of prompts ", shape.max_prompt_rows);
      inputs.logit_rows[inputs.num_logit_rows + at] = inputs.verify_indptr[i] + row;
      inputs.prompt_targets[at] = planned.sequence->tokens[planned.start + row + 1];
    }
  }
}

}  // namespace

void reserve_inputs(IterationInputs& inputs, const BatchShape& shape) {
  inputs.seq_slot.resize(shape.max_seqs);
  inputs.kind.resize(shape.max_seqs);
  inputs.prefill_start.resize(shape.max_seqs);
  inputs.verify_indptr.resize(shape.max_seqs + 1);
  inputs.first_indptr.resize(shape.max_seqs + 1);
  inputs.logit_indptr.resize(shape.max_seqs + 1);
  inputs.next_token.resize(shape.max_seqs);
  inputs.prefill_tokens.resize(shape.max_verify_rows);
  inputs.logit_rows.resize(shape.max_logit_rows);
  inputs.prompt_targets.resize(shape.max_prompt_rows);
  inputs.resets.reserve(shape.max_seqs);
  inputs.forks.reserve(shape.max_seqs);
}

void build_batch(const IterationPlan& plan, const BatchShape& shape, IterationInputs& inputs) {
  inputs.iteration = plan.iteration;
  inputs.has_prefill = false;
  inputs.has_logit_work = false;
  inputs.num_seqs = static_cast<int32_t>(plan.sequences.size());
  inputs.num_drafting = 0;
  inputs.resets.clear();
  inputs.lists.clear();
  inputs.score_copies.clear();
  inputs.table_writes.assign(plan.table_writes.begin(), plan.table_writes.end());
  inputs.forks.assign(plan.forks.begin(), plan.forks.end());
  inputs.block_copies.assign(plan.block_copies.begin(), plan.block_copies.end());
  PACELINE_CHECK(inputs.num_seqs <= shape.max_seqs, inputs.num_seqs, " of ", shape.max_seqs);

  int32_t verify_row = 0;
  int32_t first_row = 0;
  int32_t logit_row = 0;
  for (int32_t i = 0; i < inputs.num_seqs; ++i) {
    const PlannedSequence& planned = plan.sequences[i];
    const Sequence& sequence = *planned.sequence;
    inputs.seq_slot[i] = sequence.seq_slot;
    inputs.kind[i] = static_cast<int32_t>(planned.kind);
    inputs.prefill_start[i] = planned.start;
    inputs.next_token[i] = 0;
    inputs.verify_indptr[i] = verify_row;
    inputs.first_indptr[i] = first_row;
    inputs.logit_indptr[i] = logit_row;
    inputs.has_logit_work |= adjusts(sequence) || truncates(sequence) || wants_logprobs(sequence);
    if (planned.resets_state) inputs.resets.push_back(reset_of(sequence, inputs.lists));
    PACELINE_CHECK(verify_row + planned.num_rows <= shape.max_verify_rows, verify_row, " + ",
                   planned.num_rows, " rows of ", shape.max_verify_rows);

    if (planned.kind != RowKind::kDecode) {
      inputs.has_prefill = true;
      const auto next = static_cast<size_t>(planned.start + planned.num_rows);
      inputs.next_token[i] = next < sequence.tokens.size() ? sequence.tokens[next] : 0;
      std::copy_n(sequence.tokens.begin() + planned.start, planned.num_rows,
                  inputs.prefill_tokens.begin() + verify_row);
    }
    // Rows whose logits are needed: all of a window, the last of a prompt, all of a score.
    const int32_t skipped = planned.kind == RowKind::kPrefillFinal     ? planned.num_rows - 1
                            : planned.kind == RowKind::kPrefillPartial ? planned.num_rows
                                                                       : 0;
    PACELINE_CHECK(logit_row + planned.num_rows - skipped <= shape.max_logit_rows, logit_row, " + ",
                   planned.num_rows - skipped, " rows of logits of ", shape.max_logit_rows);
    if (planned.kind == RowKind::kScore) {
      inputs.score_copies.push_back({.first_logit_row = logit_row,
                                     .num_rows = planned.num_rows,
                                     .destination = sequence.logits,
                                     .destination_row = planned.start});
    }
    for (int32_t row = skipped; row < planned.num_rows; ++row) {
      inputs.logit_rows[logit_row++] = verify_row + row;
    }
    const int32_t num_first = num_first_rows(planned, shape);
    // Row i of the first pass reads what row i of the verify pass has left behind.
    PACELINE_CHECK(shape.first_rows != FirstRows::kWindow || num_first == 0 ||
                       (first_row == verify_row && num_first == planned.num_rows),
                   "first rows ", first_row, ", verify rows ", verify_row);
    verify_row += planned.num_rows;
    first_row += num_first;
    if (drafts(planned.kind)) {
      PACELINE_CHECK(inputs.num_drafting == i, "drafting sequences come first");
      ++inputs.num_drafting;
    }
  }
  PACELINE_CHECK(inputs.has_prefill || inputs.forks.empty(), inputs.forks.size(),
                 " forks without prefill rows");
  inputs.verify_indptr[inputs.num_seqs] = verify_row;
  inputs.first_indptr[inputs.num_seqs] = first_row;
  inputs.logit_indptr[inputs.num_seqs] = logit_row;
  inputs.num_verify_rows = verify_row;
  inputs.num_first_rows = first_row;
  inputs.num_logit_rows = logit_row;
  add_prompt_rows(plan, shape, inputs);
}

}  // namespace paceline
