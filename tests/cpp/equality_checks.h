// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "support/jobs.h"
#include "support/seed.h"

namespace paceline::testing {

struct SpeculativeRun {
  std::shared_ptr<const Model> target;
  std::shared_ptr<const Model> drafter;  // or null
  std::vector<Job> jobs;
  double temperature = 0;        // of neighbours
  int64_t small_pool_bytes = 0;  // forces preemption
  // Sets the options of the drafter that differ from the defaults.
  std::function<void(ExecutorOptions&)> choose = [](ExecutorOptions&) {};
};

// Speculative output equals plain output with random values of every option that must not change
// it: k, also of single requests and of iterations, block size, chunks, driver, lateness, threads
// and the size of the pool, with or without neighbours.
inline void expect_equals_plain(const SpeculativeRun& run_of, std::mt19937_64& random,
                                uint64_t seed, Tally& tally) {
  const Pick pick{random};
  ExecutorOptions options = small_engine_options(0);
  Executor plain(run_of.target, nullptr, options);
  const std::vector<Outcome> expected = run(plain, run_of.jobs);
  EXPECT_EQ(plain.check_integrity(), "");

  const auto k = static_cast<int32_t>(1 + random() % 16);
  options = small_engine_options(k);
  run_of.choose(options);
  options.block_size = pick(8, 16, 32);
  options.prefill_chunk_size = pick(0, 16, 3);
  options.speculative.draft_driver =
      pick(DraftDriver::kUnrolled, DraftDriver::kReplay, DraftDriver::kEager, DraftDriver::kWhile);
  options.device_lateness = pick(0, 1, 2);
  options.poison_freed_blocks = true;
  options.num_threads = pick(1, 2);
  std::mt19937_64 own(seed);
  if (own() % 2 == 0) options.draft_schedule_seed = own();
  options.speculative.adaptive = own() % 2 == 0;
  if (random() % 2 == 0) {
    options.kv_cache_bytes = run_of.small_pool_bytes;
    // A drafter that may catch up keeps more than its windows.
    if (options.draft_schedule_seed != 0) options.kv_cache_bytes *= 2;
  }
  Executor speculative(run_of.target, run_of.drafter, options);
  const std::vector<Job> neighbours =
      random() % 2 == 0 ? random_jobs(random, 6, 64, run_of.temperature) : std::vector<Job>{};
  std::vector<Job> jobs = run_of.jobs;
  mix_num_drafts(jobs, own, k);
  const std::vector<Outcome> actual = run(speculative, jobs, neighbours, seed);
  for (size_t i = 0; i < actual.size(); ++i) {
    expect_own_drafts(jobs[i], actual[i], k);
    ASSERT_EQ(actual[i].tokens, expected[i].tokens) << "job " << i << " k " << k;
    ASSERT_EQ(actual[i].reason, expected[i].reason) << "job " << i << " k " << k;
  }
  EXPECT_EQ(speculative.check_integrity(), "");
  tally.add(speculative, actual);
}

struct TargetAndDrafter {
  std::shared_ptr<const Model> target;
  std::shared_ptr<const Model> drafter;
};

// Pools of `small_pool_bytes` are too small for all sequences.
struct PairSizes {
  int64_t small_pool_bytes;
  int32_t num_pairs = 16;
  int32_t longest_prompt = 140;
  int32_t most_tokens = 60;  // of an output
  int32_t max_num_seqs = 0;  // 0: that of the options
  int64_t min_preemptions = 10;
};

// The same for random pairs of models, many of them in small pools.
inline void expect_pairs_equal_plain(
    const PairSizes& sizes,
    const std::function<TargetAndDrafter(std::mt19937_64&, uint64_t)>& models_of_seed) {
  const uint64_t first_seed = seed_from_env(1);
  Tally tally;
  for (uint64_t seed = first_seed; seed < first_seed + static_cast<uint64_t>(sizes.num_pairs);
       ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Pick pick{random};
    const TargetAndDrafter models = models_of_seed(random, seed);
    const double temperature = pick(0.0, 0.7, 1.0);
    std::vector<Job> jobs = random_jobs(random, pick(1, 16, 40), 64, temperature,
                                        sizes.longest_prompt, sizes.most_tokens);
    if (random() % 2 == 0) mix_sampling(jobs, random, 64);
    expect_equals_plain({.target = models.target,
                         .drafter = models.drafter,
                         .jobs = jobs,
                         .temperature = temperature,
                         .small_pool_bytes = sizes.small_pool_bytes,
                         .choose =
                             [&sizes](ExecutorOptions& o) {
                               if (sizes.max_num_seqs > 0) o.max_num_seqs = sizes.max_num_seqs;
                             }},
                        random, seed, tally);
  }
  tally.expect_all(sizes.min_preemptions);
}

}  // namespace paceline::testing
