// SPDX-License-Identifier: Apache-2.0
#pragma once

// Requests the steps of a stage from the copy engine, by maps of stage_boxes.h.

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "gemm/stage_boxes.h"
#include "gemm/wgmma.cuh"

namespace paceline::cuda {

// The rows of a matrix, or of two matrices (pair_boxes), of which the stages hold `steps` steps.
template <int32_t steps>
struct StageCopies {
  const CUtensorMap* map;
  int32_t first_row;
  int32_t copy_steps;  // copied_steps
  int32_t step_bytes;  // from a step to the next one, in shared memory
  bool is_pair;
  uint64_t policy;

  // Requests the steps of stage `block` of K; called by one thread.
  __device__ __forceinline__ void request(std::byte* to, int32_t block, uint64_t* full) const {
    // Of one step the compiler then knows that there is no loop.
    const int32_t advance = steps > 1 ? copy_steps : 1;
#pragma unroll 1
    for (int32_t step = 0; step < steps; step += advance) {
      const StepPlace at = step_place(block * steps + step, advance);
      std::byte* const to_step = to + step * step_bytes;
      if (is_pair) {
        copy_box(to_step, map, at.column, first_row, /*matrix=*/0, at.step, full, policy);
      } else {
        copy_box(to_step, map, at.column, first_row, at.step, full, policy);
      }
    }
  }
};

}  // namespace paceline::cuda
