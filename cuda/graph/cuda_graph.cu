// SPDX-License-Identifier: Apache-2.0
#include "graph/cuda_graph.h"

#include <vector>

#include "common/launch.cuh"

namespace paceline {
namespace {

using cuda::check;

__global__ void set_condition_kernel(cudaGraphConditionalHandle handle, const int32_t* keep_going) {
  cuda::let_successor_start();
  cuda::wait_for_predecessor();
  cudaGraphSetConditional(handle, *keep_going != 0 ? 1u : 0u);
}

// A graph under construction.
class Draft {
 public:
  Draft() { check(cudaGraphCreate(&graph_, 0), "cudaGraphCreate"); }
  ~Draft() { cudaGraphDestroy(graph_); }
  Draft(const Draft&) = delete;
  Draft& operator=(const Draft&) = delete;
  [[nodiscard]] cudaGraph_t get() const { return graph_; }

 private:
  cudaGraph_t graph_ = nullptr;
};

// Captures what `enqueue` enqueues into `graph`, after `after`; returns the nodes that nothing
// follows. An exception ends the capture first.
std::vector<cudaGraphNode_t> capture_into(CudaContext& ctx, cudaGraph_t graph,
                                          const std::vector<cudaGraphNode_t>& after,
                                          const CudaGraph::Enqueue& enqueue) {
  check(cudaStreamBeginCaptureToGraph(ctx.stream, graph, after.data(), nullptr, after.size(),
                                      cudaStreamCaptureModeThreadLocal),
        "cudaStreamBeginCaptureToGraph");
  std::vector<cudaGraphNode_t> last;
  try {
    enqueue();
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaGraphNode_t* nodes = nullptr;
    size_t count = 0;
    check(cudaStreamGetCaptureInfo(ctx.stream, &status, nullptr, nullptr, &nodes, nullptr, &count),
          "cudaStreamGetCaptureInfo");
    last.assign(nodes, nodes + count);
  } catch (...) {
    cudaGraph_t broken = nullptr;
    cudaStreamEndCapture(ctx.stream, &broken);
    throw;
  }
  cudaGraph_t same = nullptr;
  check(cudaStreamEndCapture(ctx.stream, &same), "cudaStreamEndCapture");
  return last;
}

}  // namespace

void CudaGraph::reset() noexcept {
  if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
  executable_ = nullptr;
}

void CudaGraph::instantiate(CudaContext& ctx, cudaGraph_t graph) {
  check(cudaGraphInstantiate(&executable_, graph, 0), "cudaGraphInstantiate");
  check(cudaGraphUpload(executable_, ctx.stream), "cudaGraphUpload");
}

CudaGraph CudaGraph::capture(CudaContext& ctx, const Enqueue& enqueue) {
  const Draft draft;
  capture_into(ctx, draft.get(), {}, enqueue);
  CudaGraph result;
  result.instantiate(ctx, draft.get());
  return result;
}

CudaGraph CudaGraph::capture_while(CudaContext& ctx, const Enqueue& before, const Enqueue& body,
                                   const Enqueue& after, const int32_t* keep_going) {
  const Draft draft;
  cudaGraphConditionalHandle handle = 0;
  check(cudaGraphConditionalHandleCreate(&handle, draft.get(), 0, cudaGraphCondAssignDefault),
        "cudaGraphConditionalHandleCreate");
  const auto set_condition = [&] {
    cuda::launch(ctx, "set condition", &set_condition_kernel, dim3(1), dim3(1), 0, handle,
                 keep_going);
  };
  const std::vector<cudaGraphNode_t> ready = capture_into(ctx, draft.get(), {}, [&] {
    before();
    set_condition();
  });
  cudaGraphNodeParams params = {};
  params.type = cudaGraphNodeTypeConditional;
  params.conditional.handle = handle;
  params.conditional.type = cudaGraphCondTypeWhile;
  params.conditional.size = 1;
  cudaGraphNode_t loop = nullptr;
  check(cudaGraphAddNode(&loop, draft.get(), ready.data(), nullptr, ready.size(), &params),
        "cudaGraphAddNode");
  capture_into(ctx, params.conditional.phGraph_out[0], {}, [&] {
    body();
    set_condition();
  });
  capture_into(ctx, draft.get(), {loop}, after);
  CudaGraph result;
  result.instantiate(ctx, draft.get());
  return result;
}

void CudaGraph::launch(CudaContext& ctx) const {
  check(cudaGraphLaunch(executable_, ctx.stream), "cudaGraphLaunch");
}

}  // namespace paceline
