// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/ops.h"

namespace paceline {
namespace {

// 1 / sqrt(mean(x^2) + eps).
[[gnu::always_inline]] inline float inverse_rms(const float* x, float eps, int32_t hidden) {
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

// x *= factor.
[[gnu::always_inline]] inline void scale_row(float* x, float factor, int32_t n) {
  int32_t i = 0;
  for (; i + 16 <= n; i += 16) store(x + i, load(x + i) * factor);
  for (; i < n; ++i) x[i] *= factor;
}

struct RmsNormRowKernel {
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

  // residual += x.
  [[gnu::always_inline]] static void add(const float* x, float* residual, int32_t hidden) {
    int32_t i = 0;
    for (; i + 16 <= hidden; i += 16) store(residual + i, load(residual + i) + load(x + i));
    for (; i < hidden; ++i) residual[i] += x[i];
  }

  [[gnu::always_inline]] static void run(const float* x, const float* x_weight, float* residual,
                                         const float* residual_scale, const float* weight,
                                         float weight_offset, float eps, float* y, int32_t hidden) {
    if (residual_scale != nullptr) {
      if (x_weight != nullptr) {
        add_scaled(x, inverse_rms(x, eps, hidden), x_weight, weight_offset, residual, hidden);
      } else {
        add(x, residual, hidden);
      }
      scale_row(residual, *residual_scale, hidden);
      x = residual;
      x_weight = nullptr;
      residual = nullptr;
      if (y == nullptr) return;
    }
    if (x_weight != nullptr) {
      add_scaled(x, inverse_rms(x, eps, hidden), x_weight, weight_offset, residual, hidden);
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
    if (weight == nullptr) {
      std::copy_n(from, hidden, y);
      return;
    }
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

// One layer's elements of a row. `table` is null for a token outside the table.
template <class Weight>
struct PerLayerKernel {
  [[gnu::always_inline]] static V16 combine(const PerLayerInputsParams& p, const V16& normed,
                                            const V16& entry) {
    return (normed + entry * p.table_scale) * p.scale;
  }
  [[gnu::always_inline]] static void run(const PerLayerInputsParams* p, const Weight* table,
                                         float* x) {
    const int32_t n = p->size;
    scale_row(x, p->x_scale, n);
    const float factor = inverse_rms(x, p->eps, n);
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) {
      const V16 normed = load(x + i) * factor * (load(p->weight + i) + p->weight_offset);
      const V16 entry = table == nullptr ? V16{} : load(table + i);
      store(x + i, combine(*p, normed, entry));
    }
    if (i < n) {
      const int32_t count = n - i;
      const V16 weight = load_first(p->weight + i, count) + p->weight_offset;
      const V16 normed = load_first(x + i, count) * factor * weight;
      const V16 entry = table == nullptr ? V16{} : load_first(table + i, count);
      store_first(x + i, combine(*p, normed, entry), count);
    }
  }
};

template <class Weight>
void per_layer_row(const PerLayerInputsParams& p, int32_t row) {
  const int64_t width = int64_t{p.num_layers} * p.size;
  const int32_t token = p.token_ids[row];
  const Weight* table = nullptr;
  if (token >= 0 && token < p.vocab_size) {
    table = static_cast<const Weight*>(p.table) + token * width;
  }
  float* const x = static_cast<float*>(p.x) + row * width;
  for (int64_t offset = 0; offset < width; offset += p.size) {
    run_best_isa<PerLayerKernel<Weight>>(&p, table == nullptr ? nullptr : table + offset,
                                         x + offset);
  }
}

// Calls row_op(row) for every row, in parallel if there are enough elements.
template <class RowOp>
void for_rows(const CpuContext& ctx, int32_t num_rows, int64_t row_elements, const RowOp& row_op) {
  constexpr int64_t kMinParallelElements = 32 << 10;
  if (ctx.num_threads == 1 || num_rows * row_elements < kMinParallelElements) {
    for (int32_t row = 0; row < num_rows; ++row) row_op(row);
    return;
  }
  ctx.for_ranges(num_rows, /*pieces_per_thread=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) row_op(static_cast<int32_t>(row));
  });
}

}  // namespace

void rms_norm(CpuContext& ctx, const RmsNormParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  PACELINE_CHECK(p.x_dtype == DType::kFloat32 && p.y_dtype == DType::kFloat32,
                 "the CPU computes in float32");
  PACELINE_CHECK(p.residual != nullptr ||
                     (p.x_weight == nullptr && p.residual_scale == nullptr && p.y != nullptr),
                 "x_weight, residual_scale and a null y need a residual");
  for_rows(ctx, num_rows, p.hidden, [&](int32_t row) {
    float* const residual = p.residual == nullptr ? nullptr : p.residual + int64_t{row} * p.hidden;
    float* const y = p.y == nullptr ? nullptr : static_cast<float*>(p.y) + row * p.y_stride;
    run_best_isa<RmsNormRowKernel>(static_cast<const float*>(p.x) + row * p.x_stride, p.x_weight,
                                   residual, p.residual_scale, p.weight, p.weight_offset, p.eps, y,
                                   p.hidden);
  });
}

void per_layer_inputs(CpuContext& ctx, const PerLayerInputsParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  PACELINE_CHECK(p.dtype == DType::kFloat32, "the CPU computes in float32");
  PACELINE_CHECK(p.table_dtype == DType::kFloat32 || p.table_dtype == DType::kBFloat16,
                 "embedding tables are float32 or bfloat16");
  for_rows(ctx, num_rows, int64_t{p.num_layers} * p.size, [&](int32_t row) {
    if (p.table_dtype == DType::kFloat32) {
      per_layer_row<float>(p, row);
    } else {
      per_layer_row<uint16_t>(p, row);
    }
  });
}

}  // namespace paceline
