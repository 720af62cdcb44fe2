// SPDX-License-Identifier: Apache-2.0

// A draft of a Markov chain by one kernel: logits + W2 f, and the draw from them.
//
// A block has 128 ids, a warp 16 of them, for all rows in turn. The product takes as long as W2
// takes to arrive, so a block requests its whole tile of W2 before its predecessor has ended, and
// several blocks share a multiprocessor. W2 is the 16 row operand of `mma.sync`, eight rows of f
// are the other one. Each output is the sum that gemm_kernel.cuh computes: K in steps of 16,
// ascending, in one float32 accumulator; so the bits depend neither on the number of rows nor on
// whether the kernel draws.
//
// The products pass through shared memory, after which a warp has the 128 ids of a row, four in a
// lane, as the counters of the noise want them. The keys are those of `draw`. The best candidate of
// a row so far lies in two of the context's counters, as a maximum that the blocks raise; it also
// is the bound that prunes ids. The last block to arrive stores the tokens.

#include <cuda_bf16.h>

#include <algorithm>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "ops/markov.h"
#include "sample/draw_keys.cuh"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kWarps = 8;
constexpr int32_t kThreads = 32 * kWarps;
constexpr int32_t kIds = 16 * kWarps;  // of a block
static_assert(kIds == 4 * 32, "a lane has four ids of a row");
constexpr int32_t kRowsOfGroup = 8;    // columns of a product
constexpr int32_t kPiece = 8;          // elements that are copied at once
constexpr int32_t kChunkUnit = 64;     // eight pieces, whose order in memory depends on the row
constexpr int32_t kMaxChunk = 512;     // columns of W2 in shared memory
constexpr size_t kReservedBytes = 64;  // of static shared memory, at most
constexpr int32_t kPitch = kIds + 4;   // of products: quarters of a warp store to different banks

using Winner = unsigned long long;  // the best candidate of a row, as atomicMax takes it

// counters[0] counts the blocks that have arrived; winners lie behind it.
constexpr int32_t kFirstWinner = 2;
constexpr int32_t kCountersOfWinner = 2;

struct Args {
  MarkovDraftParams p;
  int32_t first_row;  // of this launch
  int32_t end_row;
  int32_t chunk;     // columns in shared memory, a multiple of kChunkUnit
  bool has_pieces;   // rows of W2 and f consist of whole aligned pieces
  bool has_vectors;  // four logits are an aligned vector
  int32_t* counters;

  [[nodiscard]] __device__ __forceinline__ Winner* winner_of(int32_t row) const {
    return reinterpret_cast<Winner*>(counters + kFirstWinner) + (row - first_row);
  }
};

// f of a row; null: zeros.
template <class T>
__device__ __forceinline__ const T* factors_of(const MarkovDraftParams& p, int32_t row) {
  if (p.factors != nullptr) return static_cast<const T*>(p.factors) + int64_t{row} * p.weight.k;
  const int32_t token = p.previous[row];
  if (token < 0 || token >= p.vocab_size) return nullptr;
  return static_cast<const T*>(p.table) + int64_t{token} * p.weight.k;
}

// Rows of a chunk of columns in shared memory. Eight rows have a piece in different banks.
struct Tile {
  uint32_t address;
  uint32_t row_bytes;

  [[nodiscard]] __device__ __forceinline__ uint32_t at(int32_t row, int32_t piece) const {
    return address + static_cast<uint32_t>(row) * row_bytes +
           static_cast<uint32_t>((piece ^ (row % 8)) * 16);
  }
};

// Requests columns [first, first + chunk) of a row for the warp; zeros beyond its k elements, and
// if `from` is null. `constant`: any valid address.
__device__ __forceinline__ void request_row(const Args& args, const Tile& to, int32_t row,
                                            const __nv_bfloat16* from, int32_t first,
                                            const void* constant) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  for (int32_t piece = lane; piece < args.chunk / kPiece; piece += 32) {
    const int32_t column = first + piece * kPiece;
    const int32_t count = from == nullptr ? 0 : args.p.weight.k - column;
    if (args.has_pieces) {
      cp_async_16(to.at(row, piece), count > 0 ? from + column : constant, count > 0);
      continue;
    }
    uint32_t words[4] = {};
#pragma unroll
    for (int32_t i = 0; i < kPiece; ++i) {
      if (i >= count) break;
      const auto bits = reinterpret_cast<const uint16_t*>(from)[column + i];
      words[i / 2] |= uint32_t{bits} << (16 * (i % 2));
    }
    store_shared_16(to.at(row, piece), words);
  }
}

// Requests the columns from `first` on of the block's ids. Reads constants only.
__device__ __forceinline__ void request_weights(const Args& args, const Tile& to, int32_t first) {
  const WeightMatrix& w = args.p.weight;
  const auto* const data = reinterpret_cast<const __nv_bfloat16*>(w.data);
  const int32_t first_id = static_cast<int32_t>(blockIdx.x) * kIds;
#pragma unroll 4
  for (int32_t i = static_cast<int32_t>(threadIdx.x) / 32; i < kIds; i += kWarps) {
    const int32_t id = first_id + i;
    request_row(args, to, i, id < w.n ? data + int64_t{id} * w.k : nullptr, first, data);
  }
}

// The sums of a group of eight rows and the warp's 16 ids, as mma_16x8x16 has them.
using GroupSums = float[4];

// Adds the products of the columns [first, first + chunk).
template <int kGroups>
__device__ __forceinline__ void multiply_chunk(const Args& args, const Tile& weights,
                                               const Tile& factors, int32_t first,
                                               GroupSums (&sums)[kGroups]) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t own_id = static_cast<int32_t>(threadIdx.x) / 32 * 16 + lane % 16;
  const int32_t num_columns = min(args.chunk, args.p.weight.k - first);
#pragma unroll 2
  for (int32_t column = 0; column < num_columns; column += 32) {
    const int32_t piece = column / kPiece;
    uint32_t a[2][4];
    ldmatrix_x4(a[0], weights.at(own_id, piece + lane / 16));
    ldmatrix_x4(a[1], weights.at(own_id, piece + 2 + lane / 16));
#pragma unroll
    for (int32_t g = 0; g < kGroups; ++g) {
      uint32_t b[4];
      ldmatrix_x4(b, factors.at(g * kRowsOfGroup + lane % 8, piece + lane / 8));
      mma_16x8x16(sums[g], a[0], b[0], b[1]);
      mma_16x8x16(sums[g], a[1], b[2], b[3]);
    }
  }
}

// Computes the products of the rows from `row` on into `products`. `is_resident`: all of W2's tile
// is, or has been requested to be, in shared memory.
template <int kGroups>
__device__ __forceinline__ void make_products(const Args& args, int32_t row, int32_t end_row,
                                              bool is_resident, const Tile& weights,
                                              const Tile& factors, float* products) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t rank = args.p.weight.k;
  GroupSums sums[kGroups] = {};
  for (int32_t first = 0; first < rank; first += args.chunk) {
    if (first > 0) __syncthreads();  // the chunk before has been read
    if (first > 0 || !is_resident) request_weights(args, weights, first);
    for (int32_t i = thread / 32; i < kGroups * kRowsOfGroup; i += kWarps) {
      const auto* const from =
          row + i < end_row ? factors_of<__nv_bfloat16>(args.p, row + i) : nullptr;
      request_row(args, factors, i, from, first, args.p.weight.data);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    multiply_chunk<kGroups>(args, weights, factors, first, sums);
  }
  const int32_t lane = thread % 32;
#pragma unroll
  for (int32_t g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int32_t e = 0; e < 4; ++e) {
      const int32_t of_row = g * kRowsOfGroup + lane % 4 * 2 + e % 2;
      products[of_row * kPitch + thread / 32 * 16 + lane / 4 + e / 2 * 8] = sums[g][e];
    }
  }
}

// The same in float32, for tests: a plain loop over K, ascending.
template <int kGroups>
__device__ __forceinline__ void make_float_products(const Args& args, int32_t row, int32_t end_row,
                                                    float* products) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const WeightMatrix& w = args.p.weight;
  const int32_t id = static_cast<int32_t>(blockIdx.x) * kIds + thread % kIds;
  const float* const of_id = reinterpret_cast<const float*>(w.data) + int64_t{id} * w.k;
  for (int32_t i = thread / kIds; i < kGroups * kRowsOfGroup; i += kThreads / kIds) {
    const float* const f = row + i < end_row ? factors_of<float>(args.p, row + i) : nullptr;
    float sum = 0.0f;
    for (int32_t k = 0; k < w.k && f != nullptr && id < w.n; ++k) {
      sum = __fmaf_rn(f[k], of_id[k], sum);
    }
    products[i * kPitch + thread % kIds] = sum;
  }
}

// The candidate of a row's ids in the warp, or one that loses. four: the lane's logits; so_far: a
// candidate of the row, or 0. All lanes of the warp call it.
template <bool kIsMapped>
__device__ __forceinline__ uint64_t draw_in_warp(const DrawParams& p, int32_t row, int32_t pass_row,
                                                 int32_t seq_slot, int32_t first_id,
                                                 uint64_t so_far, float (&four)[4]) {
  const int32_t* const token_map = kIsMapped ? p.token_map + row * p.token_map_stride : nullptr;
  const float temperature = p.temperatures != nullptr ? p.temperatures[seq_slot] : 0.0f;
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    if (first_id + i >= p.vocab_limit) four[i] = negative_infinity();
  }
  drop_undrawable<kIsMapped>(first_id, p.vocab_limit, token_map, p.token_limit, four);
  uint64_t highest = 0;
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    if (four[i] > negative_infinity()) highest = max(highest, candidate(four[i], first_id + i));
  }
  if (!(temperature > 0.0f)) return warp_max(highest);
  const Noise<kIsMapped> noise = {
      .key = noise_key(p, seq_slot, p.seeds[seq_slot], drawn_position(p, pass_row)),
      .token_map = token_map,
      .temperature = temperature};
  auto bound = static_cast<uint32_t>(so_far >> 32);
  if (bound == 0) {
    uint32_t own = 0;
    if (highest != 0) {
      const float logit = from_ordered(static_cast<uint32_t>(highest >> 32));
      own = to_ordered(noise.lower_key(id_of(highest), logit));
    }
    bound = __reduce_max_sync(kAllLanes, own);
    if (bound == 0) return 0;  // no valid logit in the warp
  }
  const Pruning pruning(from_ordered(bound), temperature);
  return warp_max(best_of_four(four, first_id, noise, pruning, /*best=*/0));
}

// Stores the tokens of all rows, if this is the last block to arrive.
template <bool kIsMapped>
__device__ __forceinline__ void finish_draws(const Args& args, int32_t end_row) {
  __shared__ bool is_last;
  const DrawParams& p = args.p.draw;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  __syncthreads();  // the block's winners are stored
  if (thread == 0) {
    __threadfence();
    is_last = atomicAdd(&args.counters[0], 1) == static_cast<int32_t>(gridDim.x) - 1;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  if (thread == 0) args.counters[0] = 0;
  for (int32_t row = args.first_row + thread; row < end_row; row += kThreads) {
    const uint64_t winner = __ldcg(args.winner_of(row));
    *args.winner_of(row) = 0;
    int32_t token = p.seq_slot[p.row_index[row]] < 0 ? kInertRow : kNoValidLogit;
    if (winner != 0) {
      token = id_of(winner);
      if constexpr (kIsMapped) token = p.token_map[row * p.token_map_stride + token];
    }
    p.tokens[row] = token;
  }
}

// Computes groups of eight rows at a time, kGroups of them.
template <class T, int kGroups, bool kDraws, bool kIsMapped>
__global__ void __launch_bounds__(kThreads, kGroups == 1 ? 3 : 2)
    markov_draft_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) std::byte storage[];
  constexpr bool kIsFloat = sizeof(T) == sizeof(float);
  constexpr int32_t kRows = kGroups * kRowsOfGroup;
  const MarkovDraftParams& p = args.p;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  auto* const products = reinterpret_cast<float*>(storage);
  const auto row_bytes = static_cast<uint32_t>(args.chunk * 2);
  const Tile factors = {shared_address(storage) + kRows * kPitch * 4, row_bytes};
  const Tile weights = {factors.address + kRows * row_bytes, row_bytes};
  let_successor_start();
  if constexpr (!kIsFloat) {
    request_weights(args, weights, 0);
    cp_async_commit();
  }
  wait_for_predecessor();
  const int32_t end_row = min(*p.num_rows, args.end_row);
  const int32_t first_id = static_cast<int32_t>(blockIdx.x) * kIds + lane * 4;
  const int32_t count = p.weight.n - first_id;
  bool is_resident = true;
  for (int32_t row = args.first_row; row < end_row; row += kRows) {
    // What the warp's rows have before, which arrives during the products.
    float logits[kGroups][4];
    uint64_t so_far[kGroups] = {};
#pragma unroll
    for (int32_t g = 0; g < kGroups; ++g) {
      const int32_t own = row + g * kWarps + warp;
      const int32_t own_count = own < end_row ? count : 0;
      const float* const from = p.logits + int64_t{own} * p.weight.n + first_id;
      if (args.has_vectors) {
        load_first<true>(from, own_count, logits[g]);
      } else {
        load_first<false>(from, own_count, logits[g]);
      }
      if (kDraws && own < end_row) so_far[g] = __ldcg(args.winner_of(own));
    }
    if constexpr (kIsFloat) {
      make_float_products<kGroups>(args, row, end_row, products);
    } else {
      make_products<kGroups>(args, row, end_row, is_resident, weights, factors, products);
      is_resident = p.weight.k <= args.chunk;
    }
    __syncthreads();
#pragma unroll
    for (int32_t g = 0; g < kGroups; ++g) {
      const int32_t own = row + g * kWarps + warp;
      if (own >= end_row) break;
      float added[4];
      load_vector(products + (g * kWarps + warp) * kPitch + lane * 4, added);
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) logits[g][i] = __fadd_rn(logits[g][i], added[i]);
      if constexpr (kDraws) {
        const int32_t pass_row = p.draw.row_index[own];
        const int32_t seq_slot = p.draw.seq_slot[pass_row];
        if (seq_slot < 0) continue;
        const uint64_t winner = draw_in_warp<kIsMapped>(p.draw, own, pass_row, seq_slot, first_id,
                                                        so_far[g], logits[g]);
        if (lane == 0 && winner > so_far[g]) atomicMax(args.winner_of(own), Winner{winner});
      } else {
        float* const to = p.logits + int64_t{own} * p.weight.n + first_id;
        if (args.has_vectors) {
          store_first<true>(logits[g], count, to);
        } else {
          store_first<false>(logits[g], count, to);
        }
      }
    }
    __syncthreads();  // the products have been read
  }
  if constexpr (!kIsFloat) cp_async_wait<0>();
  if constexpr (kDraws) {
    if (end_row > args.first_row) finish_draws<kIsMapped>(args, end_row);
  }
}

template <class T, int kGroups, bool kDraws, bool kIsMapped>
void launch_kernel(CudaContext& ctx, Args args) {
  constexpr auto kernel = markov_draft_kernel<T, kGroups, kDraws, kIsMapped>;
  constexpr int32_t kRows = kGroups * kRowsOfGroup;
  constexpr int32_t kProductBytes = kRows * kPitch * static_cast<int32_t>(sizeof(float));
  const auto bytes = [](int32_t chunk) {
    return static_cast<size_t>(kProductBytes + (kIds + kRows) * chunk * 2);
  };
  // A device with less shared memory has shorter chunks. A sum does not depend on them.
  const auto fits = [&](int32_t chunk) {
    return bytes(chunk) + kReservedBytes <= static_cast<size_t>(ctx.block_shared_bytes);
  };
  int32_t max_chunk = kMaxChunk;
  while (max_chunk > kChunkUnit && !fits(max_chunk)) max_chunk -= kChunkUnit;
  args.chunk = std::min(args.chunk, max_chunk);
  static OncePerDevice allow;
  allow([&] { allow_shared_bytes(kernel, bytes(max_chunk), "markov_draft"); });
  const int32_t num_tiles = (args.p.weight.n + kIds - 1) / kIds;
  launch(ctx, "markov_draft", kernel, dim3(static_cast<unsigned>(num_tiles)), dim3(kThreads),
         bytes(args.chunk), args);
}

template <class T, int kGroups>
void launch_groups(CudaContext& ctx, const Args& args) {
  if (!args.p.draws) return launch_kernel<T, kGroups, false, false>(ctx, args);
  if (args.p.draw.token_map != nullptr) return launch_kernel<T, kGroups, true, true>(ctx, args);
  launch_kernel<T, kGroups, true, false>(ctx, args);
}

}  // namespace
}  // namespace cuda

void markov_draft(CudaContext& ctx, const MarkovDraftParams& p) {
  using namespace cuda;
  check_markov_draft(p);
  const WeightMatrix& w = p.weight;
  PACELINE_CHECK(p.dtype == w.dtype, "on a GPU the factors have the dtype of the weights");
  const int32_t rows_per_launch =
      p.draws ? (ctx.num_counters - kFirstWinner) / kCountersOfWinner : p.max_rows;
  PACELINE_CHECK(rows_per_launch > 0 || p.max_rows <= 0, "no counters to draw with");
  const bool is_float = w.dtype == DType::kFloat32;
  Args args = {
      .p = p,
      .first_row = 0,
      .end_row = 0,
      .chunk = is_float ? 0 : std::min((w.k + kChunkUnit - 1) / kChunkUnit * kChunkUnit, kMaxChunk),
      .has_pieces = w.k % kPiece == 0 && is_vector_aligned(w.data) && is_vector_aligned(p.table) &&
                    is_vector_aligned(p.factors),
      .has_vectors = w.n % 4 == 0 && is_vector_aligned(p.logits),
      .counters = ctx.counters};
  while (args.end_row < p.max_rows) {
    args.first_row = args.end_row;
    args.end_row = args.first_row + std::min(rows_per_launch, p.max_rows - args.first_row);
    with_element_type(w.dtype, "Markov head", [&](auto element) {
      using T = decltype(element);
      if (p.max_rows <= kRowsOfGroup) {
        launch_groups<T, 1>(ctx, args);
      } else {
        launch_groups<T, 4>(ctx, args);
      }
    });
  }
}

}  // namespace paceline
