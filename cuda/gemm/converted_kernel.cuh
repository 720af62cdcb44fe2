// SPDX-License-Identifier: Apache-2.0
#pragma once

// One tile of y = x W^T with packed int4 weights: the kernel of gemm_kernel.cuh, but warps convert
// the weights into its ring, where the copy engine would bring those of bfloat16. The products, and
// so the bits, are those of dequantised weights.
//
// A warp that converts reads its codes some columns ahead of their use into registers, and writes
// bfloat16 into shared memory as the products want them. Nothing else waits for it but the ring, so
// the latency of a conversion is not part of the chain of sums.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/packed_copies.cuh"
#include "gemm/gemm_args.h"
#include "gemm/gemm_epilogue.cuh"
#include "gemm/gemm_kernel.cuh"
#include "gemm/int4_elements.cuh"
#include "gemm/packed_args.h"
#include "gemm/packed_weights.h"
#include "gemm/wgmma.cuh"

namespace paceline::cuda {

// A tile of gemm_kernel.cuh whose weights `converters` warps convert, `row_tiles` times 16 rows
// each. They read `ahead` units ahead. `blocks` of a multiprocessor must have enough registers.
template <class Base, int32_t converters, int32_t row_tiles, int32_t ahead, int32_t blocks = 1>
struct ConvertedTile : Base {
  static constexpr bool kWeightsArrive = false;
  static constexpr int32_t kConverters = converters;
  static constexpr int32_t kBlocks = blocks;
  static constexpr int32_t kAhead = ahead;

  static constexpr int32_t kRowTiles = row_tiles;  // of a converter
  // A team of converters has all rows of the tile. The teams take the units by turns.
  static constexpr int32_t kTeam = Base::kWeights / kPackedRows / kRowTiles;
  static constexpr int32_t kTeams = converters / kTeam;
  static_assert(Base::kWeights % (kPackedRows * kRowTiles) == 0 && converters % kTeam == 0);

  // A unit is what a team hands over at once: columns of the ring, which are packed tiles along k.
  static_assert(Base::kDepth == kPackedColumns);
  static constexpr int32_t kUnitTiles = Base::kSteps < 2 ? 1 : 2;
  static constexpr int32_t kUnits = Base::kSteps / kUnitTiles;  // of a stage
  // Stages from a unit of a team to its next one, which has the same place.
  static constexpr int32_t kStageStep = kTeams / kUnits;
  static_assert(kTeams % kUnits == 0);

  static constexpr int32_t kFirstConverter = Base::kConsumers + 32;
  static constexpr int32_t kThreads = kFirstConverter + 32 * converters;
  // Arrivals that fill a stage: the announcement of the tokens, and every converter's.
  static constexpr uint32_t kArrivals = 1 + kUnits * kTeam;
};

// What a lane converts of a unit: its words of codes, of scales and of zero points.
template <class Tile>
struct UnitWords {
  uint4 codes[Tile::kRowTiles][Tile::kUnitTiles];
  uint32_t scales[Tile::kRowTiles][Tile::kUnitTiles];
};

// The rows of weights of a converter, and their units.
template <class Tile>
class UnitReader {
 public:
  // member: the converter's place in its team.
  __device__ __forceinline__ UnitReader(const PackedArgs& weights, int32_t member,
                                        int32_t first_column, int32_t up_row)
      : policy_(weights.weight_policy),
        num_tiles_((weights.k + kPackedColumns - 1) / kPackedColumns),
        groups_(weights, /*expert=*/0, row_tile_of(weights, member, 0, first_column, up_row)) {
    has_one_group_ = groups_.are_whole(Tile::kUnitTiles * kPackedColumns);
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    const int32_t first = row_tile_of(weights, member, 0, first_column, up_row);
    codes_ = weights.data + int64_t{first} * num_tiles_ * kTileBytes + lane * 16;
#pragma unroll
    for (int32_t r = 0; r < Tile::kRowTiles; ++r) {
      const int32_t behind = row_tile_of(weights, member, r, first_column, up_row) - first;
      code_bytes_[r] = int64_t{behind} * num_tiles_ * kTileBytes;
      scale_bytes_[r] = behind * groups_.row_bytes();
    }
  }

  // Reads a unit; of tiles behind the last one, the last one.
  __device__ __forceinline__ void read(int32_t unit, UnitWords<Tile>& to) const {
#pragma unroll
    for (int32_t t = 0; t < Tile::kUnitTiles; ++t) {
      const int32_t tile = min(unit * Tile::kUnitTiles + t, num_tiles_ - 1);
      const std::byte* const codes = codes_ + int64_t{tile} * kTileBytes;
#pragma unroll
      for (int32_t r = 0; r < Tile::kRowTiles; ++r) {
        to.codes[r][t] = read_weights_16(codes + code_bytes_[r], policy_);
      }
      if (t > 0 && has_one_group_) continue;
      const std::byte* const word = groups_.word_of(tile);
#pragma unroll
      for (int32_t r = 0; r < Tile::kRowTiles; ++r) {
        to.scales[r][t] = read_weights_4(word + scale_bytes_[r], policy_);
      }
    }
  }

  // Converts a unit to rows of 128 bytes in the swizzle of 128 bytes: tile t of row tile r at
  // `to` + r * 2,048 + t * Tile::kWeightBytes. Tiles behind the last one repeat it: they meet the
  // columns of the tokens beyond K, which arrive as zeros. (A branch that writes zeros instead
  // costs a tenth of the time of few rows, taken or not: its registers wait for the stores before
  // it.)
  __device__ __forceinline__ void write(int32_t unit, const UnitWords<Tile>& from,
                                        uint32_t to) const {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    // The lane's row of a store of four matrices, and its 16 bytes in the first 16 columns.
    const uint32_t at = to + static_cast<uint32_t>(lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16);
    if (groups_.has_float16_scales()) {
      write_unit<true>(unit, from, at);
    } else {
      write_unit<false>(unit, from, at);
    }
  }

 private:
  static constexpr int32_t kTileBytes = packed_tile_bytes(WeightFormat::kInt4);

  // Row tile r of the converter, in the matrix.
  __device__ __forceinline__ static int32_t row_tile_of(const PackedArgs& weights, int32_t member,
                                                        int32_t r, int32_t first_column,
                                                        int32_t up_row) {
    return weights.row_tile_of<Tile::kWeights>(member * Tile::kRowTiles + r, first_column, up_row);
  }

  template <bool is_float16>
  __device__ __forceinline__ void write_unit(int32_t unit, const UnitWords<Tile>& from,
                                             uint32_t at) const {
#pragma unroll
    for (int32_t r = 0; r < Tile::kRowTiles; ++r) {
      Int4Multipliers by[2];
#pragma unroll
      for (int32_t t = 0; t < Tile::kUnitTiles; ++t) {
        const int32_t tile = unit * Tile::kUnitTiles + t;
        const uint32_t at_tile =
            at + static_cast<uint32_t>(r * kPackedRows * 128 + t * Tile::kWeightBytes);
        if (!has_one_group_) {
          groups_.multipliers<is_float16, /*kHasHalves=*/true>(from.scales[r][t], tile, by);
        } else if (t == 0) {
          groups_.multipliers<is_float16, /*kHasHalves=*/false>(from.scales[r][t], tile, by);
        }
        write_tile<is_float16>(from.codes[r][t], by, at_tile);
      }
    }
  }

  template <bool is_float16>
  __device__ __forceinline__ static void write_tile(const uint4& codes,
                                                    const Int4Multipliers (&by)[2], uint32_t to) {
#pragma unroll
    for (int32_t step = 0; step < 4; ++step) {
      const uint32_t word = step == 0   ? codes.x
                            : step == 1 ? codes.y
                            : step == 2 ? codes.z
                                        : codes.w;
      uint32_t a[4];
      convert_int4<is_float16>(word, by[step / 2], a);
      store_matrices(to ^ static_cast<uint32_t>(step * 32), a);
    }
  }

  uint64_t policy_;
  int32_t num_tiles_;
  Int4Groups groups_;
  bool has_one_group_;  // all columns of a unit have the same scales
  const std::byte* codes_;
  int64_t code_bytes_[Tile::kRowTiles];  // from the first row tile to each
  int32_t scale_bytes_[Tile::kRowTiles];
};

// Fills the ring with weights; called by the warps that convert, `converter` being the number of
// the calling one.
template <class Tile>
__device__ __forceinline__ void fill_with_weights(const Ring<Tile>& ring, const PackedArgs& weights,
                                                  int32_t converter, int32_t first_column,
                                                  int32_t up_row, int32_t num_blocks) {
  constexpr int32_t kAhead = Tile::kAhead;
  constexpr int32_t kTeams = Tile::kTeams;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t member = converter % Tile::kTeam;
  const int32_t num_units = num_blocks * Tile::kUnits;
  const UnitReader<Tile> reader(weights, member, first_column, up_row);
  UnitWords<Tile> ahead[kAhead];
  const int32_t first = converter / Tile::kTeam;
#pragma unroll
  for (int32_t i = 0; i < kAhead; ++i) reader.read(first + i * kTeams, ahead[i]);
  const uint32_t data =
      shared_address(ring.data) +
      static_cast<uint32_t>(member * Tile::kRowTiles * kPackedRows * 128 +
                            first % Tile::kUnits * Tile::kUnitTiles * Tile::kWeightBytes);
  const uint32_t full = shared_address(ring.full);
  const uint32_t empty = shared_address(ring.empty);
  int32_t stage = first / Tile::kUnits;
  uint32_t parity = 1;  // of a phase before the first: that round finds the stages empty
  for (int32_t first_unit = first; first_unit < num_units; first_unit += kAhead * kTeams) {
#pragma unroll
    for (int32_t i = 0; i < kAhead; ++i) {
      const int32_t unit = first_unit + i * kTeams;
      if (unit >= num_units) break;
      barrier_wait(empty + stage * static_cast<uint32_t>(sizeof(uint64_t)), parity);
      reader.write(unit, ahead[i], data + static_cast<uint32_t>(stage * Tile::kStageBytes));
      __syncwarp();
      if (lane == 0) barrier_arrive(full + stage * static_cast<uint32_t>(sizeof(uint64_t)));
      // Behind the last use of the registers, so that none are copied.
      reader.read(unit + kAhead * kTeams, ahead[i]);
      stage += Tile::kStageStep;
      if (stage >= ring.num_stages) {
        stage -= ring.num_stages;
        parity ^= 1;
      }
    }
  }
}

// Fills the ring with tokens; called by one thread.
template <class Tile>
__device__ __forceinline__ void fill_with_tokens(const Ring<Tile>& ring,
                                                 const StageCopies<Tile::kSteps>& tokens,
                                                 int32_t num_blocks) {
  wait_for_predecessor();
  int32_t stage = 0;
  uint32_t parity = 1;
  for (int32_t block = 0; block < num_blocks; ++block) {
    barrier_wait(&ring.empty[stage], parity);
    barrier_expect(&ring.full[stage], static_cast<uint32_t>(ring.arriving_bytes));
    tokens.request(ring.tokens(stage), block, &ring.full[stage]);
    if (++stage == ring.num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    converted_gemm_kernel(const __grid_constant__ CUtensorMap token_map,
                          const __grid_constant__ PackedArgs weights,
                          const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(1024) std::byte ring_storage[];
  __shared__ uint64_t full[kMaxStages];
  __shared__ uint64_t empty[kMaxStages];
  const Ring<Tile> ring = begin_ring<Tile>(ring_storage, full, empty, args, Tile::kArrivals);
  const TilePlace place = place_of<Tile>(args);
  const int32_t num_blocks = num_blocks_of<Tile>(args);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread < Tile::kConsumers) {
    return compute_tile<__nv_bfloat16, Tile>(ring, args, place, num_blocks);
  }
  if (thread < Tile::kFirstConverter) {
    if (thread == Tile::kConsumers) {
      return fill_with_tokens<Tile>(ring, token_copies<Tile>(&token_map, args, place.first_token),
                                    num_blocks);
    }
  } else {
    // Weights do not depend on the predecessor.
    fill_with_weights<Tile>(ring, weights, (thread - Tile::kFirstConverter) / 32,
                            place.first_column, args.gated.up_row, num_blocks);
  }
  wait_for_predecessor();
}

}  // namespace paceline::cuda
