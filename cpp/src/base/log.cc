// SPDX-License-Identifier: Apache-2.0
#include "base/log.h"

#include <pthread.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "base/boundary.h"

namespace paceline {
namespace {

struct SinkSlot {
  std::mutex mutex;  // held to copy or swap the pointer, never while a sink is called or destroyed
  std::shared_ptr<const LogSink> sink;
  std::atomic<bool> has_sink{false};
};

// Never destroyed, because threads of engines may log while the process exits.
union NeverDestroyed {
  constexpr NeverDestroyed() : slot() {}
  ~NeverDestroyed() {}
  SinkSlot slot;
};
constinit NeverDestroyed never_destroyed;

SinkSlot& slot() { return never_destroyed.slot; }

// fork() copies a mutex that another thread holds. Held during fork(), it is free in the child.
void prepare_for_fork() {
  static const int registered = pthread_atfork(
      [] { slot().mutex.lock(); }, [] { slot().mutex.unlock(); }, [] { slot().mutex.unlock(); });
  (void)registered;
}

}  // namespace

void set_log_sink(LogSink sink) {
  at_boundary([&] {
    std::shared_ptr<const LogSink> next;
    if (sink) next = std::make_shared<const LogSink>(std::move(sink));
    prepare_for_fork();
    SinkSlot& all = slot();
    {
      const std::scoped_lock lock(all.mutex);
      all.sink.swap(next);
      all.has_sink = all.sink != nullptr;
    }
    next.reset();  // the former sink, now that the lock is free
  });
}

bool has_log_sink() noexcept { return slot().has_sink.load(std::memory_order_relaxed); }

void log_line(LogLevel level, std::string_view line) {
  std::shared_ptr<const LogSink> sink;
  {
    SinkSlot& all = slot();
    const std::scoped_lock lock(all.mutex);
    sink = all.sink;
  }
  if (sink == nullptr) return;
  try {
    (*sink)(level, line);
  } catch (const abi::__forced_unwind&) {
    throw;  // the thread ends
  } catch (...) {
    return;  // documented: exceptions of the sink are ignored
  }
}

}  // namespace paceline
