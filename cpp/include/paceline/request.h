// SPDX-License-Identifier: Apache-2.0
#pragma once

// A request and what comes back for it. Token ids in, token ids out.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace paceline {

using RequestId = int64_t;

// Added to a token's logit before everything else.
struct LogitBias {
  int32_t token = 0;
  float bias = 0;  // finite
};

// How the tokens of a request are chosen. What comes first is applied first: logit_bias, penalties,
// bad words, allowed tokens and min_tokens, then the temperature, top_k, top_p and min_p, then the
// draw. A token that is ruled out has no probability; if all are, the request ends with an error.
struct SamplingOptions {
  double temperature = 1.0;  // 0 = greedy; up to 1e6, and not 0 as a float32 only
  uint64_t seed = 0;         // same seed, same output, whatever else runs
  int32_t max_tokens = 16;   // >= 1, prompt + max_tokens is capped by max_model_len
  std::vector<int32_t>
      stop_token_ids;      // at most 8; the stop token is emitted, then the request ends
  int32_t min_tokens = 0;  // stop tokens are ruled out for the first so many output tokens

  std::vector<LogitBias> logit_bias;  // at most 1024, each token once
  // Logits of tokens in the prompt or the output are divided by it where positive, multiplied where
  // negative; > 0, 1 = off.
  double repetition_penalty = 1;
  double presence_penalty = 0;   // taken off the logits of tokens in the output
  double frequency_penalty = 0;  // the same, times how often they are there
  // Sequences of tokens that are never completed; at most 128, together at most 1024 tokens.
  std::vector<std::vector<int32_t>> bad_words;
  std::vector<int32_t> allowed_token_ids;  // empty: all

  int32_t top_k = 0;  // only the most probable so many; 0 = off
  double top_p = 1;   // of those, the fewest that make up this probability; in (0, 1]
  double min_p = 0;   // of those, the ones at least min_p times as probable as the best; [0, 1]

  // Logprobs of every emitted token and of the most probable so many at its place, from the
  // target's logits before all of the above; 0: of the token alone. -1: none, else at most
  // ExecutorOptions::max_logprobs.
  int32_t logprobs = -1;
  int32_t prompt_logprobs = -1;  // the same of the prompt's tokens, but for the first
};

// How probable the target found a token.
struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;  // natural logarithm of its probability
  int32_t rank = 0;   // 1 and how many tokens are more probable
};

struct Request {
  std::vector<int32_t> prompt;  // token ids, at least one, each in [0, vocab_size)
  SamplingOptions sampling;
  // Instead of generating, return the target's logits of every prompt position.
  bool score_prompt = false;
  // Independent outputs for the prompt, which is prefilled once where possible; 1..128. Sample i is
  // bit for bit what a request of its own with seed sampling.seed + i (modulo 2^64) gives.
  int32_t num_samples = 1;
};

enum class FinishReason : uint8_t { kNone, kStop, kLength, kCancelled, kError };

// Counters of one sample of a request. In every iteration that emits, emitted - accepted is 1,
// except in the sample's last one, where it may be 0.
struct SpeculationCounters {
  int64_t num_iterations = 0;        // verify iterations with drafts in which the request emitted
  int64_t num_draft_tokens = 0;      // drafts that were verified
  int64_t num_accepted_tokens = 0;   // of those, kept
  int64_t num_discarded_tokens = 0;  // drafts never judged: beyond the length limit or a stop token
  std::vector<int64_t> accepted_per_position;  // [k] times that draft i was kept
  std::vector<int64_t> drafted_per_position;   // [k] times that draft i was verified
};

// One delivery for one sample of a request: what an iteration emitted, or its end. Deliveries of a
// sample come in order; the one with finish_reason != kNone is its last.
struct RequestEvent {
  RequestId id = 0;
  int32_t sample = 0;              // 0..num_samples - 1
  std::vector<int32_t> token_ids;  // newly emitted
  // With logprobs: for each of token_ids the token itself, then the most probable ones, best first.
  std::vector<std::vector<TokenLogprob>> logprobs;
  // With prompt_logprobs: the same for the prompt's tokens from the second on. Comes once, with the
  // first token of sample 0; else null.
  std::shared_ptr<const std::vector<std::vector<TokenLogprob>>> prompt_logprobs;
  FinishReason finish_reason = FinishReason::kNone;
  std::string error;             // for kError: what happened
  int32_t num_drafted = 0;       // drafts verified in this iteration
  int32_t num_accepted = 0;      // of those, kept
  SpeculationCounters counters;  // totals; filled in the last event only
  std::shared_ptr<const std::vector<float>>
      logits;                  // [prompt_len, vocab]; score_prompt, last event
  int64_t arrival_us = 0;      // steady clock; last event only
  int64_t first_token_us = 0;  // steady clock; last event only, 0 without tokens
  int64_t finish_us = 0;       // steady clock; last event only
};

}  // namespace paceline
