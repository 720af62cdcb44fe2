// SPDX-License-Identifier: Apache-2.0
// Engines whose ranks are GPUs: any number of them has the bits of one. Where there are fewer GPUs
// than ranks, the ranks share the first one. Skipped without a GPU, unless PACELINE_REQUIRE_GPU=1.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.h>
#include <paceline/executor.h>

#include "model/weights/split_model.h"
#include "support/draft_head_checks.h"
#include "support/engine_checks.h"
#include "support/errors.h"
#include "support/format_tensors.h"
#include "support/gpu.h"
#include "support/jobs.h"
#include "support/logprob_checks.h"
#include "support/raw_models.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

using ::testing::AllOf;
using testing::expect_same;
using testing::gpus_for;
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
using testing::run;
using testing::seed_from_env;
using testing::Tally;
using testing::tiny_model;
using testing::TinyModel;

class CudaRanks : public testing::GpuTest {};

TinyModel shape_of(std::mt19937_64& random) {
  const Pick pick{random};
  TinyModel shape = {
      .hidden = pick(64, 512),
      .num_qo_heads = 4,
      .num_kv_heads = pick(1, 2, 4),
      .head_dim = 64,
      .intermediate = pick(96, 1024),
      .max_position = 2048,
      .windows = pick(0, 1) == 0 ? std::vector<int32_t>{0, 0} : std::vector<int32_t>{8, 0, 140},
      .is_gemma = pick(true, false),
      .has_bias = pick(true, false)};
  switch (random() % 4) {
    case 0:
      make_gemma4(shape, random);
      break;
    case 1:
      make_mixture(shape, random);
      break;
    case 2:
      make_latent(shape, random);
      break;
    default:
      break;
  }
  return shape;
}

ExecutorOptions options_of(int32_t num_ranks, int32_t k) {
  ExecutorOptions options = testing::gpu_engine_options(k, 16, 64 << 20);
  options.tensor_parallel_size = num_ranks;
  options.hang_timeout_s = 30;
  return options;
}

std::shared_ptr<const Model> on_gpus(const std::shared_ptr<const Model>& model, int32_t num_ranks,
                                     GpuShare share) {
  return split_over_gpus(*model, gpus_for(num_ranks), share);
}

// The numbers of ranks that a test tries: on one GPU two are enough.
std::vector<int32_t> rank_counts() {
  return cuda_status().num_gpus >= 4 ? std::vector<int32_t>{2, 4} : std::vector<int32_t>{2};
}

TEST_F(CudaRanks, AnyNumberOfThemHasTheBitsOfOne) {
  const uint64_t first_seed = seed_from_env(1);
  const uint64_t num_cells = testing::test_level() >= 3 ? 100 : 24;
  Tally tally;
  for (uint64_t seed = first_seed; seed < first_seed + num_cells; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Pick pick{random};
    const TinyModel shape = shape_of(random);
    const auto model = [&](float noise, uint64_t noise_seed, Device device) {
      return tiny_model(shape, seed, noise, noise_seed, DType::kBFloat16, device);
    };
    const double temperature = pick(0.0, 0.7, 1.0);
    std::vector<Job> jobs = random_jobs(random, pick(1, 7, 20), 64, temperature, 300, 80);
    if (random() % 2 == 0) mix_sampling(jobs, random, 64);
    mix_logprobs(jobs, random, 5);
    ExecutorOptions options = options_of(1, 0);
    options.max_logprobs = 5;
    Executor plain(model(0, 0, Device::kCuda), nullptr, options);
    const std::vector<Outcome> expected = run(plain, jobs);
    const auto target = model(0, 0, Device::kCpu);
    const auto draft = model(0.03f, seed + 2, Device::kCpu);
    for (const int32_t num_ranks : rank_counts()) {
      SCOPED_TRACE(std::to_string(num_ranks) + " ranks");
      const int32_t k = pick(0, 1, 3, 7);
      options = options_of(num_ranks, k);
      options.max_logprobs = 5;
      options.prefill_chunk_size = pick(0, 16, 64);
      options.poison_freed_blocks = random() % 2 == 0;
      options.speculative.draft_driver = pick(DraftDriver::kUnrolled, DraftDriver::kReplay,
                                              DraftDriver::kEager, DraftDriver::kWhile);
      const GpuShare share = pick(GpuShare::kCopy, GpuShare::kPart);
      Executor executor(on_gpus(target, num_ranks, GpuShare::kPart),
                        k > 0 ? on_gpus(draft, num_ranks, share) : nullptr, options);
      const std::vector<Outcome> outcomes = run(executor, jobs);
      expect_same(outcomes, expected);
      EXPECT_EQ(executor.check_integrity(), "");
      tally.add(executor, outcomes);
    }
  }
  EXPECT_GT(tally.accepted, 100);
  std::printf("%lld of %lld drafts accepted\n", static_cast<long long>(tally.accepted),
              static_cast<long long>(tally.drafted));
}

TEST_F(CudaRanks, DraftersThatAreSharedDraftTheSameTokens) {
  std::vector<testing::TinyDraftHead> heads = testing::all_heads(64, 20);
  for (const auto& drafter : testing::all_block_drafters()) heads.push_back(drafter);
  std::mt19937_64 random(9);
  for (size_t which = 0; which < heads.size(); ++which) {
    SCOPED_TRACE("head " + std::to_string(which));
    const TinyModel shape = {.num_qo_heads = 4,
                             .num_kv_heads = 4,
                             .head_dim = 64,
                             .max_position = 1024,
                             .windows = {8, 0, 20},
                             .is_gemma = which % 2 == 0};
    heads[which].decoder.num_qo_heads = 4;  // which four ranks can share
    heads[which].decoder.num_kv_heads = which % 3 == 0 ? 1 : 4;
    const testing::RawModel raw =
        testing::random_raw_model(testing::tiny_config_json(shape), which);
    const testing::RawModel raw_head = testing::random_raw_head(heads[which], which + 1);
    const std::vector<Job> jobs = random_jobs(random, 8, 64, which % 2 * 0.8, 100, 60);
    Executor plain(raw.build(DType::kBFloat16, Device::kCuda), nullptr, options_of(1, 0));
    const std::vector<Outcome> expected = run(plain, jobs);
    const auto options = [](int32_t num_ranks) {
      ExecutorOptions o = options_of(num_ranks, 4);
      o.speculative.adaptive = false;  // which depends on times
      return o;
    };
    if (heads[which].kind == DrafterKind::kGemma4Mtp) {
      const auto target = on_gpus(raw.build(DType::kBFloat16), 2, GpuShare::kPart);
      const auto head = on_gpus(raw_head.build(DType::kBFloat16), 2, GpuShare::kCopy);
      EXPECT_THAT(message_of<Unsupported>([&] { Executor(target, head, options(2)); }),
                  HasSubstr("reads the KV"));
      continue;
    }
    Executor on_one(raw.build(DType::kBFloat16, Device::kCuda),
                    raw_head.build(DType::kBFloat16, Device::kCuda), options(1));
    const std::vector<Outcome> speculative = run(on_one, jobs);
    expect_same(speculative, expected);
    for (const int32_t num_ranks : rank_counts()) {
      for (const GpuShare share : {GpuShare::kCopy, GpuShare::kPart}) {
        SCOPED_TRACE(std::to_string(num_ranks) + " ranks, each with " +
                     (share == GpuShare::kPart ? "a part" : "all") + " of the drafter");
        Executor executor(on_gpus(raw.build(DType::kBFloat16), num_ranks, GpuShare::kPart),
                          on_gpus(raw_head.build(DType::kBFloat16), num_ranks, share),
                          options(num_ranks));
        const std::vector<Outcome> outcomes = run(executor, jobs);
        expect_same(outcomes, expected);
        for (size_t i = 0; i < jobs.size(); ++i) {
          EXPECT_EQ(outcomes[i].counters.num_accepted_tokens,
                    speculative[i].counters.num_accepted_tokens);
          EXPECT_EQ(outcomes[i].counters.num_draft_tokens,
                    speculative[i].counters.num_draft_tokens);
        }
        EXPECT_EQ(executor.check_integrity(), "");
      }
    }
  }
}

// However weights arrive, a GPU has the bytes that split_model copies to it, also after an update.
// rank_weights_test compares those with the whole model.
TEST_F(CudaRanks, EveryWayOfLoadingGivesTheSameBytes) {
  for (const std::string& json :
       {testing::mixture_config(), testing::latent_config(), testing::deepseek_config()}) {
    const testing::FormatTensors tensors = testing::format_tensors(json, 3);
    const std::vector<RankMemory> memories = memories_of(gpus_for(2));
    for (const GpuShare share : {GpuShare::kPart, GpuShare::kCopy}) {
      // The bytes of a model that is filled on the CPU and then split, and of one that is filled on
      // the GPUs.
      const auto split = [&](const auto& fill) {
        ModelBuilder builder(json, DType::kBFloat16);
        fill(builder);
        return model_weight_arena(*split_over(*builder.finish(), Device::kCuda, memories, share));
      };
      const auto made = [&](const auto& fill) {
        ModelBuilder builder = builder_over(json, DType::kBFloat16, Device::kCuda, memories, share);
        fill(builder);
        return builder.finish();
      };
      const auto put = [&](ModelBuilder& builder) { put_all(builder, tensors); };
      const auto read = [&](ModelBuilder& builder) {
        for (const auto& [name, t] : tensors) {
          builder.put(name, t.dtype, t.shape, [&](int64_t first, std::span<std::byte> to) {
            std::memcpy(to.data(), t.bytes.data() + first, to.size());
          });
        }
      };
      const auto draw = [&](ModelBuilder& builder) { builder.fill_dummy(5); };
      const std::vector<std::byte> expected = split(put);
      EXPECT_EQ(model_weight_arena(*made(put)), expected);
      EXPECT_EQ(model_weight_arena(*made(read)), expected);
      EXPECT_EQ(model_weight_arena(*made(draw)), split(draw));
      const auto other =
          made([&](ModelBuilder& builder) { put_all(builder, testing::format_tensors(json, 4)); });
      EXPECT_NE(model_weight_arena(*other), expected);
      const ModelUpdate update = {.model = other, .tensors = testing::named_tensors(tensors)};
      update_models({&update, 1});
      EXPECT_EQ(model_weight_arena(*other), expected);
    }
  }
}

std::vector<NamedTensor> named_tensors(const testing::RawModel& raw) {
  std::vector<NamedTensor> named;
  for (const auto& [name, t] : raw.tensors) {
    named.push_back({.name = name, .shape = t.shape, .data = t.values.data()});
  }
  return named;
}

// Drafters change, and their weights and those of the target, while requests run on every rank.
TEST_F(CudaRanks, DraftersAndWeightsChangeWhileRequestsRun) {
  const TinyModel shape = {.num_qo_heads = 4,
                           .num_kv_heads = 4,
                           .head_dim = 64,
                           .max_position = 1024,
                           .windows = {8, 0, 20},
                           .is_gemma = false};
  const auto raw = [&](uint64_t seed) {
    return testing::random_raw_model(testing::tiny_config_json(shape), seed);
  };
  const testing::RawModel first = raw(1);
  const testing::RawModel second = raw(2);
  std::mt19937_64 random(3);
  const std::vector<Job> jobs = random_jobs(random, 12, 64, 0.8, 100, 80);
  const auto plain = [&](const testing::RawModel& model) {
    Executor executor(model.build(DType::kBFloat16, Device::kCuda), nullptr, options_of(1, 0));
    return run(executor, jobs);
  };
  const std::vector<Outcome> expected = plain(first);
  for (const int32_t num_ranks : rank_counts()) {
    SCOPED_TRACE(std::to_string(num_ranks) + " ranks");
    const auto target = on_gpus(first.build(DType::kBFloat16), num_ranks, GpuShare::kPart);
    const auto good = on_gpus(first.build(DType::kBFloat16), num_ranks, GpuShare::kCopy);
    const auto bad = on_gpus(second.build(DType::kBFloat16), num_ranks, GpuShare::kCopy);
    const ModelUpdate to_first = {.model = bad, .tensors = named_tensors(first)};
    const ModelUpdate to_second = {.model = bad, .tensors = named_tensors(second)};
    Executor executor(target, good, options_of(num_ranks, 3));
    const int64_t bytes = executor.memory_report().kv_pool_bytes;
    std::atomic<bool> is_over = false;
    std::thread changing([&] {
      try {
        for (int32_t i = 0; i < 12; ++i) {
          executor.set_drafter(nullptr, {});
          executor.set_drafter(bad, {.num_speculative_tokens = 1 + i % 4});
          const ModelUpdate& update = i % 2 == 0 ? to_first : to_second;
          executor.update_drafter([&] { update_models({&update, 1}); });
          executor.set_drafter(good, {.num_speculative_tokens = 2});
        }
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
      is_over = true;
    });
    do {
      expect_same(run(executor, jobs), expected);
    } while (!is_over);
    changing.join();
    EXPECT_EQ(executor.check_integrity(), "");
    EXPECT_EQ(executor.memory_report().kv_pool_bytes, bytes);
    const ModelUpdate update = {.model = target, .tensors = named_tensors(second)};
    EXPECT_EQ(executor.while_idle([&] { update_models({&update, 1}); }), 0);
    expect_same(run(executor, jobs), plain(second));
  }
}

TEST_F(CudaRanks, WhatDoesNotFitTogetherIsRefused) {
  const TinyModel shape = {.head_dim = 64, .max_position = 1024};
  const auto on_cpu = tiny_model(shape, 1, 0, 0, DType::kBFloat16);
  const auto on_gpu = tiny_model(shape, 1, 0, 0, DType::kBFloat16, Device::kCuda);
  const auto refusal = [](const auto& body) { return message_of<Error>(body); };
  EXPECT_THAT(
      refusal([&] { Executor(on_gpu, nullptr, options_of(2, 0)); }),
      AllOf(HasSubstr("tensor_parallel_size is 2"), HasSubstr("1 GPU"), HasSubstr("split_model")));
  const std::vector<int32_t> twice = {0, 0};
  EXPECT_THAT(refusal([&] { static_cast<void>(split_model(on_cpu, twice, GpuShare::kPart)); }),
              HasSubstr("gpus has 0 twice"));
  const std::vector<int32_t> missing = {0, 99};
  EXPECT_THAT(refusal([&] { static_cast<void>(split_model(on_cpu, missing, GpuShare::kPart)); }),
              HasSubstr("there is no GPU 99"));
  EXPECT_THAT(refusal([&] { static_cast<void>(split_model(on_gpu, {}, GpuShare::kPart)); }),
              HasSubstr("a model on the CPU"));
  const auto split = on_gpus(on_cpu, 2, GpuShare::kPart);
  ExecutorOptions whole = options_of(2, 2);
  whole.speculative.draft_tensor_parallel_size = 1;
  Executor self(split, split, options_of(2, 2));
  EXPECT_EQ(self.check_integrity(), "");
  EXPECT_THAT(refusal([&] { Executor(split, split, whole); }),
              AllOf(HasSubstr("draft_tensor_parallel_size is 1"), HasSubstr("has a part")));
  EXPECT_THAT(refusal([&] { Executor(split, on_gpu, options_of(2, 2)); }),
              HasSubstr("was loaded to 1 GPU"));
  EXPECT_THAT(refusal([&] { Executor(split, nullptr, options_of(1, 0)); }),
              HasSubstr("was loaded to 2 GPUs"));
}

}  // namespace
}  // namespace paceline
