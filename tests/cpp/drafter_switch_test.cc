// SPDX-License-Identifier: Apache-2.0
// Drafters that come and go while requests run: no token changes, no request is lost, the memory
// is that of the start, and whatever is refused changes nothing.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.h>
#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "support/errors.h"
#include "support/jobs.h"
#include "support/tiny_models.h"
#include "support/toy_constraint.h"

namespace paceline {
namespace {

using testing::expect_same;
using ::testing::HasSubstr;
using testing::Job;
using testing::message_of;
using testing::mix_logprobs;
using testing::mix_num_drafts;
using testing::mix_sampling;
using testing::Outcome;
using testing::Pick;
using testing::random_jobs;
using testing::run;
using testing::seed_from_env;
using testing::small_engine_options;
using testing::tiny_model;
using testing::TinyModel;
using testing::ToyConstraint;

constexpr int32_t kMaxLogprobs = 3;

struct Drafter {
  std::shared_ptr<const Model> model;
  SpeculativeOptions options;
};

SpeculativeOptions with_k(int32_t k) { return {.num_speculative_tokens = k, .adaptive = false}; }

SpeculativeOptions prompt_lookup(int32_t k) {
  SpeculativeOptions options = with_k(k);
  options.prompt_lookup_min = 1;
  options.prompt_lookup_max = 3;
  return options;
}

// The target with noise, a model of another shape, prompt lookup, and none.
std::vector<Drafter> four_drafters(const TinyModel& shape, uint64_t seed) {
  const TinyModel other = {
      .hidden = 16, .num_qo_heads = 2, .num_kv_heads = 1, .windows = {5, 0, 12}, .is_gemma = false};
  return {{tiny_model(shape, seed, 0.05f, seed + 2), with_k(4)},
          {tiny_model(other, seed + 1), with_k(2)},
          {nullptr, prompt_lookup(5)},
          {nullptr, with_k(0)}};
}

// No prompt is delivered again, either.
void expect_unchanged(const std::vector<Outcome>& actual, const std::vector<Outcome>& expected) {
  ASSERT_NO_FATAL_FAILURE(expect_same(actual, expected));
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].num_prompt_deliveries, expected[i].num_prompt_deliveries) << "job " << i;
  }
}

// What a report says of memory, without what runs.
std::string memory_of(const Executor& executor) {
  const MemoryReport report = executor.memory_report();
  std::string all =
      std::to_string(report.kv_pool_bytes) + ' ' + std::to_string(report.kv_slab_bytes) + ' ' +
      std::to_string(report.draft_weight_bytes) + ' ' + std::to_string(report.graph_bytes);
  for (const auto& [purpose, bytes] : report.workspace) {
    all += '\n' + purpose + ' ' + std::to_string(bytes);
  }
  for (const MemoryReport::Group& group : report.groups) {
    all += '\n' + group.owner + ' ' + group.kind + ' ' + std::to_string(group.block_bytes);
  }
  return all;
}

struct SwitchedRuns {
  int64_t num_runs = 0;
  int32_t num_busy = 0;  // switches while samples ran
};

// Switches in turn between drafters while jobs run, over and over, until there were `count`.
SwitchedRuns switch_under_load(Executor& executor, const std::vector<Drafter>& drafters,
                               int32_t count, const std::function<void()>& run_jobs) {
  std::atomic<int32_t> num_switches = 0;
  std::exception_ptr failure;
  SwitchedRuns runs;
  std::thread operator_thread([&] {
    try {
      for (; num_switches < count; ++num_switches) {
        const Drafter& next = drafters[static_cast<size_t>(num_switches + 1) % drafters.size()];
        runs.num_busy += executor.stats().num_running > 0 ? 1 : 0;
        executor.set_drafter(next.model, next.options);
        std::this_thread::sleep_for(std::chrono::milliseconds(num_switches % 4));
      }
    } catch (...) {
      failure = std::current_exception();
    }
    num_switches = count;
  });
  for (; num_switches < count || runs.num_runs < 2; ++runs.num_runs) {
    run_jobs();
    if (::testing::Test::HasFatalFailure()) break;
  }
  operator_thread.join();
  if (failure != nullptr) std::rethrow_exception(failure);
  return runs;
}

// 200 switches, 20 in each of ten engines that differ in all that may matter, some of them with
// several ranks.
TEST(DrafterSwitch, ChangesNoToken) {
  const uint64_t first_seed = seed_from_env(1);
  constexpr int32_t kNumSwitches = 20;
  int64_t num_drafted = 0;
  int64_t num_accepted = 0;
  int64_t num_preemptions = 0;
  int32_t num_busy = 0;
  int32_t num_ranked = 0;
  for (uint64_t seed = first_seed; seed < first_seed + 10; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Pick pick{random};
    TinyModel shape;
    shape.windows = pick(0, 1) == 0 ? std::vector<int32_t>{0, 0} : std::vector<int32_t>{8, 0, 8};
    shape.is_gemma = pick(true, false);
    const auto target = tiny_model(shape, seed);
    const std::vector<Drafter> drafters = four_drafters(shape, seed);
    std::vector<Job> jobs = random_jobs(random, 16, 64, pick(0.0, 1.0), 60, 60);
    mix_sampling(jobs, random, 64);
    mix_logprobs(jobs, random, kMaxLogprobs);
    for (size_t i = 0; i < jobs.size(); i += 5) {
      const uint64_t salt = random();
      jobs[i].make_constraint = [salt] { return std::make_shared<ToyConstraint>(salt, 64, 200); };
      jobs[i].sampling.bad_words.clear();
      jobs[i].sampling.allowed_token_ids.clear();
      jobs[i].sampling.stop_token_ids.clear();  // excluded before min_tokens
    }
    ExecutorOptions options = small_engine_options(0);
    options.max_logprobs = kMaxLogprobs;
    Executor plain(target, nullptr, options);
    const std::vector<Outcome> expected = run(plain, jobs);

    options.speculative = drafters[0].options;
    options.speculative.draft_driver = pick(DraftDriver::kUnrolled, DraftDriver::kReplay,
                                            DraftDriver::kEager, DraftDriver::kWhile);
    options.prefill_chunk_size = pick(0, 7, 33);
    options.device_lateness = pick(0, 1, 2);
    options.enable_prefix_caching = pick(true, false);
    options.poison_freed_blocks = pick(true, false);
    options.draft_schedule_seed = pick(0, 5);
    if (pick(true, false)) options.kv_cache_bytes = 400 << 10;  // with preemption
    options.tensor_parallel_size = pick(1, 2, 4);
    num_ranked += options.tensor_parallel_size > 1 ? 1 : 0;
    Executor executor(target, drafters[0].model, options);
    // Before the first switch, which makes all options those of its own configuration.
    std::vector<Drafter> in_turn = drafters;
    in_turn[0].options = options.speculative;
    const std::string memory = memory_of(executor);
    const SwitchedRuns runs = switch_under_load(executor, in_turn, kNumSwitches, [&] {
      const std::vector<Outcome> actual = run(executor, jobs);
      for (const Outcome& outcome : actual) {
        num_drafted += outcome.counters.num_draft_tokens;
        num_accepted += outcome.counters.num_accepted_tokens;
      }
      expect_unchanged(actual, expected);
    });
    ASSERT_FALSE(HasFatalFailure());
    EXPECT_EQ(executor.check_integrity(), "");
    EXPECT_EQ(memory_of(executor), memory);
    const ExecutorStats stats = executor.stats();
    EXPECT_EQ(stats.num_finished, runs.num_runs * static_cast<int64_t>(jobs.size()));
    EXPECT_EQ(stats.num_failed + stats.num_cancelled + stats.num_running + stats.num_waiting, 0);
    num_preemptions += stats.num_preemptions;
    num_busy += runs.num_busy;
  }
  EXPECT_GT(num_accepted, 0);
  EXPECT_LT(num_accepted, num_drafted);
  EXPECT_GT(num_preemptions, 0);
  EXPECT_GT(num_busy, 10 * kNumSwitches / 2);
  EXPECT_GT(num_ranked, 2);
}

// A busy engine: long requests that run while a test changes the drafter.
class BusyEngine {
 public:
  BusyEngine(const std::shared_ptr<const Model>& target, const Drafter& drafter,
             ExecutorOptions options = small_engine_options(0), int32_t num_jobs = 8) {
    std::mt19937_64 random(7);
    jobs_ = random_jobs(random, num_jobs, 64, 1.0, 30, 1);
    for (Job& job : jobs_) {
      job.sampling.stop_token_ids.clear();
      job.sampling.max_tokens = 200;
    }
    Executor plain(target, nullptr, options);
    expected_ = run(plain, jobs_);
    options.speculative = drafter.options;
    executor_.emplace(target, drafter.model, options);
  }

  [[nodiscard]] Executor& executor() { return *executor_; }
  [[nodiscard]] const std::vector<Outcome>& outcomes() const { return outcomes_; }  // of `during`

  // Calls `change` while all requests run, and expects that their outputs are those of plain
  // decoding.
  template <class Change>
  void during(const Change& change) {
    std::exception_ptr failure;
    std::thread changing([&] {
      while (executor_->stats().num_running < static_cast<int32_t>(jobs_.size())) {
        std::this_thread::yield();
      }
      try {
        change();
      } catch (...) {
        failure = std::current_exception();
      }
    });
    outcomes_ = run(*executor_, jobs_);
    changing.join();
    if (failure != nullptr) std::rethrow_exception(failure);
    expect_unchanged(outcomes_, expected_);
    EXPECT_EQ(executor_->check_integrity(), "");
  }

 private:
  std::vector<Job> jobs_;
  std::vector<Outcome> expected_;
  std::vector<Outcome> outcomes_;
  std::optional<Executor> executor_;
};

// A request that began without a drafter drafts with the one that comes, and its counters have the
// largest k of its life.
TEST(DrafterSwitch, WhatRunsUsesTheNewDrafter) {
  const auto target = tiny_model(TinyModel{}, 1);
  ExecutorOptions options = small_engine_options(0);
  options.host_delay_max_us = 2000;  // the requests run for longer than the changes take
  BusyEngine engine(target, {nullptr, with_k(0)}, options, 3);
  Executor& executor = engine.executor();
  engine.during([&] {
    executor.set_drafter(target, with_k(5));
    executor.set_drafter(target, with_k(3));
  });
  for (const Outcome& outcome : engine.outcomes()) {
    EXPECT_EQ(outcome.counters.drafted_per_position.size(), 5);
    EXPECT_GT(outcome.counters.num_draft_tokens, 0);
    // The target drafts for itself.
    EXPECT_EQ(outcome.counters.num_accepted_tokens, outcome.counters.num_draft_tokens);
  }
}

TEST(DrafterSwitch, RefusalsChangeNothing) {
  const TinyModel shape;
  const auto target = tiny_model(shape, 1);
  const std::vector<Drafter> drafters = four_drafters(shape, 1);
  BusyEngine engine(target, drafters[0]);
  Executor& executor = engine.executor();
  const std::string memory = memory_of(executor);
  const auto refused = [&](const std::shared_ptr<const Model>& model,
                           const SpeculativeOptions& options) {
    std::string message;
    engine.during([&] {
      message = message_of<InvalidArgument>([&] { executor.set_drafter(model, options); });
    });
    EXPECT_EQ(memory_of(executor), memory);
    EXPECT_EQ(executor.options().speculative.num_speculative_tokens, 4);
    return message;
  };
  EXPECT_THAT(refused(drafters[1].model, with_k(0)), HasSubstr("num_speculative_tokens is 0"));
  EXPECT_THAT(refused(nullptr, with_k(3)), HasSubstr("there is no drafter"));
  EXPECT_THAT(refused(drafters[1].model, with_k(17)), HasSubstr("17"));
  SpeculativeOptions standard = with_k(3);
  standard.rejection_sample_method = AcceptMethod::kStandard;
  EXPECT_THAT(refused(drafters[1].model, standard), HasSubstr("\"coupled\""));
}

TEST(DrafterSwitch, OneChangeAtATime) {
  const TinyModel shape;
  const auto target = tiny_model(shape, 1);
  const std::vector<Drafter> drafters = four_drafters(shape, 1);
  BusyEngine engine(target, drafters[0]);
  Executor& executor = engine.executor();
  engine.during([&] {
    executor.update_drafter([&] {
      const auto change = [&] { executor.set_drafter(nullptr, with_k(0)); };
      EXPECT_THAT(message_of<InvalidArgument>(change), HasSubstr("by another call"));
      const auto update = [&] { executor.update_drafter([] {}); };
      EXPECT_THAT(message_of<InvalidArgument>(update), HasSubstr("by another call"));
    });
    executor.set_drafter(nullptr, with_k(0));
  });
  EXPECT_EQ(executor.options().speculative.num_speculative_tokens, 0);
}

TEST(DrafterSwitch, WhatRunsFitsTheNewPool) {
  const TinyModel shape;
  const auto target = tiny_model(shape, 1);
  // A drafter whose KV is eight times that of the target.
  TinyModel large;
  large.windows = std::vector<int32_t>(16, 0);
  const Drafter drafter = {tiny_model(large, 2), with_k(2)};
  ExecutorOptions options = small_engine_options(0);
  options.kv_cache_bytes = 512 << 10;
  options.host_delay_max_us = 2000;  // the request runs for longer than the change takes
  BusyEngine engine(target, {nullptr, with_k(0)}, options, 1);
  Executor& executor = engine.executor();
  const auto change = [&] { executor.set_drafter(drafter.model, drafter.options); };
  engine.during([&] {
    EXPECT_THAT(message_of<InvalidArgument>(change), HasSubstr("the drafter has not changed"));
  });
  change();
  EXPECT_EQ(executor.memory_report().groups.size(), 3);
}

TEST(DrafterSwitch, RefusesWhatIsNotSupported) {
  const TinyModel shape;
  const auto target = tiny_model(shape, 1);
  ExecutorOptions options = small_engine_options(0);
  options.speculative = with_k(2);
  options.speculative.rejection_sample_method = AcceptMethod::kStandard;
  Executor standard(target, target, options);
  EXPECT_THROW(standard.set_drafter(nullptr, with_k(0)), InvalidArgument);
  EXPECT_THROW(standard.update_drafter([] {}), InvalidArgument);
  options.speculative = with_k(0);
  Executor plain(target, nullptr, options);
  EXPECT_THROW(plain.update_drafter([] {}), InvalidArgument);
}

// The engine rests for less time than an iteration takes.
TEST(DrafterSwitch, RestsForLessThanAnIteration) {
  TinyModel shape;
  shape.hidden = 256;
  shape.intermediate = 512;
  shape.windows = {0, 0, 0, 0};
  const auto target = tiny_model(shape, 1);
  const std::vector<Drafter> drafters = {{tiny_model(shape, 1, 0.05f, 3), with_k(4)},
                                         {nullptr, prompt_lookup(4)}};
  BusyEngine engine(target, drafters[0]);
  std::vector<double> rests_us;
  engine.during([&] {
    for (int32_t i = 1; i <= 21; ++i) {
      const Drafter& next = drafters[static_cast<size_t>(i) % 2];
      rests_us.push_back(engine.executor().set_drafter(next.model, next.options));
    }
  });
  std::vector<float> times_us = engine.executor().iteration_times().us;
  // The medians, since another process may take the processor in one of them.
  const auto median = [](auto& values) {
    std::sort(values.begin(), values.end());
    return static_cast<double>(values[values.size() / 2]);
  };
  EXPECT_LT(median(rests_us), median(times_us));
}

}  // namespace
}  // namespace paceline
