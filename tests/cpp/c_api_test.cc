// SPDX-License-Identifier: Apache-2.0
// The C interface: every mistake of a caller is a status with a message, structures of other
// versions are read by their size, and requests give the tokens of the C++ interface.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <paceline/error.h>
#include <paceline/executor.h>
#include <paceline/model.h>
#include <paceline/paceline.h>

#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "c_api/c_struct.h"
#include "support/described_model.h"
#include "support/failing_allocations.h"
#include "support/safetensors_writer.h"

namespace paceline {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr int32_t kNumSpeculativeTokens = 4;
constexpr int32_t kMaxModelLen = 96;

// A folder with a target, itself as its drafter, and the end-of-sequence id 4.
class CApi : public ::testing::Test {
 protected:
  CApi() { testing::write_tiny_folder(folder_, kNumSpeculativeTokens); }
  ~CApi() override { paceline_close(engine_); }

  static paceline_options options() {
    paceline_options options;
    EXPECT_EQ(paceline_options_init(&options, sizeof(options)), PACELINE_OK);
    options.device = "cpu";
    options.max_model_len = kMaxModelLen;
    options.num_threads = 1;
    return options;
  }
  static paceline_sampling sampling() {
    paceline_sampling sampling;
    EXPECT_EQ(paceline_sampling_init(&sampling, sizeof(sampling)), PACELINE_OK);
    return sampling;
  }
  paceline_status open(const paceline_options& options) {
    return paceline_open(folder_.path().c_str(), &options, &engine_);
  }
  void open() { ASSERT_EQ(open(options()), PACELINE_OK) << paceline_last_error(); }
  paceline_status add(const paceline_sampling& sampling, int64_t* id) {
    return paceline_add(engine_, prompt_.data(), prompt_.size(), &sampling, id);
  }

  struct Output {
    std::vector<int32_t> tokens;
    paceline_event last = {};
    std::string error;
  };
  // Runs a request to its end. Returns its samples.
  std::map<int32_t, Output> run(const paceline_sampling& sampling) {
    int64_t id = -1;
    EXPECT_EQ(add(sampling, &id), PACELINE_OK) << paceline_last_error();
    std::map<int32_t, Output> outputs;
    for (int32_t num_ended = 0; num_ended < sampling.num_samples;) {
      paceline_event event = {.size = sizeof(event)};
      const paceline_status status = paceline_poll(engine_, 10'000, &event);
      EXPECT_EQ(status, PACELINE_OK) << paceline_last_error();
      if (status != PACELINE_OK) break;
      EXPECT_EQ(event.request_id, id);
      Output& output = outputs[event.sample];
      output.tokens.insert(output.tokens.end(), event.token_ids,
                           event.token_ids + event.num_tokens);
      if (event.finish_reason == PACELINE_FINISH_NONE) continue;
      output.last = event;
      output.error = event.error != nullptr ? event.error : "";
      ++num_ended;
    }
    return outputs;
  }

  std::vector<int32_t> prompt_ = {1, 2, 3};
  test::TemporaryFolder folder_;
  paceline_engine* engine_ = nullptr;
};

TEST_F(CApi, NullArgumentsAreErrors) {
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

TEST_F(CApi, BadFoldersAreModelFileErrors) {
  for (const std::string& path : {folder_.file("nowhere"), std::string("/dev/null")}) {
    paceline_engine* engine = reinterpret_cast<paceline_engine*>(this);
    EXPECT_EQ(paceline_open(path.c_str(), nullptr, &engine), PACELINE_MODEL_FILE_ERROR) << path;
    EXPECT_THAT(paceline_last_error(), HasSubstr(path + "/paceline.json"));
    EXPECT_EQ(engine, nullptr);
  }
}

// The message names the field, so each field reaches the option of its name.
TEST_F(CApi, EveryOptionIsCheckedByItsName) {
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
      {[](auto& o) { o.accept_method = "synthetic"; },
       "accept_method is \"synthetic\"; allowed: \"coupled\", \"standard\", \"block\""},
      {[](auto& o) { o.greedy_drafts = 1; }, "samples_drafts is false"},
      {[](auto& o) { o.num_draft_proposals = 9; }, "num_draft_proposals is 9"},
      {[](auto& o) { o.draft_stop_threshold = 0.5; }, "draft_stop_threshold is 0.5"},
      {[](auto& o) { o.ngram_min = 3; }, "ngram_max is 0; allowed: 1"},
      {[](auto& o) { o.ngram_max = 3; }, "ngram_min is 0; allowed: 1 to 3"},
      {[](auto& o) { o.draft_driver = ""; }, "draft_driver is \"\""},
  };
  for (const auto& [change, message] : changes) {
    paceline_options changed = options();
    change(changed);
    EXPECT_EQ(open(changed), PACELINE_INVALID_ARGUMENT) << message;
    EXPECT_THAT(paceline_last_error(), HasSubstr(message));
  }
}

TEST_F(CApi, EverySamplingFieldIsCheckedByItsName) {
  open();
  const std::vector<int32_t> ids(9, 1);
  const std::vector<float> values(9, 1);
  const std::vector<size_t> lengths = {0};
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

TEST_F(CApi, GivesTheTokensOfTheCppInterface) {
  open();
  const ModelFolder folder = load_model_folder(folder_.path());
  ExecutorOptions cpp_options;
  cpp_options.max_model_len = kMaxModelLen;
  Executor executor(folder.target, folder.draft, cpp_options);
  for (const double temperature : {0.0, 1.5}) {
    Request request;
    request.prompt = prompt_;
    request.sampling = {
        .temperature = temperature, .seed = 5, .max_tokens = 40, .stop_token_ids = {4}};
    request.num_samples = 3;
    request.num_speculative_tokens = temperature > 0 ? 1 : -1;
    ASSERT_TRUE(executor.add_request(request).has_value());
    std::map<int32_t, std::vector<int32_t>> expected;
    std::map<int32_t, RequestEvent> last;
    while (last.size() < 3) {
      for (const RequestEvent& event : executor.poll(10'000)) {
        auto& tokens = expected[event.sample];
        tokens.insert(tokens.end(), event.token_ids.begin(), event.token_ids.end());
        if (event.finish_reason != FinishReason::kNone) last[event.sample] = event;
      }
    }
    paceline_sampling given = sampling();
    given.temperature = temperature;
    given.seed = 5;
    given.max_tokens = 40;
    given.num_samples = 3;
    given.num_speculative_tokens = temperature > 0 ? 1 : -1;
    const std::map<int32_t, Output> outputs = run(given);
    ASSERT_THAT(outputs, SizeIs(3));
    for (const auto& [sample, output] : outputs) {
      EXPECT_EQ(output.tokens, expected[sample]);
      EXPECT_EQ(static_cast<int>(output.last.finish_reason),
                static_cast<int>(last[sample].finish_reason));
      EXPECT_EQ(output.last.total_draft_tokens, last[sample].counters.num_draft_tokens);
      EXPECT_EQ(output.last.total_accepted_tokens, last[sample].counters.num_accepted_tokens);
      EXPECT_EQ(output.last.total_iterations, last[sample].counters.num_iterations);
      EXPECT_EQ(output.last.num_cached_tokens, last[sample].num_cached_tokens);
      EXPECT_GT(output.last.arrival_us, 0);
      EXPECT_GE(output.last.finish_us, output.last.first_token_us);
    }
  }
}

TEST_F(CApi, ARequestGoesOnAfterItsFirstTokens) {
  open();
  paceline_sampling given = sampling();
  given.temperature = 1.5;
  given.seed = 5;
  given.max_tokens = 40;
  given.ignore_eos = 1;
  given.repetition_penalty = 1.2;
  const std::vector<int32_t> whole = run(given).at(0).tokens;
  ASSERT_THAT(whole, SizeIs(40));
  prompt_.insert(prompt_.end(), whole.begin(), whole.begin() + 17);
  given.num_resumed_tokens = 17;
  EXPECT_EQ(run(given).at(0).tokens, std::vector<int32_t>(whole.begin() + 17, whole.end()));
}

TEST_F(CApi, SamplingArraysReachTheRequest) {
  open();
  const std::vector<int32_t> two = {2};
  const std::vector<float> large = {1e6F};
  const std::vector<size_t> one = {1};
  paceline_sampling given = sampling();
  given.max_tokens = 6;
  given.ignore_eos = 1;
  {
    paceline_sampling allowed = given;
    allowed.allowed_token_ids = two.data();
    allowed.num_allowed_token_ids = 1;
    EXPECT_THAT(run(allowed).at(0).tokens, AllOf(SizeIs(6), Each(2)));
    // A bad word that excludes the only allowed token ends the request.
    allowed.bad_words_token_ids = two.data();
    allowed.bad_words_lengths = one.data();
    allowed.num_bad_words = 1;
    const Output output = run(allowed).at(0);
    EXPECT_EQ(output.last.finish_reason, PACELINE_FINISH_ERROR);
    EXPECT_THAT(output.error, HasSubstr("token"));
  }
  paceline_sampling biased = given;
  biased.logit_bias_token_ids = two.data();
  biased.logit_bias_values = large.data();
  biased.num_logit_bias = 1;
  const Output output = run(biased).at(0);
  EXPECT_THAT(output.tokens, AllOf(SizeIs(6), Each(2)));
  EXPECT_EQ(output.last.finish_reason, PACELINE_FINISH_LENGTH);
  biased.stop_token_ids = two.data();
  biased.num_stop_token_ids = 1;
  EXPECT_EQ(run(biased).at(0).last.finish_reason, PACELINE_FINISH_STOP);
  // The folder's end-of-sequence id ends a sample unless ignore_eos is set.
  const std::vector<int32_t> eos = {4};
  paceline_sampling ends = given;
  ends.allowed_token_ids = eos.data();
  ends.num_allowed_token_ids = 1;
  EXPECT_THAT(run(ends).at(0).tokens, SizeIs(6));
  ends.ignore_eos = 0;
  EXPECT_THAT(run(ends).at(0).tokens, SizeIs(1));
}

TEST_F(CApi, OptionsChooseHowToSpeculate) {
  paceline_sampling given = sampling();
  given.max_tokens = 30;
  given.ignore_eos = 1;
  std::vector<int32_t> plain;
  const auto run_with = [&](const std::function<void(paceline_options&)>& change) {
    paceline_options changed = options();
    change(changed);
    EXPECT_EQ(open(changed), PACELINE_OK) << paceline_last_error();
    Output output = run(given).at(0);
    paceline_close(engine_);
    engine_ = nullptr;
    return output;
  };
  const Output without = run_with([](auto& o) { o.plain_decoding = 1; });
  EXPECT_EQ(without.last.total_draft_tokens, 0);
  for (const int32_t k : {0, 2}) {
    const Output with = run_with([&](auto& o) {
      o.num_speculative_tokens = k;
      o.adaptive_drafts = -1;
    });
    EXPECT_EQ(with.tokens, without.tokens);
    EXPECT_GT(with.last.total_draft_tokens, 0);
    const int32_t drafts = k > 0 ? k : kNumSpeculativeTokens;
    EXPECT_LE(with.last.total_draft_tokens, with.last.total_iterations * drafts);
    EXPECT_GT(with.last.total_draft_tokens, with.last.total_iterations * (drafts - 1));
  }
  for (const int32_t adaptive_drafts : {0, 1}) {
    EXPECT_EQ(run_with([&](auto& o) { o.adaptive_drafts = adaptive_drafts; }).tokens,
              without.tokens);
  }
  const Output lookup = run_with([](auto& o) {
    o.num_speculative_tokens = 3;
    o.ngram_min = 1;
    o.ngram_max = 2;
    o.draft_driver = "replay";
  });
  EXPECT_EQ(lookup.tokens, without.tokens);
  const Output standard = run_with([](auto& o) {
    o.accept_method = "standard";
    o.greedy_drafts = 1;
  });
  EXPECT_THAT(standard.tokens, SizeIs(30));
}

TEST_F(CApi, CancelEndsARequest) {
  open();
  paceline_sampling given = sampling();
  given.max_tokens = kMaxModelLen;
  given.ignore_eos = 1;
  given.num_samples = 2;
  int64_t id = -1;
  ASSERT_EQ(add(given, &id), PACELINE_OK);
  EXPECT_EQ(paceline_cancel(engine_, id, 2), PACELINE_INVALID_ARGUMENT);
  EXPECT_THAT(paceline_last_error(), HasSubstr("sample is 2; allowed: 0 to 1"));
  ASSERT_EQ(paceline_cancel(engine_, id, -1), PACELINE_OK);
  std::vector<paceline_finish_reason> reasons;
  while (reasons.size() < 2) {
    paceline_event event = {.size = sizeof(event)};
    ASSERT_EQ(paceline_poll(engine_, 10'000, &event), PACELINE_OK);
    if (event.finish_reason != PACELINE_FINISH_NONE) reasons.push_back(event.finish_reason);
  }
  EXPECT_THAT(reasons, Each(PACELINE_FINISH_CANCELLED));
  EXPECT_EQ(paceline_cancel(engine_, id, -1), PACELINE_NOT_RUNNING);
  paceline_event event = {.size = sizeof(event)};
  EXPECT_EQ(paceline_poll(engine_, 0, &event), PACELINE_NO_EVENT);
  EXPECT_EQ(paceline_poll(engine_, -1, &event), PACELINE_INVALID_ARGUMENT);
}

TEST_F(CApi, AFullQueueIsAStatus) {
  paceline_options bounded = options();
  bounded.max_waiting_requests = 2;
  bounded.max_num_seqs = 1;
  ASSERT_EQ(open(bounded), PACELINE_OK);
  paceline_sampling given = sampling();
  given.max_tokens = kMaxModelLen;
  given.ignore_eos = 1;
  paceline_status status = PACELINE_OK;
  for (int i = 0; i < 1000 && status == PACELINE_OK; ++i) {
    int64_t id = -1;
    status = add(given, &id);
  }
  EXPECT_EQ(status, PACELINE_QUEUE_FULL);
  EXPECT_THAT(paceline_last_error(), HasSubstr("queue is full"));
}

TEST_F(CApi, ThreadsShareAnEngine) {
  constexpr int kRequests = 8;
  open();
  paceline_sampling given = sampling();
  given.max_tokens = 20;
  given.ignore_eos = 1;
  std::mutex mutex;
  std::map<int64_t, int32_t> num_tokens;
  int num_ended = 0;
  const auto work = [&] {
    for (int i = 0; i < kRequests; ++i) {
      int64_t id = -1;
      EXPECT_EQ(add(given, &id), PACELINE_OK);
    }
    EXPECT_EQ(paceline_cancel(engine_, 1'000'000, -1), PACELINE_NOT_RUNNING);
    for (;;) {
      paceline_event event = {.size = sizeof(event)};
      const paceline_status status = paceline_poll(engine_, 20, &event);
      EXPECT_THAT(status, AnyOf(PACELINE_OK, PACELINE_NO_EVENT)) << paceline_last_error();
      const std::scoped_lock lock(mutex);
      if (status == PACELINE_OK) {
        num_tokens[event.request_id] += event.num_tokens;
        if (event.finish_reason != PACELINE_FINISH_NONE) ++num_ended;
      }
      if (num_ended == 2 * kRequests) return;
    }
  };
  ASSERT_EQ(paceline_options_init(nullptr, 0), PACELINE_INVALID_ARGUMENT);
  const std::string mine = paceline_last_error();
  std::thread first(work);
  std::thread second(work);
  first.join();
  second.join();
  EXPECT_EQ(paceline_last_error(), mine);  // each thread has its own
  ASSERT_THAT(num_tokens, SizeIs(2 * kRequests));
  for (const auto& [id, count] : num_tokens) EXPECT_EQ(count, 20) << id;

  paceline_engine_stats stats = {.size = sizeof(stats)};
  ASSERT_EQ(paceline_stats(engine_, &stats), PACELINE_OK);
  EXPECT_EQ(stats.num_emitted_tokens, 2 * kRequests * 20);
  EXPECT_EQ(stats.num_finished, 2 * kRequests);
  EXPECT_GT(stats.num_accepted_tokens, 0);
  EXPECT_LE(stats.num_accepted_tokens, stats.num_draft_tokens);
  EXPECT_LE(stats.num_draft_tokens, stats.num_verify_windows * kNumSpeculativeTokens);
  EXPECT_EQ(stats.num_running + stats.num_waiting, 0);
  EXPECT_GT(stats.kv_pool_bytes, 0);
  EXPECT_LE(stats.kv_free_bytes, stats.kv_pool_bytes);
  EXPECT_GT(stats.weight_bytes, 0);
}

TEST_F(CApi, TheLogCallbackGetsLines) {
  struct Log {
    std::mutex mutex;
    std::vector<std::string> lines;
  } log;
  const auto keep = [](paceline_log_level level, const char* line, void* user_data) {
    EXPECT_EQ(level, PACELINE_LOG_INFO) << line;
    Log& to = *static_cast<Log*>(user_data);
    const std::scoped_lock lock(to.mutex);
    to.lines.emplace_back(line);
  };
  ASSERT_EQ(paceline_set_log_callback(keep, &log), PACELINE_OK);
  open();
  ASSERT_EQ(paceline_set_log_callback(nullptr, nullptr), PACELINE_OK);
  paceline_close(engine_);
  engine_ = nullptr;
  const size_t count = log.lines.size();
  EXPECT_GT(count, 0);
  EXPECT_THAT(log.lines, Each(::testing::Not(HasSubstr("\n"))));
  open();
  EXPECT_THAT(log.lines, SizeIs(count));
}

// Fails the first allocation of a call on this thread, then the second, and so on. Each call must
// return a status; an exception would end the process.
TEST_F(CApi, LackOfMemoryIsAStatus) {
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

TEST_F(CApi, StructuresOfOtherVersionsAreReadByTheirSize) {
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
