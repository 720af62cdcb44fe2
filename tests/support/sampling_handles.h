// SPDX-License-Identifier: Apache-2.0
#pragma once

// SamplingArrays as arrays of an op case.

#include <algorithm>
#include <string>
#include <vector>

#include "support/op_cases.h"
#include "support/sampling_arrays.h"
#include "wire/sequence_state.h"

namespace paceline::testing {

struct SamplingHandles {
  // `role` is that of counts and seen; all else is only read.
  SamplingHandles(OpInstance& op, const SamplingArrays& s, Role role) : vocab_size(s.vocab_size) {
    const auto ints = [&](const char* name, const std::vector<int32_t>& values) {
      return op.add(int_array(name, Role::kInput, values));
    };
    const auto masks = [&](const char* name, const std::vector<uint32_t>& values, Role of) {
      return op.add(int_array(name, of, std::vector<int32_t>(values.begin(), values.end())));
    };
    const auto floats = [&](const char* name, const std::vector<float>& values) {
      return op.add(
          float_array(name, Element::kF32, Element::kF32, static_cast<int64_t>(values.size()),
                      [values](float* to) { std::copy(values.begin(), values.end(), to); }));
    };
    adjusts = ints("adjusts", s.adjusts);
    truncates = ints("truncates", s.truncates);
    repetition_penalty = floats("repetition_penalty", s.repetition_penalty);
    presence_penalty = floats("presence_penalty", s.presence_penalty);
    frequency_penalty = floats("frequency_penalty", s.frequency_penalty);
    prompt_len = ints("prompt_len", s.prompt_len);
    min_tokens = ints("min_tokens", s.min_tokens);
    num_bias = ints("num_bias", s.num_bias);
    bias_ids = ints("bias_ids", s.bias_ids);
    bias_values = floats("bias_values", s.bias_values);
    num_bad_words = ints("num_bad_words", s.num_bad_words);
    bad_word_ends = ints("bad_word_ends", s.bad_word_ends);
    bad_word_tokens = ints("bad_word_tokens", s.bad_word_tokens);
    has_allowed = ints("has_allowed", s.has_allowed);
    allowed = masks("allowed", s.allowed, Role::kInput);
    first_mask = ints("first_mask", s.first_mask);
    row_masks = masks("masks", s.masks, Role::kInput);
    masks_offset = ints("masks_offset", {static_cast<int32_t>(s.masks_offset), 0});  // an int64
    top_k = ints("top_k", s.top_k);
    top_p = floats("top_p", s.top_p);
    min_p = floats("min_p", s.min_p);
    num_logprobs = ints("num_logprobs", s.num_logprobs);
    num_prompt_logprobs = ints("num_prompt_logprobs", s.num_prompt_logprobs);
    counts = op.add(int_array("counts", role, s.counts));
    seen = masks("seen", s.seen, role);
    temperature = floats("temperatures", s.temperature);
  }

  [[nodiscard]] SamplingState at(const Addresses& at) const {
    return {.adjusts = at.get<int32_t>(adjusts),
            .truncates = at.get<int32_t>(truncates),
            .repetition_penalty = at.get<float>(repetition_penalty),
            .presence_penalty = at.get<float>(presence_penalty),
            .frequency_penalty = at.get<float>(frequency_penalty),
            .prompt_len = at.get<int32_t>(prompt_len),
            .min_tokens = at.get<int32_t>(min_tokens),
            .num_bias = at.get<int32_t>(num_bias),
            .bias_ids = at.get<int32_t>(bias_ids),
            .bias_values = at.get<float>(bias_values),
            .num_bad_words = at.get<int32_t>(num_bad_words),
            .bad_word_ends = at.get<int32_t>(bad_word_ends),
            .bad_word_tokens = at.get<int32_t>(bad_word_tokens),
            .has_allowed = at.get<int32_t>(has_allowed),
            .allowed = at.get<uint32_t>(allowed),
            .first_mask = at.get<int32_t>(first_mask),
            .masks = at.get<uint32_t>(row_masks),
            .masks_offset = at.get<int64_t>(masks_offset),
            .top_k = at.get<int32_t>(top_k),
            .top_p = at.get<float>(top_p),
            .min_p = at.get<float>(min_p),
            .num_logprobs = at.get<int32_t>(num_logprobs),
            .num_prompt_logprobs = at.get<int32_t>(num_prompt_logprobs),
            .counts = at.get<int32_t>(counts),
            .seen = at.get<uint32_t>(seen),
            .vocab_size = vocab_size};
  }

  int32_t vocab_size;
  Handle adjusts, truncates, repetition_penalty, presence_penalty, frequency_penalty, prompt_len,
      min_tokens, num_bias, bias_ids, bias_values, num_bad_words, bad_word_ends, bad_word_tokens,
      has_allowed, allowed, first_mask, row_masks, masks_offset, top_k, top_p, min_p, num_logprobs,
      num_prompt_logprobs, counts, seen, temperature;
};

}  // namespace paceline::testing
