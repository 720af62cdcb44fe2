// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/float_types.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/ops.h"

namespace paceline {
namespace {

constexpr int32_t kMaxHeadDim = 1024;

// 1 / sqrt(mean(x^2) + eps) of a head.
[[gnu::always_inline]] inline float inverse_rms(const float* in, float eps, int32_t head_dim) {
  V16 squares = {};
  int32_t d = 0;
  for (; d + 16 <= head_dim; d += 16) {
    const V16 value = load(in + d);
    squares += value * value;
  }
  if (d < head_dim) {
    const V16 value = load_first(in + d, head_dim - d);
    squares += value * value;
  }
  return 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(head_dim) + eps);
}

// RMS norm of one head from `in` to `out`, which may be the same; a copy if there is no weight.
[[gnu::always_inline]] inline void norm_head(const float* in, const float* weight,
                                             float weight_offset, float eps, float* out,
                                             int32_t head_dim) {
  if (weight == nullptr) {
    if (in != out) std::copy_n(in, head_dim, out);
    return;
  }
  const float factor = inverse_rms(in, eps, head_dim);
  int32_t d = 0;
  for (; d + 16 <= head_dim; d += 16) {
    store(out + d, load(in + d) * factor * (load(weight + d) + weight_offset));
  }
  for (; d < head_dim; ++d) out[d] = in[d] * factor * (weight[d] + weight_offset);
}

// The RMS norm without a weight.
[[gnu::always_inline]] inline void norm_head_unweighted(const float* in, float eps, float* out,
                                                        int32_t head_dim) {
  const float factor = inverse_rms(in, eps, head_dim);
  int32_t d = 0;
  for (; d + 16 <= head_dim; d += 16) store(out + d, load(in + d) * factor);
  for (; d < head_dim; ++d) out[d] = in[d] * factor;
}

// Split halves: element d is paired with d + head_dim / 2.
[[gnu::always_inline]] inline void rotate_head(const float* cos, const float* sin, float* head,
                                               int32_t head_dim) {
  const int32_t half = head_dim / 2;
  int32_t d = 0;
  for (; d + 16 <= half; d += 16) {
    const V16 a = load(head + d);
    const V16 b = load(head + half + d);
    const V16 c = load(cos + d);
    const V16 s = load(sin + d);
    store(head + d, a * c - b * s);
    store(head + half + d, b * c + a * s);
  }
  if (d < half) {
    const int32_t count = half - d;
    const V16 a = load_first(head + d, count);
    const V16 b = load_first(head + half + d, count);
    const V16 c = load_first(cos + d, count);
    const V16 s = load_first(sin + d, count);
    store_first(head + d, a * c - b * s, count);
    store_first(head + half + d, b * c + a * s, count);
  }
}

[[gnu::always_inline]] inline void append_head(const float* head, DType dtype, std::byte* to,
                                               int32_t head_dim) {
  if (dtype == DType::kFloat32) {
    std::copy_n(head, head_dim, reinterpret_cast<float*>(to));
  } else {
    std::transform(head, head + head_dim, reinterpret_cast<uint16_t*>(to),
                   [](float value) { return float_to_bf16(value); });
  }
}

struct RowKernel {
  [[gnu::always_inline]] static void run(const QkNormRopeAppendParams* p, int32_t row) {
    const int32_t head_dim = p->head_dim;
    const int64_t row_heads = qkv_heads(p->num_qo_heads, p->num_kv_heads, p->kv_inputs);
    float* const q = static_cast<float*>(p->qkv) + row * row_heads * head_dim;
    const float* const k = q + int64_t{p->num_qo_heads} * head_dim;
    const float* const v =
        p->kv_inputs == KvInputs::kKeys ? k : k + int64_t{p->num_kv_heads} * head_dim;
    const int64_t position = p->positions[row] + p->position_offset;
    const float* const cos = p->rope_cos + position * (head_dim / 2);
    const float* const sin = p->rope_sin + position * (head_dim / 2);
    for (int32_t h = 0; h < p->num_qo_heads; ++h) {
      float* const head = q + int64_t{h} * head_dim;
      norm_head(head, p->q_norm, p->norm_weight_offset, p->norm_eps, head, head_dim);
      rotate_head(cos, sin, head, head_dim);
    }
    if (p->kv_inputs == KvInputs::kNone) return;
    const KvLayerView& kv = p->kv;
    const int64_t slot = p->slot_mapping[row];
    // The contents of the null block are never used, and rows would race on it.
    if (slot < kv.block_size) return;
    std::byte* const block = kv.base + slot / kv.block_size * kv.block_bytes;
    const int64_t head_bytes = head_dim * dtype_bytes(kv.dtype);
    const int64_t offset = slot % kv.block_size * p->num_kv_heads * head_bytes;
    float rotated[kMaxHeadDim];
    float scaled[kMaxHeadDim];
    for (int32_t h = 0; h < p->num_kv_heads; ++h) {
      norm_head(k + int64_t{h} * head_dim, p->k_norm, p->norm_weight_offset, p->norm_eps, rotated,
                head_dim);
      rotate_head(cos, sin, rotated, head_dim);
      append_head(rotated, kv.dtype, block + kv.k_offset + offset + h * head_bytes, head_dim);
      const float* value = v + int64_t{h} * head_dim;
      if (p->has_v_norm) {
        norm_head_unweighted(value, p->norm_eps, scaled, head_dim);
        value = scaled;
      }
      append_head(value, kv.dtype, block + kv.v_offset + offset + h * head_bytes, head_dim);
    }
  }
};

}  // namespace

void qk_norm_rope_append(CpuContext& ctx, const QkNormRopeAppendParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  PACELINE_CHECK(p.head_dim % 2 == 0 && p.head_dim <= kMaxHeadDim, "head_dim ", p.head_dim,
                 " is odd or above ", kMaxHeadDim);
  PACELINE_CHECK(p.qkv_dtype == DType::kFloat32, "the CPU computes in float32");
  PACELINE_CHECK(p.kv.dtype == DType::kFloat32 || p.kv.dtype == DType::kBFloat16,
                 "KV caches are float32 or bfloat16");
  constexpr int64_t kMinParallelElements = 32 << 10;
  const int64_t row_elements =
      int64_t{qkv_heads(p.num_qo_heads, p.num_kv_heads, p.kv_inputs)} * p.head_dim;
  if (ctx.num_threads == 1 || num_rows * row_elements < kMinParallelElements) {
    for (int32_t row = 0; row < num_rows; ++row) run_best_isa<RowKernel>(&p, row);
    return;
  }
  ctx.for_ranges(num_rows, /*pieces_per_thread=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      run_best_isa<RowKernel>(&p, static_cast<int32_t>(row));
    }
  });
}

}  // namespace paceline
