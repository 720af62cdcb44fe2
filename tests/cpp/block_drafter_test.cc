// SPDX-License-Identifier: Apache-2.0
// Block drafters: alignment against oracles, KV after rejections, output equal to plain output.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.h>
#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "cpp/equality_checks.h"
#include "ops/candidates.h"
#include "ops/markov.h"
#include "ops/ops.h"
#include "speculate/row_ops.h"
#include "support/all_accepted.h"
#include "support/block_oracle.h"
#include "support/draft_head_checks.h"
#include "support/jobs.h"
#include "support/planted_acceptance.h"
#include "support/raw_models.h"

namespace paceline {
namespace {

using testing::all_block_drafters;
using testing::block_oracle;
using testing::block_oracle_target;
using testing::BlockOracle;
using testing::BlockSource;
using testing::expect_all_accepted;
using testing::expect_equals_plain;
using testing::Job;
using testing::llama_of;
using testing::mix_sampling;
using testing::Pick;
using testing::planted_acceptance;
using testing::random_jobs;
using testing::random_raw_head;
using testing::random_raw_model;
using testing::RawModel;
using testing::seed_from_env;
using testing::small_engine_options;
using testing::Tally;
using testing::tiny_config_json;
using testing::TinyBlock;
using testing::TinyDraftHead;
using testing::vary_options;

RawModel random_target(uint64_t seed) {
  return random_raw_model(tiny_config_json({.windows = {8, 0, 20}, .is_gemma = seed % 2 == 0}),
                          seed);
}

std::vector<BlockOracle> all_oracles() {
  std::vector<BlockOracle> oracles;
  for (const BlockSource source :
       {BlockSource::kNewest, BlockSource::kContext, BlockSource::kChain, BlockSource::kSelector}) {
    for (const bool from_anchor : {false, true}) {
      const TinyBlock block{.samples_from_anchor = from_anchor};
      TinyBlock other = block;
      other.full_is_causal = true;
      other.sliding_is_causal = false;
      other.is_anchored = true;
      oracles.push_back({source, {0}, block});
      oracles.push_back({source, {20, 0}, block});
      oracles.push_back({source, {0, 20}, other});
      // The last row sees the token before the block as the oldest one of its window.
      oracles.push_back({source, {18}, block});
      oracles.push_back({source, {18}, other});
    }
  }
  return oracles;
}

bool is_right_at_any_temperature(BlockSource source) {
  return source == BlockSource::kChain || source == BlockSource::kSelector;
}

TEST(BlockDrafter, OraclesAreAlwaysRight) {
  int64_t preemptions = 0;
  uint64_t cell = 0;
  for (const BlockOracle& oracle : all_oracles()) {
    const RawModel raw = block_oracle_target(oracle.source);
    const auto target = raw.build();
    const auto drafter = block_oracle(oracle, raw).build();
    for (const double temperature : {0.0, 1.0}) {
      // A sampled token is not a function of the token before.
      if (temperature > 0 && !is_right_at_any_temperature(oracle.source)) continue;
      for (const int32_t k : {1, 4, 5, 16}) {
        std::mt19937_64 random(11 + cell);
        ExecutorOptions options = small_engine_options(k);
        vary_options(options, cell);
        options.device_lateness = static_cast<int32_t>(cell % 3);
        options.block_size = cell % 5 == 0 ? 3 : 8;
        options.poison_freed_blocks = true;
        if (cell % 2 == 1) options.kv_cache_bytes = 600 << 10;  // forces preemption
        ++cell;
        Executor executor(target, drafter, options);
        SCOPED_TRACE(::testing::Message()
                     << "source " << static_cast<int>(oracle.source) << " window "
                     << oracle.windows[0] << " anchor " << oracle.block.samples_from_anchor << " k "
                     << k << " T " << temperature);
        std::vector<Job> jobs = random_jobs(random, 12, 64, temperature, 60, 60);
        // Whether a batch has a request with top-k decides what draws its drafts.
        if (cell % 2 == 0) jobs[0].sampling.top_k = jobs[7].sampling.top_k = 1;
        expect_all_accepted(executor, jobs);
        preemptions += executor.stats().num_preemptions;
      }
    }
  }
  EXPECT_GT(preemptions, 20);
}

TEST(BlockDrafter, PlantedFaultsGoRed) {
  const auto sound = [](CpuRunner&, Program&) {};
  // The hidden state of the next row, which after the last accepted one is a rejected draft's.
  const auto shifts_hidden = [](CpuRunner& runner, Program& program) {
    const HiddenTaps& taps = runner.buffers().target_hidden;
    for (GemmParams* p : program.params_of<GemmParams>(gemm)) {
      if (p->x == taps.data) p->x = static_cast<const float*>(p->x) + p->x_stride;
    }
  };
  // A token of the vocabulary in place of the mask token.
  const auto other_mask = [](CpuRunner&, Program& program) {
    for (auto* p : program.params_of<AssembleBlockRowsParams>(assemble_block_rows)) {
      p->mask_token = 2;
    }
  };
  // The token before the newest one.
  const auto older_token = [](CpuRunner&, Program& program) {
    for (auto* p : program.params_of<AssembleBlockRowsParams>(assemble_block_rows)) {
      --p->sequences.history;
    }
  };
  // The row before the one that predicts.
  const auto earlier_row = [](CpuRunner&, Program& program) {
    for (auto* p : program.params_of<AssembleBlockRowsParams>(assemble_block_rows)) {
      --p->first_predicting_row;
    }
  };
  // The noise of the row's position where that of the next one is drawn.
  const auto shifts_noise = [](CpuRunner&, Program& program) {
    for (auto* p : program.params_of<MarkovDraftParams>(markov_draft)) p->draw.draw_ahead ^= 1;
  };
  // Every draft follows the newest token.
  const auto breaks_chain = [](CpuRunner& runner, Program& program) {
    for (auto* p : program.params_of<MarkovDraftParams>(markov_draft)) {
      p->previous = runner.buffers().blocks.tokens;
    }
  };
  // The same of a walk over candidates.
  const auto shifts_walk = [](CpuRunner&, Program& program) {
    for (auto* p : program.params_of<WalkCandidatesParams>(walk_candidates)) {
      p->draw.draw_ahead ^= 1;
    }
  };
  // First drafts follow another token than the newest.
  const auto other_newest = [](CpuRunner& runner, Program& program) {
    for (auto* p : program.params_of<ScorePairsParams>(score_pairs)) {
      p->newest = runner.buffers().identity + 3;
    }
  };
  const auto exchanges_codebooks = [](CpuRunner&, Program& program) {
    for (auto* p : program.params_of<ScorePairsParams>(score_pairs)) {
      std::swap(p->predecessors, p->successors);
    }
  };
  // The walk goes on from another candidate than the one that it has drawn.
  const auto other_candidates = [](CpuRunner&, Program& program) {
    for (auto* p : program.params_of<WalkCandidatesParams>(walk_candidates)) ++p->lists.ids;
  };
  for (const bool from_anchor : {false, true}) {
    const auto acceptance = [&](BlockSource source, double temperature, const auto& plant) {
      const BlockOracle oracle{source, {20, 0}, {.samples_from_anchor = from_anchor}};
      const RawModel raw = block_oracle_target(source);
      return planted_acceptance(raw.build(), block_oracle(oracle, raw).build(), temperature, plant);
    };
    EXPECT_EQ(acceptance(BlockSource::kSelector, 0, sound), 1);
    EXPECT_EQ(acceptance(BlockSource::kSelector, 1, sound), 1);
    EXPECT_LT(acceptance(BlockSource::kSelector, 1, shifts_walk), 0.9);
    EXPECT_LT(acceptance(BlockSource::kSelector, 1, other_newest), 0.9);
    EXPECT_LT(acceptance(BlockSource::kSelector, 1, exchanges_codebooks), 0.9);
    EXPECT_LT(acceptance(BlockSource::kSelector, 1, other_candidates), 0.9);
    EXPECT_EQ(acceptance(BlockSource::kNewest, 0, sound), 1);
    EXPECT_EQ(acceptance(BlockSource::kContext, 0, sound), 1);
    EXPECT_EQ(acceptance(BlockSource::kChain, 1, sound), 1);
    EXPECT_LT(acceptance(BlockSource::kContext, 0, shifts_hidden), 0.9);
    EXPECT_LT(acceptance(BlockSource::kNewest, 0, other_mask), 0.9);
    EXPECT_LT(acceptance(BlockSource::kNewest, 0, older_token), 0.9);
    EXPECT_LT(acceptance(BlockSource::kChain, 1, shifts_noise), 0.9);
    EXPECT_LT(acceptance(BlockSource::kChain, 1, breaks_chain), 0.9);
    if (!from_anchor) {
      EXPECT_LT(acceptance(BlockSource::kNewest, 0, earlier_row), 0.9);
    }
  }
}

TEST(BlockDrafter, DraftKvDoesNotDependOnRejectedOrMissedDrafts) {
  const uint64_t first_seed = seed_from_env(1);
  int64_t rejected = 0;
  for (uint64_t seed = first_seed; seed < first_seed + 18 && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    const std::vector<TinyDraftHead> drafters = all_block_drafters();
    const auto target = random_target(seed).build();
    const auto drafter = random_raw_head(drafters[seed % drafters.size()], seed + 1).build();
    for (const bool catches_up : {false, true}) {
      testing::check_draft_kv(target, drafter, seed, &rejected, catches_up);
    }
  }
  EXPECT_GT(rejected, 500);
}

TEST(BlockDrafter, EveryDriverLeavesTheSameBits) {
  uint64_t seed = 0;
  for (const TinyDraftHead& shape : all_block_drafters()) {
    SCOPED_TRACE("drafter " + std::to_string(seed));
    const auto target = random_target(seed).build();
    const auto drafter = random_raw_head(shape, seed).build();
    for (const AcceptMethod method :
         {AcceptMethod::kCoupled, AcceptMethod::kStandard, AcceptMethod::kBlock}) {
      testing::check_drivers(target, drafter, seed, method);
    }
    ++seed;
  }
}

TEST(BlockDrafter, SpeculativeEqualsPlain) {
  const uint64_t first_seed = seed_from_env(1);
  Tally tally;
  for (uint64_t seed = first_seed; seed < first_seed + 54; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Pick pick{random};
    // Oracles in half of the cases, since random drafters are rarely right.
    const bool is_oracle = seed % 2 == 0;
    const std::vector<TinyDraftHead> drafters = all_block_drafters();
    const std::vector<BlockOracle> oracles = all_oracles();
    const BlockOracle& oracle = oracles[random() % oracles.size()];
    const RawModel raw = is_oracle ? block_oracle_target(oracle.source) : random_target(seed / 2);
    const RawModel drafter = is_oracle
                                 ? block_oracle(oracle, raw)
                                 : random_raw_head(drafters[seed / 2 % drafters.size()], seed + 1);
    const double temperature = pick(0.0, 0.7, 1.0);
    std::vector<Job> jobs = random_jobs(random, pick(1, 7, 24), 64, temperature, 60, 60);
    if (random() % 2 == 0) mix_sampling(jobs, random, 64);
    expect_equals_plain({.target = raw.build(),
                         .drafter = drafter.build(),
                         .jobs = jobs,
                         .temperature = temperature,
                         .small_pool_bytes = (is_oracle ? 440 : 220) << 10},
                        random, seed, tally);
  }
  tally.expect_all();
}

TEST(BlockDrafter, MoreDraftsThanTheBlockAreRefused) {
  const auto target = random_target(1).build();
  const auto message = [&](const TinyBlock& block, int32_t k) -> std::string {
    const TinyDraftHead shape{
        .decoder = llama_of({0}), .kind = DrafterKind::kBlock, .block = block};
    try {
      Executor executor(target, random_raw_head(shape, 2).build(), small_engine_options(k));
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message({.size = 5}, 4), "");
  EXPECT_NE(message({.size = 5}, 5).find("allowed: 1 to 4"), std::string::npos);
  EXPECT_EQ(message({.size = 5, .samples_from_anchor = true}, 5), "");
  EXPECT_NE(message({.size = 5, .samples_from_anchor = true}, 6).find("allowed: 1 to 5"),
            std::string::npos);
}

}  // namespace
}  // namespace paceline
