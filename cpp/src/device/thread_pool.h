// SPDX-License-Identifier: Apache-2.0
#pragma once

// The threads of one CPU device. A parallel loop is cut into parts that the caller and the workers
// claim one by one; the caller takes part and never waits for a worker that has not come, so a busy
// machine costs speed but no stall. Workers spin for a moment between loops, since the next op
// follows within microseconds, and sleep after that.
//
// Why not OpenMP: its runtime counts the threads of every team in the process. A second engine, the
// loader or another library's teams on the same cores make it stop spinning, and every op then pays
// a wake-up: measured on two cores, an iteration took half as long again (docs/performance.md).
//
// `parallel_for` is for one thread at a time, the owner; it must not be nested.

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace paceline {

class ThreadPool {
 public:
  // The caller of parallel_for is one of `num_threads`. Throws DeviceError where the system refuses
  // one of the others; those that run have ended then.
  explicit ThreadPool(int32_t num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  static constexpr int64_t kMaxParts = 65535;

  // Calls body(part) for every part in [0, num_parts), num_parts <= kMaxParts, and returns when all
  // have been done. Bodies must not throw.
  template <class Body>
  void parallel_for(int64_t num_parts, const Body& body) {
    run(
        num_parts,
        [](const void* erased, int64_t part) { (*static_cast<const Body*>(erased))(part); }, &body);
  }

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
  alignas(64) std::atomic<uint32_t> generation_{0};  // what sleepers wait on
  std::atomic<int32_t> num_sleeping_{0};
  std::atomic<bool> stops_{false};
  Call call_ = nullptr;  // of the current loop; valid while it has unclaimed or undone parts
  const void* body_ = nullptr;
  std::vector<std::thread> workers_;
};

}  // namespace paceline
