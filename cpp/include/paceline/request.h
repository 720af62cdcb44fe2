// SPDX-License-Identifier: Apache-2.0
#pragma once

// A request and the events that answer it, in token ids.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/device.h>
#include <paceline/guide.h>

namespace paceline {

// The name of a request, which Executor::add_request gives it.
using RequestId = int64_t;

// A number that is added to the logit of a token, before all other processing.
struct LogitBias {
  int32_t token = 0;  // in [0, vocab_size)
  float bias = 0;     // finite
};

// How the tokens of a request are chosen. The fields are applied in this order: logit_bias, the
// penalties, bad_words, allowed_token_ids and min_tokens, the temperature, top_k, top_p and min_p,
// the draw. An excluded token has probability 0. If all tokens are excluded, the request ends with
// an error. docs/sampling.md has the formulas.
struct SamplingOptions {
  // 0 is greedy. Otherwise at most 1e6, and large enough not to round to 0 as a float32.
  double temperature = 1.0;
  // Output is a function of request and seed, whatever else runs. With AcceptMethod::kStandard and
  // kBlock it also depends on the drafts.
  uint64_t seed = 0;
  int32_t max_tokens = 16;  // >= 1; prompt + output also end at ExecutorOptions::max_model_len
  // At most 8 ids. A stop token is emitted, and the request ends.
  std::vector<int32_t> stop_token_ids;
  int32_t min_tokens = 0;  // output tokens before a stop token is allowed, 0..max_tokens

  std::vector<LogitBias> logit_bias;  // at most 1024, each token once
  // Divides positive and multiplies negative logits of tokens that occur in prompt or output; > 0,
  // 1 is off.
  double repetition_penalty = 1;
  double presence_penalty = 0;   // is subtracted from the logits of tokens that occur in the output
  double frequency_penalty = 0;  // the same, times the number of occurrences in the output
  // Token sequences that the output never completes; at most 128, with at most 1024 tokens in all.
  std::vector<std::vector<int32_t>> bad_words;
  std::vector<int32_t> allowed_token_ids;  // the only tokens that may be drawn; empty allows all

  int32_t top_k = 0;  // keeps the top_k most likely tokens; 0 is off
  double top_p = 1;   // of these, keeps the fewest whose probabilities reach top_p; in (0, 1]
  double min_p =
      0;  // of these, keeps those of at least min_p times the highest probability; [0, 1]

  // Number of most likely tokens whose logprobs are returned at each position beside the emitted
  // token's; 0 returns the emitted token's alone, -1 none. At most ExecutorOptions::max_logprobs.
  // Logprobs come from the raw logits.
  int32_t logprobs = -1;
  int32_t prompt_logprobs = -1;  // the same for the prompt's tokens, without the first
};

// The probability that the target gives a token.
struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;  // natural logarithm of the probability
  int32_t rank = 0;   // 1 + the number of more probable tokens
};

// float32 values that the engine leaves in memory of the target's device, row-major. They are
// complete. The memory is freed with the last owner of `data`, which may outlive the engine.
struct DeviceValues {
  std::shared_ptr<float> data;  // null: none
  std::vector<int64_t> shape;
  Device device = Device::kCpu;
};

// What a caller asks of an engine.
struct Request {
  std::vector<int32_t> prompt;  // token ids, at least one, each in [0, vocab_size)
  SamplingOptions sampling;
  // True: generates nothing and returns the target's logits at every prompt position.
  bool score_prompt = false;
  // With score_prompt: the logits stay on the device of the target, as RequestEvent::device_logits.
  bool keeps_logits_on_device = false;
  // Not empty: generates nothing and returns hidden states of the target at every prompt position.
  // 0 is the input of the first layer, i the output of the i-th layer, and the number of layers the
  // output of the final norm.
  std::vector<int32_t> hidden_layers;
  // The number of tokens at the prompt's end that are output of an earlier run of this request. The
  // request goes on after them as if it had not been interrupted: they count for max_tokens,
  // min_tokens and the penalties, and the noise goes on. With AcceptMethod::kCoupled the output is
  // the same, token for token; the others draw from the same distribution. Less than the prompt and
  // max_tokens; with 1 sample and without prompt_logprobs.
  int32_t num_resumed_tokens = 0;
  // Most drafts that are verified at once: 0 (none, plain decoding) to
  // ExecutorOptions::speculative's num_speculative_tokens, or -1 for all of these. With
  // AcceptMethod::kCoupled it changes no token; with kStandard and kBlock it changes what a seed
  // gives, but not its distribution.
  int32_t num_speculative_tokens = -1;
  // The method that may draft for the request, of those of the engine: "ngram" for prompt lookup in
  // front of a model alone, or the model's method for the model alone. Empty: all of them. As
  // num_speculative_tokens, it changes no token. After a change of the drafter to one without this
  // method, the request goes on without drafts.
  std::string speculative_method;
  // Not empty: one for each sample, which may emit only what its constraint allows. Not allowed
  // with score_prompt, hidden_layers and AcceptMethod::kSynthetic.
  std::vector<std::shared_ptr<TokenConstraint>> constraints;
  // Number of independent outputs, 1..128. The prompt is prefilled once where possible. Sample i is
  // bit for bit the output of a separate request with seed sampling.seed + i (modulo 2^64).
  int32_t num_samples = 1;
  // Requests of different salts share no KV: each salt has a prefix cache of its own. At most 512
  // bytes, none of which is 0; requests with the empty salt share theirs.
  std::string cache_salt;
};

// Why a sample ended; kNone while it runs.
enum class FinishReason : uint8_t {
  kNone,
  kStop,       // a stop token was emitted
  kLength,     // max_tokens or max_model_len was reached, or a scored prompt is complete
  kCancelled,  // Executor::cancel
  kError,      // RequestEvent::error says what happened
};

// Counters of one sample. An iteration that emits tokens emits one more than it accepts, except a
// sample's last iteration, which may emit as many.
struct SpeculationCounters {
  int64_t num_iterations = 0;        // iterations with drafts in which the sample emitted tokens
  int64_t num_draft_tokens = 0;      // drafts that were verified
  int64_t num_accepted_tokens = 0;   // verified drafts that were accepted
  int64_t num_discarded_tokens = 0;  // drafts never judged, after a stop token or the limit
  // [k, or Request::num_speculative_tokens] number of times that draft i was accepted, and verified
  std::vector<int64_t> accepted_per_position;
  std::vector<int64_t> drafted_per_position;
};

// What one iteration delivers to one sample of a request: the tokens that it emitted, or the end of
// the sample. Events of a sample come in order, and the last one has finish_reason != kNone. Times
// are microseconds of the steady clock.
struct RequestEvent {
  RequestId request_id = 0;
  int32_t sample = 0;              // 0..num_samples - 1
  std::vector<int32_t> token_ids;  // emitted by this iteration
  // [token_ids][1 + logprobs] where the request asks for logprobs, otherwise empty. The emitted
  // token comes first, then the most likely tokens, highest probability first.
  std::vector<std::vector<TokenLogprob>> logprobs;
  // [prompt_len - 1][1 + prompt_logprobs], the same for the prompt's tokens from the second on. It
  // comes once, with the first token of sample 0, and is null in all other events.
  std::shared_ptr<const std::vector<std::vector<TokenLogprob>>> prompt_logprobs;
  FinishReason finish_reason = FinishReason::kNone;  // kNone except in the last event
  std::string error;                                 // with kError: what happened
  int32_t num_drafted = 0;                           // drafts that this iteration verified
  int32_t num_accepted = 0;                          // verified drafts that it accepted
  // The method that made these drafts, such as "ngram": a literal. Empty without drafts.
  std::string_view drafter;
  SpeculationCounters counters;  // totals of the sample; in the last event only
  // Prompt tokens whose KV was taken over from the prefix cache or from another sample of the
  // request, instead of being computed, when the sample first ran; in the last event only.
  int32_t num_cached_tokens = 0;
  // [prompt_len, vocab_size]; in the last event of a completed score_prompt only, otherwise null.
  std::shared_ptr<const std::vector<float>> logits;
  DeviceValues device_logits;  // instead of `logits`, with keeps_logits_on_device
  // [hidden_layers, prompt_len, hidden_size]; in the last event of a completed request with
  // hidden_layers only.
  DeviceValues hidden_states;
  int64_t arrival_us = 0;      // when the request was queued; in the last event only
  int64_t first_token_us = 0;  // of the first output token, 0 without one; in the last event only
  int64_t finish_us = 0;       // of this event; in the last event only
};

}  // namespace paceline
