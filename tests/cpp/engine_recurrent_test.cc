// SPDX-License-Identifier: Apache-2.0
// The whole engine on tiny hybrids of recurrent layers and attention.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "cpp/equality_checks.h"
#include "support/engine_checks.h"
#include "support/jobs.h"
#include "support/recurrent_models.h"
#include "support/seed.h"

namespace paceline {
namespace {

using testing::recurrent_model;
using testing::RecurrentModel;

ExecutorOptions options_of(int32_t k) {
  ExecutorOptions options = testing::small_engine_options(k);
  options.kv_cache_bytes = 24 << 20;
  return options;
}

TEST(EngineRecurrent, SelfDraftAcceptsEverything) {
  for (const char* layers : {"rrf", "rrg"}) {
    testing::expect_self_draft_accepts_everything(recurrent_model({.layers = layers}, 7),
                                                  {1, 3, 16}, 60, 60, options_of);
  }
}

// Drafters of both kinds, also one that is recurrent throughout.
TEST(EngineRecurrent, DraftsChangeNothing) {
  for (const char* layers : {"rrf", "rrg"}) {
    const auto target = recurrent_model({.layers = layers}, 3);
    testing::expect_drafts_change_nothing(
        target, {recurrent_model({.layers = "r"}, 4), recurrent_model({.layers = "g"}, 5), target},
        {1, 3, 8, 16}, 60, 60, options_of);
  }
}

// Few of these pools are tight; the next test counts preemptions.
TEST(EngineRecurrent, SpeculativeEqualsPlain) {
  const testing::PairSizes sizes = {.small_pool_bytes = 1408 << 10,
                                    .num_pairs = 24,
                                    .longest_prompt = 30,
                                    .most_tokens = 100,
                                    .max_num_seqs = 15,
                                    .min_preemptions = 3};
  testing::expect_pairs_equal_plain(sizes, [](std::mt19937_64& random, uint64_t seed) {
    const testing::Pick pick{random};
    const RecurrentModel shape{
        .layers = pick(std::string("rrf"), std::string("rrg"), std::string("gr"), std::string("fr"),
                       std::string("r")),
        .conv_size = pick(2, 4)};
    const auto target = recurrent_model(shape, seed);
    const auto drafter = seed % 3 == 0   ? target
                         : seed % 3 == 1 ? recurrent_model(shape, seed + 1)
                                         : recurrent_model({.layers = "f"}, seed + 2);
    return testing::TargetAndDrafter{target, drafter};
  });
}

// One engine whose pool has room for a few of its sixteen sequences, until it has preempted a
// thousand times. How often it does depends on times, so rounds follow each other until the count
// is reached: about twelve, of the most that are allowed.
TEST(EngineRecurrent, AThousandPreemptionsChangeNothing) {
  const uint64_t seed = testing::seed_from_env(1);
  SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
  constexpr int64_t kPreemptions = 1000;
  constexpr int32_t kMostRounds = 250;
  const auto target = recurrent_model({.layers = "rrg"}, 3);
  Executor plain(target, nullptr, options_of(0));
  ExecutorOptions options = options_of(3);
  options.max_num_seqs = 16;
  options.kv_cache_bytes = 1024 << 10;
  options.poison_freed_blocks = true;
  options.device_lateness = 1;
  Executor speculative(target, recurrent_model({.layers = "rf"}, 4), options);
  testing::Tally tally;
  std::mt19937_64 random(seed);
  int32_t round = 0;
  for (; round < kMostRounds && speculative.stats().num_preemptions < kPreemptions; ++round) {
    // Short prompts with long outputs, so that many begin and few can go on.
    std::vector<testing::Job> jobs = testing::random_jobs(random, 24, 64, round % 2 * 0.8, 12, 1);
    for (testing::Job& job : jobs) {
      job.sampling.stop_token_ids.clear();
      job.sampling.max_tokens = static_cast<int32_t>(80 + random() % 40);
    }
    const std::vector<testing::Outcome> expected = testing::run(plain, jobs);
    const std::vector<testing::Outcome> actual = testing::run(speculative, jobs);
    for (size_t i = 0; i < jobs.size(); ++i) {
      ASSERT_EQ(actual[i].tokens, expected[i].tokens) << "round " << round << ", job " << i;
      ASSERT_EQ(actual[i].reason, expected[i].reason) << "round " << round << ", job " << i;
    }
    tally.add(speculative, actual);
  }
  EXPECT_GE(speculative.stats().num_preemptions, kPreemptions) << "after " << round << " rounds";
  EXPECT_EQ(speculative.check_integrity(), "");
  tally.expect_both_verdicts();
}

// The samples of a request share its states and copy its open records. Prompts end everywhere in a
// block, so the first window of a fork, of which drafts are accepted and rejected, meets the end of
// a block at each of its rows.
TEST(EngineRecurrent, SamplesAreThoseOfSeparateRequests) {
  const auto target = recurrent_model({.layers = "rrg"}, 3);
  const auto drafter = recurrent_model({.layers = "rf"}, 4);
  for (const auto& [k, block_size] : {std::pair{3, 3}, {3, 16}, {8, 16}}) {
    SCOPED_TRACE("k " + std::to_string(k) + ", block_size " + std::to_string(block_size));
    testing::Tally tally;
    for (int32_t length = 60; length < 77; ++length) {
      SCOPED_TRACE("length " + std::to_string(length));
      ExecutorOptions options = options_of(k);
      options.block_size = block_size;
      options.poison_freed_blocks = true;
      options.enable_prefix_caching = false;
      Executor executor(target, drafter, options);
      EXPECT_EQ(testing::expect_samples_equal_requests(executor, length, &tally), 2 * (length - 1));
    }
    tally.expect_both_verdicts();
  }
}

// `pool_bytes` is room for the states of a few sequences, or for many.
ExecutorStats expect_hits_are_misses(int64_t pool_bytes, int32_t num_rounds) {
  const uint64_t seed = testing::seed_from_env(1);
  SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto target = recurrent_model({.layers = "rrf"}, 3);
  ExecutorOptions options = options_of(0);
  options.enable_prefix_caching = false;
  Executor never(target, nullptr, options);
  options = options_of(3);
  options.block_size = 8;
  options.state_interval = 24;
  options.kv_cache_bytes = pool_bytes;
  options.prefill_chunk_size = 50;
  options.device_lateness = 1;
  options.poison_freed_blocks = true;
  Executor cached(target, recurrent_model({.layers = "rf"}, 4), options);
  testing::expect_hits_equal_misses(
      never, cached,
      {.num_rounds = num_rounds, .longest_new = 30, .longest_prompt = 100, .most_tokens = 80},
      random);
  return cached.stats();
}

TEST(EngineRecurrent, HitsAndMissesHaveTheSameOutput) {
  const int32_t num_rounds = testing::test_level() >= 3 ? 125 : 6;
  const ExecutorStats few = expect_hits_are_misses(1344 << 10, num_rounds);
  EXPECT_GT(few.num_preemptions, num_rounds / 2);
  const ExecutorStats many = expect_hits_are_misses(12 << 20, num_rounds);
  for (const ExecutorStats::KvGroup& group : many.kv_groups) {
    EXPECT_GT(group.hit_blocks, 5 * num_rounds);
    EXPECT_GT(group.evicted_blocks, 5 * num_rounds);
  }
}

// A conversation computes the tokens of each turn once, and at most two blocks of earlier ones.
TEST(EngineRecurrent, AConversationComputesItsNewTokens) {
  const auto target = recurrent_model({}, 3);
  ExecutorOptions options = options_of(3);
  options.max_model_len = 1600;
  options.max_num_batched_tokens = 512;
  options.state_interval = 128;
  Executor executor(target, recurrent_model({.layers = "rf"}, 4), options);
  std::mt19937_64 random(7);
  testing::Job job;
  job.sampling.max_tokens = 23;
  for (int32_t turn = 0; turn < 20; ++turn) {
    const auto history = static_cast<int32_t>(job.prompt.size());
    for (int32_t i = 0; i < 37; ++i) job.prompt.push_back(static_cast<int32_t>(random() % 64));
    const int64_t before = executor.stats().num_shared_tokens;
    const testing::Outcome outcome = testing::run(executor, {job}).front();
    const int64_t cached = executor.stats().num_shared_tokens - before;
    // The last window of an answer is not cached, nor is a block that it ends in.
    EXPECT_GE(cached, history - 2 * options.block_size - 4) << "turn " << turn;
    job.prompt.insert(job.prompt.end(), outcome.tokens.begin(), outcome.tokens.end());
  }
  EXPECT_EQ(executor.check_integrity(), "");
}

// A state is kept where a second prompt parts from the first, so that the third one finds it.
TEST(EngineRecurrent, PromptsThatPartLeaveAState) {
  Executor executor(recurrent_model({}, 3), nullptr, options_of(0));
  std::vector<int64_t> cached;
  for (int32_t i = 0; i < 3; ++i) {
    testing::Job job;
    for (int32_t t = 0; t < 120; ++t) job.prompt.push_back((t < 83 ? 5 : 7 + i) * t % 64);
    job.sampling.max_tokens = 2;
    const int64_t before = executor.stats().num_shared_tokens;
    testing::run(executor, {job});
    cached.push_back(executor.stats().num_shared_tokens - before);
  }
  EXPECT_EQ(cached, (std::vector<int64_t>{0, 0, 80}));
}

TEST(EngineRecurrent, AThousandIterationsOfFiveDrafts) {
  const auto target = recurrent_model({}, 3);
  testing::expect_a_thousand_iterations(target, recurrent_model({.layers = "rf"}, 4), 5, 18,
                                        [](int32_t k) {
                                          ExecutorOptions options = options_of(k);
                                          options.device_lateness = 1;
                                          return options;
                                        });
}

}  // namespace
}  // namespace paceline
