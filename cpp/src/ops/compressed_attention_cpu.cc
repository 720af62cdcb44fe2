// SPDX-License-Identifier: Apache-2.0

// Compressed attention and the choice of its entries.

#include <algorithm>
#include <array>
#include <cstddef>

#include "base/check.h"
#include "base/ordered.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/attention_walk.h"
#include "ops/compressed.h"
#include "ops/for_rows.h"

namespace paceline {
namespace {

// Fills the pointers to entries, which are both keys and values: to those of a list, or to all.
template <class Kv>
struct EntryLocator {
  const KvLayerView* view;
  const int32_t* blocks;  // of the sequence
  const int32_t* list;    // or null
  int32_t width;          // elements of an entry

  [[gnu::always_inline]] void operator()(int32_t chunk, int32_t first, int32_t last,
                                         const Kv** keys, const Kv** values) const {
    const int64_t entry_bytes = int64_t{width} * static_cast<int64_t>(sizeof(Kv));
    const std::byte* const base = view->base + view->k_offset;
    for (int32_t j = first; j < last; ++j) {
      const int32_t entry = list == nullptr ? chunk + j : list[chunk + j];
      const int64_t block = blocks[entry / view->block_size];
      keys[j] = reinterpret_cast<const Kv*>(base + block * view->block_bytes +
                                            entry % view->block_size * entry_bytes);
      values[j] = keys[j];
    }
  }
};

template <class Kv>
struct Keys {
  EntryLocator<Kv> window;
  int32_t window_begin;
  int32_t window_end;
  EntryLocator<Kv> entries;
  int32_t num_entries;  // those of the list, or all visible ones
};

template <class Kv, int kHeads>
struct AttendKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const HeadGroup* group, const Keys<Kv>* keys) {
    KeyWalk<Lanes, Kv, kHeads> walk;
    walk.start(*group);
    walk.add(*group, keys->window_begin, keys->window_end, keys->window);
    walk.add(*group, 0, keys->num_entries, keys->entries);
    walk.finish(*group, keys->window_begin < keys->window_end || keys->num_entries > 0);
  }
};

template <class Kv>
struct ScoreKernel {
  // The scores of entries [begin, end), at most kChunk.
  template <class Lanes>
  [[gnu::always_inline]] static void run(const IndexScoresParams* p, int32_t row,
                                         const EntryLocator<Kv>* locate, int32_t begin,
                                         int32_t end) {
    const Kv* keys[kChunk];
    const Kv* values[kChunk];
    (*locate)(begin, 0, end - begin, keys, values);
    alignas(64) float sums[kChunk] = {};
    alignas(64) float products[kMaxHeadsAtOnce][kChunk];
    const float* const weights = p->weights + row * p->weights_stride;
    HeadGroup group = {
        .q = static_cast<const float*>(p->q) + int64_t{row} * p->num_heads * p->head_dim,
        .sinks = nullptr,
        .y = nullptr,
        .head_dim = p->head_dim,
        .value_dim = 0,
        .scale = 0,
        .soft_cap = 0};
    for (int32_t head = 0; head < p->num_heads; head += kMaxHeadsAtOnce) {
      const int32_t heads = std::min(p->num_heads - head, kMaxHeadsAtOnce);
      if (heads == kMaxHeadsAtOnce) {
        score_keys<Lanes, Kv, kMaxHeadsAtOnce>(group, keys, 0, end - begin, products);
      } else {
        for (int32_t h = 0; h < heads; ++h) {
          HeadGroup one = group;
          one.q += h * p->head_dim;
          score_keys<Lanes, Kv, 1>(one, keys, 0, end - begin, products + h);
        }
      }
      for (int32_t h = 0; h < heads; ++h) {
        const float weight = weights[head + h];
        for (int32_t j = 0; j < end - begin; ++j) {
          sums[j] += weight * (products[h][j] > 0 ? products[h][j] : 0.0f);
        }
      }
      group.q += int64_t{kMaxHeadsAtOnce} * p->head_dim;
    }
    float* const to = p->scores + row * p->scores_stride + begin;
    for (int32_t j = 0; j < end - begin; ++j) to[j] = p->scale * sums[j];
  }
};

template <class Kv>
[[nodiscard]] EntryLocator<Kv> locator(const KvLayerView& view, const BlockTable& table,
                                       int32_t seq_slot, int32_t width,
                                       const int32_t* list = nullptr) {
  return {.view = &view,
          .blocks = table.blocks + seq_slot * table.stride,
          .list = list,
          .width = width};
}

// Calls op.operator()<Kv>() for the type of the elements.
template <class Op>
void with_kv_type(const KvLayerView& view, const Op& op) {
  PACELINE_CHECK(view.dtype == DType::kFloat32 || view.dtype == DType::kBFloat16,
                 "KV caches are float32 or bfloat16");
  if (view.dtype == DType::kFloat32) {
    op.template operator()<float>();
  } else {
    op.template operator()<uint16_t>();
  }
}

// Scores as integers of the same order; equal scores have equal keys.
uint32_t key_of(float score) { return to_ordered(comparable(score)); }

// The key of the k-th highest of `count` scores, and how many of the k have exactly that key.
struct Threshold {
  uint32_t key;
  int32_t num_equal;
};

// Finds the key digit by digit, from the highest, by counting. 0 < k <= count.
Threshold find_threshold(const float* scores, int32_t count, int32_t k) {
  Threshold found = {.key = 0, .num_equal = k};
  for (int32_t shift = 24; shift >= 0; shift -= 8) {
    const uint32_t decided = shift == 24 ? 0 : ~uint32_t{0} << (shift + 8);
    std::array<int32_t, 256> counts{};
    for (int32_t i = 0; i < count; ++i) {
      const uint32_t key = key_of(scores[i]);
      if ((key & decided) == found.key) ++counts[(key >> shift) & 255];
    }
    uint32_t digit = 255;
    while (counts[digit] < found.num_equal) found.num_equal -= counts[digit--];
    found.key |= digit << shift;
  }
  return found;
}

}  // namespace

void index_scores(CpuContext& ctx, const IndexScoresParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  PACELINE_CHECK(p.dtype == DType::kFloat32, "the CPU computes in float32");
  const auto end_of = [&](int32_t row) {
    if (p.seq_slot[row] < 0 || p.entry_end[row] <= p.top_k) return 0;
    PACELINE_CHECK(p.entry_end[row] <= p.scores_stride, p.entry_end[row], " entries; at most ",
                   p.scores_stride);
    return p.entry_end[row];
  };
  int64_t num_keys = 0;
  for (int32_t row = 0; row < num_rows; ++row) num_keys += end_of(row);
  if (num_keys == 0) return;
  // An item is one chunk of one row; rows that see fewer entries have empty items.
  const auto chunks = static_cast<int32_t>((p.scores_stride + kChunk - 1) / kChunk);
  with_kv_type(p.keys, [&]<class Kv>() {
    for_attention_items(
        ctx, int64_t{num_rows} * chunks, num_keys * p.num_heads * p.head_dim, [&](int64_t item) {
          const auto row = static_cast<int32_t>(item / chunks);
          const int32_t begin = static_cast<int32_t>(item % chunks) * kChunk;
          const int32_t end = std::min(end_of(row), begin + kChunk);
          if (begin >= end) return;
          const auto locate = locator<Kv>(p.keys, p.table, p.seq_slot[row], p.head_dim);
          run_best_isa<ScoreKernel<Kv>>(&p, row, &locate, begin, end);
        });
  });
}

void choose_entries(CpuContext& ctx, const ChooseEntriesParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  PACELINE_CHECK(p.top_k > 0 && p.top_k <= kMaxIndexTopK, "top_k of the indexer is ", p.top_k);
  for_rows(ctx, num_rows, p.scores_stride * 4, [&](int32_t row) {
    const int32_t count = p.seq_slot[row] < 0 ? 0 : p.entry_end[row];
    int32_t* chosen = p.chosen + int64_t{row} * p.top_k;
    p.num_chosen[row] = std::min(count, p.top_k);
    if (count <= p.top_k) {
      for (int32_t entry = 0; entry < count; ++entry) chosen[entry] = entry;
      return;
    }
    const float* const scores = p.scores + row * p.scores_stride;
    Threshold threshold = find_threshold(scores, count, p.top_k);
    for (int32_t entry = 0; entry < count; ++entry) {
      const uint32_t key = key_of(scores[entry]);
      if (key < threshold.key || (key == threshold.key && threshold.num_equal-- <= 0)) continue;
      *chosen++ = entry;
    }
  });
}

void compressed_attention(CpuContext& ctx, const CompressedAttentionParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  PACELINE_CHECK(p.dtype == DType::kFloat32, "the CPU computes in float32");
  PACELINE_CHECK(p.head_dim > 0 && p.head_dim <= kMaxCompressedHeadDim, "a head of ", p.head_dim,
                 " elements");
  PACELINE_CHECK(p.entry_end == nullptr || p.entries.dtype == p.window.dtype,
                 "window and compressed entries have one dtype");
  const auto entries_of = [&](int32_t row) {
    if (p.entry_end == nullptr) return 0;
    return p.chosen == nullptr ? p.entry_end[row] : p.num_chosen[row];
  };
  const auto is_live = [&](int32_t row) { return p.seq_slot[row] >= 0; };
  int64_t num_keys = 0;
  for (int32_t row = 0; row < num_rows; ++row) {
    if (is_live(row)) num_keys += p.window_end[row] - p.window_begin[row] + entries_of(row);
  }
  const int64_t row_width = int64_t{p.num_heads} * p.head_dim;
  const int32_t items_per_row = (p.num_heads + kMaxHeadsAtOnce - 1) / kMaxHeadsAtOnce;
  with_kv_type(p.window, [&]<class Kv>() {
    for_attention_items(
        ctx, int64_t{num_rows} * items_per_row, num_keys * row_width, [&](int64_t item) {
          const auto row = static_cast<int32_t>(item / items_per_row);
          const int32_t head = static_cast<int32_t>(item % items_per_row) * kMaxHeadsAtOnce;
          const int32_t num_heads = std::min(p.num_heads - head, kMaxHeadsAtOnce);
          const int64_t at = row * row_width + int64_t{head} * p.head_dim;
          float* const y = static_cast<float*>(p.y) + at;
          const int32_t seq_slot = p.seq_slot[row];
          if (seq_slot < 0) {
            std::fill_n(y, int64_t{num_heads} * p.head_dim, 0.0f);
            return;
          }
          Keys<Kv> keys = {.window = locator<Kv>(p.window, p.window_table, seq_slot, p.head_dim),
                           .window_begin = p.window_begin[row],
                           .window_end = p.window_end[row],
                           .entries = {},
                           .num_entries = entries_of(row)};
          if (keys.num_entries > 0) {
            keys.entries =
                locator<Kv>(p.entries, p.entry_table, seq_slot, p.head_dim,
                            p.chosen == nullptr ? nullptr : p.chosen + int64_t{row} * p.top_k);
          }
          const HeadGroup group = {.q = static_cast<const float*>(p.q) + at,
                                   .sinks = p.sinks == nullptr ? nullptr : p.sinks + head,
                                   .y = y,
                                   .head_dim = p.head_dim,
                                   .value_dim = p.head_dim,
                                   .scale = p.scale,
                                   .soft_cap = 0};
          for_head_groups(group, num_heads, [&]<int kHeads>(const HeadGroup& heads) {
            run_best_isa<AttendKernel<Kv, kHeads>>(&heads, &keys);
          });
        });
  });
}

}  // namespace paceline
