// SPDX-License-Identifier: Apache-2.0
#pragma once

// A simulator of everything between a request and the device: the real Scheduler, SlabPool,
// SequenceBlocks and build_batch on a virtual clock, with a device model instead of a runner
// (support/simulated_device.h) and a seeded adversary who chooses sizes, arrivals, forks,
// acceptance, stops, cancellations and how late results are read. After every tick the simulator
// checks the invariants that simulator.cc lists.
//
// What a request does depends on its own fields only, never on the other requests. So a script from
// which requests have been removed is a script, too, and `shrink` can search for a small one that
// still fails.

#include <cstdint>
#include <string>
#include <vector>

#include "batch/batch_builder.h"
#include "kv/kv_layout.h"
#include "scheduler/scheduler.h"

namespace paceline::testing {

// Tokens of a prompt up to `end` that other requests may have, too.
struct SimulatedSegment {
  int32_t end = 0;
  uint64_t salt = 0;
};

struct SimulatedRequest {
  int64_t arrival = 0;  // tick
  int32_t prompt_len = 1;
  int32_t max_tokens = 1;
  int32_t num_samples = 1;
  bool is_score = false;
  bool has_prompt_logprobs = false;
  bool can_stop = false;                   // samples may end before max_tokens
  int64_t cancel_tick = -1;                // -1: never
  int32_t cancelled_sample = -1;           // -1: all of them
  int32_t max_drafts = 0;                  // most drafts in a verify window, at most k
  int32_t acceptance = 50;                 // percent: probability of each draft to be right
  uint64_t salt = 0;                       // of its tokens, drafts and stops
  int32_t cache_salt = 0;                  // of the prefix cache; 0: none
  std::vector<SimulatedSegment> segments;  // the prompt begins with these, by end

  [[nodiscard]] int32_t limit() const { return is_score ? prompt_len : prompt_len + max_tokens; }
};

struct SimulationScript {
  uint64_t seed = 0;
  SchedulerOptions options;
  FirstRows first_rows = FirstRows::kNone;
  bool follows_windows = false;  // see BatchShape
  int32_t block_size = 1;
  std::vector<KvLayerShape> target;
  std::vector<KvLayerShape> draft;
  int64_t num_slabs = 0;
  uint64_t draft_schedule_seed = 0;  // of k' by iteration; 0: it is k
  // Prompt rows of every iteration with decoding ones are limited to this number or a few more; 0:
  // they are not.
  int32_t least_prompt_rows = 0;
  int32_t percent_early = 0;  // how often a result is read although more could be launched
  std::vector<SimulatedRequest> requests;
  bool keeps_trace = false;

  [[nodiscard]] KvLayout layout() const;
  [[nodiscard]] bool varies_drafts() const { return draft_schedule_seed != 0; }
  // A line for the engine and one for each request.
  [[nodiscard]] std::string text() const;
};

// What a broken host would do; the simulator must see each.
enum class SimulatedFault : uint8_t {
  kNone,
  kCompletesEarly,   // the pool hears of an iteration before it has run
  kDropsTableWrite,  // the device never gets the first table entry of an iteration
  kDropsBlockCopy,   // a fork's partly shared block is not copied
  kKeepsCancelled,   // a cancelled sequence keeps its blocks
  kAppendsTwice,     // the last token of a result is read twice
  kAdvancesTooFar,   // blocks leave a window while the next query still sees them
  kIgnoresSalt,      // the prefix cache is not told the salts of requests
  kNoLookahead,      // the prefix cache ignores the token after a block
  kCachesEnd,        // the prefix cache learns of blocks that the drafter has not reached
  kCachesMissed,     // the same of blocks that the drafter has missed
  kDropsMissed,      // the drafter drafts on without the tokens that it has missed
  kDropsPrompt,      // the same of a prompt
  kForgetsLag,       // its windows move on while it has tokens to catch up with
  kClaimsKept,       // a draft head catches up with hidden states that were not kept
  kForgetsHoles,     // KV that it has made without them is cached
};

struct SimulationReport {
  std::string violation;  // empty: all invariants held to the end
  std::string trace;      // keeps_trace: a line for each plan
  int64_t num_ticks = 0;
  int64_t num_iterations = 0;
  int64_t num_preemptions = 0;
  int64_t num_self_preemptions = 0;  // of the oldest sequence, alone and scattered
  int64_t num_stalls = 0;
  int64_t num_forks = 0;
  int64_t num_adoptions = 0;  // sequences that began with blocks of the prefix cache
  int64_t num_evicted = 0;    // blocks
  int64_t num_cancelled = 0;
  int64_t num_stopped = 0;
  int64_t num_catch_ups = 0;        // of a drafter, for a sequence
  int64_t num_parts = 0;            // of which with a part of the missed tokens
  int64_t num_left_out = 0;         // sequences, by iteration
  int64_t num_missed_chunks = 0;    // that the target has computed alone
  int64_t num_window_releases = 0;  // entries that reserve left null, or that advance released
  double longest_wait = 0;          // iterations waited, as a share of the bound
  int64_t longest_stall = 0;        // iterations in which the oldest sequence lacked blocks
};

// The script of a seed. Its pool has exactly the slabs that the largest request needs alone, or
// some more.
[[nodiscard]] SimulationScript make_script(uint64_t seed);

[[nodiscard]] SimulationReport simulate(const SimulationScript& script,
                                        SimulatedFault fault = SimulatedFault::kNone);

// The smallest script found that still violates an invariant under the fault. `script` does.
[[nodiscard]] SimulationScript shrink(SimulationScript script,
                                      SimulatedFault fault = SimulatedFault::kNone);

}  // namespace paceline::testing
