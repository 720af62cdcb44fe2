// SPDX-License-Identifier: Apache-2.0
// The C interface: every mistake of a caller is a status with a message, and structures of other
// versions are read by their size.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <paceline/paceline.h>

#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "support/c_api_fixture.h"
#include "support/failing_allocations.h"

namespace paceline {
namespace {

using CApiErrors = testing::CApi;
using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST_F(CApiErrors, NullArgumentsAreErrors) {
  open();
  int64_t id = 0;
  paceline_event event = {.size = sizeof(event)};
  paceline_engine_stats stats = {.size = sizeof(stats)};
  const std::vector<std::pair<std::function<paceline_status()>, const char*>> calls = {
      {[] { return paceline_options_init(nullptr, sizeof(paceline_options)); }, "options"},
      {[] { return paceline_sampling_init(nullptr, sizeof(paceline_sampling)); }, "sampling"},
      {[&] { return paceline_open(folder_.path().c_str(), nullptr, nullptr); }, "engine"},
      {[] {
         paceline_engine* engine = nullptr;
         return paceline_open(nullptr, nullptr, &engine);
       },
       "folder"},
      {[&] { return paceline_add(nullptr, prompt_.data(), 3, nullptr, &id); }, "engine"},
      {[&] { return paceline_add(engine_, nullptr, 3, nullptr, &id); }, "token_ids"},
      {[&] { return paceline_add(engine_, prompt_.data(), 3, nullptr, nullptr); }, "request_id"},
      {[] { return paceline_cancel(nullptr, 0, -1); }, "engine"},
      {[&] { return paceline_poll(nullptr, 0, &event); }, "engine"},
      {[&] { return paceline_poll(engine_, 0, nullptr); }, "event"},
      {[&] { return paceline_stats(nullptr, &stats); }, "engine"},
      {[&] { return paceline_stats(engine_, nullptr); }, "stats"},
  };
  for (const auto& [call, name] : calls) {
    EXPECT_EQ(call(), PACELINE_INVALID_ARGUMENT) << name;
    EXPECT_STREQ(paceline_last_error(), concat(name, " is null; give a pointer").c_str());
  }
  paceline_close(nullptr);
  EXPECT_THAT(run(sampling()), SizeIs(1));  // without harm to the engine
}

TEST_F(CApiErrors, BadFoldersAreModelFileErrors) {
  for (const std::string& path : {folder_.file("nowhere"), std::string("/dev/null")}) {
    paceline_engine* engine = reinterpret_cast<paceline_engine*>(this);
    EXPECT_EQ(paceline_open(path.c_str(), nullptr, &engine), PACELINE_MODEL_FILE_ERROR) << path;
    EXPECT_THAT(paceline_last_error(), HasSubstr(path + "/paceline.json"));
    EXPECT_EQ(engine, nullptr);
  }
}

// The message names the field, so each field reaches the option of its name.
TEST_F(CApiErrors, EveryOptionIsCheckedByItsName) {
  using Change = std::function<void(paceline_options&)>;
  const std::vector<std::pair<Change, const char*>> changes = {
      {[](auto& o) { o.device = "gpu"; }, "device is \"gpu\"; allowed: \"cpu\", \"cuda\""},
      {[](auto& o) { o.max_model_len = -1; }, "max_model_len is -1"},
      {[](auto& o) { o.max_num_seqs = -1; }, "max_num_seqs is -1"},
      {[](auto& o) { o.max_num_batched_tokens = -1; }, "max_num_batched_tokens is -1"},
      {[](auto& o) { o.prefill_chunk_size = -1; }, "prefill_chunk_size is -1"},
      {[](auto& o) { o.block_size = -1; }, "block_size is -1"},
      {[](auto& o) { o.num_threads = -1; }, "num_threads is -1"},
      {[](auto& o) { o.kv_cache_bytes = -1; }, "kv_cache_bytes is -1"},
      {[](auto& o) { o.gpu_memory_utilization = -1; }, "gpu_memory_utilization is -1"},
      {[](auto& o) { o.max_waiting_requests = -1; }, "max_waiting_requests is -1"},
      {[](auto& o) { o.log_interval_s = 1e9; }, "log_interval_s is 1e+09"},
      {[](auto& o) { o.num_speculative_tokens = 17; }, "num_speculative_tokens is 17"},
      {[](auto& o) { o.rejection_sample_method = "synthetic"; },
       "rejection_sample_method is \"synthetic\"; allowed: \"coupled\", \"standard\", \"block\""},
      {[](auto& o) { o.draft_sample_method = "greedy"; }, "draft_sample_method is 'greedy'"},
      {[](auto& o) { o.draft_proposals = 9; }, "draft_proposals is 9"},
      {[](auto& o) { o.draft_stop_threshold = 0.5; }, "draft_stop_threshold is 0.5"},
      {[](auto& o) { o.hang_timeout_s = -1; }, "hang_timeout_s is -1"},
      {[](auto& o) { o.prompt_lookup_min = 3; },
       "prompt_lookup_max is 0; allowed: prompt_lookup_min = 3 to 256"},
      {[](auto& o) { o.prompt_lookup_max = 3; },
       "prompt_lookup_min is 0; allowed: an integer from 1 to prompt_lookup_max = 3"},
      {[](auto& o) { o.draft_driver = ""; }, "draft_driver is \"\""},
  };
  for (const auto& [change, message] : changes) {
    paceline_options changed = options();
    change(changed);
    EXPECT_EQ(open(changed), PACELINE_INVALID_ARGUMENT) << message;
    EXPECT_THAT(paceline_last_error(), HasSubstr(message));
  }
}

TEST_F(CApiErrors, EverySamplingFieldIsCheckedByItsName) {
  open();
  const std::vector<int32_t> ids(9, 1);
  const std::vector<float> values(9, 1);
  const std::vector<size_t> lengths = {0};
  const std::string long_salt(513, 'a');
  const std::vector<size_t> too_long = {std::numeric_limits<size_t>::max()};
  using Change = std::function<void(paceline_sampling&)>;
  const std::vector<std::pair<Change, const char*>> changes = {
      {[](auto& s) { s.temperature = -1; }, "temperature is -1"},
      {[](auto& s) { s.max_tokens = 0; }, "max_tokens is 0"},
      {[](auto& s) { s.min_tokens = -1; }, "min_tokens is -1"},
      {[](auto& s) { s.num_samples = 0; }, "num_samples is 0"},
      {[](auto& s) { s.num_speculative_tokens = 17; }, "num_speculative_tokens is 17"},
      {[](auto& s) { s.num_resumed_tokens = 3; }, "num_resumed_tokens is 3; allowed: 0 to 2"},
      {[](auto& s) { s.top_k = -1; }, "top_k is -1"},
      {[](auto& s) { s.top_p = 2; }, "top_p is 2"},
      {[](auto& s) { s.min_p = 3; }, "min_p is 3"},
      {[](auto& s) { s.repetition_penalty = 0; }, "repetition_penalty is 0"},
      {[](auto& s) { s.presence_penalty = 1e300; }, "presence_penalty is"},
      {[](auto& s) { s.frequency_penalty = 1e300; }, "frequency_penalty is"},
      {[](auto& s) { s.num_stop_token_ids = 1; }, "stop_token_ids is null, but has 1 elem"},
      {[&](auto& s) { s.stop_token_ids = ids.data(), s.num_stop_token_ids = 9; },
       "stop_token_ids has 10"},
      {[](auto& s) { s.num_allowed_token_ids = 1; }, "allowed_token_ids is null"},
      {[](auto& s) { s.num_logit_bias = 1; }, "logit_bias_token_ids is null"},
      {[&](auto& s) { s.logit_bias_token_ids = ids.data(), s.num_logit_bias = 1; },
       "logit_bias_values is null"},
      {[&](auto& s) {
         s.logit_bias_token_ids = ids.data(), s.logit_bias_values = values.data();
         s.num_logit_bias = 2;
       },
       "logit_bias"},
      {[](auto& s) { s.num_bad_words = 1; }, "bad_words_lengths is null"},
      {[&](auto& s) { s.bad_words_lengths = lengths.data(), s.num_bad_words = 1; },
       "bad_words_token_ids is null"},
      {[&](auto& s) {
         s.bad_words_token_ids = ids.data(), s.bad_words_lengths = lengths.data();
         s.num_bad_words = 1;
       },
       "bad_words"},
      {[&](auto& s) {
         s.bad_words_token_ids = ids.data(), s.bad_words_lengths = too_long.data();
         s.num_bad_words = 1;
       },
       "bad_words_lengths[0] is 18446744073709551615"},
      {[&](auto& s) { s.cache_salt = long_salt.c_str(); }, "cache_salt has 513 bytes; allowed: at"},
  };
  int64_t id = -1;
  for (const auto& [change, message] : changes) {
    paceline_sampling changed = sampling();
    change(changed);
    EXPECT_EQ(add(changed, &id), PACELINE_INVALID_ARGUMENT) << message;
    EXPECT_THAT(paceline_last_error(), HasSubstr(message));
  }
  const std::vector<int32_t> unknown = {5};
  EXPECT_EQ(paceline_add(engine_, unknown.data(), 1, nullptr, &id), PACELINE_INVALID_ARGUMENT);
  EXPECT_EQ(paceline_add(engine_, unknown.data(), 0, nullptr, &id), PACELINE_INVALID_ARGUMENT);
  EXPECT_EQ(id, -1);
}

// Fails the first allocation of a call on this thread, then the second, and so on. Each call must
// return a status; an exception would end the process.
TEST_F(CApiErrors, LackOfMemoryIsAStatus) {
  testing::is_test_thread = true;
  const paceline_options small = options();
  const paceline_sampling given = sampling();
  int64_t id = -1;
  paceline_event event = {.size = sizeof(event)};
  paceline_engine_stats stats = {.size = sizeof(stats)};
  const std::string path = folder_.path();
  const std::vector<std::function<paceline_status()>> calls = {
      [&] {
        paceline_close(engine_);
        return paceline_open(path.c_str(), &small, &engine_);
      },
      [&] { return add(given, &id); }, [&] { return paceline_stats(engine_, &stats); },
      [&] { return paceline_cancel(engine_, id, 7); },
      [&] { return paceline_poll(engine_, -1, &event); }};
  std::map<paceline_status, int> failures;
  for (const auto& call : calls) {
    for (int64_t i = 0, has_failed = 1; has_failed != 0; ++i) {
      testing::fail_allocations(testing::Side::kTest, i);
      const paceline_status status = call();
      testing::fault_side = testing::Side::kNone;
      has_failed = testing::num_faults;
      if (has_failed != 0) ++failures[status];
      EXPECT_TRUE(engine_ != nullptr || status != PACELINE_OK);
    }
  }
  EXPECT_GT(failures[PACELINE_OUT_OF_MEMORY], 50);
  // A lack that the library can work around, or one for the message of another error.
  failures.erase(PACELINE_OK);
  failures.erase(PACELINE_INVALID_ARGUMENT);
  EXPECT_THAT(failures, SizeIs(1));
}

TEST_F(CApiErrors, StructuresOfOtherVersionsAreReadByTheirSize) {
  // A newer program: fields that this library does not know may only have their default.
  struct Newer {
    paceline_options options;
    int64_t unknown;
  } newer;
  std::memset(&newer, 0xff, sizeof(newer));
  ASSERT_EQ(paceline_options_init(&newer.options, sizeof(newer)), PACELINE_OK);
  EXPECT_EQ(newer.options.size, sizeof(newer));
  EXPECT_EQ(newer.unknown, 0);
  newer.options.device = "cpu";
  newer.unknown = 1;
  EXPECT_EQ(open(newer.options), PACELINE_UNSUPPORTED);
  EXPECT_THAT(paceline_last_error(), HasSubstr("paceline_options has a field that"));
  newer.unknown = 0;
  ASSERT_EQ(open(newer.options), PACELINE_OK) << paceline_last_error();

  // An older program: the library writes none of the fields that the program does not have.
  paceline_engine_stats stats;
  std::memset(&stats, 0xff, sizeof(stats));
  stats.size = offsetof(paceline_engine_stats, num_finished);
  ASSERT_EQ(paceline_stats(engine_, &stats), PACELINE_OK);
  EXPECT_EQ(stats.num_iterations, 0);
  EXPECT_EQ(stats.num_finished, -1);
  paceline_sampling older = sampling();
  older.max_tokens = 3;
  older.ignore_eos = 1;
  older.top_k = -1;  // not a field of the program
  older.size = offsetof(paceline_sampling, top_k);
  EXPECT_THAT(run(older).at(0).tokens, SizeIs(3));

  // Sizes that the caller has not set.
  paceline_event event = {};
  for (const size_t size : {size_t{0}, size_t{7}, size_t{1} << 20}) {
    stats.size = older.size = event.size = size;
    int64_t id = -1;
    EXPECT_EQ(paceline_stats(engine_, &stats), PACELINE_INVALID_ARGUMENT);
    EXPECT_EQ(add(older, &id), PACELINE_INVALID_ARGUMENT);
    EXPECT_EQ(paceline_poll(engine_, 0, &event), PACELINE_INVALID_ARGUMENT);
    EXPECT_EQ(paceline_sampling_init(&older, size), PACELINE_INVALID_ARGUMENT);
    EXPECT_THAT(paceline_last_error(), HasSubstr(concat("is ", size, "; allowed: sizeof(")));
  }
  event.size = offsetof(paceline_event, token_ids);  // no room for tokens
  EXPECT_EQ(paceline_poll(engine_, 0, &event), PACELINE_INVALID_ARGUMENT);
}
}  // namespace
}  // namespace paceline
