// SPDX-License-Identifier: Apache-2.0
#pragma once

// The boxes by which the copy engine brings operands of bfloat16 to the stages of a ring. A step is
// 64 columns of K: rows of 128 bytes in shared memory. A stage has several steps, one behind the
// other. Each copy takes time of its own, however few bytes it brings, so one copy brings all steps
// of a stage: the steps of the matrix are a dimension of its tensor map.
//
// No dimension can end inside a step. Where K does, the columns behind it must arrive as zeros, and
// not as what follows the row in memory. Then a copy brings one step, of a map whose columns end
// with K.
//
// Packed weights have boxes of their own (packed_boxes).

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/host_device.h"

namespace paceline::cuda {

inline constexpr int32_t kStepColumns = 64;

// What a tensor map is made of, the innermost dimension first.
template <size_t kRank>
struct StageBoxes {
  std::array<uint64_t, kRank> extent;     // elements
  std::array<uint64_t, kRank - 1> pitch;  // bytes, without the innermost one
  std::array<uint32_t, kRank> box;        // elements of a copy
};

// The steps that a copy brings to a stage of `stage_steps`.
constexpr int32_t copied_steps(int32_t k, int32_t stage_steps) {
  return k % kStepColumns == 0 ? stage_steps : 1;
}

// Where the copy of a step begins, in the dimensions of columns and of steps.
struct StepPlace {
  int32_t column;
  int32_t step;
};
PACELINE_HOST_DEVICE constexpr StepPlace step_place(int32_t step, int32_t copy_steps) {
  return copy_steps > 1 ? StepPlace{.column = 0, .step = step}
                        : StepPlace{.column = step * kStepColumns, .step = 0};
}

// Boxes of box_rows rows of [rows, k], which are `stride` elements apart. The dimensions are
// columns, rows and steps.
constexpr StageBoxes<3> row_boxes(int32_t rows, int32_t k, int64_t stride, int32_t box_rows,
                                  int32_t copy_steps) {
  const bool is_by_steps = copy_steps > 1;
  return {
      .extent = {static_cast<uint64_t>(is_by_steps ? kStepColumns : k), static_cast<uint64_t>(rows),
                 static_cast<uint64_t>(is_by_steps ? k / kStepColumns : 1)},
      .pitch = {static_cast<uint64_t>(stride) * 2, kStepColumns * 2},
      .box = {static_cast<uint32_t>(kStepColumns), static_cast<uint32_t>(box_rows),
              static_cast<uint32_t>(copy_steps)}};
}

// Boxes of box_rows rows of each of two matrices [rows, k], which follow each other without gaps.
// The dimensions are columns, rows, matrices and steps, so a step in shared memory has the rows of
// the first matrix, then those of the second one.
constexpr StageBoxes<4> pair_boxes(int32_t rows, int32_t k, int32_t box_rows, int32_t copy_steps) {
  const StageBoxes<3> one = row_boxes(rows, k, k, box_rows, copy_steps);
  return {.extent = {one.extent[0], one.extent[1], 2, one.extent[2]},
          .pitch = {one.pitch[0], one.pitch[0] * one.extent[1], one.pitch[1]},
          .box = {one.box[0], one.box[1], 2, one.box[2]}};
}

// What packed weights are counted in.
inline constexpr int32_t kPackedWordBytes = 8;

// Boxes of packed weights: box_bytes of each of box_row_tiles row tiles of one of `num_experts`
// matrices, `stride` bytes apart, which may overlap. A row tile has row_bytes. The dimensions are
// the words of a row tile, row tiles and matrices.
constexpr StageBoxes<3> packed_boxes(int32_t row_tiles, int64_t row_bytes, int32_t num_experts,
                                     int64_t stride, int32_t box_row_tiles, int32_t box_bytes) {
  // One matrix has no stride.
  const int64_t pitch = num_experts > 1 ? stride : row_tiles * row_bytes;
  return {.extent = {static_cast<uint64_t>(row_bytes) / kPackedWordBytes,
                     static_cast<uint64_t>(row_tiles), static_cast<uint64_t>(num_experts)},
          .pitch = {static_cast<uint64_t>(row_bytes), static_cast<uint64_t>(pitch)},
          .box = {static_cast<uint32_t>(box_bytes / kPackedWordBytes),
                  static_cast<uint32_t>(box_row_tiles), 1}};
}

}  // namespace paceline::cuda
