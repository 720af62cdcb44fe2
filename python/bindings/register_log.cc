// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>

#include <paceline/log.h>

#include "bindings.h"

namespace paceline::python {
namespace {

constexpr size_t kMaxLines = 256;

struct Line {
  LogLevel level;
  std::string text;
};

// The lines that wait for Python. Engines append without the GIL, so no engine ever waits for a
// lock of Python: a handler of `logging` may hold its own lock while it closes an engine.
struct Collector {
  std::mutex mutex;
  std::deque<Line> lines;  // the newest kMaxLines
  std::atomic<bool> has_lines{false};
};

// Never destroyed, because engines may log while the process exits.
Collector& collector() {
  static auto* const made = new Collector;
  return *made;
}

void append(LogLevel level, std::string_view text) {
  Collector& all = collector();
  const std::scoped_lock lock(all.mutex);
  if (all.lines.size() == kMaxLines) all.lines.pop_front();
  all.lines.push_back({level, std::string(text)});
  all.has_lines = true;
}

// In a forked child the mutex must be free, and the lines are the parent's.
void prepare_for_fork() {
  static const int registered =
      pthread_atfork([] { collector().mutex.lock(); }, [] { collector().mutex.unlock(); },
                     [] {
                       collector().lines.clear();
                       collector().has_lines = false;
                       collector().mutex.unlock();
                     });
  (void)registered;
}

// As levels of Python's `logging`.
int python_level(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo:
      return 20;
    case LogLevel::kWarning:
      return 30;
    case LogLevel::kError:
      return 40;
  }
  return 40;
}

void collect(bool is_on) {
  const GilRelease release;
  prepare_for_fork();
  if (is_on) {
    set_log_sink(&append);
  } else {
    set_log_sink({});
  }
}

py::list take() {
  py::list result;
  Collector& all = collector();
  if (!all.has_lines.load(std::memory_order_relaxed)) return result;
  std::deque<Line> lines;
  {
    const std::scoped_lock lock(all.mutex);  // held for moments, and never while asking for the GIL
    lines.swap(all.lines);
    all.has_lines = false;
  }
  for (const Line& line : lines) {
    result.append(py::make_tuple(python_level(line.level), line.text));
  }
  return result;
}

}  // namespace

void register_log(py::module_& module) {
  module.def("collect_log_lines", &collect, py::arg("is_on") = true,
             R"doc(Keeps the log lines of engines for `take_log_lines`, at most the newest 256.

Args:
    is_on: False = lines are dropped, which is the default of the process.
)doc");
  module.def("take_log_lines", &take, R"doc(Returns the lines that were kept, and forgets them.

Returns:
    Tuples (level as in `logging`, line), the oldest first.
)doc");
}

}  // namespace paceline::python
