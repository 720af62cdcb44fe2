// SPDX-License-Identifier: Apache-2.0
//
// Latent attention ends, with the same bits, where few of its blocks run at once: another kernel
// holds the other multiprocessors until the op has ended.

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "support/cuda_fixture.h"
#include "support/op_cases.h"
#include "support/seed.h"

namespace paceline::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int kHeldBytes = 200 << 10;  // of shared memory: no block of the op fits beside them

// Blocks tell the host that they run, and end when it says so.
__global__ void hold(volatile int32_t* runs, const volatile int32_t* is_released) {
  runs[blockIdx.x] = 1;
  __threadfence_system();
  while (*is_released == 0) __nanosleep(1000);
}

template <class Condition>
bool comes_true(milliseconds limit, const Condition& condition) {
  const auto end = steady_clock::now() + limit;
  while (!condition()) {
    if (steady_clock::now() > end) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

// Holds `count` multiprocessors while it exists.
class Hold {
 public:
  explicit Hold(int32_t count) : count_(count) {
    check_cuda(cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, kHeldBytes),
               "shared memory");
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream");
    check_cuda(cudaHostAlloc(&flags_, (static_cast<size_t>(count) + 1) * sizeof(int32_t),
                             cudaHostAllocMapped),
               "flags");
    std::fill_n(flags_, count + 1, 0);
    hold<<<static_cast<unsigned>(count), 1, kHeldBytes, stream_>>>(flags_ + 1, flags_);
    check_cuda(cudaGetLastError(), "hold");
  }
  ~Hold() {
    *static_cast<volatile int32_t*>(flags_) = 1;
    cudaStreamSynchronize(stream_);
    cudaFreeHost(flags_);
    cudaStreamDestroy(stream_);
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  [[nodiscard]] bool runs() const {
    const volatile int32_t* const runs = flags_ + 1;
    return std::all_of(runs, runs + count_, [](int32_t one) { return one != 0; });
  }

 private:
  int32_t count_;
  int32_t* flags_ = nullptr;  // whether they are released, then whether each of them runs
  cudaStream_t stream_ = nullptr;
};

class LatentMerge : public GpuTest, public ::testing::WithParamInterface<int32_t> {};

TEST_P(LatentMerge, EndsHoweverFewBlocksRun) {
  TRACE_SEED();
  // GLM-4.7-Flash. One sequence has three tiles of 44 blocks, and 16 have a tile of 8 blocks each.
  const AttentionSpec spec = {.num_qo_heads = 20,
                              .num_kv_heads = 1,
                              .head_dim = 576,
                              .kv_inputs = KvInputs::kNone,
                              .value_dim = 512};
  AttentionBatch batch{.max_model_len = 8192};
  for (int32_t i = 0; i < GetParam(); ++i) batch.sequences.push_back({i, 4096, 4, 0});
  const OpInstance op = make_attention(spec, batch, base_seed());
  CudaTestContext& ctx = cuda_test_context();
  DeviceInstance device(op);
  device.run(ctx);
  const ArrayBytes want = device.download_all();
  for (const int32_t num_free : {1, 5, 60}) {
    device.reset();
    ctx.poison_workspace();
    bool ends = false;
    {
      const Hold others(ctx.context().num_sms - num_free);
      ASSERT_TRUE(comes_true(milliseconds(5000), [&] { return others.runs(); }));
      device.enqueue(ctx);
      ends = comes_true(milliseconds(5000),
                        [&] { return cudaStreamQuery(ctx.stream()) == cudaSuccess; });
    }
    ctx.synchronize();
    ASSERT_TRUE(ends) << "blocks wait for others that cannot run beside them, on " << num_free
                      << " multiprocessors";
    EXPECT_EQ(device.download_all(), want) << num_free << " multiprocessors";
    EXPECT_TRUE(ctx.are_counters_zero()) << num_free << " multiprocessors";
  }
}

INSTANTIATE_TEST_SUITE_P(Sequences, LatentMerge, ::testing::Values(1, 16),
                         [](const auto& info) { return std::to_string(info.param); });

}  // namespace
}  // namespace paceline::testing
