// SPDX-License-Identifier: Apache-2.0
#pragma once

// The matrix products of a warpgroup, d[64, N] += a[64, 16] b[N, 16]^T, with b in shared memory.
// The instruction must name every register, so macros write one function per width.

#include <cstdint>

namespace paceline::cuda {

// The rows, a, in shared memory. Thread t of the warpgroup holds rows 16 (t / 32) + (t % 32) / 4
// (+ 8 in the second pair) and columns 8 j + 2 (t % 4) (+ 1) in d[4 j .. 4 j + 3].
template <int kColumns>
__device__ __forceinline__ void wgmma(float (&d)[kColumns / 2], uint64_t a, uint64_t b);

// The same with a stored by columns: the 64 elements of a column lie side by side, as rows of 128
// bytes in the 128-byte swizzle, and its descriptor is tile_descriptor's. 16 columns are 2,048
// bytes. Without kAdds, d = a b^T.
template <int kColumns, int kAdds>
__device__ __forceinline__ void wgmma_by_columns(float (&d)[kColumns / 2], uint64_t a, uint64_t b);

// Both in shared memory, d = a b^T: the first product of a sum.
template <int kColumns>
__device__ __forceinline__ void wgmma_fresh(float (&d)[kColumns / 2], uint64_t a, uint64_t b);

// The rows in registers, b stored by columns: its 64 elements of a step of K lie side by side, as
// rows of 128 bytes in the 128-byte swizzle. 16 steps are 2,048 bytes.
template <int kColumns, int kAdds>
__device__ __forceinline__ void wgmma_rows_by_columns(float (&d)[kColumns / 2], const uint32_t* a,
                                                      uint64_t b);

// The rows in registers, d as above. With g = lane / 4 and t = lane % 4, a thread of warp w holds
// two neighbours in K in each register of a:
//   a[0]: row 16 w + g,     columns 2 t, 2 t + 1      a[2]: the same row, columns 2 t + 8, 2 t + 9
//   a[1]: row 16 w + g + 8, columns 2 t, 2 t + 1      a[3]: the same row, columns 2 t + 8, 2 t + 9
// The lower column is in the lower half (PTX ISA, wgmma "register fragments", m64k16).
// Without kAdds, d = a b^T.
template <int kColumns, int kAdds = 1>
__device__ __forceinline__ void wgmma(float (&d)[kColumns / 2], const uint32_t* a, uint64_t b);

// The first registers of d, by their numbers in the instruction.
#define PACELINE_NUMBERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PACELINE_NUMBERS_16 PACELINE_NUMBERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PACELINE_NUMBERS_20 PACELINE_NUMBERS_16 ", %16, %17, %18, %19"
#define PACELINE_NUMBERS_24 PACELINE_NUMBERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define PACELINE_NUMBERS_32 \
  PACELINE_NUMBERS_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PACELINE_NUMBERS_40 \
  PACELINE_NUMBERS_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39"
#define PACELINE_NUMBERS_48 \
  PACELINE_NUMBERS_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define PACELINE_NUMBERS_64 \
  PACELINE_NUMBERS_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PACELINE_NUMBERS_80 \
  PACELINE_NUMBERS_64       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define PACELINE_NUMBERS_96 \
  PACELINE_NUMBERS_80       \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PACELINE_NUMBERS_112                                                                 \
  PACELINE_NUMBERS_96                                                                        \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
  "%111"

// The same registers as operands.
#define PACELINE_EIGHT(i)                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define PACELINE_OPERANDS_8 PACELINE_EIGHT(0)
#define PACELINE_OPERANDS_16 PACELINE_OPERANDS_8, PACELINE_EIGHT(8)
#define PACELINE_OPERANDS_20 \
  PACELINE_OPERANDS_16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define PACELINE_OPERANDS_24 PACELINE_OPERANDS_16, PACELINE_EIGHT(16)
#define PACELINE_OPERANDS_32 PACELINE_OPERANDS_16, PACELINE_EIGHT(16), PACELINE_EIGHT(24)
#define PACELINE_OPERANDS_40 PACELINE_OPERANDS_32, PACELINE_EIGHT(32)
#define PACELINE_OPERANDS_48 PACELINE_OPERANDS_32, PACELINE_EIGHT(32), PACELINE_EIGHT(40)
#define PACELINE_OPERANDS_64 PACELINE_OPERANDS_48, PACELINE_EIGHT(48), PACELINE_EIGHT(56)
#define PACELINE_OPERANDS_80 PACELINE_OPERANDS_64, PACELINE_EIGHT(64), PACELINE_EIGHT(72)
#define PACELINE_OPERANDS_96 PACELINE_OPERANDS_80, PACELINE_EIGHT(80), PACELINE_EIGHT(88)
#define PACELINE_OPERANDS_112 PACELINE_OPERANDS_96, PACELINE_EIGHT(96), PACELINE_EIGHT(104)

// `sums` registers of d, and the numbers of the operands that follow them.
#define PACELINE_WGMMA_SHARED(columns, sums, number_a, number_b)                                \
  template <>                                                                                   \
  __device__ __forceinline__ void wgmma<columns>(float (&d)[sums], uint64_t a, uint64_t b) {    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns                                   \
                 "k16.f32.bf16.bf16 {" PACELINE_NUMBERS_##sums "}, %" #number_a ", %" #number_b \
                                                               ", 1, 1, 1, 0, 0;"               \
                 : PACELINE_OPERANDS_##sums                                                     \
                 : "l"(a), "l"(b));                                                             \
  }
PACELINE_WGMMA_SHARED(16, 8, 8, 9)
PACELINE_WGMMA_SHARED(32, 16, 16, 17)
PACELINE_WGMMA_SHARED(48, 24, 24, 25)
PACELINE_WGMMA_SHARED(64, 32, 32, 33)
PACELINE_WGMMA_SHARED(80, 40, 40, 41)
PACELINE_WGMMA_SHARED(96, 48, 48, 49)
PACELINE_WGMMA_SHARED(128, 64, 64, 65)
PACELINE_WGMMA_SHARED(160, 80, 80, 81)
PACELINE_WGMMA_SHARED(192, 96, 96, 97)
PACELINE_WGMMA_SHARED(224, 112, 112, 113)

#define PACELINE_WGMMA_FRESH(columns, sums, number_a, number_b)                                    \
  template <>                                                                                      \
  __device__ __forceinline__ void wgmma_fresh<columns>(float (&d)[sums], uint64_t a, uint64_t b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns                                      \
                 "k16.f32.bf16.bf16 {" PACELINE_NUMBERS_##sums "}, %" #number_a ", %" #number_b    \
                                                               ", 0, 1, 1, 0, 0;"                  \
                 : PACELINE_OPERANDS_##sums                                                        \
                 : "l"(a), "l"(b));                                                                \
  }
PACELINE_WGMMA_FRESH(32, 16, 16, 17)
PACELINE_WGMMA_FRESH(48, 24, 24, 25)
PACELINE_WGMMA_FRESH(96, 48, 48, 49)
PACELINE_WGMMA_FRESH(128, 64, 64, 65)

// adds: 1, or 0 for a product that does not read d.
#define PACELINE_WGMMA_BY_COLUMNS(columns, sums, adds, number_a, number_b)                      \
  template <>                                                                                   \
  __device__ __forceinline__ void wgmma_by_columns<columns, adds>(float (&d)[sums], uint64_t a, \
                                                                  uint64_t b) {                 \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns                                   \
                 "k16.f32.bf16.bf16 {" PACELINE_NUMBERS_##sums "}, %" #number_a ", %" #number_b \
                                                               ", " #adds ", 1, 1, 1, 0;"       \
                 : PACELINE_OPERANDS_##sums                                                     \
                 : "l"(a), "l"(b));                                                             \
  }
PACELINE_WGMMA_BY_COLUMNS(32, 16, 1, 16, 17)
PACELINE_WGMMA_BY_COLUMNS(32, 16, 0, 16, 17)
PACELINE_WGMMA_BY_COLUMNS(40, 20, 1, 20, 21)
PACELINE_WGMMA_BY_COLUMNS(40, 20, 0, 20, 21)
PACELINE_WGMMA_BY_COLUMNS(64, 32, 1, 32, 33)
PACELINE_WGMMA_BY_COLUMNS(64, 32, 0, 32, 33)

#define PACELINE_WGMMA_ADDS(columns, sums, adds, a0, a1, a2, a3, number_b)                         \
  template <>                                                                                      \
  __device__ __forceinline__ void wgmma<columns, adds>(float (&d)[sums], const uint32_t* a,        \
                                                       uint64_t b) {                               \
    asm volatile(                                                                                  \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" PACELINE_NUMBERS_##sums \
        "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #number_b ", " #adds ", 1, 1, 0;"         \
        : PACELINE_OPERANDS_##sums                                                                 \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                     \
  }
#define PACELINE_WGMMA_REGISTERS(columns, sums, a0, a1, a2, a3, number_b) \
  PACELINE_WGMMA_ADDS(columns, sums, 1, a0, a1, a2, a3, number_b)         \
  PACELINE_WGMMA_ADDS(columns, sums, 0, a0, a1, a2, a3, number_b)
PACELINE_WGMMA_REGISTERS(16, 8, 8, 9, 10, 11, 12)
PACELINE_WGMMA_REGISTERS(32, 16, 16, 17, 18, 19, 20)
PACELINE_WGMMA_REGISTERS(48, 24, 24, 25, 26, 27, 28)
PACELINE_WGMMA_REGISTERS(64, 32, 32, 33, 34, 35, 36)
PACELINE_WGMMA_REGISTERS(96, 48, 48, 49, 50, 51, 52)
PACELINE_WGMMA_REGISTERS(128, 64, 64, 65, 66, 67, 68)

#define PACELINE_WGMMA_ROWS_BY_COLUMNS(columns, sums, adds, a0, a1, a2, a3, number_b)              \
  template <>                                                                                      \
  __device__ __forceinline__ void wgmma_rows_by_columns<columns, adds>(                            \
      float (&d)[sums], const uint32_t* a, uint64_t b) {                                           \
    asm volatile(                                                                                  \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" PACELINE_NUMBERS_##sums \
        "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #number_b ", " #adds ", 1, 1, 1;"         \
        : PACELINE_OPERANDS_##sums                                                                 \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                     \
  }
PACELINE_WGMMA_ROWS_BY_COLUMNS(64, 32, 0, 32, 33, 34, 35, 36)
PACELINE_WGMMA_ROWS_BY_COLUMNS(64, 32, 1, 32, 33, 34, 35, 36)

#undef PACELINE_WGMMA_ROWS_BY_COLUMNS
#undef PACELINE_WGMMA_FRESH
#undef PACELINE_WGMMA_ADDS
#undef PACELINE_WGMMA_REGISTERS
#undef PACELINE_WGMMA_SHARED
#undef PACELINE_WGMMA_BY_COLUMNS
#undef PACELINE_OPERANDS_112
#undef PACELINE_OPERANDS_96
#undef PACELINE_OPERANDS_80
#undef PACELINE_OPERANDS_64
#undef PACELINE_OPERANDS_48
#undef PACELINE_OPERANDS_40
#undef PACELINE_OPERANDS_32
#undef PACELINE_OPERANDS_24
#undef PACELINE_OPERANDS_20
#undef PACELINE_OPERANDS_16
#undef PACELINE_OPERANDS_8
#undef PACELINE_EIGHT
#undef PACELINE_NUMBERS_112
#undef PACELINE_NUMBERS_96
#undef PACELINE_NUMBERS_80
#undef PACELINE_NUMBERS_64
#undef PACELINE_NUMBERS_48
#undef PACELINE_NUMBERS_40
#undef PACELINE_NUMBERS_32
#undef PACELINE_NUMBERS_24
#undef PACELINE_NUMBERS_20
#undef PACELINE_NUMBERS_16
#undef PACELINE_NUMBERS_8

}  // namespace paceline::cuda
