// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the lanes of a portable product load from the ring and multiply.

#include <cstdint>

#include "common/mma.cuh"
#include "gemm/portable_shape.cuh"

namespace paceline::cuda::portable {

// Where a lane finds its operands in a stage: bytes from the stage for the first four steps. Later
// steps are whole lines of 128 bytes further.
template <class Shape>
struct OperandPlaces {
  static constexpr bool kIsNarrow = Shape::kColumnTiles == 1;
  static constexpr int32_t kPatterns = kIsNarrow ? 2 : 4;
  uint32_t rows[4];
  uint32_t columns[kPatterns];

  // Of operands that begin first_row and first_column bytes behind the stage.
  __device__ __forceinline__ OperandPlaces(uint32_t first_row, uint32_t first_column) {
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    const auto at = [&](int32_t row, int32_t piece) {
      return static_cast<uint32_t>(row * Shape::kRowBytes + (piece ^ (lane % 8)) * 16);
    };
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) rows[i] = first_row + at(lane % 16, 2 * i + lane / 16);
#pragma unroll
    for (int32_t i = 0; i < kPatterns; ++i) {
      columns[i] = first_column + (kIsNarrow ? at(lane % 8, 4 * i + lane / 8)
                                             : at(lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2));
    }
#pragma unroll
    for (uint32_t& place : rows) keep_in_register(place);
#pragma unroll
    for (uint32_t& place : columns) keep_in_register(place);
  }
};

// What a lane needs for the products of kSteps steps of 16 columns.
template <class Shape>
struct Operands {
  static constexpr bool kIsNarrow = Shape::kColumnTiles == 1;
  static constexpr int32_t kSteps = kIsNarrow ? 2 : 1;  // ldmatrix reads four matrices

  uint32_t rows[kSteps][Shape::kRowTiles][4];
  uint32_t columns[kIsNarrow ? 1 : Shape::kColumnTiles / 2][4];

  // `number`: of these operands in the stage at the shared address `stage`.
  __device__ __forceinline__ void load(uint32_t stage, const OperandPlaces<Shape>& places,
                                       int32_t number) {
    constexpr int32_t kPatterns = OperandPlaces<Shape>::kPatterns;
#pragma unroll
    for (int32_t s = 0; s < kSteps; ++s) {
      const int32_t step = number * kSteps + s;
      const uint32_t from = stage + places.rows[step % 4] + static_cast<uint32_t>(step / 4 * 128);
#pragma unroll
      for (int32_t i = 0; i < Shape::kRowTiles; ++i) {
        ldmatrix_x4(rows[s][i], from + static_cast<uint32_t>(16 * i * Shape::kRowBytes));
      }
    }
    const uint32_t from = stage + places.columns[number % kPatterns] +
                          static_cast<uint32_t>(number / kPatterns * 128);
#pragma unroll
    for (int32_t j = 0; j < (kIsNarrow ? 1 : Shape::kColumnTiles / 2); ++j) {
      ldmatrix_x4(columns[j], from + static_cast<uint32_t>(16 * j * Shape::kRowBytes));
    }
  }

  __device__ __forceinline__ void multiply(
      float (&sums)[Shape::kRowTiles][Shape::kColumnTiles][4]) const {
#pragma unroll
    for (int32_t s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int32_t i = 0; i < Shape::kRowTiles; ++i) {
#pragma unroll
        for (int32_t j = 0; j < Shape::kColumnTiles; ++j) {
          const int32_t first = kIsNarrow ? 2 * s : j % 2 * 2;
          mma_16x8x16(sums[i][j], rows[s][i], columns[j / 2][first], columns[j / 2][first + 1]);
        }
      }
    }
  }
};

}  // namespace paceline::cuda::portable
