// SPDX-License-Identifier: Apache-2.0
//
// Gumbel-max. The key of an id is T times what ops.h says, logit + T g: the same order, no
// overflow however small T is, and at T = 0 the logit itself. g = -log(-log1p(-u)), all in float.
//
// A row is cut into pieces of kIdsPerBlock ids, a block each, so that even one row keeps a good
// part of the machine busy. A block leaves its winner in the workspace; the last block of a row to
// arrive picks the best of them. One kernel, because a draw sits between every two draft steps and
// a second launch costs more than the arrival. That the split never shows: the winner is a maximum
// with ties to the lowest id, which has no order; the sums behind a probability are cut at fixed
// ids and added in a fixed order.
//
// Two logarithms an id would take longer than loading it, so ids are pruned first, without changing
// the result. Once some id of the row has the key `bound`, another can win only if
//   logit + T g >= bound  <=>  -log1p(-u) <= exp((logit - bound) / T),
// and as u <= -log1p(-u), only if u <= exp(...). The right side gets a slack above all rounding
// errors; ids that pass have their key computed. And as u >= 2^-33, ids with
// logit < bound - 33 log(2) T need not even be given a random number.

#include <algorithm>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "ops/ops.h"
#include "sample/philox.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kNoValidLogit = -2;
constexpr int32_t kInertRow = -1;

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;
constexpr int32_t kQuads = 4;  // of a thread: ids that share a counter and are loaded at once
static_assert(kQuads == 4);    // sample() picks one of four
constexpr int32_t kIdsPerRound = kThreads * 4;
constexpr int32_t kIdsPerBlock = kQuads * kIdsPerRound;

constexpr int32_t kMaxGridRows = 65535;

// What a block knows of its ids.
struct __align__(16) Partial {
  uint64_t winner;    // see candidate(); 0: none
  float max;          // of the logits; -inf: none valid
  float sum_of_exps;  // of logit - max; with `probabilities` only
};

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

// One of four registers.
template <class T>
__device__ __forceinline__ T pick(const T (&values)[4], int32_t i) {
  const T low = (i & 1) != 0 ? values[1] : values[0];
  const T high = (i & 1) != 0 ? values[3] : values[2];
  return (i & 2) != 0 ? high : low;
}

// A thread's logits and the ids they belong to; what is not drawable is -inf.
struct Logits {
  float values[kQuads][4];
  int32_t first_id;

  __device__ __forceinline__ int32_t id(int quad, int i) const {
    return first_id + quad * kIdsPerRound + i;
  }
};

template <bool kIsVector, bool kIsMapped>
__device__ __forceinline__ void load_logits(const DrawParams& p, const float* row,
                                            const int32_t* token_map, Logits& logits) {
  const int32_t vocab_limit = p.vocab_limit;
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    const int32_t first = logits.id(quad, 0);
    float (&values)[4] = logits.values[quad];
    if (kIsVector && first + 4 <= vocab_limit) {
      load_vector(row + first, values);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = first + i < vocab_limit ? row[first + i] : negative_infinity();
      }
    }
  }
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& value = logits.values[quad][i];
      value = fmaxf(value, negative_infinity());  // NaN
      if constexpr (kIsMapped) {
        const int32_t id = logits.id(quad, i);
        if (id < vocab_limit && token_map[id] >= p.token_limit) value = negative_infinity();
      }
    }
  }
}

// Of the thread's ids, the first with the highest logit, under that logit; 0 when none is valid.
__device__ __forceinline__ uint64_t highest_logit(const Logits& logits) {
  float highest = negative_infinity();
  int32_t id = -1;
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (logits.values[quad][i] > highest) {
        highest = logits.values[quad][i];
        id = logits.id(quad, i);
      }
    }
  }
  return id < 0 ? 0 : candidate(highest, id);
}

// The best candidate of the thread, or one that cannot win against another of its warp.
// `highest_id` has the thread's highest logit; -1: no logit is valid. Called by whole warps.
// `token_map` gives the tokens whose noise ids have; with kIsMapped only.
template <bool kIsMapped>
__device__ __forceinline__ uint64_t sample(const Logits& logits, const NoiseKey& noise,
                                           const int32_t* token_map, float temperature,
                                           float highest, int32_t highest_id) {
  // Above the rounding errors of a key's noise, of the exponent and of the exponential; a key's own
  // rounding is relative to it.
  constexpr float kSlack = 1e-3f;
  constexpr float kRelativeSlack = 0x1p-21f;
  constexpr float kMaxNoise = 22.875f;  // > 33 log 2
  constexpr float kMaxFloat = 0x1.fffffep127f;
  uint64_t best = 0;
  if (highest_id >= 0) {
    int32_t token = highest_id;
    if constexpr (kIsMapped) token = token_map[highest_id];
    uint32_t words[4];
    philox_words(noise, static_cast<uint32_t>(token) / 4, words);
    best = candidate(fmaf(temperature, gumbel(pick(words, token % 4)), highest), highest_id);
  }
  const float inverse = fminf(1.0f / temperature, kMaxFloat);
  // Not unrolled: the kernel stays small, and a quad waits for the bound of the one before anyway.
#pragma unroll 1
  for (int32_t quad = 0; quad < kQuads; ++quad) {
    const uint32_t best_of_warp = __reduce_max_sync(kAllLanes, static_cast<uint32_t>(best >> 32));
    if (best_of_warp == 0) return 0;  // no valid logit in the warp
    const float bound = from_ordered(best_of_warp);
    const float slack = kSlack + kRelativeSlack * fabsf(bound) * inverse;
    // Comparisons are such that NaN, from infinities, prunes nothing.
    float values[4];
    float limit[4];  // log of what u must not exceed
    bool is_any = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] =
          pick({logits.values[0][i], logits.values[1][i], logits.values[2][i], logits.values[3][i]},
               quad);
      limit[i] = (values[i] - bound) * inverse + slack;
      is_any |= !(limit[i] < -kMaxNoise);
    }
    if (!is_any) continue;
    uint32_t words[4];
    if constexpr (kIsMapped) {
      // Tokens lie anywhere, so each takes a counter of its own.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = 0xffffffffu;
        if (limit[i] < -kMaxNoise || !(values[i] > negative_infinity())) continue;
        const int32_t token = token_map[logits.id(quad, i)];
        uint32_t of_token[4];
        philox_words(noise, static_cast<uint32_t>(token) / 4, of_token);
        words[i] = pick(of_token, token % 4);
      }
    } else {
      philox_words(noise, static_cast<uint32_t>(logits.id(quad, 0)) / 4, words);
    }
    uint32_t survivors = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool is_pruned = uniform_open(words[i]) > __expf(limit[i]);
      const bool is_valid = values[i] > negative_infinity();
      survivors |= is_valid && !is_pruned ? 1u << i : 0u;
    }
    // They are few: one copy of the logarithms, not four, keeps the kernel small.
    while (survivors != 0) {
      const int32_t i = __ffs(static_cast<int>(survivors)) - 1;
      survivors &= survivors - 1;
      const float key = fmaf(temperature, gumbel(pick(words, i)), pick(values, i));
      best = max(best, candidate(key, logits.id(quad, i)));
    }
  }
  return best;
}

template <bool kIsVector, bool kWantsProbability, bool kIsMapped>
__global__ void __launch_bounds__(kThreads)
    draw_kernel(const __grid_constant__ DrawParams p, const int32_t first_row,
                Partial* const partials, int32_t* const arrivals) {
  __shared__ uint64_t winners[kWarps];
  __shared__ uint32_t maxima[kWarps];
  __shared__ __align__(16) float sums[kWarps];
  let_successor_start();
  wait_for_predecessor();
  const int32_t row = first_row + static_cast<int32_t>(blockIdx.y);
  if (row >= *p.num_rows) return;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / 32;
  const int32_t lane = thread % 32;
  const int32_t num_pieces = static_cast<int32_t>(gridDim.x);
  const int32_t piece = static_cast<int32_t>(blockIdx.x);
  const int32_t pass_row = p.row_index[row];
  const int32_t source = p.logit_rows != nullptr ? p.logit_rows[row] : row;
  if (source < 0) {  // the same for all blocks of the row: none arrives
    if (piece == 0 && thread == 0) {
      p.tokens[row] = kInertRow;
      if constexpr (kWantsProbability) p.probabilities[row] = 0.0f;
    }
    return;
  }
  const float* const row_logits = p.logits + source * p.logits_stride;
  const int32_t* const token_map = kIsMapped ? p.token_map + source * p.token_map_stride : nullptr;

  Logits logits;
  logits.first_id = piece * kIdsPerBlock + thread * 4;
  load_logits<kIsVector, kIsMapped>(p, row_logits, token_map, logits);
  const int32_t slot = p.seq_slot[pass_row];
  const int32_t ahead = p.draw_ahead + (p.steps_ahead != nullptr ? *p.steps_ahead : 0);
  const int32_t position = p.positions[pass_row] + ahead;
  if (slot < 0) {  // the same for all blocks of the row: none arrives
    if (piece == 0 && thread == 0) {
      p.tokens[row] = kInertRow;
      if constexpr (kWantsProbability) p.probabilities[row] = 0.0f;
    }
    return;
  }
  const float temperature = p.temperatures != nullptr ? p.temperatures[slot] : 0.0f;
  const uint64_t seed = p.seeds[slot];

  const uint64_t highest = highest_logit(logits);
  uint64_t winner = highest;
  if (temperature > 0.0f) {
    const NoiseKey noise = {.seed = seed,
                            .stream = p.stream,
                            .position = static_cast<uint32_t>(position),
                            .salt = p.salts != nullptr ? static_cast<uint32_t>(p.salts[slot]) : 0};
    winner = sample<kIsMapped>(logits, noise, token_map, temperature,
                               from_ordered(static_cast<uint32_t>(highest >> 32)),
                               highest == 0 ? -1 : id_of(highest));
  }
  winner = warp_max(winner);
  if (lane == 0) winners[warp] = winner;
  if constexpr (kWantsProbability) {
    const uint32_t max_of_warp = __reduce_max_sync(kAllLanes, static_cast<uint32_t>(highest >> 32));
    if (lane == 0) maxima[warp] = max_of_warp;
  }
  __syncthreads();

  float max_logit = negative_infinity();
  float sum_of_exps = 0.0f;
  if constexpr (kWantsProbability) {
    uint32_t highest_of_block = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) highest_of_block = max(highest_of_block, maxima[i]);
    if (highest_of_block != 0) {
      max_logit = from_ordered(highest_of_block);
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum_of_exps += expf(logits.values[quad][i] - max_logit);
      }
    }
    sum_of_exps = block_sum(sum_of_exps, sums);
  }
  if (warp != 0) return;

  // The first warp ends the block, and that of the last block to arrive the row.
  winner = warp_max(lane < kWarps ? winners[lane] : 0);
  if (num_pieces > 1) {
    Partial* const row_partials = partials + int64_t{blockIdx.y} * num_pieces;
    int32_t num_before = 0;
    if (lane == 0) {
      row_partials[piece] = {.winner = winner, .max = max_logit, .sum_of_exps = sum_of_exps};
      __threadfence();
      num_before = atomicAdd(&arrivals[blockIdx.y], 1);
      __threadfence();
    }
    if (__shfl_sync(kAllLanes, num_before, 0) != num_pieces - 1) return;
    if (lane == 0) arrivals[blockIdx.y] = 0;
    winner = 0;
    max_logit = negative_infinity();
    for (int32_t i = lane; i < num_pieces; i += 32) {
      winner = max(winner, __ldcg(&row_partials[i].winner));
      if constexpr (kWantsProbability) max_logit = fmaxf(max_logit, __ldcg(&row_partials[i].max));
    }
    winner = warp_max(winner);
    if constexpr (kWantsProbability) {
      max_logit = from_ordered(__reduce_max_sync(kAllLanes, to_ordered(max_logit)));
      // Pieces lane, lane + 32, ... in turn, then the lanes: an order of the pieces alone.
      sum_of_exps = 0.0f;
      for (int32_t i = lane; i < num_pieces; i += 32) {
        sum_of_exps +=
            __ldcg(&row_partials[i].sum_of_exps) * expf(__ldcg(&row_partials[i].max) - max_logit);
      }
      sum_of_exps = warp_sum(sum_of_exps);
    }
  }
  if (lane != 0) return;
  int32_t token = winner == 0 ? kNoValidLogit : id_of(winner);
  if constexpr (kIsMapped) {
    if (winner != 0) token = token_map[token];
  }
  p.tokens[row] = token;
  if constexpr (kWantsProbability) {
    p.probabilities[row] =
        winner == 0 ? 0.0f : expf(row_logits[id_of(winner)] - max_logit) / sum_of_exps;
  }
}

template <bool kIsMapped>
auto kernel_of(const DrawParams& p) {
  const bool is_vector = p.logits_stride % 4 == 0 && is_vector_aligned(p.logits);
  if (p.probabilities != nullptr) {
    return is_vector ? draw_kernel<true, true, kIsMapped> : draw_kernel<false, true, kIsMapped>;
  }
  return is_vector ? draw_kernel<true, false, kIsMapped> : draw_kernel<false, false, kIsMapped>;
}

}  // namespace
}  // namespace cuda

void draw(CudaContext& ctx, const DrawParams& p) {
  using namespace cuda;
  const int32_t num_pieces = std::max((p.vocab_limit + kIdsPerBlock - 1) / kIdsPerBlock, 1);
  // As many rows a launch as there is room for them to meet; nearly always all.
  int64_t rows_per_launch = kMaxGridRows;
  auto* const partials = reinterpret_cast<Partial*>(ctx.workspace);
  if (num_pieces > 1) {
    const int64_t row_bytes = num_pieces * int64_t{sizeof(Partial)};
    rows_per_launch =
        std::min({rows_per_launch, int64_t{ctx.num_counters}, ctx.workspace_bytes / row_bytes});
    PACELINE_CHECK(rows_per_launch > 0, "no room to draw one of ", p.vocab_limit, " ids");
  }
  for (int64_t first_row = 0; first_row < p.max_rows; first_row += rows_per_launch) {
    const int64_t num_rows = std::min(rows_per_launch, p.max_rows - first_row);
    launch(ctx, "draw", p.token_map != nullptr ? kernel_of<true>(p) : kernel_of<false>(p),
           dim3(static_cast<unsigned>(num_pieces), static_cast<unsigned>(num_rows)), dim3(kThreads),
           0, p, static_cast<int32_t>(first_row), partials, ctx.counters);
  }
}

}  // namespace paceline
