// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/ops.h"

namespace paceline {
namespace {

// The sum of n squares: vector v of sixteen elements is added to sum v % 4, since four sums hide
// the latency of the multiply-add. value_at(i, count) returns elements [i, i + count), followed
// by zeros where there are fewer than sixteen.
template <class Lanes, class ValueAt>
[[gnu::always_inline]] inline float sum_of_squares(int32_t n, const ValueAt& value_at) {
  Lanes squares[1][4];
  clear(squares);
  int32_t i = 0;
  for (; i + 64 <= n; i += 64) {
    for (int part = 0; part < 4; ++part) {
      const Lanes value = value_at(i + 16 * part, 16);
      squares[0][part] += value * value;
    }
  }
  for (int part = 0; part < 4; ++part) {
    const int32_t num_left = n - (i + 16 * part);
    if (num_left <= 0) break;
    const Lanes value = value_at(i + 16 * part, std::min(num_left, 16));
    squares[0][part] += value * value;
  }
  return sum_lanes((squares[0][0] + squares[0][1]) + (squares[0][2] + squares[0][3]));
}

// 1 / sqrt(mean(x^2) + eps).
template <class Lanes>
[[gnu::always_inline]] inline float inverse_rms(const float* x, float eps, int32_t hidden) {
  const auto value_at = [&](int32_t i, int32_t count) __attribute__((always_inline)) {
    return load_up_to<Lanes>(x + i, count);
  };
  const float sum = sum_of_squares<Lanes>(hidden, value_at);
  return 1.0f / std::sqrt(sum / static_cast<float>(hidden) + eps);
}

// x *= factor.
template <class Lanes>
[[gnu::always_inline]] inline void scale_row(float* x, float factor, int32_t n) {
  int32_t i = 0;
  for (; i + 16 <= n; i += 16) store(x + i, load<Lanes>(x + i) * factor);
  for (; i < n; ++i) x[i] *= factor;
}

struct RmsNormRowKernel {
  // residual += x * factor * (x_weight + weight_offset).
  template <class Lanes>
  [[gnu::always_inline]] static void add_scaled(const float* x, float factor, const float* x_weight,
                                                float weight_offset, float* residual,
                                                int32_t hidden) {
    int32_t i = 0;
    for (; i + 16 <= hidden; i += 16) {
      const Lanes scaled =
          load<Lanes>(x + i) * factor * (load<Lanes>(x_weight + i) + weight_offset);
      store(residual + i, load<Lanes>(residual + i) + scaled);
    }
    if (i < hidden) {
      const int32_t count = hidden - i;
      const Lanes scale = load_first<Lanes>(x_weight + i, count) + weight_offset;
      const Lanes scaled = load_first<Lanes>(x + i, count) * factor * scale;
      store_first(residual + i, load_first<Lanes>(residual + i, count) + scaled, count);
    }
  }

  // residual += x.
  template <class Lanes>
  [[gnu::always_inline]] static void add(const float* x, float* residual, int32_t hidden) {
    int32_t i = 0;
    for (; i + 16 <= hidden; i += 16) {
      store(residual + i, load<Lanes>(residual + i) + load<Lanes>(x + i));
    }
    for (; i < hidden; ++i) residual[i] += x[i];
  }

  template <class Lanes>
  [[gnu::always_inline]] static void run(const float* x, const float* x_weight, float* residual,
                                         const float* residual_scale, const float* weight,
                                         float weight_offset, float eps, float* y, int32_t hidden) {
    if (residual_scale != nullptr) {
      if (x_weight != nullptr) {
        add_scaled<Lanes>(x, inverse_rms<Lanes>(x, eps, hidden), x_weight, weight_offset, residual,
                          hidden);
      } else {
        add<Lanes>(x, residual, hidden);
      }
      scale_row<Lanes>(residual, *residual_scale, hidden);
      x = residual;
      x_weight = nullptr;
      residual = nullptr;
      if (y == nullptr) return;
    }
    if (x_weight != nullptr) {
      add_scaled<Lanes>(x, inverse_rms<Lanes>(x, eps, hidden), x_weight, weight_offset, residual,
                        hidden);
      x = residual;
      residual = nullptr;
    }
    const auto value_at = [&](int32_t at, int32_t count) __attribute__((always_inline)) {
      Lanes value = load_up_to<Lanes>(x + at, count);
      if (residual == nullptr) return value;
      value += load_up_to<Lanes>(residual + at, count);
      store_up_to(residual + at, value, count);
      return value;
    };
    const float sum = sum_of_squares<Lanes>(hidden, value_at);
    if (y == nullptr) return;
    const float factor = 1.0f / std::sqrt(sum / static_cast<float>(hidden) + eps);
    const float* const from = residual != nullptr ? residual : x;
    if (weight == nullptr) {
      std::copy_n(from, hidden, y);
      return;
    }
    int32_t i = 0;
    for (; i + 16 <= hidden; i += 16) {
      store(y + i, load<Lanes>(from + i) * factor * (load<Lanes>(weight + i) + weight_offset));
    }
    if (i < hidden) {
      const int32_t count = hidden - i;
      const Lanes scale = load_first<Lanes>(weight + i, count) + weight_offset;
      store_first(y + i, load_first<Lanes>(from + i, count) * factor * scale, count);
    }
  }
};

// One layer's elements of a row. `table` is null for a token outside the table.
template <class Weight>
struct PerLayerKernel {
  template <class Lanes>
  [[gnu::always_inline]] static Lanes combine(const PerLayerInputsParams& p, const Lanes& normed,
                                              const Lanes& entry) {
    return (normed + entry * p.table_scale) * p.scale;
  }
  template <class Lanes>
  [[gnu::always_inline]] static void run(const PerLayerInputsParams* p, const Weight* table,
                                         float* x) {
    const int32_t n = p->size;
    scale_row<Lanes>(x, p->x_scale, n);
    const float factor = inverse_rms<Lanes>(x, p->eps, n);
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) {
      const Lanes normed =
          load<Lanes>(x + i) * factor * (load<Lanes>(p->weight + i) + p->weight_offset);
      const Lanes entry = table == nullptr ? broadcast<Lanes>(0.0f) : load<Lanes>(table + i);
      store(x + i, combine(*p, normed, entry));
    }
    if (i < n) {
      const int32_t count = n - i;
      const Lanes weight = load_first<Lanes>(p->weight + i, count) + p->weight_offset;
      const Lanes normed = load_first<Lanes>(x + i, count) * factor * weight;
      const Lanes entry =
          table == nullptr ? broadcast<Lanes>(0.0f) : load_first<Lanes>(table + i, count);
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
