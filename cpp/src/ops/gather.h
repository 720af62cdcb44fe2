// SPDX-License-Identifier: Apache-2.0
#pragma once

// The exchange of ranks (device/rank_group.h) inside a forward pass: each has computed some columns
// of every row, and afterwards each has all of them. Nothing is summed, so the bits are those of
// one rank.

#include <cstdint>

#include <paceline/dtype.h>

#include "device/rank_group.h"

namespace paceline {

struct CpuContext;

// y = the columns of all ranks. Every rank of the group makes the same calls in the same order,
// with equal num_rows, total_columns and dtype, and the columns of the ranks cover y without
// overlap.
struct GatherColumnsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* x;  // [max_rows, num_columns] dtype, rows x_stride apart; may be its place in y
  int64_t x_stride;
  int32_t num_columns;    // of this rank
  int32_t first_column;   // in y
  int32_t total_columns;  // of all ranks
  void* y;                // [max_rows, total_columns] dtype
  DType dtype = DType::kFloat32;
  RankHandle ranks;
};
// Throws DeviceError when the group has failed, and when a rank does not come in time. There is no
// overload of CudaContext yet, so check_options refuses several ranks on a GPU.
void gather_columns(CpuContext&, const GatherColumnsParams&);

}  // namespace paceline
