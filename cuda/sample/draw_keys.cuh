// SPDX-License-Identifier: Apache-2.0
#pragma once

// The keys of Gumbel-max sampling, whose maximum is drawn, and which ids need none. The key of an
// id is logit + T g, which is T times the key of ops.h: the same order, no overflow for any small
// T, and the logit itself at T = 0. g = -log(-log1p(-u)), all in float.
//
// Two logarithms per id would take longer than loading it, so ids are pruned first, without
// changing the result. Once some id of the row has the key `bound`, another can win only if
//   logit + T g >= bound  <=>  -log1p(-u) <= exp((logit - bound) / T),
// and as u <= -log1p(-u), only if u <= exp(...). The right side gets a slack above all rounding
// errors. And as u >= 2^-33, ids with logit < bound - 33 log(2) T need no random number at all.

#include <cstdint>

#include "base/ordered.h"
#include "base/philox.h"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "ops/ops.h"

namespace paceline::cuda {

// What is drawn where no token is.
inline constexpr int32_t kNoValidLogit = -2;
inline constexpr int32_t kInertRow = -1;

// Candidates are numbers, the better the larger: by key, then by lowest id. Never 0.
__device__ __forceinline__ uint64_t candidate(float key, int32_t id) {
  // Adding zero makes one of the two zeros, which are equal.
  return uint64_t{to_ordered(key + 0.0f)} << 32 | ~static_cast<uint32_t>(id);
}
__device__ __forceinline__ int32_t id_of(uint64_t candidate) {
  return static_cast<int32_t>(~static_cast<uint32_t>(candidate));
}

__device__ __forceinline__ float gumbel(uint32_t bits) {
  return -logf(-log1pf(-uniform_open(bits)));
}

// Moves a value that is equal in all lanes to a uniform register: the warp then computes what
// depends on it, such as the keys of Philox's rounds, once and not in every lane.
__device__ __forceinline__ uint32_t uniform(uint32_t value) {
  return __reduce_max_sync(kAllLanes, value);
}

// One of four registers.
template <class T>
__device__ __forceinline__ T pick(const T (&values)[4], int32_t i) {
  const T low = (i & 1) != 0 ? values[1] : values[0];
  const T high = (i & 1) != 0 ? values[3] : values[2];
  return (i & 2) != 0 ? high : low;
}

// Gives the logits of four ids that cannot be drawn, NaN among them, the value -inf.
template <bool kIsMapped>
__device__ __forceinline__ void drop_undrawable(int32_t first_id, int32_t vocab_limit,
                                                const int32_t* token_map, int32_t token_limit,
                                                float (&four)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    four[i] = fmaxf(four[i], negative_infinity());  // NaN
    if constexpr (kIsMapped) {
      const int32_t id = first_id + i;
      if (id < vocab_limit && token_map[id] >= token_limit) four[i] = negative_infinity();
    }
  }
}

// The position of the token that a row draws.
__device__ __forceinline__ int32_t drawn_position(const DrawParams& p, int32_t pass_row) {
  const int32_t ahead = p.draw_ahead + (p.steps_ahead != nullptr ? *p.steps_ahead : 0);
  return p.positions[pass_row] + ahead;
}

// The key of a row's noise, which is the same in all lanes.
__device__ __forceinline__ NoiseKey noise_key(const DrawParams& p, int32_t seq_slot, uint64_t seed,
                                              int32_t position) {
  const uint32_t salt = p.salts != nullptr ? static_cast<uint32_t>(p.salts[seq_slot]) : 0;
  const uint64_t seed_high = uniform(static_cast<uint32_t>(seed >> 32));
  return {.seed = seed_high << 32 | uniform(static_cast<uint32_t>(seed)),
          .stream = p.stream,
          .position = uniform(static_cast<uint32_t>(position)),
          .salt = uniform(salt)};
}

// The noise of the ids and its scale. `token_map` maps ids to tokens, with kIsMapped only.
template <bool kIsMapped>
struct Noise {
  NoiseKey key;
  const int32_t* token_map;
  float temperature;

  __device__ __forceinline__ uint32_t word_of(int32_t id) const {
    int32_t token = id;
    if constexpr (kIsMapped) token = token_map[id];
    uint32_t words[4];
    philox_words(key, static_cast<uint32_t>(token) / 4, words);
    return pick(words, token % 4);
  }
  // At most the id's key, up to the error that the slack of Pruning covers.
  __device__ __forceinline__ float lower_key(int32_t id, float logit) const {
    const float u = uniform_open(word_of(id));
    return fmaf(temperature, __logf(__fdividef(1.0f - u, u)), logit);
  }
};

// At most u, and no more than 2^-23 below it.
__device__ __forceinline__ float uniform_below(uint32_t bits) {
  return __uint_as_float(bits >> 9 | 0x3f800000u) - 1.0f;
}

// Which ids cannot win against the key `bound`.
class Pruning {
 public:
  static constexpr float kMaxNoise = 33.01f;

  __device__ __forceinline__ Pruning(float bound, float temperature)
      : bound_(bound),
        inverse_(fminf(1.44269504f / temperature, kMaxFloat)),
        slack_(kSlack + kRelativeSlack * fabsf(bound) * inverse_) {}
  // log2 of what u must not exceed. Infinities may make it NaN, which must prune nothing.
  [[nodiscard]] __device__ __forceinline__ float limit_of(float logit) const {
    return (logit - bound_) * inverse_ + slack_;
  }

 private:
  // kSlack exceeds the rounding errors of a key's noise, of the exponent and of the exponential;
  // the rounding of the key itself is relative to it. All in units of log 2.
  static constexpr float kSlack = 1.5e-3f;
  static constexpr float kRelativeSlack = 0x1p-21f;
  static constexpr float kMaxFloat = 0x1.fffffep127f;

  float bound_;
  float inverse_;
  float slack_;
};

// The better of `best` and the best candidate of four ids from `first`, a multiple of four, on.
template <bool kIsMapped>
__device__ __forceinline__ uint64_t best_of_four(const float (&four)[4], int32_t first,
                                                 const Noise<kIsMapped>& noise,
                                                 const Pruning& pruning, uint64_t best) {
  // With these comparisons NaN, which infinities cause, prunes nothing.
  float limit[4];
  bool is_any = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    limit[i] = pruning.limit_of(four[i]);
    is_any |= !(limit[i] < -Pruning::kMaxNoise);
  }
  if (!is_any) return best;
  uint32_t words[4];
  if constexpr (kIsMapped) {
    // Mapped tokens are not consecutive, so each needs its own counter.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = 0xffffffffu;
      if (limit[i] < -Pruning::kMaxNoise || !(four[i] > negative_infinity())) continue;
      words[i] = noise.word_of(first + i);
    }
  } else {
    philox_words(noise.key, static_cast<uint32_t>(first) / 4, words);
  }
  uint32_t survivors = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool is_pruned = uniform_below(words[i]) > exp2_approx(limit[i]);
    const bool is_valid = four[i] > negative_infinity();
    survivors |= is_valid && !is_pruned ? 1u << i : 0u;
  }
  // Survivors are few: one copy of the logarithms, not four, keeps the kernel small.
  for (; survivors != 0; survivors &= survivors - 1) {
    const int32_t i = __ffs(static_cast<int>(survivors)) - 1;
    const float key = fmaf(noise.temperature, gumbel(pick(words, i)), pick(four, i));
    best = max(best, candidate(key, first + i));
  }
  return best;
}

}  // namespace paceline::cuda
