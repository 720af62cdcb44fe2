// SPDX-License-Identifier: Apache-2.0
// The scheduler and the pool under an adversary: support/simulator.h, on 4,000 seeds.
//
// PACELINE_SEED=n runs seed n alone; with PACELINE_SHRINK=1 a violation is then reduced to a small
// script, which is printed. PACELINE_TEST_LEVEL=n runs n * n times as many seeds.
#include "support/simulator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string>

#include "support/seed.h"

namespace paceline::testing {
namespace {

std::string last_lines(const std::string& text, int32_t count) {
  size_t begin = text.size();
  for (; begin > 0 && count >= 0; --begin) count -= text[begin - 1] == '\n' ? 1 : 0;
  return begin > 0 ? text.substr(begin + 1) : text;
}

void fail_with(const SimulationScript& script, const SimulationReport& report) {
  if (std::getenv("PACELINE_SHRINK") == nullptr) {
    FAIL() << "PACELINE_SEED=" << script.seed << ": " << report.violation
           << "\nPACELINE_SEED=" << script.seed << " PACELINE_SHRINK=1 looks for a small script";
  }
  SimulationScript small = shrink(script);
  small.keeps_trace = true;
  const SimulationReport of_small = simulate(small);
  FAIL() << "PACELINE_SEED=" << script.seed << ": " << report.violation
         << "\nshrunk to: " << of_small.violation << "\n"
         << small.text() << last_lines(of_small.trace, 25);
}

TEST(SchedulerSimulation, InvariantsHoldForAllSeeds) {
  const bool is_single = std::getenv("PACELINE_SEED") != nullptr;
  const uint64_t first_seed = seed_from_env(1);
  const auto level = static_cast<uint64_t>(test_level());
  const uint64_t num_seeds = is_single ? 1 : 4000 * level * level;
  SimulationReport sum;
  for (uint64_t seed = first_seed; seed < first_seed + num_seeds; ++seed) {
    const SimulationScript script = make_script(seed);
    const SimulationReport report = simulate(script);
    if (!report.violation.empty()) fail_with(script, report);
    if (HasFatalFailure()) return;
    sum.num_iterations += report.num_iterations;
    sum.num_preemptions += report.num_preemptions;
    sum.num_self_preemptions += report.num_self_preemptions;
    sum.num_stalls += report.num_stalls;
    sum.num_forks += report.num_forks;
    sum.num_ticks += report.num_ticks;
    sum.num_adoptions += report.num_adoptions;
    sum.num_evicted += report.num_evicted;
    sum.num_cancelled += report.num_cancelled;
    sum.num_stopped += report.num_stopped;
    sum.num_catch_ups += report.num_catch_ups;
    sum.num_parts += report.num_parts;
    sum.num_left_out += report.num_left_out;
    sum.num_missed_chunks += report.num_missed_chunks;
    sum.num_window_releases += report.num_window_releases;
    sum.longest_wait = std::max(sum.longest_wait, report.longest_wait);
    sum.longest_stall = std::max(sum.longest_stall, report.longest_stall);
  }
  std::cout << num_seeds << " seeds: " << sum.num_ticks << " ticks, " << sum.num_iterations
            << " iterations, " << sum.num_adoptions << " hits of the prefix cache, "
            << sum.num_evicted << " blocks evicted, " << sum.num_preemptions << " preemptions, "
            << sum.num_self_preemptions << " of the oldest, " << sum.num_stalls
            << " stalls, longest " << sum.longest_stall << ", " << sum.num_forks << " forks, "
            << sum.num_cancelled << " cancelled, " << sum.num_stopped << " stopped, "
            << sum.num_catch_ups << " times a drafter caught up, " << sum.num_parts << " in parts, "
            << sum.num_left_out << " sequences left out, " << sum.num_missed_chunks
            << " chunks without the drafter, " << sum.num_window_releases
            << " blocks out of windows, longest wait " << sum.longest_wait << " of its bound\n";
  if (is_single) return;
  EXPECT_GE(sum.num_ticks, 200'000) << "integrity of pool and prefix cache is checked in each";
  // All kinds of events must really have happened.
  for (const int64_t count :
       {sum.num_preemptions, sum.num_stalls, sum.num_forks, sum.num_adoptions, sum.num_evicted,
        sum.num_cancelled, sum.num_stopped, sum.num_catch_ups, sum.num_parts, sum.num_left_out,
        sum.num_missed_chunks, sum.num_window_releases}) {
    EXPECT_GT(count, 0);
  }
}

// Shrunk from a seed with which the oldest sequence never ended: its blocks lay scattered, it
// preempted itself, and others, admitted beside it, scattered its blocks again.
TEST(SchedulerSimulation, WhatLackedBlocksAloneIsRecomputedAlone) {
  SimulationScript script;
  script.options = {.max_num_seqs = 4,
                    .max_num_batched_tokens = 19,
                    .prefill_chunk_size = 8,
                    .max_score_rows = 16,
                    .num_draft_tokens = 3,
                    .max_in_flight = 4};
  script.block_size = 2;
  script.target = {{SlidingKv{2}, 1, 24}, {FullKv{}, 1, 40}, {FullKv{}, 1, 24}};
  script.num_slabs = 16;
  script.requests = {
      {.arrival = 12, .prompt_len = 1, .max_tokens = 6, .max_drafts = 3, .acceptance = 0},
      {.arrival = 12,
       .prompt_len = 23,
       .max_tokens = 12,
       .num_samples = 3,
       .max_drafts = 3,
       .acceptance = 0},
      {.arrival = 16, .prompt_len = 19, .max_tokens = 6, .max_drafts = 3, .acceptance = 0},
      {.arrival = 16, .prompt_len = 1, .max_tokens = 8, .max_drafts = 3, .acceptance = 0},
      {.arrival = 16, .prompt_len = 3, .max_tokens = 1, .max_drafts = 3, .acceptance = 0}};
  const SimulationReport report = simulate(script);
  EXPECT_EQ(report.violation, "");
  EXPECT_EQ(report.num_self_preemptions, 2) << "the script no longer shows what it should";
}

// A simulator that cannot fail proves nothing; and what it finds must become small.
TEST(SchedulerSimulation, SeesAndShrinksPlantedFaults) {
  for (const SimulatedFault fault :
       {SimulatedFault::kCompletesEarly, SimulatedFault::kDropsTableWrite,
        SimulatedFault::kDropsBlockCopy, SimulatedFault::kKeepsCancelled,
        SimulatedFault::kAppendsTwice, SimulatedFault::kAdvancesTooFar,
        SimulatedFault::kIgnoresSalt, SimulatedFault::kNoLookahead, SimulatedFault::kCachesEnd,
        SimulatedFault::kCachesMissed, SimulatedFault::kDropsMissed, SimulatedFault::kDropsPrompt,
        SimulatedFault::kForgetsLag, SimulatedFault::kClaimsKept, SimulatedFault::kForgetsHoles}) {
    uint64_t seed = 1;
    while (seed < 200 && simulate(make_script(seed), fault).violation.empty()) ++seed;
    ASSERT_LT(seed, 200u) << "fault " << static_cast<int32_t>(fault) << " goes unseen";
    const SimulationScript small = shrink(make_script(seed), fault);
    // Windows move far, and blocks must find new holders. A draft head has such holes where several
    // sequences run and another one continues what it has drafted for.
    const size_t most = fault == SimulatedFault::kForgetsLag     ? 12
                        : fault == SimulatedFault::kForgetsHoles ? 8
                                                                 : 4;
    EXPECT_LE(small.requests.size(), most);
    std::cout << "fault " << static_cast<int32_t>(fault) << ": " << simulate(small, fault).violation
              << ", from\n"
              << small.text();
    EXPECT_EQ(simulate(small).violation, "") << "the script is sound, the fault is not";
  }
}

}  // namespace
}  // namespace paceline::testing
