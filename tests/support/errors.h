// SPDX-License-Identifier: Apache-2.0
#pragma once

// What errors say, for tests that compare it.

#include <string>

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

}  // namespace paceline::testing
