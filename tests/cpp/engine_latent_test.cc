// SPDX-License-Identifier: Apache-2.0
// The whole engine on tiny models with latent attention, beside sliding layers and alone.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "cpp/equality_checks.h"
#include "device/program.h"
#include "ops/latent.h"
#include "ops/ops.h"
#include "support/all_accepted.h"
#include "support/jobs.h"
#include "support/planted_faults.h"
#include "support/raw_models.h"
#include "support/reference_model.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

namespace reference = testing::reference;

using testing::expect_all_accepted;
using testing::expect_equals_plain;
using testing::Job;
using testing::kPlantPrefilled;
using testing::make_latent;
using testing::make_mixture;
using testing::mix_sampling;
using testing::Pick;
using testing::planted_logits;
using testing::random_jobs;
using testing::random_raw_model;
using testing::random_tokens;
using testing::RawModel;
using testing::relative_error;
using testing::seed_from_env;
using testing::small_engine_options;
using testing::Tally;
using testing::tiny_config_json;
using testing::tiny_model;
using testing::TinyModel;

const TinyModel kLatent{.windows = {0, 8, 0},
                        .rope_scale = 1.35,
                        .is_gemma = false,
                        .kv_lora_rank = 24,
                        .q_lora_rank = 24};

TEST(EngineLatent, SelfDraftAcceptsEverything) {
  for (const std::vector<int32_t>& windows : {std::vector<int32_t>{0, 0}, {0, 8, 0}}) {
    TinyModel shape = kLatent;
    shape.windows = windows;
    const auto model = tiny_model(shape, 7);
    for (const double temperature : {0.0, 1.0}) {
      for (const int32_t k : {1, 3, 16}) {
        std::mt19937_64 random(11);
        Executor executor(model, model, small_engine_options(k));
        expect_all_accepted(executor, random_jobs(random, 12, 64, temperature));
      }
    }
  }
}

TEST(EngineLatent, SpeculativeEqualsPlain) {
  const uint64_t first_seed = seed_from_env(1);
  Tally tally;
  for (uint64_t seed = first_seed; seed < first_seed + 40; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Pick pick{random};
    TinyModel shape{.windows = random() % 2 == 0 ? std::vector<int32_t>{0, 0}
                                                 : std::vector<int32_t>{0, 8, 0}};
    shape.is_gemma = random() % 3 == 0;
    make_latent(shape, random);
    const auto target = tiny_model(shape, seed);
    // A drafter that often agrees, another latent one, one without latent attention.
    TinyModel other{.hidden = 16, .num_qo_heads = 2, .num_kv_heads = 1, .windows = {5, 0}};
    if (seed % 4 == 1) make_latent(other, random);
    const auto drafter =
        seed % 2 == 0 ? tiny_model(shape, seed, 0.02f, seed + 2) : tiny_model(other, seed + 1);
    const double temperature = pick(0.0, 0.7, 1.0);
    std::vector<Job> jobs = random_jobs(random, pick(1, 7, 24), 64, temperature, 60, 60);
    if (random() % 2 == 0) mix_sampling(jobs, random, 64);
    expect_equals_plain({.target = target,
                         .drafter = drafter,
                         .jobs = jobs,
                         .temperature = temperature,
                         .small_pool_bytes = 300 << 10},
                        random, seed, tally);
  }
  tally.expect_all();
}

TEST(EngineLatent, LogitsMatchTheReferenceAndPlantedFaultsGoRed) {
  constexpr double kBound = 1e-4;
  struct Fault {
    const char* name;
    std::function<void(Program&)> plant;
  };
  const std::vector<Fault> faults = {
      {"the entries of the next row, one too many",
       [](Program& program) {
         for (auto* p : program.params_of<LatentAttentionParams>(latent_attention)) ++p->kv_end;
       }},
      {"rope in halves, not in pairs",
       [](Program& program) {
         for (auto* p : program.params_of<AbsorbQueriesParams>(absorb_queries)) {
           p->rope.is_interleaved = !p->rope.is_interleaved;
         }
       }},
      {"keys rotated one position further",
       [](Program& program) {
         for (auto* p : program.params_of<AppendLatentsParams>(append_latents)) {
           ++p->rope.position_offset;
         }
       }},
      {"the epsilon of the other norms",
       [](Program& program) {
         for (auto* p : program.params_of<AppendLatentsParams>(append_latents)) {
           p->norm_eps = 1e-6f;
         }
       }},
      {"q_a without its norm",
       [](Program& program) {
         for (auto* p : program.params_of<AppendLatentsParams>(append_latents)) {
           p->q_norm = nullptr;
         }
       }},
      {"values from the rows of keys",
       [](Program& program) {
         for (auto* p : program.params_of<ProjectValuesParams>(project_values)) {
           p->heads.kv_b.data -= p->heads.kv_b.row_bytes();
         }
       }},
      {"the scale of rotated elements alone",
       [](Program& program) {
         for (auto* p : program.params_of<LatentAttentionParams>(latent_attention)) {
           p->scale = 1 / std::sqrt(static_cast<float>(p->qk_rope_head_dim));
         }
       }},
      {"entries of the layer before",
       [](Program& program) {
         for (auto* p : program.params_of<LatentAttentionParams>(latent_attention)) {
           p->entries.k_offset = p->entries.v_offset = 0;
         }
       }},
  };
  for (const uint64_t seed : {1, 2, 3}) {
    TinyModel shape = kLatent;
    if (seed == 2) shape.q_lora_rank = 0;
    shape.is_gemma = seed == 3;
    const RawModel raw = random_raw_model(tiny_config_json(shape), seed);
    const auto model = raw.build();
    std::mt19937_64 random(seed);
    const std::vector<int32_t> tokens = random_tokens(random, 60, 64);
    reference::Rows expected = reference::run_target(raw, tokens).logits;
    expected.erase(expected.begin(), expected.begin() + kPlantPrefilled);
    EXPECT_LT(relative_error(planted_logits(model, tokens, [](Program&) {}), expected), kBound);
    for (const Fault& fault : faults) {
      if (seed == 2 && std::string(fault.name).starts_with("q_a")) continue;
      EXPECT_GT(relative_error(planted_logits(model, tokens, fault.plant), expected), 100 * kBound)
          << fault.name;
    }
  }
}

}  // namespace
}  // namespace paceline
