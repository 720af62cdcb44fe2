// SPDX-License-Identifier: Apache-2.0
#pragma once

// Wrappers of PTX instructions: prefetches, cp.async, ldmatrix and mma.sync, and the communication
// between blocks of a cluster. Shared memory has 32 bit addresses.

#include <cuda_bf16.h>

#include <cstdint>

namespace paceline::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Brings the 128 bytes around the address to L2.
__device__ __forceinline__ void prefetch_to_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Makes the compiler keep a value in a register, where it would read it from constant memory or
// compute it again in every round of a loop.
template <class T>
__device__ __forceinline__ void keep_in_register(T& value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if constexpr (sizeof(T) == 4) {
    asm volatile("" : "+r"(value));
  } else {
    asm volatile("" : "+l"(value));
  }
}

// Copies 16 bytes from global to shared memory, past L1. Unless `is_live`, it reads nothing and
// writes 16 zero bytes; `from` must still be a valid address.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool is_live) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(is_live ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Stores 16 bytes to global memory at once. The compiler splits a float4 of registers that it also
// uses one by one.
__device__ __forceinline__ void store_global_16(float* to, float x, float y, float z, float w) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
  uint4 words;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(from)
               : "memory");
  return words;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t from) {
  uint2 words;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "r"(from)
               : "memory");
  return words;
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}

__device__ __forceinline__ void store_shared_4(uint32_t to, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void store_shared_16(uint32_t to, const uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

// Four 8x8 matrices of 16 bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// The reverse of ldmatrix_x4_transposed: the fragments of four 8x8 matrices go to memory as their
// transposes, whose rows are the matrices' columns.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t to, uint32_t r0, uint32_t r1,
                                                       uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}
__device__ __forceinline__ void stmatrix_x2_transposed(uint32_t to, uint32_t r0, uint32_t r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(r0),
               "r"(r1)
               : "memory");
}

// d += a b: a is 16x16 (rows by k), b 16x8 (k by columns), d 16x8. With g = lane / 4, t = lane % 4,
// d[0], d[1] are row g, columns 2 t, 2 t + 1, and d[2], d[3] those of row g + 8.
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Between half of a unit of TF32 relative to 1 and relative to 2.
constexpr float kBeforeTf32Cut = 1.0f + 0.72f / 2048.0f;

// The operand of a product in TF32. The tensor core ignores the bits that TF32 does not have.
struct Tf32Operand {
  float values[4];
};
// A number that becomes one of the two numbers of TF32 around x when a tensor core cuts off the
// bits that TF32 does not have: the nearer one for most x, and so that errors have a mean of zero.
// x itself if TF32 has it, and NaN for NaN. One instruction.
__device__ __forceinline__ float before_tf32_cut(float x) { return __fmul_rn(x, kBeforeTf32Cut); }
// d += a b in TF32: a is 16x8, b 8x8, d 16x8. With g = lane / 4, t = lane % 4, a has row g of k =
// t, row g + 8 of k = t, and both of k = t + 4; b0 and b1 are column g of k = t and of k = t + 4.
__device__ __forceinline__ void mma_16x8x8(const Tf32Operand& a, float b0, float b1,
                                           float (&d)[4]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a.values[0])), "r"(__float_as_uint(a.values[1])),
        "r"(__float_as_uint(a.values[2])), "r"(__float_as_uint(a.values[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// 2^x; 0 at -inf, exactly 1 at 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to within one unit in the last place; 0 at infinity.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Clusters exist since sm_90. Before, each block is its own, and a kernel that needs several blocks
// in a cluster is never launched (CudaContext::is_portable).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define PACELINE_HAS_CLUSTERS 0
#define PACELINE_CLUSTER_DIMS(blocks)
#else
#define PACELINE_HAS_CLUSTERS 1
#define PACELINE_CLUSTER_DIMS(blocks) __cluster_dims__(blocks, 1, 1)
#endif

// A barrier for all threads of the cluster that have not exited, in two parts. A thread's writes to
// global and shared memory before it arrives are visible to all threads after they have waited.
// Without a cluster, the second part is a barrier of the block.
__device__ __forceinline__ void cluster_arrive() {
#if PACELINE_HAS_CLUSTERS
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#else
  __threadfence();
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if PACELINE_HAS_CLUSTERS
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
  __syncthreads();
#endif
}
__device__ __forceinline__ void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}

// The address of the shared variable `of` in block `rank` of the cluster, for instructions.
__device__ __forceinline__ uint32_t cluster_address(const void* of, int32_t rank) {
#if PACELINE_HAS_CLUSTERS
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(shared_address(of)), "r"(rank));
  return address;
#else
  return shared_address(of);
#endif
}

#if PACELINE_HAS_CLUSTERS
#define PACELINE_CLUSTER_SPACE "shared::cluster"
#else
#define PACELINE_CLUSTER_SPACE "shared"
#endif

// Stores to the copy of the shared variable `to` in block `rank` of the cluster.
__device__ __forceinline__ void store_to_cluster(int32_t* to, int32_t rank, int32_t value) {
  asm volatile("st." PACELINE_CLUSTER_SPACE ".s32 [%0], %1;" ::"r"(cluster_address(to, rank)),
               "r"(value)
               : "memory");
}

__device__ __forceinline__ void store_to_cluster(float* to, int32_t rank, float value) {
  asm volatile("st." PACELINE_CLUSTER_SPACE ".f32 [%0], %1;" ::"r"(cluster_address(to, rank)),
               "f"(value)
               : "memory");
}
__device__ __forceinline__ void store_to_cluster(float4* to, int32_t rank, const float4& value) {
  asm volatile("st." PACELINE_CLUSTER_SPACE
               ".v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(cluster_address(to, rank)),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

// The address of the shared variable `of` in block `rank` of the cluster.
template <class T>
__device__ __forceinline__ const T* in_cluster(const T* of, int32_t rank) {
#if PACELINE_HAS_CLUSTERS
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(of), "r"(rank));
  return reinterpret_cast<const T*>(address);
#else
  return of;
#endif
}

#undef PACELINE_CLUSTER_SPACE

}  // namespace paceline::cuda
