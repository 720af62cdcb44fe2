// SPDX-License-Identifier: Apache-2.0
#pragma once

// Logprobs: how probable the target found a token, and which tokens it found most probable, from
// its logits as they are, before bias, penalties, bans, temperature and truncation. Those change
// logits in place, and what a sequence emits is known after acceptance only. So save_raw_logits
// comes before adjust_logits and sets aside the rows that will change, and token_logprobs comes
// after accept. Rows of prompts, whose next token is known, change nowhere and are read where they
// are.
//
// A row of a verify window is a decode row: row j of a window has the logits that token j was drawn
// from, and all sums are of integers, so the bits of a row depend on its logits alone.

#include <cstdint>

#include <paceline/request.h>

#include "wire/sequence_result.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {

struct CpuContext;
struct CudaContext;

// Copies the logits of sequences that want logprobs and adjust or truncate, or of all that want
// them.
struct SaveRawLogitsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* logits;  // [max_rows, logits_stride], read at [0, sampling.vocab_size)
  float* raw_logits;    // the same; other rows and columns are left alone
  int64_t logits_stride;
  const int32_t* row_index;  // [max_rows] row of seq_slot that row i belongs to
  const int32_t* seq_slot;   // per pass row: sequence slot; -1: inert, left alone
  SamplingState sampling;    // adjusts, truncates and num_logprobs are read
  bool all_change = false;   // acceptance writes over rows of any sequence
};
void save_raw_logits(CpuContext&, const SaveRawLogitsParams&);
void save_raw_logits(CudaContext&, const SaveRawLogitsParams&);

// Rates a token in each of these rows of logits:
// - in row logit_indptr[i] + j the token j that sequence i of the batch has emitted, if it wants
//   logprobs: num_logprobs[slot] >= 0;
// - in rows from num_logit_rows on, up to num_all_logit_rows, the prompt token after the row's, if
//   num_prompt_logprobs[slot] >= 0.
// Of such a row with n = num_[prompt_]logprobs[slot] the first entry is the token, and the next
// min(n, vocab_size) are those with the highest logits, the highest first, of equal ones the lower
// id first. Other entries are left alone. A logprob is log(softmax(logits)) in float32; NaN counts
// as -inf, logits of +inf share all there is, and a row with no logit above -inf has NaN.
struct TokenLogprobsParams {
  StagedInputs inputs;            // seq_slot, logit_indptr, logit_rows, prompt_targets, counts
  const SequenceResult* results;  // [max_seqs] by batch row
  const int32_t* seq_slot;        // per pass row: sequence slot; -1: inert
  const float* logits;            // [max_logit_rows, logits_stride]
  const float* raw_logits;        // what save_raw_logits has set aside, by the same rows
  int64_t logits_stride;
  int32_t max_seqs;         // of this pass
  int32_t max_window_rows;  // that a sequence emits from: k + 1
  int32_t max_prompt_rows;  // of this pass
  int32_t max_logprobs;     // at least every num_[prompt_]logprobs
  SamplingState sampling;   // adjusts, truncates, num_[prompt_]logprobs, vocab_size are read; that
                            // is at most kMaxTruncatedVocab
  TokenLogprob* logprobs;   // [max_logit_rows, 1 + max_logprobs] written
  bool all_change = false;  // as for save_raw_logits
};
void token_logprobs(CpuContext&, const TokenLogprobsParams&);
void token_logprobs(CudaContext&, const TokenLogprobsParams&);

}  // namespace paceline
