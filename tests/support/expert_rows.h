// SPDX-License-Identifier: Apache-2.0
#pragma once

// The CPU ops that route rows to experts, on vectors.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "device/cpu_context.h"
#include "ops/moe.h"
#include "support/op_checks.h"

namespace paceline::testing {

struct Routing {
  std::vector<int32_t> experts;
  std::vector<float> weights;
};

// Routes by a softmax. `expert_scales` may be empty.
inline Routing route_by_softmax(const std::vector<float>& logits, int32_t num_rows,
                                int32_t num_experts, int32_t top_k, RouterRule rule,
                                float logit_scale = 1.0f,
                                const std::vector<float>& expert_scales = {}) {
  const auto count = static_cast<size_t>(num_rows) * static_cast<size_t>(top_k);
  Routing routing = {.experts = std::vector<int32_t>(count, -7),
                     .weights = std::vector<float>(count, -7.0f)};
  CpuContext ctx = context_of(1);
  route_experts(ctx, {.num_rows = &num_rows,
                      .max_rows = num_rows,
                      .logits = logits.data(),
                      .logits_stride = num_experts,
                      .num_experts = num_experts,
                      .top_k = top_k,
                      .rule = rule,
                      .experts = routing.experts.data(),
                      .weights = routing.weights.data(),
                      .logit_scale = logit_scale,
                      .expert_scales = expert_scales.empty() ? nullptr : expert_scales.data()});
  return routing;
}

// With a correction for every expert the rule is `scored`, without one kSoftmaxOfChosen.
inline Routing route(const std::vector<float>& logits, int32_t num_rows, int32_t num_experts,
                     int32_t top_k, int num_threads = 1, const ScoreRouting& scoring = {},
                     const std::vector<float>& correction = {},
                     RouterRule scored = RouterRule::kSigmoid) {
  const auto count = static_cast<size_t>(num_rows) * static_cast<size_t>(top_k);
  Routing routing = {.experts = std::vector<int32_t>(count, -7),
                     .weights = std::vector<float>(count, -7.0f)};
  CpuContext ctx = context_of(num_threads);
  route_experts(ctx, {.num_rows = &num_rows,
                      .max_rows = num_rows,
                      .logits = logits.data(),
                      .logits_stride = num_experts,
                      .num_experts = num_experts,
                      .top_k = top_k,
                      .rule = correction.empty() ? RouterRule::kSoftmaxOfChosen : scored,
                      .experts = routing.experts.data(),
                      .weights = routing.weights.data(),
                      .scoring = scoring,
                      .correction = correction.empty() ? nullptr : correction.data()});
  return routing;
}

struct Sorted {
  std::vector<int32_t> expert_begin;
  std::vector<int32_t> source_row;
  std::vector<int32_t> expert_row;
};

// `spare_rows` are capacity that the pass does not use.
inline Sorted sort(const std::vector<int32_t>& experts, int32_t num_rows, int32_t num_experts,
                   int32_t top_k, int32_t spare_rows = 0, int64_t* counters = nullptr,
                   bool has_shared = false) {
  const int32_t max_rows = num_rows + spare_rows;
  const size_t num_begins = static_cast<size_t>(num_experts) + (has_shared ? 2 : 1);
  const size_t num_shared = has_shared ? static_cast<size_t>(max_rows) : 0;
  const auto count = static_cast<size_t>(max_rows) * static_cast<size_t>(top_k);
  std::vector<int32_t> stale = experts;
  stale.resize(count, std::numeric_limits<int32_t>::max());
  Sorted sorted = {.expert_begin = std::vector<int32_t>(num_begins, -7),
                   .source_row = std::vector<int32_t>(count + num_shared, -7),
                   .expert_row = std::vector<int32_t>(count, -7)};
  CpuContext ctx = context_of(1);
  sort_expert_rows(ctx, {.num_rows = &num_rows,
                         .max_rows = max_rows,
                         .experts = stale.data(),
                         .num_experts = num_experts,
                         .top_k = top_k,
                         .expert_begin = sorted.expert_begin.data(),
                         .source_row = sorted.source_row.data(),
                         .expert_row = sorted.expert_row.data(),
                         .counters = counters,
                         .has_shared = has_shared});
  return sorted;
}

// Random distinct experts for every row.
inline std::vector<int32_t> random_experts(Random& random, int32_t num_rows, int32_t num_experts,
                                           int32_t top_k) {
  return route(random.normals(int64_t{num_rows} * num_experts), num_rows, num_experts, top_k)
      .experts;
}

}  // namespace paceline::testing
