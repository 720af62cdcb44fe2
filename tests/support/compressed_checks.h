// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks that engines with compressed attention must pass on every device.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <paceline/executor.h>

#include "support/all_accepted.h"
#include "support/jobs.h"

namespace paceline::testing {

using OptionsOfK = std::function<ExecutorOptions(int32_t)>;

// A model that drafts for itself accepts everything: every entry that a draft step makes and sees
// is that of the verify pass, bit for bit. Every other number of drafts samples.
inline void expect_self_draft_accepts_everything(const std::shared_ptr<const Model>& model,
                                                 const std::vector<int32_t>& drafts,
                                                 int32_t longest_prompt, int32_t most_tokens,
                                                 const OptionsOfK& options_of) {
  double temperature = 0;
  for (const int32_t k : drafts) {
    SCOPED_TRACE("k " + std::to_string(k) + ", temperature " + std::to_string(temperature));
    std::mt19937_64 random(11);
    Executor executor(model, model, options_of(k));
    expect_all_accepted(executor,
                        random_jobs(random, 12, 64, temperature, longest_prompt, most_tokens), 50);
    temperature = 1 - temperature;
  }
}

// Drafts of any quality change no token, whatever k, also of single requests, the temperature, the
// chunks and the driver are. The drafters take turns.
inline void expect_drafts_change_nothing(const std::shared_ptr<const Model>& target,
                                         const std::vector<std::shared_ptr<const Model>>& drafters,
                                         const std::vector<int32_t>& drafts, int32_t longest_prompt,
                                         int32_t most_tokens, const OptionsOfK& options_of) {
  std::vector<std::vector<Job>> jobs;
  std::vector<std::vector<Outcome>> expected;
  for (const double temperature : {0.0, 1.0}) {
    std::mt19937_64 random(5);
    jobs.push_back(random_jobs(random, 12, 64, temperature, longest_prompt, most_tokens));
    Executor plain(target, nullptr, options_of(0));
    expected.push_back(run(plain, jobs.back()));
    EXPECT_EQ(plain.check_integrity(), "");
  }
  constexpr DraftDriver kDrivers[] = {DraftDriver::kUnrolled, DraftDriver::kReplay,
                                      DraftDriver::kEager, DraftDriver::kWhile};
  for (size_t turn = 0; turn < 2 * drafts.size(); ++turn) {
    const int32_t k = drafts[turn / 2];
    const size_t sampled = (turn / 2 + turn) % 2;  // whether the jobs have a temperature
    ExecutorOptions options = options_of(k);
    options.speculative.draft_driver = kDrivers[turn % 4];
    options.prefill_chunk_size = turn % 3 == 0 ? 0 : turn % 3 == 1 ? 7 : 33;
    options.poison_freed_blocks = true;
    SCOPED_TRACE("k " + std::to_string(k) + ", turn " + std::to_string(turn));
    Executor executor(target, drafters[turn % drafters.size()], options);
    std::vector<Job> mixed = jobs[sampled];
    std::mt19937_64 own(turn);
    mix_num_drafts(mixed, own, k);
    const std::vector<Outcome> actual = run(executor, mixed);
    for (size_t i = 0; i < actual.size(); ++i) {
      expect_own_drafts(mixed[i], actual[i], k);
      ASSERT_EQ(actual[i].tokens, expected[sampled][i].tokens) << "job " << i;
    }
    EXPECT_EQ(executor.check_integrity(), "");
  }
}

// At least 1,000 iterations with k drafts: `num_jobs` requests, two at a time, equal plain
// decoding.
inline void expect_a_thousand_iterations(const std::shared_ptr<const Model>& target,
                                         const std::shared_ptr<const Model>& drafter, int32_t k,
                                         int32_t num_jobs, const OptionsOfK& options_of) {
  ExecutorOptions options = options_of(k);
  options.max_model_len = 640;
  options.max_num_seqs = 2;
  options.kv_cache_bytes = 16 << 20;
  options.poison_freed_blocks = true;
  std::mt19937_64 random(3);
  std::vector<Job> jobs = random_jobs(random, num_jobs, 64, 1.0, 60, 1);
  for (Job& job : jobs) {
    job.sampling.stop_token_ids.clear();
    job.sampling.max_tokens = 570;
  }
  Executor speculative(target, drafter, options);
  const std::vector<Outcome> actual = run(speculative, jobs);
  EXPECT_GE(speculative.stats().num_iterations, 1000);
  EXPECT_EQ(speculative.check_integrity(), "");
  options.speculative.num_speculative_tokens = 0;
  options.max_num_seqs = num_jobs;  // fewer iterations
  options.kv_cache_bytes = 64 << 20;
  Executor plain(target, nullptr, options);
  const std::vector<Outcome> expected = run(plain, jobs);
  for (size_t i = 0; i < jobs.size(); ++i) ASSERT_EQ(actual[i].tokens, expected[i].tokens);
}

}  // namespace paceline::testing
