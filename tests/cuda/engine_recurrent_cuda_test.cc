// SPDX-License-Identifier: Apache-2.0
// The whole engine on a GPU on hybrids of recurrent layers and attention, with the heads that the fast
// kernel takes and with others. Skipped without a GPU, unless PACELINE_REQUIRE_GPU=1.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include <paceline/executor.h>

#include "support/compressed_checks.h"
#include "support/gpu.h"
#include "support/jobs.h"
#include "support/recurrent_models.h"

namespace paceline {
namespace {

using testing::recurrent_model;
using testing::RecurrentModel;

class CudaRecurrent : public testing::GpuTest {};

// Heads as Qwen3.5 has them.
RecurrentModel large_heads() {
  return {.layers = "rrrf",
          .hidden = 256,
          .num_key_heads = 4,
          .num_value_heads = 12,
          .key_head_dim = 128,
          .value_head_dim = 128};
}

std::shared_ptr<const Model> on_gpu(const RecurrentModel& shape, uint64_t seed) {
  return recurrent_model(shape, seed, DType::kBFloat16, Device::kCuda);
}

ExecutorOptions options_of(int32_t k) {
  ExecutorOptions options;
  options.speculative.adaptive = false;
  options.max_model_len = 700;
  options.max_num_seqs = 16;
  options.max_num_batched_tokens = 16 * 17;
  options.kv_cache_bytes = 1 << 30;
  options.speculative.num_speculative_tokens = k;
  return options;
}

TEST_F(CudaRecurrent, SelfDraftAcceptsEverything) {
  const auto expect_of = [](const RecurrentModel& shape, const std::vector<int32_t>& drafts) {
    testing::expect_self_draft_accepts_everything(on_gpu(shape, 7), drafts, 300, 200, options_of);
  };
  expect_of(large_heads(), {1, 3, 16});
  expect_of({}, {16, 3});
}

TEST_F(CudaRecurrent, DraftsChangeNothing) {
  RecurrentModel drafter = large_heads();
  drafter.layers = "rf";
  testing::expect_drafts_change_nothing(on_gpu(large_heads(), 3),
                                        {on_gpu(drafter, 4), on_gpu(large_heads(), 5)},
                                        {1, 3, 8, 16}, 400, 200, options_of);
}

TEST_F(CudaRecurrent, AThousandIterationsOfFiveDrafts) {
  testing::expect_a_thousand_iterations(on_gpu({}, 3), on_gpu({.layers = "rf"}, 4), 5, 20,
                                        options_of);
}

// Prompts that begin as earlier ones, in a pool that holds the states of a few sequences.
TEST_F(CudaRecurrent, HitsAndMissesHaveTheSameOutput) {
  std::mt19937_64 random(5);
  const auto target = on_gpu(large_heads(), 3);
  ExecutorOptions options = options_of(0);
  options.enable_prefix_caching = false;
  Executor never(target, nullptr, options);
  options = options_of(3);
  options.state_interval = 32;
  options.kv_cache_bytes = int64_t{640} << 20;
  options.prefill_chunk_size = 50;
  Executor cached(target, on_gpu(large_heads(), 5), options);
  std::vector<std::vector<int32_t>> earlier;
  for (int32_t round = 0; round < 8; ++round) {
    std::vector<testing::Job> jobs = testing::random_jobs(random, 40, 64, 0.8, 60, 60);
    for (testing::Job& job : jobs) {
      if (earlier.empty() || random() % 5 == 0) continue;
      const std::vector<int32_t>& begin = earlier[random() % earlier.size()];
      const auto length = static_cast<std::ptrdiff_t>(random() % (begin.size() + 1));
      job.prompt.insert(job.prompt.begin(), begin.begin(), begin.begin() + length);
    }
    const std::vector<testing::Outcome> expected = testing::run(never, jobs);
    const std::vector<testing::Outcome> actual = testing::run(cached, jobs);
    for (size_t i = 0; i < jobs.size(); ++i) {
      ASSERT_EQ(actual[i].tokens, expected[i].tokens) << "round " << round << ", job " << i;
      if (i % 4 != 0 || jobs[i].prompt.size() > 300) continue;
      earlier.push_back(jobs[i].prompt);
      earlier.back().insert(earlier.back().end(), expected[i].tokens.begin(),
                            expected[i].tokens.end());
    }
  }
  EXPECT_GT(cached.stats().num_shared_tokens, 1000);
  EXPECT_EQ(cached.check_integrity(), "");
}

}  // namespace
}  // namespace paceline
