// SPDX-License-Identifier: Apache-2.0
#pragma once

// The exchange of ranks (device/rank_group.h) inside a forward pass: each has computed some columns
// of every row, and afterwards each has all of them, or the token that is drawn from them. Nothing
// is summed, so the bits are those of one rank.

#include <algorithm>
#include <cstdint>
#include <optional>

#include <paceline/dtype.h>

#include "device/rank_group.h"
#include "device/rank_share.h"
#include "ops/moe.h"
#include "ops/ops.h"

namespace paceline {

struct CpuContext;
struct CudaContext;

// y = the columns of all ranks. Every rank of the group makes the same calls in the same order,
// with equal num_rows, max_rows, columns and dtype.
struct GatherColumnsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* x;  // [max_rows, own columns] dtype, rows x_stride apart; may be its place in y
  int64_t x_stride;
  RankColumns columns;
  void* y;  // [max_rows, columns.total()] dtype
  DType dtype = DType::kFloat32;
  RankHandle ranks;
};
// On the CPU, throws DeviceError when the group has failed, and when a rank does not come in time.
// On a GPU, where every rank has columns, the kernel then ends without them, and the runner throws.
void gather_columns(CpuContext&, const GatherColumnsParams&);
void gather_columns(CudaContext&, const GatherColumnsParams&);

// combine_experts, if it is there, to the rank's columns of the gather's x; gather_columns; and
// then rms_norm with its y as x. That y may stay unwritten, because a backend may fuse the ops.
struct GatheredNormParams {
  GatherColumnsParams gather;
  RmsNormParams norm;
  std::optional<CombineExpertsParams> places = std::nullopt;
};
// Throws InternalError where the norm does not read what is gathered, or the gather not the sum of
// the places.
void check_gathered(const GatheredNormParams& p);
void gathered_norm(CpuContext&, const GatheredNormParams&);
void gathered_norm(CudaContext&, const GatheredNormParams&);

// draw, where each rank has the logits of its own ids alone, in their places. Each draws the best
// of its ids, the ranks exchange the keys of these, and all take the best of them. So the tokens
// are those of a draw from whole rows, and a row's exchange is a few bytes for each rank. Every
// rank of the group makes the same calls in the same order.
struct GatheredDrawParams {
  DrawParams draw;  // without probabilities and logit_rows
  RankColumns columns;
  RankHandle ranks;

  // The ids of the rank that may be drawn.
  [[nodiscard]] LinearRange own_ids() const {
    const LinearRange own = columns.of(ranks.rank);
    return {.first = own.first, .count = std::clamp(draw.vocab_limit - own.first, 0, own.count)};
  }
};
// Throws InternalError where the draw needs the logits of other ranks.
void check_gathered(const GatheredDrawParams& p);
// Fails as gather_columns does.
void gathered_draw(CpuContext&, const GatheredDrawParams&);
void gathered_draw(CudaContext&, const GatheredDrawParams&);

}  // namespace paceline
