// SPDX-License-Identifier: Apache-2.0
#pragma once

// From the model's logits to those that `draw` draws from, row by row: logit bias; penalties; bans
// (bad words, allowed ids, stop ids while min_tokens are not out); temperature; top-k; top-p;
// min-p. A row of a verify window is a decode row: it sees the tokens that plain decoding would
// have seen there, the drafts before it among them, and its bits depend on those tokens and on its
// own sequence's parameters alone. Rows with any mix of parameters share a batch.
//
// Order of an iteration: clear_counts (slots that were reset), count_prefill_tokens, then per pass
// adjust_logits, truncate_logits, draw, and after accept count_emitted_tokens.

#include <cstdint>

#include "wire/sequence_result.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {

struct CpuContext;
struct CudaContext;

// Logits of sequences that adjust, in place; in this order, each step one rounding:
// 1. logit += bias.
// 2. Tokens of prompt or output: logit = logit > 0 ? logit / repetition : logit * repetition.
//    Tokens of the output: logit -= frequency * times, then logit -= presence.
// 3. -inf for: the last token of each bad word whose other tokens are the sequence's newest (prompt
//    included; a word of one token always); all that is not allowed; the sequence's stop ids, while
//    the token to be drawn is one of the first min_tokens of the output.
// A row's sequence is all up to and including the row's own input token: the settled tokens, of
// which known_len tells, and the tokens of the window's rows behind the newest settled one. Of
// these, what stands at prompt_len or later is output. Rows before the newest settled token (of
// scores) are left alone. Ids outside the vocabulary, in any list, do nothing.
struct AdjustLogitsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  float* logits;  // [max_rows, logits_stride], updated at [0, sampling.vocab_size)
  int64_t logits_stride;
  const int32_t* row_index;  // [max_rows] pass row that row i belongs to
  const int32_t* seq_slot;   // per pass row: sequence slot; -1: inert, left alone
  const int32_t* positions;  // per pass row
  const int32_t* token_ids;  // per pass row; the rows of a window lie side by side
  SequenceState sequences;   // known_len, history and the stop ids are read
  SamplingState sampling;
};
void adjust_logits(CpuContext&, const AdjustLogitsParams&);
void adjust_logits(CudaContext&, const AdjustLogitsParams&);

// -inf for what top-k, top-p and min-p exclude, in place, for sequences that truncate and have a
// temperature. With w = exp((logit - highest) / temperature) of the logits above -inf:
// - top-k keeps the k highest logits.
// - top-p keeps, of what top-k keeps, the highest that make up top_p of their sum of w, and no more
//   than it takes.
// - min-p keeps w >= min_p.
// What equals the lowest logit that is kept is kept, so ties may exceed k, and something always
// stays. NaN counts as -inf. Rows whose highest logit is infinite, or that have none, are left
// alone. The sums of w are of integers, so they have no order, and both backends compute the same
// bits.
struct TruncateLogitsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  float* logits;  // [max_rows, logits_stride], updated at [0, vocab_limit)
  int64_t logits_stride;
  int32_t vocab_limit;        // at most kMaxTruncatedVocab
  const int32_t* row_index;   // [max_rows] row of seq_slot that row i belongs to
  const int32_t* seq_slot;    // per pass row: sequence slot; -1: inert, left alone
  const float* temperatures;  // [max_seqs] by sequence slot; 0: left alone
  SamplingState sampling;     // truncates, top_k, top_p and min_p are read
};
void truncate_logits(CpuContext&, const TruncateLogitsParams&);
void truncate_logits(CudaContext&, const TruncateLogitsParams&);

// Forgets the tokens of slots that begin a sequence, or begin it again. Before their first chunk is
// counted; slots that do not adjust are passed over.
struct ClearCountsParams {
  const int32_t* num_slots;  // [1]
  int32_t max_slots;         // at most so many are listed
  const int32_t* seq_slots;  // [max_seqs] distinct
  SamplingState sampling;
};
void clear_counts(CpuContext&, const ClearCountsParams&);
void clear_counts(CudaContext&, const ClearCountsParams&);

// Counts the chunks of the iteration, before its logits are adjusted: the output among them, too.
struct CountPrefillTokensParams {
  StagedInputs inputs;
  SamplingState sampling;
  int32_t max_seqs;  // of this pass
};
void count_prefill_tokens(CpuContext&, const CountPrefillTokensParams&);
void count_prefill_tokens(CudaContext&, const CountPrefillTokensParams&);

// Counts what acceptance has emitted.
struct CountEmittedTokensParams {
  StagedInputs inputs;
  SamplingState sampling;
  const SequenceResult* results;  // [max_seqs] by batch row
  int32_t max_seqs;               // of this pass
};
void count_emitted_tokens(CpuContext&, const CountEmittedTokensParams&);
void count_emitted_tokens(CudaContext&, const CountEmittedTokensParams&);

}  // namespace paceline
