// SPDX-License-Identifier: Apache-2.0
// The choice of prompt rows with scripted times.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <random>
#include <set>
#include <vector>

#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "support/tiny_models.h"
#include "tuning/chunk_chooser.h"

namespace paceline {
namespace {

constexpr int32_t kFewestRows = 100;

// A device whose times are given. As in an engine, a choice is made before the results of the
// iteration before it are known.
struct Device {
  std::function<double(int32_t)> decode_us = [](int32_t) { return 6000; };
  // What prompt rows add to an iteration.
  std::function<double(int32_t)> rows_us = [](int32_t rows) { return 15.0 * rows; };
  double noise = 0;  // relative standard deviation of times

  std::mt19937_64 random{1};
  ChunkChooser chooser{{1, 2, 4, 8, 16, 32}, kFewestRows};
  std::deque<ChunkChooser::Iteration> unread;

  // Runs an iteration with at most this many prompt rows. Returns its time over that of one
  // without.
  double run(int32_t num_decoding, int32_t rows_left) {
    std::normal_distribution<double> normal(1, noise);
    const int32_t rows = std::min(rows_left, chooser.choose(num_decoding));
    const double decode = decode_us(num_decoding);
    const double us = decode + (rows > 0 ? rows_us(rows) : 0);
    unread.push_back({.num_decoding = num_decoding,
                      .num_prompt_rows = rows,
                      .us = us * (noise > 0 ? std::max(0.5, normal(random)) : 1)});
    if (unread.size() == 2) {
      chooser.observe(unread.front());
      unread.pop_front();
    }
    return us / decode;
  }
  // The mean over iterations with prompts of any length.
  double mean(int32_t num_decoding, int32_t count) {
    double sum = 0;
    for (int32_t i = 0; i < count; ++i) sum += run(num_decoding, INT32_MAX);
    return sum / count;
  }
  void warm_up(int32_t num_decoding) {
    for (int32_t i = 0; i < 8; ++i) run(num_decoding, 0);
    mean(num_decoding, 20);
  }
};

TEST(ChunkChooser, BeginsWithAFixedNumber) {
  const ChunkChooser chooser({1, 4}, kFewestRows);
  EXPECT_EQ(chooser.choose(1), ChunkChooser::kFirstRows);
  EXPECT_EQ(chooser.choose(9), ChunkChooser::kFirstRows);
}

TEST(ChunkChooser, IterationsTakeAboutTwiceAsLong) {
  for (const double row_us : {0.5, 5.0, 15.0, 60.0}) {
    Device device{.rows_us = [row_us](int32_t rows) { return row_us * rows; }};
    device.warm_up(8);
    EXPECT_NEAR(device.mean(8, 20), 2.75, 0.05) << row_us;
  }
  // A GPU computes the first rows while it reads the weights.
  Device gpu{.rows_us = [](int32_t rows) { return std::max(500.0, 20.0 * rows - 4000); },
             .noise = 0.05};
  gpu.warm_up(8);
  EXPECT_NEAR(gpu.mean(8, 100), 2.75, 0.15);
}

TEST(ChunkChooser, ReckonsWithTheSequencesThatDecode) {
  Device device{.decode_us = [](int32_t n) { return 4000 + 200 * n; }};
  device.warm_up(1);
  device.warm_up(32);
  EXPECT_NEAR(device.mean(1, 1), 2.75, 0.1);
  EXPECT_NEAR(device.mean(32, 1), 2.75, 0.1);
  // From the nearest number that has been measured.
  EXPECT_NEAR(device.chooser.choose(16), device.chooser.choose(32), 1);
}

TEST(ChunkChooser, FollowsThePrompt) {
  Device device;
  device.warm_up(8);
  // The end of a long prompt: attention makes each row dearer.
  device.rows_us = [](int32_t rows) { return 60.0 * rows; };
  device.mean(8, 12);
  EXPECT_NEAR(device.mean(8, 1), 2.75, 0.15);
  device.rows_us = [](int32_t rows) { return 15.0 * rows; };
  device.mean(8, 12);
  EXPECT_NEAR(device.mean(8, 1), 2.75, 0.15);
}

TEST(ChunkChooser, ShortPromptsSayNothing) {
  Device device{.rows_us = [](int32_t rows) { return std::max(100.0, 20.0 * rows - 4000); }};
  device.warm_up(8);
  const int32_t before = device.chooser.choose(8);
  for (int32_t i = 0; i < 200; ++i) device.run(8, 20);
  EXPECT_EQ(device.chooser.choose(8), before);
}

TEST(ChunkChooser, LearnsFromRowsThatAreTooSlow) {
  // Rows cost nothing, so all that an iteration may have are few beside what is chosen.
  Device device{.rows_us = [](int32_t) { return 1; }};
  device.warm_up(8);
  device.rows_us = [](int32_t rows) { return 60.0 * rows; };
  for (int32_t i = 0; i < 60; ++i) device.run(8, 2048);
  EXPECT_NEAR(device.run(8, 2048), 2.75, 0.15);
}

TEST(ChunkChooser, StarvesNoPrompt) {
  Device device{.rows_us = [](int32_t rows) { return 1e4 * rows; }};
  device.warm_up(8);
  EXPECT_EQ(device.chooser.choose(8), kFewestRows);
}

TEST(ChunkChooser, OneSlowIterationChangesLittle) {
  Device device;
  device.warm_up(8);
  const int32_t before = device.chooser.choose(8);
  device.chooser.observe({.num_decoding = 8, .num_prompt_rows = before, .us = 1e6});
  EXPECT_GT(device.chooser.choose(8), 0.7 * before);
  device.chooser.observe({.num_decoding = 8, .num_prompt_rows = before, .us = 0});
  EXPECT_GT(device.chooser.choose(8), 0.7 * before);
}

// The iterations that compute these prompts of 1,500 tokens in all, which arrive while sequences
// decode.
int64_t num_iterations(const ExecutorOptions& options, int32_t num_decoding,
                       int32_t num_prompts = 3) {
  const auto model = testing::tiny_model(testing::TinyModel{}, 3);
  Executor executor(model, model, options);
  for (int32_t i = 0; i < num_decoding; ++i) {
    const auto id = executor.add_request({.prompt = {1, 2, 3}, .sampling = {.max_tokens = 500}});
    for (bool decodes = false; !decodes;) {
      for (const RequestEvent& event : executor.poll(100)) decodes |= event.request_id == id;
    }
  }
  executor.reset_stats();
  const Request request = {.prompt = std::vector<int32_t>(1500 / num_prompts, 5),
                           .sampling = {.max_tokens = 1}};
  const auto ids = executor.add_requests(std::vector<Request>(num_prompts, request));
  std::set<RequestId> left(ids->begin(), ids->end());
  while (!left.empty()) {
    for (const RequestEvent& event : executor.poll(100)) left.erase(event.request_id);
  }
  const std::vector<int32_t> counts = executor.iteration_times().num_prefill;
  return std::count_if(counts.begin(), counts.end(), [](int32_t n) { return n > 0; });
}

TEST(ChunkChooser, CutsPromptsWhileOthersDecode) {
  ExecutorOptions options = testing::small_engine_options(1);
  options.max_num_seqs = 16;
  options.max_model_len = 504;
  options.enable_prefix_caching = false;
  options.host_delay_max_us = 500;  // so that the others still decode when the prompts arrive
  options.max_num_batched_tokens = 2048;
  options.kv_cache_bytes = 64 << 20;
  EXPECT_EQ(num_iterations(options, 0), 1);
  EXPECT_GE(num_iterations(options, 3), 3);     // the first two before a time is known
  EXPECT_EQ(num_iterations(options, 3, 8), 1);  // many wait
  options.prefill_chunk_size = 2048;
  EXPECT_EQ(num_iterations(options, 3), 1);
  // Where tokens may depend on chunks, those do not depend on times.
  options.prefill_chunk_size = 0;
  for (const AcceptMethod method : {AcceptMethod::kStandard, AcceptMethod::kBlock}) {
    options.speculative.rejection_sample_method = method;
    EXPECT_EQ(num_iterations(options, 3), 4);
  }
}

}  // namespace
}  // namespace paceline
