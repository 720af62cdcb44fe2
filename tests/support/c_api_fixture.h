// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <paceline/paceline.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "support/described_model.h"
#include "support/safetensors_writer.h"

namespace paceline::testing {

inline constexpr int32_t kNumSpeculativeTokens = 4;
inline constexpr int32_t kMaxModelLen = 96;

// A folder with a target, itself as its drafter, and the end-of-sequence id 4.
class CApi : public ::testing::Test {
 protected:
  CApi() { write_tiny_folder(folder_, kNumSpeculativeTokens); }
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
    std::set<std::string> drafters;
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
      EXPECT_EQ(event.drafter != nullptr, event.num_draft_tokens > 0);
      if (event.drafter != nullptr) output.drafters.insert(event.drafter);
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

}  // namespace paceline::testing
