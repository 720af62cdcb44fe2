// SPDX-License-Identifier: Apache-2.0
// The last layer of a pass leaves out rows with an unread output. A prompt in one chunk leaves out
// all rows but one. In small chunks it leaves out none. Both must give the same bits: logits, KV of
// both models, and drafts. mixture_checks.h counts the rows that are left out.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "support/direct_runner.h"
#include "support/draft_head_checks.h"
#include "support/raw_models.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

using testing::DirectRunner;
using testing::random_raw_head;
using testing::random_raw_model;
using testing::tiny_config_json;
using testing::tiny_model;
using testing::TinyModel;

struct Seen {
  std::vector<std::vector<float>> logits;  // of the target, or those of the last draft
  std::vector<std::vector<std::byte>> kv;
  std::vector<int32_t> tokens;

  bool operator==(const Seen&) const = default;
};

constexpr int32_t kPrompt = 70;

// Two prompts beside a sequence that decodes, all rows of a prompt in chunks of at most `chunk`.
Seen run_prompts(const std::shared_ptr<const Model>& target,
                 const std::shared_ptr<const Model>& draft, int32_t k, int32_t chunk) {
  DirectRunner direct(target, draft, {.max_seqs = 3, .num_draft_tokens = k});
  std::mt19937_64 random(5);
  for (int32_t slot = 0; slot < 3; ++slot) {
    std::vector<int32_t> prompt(slot == 0 ? 9 : kPrompt);
    for (int32_t& token : prompt) token = static_cast<int32_t>(random() % 64);
    direct.start(slot, prompt, 120);
  }
  direct.plan(0, RowKind::kPrefillFinal, 0, 9);
  direct.run();
  for (int32_t start = 0; start < kPrompt; start += chunk) {
    const bool is_last = start + chunk >= kPrompt;
    const RowKind kind = is_last ? RowKind::kPrefillFinal : RowKind::kPrefillPartial;
    const int32_t rows = std::min(chunk, kPrompt - start);
    if (is_last) direct.plan(0, RowKind::kDecode, 0, k + 1);
    direct.plan(1, kind, start, rows);
    direct.plan(2, kind, start, rows);
    direct.run();
  }
  Seen seen;
  for (int32_t slot = 0; slot < 3; ++slot) {
    if (k == 0) {
      for (auto& row : direct.logits_of(slot)) seen.logits.push_back(std::move(row));
    }
    for (GroupId g = 0; g < static_cast<GroupId>(direct.layout().groups.size()); ++g) {
      for (int32_t i = slot == 0 ? 0 : kPrompt - 30; i < (slot == 0 ? 9 : kPrompt); ++i) {
        seen.kv.push_back(direct.kv_of(slot, g, i));
      }
    }
    const SequenceResult result = direct.result(slot);
    seen.tokens.insert(seen.tokens.end(), result.tokens, result.tokens + result.emitted_len);
    const SequenceState& s = direct.buffers().sequences;
    const auto drafts = direct.download(s.draft_tokens + int64_t{slot} * k, k);
    seen.tokens.insert(seen.tokens.end(), drafts.begin(), drafts.end());
  }
  return seen;
}

void expect_same(const std::shared_ptr<const Model>& target,
                 const std::shared_ptr<const Model>& draft, int32_t k) {
  const Seen whole = run_prompts(target, draft, k, kPrompt);
  ASSERT_FALSE(whole.kv.empty());
  EXPECT_TRUE(whole == run_prompts(target, draft, k, 10));
}

TEST(OutputRows, TargetsGiveTheBitsOfAllRows) {
  TinyModel mixture{.windows = {0, 8}, .is_gemma = false, .has_bias = true, .num_experts = 8};
  TinyModel latent{.windows = {8, 0}, .is_gemma = false, .kv_lora_rank = 24, .q_lora_rank = 24};
  TinyModel direct_latent = latent;
  direct_latent.q_lora_rank = 0;
  TinyModel layered{.windows = {8, 0}, .is_gemma4 = true, .per_layer_size = 8};
  int32_t shape = 0;
  for (const TinyModel& m :
       {TinyModel{}, TinyModel{.windows = {0, 8}}, mixture, latent, direct_latent, layered}) {
    SCOPED_TRACE("shape " + std::to_string(shape++));
    expect_same(tiny_model(m, 3), nullptr, 0);
  }
}

TEST(OutputRows, DraftersGiveTheBitsOfAllRows) {
  const auto target = random_raw_model(tiny_config_json({.windows = {8, 0, 20}}), 1).build();
  uint64_t seed = 1;
  for (const testing::TinyDraftHead& shape : testing::all_heads()) {
    SCOPED_TRACE("head " + std::to_string(seed));
    expect_same(target, random_raw_head(shape, ++seed).build(), 3);
  }
  expect_same(target, tiny_model({.hidden = 16, .windows = {0, 8}}, 4), 3);
}

}  // namespace
}  // namespace paceline
