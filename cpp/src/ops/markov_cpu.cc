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

[[gnu::always_inline]] inline V16 sigmoid(const V16& x) { return 1.0f / (1.0f + exp(-x)); }

struct GateKernel {
  [[gnu::always_inline]] static void run(const float* gate, const float* e, float* y, int32_t n) {
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) store(y + i, sigmoid(load(gate + i)) * load(e + i));
    if (i < n) {
      const int32_t count = n - i;
      store_first(y + i, sigmoid(load_first(gate + i, count)) * load_first(e + i, count), count);
    }
  }
};

struct AdvanceKernel {
  [[gnu::always_inline]] static void run(const float* mix, float* state, bool is_first, float* y,
                                         int32_t n) {
    for (int32_t i = 0; i < n; i += 16) {
      const int32_t count = std::min(n - i, 16);
      const V16 g = sigmoid(load_up_to(mix + i, count));
      const V16 c = tanh(load_up_to(mix + n + i, count));
      const V16 before = is_first ? V16{} : load_up_to(state + i, count);
      const V16 after = g * before + (1.0f - g) * c;
      const V16 o = tanh(load_up_to(mix + 2 * n + i, count));
      if (count == 16) {
        store(state + i, after);
        store(y + i, o);
      } else {
        store_first(state + i, after, count);
        store_first(y + i, o, count);
      }
    }
  }
};

struct EstimateKernel {
  [[gnu::always_inline]] static void run(const float* h, int32_t hidden, const float* e,
                                         int32_t rank, const float* weight, float bias,
                                         float* probability) {
    V16 sums = {};
    for (int32_t i = 0; i < hidden; i += 16) {
      sums += load_up_to(h + i, hidden - i) * load_up_to(weight + i, hidden - i);
    }
    for (int32_t i = 0; i < rank; i += 16) {
      sums += load_up_to(e + i, rank - i) * load_up_to(weight + hidden + i, rank - i);
    }
    *probability = sigmoid(broadcast(sum_lanes(sums) + bias))[0];
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
