// SPDX-License-Identifier: Apache-2.0
#pragma once

// The logits pipeline: turns the model's logits into those that `draw` samples from, row by row. It
// applies logit bias; penalties; bans (bad words, allowed ids, masks, and stop ids until min_tokens
// are reached); temperature; top-k; top-p; min-p. A row of a verify window is a decode row: it sees
// the tokens that plain decoding would have seen at that position, including the drafts before it,
// and its bits depend only on those tokens and on the parameters of its own sequence. Rows with any
// mix of parameters share a batch.
//
// Order in an iteration: clear_counts (sequence slots that were reset), count_prefill_tokens; then
// in each pass adjust_logits, truncate_logits, draw; and count_emitted_tokens after accept.

#include <cstdint>

#include "wire/sequence_result.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {

struct CpuContext;
struct CudaContext;

// Adjusts, in place, the logits of sequences whose `adjusts` is 1. In this order, with one rounding
// per operation:
// 1. logit += bias.
// 2. Tokens of prompt or output: logit = logit > 0 ? logit / repetition : logit * repetition.
//    Tokens of the output: logit -= frequency * occurrences, then logit -= presence.
// 3. -inf for: the last token of each bad word whose other tokens are the newest ones of the
//    sequence (prompt included; always for a word of one token); every token that is not allowed,
//    to the sequence or by the mask of the row;
//    the stop ids of the sequence, while the token to be drawn is among the first min_tokens of the
//    output.
// A row's sequence consists of all tokens up to and including the row's own input token: the known
// tokens, whose number is known_len, and the tokens of the window's rows after the newest known
// one. Those at position prompt_len or later are output. Rows before the newest known token (of
// scored prompts) are not changed. Ids outside the vocabulary have no effect in any list.
struct AdjustLogitsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  float* logits;  // [max_rows, logits_stride], updated at [0, sampling.vocab_size)
  int64_t logits_stride;
  const int32_t* row_index;  // [max_rows] pass row of logits row i
  const int32_t* seq_slot;   // per pass row: sequence slot; -1: inert, not changed
  const int32_t* positions;  // per pass row
  const int32_t* token_ids;  // per pass row; the rows of a window are adjacent
  SequenceState sequences;   // known_len, history and the stop ids are read
  SamplingState sampling;
};
void adjust_logits(CpuContext&, const AdjustLogitsParams&);
void adjust_logits(CudaContext&, const AdjustLogitsParams&);

// Sets the logits that top-k, top-p and min-p exclude to -inf, in place, for sequences whose
// `truncates` is 1 and whose temperature is above 0. With w = exp((logit - highest) / temperature)
// for the logits above -inf:
// - top-k keeps the k highest logits.
// - top-p keeps, of the logits that top-k keeps, the fewest highest ones whose w sums to at least
//   top_p of the total.
// - min-p keeps logits with w >= min_p.
// A logit that equals the lowest kept one is kept, so ties may exceed k, and at least one logit
// always remains. NaN counts as -inf. Rows whose highest logit is infinite, or that have none above
// -inf, are not changed. The sums of w are integer sums, which do not depend on their order, so
// both backends compute the same bits.
struct TruncateLogitsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  float* logits;  // [max_rows, logits_stride], updated at [0, vocab_limit)
  int64_t logits_stride;
  int32_t vocab_limit;        // at most kMaxTruncatedVocab
  const int32_t* row_index;   // [max_rows] row of seq_slot for row i
  const int32_t* seq_slot;    // per pass row: sequence slot; -1: inert, not changed
  const float* temperatures;  // [max_seqs] by sequence slot; 0: not changed
  SamplingState sampling;     // truncates, top_k, top_p and min_p are read
};
void truncate_logits(CpuContext&, const TruncateLogitsParams&);
void truncate_logits(CudaContext&, const TruncateLogitsParams&);

// Clears the token counts of sequence slots at which a sequence begins or restarts, before its
// first chunk is counted. Skips slots that do not adjust logits.
struct ClearCountsParams {
  const int32_t* num_seqs;   // [1]
  int32_t max_seqs;          // upper bound of num_seqs
  const int32_t* seq_slots;  // [max_seqs] distinct
  SamplingState sampling;
};
void clear_counts(CpuContext&, const ClearCountsParams&);
void clear_counts(CudaContext&, const ClearCountsParams&);

// Counts the prefill tokens of the iteration, before its logits are adjusted. They include output
// tokens when a preempted sequence is recomputed.
struct CountPrefillTokensParams {
  StagedInputs inputs;
  SamplingState sampling;
  int32_t max_seqs;  // in this pass
};
void count_prefill_tokens(CpuContext&, const CountPrefillTokensParams&);
void count_prefill_tokens(CudaContext&, const CountPrefillTokensParams&);

// Counts the tokens that accept has emitted.
struct CountEmittedTokensParams {
  StagedInputs inputs;
  SamplingState sampling;
  const SequenceResult* results;  // [max_seqs] by batch row
  int32_t max_seqs;               // in this pass
};
void count_emitted_tokens(CpuContext&, const CountEmittedTokensParams&);
void count_emitted_tokens(CudaContext&, const CountEmittedTokensParams&);

}  // namespace paceline
