// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which rows are raw_logits and rated, and what a logit is worth: the one specification that the
// CPU loops over and that CUDA threads run.

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "base/ordered.h"
#include "sample/logprobs.h"
#include "sample/truncate_rules.h"
#include "wire/sequence_state.h"

namespace paceline {

// Whether the pipeline writes over the logits of a slot.
[[nodiscard]] PACELINE_HOST_DEVICE inline bool changes_logits(const SamplingState& s,
                                                              int32_t seq_slot) {
  return s.adjusts[seq_slot] != 0 || s.truncates[seq_slot] != 0;
}

[[nodiscard]] PACELINE_HOST_DEVICE inline bool is_row_saved(const SaveRawLogitsParams& p,
                                                            int32_t row) {
  const int32_t seq_slot = p.seq_slot[p.row_index[row]];
  return seq_slot >= 0 && p.sampling.num_logprobs[seq_slot] >= 0 &&
         (p.all_change || changes_logits(p.sampling, seq_slot));
}

// A row to be rated.
struct RatedRow {
  int32_t token;        // -1: nothing is to be done
  int32_t num_best;     // most probable tokens that are wanted beside it
  const float* logits;  // [vocab_size]
  TokenLogprob* to;     // [1 + num_best]
};

// Rows that may have to be rated: those of every window, then those of prompts.
[[nodiscard]] PACELINE_HOST_DEVICE inline int32_t num_ratable_rows(const TokenLogprobsParams& p) {
  return p.max_seqs * p.max_window_rows + p.max_prompt_rows;
}

[[nodiscard]] PACELINE_HOST_DEVICE inline RatedRow rated_row(const TokenLogprobsParams& p,
                                                             int32_t index) {
  const SamplingState& s = p.sampling;
  RatedRow rated = {-1, 0, nullptr, nullptr};
  const int32_t num_window_rows = p.max_seqs * p.max_window_rows;
  int32_t row = 0;
  if (index < num_window_rows) {
    const int32_t i = index / p.max_window_rows;
    const int32_t j = index % p.max_window_rows;
    if (i >= p.inputs.counts->num_seqs) return rated;
    const int32_t seq_slot = p.inputs.seq_slot[i];
    if (s.num_logprobs[seq_slot] < 0 || j >= p.results[i].emitted_len) return rated;
    row = p.inputs.logit_indptr[i] + j;
    rated.token = p.results[i].tokens[j];
    rated.num_best = s.num_logprobs[seq_slot];
    rated.logits = p.all_change || changes_logits(s, seq_slot) ? p.raw_logits : p.logits;
  } else {
    const int32_t i = index - num_window_rows;
    row = p.inputs.counts->num_logit_rows + i;
    if (row >= p.inputs.counts->num_all_logit_rows) return rated;
    const int32_t seq_slot = p.seq_slot[p.inputs.logit_rows[row]];
    if (seq_slot < 0 || s.num_prompt_logprobs[seq_slot] < 0) return rated;
    rated.token = p.inputs.prompt_targets[i];
    rated.num_best = s.num_prompt_logprobs[seq_slot];
    rated.logits = p.logits;
  }
  if (rated.num_best > s.vocab_size) rated.num_best = s.vocab_size;
  rated.logits += row * p.logits_stride;
  rated.to = p.logprobs + int64_t{row} * (1 + p.max_logprobs);
  return rated;
}

// exp(logit - highest) in units of 2^-40, cut; logits are comparable. Where the highest is +inf it
// is 1 for its equals and 0 for all others.
[[nodiscard]] PACELINE_HOST_DEVICE inline uint64_t share_of(float highest, float logit) {
  const SoftmaxWeights weights = softmax_weights_of(/*highest=*/0.0f, /*temperature=*/1.0f);
  return weight_of(weights, logit == highest ? 0.0f : logit - highest);
}

// The logprob of a comparable logit; `total` is the sum of all shares.
[[nodiscard]] PACELINE_HOST_DEVICE inline float logprob_of(float logit, float highest,
                                                           uint64_t total) {
  constexpr double kLogUnit = -27.725887222397812;  // log(2^-40)
  if (to_ordered(highest) == kNoLogitKey) return float_of(0x7fc00000u);
  const double distance =
      logit == highest ? 0.0 : static_cast<double>(logit) - static_cast<double>(highest);
  return static_cast<float>(distance - (log(static_cast<double>(total)) + kLogUnit));
}

// Candidates are numbers, the better the larger: by logit, then by lowest id. Never 0.
[[nodiscard]] PACELINE_HOST_DEVICE inline uint64_t best_candidate(float comparable_logit,
                                                                  int32_t id) {
  return uint64_t{to_ordered(comparable_logit)} << 32 | ~static_cast<uint32_t>(id);
}
[[nodiscard]] PACELINE_HOST_DEVICE inline float logit_of(uint64_t candidate) {
  return from_ordered(static_cast<uint32_t>(candidate >> 32));
}

// Ranks of candidates that come best first: 1 and how many are more probable, so that equals share
// one.
struct Ranking {
  int32_t place = 0;
  int32_t rank = 0;
  uint64_t before = 0;

  [[nodiscard]] PACELINE_HOST_DEVICE TokenLogprob next(uint64_t candidate, float highest,
                                                       uint64_t total) {
    ++place;
    if (candidate >> 32 != before >> 32) rank = place;
    before = candidate;
    return {static_cast<int32_t>(~static_cast<uint32_t>(candidate)),
            logprob_of(logit_of(candidate), highest, total), rank};
  }
};

}  // namespace paceline
