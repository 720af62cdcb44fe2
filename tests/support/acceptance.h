// SPDX-License-Identifier: Apache-2.0
#pragma once

// The acceptance rate of an engine on random prompts.

#include <cstdint>
#include <random>
#include <utility>

#include <gtest/gtest.h>

#include "engine/engine.h"

namespace paceline::testing {

// Of eight requests with a vocabulary of 64 tokens.
inline double acceptance_rate(Engine& engine, double temperature) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 8; ++i) {
    Request request;
    for (int t = 0; t < 5 + 3 * i; ++t) request.prompt.push_back(random() % 64);
    request.sampling = {.temperature = temperature, .seed = random(), .max_tokens = 60};
    EXPECT_TRUE(engine.add_request(std::move(request)).has_value());
  }
  int64_t accepted = 0;
  int64_t drafted = 0;
  for (int left = 8; left > 0;) {
    for (const RequestEvent& event : engine.poll(100)) {
      if (event.finish_reason == FinishReason::kNone) continue;
      accepted += event.counters.num_accepted_tokens;
      drafted += event.counters.num_draft_tokens;
      --left;
    }
  }
  return static_cast<double>(accepted) / static_cast<double>(drafted);
}

}  // namespace paceline::testing
