// SPDX-License-Identifier: Apache-2.0
// Requests, options and models that an engine refuses.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>

#include <paceline/error.h>
#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "support/errors.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

using testing::expect_contains;
using testing::message_of;
using testing::small_engine_options;
using testing::tiny_model;
using testing::TinyModel;

TEST(EngineRefusals, RefusesBadRequests) {
  const auto model = tiny_model(TinyModel{}, 3);
  Executor executor(model, nullptr, small_engine_options(0));
  const auto message = [&](Request request) -> std::string {
    return message_of<InvalidArgument>([&] { (void)executor.add_request(std::move(request)); });
  };
  expect_contains(message({.prompt = {}}), {"prompt", "empty"});
  expect_contains(message({.prompt = {1, 64}}), {"token 1 is 64", "0 to 63"});
  expect_contains(message({.prompt = {-1}}), {"token 0 is -1", "0 to 63"});
  expect_contains(message({.prompt = std::vector<int32_t>(256, 1)}), {"256 tokens", "at most 255"});
  expect_contains(message({.prompt = {1}, .sampling = {.temperature = std::nan("")}}),
                  {"temperature is nan", "0 (greedy) to 1e+06"});
  expect_contains(message({.prompt = {1}, .sampling = {.temperature = -1}}), {"temperature is -1"});
  expect_contains(message({.prompt = {1}, .sampling = {.temperature = 1.1e6}}),
                  {"temperature is 1.1e+06"});
  expect_contains(message({.prompt = {1}, .sampling = {.temperature = 1e-46}}),
                  {"1e-46", "as float32"});
  expect_contains(message({.prompt = {1}, .sampling = {.max_tokens = 0}}), {"max_tokens is 0"});
  expect_contains(
      message({.prompt = {1}, .sampling = {.stop_token_ids = std::vector<int32_t>(9, 1)}}),
      {"stop_token_ids has 9", "at most 8"});
  expect_contains(message({.prompt = {1}, .sampling = {.stop_token_ids = {3, 64}}}),
                  {"stop_token_ids[1] is 64", "0 to 63"});
  const auto refusal = [&](SamplingOptions sampling) {
    return message({.prompt = {1}, .sampling = std::move(sampling)});
  };
  expect_contains(refusal({.max_tokens = 4, .min_tokens = 5}), {"min_tokens is 5", "max_tokens"});
  expect_contains(refusal({.logit_bias = {{.token = 64, .bias = 1}}}),
                  {"logit_bias[0] is 64", "0 to 63"});
  expect_contains(refusal({.logit_bias = {{3, 1}, {5, 1}, {3, 2}}}),
                  {"logit_bias", "token 3", "once"});
  expect_contains(refusal({.logit_bias = {{3, std::nanf("")}}}), {"logit_bias is nan", "finite"});
  expect_contains(refusal({.repetition_penalty = 0}), {"repetition_penalty is 0", "> 0"});
  expect_contains(refusal({.repetition_penalty = 1e-60}), {"repetition_penalty is 1e-60"});
  expect_contains(refusal({.presence_penalty = 1e300}), {"presence_penalty"});
  expect_contains(refusal({.frequency_penalty = std::nan("")}), {"frequency_penalty is nan"});
  expect_contains(refusal({.bad_words = {{1}, {}}}),
                  {"bad_words[1] is empty", "at least one token id"});
  expect_contains(refusal({.bad_words = {{1, 64}}}), {"bad_words[0][1] is 64"});
  expect_contains(refusal({.bad_words = std::vector<std::vector<int32_t>>(129, {1})}),
                  {"bad_words has 129", "at most 128"});
  expect_contains(refusal({.bad_words = {std::vector<int32_t>(1025, 1)}}),
                  {"1025 tokens", "at most 1024"});
  expect_contains(refusal({.allowed_token_ids = {-1}}), {"allowed_token_ids[0] is -1"});
  expect_contains(refusal({.top_k = -1}), {"top_k is -1"});
  expect_contains(refusal({.top_p = 0}), {"top_p is 0", "above 0"});
  expect_contains(refusal({.top_p = 1.5}), {"top_p is 1.5"});
  expect_contains(refusal({.min_p = 1.5}), {"min_p is 1.5", "0 (off) to 1"});
  expect_contains(message({.prompt = {1}, .num_speculative_tokens = 1}),
                  {"num_speculative_tokens is 1", "0 to 0", "no drafter"});
  expect_contains(message({.prompt = {1}, .num_speculative_tokens = -2}),
                  {"num_speculative_tokens is -2"});
  expect_contains(message({.prompt = {1}, .cache_salt = std::string(513, 's')}),
                  {"cache_salt has 513 bytes", "at most 512"});
  expect_contains(message({.prompt = {1}, .cache_salt = std::string("ab\0c", 4)}),
                  {"cache_salt has a NUL character at byte 2"});
  EXPECT_FALSE(executor.cancel(12345));
}

TEST(EngineRefusals, RefusesBadOptions) {
  const auto model = tiny_model(TinyModel{}, 3);
  const auto message = [&](const std::function<void(ExecutorOptions&)>& change, bool drafts) {
    ExecutorOptions options = small_engine_options(drafts ? 3 : 0);
    change(options);
    return message_of<InvalidArgument>(
        [&] { Executor executor(model, drafts ? model : nullptr, options); });
  };
  using O = ExecutorOptions;
  expect_contains(message([](O& o) { o.speculative.num_speculative_tokens = 1000000000; }, true),
                  {"num_speculative_tokens is 1000000000; allowed: 0 to 16"});
  expect_contains(message([](O& o) { o.speculative.num_speculative_tokens = 3; }, false),
                  {"drafter"});
  expect_contains(message([](O& o) { o.max_model_len = 513; }, true), {"allowed: 1 to 512"});
  expect_contains(message([](O& o) { o.kv_cache_bytes = 100; }, true), {"kv_cache_bytes"});
  expect_contains(message([](O& o) { o.max_num_batched_tokens = 31; }, true), {"32"});
  expect_contains(message([](O& o) { o.block_size = 0; }, true), {"block_size is 0"});
  expect_contains(message([](O& o) { o.max_num_batched_tokens = (1 << 19) + 1; }, true),
                  {"524288"});
  // Options that would have no effect.
  expect_contains(message([](O& o) { o.speculative.synthetic_acceptance_length = 2.5; }, true),
                  {"synthetic_acceptance_length is 2.5, but rejection_sample_method is 'coupled'"});
  expect_contains(message([](O& o) { o.speculative.draft_stop_threshold = 0.5; }, false),
                  {"draft_stop_threshold is 0.5 but there is no drafter"});
  for (const DraftDriver driver :
       {DraftDriver::kUnrolled, DraftDriver::kReplay, DraftDriver::kEager}) {
    expect_contains(message(
                        [&](O& o) {
                          o.speculative.draft_stop_threshold = 0.5;
                          o.speculative.draft_driver = driver;
                        },
                        true),
                    {"draft_stop_threshold is 0.5, but draft_driver is '", "only 'while'"});
  }
  expect_contains(message(
                      [](O& o) {
                        o.speculative.rejection_sample_method = AcceptMethod::kBlock;
                        o.speculative.draft_proposals = 7;
                      },
                      false),
                  {"draft_proposals is 7 but there is no drafter"});
}

TEST(EngineRefusals, RefusesMoreKvGroupsThanThereCanBe) {
  TinyModel shape;
  shape.windows.resize(17);
  std::iota(shape.windows.begin(), shape.windows.end(), 1);
  expect_contains(message_of<Unsupported>([&] {
                    Executor executor(tiny_model(shape, 3), nullptr, small_engine_options(0));
                  }),
                  {"17 KV groups", "at most 16"});
}

}  // namespace
}  // namespace paceline
