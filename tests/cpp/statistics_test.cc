// SPDX-License-Identifier: Apache-2.0
// The counts of an engine, and the line of figures that it logs.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/error.h>
#include <paceline/executor.h>
#include <paceline/log.h>

#include "cpp/engine_options.h"
#include "engine/interval_log.h"
#include "support/errors.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

using ::testing::_;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using testing::message_of;
using ::testing::Pair;
using testing::small_engine_options;
using testing::tiny_model;
using testing::TinyModel;

std::vector<int32_t> prompt_of(int32_t length) {
  std::vector<int32_t> prompt(static_cast<size_t>(length));
  std::iota(prompt.begin(), prompt.end(), 1);
  return prompt;
}

// Polls until `num_samples` have ended, and returns their last events.
std::vector<RequestEvent> drain(Executor& executor, size_t num_samples) {
  std::vector<RequestEvent> last;
  while (last.size() < num_samples) {
    for (RequestEvent& event : executor.poll(100)) {
      if (event.finish_reason != FinishReason::kNone) last.push_back(std::move(event));
    }
  }
  return last;
}

TEST(Statistics, CountTokensSamplesAndBlocks) {
  const auto model = tiny_model(TinyModel{.windows = {8, 0}}, 3);
  const auto draft = tiny_model(TinyModel{.windows = {8, 0}}, 3, /*noise=*/0.4F, 9);
  const int32_t k = 3;
  Executor executor(model, draft, small_engine_options(k));
  // 20 prompt tokens, and 2 x 19 that samples take over; a score; a sample that ends with an error.
  (void)executor.add_request({.prompt = prompt_of(20),
                              .sampling = {.temperature = 0, .max_tokens = 30},
                              .num_samples = 3});
  (void)executor.add_request({.prompt = prompt_of(7), .score_prompt = true});
  std::vector<RequestEvent> last = drain(executor, 4);
  const RequestId id =
      executor.add_request({.prompt = prompt_of(5), .sampling = {.max_tokens = 200}}).value();
  executor.cancel(id);
  drain(executor, 1);

  const ExecutorStats stats = executor.stats();
  EXPECT_EQ(stats.num_finished, 4);
  EXPECT_EQ(stats.num_cancelled, 1);
  EXPECT_EQ(stats.num_failed, 0);
  EXPECT_EQ(stats.num_running + stats.num_waiting, 0);
  EXPECT_EQ(stats.num_shared_tokens, 2 * 19);
  EXPECT_GE(stats.num_prompt_tokens, 20 + 2 + 7);
  EXPECT_LE(stats.num_prompt_tokens, 20 + 2 + 7 + 5);  // the cancelled one may have begun
  SpeculationCounters sum{.accepted_per_position = std::vector<int64_t>(k),
                          .drafted_per_position = std::vector<int64_t>(k)};
  int32_t num_cached = 0;
  for (const RequestEvent& event : last) {
    num_cached += event.num_cached_tokens;
    sum.num_iterations += event.counters.num_iterations;
    sum.num_draft_tokens += event.counters.num_draft_tokens;
    sum.num_accepted_tokens += event.counters.num_accepted_tokens;
    for (int32_t i = 0; i < k; ++i) {
      sum.drafted_per_position[i] += event.counters.drafted_per_position[i];
      sum.accepted_per_position[i] += event.counters.accepted_per_position[i];
    }
  }
  EXPECT_EQ(num_cached, 2 * 19);
  EXPECT_GT(sum.num_accepted_tokens, 0);
  EXPECT_LT(sum.num_accepted_tokens, sum.num_draft_tokens);
  // The cancelled sample may have verified a window or two.
  EXPECT_GE(stats.num_verify_windows, sum.num_iterations);
  EXPECT_LE(stats.num_verify_windows, sum.num_iterations + 3);
  EXPECT_GE(stats.num_draft_tokens, sum.num_draft_tokens);
  EXPECT_GE(stats.num_accepted_tokens, sum.num_accepted_tokens);
  EXPECT_EQ(stats.drafted_per_position.size(), static_cast<size_t>(k));
  EXPECT_EQ(std::accumulate(stats.drafted_per_position.begin(), stats.drafted_per_position.end(),
                            int64_t{0}),
            stats.num_draft_tokens);
  EXPECT_EQ(std::accumulate(stats.accepted_per_position.begin(), stats.accepted_per_position.end(),
                            int64_t{0}),
            stats.num_accepted_tokens);
  EXPECT_EQ(executor.iteration_times().us.size(), static_cast<size_t>(stats.num_iterations));

  const MemoryReport report = executor.memory_report();
  ASSERT_EQ(stats.kv_groups.size(), report.groups.size());
  EXPECT_EQ(stats.kv_num_slabs, report.kv_num_slabs - 1);  // without the reserved one
  EXPECT_EQ(stats.kv_groups[0].max_blocks,
            stats.kv_num_slabs * (report.kv_slab_bytes / report.groups[0].block_bytes));
  EXPECT_GT(stats.uptime_s, 0);

  executor.reset_stats();
  const ExecutorStats reset = executor.stats();
  EXPECT_EQ(reset.num_iterations + reset.num_finished + reset.num_cancelled +
                reset.num_prompt_tokens + reset.num_shared_tokens + reset.num_draft_tokens,
            0);
  EXPECT_THAT(reset.accepted_per_position, ElementsAre(0, 0, 0));
  EXPECT_GE(reset.uptime_s, stats.uptime_s);
  EXPECT_TRUE(executor.iteration_times().us.empty());
}

TEST(Statistics, ShowTheBlocksOfARunningSample) {
  const auto model = tiny_model(TinyModel{.windows = {0}}, 3);
  ExecutorOptions options = small_engine_options(0);
  options.host_delay_max_us = 2000;
  Executor executor(model, nullptr, options);
  const RequestId id =
      executor.add_request({.prompt = prompt_of(40), .sampling = {.max_tokens = 200}}).value();
  ExecutorStats stats = executor.stats();
  while (stats.num_emitted_tokens < 3) stats = executor.stats();
  EXPECT_EQ(stats.num_running, 1);
  EXPECT_GE(stats.kv_groups[0].held_blocks, 3);  // of 16 tokens
  EXPECT_LT(stats.kv_free_slabs, stats.kv_num_slabs);
  EXPECT_LT(stats.kv_groups[0].held_blocks, stats.kv_groups[0].max_blocks);
  executor.cancel(id);
  drain(executor, 1);
}

TEST(Statistics, CountSamplesThatFail) {
  const auto model = tiny_model(TinyModel{.windows = {0}, .nan_token = 7}, 3);
  Executor executor(model, nullptr, small_engine_options(0));
  (void)executor.add_request({.prompt = {7}});
  EXPECT_EQ(drain(executor, 1).front().finish_reason, FinishReason::kError);
  EXPECT_EQ(executor.stats().num_failed, 1);
  EXPECT_EQ(executor.stats().num_finished, 0);
}

TEST(IntervalLog, ALineHasTheRatesOfItsInterval) {
  IntervalLog log(2);
  EngineCounts counts;
  counts.prompt_tokens = 1000;  // before the first interval
  log.restart(counts);
  log.resume(5'000'000);
  EXPECT_FALSE(log.advance(6'000'000));
  log.resume(60'000'000);  // idle meanwhile
  EXPECT_FALSE(log.advance(60'900'000));
  EXPECT_TRUE(log.advance(61'000'000));
  counts.prompt_tokens += 50;
  counts.emitted_tokens = 241;
  counts.preemptions = 3;
  const std::string plain =
      "Running: 4 samples, waiting: 2 samples, prompt throughput: 25.0 "
      "tokens/s, generation throughput: 120.5 tokens/s, KV cache usage: "
      "12.5%, preemptions: 3";
  EXPECT_EQ(log.line(counts, 4, 2, 0.125, 2), plain);
  counts.verify_windows = 100;
  counts.draft_tokens = 190;
  counts.accepted_tokens = 110;
  counts.drafted_per_position = {100, 90};
  counts.accepted_per_position = {80, 30};
  EXPECT_EQ(log.line(counts, 4, 2, 0.125, 2),
            plain +
                ". Speculative decoding: mean acceptance length: 2.10, draft acceptance rate: "
                "57.9%, accepted: 55.0 tokens/s, drafted: 95.0 tokens/s, acceptance per "
                "position: 0.800, 0.333");
  log.restart(counts);
  EXPECT_FALSE(log.advance(62'000'000));
  EXPECT_THAT(log.line(counts, 0, 0, 0, 2), HasSubstr("prompt throughput: 0.0 tokens/s"));
  IntervalLog off(0);
  EXPECT_FALSE(off.advance(int64_t{1} << 60));
}

// Collects the lines of the process while it lives.
class Lines {
 public:
  Lines() {
    set_log_sink([this](LogLevel level, std::string_view line) {
      const std::scoped_lock lock(mutex_);
      lines_.emplace_back(level, line);
    });
  }
  ~Lines() { set_log_sink({}); }
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;

  [[nodiscard]] std::vector<std::pair<LogLevel, std::string>> get() const {
    const std::scoped_lock lock(mutex_);
    return lines_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::pair<LogLevel, std::string>> lines_;
};

TEST(Log, AnEngineTellsWhatItRunsWithAndItsFigures) {
  const auto model = tiny_model(TinyModel{}, 3);
  ExecutorOptions options = small_engine_options(2);
  options.log_interval_s = 0.01;
  options.host_delay_max_us = 1000;
  const Lines lines;
  Executor executor(model, model, options);
  ASSERT_EQ(lines.get().size(), 1u);
  EXPECT_THAT(lines.get()[0].second,
              MatchesRegex("The engine has started on cpu: 8 samples of up to 256 tokens, k = 2; a "
                           "KV pool of [34] MiB \\(as given\\)"));
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_EQ(lines.get().size(), 1u) << "no line while nothing runs";
  (void)executor.add_request({.prompt = prompt_of(9), .sampling = {.max_tokens = 200}});
  drain(executor, 1);
  const auto all = lines.get();
  ASSERT_GT(all.size(), 2u);
  for (size_t i = 1; i < all.size(); ++i) {
    EXPECT_EQ(all[i].first, LogLevel::kInfo);
    EXPECT_THAT(all[i].second, HasSubstr("waiting: 0 samples, prompt throughput: "));
  }
  EXPECT_THAT(all[1].second, HasSubstr("Running: 1 samples"));
  // It drafts for itself. On a busy machine the first interval may have been the prefill's.
  EXPECT_THAT(all, Contains(Pair(_, AllOf(HasSubstr("mean acceptance length: 3.00"),
                                          HasSubstr("acceptance per position: 1.000, 1.000")))));
}

TEST(Log, IsOffByOptionAndWithoutASink) {
  const auto model = tiny_model(TinyModel{}, 3);
  ExecutorOptions options = small_engine_options(0);
  options.log_interval_s = 0;
  {
    const Lines lines;
    Executor executor(model, nullptr, options);
    (void)executor.add_request({.prompt = prompt_of(9), .sampling = {.max_tokens = 100}});
    drain(executor, 1);
    EXPECT_EQ(lines.get().size(), 1u);
  }
  for (const double refused : {-1.0, 86'401.0, std::nan("")}) {
    options.log_interval_s = refused;
    EXPECT_THAT(message_of<InvalidArgument>([&] { Executor(model, nullptr, options); }),
                HasSubstr("allowed: 0 (off) to 86400"));
  }
}

TEST(Log, ASinkMayThrowReplaceItselfAndCallTheEngine) {
  const auto model = tiny_model(TinyModel{}, 3);
  ExecutorOptions options = small_engine_options(0);
  options.log_interval_s = 0.001;
  std::atomic<Executor*> running = nullptr;
  std::atomic<int> num_calls = 0;
  set_log_sink([&](LogLevel, std::string_view) {
    if (Executor* const executor = running) {
      (void)executor->stats();  // no lock of the engine is held
      if (num_calls == 2) set_log_sink({});
      if (num_calls == 3) set_log_sink([&](LogLevel, std::string_view) { ++num_calls; });
    }
    ++num_calls;
    throw 7;
  });
  Executor executor(model, nullptr, options);
  EXPECT_EQ(num_calls, 1);
  running = &executor;
  for (int i = 0; i < 40; ++i) {
    (void)executor.add_request({.prompt = prompt_of(9), .sampling = {.max_tokens = 100}});
  }
  for (const RequestEvent& event : drain(executor, 40)) {
    EXPECT_EQ(event.finish_reason, FinishReason::kLength);
  }
  EXPECT_EQ(num_calls, 3) << "a sink that removed itself is not called again";
  set_log_sink({});
}

TEST(Log, SinksMayChangeWhileEnginesLog) {
  const auto model = tiny_model(TinyModel{}, 3);
  ExecutorOptions options = small_engine_options(0);
  options.log_interval_s = 1e-6;  // a line each iteration
  std::atomic<int> num_calls = 0;
  std::atomic<bool> stops = false;
  std::thread changer([&] {
    while (!stops) {
      // What a sink owns lives as long as a call of it.
      set_log_sink([&, owned = std::make_shared<std::string>(64, 'x')](LogLevel, std::string_view) {
        num_calls += owned->size() == 64 ? 1 : 1 << 20;
      });
      set_log_sink({});
    }
  });
  Executor executor(model, nullptr, options);
  while (num_calls < 100) {
    (void)executor.add_request({.prompt = prompt_of(9), .sampling = {.max_tokens = 100}});
    drain(executor, 1);
  }
  stops = true;
  changer.join();
  EXPECT_LT(num_calls, 1 << 20);
}

}  // namespace
}  // namespace paceline
