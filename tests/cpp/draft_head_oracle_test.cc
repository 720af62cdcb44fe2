// SPDX-License-Identifier: Apache-2.0
// EAGLE, EAGLE-3, MTP and Gemma 4 MTP against oracles: the drafts are right, and off-by-one faults
// are seen.

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "ops/ops.h"
#include "speculate/row_ops.h"
#include "support/all_accepted.h"
#include "support/jobs.h"
#include "support/oracle.h"
#include "support/planted_acceptance.h"
#include "support/raw_models.h"

namespace paceline {
namespace {

using testing::expect_all_accepted;
using testing::Oracle;
using testing::oracle_head;
using testing::oracle_target;
using testing::planted_acceptance;
using testing::random_jobs;
using testing::RawModel;
using testing::small_engine_options;
using testing::TinyDraftHead;
using testing::vary_options;

std::vector<Oracle> all_oracles() {
  std::vector<Oracle> oracles;
  for (const bool reads_hidden : {false, true}) {
    oracles.push_back({.reads_hidden = reads_hidden});
    oracles.push_back({.kind = DrafterKind::kGemma4Mtp, .reads_hidden = reads_hidden});
    for (const bool norm_output : {false, true}) {
      oracles.push_back(
          {.kind = DrafterKind::kMtp, .reads_hidden = reads_hidden, .norm_output = norm_output});
    }
    for (const bool is_reduced : {false, true}) {
      for (size_t part = 0; part < 3; ++part) {
        oracles.push_back({.kind = DrafterKind::kEagle3,
                           .reads_hidden = reads_hidden,
                           .is_reduced = is_reduced,
                           .norm_before_residual = part == 1,
                           .norm_output = part == 2,
                           .aux_part = part});
      }
    }
  }
  return oracles;
}

TEST(DraftHead, OraclesAreAlwaysRight) {
  int64_t preemptions = 0;
  for (const Oracle& oracle : all_oracles()) {
    const RawModel raw = oracle_target(oracle.is_reduced);
    const auto target = raw.build();
    const auto head = oracle_head(oracle, raw).build();
    for (const double temperature : {0.0, 1.0}) {
      // A sampled token is not a function of the token before.
      if (temperature > 0 && oracle.reads_hidden) continue;
      uint64_t cell = 0;
      for (const int32_t k : {1, 3, 8, 16}) {
        std::mt19937_64 random(11 + cell);
        ExecutorOptions options = small_engine_options(k);
        vary_options(options, cell);
        options.device_lateness = static_cast<int32_t>(cell % 3);
        options.block_size = 8;
        if (cell % 2 == 1) options.kv_cache_bytes = 600 << 10;  // forces preemption
        ++cell;
        Executor executor(target, head, options);
        SCOPED_TRACE(::testing::Message()
                     << "kind " << static_cast<int>(oracle.kind) << " hidden "
                     << oracle.reads_hidden << " reduced " << oracle.is_reduced << " part "
                     << oracle.aux_part << " k " << k << " T " << temperature);
        expect_all_accepted(executor, random_jobs(random, 12, 64, temperature, 60, 60));
        preemptions += executor.stats().num_preemptions;
      }
    }
  }
  EXPECT_GT(preemptions, 20);
}

// The acceptance rate of an oracle's drafts after a change of its recorded programs.
double oracle_acceptance(const Oracle& oracle, double temperature,
                         const std::function<void(CpuRunner&, Program&)>& plant) {
  const RawModel raw = oracle_target(oracle.is_reduced);
  return planted_acceptance(raw.build(), oracle_head(oracle, raw).build(), temperature, plant);
}

TEST(DraftHead, PlantedOffByOnesGoRed) {
  const auto sound = [](CpuRunner&, Program&) {};
  // The hidden state of the next row.
  const auto shifts_hidden = [](CpuRunner& runner, Program& program) {
    const HiddenTaps& taps = runner.buffers().target_hidden;
    for (CopyRowsParams* p : program.params_of<CopyRowsParams>(copy_rows)) {
      if (p->x == taps.data) p->x = static_cast<const float*>(p->x) + p->x_stride;
    }
    for (GemmParams* p : program.params_of<GemmParams>(gemm)) {
      if (p->x == taps.data) p->x = static_cast<const float*>(p->x) + p->x_stride;
    }
  };
  // The row's own token instead of the one after it.
  const auto shifts_tokens = [](CpuRunner&, Program& program) {
    for (auto* p : program.params_of<AssembleFirstRowsParams>(assemble_first_rows)) {
      --p->sequences.history;
    }
  };
  // The noise of the token before.
  const auto shifts_noise = [](CpuRunner&, Program& program) {
    for (DrawParams* p : program.params_of<DrawParams>(draw)) p->draw_ahead = 1;
  };
  // Noise by row of the lm_head instead of by token.
  const auto drops_map = [](CpuRunner& runner, Program& program) {
    static std::vector<int32_t> rows(64);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int32_t>(i);
    for (DrawParams* p : program.params_of<DrawParams>(draw)) {
      if (p->tokens == runner.buffers().drawn) p->token_map = rows.data();
    }
  };
  // Every draft step reads the output of the first pass.
  const auto stops_feedback = [](CpuRunner& runner, Program& program) {
    static std::vector<float> stale(64 * 8, 0.0f);
    for (CopyRowsParams* p : program.params_of<CopyRowsParams>(copy_rows)) {
      if (p->x == runner.buffers().draft_output.feedback && p->y_stride == 128) p->x = stale.data();
    }
    for (RmsNormParams* p : program.params_of<RmsNormParams>(rms_norm)) {
      if (p->x == runner.buffers().draft_output.feedback && p->y_stride == 128) p->x = stale.data();
    }
  };
  // Positions advance although the drafter's are fixed.
  const auto moves_on = [](CpuRunner&, Program& program) {
    for (auto* p : program.params_of<AdvanceParams>(advance_draft_step)) {
      p->advances_positions = true;
    }
  };
  for (const auto kind :
       {DrafterKind::kEagle, DrafterKind::kEagle3, DrafterKind::kMtp, DrafterKind::kGemma4Mtp}) {
    const Oracle by_token{.kind = kind, .is_reduced = kind == DrafterKind::kEagle3};
    Oracle by_hidden = by_token;
    by_hidden.reads_hidden = true;
    EXPECT_EQ(oracle_acceptance(by_token, 0, sound), 1);
    EXPECT_EQ(oracle_acceptance(by_token, 1, sound), 1);
    EXPECT_EQ(oracle_acceptance(by_hidden, 0, sound), 1);
    EXPECT_LT(oracle_acceptance(by_hidden, 0, shifts_hidden), 0.9);
    EXPECT_LT(oracle_acceptance(by_token, 0, shifts_tokens), 0.9);
    EXPECT_LT(oracle_acceptance(by_token, 1, shifts_noise), 0.9);
    EXPECT_LT(oracle_acceptance(by_hidden, 0, stops_feedback), 0.9);
    if (kind == DrafterKind::kGemma4Mtp) {
      EXPECT_LT(oracle_acceptance(by_token, 1, moves_on), 0.9);
    }
    if (by_token.is_reduced) {
      EXPECT_LT(oracle_acceptance(by_token, 1, drops_map), 0.9);
    }
  }
}

TEST(DraftHead, AWholeVocabularyNeedsNoMap) {
  // Without a map row i is token i; with the identity map the model drafts the same.
  const RawModel raw = oracle_target(false);
  const auto target = raw.build();
  RawModel head = oracle_head({.kind = DrafterKind::kEagle3}, raw);
  TinyDraftHead shape{.kind = DrafterKind::kEagle3, .target_hidden = 64, .owns_lm_head = true};
  shape.decoder = testing::oracle_decoder({1});
  head.json = head_config_json(shape);
  head.config = parse_decoder_config(head.json);
  head.tensors["lm_head.weight"] = raw.at("lm_head.weight");
  for (const bool has_map : {false, true}) {
    if (has_map) head.draft_to_target = testing::oracle_tokens(false);
    const auto model = head.build();
    EXPECT_EQ(model->weights.head.draft_to_target != nullptr, has_map);
    std::mt19937_64 random(4);
    Executor executor(target, model, small_engine_options(5));
    expect_all_accepted(executor, random_jobs(random, 8, 64, 1.0));
  }
}

}  // namespace
}  // namespace paceline
