// SPDX-License-Identifier: Apache-2.0
// The engine with `standard` and `block` acceptance.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <paceline/error.h>
#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "support/all_accepted.h"
#include "support/draft_head_checks.h"
#include "support/errors.h"
#include "support/jobs.h"
#include "support/oracle.h"
#include "support/tiny_models.h"

namespace paceline::testing {
namespace {

constexpr auto kStandard = AcceptMethod::kStandard;
constexpr auto kBlock = AcceptMethod::kBlock;

ExecutorOptions options_of(int32_t k, AcceptMethod method = AcceptMethod::kCoupled) {
  ExecutorOptions options = small_engine_options(k);
  options.speculative.rejection_sample_method = method;
  return options;
}

constexpr DraftDriver kDrivers[] = {DraftDriver::kUnrolled, DraftDriver::kReplay,
                                    DraftDriver::kWhile, DraftDriver::kEager};

TEST(RejectingEngine, SelfDraftAcceptsEverything) {
  const auto model = tiny_model(TinyModel{.windows = {8, 0, 8}}, 7);
  for (const AcceptMethod method : {kStandard, kBlock}) {
    for (const double temperature : {0.0, 1.0}) {
      for (const int32_t k : {1, 3, 16}) {
        std::mt19937_64 random(11);
        ExecutorOptions options = options_of(k, method);
        options.speculative.draft_proposals = 64;  // the vocabulary
        Executor executor(model, model, options);
        expect_all_accepted(executor, random_jobs(random, 12, 64, temperature));
      }
    }
  }
}

// Draft heads that return the target's next logits, also with a reduced vocabulary or from fixed
// positions. A draft in a wrong column or a distribution of another row would rarely be accepted.
TEST(RejectingEngine, DraftsOfOraclesAreAccepted) {
  for (const DrafterKind kind :
       {DrafterKind::kEagle, DrafterKind::kEagle3, DrafterKind::kMtp, DrafterKind::kGemma4Mtp}) {
    for (const AcceptMethod method : {kStandard, kBlock}) {
      const bool is_reduced = kind == DrafterKind::kEagle3;
      const RawModel raw = oracle_target(is_reduced);
      const auto head = oracle_head({.kind = kind, .is_reduced = is_reduced}, raw).build();
      ExecutorOptions options = options_of(5, method);
      options.max_model_len = 200;
      std::mt19937_64 random(3);
      Executor executor(raw.build(), head, options);
      Tally tally;
      tally.add(executor, run(executor, random_jobs(random, 60, 64, 1.0)));
      EXPECT_GT(tally.drafted, 500);
      EXPECT_GE(tally.accepted, tally.drafted * 99 / 100) << "drafter " << static_cast<int>(kind);
    }
  }
}

TEST(RejectingEngine, EqualsPlainAtTemperatureZero) {
  const std::vector<TinyDraftHead> heads = all_heads();
  Tally tally;
  const uint64_t first_seed = seed_from_env(1);
  for (uint64_t seed = first_seed; seed < first_seed + 40; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Pick pick{random};
    const size_t which = seed % (heads.size() + 4);
    const TinyModel shape = {.windows = {8, 0, 20}, .is_gemma = random() % 2 == 0};
    const bool has_head = which < heads.size();
    const RawModel raw = random_raw_model(tiny_config_json(shape), seed);
    const auto target = has_head ? raw.build() : tiny_model(shape, seed);
    const auto draft = has_head         ? random_raw_head(heads[which], seed + 1).build()
                       : which % 4 == 0 ? nullptr  // prompt lookup
                                        : tiny_model(shape, seed, 0.05f, seed + 2);
    std::vector<Job> jobs = random_jobs(random, pick(1, 7, 20), 64, 0.0, 60, 60);
    if (random() % 2 == 0) mix_sampling(jobs, random, 64);
    Executor plain(target, nullptr, options_of(0));
    const std::vector<Outcome> expected = run(plain, jobs);
    ExecutorOptions options =
        options_of(static_cast<int32_t>(1 + random() % 16), pick(kStandard, kBlock));
    const bool samples_drafts = draft != nullptr && random() % 3 != 0;
    options.speculative.draft_sample_method =
        samples_drafts ? DraftSampleMethod::kProbabilistic : DraftSampleMethod::kGreedy;
    if (samples_drafts) {
      options.speculative.draft_proposals = pick(0, 1, 5, 256);
    }
    if (draft == nullptr) {
      options.speculative.prompt_lookup_min = 1;
      options.speculative.prompt_lookup_max = 3;
    }
    options.speculative.draft_driver = pick(DraftDriver::kUnrolled, DraftDriver::kReplay,
                                            DraftDriver::kEager, DraftDriver::kWhile);
    options.prefill_chunk_size = pick(0, 16);
    options.device_lateness = pick(0, 1, 2);
    options.poison_freed_blocks = true;
    options.num_threads = pick(1, 2);
    if (random() % 2 == 0) options.kv_cache_bytes = 300 << 10;
    Executor speculative(target, draft, options);
    const std::vector<Outcome> actual = run(speculative, jobs);
    for (size_t i = 0; i < jobs.size(); ++i) {
      ASSERT_EQ(actual[i].tokens, expected[i].tokens) << "job " << i;
      ASSERT_EQ(actual[i].reason, expected[i].reason);
    }
    EXPECT_EQ(speculative.check_integrity(), "");
    tally.add(speculative, actual);
  }
  // Random draft heads are rarely right.
  EXPECT_GT(tally.accepted, tally.drafted / 100);
  EXPECT_LT(tally.accepted, tally.drafted * 19 / 20);
}

// The windows of a request depend on its own tokens alone, so its output depends on nothing else.
TEST(RejectingEngine, ASeedGivesTheSameTokensByEveryDriver) {
  const TinyModel shape{.windows = {8, 0, 8}};
  const auto target = tiny_model(shape, 3);
  const auto draft = tiny_model(shape, 3, 0.05f, 4);
  std::mt19937_64 random(9);
  std::vector<Job> jobs = random_jobs(random, 16, 64, 1.0);
  mix_sampling(jobs, random, 64);
  Executor plain(target, nullptr, options_of(0));
  const std::vector<Outcome> without = run(plain, jobs);
  for (const AcceptMethod method : {kStandard, kBlock}) {
    for (const bool samples_drafts : {false, true}) {
      std::vector<Outcome> first;
      for (const DraftDriver driver : kDrivers) {
        ExecutorOptions options = options_of(4, method);
        options.speculative.draft_sample_method =
            samples_drafts ? DraftSampleMethod::kProbabilistic : DraftSampleMethod::kGreedy;
        options.speculative.draft_driver = driver;
        options.num_threads = driver == DraftDriver::kReplay ? 2 : 1;
        Executor executor(target, draft, options);
        const std::vector<Outcome> outcomes = run(executor, jobs);
        if (first.empty()) first = outcomes;
        Tally tally;
        tally.add(executor, outcomes);
        bool is_as_plain = true;
        for (size_t i = 0; i < jobs.size(); ++i) {
          EXPECT_EQ(outcomes[i].tokens, first[i].tokens);
          EXPECT_EQ(outcomes[i].counters.num_accepted_tokens,
                    first[i].counters.num_accepted_tokens);
          is_as_plain &= outcomes[i].tokens == without[i].tokens;
        }
        EXPECT_FALSE(is_as_plain) << "only the distribution is the same";
        tally.expect_both_verdicts();
      }
    }
  }
}

// A request with fewer drafts has the windows, and so the tokens, of an engine that makes as many
// for all; without drafts, those of plain decoding.
TEST(RejectingEngine, ARequestsOwnKIsThatOfAnEngine) {
  const TinyModel shape{.windows = {8, 0, 8}};
  const auto target = tiny_model(shape, 3);
  const auto draft = tiny_model(shape, 3, 0.05f, 4);
  std::mt19937_64 random(9);
  std::vector<Job> jobs = random_jobs(random, 16, 64, 1.0);
  for (const AcceptMethod method : {kStandard, kBlock}) {
    std::vector<std::vector<Outcome>> expected;  // by k
    for (int32_t k = 0; k <= 4; ++k) {
      Executor executor(target, k == 0 ? nullptr : draft,
                        k == 0 ? options_of(0) : options_of(k, method));
      expected.push_back(run(executor, jobs));
    }
    Executor executor(target, draft, options_of(4, method));
    mix_num_drafts(jobs, random, 4);
    const std::vector<Outcome> outcomes = run(executor, jobs);
    for (size_t i = 0; i < jobs.size(); ++i) {
      const int32_t own = jobs[i].num_speculative_tokens;
      const Outcome& same = expected[static_cast<size_t>(own < 0 ? 4 : own)][i];
      EXPECT_EQ(outcomes[i].tokens, same.tokens) << "job " << i << " k " << own;
      EXPECT_EQ(outcomes[i].counters.drafted_per_position, same.counters.drafted_per_position);
      EXPECT_EQ(outcomes[i].counters.accepted_per_position, same.counters.accepted_per_position);
      expect_own_drafts(jobs[i], outcomes[i], 4);
    }
    for (Job& job : jobs) job.num_speculative_tokens = -1;
  }
}

// The early stop changes how much is drafted, and nothing in the distribution
// (rejection_distribution_test).
TEST(RejectingEngine, DraftsStopEarly) {
  const TinyModel shape{.windows = {8, 0, 8}};
  const auto target = tiny_model(shape, 3);
  const auto draft = tiny_model(shape, 3, 0.05f, 4);
  std::mt19937_64 random(9);
  const std::vector<Job> jobs = random_jobs(random, 16, 64, 0.0);
  Executor plain(target, nullptr, options_of(0));
  const std::vector<Outcome> expected = run(plain, jobs);
  std::array<int64_t, 2> drafted = {};
  for (const bool stops : {false, true}) {
    ExecutorOptions options = options_of(6, kBlock);
    options.speculative.draft_driver = DraftDriver::kWhile;
    options.speculative.draft_stop_threshold = stops ? 0.3 : 0.0;
    Executor executor(target, draft, options);
    const std::vector<Outcome> actual = run(executor, jobs);
    for (size_t i = 0; i < jobs.size(); ++i) {
      EXPECT_EQ(actual[i].tokens, expected[i].tokens);
      drafted[stops ? 1 : 0] += actual[i].counters.num_draft_tokens;
    }
  }
  EXPECT_LT(drafted[1], drafted[0]);
}

TEST(RejectingEngine, BadLogitsEndOneRequestOnly) {
  TinyModel shape{.is_gemma = false};
  shape.nan_token = 63;
  const auto broken = tiny_model(shape, 3);
  for (const AcceptMethod method : {kStandard, kBlock}) {
    std::vector<Job> jobs(2);
    jobs[0] = {.prompt = {1, 63, 2}, .sampling = {.temperature = 1.0, .max_tokens = 20}};
    jobs[1] = {.prompt = {1, 2},
               .sampling = {.temperature = 1.0, .max_tokens = 20, .bad_words = {{63}}}};
    Executor executor(broken, broken, options_of(3, method));
    const std::vector<Outcome> outcomes = run(executor, jobs);
    EXPECT_EQ(outcomes[0].reason, FinishReason::kError);
    EXPECT_TRUE(outcomes[0].tokens.empty());
    EXPECT_EQ(outcomes[1].reason, FinishReason::kLength);
    EXPECT_EQ(outcomes[1].tokens.size(), 20u);
    EXPECT_EQ(executor.check_integrity(), "");
  }
}

TEST(RejectingEngine, ProposalsAreInTheWorkspace) {
  const auto model = tiny_model(TinyModel{}, 3);
  const auto workspace = [&](bool samples_drafts, int32_t proposals) {
    ExecutorOptions options = options_of(4, kStandard);
    options.speculative.draft_sample_method =
        samples_drafts ? DraftSampleMethod::kProbabilistic : DraftSampleMethod::kGreedy;
    options.speculative.draft_proposals = proposals;
    const MemoryReport report = Executor(model, model, options).memory_report();
    int64_t sum = 0;
    for (const auto& [purpose, bytes] : report.workspace) sum += bytes;
    EXPECT_EQ(sum, report.workspace_bytes);
    const auto found = report.workspace.find("proposals");
    return found == report.workspace.end() ? 0 : found->second;
  };
  EXPECT_EQ(workspace(false, 0), 0);
  const int64_t of_default = workspace(true, 0);
  EXPECT_EQ(of_default, workspace(true, 64));
  EXPECT_EQ(workspace(true, 256) - of_default, 8 * 4 * (256 - 64) * 8);
  EXPECT_GE(of_default, 8 * 4 * 64 * 8);
}

TEST(RejectingEngine, RefusesBadOptions) {
  const auto model = tiny_model(TinyModel{}, 3);
  const auto message = [&](const std::function<void(SpeculativeOptions&)>& change,
                           bool has_draft = true) -> std::string {
    ExecutorOptions options = options_of(3, kStandard);
    change(options.speculative);
    return message_of<InvalidArgument>(
        [&] { Executor executor(model, has_draft ? model : nullptr, options); });
  };
  using S = SpeculativeOptions;
  const auto expect = [](const std::string& text, const char* part) {
    expect_contains(text, {part});
  };
  EXPECT_EQ(message([](S&) {}), "");
  expect(message([](S& s) { s.draft_proposals = 257; }),
         "draft_proposals is 257; allowed: 0 to 256");
  expect(message([](S& s) { s.draft_proposals = -1; }), "draft_proposals is -1");
  expect(message([](S& s) {
           s.draft_sample_method = DraftSampleMethod::kGreedy;
           s.draft_proposals = 8;
         }),
         "draft_proposals is 8, but rejection_sample_method is 'standard' and draft_sample_method "
         "'greedy'; allowed: only with");
  expect(message([](S& s) {
           s.rejection_sample_method = AcceptMethod::kCoupled;
           s.draft_proposals = 8;
         }),
         "draft_proposals is 8, but rejection_sample_method is 'coupled'");
  expect(message([](S& s) {
           s.rejection_sample_method = AcceptMethod::kCoupled;
           s.draft_sample_method = DraftSampleMethod::kGreedy;
         }),
         "draft_sample_method is 'greedy'");
  const auto look_up = [](S& s) { s.prompt_lookup_min = s.prompt_lookup_max = 2; };
  expect(message(look_up, /*has_draft=*/false), "draft_sample_method is 'probabilistic'");
  EXPECT_EQ(message(
                [&](S& s) {
                  look_up(s);
                  s.draft_sample_method = DraftSampleMethod::kGreedy;
                },
                /*has_draft=*/false),
            "");
}

}  // namespace
}  // namespace paceline::testing
