// SPDX-License-Identifier: Apache-2.0
// The whole engine on tiny mixtures of experts with sinks: speculative output equals plain output
// with drafters of every kind, whatever the routing.

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <iterator>
#include <list>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "cpp/equality_checks.h"
#include "device/program.h"
#include "ops/moe.h"
#include "ops/ops.h"
#include "runner/cpu_runner.h"
#include "support/all_accepted.h"
#include "support/draft_head_checks.h"
#include "support/engine_checks.h"
#include "support/invariance.h"
#include "support/jobs.h"
#include "support/mixture_checks.h"
#include "support/planted_faults.h"
#include "support/raw_models.h"
#include "support/reference_model.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

namespace reference = testing::reference;

using testing::all_heads;
using testing::by_windows;
using testing::DirectRunner;
using testing::expect_a_chunk_takes_any_routing;
using testing::expect_all_accepted;
using testing::expect_bad_logits_end_one_request;
using testing::expect_equals_plain;
using testing::expect_same_bits;
using testing::Job;
using testing::kPlantPrefilled;
using testing::make_mixture;
using testing::mix_sampling;
using testing::Pick;
using testing::planted_logits;
using testing::random_jobs;
using testing::random_raw_head;
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

// Windows and full attention alternate, as in GPT-OSS.
const TinyModel kMixture{.intermediate = 64,
                         .windows = {8, 0, 8, 0},
                         .rope_scale = 1.35,
                         .is_gemma = false,
                         .has_bias = true,
                         .has_sinks = true,
                         .num_experts = 8,
                         .top_k = 3};

TEST(EngineMixture, SelfDraftAcceptsEverything) {
  for (const bool is_interleaved : {true, false}) {
    TinyModel shape = kMixture;
    shape.is_interleaved = is_interleaved;
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

// What drafts for a target.
enum class DraftedWith : uint8_t { kItself, kOtherMixture, kDense, kHead, kNgram };

std::shared_ptr<const Model> drafter_of(DraftedWith with, const TinyModel& target, uint64_t seed,
                                        std::mt19937_64& random) {
  TinyModel other{.hidden = 16, .num_qo_heads = 2, .num_kv_heads = 1, .windows = {5, 0, 12}};
  switch (with) {
    case DraftedWith::kItself:
      return tiny_model(target, seed, 0.02f, seed + 2);
    case DraftedWith::kOtherMixture:
      make_mixture(other, random);
      return tiny_model(other, seed + 1);
    case DraftedWith::kDense:
      other.is_gemma = random() % 2 == 0;
      return tiny_model(other, seed + 1);
    case DraftedWith::kHead: {
      const auto heads = all_heads();
      return random_raw_head(heads[random() % heads.size()], seed + 1).build();
    }
    case DraftedWith::kNgram:
      return nullptr;
  }
  return nullptr;
}

TEST(EngineMixture, SpeculativeEqualsPlain) {
  const uint64_t first_seed = seed_from_env(1);
  Tally tally;
  for (uint64_t seed = first_seed; seed < first_seed + 40; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Pick pick{random};
    // Half of them often agree with the target.
    constexpr DraftedWith kAll[] = {DraftedWith::kItself, DraftedWith::kOtherMixture,
                                    DraftedWith::kItself, DraftedWith::kDense,
                                    DraftedWith::kItself, DraftedWith::kHead,
                                    DraftedWith::kItself, DraftedWith::kNgram};
    const DraftedWith with = kAll[seed % std::size(kAll)];
    // Heads read hidden states and KV of layers that these windows have.
    TinyModel shape{.windows = with == DraftedWith::kHead ? std::vector<int32_t>{8, 0, 20}
                                                          : std::vector<int32_t>{8, 0, 8}};
    make_mixture(shape, random);
    // A mixture drafts for a dense model, too.
    if (with == DraftedWith::kOtherMixture && random() % 2 == 0) shape.num_experts = 0;
    const auto target = tiny_model(shape, seed);
    const auto drafter = drafter_of(with, shape, seed, random);
    const double temperature = pick(0.0, 0.7, 1.0);
    std::vector<Job> jobs = random_jobs(random, pick(1, 7, 24), 64, temperature, 60, 60);
    if (random() % 2 == 0) mix_sampling(jobs, random, 64);

    const auto choose = [&](ExecutorOptions& options) {
      if (with != DraftedWith::kNgram) return;
      options.speculative.prompt_lookup_min = 1;
      options.speculative.prompt_lookup_max = 3;
    };
    expect_equals_plain({.target = target,
                         .drafter = drafter,
                         .jobs = jobs,
                         .temperature = temperature,
                         .small_pool_bytes = 300 << 10,
                         .choose = choose},
                        random, seed, tally);
  }
  tally.expect_all();
}

TEST(EngineMixture, AChunkTakesAnyRouting) {
  for (const bool goes_together : {false, true}) {
    TinyModel shape = kMixture;
    shape.num_experts = 128;
    shape.top_k = 4;
    shape.windows = {8, 0};
    shape.max_position = 2304;
    if (goes_together) shape.router_bias_scale = 100;
    const auto options_of = [](int32_t k) {
      ExecutorOptions options = small_engine_options(k);
      options.num_threads = 2;
      return options;
    };
    expect_a_chunk_takes_any_routing(tiny_model(shape, 9), nullptr, goes_together, 8, options_of);
  }
}

TEST(EngineMixture, BadLogitsEndOneRequestOnly) {
  TinyModel shape = kMixture;
  const auto sound = tiny_model(shape, 3);
  shape.nan_token = 63;
  const auto broken = tiny_model(shape, 3);
  std::mt19937_64 random(5);
  expect_bad_logits_end_one_request(sound, broken, random_jobs(random, 8, 63, 0.0),
                                    small_engine_options);
}

TEST(EngineMixture, LogitsMatchTheReferenceAndPlantedFaultsGoRed) {
  constexpr double kBound = 1e-4;
  const auto sound = [](Program&) {};
  const auto scales_sinks = [](Program& program) {
    static std::list<std::vector<float>> all;
    for (auto* p : program.params_of<PagedAttentionParams>(paged_attention)) {
      std::vector<float>& scaled = all.emplace_back(p->sinks, p->sinks + p->num_qo_heads);
      for (float& sink : scaled) sink *= p->scale;
      p->sinks = scaled.data();
    }
  };
  const auto drops_sinks = [](Program& program) {
    for (auto* p : program.params_of<PagedAttentionParams>(paged_attention)) p->sinks = nullptr;
  };
  // As if YaRN's factor were that of q alone.
  const auto scales_once = [](Program& program) {
    for (auto* p : program.params_of<PagedAttentionParams>(paged_attention)) {
      p->scale /= static_cast<float>(kMixture.rope_scale);
    }
  };
  const auto swaps_interleave = [](Program& program) {
    for (auto* p : program.params_of<ActivatedExpertsParams>(activated_experts)) {
      p->activation.is_interleaved = !p->activation.is_interleaved;
    }
  };
  const auto lowers_limit = [](Program& program) {
    for (auto* p : program.params_of<ActivatedExpertsParams>(activated_experts)) {
      p->activation.limit = 1;
    }
  };
  // A place has the weight of the next one.
  const auto shifts_places = [](Program& program) {
    for (auto* p : program.params_of<CombineAndNormParams>(combine_and_norm)) {
      ++p->combine.weights;
    }
  };
  // An output has the bias of the one before.
  const auto takes_other_bias = [](Program& program) {
    for (auto* p : program.params_of<ExpertGemmParams>(expert_gemm)) --p->bias;
  };
  // The products of gate_up and of down.
  const auto products_of = [](Program& program) {
    std::vector<ExpertGemmParams*> products = program.params_of<ExpertGemmParams>(expert_gemm);
    for (auto* p : program.params_of<ActivatedExpertsParams>(activated_experts)) {
      products.push_back(&p->product);
    }
    return products;
  };
  // Each expert's matrix begins a row earlier than that of the one before it.
  const auto starts_early = [&](Program& program) {
    for (auto* p : products_of(program)) {
      p->weight.data_stride -= p->weight.first.row_bytes();
    }
  };
  // A scale of the last expert is twice as large, in every row.
  const auto doubles_scale = [&](Program& program) {
    static std::list<std::vector<std::byte>> all;
    for (auto* p : products_of(program)) {
      const ExpertMatrices& experts = p->weight;
      const int64_t size = experts.num_experts * experts.scales_stride;
      std::vector<std::byte>& scales =
          all.emplace_back(experts.first.scales, experts.first.scales + size);
      const int64_t per_row = experts.first.k / kMxfp4Columns;
      for (int64_t at = size - experts.scales_stride; at < size; at += per_row) {
        scales[static_cast<size_t>(at)] =
            static_cast<std::byte>(std::to_integer<int>(scales[static_cast<size_t>(at)]) + 1);
      }
      p->weight.first.scales = scales.data();
    }
  };
  for (const uint64_t seed : {1, 2, 3}) {
    TinyModel shape = kMixture;
    shape.is_interleaved = seed != 2;
    shape.is_mxfp4 = seed == 3;
    const RawModel raw = random_raw_model(tiny_config_json(shape), seed);
    const auto model = raw.build();
    std::mt19937_64 random(seed);
    const std::vector<int32_t> tokens = random_tokens(random, 60, 64);
    reference::Rows expected = reference::run_target(raw, tokens).logits;
    expected.erase(expected.begin(), expected.begin() + kPlantPrefilled);
    const auto error = [&](const std::function<void(Program&)>& plant) {
      return relative_error(planted_logits(model, tokens, plant), expected);
    };
    EXPECT_LT(error(sound), kBound);
    EXPECT_GT(error(scales_sinks), 100 * kBound);
    EXPECT_GT(error(drops_sinks), 100 * kBound);
    EXPECT_GT(error(scales_once), 100 * kBound);
    EXPECT_GT(error(swaps_interleave), 100 * kBound);
    EXPECT_GT(error(lowers_limit), 100 * kBound);
    EXPECT_GT(error(shifts_places), 100 * kBound);
    EXPECT_GT(error(takes_other_bias), 100 * kBound);
    EXPECT_GT(error(starts_early), 100 * kBound);
    if (shape.is_mxfp4) {
      EXPECT_GT(error(doubles_scale), 100 * kBound);
    }
  }
}

// The scales of mxfp4 are powers of two, so its values are exact.
TEST(EngineMixture, Mxfp4ExpertsGiveTheBitsOfPlainOnes) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    TinyModel shape = kMixture;
    shape.is_mxfp4 = true;
    const RawModel raw = random_raw_model(tiny_config_json(shape), 4);
    shape.is_mxfp4 = false;
    RawModel plain = raw;
    plain.json = tiny_config_json(shape);
    plain.config = parse_decoder_config(plain.json);
    std::mt19937_64 random(4);
    const std::vector<int32_t> tokens = random_tokens(random, 60, 64);
    expect_same_bits(by_windows(raw.build(dtype), tokens, 20, 4, {}),
                     by_windows(plain.build(dtype), tokens, 20, 4, {}));
  }
}

// A shared expert of the others' form is one more of them in passes of few rows. In passes of more
// rows it is an MLP of its own.
TEST(EngineMixture, ASharedExpertGivesTheSameBitsAmongTheOthersAndApart) {
  for (const bool is_per_expert : {false, true}) {
    const auto model = tiny_model({.intermediate = 64,
                                   .windows = {8, 0},
                                   .is_gemma = false,
                                   .num_experts = 8,
                                   .top_k = 3,
                                   .is_interleaved = false,
                                   .is_deepseek = true,
                                   .shared_intermediate = 64,
                                   .is_per_expert = is_per_expert},
                                  6);
    std::mt19937_64 random(6);
    const std::vector<int32_t> tokens = random_tokens(random, 90, 64);
    const auto trace = [&](bool is_joined) {
      const int32_t max_seqs = is_joined ? 4 : kMaxJoinedRows + 1;  // also in plain iterations
      const int32_t prefilled = is_joined ? kMaxJoinedRows : kMaxJoinedRows + 1;
      return by_windows(model, tokens, prefilled, 4,
                        {.max_seqs = max_seqs, .max_verify_rows = 5 * max_seqs + 200},
                        [&](DirectRunner& direct) {
                          int64_t num_mixtures = 0;
                          auto& runner = dynamic_cast<CpuRunner&>(direct.runner());
                          for (Program* const program : runner.programs()) {
                            for (const auto* p : program->params_of<RouterParams>(run_router)) {
                              EXPECT_EQ(p->sort.has_shared, is_joined);
                              ++num_mixtures;
                            }
                          }
                          EXPECT_GT(num_mixtures, 0);
                        });
    };
    expect_same_bits(trace(true), trace(false));
  }
}

}  // namespace
}  // namespace paceline
