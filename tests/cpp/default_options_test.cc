// SPDX-License-Identifier: Apache-2.0
// What an executor chooses by itself, for any models and for a folder with a drafter.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <paceline/error.h>
#include <paceline/executor.h>
#include <paceline/model.h>

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
  EXPECT_EQ(Executor(model, nullptr, options).options().max_model_len, 4096);
  options.max_model_len = 64;
  options.max_num_seqs = 1024;
  options.speculative.num_speculative_tokens = 2;
  EXPECT_EQ(Executor(model, model, options).options().max_num_batched_tokens, 3 * 1024);
  // A drafter that was not read from a folder knows no k.
  options.speculative.num_speculative_tokens = 0;
  EXPECT_THAT(message_of<InvalidArgument>([&] { Executor(model, model, options); }),
              HasSubstr("num_speculative_tokens is 0 but a drafter is given"));
  // A value that was given is never changed.
  const auto short_draft = tiny_model(TinyModel{.max_position = 256}, 1);
  options = {.speculative = {.num_speculative_tokens = 2}};
  EXPECT_THAT(message_of<InvalidArgument>([&] { Executor(model, short_draft, options); }),
              HasSubstr("max_model_len is 4096, but the drafter supports 256"));
}

}  // namespace
}  // namespace paceline
