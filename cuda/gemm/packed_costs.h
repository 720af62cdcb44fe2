// SPDX-License-Identifier: Apache-2.0
#pragma once

// By what the kernels of packed weights are chosen (docs/kernels.md).

#include <cstdint>

namespace paceline::cuda {

// With fewer tiles of 16 rows of weights a multiprocessor, a warp is alone on its part of it.
inline constexpr int64_t kFewRowTiles = 5;

// A tile of one matrix of fp8 weights, and what it takes over 4,096 columns, in microseconds of an
// H200.
struct TileTime {
  int32_t weights;
  int32_t tokens;
  double us;

  // The same of a product on `num_sms` multiprocessors, of which the busiest decides.
  [[nodiscard]] constexpr double of(int32_t n, int32_t rows, int32_t num_sms) const {
    const int64_t tiles = int64_t{(n + weights - 1) / weights} * ((rows + tokens - 1) / tokens);
    return us * static_cast<double>((tiles + num_sms - 1) / num_sms);
  }
};
inline constexpr TileTime kMatrixTime = {64, 128, 21.0};       // matrix_kernel.cuh
inline constexpr TileTime kWideMatrixTime = {128, 128, 28.5};  // the same
inline constexpr TileTime kConvertedTime = {64, 128, 18.0};    // converted_kernel.cuh
inline constexpr TileTime kConvertedFewTime = {96, 64, 18.0};  // the same
inline constexpr TileTime kWideFewTime = {128, 64, 22.5};      // wide_kernel.cuh

}  // namespace paceline::cuda
