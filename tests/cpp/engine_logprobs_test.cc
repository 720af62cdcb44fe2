// SPDX-License-Identifier: Apache-2.0
// Logprobs through the whole engine on tiny random models: speculative decoding returns the bits of
// plain decoding, the values are those of the model's logits, and asking for them changes nothing.

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>

#include <paceline/error.h>
#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "support/errors.h"
#include "support/jobs.h"
#include "support/logprob_checks.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

using testing::expect_contains;
using testing::Job;
using testing::message_of;
using testing::mix_logprobs;
using testing::mix_sampling;
using testing::Outcome;
using testing::Pick;
using testing::random_jobs;
using testing::run;
using testing::same_logprobs;
using testing::seed_from_env;
using testing::Tally;
using testing::tiny_model;
using testing::TinyModel;

constexpr int32_t kVocab = 64;

ExecutorOptions options_of(int32_t k, int32_t max_logprobs) {
  ExecutorOptions options = testing::small_engine_options(k);
  options.max_logprobs = max_logprobs;
  return options;
}

void expect_complete(const Outcome& outcome, const Job& job) {
  const auto expect_rows = [&](const std::vector<std::vector<TokenLogprob>>& rows, size_t count,
                               int32_t num_best) {
    ASSERT_EQ(rows.size(), num_best < 0 ? 0 : count);
    for (const auto& row : rows) {
      ASSERT_EQ(row.size(), 1 + static_cast<size_t>(std::min(num_best, kVocab)));
    }
  };
  expect_rows(outcome.logprobs, outcome.tokens.size(), job.sampling.logprobs);
  for (size_t i = 0; i < outcome.logprobs.size(); ++i) {
    EXPECT_EQ(outcome.logprobs[i][0].token, outcome.tokens[i]);
  }
  expect_rows(outcome.prompt_logprobs, job.prompt.size() - 1, job.sampling.prompt_logprobs);
  for (size_t i = 0; i < outcome.prompt_logprobs.size(); ++i) {
    EXPECT_EQ(outcome.prompt_logprobs[i][0].token, job.prompt[i + 1]);
  }
  EXPECT_EQ(outcome.num_prompt_deliveries, job.sampling.prompt_logprobs < 0 ? 0 : 1);
}

TEST(EngineLogprobs, SpeculativeEqualsPlain) {
  const uint64_t first_seed = seed_from_env(1);
  Tally tally;
  for (uint64_t seed = first_seed; seed < first_seed + 40; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Pick pick{random};
    TinyModel shape;
    shape.windows = random() % 2 == 0 ? std::vector<int32_t>{8, 0, 8} : std::vector<int32_t>{0, 20};
    shape.is_gemma = random() % 2 == 0;
    const auto target = tiny_model(shape, seed);
    const auto draft = tiny_model(shape, seed, 0.05f, seed + 2);
    const double temperature = pick(0.0, 0.7, 1.0);
    std::vector<Job> jobs =
        random_jobs(random, pick(1, 7, 24), kVocab, temperature, pick(60, 150), 60);
    if (random() % 2 == 0) mix_sampling(jobs, random, kVocab);
    Executor silent(target, nullptr, options_of(0, 0));
    const std::vector<Outcome> without = run(silent, jobs);

    const int32_t max_logprobs = pick(1, 5, 64);
    mix_logprobs(jobs, random, max_logprobs);
    Executor plain(target, nullptr, options_of(0, max_logprobs));
    const std::vector<Outcome> expected = run(plain, jobs);
    EXPECT_EQ(plain.check_integrity(), "");

    const auto k = static_cast<int32_t>(1 + random() % 16);
    ExecutorOptions options = options_of(k, max_logprobs);
    options.block_size = pick(8, 16, 32);
    options.prefill_chunk_size = pick(0, 7, 16);
    options.speculative.draft_driver = pick(DraftDriver::kUnrolled, DraftDriver::kReplay,
                                            DraftDriver::kEager, DraftDriver::kWhile);
    options.device_lateness = pick(0, 1, 2);
    options.poison_freed_blocks = true;
    options.num_threads = pick(1, 2);
    if (random() % 2 == 0) options.kv_cache_bytes = 300 << 10;  // forces preemption
    Executor speculative(target, draft, options);
    std::vector<Job> neighbours =
        random() % 2 == 0 ? random_jobs(random, 6, kVocab, temperature) : std::vector<Job>{};
    mix_logprobs(neighbours, random, max_logprobs);
    const std::vector<Outcome> actual = run(speculative, jobs, neighbours, seed);
    for (size_t i = 0; i < jobs.size(); ++i) {
      SCOPED_TRACE("job " + std::to_string(i) + ", k " + std::to_string(k));
      EXPECT_EQ(expected[i].tokens, without[i].tokens) << "asking for logprobs changed the output";
      EXPECT_EQ(expected[i].reason, without[i].reason);
      EXPECT_EQ(actual[i].tokens, expected[i].tokens);
      if (expected[i].reason != FinishReason::kError) expect_complete(expected[i], jobs[i]);
      EXPECT_TRUE(same_logprobs(actual[i].logprobs, expected[i].logprobs));
      EXPECT_TRUE(same_logprobs(actual[i].prompt_logprobs, expected[i].prompt_logprobs));
      EXPECT_EQ(actual[i].num_prompt_deliveries, expected[i].num_prompt_deliveries);
    }
    EXPECT_EQ(speculative.check_integrity(), "");
    tally.add(speculative, actual);
    if (HasFailure()) return;
  }
  // The runs must meet accepted and rejected drafts, and preemption.
  tally.expect_all();
}

// Sampling parameters change the draws but not the logprobs.
TEST(EngineLogprobs, AreThoseOfTheModelsLogits) {
  const auto target = tiny_model(TinyModel{}, 3);
  const auto draft = tiny_model(TinyModel{}, 3, 0.05f, 4);
  Executor executor(target, draft, options_of(4, kVocab));
  std::mt19937_64 random(seed_from_env(9));
  std::vector<Job> jobs = random_jobs(random, 40, kVocab, 0.8, 100);
  mix_sampling(jobs, random, kVocab);
  for (Job& job : jobs) job.sampling.logprobs = job.sampling.prompt_logprobs = kVocab;
  const std::vector<Outcome> outcomes = run(executor, jobs);
  const int64_t num_compared = testing::expect_logprobs_of_logits(executor, jobs, outcomes, kVocab);
  EXPECT_GT(num_compared, 40 * kVocab * 20);
}

TEST(EngineLogprobs, BadLogitsEndOneRequestOnly) {
  TinyModel shape{.is_gemma = false};
  shape.nan_token = 63;
  const auto model = tiny_model(shape, 3);
  Executor executor(model, model, options_of(3, 5));
  const SamplingOptions sampling = {.temperature = 0,
                                    .max_tokens = 4,
                                    .allowed_token_ids = {1, 2},
                                    .logprobs = 2,
                                    .prompt_logprobs = 2};
  const std::vector<Outcome> outcomes =
      run(executor, {{.prompt = {1, 63, 2}, .sampling = sampling}, {{1, 2, 3}, sampling}});
  EXPECT_EQ(outcomes[0].reason, FinishReason::kError);
  EXPECT_TRUE(outcomes[0].logprobs.empty());
  EXPECT_EQ(outcomes[1].reason, FinishReason::kLength);
  for (const auto& rows : {outcomes[1].logprobs, outcomes[1].prompt_logprobs}) {
    for (const auto& row : rows) EXPECT_TRUE(std::isfinite(row[0].logprob));
  }
}

TEST(EngineLogprobs, APromptOfOneTokenHasNone) {
  Executor executor(tiny_model(TinyModel{}, 3), nullptr, options_of(0, 5));
  const std::vector<Outcome> outcomes =
      run(executor, {{.prompt = {1}, .sampling = {.max_tokens = 2, .prompt_logprobs = 5}}});
  EXPECT_EQ(outcomes[0].num_prompt_deliveries, 1);
  EXPECT_TRUE(outcomes[0].prompt_logprobs.empty());
  EXPECT_TRUE(outcomes[0].logprobs.empty());
}

TEST(EngineLogprobs, RefusesWhatItHasNoRoomFor) {
  const auto model = tiny_model(TinyModel{}, 3);
  const auto refusal = [&](int32_t max_logprobs, const Request& request) -> std::string {
    Executor executor(model, nullptr, options_of(0, max_logprobs));
    return message_of<InvalidArgument>([&] { (void)executor.add_request(request); });
  };
  const auto expect = [](const std::string& text, const char* part) {
    expect_contains(text, {part});
  };
  const Request three = {.prompt = {1}, .sampling = {.logprobs = 3}};
  const Request prompt_three = {.prompt = {1}, .sampling = {.prompt_logprobs = 3}};
  expect(refusal(0, three), "logprobs is 3; allowed: -1 (none), since max_logprobs is 0");
  expect(refusal(2, three), "logprobs is 3; allowed: -1 (none) to 2 (max_logprobs)");
  expect(refusal(2, prompt_three), "prompt_logprobs is 3; allowed: -1 (none) to 2");
  expect(refusal(2, {.prompt = {1}, .sampling = {.logprobs = -2}}), "logprobs is -2");
  expect(refusal(0, {.prompt = {1}, .sampling = {.logprobs = 0}}), "logprobs is 0");
  expect(refusal(5, {.prompt = {1}, .sampling = {.logprobs = 3}, .score_prompt = true}),
         "score_prompt");
  EXPECT_EQ(refusal(3, three), "");
  EXPECT_EQ(refusal(3, prompt_three), "");
  EXPECT_THROW(Executor(model, nullptr, options_of(0, 65)), InvalidArgument);
  EXPECT_THROW(Executor(model, nullptr, options_of(0, -1)), InvalidArgument);
  ExecutorOptions null_device = options_of(0, 1);
  null_device.use_null_device = true;
  EXPECT_THROW(Executor(model, nullptr, null_device), InvalidArgument);
}

TEST(EngineLogprobs, TakeMemoryOnlyWhereTheyMayBeAskedFor) {
  const auto model = tiny_model(TinyModel{}, 3);
  const auto workspace = [&](int32_t max_logprobs) {
    return Executor(model, nullptr, options_of(0, max_logprobs)).memory_report().workspace_bytes;
  };
  const int64_t none = workspace(0);
  EXPECT_GT(workspace(1), none);
  EXPECT_GT(workspace(64), workspace(1));
}

}  // namespace
}  // namespace paceline
