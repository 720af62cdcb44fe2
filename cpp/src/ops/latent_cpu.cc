// SPDX-License-Identifier: Apache-2.0

// The ops around latent_attention: entries, absorbed queries, and values. latent_attention itself
// is in attention_cpu.cc, whose walk over keys it shares.

#include <algorithm>

#include "base/check.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/for_rows.h"
#include "ops/gemm_columns.h"
#include "ops/head_math.h"
#include "ops/latent.h"

namespace paceline {
namespace {

constexpr int32_t kMaxEntryWidth = 8192;  // of append_latents, which keeps an entry on the stack

struct AppendKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const AppendLatentsParams* p, int32_t row) {
    const int32_t rank = p->kv_lora_rank;
    const int32_t width = rank + p->qk_rope_head_dim;
    float* const q = static_cast<float*>(p->qkv_a) + int64_t{row} * (p->q_width + width);
    if (p->q_norm != nullptr) {
      norm_head<Lanes>(q, p->q_norm, p->norm_weight_offset, p->norm_eps, q, p->q_width);
    }
    const KvLayerView& entries = p->entries;
    const int64_t slot = p->slot_mapping[row];
    // The contents of the null block are never used, and rows would race on it.
    if (slot < entries.block_size) return;
    const float* const c = q + p->q_width;
    float entry[kMaxEntryWidth];
    norm_head<Lanes>(c, p->latent_norm, p->norm_weight_offset, p->norm_eps, entry, rank);
    std::copy(c + rank, c + width, entry + rank);
    rotate_to<Lanes>(p->rope, p->rope.positions[row], entry + rank, p->qk_rope_head_dim);
    std::byte* const block = entries.base + slot / entries.block_size * entries.block_bytes;
    const int64_t entry_bytes = width * dtype_bytes(entries.dtype);
    append_head(entry, entries.dtype,
                block + entries.k_offset + slot % entries.block_size * entry_bytes, width);
  }
};

struct RotateKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const LatentRope* rope, int32_t row, float* head,
                                         int32_t width) {
    rotate_to<Lanes>(*rope, rope->positions[row], head, width);
  }
};

// y = W^T x for some rows of x: W [k, n] is K_h, so that outputs lie along its rows. An output is
// one multiply-add for each element of x, in ascending order, whatever is computed beside it.
template <class W>
struct AbsorbArgs {
  const float* x;
  int64_t x_stride;
  const W* weight;
  int32_t k;
  int32_t n;
  float* y;
  int64_t y_stride;
};

constexpr int32_t kMaxAbsorbedRows = 4;  // 4 rows x 4 vectors of accumulators

template <class W, int kRows>
struct AbsorbKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const AbsorbArgs<W>* args) {
    int32_t column = 0;
    for (; column + 64 <= args->n; column += 64) columns<Lanes, 4>(*args, column);
    for (; column < args->n; column += 16) columns<Lanes, 1>(*args, column);
  }

  template <class Lanes, int kVectors>
  [[gnu::always_inline]] static void columns(const AbsorbArgs<W>& args, int32_t column) {
    const int32_t left = args.n - column;  // below 16 only in a call for one vector
    Lanes acc[kRows][kVectors];
    clear(acc);
    for (int32_t i = 0; i < args.k; ++i) {
      const W* const from = args.weight + int64_t{i} * args.n + column;
      Lanes weight[kVectors];
      for (int v = 0; v < kVectors; ++v) weight[v] = load_up_to<Lanes>(from + 16 * v, left);
      for (int r = 0; r < kRows; ++r) {
        const Lanes x = broadcast<Lanes>(args.x[r * args.x_stride + i]);
        for (int v = 0; v < kVectors; ++v) acc[r][v] += x * weight[v];
      }
    }
    for (int r = 0; r < kRows; ++r) {
      float* const to = args.y + r * args.y_stride + column;
      for (int v = 0; v < kVectors; ++v) store_up_to(to + 16 * v, acc[r][v], left);
    }
  }
};

template <class W>
void absorb_rows(AbsorbArgs<W> args, int32_t num_rows) {
  while (num_rows > 0) {
    const int32_t rows = std::min(num_rows, kMaxAbsorbedRows);
    switch (rows) {
      case 1:
        run_best_isa<AbsorbKernel<W, 1>>(&args);
        break;
      case 2:
        run_best_isa<AbsorbKernel<W, 2>>(&args);
        break;
      case 3:
        run_best_isa<AbsorbKernel<W, 3>>(&args);
        break;
      case 4:
        run_best_isa<AbsorbKernel<W, 4>>(&args);
        break;
    }
    args.x += rows * args.x_stride;
    args.y += rows * args.y_stride;
    num_rows -= rows;
  }
}

void check_heads(const LatentHeads& heads, DType dtype) {
  PACELINE_CHECK(heads.kv_b.format == WeightFormat::kPlain, "kv_b has a format");
  PACELINE_CHECK(
      heads.kv_b.n == int64_t{heads.num_heads} * (heads.qk_nope_head_dim + heads.v_head_dim),
      "kv_b has ", heads.kv_b.n, " rows");
  PACELINE_CHECK(dtype == DType::kFloat32, "the CPU computes in float32");
}

// The rows of kv_b from `row` of head `head`.
[[nodiscard]] const std::byte* head_rows(const LatentHeads& heads, int32_t head, int32_t row) {
  const int64_t first = int64_t{head} * (heads.qk_nope_head_dim + heads.v_head_dim) + row;
  return heads.kv_b.data + first * heads.kv_b.row_bytes();
}

// Calls of_head(head) for every head, in parallel where `work` multiplications pay for it.
template <class OfHead>
void for_heads(const CpuContext& ctx, int32_t num_heads, int64_t work, const OfHead& of_head) {
  constexpr int64_t kMinParallelWork = 100 << 10;
  if (ctx.num_threads == 1 || work < kMinParallelWork) {
    for (int32_t head = 0; head < num_heads; ++head) of_head(head);
    return;
  }
  ctx.for_ranges(num_heads, /*pieces_per_thread=*/4, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) of_head(static_cast<int32_t>(head));
  });
}

}  // namespace

void append_latents(CpuContext& ctx, const AppendLatentsParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  const int32_t width = p.kv_lora_rank + p.qk_rope_head_dim;
  PACELINE_CHECK(width <= kMaxEntryWidth, "an entry of ", width, " elements");
  PACELINE_CHECK(p.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim ", p.qk_rope_head_dim, " is odd");
  PACELINE_CHECK(p.dtype == DType::kFloat32, "the CPU computes in float32");
  PACELINE_CHECK(p.entries.dtype == DType::kFloat32 || p.entries.dtype == DType::kBFloat16,
                 "KV caches are float32 or bfloat16");
  for_rows(ctx, num_rows, int64_t{p.q_width + width} * 4,
           [&](int32_t row) { run_best_isa<AppendKernel>(&p, row); });
}

void absorb_queries(CpuContext& ctx, const AbsorbQueriesParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  if (num_rows <= 0) return;
  const LatentHeads& heads = p.heads;
  check_heads(heads, p.dtype);
  const int32_t rank = heads.kv_b.k;
  const int32_t nope = heads.qk_nope_head_dim;
  const int32_t rope = p.qk_rope_head_dim;
  const int64_t y_stride = int64_t{heads.num_heads} * (rank + rope);
  for_heads(
      ctx, heads.num_heads, int64_t{num_rows} * heads.num_heads * nope * rank, [&](int32_t head) {
        const float* const q = static_cast<const float*>(p.q) + int64_t{head} * (nope + rope);
        float* const y = static_cast<float*>(p.y) + int64_t{head} * (rank + rope);
        const auto absorb = [&]<class W>() {
          const W* const weight = reinterpret_cast<const W*>(head_rows(heads, head, 0));
          absorb_rows(AbsorbArgs<W>{q, p.q_stride, weight, nope, rank, y, y_stride}, num_rows);
        };
        if (heads.kv_b.dtype == DType::kFloat32) {
          absorb.template operator()<float>();
        } else {
          absorb.template operator()<uint16_t>();
        }
        for (int32_t row = 0; row < num_rows; ++row) {
          float* const rotated = y + row * y_stride + rank;
          std::copy_n(q + row * p.q_stride + nope, rope, rotated);
          run_best_isa<RotateKernel>(&p.rope, row, rotated, rope);
        }
      });
}

void project_values(CpuContext& ctx, const ProjectValuesParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  if (num_rows <= 0) return;
  const LatentHeads& heads = p.heads;
  check_heads(heads, p.dtype);
  const int32_t rank = heads.kv_b.k;
  const GemmScratch scratch(ctx);
  for_heads(ctx, heads.num_heads, int64_t{num_rows} * heads.num_heads * heads.v_head_dim * rank,
            [&](int32_t head) {
              GemmColumns columns = {
                  .num_rows = num_rows,
                  .x = static_cast<const float*>(p.x) + int64_t{head} * rank,
                  .x_stride = int64_t{heads.num_heads} * rank,
                  .weight = heads.kv_b,
                  .y = static_cast<float*>(p.y) + int64_t{head} * heads.v_head_dim,
                  .y_stride = int64_t{heads.num_heads} * heads.v_head_dim};
              columns.weight.data = head_rows(heads, head, heads.qk_nope_head_dim);
              columns.weight.n = heads.v_head_dim;
              gemm_columns(columns, 0, heads.v_head_dim, scratch.of_thread());
            });
}

}  // namespace paceline
