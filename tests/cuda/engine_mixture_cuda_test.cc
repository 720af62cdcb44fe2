// SPDX-License-Identifier: Apache-2.0
// The whole engine on a GPU on mixtures of experts with the heads, biases and sinks of GPT-OSS, in
// bfloat16 and mxfp4. Skipped without a GPU, unless PACELINE_REQUIRE_GPU=1.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include <paceline/executor.h>

#include "support/all_accepted.h"
#include "support/engine_checks.h"
#include "support/gpu.h"
#include "support/jobs.h"
#include "support/mixture_checks.h"
#include "support/raw_models.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

using testing::expect_a_chunk_takes_any_routing;
using testing::expect_all_accepted;
using testing::expect_bad_logits_end_one_request;
using testing::random_jobs;
using testing::random_raw_model;
using testing::RawModel;
using testing::tiny_config_json;
using testing::tiny_model;
using testing::TinyModel;

class CudaMixture : public testing::GpuTest {};

TinyModel mixture_of(std::vector<int32_t> windows, bool is_mxfp4) {
  return {.hidden = 64,
          .num_qo_heads = 8,
          .num_kv_heads = 1,
          .head_dim = 64,
          .intermediate = 96,
          .max_position = 2304,
          .windows = std::move(windows),
          .is_gemma = false,
          .has_bias = true,
          .has_sinks = true,
          .num_experts = 32,
          .top_k = 4,
          .is_mxfp4 = is_mxfp4};
}

std::shared_ptr<const Model> model_of(const TinyModel& shape, uint64_t seed) {
  return tiny_model(shape, seed, 0, 0, DType::kBFloat16, Device::kCuda);
}

ExecutorOptions options_of(int32_t k) { return testing::gpu_engine_options(k, 64, 256 << 20); }

TEST_F(CudaMixture, SelfDraftAcceptsEverything) {
  for (const bool is_mxfp4 : {false, true}) {
    const auto model = model_of(mixture_of({128, 0, 128, 0}, is_mxfp4), 7);
    for (const double temperature : {0.0, 1.0}) {
      for (const int32_t k : {1, 3, 8, 16}) {
        std::mt19937_64 random(11);
        Executor executor(model, model, options_of(k));
        expect_all_accepted(executor, random_jobs(random, 20, 64, temperature, 300, 300), 500);
      }
    }
  }
}

TEST_F(CudaMixture, AChunkTakesAnyRouting) {
  for (const bool goes_together : {false, true}) {
    TinyModel shape = mixture_of({128, 0}, /*is_mxfp4=*/goes_together);
    shape.num_experts = 128;
    if (goes_together) shape.router_bias_scale = 100;
    const auto model = model_of(shape, 9);
    expect_a_chunk_takes_any_routing(model, model, goes_together, 40, options_of);
  }
}

TEST_F(CudaMixture, BadLogitsEndOneRequestOnly) {
  for (const bool is_mxfp4 : {false, true}) {
    TinyModel shape = mixture_of({8, 0, 130}, is_mxfp4);
    const auto sound = model_of(shape, 3);
    shape.nan_token = 63;
    const auto broken = model_of(shape, 3);
    std::mt19937_64 random(5);
    expect_bad_logits_end_one_request(sound, broken, random_jobs(random, 12, 63, 0.0, 200, 60),
                                      options_of);
  }
}

// The scores of a prompt of 600 tokens: in one chunk, and in chunks of 7.
std::vector<std::vector<float>> scores_by_chunks(const std::shared_ptr<const Model>& model) {
  std::mt19937_64 random(4);
  std::vector<int32_t> prompt(600);
  for (int32_t& token : prompt) token = static_cast<int32_t>(random() % 64);
  std::vector<std::vector<float>> scores;
  for (const int32_t chunk : {0, 7}) {
    ExecutorOptions options = options_of(0);
    options.prefill_chunk_size = chunk;
    Executor executor(model, nullptr, options);
    (void)executor.add_request({.prompt = prompt, .score_prompt = true}).value();
    for (bool is_done = false; !is_done;) {
      for (const RequestEvent& event : executor.poll(100)) {
        if (event.finish_reason == FinishReason::kNone) continue;
        scores.push_back(*event.logits);
        is_done = true;
      }
    }
  }
  return scores;
}

// A shared expert of the others' form is one more of them in the small chunks, and in the large one
// an MLP of its own.
TEST_F(CudaMixture, ASharedExpertGivesTheSameBitsAmongTheOthersAndApart) {
  for (const bool is_per_expert : {false, true}) {
    TinyModel shape = mixture_of({8, 0}, /*is_mxfp4=*/false);
    shape.has_bias = shape.has_sinks = shape.is_interleaved = false;
    shape.is_deepseek = true;
    shape.shared_intermediate = shape.intermediate;
    shape.is_per_expert = is_per_expert;
    const auto scores = scores_by_chunks(model_of(shape, 6));
    EXPECT_EQ(scores[1], scores[0]);
  }
}

// The scales of mxfp4 are powers of two, so its values are exact. The prompt is long enough for the
// products of many rows.
TEST_F(CudaMixture, Mxfp4ExpertsGiveTheBitsOfPlainOnes) {
  TinyModel shape = mixture_of({8, 0}, /*is_mxfp4=*/true);
  const RawModel raw = random_raw_model(tiny_config_json(shape), 4);
  shape.is_mxfp4 = false;
  RawModel plain = raw;
  plain.json = tiny_config_json(shape);
  plain.config = parse_decoder_config(plain.json);
  const auto expected = scores_by_chunks(plain.build(DType::kBFloat16, Device::kCuda));
  const auto scores = scores_by_chunks(raw.build(DType::kBFloat16, Device::kCuda));
  EXPECT_EQ(expected[1], expected[0]);
  EXPECT_EQ(scores, expected);
}

}  // namespace
}  // namespace paceline
