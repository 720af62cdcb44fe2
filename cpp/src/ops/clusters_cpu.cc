// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "base/float_types.h"
#include "device/cpu_context.h"
#include "ops/ops.h"

namespace paceline {
namespace {

// Activations are float32 on the CPU, weights as they were loaded.
template <class Weight>
float dot(const float* x, const Weight* weight, int32_t size) {
  float sum = 0.0f;
  for (int32_t i = 0; i < size; ++i) {
    if constexpr (std::is_same_v<Weight, float>) {
      sum += x[i] * weight[i];
    } else {
      sum += x[i] * bf16_to_float(weight[i]);
    }
  }
  return sum;
}

template <class Weight>
void cluster_logits_of_row(const ClusterLogitsParams& p, int32_t row) {
  const auto* const weight = static_cast<const Weight*>(p.weight);
  const float* const x = static_cast<const float*>(p.x) + int64_t{row} * p.hidden;
  int64_t out = int64_t{row} * p.top * p.cluster_size;
  for (int32_t rank = 0; rank < p.top; ++rank) {
    const int32_t cluster = p.clusters[int64_t{row} * p.top + rank];
    for (int32_t i = 0; i < p.cluster_size; ++i, ++out) {
      const int32_t token = p.token_ordering[int64_t{cluster} * p.cluster_size + i];
      p.tokens[out] = token;
      p.logits[out] = dot(x, weight + int64_t{token} * p.hidden, p.hidden);
    }
  }
}

}  // namespace

void select_clusters(CpuContext&, const SelectClustersParams& p) {
  constexpr float kNegInf = -std::numeric_limits<float>::infinity();
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  std::vector<int32_t> order(static_cast<size_t>(p.num_clusters));
  for (int32_t row = 0; row < num_rows; ++row) {
    const float* const scores = p.scores + int64_t{row} * p.num_clusters;
    const auto score_of = [&](int32_t i) { return std::isnan(scores[i]) ? kNegInf : scores[i]; };
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + p.top, order.end(), [&](int32_t a, int32_t b) {
      const float score_a = score_of(a);
      const float score_b = score_of(b);
      return score_a != score_b ? score_a > score_b : a < b;
    });
    std::copy_n(order.begin(), p.top, p.clusters + int64_t{row} * p.top);
  }
}

void cluster_logits(CpuContext& ctx, const ClusterLogitsParams& p) {
  PACELINE_CHECK(p.x_dtype == DType::kFloat32, dtype_name(p.x_dtype));
  const bool is_bf16 = p.weight_dtype == DType::kBFloat16;
  PACELINE_CHECK(is_bf16 || p.weight_dtype == DType::kFloat32, dtype_name(p.weight_dtype));
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  ctx.for_ranges(num_rows, /*pieces_per_thread=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (is_bf16) {
        cluster_logits_of_row<uint16_t>(p, static_cast<int32_t>(row));
      } else {
        cluster_logits_of_row<float>(p, static_cast<int32_t>(row));
      }
    }
  });
}

}  // namespace paceline
