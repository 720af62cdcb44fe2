// SPDX-License-Identifier: Apache-2.0
#pragma once

// Logprobs of an engine compared with the logits that it returns for the same tokens.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include <paceline/executor.h>

#include "support/jobs.h"

namespace paceline::testing {

// Every job must have asked for `vocab` logprobs of its prompt and of its output. Scores prompt and
// output of each job and compares; returns how many logprobs have been compared.
inline int64_t expect_logprobs_of_logits(Executor& executor, const std::vector<Job>& jobs,
                                         const std::vector<Outcome>& outcomes, int32_t vocab) {
  int64_t num_compared = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (outcomes[i].reason == FinishReason::kError) continue;
    std::vector<int32_t> tokens = jobs[i].prompt;
    tokens.insert(tokens.end(), outcomes[i].tokens.begin(), outcomes[i].tokens.end());
    std::vector<std::vector<TokenLogprob>> rows = outcomes[i].prompt_logprobs;
    rows.insert(rows.end(), outcomes[i].logprobs.begin(), outcomes[i].logprobs.end());
    EXPECT_EQ(rows.size(), tokens.size() - 1);
    if (rows.size() != tokens.size() - 1) return 0;
    (void)executor.add_request({.prompt = tokens, .score_prompt = true}).value();
    std::shared_ptr<const std::vector<float>> logits;
    while (logits == nullptr) {
      for (const RequestEvent& event : executor.poll(100)) logits = event.logits;
    }
    for (size_t row = 0; row < rows.size(); ++row) {
      const float* const x = logits->data() + row * static_cast<size_t>(vocab);
      double sum = 0;
      for (int32_t id = 0; id < vocab; ++id) sum += std::exp(double{x[id]});
      EXPECT_EQ(rows[row].size(), static_cast<size_t>(vocab) + 1);
      EXPECT_EQ(rows[row][0].token, tokens[row + 1]);
      for (const TokenLogprob& entry : rows[row]) {
        EXPECT_NEAR(entry.logprob, x[entry.token] - std::log(sum), 2e-6);
        EXPECT_EQ(entry.rank,
                  1 + std::count_if(x, x + vocab, [&](float y) { return y > x[entry.token]; }));
        ++num_compared;
      }
    }
  }
  return num_compared;
}

}  // namespace paceline::testing
