// SPDX-License-Identifier: Apache-2.0
#include "ops/markov.h"

#include <algorithm>

#include "base/check.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/for_rows.h"

namespace paceline {
namespace {

// An exponential costs about as much as moving a few dozen bytes.
constexpr int64_t kBytesPerExp = 32;

template <class Lanes>
[[gnu::always_inline]] inline Lanes sigmoid(const Lanes& x) {
  return 1.0f / (1.0f + exp(-x));
}

struct GateKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const float* gate, const float* e, float* y, int32_t n) {
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) store(y + i, sigmoid(load<Lanes>(gate + i)) * load<Lanes>(e + i));
    if (i < n) {
      const int32_t count = n - i;
      store_first(y + i,
                  sigmoid(load_first<Lanes>(gate + i, count)) * load_first<Lanes>(e + i, count),
                  count);
    }
  }
};

struct AdvanceKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const float* mix, float* state, bool is_first, float* y,
                                         int32_t n) {
    for (int32_t i = 0; i < n; i += 16) {
      const int32_t count = std::min(n - i, 16);
      const Lanes g = sigmoid(load_up_to<Lanes>(mix + i, count));
      const Lanes c = tanh(load_up_to<Lanes>(mix + n + i, count));
      const Lanes before = is_first ? broadcast<Lanes>(0.0f) : load_up_to<Lanes>(state + i, count);
      const Lanes after = g * before + (1.0f - g) * c;
      const Lanes o = tanh(load_up_to<Lanes>(mix + 2 * n + i, count));
      store_up_to(state + i, after, count);
      store_up_to(y + i, o, count);
    }
  }
};

struct EstimateKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const float* h, int32_t hidden, const float* e,
                                         int32_t rank, const float* weight, float bias,
                                         float* probability) {
    Lanes sums = {};
    for (int32_t i = 0; i < hidden; i += 16) {
      sums += load_up_to<Lanes>(h + i, hidden - i) * load_up_to<Lanes>(weight + i, hidden - i);
    }
    for (int32_t i = 0; i < rank; i += 16) {
      sums += load_up_to<Lanes>(e + i, rank - i) * load_up_to<Lanes>(weight + hidden + i, rank - i);
    }
    *probability = 1.0f / (1.0f + exp_one(-(sum_lanes(sums) + bias)));
  }
};

void check_float(DType dtype) {
  PACELINE_CHECK(dtype == DType::kFloat32, "the CPU computes in float32");
}

}  // namespace

void join_parts(CpuContext& ctx, const JoinPartsParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  const int32_t width = p.width();
  check_float(p.y_dtype);
  for (const RowPart& part : p.parts) check_float(part.dtype);
  for_rows(ctx, num_rows, int64_t{width} * 8, [&](int32_t row) {
    float* y = static_cast<float*>(p.y) + int64_t{row} * width;
    for (const RowPart& part : p.parts) {
      if (part.x != nullptr) {
        std::copy_n(static_cast<const float*>(part.x) + row * part.stride, part.width, y);
      } else {
        std::fill_n(y, part.width, 0.0f);
      }
      y += part.width;
    }
  });
}

void gate_embeddings(CpuContext& ctx, const GateEmbeddingsParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  check_float(p.y_dtype);
  for_rows(ctx, num_rows, p.rank * kBytesPerExp, [&](int32_t row) {
    const int64_t at = int64_t{row} * p.rank;
    run_best_isa<GateKernel>(p.gate + at, p.e + at, static_cast<float*>(p.y) + at, p.rank);
  });
}

void advance_markov(CpuContext& ctx, const AdvanceMarkovParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  check_float(p.y_dtype);
  for_rows(ctx, num_rows, 3 * p.rank * kBytesPerExp, [&](int32_t row) {
    const int64_t at = int64_t{row} * p.rank;
    run_best_isa<AdvanceKernel>(p.mix + 3 * at, p.state + at, p.is_first,
                                static_cast<float*>(p.y) + at, p.rank);
  });
}

void estimate_acceptance(CpuContext& ctx, const EstimateAcceptanceParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  check_float(p.dtype);
  const float bias = p.bias != nullptr ? *p.bias : 0.0f;
  for_rows(ctx, num_rows, int64_t{p.hidden + p.rank} * 8, [&](int32_t row) {
    run_best_isa<EstimateKernel>(static_cast<const float*>(p.h) + int64_t{row} * p.hidden, p.hidden,
                                 p.rank > 0 ? p.e + int64_t{row} * p.rank : nullptr, p.rank,
                                 p.weight, bias, p.probability + row);
  });
}

}  // namespace paceline
