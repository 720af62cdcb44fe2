// SPDX-License-Identifier: Apache-2.0
// The whole engine on a GPU on hybrids of recurrent layers and attention, with the heads that the
// fast kernel takes and with others. Skipped without a GPU, unless PACELINE_REQUIRE_GPU=1.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include <paceline/executor.h>

#include "support/engine_checks.h"
#include "support/gpu.h"
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

ExecutorOptions options_of(int32_t k) { return testing::gpu_engine_options(k, 16, 1 << 30); }

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
  testing::expect_hits_equal_misses(
      never, cached, {.num_rounds = 8, .longest_new = 60, .longest_prompt = 360, .most_tokens = 60},
      random);
  EXPECT_GT(cached.stats().num_shared_tokens, 1000);
}

}  // namespace
}  // namespace paceline
