// SPDX-License-Identifier: Apache-2.0
//
// Which experts the rows of a pass choose, the order of the expert rows, and the sum of what the
// experts made of a row.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/sigmoid.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/for_rows.h"
#include "ops/moe.h"

namespace paceline {
namespace {

// Groups of experts, one bit for each. Without groups all experts are one group.
struct ExpertGroups {
  uint32_t open = 1;  // those whose experts can be chosen
  int32_t size = 0;
};

// The best experts of a row in open groups, with their scores.
void choose_experts(const float* scores, const ExpertGroups& groups, int32_t num_experts,
                    int32_t top_k, int32_t* experts, float* chosen) {
  int32_t num_chosen = 0;
  for (int32_t begin = 0, group = 0; begin < num_experts; begin += groups.size, ++group) {
    if ((groups.open >> group & 1) == 0) continue;
    for (int32_t e = begin; e < begin + groups.size; ++e) {
      const float score =
          std::isnan(scores[e]) ? -std::numeric_limits<float>::infinity() : scores[e];
      // Experts come in ascending order, so of equal scores the first one stays first.
      if (num_chosen == top_k && !(score > chosen[top_k - 1])) continue;
      int32_t place = num_chosen < top_k ? num_chosen++ : top_k - 1;
      for (; place > 0 && score > chosen[place - 1]; --place) {
        experts[place] = experts[place - 1];
        chosen[place] = chosen[place - 1];
      }
      experts[place] = e;
      chosen[place] = score;
    }
  }
}

void route_by_softmax(const RouteExpertsParams& p, int32_t row, int32_t* experts, float* weights) {
  const float* const logits = p.logits + row * p.logits_stride;
  choose_experts(logits, {.size = p.num_experts}, p.num_experts, p.top_k, experts, weights);
  const float best = weights[0];
  const auto term = [&](float logit) { return exp_one((logit - best) * p.logit_scale); };
  float sum = 0;
  if (p.rule == RouterRule::kSoftmax) {
    for (int32_t e = 0; e < p.num_experts; ++e) sum += std::isnan(logits[e]) ? 0 : term(logits[e]);
  }
  for (int32_t place = 0; place < p.top_k; ++place) {
    weights[place] = term(weights[place]);
    if (p.rule == RouterRule::kSoftmaxOfChosen) sum += weights[place];
  }
  for (int32_t place = 0; place < p.top_k; ++place) {
    weights[place] /= sum;
    if (p.expert_scales != nullptr) weights[place] *= p.expert_scales[experts[place]];
  }
}

// The groups with the highest sums of their two best experts.
[[nodiscard]] uint32_t best_groups(const ScoreRouting& routing, const float* choice, int32_t size) {
  std::array<float, kMaxExpertGroups> sums;
  for (int32_t group = 0; group < routing.num_groups; ++group) {
    std::array<int32_t, 2> experts;
    std::array<float, 2> best;
    choose_experts(choice + int64_t{group} * size, {.size = size}, size, 2, experts.data(),
                   best.data());
    sums[static_cast<size_t>(group)] = best[0] + best[1];
  }
  std::array<int32_t, kMaxExpertGroups> groups;
  std::array<float, kMaxExpertGroups> chosen;
  choose_experts(sums.data(), {.size = routing.num_groups}, routing.num_groups, routing.top_groups,
                 groups.data(), chosen.data());
  uint32_t open = 0;
  for (int32_t i = 0; i < routing.top_groups; ++i) {
    open |= uint32_t{1} << groups[static_cast<size_t>(i)];
  }
  return open;
}

template <RouterRule kRule>
struct ScoreKernel {
  [[gnu::always_inline]] static void run(const float* logits, float* scores, int32_t count) {
    for (int32_t i = 0; i < count; ++i) {
      scores[i] = kRule == RouterRule::kSigmoid ? sigmoid_same_bits(logits[i])
                                                : sqrt_softplus_same_bits(logits[i]);
    }
  }
};

// The experts that a table has for the token of a row.
void copy_token_experts(const RouteExpertsParams& p, int32_t row, int32_t* experts) {
  const int32_t token = p.token_ids[row];
  const int64_t known = token >= 0 && token < p.vocab_size ? token : 0;
  std::copy_n(p.token_experts + known * p.top_k, p.top_k, experts);
}

template <RouterRule kRule>
void route_by_score(const RouteExpertsParams& p, int32_t row, int32_t* experts, float* weights) {
  const ScoreRouting& routing = p.scoring;
  std::array<float, kMaxExperts> scores;
  std::array<float, kMaxExperts> choice;
  run_best_isa<ScoreKernel<kRule>>(p.logits + row * p.logits_stride, scores.data(), p.num_experts);
  if (p.token_experts != nullptr) {
    copy_token_experts(p, row, experts);
  } else {
    for (int32_t e = 0; e < p.num_experts; ++e) {
      choice[static_cast<size_t>(e)] = scores[static_cast<size_t>(e)] + p.correction[e];
    }
    ExpertGroups groups = {.size = p.num_experts / routing.num_groups};
    if (routing.num_groups > 1) groups.open = best_groups(routing, choice.data(), groups.size);
    choose_experts(choice.data(), groups, p.num_experts, p.top_k, experts, weights);
  }
  float sum = 0;
  for (int32_t place = 0; place < p.top_k; ++place) {
    weights[place] = scores[static_cast<size_t>(experts[place])];
    sum += weights[place];
  }
  for (int32_t place = 0; place < p.top_k; ++place) {
    if (routing.normalises) weights[place] /= sum + 1e-20f;
    weights[place] *= routing.scale;
  }
}

struct CombineKernel {
  [[gnu::always_inline]] static void run(const CombineExpertsParams* params, int64_t row,
                                         int64_t num_rows) {
    const CombineExpertsParams& p = *params;
    const auto* const x = static_cast<const float*>(p.x);
    const int64_t stride = p.stride > 0 ? p.stride : p.hidden;
    float* const y = static_cast<float*>(p.y) + row * stride;
    const float* const base = p.has_shared        ? x + (num_rows * p.top_k + row) * stride
                              : p.base != nullptr ? static_cast<const float*>(p.base) + row * stride
                                                  : nullptr;
    const int32_t* const expert_row = p.expert_row + row * p.top_k;
    const float* const weights = p.weights + row * p.top_k;
    const float scale =
        p.base_gate == nullptr ? 1.0f : sigmoid_same_bits(p.base_gate[row * p.base_gate_stride]);
    constexpr int32_t kColumns = 64;  // whose sums stay in registers
    int32_t first = 0;
    for (; first + kColumns <= p.hidden; first += kColumns) {
      float sums[kColumns] = {};
      if (base != nullptr) {
        for (int32_t i = 0; i < kColumns; ++i) sums[i] = scale * base[first + i];
      }
      for (int32_t place = 0; place < p.top_k; ++place) {
        const float* const from = x + expert_row[place] * stride + first;
        for (int32_t i = 0; i < kColumns; ++i) {
          sums[i] = std::fma(weights[place], from[i], sums[i]);
        }
      }
      for (int32_t i = 0; i < kColumns; ++i) y[first + i] = sums[i];
    }
    for (; first < p.hidden; ++first) {
      float sum = base != nullptr ? scale * base[first] : 0;
      for (int32_t place = 0; place < p.top_k; ++place) {
        sum = std::fma(weights[place], x[expert_row[place] * stride + first], sum);
      }
      y[first] = sum;
    }
  }
};

}  // namespace

void check_routing(const RouteExpertsParams& p) {
  PACELINE_CHECK(p.num_experts >= 1 && p.num_experts <= kMaxExperts && p.top_k >= 1 &&
                     p.top_k <= kMaxTopK && p.top_k <= p.num_experts,
                 p.top_k, " of ", p.num_experts, " experts");
  PACELINE_CHECK(p.logits_stride >= p.num_experts, "logits ", p.logits_stride, " apart");
  if (p.token_experts != nullptr) {
    PACELINE_CHECK(p.rule == RouterRule::kSqrtSoftplus && p.token_ids != nullptr &&
                       p.vocab_size >= 1 && p.scoring.num_groups == 1,
                   "experts by token for ", p.vocab_size, " tokens");
    return;
  }
  if (has_softmax(p.rule)) {
    PACELINE_CHECK(p.logit_scale > 0, "logit_scale ", p.logit_scale);
    return;
  }
  PACELINE_CHECK(p.logit_scale == 1 && p.expert_scales == nullptr, "scales without a softmax");
  const auto [num_groups, top_groups, normalises, scale] = p.scoring;
  PACELINE_CHECK(p.correction != nullptr, "no correction");
  PACELINE_CHECK(num_groups >= 1 && num_groups <= kMaxExpertGroups && top_groups >= 1 &&
                     top_groups <= num_groups && p.num_experts % num_groups == 0,
                 top_groups, " of ", num_groups, " groups of ", p.num_experts, " experts");
  const int32_t size = p.num_experts / num_groups;
  PACELINE_CHECK((num_groups == 1 || size >= 2) && top_groups * size >= p.top_k, p.top_k,
                 " experts of ", top_groups, " groups of ", size);
}

void route_experts(CpuContext& ctx, const RouteExpertsParams& p) {
  check_routing(p);
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  // A comparison counts as moving 16 bytes.
  for_rows(ctx, num_rows, int64_t{p.num_experts} * 16, [&](int32_t row) {
    int32_t* const experts = p.experts + int64_t{row} * p.top_k;
    float* const weights = p.weights + int64_t{row} * p.top_k;
    switch (p.rule) {
      case RouterRule::kSoftmaxOfChosen:
      case RouterRule::kSoftmax:
        return route_by_softmax(p, row, experts, weights);
      case RouterRule::kSigmoid:
        return route_by_score<RouterRule::kSigmoid>(p, row, experts, weights);
      case RouterRule::kSqrtSoftplus:
        return route_by_score<RouterRule::kSqrtSoftplus>(p, row, experts, weights);
    }
  });
}

// Counts, sums and places in one thread: 8,192 expert rows take microseconds.
void sort_expert_rows(CpuContext&, const SortExpertRowsParams& p) {
  PACELINE_CHECK(p.num_experts <= kMaxExperts, p.num_experts, " experts");
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  const int64_t num_expert_rows = int64_t{num_rows} * p.top_k;
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
  if (p.has_shared) {
    p.expert_begin[p.num_experts + 1] = begin + num_rows;
    std::iota(p.source_row + begin, p.source_row + begin + num_rows, 0);
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

void run_router(CpuContext& ctx, const RouterParams& p) {
  gemm(ctx, p.product);
  route_and_sort(ctx, {.route = p.route, .sort = p.sort});
}

void check_activation(const ActivatedExpertsParams& p) {
  const GatedActivationParams& a = p.activation;
  PACELINE_CHECK(a.x == p.product.y && a.up == nullptr && a.dtype == p.product.y_dtype &&
                     a.max_rows == p.product.max_rows &&
                     p.product.weight.first.n == 2 * a.intermediate &&
                     p.product.y_stride == p.product.weight.first.n,
                 "the activation reads the rows of the product");
}

void activated_experts(CpuContext& ctx, const ActivatedExpertsParams& p) {
  check_activation(p);
  expert_gemm(ctx, p.product);
  gated_activation(ctx, p.activation);
}

void combine_experts(CpuContext& ctx, const CombineExpertsParams& p) {
  PACELINE_CHECK(p.dtype == DType::kFloat32, "the CPU computes in float32");
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  for_rows(ctx, num_rows, int64_t{p.hidden} * 4 * (p.top_k + 1),
           [&](int32_t row) { run_best_isa<CombineKernel>(&p, int64_t{row}, int64_t{num_rows}); });
}

void combine_and_norm(CpuContext& ctx, const CombineAndNormParams& p) {
  combine_experts(ctx, p.combine);
  rms_norm(ctx, p.norm);
}

}  // namespace paceline
