// SPDX-License-Identifier: Apache-2.0
#pragma once

// What an embedder may set. Plain data: `Executor` checks every field and refuses, it never
// adjusts.

#include <cstdint>
#include <string>

namespace paceline {

// How the verdict on a draft is reached.
enum class AcceptMethod : uint8_t {
  // Keep a draft while it equals the target's own draw from shared noise: the output is bit for
  // bit that of plain decoding.
  kCoupled,
  // Rejection sampling: keep a draft with the chance that target and drafter give it, and draw what
  // takes the place of the first that is not kept from what is left of the target's law. The output
  // follows the target's law; which tokens a seed gives depends on what was drafted.
  kStandard,
  // Block verification (Sun et al., 2024): the same, judging the drafts of a window together. It
  // keeps at least as many of them on average.
  kBlock,
  // Do all the work of kCoupled, then override the verdict so that the mean acceptance length is
  // `synthetic_acceptance_length`. For benches on dummy weights; the text is meaningless.
  kSynthetic,
};

// Who replays the captured draft step. All drivers give identical bits.
enum class DraftDriver : uint8_t {
  kUnrolled,  // k-1 copies of the step inside one program of the whole iteration
  kReplay,    // the one-step program is launched k-1 times
  kWhile,     // the device repeats the one-step program while there is something to draft
  kEager,     // nothing is captured; for debugging and as the reference in tests
};

// Where a drafter with fixed positions (Gemma 4 MTP) stands while it drafts; its keys are the same.
enum class DraftPosition : uint8_t {
  kLast,  // at the last token that has KV, one before the newest
  kNext,  // at the newest token
};

struct SpeculativeOptions {
  int32_t num_speculative_tokens = 0;  // k: 0 = plain decoding, else 1..16
  AcceptMethod accept_method = AcceptMethod::kCoupled;
  double synthetic_acceptance_length = 0;  // kSynthetic only: in [1, k+1], bonus token included
  // kStandard and kBlock. Whether drafts are drawn at the request's temperature from a law that the
  // verdict knows; else they are the drafter's likeliest tokens. False: only there; prompt lookup
  // has no law to draw from and needs it.
  bool samples_drafts = true;
  // kStandard and kBlock with drafts that are drawn: how many of the drafter's likeliest tokens
  // that law is made of. 1..256, or 0 for 64; elsewhere only 0.
  int32_t num_draft_proposals = 0;
  // A sequence drafts no further once the drafter's own probability (softmax of its logits at
  // temperature 1, cut by the request's top_k, top_p and min_p) of a token it has drawn is below
  // this; that token is still verified. 0: off. Any other value in (0, 1) needs
  // DraftDriver::kWhile.
  double draft_stop_threshold = 0;
  // Prompt lookup, in place of a drafter: the k tokens that followed the last n of a sequence when
  // they occurred before, for the longest n in [ngram_min, ngram_max] that did. 0 and 0: off; else
  // 1 <= ngram_min <= ngram_max <= 256.
  int32_t ngram_min = 0;
  int32_t ngram_max = 0;
  // kNext: only with a drafter whose positions are fixed.
  DraftPosition draft_position = DraftPosition::kLast;
};

struct ExecutorOptions {
  int32_t max_model_len = 0;  // tokens of prompt + output of one request; > 0
  int32_t max_num_seqs = 64;  // samples that run at the same time, 1..1024
  // Rows of one iteration; from max_num_seqs * (k+1) to 524,288.
  int32_t max_num_batched_tokens = 2048;
  int32_t prefill_chunk_size = 0;  // most prompt tokens of one request in one iteration; 0 = budget
  int32_t max_waiting_requests = 0;  // requests that may queue; 0 = no bound
  // Bytes of the KV pool, all groups together. 0: as default_kv_cache_size() chooses.
  int64_t kv_cache_bytes = 0;
  int32_t block_size = 16;  // tokens of a KV block, 1..256
  int32_t num_threads = 0;  // CPU threads of the ops; 0 = all cores
  // The most probable tokens whose logprobs a request may ask for, 0..64. 0: none may ask for
  // logprobs, and no memory is taken for them.
  int32_t max_logprobs = 0;
  SpeculativeOptions speculative;
  DraftDriver draft_driver = DraftDriver::kUnrolled;

  // For tests. 0 = a real asynchronous device; n = iteration i runs, and its results appear, only
  // once iteration i+n has been launched (0..2).
  int32_t device_lateness = 0;
  // For tests: sliding layers read per-token lists of visible slots instead of a [begin, end)
  // range.
  bool use_window_lists = false;
  // For tests: the engine's thread sleeps for a random time of at most this before each of its
  // stages (plan, launch, read). 0: it does not.
  int32_t host_delay_max_us = 0;
  // For benches of the host side: no op runs, every sequence emits token 0 and keeps no draft.
  bool use_null_device = false;
  // For tests: fill a KV block with NaN as soon as it may be reused, so that a stale read shows.
  bool poison_freed_blocks = false;
};

}  // namespace paceline
