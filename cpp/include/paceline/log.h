// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where the library's log lines go. Without a sink it prints nothing.

#include <cstdint>
#include <functional>
#include <string_view>

#include <paceline/export.h>

namespace paceline {

// How serious a line is.
enum class LogLevel : uint8_t {
  kInfo,     // facts of the start, and the figures of an interval (ExecutorOptions::log_interval_s)
  kWarning,  // requests ended with an error, the engine goes on
  kError,    // the engine has failed
};

// Receives one line without a newline. Lines never contain prompts or outputs.
using LogSink = std::function<void(LogLevel level, std::string_view line)>;

// Sets the sink of the process in place of the former one; an empty function removes it. Any thread
// may call it. The sink is called on the threads of engines and on those that construct them,
// perhaps on several at once, and the library holds no lock meanwhile; the engine waits for it. A
// call of the former sink may still be under way when this returns; the former sink is destroyed
// after it. Exceptions of the sink are ignored.
PACELINE_API void set_log_sink(LogSink sink);

}  // namespace paceline
