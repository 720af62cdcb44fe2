// SPDX-License-Identifier: Apache-2.0
// Several samples of a prompt: each equals a separate request, the prompt is prefilled once where
// possible, and samples end one by one; and the ops of a fork against references.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <set>

#include <paceline/error.h>
#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "device/cpu_context.h"
#include "ops/fork.h"
#include "support/draft_head_checks.h"
#include "support/errors.h"
#include "support/oracle.h"
#include "support/samples.h"
#include "support/sampling_arrays.h"
#include "wire/blocks.h"
#include "wire/sequence_state.h"

namespace paceline {
namespace {

using testing::all_heads;
using testing::apart;
using testing::expect_contains;
using testing::Job;
using testing::make_gemma4;
using testing::message_of;
using testing::mix_sampling;
using testing::most_shared_tokens;
using testing::Oracle;
using testing::oracle_head;
using testing::oracle_target;
using testing::Outcome;
using testing::Pick;
using testing::random_jobs;
using testing::random_raw_head;
using testing::random_raw_model;
using testing::run;
using testing::run_samples;
using testing::sampled;
using testing::SampledJob;
using testing::SamplingArrays;
using testing::seed_from_env;
using testing::Tally;
using testing::tiny_config_json;
using testing::tiny_model;
using testing::TinyDraftHead;
using testing::TinyModel;

ExecutorOptions options_of(int32_t k) {
  ExecutorOptions options = testing::small_engine_options(k);
  options.poison_freed_blocks = true;
  options.enable_prefix_caching = false;  // it would share prompts, too
  return options;
}

// A target and a speculator at random from a seed: every kind of speculator and of KV group.
struct Models {
  std::shared_ptr<const Model> target;
  std::shared_ptr<const Model> draft;  // null for plain decoding and prompt lookup
  bool is_ngram = false;
  bool is_large = false;  // has slabs that need a larger pool for the same number of sequences
};

Models random_models(uint64_t seed) {
  std::mt19937_64 random(seed);
  const uint64_t kind = seed % 6;
  if (kind == 3) {  // a draft head that is always right
    constexpr std::array kKinds = {DrafterKind::kEagle, DrafterKind::kEagle3,
                                   DrafterKind::kGemma4Mtp};
    const auto raw = oracle_target(false);
    const Oracle oracle{.kind = kKinds[random() % 3]};
    return {.target = raw.build(), .draft = oracle_head(oracle, raw).build(), .is_large = true};
  }
  if (kind == 4 || kind == 5) {  // a random draft head, or prompt lookup
    const auto target = random_raw_model(
        tiny_config_json({.windows = {8, 0, 20}, .is_gemma = random() % 2 == 0}), seed);
    const std::vector<TinyDraftHead> heads = all_heads();
    const size_t which = seed / 6 % (heads.size() + 1);
    if (which == heads.size()) return {.target = target.build(), .is_ngram = true};
    return {.target = target.build(), .draft = random_raw_head(heads[which], seed + 1).build()};
  }
  constexpr std::array<std::array<int32_t, 3>, 3> kWindows = {{{0, 0, 0}, {8, 0, 8}, {20, 20, 0}}};
  const auto& windows = kWindows[random() % 3];
  TinyModel shape{.windows = {windows.begin(), windows.end()}, .is_gemma = random() % 2 == 0};
  if (random() % 3 == 0) make_gemma4(shape, random);
  Models models{.target = tiny_model(shape, seed), .is_large = shape.is_gemma4};
  if (kind == 1) models.draft = tiny_model(shape, seed, 0.05f, seed + 2);
  if (kind == 2) {
    models.draft = tiny_model(
        {.hidden = 16, .num_qo_heads = 2, .num_kv_heads = 1, .windows = {5, 0, 12}}, seed + 1);
  }
  return models;
}

TEST(Fork, SamplesEqualSeparateRequests) {
  const uint64_t first_seed = seed_from_env(1);
  Tally tally;
  int64_t shared = 0;
  int64_t most_shared = 0;
  for (uint64_t seed = first_seed; seed < first_seed + 72; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed + 1000);
    const Pick pick{random};
    const Models models = random_models(seed);
    const double temperature = pick(0.0, 0.7, 1.0, 1.0);
    std::vector<Job> bare = random_jobs(random, pick(1, 3, 8), 64, temperature, 80, 80);
    if (random() % 2 == 0) mix_sampling(bare, random, 64);
    const std::vector<SampledJob> jobs = sampled(bare, random, pick(3, 6, 12));
    const std::vector<Job> separate = apart(jobs);

    ExecutorOptions options = options_of(0);
    Executor plain(models.target, nullptr, options);
    const std::vector<Outcome> expected = run(plain, separate);
    EXPECT_EQ(plain.stats().num_shared_tokens, 0);

    const bool drafts = models.draft != nullptr || models.is_ngram;
    const auto k = drafts ? static_cast<int32_t>(1 + random() % 16) : 0;
    options = options_of(k);
    if (models.is_ngram) {
      options.speculative.prompt_lookup_min = 1;
      options.speculative.prompt_lookup_max = 3;
    }
    options.block_size = pick(1, 8, 16, 32);
    options.enable_prefix_caching = seed % 2 == 0;
    options.prefill_chunk_size = pick(0, 16, 3);
    options.max_num_seqs = pick(8, 8, 3, 1);
    options.device_lateness = pick(0, 1, 2);
    options.num_threads = pick(1, 2);
    options.speculative.draft_driver = pick(DraftDriver::kUnrolled, DraftDriver::kReplay,
                                            DraftDriver::kEager, DraftDriver::kWhile);
    if (random() % 2 == 0) options.kv_cache_bytes = (models.is_large ? 800 : 220) << 10;
    Executor executor(models.target, models.draft, options);
    const std::vector<SampledJob> neighbours =
        random() % 2 == 0 ? sampled(random_jobs(random, 4, 64, temperature), random, 5)
                          : std::vector<SampledJob>{};
    const std::vector<Outcome> actual = run_samples(executor, jobs, neighbours, seed);
    for (size_t i = 0; i < separate.size(); ++i) {
      ASSERT_EQ(actual[i].tokens, expected[i].tokens) << "sample " << i << " k " << k;
      ASSERT_EQ(actual[i].reason, expected[i].reason);
    }
    EXPECT_EQ(executor.check_integrity(), "");
    tally.add(executor, actual);
    shared += executor.stats().num_shared_tokens;
    most_shared += most_shared_tokens(jobs);
  }
  // The runs must meet accepted and rejected drafts, preemption, and both forks and samples that
  // prefill by themselves.
  tally.expect_all();
  EXPECT_GT(shared, most_shared / 4);
  std::printf("%lld preemptions, %lld tokens shared of %lld\n",
              static_cast<long long>(tally.preemptions), static_cast<long long>(shared),
              static_cast<long long>(most_shared));
}

TEST(Fork, ThePromptIsPrefilledOnce) {
  // At the edges of blocks, of 16 tokens, and of windows.
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const Models models = random_models(seed);
    for (const int32_t prompt_len : {1, 2, 16, 17, 18, 33, 90}) {
      SCOPED_TRACE("models " + std::to_string(seed) + ", prompt of " + std::to_string(prompt_len));
      const bool drafts = models.draft != nullptr || models.is_ngram;
      ExecutorOptions options = options_of(drafts ? 4 : 0);
      if (models.is_ngram) {
        options.speculative.prompt_lookup_min = 1;
        options.speculative.prompt_lookup_max = 3;
      }
      options.prefill_chunk_size = 24;
      options.device_lateness = static_cast<int32_t>(seed % 3);
      std::mt19937_64 random(seed);
      SampledJob job{.num_samples = 6};
      for (int32_t i = 0; i < prompt_len; ++i) {
        job.job.prompt.push_back(static_cast<int32_t>(random() % 64));
      }
      job.job.sampling = {.seed = ~uint64_t{0} - 2, .max_tokens = 30};  // seeds wrap around
      Executor plain(models.target, nullptr, options_of(0));
      const std::vector<Outcome> expected = run(plain, apart({job}));
      Executor executor(models.target, models.draft, options);
      const std::vector<Outcome> actual = run_samples(executor, {job});
      // With the KV of a separate request the drafter makes the same drafts, too.
      Executor alone(models.target, models.draft, options);
      const std::vector<Outcome> unshared = run(alone, apart({job}));
      std::set<std::vector<int32_t>> different;
      for (size_t i = 0; i < actual.size(); ++i) {
        EXPECT_EQ(actual[i].tokens, expected[i].tokens) << "sample " << i;
        EXPECT_EQ(actual[i].num_cached_tokens, i == 0 ? 0 : prompt_len - 1);
        EXPECT_EQ(unshared[i].num_cached_tokens, 0);
        EXPECT_EQ(actual[i].counters.num_draft_tokens, unshared[i].counters.num_draft_tokens);
        EXPECT_EQ(actual[i].counters.accepted_per_position,
                  unshared[i].counters.accepted_per_position);
        different.insert(actual[i].tokens);
      }
      EXPECT_GT(different.size(), 1u);
      EXPECT_EQ(executor.stats().num_shared_tokens, 5 * (prompt_len - 1));
      EXPECT_EQ(executor.stats().num_preemptions, 0);
      executor.reset_stats();
      EXPECT_EQ(executor.stats().num_shared_tokens, 0);
      EXPECT_EQ(executor.check_integrity(), "");
    }
  }
}

TEST(Fork, AParentThatEndsWithItsFirstTokenHasTheDraftersKvToo) {
  for (uint64_t seed = 0; seed < 18; ++seed) {
    SCOPED_TRACE("models " + std::to_string(seed));
    const Models models = random_models(seed);
    if (models.draft == nullptr) continue;
    std::mt19937_64 random(seed);
    SampledJob job{.num_samples = 5};
    for (int32_t i = 0; i < 45; ++i) {
      job.job.prompt.push_back(static_cast<int32_t>(random() % 64));
    }
    job.job.sampling = {.seed = seed, .max_tokens = 30};
    // The first token of the first sample is a stop token, and may be one for others.
    Executor plain(models.target, nullptr, options_of(0));
    job.job.sampling.stop_token_ids = {run(plain, {job.job}).front().tokens.front()};
    Executor alone(models.target, models.draft, options_of(5));
    const std::vector<Outcome> expected = run(alone, apart({job}));
    ASSERT_EQ(expected[0].tokens.size(), 1u);
    Executor executor(models.target, models.draft, options_of(5));
    const std::vector<Outcome> actual = run_samples(executor, {job});
    EXPECT_EQ(executor.stats().num_shared_tokens, 4 * 44);
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_EQ(actual[i].tokens, expected[i].tokens) << "sample " << i;
      EXPECT_EQ(actual[i].counters.accepted_per_position,
                expected[i].counters.accepted_per_position)
          << "sample " << i;
    }
  }
}

TEST(Fork, SamplesEndOneByOne) {
  const auto model = tiny_model(TinyModel{}, 3);
  ExecutorOptions options = options_of(3);
  options.max_num_seqs = 3;
  Executor executor(model, model, options);
  const std::vector<int32_t> prompt(40, 7);
  const RequestId id =
      executor
          .add_request(
              {.prompt = prompt, .sampling = {.seed = 5, .max_tokens = 200}, .num_samples = 5})
          .value();
  EXPECT_TRUE(executor.cancel(id, 1));
  EXPECT_TRUE(executor.cancel(id, 1));  // once more changes nothing
  std::map<int32_t, FinishReason> reasons;
  std::map<int32_t, int32_t> num_tokens;
  bool has_cancelled_all = false;
  while (reasons.size() < 5) {
    for (const RequestEvent& event : executor.poll(100)) {
      ASSERT_EQ(event.request_id, id);
      EXPECT_EQ(reasons.count(event.sample), 0u)
          << "an event after sample " << event.sample << " has ended";
      num_tokens[event.sample] += static_cast<int32_t>(event.token_ids.size());
      if (event.finish_reason != FinishReason::kNone) reasons[event.sample] = event.finish_reason;
    }
    // Sample 3 waits for a sequence slot; it and the running ones are cancelled.
    if (!has_cancelled_all && reasons.count(0) > 0) {
      has_cancelled_all = true;
      executor.cancel(id);
    }
  }
  EXPECT_EQ(reasons[0], FinishReason::kLength);
  EXPECT_EQ(num_tokens[0], 200);
  EXPECT_EQ(reasons[1], FinishReason::kCancelled);
  EXPECT_EQ(reasons[4], FinishReason::kCancelled);
  EXPECT_FALSE(executor.cancel(id));
  EXPECT_FALSE(executor.cancel(id, 0));
  EXPECT_EQ(executor.check_integrity(), "");
  EXPECT_TRUE(executor.poll(0).empty());
}

TEST(Fork, BadRequestsAreRefused) {
  const auto model = tiny_model(TinyModel{}, 3);
  Executor executor(model, nullptr, options_of(0));
  const auto message = [&](Request request) -> std::string {
    return message_of<InvalidArgument>([&] { (void)executor.add_request(std::move(request)); });
  };
  expect_contains(message({.prompt = {1}, .num_samples = 0}),
                  {"num_samples is 0; allowed: 1 to 128"});
  expect_contains(message({.prompt = {1}, .num_samples = 129}), {"num_samples is 129"});
  expect_contains(message({.prompt = {1}, .score_prompt = true, .num_samples = 2}),
                  {"set it to 1"});
  const RequestId id =
      executor.add_request({.prompt = {1}, .sampling = {.max_tokens = 200}, .num_samples = 2})
          .value();
  for (const int32_t sample : {-1, 2}) {
    expect_contains(message_of<InvalidArgument>([&] { executor.cancel(id, sample); }),
                    {"allowed: 0 to 1"});
  }
}

TEST(Fork, QueueBoundCountsRequests) {
  const auto model = tiny_model(TinyModel{}, 3);
  ExecutorOptions options = options_of(0);
  options.max_num_seqs = 1;
  options.max_waiting_requests = 3;
  Executor executor(model, nullptr, options);
  const auto add = [&] {
    return executor.add_request(
        {.prompt = {1, 2}, .sampling = {.max_tokens = 200}, .num_samples = 20});
  };
  ASSERT_TRUE(add().has_value());
  while (executor.poll(100).empty()) {
  }
  // One of its samples runs and nineteen wait: that is one request.
  EXPECT_TRUE(add().has_value());
  EXPECT_TRUE(add().has_value());
  EXPECT_FALSE(add().has_value());
}

// --- the ops -------------------------------------------------------------------------------------

TEST(Fork, BlocksAreCopiedAndNothingElse) {
  constexpr std::array<int64_t, 3> kBlockBytes = {64, 192, 128};
  constexpr int64_t kPoolBytes = 64 * 192;
  std::mt19937_64 random(1);
  std::vector<std::byte> pool(kPoolBytes);
  for (std::byte& byte : pool) byte = static_cast<std::byte>(random());
  // No destination overlaps another one or a source.
  const std::vector<BlockCopy> copies = {{0, 3, 100}, {1, 2, 5},   {2, 30, 70},
                                         {1, 40, 63}, {0, 3, 101}, {0, 7, 8}};
  for (const int32_t claimed : {0, 1, 5, 9}) {
    const int32_t num_made = std::min(claimed, 5);  // the sixth is beyond max_copies
    std::vector<std::byte> expected = pool;
    for (int32_t i = 0; i < num_made; ++i) {
      const BlockCopy& copy = copies[static_cast<size_t>(i)];
      const int64_t bytes = kBlockBytes[static_cast<size_t>(copy.group)];
      for (int64_t at = 0; at < bytes; ++at) {
        expected[static_cast<size_t>(copy.destination * bytes + at)] =
            pool[static_cast<size_t>(copy.source * bytes + at)];
      }
    }
    std::vector<std::byte> actual = pool;
    CopyBlocksParams params{.num_copies = &claimed,
                            .max_copies = 5,
                            .copies = copies.data(),
                            .pool = actual.data(),
                            .block_bytes = {}};
    std::copy(kBlockBytes.begin(), kBlockBytes.end(), params.block_bytes);
    CpuContext ctx;
    copy_blocks(ctx, params);
    EXPECT_EQ(actual, expected) << claimed << " copies";
  }
}

TEST(Fork, HistoryTablesAndSeenTokensAreCopiedBetweenSequenceSlots) {
  constexpr int32_t kSlots = 7;
  constexpr int32_t kStride = 40;
  constexpr int32_t kVocab = 70;
  constexpr std::array kBlockSizes = {8, 1, 16};
  std::mt19937_64 random(2);
  for (const int32_t claimed : {0, 3, 7}) {
    const std::vector<SequenceFork> forks = {
        {.parent_seq_slot = 4, .seq_slot = 0, .num_tokens = 17},  // adjusts
        {.parent_seq_slot = 4, .seq_slot = 2, .num_tokens = 39},  // does not
        {.parent_seq_slot = 1, .seq_slot = 3, .num_tokens = 8},
        // From the prefix cache, whose tables the host writes; adjusts.
        {.parent_seq_slot = -1, .seq_slot = 6, .num_tokens = 24, .first_token = 5},
        {.parent_seq_slot = 1, .seq_slot = 5, .num_tokens = 8}};  // beyond max_forks
    const int32_t num_made = std::min(claimed, 4);
    std::vector<int32_t> adopted(40);
    for (int32_t& token : adopted) token = static_cast<int32_t>(random() % (kVocab + 5));
    std::vector<int32_t> history(kSlots * kStride);
    for (int32_t& token : history) token = static_cast<int32_t>(random() % (kVocab + 5));
    SamplingArrays sampling(kSlots, kVocab);
    sampling.adjusts = {1, 1, 0, 1, 0, 1, 1};
    sampling.seen[0] = 1;  // must stay
    std::vector<std::vector<int32_t>> tables(kBlockSizes.size());
    ForkSequencesParams params{.num_forks = &claimed,
                               .max_forks = 4,
                               .forks = forks.data(),
                               .adopted_tokens = adopted.data(),
                               .sequences = {},
                               .sampling = sampling.state(),
                               .tables = {},
                               .num_tables = static_cast<int32_t>(kBlockSizes.size())};
    params.sequences.history = history.data();
    params.sequences.history_stride = kStride;
    for (size_t g = 0; g < kBlockSizes.size(); ++g) {
      tables[g].resize(kSlots * kStride);
      for (int32_t& block : tables[g]) block = static_cast<int32_t>(random() % 1000);
      params.tables[g] = {
          .blocks = tables[g].data(), .stride = kStride, .block_size = kBlockSizes[g]};
    }
    auto expected_history = history;
    auto expected_tables = tables;
    auto expected_seen = sampling.seen;
    const auto expected_counts = sampling.counts;
    for (int32_t i = 0; i < num_made; ++i) {
      const SequenceFork& fork = forks[static_cast<size_t>(i)];
      for (int32_t at = 0; at < fork.num_tokens; ++at) {
        const bool has_parent = fork.parent_seq_slot >= 0;
        const int32_t token =
            has_parent ? history[static_cast<size_t>(fork.parent_seq_slot * kStride + at)]
                       : adopted[static_cast<size_t>(fork.first_token + at)];
        expected_history[static_cast<size_t>(fork.seq_slot * kStride + at)] = token;
        if (token < kVocab && sampling.adjusts[static_cast<size_t>(fork.seq_slot)] != 0) {
          expected_seen[static_cast<size_t>(fork.seq_slot * mask_words(kVocab) + token / 32)] |=
              uint32_t{1} << token % 32;
        }
        for (size_t g = 0; has_parent && g < kBlockSizes.size(); ++g) {
          const int32_t index = at / kBlockSizes[g];
          if ((index + 1) * kBlockSizes[g] > fork.num_tokens) continue;  // not wholly below
          expected_tables[g][static_cast<size_t>(fork.seq_slot * kStride + index)] =
              tables[g][static_cast<size_t>(fork.parent_seq_slot * kStride + index)];
        }
      }
    }
    CpuContext ctx;
    fork_sequences(ctx, params);
    EXPECT_EQ(history, expected_history);
    EXPECT_EQ(tables, expected_tables);
    EXPECT_EQ(sampling.seen, expected_seen);
    EXPECT_EQ(sampling.counts, expected_counts);
  }
}

}  // namespace
}  // namespace paceline
