// SPDX-License-Identifier: Apache-2.0
// EAGLE, EAGLE-3, MTP, Gemma 4 MTP and prompt lookup: logits against the equations, KV after
// rejections, and output equal to plain output.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "cpp/equality_checks.h"
#include "support/direct_runner.h"
#include "support/draft_head_checks.h"
#include "support/jobs.h"
#include "support/oracle.h"
#include "support/raw_models.h"
#include "support/reference_model.h"
#include "wire/sequence_state.h"

namespace paceline {
namespace {

using testing::all_heads;
using testing::DirectRunner;
using testing::expect_equals_plain;
using testing::Job;
using testing::mix_sampling;
using testing::Oracle;
using testing::oracle_head;
using testing::oracle_target;
using testing::Outcome;
using testing::Pick;
using testing::random_jobs;
using testing::random_raw_head;
using testing::random_raw_model;
using testing::RawModel;
using testing::run;
using testing::seed_from_env;
using testing::small_engine_options;
using testing::Tally;
using testing::tiny_config_json;
using testing::TinyDraftHead;

TEST(DraftHead, LogitsOfEveryStepAreThoseOfTheEquations) {
  uint64_t seed = 1;
  for (const TinyDraftHead& shape : all_heads()) {
    SCOPED_TRACE("head " + std::to_string(seed));
    ++seed;
    const RawModel target = random_raw_model(
        tiny_config_json({.windows = {8, 0, 20}, .is_gemma = seed % 2 == 0}), seed);
    const RawModel head = random_raw_head(shape, seed + 100);
    const auto target_model = target.build();
    const auto head_model = head.build();
    const int32_t width = head.config.num_logits();
    const bool is_mtp = shape.kind == DrafterKind::kGemma4Mtp;
    for (const int32_t k : {1, 2, 4}) {
      const DraftPosition position = is_mtp && k != 2 ? DraftPosition::kNext : DraftPosition::kLast;
      DirectRunner direct(target_model, head_model,
                          {.max_seqs = 2, .num_draft_tokens = k, .draft_position = position});
      std::mt19937_64 random(seed);
      for (int32_t slot = 0; slot < 2; ++slot) {
        std::vector<int32_t> prompt(static_cast<size_t>(14 + 5 * slot));
        for (int32_t& token : prompt) token = static_cast<int32_t>(random() % 64);
        direct.start(slot, prompt, 100);
      }
      // The last logits of an iteration are those of draft k.
      const auto check = [&](int32_t row, int32_t slot) {
        const SequenceState& s = direct.buffers().sequences;
        const int32_t known = s.known_len[slot];
        std::vector<int32_t> tokens(s.history + slot * s.history_stride,
                                    s.history + slot * s.history_stride + known);
        tokens.insert(tokens.end(), s.draft_tokens + slot * k, s.draft_tokens + (slot + 1) * k);
        ASSERT_EQ(s.draft_len[slot], k);
        const auto states = testing::reference::run_target(target, tokens);
        const auto num_first = static_cast<size_t>(known - 1);
        const auto num_steps = static_cast<size_t>(k) - 1;
        const auto expected =
            is_mtp ? testing::reference::run_mtp(head, target, states, tokens, num_first, num_steps,
                                                 position == DraftPosition::kNext ? 1 : 0)
                   : testing::reference::run_head(head, target, states, tokens, num_first,
                                                  num_first + num_steps);
        const float* logits = direct.buffers().logits + int64_t{row} * width;
        const int32_t* ids = direct.buffers().draft_output.tokens;  // of a head over clusters
        double error = 0;
        double scale = 0;
        for (int32_t i = 0; i < width; ++i) {
          const auto id = static_cast<size_t>(ids != nullptr ? ids[int64_t{row} * width + i] : i);
          error = std::max(error, std::abs(expected[id] - logits[i]));
          scale = std::max(scale, std::abs(expected[id]));
        }
        ASSERT_GT(scale, 0);
        ASSERT_LT(error, 2e-4 * scale) << "k " << k << " slot " << slot << " known " << known;
      };
      direct.plan(0, RowKind::kPrefillPartial, 0, 6);
      direct.plan(1, RowKind::kPrefillPartial, 0, 9);
      direct.run();
      direct.plan(0, RowKind::kPrefillPartial, 6, 3);
      direct.plan(1, RowKind::kPrefillFinal, 9, 10);
      direct.run();
      check(0, 1);
      direct.plan(1, RowKind::kDecode, 0, k + 1);
      direct.plan(0, RowKind::kPrefillFinal, 9, 5);
      direct.run();
      check(0, 1);
      check(1, 0);
      for (int i = 0; i < 3 && !HasFatalFailure(); ++i) {
        direct.plan(0, RowKind::kDecode, 0, k + 1);
        direct.plan(1, RowKind::kDecode, 0, k + 1);
        direct.run();
        check(0, 0);
        check(1, 1);
      }
      if (HasFatalFailure()) return;
    }
  }
}

TEST(DraftHead, DraftKvDoesNotDependOnRejectedOrMissedDrafts) {
  const uint64_t first_seed = seed_from_env(1);
  int64_t rejected = 0;
  for (uint64_t seed = first_seed; seed < first_seed + 16 && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    const std::vector<TinyDraftHead> heads = all_heads();
    const auto target =
        random_raw_model(tiny_config_json({.windows = {8, 0, 20}, .is_gemma = seed % 2 == 0}), seed)
            .build();
    const auto head = random_raw_head(heads[seed % heads.size()], seed + 1).build();
    for (const bool catches_up : {false, true}) {
      testing::check_draft_kv(target, head, seed, &rejected, catches_up);
    }
  }
  EXPECT_GT(rejected, 500);
}

TEST(DraftHead, ADraftModelCatchesUpWithPromptsThatItHasMissed) {
  const uint64_t first_seed = seed_from_env(1);
  int64_t rejected = 0;
  for (uint64_t seed = first_seed; seed < first_seed + 16 && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    const auto target =
        random_raw_model(tiny_config_json({.windows = {8, 0, 20}, .is_gemma = seed % 2 == 0}), seed)
            .build();
    const auto draft = random_raw_model(tiny_config_json({.windows = {0, 0}}), seed + 1).build();
    for (const bool catches_up : {false, true}) {
      testing::check_draft_kv(target, draft, seed, &rejected, catches_up);
    }
  }
  EXPECT_GT(rejected, 500);
}

TEST(DraftHead, EveryDriverLeavesTheSameBits) {
  for (size_t which = 0; which < all_heads().size(); ++which) {
    SCOPED_TRACE("head " + std::to_string(which));
    const RawModel raw =
        random_raw_model(tiny_config_json({.windows = {8, 0, 20}, .is_gemma = false}), which);
    for (const AcceptMethod method :
         {AcceptMethod::kCoupled, AcceptMethod::kStandard, AcceptMethod::kBlock}) {
      testing::check_drivers(raw.build(), random_raw_head(all_heads()[which], which).build(), which,
                             method);
    }
  }
}

TEST(DraftHead, SpeculativeEqualsPlain) {
  const uint64_t first_seed = seed_from_env(1);
  Tally tally;
  for (uint64_t seed = first_seed; seed < first_seed + 48; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Pick pick{random};
    const std::vector<TinyDraftHead> heads = all_heads();
    const auto which = static_cast<size_t>(seed % (heads.size() + 3));
    const bool is_ngram = which >= heads.size();
    const bool is_gemma = random() % 2 == 0;
    // Oracles in some cases, since random draft heads are rarely right.
    const bool is_oracle = !is_ngram && random() % 2 == 0;
    const Oracle oracle{.kind = pick(DrafterKind::kEagle, DrafterKind::kEagle3, DrafterKind::kMtp,
                                     DrafterKind::kGemma4Mtp)};
    const RawModel raw =
        is_oracle ? oracle_target(false)
                  : random_raw_model(
                        tiny_config_json({.windows = {8, 0, 20}, .is_gemma = is_gemma}), seed);
    const auto target = raw.build();
    std::shared_ptr<const Model> head;
    if (is_oracle) {
      head = oracle_head(oracle, raw).build();
    } else if (!is_ngram) {
      head = random_raw_head(heads[which], seed + 1).build();
    }
    const double temperature = pick(0.0, 0.7, 1.0);
    std::vector<Job> jobs = random_jobs(random, pick(1, 7, 24), 64, temperature, 60, 60);
    if (random() % 2 == 0) mix_sampling(jobs, random, 64);

    const auto choose = [&](ExecutorOptions& options) {
      if (head != nullptr && head->config.drafter->kind == DrafterKind::kGemma4Mtp) {
        options.speculative.draft_position = pick(DraftPosition::kLast, DraftPosition::kNext);
      }
      if (is_ngram) {
        options.speculative.prompt_lookup_min = pick(1, 2);
        options.speculative.prompt_lookup_max = pick(2, 4);
      }
    };
    expect_equals_plain({.target = target,
                         .drafter = head,
                         .jobs = jobs,
                         .temperature = temperature,
                         .small_pool_bytes = (is_oracle ? 600 : 260) << 10,
                         .choose = choose},
                        random, seed, tally);
  }
  tally.expect_all();
}

TEST(Ngram, CyclesAreFoundAndMissesDraftNothing) {
  const auto target = oracle_target(false).build();  // greedy: f is a permutation, so it cycles
  ExecutorOptions options = small_engine_options(4);
  options.speculative.prompt_lookup_min = 2;
  options.speculative.prompt_lookup_max = 4;
  Executor executor(target, nullptr, options);
  const std::vector<Job> jobs = {
      {.prompt = {1}, .sampling = {.temperature = 0, .max_tokens = 200}}};
  const Outcome outcome = run(executor, jobs).front();
  std::vector<int32_t> tokens = {1};
  while (tokens.size() < 201) {
    tokens.push_back(static_cast<int32_t>(testing::oracle_next(false, tokens.back())));
  }
  EXPECT_EQ(outcome.tokens, std::vector<int32_t>(tokens.begin() + 1, tokens.end()));
  // During the first cycle no token has occurred before; then every draft is right.
  EXPECT_EQ(outcome.counters.num_accepted_tokens, outcome.counters.num_draft_tokens);
  const auto period =
      static_cast<int64_t>(std::find(tokens.begin() + 1, tokens.end(), 1) - tokens.begin());
  EXPECT_GT(outcome.counters.num_accepted_tokens, (200 - period - 4) * 3 / 5);
  EXPECT_LE(outcome.counters.num_accepted_tokens, 200 - period);
  EXPECT_EQ(executor.check_integrity(), "");
}

}  // namespace
}  // namespace paceline
