// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gemm/stage_boxes.h"

namespace paceline::cuda {

// Describes [rows, columns] of bfloat16, rows `stride` elements apart, to the copy engine. It
// copies boxes of box_rows x 64 to shared memory as rows of 128 bytes in the 128-byte swizzle.
CUtensorMap tensor_map(const void* data, int32_t rows, int32_t columns, int64_t stride,
                       int32_t box_rows);

// Describes an operand of bfloat16 to the copy engine, which copies boxes of it to shared memory as
// rows of 128 bytes in the 128-byte swizzle.
CUtensorMap stage_map(const void* data, const StageBoxes<3>& boxes);
CUtensorMap stage_map(const void* data, const StageBoxes<4>& boxes);

// Describes `matrices` matrices of [rows, row_bytes] bytes, `stride` bytes apart, to the copy
// engine. It copies boxes of box_rows x box_bytes of one matrix to shared memory in the swizzle
// that spans box_bytes, which is 64 or 128. Row bytes and stride are multiples of 16.
CUtensorMap byte_map(const void* data, int32_t matrices, int64_t stride, int32_t rows,
                     int64_t row_bytes, int32_t box_rows, int32_t box_bytes);

// Describes packed weights (packed_boxes) to the copy engine, which copies boxes of them to shared
// memory, row tile after row tile.
CUtensorMap packed_map(const void* data, const StageBoxes<3>& boxes);

// Describes the keys, or the values, of a paged cache in bfloat16: from `data` on, blocks lie
// block_bytes apart, each with block_size tokens of [heads, head_dim]. The copy engine copies
// box_tokens x 64 elements of one head as rows of 128 bytes in the 128-byte swizzle. The number of
// blocks is not known here, so nothing checks it.
CUtensorMap paged_map(const void* data, int64_t block_bytes, int32_t block_size, int32_t heads,
                      int32_t head_dim, int32_t box_tokens);

// The tokens of a box such that boxes begin at multiples of 1,024 bytes, none has parts of two
// blocks, and chunks of `chunk` tokens have whole ones; 0: blocks of this size have no such boxes.
int32_t paged_box_tokens(int32_t block_size, int32_t chunk);

}  // namespace paceline::cuda
