// SPDX-License-Identifier: Apache-2.0
// The device allocates nothing in an iteration, on any thread, whatever kinds of layers the models
// have: an op that ran out of memory would end its engine.

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/compressed_models.h"
#include "support/direct_runner.h"
#include "support/draft_head_checks.h"
#include "support/failing_allocations.h"
#include "support/raw_models.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

using testing::all_block_drafters;
using testing::all_heads;
using testing::compressed_model;
using testing::DirectOptions;
using testing::DirectRunner;
using testing::fail_allocations;
using testing::fault_countdown;
using testing::fault_side;
using testing::is_test_thread;
using testing::random_raw_head;
using testing::Side;
using testing::tiny_model;
using testing::TinyDraftHead;
using testing::TinyModel;

constexpr int32_t kNumDrafts = 3;
constexpr int32_t kNumSeqs = 3;
constexpr int32_t kPromptLen = 40;

struct Pair {
  std::string name;
  std::shared_ptr<const Model> target;
  std::shared_ptr<const Model> drafter;
};

std::vector<Pair> pairs_of(DType dtype) {
  const auto model = [&](const TinyModel& shape) { return tiny_model(shape, 3, 0, 0, dtype); };
  std::vector<Pair> pairs;
  const auto add_alone = [&](const char* name, std::shared_ptr<const Model> drafts_for_itself) {
    pairs.push_back({name, drafts_for_itself, drafts_for_itself});
  };
  TinyModel gemma4;
  std::mt19937_64 random(4);
  make_gemma4(gemma4, random);
  gemma4.per_layer_size = 8;
  add_alone("Gemma 4", model(gemma4));
  const TinyModel gpt_oss{.intermediate = 64,
                          .is_gemma = false,
                          .has_bias = true,
                          .has_sinks = true,
                          .num_experts = 8,
                          .top_k = 3,
                          .is_mxfp4 = true};
  add_alone("mixture in mxfp4", model(gpt_oss));
  const TinyModel deepseek{.is_gemma = false,
                           .num_experts = 8,
                           .top_k = 3,
                           .is_interleaved = false,
                           .is_deepseek = true,
                           .shared_intermediate = 48,
                           .kv_lora_rank = 24,
                           .q_lora_rank = 24};
  add_alone("latent attention", model(deepseek));
  for (const bool has_formats : {false, true}) {
    const auto target = compressed_model(
        {.ratios = {0, 4, 16}, .q_lora_rank = 64, .has_formats = has_formats}, 3, dtype);
    const auto layer = compressed_model(
        {.ratios = {0}, .q_lora_rank = 64, .is_mtp_layer = true, .has_formats = has_formats}, 4,
        dtype);
    pairs.push_back({"compressed attention", target, layer});
  }
  auto heads = all_heads();
  for (const TinyDraftHead& drafter : all_block_drafters()) heads.push_back(drafter);
  for (size_t i = 0; i < heads.size(); ++i) {
    pairs.push_back({"draft head " + std::to_string(i), model({.windows = {8, 0, 20}}),
                     random_raw_head(heads[i], 5).build(dtype)});
  }
  return pairs;
}

// Plans a verify window of every sequence and runs it. Returns how many allocations that makes on
// a side, and on the device alone.
int64_t count_allocations(DirectRunner& direct, Side side) {
  constexpr int64_t kFar = int64_t{1} << 40;
  for (int32_t slot = 0; slot < kNumSeqs; ++slot) {
    direct.plan(slot, RowKind::kDecode, 0, kNumDrafts + 1);
  }
  direct.build();
  fail_allocations(side, kFar);
  direct.launch();
  fault_side = Side::kNone;
  direct.finish();
  return kFar - fault_countdown;
}

TEST(Allocations, AnIterationMakesNone) {
  is_test_thread = true;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const auto& [name, target, drafter] : pairs_of(dtype)) {
      for (const AcceptMethod method : {AcceptMethod::kCoupled, AcceptMethod::kBlock}) {
        SCOPED_TRACE(name + (method == AcceptMethod::kBlock ? ", block" : ""));
        DirectOptions options;
        options.num_draft_tokens = kNumDrafts;
        options.num_threads = 2;
        options.rejection_sample_method = method;
        DirectRunner direct(target, drafter, options);
        for (int32_t slot = 0; slot < kNumSeqs; ++slot) {
          direct.start(slot, std::vector<int32_t>(kPromptLen, 7), kPromptLen + 60,
                       /*temperature=*/1.0);
          SamplingOptions& sampling = direct.sequence(slot).sampling;
          sampling.top_k = 20;
          sampling.top_p = 0.9;
          sampling.repetition_penalty = 1.1;
          direct.plan(slot, RowKind::kPrefillFinal, 0, kPromptLen);
        }
        direct.run();
        EXPECT_EQ(count_allocations(direct, Side::kTest), 0);
        EXPECT_EQ(count_allocations(direct, Side::kEngine), 0);
        EXPECT_GE(direct.known_len(0), kPromptLen + 3);
      }
    }
  }
}

}  // namespace
}  // namespace paceline
