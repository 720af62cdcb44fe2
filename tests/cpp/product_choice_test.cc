// SPDX-License-Identifier: Apache-2.0
//
// Which kernel computes a product of packed weights on sm_90a. It is chosen by measurements
// (docs/kernels.md), and this test has the shapes that were measured; it needs no GPU.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "device/cuda_context.h"
#include "gemm/converted_gemm.h"
#include "ops/ops.h"

namespace paceline {
namespace {

// An H200, as far as the choice sees it.
CudaContext h200() {
  CudaContext ctx;
  ctx.num_sms = 132;
  return ctx;
}

GemmParams product(WeightFormat format, int32_t n, int32_t k, int32_t rows) {
  GemmParams p = {};
  p.weight.format = format;
  p.weight.layout = WeightLayout::kPacked;
  p.weight.dtype = DType::kBFloat16;
  p.weight.n = n;
  p.weight.k = k;
  p.weight.scale_rows = 128;
  p.weight.scale_cols = 128;
  p.max_rows = rows;
  p.x_stride = k;
  p.y_stride = n;
  p.x_dtype = DType::kBFloat16;
  p.y_dtype = DType::kBFloat16;
  p.num_groups = 1;
  return p;
}

bool takes_fp8(int32_t n, int32_t k, int32_t rows) {
  const CudaContext ctx = h200();
  return cuda::takes_converted(ctx, product(WeightFormat::kFp8, n, k, rows));
}

TEST(ProductChoice, Fp8HasTheTilesThatWereFaster) {
  constexpr int32_t kRows[] = {8, 16, 17, 64, 128, 256, 512, 2048};
  struct Shape {
    int32_t n;
    int32_t k;
    bool takes[std::size(kRows)];
  };
  constexpr Shape kShapes[] = {
      {6144, 4096, {false, true, true, true, true, false, true, false}},
      {4096, 4096, {false, true, true, true, true, true, false, false}},
      {24576, 4096, {false, false, true, true, true, false, false, false}},
      {4096, 12288, {false, true, true, true, true, true, false, false}},
      {28672, 4096, {false, false, false, false, false, false, false, false}},
      {4096, 14336, {false, true, true, true, true, true, false, false}},
  };
  for (const Shape& shape : kShapes) {
    for (size_t i = 0; i < std::size(kRows); ++i) {
      EXPECT_EQ(takes_fp8(shape.n, shape.k, kRows[i]), shape.takes[i])
          << shape.n << "x" << shape.k << ", " << kRows[i] << " rows";
    }
  }
}

TEST(ProductChoice, ScalesThatMultiplySumsAreSharedByRowTiles) {
  const CudaContext ctx = h200();
  GemmParams p = product(WeightFormat::kFp8, 4096, 4096, 64);
  for (const int32_t rows : {1, 2, 4, 8}) {
    p.weight.scale_rows = rows;
    p.weight.has_exact_scales = false;
    EXPECT_FALSE(cuda::takes_converted(ctx, p)) << rows;
    p.weight.has_exact_scales = true;  // part of the values
    EXPECT_TRUE(cuda::takes_converted(ctx, p)) << rows;
  }
  p.weight.has_exact_scales = false;
  for (const int32_t rows : {16, 32, 128}) {
    p.weight.scale_rows = rows;
    EXPECT_TRUE(cuda::takes_converted(ctx, p)) << rows;
  }
  p.weight.scale_rows = 1;
  p.weight.scale_cols = p.weight.k;  // one a row
  EXPECT_TRUE(cuda::takes_converted(ctx, p));
  p.weight.scale_cols = 64;
  EXPECT_FALSE(cuda::takes_converted(ctx, p));
}

// An end that a tile does not know would be left out without a word.
TEST(ProductChoice, OnlyTilesOfSixteenTokensAddToAResidual) {
  const CudaContext ctx = h200();
  for (const WeightFormat format :
       {WeightFormat::kInt4, WeightFormat::kNvfp4, WeightFormat::kFp8}) {
    for (int32_t rows = 1; rows <= 64; ++rows) {
      EXPECT_EQ(adds_in_product(ctx, product(format, 4096, 4096, rows)),
                rows <= 16 && format != WeightFormat::kFp8)
          << static_cast<int>(format) << ", " << rows << " rows";
    }
  }
}

TEST(ProductChoice, WhatTheTilesCannotComputeGoesElsewhere) {
  for (const WeightFormat format :
       {WeightFormat::kInt4, WeightFormat::kNvfp4, WeightFormat::kFp8}) {
    CudaContext ctx = h200();
    const GemmParams usual = product(format, 4096, 4096, 64);
    EXPECT_TRUE(cuda::takes_converted(ctx, usual));
    const auto expect_other = [&](const auto& change) {
      GemmParams p = usual;
      change(p);
      EXPECT_FALSE(cuda::takes_converted(ctx, p)) << static_cast<int>(format);
    };
    expect_other([](GemmParams& p) { p.y_dtype = DType::kFloat32; });
    expect_other([](GemmParams& p) { p.num_groups = 2; });
    expect_other([](GemmParams& p) { p.x_stride += 4; });
    expect_other([](GemmParams& p) { p.weight.layout = WeightLayout::kRowMajor; });
    ctx.is_portable = true;
    EXPECT_FALSE(cuda::takes_converted(ctx, usual));
  }
}

}  // namespace
}  // namespace paceline
