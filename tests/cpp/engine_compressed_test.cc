// SPDX-License-Identifier: Apache-2.0
// The whole engine on tiny models with compressed attention and several residual streams.

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "cpp/equality_checks.h"
#include "support/compressed_models.h"
#include "support/engine_checks.h"

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

TEST(EngineCompressed, SpeculativeEqualsPlain) {
  testing::expect_pairs_equal_plain({.small_pool_bytes = 640 << 10}, [](std::mt19937_64& random, uint64_t seed) {
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
    return testing::TargetAndDrafter{target, drafter};
  });
}

// The samples of a request share its blocks, and copy those with an entry of both.
TEST(EngineCompressed, SamplesAreThoseOfSeparateRequests) {
  const auto target = compressed_model({.ratios = {0, 4, 16}}, 3);
  const auto layer = compressed_model({.ratios = {0}, .is_mtp_layer = true}, 4);
  for (const int32_t block_size : {2, 16}) {
    // Prompts that end everywhere in an entry of 4 and of 16 tokens.
    for (int32_t length = 60; length < 77; ++length) {
      SCOPED_TRACE("length " + std::to_string(length));
      ExecutorOptions options = small_engine_options(3);
      options.block_size = block_size;
      options.poison_freed_blocks = true;
      Executor executor(target, layer, options);
      EXPECT_GT(testing::expect_samples_equal_requests(executor, length), 0);
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
