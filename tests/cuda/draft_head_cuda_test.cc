// SPDX-License-Identifier: Apache-2.0
// EAGLE, EAGLE-3 and prompt lookup on a GPU in bfloat16: oracles, KV after rejections, drivers, and
// output that equals plain output. Skipped without a GPU, unless PACELINE_REQUIRE_GPU=1.

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>

#include <paceline/executor.h>

#include "support/all_accepted.h"
#include "support/draft_head_checks.h"
#include "support/gpu.h"
#include "support/jobs.h"
#include "support/oracle.h"
#include "wire/batch_shape.h"
#include "wire/sequence_state.h"

namespace paceline {
namespace {

using testing::all_heads;
using testing::expect_all_accepted;
using testing::Job;
using testing::make_mixture;
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
using testing::Tally;
using testing::tiny_config_json;
using testing::tiny_model;
using testing::TinyModel;
using testing::vary_options;

class CudaDraftHead : public testing::GpuTest {};

constexpr int32_t kHeadDim = 64;
constexpr int32_t kWindow = 140;

RawModel raw_target(bool is_gemma, uint64_t seed) {
  TinyModel shape;
  shape.head_dim = kHeadDim;
  shape.windows = {8, 0, kWindow};
  shape.is_gemma = is_gemma;
  return random_raw_model(tiny_config_json(shape), seed);
}

std::shared_ptr<const Model> on_gpu(const RawModel& raw) {
  return raw.build(DType::kBFloat16, Device::kCuda);
}

std::shared_ptr<const Model> mixture_on_gpu(uint64_t seed) {
  TinyModel shape{.head_dim = kHeadDim, .windows = {8, 0, kWindow}};
  std::mt19937_64 switches(seed);
  make_mixture(shape, switches);
  return tiny_model(shape, seed, 0, 0, DType::kBFloat16, Device::kCuda);
}

ExecutorOptions options_of(int32_t k) {
  ExecutorOptions options = testing::gpu_engine_options(k, 24, 64 << 20);
  options.max_model_len = 512;
  return options;
}

TEST_F(CudaDraftHead, OraclesAreAlwaysRight) {
  uint64_t cell = 0;
  for (const auto kind :
       {DrafterKind::kEagle, DrafterKind::kEagle3, DrafterKind::kMtp, DrafterKind::kGemma4Mtp}) {
    for (const bool reads_hidden : {false, true}) {
      for (const double temperature : {0.0, 1.0}) {
        // Sampled tokens do not depend on the previous token only.
        if (temperature > 0 && reads_hidden) continue;
        const bool is_eagle3 = kind == DrafterKind::kEagle3;
        const Oracle oracle{.kind = kind,
                            .reads_hidden = reads_hidden,
                            .is_reduced = is_eagle3,
                            .norm_before_residual = is_eagle3 && cell % 8 == 0};
        const RawModel raw = oracle_target(oracle.is_reduced);
        const auto target = on_gpu(raw);
        const auto head = on_gpu(oracle_head(oracle, raw));
        for (const int32_t k : {1, 3, 8, 16}) {
          SCOPED_TRACE("cell " + std::to_string(cell) + " k " + std::to_string(k));
          std::mt19937_64 random(11 + cell);
          ExecutorOptions options = options_of(k);
          vary_options(options, cell);
          if (cell % 3 == 1) options.kv_cache_bytes = 1 << 20;  // forces preemption
          ++cell;
          Executor executor(target, head, options);
          expect_all_accepted(executor, random_jobs(random, 20, 64, temperature, 60, 90));
        }
      }
    }
  }
}

// For every draft head, the distributions of drafts and target are nearly equal: a token that is
// drawn at a wrong position, or judged by another token's distribution, is accepted only by
// accident.
TEST_F(CudaDraftHead, OraclesAreKeptByTheirLaws) {
  for (const auto kind :
       {DrafterKind::kEagle, DrafterKind::kEagle3, DrafterKind::kMtp, DrafterKind::kGemma4Mtp}) {
    for (const auto method : {AcceptMethod::kStandard, AcceptMethod::kBlock}) {
      const bool is_reduced = kind == DrafterKind::kEagle3;
      const RawModel raw = oracle_target(is_reduced);
      const auto head = on_gpu(oracle_head({.kind = kind, .is_reduced = is_reduced}, raw));
      ExecutorOptions options = options_of(5);
      options.speculative.rejection_sample_method = method;
      std::mt19937_64 random(3);
      Executor executor(on_gpu(raw), head, options);
      Tally tally;
      tally.add(executor, run(executor, random_jobs(random, 60, 64, 1.0)));
      EXPECT_GT(tally.drafted, 500);
      EXPECT_GE(tally.accepted, tally.drafted * 97 / 100) << "drafter " << static_cast<int>(kind);
      EXPECT_EQ(executor.check_integrity(), "");
    }
  }
}

TEST_F(CudaDraftHead, DraftKvIsThatOfARunThatWasNeverWrong) {
  const uint64_t first_seed = seed_from_env(1);
  int64_t rejected = 0;
  for (uint64_t seed = first_seed; seed < first_seed + 16 && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    const auto heads = all_heads(kHeadDim, kWindow);
    for (const bool catches_up : {false, true}) {
      testing::check_draft_kv(on_gpu(raw_target(seed % 2 == 0, seed)),
                              on_gpu(random_raw_head(heads[seed % heads.size()], seed + 1)), seed,
                              &rejected, catches_up);
    }
  }
  EXPECT_GT(rejected, 500);
}

TEST_F(CudaDraftHead, EveryDriverLeavesTheSameBits) {
  const auto heads = all_heads(kHeadDim, kWindow);
  for (size_t which = 0; which < heads.size(); ++which) {
    SCOPED_TRACE("head " + std::to_string(which));
    for (const AcceptMethod method :
         {AcceptMethod::kCoupled, AcceptMethod::kStandard, AcceptMethod::kBlock}) {
      testing::check_drivers(on_gpu(raw_target(false, which)),
                             on_gpu(random_raw_head(heads[which], which)), which, method);
    }
  }
}

// Logits of the last draft step of a prompt's first iteration, on both backends.
TEST_F(CudaDraftHead, LogitsAreThoseOfTheCpuUpToRounding) {
  const auto heads = all_heads(kHeadDim, kWindow);
  size_t num_compared = 0;
  for (size_t which = 0; which < heads.size(); ++which) {
    for (const int32_t k : {1, 2}) {
      SCOPED_TRACE("head " + std::to_string(which) + " k " + std::to_string(k));
      const RawModel target = raw_target(which % 2 == 0, which);
      const RawModel head = random_raw_head(heads[which], which);
      const int32_t width = head.config.num_logits();
      std::vector<std::vector<float>> logits;
      std::vector<std::vector<int32_t>> drafts;
      for (const auto device : {Device::kCpu, Device::kCuda}) {
        testing::DirectRunner direct(target.build(DType::kBFloat16, device),
                                     head.build(DType::kBFloat16, device),
                                     {.max_seqs = 2, .num_draft_tokens = k});
        std::vector<int32_t> prompt(30);
        std::mt19937_64 random(which);
        for (int32_t& token : prompt) token = static_cast<int32_t>(random() % 64);
        direct.start(0, prompt, 100);
        direct.plan(0, RowKind::kPrefillFinal, 0, 30);
        direct.run();
        logits.push_back(direct.download(direct.buffers().logits, width));
        const SequenceState& s = direct.buffers().sequences;
        drafts.push_back(direct.download(s.history, 31));
        const auto drawn = direct.download(s.draft_tokens, k - 1);
        drafts.back().insert(drafts.back().end(), drawn.begin(), drawn.end());
      }
      if (drafts[0] != drafts[1]) continue;  // rounding decided a draw, so the inputs differ
      ++num_compared;
      double error = 0;
      double scale = 0;
      for (size_t i = 0; i < logits[0].size(); ++i) {
        error += std::pow(double{logits[0][i]} - logits[1][i], 2);
        scale += std::pow(double{logits[0][i]}, 2);
      }
      EXPECT_LT(std::sqrt(error), 0.05 * std::sqrt(scale));
    }
  }
  EXPECT_GT(num_compared, heads.size());  // out of twice as many
}

TEST_F(CudaDraftHead, SpeculativeEqualsPlain) {
  const uint64_t first_seed = seed_from_env(1);
  const uint64_t num_cells = testing::test_level() >= 3 ? 300 : 48;
  Tally tally;
  for (uint64_t seed = first_seed; seed < first_seed + num_cells; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Pick pick{random};
    const auto heads = all_heads(kHeadDim, kWindow);
    const auto which = static_cast<size_t>(seed % (heads.size() + 3));
    const bool is_ngram = which >= heads.size();
    const bool is_oracle = !is_ngram && random() % 2 == 0;
    const RawModel raw = is_oracle ? oracle_target(false) : raw_target(random() % 2 == 0, seed);
    const bool is_mixture = !is_oracle && random() % 3 == 0;
    const auto target = is_mixture ? mixture_on_gpu(seed) : on_gpu(raw);
    std::shared_ptr<const Model> head;
    if (is_oracle) {
      head = on_gpu(oracle_head({.kind = pick(DrafterKind::kEagle, DrafterKind::kEagle3)}, raw));
    } else if (!is_ngram) {
      head = on_gpu(random_raw_head(heads[which], seed + 1));
    }
    const double temperature = pick(0.0, 0.7, 1.0);
    std::vector<Job> jobs = random_jobs(random, pick(1, 7, 24), 64, temperature, 200, 100);
    if (random() % 2 == 0) mix_sampling(jobs, random, 64);

    ExecutorOptions options = options_of(0);
    Executor plain(target, nullptr, options);
    const std::vector<Outcome> expected = run(plain, jobs);

    const auto k = static_cast<int32_t>(1 + random() % 16);
    options = options_of(k);
    if (is_ngram) {
      options.speculative.prompt_lookup_min = pick(1, 2);
      options.speculative.prompt_lookup_max = pick(2, 4);
    }
    options.block_size = pick(8, 16, 32);
    options.prefill_chunk_size = pick(0, 16, 100);
    options.speculative.draft_driver = pick(DraftDriver::kUnrolled, DraftDriver::kReplay,
                                            DraftDriver::kEager, DraftDriver::kWhile);
    if (options.speculative.draft_driver == DraftDriver::kWhile && !is_ngram && random() % 2 == 0) {
      options.speculative.draft_stop_threshold = pick(0.2, 0.6);
    }
    options.poison_freed_blocks = true;
    if (random() % 2 == 0) options.max_num_seqs = pick(3, 17);
    if (random() % 2 == 0) options.kv_cache_bytes = 3 << 20;
    std::mt19937_64 own(seed);
    if (own() % 2 == 0) {
      options.draft_schedule_seed = own();
      options.kv_cache_bytes *= 2;  // a drafter that may catch up keeps more than its windows
    }
    options.speculative.adaptive = own() % 2 == 0;
    Executor speculative(target, head, options);
    const std::vector<Job> neighbours =
        random() % 2 == 0 ? random_jobs(random, 6, 64, temperature) : std::vector<Job>{};
    mix_num_drafts(jobs, own, k);
    const std::vector<Outcome> actual = run(speculative, jobs, neighbours, seed);
    for (size_t i = 0; i < jobs.size(); ++i) {
      expect_own_drafts(jobs[i], actual[i], k);
      ASSERT_EQ(actual[i].tokens, expected[i].tokens)
          << "job " << i << " k " << k << " driver "
          << static_cast<int>(options.speculative.draft_driver);
      EXPECT_EQ(actual[i].reason, expected[i].reason);
    }
    EXPECT_EQ(speculative.check_integrity(), "");
    tally.add(speculative, actual);
  }
  tally.expect_all(/*min_preemptions=*/5);
}

}  // namespace
}  // namespace paceline
