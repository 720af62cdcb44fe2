// SPDX-License-Identifier: Apache-2.0
#include "batch/batch_builder.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "request/sequence.h"
#include "scheduler/iteration_plan.h"
#include "wire/batch_shape.h"
#include "wire/sequence_state.h"

namespace paceline {
namespace {

bool drafts(RowKind kind) { return kind == RowKind::kDecode || kind == RowKind::kPrefillFinal; }

// Rows of a sequence in the drafter's first pass. The drafter prefills the same chunk as the
// target, or misses it. In a plain iteration it has no rows for sequences that decode, except that
// a draft head follows them beside chunks, since its rows there are those of the verify pass.
int32_t num_first_rows(const PlannedSequence& planned, const IterationPlan& plan,
                       const BatchShape& shape) {
  const int32_t num_drafts = plan.num_drafts;
  if (shape.num_draft_tokens == 0 || shape.first_rows == FirstRows::kNone) return 0;
  if (shape.first_rows == FirstRows::kLast) return num_drafts > 0 && drafts(planned.kind) ? 1 : 0;
  // A chunk without the drafter. In a pass that drafts, its sequence still has a row, which is not
  // live, since the sequences that draw come first.
  if (planned.kind != RowKind::kDecode && !planned.is_followed) {
    return num_drafts > 0 && drafts(planned.kind) ? 1 : 0;
  }
  switch (planned.kind) {
    case RowKind::kDecode:
      if (num_drafts == 0) {
        return plan.follows_chunks ? planned.num_rows : 0;
      }
      if (planned.catch_up_start != kNoPart) return planned.num_missed;
      if (shape.follows_windows) return planned.num_missed + std::max(planned.num_rows, 2);
      return planned.num_missed + (shape.first_rows == FirstRows::kWindow
                                       ? planned.num_rows
                                       : shape.first_rows_per_decode(num_drafts));
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
  const bool has_bans = !s.bad_words.empty() || !sequence.allowed.empty() || s.min_tokens > 0 ||
                        sequence.needs_masks();
  // A score returns the unchanged logits of the target.
  return !sequence.is_score && (has_penalty || has_bans || !s.logit_bias.empty());
}

bool truncates(const Sequence& sequence) {
  const SamplingOptions& s = sequence.sampling;
  return !sequence.is_score && (s.top_k > 0 || s.top_p < 1 || s.min_p > 0);
}

bool wants_logprobs(const Sequence& sequence) {
  return sequence.sampling.logprobs >= 0 || sequence.sampling.prompt_logprobs >= 0;
}

// Returns the state in which `sequence` starts, and appends its lists to those of the batch.
SequenceReset reset_of(const Sequence& sequence, const InputCapacity& capacity,
                       StagedInputs& inputs) {
  const SamplingOptions& s = sequence.sampling;
  if (sequence.is_score) {
    return {.seq_slot = sequence.seq_slot, .limit = sequence.limit};
  }
  int32_t& num_words = inputs.counts->num_list_words;
  SequenceReset reset{.seq_slot = sequence.seq_slot,
                      .limit = sequence.limit,
                      .seed = s.seed,
                      .sources = sequence.sources,
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
                      .first_list_word = num_words,
                      .num_bias = static_cast<int32_t>(s.logit_bias.size()),
                      .num_bad_words = static_cast<int32_t>(s.bad_words.size()),
                      .has_allowed = sequence.allowed.empty() ? 0 : 1};
  std::copy(s.stop_token_ids.begin(), s.stop_token_ids.end(), reset.stop_ids);
  const auto append = [&](int32_t word) {
    PACELINE_CHECK(num_words < capacity.list_words, "sampling lists of more than ",
                   capacity.list_words, " words");
    inputs.lists[num_words++] = word;
  };
  for (const LogitBias& bias : s.logit_bias) append(bias.token);
  for (const LogitBias& bias : s.logit_bias) append(std::bit_cast<int32_t>(bias.bias));
  for (const std::vector<int32_t>& word : s.bad_words) {
    reset.num_bad_word_tokens += static_cast<int32_t>(word.size());
    append(reset.num_bad_word_tokens);
  }
  for (const std::vector<int32_t>& word : s.bad_words) {
    for (const int32_t token : word) append(token);
  }
  for (const uint32_t bits : sequence.allowed) append(std::bit_cast<int32_t>(bits));
  return reset;
}

// Appends the rows for prompt logprobs to the rows of logits, after those that draw.
void add_prompt_rows(const IterationPlan& plan, const BatchShape& shape, StagedInputs& inputs) {
  IterationCounts& counts = *inputs.counts;
  for (int32_t i = 0; i < counts.num_seqs; ++i) {
    const PlannedSequence& planned = plan.sequences[i];
    for (int32_t row = 0; row < planned.num_prompt_rows; ++row) {
      const int32_t index = counts.num_prompt_rows++;
      PACELINE_CHECK(
          index < shape.max_prompt_rows && counts.num_logit_rows + index < shape.max_logit_rows,
          "row ", index, " for prompt logprobs after ", counts.num_logit_rows,
          " rows of logits; max_prompt_rows is ", shape.max_prompt_rows, ", max_logit_rows is ",
          shape.max_logit_rows);
      inputs.logit_rows[counts.num_logit_rows + index] = inputs.verify_indptr[i] + row;
      inputs.prompt_targets[index] = planned.sequence->tokens[planned.start + row + 1];
    }
  }
}

// Appends the sequences that begin with blocks of the prefix cache to the forks.
void add_adoptions(const IterationPlan& plan, Batch& batch) {
  StagedInputs& inputs = batch.inputs;
  IterationCounts& counts = *inputs.counts;
  for (const PlannedSequence& planned : plan.sequences) {
    if (planned.num_adopted == 0) continue;
    const int32_t first = counts.num_adopted_tokens;
    PACELINE_CHECK(counts.num_forks < batch.capacity.seqs &&
                       first + planned.num_adopted <= batch.capacity.adopted_tokens,
                   first, " + ", planned.num_adopted, " adopted tokens; the ring entry holds ",
                   batch.capacity.adopted_tokens);
    inputs.forks[counts.num_forks++] = {.parent_seq_slot = -1,
                                        .seq_slot = planned.sequence->seq_slot,
                                        .num_tokens = planned.num_adopted,
                                        .first_token = first};
    std::copy_n(planned.sequence->tokens.begin(), planned.num_adopted,
                inputs.adopted_tokens + first);
    counts.num_adopted_tokens += planned.num_adopted;
  }
}

// Whether the rows of a planned sequence take the window that its guide has made.
bool takes_window(const PlannedSequence& planned) {
  const Sequence& sequence = *planned.sequence;
  return planned.kind == RowKind::kDecode
             ? sequence.guide != nullptr
             : planned.kind == RowKind::kPrefillFinal && sequence.needs_masks();
}

// Adds the windows of guided sequences. Where their masks do not fit, windows lose their last
// drafts; there is room for at least one mask for each sequence.
void add_windows(const IterationPlan& plan, Batch& batch) {
  StagedInputs& inputs = batch.inputs;
  IterationCounts& counts = *inputs.counts;
  int64_t num_masked = 0;
  for (const PlannedSequence& planned : plan.sequences) {
    if (takes_window(planned) && planned.sequence->needs_masks()) ++num_masked;
  }
  int32_t first_mask = 0;
  for (const PlannedSequence& planned : plan.sequences) {
    if (!takes_window(planned)) continue;
    const GuidedWindow& made = planned.sequence->window;
    PACELINE_CHECK(made.num_tokens == planned.sequence->known_len(), "a window for ",
                   made.num_tokens, " tokens; the sequence has ", planned.sequence->known_len());
    HostWindow window{.seq_slot = planned.sequence->seq_slot};
    if (planned.kind == RowKind::kDecode) {
      window.num_drafts = std::min(static_cast<int32_t>(made.drafts.size()), planned.num_rows - 1);
    }
    if (!made.masks.empty()) {
      const int64_t num_words =
          static_cast<int64_t>(made.masks.size()) / static_cast<int64_t>(made.drafts.size() + 1);
      const int64_t room = batch.capacity.mask_words / num_words - first_mask - num_masked + 1;
      PACELINE_CHECK(room > 0, "no room for mask ", first_mask);
      const int64_t num_masks = std::min<int64_t>(window.num_drafts + 1, room);
      window.num_drafts = static_cast<int32_t>(num_masks) - 1;
      window.first_mask = first_mask;
      std::copy_n(made.masks.begin(), num_masks * num_words, inputs.masks + counts.num_mask_words);
      counts.num_mask_words += static_cast<int32_t>(num_masks * num_words);
      first_mask += static_cast<int32_t>(num_masks);
      --num_masked;
    }
    std::copy_n(made.drafts.begin(), window.num_drafts, window.drafts);
    inputs.windows[counts.num_windows++] = window;
  }
}

// Adds a sequence's rows of logits, and the copies of logits and hidden states that a score
// returns.
void add_logit_rows(const PlannedSequence& planned, const BatchShape& shape, int32_t verify_row,
                    Batch& batch, int32_t& logit_row) {
  const Sequence& sequence = *planned.sequence;
  // Logits are needed for all rows of a verify window, the last row of a prompt and all rows of a
  // score that returns them.
  const bool is_score = planned.kind == RowKind::kScore;
  const bool has_logits =
      planned.kind != RowKind::kPrefillPartial && !(is_score && sequence.skips_logits);
  const int32_t skipped = !has_logits                              ? planned.num_rows
                          : planned.kind == RowKind::kPrefillFinal ? planned.num_rows - 1
                                                                   : 0;
  PACELINE_CHECK(logit_row + planned.num_rows - skipped <= shape.max_logit_rows, logit_row, " + ",
                 planned.num_rows - skipped, " rows of logits; max_logit_rows is ",
                 shape.max_logit_rows);
  if (is_score && has_logits) {
    batch.returns_logits = true;
    batch.score_copies.push_back({.first_logit_row = logit_row,
                                  .num_rows = planned.num_rows,
                                  .destination = sequence.logits,
                                  .device_destination = sequence.device_logits,
                                  .destination_row = planned.start});
  }
  if (!sequence.hidden_layers.empty()) {
    batch.hidden_copies.push_back({.first_verify_row = verify_row,
                                   .num_rows = planned.num_rows,
                                   .layers = sequence.hidden_layers,
                                   .destination = sequence.hidden_states,
                                   .destination_row = planned.start});
  }
  for (int32_t row = skipped; row < planned.num_rows; ++row) {
    batch.inputs.logit_rows[logit_row++] = verify_row + row;
  }
}

template <class T>
void copy_all(const char* what, const std::vector<T>& from, int32_t capacity, T* to,
              int32_t& count) {
  count = static_cast<int32_t>(from.size());
  PACELINE_CHECK(count <= capacity, count, " ", what, "; the ring entry holds ", capacity);
  std::copy(from.begin(), from.end(), to);
}

}  // namespace

void build_batch(const IterationPlan& plan, const BatchShape& shape, Batch& batch) {
  StagedInputs& inputs = batch.inputs;
  IterationCounts& counts = *inputs.counts;
  counts = IterationCounts{};
  counts.num_seqs = static_cast<int32_t>(plan.sequences.size());
  batch.num_drafts = plan.num_drafts;
  batch.has_prefill = plan.has_prefill;
  batch.has_logit_work = false;
  batch.returns_logits = false;
  batch.catches_up = false;
  batch.gathers_hidden = false;
  batch.keeps_hidden = plan.keeps_hidden;
  batch.drop_copies();
  copy_all("block table entries", plan.table_writes, batch.capacity.table_writes,
           inputs.table_writes, counts.num_table_writes);
  copy_all("forks", plan.forks, batch.capacity.seqs, inputs.forks, counts.num_forks);
  copy_all("block copies", plan.block_copies, batch.capacity.block_copies, inputs.block_copies,
           counts.num_block_copies);
  add_adoptions(plan, batch);
  add_windows(plan, batch);
  PACELINE_CHECK(counts.num_seqs <= shape.max_seqs, counts.num_seqs, " sequences; max_seqs is ",
                 shape.max_seqs);

  int32_t verify_row = 0;
  int32_t first_row = 0;
  int32_t logit_row = 0;
  for (int32_t i = 0; i < counts.num_seqs; ++i) {
    const PlannedSequence& planned = plan.sequences[i];
    const Sequence& sequence = *planned.sequence;
    inputs.seq_slot[i] = sequence.seq_slot;
    inputs.kind[i] = static_cast<int32_t>(planned.kind);
    inputs.prefill_start[i] =
        planned.kind == RowKind::kDecode ? planned.catch_up_start : planned.start;
    inputs.next_token[i] = 0;
    inputs.num_drafts[i] = planned.num_drafts;
    inputs.num_kept[i] = planned.num_kept;
    inputs.verify_indptr[i] = verify_row;
    inputs.first_indptr[i] = first_row;
    inputs.logit_indptr[i] = logit_row;
    batch.has_logit_work |= adjusts(sequence) || truncates(sequence) || wants_logprobs(sequence);
    if (planned.resets_state) {
      inputs.reset_seq_slots[counts.num_resets] = sequence.seq_slot;
      inputs.resets[counts.num_resets++] = reset_of(sequence, batch.capacity, inputs);
    }
    PACELINE_CHECK(verify_row + planned.num_rows <= shape.max_verify_rows, verify_row, " + ",
                   planned.num_rows, " rows; max_verify_rows is ", shape.max_verify_rows);

    if (planned.kind != RowKind::kDecode) {
      PACELINE_CHECK(plan.has_prefill, "a chunk in a plan without chunks");
      const auto next = static_cast<size_t>(planned.start + planned.num_rows);
      inputs.next_token[i] = next < sequence.tokens.size() ? sequence.tokens[next] : 0;
      std::copy_n(sequence.tokens.begin() + planned.start, planned.num_rows,
                  inputs.prefill_tokens + verify_row);
    }
    add_logit_rows(planned, shape, verify_row, batch, logit_row);
    const int32_t num_first = num_first_rows(planned, plan, shape);
    batch.catches_up |= planned.num_missed > 0;
    // Row i of the first pass reads the hidden states of row i of the verify pass, if the two
    // passes have the same rows.
    batch.gathers_hidden |=
        shape.first_rows == FirstRows::kWindow && num_first > 0 &&
        (first_row != verify_row || num_first != planned.num_rows || planned.num_missed > 0);
    verify_row += planned.num_rows;
    first_row += num_first;
    if (plan.num_drafts > 0 && drafts(planned.kind)) {
      PACELINE_CHECK(counts.num_drafting == i, "the sequences that draft must come first");
      ++counts.num_drafting;
    }
  }
  PACELINE_CHECK(batch.has_prefill || counts.num_forks == 0, counts.num_forks,
                 " forks without prefill rows");
  inputs.verify_indptr[counts.num_seqs] = verify_row;
  inputs.first_indptr[counts.num_seqs] = first_row;
  inputs.logit_indptr[counts.num_seqs] = logit_row;
  counts.num_verify_rows = verify_row;
  counts.num_first_rows = first_row;
  counts.num_logit_rows = logit_row;
  counts.num_prefill_tokens = batch.has_prefill ? verify_row : 0;
  add_prompt_rows(plan, shape, inputs);
  counts.num_all_logit_rows = counts.num_logit_rows + counts.num_prompt_rows;
}

}  // namespace paceline
