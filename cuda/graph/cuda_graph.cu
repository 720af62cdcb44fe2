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

// A graph under construction, which this object destroys.
class OwnedGraph {
 public:
  OwnedGraph() { check(cudaGraphCreate(&graph_, 0), "cudaGraphCreate"); }
  ~OwnedGraph() { cudaGraphDestroy(graph_); }
  OwnedGraph(const OwnedGraph&) = delete;
  OwnedGraph& operator=(const OwnedGraph&) = delete;
  [[nodiscard]] cudaGraph_t get() const { return graph_; }

 private:
  cudaGraph_t graph_ = nullptr;
};

// Captures what `enqueue` enqueues into `graph`, after the nodes `after`. Returns the nodes that
// have no successor. If `enqueue` throws, the capture ends before the exception leaves.
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
  const OwnedGraph graph;
  capture_into(ctx, graph.get(), {}, enqueue);
  CudaGraph result;
  result.instantiate(ctx, graph.get());
  return result;
}

CudaGraph CudaGraph::capture_while(CudaContext& ctx, const Enqueue& before, const Enqueue& body,
                                   const Enqueue& after, const int32_t* keep_going) {
  const OwnedGraph graph;
  cudaGraphConditionalHandle handle = 0;
  check(cudaGraphConditionalHandleCreate(&handle, graph.get(), 0, cudaGraphCondAssignDefault),
        "cudaGraphConditionalHandleCreate");
  const auto set_condition = [&] {
    cuda::launch(ctx, "set condition", &set_condition_kernel, dim3(1), dim3(1), 0, handle,
                 keep_going);
  };
  const std::vector<cudaGraphNode_t> ready = capture_into(ctx, graph.get(), {}, [&] {
    before();
    set_condition();
  });
  cudaGraphNodeParams params = {};
  params.type = cudaGraphNodeTypeConditional;
  params.conditional.handle = handle;
  params.conditional.type = cudaGraphCondTypeWhile;
  params.conditional.size = 1;
  cudaGraphNode_t loop = nullptr;
  check(cudaGraphAddNode(&loop, graph.get(), ready.data(), nullptr, ready.size(), &params),
        "cudaGraphAddNode");
  capture_into(ctx, params.conditional.phGraph_out[0], {}, [&] {
    body();
    set_condition();
  });
  capture_into(ctx, graph.get(), {loop}, after);
  CudaGraph result;
  result.instantiate(ctx, graph.get());
  return result;
}

void CudaGraph::launch(CudaContext& ctx) const {
  check(cudaGraphLaunch(executable_, ctx.stream), "cudaGraphLaunch");
}

}  // namespace paceline
