// SPDX-License-Identifier: Apache-2.0
// A model of the toy kind runs in the engine: speculative output equals plain output, and the model
// accepts all that it drafts for itself. tests/python/test_toy_kind.py adds the kind and builds
// this.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <regex>
#include <string>
#include <vector>

#include "cpp/engine_options.h"
#include "cpp/equality_checks.h"
#include "support/all_accepted.h"
#include "support/jobs.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

using testing::Job;
using testing::Pick;
using testing::random_jobs;
using testing::Tally;

constexpr int32_t kHidden = 32;
constexpr int32_t kLayers = 2;

// A model whose layers are all of the toy kind. `noise`: what makes it another one, as in
// tiny_model.
std::shared_ptr<const Model> toy_model(uint64_t seed, float noise = 0) {
  const testing::TinyModel shape{.hidden = kHidden, .windows = {0, 0}, .is_gemma = false};
  const std::regex attention(R"re("attention":\{[^{}]*\})re");
  const std::string json =
      std::regex_replace(testing::tiny_config_json(shape), attention,
                         R"("attention":{"kind":"toy","num_heads":2,"rope":0})");
  ModelBuilder builder(json, DType::kFloat32, Device::kCpu);
  std::mt19937_64 weights(seed);
  std::mt19937_64 noises(seed + 1);
  std::normal_distribution<float> normal;
  const auto put = [&](const std::string& name, const std::vector<int64_t>& extents) {
    int64_t count = 1;
    for (const int64_t extent : extents) count *= extent;
    const bool is_norm = name.find("norm") != std::string::npos;
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) {
      value = (is_norm ? 1.0f : 0.0f) + 0.25f * (normal(weights) + noise * normal(noises));
    }
    builder.put(name, DType::kFloat32, extents, {}, values.data());
  };
  put("embed.weight", {shape.vocab_size, kHidden});
  put("lm_head.weight", {shape.vocab_size, kHidden});
  put("final_norm.weight", {kHidden});
  for (int32_t i = 0; i < kLayers; ++i) {
    const std::string layer = "layers." + std::to_string(i) + ".";
    put(layer + "attn_norm.weight", {kHidden});
    put(layer + "mlp_norm.weight", {kHidden});
    put(layer + "attn.m.weight", {3 * kHidden, kHidden});
    for (const auto& [name, extents] :
         testing::dense_mlp_shapes(shape.intermediate, layer + "mlp.", kHidden)) {
      put(name, extents);
    }
  }
  return builder.finish();
}

TEST(ToyKind, SpeculativeEqualsPlain) {
  Tally tally;
  for (uint64_t seed = 1; seed < 25; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const Pick pick{random};
    const double temperature = pick(0.0, 0.7, 1.0);
    testing::expect_equals_plain(
        {.target = toy_model(seed),
         .drafter = toy_model(seed, 0.05f),
         .jobs = random_jobs(random, pick(1, 7, 24), 64, temperature, 60, 60),
         .temperature = temperature,
         .small_pool_bytes = 300 << 10},
        random, seed, tally);
  }
  tally.expect_both_verdicts();
}

TEST(ToyKind, SelfDraftAcceptsEverything) {
  const auto model = toy_model(7);
  for (const double temperature : {0.0, 1.0}) {
    std::mt19937_64 random(11);
    Executor executor(model, model, testing::small_engine_options(4));
    testing::expect_all_accepted(executor, random_jobs(random, 12, 64, temperature));
  }
}

}  // namespace
}  // namespace paceline
