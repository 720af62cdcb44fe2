// SPDX-License-Identifier: Apache-2.0
// The whole engine on a GPU in bfloat16: speculative output equals plain output under any other
// load. Skipped without a GPU, unless PACELINE_REQUIRE_GPU=1.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <random>
#include <string>
#include <utility>

#include <paceline/error.h>
#include <paceline/executor.h>

#include "support/all_accepted.h"
#include "support/engine_checks.h"
#include "support/errors.h"
#include "support/gpu.h"
#include "support/jobs.h"
#include "support/logprob_checks.h"
#include "support/samples.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

using testing::apart;
using testing::expect_all_accepted;
using testing::Job;
using testing::make_gemma4;
using testing::make_latent;
using testing::make_mixture;
using testing::message_of;
using testing::mix_logprobs;
using testing::mix_sampling;
using testing::most_shared_tokens;
using testing::Outcome;
using testing::Pick;
using testing::random_jobs;
using testing::run;
using testing::run_samples;
using testing::same_logprobs;
using testing::sampled;
using testing::SampledJob;
using testing::seed_from_env;
using testing::Tally;
using testing::tiny_model;
using testing::TinyModel;

class CudaEngine : public testing::GpuTest {};

TinyModel shape_of(std::vector<int32_t> windows) {
  return {.hidden = 64,
          .head_dim = 64,
          .intermediate = 96,
          .max_position = 2048,
          .windows = std::move(windows)};
}

std::shared_ptr<const Model> model_of(const TinyModel& shape, uint64_t seed, float noise = 0,
                                      uint64_t noise_seed = 0) {
  return tiny_model(shape, seed, noise, noise_seed, DType::kBFloat16, Device::kCuda);
}

ExecutorOptions options_of(int32_t k) { return testing::gpu_engine_options(k, 64, 256 << 20); }

// The model drafts for itself, so the target must accept every draft.
void expect_self_draft(const std::shared_ptr<const Model>& model, const ExecutorOptions& options,
                       double temperature) {
  std::mt19937_64 random(11);
  Executor executor(model, model, options);
  expect_all_accepted(executor, random_jobs(random, 20, 64, temperature, 300, 300), 500);
}

TEST_F(CudaEngine, SelfDraftAcceptsEverything) {
  TinyModel gemma4 = shape_of({8, 0, 200, 8, 0});
  gemma4.is_gemma4 = true;
  gemma4.head_dim = 256;
  gemma4.full_head_dim = 512;
  gemma4.full_kv_heads = 1;
  gemma4.k_eq_v = true;
  gemma4.num_shared = 2;
  gemma4.per_layer_size = 8;
  // The shape that has a kernel of its own, and one that has not.
  TinyModel latent = shape_of({0, 8, 0});
  latent.is_gemma = false;
  latent.kv_lora_rank = 512;
  latent.qk_rope_head_dim = 64;
  latent.q_lora_rank = 24;
  TinyModel small_latent = latent;
  small_latent.kv_lora_rank = 56;
  small_latent.q_lora_rank = 0;
  for (const TinyModel& shape : {shape_of({0, 0}), shape_of({8, 200}), shape_of({8, 0, 130}),
                                 gemma4, latent, small_latent}) {
    const auto model = model_of(shape, 7);
    for (const double temperature : {0.0, 1.0}) {
      for (const int32_t k : {1, 3, 8, 16}) {
        expect_self_draft(model, options_of(k), temperature);
      }
    }
  }
}

// One cell of the matrix: the test randomizes everything that must not affect the output.
TEST_F(CudaEngine, SpeculativeEqualsPlain) {
  const uint64_t first_seed = seed_from_env(1);
  const uint64_t num_cells = testing::test_level() >= 3 ? 400 : 60;
  Tally tally;
  int64_t num_rated = 0;
  int64_t num_prompt_rated = 0;
  for (uint64_t seed = first_seed; seed < first_seed + num_cells; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Pick pick{random};
    TinyModel shape = shape_of(pick(0, 1, 2) == 0  ? std::vector<int32_t>{0, 0}
                               : random() % 2 == 0 ? std::vector<int32_t>{8, 0, 140}
                                                   : std::vector<int32_t>{20, 200});
    shape.is_gemma = random() % 2 == 0;
    shape.num_kv_heads = pick(1, 2, 4);
    std::mt19937_64 switches(seed);
    const uint64_t family = switches() % 4;
    if (family == 0) make_gemma4(shape, switches);
    if (family == 1) make_mixture(shape, switches);
    if (family == 2) make_latent(shape, switches);
    TinyModel draft_shape = shape;
    const bool is_other = random() % 3 == 0;
    if (is_other) {
      draft_shape = TinyModel{.hidden = 32,
                              .num_qo_heads = 2,
                              .num_kv_heads = 1,
                              .head_dim = 128,
                              .max_position = 2048,
                              .windows = {5, 0, 130},
                              .is_gemma = random() % 2 == 0};
      const uint64_t draft_family = switches() % 4;
      if (draft_family == 0) make_gemma4(draft_shape, switches);
      if (draft_family == 1) make_mixture(draft_shape, switches);
    }
    const auto target = model_of(shape, seed);
    const auto draft =
        is_other ? model_of(draft_shape, seed + 1) : model_of(draft_shape, seed, 0.03f, seed + 2);
    const double temperature = pick(0.0, 0.7, 1.0);
    const auto num_jobs = pick(1, 7, 64);
    const int32_t longest = num_jobs == 64 ? 100 : 500;
    std::vector<Job> jobs = random_jobs(random, num_jobs, 64, temperature, longest, 150);
    if (num_jobs < 64) {  // a chunk of 512 divides this one
      for (size_t at = jobs[0].prompt.size(); at < 530; ++at) {
        jobs[0].prompt.push_back(static_cast<int32_t>(switches() % 64));
      }
    }
    if (switches() % 2 == 0) mix_sampling(jobs, switches, 64);
    const int32_t max_logprobs = std::array{0, 5, 64}[switches() % 3];
    if (max_logprobs > 0) mix_logprobs(jobs, switches, max_logprobs);

    ExecutorOptions options = options_of(0);
    options.max_logprobs = max_logprobs;
    Executor plain(target, nullptr, options);
    const std::vector<Outcome> expected = run(plain, jobs);
    EXPECT_EQ(plain.check_integrity(), "");

    const auto k = static_cast<int32_t>(1 + random() % 16);
    options = options_of(k);
    options.block_size = pick(8, 16, 32);
    options.prefill_chunk_size = pick(0, 16, 512);
    options.speculative.draft_driver = pick(DraftDriver::kUnrolled, DraftDriver::kReplay,
                                            DraftDriver::kEager, DraftDriver::kWhile);
    if (options.speculative.draft_driver == DraftDriver::kWhile && random() % 2 == 0) {
      options.speculative.draft_stop_threshold = pick(0.2, 0.6);
    }
    options.poison_freed_blocks = true;
    options.max_logprobs = max_logprobs;
    if (random() % 2 == 0) options.max_num_seqs = pick(3, 17);
    if (random() % 4 == 0) options.host_delay_max_us = 2000;
    if (random() % 2 == 0) options.draft_schedule_seed = random();
    // Forces preemption: room for two or three full sequences, also for a Gemma 4 with its larger
    // heads and twice the layers. With many sequences, each is half as long.
    const bool is_large = shape.is_gemma4 || draft_shape.is_gemma4;
    const int32_t unit = (is_large ? 23 : 20) - (num_jobs == 64 ? 1 : 0);
    if (random() % 2 == 0) options.kv_cache_bytes = pick(4, 6) << unit;
    Executor speculative(target, draft, options);
    const std::vector<Job> neighbours =
        random() % 2 == 0 ? random_jobs(random, 6, 64, temperature) : std::vector<Job>{};
    std::mt19937_64 own(seed);
    mix_num_drafts(jobs, own, k);
    const std::vector<Outcome> actual = run(speculative, jobs, neighbours, seed);
    for (size_t i = 0; i < jobs.size(); ++i) {
      expect_own_drafts(jobs[i], actual[i], k);
      ASSERT_EQ(actual[i].tokens, expected[i].tokens)
          << "job " << i << " k " << k << " driver "
          << static_cast<int>(options.speculative.draft_driver);
      EXPECT_EQ(actual[i].reason, expected[i].reason);
      ASSERT_TRUE(same_logprobs(actual[i].logprobs, expected[i].logprobs)) << "job " << i;
      ASSERT_TRUE(same_logprobs(actual[i].prompt_logprobs, expected[i].prompt_logprobs))
          << "job " << i;
      num_rated += static_cast<int64_t>(actual[i].logprobs.size());
      num_prompt_rated += static_cast<int64_t>(actual[i].prompt_logprobs.size());
    }
    EXPECT_EQ(speculative.check_integrity(), "");
    tally.add(speculative, actual);
  }
  // The cells must exercise both verdicts, and preemption.
  tally.expect_all();
  EXPECT_GT(num_rated, 1000);
  EXPECT_GT(num_prompt_rated, 1000);
  std::printf("%lld of %lld drafts accepted, %lld preemptions\n",
              static_cast<long long>(tally.accepted), static_cast<long long>(tally.drafted),
              static_cast<long long>(tally.preemptions));
}

TEST_F(CudaEngine, BadLogitsEndOneRequestOnly) {
  TinyModel shape = shape_of({8, 0, 130});
  shape.is_gemma = false;
  const auto sound = model_of(shape, 3);
  shape.nan_token = 63;
  const auto broken = model_of(shape, 3);
  std::mt19937_64 random(5);
  testing::expect_bad_logits_end_one_request(sound, broken,
                                             random_jobs(random, 12, 63, 0.0, 200, 60), options_of);
}

TEST_F(CudaEngine, SelfDraftIsAcceptedByOtherMethods) {
  const auto model = model_of(shape_of({8, 0, 130}), 7);
  for (const auto method : {AcceptMethod::kStandard, AcceptMethod::kBlock}) {
    for (const double temperature : {0.0, 1.0}) {
      for (const int32_t k : {1, 3, 16}) {
        ExecutorOptions options = options_of(k);
        options.speculative.rejection_sample_method = method;
        options.speculative.draft_proposals = 64;  // the vocabulary
        expect_self_draft(model, options, temperature);
      }
    }
  }
}

// `standard` and `block`: at temperature 0 the output equals that of plain decoding. At a higher
// temperature it equals that of the same windows under every driver of the draft step.
TEST_F(CudaEngine, OtherAcceptanceByEveryDriver) {
  TinyModel shape = shape_of({8, 0, 130});
  shape.is_gemma = false;  // tied embeddings would only repeat tokens
  const auto target = model_of(shape, 3);
  const auto draft = model_of(shape, 3, 0.03f, 4);
  for (const double temperature : {0.0, 1.0}) {
    std::mt19937_64 random(9);
    std::vector<Job> jobs = random_jobs(random, 40, 64, temperature, 200, 150);
    mix_sampling(jobs, random, 64);
    Executor plain(target, nullptr, options_of(0));
    const std::vector<Outcome> without = run(plain, jobs);
    for (const auto method : {AcceptMethod::kStandard, AcceptMethod::kBlock}) {
      // Deterministic drafts, drafts from all tokens, and drafts from a few of them.
      for (const auto& [samples_drafts, num_proposals] :
           {std::pair{false, 0}, {true, 64}, {true, 5}}) {
        std::vector<Outcome> expected = temperature > 0 ? std::vector<Outcome>{} : without;
        Tally tally;
        for (const auto driver : {DraftDriver::kEager, DraftDriver::kUnrolled, DraftDriver::kReplay,
                                  DraftDriver::kWhile}) {
          ExecutorOptions options = options_of(5);
          options.speculative.rejection_sample_method = method;
          options.speculative.draft_sample_method =
              samples_drafts ? DraftSampleMethod::kProbabilistic : DraftSampleMethod::kGreedy;
          options.speculative.draft_proposals = num_proposals;
          options.speculative.draft_driver = driver;
          Executor executor(target, draft, options);
          const std::vector<Outcome> actual = run(executor, jobs);
          if (expected.empty()) expected = actual;
          for (size_t i = 0; i < jobs.size(); ++i) {
            ASSERT_EQ(actual[i].tokens, expected[i].tokens)
                << "job " << i << " driver " << static_cast<int>(driver);
            EXPECT_EQ(actual[i].reason, expected[i].reason);
          }
          EXPECT_EQ(executor.check_integrity(), "");
          tally.add(executor, actual);
        }
        tally.expect_both_verdicts();
      }
    }
  }
}

// Samples of one prompt, with any sharing of KV, against separate requests without a drafter.
TEST_F(CudaEngine, SamplesEqualRequestsOfTheirOwn) {
  const uint64_t first_seed = seed_from_env(1);
  const uint64_t num_cells = testing::test_level() >= 3 ? 200 : 30;
  int64_t preemptions = 0;
  int64_t shared = 0;
  int64_t most_shared = 0;
  for (uint64_t seed = first_seed; seed < first_seed + num_cells; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Pick pick{random};
    TinyModel shape = shape_of(random() % 3 == 0   ? std::vector<int32_t>{0, 0}
                               : random() % 2 == 0 ? std::vector<int32_t>{8, 0, 140}
                                                   : std::vector<int32_t>{20, 200});
    shape.is_gemma = random() % 2 == 0;
    shape.num_kv_heads = pick(1, 2, 4);
    if (random() % 3 == 0) make_gemma4(shape, random);
    const auto target = model_of(shape, seed);
    const auto draft = model_of(shape, seed, 0.03f, seed + 2);
    std::vector<Job> bare =
        random_jobs(random, pick(1, 4, 12), 64, pick(0.0, 0.7, 1.0, 1.0), 400, 100);
    if (random() % 2 == 0) mix_sampling(bare, random, 64);
    const std::vector<SampledJob> jobs = sampled(bare, random, pick(3, 8, 24));
    const std::vector<Job> separate = apart(jobs);
    Executor plain(target, nullptr, options_of(0));
    const std::vector<Outcome> expected = run(plain, separate);

    const auto k = static_cast<int32_t>(random() % 9);
    ExecutorOptions options = options_of(k);
    options.block_size = pick(8, 16, 32);
    options.prefill_chunk_size = pick(0, 16, 512);
    options.speculative.draft_driver = pick(DraftDriver::kUnrolled, DraftDriver::kReplay,
                                            DraftDriver::kEager, DraftDriver::kWhile);
    options.poison_freed_blocks = true;
    if (random() % 2 == 0) options.max_num_seqs = pick(3, 17);
    if (random() % 4 == 0) options.host_delay_max_us = 2000;
    if (random() % 2 == 0) options.draft_schedule_seed = random();
    if (random() % 2 == 0) options.kv_cache_bytes = pick(4, 6) << (shape.is_gemma4 ? 23 : 20);
    Executor executor(target, k > 0 ? draft : nullptr, options);
    const std::vector<SampledJob> neighbours =
        random() % 2 == 0 ? sampled(random_jobs(random, 4, 64, 1.0), random, 6)
                          : std::vector<SampledJob>{};
    const std::vector<Outcome> actual = run_samples(executor, jobs, neighbours, seed);
    for (size_t i = 0; i < separate.size(); ++i) {
      ASSERT_EQ(actual[i].tokens, expected[i].tokens) << "sample " << i << " k " << k;
      EXPECT_EQ(actual[i].reason, expected[i].reason);
    }
    EXPECT_EQ(executor.check_integrity(), "");
    preemptions += executor.stats().num_preemptions;
    shared += executor.stats().num_shared_tokens;
    most_shared += most_shared_tokens(jobs);
  }
  EXPECT_GT(shared, most_shared / 4);
  std::printf("%lld preemptions, %lld tokens shared of %lld\n", static_cast<long long>(preemptions),
              static_cast<long long>(shared), static_cast<long long>(most_shared));
}

TEST_F(CudaEngine, ThePromptIsPrefilledOnce) {
  for (const std::vector<int32_t>& windows : {std::vector<int32_t>{0, 0}, {8, 0, 140}}) {
    const auto target = model_of(shape_of(windows), 3);
    const auto draft = model_of(shape_of(windows), 3, 0.03f, 5);
    for (const int32_t prompt_len : {1, 2, 16, 17, 18, 300}) {
      SCOPED_TRACE(prompt_len);
      ExecutorOptions options = options_of(4);
      options.prefill_chunk_size = 128;
      options.poison_freed_blocks = true;
      std::mt19937_64 random(prompt_len);
      SampledJob job{.num_samples = 20};
      for (int32_t i = 0; i < prompt_len; ++i) {
        job.job.prompt.push_back(static_cast<int32_t>(random() % 64));
      }
      job.job.sampling = {.seed = 9, .max_tokens = 60, .repetition_penalty = 1.2};
      // The drafts are equal too, so the drafter's KV must equal that of a separate request.
      Executor alone(target, draft, options);
      const std::vector<Outcome> expected = run(alone, apart({job}));
      Executor executor(target, draft, options);
      const std::vector<Outcome> actual = run_samples(executor, {job});
      for (size_t i = 0; i < actual.size(); ++i) {
        EXPECT_EQ(actual[i].tokens, expected[i].tokens) << "sample " << i;
        EXPECT_EQ(actual[i].counters.accepted_per_position,
                  expected[i].counters.accepted_per_position);
      }
      EXPECT_EQ(executor.stats().num_shared_tokens, 19 * (prompt_len - 1));
      EXPECT_EQ(executor.check_integrity(), "");
    }
  }
}

TEST_F(CudaEngine, ScoresEqualWhateverTheChunks) {
  const auto model = model_of(shape_of({8, 0, 140}), 3);
  std::mt19937_64 random(3);
  std::vector<int32_t> prompt(333);
  for (int32_t& token : prompt) token = static_cast<int32_t>(random() % 64);
  std::vector<std::vector<float>> scores;
  for (const int32_t chunk : {0, 16, 100}) {
    ExecutorOptions options = options_of(0);
    options.prefill_chunk_size = chunk;
    Executor executor(model, nullptr, options);
    (void)executor.add_request({.prompt = prompt, .score_prompt = true}).value();
    for (bool is_done = false; !is_done;) {
      for (const RequestEvent& event : executor.poll(100)) {
        if (event.finish_reason == FinishReason::kNone) continue;
        scores.push_back(*event.logits);
        is_done = true;
      }
    }
  }
  EXPECT_EQ(scores[0], scores[1]);
  EXPECT_EQ(scores[0], scores[2]);
}

// A token's logprobs against the logits that the engine returns for the same prompt and completion.
TEST_F(CudaEngine, LogprobsAreThoseOfTheLogits) {
  const auto model = model_of(shape_of({8, 0, 140}), 3);
  ExecutorOptions options = options_of(3);
  options.max_logprobs = 64;
  Executor executor(model, model, options);
  std::mt19937_64 random(3);
  std::vector<Job> jobs = random_jobs(random, 8, 64, 0.8, 200, 100);
  mix_sampling(jobs, random, 64);
  for (Job& job : jobs) job.sampling.logprobs = job.sampling.prompt_logprobs = 64;
  const std::vector<Outcome> outcomes = run(executor, jobs);
  const int64_t num_compared = testing::expect_logprobs_of_logits(executor, jobs, outcomes, 64);
  EXPECT_GT(num_compared, 10000);
}

TEST_F(CudaEngine, RefusesAModelOnTheHost) {
  const auto target = model_of(shape_of({0}), 3);
  const auto draft = tiny_model(shape_of({0}), 3, 0, 0, DType::kBFloat16);
  EXPECT_THROW(Executor(target, draft, options_of(2)), InvalidArgument);
  const auto float_draft = tiny_model(shape_of({0}), 3, 0, 0, DType::kFloat32, Device::kCuda);
  EXPECT_THROW(Executor(target, float_draft, options_of(2)), Unsupported);
  ExecutorOptions late = options_of(2);
  late.device_lateness = 1;
  EXPECT_THROW(Executor(target, target, late), InvalidArgument);
}

// The pool takes what the utilization leaves, and all together stay below it.
TEST_F(CudaEngine, StaysBelowTheUtilization) {
  const auto target = model_of(shape_of({0, 0}), 3);
  const auto draft = model_of(shape_of({0}), 4);
  ExecutorOptions options = options_of(4);
  options.kv_cache_bytes = 0;
  options.max_model_len = 2048;
  options.max_num_seqs = 1024;
  options.max_num_batched_tokens = 1024 * 5;
  const int64_t wanted = default_kv_cache_size(*target, draft.get(), options).bytes;
  const auto total = static_cast<double>(cuda_status().total_bytes);
  options.gpu_memory_utilization = 4.0 * (1 << 30) / total;
  {
    Executor executor(target, draft, options);
    const MemoryReport report = executor.memory_report();
    const int64_t used = report.target_weight_bytes + report.draft_weight_bytes +
                         report.kv_pool_bytes + report.workspace_bytes + report.graph_bytes;
    std::printf("of 4096 MiB: KV pool %.1f, workspace %.1f, graphs %.1f\n",
                static_cast<double>(report.kv_pool_bytes) / (1 << 20),
                static_cast<double>(report.workspace_bytes) / (1 << 20),
                static_cast<double>(report.graph_bytes) / (1 << 20));
    EXPECT_LE(used, int64_t{4} << 30);
    EXPECT_LT(report.kv_pool_bytes, wanted);
    // Only what is reserved for graphs, and the ends of buffers, remain unused.
    EXPECT_GE(used - report.graph_bytes, (int64_t{3} << 30) - (int64_t{16} << 20));
    std::mt19937_64 random(7);
    for (const Outcome& outcome : run(executor, random_jobs(random, 8, 64, 0.8, 200, 100))) {
      EXPECT_EQ(outcome.reason, FinishReason::kLength);
    }
  }
  options.gpu_memory_utilization = 0.5 * (1 << 30) / total;
  EXPECT_THAT(message_of<OutOfMemory>([&] { Executor(target, draft, options); }),
              ::testing::HasSubstr("leaves no room for a KV pool"));
}

TEST_F(CudaEngine, SaysHowMuchMemoryIsMissing) {
  const auto model = model_of(shape_of({0}), 3);
  ExecutorOptions options = options_of(0);
  options.kv_cache_bytes = int64_t{1} << 42;
  try {
    Executor executor(model, nullptr, options);
    FAIL() << "a pool of 4 TiB was had";
  } catch (const OutOfMemory& error) {
    EXPECT_NE(std::string(error.what()).find("MiB are missing"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("the KV pool"), std::string::npos);
  }
}

}  // namespace
}  // namespace paceline
