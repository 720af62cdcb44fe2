// SPDX-License-Identifier: Apache-2.0
#pragma once

// Engines whose drafter is never wrong: the target itself, or an oracle.

#include <array>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include <paceline/executor.h>

#include "support/jobs.h"

namespace paceline::testing {

// Changes options by the number of a cell of a test: the chunks of prompts and the draft driver.
inline void vary_options(ExecutorOptions& options, uint64_t cell) {
  options.prefill_chunk_size = cell % 2 == 0 ? 7 : 0;
  options.speculative.draft_driver = std::array{DraftDriver::kUnrolled, DraftDriver::kReplay,
                                                DraftDriver::kWhile, DraftDriver::kEager}[cell % 4];
}

// Runs jobs to their end. At least `fewest_drafts` drafts are verified, and all of them accepted.
inline void expect_all_accepted(Executor& executor, const std::vector<Job>& jobs,
                                int64_t fewest_drafts = 1) {
  int64_t num_drafts = 0;
  for (const Outcome& outcome : run(executor, jobs)) {
    EXPECT_EQ(outcome.counters.num_accepted_tokens, outcome.counters.num_draft_tokens);
    num_drafts += outcome.counters.num_draft_tokens;
  }
  EXPECT_GE(num_drafts, fewest_drafts);
  EXPECT_EQ(executor.check_integrity(), "");
}

}  // namespace paceline::testing
