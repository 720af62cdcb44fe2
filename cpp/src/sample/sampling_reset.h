// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the start of a sequence writes into its slot of SamplingState: the one specification that
// the CPU's upload and the CUDA ring share.

#include <cstdint>

#include "base/host_device.h"
#include "batch/iteration_inputs.h"
#include "sample/logits.h"

namespace paceline {

// `lists` begins with the reset's own. Worker `worker` of `num_workers` copies every
// num_workers-th element.
PACELINE_HOST_DEVICE inline void reset_sampling(const SamplingState& s, const SlotReset& reset,
                                                const int32_t* lists, int32_t worker,
                                                int32_t num_workers) {
  const int64_t slot = reset.slot;
  if (worker == 0) {
    s.adjusts[slot] = reset.adjusts;
    s.truncates[slot] = reset.truncates;
    s.repetition_penalty[slot] = reset.repetition_penalty;
    s.presence_penalty[slot] = reset.presence_penalty;
    s.frequency_penalty[slot] = reset.frequency_penalty;
    s.prompt_len[slot] = reset.prompt_len;
    s.min_tokens[slot] = reset.min_tokens;
    s.num_bias[slot] = reset.num_bias;
    s.num_bad_words[slot] = reset.num_bad_words;
    s.has_allowed[slot] = reset.has_allowed;
    s.top_k[slot] = reset.top_k;
    s.top_p[slot] = reset.top_p;
    s.min_p[slot] = reset.min_p;
    s.num_logprobs[slot] = reset.num_logprobs;
    s.num_prompt_logprobs[slot] = reset.num_prompt_logprobs;
  }
  auto* const biases = reinterpret_cast<int32_t*>(s.bias_values);
  auto* const allowed = reinterpret_cast<int32_t*>(s.allowed);
  const auto take = [&](int32_t* to, int32_t count) {
    for (int32_t i = worker; i < count; i += num_workers) to[i] = lists[i];
    lists += count;
  };
  take(s.bias_ids + slot * kMaxLogitBias, reset.num_bias);
  take(biases + slot * kMaxLogitBias, reset.num_bias);
  take(s.bad_word_ends + slot * kMaxBadWords, reset.num_bad_words);
  take(s.bad_word_tokens + slot * kMaxBadWordTokens, reset.num_bad_word_tokens);
  const int32_t num_words = mask_words(s.vocab_size);
  take(allowed + slot * num_words, reset.has_allowed != 0 ? num_words : 0);
}

}  // namespace paceline
