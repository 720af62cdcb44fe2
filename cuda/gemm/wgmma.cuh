// SPDX-License-Identifier: Apache-2.0
#pragma once

// Wrappers of the Hopper instructions of the GEMM: bulk tensor copies that complete on an mbarrier,
// and warpgroup matrix products of bfloat16 tiles in shared memory with float32
// accumulators in registers. PTX ISA 8.0 and newer, chapters 9.7.9 (copies), 9.7.13 (mbarrier) and
// 9.7.15 (wgmma).

#include <cuda.h>

#include <cstdint>

#include "common/mma.cuh"

namespace paceline::cuda {

// --- mbarrier --------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  barrier_arrive(shared_address(barrier));
}

// Arrives when all copies that the calling thread has begun with cp.async have.
__device__ __forceinline__ void arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives, and announces the bytes that copies will deliver.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Stores to the copy of the shared variable `to` in block `rank` of the cluster, and delivers its
// bytes to that block's `barrier`. The storing thread needs no fence.
__device__ __forceinline__ void store_async(float* to, int32_t rank, float value,
                                            uint64_t* barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                   cluster_address(to, rank)),
               "f"(value), "r"(cluster_address(barrier, rank))
               : "memory");
}

__device__ __forceinline__ void store_async(float4* to, int32_t rank, const float4& value,
                                            uint64_t* barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(cluster_address(to, rank)),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(cluster_address(barrier, rank))
      : "memory");
}

// Arrives at the barrier of block `rank` of the cluster. It orders no memory but the shared memory
// that the thread has read before.
__device__ __forceinline__ void barrier_arrive_in_cluster(uint64_t* barrier, int32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(barrier, rank))
               : "memory");
}

// Whether the phase of that parity is over; may wait for a limited time before it returns false.
// `barrier` is an address in shared memory.
__device__ __forceinline__ bool barrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t is_over;
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
      "selp.u32 %0, 1, 0, over;\n"
      "}\n"
      : "=r"(is_over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return is_over != 0;
}

// Whether the phase of that parity is over, without waiting.
__device__ __forceinline__ bool barrier_test(uint64_t* barrier, uint32_t parity) {
  uint32_t is_over;
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;\n"
      "selp.u32 %0, 1, 0, over;\n"
      "}\n"
      : "=r"(is_over)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return is_over != 0;
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  while (!barrier_try_wait(barrier, parity)) {
  }
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  barrier_wait(shared_address(barrier), parity);
}

// The same for a warp that is well ahead of those it waits for. It looks seldom, since what it
// issues is taken from the other warps.
__device__ __forceinline__ void barrier_wait_idle(uint64_t* barrier, uint32_t parity) {
  constexpr uint32_t kNanoseconds = 64;
  while (!barrier_try_wait(shared_address(barrier), parity)) __nanosleep(kNanoseconds);
}

// --- Bulk tensor copy ------------------------------------------------------------------------

// Cache policies as 64-bit operands: weights are read once and evicted first, activations last.
inline constexpr uint64_t kEvictNormal = 0x1000000000000000ull;
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
inline constexpr uint64_t kEvictLast = 0x14F0000000000000ull;

// Fetches a map for the copies to come.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the box at (column, row) of a two-dimensional map to an address in shared memory. Elements
// beyond the tensor arrive as zeros and count towards the barrier's bytes.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int32_t column,
                                         int32_t row, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int32_t column,
                                         int32_t row, uint64_t* barrier, uint64_t policy) {
  copy_box(shared_address(to), map, column, row, barrier, policy);
}

// Copies the box at (column, row, outer) of a three-dimensional map.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int32_t column,
                                         int32_t row, int32_t outer, uint64_t* barrier,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(outer), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int32_t column,
                                         int32_t row, int32_t outer, uint64_t* barrier,
                                         uint64_t policy) {
  copy_box(shared_address(to), map, column, row, outer, barrier, policy);
}

// Copies the box at (column, row, matrix, outer) of a four-dimensional map.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int32_t column,
                                         int32_t row, int32_t matrix, int32_t outer,
                                         uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(outer), "r"(shared_address(barrier)),
      "l"(policy)
      : "memory");
}

// Copies the box at (column, head, token, block) of a four-dimensional map.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int32_t column,
                                         int32_t head, int32_t token, int32_t block,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(column), "r"(head), "r"(token), "r"(block), "r"(shared_address(barrier))
      : "memory");
}

// Copies contiguous bytes, a multiple of 16.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes,
                                          uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Orders this thread's earlier writes to shared memory (cp.async that has completed, too) before
// what the tensor cores read: they access it through another proxy.
__device__ __forceinline__ void fence_shared_for_wgmma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- wgmma -----------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accumulators across asynchronous products. (With a loop over
// references, it puts the accumulators of some kernels into local memory.)
template <int kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// The value of the first lane. The compiler then knows that all lanes have the same, and computes
// descriptors in uniform registers, as the products need them; else it moves each there on its way,
// which takes longer than a small product. The whole warp calls it.
__device__ __forceinline__ uint32_t uniform(uint32_t value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

// Describes a K-major tile with rows of 128 bytes in the 128-byte swizzle, 1,024-byte aligned:
// groups of 8 rows are 1,024 bytes apart.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t tile) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kGroupStride = uint64_t{1024 >> 4} << 32;
  constexpr uint64_t kIgnored = uint64_t{1} << 16;  // the leading offset, with this swizzle
  return kSwizzle128 | kGroupStride | kIgnored | ((tile & 0x3FFFFu) >> 4);
}
__device__ __forceinline__ uint64_t tile_descriptor(const void* tile) {
  return tile_descriptor(shared_address(tile));
}

// Changes the registers of each thread of the calling warpgroup, a multiple of 8. The warpgroups of
// a block share those that it was launched with.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The bytes of a unit of descriptors.
inline constexpr int32_t kDescriptorUnit = 16;

// The same for a tile `units` behind it. Its address is in the lower half, which alone is changed:
// an addition of 64 bits by a number that the compiler does not know takes twice the instructions.
__device__ __forceinline__ uint64_t descriptor_behind(uint64_t descriptor, uint32_t units) {
  const uint32_t low = static_cast<uint32_t>(descriptor) + units;
  return (descriptor >> 32 << 32) | low;
}

// Added to a descriptor: the same tile 16 columns further on.
inline constexpr uint64_t kNext16Columns = 32 / kDescriptorUnit;

}  // namespace paceline::cuda
