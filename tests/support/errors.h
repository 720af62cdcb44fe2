// SPDX-License-Identifier: Apache-2.0
#pragma once

// What errors say, for tests that compare it.

#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace paceline::testing {

// The message of the exception that `step` throws; "" when it throws none.
template <class Error, class Step>
std::string message_of(Step step) {
  try {
    step();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

inline void expect_contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
  }
}

}  // namespace paceline::testing
