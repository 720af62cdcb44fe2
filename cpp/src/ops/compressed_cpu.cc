// SPDX-License-Identifier: Apache-2.0

// The ops that make what compressed attention reads: queries, window entries, and compressed
// entries. The attention itself is in compressed_attention_cpu.cc.

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>

#include "base/check.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "metadata/metadata_rows.h"
#include "ops/compressed.h"
#include "ops/for_rows.h"
#include "ops/head_math.h"

namespace paceline {
namespace {

void check_kv_dtype(const KvLayerView& view) {
  PACELINE_CHECK(view.dtype == DType::kFloat32 || view.dtype == DType::kBFloat16,
                 "KV caches are float32 or bfloat16");
}

void check_heads(int32_t head_dim, int32_t rope_head_dim) {
  PACELINE_CHECK(head_dim > 0 && head_dim <= kMaxCompressedHeadDim, "a head of ", head_dim,
                 " elements");
  PACELINE_CHECK(rope_head_dim >= 0 && rope_head_dim <= head_dim && rope_head_dim % 2 == 0,
                 rope_head_dim, " rotated elements of ", head_dim, " elements");
}

// The contents of the null block are never used, and rows would race on it.
bool is_in_null_block(const KvLayerView& view, int64_t slot) { return slot < view.block_size; }

// Where the `width` elements of a slot are.
[[gnu::always_inline]] inline std::byte* address_of(const KvLayerView& view, int64_t slot,
                                                    int32_t width) {
  const int64_t bytes = width * dtype_bytes(view.dtype);
  return view.base + slot / view.block_size * view.block_bytes + view.k_offset +
         slot % view.block_size * bytes;
}

struct AppendKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const AppendWindowEntriesParams* p, int32_t row) {
    float* const q = static_cast<float*>(p->qkv_a) + int64_t{row} * (p->q_width + p->head_dim);
    norm_head<Lanes>(q, p->q_norm, p->norm_weight_offset, p->norm_eps, q, p->q_width);
    const int64_t slot = p->slot_mapping[row];
    if (is_in_null_block(p->entries, slot)) return;
    float entry[kMaxCompressedHeadDim];
    norm_head<Lanes>(q + p->q_width, p->entry_norm, p->norm_weight_offset, p->norm_eps, entry,
                     p->head_dim);
    rotate_to<Lanes>(p->rope, p->rope.positions[row], entry + p->head_dim - p->rope_head_dim,
                     p->rope_head_dim);
    append_head(entry, p->entries.dtype, address_of(p->entries, slot, p->head_dim), p->head_dim);
  }
};

struct RotateKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const RotateHeadsParams* p, int32_t row) {
    const int32_t width = p->rope_head_dim;
    LatentRope rope = p->rope;
    // The negative angle has the same cosine and the negative sine.
    float negative[kMaxCompressedHeadDim / 2];
    if (p->is_inverse) {
      const int64_t at = (int64_t{rope.positions[row]} + rope.position_offset) * (width / 2);
      for (int32_t i = 0; i < width / 2; ++i) negative[i] = -rope.sin[at + i];
      rope.sin = negative - at;
    }
    float* head = static_cast<float*>(p->x) + int64_t{row} * p->num_heads * p->head_dim;
    for (int32_t h = 0; h < p->num_heads; ++h, head += p->head_dim) {
      if (p->has_norm) norm_head_unweighted<Lanes>(head, p->norm_eps, head, p->head_dim);
      rotate_to<Lanes>(rope, rope.positions[row], head + p->head_dim - width, width);
    }
  }
};

// The tokens of one entry, in the order of its sum: where each has its channels and its gates.
struct EntryTokens {
  int32_t count = 0;
  // [count] channel 0 of kv, of the gate and of the gate's bias
  std::array<const float*, 2 * kMaxTokensPerEntry> kv;
  std::array<const float*, 2 * kMaxTokensPerEntry> gate;
  std::array<const float*, 2 * kMaxTokensPerEntry> bias;
};

// The softmax over tokens times kv, for 16 channels from d on, of which num_left exist.
template <class Lanes>
[[gnu::always_inline]] inline Lanes mean_channels(const EntryTokens& tokens, int32_t d,
                                                  int32_t num_left) {
  Lanes highest = broadcast<Lanes>(-std::numeric_limits<float>::infinity());
  for (int32_t t = 0; t < tokens.count; ++t) {
    highest = max(highest, load_up_to<Lanes>(tokens.gate[t] + d, num_left) +
                               load_up_to<Lanes>(tokens.bias[t] + d, num_left));
  }
  Lanes sum = {};
  Lanes weighted = {};
  for (int32_t t = 0; t < tokens.count; ++t) {
    const Lanes weight = exp(load_up_to<Lanes>(tokens.gate[t] + d, num_left) +
                             load_up_to<Lanes>(tokens.bias[t] + d, num_left) - highest);
    sum += weight;
    weighted += weight * load_up_to<Lanes>(tokens.kv[t] + d, num_left);
  }
  return weighted / sum;
}

struct CompressKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const CompressParams* p, const Compressor* c, int32_t row,
                                         const EntryTokens* tokens) {
    float entry[kMaxCompressedHeadDim];
    int32_t d = 0;
    for (; d + 16 <= c->dim; d += 16) store(entry + d, mean_channels<Lanes>(*tokens, d, 16));
    if (d < c->dim)
      store_first(entry + d, mean_channels<Lanes>(*tokens, d, c->dim - d), c->dim - d);
    norm_head<Lanes>(entry, c->norm, p->norm_weight_offset, p->norm_eps, entry, c->dim);
    const int32_t first_token = p->positions[row] / p->tokens_per_entry * p->tokens_per_entry;
    rotate_to<Lanes>(p->rope, first_token, entry + c->dim - p->rope_head_dim, p->rope_head_dim);
    append_head(entry, c->entries.dtype, address_of(c->entries, p->entry_slots[row], c->dim),
                c->dim);
  }
};

// Finds the tokens of the entry that the row at `position` completes.
void find_tokens(const CompressParams& p, const Compressor& c, int32_t seq_slot, int32_t position,
                 EntryTokens& tokens) {
  const int32_t ratio = p.tokens_per_entry;
  const int32_t width = p.overlaps ? 2 * c.dim : c.dim;
  tokens.count = 0;
  const auto add = [&](int32_t first, int32_t channel) {
    for (int32_t token = first; token < first + ratio; ++token) {
      const int64_t slot = slot_of(p.tail_table, seq_slot, token);
      const auto* const kv =
          reinterpret_cast<const float*>(address_of(p.tail, slot, p.tail_width)) + c.tail_offset;
      const auto i = static_cast<size_t>(tokens.count++);
      tokens.kv[i] = kv + channel;
      tokens.gate[i] = kv + width + channel;
      tokens.bias[i] = c.position_bias + int64_t{token % ratio} * width + channel;
    }
  };
  const int32_t first = position / ratio * ratio;
  if (p.overlaps && first > 0) add(first - ratio, 0);
  add(first, p.overlaps ? c.dim : 0);
}

}  // namespace

void append_window_entries(CpuContext& ctx, const AppendWindowEntriesParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  check_heads(p.head_dim, p.rope_head_dim);
  check_kv_dtype(p.entries);
  PACELINE_CHECK(p.dtype == DType::kFloat32, "the CPU computes in float32");
  for_rows(ctx, num_rows, int64_t{p.q_width + p.head_dim} * 4,
           [&](int32_t row) { run_best_isa<AppendKernel>(&p, row); });
}

void rotate_heads(CpuContext& ctx, const RotateHeadsParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  check_heads(p.head_dim, p.rope_head_dim);
  PACELINE_CHECK(p.dtype == DType::kFloat32, "the CPU computes in float32");
  for_rows(ctx, num_rows, int64_t{p.num_heads} * p.head_dim * 4,
           [&](int32_t row) { run_best_isa<RotateKernel>(&p, row); });
}

void append_tail(CpuContext& ctx, const AppendTailParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  PACELINE_CHECK(p.tail.dtype == DType::kFloat32, "the tail store is float32");
  for_rows(ctx, num_rows, int64_t{p.width} * 8, [&](int32_t row) {
    const int64_t slot = p.slot_mapping[row];
    if (is_in_null_block(p.tail, slot)) return;
    std::copy_n(p.x + row * p.x_stride, p.width,
                reinterpret_cast<float*>(address_of(p.tail, slot, p.width)));
  });
}

void compress(CpuContext& ctx, const CompressParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  PACELINE_CHECK(p.tokens_per_entry > 0 && p.tokens_per_entry <= kMaxTokensPerEntry, "an entry of ",
                 p.tokens_per_entry, " tokens");
  PACELINE_CHECK(p.tail.dtype == DType::kFloat32, "the tail store is float32");
  int64_t row_bytes = 0;
  for (int32_t i = 0; i < p.num_compressors; ++i) {
    const Compressor& c = p.compressors[i];
    check_heads(c.dim, p.rope_head_dim);
    check_kv_dtype(c.entries);
    row_bytes += int64_t{c.dim} * (p.overlaps ? 2 : 1) * 8;  // what a token has
  }
  for_rows(ctx, num_rows, row_bytes, [&](int32_t row) {
    const int32_t seq_slot = p.seq_slot[row];
    if (seq_slot < 0) return;
    EntryTokens tokens;
    for (int32_t i = 0; i < p.num_compressors; ++i) {
      const Compressor& c = p.compressors[i];
      if (is_in_null_block(c.entries, p.entry_slots[row])) return;
      find_tokens(p, c, seq_slot, p.positions[row], tokens);
      run_best_isa<CompressKernel>(&p, &c, row, &tokens);
    }
  });
}

}  // namespace paceline
