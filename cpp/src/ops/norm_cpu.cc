// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "device/cpu_context.h"
#include "ops/ops.h"
#include "ops/vector_math.h"

namespace paceline {
namespace {

struct RmsNormRowKernel {
  // 1 / rms of a row.
  [[gnu::always_inline]] static float factor_of(const float* x, float eps, int32_t hidden) {
    V16 squares[4] = {};
    int32_t i = 0;
    int32_t lane_group = 0;
    for (; i + 16 <= hidden; i += 16) {
      const V16 value = load(x + i);
      squares[lane_group] += value * value;
      lane_group = (lane_group + 1) & 3;
    }
    if (i < hidden) {
      const V16 value = load_first(x + i, hidden - i);
      squares[lane_group] += value * value;
    }
    const float sum = sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
    return 1.0f / std::sqrt(sum / static_cast<float>(hidden) + eps);
  }

  // residual += x * factor * (x_weight + weight_offset).
  [[gnu::always_inline]] static void add_scaled(const float* x, float factor, const float* x_weight,
                                                float weight_offset, float* residual,
                                                int32_t hidden) {
    int32_t i = 0;
    for (; i + 16 <= hidden; i += 16) {
      const V16 scaled = load(x + i) * factor * (load(x_weight + i) + weight_offset);
      store(residual + i, load(residual + i) + scaled);
    }
    if (i < hidden) {
      const int32_t count = hidden - i;
      const V16 scale = load_first(x_weight + i, count) + weight_offset;
      const V16 scaled = load_first(x + i, count) * factor * scale;
      store_first(residual + i, load_first(residual + i, count) + scaled, count);
    }
  }

  [[gnu::always_inline]] static void run(const float* x, const float* x_weight, float* residual,
                                         const float* weight, float weight_offset, float eps,
                                         float* y, int32_t hidden) {
    if (x_weight != nullptr) {
      add_scaled(x, factor_of(x, eps, hidden), x_weight, weight_offset, residual, hidden);
      x = residual;
      residual = nullptr;
    }
    // Four accumulators hide the latency of the multiply-add.
    V16 squares[4] = {};
    int32_t i = 0;
    int32_t lane_group = 0;
    for (; i + 16 <= hidden; i += 16) {
      V16 value = load(x + i);
      if (residual != nullptr) {
        value += load(residual + i);
        store(residual + i, value);
      }
      squares[lane_group] += value * value;
      lane_group = (lane_group + 1) & 3;
    }
    if (i < hidden) {
      const int32_t count = hidden - i;
      V16 value = load_first(x + i, count);
      if (residual != nullptr) {
        value += load_first(residual + i, count);
        store_first(residual + i, value, count);
      }
      squares[lane_group] += value * value;
    }
    if (y == nullptr) return;
    const float sum = sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
    const float factor = 1.0f / std::sqrt(sum / static_cast<float>(hidden) + eps);
    const float* const from = residual != nullptr ? residual : x;
    for (i = 0; i + 16 <= hidden; i += 16) {
      store(y + i, load(from + i) * factor * (load(weight + i) + weight_offset));
    }
    if (i < hidden) {
      const int32_t count = hidden - i;
      const V16 scale = load_first(weight + i, count) + weight_offset;
      store_first(y + i, load_first(from + i, count) * factor * scale, count);
    }
  }
};

}  // namespace

void rms_norm(CpuContext& ctx, const RmsNormParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  PACELINE_CHECK(p.x_dtype == DType::kFloat32 && p.y_dtype == DType::kFloat32,
                 "the CPU computes in float32");
  PACELINE_CHECK(p.residual != nullptr || (p.x_weight == nullptr && p.y != nullptr),
                 "x_weight and a null y go with a residual");
  auto norm_row = [&](int32_t row) {
    float* const residual = p.residual == nullptr ? nullptr : p.residual + int64_t{row} * p.hidden;
    float* const y = p.y == nullptr ? nullptr : static_cast<float*>(p.y) + row * p.y_stride;
    run_best_isa<RmsNormRowKernel>(static_cast<const float*>(p.x) + row * p.x_stride, p.x_weight,
                                   residual, p.weight, p.weight_offset, p.eps, y, p.hidden);
  };
  constexpr int64_t kMinParallelElements = 32 << 10;
  if (ctx.num_threads == 1 || int64_t{num_rows} * p.hidden < kMinParallelElements) {
    for (int32_t row = 0; row < num_rows; ++row) norm_row(row);
    return;
  }
  ctx.for_ranges(num_rows, /*pieces_per_thread=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) norm_row(static_cast<int32_t>(row));
  });
}

}  // namespace paceline
