// SPDX-License-Identifier: Apache-2.0
#pragma once

// The CUDA backend as a Runner. A launch neither copies, allocates nor waits, unless a scored chunk
// must be copied to the host: inputs and results pass through the iteration ring in pinned memory
// (graph/iteration_ring.h).

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "device/cuda_context.h"
#include "device/device_arena.h"
#include "gemm/gemm_planner.h"
#include "graph/cuda_graph.h"
#include "runner/iteration_runner.h"
#include "runner/runner.h"

namespace paceline {

struct CudaRunnerOptions {
  RunnerOptions runner;
  bool poison_pool = false;  // fill the KV pool with NaN at start
  // Ranks on one GPU, for tests: a kernel that starts early would hold the multiprocessors that the
  // kernel needs for which it waits.
  bool shares_gpu = false;
  // Called while graphs are captured; may be null.
  std::function<void(int32_t done, int32_t total)> on_capture;
};

class CudaRunner final : public Runner {
 public:
  // `draft` may be null. The layout must outlive the runner. Throws Unsupported (shapes, dtypes),
  // OutOfMemory, DeviceError.
  CudaRunner(std::shared_ptr<const Model> target, std::shared_ptr<const Model> draft,
             const KvLayout& layout, const CudaRunnerOptions& options);
  // The bytes of its workspace, without captured graphs. Touches no device.
  [[nodiscard]] static int64_t count_workspace(const std::shared_ptr<const Model>& target,
                                               const std::shared_ptr<const Model>& draft,
                                               const KvLayout& layout,
                                               const RunnerOptions& options);
  ~CudaRunner() override;
  CudaRunner(const CudaRunner&) = delete;
  CudaRunner& operator=(const CudaRunner&) = delete;

  void bind(Batch& batch) override { runner_->bind(batch); }
  void launch(const Batch& batch) override;
  [[nodiscard]] std::vector<KernelTime> launch_traced(const Batch& batch) override;
  void abort(std::exception_ptr cause) override;
  void wait(int64_t iteration) override;
  [[nodiscard]] int64_t completed() override;
  [[nodiscard]] std::span<const SequenceResult> results(int64_t iteration) override {
    return runner_->results(iteration);
  }
  [[nodiscard]] std::span<const TokenLogprob> logprobs(int64_t iteration) override {
    return runner_->logprobs(iteration);
  }
  [[nodiscard]] std::span<const ProposedDrafts> drafts(int64_t iteration) override {
    return runner_->drafts(iteration);
  }
  [[nodiscard]] Timing timing(int64_t iteration) override { return runner_->timing(iteration); }
  [[nodiscard]] std::array<ExpertCounts, kNumModels> experts(int64_t iteration) override {
    return runner_->experts(iteration);
  }
  void poison(GroupId group, BlockId block) override;
  [[nodiscard]] KvPools shared_kv_pools() const override { return {runner_->shared_kv_pool()}; }
  [[nodiscard]] std::map<std::string, int64_t, std::less<>> workspace_bytes() const override {
    return arena_.bytes_by_purpose();
  }
  [[nodiscard]] int64_t graph_bytes() const override { return graph_bytes_; }

  // For tests and traces. Call these only while the device is idle.
  [[nodiscard]] const IterationBuffers& buffers() const { return runner_->buffers(); }
  [[nodiscard]] const Iteration& iteration() const { return runner_->iteration(); }
  [[nodiscard]] CudaContext& context() { return context_; }
  [[nodiscard]] std::byte* kv_pool() const { return runner_->kv_pool().data(); }
  void synchronize();

 private:
  void warm_up();
  void capture(const std::function<void(int32_t done, int32_t total)>& on_capture);
  void begin_launch(const Batch& batch);

  int32_t max_in_flight_;
  int32_t gpu_;
  DeviceArena arena_;
  CudaContext context_;
  std::unique_ptr<GemmPlanner> planner_;
  std::unique_ptr<IterationRunner<CudaContext, CudaGraph>> runner_;
  int64_t graph_bytes_ = 0;
  // One thread may launch while another one waits.
  std::atomic<int64_t> launched_ = -1;
  std::atomic<int64_t> completed_ = -1;
  std::mutex mutex_;
  std::exception_ptr failure_;  // that abort() has given

  // The destructor waits for the stream. The member is the last one and thus destroyed first, so
  // nothing that kernels in flight use is freed before, even if the constructor throws.
  struct Stream {
    ~Stream() { reset(); }
    void reset() noexcept;
    CUstream_st* handle = nullptr;
  };
  Stream stream_;
};

}  // namespace paceline
