// SPDX-License-Identifier: Apache-2.0
#pragma once

// Captured graphs of the CUDA backend, with the interface of CpuGraph (graph/cpu_graph.h). A graph
// is built once, at start, and replayed; whatever changes between replays is memory at fixed
// addresses.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <utility>

#include "device/cuda_context.h"

namespace paceline {

// An instantiated graph; move-only.
class CudaGraph {
 public:
  CudaGraph() = default;
  ~CudaGraph() { reset(); }
  CudaGraph(CudaGraph&& other) noexcept : executable_(std::exchange(other.executable_, nullptr)) {}
  CudaGraph& operator=(CudaGraph&& other) noexcept {
    if (this != &other) {
      reset();
      executable_ = std::exchange(other.executable_, nullptr);
    }
    return *this;
  }

  using Enqueue = std::function<void()>;

  // Captures everything that `enqueue` puts on the context's stream.
  [[nodiscard]] static CudaGraph capture(CudaContext& ctx, const Enqueue& enqueue);

  // Captures a graph that runs `before`, then repeats `body` while *keep_going (device memory, [1])
  // is not 0, read before every round, then runs `after`. The WHILE node is at the top level of its
  // graph, and the graph is instantiated once. Its body may contain kernels only.
  [[nodiscard]] static CudaGraph capture_while(CudaContext& ctx, const Enqueue& before,
                                               const Enqueue& body, const Enqueue& after,
                                               const int32_t* keep_going);

  void launch(CudaContext& ctx) const;

 private:
  void instantiate(CudaContext& ctx, cudaGraph_t graph);
  void reset() noexcept;

  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace paceline
