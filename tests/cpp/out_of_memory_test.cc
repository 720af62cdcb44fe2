// SPDX-License-Identifier: Apache-2.0
// The engine's thread runs out of memory at each of its allocations in turn: nothing aborts, every
// request ends, what was delivered is right, and the engine serves the next requests.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <paceline/error.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <new>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "engine/engine.h"
#include "model/description/kv_shapes.h"
#include "runner/cpu_runner.h"
#include "support/errors.h"
#include "support/failing_allocations.h"
#include "support/host_batch.h"
#include "support/tiny_models.h"
#include "support/toy_constraint.h"

namespace paceline {
namespace {

using testing::fail_allocations;
using testing::fault_side;
using ::testing::HasSubstr;
using testing::is_in_device;
using testing::is_test_thread;
using testing::message_of;
using testing::num_faults;
using testing::Side;
using testing::tiny_model;
using testing::TinyModel;

using Clock = std::chrono::steady_clock;

constexpr int32_t kMaxInFlight = 2;

// Runs each iteration on the engine's own thread, where no allocation fails meanwhile.
class DirectRunner final : public Runner {
 public:
  explicit DirectRunner(std::unique_ptr<CpuRunner> runner) : runner_(std::move(runner)) {}

  void bind(Batch& batch) override { runner_->bind(batch); }
  void launch(const Batch& batch) override {
    is_in_device = true;
    runner_->run_now(batch);
    completed_ = batch.iteration;
    is_in_device = false;
  }
  void wait(int64_t) override {}
  int64_t completed() override { return completed_; }
  std::span<const SequenceResult> results(int64_t iteration) override {
    return runner_->results(iteration);
  }
  std::span<const TokenLogprob> logprobs(int64_t iteration) override {
    return runner_->logprobs(iteration);
  }
  std::span<const ProposedDrafts> drafts(int64_t iteration) override {
    return runner_->drafts(iteration);
  }
  Timing timing(int64_t) override { return {}; }
  void poison(GroupId group, BlockId block) override { runner_->poison(group, block); }
  std::map<std::string, int64_t, std::less<>> workspace_bytes() const override { return {}; }

 private:
  std::unique_ptr<CpuRunner> runner_;
  int64_t completed_ = -1;
};

struct TinyEngine {
  TinyEngine() {
    model = tiny_model(TinyModel{.windows = {8, 0}}, 5);
    // Room for two or three sequences, so that some are preempted.
    layout = plan_kv_layout(kv_layer_shapes(model->config), kv_layer_shapes(model->config), 8,
                            DType::kFloat32, 180 << 10);
    options = {.shape = {.max_seqs = 4,
                         .max_verify_rows = 32,
                         .max_logit_rows = 64,
                         .num_draft_tokens = 2,
                         .first_rows = FirstRows::kNewest,
                         .max_prompt_rows = 16,
                         .max_logprobs = 2},
               .scheduler = {.max_num_seqs = 4,
                             .max_num_batched_tokens = 32,
                             .prefill_chunk_size = 8,
                             .max_score_rows = 16,
                             .num_draft_tokens = 2,
                             .max_in_flight = kMaxInFlight},
               .max_model_len = 64,
               .vocab_size = model->config.vocab_size,
               .poisons_freed_blocks = true,
               .windows = {.vocab_size = model->config.vocab_size}};
  }

  std::unique_ptr<Engine> engine() const {
    const CpuRunnerOptions runner_options = {
        .runner = {.iteration = {.shape = options.shape, .max_model_len = 64},
                   .max_in_flight = kMaxInFlight}};
    return std::make_unique<Engine>(options, layout,
                                    std::make_unique<DirectRunner>(std::make_unique<CpuRunner>(
                                        model, model, layout, runner_options)));
  }

  std::shared_ptr<const Model> model;
  KvLayout layout;
  EngineOptions options;
};

// Everything that makes the engine's thread allocate: forks, logprobs of prompts and outputs,
// scores, lists of the logits pipeline, a constraint, and more requests than can run at once.
std::vector<Request> workload() {
  const auto prompt = [](int32_t length) {
    std::vector<int32_t> tokens;
    for (int32_t t = 0; t < length; ++t) tokens.push_back((7 * t + length) % 64);
    return tokens;
  };
  return {{.prompt = prompt(19),
           .sampling = {.seed = 1, .max_tokens = 12, .logprobs = 2, .prompt_logprobs = 1},
           .num_samples = 3},
          {.prompt = prompt(5),
           .sampling = {.temperature = 0, .max_tokens = 20, .bad_words = {{3}, {4, 5}}}},
          {.prompt = prompt(11), .score_prompt = true},
          {.prompt = prompt(30), .sampling = {.seed = 2, .max_tokens = 25}},
          {.prompt = prompt(2), .sampling = {.seed = 3, .max_tokens = 30, .logprobs = 0}},
          {.prompt = prompt(4),
           .sampling = {.seed = 5, .max_tokens = 14},
           .constraints = {std::make_shared<testing::ToyConstraint>(1, 64)}},
          {.prompt = prompt(9), .sampling = {.seed = 4, .max_tokens = 6}}};
}

struct Outcome {
  std::vector<int32_t> tokens;
  std::vector<std::vector<TokenLogprob>> logprobs;
  FinishReason reason = FinishReason::kNone;
  std::string error;
};

// By index of the request in the workload, and sample.
using Outcomes = std::map<std::pair<RequestId, int32_t>, Outcome>;

size_t num_samples_of(const std::vector<Request>& requests) {
  size_t num_samples = 0;
  for (const Request& request : requests) num_samples += static_cast<size_t>(request.num_samples);
  return num_samples;
}

// Until all have ended, or for ten seconds.
Outcomes drain(Engine& engine, RequestId first_id, size_t num_samples) {
  Outcomes outcomes;
  const Clock::time_point deadline = Clock::now() + std::chrono::seconds(10);
  for (size_t num_ended = 0; num_ended < num_samples && Clock::now() < deadline;) {
    for (const RequestEvent& event : engine.poll(50)) {
      Outcome& outcome = outcomes[{event.request_id - first_id, event.sample}];
      EXPECT_EQ(outcome.reason, FinishReason::kNone) << "an event after the last one";
      outcome.tokens.insert(outcome.tokens.end(), event.token_ids.begin(), event.token_ids.end());
      outcome.logprobs.insert(outcome.logprobs.end(), event.logprobs.begin(), event.logprobs.end());
      outcome.reason = event.finish_reason;
      outcome.error = event.error;
      num_ended += event.finish_reason != FinishReason::kNone ? 1 : 0;
    }
  }
  return outcomes;
}

Outcomes serve(Engine& engine) {
  const std::vector<Request> requests = workload();
  const std::vector<RequestId> ids = engine.add_requests(requests).value();
  engine.cancel(ids.back());
  return drain(engine, ids.front(), num_samples_of(requests));
}

bool is_prefix(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  return a.size() <= b.size() && std::equal(a.begin(), a.end(), b.begin());
}

// What has been delivered is right, and all has ended.
void check(const Outcomes& actual, const Outcomes& expected, RequestId cancelled) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [key, outcome] : actual) {
    const Outcome& whole = expected.at(key);
    ASSERT_NE(outcome.reason, FinishReason::kNone) << "request " << key.first << " hangs";
    EXPECT_TRUE(is_prefix(outcome.tokens, whole.tokens)) << "request " << key.first;
    if (!whole.logprobs.empty()) {
      EXPECT_EQ(outcome.logprobs.size(), outcome.tokens.size());
    }
    if (outcome.reason == FinishReason::kError) {
      EXPECT_NE(outcome.error.find("memory"), std::string::npos) << outcome.error;
    } else if (key.first != cancelled) {
      EXPECT_EQ(outcome.tokens, whole.tokens) << "request " << key.first;
      EXPECT_EQ(outcome.reason, whole.reason);
    }
  }
}

class OutOfMemoryTest : public ::testing::Test {
 protected:
  OutOfMemoryTest() { is_test_thread = true; }
  ~OutOfMemoryTest() override { fault_side = Side::kNone; }

  // Without the cancelled one, whose end depends on the moment.
  Outcomes expected_outcomes() {
    const auto engine = setup_.engine();
    const std::vector<Request> requests = workload();
    const RequestId first = engine->add_requests(requests).value().front();
    return drain(*engine, first, num_samples_of(requests));
  }

  // One allocation fails, or all do for `duration_us`; from the n-th on, for n = 0, stride, ...
  // until a run needs fewer.
  void fail_at_every_allocation(int64_t duration_us, int64_t stride) {
    const Outcomes expected = expected_outcomes();
    const auto cancelled = static_cast<RequestId>(workload().size()) - 1;
    int64_t num_errors = 0;
    int64_t num_served_beside_errors = 0;
    int64_t n = 0;
    for (bool has_failed = true; has_failed; n += stride) {
      SCOPED_TRACE("allocation " + std::to_string(n));
      fail_allocations(Side::kEngine, n, duration_us);
      const auto engine = setup_.engine();
      const Outcomes outcomes = serve(*engine);
      EXPECT_EQ(engine->check_integrity(), "");
      fault_side = Side::kNone;
      has_failed = num_faults > 0;
      check(outcomes, expected, cancelled);
      int64_t num_ended_so = 0;
      for (const auto& [key, outcome] : outcomes) {
        num_ended_so += outcome.reason == FinishReason::kError ? 1 : 0;
      }
      num_errors += num_ended_so;
      if (num_ended_so > 0) {
        num_served_beside_errors += static_cast<int64_t>(outcomes.size()) - num_ended_so;
      }
      // The next requests find an engine that is as good as new.
      check(serve(*engine), expected, cancelled);
      EXPECT_EQ(engine->check_integrity(), "");
      const ExecutorStats stats = engine->stats();
      const IterationTimes times = engine->iteration_times();
      EXPECT_EQ(times.us.size(), static_cast<size_t>(stats.num_iterations));
      EXPECT_EQ(times.us.size(), times.num_prefill.size());
      EXPECT_EQ(times.us.size(), times.idle_us.size());
      EXPECT_EQ(times.us.size(), times.num_decoding.size());
      EXPECT_EQ(stats.num_running + stats.num_waiting, 0);
      if (HasFailure()) return;
    }
    EXPECT_GT(n, 200) << "the faults do not reach the engine";
    EXPECT_GT(num_errors, 100 / stride);
    EXPECT_GT(num_served_beside_errors, 100 / stride) << "what waits goes on";
  }

  TinyEngine setup_;
};

TEST_F(OutOfMemoryTest, AnyAllocationOfTheEnginesThreadMayFail) { fail_at_every_allocation(0, 1); }

TEST_F(OutOfMemoryTest, MemoryMayBeOutForAWhile) { fail_at_every_allocation(25'000, 11); }

TEST_F(OutOfMemoryTest, AddingRequestsFailsWhollyOrNotAtAll) {
  const auto engine = setup_.engine();
  const Outcomes expected =
      drain(*engine, engine->add_requests(workload()).value().front(), num_samples_of(workload()));
  int64_t n = 0;
  for (bool has_failed = true; has_failed; ++n) {
    std::vector<Request> requests = workload();
    std::optional<std::vector<RequestId>> ids;
    fail_allocations(Side::kTest, n);
    try {
      ids = engine->add_requests(std::move(requests));
    } catch (const std::bad_alloc&) {
    }
    fault_side = Side::kNone;
    has_failed = !ids.has_value();
    if (has_failed) {
      EXPECT_EQ(engine->check_integrity(), "");
      EXPECT_TRUE(engine->poll(0).empty()) << "allocation " << n;
    } else {
      check(drain(*engine, ids->front(), num_samples_of(workload())), expected, -1);
    }
  }
  EXPECT_GT(n, 30);
}

// A device that has no memory for what it was given.
class FailingRunner final : public Runner {
 public:
  explicit FailingRunner(const BatchShape& shape) : memory_(shape) {}
  void bind(Batch& batch) override {
    batch.inputs = memory_->inputs;
    batch.capacity = memory_->capacity;
  }
  void launch(const Batch&) override { throw std::bad_alloc(); }
  void wait(int64_t) override {}
  int64_t completed() override { return -1; }
  std::span<const SequenceResult> results(int64_t) override { return {}; }
  Timing timing(int64_t) override { return {}; }
  void poison(GroupId, BlockId) override {}
  std::map<std::string, int64_t, std::less<>> workspace_bytes() const override { return {}; }

 private:
  testing::HostBatch memory_;
};

TEST_F(OutOfMemoryTest, OfTheDeviceIsFinal) {
  Engine engine(setup_.options, setup_.layout,
                std::make_unique<FailingRunner>(setup_.options.shape));
  (void)engine.add_request({.prompt = {1, 2}});
  EXPECT_THROW(
      {
        const Clock::time_point deadline = Clock::now() + std::chrono::seconds(10);
        while (Clock::now() < deadline) (void)engine.poll(50);
      },
      std::bad_alloc);
  EXPECT_THROW((void)engine.add_request({.prompt = {1, 2}}), std::bad_alloc);
  EXPECT_THROW((void)engine.check_integrity(), std::bad_alloc);
}

// A device whose iterations complete only while it is not stuck.
class StuckRunner final : public Runner {
 public:
  StuckRunner(std::unique_ptr<CpuRunner> runner, const std::atomic<bool>& is_stuck)
      : runner_(std::move(runner)), is_stuck_(is_stuck) {}
  void bind(Batch& batch) override { runner_->bind(batch); }
  void launch(const Batch& batch) override { runner_->launch(batch); }
  void wait(int64_t iteration) override {
    while (is_stuck_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    runner_->wait(iteration);
  }
  int64_t completed() override { return runner_->completed(); }
  std::span<const SequenceResult> results(int64_t iteration) override {
    return runner_->results(iteration);
  }
  Timing timing(int64_t) override { return {}; }
  void poison(GroupId group, BlockId block) override { runner_->poison(group, block); }
  std::map<std::string, int64_t, std::less<>> workspace_bytes() const override { return {}; }

 private:
  std::unique_ptr<CpuRunner> runner_;
  const std::atomic<bool>& is_stuck_;
};

// Neither a device that rests nor one that works is stuck, and a failure is final.
TEST_F(OutOfMemoryTest, ADeviceThatHangsIsAFailure) {
  EngineOptions options = setup_.options;
  options.shape.max_logprobs = 0;
  options.hang_timeout_s = 0.3;
  std::atomic<bool> is_stuck = false;
  const CpuRunnerOptions runner_options = {
      .runner = {.iteration = {.shape = options.shape, .max_model_len = 64},
                 .max_in_flight = kMaxInFlight}};
  Engine engine(
      options, setup_.layout,
      std::make_unique<StuckRunner>(
          std::make_unique<CpuRunner>(setup_.model, setup_.model, setup_.layout, runner_options),
          is_stuck));
  const auto ends = [&] {
    (void)engine.add_request({.prompt = {1, 2}, .sampling = {.max_tokens = 30}});
    for (const Clock::time_point begin = Clock::now();
         Clock::now() < begin + std::chrono::seconds(10);) {
      for (const RequestEvent& event : engine.poll(20)) {
        if (event.finish_reason != FinishReason::kNone) return true;
      }
    }
    return false;
  };
  EXPECT_TRUE(ends());
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  EXPECT_TRUE(ends());
  is_stuck = true;
  EXPECT_THAT(message_of<DeviceError>([&] { (void)ends(); }),
              HasSubstr("the device has not completed an iteration for 0."));
  is_stuck = false;
  EXPECT_THROW((void)engine.add_request({.prompt = {1, 2}}), DeviceError);
  EXPECT_THROW((void)engine.check_integrity(), DeviceError);
}

// Memory stays out until the engine is gone: its end must not wait for memory.
TEST_F(OutOfMemoryTest, AnEngineWithoutMemoryCanBeDestroyed) {
  for (int64_t n = 0; n < 120; n += 7) {
    fail_allocations(Side::kEngine, n, int64_t{60} * 1'000'000);
    const Clock::time_point start = Clock::now();
    {
      const auto engine = setup_.engine();
      (void)engine->add_requests(workload());
      std::this_thread::sleep_for(std::chrono::milliseconds(15));
    }
    fault_side = Side::kNone;
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(5));
  }
}

}  // namespace
}  // namespace paceline
