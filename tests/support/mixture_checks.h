// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks that engines with a mixture of experts must pass on every device.

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include <paceline/executor.h>

#include "support/jobs.h"

namespace paceline::testing {

// A prompt of 2,048 tokens in one chunk gives the output that it gives in chunks of 100. `model`
// has two layers of 128 experts with top_k 4; its routers spread the rows over all experts or,
// where goes_together, choose a few. `drafter` drafts beside the small chunks; it may be null.
inline void expect_a_chunk_takes_any_routing(
    const std::shared_ptr<const Model>& model, const std::shared_ptr<const Model>& drafter,
    bool goes_together, int32_t max_tokens,
    const std::function<ExecutorOptions(int32_t)>& options_of) {
  std::mt19937_64 random(12);
  Job job{.prompt = {}, .sampling = {.max_tokens = max_tokens}};
  for (int32_t i = 0; i < 2048; ++i) job.prompt.push_back(static_cast<int32_t>(random() % 64));
  std::vector<Outcome> outcomes;
  for (const int32_t chunk : {2048, 100}) {
    const bool drafts = chunk == 100 && drafter != nullptr;
    ExecutorOptions options = options_of(drafts ? 3 : 0);
    options.max_model_len = 2304;
    options.max_num_batched_tokens = 2048 + 256;
    options.prefill_chunk_size = chunk;
    Executor executor(model, drafts ? drafter : nullptr, options);
    outcomes.push_back(run(executor, {job}).front());
    if (chunk < 2048) continue;
    const int32_t num_hit = executor.iteration_times().target_experts_hit.front();
    // The last layer computes the experts of one row only: of the last, which draws.
    const int32_t of_first = num_hit - 4;
    EXPECT_TRUE(goes_together ? of_first <= 16 : of_first >= 100 && of_first <= 128) << num_hit;
  }
  EXPECT_EQ(outcomes[0].tokens, outcomes[1].tokens);
}

}  // namespace paceline::testing
