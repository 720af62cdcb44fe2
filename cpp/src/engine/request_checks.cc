// SPDX-License-Identifier: Apache-2.0
#include "engine/request_checks.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "wire/limits.h"

namespace paceline {
namespace {

void check_token(const char* name, int64_t index, int32_t token, int32_t vocab_size) {
  if (token >= 0 && token < vocab_size) return;
  throw InvalidArgument(concat(name, "[", index, "] is ", token, "; allowed: 0 to ", vocab_size - 1,
                               " (vocab_size ", vocab_size, ")"));
}

void check_sampling(const SamplingOptions& s, int32_t vocab_size) {
  const auto refuse = [](const char* name, auto value, const char* allowed) {
    throw InvalidArgument(concat(name, " is ", value, "; allowed: ", allowed));
  };
  if (s.max_tokens < 1) refuse("max_tokens", s.max_tokens, "1 or more");
  if (s.min_tokens < 0 || s.min_tokens > s.max_tokens) {
    refuse("min_tokens", s.min_tokens, "0 to max_tokens");
  }
  // The ops read float32, so a value that becomes 0 or infinite as float32 is refused.
  const auto narrow = [](double value) { return static_cast<float>(value); };
  const bool is_greedy = s.temperature == 0;
  if (!(is_greedy || (narrow(s.temperature) > 0 && s.temperature <= kMaxTemperature))) {
    throw InvalidArgument(concat("temperature is ", s.temperature, "; allowed: 0 (greedy) to ",
                                 kMaxTemperature, ", and not so small that it is 0 as float32"));
  }
  if (!(std::isfinite(narrow(s.repetition_penalty)) && narrow(s.repetition_penalty) > 0)) {
    refuse("repetition_penalty", s.repetition_penalty, "a finite number > 0 (1 is off)");
  }
  if (!std::isfinite(narrow(s.presence_penalty))) {
    refuse("presence_penalty", s.presence_penalty, "a finite number (0 is off)");
  }
  if (!std::isfinite(narrow(s.frequency_penalty))) {
    refuse("frequency_penalty", s.frequency_penalty, "a finite number (0 is off)");
  }
  if (s.top_k < 0) refuse("top_k", s.top_k, "0 (off) or more");
  if (!(narrow(s.top_p) > 0 && s.top_p <= 1)) {
    refuse("top_p", s.top_p, "above 0 and at most 1 (off)");
  }
  if (!(s.min_p >= 0 && s.min_p <= 1)) refuse("min_p", s.min_p, "0 (off) to 1");

  const auto check_count = [](const char* name, size_t count, int32_t most, const char* what) {
    if (count <= static_cast<size_t>(most)) return;
    throw InvalidArgument(concat(name, " has ", count, what, "; allowed: at most ", most));
  };
  check_count("stop_token_ids", s.stop_token_ids.size(), kMaxStopIds, " entries");
  check_count("logit_bias", s.logit_bias.size(), kMaxLogitBias, " entries");
  check_count("bad_words", s.bad_words.size(), kMaxBadWords, " entries");
  for (size_t i = 0; i < s.stop_token_ids.size(); ++i) {
    check_token("stop_token_ids", static_cast<int64_t>(i), s.stop_token_ids[i], vocab_size);
  }
  std::vector<int32_t> biased;
  for (size_t i = 0; i < s.logit_bias.size(); ++i) {
    check_token("logit_bias", static_cast<int64_t>(i), s.logit_bias[i].token, vocab_size);
    if (!std::isfinite(s.logit_bias[i].bias)) {
      refuse("logit_bias", s.logit_bias[i].bias, "finite numbers");
    }
    biased.push_back(s.logit_bias[i].token);
  }
  std::sort(biased.begin(), biased.end());
  if (const auto twice = std::adjacent_find(biased.begin(), biased.end()); twice != biased.end()) {
    throw InvalidArgument(concat("logit_bias has token ", *twice, " twice; allowed: once"));
  }
  size_t num_bad_tokens = 0;
  for (size_t w = 0; w < s.bad_words.size(); ++w) {
    const std::vector<int32_t>& word = s.bad_words[w];
    const std::string name = "bad_words[" + std::to_string(w) + "]";
    if (word.empty()) {
      throw InvalidArgument(concat(name, " is empty; allowed: at least one token id"));
    }
    num_bad_tokens += word.size();
    for (size_t i = 0; i < word.size(); ++i) {
      check_token(name.c_str(), static_cast<int64_t>(i), word[i], vocab_size);
    }
  }
  check_count("bad_words", num_bad_tokens, kMaxBadWordTokens, " tokens in all");
  for (size_t i = 0; i < s.allowed_token_ids.size(); ++i) {
    check_token("allowed_token_ids", static_cast<int64_t>(i), s.allowed_token_ids[i], vocab_size);
  }
}

void check_method(const std::string& method, const SourceMethods& methods) {
  if (method.empty() || sources_of(method, methods) != 0) return;
  std::string names;
  for (const std::string_view name : methods) {
    if (!name.empty()) names += concat(names.empty() ? "'" : " or '", name, "'");
  }
  throw InvalidArgument(
      concat("speculative_method is '", method.substr(0, 80), "', ",
             names.empty() ? std::string("but there is no drafter; leave it out")
                           : concat("which is not a method of this engine; allowed: ", names,
                                    ", or leave it out for all")));
}

// Refuses resumed tokens that leave no prompt or no token to generate, and what they cannot be
// combined with.
void check_resumed(const Request& request) {
  const int32_t resumed = request.num_resumed_tokens;
  if (resumed == 0) return;
  const auto most =
      std::min(static_cast<int64_t>(request.prompt.size()), int64_t{request.sampling.max_tokens}) -
      1;
  if (resumed < 0 || resumed > most) {
    throw InvalidArgument(concat("num_resumed_tokens is ", resumed, "; allowed: 0 to ", most,
                                 ", less than the prompt and less than max_tokens"));
  }
  if (is_score(request) || request.num_samples > 1 || request.sampling.prompt_logprobs >= 0) {
    throw InvalidArgument(concat("num_resumed_tokens is ", resumed,
                                 "; allowed with prompt_logprobs, several samples, score_prompt "
                                 "or hidden_layers: 0"));
  }
}

// Refuses more logprobs than the engine has buffers for, and logprobs together with logits.
void check_logprobs(const Request& request, int32_t max_logprobs) {
  const auto check = [&](const char* name, int32_t value) {
    if (value == -1) return;
    if (max_logprobs == 0) {
      throw InvalidArgument(
          concat(name, " is ", value, "; allowed: -1 (none), since max_logprobs is 0; raise it"));
    }
    if (value < 0 || value > max_logprobs) {
      throw InvalidArgument(
          concat(name, " is ", value, "; allowed: -1 (none) to ", max_logprobs, " (max_logprobs)"));
    }
    if (is_score(request)) {
      throw InvalidArgument(concat(name, " is ", value,
                                   ", but a request with score_prompt or hidden_layers emits "
                                   "nothing; allowed with it: -1 (none)"));
    }
  };
  check("logprobs", request.sampling.logprobs);
  check("prompt_logprobs", request.sampling.prompt_logprobs);
}

void check_constraints(const Request& request, const RequestBounds& bounds) {
  const size_t count = request.constraints.size();
  if (count == 0) return;
  if (is_score(request)) {
    throw InvalidArgument(
        "constraints is not empty, but a request with score_prompt or hidden_layers emits nothing; "
        "leave it out");
  }
  if (!bounds.allows_constraints) {
    throw InvalidArgument(
        "constraints is not empty, but the engine's acceptance method is 'synthetic' or its device "
        "the null device, which emit any token; allowed with them: no constraints");
  }
  if (count != static_cast<size_t>(request.num_samples)) {
    throw InvalidArgument(concat("constraints has ", count, " entries and num_samples is ",
                                 request.num_samples, "; allowed: one for each sample, or none"));
  }
  for (size_t i = 0; i < count; ++i) {
    if (request.constraints[i] == nullptr) {
      throw InvalidArgument(concat("constraints[", i, "] is null; give a constraint"));
    }
  }
}

// A salt with a NUL would be another one for C hosts, whose strings end there.
void check_cache_salt(const std::string& salt) {
  if (salt.size() > static_cast<size_t>(kMaxCacheSaltBytes)) {
    throw InvalidArgument(concat("cache_salt has ", salt.size(), " bytes; allowed: at most ",
                                 kMaxCacheSaltBytes, "; send a hash of it"));
  }
  if (const size_t nul = salt.find('\0'); nul != std::string::npos) {
    throw InvalidArgument(concat("cache_salt has a NUL character at byte ", nul,
                                 "; allowed: a string without; send a hash of it in hexadecimal"));
  }
}

}  // namespace

void check_request(const Request& request, const RequestBounds& bounds) {
  const auto prompt_len = static_cast<int64_t>(request.prompt.size());
  if (prompt_len == 0) {
    throw InvalidArgument("prompt is empty; give at least one token id");
  }
  const int64_t longest = bounds.max_model_len - (is_score(request) ? 0 : 1);
  if (prompt_len > longest) {
    throw InvalidArgument(concat("prompt has ", prompt_len, " tokens; max_model_len ",
                                 bounds.max_model_len, " allows at most ", longest,
                                 "; shorten the prompt or raise max_model_len"));
  }
  for (int64_t i = 0; i < prompt_len; ++i) {
    const int32_t token = request.prompt[i];
    if (token < 0 || token >= bounds.vocab_size) {
      throw InvalidArgument(concat("prompt token ", i, " is ", token, "; allowed: 0 to ",
                                   bounds.vocab_size - 1, " (vocab_size ", bounds.vocab_size, ")"));
    }
  }
  if (request.num_samples < 1 || request.num_samples > kMaxSamples) {
    throw InvalidArgument(
        concat("num_samples is ", request.num_samples, "; allowed: 1 to ", kMaxSamples));
  }
  if (is_score(request) && request.num_samples > 1) {
    throw InvalidArgument(concat("num_samples is ", request.num_samples,
                                 ", but a scored prompt has no samples; set it to 1"));
  }
  if (const int32_t k = bounds.num_draft_tokens;
      request.num_speculative_tokens < -1 || request.num_speculative_tokens > k) {
    throw InvalidArgument(
        concat("num_speculative_tokens is ", request.num_speculative_tokens, "; allowed: 0 to ", k,
               k == 0 ? ", since there is no drafter" : " (num_speculative_tokens of the engine)",
               ", or -1 for all of these"));
  }
  check_method(request.speculative_method, bounds.methods);
  for (size_t i = 0; i < request.hidden_layers.size(); ++i) {
    const int32_t layer = request.hidden_layers[i];
    if (layer < 0 || layer > bounds.num_layers) {
      throw InvalidArgument(concat("hidden_layers[", i, "] is ", layer,
                                   "; allowed: 0 (embeddings) to ", bounds.num_layers,
                                   " (after the final norm)"));
    }
    if (bounds.num_streams > 1 && layer < bounds.num_layers) {
      throw InvalidArgument(
          concat("hidden_layers[", i, "] is ", layer, ", where this model has ", bounds.num_streams,
                 " residual streams; allowed: ", bounds.num_layers, " (after the final norm)"));
    }
  }
  if (request.keeps_logits_on_device && !request.score_prompt) {
    throw InvalidArgument(
        "keeps_logits_on_device is true and score_prompt false; set score_prompt, or leave it out");
  }
  check_sampling(request.sampling, bounds.vocab_size);
  check_logprobs(request, bounds.max_logprobs);
  check_resumed(request);
  check_cache_salt(request.cache_salt);
  check_constraints(request, bounds);
}

}  // namespace paceline
