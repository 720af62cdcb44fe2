// SPDX-License-Identifier: Apache-2.0
#pragma once

// A request and what comes back for it. Token ids in, token ids out.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace paceline {

using RequestId = int64_t;

struct SamplingOptions {
  double temperature = 1.0;       // 0 = greedy; finite and >= 0
  uint64_t seed = 0;              // same seed, same output, whatever else runs
  int32_t max_tokens = 16;        // >= 1, prompt + max_tokens is capped by max_model_len
  std::vector<int32_t> stop_token_ids;  // at most 8; the stop token is emitted, then the request ends
};

struct Request {
  std::vector<int32_t> prompt;    // token ids, at least one, each in [0, vocab_size)
  SamplingOptions sampling;
  // Instead of generating, return the target's logits of every prompt position.
  bool score_prompt = false;
};

enum class FinishReason : uint8_t { kNone, kStop, kLength, kCancelled, kError };

// Counters of one request. In every iteration that emits, emitted - accepted is 1, except in the
// request's last one, where it may be 0.
struct SpeculationCounters {
  int64_t num_iterations = 0;       // verify iterations with drafts in which the request emitted
  int64_t num_draft_tokens = 0;     // drafts that were verified
  int64_t num_accepted_tokens = 0;  // of those, kept
  int64_t num_discarded_tokens = 0; // drafts never judged: beyond the length limit or a stop token
  std::vector<int64_t> accepted_per_position;  // [k] times that draft i was kept
  std::vector<int64_t> drafted_per_position;   // [k] times that draft i was verified
};

// One delivery for one request: what an iteration emitted, or its end. Deliveries of a request
// come in order; the one with finish_reason != kNone is the last.
struct RequestEvent {
  RequestId id = 0;
  std::vector<int32_t> token_ids;     // newly emitted
  FinishReason finish_reason = FinishReason::kNone;
  std::string error;                  // for kError: what happened
  int32_t num_drafted = 0;            // drafts verified in this iteration
  int32_t num_accepted = 0;           // of those, kept
  SpeculationCounters counters;       // totals; filled in the last event only
  std::shared_ptr<const std::vector<float>> logits;  // [prompt_len, vocab]; score_prompt, last event
  int64_t arrival_us = 0;             // steady clock; last event only
  int64_t first_token_us = 0;         // steady clock; last event only, 0 without tokens
  int64_t finish_us = 0;              // steady clock; last event only
};

}  // namespace paceline
