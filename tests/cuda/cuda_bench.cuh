// SPDX-License-Identifier: Apache-2.0
#pragma once

// What bench_cuda_ops times ops with: graphs of launches, with data from memory or from the caches.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/cuda_fixture.h"
#include "support/op_cases.h"

namespace paceline::testing {

inline constexpr int64_t kColdBytes = int64_t{400}
                                      << 20;  // a rotation; eight times the L2 of an H200
inline constexpr int kMinLaunches = 20;
inline constexpr int kMaxCopies = 320;
inline constexpr int kReplays = 5;

// Random bits give the power draw, and so the clock, of real weights.
inline __global__ void fill_random_bf16(uint16_t* to, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    uint64_t z = static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z ^= z >> 31;
    // Sign and mantissa are random, the exponent is one of four: 2^-7 .. 2^-4.
    to[i] = static_cast<uint16_t>((z & 0x807f) | (0x3c00 + (z >> 20 & 3) * 0x80));
  }
}

struct Record {
  std::string name;   // "gemm/qwen3-8b/qkv"
  std::string point;  // "m=16"
  double us = 0;
  double rate = 0;
  const char* unit = "";
};

class Bench {
 public:
  // rows: of the products to time; empty: those that the products choose.
  Bench(std::string filter, std::vector<int32_t> rows)
      : filter_(std::move(filter)), rows_(std::move(rows)) {}

  [[nodiscard]] bool wants(const std::string& name) const {
    return name.find(filter_) != std::string::npos;
  }
  [[nodiscard]] std::span<const int32_t> rows_or(std::span<const int32_t> otherwise) const {
    return rows_.empty() ? otherwise : rows_;
  }
  const std::vector<Record>& records() const { return records_; }
  void record(Record r) { records_.push_back(std::move(r)); }

  // At least `bytes` of random bfloat16, which are small numbers when read as float32. A larger
  // request replaces the buffer.
  std::byte* arena(int64_t bytes) {
    if (arena_.size() < bytes) {
      arena_ = DeviceVector<std::byte>();
      arena_ = DeviceVector<std::byte>(bytes);
      fill_random_bf16<<<2048, 256>>>(reinterpret_cast<uint16_t*>(arena_.data()), bytes / 2);
      check_cuda(cudaDeviceSynchronize(), "fill");
    }
    return arena_.data();
  }

  // Microseconds per call of enqueue(i), i = 0, 1, ... `launches` - 1, in one graph.
  double median_us(int launches, const std::function<void(int)>& enqueue) {
    enqueue(0);  // keeps the setup of the first call out of the graph
    ctx_.synchronize();
    const CapturedGraph graph(ctx_, [&] {
      for (int i = 0; i < launches; ++i) enqueue(i);
    });
    cudaEvent_t start = nullptr;
    cudaEvent_t stop = nullptr;
    check_cuda(cudaEventCreate(&start), "event");
    check_cuda(cudaEventCreate(&stop), "event");
    graph.launch();
    std::vector<double> times;
    for (int i = 0; i < kReplays; ++i) {
      check_cuda(cudaEventRecord(start, ctx_.stream()), "event");
      graph.launch();
      check_cuda(cudaEventRecord(stop, ctx_.stream()), "event");
      check_cuda(cudaEventSynchronize(stop), "replay");
      float ms = 0;
      check_cuda(cudaEventElapsedTime(&ms, start, stop), "event");
      times.push_back(1e3 * ms / launches);
    }
    cudaEventDestroy(start);
    cudaEventDestroy(stop);
    std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
    return times[kReplays / 2];
  }

  // Times the instance with the array `rotated` at one of several cold addresses. A launch reads
  // `read_bytes` of the array; 0: all of it.
  double cold_us(const OpInstance& op, const char* rotated, int64_t read_bytes = 0) {
    const Handle handle = op.find(rotated);
    const OpArray& array = op.arrays[static_cast<size_t>(handle)];
    const int64_t bytes = (array.count * element_bytes(array.cuda) + 255) / 256 * 256;
    if (read_bytes == 0) read_bytes = bytes;
    const int copies = static_cast<int>(
        std::clamp<int64_t>((kColdBytes + read_bytes - 1) / read_bytes, 1, kMaxCopies));
    std::byte* const at = arena(bytes * copies);
    OpInstance rest = op;  // owns all arrays but the rotated one
    rest.arrays[static_cast<size_t>(handle)].count = 0;
    const DeviceInstance device(rest, nullptr, /*has_values=*/false);
    Addresses addresses = device.addresses();
    for (size_t i = 0; i < op.arrays.size(); ++i) {
      if (!is_float(rest.arrays[i].cuda) || rest.arrays[i].count == 0) continue;
      const int64_t halves = rest.arrays[i].count * element_bytes(rest.arrays[i].cuda) / 2;
      fill_random_bf16<<<256, 256>>>(addresses.get<uint16_t>(static_cast<Handle>(i)), halves);
    }
    check_cuda(cudaDeviceSynchronize(), "fill");
    return median_us(std::max(copies, kMinLaunches), [&](int i) {
      addresses.set(handle, at + i % copies * bytes);
      device.enqueue(ctx_, addresses);
    });
  }

  double warm_us(const OpInstance& op) {
    const DeviceInstance device(op);
    return median_us(2 * kMinLaunches, [&](int) { device.enqueue(ctx_); });
  }

 private:
  std::string filter_;
  std::vector<int32_t> rows_;
  CudaTestContext& ctx_ = cuda_test_context();
  DeviceVector<std::byte> arena_;
  std::vector<Record> records_;
};

// bench_products.cu and bench_recurrent.cu
void bench_products(Bench& bench);
void bench_recurrent(Bench& bench);

}  // namespace paceline::testing
