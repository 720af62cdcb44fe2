// SPDX-License-Identifier: Apache-2.0
#pragma once

// The rows that a sequence has in each pass of an iteration, and the largest numbers of rows that
// an engine's buffers hold.

#include <algorithm>
#include <cstdint>

namespace paceline {

// Rows of one sequence in the verify pass.
enum class RowKind : int32_t {
  kDecode = 0,          // the last known token and up to max_drafts drafts
  kPrefillFinal = 1,    // the last chunk of the known tokens; its last row draws the next token
  kPrefillPartial = 2,  // an earlier chunk
  kScore = 3,           // a chunk whose logits are returned; draws nothing
};

// Rows of a drafter's first pass.
enum class FirstRows : uint8_t {
  kNone,    // there is no first pass
  kNewest,  // the newest known tokens: a decoding sequence has two rows; a prefilling one has its
            // chunk and the token drawn after it
  kWindow,  // one row for each row of the verify pass, with the token of the next position
  kLast,    // one row for each drafting sequence: the last position of the target's KV, with the
            // newest token, whose own position is the next one
};

struct BatchShape {
  int32_t max_seqs = 0;
  int32_t max_verify_rows = 0;
  int32_t max_logit_rows = 0;
  int32_t num_draft_tokens = 0;  // k
  FirstRows first_rows = FirstRows::kNone;
  // With kNewest: drafts of verify windows may come from elsewhere, so a decoding sequence has a
  // row for each row of its window, and at least two.
  bool follows_windows = false;
  int32_t max_prompt_rows = 0;     // most rows for prompt logprobs, part of max_logit_rows
  int32_t max_logprobs = 0;        // see ExecutorOptions; 0: no logprobs are computed
  int32_t max_adopted_tokens = 0;  // most tokens that sequences take over from the prefix cache

  // Most rows of a decoding sequence in the drafter's first pass, if it has missed nothing. k' is
  // num_drafts; with 0 the pass does not run.
  [[nodiscard]] int32_t first_rows_per_decode(int32_t num_drafts) const {
    if (num_drafts == 0) return 0;
    switch (first_rows) {
      case FirstRows::kNone:
        return 0;
      case FirstRows::kNewest:
        return follows_windows ? std::max(num_drafts + 1, 2) : 2;
      case FirstRows::kWindow:
        return num_drafts + 1;
      case FirstRows::kLast:
        return 1;
    }
    return 0;
  }
};

}  // namespace paceline
