// SPDX-License-Identifier: Apache-2.0
// The whole engine on tiny models with compressed attention and several residual streams.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>

#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "support/compressed_checks.h"
#include "support/compressed_models.h"

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

}  // namespace
}  // namespace paceline
