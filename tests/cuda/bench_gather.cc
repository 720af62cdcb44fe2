// SPDX-License-Identifier: Apache-2.0
//
// Times the exchange of ranks alone (`gather_columns`), one rank a GPU: microseconds of an exchange
// by the bytes that every rank has afterwards. A figure is the median of several replays of a graph
// of exchanges, on the rank that takes longest.
//
// Usage: bench_gather [NUM_GPUS] (default: all that the process sees).

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <numeric>
#include <vector>

#include <paceline/device.h>

#include "common/describe_device.h"
#include "common/device_scope.h"
#include "device/cuda_context.h"
#include "device/device_memory.h"
#include "device/rank_group.h"
#include "ops/gather.h"

namespace paceline {
namespace {

constexpr int32_t kExchanges = 256;  // of a graph
constexpr int32_t kReplays = 21;
constexpr int32_t kRowBytes = 8192;  // 4,096 columns in bfloat16
constexpr int64_t kMessages[] = {8 << 10, 32 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20};
constexpr int64_t kMaxBytes = 1 << 20;

// A rank: its GPU, a stream, and the arrays of its exchanges.
class Rank {
 public:
  Rank(int32_t gpu, int32_t rank, int32_t num_ranks, RankGroup& group)
      : gpu_(gpu), memory_(cuda_memory(gpu), kMaxBytes + 2 * kCountBytes, "bench_gather") {
    const cuda::DeviceScope scope(gpu_);
    cuda::describe_device(context_);
    cuda::check(cudaStreamCreateWithFlags(&context_.stream, cudaStreamNonBlocking), "a stream");
    cuda::check(cudaEventCreate(&begin_), "an event");
    cuda::check(cudaEventCreate(&end_), "an event");
    std::byte* const rows = memory_.data() + kMaxBytes;
    constexpr int32_t kMost = kMaxBytes / kRowBytes;
    set_rows(rows, 0);
    set_rows(rows + kCountBytes, kMost);
    params_ = {.num_rows = reinterpret_cast<const int32_t*>(rows),
               .max_rows = kMost,
               .x = nullptr,
               .x_stride = kRowBytes / 2,
               .columns = {.num_ranks = num_ranks},
               .y = memory_.data(),
               .dtype = DType::kBFloat16,
               .ranks = {.group = &group, .rank = rank}};
    const int32_t columns = kRowBytes / 2;
    for (int32_t r = 0; r < num_ranks; ++r) {
      params_.columns.first[static_cast<size_t>(r) + 1] = columns * (r + 1) / num_ranks;
    }
    params_.x = memory_.data() + int64_t{params_.columns.of(rank).first} * 2;
    // Loads the kernels, for which the driver may wait for the device: no rank waits here.
    for (const int64_t bytes : kMessages) exchange(bytes);
    cuda::check(cudaStreamSynchronize(context_.stream), "an exchange without rows");
    params_.num_rows = reinterpret_cast<const int32_t*>(rows + kCountBytes);
  }
  ~Rank() {
    const cuda::DeviceScope scope(gpu_);
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(context_.stream);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  // Captures exchanges of this many bytes.
  void capture(int64_t bytes) {
    const cuda::DeviceScope scope(gpu_);
    cudaGraph_t graph = nullptr;
    cuda::check(cudaStreamBeginCapture(context_.stream, cudaStreamCaptureModeThreadLocal),
                "a capture");
    for (int32_t i = 0; i < kExchanges; ++i) exchange(bytes);
    cuda::check(cudaStreamEndCapture(context_.stream, &graph), "a capture");
    if (program_ != nullptr) cuda::check(cudaGraphExecDestroy(program_), "a graph");
    cuda::check(cudaGraphInstantiate(&program_, graph, 0), "a graph");
    cuda::check(cudaGraphDestroy(graph), "a graph");
    cuda::check(cudaGraphUpload(program_, context_.stream), "a graph");
  }
  void launch() {
    const cuda::DeviceScope scope(gpu_);
    cuda::check(cudaEventRecord(begin_, context_.stream), "an event");
    cuda::check(cudaGraphLaunch(program_, context_.stream), "a launch");
    cuda::check(cudaEventRecord(end_, context_.stream), "an event");
  }
  // Microseconds of one exchange in the last launch.
  [[nodiscard]] float time_us() const {
    const cuda::DeviceScope scope(gpu_);
    float milliseconds = 0.0f;
    cuda::check(cudaEventSynchronize(end_), "an event");
    cuda::check(cudaEventElapsedTime(&milliseconds, begin_, end_), "an event");
    return milliseconds * 1e3f / kExchanges;
  }

 private:
  static constexpr int64_t kCountBytes = 256;

  void set_rows(std::byte* to, int32_t count) {
    cuda_memory(gpu_).upload(to, reinterpret_cast<const std::byte*>(&count), sizeof(count));
  }
  void exchange(int64_t bytes) {
    GatherColumnsParams p = params_;
    p.max_rows = static_cast<int32_t>(bytes / kRowBytes);
    gather_columns(context_, p);
  }

  int32_t gpu_;
  DeviceBuffer memory_;
  CudaContext context_;
  GatherColumnsParams params_{};
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  cudaGraphExec_t program_ = nullptr;
};

void bench(int32_t num_gpus) {
  std::vector<int32_t> gpus(static_cast<size_t>(num_gpus));
  std::iota(gpus.begin(), gpus.end(), 0);
  connect_gpus(gpus);
  std::vector<DeviceMemory*> memories;
  for (const int32_t gpu : gpus) memories.push_back(&cuda_memory(gpu));
  RankGroup group(memories, kRowBytes);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (const int32_t gpu : gpus) ranks.push_back(std::make_unique<Rank>(gpu, gpu, num_gpus, group));
  std::printf("%10s%14s   (%d GPUs)\n", "bytes", "us", num_gpus);
  for (const int64_t bytes : kMessages) {
    for (const auto& rank : ranks) rank->capture(bytes);
    std::vector<float> times;
    for (int32_t i = 0; i < kReplays; ++i) {
      for (const auto& rank : ranks) rank->launch();
      float slowest = 0.0f;
      for (const auto& rank : ranks) slowest = std::max(slowest, rank->time_us());
      times.push_back(slowest);
    }
    std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
    std::printf("%10lld%14.2f\n", static_cast<long long>(bytes), times[kReplays / 2]);
  }
}

}  // namespace
}  // namespace paceline

int main(int argc, char** argv) {
  try {
    const int32_t found = paceline::cuda_status().num_gpus;
    const int32_t num_gpus = argc > 1 ? std::atoi(argv[1]) : found;
    if (num_gpus < 2 || num_gpus > std::min(found, paceline::kMaxRanks)) {
      std::fprintf(stderr, "NUM_GPUS is %d; allowed: 2 to %d, the GPUs that the process sees\n",
                   num_gpus, std::min(found, paceline::kMaxRanks));
      return 2;
    }
    paceline::bench(num_gpus);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_gather: %s\n", error.what());
    return 1;
  }
}
