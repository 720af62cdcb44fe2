// SPDX-License-Identifier: Apache-2.0
#pragma once

// Times the kernels of one iteration one by one. The events between kernels prevent overlap with
// the predecessor, so the sum exceeds the duration of the iteration.

#include <cuda_runtime_api.h>

#include <string>
#include <utility>
#include <vector>

#include "common/status.h"

namespace paceline {

class KernelTrace {
 public:
  explicit KernelTrace(cudaStream_t stream) : stream_(stream) { record("begin"); }
  ~KernelTrace() {
    for (const auto& mark : marks_) cudaEventDestroy(mark.second);
  }
  KernelTrace(const KernelTrace&) = delete;
  KernelTrace& operator=(const KernelTrace&) = delete;

  // The label replaces the name of the kernel that is enqueued next.
  void label_next(std::string label) { label_ = std::move(label); }

  // Call after enqueuing a kernel.
  void mark(const char* kernel) {
    record(label_.empty() ? std::string(kernel) : std::exchange(label_, {}));
  }

  // (name, microseconds) in order. Requires that the stream has been synchronized.
  [[nodiscard]] std::vector<std::pair<std::string, float>> times() const {
    std::vector<std::pair<std::string, float>> times;
    for (size_t i = 1; i < marks_.size(); ++i) {
      float ms = 0;
      cuda::check(cudaEventElapsedTime(&ms, marks_[i - 1].second, marks_[i].second),
                  "cudaEventElapsedTime");
      times.emplace_back(marks_[i].first, ms * 1000.0f);
    }
    return times;
  }

 private:
  void record(std::string name) {
    cudaEvent_t event = nullptr;
    cuda::check(cudaEventCreate(&event), "cudaEventCreate");
    marks_.emplace_back(std::move(name), event);
    // External: an ordinary event of a captured stream would only order the graph.
    cuda::check(cudaEventRecordWithFlags(event, stream_, cudaEventRecordExternal),
                "cudaEventRecord");
  }

  cudaStream_t stream_;
  std::string label_;
  std::vector<std::pair<std::string, cudaEvent_t>> marks_;
};

}  // namespace paceline
