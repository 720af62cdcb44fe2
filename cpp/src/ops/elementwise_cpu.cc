// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/for_rows.h"
#include "ops/ops.h"

namespace paceline {
namespace {

template <class Weight>
struct ScaleKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const Weight* from, float scale, float* to, int32_t n) {
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) store(to + i, load<Lanes>(from + i) * scale);
    if (i < n) store_first(to + i, load_first<Lanes>(from + i, n - i) * scale, n - i);
  }
};

// Sixteen gates and ups of a row at once. The comparisons keep a NaN.
template <Activation kActivation, class Lanes>
[[gnu::always_inline]] inline Lanes gate_up(const Lanes& gate, const Lanes& up, float alpha,
                                            float limit) {
  if constexpr (kActivation == Activation::kSilu) {
    return gate / (1.0f + exp(-gate)) * up;
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    const Lanes inner = 0.7978845608f * (gate + 0.044715f * gate * gate * gate);
    return 0.5f * gate * (1.0f + tanh(inner)) * up;
  } else if constexpr (kActivation == Activation::kSigmoid) {
    return up / (1.0f + exp(-gate));
  } else {
    static_assert(kActivation == Activation::kSwigluOai || kActivation == Activation::kClampedSilu);
    const Lanes high = broadcast<Lanes>(limit);
    const Lanes low = -high;
    const Lanes g = at_most(gate, high);
    const Lanes u = at_least(at_most(up, high), low);
    if constexpr (kActivation == Activation::kClampedSilu) return g / (1.0f + exp(-g)) * u;
    return g / (1.0f + exp(-alpha * g)) * (u + 1.0f);
  }
}

template <Activation kActivation>
struct GateKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const float* gate, const float* up, float* y, int32_t n,
                                         float alpha, float limit) {
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) {
      store(y + i, gate_up<kActivation>(load<Lanes>(gate + i), load<Lanes>(up + i), alpha, limit));
    }
    if (i < n) {
      const int32_t count = n - i;
      store_first(y + i,
                  gate_up<kActivation>(load_first<Lanes>(gate + i, count),
                                       load_first<Lanes>(up + i, count), alpha, limit),
                  count);
    }
  }
};

// Gates in the even elements of x, ups in the odd ones.
template <Activation kActivation>
struct InterleavedGateKernel {
  [[gnu::always_inline]] static V16 gate_up_of(const V16& a, const V16& b, float alpha,
                                               float limit) {
    constexpr V16i kEven = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    constexpr V16i kOdd = kEven + 1;
    return gate_up<kActivation>(__builtin_shuffle(a, b, kEven), __builtin_shuffle(a, b, kOdd),
                                alpha, limit);
  }
  [[gnu::always_inline]] static void run(const float* x, float* y, int32_t n, float alpha,
                                         float limit) {
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) {
      store(y + i, gate_up_of(load(x + 2 * i), load(x + 2 * i + 16), alpha, limit));
    }
    if (i < n) {
      float padded[32] = {};
      for (int32_t j = 0; j < 2 * (n - i); ++j) padded[j] = x[2 * i + j];
      store_first(y + i, gate_up_of(load(padded), load(padded + 16), alpha, limit), n - i);
    }
  }
};

template <Activation kActivation>
void activate_row(const GatedActivationParams& p, int64_t row) {
  const auto* const x = static_cast<const float*>(p.x);
  float* const y = static_cast<float*>(p.y) + row * p.intermediate;
  if (p.is_interleaved) {
    run_best_isa<InterleavedGateKernel<kActivation>>(x + row * 2 * p.intermediate, y,
                                                     p.intermediate, p.alpha, p.limit);
    return;
  }
  const float* const gate = x + row * (p.up == nullptr ? 2 : 1) * p.intermediate;
  const float* const up =
      p.up == nullptr ? gate + p.intermediate : static_cast<const float*>(p.up) + row * p.up_stride;
  run_best_isa<GateKernel<kActivation>>(gate, up, y, p.intermediate, p.alpha, p.limit);
}

struct SoftCapKernel {
  template <class Lanes>
  [[gnu::always_inline]] static Lanes capped(const Lanes& logits, float scale, float cap) {
    const Lanes x = logits * scale;
    return cap > 0 ? cap * tanh(x / cap) : x;
  }
  template <class Lanes>
  [[gnu::always_inline]] static void run(float* logits, float scale, float cap, int32_t n) {
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) store(logits + i, capped(load<Lanes>(logits + i), scale, cap));
    if (i < n)
      store_first(logits + i, capped(load_first<Lanes>(logits + i, n - i), scale, cap), n - i);
  }
};

template <class Weight>
void embed_rows(const CpuContext& ctx, const EmbedParams& p, int32_t num_rows) {
  const Weight* const table = static_cast<const Weight*>(p.table);
  for_rows(ctx, num_rows, int64_t{p.hidden} * 8, [&](int32_t row) {
    float* const y = p.y + int64_t{row} * p.hidden;
    const int32_t token = p.token_ids[row];
    if (token < 0 || token >= p.vocab_size) {
      std::memset(y, 0, static_cast<size_t>(p.hidden) * sizeof(float));
      return;
    }
    run_best_isa<ScaleKernel<Weight>>(table + int64_t{token} * p.hidden, p.scale, y, p.hidden);
  });
}

}  // namespace

void embed(CpuContext& ctx, const EmbedParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  PACELINE_CHECK(p.table_dtype == DType::kFloat32 || p.table_dtype == DType::kBFloat16,
                 "embedding tables are float32 or bfloat16");
  if (p.table_dtype == DType::kFloat32) {
    embed_rows<float>(ctx, p, num_rows);
  } else {
    embed_rows<uint16_t>(ctx, p, num_rows);
  }
}

void gated_activation(CpuContext& ctx, const GatedActivationParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  PACELINE_CHECK(p.dtype == DType::kFloat32, "the CPU computes in float32");
  PACELINE_CHECK(!p.is_interleaved || p.up == nullptr, "an interleaved x holds both factors");
  // An exponential costs about as much as moving a few dozen bytes, so each element counts as 32.
  for_rows(ctx, num_rows, int64_t{p.intermediate} * 32, [&](int32_t row) {
    switch (p.activation) {
      case Activation::kSilu:
        return activate_row<Activation::kSilu>(p, row);
      case Activation::kGeluTanh:
        return activate_row<Activation::kGeluTanh>(p, row);
      case Activation::kSwigluOai:
        return activate_row<Activation::kSwigluOai>(p, row);
      case Activation::kClampedSilu:
        return activate_row<Activation::kClampedSilu>(p, row);
      case Activation::kSigmoid:
        return activate_row<Activation::kSigmoid>(p, row);
    }
  });
}

void gather_rows(CpuContext& ctx, const GatherRowsParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  for_rows(ctx, num_rows, int64_t{p.hidden} * 8, [&](int32_t row) {
    std::memcpy(p.y + int64_t{row} * p.hidden, p.x + int64_t{p.row_index[row]} * p.hidden,
                static_cast<size_t>(p.hidden) * sizeof(float));
  });
}

void copy_rows(CpuContext& ctx, const CopyRowsParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  PACELINE_CHECK(p.x_dtype == DType::kFloat32 && p.y_dtype == DType::kFloat32,
                 "the CPU computes in float32");
  for_rows(ctx, num_rows, int64_t{p.width} * 8, [&](int32_t row) {
    const int64_t from_row = p.row_index != nullptr ? p.row_index[row] : row;
    std::memcpy(static_cast<float*>(p.y) + row * p.y_stride,
                static_cast<const float*>(p.x) + from_row * p.x_stride,
                static_cast<size_t>(p.width) * sizeof(float));
  });
}

void soft_cap(CpuContext& ctx, const SoftCapParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  for_rows(ctx, num_rows, int64_t{p.n} * 32, [&](int32_t row) {
    run_best_isa<SoftCapKernel>(p.logits + row * p.row_stride(), p.scale, p.cap, p.n);
  });
}

void check_activation(const ActivatedGemmParams& p) {
  const GatedActivationParams& a = p.activation;
  PACELINE_CHECK(a.x == p.product.y && a.up == nullptr && !a.is_interleaved &&
                     a.dtype == p.product.y_dtype && a.num_rows == p.product.num_rows &&
                     a.max_rows == p.product.max_rows && p.product.num_groups == 1 &&
                     p.product.weight.n == 2 * a.intermediate &&
                     p.product.y_stride == p.product.weight.n,
                 "the activation reads the rows of the product");
}

void activated_gemm(CpuContext& ctx, const ActivatedGemmParams& p) {
  check_activation(p);
  gemm(ctx, p.product);
  gated_activation(ctx, p.activation);
}

void check_norm(const NormedGemmParams& p) {
  PACELINE_CHECK(p.norm.y == p.product.x && p.norm.y_stride == p.product.x_stride &&
                     p.norm.y_dtype == p.product.x_dtype && p.norm.hidden == p.product.weight.k &&
                     p.norm.num_rows == p.product.num_rows &&
                     p.norm.max_rows == p.product.max_rows && p.product.num_groups == 1,
                 "the product reads the rows of the norm");
}

void normed_gemm(CpuContext& ctx, const NormedGemmParams& p) {
  check_norm(p);
  rms_norm(ctx, p.norm);
  if (p.has_activation) {
    activated_gemm(ctx, {.product = p.product, .activation = p.activation});
  } else {
    gemm(ctx, p.product);
  }
}

void added_gemm(CpuContext& ctx, const AddedGemmParams& p) {
  gemm(ctx, p.product);
  rms_norm(ctx, addition_of(p));
}

bool adds_in_product(const CpuContext&, const GemmParams&) { return false; }

}  // namespace paceline
