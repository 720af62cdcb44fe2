// SPDX-License-Identifier: Apache-2.0
#pragma once

// Batches whose rows have chosen experts, and arrays with a row for each expert row, for the
// builders of op cases.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "support/op_cases_moe.h"
#include "support/row_arrays.h"

namespace paceline::testing {

// Purposes of random streams.
enum ExpertPurpose : uint64_t {
  kExpertX = 301,
  kExpertBias,
  kChoice,
  kPlaceWeights,
  kExpertResidual,
  kExpertBase,
  kRouterCorrection,
  kExpertNorm,
  kRouterX,
  kRouterWeight,
  kRouterBias,
  kBaseGate,
};

// The different experts of row `id`.
inline std::vector<int32_t> experts_of_row(Routed routed, int32_t num_experts, int32_t top_k,
                                           int64_t id, uint64_t seed) {
  std::vector<int32_t> experts(static_cast<size_t>(num_experts));
  std::iota(experts.begin(), experts.end(), 0);
  if (routed == Routed::kSpread) {
    const auto first = static_cast<int32_t>(id * top_k % num_experts);
    std::rotate(experts.begin(), experts.begin() + first, experts.end());
  } else {
    Stream stream(seed, kChoice, routed == Routed::kTogether ? 0 : static_cast<uint64_t>(id));
    shuffle(experts, stream);
  }
  experts.resize(static_cast<size_t>(top_k));
  return experts;
}

// A batch whose rows have chosen their experts: the result of sort_expert_rows, followed by stale
// entries.
struct ExpertRows {
  std::vector<int32_t> experts;       // [max_rows, top_k]
  std::vector<int32_t> expert_begin;  // [num_experts + 1], with a shared expert one more
  std::vector<int32_t> source_row;    // [max_rows * top_k], with a shared expert max_rows more
  std::vector<int32_t> expert_row;    // [max_rows, top_k]
  std::vector<int32_t> place;         // of each expert row; top_k: of the shared expert
};

inline ExpertRows expert_rows_of(Routed routed, int32_t num_experts, int32_t top_k,
                                 const Rows& rows, uint64_t seed, bool has_shared = false) {
  const auto capacity = static_cast<size_t>(rows.max_rows) * static_cast<size_t>(top_k);
  ExpertRows r = {.experts = std::vector<int32_t>(capacity, std::numeric_limits<int32_t>::max()),
                  .expert_begin = std::vector<int32_t>(static_cast<size_t>(num_experts) + 1, 0),
                  .source_row = std::vector<int32_t>(capacity, std::numeric_limits<int32_t>::max()),
                  .expert_row = std::vector<int32_t>(capacity, std::numeric_limits<int32_t>::max()),
                  .place = std::vector<int32_t>(capacity, 0)};
  const size_t count = rows.ids.size() * static_cast<size_t>(top_k);
  for (size_t i = 0; i < rows.ids.size(); ++i) {
    const std::vector<int32_t> of_row =
        experts_of_row(routed, num_experts, top_k, rows.ids[i], seed);
    std::copy(of_row.begin(), of_row.end(), r.experts.begin() + std::ssize(of_row) * i);
  }
  std::vector<int32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return r.experts[static_cast<size_t>(a)] < r.experts[static_cast<size_t>(b)];
  });
  for (size_t i = 0; i < count; ++i) {
    const auto from = static_cast<size_t>(order[i]);
    r.source_row[i] = order[i] / top_k;
    r.place[i] = order[i] % top_k;
    r.expert_row[from] = static_cast<int32_t>(i);
    ++r.expert_begin[static_cast<size_t>(r.experts[from]) + 1];
  }
  std::partial_sum(r.expert_begin.begin(), r.expert_begin.end(), r.expert_begin.begin());
  if (has_shared) {
    const size_t all = capacity + static_cast<size_t>(rows.max_rows);
    r.source_row.resize(all, std::numeric_limits<int32_t>::max());
    r.place.resize(all, 0);
    for (size_t i = 0; i < rows.ids.size(); ++i) {
      r.source_row[count + i] = static_cast<int32_t>(i);
      r.place[count + i] = top_k;
    }
    r.expert_begin.push_back(static_cast<int32_t>(count + rows.ids.size()));
  }
  return r;
}

// Values of every expert row by the identity of its row and its place; NaN where there is none.
inline OpArray expert_row_values(std::string name, Element cuda, const Rows& rows,
                                 const ExpertRows& routing, int64_t width, int64_t stride,
                                 uint64_t seed) {
  const int64_t count = std::ssize(routing.place) * stride;
  std::vector<std::pair<int64_t, int32_t>> of_rows;  // identity, place
  const auto num_expert_rows = static_cast<size_t>(routing.expert_begin.back());
  for (size_t i = 0; i < num_expert_rows; ++i) {
    of_rows.emplace_back(rows.ids[static_cast<size_t>(routing.source_row[i])], routing.place[i]);
  }
  OpArray array = float_array(std::move(name), Element::kF32, cuda, count, [=](float* to) {
    std::fill_n(to, count, std::numeric_limits<float>::quiet_NaN());
    for (const auto& [id, place] : of_rows) {
      Stream(seed, kExpertX, static_cast<uint64_t>(id), static_cast<uint64_t>(place))
          .fill(to, width);
      to += stride;
    }
  });
  array.row_length = stride;
  return array;
}

inline OpArray constant_normals(std::string name, int64_t count, uint64_t seed, uint64_t purpose,
                                float scale = 1.0f) {
  OpArray array = float_array(std::move(name), Element::kF32, Element::kF32, count,
                              [=](float* to) { Stream(seed, purpose).fill(to, count, scale); });
  array.is_constant = true;
  return array;
}

inline OpArray normal_x_rows(std::string name, Element cuda, const Rows& rows, int64_t width,
                             int64_t stride, uint64_t seed, float scale = 1.0f) {
  return row_array(std::move(name), Element::kF32, cuda, rows, stride, [=](int64_t id, float* to) {
    Stream(seed, kExpertX, static_cast<uint64_t>(id)).fill(to, width, scale);
  });
}

}  // namespace paceline::testing
