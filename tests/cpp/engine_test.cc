// SPDX-License-Identifier: Apache-2.0
// The whole engine on tiny random models: speculative output equals plain output in all
// circumstances, requests are isolated, and nothing leaks.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include <paceline/error.h>
#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "cpp/equality_checks.h"
#include "support/all_accepted.h"
#include "support/engine_checks.h"
#include "support/jobs.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

using testing::expect_all_accepted;
using testing::expect_equals_plain;
using ::testing::HasSubstr;
using testing::Job;
using testing::make_gemma4;
using testing::mix_sampling;
using testing::Outcome;
using testing::Pick;
using testing::random_jobs;
using testing::run;
using testing::seed_from_env;
using testing::small_engine_options;
using testing::Tally;
using testing::tiny_model;
using testing::TinyModel;

TEST(Engine, SelfDraftAcceptsEverything) {
  // A Gemma 3, and a Gemma 4 with all its features.
  for (const bool is_gemma4 : {false, true}) {
    TinyModel shape{.windows = {8, 0, 8}};
    if (is_gemma4) {
      shape = {.windows = {8, 0, 8, 8, 0},
               .is_gemma4 = true,
               .full_head_dim = 32,
               .full_kv_heads = 1,
               .k_eq_v = true,
               .num_shared = 2,
               .per_layer_size = 8};
    }
    const auto model = tiny_model(shape, 7);
    for (const double temperature : {0.0, 1.0}) {
      for (const int32_t k : {1, 3, 8, 16}) {
        // With a schedule the drafter misses tokens and catches up.
        for (const uint64_t schedule : {0, 5}) {
          std::mt19937_64 random(11);
          ExecutorOptions options = small_engine_options(k);
          options.draft_schedule_seed = schedule;
          Executor executor(model, model, options);
          expect_all_accepted(executor, random_jobs(random, 12, 64, temperature));
        }
      }
    }
  }
}

TEST(Engine, SpeculativeEqualsPlain) {
  const uint64_t first_seed = seed_from_env(1);
  Tally tally;
  for (uint64_t seed = first_seed; seed < first_seed + 60; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Pick pick{random};
    TinyModel shape;
    shape.windows = pick(0, 1, 2) == 0  ? std::vector<int32_t>{0, 0}
                    : random() % 2 == 0 ? std::vector<int32_t>{8, 0, 8}
                                        : std::vector<int32_t>{20, 20, 0};
    shape.is_gemma = random() % 2 == 0;
    shape.has_sinks = seed % 3 == 0;
    std::mt19937_64 switches(seed);
    if (switches() % 3 == 0) make_gemma4(shape, switches);
    TinyModel draft_shape = shape;
    const bool is_other = random() % 3 == 0;
    if (is_other) {
      draft_shape = TinyModel{.hidden = 16,
                              .num_qo_heads = 2,
                              .num_kv_heads = 1,
                              .windows = {5, 0, 12},
                              .is_gemma = random() % 2 == 0};
      if (switches() % 3 == 0) make_gemma4(draft_shape, switches);
    }
    const auto target = tiny_model(shape, seed);
    const auto draft = is_other ? tiny_model(draft_shape, seed + 1)
                                : tiny_model(draft_shape, seed, 0.05f, seed + 2);
    const double temperature = pick(0.0, 0.7, 1.0);
    const auto num_jobs = pick(1, 7, 32);
    std::vector<Job> jobs = random_jobs(random, num_jobs, 64, temperature, 60, 60);
    if (random() % 2 == 0) mix_sampling(jobs, random, 64);

    // Heads of two sizes have larger slabs, and the pool has eight at least.
    const bool is_large = shape.is_gemma4 || draft_shape.is_gemma4;
    expect_equals_plain({.target = target,
                         .drafter = draft,
                         .jobs = jobs,
                         .temperature = temperature,
                         .small_pool_bytes = (is_large ? 600 : 300) << 10},
                        random, seed, tally);
  }
  // The runs must meet accepted and rejected drafts, and preemption.
  tally.expect_all();
}

TEST(Engine, CountersAddUp) {
  const auto target = tiny_model(TinyModel{}, 3);
  const auto draft = tiny_model(TinyModel{}, 3, 0.05f, 4);
  ExecutorOptions options = small_engine_options(5);
  options.kv_cache_bytes = 120 << 10;  // forces preemption: recomputed tokens count once
  Executor executor(target, draft, options);
  std::mt19937_64 random(21);
  std::map<RequestId, SpeculationCounters> sums;
  int64_t emitted = 0;
  int64_t drafted = 0;
  int64_t accepted = 0;
  const std::vector<Job> jobs = random_jobs(random, 24, 64, 1.0);
  for (const Job& job : jobs) {
    sums[executor.add_request({job.prompt, job.sampling}).value()] = {};
  }
  for (size_t left = jobs.size(); left > 0;) {
    for (const RequestEvent& event : executor.poll(100)) {
      SpeculationCounters& sum = sums.at(event.request_id);
      const auto num_tokens = static_cast<int32_t>(event.token_ids.size());
      const bool is_last = event.finish_reason != FinishReason::kNone;
      // Every iteration emits one token of the target's own, except the last, which may end with
      // a draft.
      EXPECT_TRUE(num_tokens - event.num_accepted == 1 ||
                  (is_last && num_tokens == event.num_accepted));
      EXPECT_LE(event.num_accepted, event.num_drafted);
      sum.num_draft_tokens += event.num_drafted;
      sum.num_accepted_tokens += event.num_accepted;
      emitted += num_tokens;
      drafted += event.num_drafted;
      accepted += event.num_accepted;
      if (!is_last) continue;
      --left;
      const SpeculationCounters& total = event.counters;
      EXPECT_EQ(total.num_draft_tokens, sum.num_draft_tokens);
      EXPECT_EQ(total.num_accepted_tokens, sum.num_accepted_tokens);
      EXPECT_EQ(std::accumulate(total.drafted_per_position.begin(),
                                total.drafted_per_position.end(), int64_t{0}),
                total.num_draft_tokens);
      EXPECT_EQ(std::accumulate(total.accepted_per_position.begin(),
                                total.accepted_per_position.end(), int64_t{0}),
                total.num_accepted_tokens);
    }
  }
  const ExecutorStats stats = executor.stats();
  EXPECT_GT(stats.num_preemptions, 0);
  EXPECT_EQ(stats.num_emitted_tokens, emitted);
  EXPECT_EQ(stats.num_draft_tokens, drafted);
  EXPECT_EQ(stats.num_accepted_tokens, accepted);
}

TEST(Engine, LogitsOfAScoreAreWholeAndTheCallers) {
  const auto model = tiny_model(TinyModel{}, 3);
  ExecutorOptions options = small_engine_options(0);
  options.prefill_chunk_size = 8;
  options.host_delay_max_us = 500;
  Executor executor(model, nullptr, options);
  const std::vector<int32_t> prompt(200, 1);
  for (const bool is_cancelled : {true, false}) {
    const RequestId id = executor.add_request({.prompt = prompt, .score_prompt = true}).value();
    if (is_cancelled) {
      while (executor.stats().num_iterations < 3) std::this_thread::yield();
      EXPECT_TRUE(executor.cancel(id));
    }
    std::vector<RequestEvent> events;
    while (events.empty()) events = executor.poll(100);
    ASSERT_EQ(events.size(), 1U);
    EXPECT_EQ(executor.check_integrity(), "");
    if (is_cancelled) {
      EXPECT_EQ(events[0].finish_reason, FinishReason::kCancelled);
      EXPECT_EQ(events[0].logits, nullptr);
    } else {
      EXPECT_EQ(events[0].finish_reason, FinishReason::kLength);
      ASSERT_NE(events[0].logits, nullptr);
      EXPECT_EQ(events[0].logits->size(), 200U * 64);
      EXPECT_EQ(events[0].logits.use_count(), 1) << "the engine holds on to them";
    }
  }
}

TEST(Engine, BadLogitsEndOneRequestOnly) {
  TinyModel shape{.is_gemma = false};
  const auto sound = tiny_model(shape, 3);
  shape.nan_token = 63;
  const auto broken = tiny_model(shape, 3);
  std::mt19937_64 random(5);
  testing::expect_bad_logits_end_one_request(sound, broken, random_jobs(random, 12, 63, 0.0),
                                             small_engine_options);
}

TEST(Engine, ScoresAreLogitsAsTheyAre) {
  Executor executor(tiny_model(TinyModel{}, 3), nullptr, small_engine_options(0));
  std::vector<std::vector<float>> scores;
  for (const bool is_mixed : {false, true}) {
    Request request{.prompt = {5, 6, 7, 8}, .score_prompt = true};
    if (is_mixed) {
      request.sampling = {.logit_bias = {{7, 3}},
                          .repetition_penalty = 1.5,
                          .allowed_token_ids = {1, 2},
                          .top_k = 3};
    }
    const RequestId id = executor.add_request(std::move(request)).value();
    for (bool has_ended = false; !has_ended;) {
      for (const RequestEvent& event : executor.poll(100)) {
        if (event.request_id != id || event.finish_reason == FinishReason::kNone) continue;
        scores.push_back(*event.logits);
        has_ended = true;
      }
    }
  }
  EXPECT_EQ(scores[0], scores[1]);
}

TEST(Engine, RulingOutEveryTokenEndsOneRequestOnly) {
  const auto model = tiny_model(TinyModel{}, 3);
  Executor executor(model, nullptr, small_engine_options(0));
  Job doomed{.prompt = {1, 2}, .sampling = {.max_tokens = 4}};
  for (int32_t t = 0; t < 64; ++t) doomed.sampling.bad_words.push_back({t});
  Job fine = doomed;
  fine.sampling.bad_words.pop_back();
  const std::vector<Outcome> outcomes = run(executor, {doomed, fine});
  EXPECT_EQ(outcomes[0].reason, FinishReason::kError);
  EXPECT_EQ(outcomes[1].tokens, std::vector<int32_t>(4, 63));
}

TEST(Engine, ServesAllInTheSmallestPool) {
  // Every request that fits alone is served, even if two never fit together.
  const auto target = tiny_model(TinyModel{.windows = {8, 0, 40}}, 3);
  const auto draft = tiny_model(TinyModel{.hidden = 16, .num_kv_heads = 1, .windows = {16, 0}}, 4);
  std::mt19937_64 random(8);
  const std::vector<Job> jobs = random_jobs(random, 20, 64, 0.7, 100, 100);
  Executor plain(target, nullptr, small_engine_options(0));
  const std::vector<Outcome> expected = run(plain, jobs);
  for (const int32_t lateness : {0, 2}) {
    ExecutorOptions options = small_engine_options(4);
    options.block_size = 8;
    options.prefill_chunk_size = 16;
    options.device_lateness = lateness;
    // The smallest pool that takes the longest of the jobs.
    int32_t refused = 1;
    for (options.kv_cache_bytes = 64 << 10; refused > 0; options.kv_cache_bytes += 16 << 10) {
      try {
        Executor executor(target, draft, options);
        refused = 0;
        for (const Job& job : jobs) {
          Request request{job.prompt, job.sampling};
          try {
            executor.cancel(executor.add_request(std::move(request)).value());
          } catch (const InvalidArgument& error) {
            EXPECT_NE(std::string(error.what()).find("kv_cache_bytes"), std::string::npos);
            ++refused;
          }
        }
        if (refused > 0) continue;
        (void)executor.check_integrity();  // until the cancelled ones are gone
        (void)executor.poll(0);
        const std::vector<Outcome> actual = run(executor, jobs);
        for (size_t i = 0; i < jobs.size(); ++i) EXPECT_EQ(actual[i].tokens, expected[i].tokens);
        EXPECT_GT(executor.stats().num_preemptions, 0);
        EXPECT_EQ(executor.check_integrity(), "");
      } catch (const InvalidArgument&) {  // not even two slabs
        refused = 1;
      }
    }
  }
}

TEST(Engine, StopsInTheMiddleOfWork) {
  const auto model = tiny_model(TinyModel{}, 3);
  std::mt19937_64 random(2);
  for (int round = 0; round < 20; ++round) {
    ExecutorOptions options = small_engine_options(4);
    options.device_lateness = round % 3;
    Executor executor(model, model, options);
    for (const Job& job : random_jobs(random, 10, 64, 1.0)) {
      (void)executor.add_request({job.prompt, job.sampling});
    }
    if (round % 2 == 0) (void)executor.poll(1);
  }
}

TEST(Engine, QueueBoundIsAReturnValue) {
  const auto model = tiny_model(TinyModel{}, 3);
  ExecutorOptions options = small_engine_options(0);
  options.max_num_seqs = 1;
  options.max_waiting_requests = 3;
  Executor executor(model, nullptr, options);
  int32_t refused = 0;
  for (int i = 0; i < 50; ++i) {
    refused += executor.add_request({.prompt = {1, 2}, .sampling = {.max_tokens = 200}}) ? 0 : 1;
  }
  EXPECT_GT(refused, 20);

  const auto several = [](size_t count) {
    return std::vector<Request>(count, {.prompt = {1, 2}, .sampling = {.max_tokens = 2}});
  };
  EXPECT_EQ(executor.add_requests(several(3)), std::nullopt);  // but could be, later
  try {
    (void)executor.add_requests(several(4));
    ADD_FAILURE() << "four can never wait";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("4 entries; allowed: at most max_waiting_requests"));
  }
}

// Also where no further iteration follows.
TEST(Engine, CancelledRequestsMakeRoomInTheQueue) {
  const auto model = tiny_model(TinyModel{}, 3);
  for (int round = 0; round < 40; ++round) {
    ExecutorOptions options = small_engine_options(0);
    options.max_waiting_requests = 1;
    options.host_delay_max_us = round % 2 * 200;
    Executor executor(model, nullptr, options);
    for (int i = 0; i < 3; ++i) {
      const auto id = executor.add_request({.prompt = {1, 2}});
      ASSERT_TRUE(id.has_value()) << "round " << round << ", request " << i;
      executor.cancel(*id);
      EXPECT_EQ(executor.check_integrity(), "");
      EXPECT_EQ(executor.stats().num_running + executor.stats().num_waiting, 0);
    }
  }
}

TEST(Engine, RequestsAddedTogetherBeginTogether) {
  const auto model = tiny_model(TinyModel{}, 3);
  ExecutorOptions options = small_engine_options(2);
  options.max_waiting_requests = 5;
  Executor executor(model, model, options);
  const std::vector<Request> good(5, Request{.prompt = {1, 2}, .sampling = {.max_tokens = 4}});

  std::vector<Request> bad = good;
  bad[2].prompt = {64};
  try {
    (void)executor.add_requests(bad);
    ADD_FAILURE() << "an id out of range was taken";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("request 2 of 5: "));
  }
  EXPECT_EQ(executor.add_requests({}), std::vector<RequestId>());
  EXPECT_EQ(executor.check_integrity(), "");
  EXPECT_EQ(executor.stats().num_iterations, 0);  // all or none

  for (int round = 0; round < 20; ++round) {
    executor.reset_stats();
    const auto ids = executor.add_requests(good);
    ASSERT_TRUE(ids.has_value());
    EXPECT_TRUE(std::is_sorted(ids->begin(), ids->end()));
    std::set<RequestId> left(ids->begin(), ids->end());
    while (!left.empty()) {
      for (const RequestEvent& event : executor.poll(100)) {
        if (event.finish_reason == FinishReason::kNone) continue;
        EXPECT_EQ(left.erase(event.request_id), 1U);
      }
    }
    EXPECT_EQ(executor.check_integrity(), "");
    EXPECT_EQ(executor.iteration_times().num_prefill.front(), 5);
  }
}

TEST(Engine, NullDeviceServesEveryLimit) {
  const auto model = tiny_model(TinyModel{}, 3);
  ExecutorOptions options = small_engine_options(3);
  options.use_null_device = true;
  Executor executor(model, model, options);
  std::mt19937_64 random(4);
  const std::vector<Job> jobs = random_jobs(random, 100, 64, 0.0);
  const std::vector<Outcome> outcomes = run(executor, jobs);
  for (size_t i = 0; i < jobs.size(); ++i) {
    EXPECT_EQ(static_cast<int32_t>(outcomes[i].tokens.size()), jobs[i].sampling.max_tokens);
    EXPECT_EQ(outcomes[i].reason, FinishReason::kLength);
  }
  EXPECT_EQ(executor.check_integrity(), "");
}

}  // namespace
}  // namespace paceline
