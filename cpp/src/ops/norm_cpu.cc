// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>

#include "device/cpu_context.h"
#include "ops/ops.h"
#include "ops/vector_math.h"

namespace paceline {
namespace {

struct RmsNormRowKernel {
  [[gnu::always_inline]] static void run(const float* x, float* residual, const float* weight,
                                         float weight_offset, float eps, float* y, int32_t hidden) {
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
  auto norm_row = [&](int32_t row) {
    float* const residual =
        p.residual == nullptr ? nullptr : p.residual + int64_t{row} * p.hidden;
    run_best_isa<RmsNormRowKernel>(p.x + row * p.x_stride, residual, p.weight, p.weight_offset,
                                   p.eps, p.y + row * p.y_stride, p.hidden);
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
