// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>

#include "base/check.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/ops.h"

namespace paceline {
namespace {

// Activations are float32 on the CPU; weights keep the dtype in which they were loaded.
template <class Weight>
struct DotKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const float* x, const Weight* weight, int32_t size,
                                         float* sum) {
    Lanes sums = {};
    int32_t i = 0;
    for (; i + 16 <= size; i += 16) sums += load<Lanes>(x + i) * load<Lanes>(weight + i);
    if (i < size)
      sums += load_first<Lanes>(x + i, size - i) * load_first<Lanes>(weight + i, size - i);
    *sum = sum_lanes(sums);
  }
};

// The logits of the tokens in the cluster at rank `rank` of row `row`.
template <class Weight>
void logits_of_cluster(const ClusterLogitsParams& p, int64_t row, int64_t rank) {
  const auto* const weight = static_cast<const Weight*>(p.weight);
  const float* const x = static_cast<const float*>(p.x) + row * p.hidden;
  const int64_t cluster = p.clusters[row * p.top + rank];
  const int64_t out = (row * p.top + rank) * p.cluster_size;
  for (int64_t i = 0; i < p.cluster_size; ++i) {
    const int32_t token = p.token_ordering[cluster * p.cluster_size + i];
    p.tokens[out + i] = token;
    run_best_isa<DotKernel<Weight>>(x, weight + int64_t{token} * p.hidden, p.hidden,
                                    &p.logits[out + i]);
  }
}

}  // namespace

void select_clusters(CpuContext&, const SelectClustersParams& p) {
  constexpr float kNegInf = -std::numeric_limits<float>::infinity();
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  for (int32_t row = 0; row < num_rows; ++row) {
    const float* const scores = p.scores + int64_t{row} * p.num_clusters;
    const auto score_of = [&](int32_t i) { return std::isnan(scores[i]) ? kNegInf : scores[i]; };
    const auto is_better = [&](int32_t a, int32_t b) {
      const float score_a = score_of(a);
      const float score_b = score_of(b);
      return score_a != score_b ? score_a > score_b : a < b;
    };
    // A heap in the output, with the worst of the best so far at its front: an op allocates
    // nothing.
    const std::span<int32_t> best(p.clusters + int64_t{row} * p.top, static_cast<size_t>(p.top));
    std::iota(best.begin(), best.end(), 0);
    std::make_heap(best.begin(), best.end(), is_better);
    for (int32_t i = p.top; i < p.num_clusters; ++i) {
      if (!is_better(i, best.front())) continue;
      std::pop_heap(best.begin(), best.end(), is_better);
      best.back() = i;
      std::push_heap(best.begin(), best.end(), is_better);
    }
    std::sort_heap(best.begin(), best.end(), is_better);
  }
}

void cluster_logits(CpuContext& ctx, const ClusterLogitsParams& p) {
  PACELINE_CHECK(p.x_dtype == DType::kFloat32, dtype_name(p.x_dtype));
  const bool is_bf16 = p.weight_dtype == DType::kBFloat16;
  PACELINE_CHECK(is_bf16 || p.weight_dtype == DType::kFloat32, dtype_name(p.weight_dtype));
  const int64_t num_rows = std::min(*p.num_rows, p.max_rows);
  ctx.for_ranges(num_rows * p.top, /*pieces_per_thread=*/4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (is_bf16) {
        logits_of_cluster<uint16_t>(p, i / p.top, i % p.top);
      } else {
        logits_of_cluster<float>(p, i / p.top, i % p.top);
      }
    }
  });
}

}  // namespace paceline
