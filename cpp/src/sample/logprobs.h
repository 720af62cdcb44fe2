// SPDX-License-Identifier: Apache-2.0
#pragma once

// Logprobs: the log-probability that the target gives a token, and the tokens that it finds most
// probable. Both are computed from the raw logits, before bias, penalties, bans, temperature and
// truncation. The pipeline changes logits in place, while the emitted tokens are known only after
// acceptance. So save_raw_logits runs before adjust_logits and saves the rows that will change, and
// token_logprobs runs after accept. The pipeline does not change rows of prompts, whose next token
// is known; these are read from the logits themselves.
//
// A row of a verify window is a decode row: row j of a window has the logits that token j was drawn
// from. All sums are integer sums, so the bits of a row depend only on its logits.

#include <cstdint>

#include <paceline/request.h>

#include "wire/sequence_result.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {

struct CpuContext;
struct CudaContext;

// Copies the logits of sequences that request logprobs and adjust or truncate their logits; with
// all_change, of all sequences that request logprobs.
struct SaveRawLogitsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* logits;  // [max_rows, logits_stride], read at [0, sampling.vocab_size)
  float* raw_logits;    // same shape; other rows and columns are not changed
  int64_t logits_stride;
  const int32_t* row_index;  // [max_rows] row of seq_slot for row i
  const int32_t* seq_slot;   // per pass row: sequence slot; -1: inert, not copied
  SamplingState sampling;    // adjusts, truncates and num_logprobs are read
  bool all_change = false;   // acceptance may overwrite rows of any sequence
};
void save_raw_logits(CpuContext&, const SaveRawLogitsParams&);
void save_raw_logits(CudaContext&, const SaveRawLogitsParams&);

// Computes the logprobs of these rows of logits:
// - row logit_indptr[i] + j, for token j that sequence i of the batch has emitted, if the sequence
//   requests logprobs: num_logprobs[slot] >= 0;
// - rows from num_logit_rows up to num_all_logit_rows, each for the prompt token after it, if
//   num_prompt_logprobs[slot] >= 0.
// With n = num_[prompt_]logprobs[slot], the first entry of a row is the token itself, and the next
// min(n, vocab_size) entries are the tokens with the highest logits, highest first; among equal
// logits the lower id comes first. Other entries are not changed. A logprob is log(softmax(logits))
// in float32. NaN counts as -inf, logits of +inf share the whole probability, and a row with no
// logit above -inf has NaN.
struct TokenLogprobsParams {
  StagedInputs inputs;            // seq_slot, logit_indptr, logit_rows, prompt_targets, counts
  const SequenceResult* results;  // [max_seqs] by batch row
  const int32_t* seq_slot;        // per pass row: sequence slot; -1: inert
  const float* logits;            // [max_logit_rows, logits_stride]
  const float* raw_logits;        // saved by save_raw_logits, in the same rows
  int64_t logits_stride;
  int32_t max_seqs;         // in this pass
  int32_t max_window_rows;  // rows of a sequence that may emit tokens: k + 1
  int32_t max_prompt_rows;  // in this pass
  int32_t max_logprobs;     // upper bound of every num_[prompt_]logprobs
  SamplingState sampling;   // adjusts, truncates, num_[prompt_]logprobs and vocab_size are read;
                            // vocab_size is at most kMaxTruncatedVocab
  TokenLogprob* logprobs;   // [max_logit_rows, 1 + max_logprobs] written
  bool all_change = false;  // as in save_raw_logits
};
void token_logprobs(CpuContext&, const TokenLogprobsParams&);
void token_logprobs(CudaContext&, const TokenLogprobsParams&);

}  // namespace paceline
