// SPDX-License-Identifier: Apache-2.0
#pragma once

// The convolution over the rows of a block, under the rules of ops.h. BlockConfig
// (model/description/decoder_config.h) says where a block drafter has it.

#include <cstdint>

#include <paceline/dtype.h>

#include "base/host_device.h"

namespace paceline {

struct CpuContext;
struct CudaContext;

// The most rows that a row of a convolution reads.
inline constexpr int32_t kMaxBlockConvTaps = 16;

// In place, for the rows of each block:
//   y_i = sum over t of x_{i-t} * (base[t] + delta_i[t])
// where row i - t is in the block. delta_i[t] has one number for each group of `group` elements. A
// row depends on rows before it in its own block alone: the op is row-invariant by blocks, and the
// rows at the end of a block may be left out.
struct ConvolveBlocksParams {
  const int32_t* num_seqs;  // [1] blocks
  int32_t max_seqs;
  // [max_seqs + 1] block s has the rows [row_indptr[s], row_indptr[s + 1]), at most
  // max_rows_per_seq
  const int32_t* row_indptr;
  int32_t max_rows_per_seq;
  void* x;             // [rows, hidden] dtype, updated
  const float* base;   // [num_taps, hidden]
  const float* delta;  // [rows, num_taps * hidden / group], rows delta_stride apart
  int64_t delta_stride;
  int32_t num_taps;  // 1 to kMaxBlockConvTaps
  int32_t group;     // divides hidden
  int32_t hidden;
  DType dtype = DType::kFloat32;
};
void convolve_blocks(CpuContext&, const ConvolveBlocksParams&);
void convolve_blocks(CudaContext&, const ConvolveBlocksParams&);
// Throws InternalError if the sizes contradict each other.
void check_convolution(const ConvolveBlocksParams& p);

// How many taps row `index` of a block has.
[[nodiscard]] PACELINE_HOST_DEVICE constexpr int32_t taps_of_row(int32_t num_taps, int32_t index) {
  return num_taps < index + 1 ? num_taps : index + 1;
}

}  // namespace paceline
