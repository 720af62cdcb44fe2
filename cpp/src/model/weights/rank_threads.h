// SPDX-License-Identifier: Apache-2.0
#pragma once

// The threads that fill the weights of ranks. Each rank has one for as long as its weights are
// loaded, because the staging buffers of a GPU belong to a thread.

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device/cpu_context.h"

namespace paceline {

class RankThreads final {
 public:
  // Throws DeviceError when the system refuses a thread.
  explicit RankThreads(int32_t num_ranks);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  // Calls body(rank, context) for every rank, on the rank's thread and with its part of the cores,
  // and returns when all calls have returned. Rethrows the exception of the first rank that threw.
  using Body = std::function<void(size_t rank, const CpuContext& ctx)>;
  void run(const Body& body);

 private:
  struct Rank {
    std::unique_ptr<ThreadPool> pool;
    CpuContext ctx;
    std::exception_ptr failure;
    std::thread thread;
  };
  void work(size_t rank);
  void stop() noexcept;

  std::vector<Rank> ranks_;
  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  const Body* body_ = nullptr;
  int64_t num_runs_ = 0;
  size_t num_running_ = 0;
  bool stops_ = false;
};

}  // namespace paceline
