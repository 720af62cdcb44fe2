// SPDX-License-Identifier: Apache-2.0
// Configurations of draft heads and of prompt lookup that are refused.

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include <paceline/error.h>
#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "support/errors.h"
#include "support/raw_models.h"

namespace paceline {
namespace {

using testing::expect_contains;
using testing::llama_of;
using testing::message_of;
using testing::random_raw_head;
using testing::random_raw_model;
using testing::RawModel;
using testing::small_engine_options;
using testing::tiny_config_json;
using testing::TinyDraftHead;

TEST(DraftHead, MismatchesAreRefusedWithBothValues) {
  const auto target =
      random_raw_model(tiny_config_json({.windows = {8, 0, 20}, .is_gemma = false}), 1).build();
  const auto refusal = [&](const TinyDraftHead& head) {
    return message_of<InvalidArgument>([&] {
      Executor executor(target, random_raw_head(head, 2).build(), small_engine_options(3));
    });
  };
  constexpr auto kEagle3 = DrafterKind::kEagle3;
  EXPECT_EQ(refusal({.kind = kEagle3}), "");
  expect_contains(refusal({.kind = kEagle3, .target_hidden = 48}), {"48", "32"});
  expect_contains(refusal({.kind = kEagle3, .aux_layers = {0, 1, 3}}),
                  {"layer 3", "3 layers", "0 to 2"});
  TinyDraftHead head{.kind = kEagle3, .owns_embedding = true, .owns_lm_head = true};
  head.decoder.vocab_size = head.draft_vocab_size = 80;
  expect_contains(refusal(head), {"80", "64"});
  head = {.kind = kEagle3, .owns_lm_head = true, .draft_vocab_size = 40};
  head.decoder.hidden = 16;
  expect_contains(refusal(head), {"embedding table", "16", "32"});
  expect_contains(message_of<InvalidArgument>([&] {
                    Executor executor(target,
                                      random_raw_head({.kind = kEagle3}, 2).build(DType::kBFloat16),
                                      small_engine_options(3));
                  }),
                  {"bfloat16", "float32", "load both with the same dtype"});
  expect_contains(message_of<InvalidArgument>([&] {
                    Executor executor(
                        random_raw_head({.owns_embedding = true, .owns_lm_head = true}, 2).build(),
                        nullptr, small_engine_options(0));
                  }),
                  {"is a draft head"});
  // Layers that find no KV to read.
  constexpr auto kGemma4Mtp = DrafterKind::kGemma4Mtp;
  EXPECT_EQ(refusal({.decoder = llama_of({20, 0}), .kind = kGemma4Mtp}), "");
  expect_contains(refusal({.decoder = llama_of({0}), .kind = kGemma4Mtp, .target_hidden = 48}),
                  {"48", "32"});
  expect_contains(refusal({.decoder = llama_of({20, 12}), .kind = kGemma4Mtp}),
                  {"layer 1 of the drafter", "'sliding'", "layer 2 has window 20", "12"});
  TinyDraftHead reader{.decoder = llama_of({0}), .kind = kGemma4Mtp};
  reader.decoder.head_dim = 32;
  expect_contains(refusal(reader),
                  {"layer 0 of the drafter", "'full'", "layer 1 has head_dim 16", "32"});
  expect_contains(
      message_of<InvalidArgument>([&] {
        const auto slides =
            random_raw_model(tiny_config_json({.windows = {20}, .is_gemma = false}), 1).build();
        Executor executor(
            slides, random_raw_head({.decoder = llama_of({20, 0}), .kind = kGemma4Mtp}, 2).build(),
            small_engine_options(3));
      }),
      {"layer 1 of the drafter", "'full'", "no layer of that kind with KV of its own"});
  expect_contains(message_of<InvalidArgument>([&] {
                    ExecutorOptions options = small_engine_options(3);
                    options.speculative.draft_position = DraftPosition::kNext;
                    Executor executor(target, random_raw_head({.kind = kEagle3}, 2).build(),
                                      options);
                  }),
                  {"draft_position is 'next', but method is 'eagle3'", "only with 'gemma4_mtp'"});
  expect_contains(
      refusal(
          {.decoder = llama_of({0}), .kind = kGemma4Mtp, .num_centroids = 7, .top_centroids = 1}),
      {"count", "7", "divisors of draft_vocab_size, 64"});
  expect_contains(refusal({.decoder = llama_of({0}), .kind = kGemma4Mtp, .owns_embedding = true}),
                  {"owns_embedding", "gemma4_mtp"});
  // Configs that contradict themselves.
  expect_contains(refusal({.target_hidden = 48}), {"target_hidden_size", "48", "32"});
  expect_contains(refusal({.norm_output = true}), {"norm_output", "eagle"});
  constexpr auto kMtp = DrafterKind::kMtp;
  EXPECT_EQ(refusal({.kind = kMtp, .fc_norm = true, .norm_output = true}), "");
  expect_contains(refusal({.kind = kMtp}), {"fc_norm is false", "true where kind is 'mtp'"});
  expect_contains(refusal({.kind = kMtp, .target_hidden = 48, .fc_norm = true}),
                  {"target_hidden_size", "48", "32", "'mtp'"});
  expect_contains(refusal({.kind = kMtp, .norm_before_fc = true, .fc_norm = true}),
                  {"norm_before_fc", "false where kind is 'mtp'"});
  expect_contains(refusal({.kind = kEagle3, .draft_vocab_size = 40}),
                  {"draft_vocab_size", "40", "64"});
  expect_contains(refusal({.kind = kEagle3, .aux_layers = {2, 1}}), {"aux_layers", "ascending"});
  // Tokens of the map.
  RawModel raw =
      random_raw_head({.kind = kEagle3, .owns_lm_head = true, .draft_vocab_size = 40}, 2);
  raw.draft_to_target[7] = 64;
  expect_contains(message_of<InvalidArgument>([&] { (void)raw.build(); }),
                  {"draft_to_target", "[7] is 64", "0 to 63"});
  raw.draft_to_target[7] = 63;
  ModelBuilder builder(raw.json, DType::kFloat32);
  std::vector<int32_t> ids(40);
  std::iota(ids.begin(), ids.end(), 24);
  const std::vector<float> values(40);
  const auto put = [&](const char* name, DType dtype, std::vector<int64_t> dims, const void* data) {
    return message_of<InvalidArgument>([&] { builder.put(name, dtype, dims, {}, data); });
  };
  expect_contains(put("draft_to_target", DType::kFloat32, {40}, values.data()),
                  {"float32", "int32, int64"});
  expect_contains(put("fc.weight", DType::kInt32, {32, 96}, ids.data()),
                  {"fc.weight", "int32", "bfloat16"});
  EXPECT_EQ(put("draft_to_target", DType::kInt32, {40}, ids.data()), "");
  raw.draft_to_target.assign(ids.begin(), ids.end());
  raw.draft_to_target[39] = 24;
  expect_contains(message_of<InvalidArgument>([&] { (void)raw.build(); }),
                  {"draft_to_target", "[0] and [39] are both 24"});
  raw.draft_to_target.clear();
  expect_contains(message_of<InvalidArgument>([&] { (void)raw.build(); }),
                  {"missing", "draft_to_target"});
  // Prompt lookup.
  const auto ngram = [&](int32_t min, int32_t max, bool has_head) {
    ExecutorOptions options = small_engine_options(3);
    options.speculative.prompt_lookup_min = min;
    options.speculative.prompt_lookup_max = max;
    return message_of<InvalidArgument>([&] {
      Executor executor(target, has_head ? random_raw_head({}, 2).build() : nullptr, options);
    });
  };
  EXPECT_EQ(ngram(1, 3, false), "");
  expect_contains(ngram(4, 3, false), {"prompt_lookup_min is 4", "1 to prompt_lookup_max = 3"});
  expect_contains(ngram(0, 3, false), {"prompt_lookup_min is 0"});
  expect_contains(ngram(1, 300, false), {"prompt_lookup_max is 300", "256"});
  EXPECT_EQ(ngram(1, 3, true), "");  // in front of the head
}

}  // namespace
}  // namespace paceline
