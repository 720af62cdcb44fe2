// SPDX-License-Identifier: Apache-2.0
// The C interface: requests give the tokens of the C++ interface.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <paceline/error.h>
#include <paceline/executor.h>
#include <paceline/model.h>
#include <paceline/paceline.h>
#include <paceline/receipt.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "model/weights/safetensors_file.h"
#include "support/c_api_fixture.h"
#include "support/errors.h"

namespace paceline {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using testing::CApi;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::kMaxModelLen;
using testing::kNumSpeculativeTokens;
using testing::message_of;
using ::testing::SizeIs;

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

TEST_F(CApi, ReceiptsAreThoseOfTheCppInterface) {
  setenv("XDG_CACHE_HOME", folder_.path().c_str(), /*overwrite=*/1);  // keeps the digests
  open();
  const ModelFolder folder = load_model_folder(folder_.path());
  ExecutorOptions cpp_options;
  cpp_options.max_model_len = kMaxModelLen;
  const Executor executor(folder.target, folder.draft, cpp_options);
  const ReceiptMaker maker(folder, executor);
  Request request;
  request.prompt = prompt_;
  request.sampling = {.temperature = 1.5,
                      .seed = 5,
                      .max_tokens = 40,
                      .stop_token_ids = {4},
                      .logit_bias = {{3, 0.5f}, {2, -1.f}},
                      .top_k = 20};
  request.num_samples = 3;
  const std::vector<int32_t> biased = {3, 2};
  const std::vector<float> biases = {0.5f, -1.f};
  paceline_sampling given = sampling();
  given.temperature = 1.5;
  given.seed = 5;
  given.max_tokens = 40;
  given.num_samples = 3;
  given.top_k = 20;
  given.logit_bias_token_ids = biased.data();
  given.logit_bias_values = biases.data();
  given.num_logit_bias = 2;
  const auto receipt_of = [&](const paceline_output& output) {
    const char* text = nullptr;
    const paceline_status status =
        paceline_receipt(engine_, prompt_.data(), prompt_.size(), &given, &output, &text);
    EXPECT_EQ(status == PACELINE_OK, text != nullptr);
    return std::string(text != nullptr ? text : paceline_last_error());
  };
  for (const auto& [sample, output] : run(given)) {
    paceline_output ended = {.size = sizeof(ended),
                             .sample = sample,
                             .token_ids = output.tokens.data(),
                             .num_token_ids = output.tokens.size(),
                             .finish_reason = output.last.finish_reason,
                             .with_text = sample % 2};
    const auto form = sample % 2 == 1 ? ReceiptForm::kWithText : ReceiptForm::kDigests;
    const auto reason = static_cast<FinishReason>(output.last.finish_reason);
    const std::string expected = maker.make(request, sample, output.tokens, reason, form);
    EXPECT_EQ(receipt_of(ended), expected);
    EXPECT_EQ(expected.find("\"inputs\"") != std::string::npos, sample % 2 == 1);
    EXPECT_THAT(expected, HasSubstr(concat("\"seed\":\"", 5 + sample, "\"")));
    // What was resumed is output, too.
    Request resumed = request;
    resumed.num_samples = 1;
    resumed.sampling.seed += static_cast<uint64_t>(sample);
    resumed.prompt.insert(resumed.prompt.end(), output.tokens.begin(), output.tokens.begin() + 1);
    resumed.num_resumed_tokens = 1;
    EXPECT_EQ(maker.make(resumed, 0, std::span(output.tokens).subspan(1), reason, form), expected);
    ended.finish_reason = PACELINE_FINISH_ERROR;
    EXPECT_THAT(receipt_of(ended), HasSubstr("finish_reason is kNone or kError; allowed: kStop"));
    ended.finish_reason = static_cast<paceline_finish_reason>(77);
    EXPECT_THAT(receipt_of(ended), HasSubstr("finish_reason is"));
    ended.finish_reason = PACELINE_FINISH_STOP;
    ended.token_ids = nullptr;
    EXPECT_THAT(receipt_of(ended), HasSubstr("token_ids of paceline_output is null"));
    ended.sample = 3;
    ended.num_token_ids = 0;
    EXPECT_THAT(receipt_of(ended), HasSubstr("sample is 3; allowed: 0 to 2"));
  }
  // The folder's files do not have weights that have been updated.
  const SafetensorsFile file(folder.origin.weights.path);
  std::vector<std::vector<std::byte>> values;
  ModelUpdate update{.model = folder.target, .tensors = {}};
  for (const std::string_view name : file.names()) {
    const StoredTensor tensor = *file.find(name);
    ASSERT_EQ(tensor.dtype, "F32");
    file.read(tensor, 0, values.emplace_back(static_cast<size_t>(tensor.bytes)));
    update.tensors.push_back({.name = std::string(name),
                              .dtype = DType::kFloat32,
                              .shape = {tensor.shape.begin(), tensor.shape.end()},
                              .data = values.back().data()});
  }
  update_models(std::vector<ModelUpdate>{update});
  const std::vector<int32_t> tokens = {1, 2};
  const auto make = [&] { (void)maker.make(request, 0, tokens, FinishReason::kLength); };
  EXPECT_THAT(message_of<Unsupported>(make), HasSubstr("the weights have been updated since"));
  EXPECT_THAT(message_of<Unsupported>([&] { ReceiptMaker(folder, executor); }),
              HasSubstr("the weights have been updated since"));
  // A folder whose weights have been written again since.
  const std::string& weights = folder.origin.weights.path;
  std::filesystem::last_write_time(weights, std::filesystem::file_time_type::clock::now());
  EXPECT_THAT(message_of<InvalidArgument>([&] { ReceiptMaker(folder, executor); }),
              HasSubstr("has changed since its weights were loaded"));
  EXPECT_THAT(
      message_of<InvalidArgument>([&] { ReceiptMaker({.target = folder.target}, executor); }),
      HasSubstr("folder was not read by load_model_folder"));
}

TEST_F(CApi, RequestsOfDifferentSaltsShareNoKv) {
  open();
  prompt_.assign(40, 3);
  paceline_sampling given = sampling();
  given.temperature = 0;
  const Output first = run(given).at(0);
  EXPECT_EQ(first.last.num_cached_tokens, 0);
  EXPECT_EQ(run(given).at(0).last.num_cached_tokens, 32);
  for (const std::string& salt : {std::string("a"), std::string("b"), std::string(512, 'b')}) {
    given.cache_salt = salt.c_str();
    for (const int32_t num_cached : {0, 32}) {
      const Output output = run(given).at(0);
      EXPECT_EQ(output.last.num_cached_tokens, num_cached) << salt;
      EXPECT_EQ(output.tokens, first.tokens) << salt;
    }
  }
  given.cache_salt = "";
  EXPECT_EQ(run(given).at(0).last.num_cached_tokens, 32) << "the empty salt is none";
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
    EXPECT_EQ(with.drafters, std::set<std::string>{"draft_model"});
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
    o.prompt_lookup_min = 1;
    o.prompt_lookup_max = 2;
    o.draft_driver = "replay";
  });
  EXPECT_EQ(lookup.tokens, without.tokens);
  EXPECT_EQ(lookup.drafters, std::set<std::string>{"ngram"});
  EXPECT_EQ(without.drafters, std::set<std::string>{});
  const Output standard = run_with([](auto& o) {
    o.rejection_sample_method = "standard";
    o.draft_sample_method = "greedy";
  });
  EXPECT_THAT(standard.tokens, SizeIs(30));
}

TEST_F(CApi, CancelEndsARequest) {
  // One sample after the other, so that most have not begun when the request is cancelled. On a
  // busy machine the engine may end the first ones before it hears of the cancellation.
  constexpr int kSamples = 128;
  paceline_options one_by_one = options();
  one_by_one.max_num_seqs = 1;
  ASSERT_EQ(open(one_by_one), PACELINE_OK) << paceline_last_error();
  paceline_sampling given = sampling();
  given.max_tokens = kMaxModelLen;
  given.ignore_eos = 1;
  given.num_samples = kSamples;
  int64_t id = -1;
  ASSERT_EQ(add(given, &id), PACELINE_OK);
  EXPECT_EQ(paceline_cancel(engine_, id, kSamples), PACELINE_INVALID_ARGUMENT);
  EXPECT_THAT(paceline_last_error(), HasSubstr("sample is 128; allowed: 0 to 127"));
  ASSERT_EQ(paceline_cancel(engine_, id, -1), PACELINE_OK);
  std::vector<paceline_finish_reason> reasons;
  while (reasons.size() < kSamples) {
    paceline_event event = {.size = sizeof(event)};
    ASSERT_EQ(paceline_poll(engine_, 10'000, &event), PACELINE_OK);
    if (event.finish_reason != PACELINE_FINISH_NONE) reasons.push_back(event.finish_reason);
  }
  const auto cancelled = std::ranges::find(reasons, PACELINE_FINISH_CANCELLED);
  EXPECT_NE(cancelled, reasons.end());
  EXPECT_THAT(std::vector(reasons.begin(), cancelled), Each(PACELINE_FINISH_LENGTH));
  EXPECT_THAT(std::vector(cancelled, reasons.end()), Each(PACELINE_FINISH_CANCELLED));
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
}  // namespace
}  // namespace paceline
