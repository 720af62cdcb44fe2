// SPDX-License-Identifier: Apache-2.0
#pragma once

// The state of each sequence on the device, by sequence slot, and the reset that the host sends
// when a sequence starts in a slot. The device's state is authoritative: the host learns of changes
// one iteration late.

#include <cstdint>

#include "base/host_device.h"
#include "wire/draft_source.h"
#include "wire/limits.h"

namespace paceline {

// Arrays by sequence slot. Written by sequence resets (begin_iteration), fork_sequences,
// assemble_verify_rows, accept and the draft ops.
struct SequenceState {
  int32_t* known_len;        // [max_seqs] tokens of prompt and output; while the sequence
                             // decodes, the last of them has no KV yet
  int32_t* limit;            // [max_seqs] length at which the sequence ends
  int32_t* max_drafts;       // [max_seqs] most drafts for the next verify window, 0..k; each
                             // iteration sets it from its staged num_drafts
  int32_t* is_active;        // [max_seqs] 1 until the sequence ends on the device
  uint64_t* seed;            // [max_seqs]
  float* temperature;        // [max_seqs]
  int32_t* num_stop_ids;     // [max_seqs]
  int32_t* stop_ids;         // [max_seqs, kMaxStopIds]
  int32_t* history;          // [max_seqs, history_stride] token ids by position
  int64_t history_stride;    // max_model_len
  int32_t* draft_tokens;     // [max_seqs, num_draft_tokens]
  int32_t* draft_len;        // [max_seqs] number of drafts to verify; 0 after acceptance, until new
                             // ones are made
  int32_t* sources;          // [max_seqs] the sources that may draft for the sequence, as bits
  int32_t* draft_source;     // [max_seqs] DraftSource of draft_tokens
  int32_t num_draft_tokens;  // k
};

// Words of a bit mask over `vocab_size` tokens; token t is bit t % 32 of word t / 32.
[[nodiscard]] PACELINE_HOST_DEVICE constexpr int32_t mask_words(int32_t vocab_size) {
  return (vocab_size + 31) / 32;
}

// The parameters of the logits pipeline and of logprobs. Device arrays by sequence slot. Sequence
// resets (begin_iteration) write all but `counts` and `seen`, which the counting ops of
// sample/logits.h and fork_sequences write.
struct SamplingState {
  int32_t* adjusts;    // [max_seqs] 1 if adjust_logits has work to do; tokens are counted only
                       // then
  int32_t* truncates;  // [max_seqs] 1 if truncate_logits has work to do

  float* repetition_penalty;  // [max_seqs] > 0; 1: none
  float* presence_penalty;    // [max_seqs] 0: none
  float* frequency_penalty;   // [max_seqs] 0: none
  int32_t* prompt_len;        // [max_seqs] tokens at this position and later are output, even
                              // when a preempted sequence is prefilled with them
  int32_t* min_tokens;        // [max_seqs] output tokens before a stop token is allowed

  int32_t* num_bias;   // [max_seqs]
  int32_t* bias_ids;   // [max_seqs, kMaxLogitBias] distinct
  float* bias_values;  // [max_seqs, kMaxLogitBias]

  int32_t* num_bad_words;    // [max_seqs]
  int32_t* bad_word_ends;    // [max_seqs, kMaxBadWords] word i is bad_word_tokens[ends[i - 1],
                             // ends[i]); word 0 begins at 0
  int32_t* bad_word_tokens;  // [max_seqs, kMaxBadWordTokens]

  int32_t* has_allowed;  // [max_seqs] 1: only the tokens of `allowed` may be drawn
  uint32_t* allowed;     // [max_seqs, mask_words(vocab_size)]

  // [max_seqs] the mask of the first row of the sequence's verify window; those of later rows
  // follow. -1: none. A sequence with masks gets new ones for every iteration that draws for it.
  int32_t* first_mask;
  // [masks, mask_words(vocab_size)] in entry 0 of the iteration ring, and [1] the words from there
  // to the masks of the running iteration. The host rewrites the ring, so a GPU must not cache
  // them.
  const uint32_t* masks;
  int64_t* masks_offset;

  int32_t* top_k;  // [max_seqs] 0: none
  float* top_p;    // [max_seqs] in (0, 1]; 1: none
  float* min_p;    // [max_seqs] in [0, 1]; 0: none

  // How many of the most probable tokens are returned with each emitted token, and with each prompt
  // token; -1: no logprobs. See sample/logprobs.h.
  int32_t* num_logprobs;         // [max_seqs]
  int32_t* num_prompt_logprobs;  // [max_seqs]

  int32_t* counts;  // [max_seqs, vocab_size] occurrences of each token in the output so far
  uint32_t* seen;   // [max_seqs, mask_words(vocab_size)] tokens that occur in prompt or output
  int32_t vocab_size;
};

// The verify window that the host has made for a sequence; it replaces the drafts of the device.
struct HostWindow {
  int32_t seq_slot = 0;
  int32_t first_mask = -1;  // see SamplingState
  int32_t num_drafts = 0;
  int32_t drafts[kMaxDraftTokens] = {};
};

// The state of a sequence slot at the start of a sequence.
struct SequenceReset {
  int32_t seq_slot = 0;
  int32_t limit = 0;  // length at which the sequence ends
  uint64_t seed = 0;
  int32_t sources = kAllSources;
  float temperature = 0;
  int32_t num_stop_ids = 0;
  int32_t stop_ids[kMaxStopIds] = {};
  // The logits pipeline; see SamplingState.
  int32_t adjusts = 0;
  int32_t truncates = 0;
  int32_t prompt_len = 0;
  int32_t min_tokens = 0;
  int32_t top_k = 0;
  float top_p = 1;
  float min_p = 0;
  float repetition_penalty = 1;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  int32_t num_logprobs = -1;
  int32_t num_prompt_logprobs = -1;
  // Index in StagedInputs::lists of the sequence's lists, which follow one another: ids of biases,
  // biases, ends of bad words, tokens of bad words, and the mask of allowed tokens.
  int32_t first_list_word = 0;
  int32_t num_bias = 0;
  int32_t num_bad_words = 0;
  int32_t num_bad_word_tokens = 0;
  int32_t has_allowed = 0;
};

}  // namespace paceline
