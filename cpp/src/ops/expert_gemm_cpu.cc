// SPDX-License-Identifier: Apache-2.0
//
// The products of all experts that have rows. Threads take pieces of about the same cost, which may
// cover a part of the columns of one expert or several experts. So one expert with many rows and
// many experts with few rows both keep every thread busy.

#include <algorithm>
#include <cstdint>

#include "base/check.h"
#include "device/cpu_context.h"
#include "ops/gemm_columns.h"
#include "ops/moe.h"

namespace paceline {
namespace {

// Reading a column of W costs about as much as multiplying it by this many rows of x.
constexpr int64_t kRowsPerRead = 6;

[[nodiscard]] GemmColumns product_of_expert(const ExpertGemmParams& p, int32_t expert) {
  const int32_t begin = p.expert_begin[expert];
  GemmColumns product = {.num_rows = p.expert_begin[expert + 1] - begin,
                         .x = static_cast<const float*>(p.x),
                         .x_stride = p.x_stride,
                         .weight = p.weight.of(expert),
                         .y = static_cast<float*>(p.y) + begin * p.y_stride,
                         .y_stride = p.y_stride};
  if (p.x_rows != nullptr) {
    product.x_rows = p.x_rows + begin;
  } else {
    product.x += begin * p.x_stride;
  }
  const int64_t bias_stride = p.bias_stride > 0 ? p.bias_stride : p.weight.first.n;
  if (p.bias != nullptr) product.bias = p.bias + expert * bias_stride;
  return product;
}

}  // namespace

void expert_gemm(CpuContext& ctx, const ExpertGemmParams& p) {
  const int32_t num_experts = p.weight.num_experts;
  const int32_t num_rows = p.expert_begin[num_experts];
  if (num_rows <= 0) return;
  PACELINE_CHECK(num_rows <= p.max_rows, num_rows, " expert rows in room for ", p.max_rows);
  PACELINE_CHECK(p.x_dtype == DType::kFloat32 && p.y_dtype == DType::kFloat32,
                 "the CPU computes in float32");
  const GemmScratch scratch(ctx);
  const int32_t n = p.weight.first.n;
  // Fewer multiplications cost less than a fork and join.
  constexpr int64_t kMinParallelWork = 100 << 10;
  if (ctx.num_threads == 1 || int64_t{num_rows} * n * p.weight.first.k < kMinParallelWork) {
    for (int32_t e = 0; e < num_experts; ++e) {
      const GemmColumns product = product_of_expert(p, e);
      if (product.num_rows > 0) gemm_columns(product, 0, n, scratch.of_thread());
    }
    return;
  }
  // The grains (kGemmGrain columns of an expert) are intervals, expert after expert, each as long
  // as its cost. A piece of the whole takes the grains that begin in it.
  const int64_t num_grains = (n + kGemmGrain - 1) / kGemmGrain;
  const auto grain_cost = [](int64_t rows) { return rows > 0 ? rows + kRowsPerRead : 0; };
  int64_t cost = 0;
  for (int32_t e = 0; e < num_experts; ++e) {
    cost += grain_cost(p.expert_begin[e + 1] - p.expert_begin[e]) * num_grains;
  }
  ctx.for_ranges(cost, /*pieces_per_thread=*/8, [&](int64_t begin, int64_t end) {
    int64_t at = 0;  // where the expert's grains begin
    for (int32_t e = 0; e < num_experts && at < end; ++e) {
      const int64_t each = grain_cost(p.expert_begin[e + 1] - p.expert_begin[e]);
      if (each == 0) continue;
      const auto grain_from = [&](int64_t place) {  // the first one that begins at or after it
        return std::clamp<int64_t>((place - at + each - 1) / each, 0, num_grains);
      };
      const int64_t first = begin <= at ? 0 : grain_from(begin);
      const int64_t last = grain_from(end);
      if (first < last) {
        gemm_columns(product_of_expert(p, e), static_cast<int32_t>(first * kGemmGrain),
                     static_cast<int32_t>(std::min<int64_t>(last * kGemmGrain, n)),
                     scratch.of_thread());
      }
      at += each * num_grains;
    }
  });
}

}  // namespace paceline
