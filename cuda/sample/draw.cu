// SPDX-License-Identifier: Apache-2.0
//
// Gumbel-max sampling, by the keys of draw_keys.cuh.
//
// A row is divided into pieces of a few thousand ids, one block each, so that even one row occupies
// a good part of the GPU. A block stores its winner in the workspace; the last block of a row to
// arrive picks the best of them. All of this is one kernel, because a draw runs between any two
// draft steps and a second launch costs more than the arrival. The split does not change results:
// the winner is a maximum with ties to the lowest id, in any order; the sums of a probability are
// divided at fixed ids and added in a fixed order.
//
// Where ranks share the ids, the warp that finishes a row sends the winner of the rank's ids to the
// others in a packet (gather/exchange.cuh), and picks the best of all. It waits for them while
// other rows are drawn, so a launch has few enough rows that those that wait leave room for blocks
// of the rest.
//
// The bound that prunes ids is a lower bound of the best key among each thread's id with the
// highest logit: as -log1p(-u) <= u / (1 - u), a key is at least logit + T log((1 - u) / u), which
// takes one logarithm and no exact rounding.

#include <algorithm>
#include <type_traits>

#include "base/philox.h"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "gather/exchange.cuh"
#include "ops/gather.h"
#include "ops/ops.h"
#include "sample/draw_keys.cuh"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;
constexpr int32_t kIdsPerCounter = 4;  // of noise
constexpr int32_t kIdsPerRound = kThreads * kIdsPerCounter;
constexpr int32_t kRounds = 4;      // of a block, at least
constexpr int32_t kManyRounds = 8;  // with enough rows

constexpr int32_t kMaxGridRows = 65535;

// Of a draw whose ids ranks share; NoExchange of others.
struct WinnerExchange {
  LinearRange ids;    // of the rank
  GatherArgs gather;  // a packet for each rank and row
};
struct NoExchange {};

// The result of a block's ids.
struct __align__(16) Partial {
  uint64_t winner;    // see candidate(); 0: none
  float max;          // of the logits; -inf: none valid
  float sum_of_exps;  // of logit - max; with `probabilities` only
};

// The logits of a row. Each pass loads them again, from the L1 cache: in registers they would leave
// room for fewer warps, which costs more.
template <bool kIsVector, bool kIsMapped, bool kIsShared>
struct RowLogits {
  const float* values;
  const int32_t* token_map;  // with kIsMapped only
  int32_t first;             // ids [first, vocab_limit) may be drawn; 0 unless kIsShared
  int32_t vocab_limit;
  int32_t token_limit;

  // Loads the logits of four ids; -inf where an id cannot be drawn.
  __device__ __forceinline__ void load(int32_t first_id, float (&four)[4]) const {
    if (kIsVector && (!kIsShared || first_id >= first) && first_id + 4 <= vocab_limit) {
      load_vector(values + first_id, four);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool is_own = (!kIsShared || first_id + i >= first) && first_id + i < vocab_limit;
        four[i] = is_own ? values[first_id + i] : negative_infinity();
      }
    }
    drop_undrawable<kIsMapped>(first_id, vocab_limit, token_map, token_limit, four);
  }

  // The candidate with the highest logit, and that logit as its key, of the thread's ids from
  // `first_id` on; the first of equals. 0 when no logit is valid.
  __device__ __forceinline__ uint64_t highest(int32_t first_id, int32_t num_rounds) const {
    float highest = negative_infinity();
    int32_t id = -1;
#pragma unroll 4
    for (int32_t round = 0; round < num_rounds; ++round) {
      const int32_t first = first_id + round * kIdsPerRound;
      float four[4];
      load(first, four);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (four[i] > highest) {
          highest = four[i];
          id = first + i;
        }
      }
    }
    return id < 0 ? 0 : candidate(highest, id);
  }
};

// The best candidate of the thread's ids, or one that loses against another of its block. `highest`
// is the result of RowLogits::highest. All threads of a block call it; `bounds` is shared memory.
template <class Logits, bool kIsMapped>
__device__ __forceinline__ uint64_t sample(const Logits& logits, int32_t first_id,
                                           int32_t num_rounds, const Noise<kIsMapped>& noise,
                                           uint64_t highest, uint32_t (&bounds)[kWarps]) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  uint32_t own_bound = 0;
  if (highest != 0) {
    const float logit = from_ordered(static_cast<uint32_t>(highest >> 32));
    own_bound = to_ordered(noise.lower_key(id_of(highest), logit));
  }
  const uint32_t bound_of_warp = __reduce_max_sync(kAllLanes, own_bound);
  if (thread % 32 == 0) bounds[thread / 32] = bound_of_warp;
  __syncthreads();
  uint32_t bound_of_block = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) bound_of_block = max(bound_of_block, bounds[i]);
  if (bound_of_block == 0) return 0;  // no valid logit in the block
  const Pruning pruning(from_ordered(bound_of_block), noise.temperature);
  uint64_t best = 0;
#pragma unroll 1
  for (int32_t round = 0; round < num_rounds; ++round) {
    const int32_t first = first_id + round * kIdsPerRound;
    float four[4];
    logits.load(first, four);
    best = best_of_four(four, first, noise, pruning, best);
  }
  return best;
}

// The rows of this launch, of the `num_left` that it and those behind it have.
__device__ __forceinline__ int32_t rows_of_launch(int32_t num_left) {
  return min(num_left, static_cast<int32_t>(gridDim.y));
}

// The best of the winners of all ranks, in all lanes of the warp that finishes a row of `num_rows`.
// `count`: of the exchanges before this one, in the first lane.
__device__ __forceinline__ uint64_t best_of_ranks(const GatherArgs& a, uint64_t count,
                                                  int32_t num_rows, int32_t vocab_limit,
                                                  uint64_t winner) {
  const auto row = static_cast<int32_t>(blockIdx.y);
  const auto lane = static_cast<int32_t>(threadIdx.x);
  const uint64_t number = __shfl_sync(kAllLanes, count, 0) + 1;
  if (lane == 0) count_exchange(a, number, static_cast<uint32_t>(num_rows));
  if (lane < a.num_ranks && lane != a.rank) {
    store_packet(packet_place(a, number, lane, row, a.rank), {winner, number});
    uint64_t received[1];
    receive_packets(a, number, lane, row, lane, received);
    winner = max(winner, received[0]);
  }
  winner = warp_max(winner);
  // If the group has failed, what was received may be anything.
  const int32_t id = id_of(winner);
  return id >= 0 && id < vocab_limit ? winner : 0;
}

template <bool kIsVector, bool kWantsProbability, bool kIsMapped, class Exchange>
__global__ void __launch_bounds__(kThreads)
    draw_kernel(const __grid_constant__ DrawParams p, const int32_t first_row,
                const int32_t num_rounds, Partial* const partials, int32_t* const arrivals,
                const __grid_constant__ Exchange exchange) {
  constexpr bool kIsShared = std::is_same_v<Exchange, WinnerExchange>;
  __shared__ uint32_t bounds[kWarps];
  __shared__ uint64_t winners[kWarps];
  __shared__ uint32_t maxima[kWarps];
  __shared__ __align__(16) float sums[kWarps];
  let_successor_start();
  wait_for_predecessor();
  uint64_t num_exchanges = 0;
  if constexpr (kIsShared) num_exchanges = load_exchange_count(exchange.gather);
  const int32_t num_rows = *p.num_rows;
  const int32_t row = first_row + static_cast<int32_t>(blockIdx.y);
  if (row >= num_rows) return;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / 32;
  const int32_t lane = thread % 32;
  const int32_t num_pieces = static_cast<int32_t>(gridDim.x);
  const int32_t piece = static_cast<int32_t>(blockIdx.x);
  const int32_t pass_row = p.row_index[row];
  const int32_t source = p.logit_rows != nullptr ? p.logit_rows[row] : row;
  if (source < 0) {  // uniform over the blocks of the row, so none arrives
    if (piece == 0 && thread == 0) {
      p.tokens[row] = kInertRow;
      if constexpr (kWantsProbability) p.probabilities[row] = 0.0f;
    }
    return;
  }
  const float* const row_logits = p.logits + source * p.logits_stride;
  const int32_t* const token_map = kIsMapped ? p.token_map + source * p.token_map_stride : nullptr;

  int32_t first_id = piece * num_rounds * kIdsPerRound + thread * kIdsPerCounter;
  RowLogits<kIsVector, kIsMapped, kIsShared> logits = {.values = row_logits,
                                                       .token_map = token_map,
                                                       .first = 0,
                                                       .vocab_limit = p.vocab_limit,
                                                       .token_limit = p.token_limit};
  if constexpr (kIsShared) {
    const LinearRange ids = exchange.ids;
    first_id += ids.first - ids.first % kIdsPerCounter;
    logits.first = ids.first;
    logits.vocab_limit = ids.first + ids.count;
  }
  const uint64_t highest = logits.highest(first_id, num_rounds);
  const int32_t seq_slot = p.seq_slot[pass_row];
  const int32_t position = drawn_position(p, pass_row);
  if (seq_slot < 0) {  // uniform over the blocks of the row, so none arrives
    if constexpr (kIsShared) {
      // A rank that has received an exchange knows that the others have read the one before.
      if (piece == 0 && warp == 0) {
        best_of_ranks(exchange.gather, num_exchanges, rows_of_launch(num_rows - first_row),
                      p.vocab_limit, 0);
      }
    }
    if (piece == 0 && thread == 0) {
      p.tokens[row] = kInertRow;
      if constexpr (kWantsProbability) p.probabilities[row] = 0.0f;
    }
    return;
  }
  const float temperature = p.temperatures != nullptr ? p.temperatures[seq_slot] : 0.0f;
  const uint64_t seed = p.seeds[seq_slot];

  uint64_t winner = highest;
  if (temperature > 0.0f) {
    const Noise<kIsMapped> noise = {.key = noise_key(p, seq_slot, seed, position),
                                    .token_map = token_map,
                                    .temperature = temperature};
    winner = sample(logits, first_id, num_rounds, noise, highest, bounds);
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
      for (int32_t round = 0; round < kRounds; ++round) {
        float four[4];
        logits.load(first_id + round * kIdsPerRound, four);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum_of_exps += expf(four[i] - max_logit);
      }
    }
    sum_of_exps = block_sum(sum_of_exps, sums);
  }
  if (warp != 0) return;

  // The first warp finishes the block, and that of the last block to arrive finishes the row.
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
    __syncwarp();  // makes the partials that lane 0 saw arrive visible to all lanes
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
      // Pieces lane, lane + 32, ... in turn, then the lanes: the order depends on the pieces only.
      sum_of_exps = 0.0f;
      for (int32_t i = lane; i < num_pieces; i += 32) {
        sum_of_exps +=
            __ldcg(&row_partials[i].sum_of_exps) * expf(__ldcg(&row_partials[i].max) - max_logit);
      }
      sum_of_exps = warp_sum(sum_of_exps);
    }
  }
  if constexpr (kIsShared) {
    winner = best_of_ranks(exchange.gather, num_exchanges, rows_of_launch(num_rows - first_row),
                           p.vocab_limit, winner);
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

template <bool kIsMapped, class Exchange>
auto kernel_of(const DrawParams& p) {
  const bool is_vector = p.logits_stride % 4 == 0 && is_vector_aligned(p.logits);
  if constexpr (std::is_same_v<Exchange, NoExchange>) {
    if (p.probabilities != nullptr) {
      return is_vector ? draw_kernel<true, true, kIsMapped, Exchange>
                       : draw_kernel<false, true, kIsMapped, Exchange>;
    }
  }
  return is_vector ? draw_kernel<true, false, kIsMapped, Exchange>
                   : draw_kernel<false, false, kIsMapped, Exchange>;
}

// Draws from `num_ids` ids of each row, at most `most_rows` in a launch.
template <class Exchange>
void launch_draws(CudaContext& ctx, const char* name, const DrawParams& p, int32_t num_ids,
                  int64_t most_rows, const Exchange& exchange) {
  // More ids per block amortize a block's fixed work, as long as the GPU has enough blocks. With
  // probabilities the pieces are fixed, because the sums are divided there.
  constexpr int32_t kManyBlocks = 3000;
  const auto pieces_of = [&](int32_t num_rounds) {
    const int32_t ids = num_rounds * kIdsPerRound;
    return std::max((num_ids + ids - 1) / ids, 1);
  };
  const bool has_many =
      p.probabilities == nullptr && int64_t{p.max_rows} * pieces_of(kManyRounds) >= kManyBlocks;
  const int32_t num_rounds = has_many ? kManyRounds : kRounds;
  const int32_t num_pieces = pieces_of(num_rounds);
  // Rows per launch are limited by the room for their partials; nearly always it is enough for all.
  int64_t rows_per_launch = most_rows;
  auto* const partials = reinterpret_cast<Partial*>(ctx.workspace);
  if (num_pieces > 1) {
    const int64_t row_bytes = num_pieces * int64_t{sizeof(Partial)};
    rows_per_launch =
        std::min({rows_per_launch, int64_t{ctx.num_counters}, ctx.workspace_bytes / row_bytes});
    PACELINE_CHECK(rows_per_launch > 0, "no room to draw one of ", num_ids, " ids");
  }
  const auto kernel =
      p.token_map != nullptr ? kernel_of<true, Exchange>(p) : kernel_of<false, Exchange>(p);
  for (int64_t first_row = 0; first_row < p.max_rows; first_row += rows_per_launch) {
    const int64_t num_rows = std::min(rows_per_launch, p.max_rows - first_row);
    launch(ctx, name, kernel,
           dim3(static_cast<unsigned>(num_pieces), static_cast<unsigned>(num_rows)), dim3(kThreads),
           0, p, static_cast<int32_t>(first_row), num_rounds, partials, ctx.counters, exchange);
  }
}

}  // namespace
}  // namespace cuda

void draw(CudaContext& ctx, const DrawParams& p) {
  using namespace cuda;
  launch_draws(ctx, "draw", p, p.vocab_limit, kMaxGridRows, NoExchange{});
}

void gathered_draw(CudaContext& ctx, const GatheredDrawParams& p) {
  using namespace cuda;
  check_gathered(p);
  WinnerExchange exchange = {.ids = p.own_ids(), .gather = {}};
  GatherArgs& gather = exchange.gather;
  gather.rank = p.ranks.rank;
  gather.num_ranks = p.columns.num_ranks;
  for (int32_t rank = 0; rank <= gather.num_ranks; ++rank) gather.first_packet[rank] = rank;
  gather.exchange = p.ranks.group->gpu_exchange();
  const int32_t num_ids = exchange.ids.count + exchange.ids.first % kIdsPerCounter;
  // Ranks that share a GPU have no early starts. Multiprocessors with a block that waits have no
  // room for blocks of another rank that need most of the shared memory, so all ranks together may
  // not occupy all of them, as in gather_columns.
  const int32_t half = std::max(ctx.num_sms / 2, 1);
  const int32_t most_rows = ctx.has_early_starts ? half : std::min(half, kMaxPacketBlocks);
  launch_draws(ctx, "gathered_draw", p.draw, num_ids, most_rows, exchange);
}

}  // namespace paceline
