// SPDX-License-Identifier: Apache-2.0
// Guided sequences on a GPU: windows and masks reach the kernels through the mapped ring.

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include <paceline/executor.h>

#include "support/gpu.h"
#include "support/jobs.h"
#include "support/tiny_models.h"
#include "support/toy_constraint.h"

namespace paceline::testing {
namespace {

class CudaGuidedEngine : public GpuTest {};

ExecutorOptions options_of(int32_t k) {
  ExecutorOptions options = gpu_engine_options(k, 16, 64 << 20);
  options.max_model_len = 300;
  return options;
}

TEST_F(CudaGuidedEngine, EqualsPlainDecodingUnderTheSameConstraint) {
  Tally tally;
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Pick pick{random};
    // The larger vocabulary takes several blocks of a row, and more masks than one kernel reads at
    // once.
    const int32_t vocab = seed % 3 == 0 ? 40'000 : 100;
    const TinyModel shape = {.vocab_size = vocab,
                             .hidden = 64,
                             .head_dim = 64,
                             .intermediate = 96,
                             .max_position = 2048,
                             .windows = {8, 0}};
    const auto target = tiny_model(shape, seed, 0, 0, DType::kBFloat16, Device::kCuda);
    const bool is_ngram = seed % 4 == 0;
    const auto draft =
        is_ngram ? nullptr
                 : tiny_model(shape, seed, 0.02f, seed + 1, DType::kBFloat16, Device::kCuda);
    std::vector<Job> jobs = random_jobs(random, 24, vocab, pick(0.0, 0.7, 1.5), 60, 60);
    if (seed % 2 == 0) mix_sampling(jobs, random, vocab);
    constrain_some(jobs, random, vocab);
    Executor plain(target, nullptr, options_of(0));
    const std::vector<Outcome> expected = run(plain, jobs);
    ExecutorOptions options = options_of(static_cast<int32_t>(1 + random() % 7));
    if (is_ngram) options.speculative.prompt_lookup_min = options.speculative.prompt_lookup_max = 1;
    options.speculative.draft_driver = pick(DraftDriver::kUnrolled, DraftDriver::kReplay,
                                            DraftDriver::kWhile, DraftDriver::kEager);
    options.prefill_chunk_size = pick(0, 16);
    Executor speculative(target, draft, options);
    const std::vector<Outcome> actual = run(speculative, jobs);
    for (size_t i = 0; i < jobs.size(); ++i) {
      ASSERT_EQ(actual[i].tokens, expected[i].tokens) << "job " << i;
      ASSERT_EQ(actual[i].reason, expected[i].reason);
      if (jobs[i].make_constraint) {
        ASSERT_TRUE(ToyConstraint::accepts(jobs[i].sampling.seed, vocab, actual[i].tokens));
      }
    }
    EXPECT_EQ(speculative.check_integrity(), "");
    tally.add(speculative, actual);
  }
  tally.expect_both_verdicts();
}

}  // namespace
}  // namespace paceline::testing
