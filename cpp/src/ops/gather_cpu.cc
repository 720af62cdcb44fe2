// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/check.h"
#include "device/cpu_context.h"
#include "ops/for_rows.h"
#include "ops/gather.h"

namespace paceline {

void gather_columns(CpuContext& ctx, const GatherColumnsParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  PACELINE_CHECK(p.ranks.group != nullptr, "columns are gathered without other ranks");
  RankGroup& group = *p.ranks.group;
  PACELINE_CHECK(p.columns.num_ranks == group.num_ranks(), p.columns.num_ranks, " of ",
                 group.num_ranks(), " ranks have columns");
  const LinearRange own = p.columns.of(p.ranks.rank);
  PACELINE_CHECK(own.first >= 0 && own.count >= 0, "columns ", own.first, " to ",
                 own.first + own.count);
  const int64_t item_bytes = dtype_bytes(p.dtype);
  const int64_t row_bytes = p.columns.total() * item_bytes;
  const int64_t begin = own.first * item_bytes;
  const int64_t own_bytes = own.count * item_bytes;
  const auto* const x = static_cast<const std::byte*>(p.x);
  auto* const y = static_cast<std::byte*>(p.y);
  const auto rows_a_step = static_cast<int32_t>(
      std::min<int64_t>(group.place_bytes() / std::max<int64_t>(row_bytes, 1), p.max_rows));
  PACELINE_CHECK(rows_a_step > 0 || num_rows <= 0, "rows of ", row_bytes,
                 " bytes are exchanged in ", group.place_bytes());
  // Where x has its place in y, it stays there.
  const bool is_in_place = p.x == y + begin && p.x_stride == p.columns.total();
  const auto copy = [](std::byte* to, const std::byte* from, int64_t bytes) {
    if (bytes == 0) return;  // x may be null without columns
    std::memcpy(to, from, static_cast<size_t>(bytes));
  };
  for (int32_t first = 0; first < num_rows; first += rows_a_step) {
    const int32_t count = std::min(rows_a_step, num_rows - first);
    std::byte* const place = group.place(p.ranks.rank);
    for_rows(ctx, count, own_bytes, [&](int32_t row) {
      copy(place + row * row_bytes + begin, x + (first + row) * p.x_stride * item_bytes, own_bytes);
    });
    group.meet(p.ranks.rank);
    for_rows(ctx, count, row_bytes, [&](int32_t row) {
      std::byte* const to = y + (first + row) * row_bytes;
      const std::byte* const from = place + row * row_bytes;
      const int64_t end = begin + own_bytes;
      copy(to, from, is_in_place ? begin : end);
      copy(to + end, from + end, row_bytes - end);
    });
  }
}

void check_gathered(const GatheredNormParams& p) {
  const GatherColumnsParams& gather = p.gather;
  const RmsNormParams& norm = p.norm;
  PACELINE_CHECK(norm.x == gather.y && norm.num_rows == gather.num_rows &&
                     norm.max_rows == gather.max_rows && norm.x_dtype == gather.dtype &&
                     norm.hidden == gather.columns.total() && norm.x_stride == norm.hidden,
                 "the norm does not read what is gathered");
  if (!p.places) return;
  PACELINE_CHECK(p.places->y == gather.x && p.places->stride == gather.x_stride &&
                     p.places->num_rows == gather.num_rows &&
                     p.places->max_rows == gather.max_rows && p.places->dtype == gather.dtype &&
                     p.places->hidden == gather.columns.of(gather.ranks.rank).count,
                 "the gather does not read the sum of the places");
}

void gathered_norm(CpuContext& ctx, const GatheredNormParams& p) {
  check_gathered(p);
  if (p.places) combine_experts(ctx, *p.places);
  gather_columns(ctx, p.gather);
  rms_norm(ctx, p.norm);
}

}  // namespace paceline
