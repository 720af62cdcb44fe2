// SPDX-License-Identifier: Apache-2.0
// The whole engine on tiny random models: speculative output equals plain output whatever else
// happens, requests are isolated, and nothing leaks.

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <random>

#include <paceline/executor.h>

#include "support/tiny_models.h"

namespace paceline {
namespace {

using testing::tiny_model;
using testing::TinyModel;

struct Job {
  std::vector<int32_t> prompt;
  SamplingOptions sampling;
};

struct Outcome {
  std::vector<int32_t> tokens;
  FinishReason reason = FinishReason::kNone;
  SpeculationCounters counters;
};

uint64_t seed_from_env(uint64_t fallback) {
  const char* text = std::getenv("PACELINE_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : fallback;
}

std::vector<Job> random_jobs(std::mt19937_64& random, int32_t count, int32_t vocab,
                             double temperature, int32_t longest_prompt = 60,
                             int32_t most_tokens = 40) {
  std::vector<Job> jobs;
  for (int32_t i = 0; i < count; ++i) {
    Job job;
    const auto length = static_cast<int32_t>(1 + random() % longest_prompt);
    for (int32_t t = 0; t < length; ++t) {
      job.prompt.push_back(static_cast<int32_t>(random() % vocab));
    }
    job.sampling.temperature = temperature;
    job.sampling.seed = random();
    job.sampling.max_tokens = static_cast<int32_t>(1 + random() % most_tokens);
    if (random() % 3 == 0) job.sampling.stop_token_ids = {static_cast<int32_t>(random() % vocab)};
    jobs.push_back(job);
  }
  return jobs;
}

// Runs all jobs at once; `cancelled` of them are neighbours that get cancelled at random moments.
std::vector<Outcome> run(Executor& executor, const std::vector<Job>& jobs,
                         const std::vector<Job>& neighbours = {}, uint64_t seed = 0) {
  std::mt19937_64 random(seed);
  std::map<RequestId, size_t> index;
  std::vector<RequestId> to_cancel;
  std::vector<Outcome> outcomes(jobs.size());
  for (size_t i = 0; i < std::max(jobs.size(), neighbours.size()); ++i) {
    if (i < neighbours.size()) {
      to_cancel.push_back(
          executor.add_request({neighbours[i].prompt, neighbours[i].sampling}).value());
    }
    if (i < jobs.size()) {
      index[executor.add_request({jobs[i].prompt, jobs[i].sampling}).value()] = i;
    }
  }
  size_t left = jobs.size();
  while (left > 0) {
    if (!to_cancel.empty() && random() % 4 == 0) {
      executor.cancel(to_cancel.back());
      to_cancel.pop_back();
    }
    for (RequestEvent& event : executor.poll(1)) {
      const auto found = index.find(event.id);
      if (found == index.end()) continue;
      Outcome& outcome = outcomes[found->second];
      outcome.tokens.insert(outcome.tokens.end(), event.token_ids.begin(), event.token_ids.end());
      if (event.finish_reason == FinishReason::kNone) continue;
      outcome.reason = event.finish_reason;
      outcome.counters = event.counters;
      --left;
    }
  }
  for (const RequestId id : to_cancel) executor.cancel(id);
  return outcomes;
}

ExecutorOptions options_of(int32_t k) {
  ExecutorOptions options;
  options.max_model_len = 256;
  options.max_num_seqs = 8;
  options.max_num_batched_tokens = 256;
  options.kv_cache_bytes = 4 << 20;
  options.num_threads = 1;
  options.speculative.num_speculative_tokens = k;
  return options;
}

TEST(Engine, SelfDraftAcceptsEverything) {
  const auto model = tiny_model(TinyModel{.windows = {8, 0, 8}}, 7);
  for (const double temperature : {0.0, 1.0}) {
    for (const int32_t k : {1, 3, 8, 16}) {
      std::mt19937_64 random(11);
      Executor executor(model, model, options_of(k));
      for (const Outcome& outcome : run(executor, random_jobs(random, 12, 64, temperature))) {
        EXPECT_EQ(outcome.counters.num_accepted_tokens, outcome.counters.num_draft_tokens);
      }
      EXPECT_EQ(executor.check_integrity(), "");
    }
  }
}

TEST(Engine, SpeculativeEqualsPlain) {
  const uint64_t first_seed = seed_from_env(1);
  int64_t accepted = 0;
  int64_t drafted = 0;
  for (uint64_t seed = first_seed; seed < first_seed + 40; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto pick = [&](auto... values) {
      const std::array all = {values...};
      return all[random() % all.size()];
    };
    TinyModel shape;
    shape.windows = pick(0, 1, 2) == 0   ? std::vector<int32_t>{0, 0}
                    : random() % 2 == 0 ? std::vector<int32_t>{8, 0, 8}
                                        : std::vector<int32_t>{20, 20, 0};
    shape.is_gemma = random() % 2 == 0;
    TinyModel draft_shape = shape;
    const bool is_other = random() % 3 == 0;
    if (is_other) {
      draft_shape = TinyModel{.hidden = 16, .num_qo_heads = 2, .num_kv_heads = 1,
                              .windows = {5, 0, 12}, .is_gemma = random() % 2 == 0};
    }
    const auto target = tiny_model(shape, seed);
    const auto draft = is_other ? tiny_model(draft_shape, seed + 1)
                                : tiny_model(draft_shape, seed, 0.05f, seed + 2);
    const double temperature = pick(0.0, 0.7, 1.0);
    const auto num_jobs = pick(1, 7, 32);
    const std::vector<Job> jobs = random_jobs(random, num_jobs, 64, temperature);

    ExecutorOptions options = options_of(0);
    Executor plain(target, nullptr, options);
    const std::vector<Outcome> expected = run(plain, jobs);
    EXPECT_EQ(plain.check_integrity(), "");

    const auto k = static_cast<int32_t>(1 + random() % 16);
    options = options_of(k);
    options.block_size = pick(8, 16, 32);
    options.prefill_chunk_size = pick(0, 16);
    options.draft_driver = pick(DraftDriver::kUnrolled, DraftDriver::kReplay, DraftDriver::kEager);
    options.device_lateness = pick(0, 1, 2);
    options.use_window_lists = false;
    options.poison_freed_blocks = true;
    options.num_threads = pick(1, 2);
    if (random() % 2 == 0) options.kv_cache_bytes = 400 << 10;  // forces preemption
    Executor speculative(target, draft, options);
    const std::vector<Job> neighbours =
        random() % 2 == 0 ? random_jobs(random, 6, 64, temperature) : std::vector<Job>{};
    const std::vector<Outcome> actual = run(speculative, jobs, neighbours, seed);
    for (size_t i = 0; i < jobs.size(); ++i) {
      EXPECT_EQ(actual[i].tokens, expected[i].tokens) << "job " << i << " k " << k;
      EXPECT_EQ(actual[i].reason, expected[i].reason);
      accepted += actual[i].counters.num_accepted_tokens;
      drafted += actual[i].counters.num_draft_tokens;
    }
    EXPECT_EQ(speculative.check_integrity(), "");
  }
  // The cells must exercise both verdicts.
  EXPECT_GT(accepted, drafted / 20);
  EXPECT_LT(accepted, drafted * 19 / 20);
}

}  // namespace
}  // namespace paceline
