// SPDX-License-Identifier: Apache-2.0
//
// The order in which the CUDA gemm sums: one float32 accumulator per output, over K in ascending
// steps of one tensor core instruction of 16. A simple kernel in that order, with one warp per tile
// of 16 x 8 outputs, must agree with `gemm` in every bit at every number of rows, on the kernels of
// sm_90a and on those of every GPU. Then tiles, pipelines and the division of work do not affect
// results. PACELINE_SEED overrides the seed.

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ostream>
#include <vector>

#include "common/describe_device.h"
#include "ops/ops.h"
#include "support/cuda_fixture.h"
#include "support/gemm_reference.cuh"
#include "support/seed.h"

namespace paceline::testing {
namespace {

constexpr int32_t kMaxRows = 2048;
constexpr int32_t kNumRows[] = {1,   2,   8,   9,   16,  17,  32,  33,  63,  64,  65,  96,
                                128, 129, 160, 161, 191, 193, 255, 256, 320, 512, 2048};

struct Shape {
  int32_t n;
  int32_t k;
};
void PrintTo(const Shape& shape, std::ostream* out) { *out << "N" << shape.n << " K" << shape.k; }

class GemmOrder : public GemmComparison, public ::testing::WithParamInterface<Shape> {};

TEST_P(GemmOrder, EqualsOneAccumulatorInAscendingSteps) {
  TRACE_SEED();
  CudaTestContext& ctx = cuda_test_context();
  const auto [n, k] = GetParam();
  const int64_t outputs = int64_t{kMaxRows} * n;
  DeviceVector<__nv_bfloat16> x(int64_t{kMaxRows} * k);
  DeviceVector<__nv_bfloat16> weight(int64_t{n} * k);
  DeviceVector<float> bias(n);
  DeviceVector<float> reference(outputs);
  GemmOutputs y(outputs);
  fill_normal<<<1024, 256, 0, ctx.stream()>>>(x.data(), x.size(), base_seed(), 1.0f);
  fill_normal<<<1024, 256, 0, ctx.stream()>>>(weight.data(), weight.size(), base_seed() + 1, 0.02f);
  std::vector<float> host_bias(static_cast<size_t>(n));
  Stream(base_seed(), 2).fill(host_bias.data(), n);
  bias.upload(host_bias);
  reference_gemm<<<dim3((n + 31) / 32, kMaxRows / 16), 128, 0, ctx.stream()>>>(
      x.data(), weight.data(), reference.data(), kMaxRows, n, k, {});
  ctx.synchronize();

  int64_t num_different = 0;
  int64_t num_compared = 0;
  for (const bool is_portable : {false, true}) {
    if (!is_portable && !cuda::runs_sm90a()) continue;
    const KernelChoice choice(ctx, is_portable);
    for (const int32_t num_rows : kNumRows) {
      const DeviceVector<int32_t> num_rows_at(std::vector<int32_t>{num_rows});
      // max_rows at the number of rows, above it, and at the largest value: it selects tiles and
      // grids.
      for (const int32_t max_rows : {num_rows, std::min(num_rows + 70, kMaxRows), kMaxRows}) {
        for (const bool has_bias : {false, true}) {
          const float* const added = has_bias ? bias.data() : nullptr;
          const GemmParams p{.num_rows = num_rows_at.data(),
                             .max_rows = max_rows,
                             .x = x.data(),
                             .x_stride = k,
                             .weight = plain_matrix(weight.data(), n, k, DType::kBFloat16),
                             .bias = added,
                             .y_stride = n,
                             .x_dtype = DType::kBFloat16};
          ctx.poison_workspace();
          const int64_t tail = std::min<int64_t>(outputs - int64_t{num_rows} * n, 4 * int64_t{n});
          num_different += count_both(p, y, reference, added, num_rows, n, tail,
                                      is_portable ? "portable" : "sm_90a");
          num_compared += 2 * int64_t{num_rows} * n;
        }
      }
    }
  }
  std::printf("N%d K%d: %lld of %lld outputs differ\n", n, k, static_cast<long long>(num_different),
              static_cast<long long>(num_compared));
  EXPECT_EQ(num_different, 0);
  EXPECT_TRUE(ctx.are_counters_zero());
  expect_intact_guards(y);
}

// With 132 SMs the shapes and row counts select every tile of gemm_tiles.cu: products of models,
// then products whose last tiles extend beyond N and K, then those of one and of three steps of 64
// columns, which fill a part of a stage.
INSTANTIATE_TEST_SUITE_P(Shapes, GemmOrder,
                         ::testing::Values(Shape{6144, 4096}, Shape{4096, 4096}, Shape{4096, 12288},
                                           Shape{24576, 4096}, Shape{5376, 21504}, Shape{512, 4096},
                                           Shape{32, 2880}, Shape{257, 2048}, Shape{3100, 136},
                                           Shape{5100, 2056}, Shape{7300, 2120}, Shape{1536, 640},
                                           Shape{640, 1024}, Shape{28672, 640}, Shape{4096, 2568},
                                           Shape{4001, 328}, Shape{6100, 136}, Shape{24500, 136},
                                           Shape{28604, 264}, Shape{31900, 200}, Shape{97, 72},
                                           Shape{1, 8}, Shape{2100, 2056}, Shape{97, 64},
                                           Shape{4096, 64}, Shape{24500, 64}, Shape{2100, 192},
                                           Shape{6100, 192}, Shape{24500, 192}, Shape{28604, 320}));

}  // namespace
}  // namespace paceline::testing
