// SPDX-License-Identifier: Apache-2.0
#pragma once

// One tile of y = x W^T with packed int4 weights, for few rows of x and many of W. Every warp of a
// multiprocessor has rows of W: it converts them in registers and multiplies by `mma.sync`. K is
// walked in ascending order with one accumulator per output, in the steps of
// gemm_kernel.cuh, so the bits are those of dequantised weights.
//
// Two warps share 16 rows and take the units of columns by turns. Each converts its next unit while
// the other multiplies, and gets the sums from it. So the chain of sums does not wait for
// conversions, and a scheduler has twice as many warps among which to choose.
//
// The tokens stay in shared memory whole. A warp copies its codes some units ahead
// (int4_units.cuh).

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "common/launch.cuh"
#include "common/mma.cuh"
#include "gemm/gemm_args.h"
#include "gemm/gemm_kernel.cuh"
#include "gemm/int4_elements.cuh"
#include "gemm/int4_units.cuh"
#include "gemm/packed_args.h"
#include "gemm/packed_weights.h"
#include "gemm/wgmma.cuh"

namespace paceline::cuda {

// `row_tiles` of 16 weights by 8 * token_tiles tokens. They arrive in blocks of 256 columns.
template <int32_t row_tiles, int32_t token_tiles>
struct RegisterTile : Tile<RowsAre::kWeights, row_tiles / 4, 8 * token_tiles, /*steps=*/4> {
  using Base = Tile<RowsAre::kWeights, row_tiles / 4, 8 * token_tiles, 4>;
  static_assert(row_tiles % 4 == 0 && Base::kDepth == kPackedColumns);
  static constexpr bool kWeightsArrive = false;  // in the ring of gemm_kernel.cuh
  static constexpr int32_t kRowTiles = row_tiles;
  static constexpr int32_t kTokenTiles = token_tiles;
  // The first kConsumers threads have the sums at the end. The other sharers bring the tokens.
  static constexpr int32_t kSharers = 2;
  static constexpr int32_t kThreads = kSharers * Base::kConsumers;

  static constexpr int32_t kUnitTiles = 2;
  static constexpr int32_t kUnits = Base::kSteps / kUnitTiles;  // of a block
  static constexpr int32_t kAhead = 2;                          // of a warp
  using Slots = CodeSlots<kUnitTiles>;
  static constexpr int32_t kWarpBytes = kAhead * Slots::kSlotBytes;
  // Sums on their way from warp to warp.
  static constexpr int32_t kSumBytes = 32 * 16 * token_tiles;

  static constexpr int32_t kBlockBytes = Base::kSteps * Base::kTokenBytes;
  // Of all tokens, behind them the warps' slots, and then the sums.
  static constexpr int32_t kSlotBytes = kSharers * row_tiles * kWarpBytes;
  static constexpr int32_t shared_bytes(int32_t num_blocks) {
    return num_blocks * kBlockBytes + kSlotBytes + row_tiles * kSumBytes + 1024;
  }
};

inline constexpr int32_t kMaxTokenBlocks = 32;

// Sums that two warps give each other in turns.
template <class Tile>
class SumTurns {
 public:
  // at: of the row tile, in shared memory. given: its barrier, of which a phase ends with each
  // unit.
  __device__ __forceinline__ SumTurns(uint32_t at, uint64_t* given)
      : at_(at + threadIdx.x % 32 * 16), given_(given) {}

  __device__ __forceinline__ void give(const Accumulators<Tile>& sums) const {
#pragma unroll
    for (int32_t j = 0; j < Tile::kTokenTiles; ++j) {
      uint32_t words[4];
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) words[i] = __float_as_uint(sums[4 * j + i]);
      store_shared_16(at_ + static_cast<uint32_t>(j * 512), words);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(given_);
  }
  // Takes what was given behind `unit`.
  __device__ __forceinline__ void take(int32_t unit, Accumulators<Tile>& sums) const {
    barrier_wait(given_, static_cast<uint32_t>(unit) % 2);
#pragma unroll
    for (int32_t j = 0; j < Tile::kTokenTiles; ++j) {
      const uint4 words = load_shared_16(at_ + static_cast<uint32_t>(j * 512));
      sums[4 * j] = __uint_as_float(words.x);
      sums[4 * j + 1] = __uint_as_float(words.y);
      sums[4 * j + 2] = __uint_as_float(words.z);
      sums[4 * j + 3] = __uint_as_float(words.w);
    }
  }

 private:
  uint32_t at_;
  uint64_t* given_;
};

// Multiplies every second unit from `sharer` on; called by all warps that multiply. The first
// sharer has the sums at the end. tokens_full: the barriers of the blocks of tokens. The first
// kAhead units of the slots have been requested.
template <class Tile, class Kind>
__device__ __forceinline__ void multiply_units(const typename Tile::Slots& slots,
                                               const SumTurns<Tile>& turns, int32_t sharer,
                                               int32_t num_units, uint32_t tokens,
                                               uint64_t* tokens_full, Accumulators<Tile>& sums) {
  constexpr int32_t kUnitTiles = Tile::kUnitTiles;
  constexpr bool kHasPairs = Tile::kTokenTiles > 1;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  // The lane's row of a load of four matrices, and its 16 bytes in the swizzle of 128 bytes.
  const int32_t row = kHasPairs ? lane / 16 * 8 + lane % 8 : lane % 8;
  const int32_t piece = kHasPairs ? lane / 8 % 2 : lane / 8;
  const uint32_t of_lane =
      tokens + static_cast<uint32_t>(row * Tile::kRowBytes + (piece ^ row % 8) * 16);
  for (int32_t first = sharer; first < num_units; first += Tile::kAhead * Tile::kSharers) {
#pragma unroll
    for (int32_t i = 0; i < Tile::kAhead; ++i) {
      const int32_t unit = first + i * Tile::kSharers;
      if (unit >= num_units) break;
      cp_async_wait<Tile::kAhead - 1>();
      SlotWords<kUnitTiles> words;
      slots.template load<Kind>(i, words);
      Int4Multipliers by[2];
      const uint32_t of_unit =
          of_lane + static_cast<uint32_t>(unit * kUnitTiles * Tile::kTokenBytes);
#pragma unroll
      for (int32_t t = 0; t < kUnitTiles; ++t) {
        uint32_t a[4][4];
        slots.template multipliers<Kind>(unit, t, words, by);
        const uint4& w = words.codes[t];
        convert_int4<Kind::kIsFloat16>(w.x, by[0], a[0]);
        convert_int4<Kind::kIsFloat16>(w.y, by[0], a[1]);
        convert_int4<Kind::kIsFloat16>(w.z, by[1], a[2]);
        convert_int4<Kind::kIsFloat16>(w.w, by[1], a[3]);
        if (t == 0) {
          barrier_wait(tokens_full + unit / Tile::kUnits, 0);
          if (unit > 0) turns.take(unit - 1, sums);
        }
        uint32_t b[4];
#pragma unroll
        for (int32_t step = 0; step < 4; ++step) {
          // Both halves of a step for two tiles of tokens, or of two steps for one.
          if (kHasPairs || step % 2 == 0) {
            ldmatrix_x4(b, (of_unit + static_cast<uint32_t>(t * Tile::kTokenBytes)) ^
                               static_cast<uint32_t>(step * 32));
          }
#pragma unroll
          for (int32_t j = 0; j < Tile::kTokenTiles; ++j) {
            const int32_t of_b = kHasPairs ? 2 * j : step % 2 * 2;
            mma_16x8x16(reinterpret_cast<float (&)[4]>(sums[4 * j]), a[step], b[of_b], b[of_b + 1]);
          }
        }
      }
      if (unit + 1 < num_units || sharer > 0) turns.give(sums);
      const int32_t next = unit + Tile::kAhead * Tile::kSharers;
      if (next < num_units) slots.request(next, i);
      cp_async_commit();
    }
  }
  cp_async_wait<0>();
  if (sharer == 0 && num_units % Tile::kSharers == 0) turns.take(num_units - 1, sums);
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    register_gemm_kernel(const __grid_constant__ CUtensorMap token_map,
                         const __grid_constant__ PackedArgs weights,
                         const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(1024) std::byte ring_storage[];
  __shared__ uint64_t tokens_full[kMaxTokenBlocks];
  __shared__ uint64_t sums_given[Tile::kRowTiles];
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t num_blocks = num_blocks_of<Tile>(args);
  if (thread < num_blocks) barrier_init(&tokens_full[thread], 1);
  if (thread < Tile::kRowTiles) barrier_init(&sums_given[thread], 1);
  barrier_init_fence();
  __syncthreads();
  if (!args.delays_successor) let_successor_start();
  const TilePlace place = place_of<Tile>(args);
  // Dynamic shared memory is aligned to 16 bytes only; the swizzle needs 1,024.
  std::byte* const tokens = reinterpret_cast<std::byte*>(
      (reinterpret_cast<uintptr_t>(ring_storage) + 1023) & ~uintptr_t{1023});
  const int32_t warp = thread / 32;
  const int32_t sharer = warp / Tile::kRowTiles;
  const int32_t row_tile = warp % Tile::kRowTiles;
  const int32_t num_units = num_blocks * Tile::kUnits;
  const uint32_t tokens_at = shared_address(tokens);
  const uint32_t slots_at = tokens_at + static_cast<uint32_t>(num_blocks * Tile::kBlockBytes);
  const typename Tile::Slots slots(
      weights, weights.row_tile_of<Tile::kWeights>(row_tile, place.first_column, args.gated.up_row),
      slots_at + static_cast<uint32_t>(warp * Tile::kWarpBytes));
#pragma unroll
  for (int32_t i = 0; i < Tile::kAhead; ++i) {
    const int32_t unit = sharer + i * Tile::kSharers;
    if (unit < num_units) slots.request(unit, i);
    cp_async_commit();
  }
  const SumTurns<Tile> turns(
      slots_at + static_cast<uint32_t>(Tile::kSlotBytes + row_tile * Tile::kSumBytes),
      &sums_given[row_tile]);
  const auto multiply = [&](Accumulators<Tile>& sums) {
    slots.with_kind([&](auto kind) {
      multiply_units<Tile, decltype(kind)>(slots, turns, sharer, num_units, tokens_at, tokens_full,
                                           sums);
    });
  };
  if (sharer == 0) return compute_tile<__nv_bfloat16, Tile>(tokens, args, place, multiply);
  wait_for_predecessor();
  if (thread % 32 == 0) {
    const auto copies = token_copies<Tile>(&token_map, args, place.first_token);
    for (int32_t block = row_tile; block < num_blocks; block += Tile::kRowTiles) {
      barrier_expect(&tokens_full[block], static_cast<uint32_t>(args.stage_bytes));
      copies.request(tokens + block * Tile::kBlockBytes, block, &tokens_full[block]);
    }
  }
  __syncwarp();
  Accumulators<Tile> sums;
  multiply(sums);
}

}  // namespace paceline::cuda
