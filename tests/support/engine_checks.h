// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks that engines must pass on every device, whatever the kinds of layers.

#include <gtest/gtest.h>

#include <algorithm>
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
#include "support/samples.h"

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

// Three samples of a prompt equal three requests. Returns how many tokens of the prompt they
// shared.
inline int64_t expect_samples_equal_requests(Executor& executor, int32_t prompt_len,
                                             Tally* tally = nullptr) {
  std::mt19937_64 random(static_cast<uint64_t>(prompt_len));
  SampledJob job{.num_samples = 3};
  for (int32_t i = 0; i < prompt_len; ++i) {
    job.job.prompt.push_back(static_cast<int32_t>(random() % 64));
  }
  job.job.sampling = {.temperature = 1.0, .seed = 5, .max_tokens = 30};
  const std::vector<Outcome> expected = run(executor, apart({job}));
  const int64_t shared_before = executor.stats().num_shared_tokens;
  const std::vector<Outcome> actual = run_samples(executor, {job});
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(actual[i].tokens, expected[i].tokens) << "sample " << i;
  }
  EXPECT_EQ(executor.check_integrity(), "");
  if (tally != nullptr) tally->add(executor, actual);
  return executor.stats().num_shared_tokens - shared_before;
}

struct RepeatedPrompts {
  int32_t num_rounds;
  int32_t longest_new;     // tokens that a prompt adds to an earlier one
  int32_t longest_prompt;  // all tokens of a prompt
  int32_t most_tokens;
};

// Rounds of requests that begin as earlier ones do, beside others that are cancelled: `cached`,
// with its hits of the prefix cache, gives the output of `never`, which has no cache.
inline void expect_hits_equal_misses(Executor& never, Executor& cached,
                                     const RepeatedPrompts& sizes, std::mt19937_64& random) {
  std::vector<std::vector<int32_t>> earlier;
  for (int32_t round = 0; round < sizes.num_rounds; ++round) {
    std::vector<Job> jobs =
        random_jobs(random, 40, 64, round % 2 * 0.8, sizes.longest_new, sizes.most_tokens);
    for (Job& job : jobs) {
      if (earlier.empty() || random() % 5 == 0) continue;
      const std::vector<int32_t>& begin = earlier[random() % earlier.size()];
      const auto length = static_cast<std::ptrdiff_t>(random() % (begin.size() + 1));
      job.prompt.insert(job.prompt.begin(), begin.begin(), begin.begin() + length);
      job.prompt.resize(std::min(job.prompt.size(), static_cast<size_t>(sizes.longest_prompt)));
    }
    const std::vector<Outcome> expected = run(never, jobs);
    const std::vector<Outcome> actual = run(cached, jobs, random_jobs(random, 6, 64, 0), random());
    for (size_t i = 0; i < jobs.size(); ++i) {
      EXPECT_EQ(actual[i].tokens, expected[i].tokens) << "round " << round << ", job " << i;
      if (random() % 4 != 0) continue;
      earlier.push_back(jobs[i].prompt);
      earlier.back().insert(earlier.back().end(), expected[i].tokens.begin(),
                            expected[i].tokens.end());
    }
    if (earlier.size() > 60) earlier.erase(earlier.begin(), earlier.begin() + 20);
  }
  EXPECT_EQ(cached.check_integrity(), "");
}

// Requests without a token that can be sampled end, and the others keep their tokens. The logits of
// one are not finite: NaN logits of a router still choose experts, whose other rows keep their
// bits. The other bans all tokens. `broken` is `sound` but for token 63, which makes NaN; requests
// that generate it are not compared.
inline void expect_bad_logits_end_one_request(const std::shared_ptr<const Model>& sound,
                                              const std::shared_ptr<const Model>& broken,
                                              const std::vector<Job>& jobs,
                                              const OptionsOfK& options_of) {
  Executor reference(sound, nullptr, options_of(0));
  const std::vector<Outcome> expected = run(reference, jobs);
  for (const int32_t k : {0, 3}) {
    std::vector<Job> all = jobs;
    all.push_back({.prompt = {1, 63, 2}, .sampling = {.max_tokens = 20}});
    all.push_back({.prompt = {1, 2}, .sampling = {.max_tokens = 4}});
    for (int32_t t = 0; t < 64; ++t) all.back().sampling.bad_words.push_back({t});
    Executor executor(broken, k > 0 ? broken : nullptr, options_of(k));
    const std::vector<Outcome> actual = run(executor, all);
    for (size_t i = jobs.size(); i < all.size(); ++i) {
      EXPECT_EQ(actual[i].reason, FinishReason::kError);
      EXPECT_TRUE(actual[i].tokens.empty());
    }
    size_t num_compared = 0;
    for (size_t i = 0; i < jobs.size(); ++i) {
      const std::vector<int32_t>& tokens = expected[i].tokens;
      if (std::find(tokens.begin(), tokens.end(), 63) != tokens.end()) continue;
      EXPECT_EQ(actual[i].tokens, tokens) << "job " << i << ", k " << k;
      ++num_compared;
    }
    EXPECT_GT(num_compared, jobs.size() / 4);
    EXPECT_EQ(executor.check_integrity(), "");
  }
}

}  // namespace paceline::testing
