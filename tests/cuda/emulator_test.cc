// SPDX-License-Identifier: Apache-2.0
//
// The emulator of kernels: the results of its stand-ins, and the faults that it has to report.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <cuda_runtime.h>

#include "common/mma.cuh"
#include "common/ordering.cuh"
#include "emulator.h"
#include "gemm/wgmma.cuh"
#include "guarded_memory.h"
#include "support/seed.h"

namespace paceline::cuda {
namespace {

using emulator::GuardedMemory;
using ::testing::HasSubstr;

constexpr uint32_t kAllLanes = 0xffffffffu;

struct Shape {
  dim3 grid = 1;
  dim3 block = 32;
  dim3 cluster = 1;
  size_t shared_bytes = 0;
  size_t max_shared_bytes = emulator::kMaxDynamicSharedBytes;  // of the machine
};

// Returns an error message, empty after success.
template <class... Params, class... Args>
std::string run(void (*kernel)(Params...), const Shape& shape, uint64_t seed, Args... args) {
  emulator::set_options({.seed = seed, .max_shared_bytes = shape.max_shared_bytes});
  cudaLaunchAttribute cluster = {.id = cudaLaunchAttributeClusterDimension, .val = {}};
  cluster.val.clusterDim = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
  const cudaLaunchConfig_t config = {.gridDim = shape.grid,
                                     .blockDim = shape.block,
                                     .dynamicSmemBytes = shape.shared_bytes,
                                     .attrs = &cluster,
                                     .numAttrs = 1};
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, args...);
  return status == cudaSuccess ? std::string() : cudaGetErrorString(status);
}

// --- order ---------------------------------------------------------------------------------------

__global__ void store_order(std::vector<uint32_t>* order) {
  order->push_back(blockIdx.x * blockDim.x + threadIdx.x);
}

TEST(Emulator, TheSeedChoosesTheOrderOfBlocksAndThreads) {
  const auto order_of = [](uint64_t seed) {
    std::vector<uint32_t> order;
    EXPECT_EQ(run(store_order, {.grid = 5, .block = 48}, seed, &order), "");
    return order;
  };
  const std::vector<uint32_t> order = order_of(1);
  EXPECT_EQ(std::set<uint32_t>(order.begin(), order.end()).size(), 5u * 48u);
  EXPECT_EQ(order, order_of(1));
  EXPECT_NE(order, order_of(2));
}

template <bool kHasBarrier>
__global__ void reverse(const int32_t* from, int32_t* to) {
  __shared__ int32_t values[64];
  values[threadIdx.x] = from[threadIdx.x];
  if (kHasBarrier) __syncthreads();
  to[threadIdx.x] = values[63 - threadIdx.x];
}

TEST(Emulator, AMissingBarrierShowsInTheResult) {
  std::vector<int32_t> from(64);
  for (int32_t i = 0; i < 64; ++i) from[static_cast<size_t>(i)] = i;
  const std::vector<int32_t> expected(from.rbegin(), from.rend());
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<int32_t> to(64);
    EXPECT_EQ(run(reverse<true>, {.block = 64}, seed, from.data(), to.data()), "");
    EXPECT_EQ(to, expected);
    EXPECT_EQ(run(reverse<false>, {.block = 64}, seed, from.data(), to.data()), "");
    EXPECT_NE(to, expected);
  }
}

// --- barriers ------------------------------------------------------------------------------------

__global__ void half_waits() {
  if (threadIdx.x < 16) __syncthreads();
}
__global__ void waits_in_two_places() {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void count_threads(int32_t* to) {
  extern __shared__ int32_t counts[];
  const auto thread = static_cast<int32_t>(threadIdx.x);
  counts[thread] = __syncthreads_count(thread % 3 == 0);
  to[thread] = counts[thread] + 100 * __syncthreads_or(thread == 7);
  if (thread < 32) sync_some_threads<1, 32>();
}

TEST(Emulator, ABarrierThatNotAllThreadsReachIsAnError) {
  EXPECT_THAT(run(half_waits, {}, 0), HasSubstr("16 threads have ended; 16 threads wait for their "
                                                "block at cuda/emulator_test.cc:"));
  EXPECT_THAT(run(waits_in_two_places, {}, 0), HasSubstr("others are at that of"));
  // Unfinished threads do not disturb the next launch.
  std::vector<int32_t> to(64);
  EXPECT_EQ(run(count_threads, {.block = 64, .shared_bytes = 256}, 0, to.data()), "");
  EXPECT_EQ(to, std::vector<int32_t>(64, 122));
}

// --- collective calls of a warp ------------------------------------------------------------------

__global__ void shuffles(int32_t* to) {
  const auto lane = static_cast<int32_t>(threadIdx.x);
  int32_t* const of_lane = to + lane * 10;
  of_lane[0] = __shfl_sync(kAllLanes, lane, 5);
  of_lane[1] = __shfl_sync(kAllLanes, lane, 5, 8);
  of_lane[2] = __shfl_up_sync(kAllLanes, lane, 3);
  of_lane[3] = __shfl_down_sync(kAllLanes, lane, 3, 16);
  of_lane[4] = __shfl_xor_sync(kAllLanes, lane, 6);
  of_lane[5] = static_cast<int32_t>(__ballot_sync(kAllLanes, lane % 2));
  of_lane[6] = static_cast<int32_t>(__match_any_sync(kAllLanes, lane / 8));
  of_lane[7] = __reduce_min_sync(kAllLanes, 4 - lane);
  of_lane[8] = __any_sync(kAllLanes, lane == 9) * 2 + __all_sync(kAllLanes, lane != 9);
  if (lane < 8) of_lane[9] = static_cast<int32_t>(__reduce_add_sync(0xffu, uint32_t{3}));
}

TEST(Emulator, LanesExchangeValues) {
  std::vector<int32_t> to(320, -1);
  ASSERT_EQ(run(shuffles, {}, 3, to.data()), "");
  for (int32_t lane = 0; lane < 32; ++lane) {
    const auto at = to.begin() + lane * 10;
    const std::vector<int32_t> expected = {5,
                                           lane / 8 * 8 + 5,
                                           lane < 3 ? lane : lane - 3,
                                           lane % 16 > 12 ? lane : lane + 3,
                                           lane ^ 6,
                                           static_cast<int32_t>(0xaaaaaaaau),
                                           static_cast<int32_t>(0xffu << (lane / 8 * 8)),
                                           -27,
                                           2,
                                           lane < 8 ? 24 : -1};
    EXPECT_EQ(std::vector<int32_t>(at, at + 10), expected) << "lane " << lane;
  }
}

__global__ void lacks_itself() { __syncwarp(0xfffeu); }
__global__ void lacks_some() {
  if (threadIdx.x >= 4) __syncwarp(0xfffffff0u);
  if (threadIdx.x < 4) __syncwarp();
}
__global__ void calls_differ(int32_t* to) {
  if (threadIdx.x < 16) {
    *to = __any_sync(kAllLanes, 1);
  } else {
    *to = __all_sync(kAllLanes, 1);
  }
}
__global__ void asks_an_absent_lane(uint32_t* to) {
  if (threadIdx.x < 16) to[threadIdx.x] = __shfl_sync(0xffffu, threadIdx.x, 20);
}

TEST(Emulator, AWrongMaskIsAnError) {
  EXPECT_THAT(run(lacks_itself, {}, 0), HasSubstr("is not among the lanes 0xfffe"));
  // Lanes that have ended do not count: only the four wait for others that never call so.
  EXPECT_EQ(run(lacks_some, {}, 0), "");
  int32_t result = 0;
  EXPECT_THAT(run(calls_differ, {}, 0, &result), HasSubstr("is in another one at"));
  std::vector<uint32_t> values(16);
  EXPECT_EQ(run(asks_an_absent_lane, {}, 0, values.data()), "");
  EXPECT_EQ(values, std::vector<uint32_t>(16, static_cast<uint32_t>(emulator::kUndefined)));
}

// --- memory --------------------------------------------------------------------------------------

__global__ void reads_before_writing(uint32_t* to) {
  __shared__ uint32_t value;
  to[blockIdx.x] = value;
  value = 1;
}
__global__ void writes_shared(int32_t at) {
  extern __shared__ float values[];
  values[at] = 0.0f;
}
__global__ void writes(int32_t* to, int32_t at) { to[at] = 0; }
template <bool kWaits>
__global__ void copies(const float* from, float* to) {
  __shared__ __align__(16) float values[4];
  cp_async_16(shared_address(values), from, true);
  cp_async_commit();
  if (kWaits) cp_async_wait<0>();
  for (int i = 0; i < 4; ++i) to[i] = values[i];
}

TEST(Emulator, SharedMemoryIsUndefinedBeforeItIsWritten) {
  std::vector<uint32_t> to(3);
  EXPECT_EQ(run(reads_before_writing, {.grid = 3, .block = 1}, 0, to.data()), "");
  EXPECT_EQ(to, std::vector<uint32_t>(3, static_cast<uint32_t>(emulator::kUndefined)));
}

TEST(Emulator, WritesBeyondMemoryAreErrors) {
  EXPECT_EQ(run(writes_shared, {.block = 1, .shared_bytes = 40}, 0, 9), "");
  EXPECT_THAT(run(writes_shared, {.block = 1, .shared_bytes = 40}, 0, 10),
              HasSubstr("wrote beyond the 40 bytes"));
  const GuardedMemory memory(16);
  auto* const values = reinterpret_cast<int32_t*>(memory.data());
  EXPECT_EQ(run(writes, {.block = 1}, 0, values, 3), "");
  EXPECT_TRUE(memory.are_guards_intact());
  EXPECT_EQ(run(writes, {.block = 1}, 0, values, -1), "");
  EXPECT_FALSE(memory.are_guards_intact());
  EXPECT_EXIT(static_cast<void>(run(writes, {.block = 1}, 0, values, 4)),
              ::testing::ExitedWithCode(1), "beyond an array: thread 0 of block");
}

__global__ void do_nothing() {}

TEST(Emulator, AskingForMoreSharedMemoryThanTheMachineHasIsAnError) {
  const auto ask = [](size_t num_bytes) {
    return run(do_nothing, {.shared_bytes = num_bytes, .max_shared_bytes = 99 << 10}, 1);
  };
  EXPECT_EQ(ask(99 << 10), "");
  EXPECT_THAT(ask((99 << 10) + 1), HasSubstr("it can have 101376"));
  EXPECT_EQ(
      cudaFuncSetAttribute(&do_nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 99 << 10),
      cudaSuccess);
  EXPECT_EQ(
      cudaFuncSetAttribute(&do_nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10),
      cudaErrorInvalidValue);
}

TEST(Emulator, CopiesComeWithTheirWait) {
  const std::vector<float> from = {1, 2, 3, 4};
  std::vector<float> to(4);
  EXPECT_EQ(run(copies<true>, {.block = 1}, 0, from.data(), to.data()), "");
  EXPECT_EQ(to, from);
  EXPECT_EQ(run(copies<false>, {.block = 1}, 0, from.data(), to.data()), "");
  EXPECT_NE(to, from);
}

__global__ void never_delivers(uint64_t*) {
  __shared__ uint64_t arrived;
  barrier_init(&arrived, 1);
  barrier_expect(&arrived, 16);
  barrier_wait(&arrived, 0);
}

TEST(Emulator, ACopyThatDoesNotComeIsAnError) {
  EXPECT_THAT(run(never_delivers, {.block = 1}, 0, static_cast<uint64_t*>(nullptr)),
              HasSubstr("for a change of memory that does not come"));
}

// --- clusters ------------------------------------------------------------------------------------

template <bool kWaitsAtTheEnd>
__global__ void reads_neighbour(int32_t* to, int32_t distance) {
  __shared__ int32_t value;
  __shared__ int32_t sent;
  const auto rank = static_cast<int32_t>(blockIdx.x % 4);
  if (threadIdx.x == 0) {
    value = static_cast<int32_t>(blockIdx.x);
    store_to_cluster(&sent, (rank + 1) % 4, static_cast<int32_t>(blockIdx.x));
  }
  cluster_barrier();
  if (threadIdx.x == 40) to[blockIdx.x] = 100 * sent + *in_cluster(&value, rank % 4 ^ distance);
  if (kWaitsAtTheEnd) cluster_barrier();
}

// Blocks that poll for what the other one sends, a number after the other.
__global__ void sends_by_turns(int32_t* to) {
  __shared__ uint64_t arrived;
  __shared__ float number;
  const auto rank = static_cast<int32_t>(blockIdx.x % 2);
  if (threadIdx.x == 0) {
    barrier_init(&arrived, 1);
    number = 0;
  }
  cluster_barrier();
  for (int32_t turn = 0; turn < 6; ++turn) {
    if (turn % 2 == rank) {
      if (threadIdx.x == 0) store_async(&number, 1 - rank, number + 1, &arrived);
    } else {
      if (threadIdx.x == 0) barrier_expect(&arrived, sizeof(float));
      barrier_wait(&arrived, static_cast<uint32_t>(turn / 2 % 2));
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) to[blockIdx.x] = static_cast<int32_t>(number);
  cluster_barrier();
}

TEST(Emulator, ABlockThatPollsLetsTheOthersOfItsClusterRun) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    std::vector<int32_t> to(4);
    ASSERT_EQ(run(sends_by_turns, {.grid = 4, .block = 64, .cluster = 2}, seed, to.data()), "");
    EXPECT_EQ(to, (std::vector<int32_t>{6, 5, 6, 5}));
  }
}

TEST(Emulator, BlocksOfAClusterShareMemory) {
  const Shape shape = {.grid = 8, .block = 64, .cluster = 4};
  int32_t num_errors = 0;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    std::vector<int32_t> to(8);
    ASSERT_EQ(run(reads_neighbour<true>, shape, seed, to.data(), 1), "");
    EXPECT_EQ(to, (std::vector<int32_t>{301, 0, 103, 202, 705, 404, 507, 606}));
    // Without the last barrier a block may end while another one reads its memory.
    if (!run(reads_neighbour<false>, shape, seed, to.data(), 1).empty()) ++num_errors;
  }
  EXPECT_GT(num_errors, 0);
  std::vector<int32_t> to(8);
  EXPECT_THAT(run(reads_neighbour<true>, shape, 0, to.data(), 4), HasSubstr("of a cluster of 4"));
}

}  // namespace
}  // namespace paceline::cuda
