// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include "base/check.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/head_math.h"
#include "ops/ops.h"

namespace paceline {
namespace {

constexpr int32_t kMaxHeadDim = 1024;

struct RowKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const QkNormRopeAppendParams* p, int32_t row) {
    const int32_t head_dim = p->head_dim;
    const int64_t row_heads = qkv_heads(p->num_qo_heads, p->num_kv_heads, p->kv_inputs);
    float* const q = static_cast<float*>(p->qkv) + row * row_heads * head_dim;
    const float* const k = q + int64_t{p->num_qo_heads} * head_dim;
    const float* const v =
        p->kv_inputs == KvInputs::kKeys ? k : k + int64_t{p->num_kv_heads} * head_dim;
    const int64_t position = p->positions[row] + p->position_offset;
    const int32_t rotated_dim = p->rope_head_dim > 0 ? p->rope_head_dim : head_dim;
    const float* const cos = p->rope_cos + position * (rotated_dim / 2);
    const float* const sin = p->rope_sin + position * (rotated_dim / 2);
    for (int32_t h = 0; h < p->num_qo_heads; ++h) {
      float* const head = q + int64_t{h} * head_dim;
      norm_head<Lanes>(head, p->q_norm, p->norm_weight_offset, p->norm_eps, head, head_dim);
      rotate_head<Lanes>(cos, sin, head, rotated_dim);
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
      norm_head<Lanes>(k + int64_t{h} * head_dim, p->k_norm, p->norm_weight_offset, p->norm_eps,
                       rotated, head_dim);
      rotate_head<Lanes>(cos, sin, rotated, rotated_dim);
      append_head(rotated, kv.dtype, block + kv.k_offset + offset + h * head_bytes, head_dim);
      const float* value = v + int64_t{h} * head_dim;
      if (p->has_v_norm) {
        norm_head_unweighted<Lanes>(value, p->norm_eps, scaled, head_dim);
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
  PACELINE_CHECK(p.rope_head_dim % 2 == 0 && p.rope_head_dim <= p.head_dim, "rope_head_dim ",
                 p.rope_head_dim, " is odd or above head_dim ", p.head_dim);
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
