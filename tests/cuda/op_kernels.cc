// SPDX-License-Identifier: Apache-2.0
//
// Prints which kernels each case of the op table launches, for tests/cuda/sanitizers.py, which
// chooses cases by them. Nothing runs: the launches are captured, with addresses in memory that
// holds nothing. A line is
//
//   name of the case <tab> bytes of its arrays {<tab> kernel <space> threads <space> shared bytes}
//
// with the kernel's mangled name, the threads of a block, and its static and dynamic shared memory.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "support/cuda_fixture.h"
#include "support/op_cases.h"
#include "support/seed.h"

namespace paceline::testing {
namespace {

// Addresses of arrays that nothing reads or writes.
class Arena {
 public:
  Addresses place(const OpInstance& op) {
    std::vector<int64_t> offsets;
    num_bytes_ = 0;
    for (const OpArray& array : op.arrays) {
      offsets.push_back(num_bytes_);
      num_bytes_ += (cuda_bytes(array) + kAlignment - 1) / kAlignment * kAlignment;
    }
    if (num_bytes_ > memory_.size()) memory_ = DeviceVector<std::byte>(num_bytes_);
    std::vector<std::byte*> at;
    for (const int64_t offset : offsets) at.push_back(memory_.data() + offset);
    return Addresses(std::move(at));
  }
  [[nodiscard]] int64_t num_bytes() const { return num_bytes_; }  // of the arrays placed last

 private:
  static constexpr int64_t kAlignment = 256;
  DeviceVector<std::byte> memory_{int64_t{1} << 30};
  int64_t num_bytes_ = 0;
};

std::string kernel_of(cudaGraphNode_t node) {
  cudaKernelNodeParams launch = {};
  check_cuda(cudaGraphKernelNodeGetParams(node, &launch), "cudaGraphKernelNodeGetParams");
  const char* name = nullptr;
  check_cuda(cudaFuncGetName(&name, launch.func), "cudaFuncGetName");
  cudaFuncAttributes attributes = {};
  check_cuda(cudaFuncGetAttributes(&attributes, launch.func), "cudaFuncGetAttributes");
  const uint64_t threads = uint64_t{launch.blockDim.x} * launch.blockDim.y * launch.blockDim.z;
  return std::string(name) + " " + std::to_string(threads) + " " +
         std::to_string(attributes.sharedSizeBytes + launch.sharedMemBytes);
}

// The kernels that `enqueue()` launches, in no particular order.
template <class Enqueue>
std::vector<std::string> captured_kernels(cudaStream_t stream, const Enqueue& enqueue) {
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
  enqueue();
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(stream, &graph), "end capture");
  size_t count = 0;
  check_cuda(cudaGraphGetNodes(graph, nullptr, &count), "cudaGraphGetNodes");
  std::vector<cudaGraphNode_t> nodes(count);
  if (count > 0) check_cuda(cudaGraphGetNodes(graph, nodes.data(), &count), "cudaGraphGetNodes");
  std::vector<std::string> kernels;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    check_cuda(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
    if (type == cudaGraphNodeTypeKernel) kernels.push_back(kernel_of(node));
  }
  cudaGraphDestroy(graph);
  std::sort(kernels.begin(), kernels.end());
  kernels.erase(std::unique(kernels.begin(), kernels.end()), kernels.end());
  return kernels;
}

void print_kernels() {
  CudaTestContext& ctx = cuda_test_context();
  Arena arena;
  for (const OpCase& c : op_cases()) {
    const OpInstance op = c.make(base_seed());
    const Addresses at = arena.place(op);
    ctx.context().max_model_len = std::max(op.max_model_len, 1);
    std::string line = c.name + "\t" + std::to_string(arena.num_bytes());
    for (const std::string& kernel :
         captured_kernels(ctx.stream(), [&] { op.run_cuda(ctx.context(), at); })) {
      line += "\t" + kernel;
    }
    std::puts(line.c_str());
  }
}

}  // namespace
}  // namespace paceline::testing

int main() {
  try {
    paceline::testing::print_kernels();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "op_kernels: %s\n", error.what());
    return 1;
  }
  return 0;
}
