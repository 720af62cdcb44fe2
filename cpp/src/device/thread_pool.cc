// SPDX-License-Identifier: Apache-2.0
#include "device/thread_pool.h"

#include "base/check.h"
#include "base/start_thread.h"

namespace paceline {
namespace {

constexpr int32_t kSpins = 8000;         // a few hundred microseconds, then sleep
constexpr int32_t kSpinsToYield = 2000;  // of the caller, for parts that workers have claimed

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

constexpr uint32_t generation_of(uint64_t loop) { return static_cast<uint32_t>(loop >> 32); }
constexpr uint32_t num_parts_of(uint64_t loop) {
  return static_cast<uint32_t>(loop >> 16) & 0xffff;
}
constexpr uint32_t next_part_of(uint64_t loop) { return static_cast<uint32_t>(loop) & 0xffff; }

}  // namespace

ThreadPool::ThreadPool(int32_t num_threads) {
  PACELINE_CHECK(num_threads >= 1, "num_threads = ", num_threads);
  const auto num_workers = static_cast<size_t>(num_threads) - 1;
  try {
    workers_.reserve(num_workers);
    while (workers_.size() < num_workers) workers_.emplace_back([this] { work(); });
    // After the threads, so that a limit on memory for stacks is reported as one on threads. The
    // bytes are not written, so those that no op uses take no memory.
    scratch_.reserve(num_workers + 1);
    while (scratch_.size() <= num_workers) {
      scratch_.push_back(
          std::make_unique_for_overwrite<std::byte[]>(kScratchBytes + kScratchAlignment));
    }
  } catch (const std::system_error& error) {
    const size_t num_started = workers_.size();
    stop();
    throw_out_of_threads(
        concat("the threads of the CPU device: num_threads is ", num_threads, ", which takes ",
               num_workers, " threads beside the calling one, and ", num_started,
               " could be started"),
        error);
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  stops_.store(true);
  generation_.fetch_add(1);
  generation_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

std::byte* ThreadPool::scratch() const {
  // By identity and not by a thread_local index, which the system may allocate lazily and so end
  // the process when memory is short.
  const std::thread::id self = std::this_thread::get_id();
  size_t index = 0;  // of the owner
  for (size_t i = 0; i < workers_.size(); ++i) {
    if (workers_[i].get_id() == self) index = i + 1;
  }
  const auto address = reinterpret_cast<uintptr_t>(scratch_[index].get());
  return scratch_[index].get() + (kScratchAlignment - address % kScratchAlignment);
}

bool ThreadPool::claim_and_do(uint32_t generation) {
  uint64_t loop = loop_.load(std::memory_order_acquire);
  for (;;) {
    if (generation_of(loop) != generation || next_part_of(loop) >= num_parts_of(loop)) return false;
    if (loop_.compare_exchange_weak(loop, loop + 1, std::memory_order_acq_rel)) break;
  }
  // The loop cannot end before this part is done, so call_ and body_ do not change.
  call_(body_, next_part_of(loop));
  num_done_.fetch_add(1, std::memory_order_release);
  return true;
}

void ThreadPool::run(int64_t num_parts, Call call, const void* body) {
  if (num_parts <= 1 || workers_.empty()) {
    for (int64_t part = 0; part < num_parts; ++part) call(body, part);
    return;
  }
  PACELINE_CHECK(num_parts <= kMaxParts, "num_parts = ", num_parts);
  call_ = call;
  body_ = body;
  num_done_.store(0, std::memory_order_relaxed);
  const uint32_t generation = generation_of(loop_.load(std::memory_order_relaxed)) + 1;
  loop_.store(uint64_t{generation} << 32 | static_cast<uint64_t>(num_parts) << 16);
  generation_.store(generation);
  // A worker counts itself as sleeping before it reads the generation a last time.
  if (num_sleeping_.load() > 0) generation_.notify_all();
  while (claim_and_do(generation)) {
  }
  for (int32_t spins = 0; num_done_.load(std::memory_order_acquire) < num_parts; ++spins) {
    if (spins < kSpinsToYield) {
      pause_briefly();
    } else {
      std::this_thread::yield();  // a worker was interrupted in the middle of its part
    }
  }
}

void ThreadPool::work() {
  prepare_to_throw();
  uint32_t seen = 0;
  for (;;) {
    int32_t spins = 0;
    while (generation_.load(std::memory_order_acquire) == seen && ++spins < kSpins) {
      pause_briefly();
    }
    if (generation_.load() == seen) {
      num_sleeping_.fetch_add(1);
      generation_.wait(seen);
      num_sleeping_.fetch_sub(1);
    }
    if (stops_.load()) return;
    seen = generation_.load(std::memory_order_acquire);
    while (claim_and_do(seen)) {
    }
  }
}

}  // namespace paceline
