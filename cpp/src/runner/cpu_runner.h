// SPDX-License-Identifier: Apache-2.0
#pragma once

// The CPU backend as an asynchronous device: its own thread takes launched iterations in order and
// runs them.

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device/cpu_context.h"
#include "device/device_arena.h"
#include "device/thread_pool.h"
#include "graph/cpu_graph.h"
#include "runner/iteration_runner.h"
#include "runner/runner.h"

namespace paceline {

struct CpuRunnerOptions {
  RunnerOptions runner;
  int32_t num_threads = 1;
  // Iteration i starts only once i + lateness has been launched or `wait` has been called for i.
  int32_t lateness = 0;
  bool poison_pool = false;  // fill the KV pool with NaN at start
};

class CpuRunner final : public Runner {
 public:
  // `draft` may be null. The layout must outlive the runner.
  CpuRunner(std::shared_ptr<const Model> target, std::shared_ptr<const Model> draft,
            const KvLayout& layout, const CpuRunnerOptions& options);
  ~CpuRunner() override;
  CpuRunner(const CpuRunner&) = delete;
  CpuRunner& operator=(const CpuRunner&) = delete;

  void bind(Batch& batch) override { runner_.bind(batch); }
  void launch(const Batch& batch) override;
  void release(int64_t iteration) override;
  void abort(std::exception_ptr cause) override;
  void wait(int64_t iteration) override;
  [[nodiscard]] int64_t completed() override;
  [[nodiscard]] std::span<const SequenceResult> results(int64_t iteration) override {
    return runner_.results(iteration);
  }
  [[nodiscard]] std::span<const TokenLogprob> logprobs(int64_t iteration) override {
    return runner_.logprobs(iteration);
  }
  [[nodiscard]] std::span<const ProposedDrafts> drafts(int64_t iteration) override {
    return runner_.drafts(iteration);
  }
  [[nodiscard]] Timing timing(int64_t iteration) override { return runner_.timing(iteration); }
  [[nodiscard]] std::array<ExpertCounts, kNumModels> experts(int64_t iteration) override {
    return runner_.experts(iteration);
  }
  void poison(GroupId group, BlockId block) override;
  [[nodiscard]] KvPools shared_kv_pools() const override { return {runner_.shared_kv_pool()}; }
  [[nodiscard]] std::map<std::string, int64_t, std::less<>> workspace_bytes() const override {
    return arena_.bytes_by_purpose();
  }

  // For tests that read device memory and plant faults in recorded calls. Call these only while the
  // device is idle.
  [[nodiscard]] const IterationBuffers& buffers() const { return runner_.buffers(); }
  [[nodiscard]] std::byte* kv_pool() const { return runner_.kv_pool().data(); }
  [[nodiscard]] std::vector<Program*> programs();
  // Does the work of one launch on the calling thread.
  void run_now(const Batch& batch) { runner_.run(batch); }

 private:
  void device_loop();

  CpuRunnerOptions options_;
  ThreadPool threads_;
  CpuContext context_;
  DeviceArena arena_;
  IterationRunner<CpuContext, CpuGraph> runner_;

  std::mutex mutex_;
  std::condition_variable wake_device_;
  std::condition_variable wake_host_;
  std::vector<const Batch*> launches_;  // by iteration modulo its size
  int64_t launched_ = -1;
  int64_t completed_ = -1;
  int64_t awaited_ = -1;  // the newest iteration that `release` or `wait` was called for
  bool stops_ = false;
  std::exception_ptr failure_;
  std::thread thread_;  // last: everything above must exist before it starts
};

}  // namespace paceline
