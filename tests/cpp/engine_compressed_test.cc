// SPDX-License-Identifier: Apache-2.0
// The whole engine on tiny models with compressed attention and several residual streams.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "cpp/equality_checks.h"
#include "support/compressed_checks.h"
#include "support/compressed_models.h"
#include "support/jobs.h"
#include "support/seed.h"

namespace paceline {
namespace {

using testing::compressed_model;
using testing::CompressedModel;
using testing::small_engine_options;

TEST(EngineCompressed, SelfDraftAcceptsEverything) {
  testing::expect_self_draft_accepts_everything(compressed_model({}, 7), {1, 3, 16}, 60, 60,
                                                small_engine_options);
}

TEST(EngineCompressed, DraftsChangeNothing) {
  const auto target = compressed_model({}, 3);
  const auto layer = compressed_model({.ratios = {0}, .is_mtp_layer = true}, 4);
  testing::expect_drafts_change_nothing(target, {layer, compressed_model({}, 5)}, {1, 3, 8, 16}, 60,
                                        60, small_engine_options);
}

// Every option that must not change the output, with pools that are too small for all sequences.
TEST(EngineCompressed, SpeculativeEqualsPlain) {
  const uint64_t first_seed = testing::seed_from_env(1);
  testing::Tally tally;
  for (uint64_t seed = first_seed; seed < first_seed + 16; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const testing::Pick pick{random};
    CompressedModel shape;
    shape.ratios =
        random() % 2 == 0 ? std::vector<int32_t>{0, 4, 16} : std::vector<int32_t>{4, 128};
    const auto target = compressed_model(shape, seed);
    // The target itself, whose drafts are rejected only where they are sampled, another model of
    // this kind, and its MTP layer.
    const auto drafter = seed % 3 == 0 ? target
                         : seed % 3 == 1
                             ? compressed_model(shape, seed + 1)
                             : compressed_model({.ratios = {0}, .is_mtp_layer = true}, seed + 2);
    const double temperature = pick(0.0, 0.7, 1.0);
    std::vector<testing::Job> jobs =
        testing::random_jobs(random, pick(1, 16, 40), 64, temperature, 140, 60);
    if (random() % 2 == 0) testing::mix_sampling(jobs, random, 64);
    testing::expect_equals_plain({.target = target,
                                  .drafter = drafter,
                                  .jobs = jobs,
                                  .temperature = temperature,
                                  .small_pool_bytes = 640 << 10},
                                 random, seed, tally);
  }
  tally.expect_all(10);
}

// The samples of a request share its blocks, and copy those with an entry of both.
TEST(EngineCompressed, SamplesAreThoseOfSeparateRequests) {
  const auto target = compressed_model({.ratios = {0, 4, 16}}, 3);
  const auto layer = compressed_model({.ratios = {0}, .is_mtp_layer = true}, 4);
  for (const int32_t block_size : {2, 16}) {
    // Prompts that end everywhere in an entry of 4 and of 16 tokens.
    for (int32_t length = 60; length < 77; ++length) {
      std::mt19937_64 random(static_cast<uint64_t>(length));
      Request request;
      for (int32_t i = 0; i < length; ++i) request.prompt.push_back(random() % 64);
      request.sampling = {.temperature = 1.0, .seed = 5, .max_tokens = 30};
      ExecutorOptions options = small_engine_options(3);
      options.block_size = block_size;
      options.poison_freed_blocks = true;
      Executor executor(target, layer, options);
      std::vector<testing::Job> jobs;
      for (uint64_t sample = 0; sample < 3; ++sample) {
        testing::Job& job = jobs.emplace_back(testing::Job{request.prompt, request.sampling});
        job.sampling.seed += sample;
      }
      const std::vector<testing::Outcome> expected = testing::run(executor, jobs);
      request.num_samples = 3;
      ASSERT_TRUE(executor.add_request(request).has_value());
      std::vector<std::vector<int32_t>> tokens(3);
      for (int32_t left = 3; left > 0;) {
        for (const RequestEvent& event : executor.poll(1)) {
          std::vector<int32_t>& of_sample = tokens[static_cast<size_t>(event.sample)];
          of_sample.insert(of_sample.end(), event.token_ids.begin(), event.token_ids.end());
          if (event.finish_reason != FinishReason::kNone) --left;
        }
      }
      for (size_t sample = 0; sample < 3; ++sample) {
        ASSERT_EQ(tokens[sample], expected[sample].tokens) << "length " << length;
      }
      EXPECT_EQ(executor.check_integrity(), "");
    }
  }
}

// What once crashed an engine: more than two MTP tokens with metadata that depends on positions.
TEST(EngineCompressed, AThousandIterationsOfFiveMtpTokens) {
  const auto target = compressed_model({.ratios = {0, 4, 128}}, 3);
  const auto layer = compressed_model({.ratios = {0}, .is_mtp_layer = true}, 4);
  testing::expect_a_thousand_iterations(target, layer, 5, 18, [](int32_t k) {
    ExecutorOptions options = small_engine_options(k);
    options.device_lateness = 1;
    return options;
  });
}

}  // namespace
}  // namespace paceline
