// SPDX-License-Identifier: Apache-2.0
#pragma once

// The scales of weights, as arguments of a kernel.

#include <cstddef>
#include <cstdint>

namespace paceline::cuda {

// What a matrix's scales do.
enum class ScaleUse : uint8_t {
  kNone,     // there are none
  kValues,   // they are part of the values that are multiplied
  kRowSums,  // kFp8, one scale a row, multiplies the sum over K
  kTileSums  // kFp8, a scale for 128 columns, multiplies the sum over them
};

struct ScaleArgs {
  const std::byte* scales;
  int64_t expert_stride;  // bytes
  int32_t columns;        // of the table of scales
  int32_t row_shift;      // kFp8: log2 of the rows that share a scale
  ScaleUse use;
};

}  // namespace paceline::cuda
