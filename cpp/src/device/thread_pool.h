// SPDX-License-Identifier: Apache-2.0
#pragma once

// The threads of one CPU device. The caller and the workers claim the parts of a parallel loop one
// by one. The caller never waits for a worker that has not claimed a part, so a busy machine slows
// a loop down but cannot stall it. Between loops workers spin for a moment, since the next op
// follows within microseconds, and then sleep.
//
// This is not OpenMP, whose runtime counts the threads of every team in the process. A second
// engine, the loader or another library's teams on the same cores make it stop spinning, and every
// op then pays for a wake-up. On two cores an iteration took 1.5 times as long
// (docs/performance.md).
//
// Only one thread at a time, the owner, may call `parallel_for`. Calls must not be nested.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace paceline {

class ThreadPool {
 public:
  // Starts num_threads - 1 workers; the caller of parallel_for is the last thread. Throws
  // DeviceError when the system refuses a thread, or std::bad_alloc, after it has joined those that
  // started.
  explicit ThreadPool(int32_t num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  static constexpr int64_t kMaxParts = 65535;
  static constexpr size_t kScratchBytes = 1 << 20;
  static constexpr size_t kScratchAlignment = 64;

  // Calls body(part) for every part in [0, num_parts), num_parts <= kMaxParts, and returns when all
  // calls have returned. Bodies must not throw.
  template <class Body>
  void parallel_for(int64_t num_parts, const Body& body) {
    run(
        num_parts,
        [](const void* erased, int64_t part) { (*static_cast<const Body*>(erased))(part); }, &body);
  }

  // kScratchBytes of the calling thread, which is a worker or the owner, aligned to
  // kScratchAlignment. Allocated with the pool, because a worker that runs out of memory in a body
  // would end the process.
  [[nodiscard]] std::byte* scratch() const;

 private:
  using Call = void (*)(const void* body, int64_t part);

  void run(int64_t num_parts, Call call, const void* body);
  bool claim_and_do(uint32_t generation);
  void work();
  void stop();  // ends and joins the workers

  // One word, so that a late worker can never claim a part of a loop other than the one it sees:
  // generation << 32 | number of parts << 16 | next part.
  alignas(64) std::atomic<uint64_t> loop_{0};
  alignas(64) std::atomic<int64_t> num_done_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};  // sleeping workers wait for its change
  std::atomic<int32_t> num_sleeping_{0};
  std::atomic<bool> stops_{false};
  Call call_ = nullptr;  // of the current loop; valid until all of its parts are done
  const void* body_ = nullptr;
  std::vector<std::unique_ptr<std::byte[]>> scratch_;  // of the owner, then of the workers
  std::vector<std::thread> workers_;
};

}  // namespace paceline
