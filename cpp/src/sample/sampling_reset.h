// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the start of a sequence writes into its slot of SamplingState: the one specification that
// the CPU's upload and the CUDA ring share.

#include <cstdint>

#include "base/host_device.h"
#include "wire/limits.h"
#include "wire/sequence_state.h"

namespace paceline {

// `lists` begins with the reset's own. Worker `worker` of `num_workers` copies every
// num_workers-th element.
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
    s.top_k[seq_slot] = reset.top_k;
    s.top_p[seq_slot] = reset.top_p;
    s.min_p[seq_slot] = reset.min_p;
    s.num_logprobs[seq_slot] = reset.num_logprobs;
    s.num_prompt_logprobs[seq_slot] = reset.num_prompt_logprobs;
  }
  auto* const biases = reinterpret_cast<int32_t*>(s.bias_values);
  auto* const allowed = reinterpret_cast<int32_t*>(s.allowed);
  const auto take = [&](int32_t* to, int32_t count) {
    for (int32_t i = worker; i < count; i += num_workers) to[i] = lists[i];
    lists += count;
  };
  take(s.bias_ids + seq_slot * kMaxLogitBias, reset.num_bias);
  take(biases + seq_slot * kMaxLogitBias, reset.num_bias);
  take(s.bad_word_ends + seq_slot * kMaxBadWords, reset.num_bad_words);
  take(s.bad_word_tokens + seq_slot * kMaxBadWordTokens, reset.num_bad_word_tokens);
  const int32_t num_words = mask_words(s.vocab_size);
  take(allowed + seq_slot * num_words, reset.has_allowed != 0 ? num_words : 0);
}

}  // namespace paceline
