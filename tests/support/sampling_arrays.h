// SPDX-License-Identifier: Apache-2.0
#pragma once

// The sampling parameters of sequences, as a request has them and as the ops read them.

#include <cstdint>
#include <utility>
#include <vector>

#include "wire/limits.h"
#include "wire/sequence_state.h"

namespace paceline::testing {

struct Sampling {
  std::vector<std::pair<int32_t, float>> bias = {};
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  std::vector<std::vector<int32_t>> bad_words = {};
  std::vector<int32_t> allowed = {};             // empty: all
  std::vector<std::vector<int32_t>> masks = {};  // the allowed tokens by row of the window
  int32_t prompt_len = 0;
  int32_t min_tokens = 0;
  std::vector<int32_t> stop_ids = {};
  float temperature = 1.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  int32_t num_logprobs = -1;
  int32_t num_prompt_logprobs = -1;
};

// The arrays of a SamplingState. Entries that no op may read hold values that a test would see.
struct SamplingArrays {
  SamplingArrays(int32_t num_slots, int32_t vocab_size)
      : vocab_size(vocab_size),
        adjusts(size(num_slots), 0),
        truncates(size(num_slots), 0),
        prompt_len(size(num_slots), 0),
        min_tokens(size(num_slots), 0),
        num_bias(size(num_slots), 0),
        bias_ids(size(num_slots) * kMaxLogitBias, 0),
        num_bad_words(size(num_slots), 0),
        bad_word_ends(size(num_slots) * kMaxBadWords, 1),
        bad_word_tokens(size(num_slots) * kMaxBadWordTokens, 0),
        has_allowed(size(num_slots), 0),
        first_mask(size(num_slots), -1),
        top_k(size(num_slots), 1),
        num_logprobs(size(num_slots), -1),
        num_prompt_logprobs(size(num_slots), -1),
        counts(size(num_slots) * size(vocab_size), 0),
        allowed(size(num_slots) * size(mask_words(vocab_size)), 0),
        seen(size(num_slots) * size(mask_words(vocab_size)), 0),
        masks(kMasksOffset, 0),
        repetition_penalty(size(num_slots), 3.0f),
        presence_penalty(size(num_slots), 3.0f),
        frequency_penalty(size(num_slots), 3.0f),
        top_p(size(num_slots), 0.01f),
        min_p(size(num_slots), 1.0f),
        bias_values(size(num_slots) * kMaxLogitBias, 99.0f),
        temperature(size(num_slots), 1.0f) {}

  void set(int32_t at, const Sampling& s) {
    const size_t slot = size(at);
    adjusts[slot] = 1;
    truncates[slot] = s.top_k > 0 || s.top_p < 1.0f || s.min_p > 0.0f ? 1 : 0;
    repetition_penalty[slot] = s.repetition_penalty;
    presence_penalty[slot] = s.presence_penalty;
    frequency_penalty[slot] = s.frequency_penalty;
    prompt_len[slot] = s.prompt_len;
    min_tokens[slot] = s.min_tokens;
    num_bias[slot] = static_cast<int32_t>(s.bias.size());
    for (size_t i = 0; i < s.bias.size(); ++i) {
      bias_ids[slot * kMaxLogitBias + i] = s.bias[i].first;
      bias_values[slot * kMaxLogitBias + i] = s.bias[i].second;
    }
    num_bad_words[slot] = static_cast<int32_t>(s.bad_words.size());
    size_t end = 0;
    for (size_t i = 0; i < s.bad_words.size(); ++i) {
      for (const int32_t token : s.bad_words[i]) {
        bad_word_tokens[slot * kMaxBadWordTokens + end++] = token;
      }
      bad_word_ends[slot * kMaxBadWords + i] = static_cast<int32_t>(end);
    }
    has_allowed[slot] = s.allowed.empty() ? 0 : 1;
    for (const int32_t token : s.allowed) mark(allowed, at, token);
    const size_t mask = size(mask_words(vocab_size));
    for (size_t row = 0; row < s.masks.size(); ++row) {
      const auto index = static_cast<int32_t>((masks.size() - kMasksOffset) / mask);
      if (row == 0) first_mask[slot] = index;
      masks.resize(masks.size() + mask, 0);
      for (const int32_t token : s.masks[row]) mark(masks, index, token, kMasksOffset);
    }
    top_k[slot] = s.top_k;
    top_p[slot] = s.top_p;
    min_p[slot] = s.min_p;
    num_logprobs[slot] = s.num_logprobs;
    num_prompt_logprobs[slot] = s.num_prompt_logprobs;
    temperature[slot] = s.temperature;
  }

  // As the counting ops leave it after these tokens.
  void settle(int32_t slot, const std::vector<int32_t>& tokens) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      mark(seen, slot, tokens[i]);
      if (static_cast<int32_t>(i) < prompt_len[size(slot)]) continue;
      ++counts[size(slot) * size(vocab_size) + size(tokens[i])];
    }
  }

  [[nodiscard]] SamplingState state() {
    return {.adjusts = adjusts.data(),
            .truncates = truncates.data(),
            .repetition_penalty = repetition_penalty.data(),
            .presence_penalty = presence_penalty.data(),
            .frequency_penalty = frequency_penalty.data(),
            .prompt_len = prompt_len.data(),
            .min_tokens = min_tokens.data(),
            .num_bias = num_bias.data(),
            .bias_ids = bias_ids.data(),
            .bias_values = bias_values.data(),
            .num_bad_words = num_bad_words.data(),
            .bad_word_ends = bad_word_ends.data(),
            .bad_word_tokens = bad_word_tokens.data(),
            .has_allowed = has_allowed.data(),
            .allowed = allowed.data(),
            .first_mask = first_mask.data(),
            .masks = masks.data(),
            .masks_offset = &masks_offset,
            .top_k = top_k.data(),
            .top_p = top_p.data(),
            .min_p = min_p.data(),
            .num_logprobs = num_logprobs.data(),
            .num_prompt_logprobs = num_prompt_logprobs.data(),
            .counts = counts.data(),
            .seen = seen.data(),
            .vocab_size = vocab_size};
  }

  int32_t vocab_size;
  std::vector<int32_t> adjusts, truncates, prompt_len, min_tokens, num_bias, bias_ids,
      num_bad_words, bad_word_ends, bad_word_tokens, has_allowed, first_mask, top_k, num_logprobs,
      num_prompt_logprobs, counts;
  std::vector<uint32_t> allowed, seen, masks;
  int64_t masks_offset = kMasksOffset;
  std::vector<float> repetition_penalty, presence_penalty, frequency_penalty, top_p, min_p,
      bias_values, temperature;

 private:
  static size_t size(int32_t count) { return static_cast<size_t>(count); }
  static constexpr size_t kMasksOffset = 5;
  void mark(std::vector<uint32_t>& mask, int32_t slot, int32_t token, size_t offset = 0) const {
    mask[offset + size(slot) * size(mask_words(vocab_size)) + size(token / 32)] |= uint32_t{1}
                                                                                   << token % 32;
  }
};

}  // namespace paceline::testing
