// SPDX-License-Identifier: Apache-2.0
#pragma once

// How adjust_logits changes one logit, and what it reads about a row: the single specification that
// the CPU loops over and CUDA threads run. A product that is added to something is written as fmaf,
// so that the rounding does not depend on the compiler.

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "sample/logits.h"
#include "wire/limits.h"
#include "wire/sequence_state.h"

namespace paceline {

// The sequence whose next token a row predicts.
struct AdjustedRow {
  int32_t seq_slot;  // -1: the row is not changed
  int32_t known_len;
  const int32_t* history;  // [known_len]
  int32_t num_drafts;
  const int32_t* drafts;  // [num_drafts] tokens at positions known_len and on; the last is the
                          // row's own input token

  // Number of tokens up to and including the row's own input token.
  [[nodiscard]] PACELINE_HOST_DEVICE int32_t length() const { return known_len + num_drafts; }
  [[nodiscard]] PACELINE_HOST_DEVICE int32_t token_at(int32_t position) const {
    return position < known_len ? history[position] : drafts[position - known_len];
  }
};

[[nodiscard]] PACELINE_HOST_DEVICE inline AdjustedRow adjusted_row(const AdjustLogitsParams& p,
                                                                   int32_t row) {
  const int32_t pass_row = p.row_index[row];
  const int32_t seq_slot = p.seq_slot[pass_row];
  AdjustedRow adjusted = {-1, 0, nullptr, 0, nullptr};
  if (seq_slot < 0 || p.sampling.adjusts[seq_slot] == 0) return adjusted;
  adjusted.known_len = p.sequences.known_len[seq_slot];
  adjusted.num_drafts = p.positions[pass_row] + 1 - adjusted.known_len;
  if (adjusted.num_drafts < 0) return adjusted;
  adjusted.seq_slot = seq_slot;
  adjusted.history = p.sequences.history + seq_slot * p.sequences.history_stride;
  adjusted.drafts = p.token_ids + pass_row + 1 - adjusted.num_drafts;
  return adjusted;
}

struct Penalties {
  float repetition;
  float frequency;
  float presence;
  [[nodiscard]] PACELINE_HOST_DEVICE bool is_any() const {
    return repetition != 1.0f || frequency != 0.0f || presence != 0.0f;
  }
};

[[nodiscard]] PACELINE_HOST_DEVICE inline Penalties penalties_of(const SamplingState& s,
                                                                 int32_t seq_slot) {
  return {s.repetition_penalty[seq_slot], s.frequency_penalty[seq_slot],
          s.presence_penalty[seq_slot]};
}

// The penalised logit of a token that occurs in the sequence. `count` is its number of occurrences
// in the output.
[[nodiscard]] PACELINE_HOST_DEVICE inline float penalised(const Penalties& penalties, float logit,
                                                          int32_t count) {
  logit = logit > 0.0f ? logit / penalties.repetition : logit * penalties.repetition;
  if (count > 0) {
    logit = fmaf(-penalties.frequency, static_cast<float>(count), logit);
    logit = logit - penalties.presence;
  }
  return logit;
}

// Word `word` of the bit mask of tokens that occur in the row's sequence.
[[nodiscard]] PACELINE_HOST_DEVICE inline uint32_t seen_bits(const SamplingState& s,
                                                             const AdjustedRow& row, int32_t word) {
  uint32_t bits = s.seen[int64_t{row.seq_slot} * mask_words(s.vocab_size) + word];
  for (int32_t j = 0; j < row.num_drafts; ++j) {
    const int32_t token = row.drafts[j];
    // The drafter found no valid logit and drafted no token.
    if (token < 0 || token >= s.vocab_size) continue;
    if (token / 32 == word) bits |= uint32_t{1} << token % 32;
  }
  return bits;
}

// Number of occurrences of `token` in the output of the row's sequence.
[[nodiscard]] PACELINE_HOST_DEVICE inline int32_t output_count(const SamplingState& s,
                                                               const AdjustedRow& row,
                                                               int32_t token) {
  int32_t count = s.counts[int64_t{row.seq_slot} * s.vocab_size + token];
  for (int32_t j = 0; j < row.num_drafts; ++j) count += row.drafts[j] == token ? 1 : 0;
  return count;
}

[[nodiscard]] PACELINE_HOST_DEVICE inline bool is_allowed(const SamplingState& s, int32_t seq_slot,
                                                          int32_t token) {
  const uint32_t bits = s.allowed[int64_t{seq_slot} * mask_words(s.vocab_size) + token / 32];
  return (bits >> token % 32 & 1) != 0;
}

// The mask of the row, or null if all tokens may be drawn.
[[nodiscard]] PACELINE_HOST_DEVICE inline const uint32_t* mask_of(const SamplingState& s,
                                                                  const AdjustedRow& row) {
  const int32_t first = s.first_mask[row.seq_slot];
  if (first < 0) return nullptr;
  return s.masks + *s.masks_offset + int64_t{first + row.num_drafts} * mask_words(s.vocab_size);
}

// The token that bad word `index` of the row's sequence bans here, or -1.
[[nodiscard]] PACELINE_HOST_DEVICE inline int32_t token_banned_by(const SamplingState& s,
                                                                  const AdjustedRow& row,
                                                                  int32_t index) {
  const int32_t* const ends = s.bad_word_ends + int64_t{row.seq_slot} * kMaxBadWords;
  const int32_t* const tokens = s.bad_word_tokens + int64_t{row.seq_slot} * kMaxBadWordTokens;
  const int32_t begin = index > 0 ? ends[index - 1] : 0;
  const int32_t num_before = ends[index] - begin - 1;
  if (num_before < 0 || num_before > row.length()) return -1;
  const int32_t first = row.length() - num_before;
  for (int32_t j = 0; j < num_before; ++j) {
    if (row.token_at(first + j) != tokens[begin + j]) return -1;
  }
  return tokens[begin + num_before];
}

// Whether the token that the row predicts is among the first min_tokens of the output.
[[nodiscard]] PACELINE_HOST_DEVICE inline bool bans_stop_ids(const SamplingState& s,
                                                             const AdjustedRow& row) {
  return row.length() - s.prompt_len[row.seq_slot] < s.min_tokens[row.seq_slot];
}

}  // namespace paceline
