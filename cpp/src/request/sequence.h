// SPDX-License-Identifier: Apache-2.0
#pragma once

// One sample of a request while the engine serves it: what the host knows about it, which lags
// behind the device by the iterations in flight. The engine owns it. The scheduler writes what
// follows from its plans: phases, blocks, numbers of computed rows. The engine writes what comes
// back from the device, such as tokens, counters and logprobs.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <paceline/request.h>

#include "kv/prefix_cache.h"
#include "kv/sequence_blocks.h"
#include "request/window_guide.h"
#include "wire/batch_shape.h"
#include "wire/draft_source.h"

namespace paceline {

struct Sequence {
  enum class Phase : uint8_t { kWaiting, kPrefill, kDecode, kFinished };

  RequestId id = 0;
  int32_t sample = 0;             // index among the samples of its request
  int32_t num_samples = 1;        // number of samples of its request
  SamplingOptions sampling;       // includes the sample's own seed
  std::vector<uint32_t> allowed;  // one bit per token of the vocabulary; empty: all are allowed
  bool is_score = false;          // generates nothing and returns logits, hidden states or both
  bool skips_logits = false;      // a score that returns hidden states only
  std::vector<int32_t> hidden_layers;  // see Request
  Phase phase = Phase::kWaiting;

  CacheSalt cache_salt;         // see Request
  std::vector<int32_t> tokens;  // prompt and the output that the host has read
  int32_t prompt_len = 0;
  int32_t limit = 0;              // length of prompt and output at which the request ends
  int32_t max_drafts = 0;         // most drafts in a verify window, at most k
  int32_t own_drafts = -1;        // Request::num_speculative_tokens
  std::string own_method;         // Request::speculative_method
  int32_t sources = kAllSources;  // those that may draft, as bits

  int32_t seq_slot = -1;          // row of the device's per-sequence state while the sequence runs
  bool needs_reset = false;       // the next launch must initialise the sequence slot
  int32_t num_prefilled = 0;      // tokens whose prefill has been launched, or taken over by a fork
                                  // or from the prefix cache
  int32_t num_cached_tokens = 0;  // prompt tokens taken over when the sequence was first admitted
  // Tokens whose KV is known to be complete, in the groups of the drafter too unless it may miss
  // prompts, and where the prefix cache has them.
  int32_t num_computed = 0;
  PrefixCache::Cursor cached_to;
  PrefixCache::Cursor drafted_to;  // the same for the groups of target and drafter
  int64_t newest_prefill = -1;     // iteration of the newest launch that prefilled
  SequenceBlocks blocks;
  // Most drafts that the device has for the next window.
  int32_t num_drafts_ahead = 0;
  // Prompt tokens that have been launched, and tokens that launches have emitted, or will, which
  // the drafter has missed.
  int32_t num_missed = 0;
  // Of a draft head: the newest of these for which the target's hidden states are kept.
  int32_t num_kept = 0;
  // The drafter has the KV of the first num_followed - 1 tokens, and maybe of one more. Not known
  // while launches are in flight in which it drafts.
  int32_t num_followed = 1;
  bool misses_prompt = false;  // the target computes the prompt alone
  // The drafter has followed some tokens without the hidden states of the target, which were not
  // kept, or with weights that have changed since. Its KV serves this sequence, but not
  // others.
  bool has_holes = false;
  // Where the sequence parts from earlier ones whose KV is cached, but not the state there; -1: it
  // does not.
  int32_t parting = -1;

  // Incremented by preemption. Results of launches from an earlier epoch are dropped, since
  // recomputation yields the same tokens again.
  int64_t epoch = 0;
  // Launches of this epoch that have not been read and may emit tokens.
  int32_t emitting_in_flight = 0;
  int32_t launches_in_flight = 0;  // launches that still refer to this object

  // Of a guided sequence: what makes its windows, the next window, and the number of tokens that
  // the guide has been given, 0 at first.
  std::shared_ptr<WindowGuide> guide;
  GuidedWindow window;
  int32_t num_guided = 0;

  SpeculationCounters counters;
  // Of a score, where they are asked for: [prompt_len, vocab], on the host or on the device, and
  // [hidden_layers, prompt_len, hidden].
  std::shared_ptr<std::vector<float>> logits;
  DeviceValues device_logits;
  DeviceValues hidden_states;
  // Set with prompt_logprobs until they are delivered: [prompt_len - 1], filled as chunks are read.
  std::shared_ptr<std::vector<std::vector<TokenLogprob>>> prompt_logprobs;
  int64_t arrival_us = 0;
  int64_t first_token_us = 0;

  [[nodiscard]] int32_t known_len() const { return static_cast<int32_t>(tokens.size()); }
  // max_drafts with this k, if all sources may draft.
  [[nodiscard]] int32_t wanted_drafts(int32_t k) const {
    return own_drafts >= 0 ? std::min(own_drafts, k) : k;
  }
  // Sets what follows from the drafter: its k, and the methods of its sources.
  void set_drafter(int32_t k, const SourceMethods& methods) {
    sources = own_method.empty() ? kAllSources : sources_of(own_method, methods);
    max_drafts = sources == 0 ? 0 : wanted_drafts(k);
  }
  [[nodiscard]] bool needs_masks() const {
    return guide != nullptr && guide->constraint != nullptr;
  }
  // Whether the sequence must wait with rows of this kind until the host has read its last result
  // and its guide has made the next window.
  [[nodiscard]] bool lacks_window(RowKind kind) const {
    const bool takes_window = kind == RowKind::kDecode
                                  ? guide != nullptr
                                  : kind == RowKind::kPrefillFinal && needs_masks();
    return takes_window && (emitting_in_flight > 0 || window.num_tokens != known_len());
  }
};

}  // namespace paceline
