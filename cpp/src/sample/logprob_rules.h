// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which rows of raw logits are saved, which rows have logprobs computed, and how a logprob is
// computed: the single specification that the CPU loops over and CUDA threads run.

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "base/ordered.h"
#include "sample/logprobs.h"
#include "sample/truncate_rules.h"
#include "wire/sequence_state.h"

namespace paceline {

// Whether the logits pipeline overwrites the logits of a sequence slot.
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

// A row of logits whose logprobs are computed.
struct LogprobRow {
  int32_t token;        // -1: the row has no logprobs to compute
  int32_t num_best;     // number of most probable tokens to return with it
  const float* logits;  // [vocab_size]
  TokenLogprob* out;    // [1 + num_best]
};

// Upper bound of the rows with logprobs: first those of every window, then those of prompts.
[[nodiscard]] PACELINE_HOST_DEVICE inline int32_t max_logprob_rows(const TokenLogprobsParams& p) {
  return p.max_seqs * p.max_window_rows + p.max_prompt_rows;
}

[[nodiscard]] PACELINE_HOST_DEVICE inline LogprobRow logprob_row(const TokenLogprobsParams& p,
                                                                 int32_t index) {
  const SamplingState& s = p.sampling;
  LogprobRow result = {-1, 0, nullptr, nullptr};
  const int32_t num_window_rows = p.max_seqs * p.max_window_rows;
  int32_t row = 0;
  if (index < num_window_rows) {
    const int32_t i = index / p.max_window_rows;
    const int32_t j = index % p.max_window_rows;
    if (i >= p.inputs.counts->num_seqs) return result;
    const int32_t seq_slot = p.inputs.seq_slot[i];
    if (s.num_logprobs[seq_slot] < 0 || j >= p.results[i].emitted_len) return result;
    row = p.inputs.logit_indptr[i] + j;
    result.token = p.results[i].tokens[j];
    result.num_best = s.num_logprobs[seq_slot];
    result.logits = p.all_change || changes_logits(s, seq_slot) ? p.raw_logits : p.logits;
  } else {
    const int32_t i = index - num_window_rows;
    row = p.inputs.counts->num_logit_rows + i;
    if (row >= p.inputs.counts->num_all_logit_rows) return result;
    const int32_t seq_slot = p.seq_slot[p.inputs.logit_rows[row]];
    if (seq_slot < 0 || s.num_prompt_logprobs[seq_slot] < 0) return result;
    result.token = p.inputs.prompt_targets[i];
    result.num_best = s.num_prompt_logprobs[seq_slot];
    result.logits = p.logits;
  }
  if (result.num_best > s.vocab_size) result.num_best = s.vocab_size;
  result.logits += row * p.logits_stride;
  result.out = p.logprobs + int64_t{row} * (1 + p.max_logprobs);
  return result;
}

// exp(logit - highest) in units of 2^-40, rounded down; both logits are comparable. If `highest` is
// +inf, the weight is 1 for logits of +inf and 0 for all others.
[[nodiscard]] PACELINE_HOST_DEVICE inline uint64_t logprob_weight(float highest, float logit) {
  const SoftmaxWeights weights = softmax_weights_of(/*highest=*/0.0f, /*temperature=*/1.0f);
  return weight_of(weights, logit == highest ? 0.0f : logit - highest);
}

// The logprob of a comparable logit. `total` is the sum of the weights of all logits.
[[nodiscard]] PACELINE_HOST_DEVICE inline float logprob_of(float logit, float highest,
                                                           uint64_t total) {
  constexpr double kLogUnit = -27.725887222397812;  // log(2^-40)
  if (to_ordered(highest) == kNoLogitKey) return float_of(0x7fc00000u);
  const double distance =
      logit == highest ? 0.0 : static_cast<double>(logit) - static_cast<double>(highest);
  return static_cast<float>(distance - (log(static_cast<double>(total)) + kLogUnit));
}

// A candidate encodes a logit and an id as one number; a higher number is a better candidate: the
// higher logit, then the lower id. It is never 0.
[[nodiscard]] PACELINE_HOST_DEVICE inline uint64_t best_candidate(float comparable_logit,
                                                                  int32_t id) {
  return uint64_t{to_ordered(comparable_logit)} << 32 | ~static_cast<uint32_t>(id);
}
[[nodiscard]] PACELINE_HOST_DEVICE inline float logit_of(uint64_t candidate) {
  return from_ordered(static_cast<uint32_t>(candidate >> 32));
}

// Assigns ranks to candidates that arrive best first. The rank is 1 + the number of more probable
// tokens, so equal logits share a rank.
struct Ranking {
  int32_t index = 0;
  int32_t rank = 0;
  uint64_t previous = 0;

  [[nodiscard]] PACELINE_HOST_DEVICE TokenLogprob next(uint64_t candidate, float highest,
                                                       uint64_t total) {
    ++index;
    if (candidate >> 32 != previous >> 32) rank = index;
    previous = candidate;
    return {static_cast<int32_t>(~static_cast<uint32_t>(candidate)),
            logprob_of(logit_of(candidate), highest, total), rank};
  }
};

}  // namespace paceline
