// SPDX-License-Identifier: Apache-2.0
// Ranks that share a model: any number of them has the bits of one, whatever the model, the drafter
// and the options; and a rank that fails or hangs ends all requests with one error.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <string>

#include <paceline/error.h>
#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "cpp/equality_checks.h"
#include "executor/option_checks.h"
#include "model/weights/rank_model.h"
#include "model/weights/split_model.h"
#include "support/draft_head_checks.h"
#include "support/engine_checks.h"
#include "support/errors.h"
#include "support/jobs.h"
#include "support/raw_models.h"
#include "support/tiny_models.h"
#include "support/toy_constraint.h"

namespace paceline {
namespace {

using ::testing::AllOf;
using testing::constrain_some;
using testing::expect_equals_plain;
using testing::expect_same;
using ::testing::HasSubstr;
using testing::Job;
using testing::make_gemma4;
using testing::make_latent;
using testing::make_mixture;
using testing::message_of;
using testing::mix_logprobs;
using testing::mix_sampling;
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
using testing::tiny_model;
using testing::TinyDraftHead;
using testing::TinyModel;

// Twelve query heads, which 1, 2, 3 and 4 ranks can share; KV heads are split or repeated, MLPs are
// dense or mixtures, and full layers may have latent attention.
TinyModel shared_shape(std::mt19937_64& random) {
  const Pick pick{random};
  TinyModel shape = {
      .num_qo_heads = 12,
      .num_kv_heads = pick(1, 12),
      .head_dim = 8,
      .intermediate = pick(48, 56),
      .windows = pick(0, 1) == 0 ? std::vector<int32_t>{0, 0} : std::vector<int32_t>{8, 0, 20},
      .is_gemma = pick(true, false),
      .has_bias = pick(true, false),
      .has_sinks = pick(true, false)};
  switch (random() % 4) {
    case 0:
      make_gemma4(shape, random);
      break;
    case 1:
      make_mixture(shape, random);
      break;
    case 2:
      make_mixture(shape, random);
      make_latent(shape, random);
      break;
    default:
      break;
  }
  return shape;
}

ExecutorOptions options_of(int32_t num_ranks, int32_t k) {
  ExecutorOptions options = small_engine_options(k);
  options.tensor_parallel_size = num_ranks;
  return options;
}

TEST(Ranks, AnyNumberOfThemHasTheSameTokensAndLogprobs) {
  const uint64_t first_seed = seed_from_env(1);
  for (uint64_t seed = first_seed; seed < first_seed + 24; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto model = tiny_model(shared_shape(random), seed);
    std::vector<Job> jobs = random_jobs(random, 12, 64, seed % 2 * 0.8);
    mix_sampling(jobs, random, 64);
    mix_logprobs(jobs, random, 5);
    constrain_some(jobs, random, 64);
    for (Job& job : jobs) {
      if (job.make_constraint) job.sampling.prompt_logprobs = -1;
    }
    std::vector<Outcome> expected;
    for (int32_t num_ranks = 1; num_ranks <= 4; ++num_ranks) {
      SCOPED_TRACE(std::to_string(num_ranks) + " ranks");
      ExecutorOptions options = options_of(num_ranks, 0);
      options.max_logprobs = 5;
      options.num_threads = static_cast<int32_t>(1 + seed % 3);
      Executor executor(model, nullptr, options);
      const std::vector<Outcome> outcomes = run(executor, jobs);
      if (num_ranks == 1) expected = outcomes;
      expect_same(outcomes, expected);
      EXPECT_EQ(executor.check_integrity(), "");
    }
  }
}

TEST(Ranks, SpeculativeEqualsPlainOnOneRank) {
  const uint64_t first_seed = seed_from_env(1);
  Tally tally;
  for (uint64_t seed = first_seed; seed < first_seed + 24; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Pick pick{random};
    const TinyModel shape = shared_shape(random);
    const auto target = tiny_model(shape, seed);
    const auto draft = tiny_model(shape, seed, 0.05f, seed + 2);
    const double temperature = pick(0.0, 0.7, 1.0);
    std::vector<Job> jobs = random_jobs(random, pick(1, 7, 32), 64, temperature, 60, 60);
    if (random() % 2 == 0) mix_sampling(jobs, random, 64);
    const auto choose = [&](ExecutorOptions& options) {
      const int32_t num_ranks = pick(2, 3, 4);
      options.tensor_parallel_size = num_ranks;
      options.speculative.draft_tensor_parallel_size = pick(1, num_ranks);
    };
    expect_equals_plain({.target = target,
                         .drafter = draft,
                         .jobs = jobs,
                         .temperature = temperature,
                         .small_pool_bytes = (shape.num_kv_heads == 1 ? 400 : 900) << 10,
                         .choose = choose},
                        random, seed, tally);
  }
  tally.expect_all(5);
}

// As on GPUs, where each rank has its rows in memory of its own.
TEST(Ranks, WeightsOfTheirOwnHaveTheBitsOfOneRank) {
  const uint64_t first_seed = seed_from_env(1);
  for (uint64_t seed = first_seed; seed < first_seed + 24; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Pick pick{random};
    const TinyModel shape = shared_shape(random);
    const auto target = tiny_model(shape, seed);
    const auto draft = tiny_model(shape, seed, 0.05f, seed + 2);
    const std::vector<Job> jobs = random_jobs(random, 7, 64, pick(0.0, 0.8));
    Executor plain(target, nullptr, options_of(1, 0));
    const std::vector<Outcome> expected = run(plain, jobs);
    for (int32_t num_ranks = 1; num_ranks <= 4; ++num_ranks) {
      SCOPED_TRACE(std::to_string(num_ranks) + " ranks");
      const std::vector<RankMemory> memories(static_cast<size_t>(num_ranks),
                                             {.memory = &host_memory()});
      const auto split = [&](const Model& model, GpuShare share) {
        return split_over(model, Device::kCpu, memories, share);
      };
      Executor executor(split(*target, GpuShare::kPart),
                        split(*draft, pick(GpuShare::kCopy, GpuShare::kPart)),
                        options_of(num_ranks, 3));
      expect_same(run(executor, jobs), expected);
      EXPECT_EQ(executor.check_integrity(), "");
    }
  }
}

// Each rank computes all of a drafter or a part, from the weights of the whole or from its own.
TEST(Ranks, DraftersThatAreSharedDraftTheSameTokens) {
  std::vector<TinyDraftHead> heads = testing::all_heads();
  for (const TinyDraftHead& drafter : testing::all_block_drafters()) heads.push_back(drafter);
  TinyDraftHead latent = {.kind = DrafterKind::kMtp, .fc_norm = true, .owns_lm_head = true};
  latent.decoder.kv_lora_rank = 24;
  heads.push_back(latent);
  std::mt19937_64 random(9);
  int64_t num_accepted = 0;
  for (size_t which = 0; which < heads.size(); ++which) {
    SCOPED_TRACE("head " + std::to_string(which));
    TinyModel shape = {
        .num_qo_heads = 12, .num_kv_heads = 12, .head_dim = 8, .windows = {8, 0, 20}};
    shape.is_gemma = which % 2 == 0;
    heads[which].decoder.num_qo_heads = 12;
    heads[which].decoder.num_kv_heads = which % 3 == 0 ? 1 : 12;
    const auto target = random_raw_model(tiny_config_json(shape), which).build();
    const auto head = random_raw_head(heads[which], which + 1).build();
    const std::vector<Job> jobs = random_jobs(random, 8, 64, which % 2 * 0.8);
    if (head->config.drafter->kind == DrafterKind::kGemma4Mtp) {
      EXPECT_THAT(message_of<Unsupported>([&] { Executor(target, head, options_of(2, 3)); }),
                  AllOf(HasSubstr("tensor_parallel_size is 2"), HasSubstr("reads the KV")));
      continue;
    }
    Executor plain(target, nullptr, options_of(1, 0));
    const std::vector<Outcome> expected = run(plain, jobs);
    // With one rank the drafts are the same, too.
    std::vector<Outcome> on_one;
    const auto compare = [&](const std::shared_ptr<const Model>& of_target,
                             const std::shared_ptr<const Model>& of_draft, int32_t num_ranks,
                             int32_t draft_ranks, DraftDriver driver) {
      SCOPED_TRACE(std::to_string(num_ranks) + " ranks, the drafter on " +
                   std::to_string(draft_ranks));
      ExecutorOptions options = options_of(num_ranks, 4);
      options.speculative.draft_tensor_parallel_size = draft_ranks;
      options.speculative.draft_driver = driver;
      options.speculative.adaptive = false;  // which depends on times
      Executor executor(of_target, of_draft, options);
      const std::vector<Outcome> outcomes = run(executor, jobs);
      expect_same(outcomes, expected);
      if (num_ranks == 1) on_one = outcomes;
      for (size_t i = 0; i < jobs.size(); ++i) {
        EXPECT_EQ(outcomes[i].counters.num_accepted_tokens, on_one[i].counters.num_accepted_tokens);
        EXPECT_EQ(outcomes[i].counters.num_draft_tokens, on_one[i].counters.num_draft_tokens);
      }
      EXPECT_EQ(executor.check_integrity(), "");
    };
    constexpr auto kUnrolled = DraftDriver::kUnrolled;
    compare(target, head, 1, 1, kUnrolled);
    for (const Outcome& outcome : on_one) num_accepted += outcome.counters.num_accepted_tokens;
    compare(target, head, 2, 1, kUnrolled);
    for (const auto driver : {kUnrolled, DraftDriver::kReplay, DraftDriver::kWhile}) {
      compare(target, head, 2, 2, driver);
    }
    for (const int32_t num_ranks : {3, 4}) {
      compare(target, head, num_ranks, num_ranks, kUnrolled);
      const std::vector<RankMemory> memories(static_cast<size_t>(num_ranks),
                                             {.memory = &host_memory()});
      compare(split_over(*target, Device::kCpu, memories, GpuShare::kPart),
              split_over(*head, Device::kCpu, memories, GpuShare::kPart), num_ranks, num_ranks,
              DraftDriver::kEager);
    }
  }
  EXPECT_GT(num_accepted, 100);
}

// Rows of which only the winners are exchanged, and those whose logits are: for rejection, for a
// drafter that stops early, and for requests that change logits beside others that do not.
TEST(Ranks, EveryAcceptanceMethodHasTheTokensOfOneRank) {
  const auto target = tiny_model(TinyModel{.num_qo_heads = 12, .num_kv_heads = 12}, 1);
  const auto draft = tiny_model(TinyModel{.num_qo_heads = 12, .num_kv_heads = 12}, 1, 0.05f, 3);
  std::mt19937_64 random(8);
  int64_t num_accepted = 0;
  for (const auto method :
       {AcceptMethod::kCoupled, AcceptMethod::kStandard, AcceptMethod::kBlock}) {
    for (const double threshold : {0.0, 0.2}) {
      for (const bool mixes : {false, true}) {
        std::vector<Job> jobs = random_jobs(random, 8, 64, 0.8);
        if (mixes) mix_sampling(jobs, random, 64);
        std::vector<Outcome> expected;
        for (const int32_t num_ranks : {1, 2, 3}) {
          SCOPED_TRACE(std::to_string(num_ranks) + " ranks, method " +
                       std::to_string(static_cast<int>(method)));
          ExecutorOptions options = options_of(num_ranks, 3);
          options.speculative.rejection_sample_method = method;
          options.speculative.draft_stop_threshold = threshold;
          options.speculative.draft_driver = DraftDriver::kWhile;  // which can stop early
          options.speculative.draft_tensor_parallel_size = num_ranks;
          options.speculative.adaptive = false;
          Executor executor(target, draft, options);
          const std::vector<Outcome> outcomes = run(executor, jobs);
          if (num_ranks == 1) expected = outcomes;
          expect_same(outcomes, expected);
          for (size_t i = 0; i < jobs.size(); ++i) {
            EXPECT_EQ(outcomes[i].counters.num_accepted_tokens,
                      expected[i].counters.num_accepted_tokens);
            num_accepted += outcomes[i].counters.num_accepted_tokens;
          }
        }
      }
    }
  }
  EXPECT_GT(num_accepted, 500);
}

TEST(Ranks, ADrafterIsSharedAsAskedOrRefused) {
  const auto target = tiny_model(TinyModel{.num_qo_heads = 12, .num_kv_heads = 12}, 1);
  const auto draft = tiny_model(TinyModel{.num_qo_heads = 4, .num_kv_heads = 2}, 2);
  const auto options = [](int32_t num_ranks, int32_t draft_ranks) {
    ExecutorOptions o = options_of(num_ranks, 2);
    o.speculative.draft_tensor_parallel_size = draft_ranks;
    return o;
  };
  const auto refusal = [&](int32_t num_ranks, int32_t draft_ranks) {
    return message_of<Error>([&] { Executor(target, draft, options(num_ranks, draft_ranks)); });
  };
  EXPECT_THAT(refusal(4, 2), AllOf(HasSubstr("draft_tensor_parallel_size is 2"),
                                   HasSubstr("tensor_parallel_size is 4"), HasSubstr("1, where"),
                                   HasSubstr("4, where")));
  EXPECT_THAT(refusal(1, 2), HasSubstr("draft_tensor_parallel_size is 2"));
  EXPECT_THAT(refusal(2, -1), HasSubstr("draft_tensor_parallel_size is -1; allowed: 0 to 8"));
  EXPECT_THAT(
      refusal(3, 3),
      AllOf(HasSubstr("draft_tensor_parallel_size is 3"), HasSubstr("4 query heads and 2 KV heads"),
            HasSubstr("with tensor_parallel_size 3: 1"), HasSubstr("both can be 1, 2, 4")));
  EXPECT_EQ(drafter_share(*draft, 3, 0), GpuShare::kCopy);
  EXPECT_EQ(drafter_share(*draft, 2, 0), GpuShare::kCopy);
  EXPECT_EQ(drafter_share(*draft, 2, 1), GpuShare::kCopy);
  EXPECT_EQ(drafter_share(*draft, 2, 2), GpuShare::kPart);
  EXPECT_EQ(drafter_share(*draft, 1, 1), GpuShare::kCopy);
  const std::vector<RankMemory> memories(2, {.memory = &host_memory()});
  for (const GpuShare share : {GpuShare::kPart, GpuShare::kCopy}) {
    const bool has_parts = share == GpuShare::kPart;
    const auto split = split_over(*draft, Device::kCpu, memories, share);
    const auto on_ranks = split_over(*target, Device::kCpu, memories, GpuShare::kPart);
    EXPECT_THAT(message_of<InvalidArgument>(
                    [&] { Executor(on_ranks, split, options(2, has_parts ? 1 : 2)); }),
                AllOf(HasSubstr(has_parts ? "has a part of the drafter" : "has all of the drafter"),
                      HasSubstr(has_parts ? "allowed: 2, 0" : "allowed: 1, 0")));
  }
}

// Its ranks have the parts that they draft with.
TEST(Ranks, ATargetThatIsSplitMayBeItsOwnDrafter) {
  const auto target = tiny_model(TinyModel{.num_qo_heads = 4, .num_kv_heads = 4}, 1);
  const std::vector<RankMemory> memories(2, {.memory = &host_memory()});
  const auto split = split_over(*target, Device::kCpu, memories, GpuShare::kPart);
  std::mt19937_64 random(3);
  const std::vector<Job> jobs = random_jobs(random, 6, 64, 0.8);
  Executor plain(target, nullptr, options_of(1, 0));
  ExecutorOptions options = options_of(2, 3);
  options.speculative.adaptive = false;
  Executor self(split, split, options);
  const std::vector<Outcome> outcomes = run(self, jobs);
  expect_same(outcomes, run(plain, jobs));
  int64_t num_drafts = 0;
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.counters.num_accepted_tokens, outcome.counters.num_draft_tokens);
    num_drafts += outcome.counters.num_draft_tokens;
  }
  EXPECT_GT(num_drafts, 20);
}

// A prediction by the bytes of published drafters, for two ranks and for four.
TEST(Ranks, ADrafterIsSharedWhereItsWeightsTakeLongerThanExchanges) {
  const auto is_shared = [](const TinyModel& decoder, const TinyDraftHead* head) {
    TinyDraftHead own;
    if (head != nullptr) own = *head;
    own.decoder = decoder;
    const DecoderConfig config = parse_decoder_config(
        head != nullptr ? testing::head_config_json(own) : tiny_config_json(decoder));
    return std::pair(is_faster_shared(config, DType::kBFloat16, 2),
                     is_faster_shared(config, DType::kBFloat16, 4));
  };
  using Both = std::pair<bool, bool>;
  TinyDraftHead eagle3 = {.kind = DrafterKind::kEagle3,
                          .target_hidden = 4096,
                          .owns_lm_head = true,
                          .draft_vocab_size = 32000};
  const TinyModel of_qwen3_8b = {.vocab_size = 151936,
                                 .hidden = 4096,
                                 .num_qo_heads = 32,
                                 .num_kv_heads = 8,
                                 .head_dim = 128,
                                 .intermediate = 12288,
                                 .windows = {0},
                                 .is_gemma = false};
  EXPECT_EQ(is_shared(of_qwen3_8b, &eagle3), Both(true, true));
  const TinyModel gemma3_270m = {.vocab_size = 262144,
                                 .hidden = 640,
                                 .num_qo_heads = 4,
                                 .num_kv_heads = 1,
                                 .head_dim = 256,
                                 .intermediate = 2048,
                                 .windows = std::vector<int32_t>(18, 0)};
  EXPECT_EQ(is_shared(gemma3_270m, nullptr), Both(false, false));
  const TinyModel qwen3_4b = {.vocab_size = 151936,
                              .hidden = 2560,
                              .num_qo_heads = 32,
                              .num_kv_heads = 8,
                              .head_dim = 128,
                              .intermediate = 9728,
                              .windows = std::vector<int32_t>(36, 0),
                              .is_gemma = false};
  EXPECT_EQ(is_shared(qwen3_4b, nullptr), Both(true, true));
}

TEST(Ranks, HitsOfThePrefixCacheEqualMisses) {
  std::mt19937_64 random(4);
  const auto model = tiny_model(
      TinyModel{.num_qo_heads = 12, .num_kv_heads = 6, .head_dim = 8, .windows = {8, 0, 20}}, 5);
  ExecutorOptions never = options_of(1, 0);
  never.enable_prefix_caching = false;
  ExecutorOptions cached = options_of(3, 3);
  cached.kv_cache_bytes = 600 << 10;
  cached.poison_freed_blocks = true;
  Executor without(model, nullptr, never);
  Executor with(model, tiny_model({.hidden = 16, .num_qo_heads = 2, .num_kv_heads = 1}, 6), cached);
  testing::expect_hits_equal_misses(
      without, with, {.num_rounds = 6, .longest_new = 30, .longest_prompt = 120, .most_tokens = 20},
      random);
  EXPECT_GT(with.stats().num_prefix_hit_tokens, 500);
}

TEST(Ranks, SamplesShareTheirPrompt) {
  const auto model =
      tiny_model(TinyModel{.num_qo_heads = 4, .num_kv_heads = 2, .windows = {8, 0}}, 5);
  ExecutorOptions options = options_of(2, 3);
  options.poison_freed_blocks = true;
  Executor executor(model, model, options);
  EXPECT_GT(testing::expect_samples_equal_requests(executor, 50), 0);
}

// The logits or hidden states of a prompt.
std::vector<float> values_of(Executor& executor, Request request) {
  static_cast<void>(executor.add_request(std::move(request)));
  for (;;) {
    for (const RequestEvent& event : executor.poll(100)) {
      if (event.finish_reason == FinishReason::kNone) continue;
      EXPECT_EQ(event.error, "");
      if (event.logits != nullptr) return *event.logits;
      const DeviceValues& values = event.hidden_states;
      int64_t count = 1;
      for (const int64_t size : values.shape) count *= size;
      return {values.data.get(), values.data.get() + count};
    }
  }
}

TEST(Ranks, LogitsAndHiddenStatesOfPromptsAreThoseOfOneRank) {
  const auto model = tiny_model(
      TinyModel{.num_qo_heads = 12, .num_kv_heads = 12, .head_dim = 8, .windows = {8, 0, 20}}, 5);
  std::vector<int32_t> prompt;
  for (int32_t i = 0; i < 150; ++i) prompt.push_back(i * 7 % 64);
  std::vector<std::vector<float>> expected;
  for (const int32_t num_ranks : {1, 2, 3, 4}) {
    Executor executor(model, nullptr, options_of(num_ranks, 0));
    const std::vector<std::vector<float>> values = {
        values_of(executor, {.prompt = prompt, .score_prompt = true}),
        values_of(executor, {.prompt = prompt, .hidden_layers = {0, 1, 3}})};
    if (num_ranks == 1) expected = values;
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(values[i].size(), expected[i].size());
      ASSERT_GT(values[i].size(), 0u);
      EXPECT_EQ(std::memcmp(values[i].data(), expected[i].data(), values[i].size() * sizeof(float)),
                0);
    }
  }
}

TEST(Ranks, AModelThatCannotBeSharedSaysWhichNumbersWork) {
  const auto refusal = [](const TinyModel& shape, int32_t num_ranks) {
    const auto model = tiny_model(shape, 1);
    return message_of<Unsupported>([&] { Executor(model, nullptr, options_of(num_ranks, 0)); });
  };
  EXPECT_THAT(
      refusal({.num_qo_heads = 4, .num_kv_heads = 2}, 3),
      AllOf(HasSubstr("tensor_parallel_size is 3"), HasSubstr("4 query heads and 2 KV heads"),
            HasSubstr("allowed for this model: 1, 2, 4")));
  EXPECT_THAT(refusal({.num_qo_heads = 12, .num_kv_heads = 6, .head_dim = 8}, 4),
              HasSubstr("allowed for this model: 1, 2, 3, 6"));
  EXPECT_THAT(refusal({.windows = {0}, .is_gemma = false, .kv_lora_rank = 24}, 5),
              AllOf(HasSubstr("4 heads in its attention, latent"),
                    HasSubstr("allowed for this model: 1, 2, 3, 4")));
  const auto model = tiny_model({}, 1);
  for (const int32_t num_ranks : {0, -1, 9}) {
    EXPECT_THAT(
        message_of<InvalidArgument>([&] { Executor(model, nullptr, options_of(num_ranks, 0)); }),
        HasSubstr("tensor_parallel_size is " + std::to_string(num_ranks) + "; allowed: 1 to 8"));
  }
  ExecutorOptions null = options_of(2, 0);
  null.use_null_device = true;
  EXPECT_THAT(message_of<InvalidArgument>([&] { Executor(model, nullptr, null); }),
              HasSubstr("use_null_device"));
  Model on_gpu;
  on_gpu.config = model->config;
  on_gpu.device = Device::kCuda;
  EXPECT_THAT(
      message_of<InvalidArgument>([&] { check_options(options_of(2, 0), on_gpu, nullptr); }),
      AllOf(HasSubstr("tensor_parallel_size is 2"), HasSubstr("loaded to 1 GPU"),
            HasSubstr("split_model")));
}

TEST(Ranks, MemoryIsThatOfAllRanks) {
  const auto model = tiny_model({.num_qo_heads = 4, .num_kv_heads = 4}, 1);
  ExecutorOptions options = options_of(1, 0);
  options.kv_cache_bytes = 0;
  Executor one(model, nullptr, options);
  options.tensor_parallel_size = 4;
  Executor four(model, nullptr, options);
  const MemoryReport of_one = one.memory_report();
  const MemoryReport of_four = four.memory_report();
  EXPECT_EQ(of_four.target_weight_bytes, of_one.target_weight_bytes);
  EXPECT_EQ(of_four.groups[0].num_kv_heads, 1);
  EXPECT_EQ(of_four.kv_pool_bytes % 4, 0);
  EXPECT_GT(of_four.workspace.at("exchange of ranks"), 0);
  EXPECT_EQ(of_four.workspace.at("results"), 4 * of_one.workspace.at("results"));
  ASSERT_EQ(of_four.ranks.size(), 4U);
  int64_t workspace = 0;
  for (const MemoryReport::Rank& rank : of_four.ranks) {
    EXPECT_EQ(rank.gpu, -1);
    EXPECT_EQ(4 * rank.kv_pool_bytes, of_four.kv_pool_bytes);
    workspace += rank.workspace_bytes;
  }
  EXPECT_EQ(workspace, of_four.workspace_bytes);
}

}  // namespace
}  // namespace paceline
