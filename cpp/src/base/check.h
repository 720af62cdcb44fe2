// SPDX-License-Identifier: Apache-2.0
#pragma once

// PACELINE_CHECK(condition, parts...) checks an invariant of the library. It throws InternalError
// with the parts streamed into the message. User input is checked with InvalidArgument instead.

#include <exception>
#include <source_location>
#include <sstream>
#include <string>

#include <paceline/error.h>

namespace paceline {

// Streams all parts into one string.
template <class... Parts>
[[nodiscard]] std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// What an exception says.
[[nodiscard]] std::string message_of(const std::exception_ptr& cause);

[[noreturn]] void throw_check_failure(const char* condition, const std::string& message,
                                      std::source_location where);

}  // namespace paceline

#define PACELINE_CHECK(condition, ...)                                                   \
  do {                                                                                   \
    if (!(condition)) [[unlikely]] {                                                     \
      ::paceline::throw_check_failure(#condition,                                        \
                                      ::paceline::concat("" __VA_OPT__(, ) __VA_ARGS__), \
                                      std::source_location::current());                  \
    }                                                                                    \
  } while (false)
