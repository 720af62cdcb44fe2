// SPDX-License-Identifier: Apache-2.0
#pragma once

// The bits of packed weights (WeightLayout::kPacked): elements of 4 and 8 bits in the order in
// which a warp reads them as the operand of `mma.sync` m16n8k16 and of `wgmma` m64k16.
//
// A matrix [n, k] is cut into tiles of 16 rows and 64 columns, padded with zeros; the tiles of 16
// rows follow each other along k. With g = lane / 4 and t = lane % 4, a lane's operand of a step of
// 16 columns, from column c, has the elements
//   a0: row g,     columns c + 2 t     and c + 2 t + 1
//   a1: row g + 8, columns c + 2 t     and c + 2 t + 1
//   a2: row g,     columns c + 2 t + 8 and c + 2 t + 9
//   a3: row g + 8, columns c + 2 t + 8 and c + 2 t + 9
// A word's lower 16 bits have the elements of the even columns, and its upper 16 bits those of the
// odd ones. Below, bits are those of a half.
//
// kMxfp4: a tile has 512 bytes, of which lane l has 16 at 16 l: a word for each of the four steps,
// with
//   a0: sign 15, exponent 8..7, mantissa 6
//   a1: exponent 12..11, mantissa 10; the sign is bit 3 of the other half
//   a2: sign 9, exponent 2..1, mantissa 0
//   a3: sign 13, exponent 14 and 5, mantissa 4
// No other order of the bits needs fewer instructions: shifts by three distances cannot cover a
// half.
// Its scales have 32 bytes a tile, [8][4]: for each g the bytes of row g and row g + 8 for the
// first 32 columns, then for the last 32.
//
// kNvfp4: elements as kMxfp4 has them. A scale s gives the values of 16 columns of a row by a line,
// two bfloat16: its slope 2 (r15 - r1) and its offset r1 - slope, with r1 = bfloat16(s) and r15 =
// bfloat16(1.5 s) (nvfp4_elements.cuh). A tile has 256 bytes of them, [8][4][2][2]: for each g and
// each 16 columns the slope of row g and that of row g + 8, then their offsets.
//
// kInt4: as kMxfp4, with the codes a0 at bits 3..0, a1 at 7..4, a2 at 11..8 and a3 at 15..12.
// Its scales have 32 bytes for each group of columns, [8][2]: for each g the scale of row g and
// that of row g + 8. Its zero points are bytes, packed as the scales of kMxfp4 are: 32 bytes for
// each two groups, [8][4].
//
// kFp8: a tile has 1,024 bytes. Lane l has 16 at 16 l for the first 32 columns and 16 at 512 + 16 l
// for the last 32: for each of the two steps a word of row g and a word of row g + 8, with
//   a0 (a1): sign 15, exponent 10..7, mantissa 6..4
//   a2 (a3): sign 11, exponent 14..12 and 3, mantissa 2..0
// Its scales are those of a row-major matrix.

#include "ops/weight_matrix.h"
