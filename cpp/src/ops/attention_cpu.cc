// SPDX-License-Identifier: Apache-2.0
//
// Softmax attention over a paged KV cache, one (row, KV head) at a time: the query heads of a group
// share each load of a key. The kernel takes keys in chunks [128 c, 128 (c + 1)) of absolute
// positions:
//    1. scores of the visible keys; those of invisible keys are -inf, and their memory is not read
//    2. max, exp, sum: lane l sums positions l, l + 16, ... of the chunk, then sum_lanes' tree
//    3. accumulator: one multiply-add per key in ascending order
// It merges each chunk into the running (max, sum, accumulator) in ascending order. No result
// depends on how many heads or keys are computed together, so a row's bits depend only on its query
// and its visible keys.

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/latent.h"
#include "ops/ops.h"

namespace paceline {
namespace {

constexpr int32_t kChunk = kAttentionChunk;
constexpr int32_t kMaxValueDim = 1024;
constexpr int32_t kMaxHeadsAtOnce = 4;  // 4 heads x 4 keys (or 4 vectors of V) of accumulators
constexpr float kNegInf = -std::numeric_limits<float>::infinity();
static_assert(kChunk % 16 == 0);

// The query heads of one (row, KV head) and their parameters.
struct HeadGroup {
  const float* q;      // [num_heads, head_dim]
  const float* sinks;  // [num_heads], or null
  float* y;            // [num_heads, value_dim]
  int32_t head_dim;    // of queries and keys
  int32_t value_dim;
  float scale;
  float soft_cap;
};

// Sixteen elements, of which `num_left` exist; the others are zero.
template <class T>
[[gnu::always_inline]] inline V16 load_up_to(const T* from, int32_t num_left) {
  return num_left >= 16 ? load(from) : load_first(from, num_left);
}

// scores[h][j - first] = q_h . key_j for keys [first, last) of the chunk.
template <class Kv, int kHeads>
[[gnu::always_inline]] inline void score_keys(const HeadGroup& group, const Kv* const* keys,
                                              int32_t first, int32_t last,
                                              float (*scores)[kChunk]) {
  const int32_t head_dim = group.head_dim;
  for (int32_t j = first; j < last; j += 4) {
    // Past the last key the loop repeats it and drops the extra scores.
    const Kv* key[4];
    for (int i = 0; i < 4; ++i) key[i] = keys[std::min(j + i, last - 1)];
    V16 acc[kHeads][4] = {};
    int32_t d = 0;
    for (; d + 16 <= head_dim; d += 16) {
      V16 kv[4];
      for (int i = 0; i < 4; ++i) kv[i] = load(key[i] + d);
      for (int h = 0; h < kHeads; ++h) {
        const V16 q = load(group.q + h * head_dim + d);
        for (int i = 0; i < 4; ++i) acc[h][i] += q * kv[i];
      }
    }
    if (d < head_dim) {
      V16 kv[4];
      for (int i = 0; i < 4; ++i) kv[i] = load_first(key[i] + d, head_dim - d);
      for (int h = 0; h < kHeads; ++h) {
        const V16 q = load_first(group.q + h * head_dim + d, head_dim - d);
        for (int i = 0; i < 4; ++i) acc[h][i] += q * kv[i];
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      const Sums4 sums = sum_lanes(acc[h][0], acc[h][1], acc[h][2], acc[h][3]);
      for (int32_t i = 0; i < std::min(4, last - j); ++i) scores[h][j + i] = sums.sum[i];
    }
  }
}

// running[h][d .. d + 16 kVectors) = running * running_factor + (sum over keys of weight * V) *
// chunk_factor.
template <class Kv, int kHeads, int kVectors>
[[gnu::always_inline]] inline void accumulate_values(const Kv* const* values, int32_t first,
                                                     int32_t last, const float (*weights)[kChunk],
                                                     int32_t value_dim, int32_t d,
                                                     const float* running_factor,
                                                     const float* chunk_factor, float* running) {
  V16 acc[kHeads][kVectors] = {};
  for (int32_t j = first; j < last; ++j) {
    V16 value[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      // Only a call for one vector can reach past value_dim.
      value[i] =
          kVectors == 1 ? load_up_to(values[j] + d, value_dim - d) : load(values[j] + d + 16 * i);
    }
    for (int h = 0; h < kHeads; ++h) {
      const V16 weight = broadcast(weights[h][j]);
      for (int i = 0; i < kVectors; ++i) acc[h][i] += weight * value[i];
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int i = 0; i < kVectors; ++i) {
      float* const to = running + h * kMaxValueDim + d + 16 * i;
      store(to, load(to) * running_factor[h] + acc[h][i] * chunk_factor[h]);
    }
  }
}

// `locate(chunk, first, last, keys, values)` fills keys[] and values[] with pointers for the chunk
// positions [first, last).
template <class Kv, int kHeads, class Locate>
[[gnu::always_inline]] inline void attend(const HeadGroup& group, int32_t begin, int32_t end,
                                          const Locate& locate) {
  const int32_t value_dim = group.value_dim;
  alignas(64) float running[kHeads * kMaxValueDim];
  alignas(64) float scores[kHeads][kChunk];
  const Kv* keys[kChunk];
  const Kv* values[kChunk];
  float running_max[kHeads];
  float running_sum[kHeads];
  for (int h = 0; h < kHeads; ++h) {
    running_max[h] = kNegInf;
    running_sum[h] = 0.0f;
    std::fill_n(running + h * kMaxValueDim, (value_dim + 15) / 16 * 16, 0.0f);
  }
  for (int32_t chunk = begin / kChunk * kChunk; chunk < end; chunk += kChunk) {
    const int32_t first = std::max(begin - chunk, 0);
    const int32_t last = std::min(end - chunk, kChunk);
    locate(chunk, first, last, keys, values);
    score_keys<Kv, kHeads>(group, keys, first, last, scores);
    float running_factor[kHeads];
    float chunk_factor[kHeads];
    for (int h = 0; h < kHeads; ++h) {
      std::fill(scores[h], scores[h] + first, kNegInf);
      std::fill(scores[h] + last, scores[h] + kChunk, kNegInf);
      V16 highest = broadcast(kNegInf);
      for (int32_t j = 0; j < kChunk; j += 16) {
        V16 score = load(scores[h] + j) * group.scale;
        if (group.soft_cap > 0.0f) {
          // -inf marks an invisible key and must not become -cap.
          score = score > kNegInf ? group.soft_cap * tanh(score / group.soft_cap) : score;
        }
        store(scores[h] + j, score);
        highest = max(highest, score);
      }
      const float chunk_max = max_lanes(highest);
      V16 sum = {};
      for (int32_t j = 0; j < kChunk; j += 16) {
        const V16 weight = exp(load(scores[h] + j) - chunk_max);
        store(scores[h] + j, weight);
        sum += weight;
      }
      const float new_max = std::max(running_max[h], chunk_max);
      running_factor[h] = exp_one(running_max[h] - new_max);
      chunk_factor[h] = exp_one(chunk_max - new_max);
      running_sum[h] = running_sum[h] * running_factor[h] + sum_lanes(sum) * chunk_factor[h];
      running_max[h] = new_max;
    }
    int32_t d = 0;
    for (; d + 64 <= value_dim; d += 64) {
      accumulate_values<Kv, kHeads, 4>(values, first, last, scores, value_dim, d, running_factor,
                                       chunk_factor, running);
    }
    for (; d < value_dim; d += 16) {
      accumulate_values<Kv, kHeads, 1>(values, first, last, scores, value_dim, d, running_factor,
                                       chunk_factor, running);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    float sum = running_sum[h];
    float factor = 1.0f;
    if (group.sinks != nullptr) {
      const float new_max = std::max(running_max[h], group.sinks[h]);
      factor = exp_one(running_max[h] - new_max);
      sum = sum * factor + exp_one(group.sinks[h] - new_max);
    }
    const float inverse = begin < end ? factor / sum : 0.0f;  // no visible key: zero
    for (int32_t d = 0; d < value_dim; ++d) {
      group.y[h * value_dim + d] = running[h * kMaxValueDim + d] * inverse;
    }
  }
}

// Where the keys of a row are stored: given by a block table or by a list of slots.
struct BlockLocations {
  const int32_t* blocks;
};
struct SlotLocations {
  const int64_t* slots;
};

// Fills the pointers to the keys and values of one KV head.
template <class Kv, class KvLocations>
struct Locator {
  const KvLayerView* kv;
  KvLocations locations;
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
    if constexpr (std::is_same_v<KvLocations, BlockLocations>) {
      int32_t index = (chunk + first) / kv->block_size;
      int32_t offset = (chunk + first) % kv->block_size;
      for (int32_t j = first; j < last; ++j) {
        set_pointers(j, locations.blocks[index], offset);
        if (++offset == kv->block_size) {
          offset = 0;
          ++index;
        }
      }
    } else {
      for (int32_t j = first; j < last; ++j) {
        const int64_t slot = locations.slots[chunk + j];
        set_pointers(j, slot / kv->block_size, slot % kv->block_size);
      }
    }
  }
};

template <class Kv, class KvLocations, int kHeads>
struct AttendKernel {
  [[gnu::always_inline]] static void run(const HeadGroup* group, int32_t begin, int32_t end,
                                         const Locator<Kv, KvLocations>* locate) {
    attend<Kv, kHeads>(*group, begin, end, *locate);
  }
};

// All query heads of one KV head, up to kMaxHeadsAtOnce at a time.
template <class Kv, class KvLocations>
void attend_group(HeadGroup group, int32_t num_heads, int32_t begin, int32_t end,
                  const Locator<Kv, KvLocations>& locate) {
  while (num_heads > 0) {
    const int32_t heads = std::min(num_heads, kMaxHeadsAtOnce);
    switch (heads) {
      case 1:
        run_best_isa<AttendKernel<Kv, KvLocations, 1>>(&group, begin, end, &locate);
        break;
      case 2:
        run_best_isa<AttendKernel<Kv, KvLocations, 2>>(&group, begin, end, &locate);
        break;
      case 3:
        run_best_isa<AttendKernel<Kv, KvLocations, 3>>(&group, begin, end, &locate);
        break;
      case 4:
        run_best_isa<AttendKernel<Kv, KvLocations, 4>>(&group, begin, end, &locate);
        break;
    }
    group.q += int64_t{heads} * group.head_dim;
    group.y += int64_t{heads} * group.value_dim;
    if (group.sinks != nullptr) group.sinks += heads;
    num_heads -= heads;
  }
}

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
// locations_of(row) where they are stored.
template <class KvLocations, class RangeOf, class LocationsOf>
void attend_rows(const CpuContext& ctx, const AttentionRows& p, const RangeOf& range_of,
                 const LocationsOf& locations_of) {
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
      const Locator<Kv, KvLocations> locate = {.kv = p.kv,
                                               .locations = locations_of(row),
                                               .num_kv_heads = p.num_kv_heads,
                                               .kv_head = first_head / heads_per_group,
                                               .head_dim = p.head_dim};
      attend_group(group, num_heads, range.begin, range.end, locate);
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
  // Fewer multiplications cost less than a fork and join.
  constexpr int64_t kMinParallelWork = 64 << 10;
  if (ctx.num_threads == 1 || num_items == 1 ||
      num_keys * p.num_qo_heads * p.head_dim < kMinParallelWork) {
    for (int64_t item = 0; item < num_items; ++item) attend_one(item);
    return;
  }
  // Later rows of a prompt see more keys, so work is cut into many pieces: no thread then waits
  // long for the last one.
  ctx.for_ranges(num_items, /*pieces_per_thread=*/32, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) attend_one(item);
  });
}

}  // namespace

void paged_attention(CpuContext& ctx, const PagedAttentionParams& p) {
  auto range_of = [&](int32_t row) -> KeyRange {
    if (p.seq_slot[row] < 0) return {.begin = 0, .end = 0};
    return {.begin = p.kv_begin == nullptr ? 0 : p.kv_begin[row], .end = p.kv_end[row]};
  };
  auto locations_of = [&](int32_t row) -> BlockLocations {
    return {p.block_table + p.seq_slot[row] * p.block_table_stride};
  };
  attend_rows<BlockLocations>(ctx, multi_head_rows(p, p.soft_cap), range_of, locations_of);
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
  auto locations_of = [&](int32_t row) -> BlockLocations {
    return {p.block_table + p.seq_slot[row] * p.block_table_stride};
  };
  attend_rows<BlockLocations>(ctx, rows, range_of, locations_of);
}

void list_attention(CpuContext& ctx, const ListAttentionParams& p) {
  auto range_of = [&](int32_t row) -> KeyRange {
    return {.begin = 0, .end = std::min(p.window_count[row], p.window)};
  };
  auto locations_of = [&](int32_t row) -> SlotLocations {
    return {p.window_slots + int64_t{row} * p.window};
  };
  attend_rows<SlotLocations>(ctx, multi_head_rows(p, /*soft_cap=*/0.0f), range_of, locations_of);
}

}  // namespace paceline
