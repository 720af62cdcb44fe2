// SPDX-License-Identifier: Apache-2.0
// Requests, options and models that an engine refuses.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>

#include <paceline/error.h>
#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

using ::testing::HasSubstr;
using testing::small_engine_options;
using testing::tiny_model;
using testing::TinyModel;

TEST(EngineRefusals, RefusesBadRequests) {
  const auto model = tiny_model(TinyModel{}, 3);
  Executor executor(model, nullptr, small_engine_options(0));
  const auto message = [&](Request request) -> std::string {
    try {
      (void)executor.add_request(std::move(request));
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  const auto expect = [&](const std::string& text, std::initializer_list<const char*> parts) {
    for (const char* part : parts) {
      EXPECT_NE(text.find(part), std::string::npos) << text << " lacks " << part;
    }
  };
  expect(message({.prompt = {}}), {"prompt", "empty"});
  expect(message({.prompt = {1, 64}}), {"token 1 is 64", "0 to 63"});
  expect(message({.prompt = {-1}}), {"token 0 is -1", "0 to 63"});
  expect(message({.prompt = std::vector<int32_t>(256, 1)}), {"256 tokens", "at most 255"});
  expect(message({.prompt = {1}, .sampling = {.temperature = std::nan("")}}),
         {"temperature is nan", "0 (greedy) to 1e+06"});
  expect(message({.prompt = {1}, .sampling = {.temperature = -1}}), {"temperature is -1"});
  expect(message({.prompt = {1}, .sampling = {.temperature = 1.1e6}}), {"temperature is 1.1e+06"});
  expect(message({.prompt = {1}, .sampling = {.temperature = 1e-46}}), {"1e-46", "as float32"});
  expect(message({.prompt = {1}, .sampling = {.max_tokens = 0}}), {"max_tokens is 0"});
  expect(message({.prompt = {1}, .sampling = {.stop_token_ids = std::vector<int32_t>(9, 1)}}),
         {"stop_token_ids has 9", "at most 8"});
  expect(message({.prompt = {1}, .sampling = {.stop_token_ids = {3, 64}}}),
         {"stop_token_ids[1] is 64", "0 to 63"});
  const auto refusal = [&](SamplingOptions sampling) {
    return message({.prompt = {1}, .sampling = std::move(sampling)});
  };
  expect(refusal({.max_tokens = 4, .min_tokens = 5}), {"min_tokens is 5", "max_tokens"});
  expect(refusal({.logit_bias = {{.token = 64, .bias = 1}}}), {"logit_bias[0] is 64", "0 to 63"});
  expect(refusal({.logit_bias = {{3, 1}, {5, 1}, {3, 2}}}), {"logit_bias", "token 3", "once"});
  expect(refusal({.logit_bias = {{3, std::nanf("")}}}), {"logit_bias is nan", "finite"});
  expect(refusal({.repetition_penalty = 0}), {"repetition_penalty is 0", "> 0"});
  expect(refusal({.repetition_penalty = 1e-60}), {"repetition_penalty is 1e-60"});
  expect(refusal({.presence_penalty = 1e300}), {"presence_penalty"});
  expect(refusal({.frequency_penalty = std::nan("")}), {"frequency_penalty is nan"});
  expect(refusal({.bad_words = {{1}, {}}}), {"bad_words[1] is empty", "at least one token id"});
  expect(refusal({.bad_words = {{1, 64}}}), {"bad_words[0][1] is 64"});
  expect(refusal({.bad_words = std::vector<std::vector<int32_t>>(129, {1})}),
         {"bad_words has 129", "at most 128"});
  expect(refusal({.bad_words = {std::vector<int32_t>(1025, 1)}}), {"1025 tokens", "at most 1024"});
  expect(refusal({.allowed_token_ids = {-1}}), {"allowed_token_ids[0] is -1"});
  expect(refusal({.top_k = -1}), {"top_k is -1"});
  expect(refusal({.top_p = 0}), {"top_p is 0", "above 0"});
  expect(refusal({.top_p = 1.5}), {"top_p is 1.5"});
  expect(refusal({.min_p = 1.5}), {"min_p is 1.5", "0 (off) to 1"});
  expect(message({.prompt = {1}, .num_speculative_tokens = 1}),
         {"num_speculative_tokens is 1", "0 to 0", "no drafter"});
  expect(message({.prompt = {1}, .num_speculative_tokens = -2}), {"num_speculative_tokens is -2"});
  EXPECT_FALSE(executor.cancel(12345));
}

TEST(EngineRefusals, RefusesBadOptions) {
  const auto model = tiny_model(TinyModel{}, 3);
  const auto message = [&](const std::function<void(ExecutorOptions&)>& change, bool drafts) {
    ExecutorOptions options = small_engine_options(drafts ? 3 : 0);
    change(options);
    try {
      Executor executor(model, drafts ? model : nullptr, options);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  using O = ExecutorOptions;
  EXPECT_NE(message([](O& o) { o.speculative.num_speculative_tokens = 1000000000; }, true)
                .find("num_speculative_tokens is 1000000000; allowed: 0 to 16"),
            std::string::npos);
  EXPECT_NE(message([](O& o) { o.speculative.num_speculative_tokens = 3; }, false).find("drafter"),
            std::string::npos);
  EXPECT_NE(message([](O& o) { o.max_model_len = 513; }, true).find("allowed: 1 to 512"),
            std::string::npos);
  EXPECT_NE(message([](O& o) { o.kv_cache_bytes = 100; }, true).find("kv_cache_bytes"),
            std::string::npos);
  EXPECT_NE(message([](O& o) { o.max_num_batched_tokens = 31; }, true).find("32"),
            std::string::npos);
  EXPECT_NE(message([](O& o) { o.block_size = 0; }, true).find("block_size is 0"),
            std::string::npos);
  EXPECT_NE(message([](O& o) { o.max_num_batched_tokens = (1 << 19) + 1; }, true).find("524288"),
            std::string::npos);
  // Options that would have no effect.
  EXPECT_NE(message([](O& o) { o.speculative.synthetic_acceptance_length = 2.5; }, true)
                .find("synthetic_acceptance_length is 2.5; allowed: 0, unless"),
            std::string::npos);
  EXPECT_NE(message(
                [](O& o) {
                  o.speculative.draft_stop_threshold = 0.5;
                  o.draft_driver = DraftDriver::kWhile;
                },
                false)
                .find("draft_stop_threshold is 0.5 but there is no drafter"),
            std::string::npos);
  EXPECT_NE(message(
                [](O& o) {
                  o.speculative.accept_method = AcceptMethod::kBlock;
                  o.speculative.num_draft_proposals = 7;
                },
                false)
                .find("num_draft_proposals is 7"),
            std::string::npos);
}

TEST(EngineRefusals, RefusesMoreKvGroupsThanThereCanBe) {
  TinyModel shape;
  shape.windows.resize(17);
  std::iota(shape.windows.begin(), shape.windows.end(), 1);
  try {
    Executor executor(tiny_model(shape, 3), nullptr, small_engine_options(0));
    ADD_FAILURE() << "17 groups were taken";
  } catch (const Unsupported& error) {
    EXPECT_THAT(error.what(), HasSubstr("17 KV groups"));
    EXPECT_THAT(error.what(), HasSubstr("at most 16"));
  }
}

}  // namespace
}  // namespace paceline
