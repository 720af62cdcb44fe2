// SPDX-License-Identifier: Apache-2.0

// Softmax attention over a paged KV cache and over latent entries, by the walk of
// attention_walk.h.

#include <algorithm>

#include "base/check.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/attention_walk.h"
#include "ops/latent.h"
#include "ops/ops.h"

namespace paceline {
namespace {

// Fills the pointers to the keys and values of one KV head.
template <class Kv>
struct Locator {
  const KvLayerView* kv;
  const int32_t* blocks;  // the row of the block table
  int32_t num_kv_heads;
  int32_t kv_head;
  int32_t head_dim;

  [[gnu::always_inline]] void operator()(int32_t chunk, int32_t first, int32_t last,
                                         const Kv** keys, const Kv** values) const {
    const int64_t token_bytes = int64_t{num_kv_heads} * head_dim * static_cast<int64_t>(sizeof(Kv));
    const int64_t head_bytes = int64_t{kv_head} * head_dim * static_cast<int64_t>(sizeof(Kv));
    const std::byte* const base = kv->base + head_bytes;
    auto set_pointers = [&](int32_t j, int64_t block, int64_t offset) {
      const std::byte* const token = base + block * kv->block_bytes + offset * token_bytes;
      keys[j] = reinterpret_cast<const Kv*>(token + kv->k_offset);
      values[j] = reinterpret_cast<const Kv*>(token + kv->v_offset);
    };
    int32_t index = (chunk + first) / kv->block_size;
    int32_t offset = (chunk + first) % kv->block_size;
    for (int32_t j = first; j < last; ++j) {
      set_pointers(j, blocks[index], offset);
      if (++offset == kv->block_size) {
        offset = 0;
        ++index;
      }
    }
  }
};

template <class Kv, int kHeads>
struct AttendKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const HeadGroup* group, int32_t begin, int32_t end,
                                         const Locator<Kv>* locate) {
    KeyWalk<Lanes, Kv, kHeads> walk;
    walk.start(*group);
    walk.add(*group, begin, end, *locate);
    walk.finish(*group, begin < end);
  }
};

struct KeyRange {
  int32_t begin;
  int32_t end;
};

// What the ops have in common. Queries are at q, q_stride apart from row to row, the heads of a row
// one after the other.
struct AttentionRows {
  int32_t num_rows;
  const float* q;
  int64_t q_stride;
  const float* sinks;  // or null
  float* y;            // [num_rows, num_qo_heads * value_dim]
  const KvLayerView* kv;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t value_dim;
  float scale;
  float soft_cap;
  // Query heads that one call of the walk over keys takes; all of them read the same KV head.
  int32_t heads_per_item;
};

template <class Params>
[[nodiscard]] AttentionRows multi_head_rows(const Params& p, float soft_cap) {
  PACELINE_CHECK(p.num_kv_heads > 0 && p.num_qo_heads % p.num_kv_heads == 0, "num_qo_heads ",
                 p.num_qo_heads, " is not a multiple of num_kv_heads ", p.num_kv_heads);
  PACELINE_CHECK(p.dtype == DType::kFloat32, "the CPU computes in float32");
  return {.num_rows = std::min(*p.num_rows, p.max_rows),
          .q = static_cast<const float*>(p.qkv),
          .q_stride = int64_t{qkv_heads(p.num_qo_heads, p.num_kv_heads, p.kv_inputs)} * p.head_dim,
          .sinks = p.sinks,
          .y = static_cast<float*>(p.y),
          .kv = &p.kv,
          .num_qo_heads = p.num_qo_heads,
          .num_kv_heads = p.num_kv_heads,
          .head_dim = p.head_dim,
          .value_dim = p.head_dim,
          .scale = p.scale,
          .soft_cap = soft_cap,
          .heads_per_item = p.num_qo_heads / p.num_kv_heads};
}

// The shared part of all ops. range_of(row) returns the visible keys (end 0: inert row), and
// blocks_of(row) where they are stored.
template <class RangeOf, class BlocksOf>
void attend_rows(const CpuContext& ctx, const AttentionRows& p, const RangeOf& range_of,
                 const BlocksOf& blocks_of) {
  PACELINE_CHECK(p.value_dim > 0 && p.value_dim <= p.head_dim && p.value_dim <= kMaxValueDim,
                 "values of ", p.value_dim, " elements are not in 1..", kMaxValueDim);
  PACELINE_CHECK(p.kv->dtype == DType::kFloat32 || p.kv->dtype == DType::kBFloat16,
                 "KV caches are float32 or bfloat16");
  const int32_t heads_per_group = p.num_qo_heads / p.num_kv_heads;
  const int32_t items_per_row = (p.num_qo_heads + p.heads_per_item - 1) / p.heads_per_item;
  auto attend_one = [&](int64_t item) {
    const int32_t row = static_cast<int32_t>(item / items_per_row);
    const int32_t first_head = static_cast<int32_t>(item % items_per_row) * p.heads_per_item;
    const int32_t num_heads = std::min(p.heads_per_item, p.num_qo_heads - first_head);
    const HeadGroup group = {.q = p.q + row * p.q_stride + int64_t{first_head} * p.head_dim,
                             .sinks = p.sinks == nullptr ? nullptr : p.sinks + first_head,
                             .y = p.y + (int64_t{row} * p.num_qo_heads + first_head) * p.value_dim,
                             .head_dim = p.head_dim,
                             .value_dim = p.value_dim,
                             .scale = p.scale,
                             .soft_cap = p.soft_cap};
    const KeyRange range = range_of(row);
    if (range.begin >= range.end) {
      std::fill_n(group.y, int64_t{num_heads} * p.value_dim, 0.0f);
      return;
    }
    auto attend_as = [&]<class Kv>() {
      const Locator<Kv> locate = {.kv = p.kv,
                                  .blocks = blocks_of(row),
                                  .num_kv_heads = p.num_kv_heads,
                                  .kv_head = first_head / heads_per_group,
                                  .head_dim = p.head_dim};
      for_head_groups(group, num_heads, [&]<int kHeads>(const HeadGroup& heads) {
        run_best_isa<AttendKernel<Kv, kHeads>>(&heads, range.begin, range.end, &locate);
      });
    };
    if (p.kv->dtype == DType::kFloat32) {
      attend_as.template operator()<float>();
    } else {
      attend_as.template operator()<uint16_t>();
    }
  };
  const int64_t num_items = int64_t{p.num_rows} * items_per_row;
  int64_t num_keys = 0;
  for (int32_t row = 0; row < p.num_rows; ++row) {
    num_keys += std::max(range_of(row).end - range_of(row).begin, 0);
  }
  for_attention_items(ctx, num_items, num_keys * p.num_qo_heads * p.head_dim, attend_one);
}

}  // namespace

void paged_attention(CpuContext& ctx, const PagedAttentionParams& p) {
  auto range_of = [&](int32_t row) -> KeyRange {
    if (p.seq_slot[row] < 0) return {.begin = 0, .end = 0};
    return {.begin = p.kv_begin == nullptr ? 0 : p.kv_begin[row], .end = p.kv_end[row]};
  };
  auto blocks_of = [&](int32_t row) {
    return p.block_table + p.seq_slot[row] * p.block_table_stride;
  };
  attend_rows(ctx, multi_head_rows(p, p.soft_cap), range_of, blocks_of);
}

void latent_attention(CpuContext& ctx, const LatentAttentionParams& p) {
  PACELINE_CHECK(p.dtype == DType::kFloat32, "the CPU computes in float32");
  const int32_t width = p.kv_lora_rank + p.qk_rope_head_dim;
  // The latent of an entry is both the begin of its key and its value.
  PACELINE_CHECK(p.entries.v_offset == p.entries.k_offset, "entries have no values of their own");
  const AttentionRows rows = {.num_rows = std::min(*p.num_rows, p.max_rows),
                              .q = static_cast<const float*>(p.q),
                              .q_stride = int64_t{p.num_heads} * width,
                              .sinks = nullptr,
                              .y = static_cast<float*>(p.y),
                              .kv = &p.entries,
                              .num_qo_heads = p.num_heads,
                              .num_kv_heads = 1,
                              .head_dim = width,
                              .value_dim = p.kv_lora_rank,
                              .scale = p.scale,
                              .soft_cap = 0,
                              .heads_per_item = kMaxHeadsAtOnce};
  auto range_of = [&](int32_t row) -> KeyRange {
    return {.begin = 0, .end = p.seq_slot[row] < 0 ? 0 : p.kv_end[row]};
  };
  auto blocks_of = [&](int32_t row) {
    return p.block_table + p.seq_slot[row] * p.block_table_stride;
  };
  attend_rows(ctx, rows, range_of, blocks_of);
}

}  // namespace paceline
