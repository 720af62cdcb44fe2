// SPDX-License-Identifier: Apache-2.0
#pragma once

// Arrays of ops whose rows are independent, for the builders of op cases.

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "support/op_cases.h"

namespace paceline::testing {

inline Handle add_num_rows(OpInstance& op, const Rows& rows) {
  op.num_rows = static_cast<int32_t>(rows.ids.size());
  return op.add(int_array<int32_t>("num_rows", Role::kInput, {rows.claimed}));
}

// The identity whose values stand in rows that are not computed. It is none of the first ones,
// which have values at the edges, and nowhere inert.
inline constexpr int64_t kLeftRowId = 1000;

// A row-wise float array with what `row_values(id, to)` writes of the rows that are computed. The
// rest is NaN, which spreads if it is read. In an array that is updated in place NaN would stay NaN
// if the op computed a row too many, so there the rest has values that change.
template <class RowValues>
OpArray row_array(std::string name, Element cpu, Element cuda, const Rows& rows, int64_t stride,
                  const RowValues& row_values, Role role = Role::kInput) {
  const int64_t count = rows.max_rows * stride;
  const bool is_updated = role == Role::kInOut;
  const auto fill = [rows, stride, count, row_values, is_updated](float* to) {
    std::fill_n(to, count, is_updated ? 0.75f : std::numeric_limits<float>::quiet_NaN());
    const size_t num_filled = is_updated ? static_cast<size_t>(rows.max_rows) : rows.ids.size();
    for (size_t i = 0; i < num_filled; ++i) {
      row_values(i < rows.ids.size() ? rows.ids[i] : kLeftRowId,
                 to + static_cast<int64_t>(i) * stride);
    }
  };
  OpArray array = float_array(std::move(name), cpu, cuda, count, fill);
  array.role = role;
  array.row_length = stride;
  return array;
}

// Whether the expected value is finite and `got` is within the bound of it. A bound relative to an
// infinite value would accept everything.
[[nodiscard]] inline bool is_near(double want, double got, double bound) {
  return std::isfinite(want) && std::fabs(want - got) <= bound;
}

inline void fill_logits(LogitKind kind, int32_t count, int64_t id, uint64_t seed, float* to) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  Stream stream(seed, /*purpose=*/1, static_cast<uint64_t>(id));
  stream.fill(to, count, kind == LogitKind::kPeaked ? 1000.0f : 2.0f);
  for (int32_t i = 0; i < count; ++i) {
    switch (kind) {
      case LogitKind::kPlain:
      case LogitKind::kPeaked:
        break;
      case LogitKind::kTies:
        to[i] = std::round(to[i]);
        break;
      case LogitKind::kHoles:  // every fifth row has no valid logit at all
        if (id % 5 == 3 || stream.one_in(3)) {
          to[i] = stream.one_in(2) ? std::numeric_limits<float>::quiet_NaN() : -kInf;
        }
        break;
      case LogitKind::kInfinite:
        if (stream.one_in(count / 3 + 1)) to[i] = kInf;
        break;
      case LogitKind::kTiny:  // of all magnitudes down to zero, of both signs
        to[i] = std::ldexp(to[i], -stream.below(160));
        break;
      case LogitKind::kHalves: {
        const auto rank = static_cast<int32_t>((i + 7 * id) % count);
        to[i] = rank > 20 ? -kInf : -static_cast<float>(std::min(rank, 19));
        break;
      }
    }
  }
}

}  // namespace paceline::testing
