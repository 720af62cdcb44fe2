// SPDX-License-Identifier: Apache-2.0
//
// Which experts the rows of a pass choose, the order of the expert rows, and the sum of what the
// experts made of a row.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "base/check.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/for_rows.h"
#include "ops/moe.h"

namespace paceline {
namespace {

// The best experts of a row, with their logits in place of weights.
void choose_experts(const RouteExpertsParams& p, const float* logits, int32_t* experts,
                    float* chosen) {
  int32_t num_chosen = 0;
  for (int32_t e = 0; e < p.num_experts; ++e) {
    const float logit = std::isnan(logits[e]) ? -std::numeric_limits<float>::infinity() : logits[e];
    // Experts come in ascending order, so one that equals another stays behind it.
    if (num_chosen == p.top_k && !(logit > chosen[p.top_k - 1])) continue;
    int32_t place = num_chosen < p.top_k ? num_chosen++ : p.top_k - 1;
    for (; place > 0 && logit > chosen[place - 1]; --place) {
      experts[place] = experts[place - 1];
      chosen[place] = chosen[place - 1];
    }
    experts[place] = e;
    chosen[place] = logit;
  }
}

struct CombineKernel {
  [[gnu::always_inline]] static void run(const CombineExpertsParams* params, int64_t row) {
    const CombineExpertsParams& p = *params;
    const auto* const x = static_cast<const float*>(p.x);
    float* const y = static_cast<float*>(p.y) + row * p.hidden;
    const int32_t* const expert_row = p.expert_row + row * p.top_k;
    const float* const weights = p.weights + row * p.top_k;
    constexpr int32_t kColumns = 64;  // whose sums stay in registers
    int32_t first = 0;
    for (; first + kColumns <= p.hidden; first += kColumns) {
      float sums[kColumns] = {};
      for (int32_t place = 0; place < p.top_k; ++place) {
        const float* const from = x + int64_t{expert_row[place]} * p.hidden + first;
        for (int32_t i = 0; i < kColumns; ++i) {
          sums[i] = std::fma(weights[place], from[i], sums[i]);
        }
      }
      for (int32_t i = 0; i < kColumns; ++i) y[first + i] = sums[i];
    }
    for (; first < p.hidden; ++first) {
      float sum = 0;
      for (int32_t place = 0; place < p.top_k; ++place) {
        sum = std::fma(weights[place], x[int64_t{expert_row[place]} * p.hidden + first], sum);
      }
      y[first] = sum;
    }
  }
};

}  // namespace

void route_experts(CpuContext& ctx, const RouteExpertsParams& p) {
  PACELINE_CHECK(p.num_experts <= kMaxExperts && p.top_k >= 1 && p.top_k <= kMaxTopK &&
                     p.top_k <= p.num_experts,
                 p.top_k, " of ", p.num_experts, " experts");
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  // A comparison counts as moving 16 bytes.
  for_rows(ctx, num_rows, int64_t{p.num_experts} * 16, [&](int32_t row) {
    int32_t* const experts = p.experts + int64_t{row} * p.top_k;
    float* const weights = p.weights + int64_t{row} * p.top_k;
    choose_experts(p, p.logits + int64_t{row} * p.num_experts, experts, weights);
    switch (p.rule) {
      case RouterRule::kSoftmaxOfChosen: {
        const float best = weights[0];
        float sum = 0;
        for (int32_t place = 0; place < p.top_k; ++place) {
          weights[place] = exp_one(weights[place] - best);
          sum += weights[place];
        }
        for (int32_t place = 0; place < p.top_k; ++place) weights[place] /= sum;
        return;
      }
    }
  });
}

// Counts, sums and places in one thread: 8,192 expert rows take microseconds.
void sort_expert_rows(CpuContext&, const SortExpertRowsParams& p) {
  PACELINE_CHECK(p.num_experts <= kMaxExperts, p.num_experts, " experts");
  const int64_t num_expert_rows = int64_t{std::min(*p.num_rows, p.max_rows)} * p.top_k;
  std::array<int32_t, kMaxExperts> next = {};  // expert row of an expert, first their number
  for (int64_t i = 0; i < num_expert_rows; ++i) ++next[static_cast<size_t>(p.experts[i])];
  int32_t num_hit = 0;
  int32_t begin = 0;
  for (int32_t e = 0; e < p.num_experts; ++e) {
    int32_t& of_expert = next[static_cast<size_t>(e)];
    num_hit += of_expert > 0 ? 1 : 0;
    p.expert_begin[e] = begin;
    begin += std::exchange(of_expert, begin);
  }
  p.expert_begin[p.num_experts] = begin;
  for (int64_t i = 0; i < num_expert_rows; ++i) {
    const int32_t expert_row = next[static_cast<size_t>(p.experts[i])]++;
    p.source_row[expert_row] = static_cast<int32_t>(i / p.top_k);
    p.expert_row[i] = expert_row;
  }
  if (p.counters != nullptr) {
    p.counters[0] += num_hit;
    p.counters[1] += 1;
  }
}

void route_and_sort(CpuContext& ctx, const RouteAndSortParams& p) {
  route_experts(ctx, p.route);
  sort_expert_rows(ctx, p.sort);
}

void combine_experts(CpuContext& ctx, const CombineExpertsParams& p) {
  PACELINE_CHECK(p.dtype == DType::kFloat32, "the CPU computes in float32");
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  for_rows(ctx, num_rows, int64_t{p.hidden} * 4 * (p.top_k + 1),
           [&](int32_t row) { run_best_isa<CombineKernel>(&p, int64_t{row}); });
}

void combine_and_norm(CpuContext& ctx, const CombineAndNormParams& p) {
  combine_experts(ctx, p.combine);
  rms_norm(ctx, p.norm);
}

}  // namespace paceline
