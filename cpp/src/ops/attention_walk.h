// SPDX-License-Identifier: Apache-2.0
#pragma once

// The walk over keys that all attention on the CPU shares, one (row, KV head) at a time: the query
// heads of a group share each load of a key. Keys are taken in chunks [128 c, 128 (c + 1)) of their
// positions, or of another number that they have:
//    1. scores of the visible keys; those of invisible keys are -inf, and their memory is not read
//    2. max, exp, sum: lane l sums positions l, l + 16, ... of the chunk, then sum_lanes' tree
//    3. accumulator: one multiply-add per key in ascending order
// Each chunk is merged into the running (max, sum, accumulator) in ascending order. No result
// depends on how many heads or keys are computed together, so a row's bits depend only on its query
// and its visible keys. Included by ops that run_best_isa compiles.

#include <algorithm>
#include <cstdint>
#include <limits>

#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/ops.h"

namespace paceline {

inline constexpr int32_t kChunk = kAttentionChunk;
inline constexpr int32_t kMaxValueDim = 1024;
inline constexpr int32_t kMaxHeadsAtOnce =
    4;  // 4 heads x 4 keys (or 4 vectors of V) of accumulators
inline constexpr float kNegInf = -std::numeric_limits<float>::infinity();
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

// cap * tanh(score / cap), but -inf, which marks an invisible key, stays.
template <class L>
[[gnu::always_inline]] inline L capped(const L& score, float cap) {
  if constexpr (kIsHalves<L>) {
    return {capped(score.low, cap), capped(score.high, cap)};
  } else {
    return score > kNegInf ? cap * tanh(score / cap) : score;
  }
}

// scores[h][j - first] = q_h . key_j for keys [first, last) of the chunk.
template <class Lanes, class Kv, int kHeads>
[[gnu::always_inline]] inline void score_keys(const HeadGroup& group, const Kv* const* keys,
                                              int32_t first, int32_t last,
                                              float (*scores)[kChunk]) {
  const int32_t head_dim = group.head_dim;
  for (int32_t j = first; j < last; j += 4) {
    // Past the last key the loop repeats it and drops the extra scores.
    const Kv* key[4];
    for (int i = 0; i < 4; ++i) key[i] = keys[std::min(j + i, last - 1)];
    Lanes acc[kHeads][4];
    clear(acc);
    int32_t d = 0;
    for (; d + 16 <= head_dim; d += 16) {
      Lanes kv[4];
      for (int i = 0; i < 4; ++i) kv[i] = load<Lanes>(key[i] + d);
      for (int h = 0; h < kHeads; ++h) {
        const Lanes q = load<Lanes>(group.q + h * head_dim + d);
        for (int i = 0; i < 4; ++i) acc[h][i] += q * kv[i];
      }
    }
    if (d < head_dim) {
      Lanes kv[4];
      for (int i = 0; i < 4; ++i) kv[i] = load_first<Lanes>(key[i] + d, head_dim - d);
      for (int h = 0; h < kHeads; ++h) {
        const Lanes q = load_first<Lanes>(group.q + h * head_dim + d, head_dim - d);
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
template <class Lanes, class Kv, int kHeads, int kVectors>
[[gnu::always_inline]] inline void accumulate_values(const Kv* const* values, int32_t first,
                                                     int32_t last, const float (*weights)[kChunk],
                                                     int32_t value_dim, int32_t d,
                                                     const float* running_factor,
                                                     const float* chunk_factor, float* running) {
  Lanes acc[kHeads][kVectors];
  clear(acc);
  for (int32_t j = first; j < last; ++j) {
    Lanes value[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      // Only a call for one vector can reach past value_dim.
      value[i] = kVectors == 1 ? load_up_to<Lanes>(values[j] + d, value_dim - d)
                               : load<Lanes>(values[j] + d + 16 * i);
    }
    for (int h = 0; h < kHeads; ++h) {
      const Lanes weight = broadcast<Lanes>(weights[h][j]);
      for (int i = 0; i < kVectors; ++i) acc[h][i] += weight * value[i];
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int i = 0; i < kVectors; ++i) {
      float* const to = running + h * kMaxValueDim + d + 16 * i;
      store(to, load<Lanes>(to) * running_factor[h] + acc[h][i] * chunk_factor[h]);
    }
  }
}

// The running (max, sum, accumulator) of a group of kHeads heads.
template <class Lanes, class Kv, int kHeads>
struct KeyWalk {
  [[gnu::always_inline]] void start(const HeadGroup& group) {
    for (int h = 0; h < kHeads; ++h) {
      running_max[h] = kNegInf;
      running_sum[h] = 0.0f;
      std::fill_n(running + h * kMaxValueDim, (group.value_dim + 15) / 16 * 16, 0.0f);
    }
  }

  // Adds the keys [begin, end). `locate(chunk, first, last, keys, values)` fills keys[] and
  // values[] with pointers for the chunk positions [first, last).
  template <class Locate>
  [[gnu::always_inline]] void add(const HeadGroup& group, int32_t begin, int32_t end,
                                  const Locate& locate) {
    const int32_t value_dim = group.value_dim;
    for (int32_t chunk = begin / kChunk * kChunk; chunk < end; chunk += kChunk) {
      const int32_t first = std::max(begin - chunk, 0);
      const int32_t last = std::min(end - chunk, kChunk);
      locate(chunk, first, last, keys, values);
      score_keys<Lanes, Kv, kHeads>(group, keys, first, last, scores);
      float running_factor[kHeads];
      float chunk_factor[kHeads];
      for (int h = 0; h < kHeads; ++h) {
        std::fill(scores[h], scores[h] + first, kNegInf);
        std::fill(scores[h] + last, scores[h] + kChunk, kNegInf);
        Lanes highest = broadcast<Lanes>(kNegInf);
        for (int32_t j = 0; j < kChunk; j += 16) {
          Lanes score = load<Lanes>(scores[h] + j) * group.scale;
          if (group.soft_cap > 0.0f) score = capped(score, group.soft_cap);
          store(scores[h] + j, score);
          highest = max(highest, score);
        }
        const float chunk_max = max_lanes(highest);
        Lanes sum = {};
        for (int32_t j = 0; j < kChunk; j += 16) {
          const Lanes weight = exp(load<Lanes>(scores[h] + j) - chunk_max);
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
        accumulate_values<Lanes, Kv, kHeads, 4>(values, first, last, scores, value_dim, d,
                                                running_factor, chunk_factor, running);
      }
      for (; d < value_dim; d += 16) {
        accumulate_values<Lanes, Kv, kHeads, 1>(values, first, last, scores, value_dim, d,
                                                running_factor, chunk_factor, running);
      }
    }
  }

  // Writes the outputs, with the sinks in the sums; zeros if there was no key.
  [[gnu::always_inline]] void finish(const HeadGroup& group, bool has_keys) {
    for (int h = 0; h < kHeads; ++h) {
      float sum = running_sum[h];
      float factor = 1.0f;
      if (group.sinks != nullptr) {
        const float new_max = std::max(running_max[h], group.sinks[h]);
        factor = exp_one(running_max[h] - new_max);
        sum = sum * factor + exp_one(group.sinks[h] - new_max);
      }
      const float inverse = has_keys ? factor / sum : 0.0f;
      for (int32_t d = 0; d < group.value_dim; ++d) {
        group.y[h * group.value_dim + d] = running[h * kMaxValueDim + d] * inverse;
      }
    }
  }

  alignas(64) float running[kHeads * kMaxValueDim];
  alignas(64) float scores[kHeads][kChunk];
  const Kv* keys[kChunk];
  const Kv* values[kChunk];
  float running_max[kHeads];
  float running_sum[kHeads];
};

// The next heads of a group, for walks of up to kMaxHeadsAtOnce of them: calls walk.operator()<n>
// with the group of the next n heads until there are none left.
template <class Walk>
void for_head_groups(HeadGroup group, int32_t num_heads, const Walk& walk) {
  while (num_heads > 0) {
    const int32_t heads = std::min(num_heads, kMaxHeadsAtOnce);
    switch (heads) {
      case 1:
        walk.template operator()<1>(group);
        break;
      case 2:
        walk.template operator()<2>(group);
        break;
      case 3:
        walk.template operator()<3>(group);
        break;
      case 4:
        walk.template operator()<4>(group);
        break;
    }
    group.q += int64_t{heads} * group.head_dim;
    group.y += int64_t{heads} * group.value_dim;
    if (group.sinks != nullptr) group.sinks += heads;
    num_heads -= heads;
  }
}

// Calls attend_one(item) for every item, in parallel where `num_products` multiplications pay for
// it.
template <class AttendOne>
void for_attention_items(const CpuContext& ctx, int64_t num_items, int64_t num_products,
                         const AttendOne& attend_one) {
  // Fewer multiplications cost less than a fork and join.
  constexpr int64_t kMinParallelWork = 64 << 10;
  if (ctx.num_threads == 1 || num_items == 1 || num_products < kMinParallelWork) {
    for (int64_t item = 0; item < num_items; ++item) attend_one(item);
    return;
  }
  // Later rows of a prompt see more keys, so work is cut into many pieces: no thread then waits
  // long for the last one.
  ctx.for_ranges(num_items, /*pieces_per_thread=*/32, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) attend_one(item);
  });
}

}  // namespace paceline
