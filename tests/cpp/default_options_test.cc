// SPDX-License-Identifier: Apache-2.0
// What an executor chooses by itself, for any models and for a folder with a drafter.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include <paceline/error.h>
#include <paceline/executor.h>
#include <paceline/model.h>

#include "executor/default_sizes.h"
#include "support/compressed_models.h"
#include "support/described_model.h"
#include "support/errors.h"
#include "support/safetensors_writer.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::tiny_model;
using testing::TinyModel;

TEST(DefaultOptions, WorkForAFolderWithADrafter) {
  const test::TemporaryFolder written;
  testing::write_tiny_folder(written, 3);
  const ModelFolder folder = load_model_folder(written.path());
  for (const ExecutorOptions& options : {recommended_options(folder), ExecutorOptions{}}) {
    Executor executor(folder.target, folder.draft, options);
    const ExecutorOptions& seen = executor.options();
    EXPECT_EQ(seen.speculative.num_speculative_tokens, 3);
    EXPECT_TRUE(executor.stats().is_adaptive);
    EXPECT_EQ(seen.max_model_len, 128);
    EXPECT_EQ(seen.max_num_batched_tokens, 2048);
    EXPECT_GT(seen.kv_cache_bytes, 0);
    Request request = {.prompt = {1, 2}, .sampling = recommended_sampling(folder)};
    EXPECT_THAT(request.sampling.stop_token_ids, ElementsAre(4));
    request.sampling.temperature = 0;
    ASSERT_TRUE(executor.add_request(request).has_value());
    SpeculationCounters counters;
    for (bool is_running = true; is_running;) {
      for (const RequestEvent& event : executor.poll(100)) {
        is_running = event.finish_reason == FinishReason::kNone;
        counters = event.counters;
      }
    }
    EXPECT_EQ(counters.num_accepted_tokens, counters.num_draft_tokens);
  }
  EXPECT_EQ(recommended_options(folder).kv_cache_bytes,
            Executor(folder.target, folder.draft, {}).options().kv_cache_bytes);
  // The host may choose another k for the folder.
  ModelFolder changed = folder;
  changed.num_speculative_tokens = 5;
  EXPECT_EQ(recommended_options(changed).speculative.num_speculative_tokens, 5);
  // Without the drafter, the folder's target decodes plainly.
  EXPECT_EQ(recommended_options(*folder.target, nullptr).speculative.num_speculative_tokens, 0);
  changed.target = nullptr;
  EXPECT_THROW((void)recommended_options(changed), InvalidArgument);
}

TEST(DefaultOptions, FollowTheModelAndTheWindows) {
  const auto model = tiny_model(TinyModel{.max_position = 100'000}, 1);
  ExecutorOptions options;
  EXPECT_EQ(Executor(model, nullptr, options).options().max_model_len, 100'000);
  options.max_model_len = 64;
  options.max_num_seqs = 1024;
  options.speculative.num_speculative_tokens = 2;
  EXPECT_EQ(Executor(model, model, options).options().max_num_batched_tokens, 3 * 1024);
  // A drafter that was not read from a folder knows no k.
  options.speculative.num_speculative_tokens = 0;
  EXPECT_THAT(message_of<InvalidArgument>([&] { Executor(model, model, options); }),
              HasSubstr("num_speculative_tokens is 0 but a drafter is given"));
  // A draft model that supports less shortens the default, but not below 4,096.
  const auto draft = tiny_model(TinyModel{.max_position = 9'000}, 1);
  const ExecutorOptions drafting = {.speculative = {.num_speculative_tokens = 2}};
  EXPECT_EQ(Executor(model, draft, drafting).options().max_model_len, 9'000);
  const auto short_draft = tiny_model(TinyModel{.max_position = 256}, 1);
  options = {.speculative = {.num_speculative_tokens = 2}};
  EXPECT_THAT(message_of<InvalidArgument>([&] { Executor(model, short_draft, options); }),
              HasSubstr("max_model_len is 4096, but the drafter supports 256"));
}

TEST(DefaultOptions, AnIndexerKeepsTheLengthShort) {
  testing::CompressedModel described;
  described.max_position = 65'536;
  const auto model = testing::compressed_model(described, 1);
  const DefaultSizes sizes = choose_sizes({}, *model, nullptr, int64_t{1} << 40);
  EXPECT_EQ(sizes.options.max_model_len, 4096);
  EXPECT_TRUE(sizes.is_shortened);
  EXPECT_THAT(sizes.model_len_rule, HasSubstr("each of its iterations longer"));
  EXPECT_THAT(sizes.model_len_rule, HasSubstr("supports 65536 tokens"));
}

// The length of an engine whose memory is short: each sequence of it can run, and no longer one.
TEST(DefaultOptions, TheLongestSequenceThatFitsThePoolCanRun) {
  const auto model = tiny_model(TinyModel{.max_position = 100'000}, 1);  // windows of 8 and 0
  for (const int64_t kv_cache_bytes : {100'000, 1 << 20, 3'000'000, 1 << 24}) {
    ExecutorOptions options;
    options.kv_cache_bytes = kv_cache_bytes;
    options.max_num_batched_tokens = options.max_num_seqs = 4;
    for (const int32_t block_size : {16, 7}) {
      options.block_size = block_size;
      options.max_model_len = 0;
      Executor executor(model, nullptr, options);
      const int32_t found = executor.options().max_model_len;
      EXPECT_EQ(found % block_size, 0);
      EXPECT_LT(found, 100'000);
      const auto request = [](int32_t num_tokens) {
        return Request{.prompt = std::vector<int32_t>(static_cast<size_t>(num_tokens - 1), 1),
                       .sampling = {.max_tokens = 1}};
      };
      EXPECT_TRUE(executor.add_request(request(found)).has_value());
      options.max_model_len = found + block_size;
      Executor longer(model, nullptr, options);
      EXPECT_THAT(message_of<InvalidArgument>(
                      [&] { (void)longer.add_request(request(found + block_size)); }),
                  HasSubstr("kv_cache_bytes"))
          << kv_cache_bytes;
    }
  }
}

TEST(DefaultOptions, TheLengthFollowsTheMemory) {
  const auto model = tiny_model(TinyModel{.max_position = 100'000}, 1);
  const auto sizes = [&](int64_t free_bytes) {
    return choose_sizes({}, *model, nullptr, free_bytes);
  };
  const DefaultSizes ample = sizes(int64_t{1} << 40);
  EXPECT_EQ(ample.options.max_model_len, 100'000);
  EXPECT_FALSE(ample.is_shortened);
  EXPECT_EQ(ample.model_len_rule, "the length that the model supports");
  // The pool is that of 64 sequences of 4,096 tokens, as one of 100,000 takes less.
  EXPECT_EQ(ample.kv_cache_rule,
            "default: enough for 64 sequences of 4096 tokens, or for one of 100000");
  ExecutorOptions given;
  given.max_model_len = 4096;
  const DefaultSizes shorter = choose_sizes(given, *model, nullptr, int64_t{1} << 40);
  EXPECT_EQ(ample.options.kv_cache_bytes, shorter.options.kv_cache_bytes);
  EXPECT_EQ(shorter.model_len_rule, "");
  // A quarter of the free memory, of which a sequence takes all.
  int32_t before = 100'000;
  for (int64_t free_bytes = ample.options.kv_cache_bytes; free_bytes > 1 << 22; free_bytes /= 2) {
    const DefaultSizes found = sizes(free_bytes);
    EXPECT_EQ(found.options.kv_cache_bytes, free_bytes / 4);
    EXPECT_LE(found.options.max_model_len, before);
    before = found.options.max_model_len;
  }
  EXPECT_LT(before, 20'000);
  EXPECT_GT(before, 1'000);
  const DefaultSizes least = sizes(1 << 22);
  EXPECT_TRUE(least.is_shortened);
  EXPECT_THAT(least.model_len_rule, HasSubstr("of the 100000 tokens that the model supports"));
  // One that is given is never changed.
  EXPECT_EQ(choose_sizes(given, *model, nullptr, 1 << 22).options.max_model_len, 4096);
}

}  // namespace
}  // namespace paceline
