// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the host writes to a sequence slot: the one specification that both backends share. Worker
// `worker` of `num_workers` writes every num_workers-th element of a list; worker 0 writes the
// rest.

#include <cstdint>

#include "base/host_device.h"
#include "wire/limits.h"
#include "wire/sequence_state.h"

namespace paceline {

PACELINE_HOST_DEVICE inline void reset_sequence(const SequenceState& s, const SequenceReset& reset,
                                                int32_t worker, int32_t num_workers) {
  const int64_t seq_slot = reset.seq_slot;
  for (int32_t i = worker; i < kMaxStopIds; i += num_workers) {
    s.stop_ids[seq_slot * kMaxStopIds + i] = reset.stop_ids[i];
  }
  if (worker != 0) return;
  s.known_len[seq_slot] = 0;
  s.limit[seq_slot] = reset.limit;
  s.max_drafts[seq_slot] = 0;
  s.is_active[seq_slot] = 1;
  s.seed[seq_slot] = reset.seed;
  s.temperature[seq_slot] = reset.temperature;
  s.num_stop_ids[seq_slot] = reset.num_stop_ids;
  s.draft_len[seq_slot] = 0;
  s.sources[seq_slot] = reset.sources;
  s.draft_source[seq_slot] = static_cast<int32_t>(DraftSource::kModel);
}

// `lists` begins with the lists of this reset.
PACELINE_HOST_DEVICE inline void reset_sampling(const SamplingState& s, const SequenceReset& reset,
                                                const int32_t* lists, int32_t worker,
                                                int32_t num_workers) {
  const int64_t seq_slot = reset.seq_slot;
  if (worker == 0) {
    s.adjusts[seq_slot] = reset.adjusts;
    s.truncates[seq_slot] = reset.truncates;
    s.repetition_penalty[seq_slot] = reset.repetition_penalty;
    s.presence_penalty[seq_slot] = reset.presence_penalty;
    s.frequency_penalty[seq_slot] = reset.frequency_penalty;
    s.prompt_len[seq_slot] = reset.prompt_len;
    s.min_tokens[seq_slot] = reset.min_tokens;
    s.num_bias[seq_slot] = reset.num_bias;
    s.num_bad_words[seq_slot] = reset.num_bad_words;
    s.has_allowed[seq_slot] = reset.has_allowed;
    s.first_mask[seq_slot] = -1;
    s.top_k[seq_slot] = reset.top_k;
    s.top_p[seq_slot] = reset.top_p;
    s.min_p[seq_slot] = reset.min_p;
    s.num_logprobs[seq_slot] = reset.num_logprobs;
    s.num_prompt_logprobs[seq_slot] = reset.num_prompt_logprobs;
  }
  auto* const biases = reinterpret_cast<int32_t*>(s.bias_values);
  auto* const allowed = reinterpret_cast<int32_t*>(s.allowed);
  const auto copy_list = [&](int32_t* to, int32_t count) {
    for (int32_t i = worker; i < count; i += num_workers) to[i] = lists[i];
    lists += count;
  };
  copy_list(s.bias_ids + seq_slot * kMaxLogitBias, reset.num_bias);
  copy_list(biases + seq_slot * kMaxLogitBias, reset.num_bias);
  copy_list(s.bad_word_ends + seq_slot * kMaxBadWords, reset.num_bad_words);
  copy_list(s.bad_word_tokens + seq_slot * kMaxBadWordTokens, reset.num_bad_word_tokens);
  const int32_t num_words = mask_words(s.vocab_size);
  copy_list(allowed + seq_slot * num_words, reset.has_allowed != 0 ? num_words : 0);
}

// After the reset of the same sequence slot, if there is one.
PACELINE_HOST_DEVICE inline void set_window(const SequenceState& s, const SamplingState& sampling,
                                            const HostWindow& window, int32_t worker,
                                            int32_t num_workers) {
  const int64_t seq_slot = window.seq_slot;
  for (int32_t i = worker; i < window.num_drafts; i += num_workers) {
    s.draft_tokens[seq_slot * s.num_draft_tokens + i] = window.drafts[i];
  }
  if (worker != 0) return;
  s.draft_len[seq_slot] = window.num_drafts;
  sampling.first_mask[seq_slot] = window.first_mask;
}

}  // namespace paceline
