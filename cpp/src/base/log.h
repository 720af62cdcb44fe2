// SPDX-License-Identifier: Apache-2.0
#pragma once

// Lines for the log sink. They are best effort: without memory a line is lost.

#include <string_view>

#include <paceline/log.h>

#include "base/check.h"

namespace paceline {

// Whether lines are wanted at all. Costs one load.
[[nodiscard]] bool has_log_sink() noexcept;

// Sends a line to the sink, if there is one. Ignores its exceptions.
void log_line(LogLevel level, std::string_view line);

// The same with a line that `make` returns, which is called only if there is a sink. Ignores the
// exceptions of both.
template <class Make>
void log_made(LogLevel level, Make make) {
  if (!has_log_sink()) return;
  try {
    log_line(level, make());
  } catch (const std::exception&) {
    return;  // no memory for the line
  }
}

}  // namespace paceline
