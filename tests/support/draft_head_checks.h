// SPDX-License-Identifier: Apache-2.0
#pragma once

// Draft heads and block drafters of every kind, and checks that each must pass on every device,
// with a runner that is driven by hand.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "support/direct_runner.h"
#include "support/raw_models.h"
#include "wire/batch_shape.h"
#include "wire/blocks.h"
#include "wire/sequence_result.h"
#include "wire/sequence_state.h"

namespace paceline::testing {

// Draft heads that together use every switch, for targets of hidden size 32 with at least 3 layers;
// the last layer sees `window` keys and one layer sees all.
inline std::vector<TinyDraftHead> all_heads(int32_t head_dim = 16, int32_t window = 20) {
  const TinyModel llama = llama_of({0});
  const TinyModel sliding = llama_of({12});
  TinyModel deep = llama_of({6, 0, 9});
  deep.has_bias = true;
  TinyModel gemma = llama;
  gemma.is_gemma = true;
  TinyModel narrow = llama_of({0, 5});
  narrow.hidden = 16;
  narrow.num_qo_heads = 2;
  narrow.num_kv_heads = 1;
  TinyModel reader = llama_of({window, window, 0});
  reader.hidden = 48;
  reader.is_gemma = true;
  // Rows take all experts: rounding, which differs between devices, then changes no choice.
  TinyModel mixture = llama;
  mixture.num_experts = 4;
  mixture.top_k = 4;
  mixture.is_deepseek = true;
  mixture.is_per_expert = true;
  mixture.is_interleaved = false;
  mixture.shared_intermediate = 24;
  constexpr auto kEagle3 = DrafterKind::kEagle3;
  constexpr auto kMtp = DrafterKind::kMtp;
  constexpr auto kGemma4Mtp = DrafterKind::kGemma4Mtp;
  std::vector<TinyDraftHead> heads = {
      {.decoder = llama},
      {.decoder = deep, .has_fc_bias = true},
      {.decoder = gemma, .owns_embedding = true, .owns_lm_head = true},
      {.decoder = llama, .kind = kEagle3},
      {.decoder = llama, .kind = kEagle3, .norm_before_residual = true, .norm_before_fc = true},
      {.decoder = gemma, .kind = kEagle3, .aux_layers = {0, 2}, .fc_norm = true},
      {.decoder = narrow,
       .kind = kEagle3,
       .norm_before_residual = true,
       .norm_output = true,
       .owns_embedding = true,
       .owns_lm_head = true,
       .draft_vocab_size = 40},
      {.decoder = sliding,
       .kind = kEagle3,
       .norm_output = true,
       .has_fc_bias = true,
       .owns_lm_head = true,
       .draft_vocab_size = 50},
      {.decoder = llama_of({window, 0}), .kind = kGemma4Mtp},
      {.decoder = reader, .kind = kGemma4Mtp},
      {.decoder = reader, .kind = kGemma4Mtp, .num_centroids = 8, .top_centroids = 3},
      {.decoder = mixture, .kind = kMtp, .fc_norm = true, .norm_output = true},
      {.decoder = mixture, .kind = kMtp, .fc_norm = true, .owns_lm_head = true},
      {.decoder = deep, .kind = kMtp, .fc_norm = true, .norm_output = true, .owns_embedding = true},
  };
  for (TinyDraftHead& head : heads) head.decoder.head_dim = head_dim;
  return heads;
}

// Block drafters that together use every switch, for targets of hidden size 32 with at least 3
// layers. Their blocks have room for 16 drafts.
inline std::vector<TinyDraftHead> all_block_drafters() {
  constexpr auto kBlock = DrafterKind::kBlock;
  TinyModel biased = llama_of({0, 5});
  biased.has_bias = true;
  TinyModel narrow = llama_of({7, 0});
  narrow.hidden = 16;
  narrow.num_kv_heads = 1;
  return {
      {.decoder = llama_of({0}), .kind = kBlock},
      {.decoder = llama_of({9, 0, 12}), .kind = kBlock, .aux_layers = {0, 2}},
      {.decoder = biased,
       .kind = kBlock,
       .aux_layers = {1},
       .block = {.full_is_causal = true, .sliding_is_causal = false}},
      {.decoder = llama_of({6, 0}),
       .kind = kBlock,
       .block = {.samples_from_anchor = true, .is_anchored = true, .markov_rank = 8}},
      {.decoder = llama_of({8, 3}),
       .kind = kBlock,
       .block = {.samples_from_anchor = true,
                 .sliding_is_causal = false,
                 .is_anchored = true,
                 .markov_rank = 32}},
      {.decoder = narrow,
       .kind = kBlock,
       .owns_embedding = true,
       .owns_lm_head = true,
       .draft_vocab_size = 40,
       .block = {.markov_rank = 5}},
      {.decoder = llama_of({7}),
       .kind = kBlock,
       .block = {.sliding_is_causal = false, .taps = 2, .group = 16}},
      {.decoder = narrow,
       .kind = kBlock,
       .aux_layers = {1},
       .owns_embedding = true,
       .owns_lm_head = true,
       .block = {.samples_from_anchor = true,
                 .is_anchored = true,
                 .taps = 5,
                 .group = 1,
                 .selector_rank = 40,
                 .selector_top = 32}},
  };
}

// The KV of a sequence in drafter and target, by group and position.
inline std::vector<std::vector<std::byte>> all_kv(const DirectRunner& direct, int32_t slot,
                                                  int32_t length) {
  std::vector<std::vector<std::byte>> kv;
  for (GroupId g = 0; g < static_cast<GroupId>(direct.layout().groups.size()); ++g) {
    for (int32_t p = 0; p < length; ++p) kv.push_back(direct.kv_of(slot, g, p));
  }
  return kv;
}

// Runs three sequences of models whose vocabulary is 64, prompts in chunks of any size beside
// others that decode already, and compares the KV they end with to that of a prefill of the same
// tokens. With `catches_up` some iterations are plain, so that the drafter misses their tokens and
// gets them later, in parts or at once; a draft model also misses chunks of prompts. Adds to
// `rejected` how many drafts were wrong.
inline void check_draft_kv(const std::shared_ptr<const Model>& target,
                           const std::shared_ptr<const Model>& head, uint64_t seed,
                           int64_t* rejected, bool catches_up = false) {
  std::mt19937_64 random(seed);
  const double temperature = seed % 3 == 0 ? 0 : 1;
  const auto k = static_cast<int32_t>(1 + random() % 6);
  constexpr int32_t kRounds = 14;
  const DirectOptions options{
      .max_seqs = 3, .num_draft_tokens = k, .kept_hidden_tokens = catches_up ? kRounds + 1 : 0};
  DirectRunner direct(target, head, options);
  const bool is_draft_model = !head->config.drafter.has_value();
  std::mt19937_64 lulls(seed + 1);
  std::vector<int32_t> missed(3, 0);
  std::vector<int32_t> ready(3, k);  // drafts for the next window
  std::vector<int32_t> lengths;
  for (int32_t slot = 0; slot < 3; ++slot) {
    std::vector<int32_t> prompt(2 + random() % 40);
    for (int32_t& token : prompt) token = static_cast<int32_t>(random() % 64);
    direct.start(slot, prompt, 200, temperature, seed * 10 + static_cast<uint64_t>(slot));
    lengths.push_back(static_cast<int32_t>(prompt.size()));
  }
  std::vector<int32_t> done(3, 0);
  for (int round = 0; round < kRounds; ++round) {
    const bool is_plain = catches_up && round < kRounds - 2 && lulls() % 2 == 0;
    direct.set_num_drafts(is_plain ? 0 : k);
    const bool has_prefill = done != lengths;
    for (int32_t slot = 0; slot < 3; ++slot) {
      const int32_t left = lengths[slot] - done[slot];
      if (left == 0 && is_plain) {
        // Beside chunks a draft head follows those that it has followed so far.
        const bool is_left_out = has_prefill && missed[slot] > 0;
        direct.plan(slot, RowKind::kDecode, 0, 1, 0, kNoPart, is_left_out);
        missed[slot] += is_draft_model || !has_prefill || is_left_out ? 1 : 0;
        ready[slot] = 0;
        continue;
      }
      if (left == 0 && missed[slot] > 1 && round < kRounds - 2 && lulls() % 3 == 0) {
        const auto part = static_cast<int32_t>(1 + lulls() % (missed[slot] - 1));
        direct.plan(slot, RowKind::kDecode, 0, 1, part, direct.known_len(slot) - missed[slot] - 1);
        missed[slot] += 1 - part;
        ready[slot] = 0;
        continue;
      }
      if (left == 0) {
        direct.plan(slot, RowKind::kDecode, 0, ready[slot] + 1, missed[slot]);
        missed[slot] = 0;
        ready[slot] = k;
        continue;
      }
      const auto rows = static_cast<int32_t>(1 + random() % left);
      const bool is_missed = is_draft_model && catches_up && (missed[slot] > 0 || lulls() % 2 == 0);
      direct.plan(slot, rows == left ? RowKind::kPrefillFinal : RowKind::kPrefillPartial,
                  done[slot], rows, 0, kNoPart, is_missed);
      missed[slot] += is_missed ? rows : 0;
      ready[slot] = is_plain || is_missed ? 0 : k;
      done[slot] += rows;
    }
    direct.run();
    for (int32_t row = 0; row < 3; ++row) {
      const SequenceResult result = direct.result(row);
      *rejected += result.drafted_len - result.accepted_len;
    }
  }
  const SequenceState& s = direct.buffers().sequences;
  for (int32_t slot = 0; slot < 3; ++slot) {
    if (done[slot] < lengths[slot]) continue;
    const int32_t known = direct.download(s.known_len + slot, 1).front();
    const std::vector<int32_t> history =
        direct.download(s.history + slot * s.history_stride, known);
    // All known tokens but the last as one prompt, which draws the last one again.
    DirectRunner fresh(target, head, options);
    fresh.start(0, {history.begin(), history.end() - 1}, 200, temperature,
                seed * 10 + static_cast<uint64_t>(slot));
    fresh.plan(0, RowKind::kPrefillFinal, 0, known - 1);
    fresh.run();
    ASSERT_EQ(fresh.result(0).tokens[0], history.back());
    const auto actual = all_kv(direct, slot, known - 1);
    const auto expected = all_kv(fresh, 0, known - 1);
    for (size_t i = 0; i < actual.size(); ++i) {
      ASSERT_TRUE(actual[i] == expected[i])
          << "slot " << slot << " group " << i / static_cast<size_t>(known - 1) << " position "
          << i % static_cast<size_t>(known - 1);
    }
  }
}

// Drafts, tokens, KV of both models and the inputs of a further draft step have the same bits with
// every draft driver.
inline void check_drivers(const std::shared_ptr<const Model>& target,
                          const std::shared_ptr<const Model>& head, uint64_t seed,
                          AcceptMethod method = AcceptMethod::kCoupled) {
  struct Bits {
    std::vector<int32_t> drafts;
    std::vector<int32_t> history;
    std::vector<std::vector<std::byte>> kv;
    std::vector<float> hidden;
    bool operator==(const Bits&) const = default;
  };
  constexpr int32_t kDrafts = 5;
  std::vector<Bits> all;
  for (const auto driver :
       {DraftDriver::kEager, DraftDriver::kUnrolled, DraftDriver::kReplay, DraftDriver::kWhile}) {
    DirectRunner direct(target, head,
                        {.max_seqs = 3,
                         .num_draft_tokens = kDrafts,
                         .driver = driver,
                         .rejection_sample_method = method});
    std::mt19937_64 random(seed);
    for (int32_t slot = 0; slot < 3; ++slot) {
      std::vector<int32_t> prompt(10 + random() % 30);
      for (int32_t& token : prompt) token = static_cast<int32_t>(random() % 64);
      const auto length = static_cast<int32_t>(prompt.size());
      direct.start(slot, prompt, 100, 1.0, random());
      direct.plan(slot, RowKind::kPrefillFinal, 0, length);
    }
    direct.run();
    for (int i = 0; i < 12; ++i) {
      for (int32_t slot = 0; slot < 3; ++slot) direct.plan(slot, RowKind::kDecode, 0, kDrafts + 1);
      direct.run();
    }
    const SequenceState& s = direct.buffers().sequences;
    Bits& bits = all.emplace_back();
    bits.drafts = direct.download(s.draft_tokens, 3 * kDrafts);
    bits.history = direct.download(s.history, 3 * s.history_stride);
    bits.hidden = direct.download(direct.buffers().draft_output.feedback,
                                  int64_t{3} * head->config.embed_width());
    for (int32_t slot = 0; slot < 3; ++slot) {
      for (auto& position : all_kv(direct, slot, 100)) bits.kv.push_back(std::move(position));
    }
  }
  for (const Bits& bits : all) {
    EXPECT_EQ(bits.drafts, all[0].drafts);
    EXPECT_EQ(bits.history, all[0].history);
    EXPECT_EQ(bits.hidden, all[0].hidden);
    EXPECT_TRUE(bits.kv == all[0].kv);
  }
}

}  // namespace paceline::testing
