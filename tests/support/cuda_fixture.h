// SPDX-License-Identifier: Apache-2.0
#pragma once

// The base of tests of CUDA ops: device memory between guards, a context like an engine's, and the
// arrays of an op case on the device.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/describe_device.h"
#include "device/cuda_context.h"
#include "gemm/gemm_planner.h"
#include "support/gpu.h"
#include "support/op_cases.h"

namespace paceline::testing {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// Memory of the GPU with a guard on either side; move-only, 256 B aligned. What its functions write
// is there when they return: a small upload may otherwise still be under way, and the context's
// stream waits for no other.
template <class T>
class DeviceVector {
 public:
  DeviceVector() = default;
  explicit DeviceVector(int64_t count) : count_(count) {
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, bytes() + 2 * kGuardBytes), "cudaMalloc");
    memory_ = static_cast<std::byte*>(memory);
    check_cuda(cudaMemset(memory_, kGuard, kGuardBytes), "cudaMemset");
    check_cuda(cudaMemset(memory_ + kGuardBytes + bytes(), kGuard, kGuardBytes), "cudaMemset");
    finish();
  }
  explicit DeviceVector(const std::vector<T>& values)
      : DeviceVector(static_cast<int64_t>(values.size())) {
    upload(values);
  }
  ~DeviceVector() { cudaFree(memory_); }
  DeviceVector(DeviceVector&& other) noexcept { swap(other); }
  DeviceVector& operator=(DeviceVector&& other) noexcept {
    swap(other);
    return *this;
  }

  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(memory_ + kGuardBytes); }
  [[nodiscard]] int64_t size() const { return count_; }
  [[nodiscard]] size_t bytes() const { return static_cast<size_t>(count_) * sizeof(T); }

  void upload(const std::vector<T>& values) {
    if (static_cast<int64_t>(values.size()) != count_) throw std::logic_error("size of upload");
    if (count_ == 0) return;
    check_cuda(cudaMemcpy(data(), values.data(), bytes(), cudaMemcpyHostToDevice), "upload");
    finish();
  }
  [[nodiscard]] std::vector<T> download() const {
    std::vector<T> values(static_cast<size_t>(count_));
    if (count_ == 0) return values;
    check_cuda(cudaMemcpy(values.data(), data(), bytes(), cudaMemcpyDeviceToHost), "download");
    return values;
  }
  void fill_bytes(int value) {
    if (count_ > 0) check_cuda(cudaMemset(data(), value, bytes()), "cudaMemset");
    finish();
  }
  void poison() { fill_bytes(0xff); }

  [[nodiscard]] bool are_guards_intact() const {
    std::vector<unsigned char> guards(2 * kGuardBytes);
    check_cuda(cudaMemcpy(guards.data(), memory_, kGuardBytes, cudaMemcpyDeviceToHost), "guard");
    check_cuda(cudaMemcpy(guards.data() + kGuardBytes, memory_ + kGuardBytes + bytes(), kGuardBytes,
                          cudaMemcpyDeviceToHost),
               "guard");
    return std::all_of(guards.begin(), guards.end(),
                       [](unsigned char byte) { return byte == kGuard; });
  }

 private:
  static constexpr size_t kGuardBytes = 256;
  static constexpr unsigned char kGuard = 0xff;  // read as floats these are NaN

  static void finish() { check_cuda(cudaStreamSynchronize(nullptr), "the default stream"); }
  void swap(DeviceVector& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(count_, other.count_);
  }

  std::byte* memory_ = nullptr;
  int64_t count_ = 0;
};

// A context as an engine makes it.
class CudaTestContext {
 public:
  static constexpr int64_t kWorkspaceBytes = int64_t{256} << 20;
  static constexpr int32_t kNumCounters = 65536;

  CudaTestContext() : workspace_(kWorkspaceBytes), counters_(kNumCounters) {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    planner_ = std::make_unique<GemmPlanner>(/*uses_library=*/false);
    counters_.fill_bytes(0);
    context_ = {.stream = stream_,
                .gemm = planner_.get(),
                .workspace = workspace_.data(),
                .workspace_bytes = kWorkspaceBytes,
                .counters = counters_.data(),
                .num_counters = kNumCounters,
                .max_model_len = 4096};
    cuda::describe_device(context_);
    poison_workspace();
  }
  ~CudaTestContext() { cudaStreamDestroy(stream_); }
  CudaTestContext(const CudaTestContext&) = delete;
  CudaTestContext& operator=(const CudaTestContext&) = delete;

  [[nodiscard]] CudaContext& context() { return context_; }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }
  void synchronize() const { check_cuda(cudaStreamSynchronize(stream_), "an op"); }

  // No op may depend on what another one left in the scratch memory.
  void poison_workspace() { workspace_.poison(); }
  [[nodiscard]] bool are_counters_zero() const {
    const std::vector<int32_t> counters = counters_.download();
    return std::all_of(counters.begin(), counters.end(), [](int32_t c) { return c == 0; });
  }
  void reset_counters() { counters_.fill_bytes(0); }
  [[nodiscard]] bool are_guards_intact() const {
    return workspace_.are_guards_intact() && counters_.are_guards_intact();
  }

 private:
  DeviceVector<std::byte> workspace_;
  DeviceVector<int32_t> counters_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<GemmPlanner> planner_;
  CudaContext context_;
};

// One for the whole test binary, since a GPU takes long to start.
inline CudaTestContext& cuda_test_context() {
  static CudaTestContext context;
  return context;
}

// While it lives, ops use the kernels for every GPU, or those of sm_90a.
class KernelChoice {
 public:
  KernelChoice(CudaTestContext& ctx, bool is_portable)
      : context_(ctx.context()), was_portable_(std::exchange(context_.is_portable, is_portable)) {
    context_.has_clusters = !is_portable;
  }
  ~KernelChoice() {
    context_.is_portable = was_portable_;
    context_.has_clusters = !was_portable_;
  }
  KernelChoice(const KernelChoice&) = delete;
  KernelChoice& operator=(const KernelChoice&) = delete;

 private:
  CudaContext& context_;
  bool was_portable_;
};

// A graph of what `enqueue()` puts on the context's stream.
class CapturedGraph {
 public:
  template <class Enqueue>
  CapturedGraph(CudaTestContext& ctx, const Enqueue& enqueue) : stream_(ctx.stream()) {
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "begin capture");
    enqueue();
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamEndCapture(stream_, &graph), "end capture");
    const cudaError_t status = cudaGraphInstantiate(&instance_, graph, 0);
    cudaGraphDestroy(graph);
    check_cuda(status, "cudaGraphInstantiate");
  }
  ~CapturedGraph() { cudaGraphExecDestroy(instance_); }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;
  void launch() const { check_cuda(cudaGraphLaunch(instance_, stream_), "cudaGraphLaunch"); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t instance_ = nullptr;
};

// Arrays that do not depend on the rows, on the device, by name; of one case and seed.
using ConstantCache = std::map<std::string, std::shared_ptr<DeviceVector<std::byte>>>;

// The arrays of an op case on the GPU.
class DeviceInstance {
 public:
  // With `has_values` false float arrays keep any content, for callers that only time the op.
  explicit DeviceInstance(const OpInstance& op, ConstantCache* constants = nullptr,
                          bool has_values = true)
      : op_(op) {
    for (const OpArray& array : op.arrays) {
      const bool is_cached = constants != nullptr && array.is_constant;
      std::shared_ptr<DeviceVector<std::byte>> memory;
      if (is_cached) memory = (*constants)[array.name];
      if (memory == nullptr) {
        memory = std::make_shared<DeviceVector<std::byte>>(cuda_bytes(array));
        if (has_values || !is_float(array.cuda)) memory->upload(initial_bytes(array, true));
        if (is_cached) (*constants)[array.name] = memory;
      }
      memory_.push_back(std::move(memory));
    }
  }

  // Puts back what the op may have changed.
  void reset() {
    for (size_t i = 0; i < memory_.size(); ++i) {
      const OpArray& array = op_.arrays[i];
      if (array.role != Role::kInput) memory_[i]->upload(initial_bytes(array, true));
    }
  }
  [[nodiscard]] Addresses addresses() const {
    std::vector<std::byte*> at;
    for (const auto& memory : memory_) at.push_back(memory->data());
    return Addresses(std::move(at));
  }
  void enqueue(CudaTestContext& ctx) const { enqueue(ctx, addresses()); }
  void enqueue(CudaTestContext& ctx, const Addresses& at) const {
    ctx.context().max_model_len = std::max(op_.max_model_len, 1);
    op_.run_cuda(ctx.context(), at);
  }
  void run(CudaTestContext& ctx) const {
    enqueue(ctx);
    ctx.synchronize();
  }
  [[nodiscard]] std::vector<std::byte> download(size_t array) const {
    return memory_[array]->download();
  }
  [[nodiscard]] ArrayBytes download_all() const {
    ArrayBytes all;
    for (const auto& memory : memory_) all.push_back(memory->download());
    return all;
  }
  // The first array that was written beyond its ends, or an empty string.
  [[nodiscard]] std::string broken_guard() const {
    for (size_t i = 0; i < memory_.size(); ++i) {
      if (!memory_[i]->are_guards_intact()) return op_.arrays[i].name;
    }
    return {};
  }

 private:
  const OpInstance& op_;  // outlives this
  std::vector<std::shared_ptr<DeviceVector<std::byte>>> memory_;
};

}  // namespace paceline::testing
