// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the CUDA products are compared with: one float32 accumulator per output, over K in ascending
// steps of one tensor core instruction of 16, in a simple kernel with one warp per tile of 16 x 8
// outputs.

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "ops/moe.h"
#include "ops/ops.h"
#include "support/cuda_fixture.h"

namespace paceline::testing {

__device__ inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// About normal: the sum of four uniform numbers. Every 61st is large, so that partial sums differ
// in magnitude and the order affects the bits.
inline __global__ void fill_normal(__nv_bfloat16* to, int64_t count, uint64_t seed, float scale) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const uint64_t bits = mix(mix(seed) + static_cast<uint64_t>(i));
    const auto sum = static_cast<int64_t>((bits & 0xffff) + (bits >> 16 & 0xffff) +
                                          (bits >> 32 & 0xffff) + (bits >> 48));
    const float value = static_cast<float>(sum - 131070) * (1.7320508f / 65536.0f) * scale;
    to[i] = __float2bfloat16_rn(i % 61 == 7 ? 16.0f * value : value);
  }
}

// Two neighbours in K, or zeros.
__device__ inline uint32_t load_pair(const __nv_bfloat16* row, int32_t k, int32_t at,
                                     bool is_inside) {
  return is_inside && at < k ? *reinterpret_cast<const uint32_t*>(row + at) : 0u;
}

// Which rows of x a product reads, and what multiplies its sums.
struct ReferenceExtras {
  const int32_t* x_rows = nullptr;  // row of x of each row; null: row i of row i
  // [.., ceil(k / part)]: after every `part` columns of K, sum = fma(scale, part's sum, sum). Null:
  // one sum over K.
  const float* scales = nullptr;
  int32_t scale_rows = 1;  // rows of W that share a scale
  int32_t part = 0;        // a multiple of 16
};

// y32 = x W^T, one warp per tile of 16 rows x 8 columns; k is even.
inline __global__ void reference_gemm(const __nv_bfloat16* x, const __nv_bfloat16* weight, float* y,
                                      int32_t num_rows, int32_t n, int32_t k,
                                      ReferenceExtras extras) {
  const int32_t lane = threadIdx.x % 32;
  const int32_t group = lane / 4;
  const int32_t pair = lane % 4 * 2;
  const int32_t column = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * 8;
  const int32_t row = blockIdx.y * 16;
  if (column >= n) return;
  const int32_t rows[2] = {row + group, row + group + 8};
  const bool has_row[2] = {rows[0] < num_rows, rows[1] < num_rows};
  const bool has_column = column + group < n;
  const auto row_of_x = [&](int i) {
    const int64_t at = has_row[i] ? rows[i] : 0;
    return x + (extras.x_rows != nullptr ? extras.x_rows[at] : at) * k;
  };
  const __nv_bfloat16* const x0 = row_of_x(0);
  const __nv_bfloat16* const x1 = row_of_x(1);
  const __nv_bfloat16* const w = weight + int64_t{has_column ? column + group : 0} * k;
  const int32_t part = extras.scales != nullptr ? extras.part : k;
  const int32_t num_parts = (k + part - 1) / part;
  float c[4] = {};
  float total[4] = {};
  for (int32_t at = 0; at < k; at += 16) {
    const uint32_t a0 = load_pair(x0, k, at + pair, has_row[0]);
    const uint32_t a1 = load_pair(x1, k, at + pair, has_row[1]);
    const uint32_t a2 = load_pair(x0, k, at + pair + 8, has_row[0]);
    const uint32_t a3 = load_pair(x1, k, at + pair + 8, has_row[1]);
    const uint32_t b0 = load_pair(w, k, at + pair, has_column);
    const uint32_t b1 = load_pair(w, k, at + pair + 8, has_column);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    if (extras.scales == nullptr || ((at + 16) % part != 0 && at + 16 < k)) continue;
    for (int i = 0; i < 4; ++i) {
      const int32_t scale_row = min(column + pair + i % 2, n - 1) / extras.scale_rows;
      total[i] =
          __fmaf_rn(extras.scales[int64_t{scale_row} * num_parts + at / part], c[i], total[i]);
      c[i] = 0.0f;
    }
  }
  for (int i = 0; i < 4; ++i) {
    const int32_t to_column = column + pair + i % 2;
    if (!has_row[i / 2] || to_column >= n) continue;
    y[int64_t{rows[i / 2]} * n + to_column] = extras.scales != nullptr ? total[i] : c[i];
  }
}

// differences[0] counts outputs that differ in a bit from the reference (rounded, for bfloat16);
// differences[1] is the index of the first.
template <class T>
__global__ void count_differences(const T* y, const float* reference, const float* bias,
                                  int64_t count, int32_t n, unsigned long long* differences) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const float want = bias == nullptr ? reference[i] : reference[i] + bias[i % n];
    bool is_same;
    if constexpr (sizeof(T) == 4) {
      is_same = __float_as_uint(y[i]) == __float_as_uint(want);
    } else {
      is_same = __bfloat16_as_ushort(y[i]) == __bfloat16_as_ushort(__float2bfloat16_rn(want));
    }
    if (is_same) continue;
    atomicAdd(&differences[0], 1ull);
    atomicMin(&differences[1], static_cast<unsigned long long>(i));
  }
}

// The outputs of a product in both dtypes that it writes.
struct GemmOutputs {
  explicit GemmOutputs(int64_t count) : y32(count), y16(count) {}

  DeviceVector<float> y32;
  DeviceVector<__nv_bfloat16> y16;
};

inline void run_product(CudaContext& ctx, const GemmParams& p) { gemm(ctx, p); }
inline void run_product(CudaContext& ctx, const ExpertGemmParams& p) { expert_gemm(ctx, p); }

// Compares outputs on the device.
class GemmComparison : public GpuTest {
 protected:
  template <class T>
  static T first_word(const DeviceVector<T>& from, size_t index = 0) {
    return from.download()[index];
  }

  // The number of the rows' outputs that differ; prints the first.
  template <class T>
  int64_t count(const DeviceVector<T>& y, const DeviceVector<float>& reference, const float* bias,
                int32_t num_rows, int32_t n, const char* what) {
    CudaTestContext& ctx = cuda_test_context();
    DeviceVector<unsigned long long> differences({0ull, ~0ull});
    const int64_t outputs = int64_t{num_rows} * n;
    count_differences<<<1024, 256, 0, ctx.stream()>>>(y.data(), reference.data(), bias, outputs, n,
                                                      differences.data());
    ctx.synchronize();
    const auto number = static_cast<int64_t>(first_word(differences));
    if (number > 0) {
      const auto at = static_cast<int64_t>(first_word(differences, 1));
      std::printf("  N%d %s, %d rows: %lld of %lld outputs differ, first row %lld column %lld\n", n,
                  what, num_rows, static_cast<long long>(number), static_cast<long long>(outputs),
                  static_cast<long long>(at / n), static_cast<long long>(at % n));
    }
    return number;
  }

  // Computes the product `p` with outputs of both dtypes, and counts those that differ. The product
  // must leave the `tail` outputs beyond the rows alone. `added`: the bias that the reference
  // lacks.
  template <class Params>
  int64_t count_both(Params p, GemmOutputs& y, const DeviceVector<float>& reference,
                     const float* added, int32_t num_rows, int32_t n, int64_t tail,
                     const char* what) {
    CudaTestContext& ctx = cuda_test_context();
    y.y32.poison();
    y.y16.poison();
    p.y = y.y32.data();
    p.y_dtype = DType::kFloat32;
    run_product(ctx.context(), p);
    p.y = y.y16.data();
    p.y_dtype = DType::kBFloat16;
    run_product(ctx.context(), p);
    ctx.synchronize();
    const int64_t outputs = int64_t{num_rows} * n;
    EXPECT_TRUE(is_untouched_beyond(y.y32, outputs, tail)) << what << ", " << num_rows << " rows";
    EXPECT_TRUE(is_untouched_beyond(y.y16, outputs, tail)) << what << ", " << num_rows << " rows";
    return count(y.y32, reference, added, num_rows, n, what) +
           count(y.y16, reference, added, num_rows, n, what);
  }

  static void expect_intact_guards(const GemmOutputs& y) {
    EXPECT_TRUE(y.y32.are_guards_intact());
    EXPECT_TRUE(y.y16.are_guards_intact());
  }

  // Whether the op wrote beyond the rows of y, which the test filled with poison.
  template <class T>
  static bool is_untouched_beyond(const DeviceVector<T>& y, int64_t from, int64_t elements) {
    std::vector<T> tail(static_cast<size_t>(elements));
    check_cuda(
        cudaMemcpy(tail.data(), y.data() + from, tail.size() * sizeof(T), cudaMemcpyDeviceToHost),
        "tail");
    const auto* const bytes = reinterpret_cast<const unsigned char*>(tail.data());
    return std::all_of(bytes, bytes + tail.size() * sizeof(T),
                       [](unsigned char byte) { return byte == 0xff; });
  }
};

}  // namespace paceline::testing
