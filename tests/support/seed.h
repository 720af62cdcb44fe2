// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where a test's random numbers come from, and how much of it is run. A failure shows the seed;
// PACELINE_SEED repeats it.

#include <cstdint>
#include <cstdlib>

#include <gtest/gtest.h>

namespace paceline::testing {

// PACELINE_SEED, or `fallback`.
[[nodiscard]] inline uint64_t seed_from_env(uint64_t fallback) {
  const char* const text = std::getenv("PACELINE_SEED");
  return text == nullptr ? fallback : std::strtoull(text, nullptr, 10);
}

// The same for tests that have one seed, not a range of them.
[[nodiscard]] inline uint64_t base_seed() {
  static const uint64_t seed = seed_from_env(20240607);
  return seed;
}

#define TRACE_SEED() \
  SCOPED_TRACE(::testing::Message() << "PACELINE_SEED=" << ::paceline::testing::base_seed())

// PACELINE_TEST_LEVEL; 3 is everything.
[[nodiscard]] inline int test_level() {
  const char* const text = std::getenv("PACELINE_TEST_LEVEL");
  return text == nullptr ? 1 : std::atoi(text);
}

}  // namespace paceline::testing
