// SPDX-License-Identifier: Apache-2.0
// Guided sequences: constraints, and a drafter of the caller.

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cmath>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.h>
#include <paceline/executor.h>

#include "batch/batch_builder.h"
#include "cpp/engine_options.h"
#include "support/draft_head_checks.h"
#include "support/errors.h"
#include "support/host_batch.h"
#include "support/jobs.h"
#include "support/tiny_models.h"
#include "support/toy_constraint.h"

namespace paceline::testing {
namespace {

constexpr int32_t kVocab = 64;

template <class Step>
void expect_refused(Step step, const std::vector<std::string>& parts) {
  expect_contains(message_of<InvalidArgument>(step), parts);
}

// Proposes what followed the last token earlier, and otherwise the last token again.
class EchoDrafter : public HostDrafter {
 public:
  std::vector<int32_t> draft(std::span<const int32_t> tokens, int32_t max_drafts) override {
    ++num_calls;
    std::vector<int32_t> drafts;
    for (size_t i = tokens.size() - 1; i-- > 0;) {
      if (tokens[i] != tokens.back()) continue;
      for (size_t j = i + 1; j < tokens.size() && std::ssize(drafts) < max_drafts; ++j) {
        drafts.push_back(tokens[j]);
      }
      return drafts;
    }
    if (max_drafts > 0) drafts.push_back(tokens.back());
    return drafts;
  }
  std::atomic<int> num_calls = 0;
};

// Options that change when and how things run, but never the output.
void mix_options(ExecutorOptions& options, std::mt19937_64& random) {
  const Pick pick{random};
  options.speculative.draft_driver =
      pick(DraftDriver::kUnrolled, DraftDriver::kReplay, DraftDriver::kEager, DraftDriver::kWhile);
  if (options.speculative.draft_driver == DraftDriver::kWhile &&
      options.speculative.prompt_lookup_max == 0 &&
      options.speculative.num_speculative_tokens > 0 && options.speculative.drafter == nullptr) {
    options.speculative.draft_stop_threshold = pick(0.0, 0.02);
  }
  options.prefill_chunk_size = pick(0, 16);
  options.device_lateness = pick(0, 1, 2);
  options.poison_freed_blocks = true;
  options.enable_prefix_caching = pick(true, false);
  options.num_threads = pick(1, 2);
  if (random() % 2 == 0) options.kv_cache_bytes = 300 << 10;
}

TEST(GuidedEngine, EqualsPlainDecodingUnderTheSameConstraint) {
  const std::vector<TinyDraftHead> heads = all_heads();
  Tally tally;
  const uint64_t first_seed = seed_from_env(1);
  for (uint64_t seed = first_seed; seed < first_seed + 48; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Pick pick{random};
    const size_t which = seed % (heads.size() + 6);
    const TinyModel shape = {.windows = {8, 0, 20}, .is_gemma = random() % 2 == 0};
    const bool has_head = which < heads.size();
    const RawModel raw = random_raw_model(tiny_config_json(shape), seed);
    const auto target = has_head ? raw.build() : tiny_model(shape, seed);
    const bool is_ngram = !has_head && which % 3 == 0;
    const bool is_host = !has_head && which % 3 == 1;
    const auto draft = has_head              ? random_raw_head(heads[which], seed + 1).build()
                       : is_ngram || is_host ? nullptr
                                             : tiny_model(shape, seed, 0.05f, seed + 2);
    std::vector<Job> jobs =
        random_jobs(random, pick(1, 7, 20), kVocab, pick(0.0, 0.7, 1.5), 60, 60);
    if (random() % 2 == 0) {
      // A constraint and other bans may exclude all tokens, which ends both outputs alike.
      mix_sampling(jobs, random, kVocab);
    }
    constrain_some(jobs, random, kVocab, pick(0, 0, 300));
    ExecutorOptions plain_options = small_engine_options(0);
    Executor plain(target, nullptr, plain_options);
    const std::vector<Outcome> expected = run(plain, jobs);
    ExecutorOptions options = small_engine_options(static_cast<int32_t>(1 + random() % 8));
    if (is_ngram) {
      options.speculative.prompt_lookup_min = 1;
      options.speculative.prompt_lookup_max = 3;
    }
    if (is_host) options.speculative.drafter = std::make_shared<EchoDrafter>();
    mix_options(options, random);
    std::vector<Job> neighbours = random_jobs(random, pick(0, 6), kVocab, 1.0);
    constrain_some(neighbours, random, kVocab);
    Executor speculative(target, draft, options);
    const std::vector<Outcome> actual = run(speculative, jobs, neighbours, seed);
    for (size_t i = 0; i < jobs.size(); ++i) {
      ASSERT_EQ(actual[i].tokens, expected[i].tokens) << "job " << i;
      ASSERT_EQ(actual[i].reason, expected[i].reason);
      if (jobs[i].make_constraint) {
        ASSERT_TRUE(ToyConstraint::accepts(jobs[i].sampling.seed, kVocab, actual[i].tokens));
      }
    }
    EXPECT_EQ(speculative.check_integrity(), "");
    tally.add(speculative, actual);
  }
  tally.expect_all();
}

// Rejection keeps its promises, too: at temperature 0 the output is that of plain decoding.
TEST(GuidedEngine, StandardAndBlockAcceptanceObeyTheConstraint) {
  const TinyModel shape{.windows = {8, 0, 8}};
  const auto target = tiny_model(shape, 3);
  const auto draft = tiny_model(shape, 3, 0.05f, 4);
  for (const AcceptMethod method : {AcceptMethod::kStandard, AcceptMethod::kBlock}) {
    for (const bool samples_drafts : {true, false}) {
      for (const double temperature : {0.0, 1.0}) {
        std::mt19937_64 random(5);
        std::vector<Job> jobs = random_jobs(random, 12, kVocab, temperature);
        constrain_some(jobs, random, kVocab);
        ExecutorOptions options = small_engine_options(5);
        options.speculative.rejection_sample_method = method;
        options.speculative.draft_sample_method =
            samples_drafts ? DraftSampleMethod::kProbabilistic : DraftSampleMethod::kGreedy;
        Executor engine(target, draft, options);
        const std::vector<Outcome> actual = run(engine, jobs);
        Executor plain(target, nullptr, small_engine_options(0));
        const std::vector<Outcome> expected = run(plain, jobs);
        for (size_t i = 0; i < jobs.size(); ++i) {
          if (temperature == 0) {
            ASSERT_EQ(actual[i].tokens, expected[i].tokens) << "job " << i;
          }
          ASSERT_TRUE(!jobs[i].make_constraint ||
                      ToyConstraint::accepts(jobs[i].sampling.seed, kVocab, actual[i].tokens));
        }
      }
    }
  }
}

// Under sampled rejection a draft that the constraint excludes must be rejected, not cut: sampling
// from the target where the drafter happened to break the grammar would favour some tokens.
TEST(GuidedEngine, RejectionKeepsTheDistributionUnderAConstraint) {
  const TinyModel shape{.windows = {0}};
  const auto target = tiny_model(shape, 3);
  const auto draft = tiny_model(shape, 99);  // often outside of the constraint, and often wrong
  constexpr int kSamples = 8000;
  constexpr uint64_t kSalt = 6;  // allows half of the tokens at most positions
  const auto pairs = [&](AcceptMethod method, uint64_t first_seed) {
    ExecutorOptions options = small_engine_options(method == AcceptMethod::kCoupled ? 0 : 2);
    options.max_num_seqs = 64;
    options.speculative.rejection_sample_method = method;
    Executor engine(target, method == AcceptMethod::kCoupled ? nullptr : draft, options);
    std::vector<Job> jobs(kSamples);
    for (Job& job : jobs) {
      job.prompt = {1, 2, 3};
      job.sampling.max_tokens = 3;
      job.sampling.seed = first_seed++;
      job.make_constraint = [=] { return std::make_shared<ToyConstraint>(kSalt, kVocab); };
    }
    std::map<std::pair<int32_t, int32_t>, double> counts;
    for (const Outcome& outcome : run(engine, jobs)) {
      ++counts[{outcome.tokens.at(1), outcome.tokens.at(2)}];
    }
    return counts;
  };
  const auto expected = pairs(AcceptMethod::kCoupled, 1);
  for (const AcceptMethod method : {AcceptMethod::kStandard, AcceptMethod::kBlock}) {
    const auto actual = pairs(method, 1'000'000);
    double chi_square = 0;
    double num_bins = 0;
    for (const auto& [pair, count] : expected) {
      const auto found = actual.find(pair);
      const double other = found == actual.end() ? 0 : found->second;
      if (count + other < 20) continue;
      chi_square += (count - other) * (count - other) / (count + other);
      ++num_bins;
    }
    EXPECT_GT(num_bins, 20);
    // The seeds are fixed; a law that differs gives several times the number of bins.
    EXPECT_LT(chi_square, num_bins + 4 * std::sqrt(2 * num_bins)) << num_bins << " bins";
  }
}

TEST(GuidedEngine, WindowsLoseDraftsWhereMasksDoNotFit) {
  constexpr int32_t kDrafts = 12;
  const BatchShape shape{
      .max_seqs = 4, .max_verify_rows = 64, .max_logit_rows = 64, .num_draft_tokens = kDrafts};
  HostBatch batch(shape);
  const int32_t num_words = mask_words(kVocab);
  ASSERT_EQ(batch->capacity.mask_words / num_words, 32);
  IterationPlan plan;
  std::vector<Sequence> sequences(4);
  for (size_t i = 0; i < sequences.size(); ++i) {
    Sequence& sequence = sequences[i];
    sequence.seq_slot = static_cast<int32_t>(i);
    sequence.tokens = {1, 2, 3};
    sequence.max_drafts = kDrafts;
    if (i == 1) sequence.sampling.allowed_token_ids = {1};  // of no concern to masks
    if (i != 1) {
      sequence.guide = std::make_shared<WindowGuide>();
      sequence.guide->constraint = std::make_shared<ToyConstraint>(1, kVocab);
      sequence.window = {.num_tokens = 3, .drafts = std::vector<int32_t>(kDrafts, 7)};
      for (int32_t row = 0; row <= kDrafts; ++row) {
        sequence.window.masks.insert(sequence.window.masks.end(), num_words, 100 * i + row);
      }
    }
    plan.sequences.push_back(
        {.sequence = &sequence, .kind = RowKind::kDecode, .num_rows = kDrafts + 1});
  }
  build_batch(plan, shape, *batch);
  const StagedInputs& inputs = batch->inputs;
  ASSERT_EQ(inputs.counts->num_windows, 3);
  EXPECT_EQ(inputs.counts->num_mask_words, 32 * num_words);
  constexpr std::array kExpected = {12, 12, 5};
  constexpr std::array kFirst = {0, 13, 26};
  for (int32_t i = 0; i < 3; ++i) {
    const HostWindow& window = inputs.windows[i];
    EXPECT_EQ(window.seq_slot, i == 0 ? 0 : i + 1);
    EXPECT_EQ(window.num_drafts, kExpected[i]);
    EXPECT_EQ(window.first_mask, kFirst[i]);
    for (int32_t row = 0; row <= kExpected[i]; ++row) {
      EXPECT_EQ(inputs.masks[(kFirst[i] + row) * num_words],
                static_cast<uint32_t>(100 * window.seq_slot + row));
    }
  }
  EXPECT_TRUE(batch->has_logit_work);
}

// The tokens that the constraint forces cost no drafter: without one that is ever right, windows
// still accept drafts.
TEST(GuidedEngine, ForcedTokensAreDrafts) {
  const auto target = tiny_model({}, 1);
  ExecutorOptions options = small_engine_options(4);
  options.speculative.prompt_lookup_min = options.speculative.prompt_lookup_max =
      200;  // never finds anything
  Executor engine(target, nullptr, options);
  std::mt19937_64 random(2);
  std::vector<Job> jobs = random_jobs(random, 8, kVocab, 1.0, 20, 60);
  for (Job& job : jobs) {
    job.sampling.stop_token_ids.clear();
    job.make_constraint = [salt = job.sampling.seed] {
      return std::make_shared<ToyConstraint>(salt, kVocab);
    };
  }
  int64_t drafted = 0;
  for (const Outcome& outcome : run(engine, jobs)) {
    EXPECT_EQ(outcome.counters.num_accepted_tokens, outcome.counters.num_draft_tokens);
    drafted += outcome.counters.num_draft_tokens;
  }
  EXPECT_GT(drafted, 20);
}

class Failing : public TokenConstraint {
 public:
  explicit Failing(int32_t which) : which_(which) {}
  void constrain(std::span<const int32_t>, std::vector<int32_t>& drafts, int32_t max_drafts,
                 std::span<uint32_t> masks) override {
    std::fill(masks.begin(), masks.end(), ~uint32_t{0});
    if (++num_calls_ < 3) return;
    if (which_ == 0) throw std::runtime_error("no more");
    if (which_ == 1) drafts.assign(static_cast<size_t>(max_drafts) + 1, 0);
    if (which_ == 2) drafts.assign(1, kVocab);
    if (which_ == 3) std::fill(masks.begin(), masks.end(), 0);
  }

 private:
  int32_t which_;
  int32_t num_calls_ = 0;
};

TEST(GuidedEngine, AFailingConstraintEndsItsOwnSampleOnly) {
  const auto target = tiny_model({}, 1);
  ExecutorOptions options = small_engine_options(3);
  options.speculative.prompt_lookup_min = options.speculative.prompt_lookup_max = 1;
  Executor engine(target, nullptr, options);
  constexpr std::array kMessages = {
      "no more", "the constraint returned 4 drafts; allowed: at most 3",
      "the constraint returned token 64 as draft 0; allowed: 0 to 63", "no token can be drawn"};
  std::mt19937_64 random(7);
  std::vector<Job> jobs = random_jobs(random, 8, kVocab, 1.0);
  for (Job& job : jobs) {
    job.sampling.max_tokens = 40;
    job.sampling.stop_token_ids.clear();
  }
  for (size_t i = 0; i < kMessages.size(); ++i) {
    jobs[2 * i].make_constraint = [=] {
      return std::make_shared<Failing>(static_cast<int32_t>(i));
    };
  }
  const std::vector<Outcome> outcomes = run(engine, jobs);
  for (size_t i = 0; i < outcomes.size(); ++i) {
    if (i % 2 == 1) {
      EXPECT_EQ(outcomes[i].reason, FinishReason::kLength);
    } else {
      EXPECT_EQ(outcomes[i].reason, FinishReason::kError);
      EXPECT_NE(outcomes[i].error.find(kMessages[i / 2]), std::string::npos) << outcomes[i].error;
      EXPECT_GT(outcomes[i].tokens.size(), 0u);
    }
  }
  EXPECT_EQ(engine.check_integrity(), "");
}

// A constraint that never seems to answer holds up no other sample, and can be cancelled.
TEST(GuidedEngine, OthersAreNotHeldUp) {
  struct Gate {
    std::atomic<bool> is_open = false;
  };
  class Waiting : public TokenConstraint {
   public:
    explicit Waiting(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {}
    void constrain(std::span<const int32_t>, std::vector<int32_t>&, int32_t,
                   std::span<uint32_t> masks) override {
      gate_->is_open.wait(false);
      std::fill(masks.begin(), masks.end(), ~uint32_t{0});
    }

   private:
    std::shared_ptr<Gate> gate_;
  };
  const auto gate = std::make_shared<Gate>();
  Executor engine(tiny_model({}, 1), nullptr, small_engine_options(0));
  Request waiting{.prompt = {1, 2, 3}};
  waiting.num_samples = 2;
  waiting.constraints = {std::make_shared<Waiting>(gate), std::make_shared<Waiting>(gate)};
  const RequestId id = engine.add_request(std::move(waiting)).value();
  std::mt19937_64 random(3);
  std::vector<Job> jobs = random_jobs(random, 4, kVocab, 1.0);
  for (const Outcome& outcome : run(engine, jobs)) EXPECT_NE(outcome.reason, FinishReason::kError);
  EXPECT_TRUE(engine.cancel(id, 0));
  gate->is_open = true;
  gate->is_open.notify_all();
  int32_t num_ended = 0;
  while (num_ended < 2) {
    for (const RequestEvent& event : engine.poll(10)) {
      if (event.finish_reason == FinishReason::kNone) continue;
      EXPECT_EQ(event.finish_reason,
                event.sample == 0 ? FinishReason::kCancelled : FinishReason::kLength);
      ++num_ended;
    }
  }
  EXPECT_EQ(engine.check_integrity(), "");
}

// A request that goes on after an interruption has the output that it would have had, although its
// constraint is a new one.
TEST(GuidedEngine, AResumedOutputGoesOnUnderItsConstraint) {
  const auto target = tiny_model({}, 1);
  std::mt19937_64 random(4);
  std::vector<Job> jobs = random_jobs(random, 12, kVocab, 1.0, 30, 40);
  constrain_some(jobs, random, kVocab);
  for (const bool is_host : {true, false}) {
    ExecutorOptions options = small_engine_options(3);
    if (is_host) {
      options.speculative.drafter = std::make_shared<EchoDrafter>();
    } else {
      options.speculative.prompt_lookup_min = options.speculative.prompt_lookup_max = 1;
    }
    Executor engine(target, nullptr, options);
    const std::vector<Outcome> whole = run(engine, jobs);
    std::vector<Job> resumed = jobs;
    for (size_t i = 0; i < jobs.size(); ++i) {
      const std::vector<int32_t>& tokens = whole[i].tokens;
      const auto count = static_cast<int32_t>(random() % tokens.size());
      resumed[i].num_resumed_tokens = count;
      resumed[i].prompt.insert(resumed[i].prompt.end(), tokens.begin(),
                               tokens.begin() + resumed[i].num_resumed_tokens);
    }
    const std::vector<Outcome> rest = run(engine, resumed);
    for (size_t i = 0; i < jobs.size(); ++i) {
      std::vector<int32_t> tokens = whole[i].tokens;
      tokens.erase(tokens.begin(), tokens.begin() + resumed[i].num_resumed_tokens);
      EXPECT_EQ(rest[i].tokens, tokens) << "job " << i;
      EXPECT_EQ(rest[i].reason, whole[i].reason);
    }
  }
}

TEST(GuidedEngine, RefusesWhatItCannotGuide) {
  const auto target = tiny_model({}, 1);
  const auto toy = std::make_shared<ToyConstraint>(1, kVocab);
  Executor engine(target, nullptr, small_engine_options(0));
  const auto add = [&](Executor& to, Request request) { (void)to.add_request(std::move(request)); };
  expect_refused([&] { add(engine, {.prompt = {1}, .constraints = {toy}, .num_samples = 2}); },
                 {"constraints has 1 entries and num_samples is 2"});
  expect_refused([&] { add(engine, {.prompt = {1}, .constraints = {nullptr}}); },
                 {"constraints[0] is null"});
  expect_refused([&] { add(engine, {.prompt = {1}, .score_prompt = true, .constraints = {toy}}); },
                 {"score_prompt"});
  ExecutorOptions options = small_engine_options(2);
  options.speculative.rejection_sample_method = AcceptMethod::kSynthetic;
  options.speculative.synthetic_acceptance_length = 2;
  options.speculative.drafter = std::make_shared<EchoDrafter>();
  {
    Executor synthetic(target, nullptr, options);
    expect_refused([&] { add(synthetic, {.prompt = {1}, .constraints = {toy}}); }, {"synthetic"});
  }
  options = small_engine_options(2);
  options.speculative.drafter = std::make_shared<EchoDrafter>();
  expect_refused([&] { Executor(target, target, options); },
                 {"drafter is given, but method is 'draft_model'"});
  options.speculative.rejection_sample_method = AcceptMethod::kStandard;
  expect_refused([&] { Executor(target, nullptr, options); },
                 {"draft_sample_method is 'probabilistic'"});
}

}  // namespace
}  // namespace paceline::testing
