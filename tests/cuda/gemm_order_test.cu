// SPDX-License-Identifier: Apache-2.0
//
// The order in which the CUDA gemm sums: one float32 accumulator per output, over K in ascending
// steps of one tensor core instruction of 16. A simple kernel in that order, with one warp per tile
// of 16 x 8 outputs, must agree with `gemm` in every bit at every number of rows. Then tiles,
// pipelines and the division of work do not affect results. PACELINE_SEED overrides the seed.

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ostream>
#include <vector>

#include "ops/ops.h"
#include "support/cuda_fixture.h"
#include "support/seed.h"

namespace paceline::testing {
namespace {

__device__ uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// About normal: the sum of four uniform numbers. Every 61st is large, so that partial sums differ
// in magnitude and the order affects the bits.
__global__ void fill_normal(__nv_bfloat16* to, int64_t count, uint64_t seed, float scale) {
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
__device__ uint32_t load_pair(const __nv_bfloat16* row, int32_t k, int32_t at, bool is_inside) {
  return is_inside && at < k ? *reinterpret_cast<const uint32_t*>(row + at) : 0u;
}

// y32 = x W^T, one warp per tile of 16 rows x 8 columns; k is even.
__global__ void reference_gemm(const __nv_bfloat16* x, const __nv_bfloat16* weight, float* y,
                               int32_t num_rows, int32_t n, int32_t k) {
  const int32_t lane = threadIdx.x % 32;
  const int32_t group = lane / 4;
  const int32_t pair = lane % 4 * 2;
  const int32_t column = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * 8;
  const int32_t row = blockIdx.y * 16;
  if (column >= n) return;
  const int32_t rows[2] = {row + group, row + group + 8};
  const bool has_row[2] = {rows[0] < num_rows, rows[1] < num_rows};
  const bool has_column = column + group < n;
  const __nv_bfloat16* const x0 = x + int64_t{has_row[0] ? rows[0] : 0} * k;
  const __nv_bfloat16* const x1 = x + int64_t{has_row[1] ? rows[1] : 0} * k;
  const __nv_bfloat16* const w = weight + int64_t{has_column ? column + group : 0} * k;
  float c[4] = {};
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
  }
  for (int i = 0; i < 4; ++i) {
    const int32_t to_column = column + pair + i % 2;
    if (has_row[i / 2] && to_column < n) y[int64_t{rows[i / 2]} * n + to_column] = c[i];
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

constexpr int32_t kMaxRows = 2048;
constexpr int32_t kNumRows[] = {1,   2,   8,   9,   16,  17,  32,  33,  63,  64,  65,  96,
                                128, 129, 160, 161, 191, 193, 255, 256, 320, 512, 2048};

struct Shape {
  int32_t n;
  int32_t k;
};
void PrintTo(const Shape& shape, std::ostream* out) { *out << "N" << shape.n << " K" << shape.k; }

class GemmOrder : public GpuTest, public ::testing::WithParamInterface<Shape> {
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

TEST_P(GemmOrder, EqualsOneAccumulatorInAscendingSteps) {
  TRACE_SEED();
  CudaTestContext& ctx = cuda_test_context();
  const auto [n, k] = GetParam();
  const int64_t outputs = int64_t{kMaxRows} * n;
  DeviceVector<__nv_bfloat16> x(int64_t{kMaxRows} * k);
  DeviceVector<__nv_bfloat16> weight(int64_t{n} * k);
  DeviceVector<float> bias(n);
  DeviceVector<float> reference(outputs);
  DeviceVector<float> y32(outputs);
  DeviceVector<__nv_bfloat16> y16(outputs);
  fill_normal<<<1024, 256, 0, ctx.stream()>>>(x.data(), x.size(), base_seed(), 1.0f);
  fill_normal<<<1024, 256, 0, ctx.stream()>>>(weight.data(), weight.size(), base_seed() + 1, 0.02f);
  std::vector<float> host_bias(static_cast<size_t>(n));
  Stream(base_seed(), 2).fill(host_bias.data(), n);
  bias.upload(host_bias);
  reference_gemm<<<dim3((n + 31) / 32, kMaxRows / 16), 128, 0, ctx.stream()>>>(
      x.data(), weight.data(), reference.data(), kMaxRows, n, k);
  ctx.synchronize();

  int64_t num_different = 0;
  int64_t num_compared = 0;
  for (const int32_t num_rows : kNumRows) {
    const DeviceVector<int32_t> num_rows_at(std::vector<int32_t>{num_rows});
    // max_rows at the number of rows, above it, and at the largest value: it selects tiles and
    // grids.
    for (const int32_t max_rows : {num_rows, std::min(num_rows + 70, kMaxRows), kMaxRows}) {
      for (const bool has_bias : {false, true}) {
        const float* const added = has_bias ? bias.data() : nullptr;
        GemmParams p{.num_rows = num_rows_at.data(),
                     .max_rows = max_rows,
                     .x = x.data(),
                     .x_stride = k,
                     .weight = plain_matrix(weight.data(), n, k, DType::kBFloat16),
                     .bias = added,
                     .y = y32.data(),
                     .y_stride = n,
                     .x_dtype = DType::kBFloat16,
                     .y_dtype = DType::kFloat32};
        y32.poison();
        y16.poison();
        ctx.poison_workspace();
        gemm(ctx.context(), p);
        p.y = y16.data();
        p.y_dtype = DType::kBFloat16;
        gemm(ctx.context(), p);
        ctx.synchronize();
        num_different += count(y32, reference, added, num_rows, n, "float32");
        num_different += count(y16, reference, added, num_rows, n, "bfloat16");
        num_compared += 2 * int64_t{num_rows} * n;
        const int64_t tail = std::min<int64_t>(outputs - int64_t{num_rows} * n, 4 * int64_t{n});
        EXPECT_TRUE(is_untouched_beyond(y32, int64_t{num_rows} * n, tail)) << num_rows << " rows";
        EXPECT_TRUE(is_untouched_beyond(y16, int64_t{num_rows} * n, tail)) << num_rows << " rows";
      }
    }
  }
  std::printf("N%d K%d: %lld of %lld outputs differ\n", n, k, static_cast<long long>(num_different),
              static_cast<long long>(num_compared));
  EXPECT_EQ(num_different, 0);
  EXPECT_TRUE(ctx.are_counters_zero());
  EXPECT_TRUE(y32.are_guards_intact());
  EXPECT_TRUE(y16.are_guards_intact());
}

// With 132 SMs the shapes and row counts select every tile of gemm.cu: products of models, then
// products whose last tiles extend beyond N and K.
INSTANTIATE_TEST_SUITE_P(Shapes, GemmOrder,
                         ::testing::Values(Shape{6144, 4096}, Shape{4096, 4096}, Shape{4096, 12288},
                                           Shape{24576, 4096}, Shape{5376, 21504}, Shape{512, 4096},
                                           Shape{1536, 640}, Shape{640, 1024}, Shape{28672, 640},
                                           Shape{4096, 2568}, Shape{4001, 328}, Shape{6100, 136},
                                           Shape{24500, 136}, Shape{28604, 264}, Shape{31900, 200},
                                           Shape{97, 72}, Shape{1, 8}));

}  // namespace
}  // namespace paceline::testing
