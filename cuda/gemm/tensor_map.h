// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>

namespace paceline::cuda {

// Describes [rows, columns] of bfloat16, rows `stride` elements apart, to the copy engine. It
// copies boxes of box_rows x 64 to shared memory as rows of 128 bytes in the 128-byte swizzle.
CUtensorMap tensor_map(const void* data, int32_t rows, int32_t columns, int64_t stride,
                       int32_t box_rows);

}  // namespace paceline::cuda
