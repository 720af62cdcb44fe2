// SPDX-License-Identifier: Apache-2.0
#pragma once

// One tile of y = x W^T with packed weights of 4 and 8 bits: the kernel of gemm_kernel.cuh, but
// warps convert the weights into its ring, where the copy engine would bring those of bfloat16. The
// products, and so the bits, are those of dequantised weights. Scales of 128 columns that are not
// part of the values multiply the sums over these columns.
//
// A warp that converts reads its elements some columns ahead of their use into registers, and
// writes bfloat16 into shared memory as the products want them (converted_units.cuh). Nothing else
// waits for it but the ring, so the latency of a conversion is not part of the chain of sums.

#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/launch.cuh"
#include "common/mma.cuh"
#include "gemm/converted_units.cuh"
#include "gemm/gemm_args.h"
#include "gemm/gemm_epilogue.cuh"
#include "gemm/gemm_kernel.cuh"
#include "gemm/packed_args.h"
#include "gemm/packed_weights.h"
#include "gemm/row_scales.cuh"
#include "gemm/wgmma.cuh"

namespace paceline::cuda {

// A tile of gemm_kernel.cuh whose weights of `format` are converted by `converters` warps, 16 rows
// each. They read `ahead` units ahead. `blocks` of a multiprocessor must have enough registers.
// has_tile_sums: as in ScaleUse.
template <class Base, WeightFormat format, int32_t converters, int32_t ahead, int32_t blocks = 1,
          bool has_tile_sums = false>
struct ConvertedTile : Base {
  static constexpr bool kWeightsArrive = false;
  static constexpr WeightFormat kFormat = format;
  static constexpr bool kHasTileSums = has_tile_sums;
  static constexpr int32_t kConverters = converters;
  static constexpr int32_t kBlocks = blocks;
  static constexpr int32_t kAhead = ahead;

  // A team of converters has all rows of the tile, a row tile each. The teams take the units by
  // turns.
  static constexpr int32_t kTeam = Base::kWeights / kPackedRows;
  static constexpr int32_t kTeams = converters / kTeam;
  static_assert(Base::kWeights % kPackedRows == 0 && converters % kTeam == 0);

  // A unit is what a team hands over at once: columns of the ring, which are packed tiles along k.
  static_assert(Base::kDepth == kPackedColumns && Base::kSteps % 2 == 0);
  static constexpr int32_t kUnitTiles = 2;
  static constexpr int32_t kUnits = Base::kSteps / kUnitTiles;  // of a stage
  // Stages from a unit of a team to its next one, which has the same place.
  static constexpr int32_t kStageStep = kTeams / kUnits;
  static_assert(kTeams % kUnits == 0);

  // The sums of a stage, of which two sets let products run while the other set is added up. They
  // need more registers than a share of all threads, and only whole warpgroups can move registers.
  static_assert(!has_tile_sums ||
                (kUnits == 1 && blocks == 1 && Base::kGroups == 1 && converters % 4 == 0));
  static constexpr bool kMovesRegisters = has_tile_sums;
  static constexpr int32_t kFirstConverter = Base::kConsumers + (kMovesRegisters ? 128 : 32);
  static constexpr int32_t kThreads = kFirstConverter + 32 * converters;
  // Of those that the block is launched with, as many as launch bounds allow.
  static constexpr int32_t kConverterRegisters = 72;
  static constexpr int32_t kConsumerRegisters = std::min(
      240,
      (65536 / kThreads / 8 * 8 * kThreads - (kThreads - Base::kConsumers) * kConverterRegisters) /
          Base::kConsumers / 8 * 8);
  static_assert(!kMovesRegisters || 3 * Base::kColumns / 2 + 30 <= kConsumerRegisters);

  // Arrivals that fill a stage: the announcement of the tokens, and every converter's.
  static constexpr uint32_t kArrivals = 1 + kUnits * kTeam;
};

// ScaleUse::kTileSums: the scales of the row tiles of every stage, in shared memory.
template <class Tile>
using SumScales = float[kMaxStages][Tile::kTeam];

// Fills the ring with weights; called by the warps that convert, `converter` being the number of
// the calling one.
template <class Tile>
__device__ __forceinline__ void fill_with_weights(const Ring<Tile>& ring, const PackedArgs& weights,
                                                  const SumScales<Tile>& sum_scales,
                                                  int32_t converter, int32_t first_column,
                                                  int32_t up_row, int32_t num_blocks) {
  constexpr int32_t kAhead = Tile::kAhead;
  constexpr int32_t kTeams = Tile::kTeams;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t member = converter % Tile::kTeam;
  const int32_t num_units = num_blocks * Tile::kUnits;
  using Reader = UnitReader<Tile, Tile::kFormat>;
  const Reader reader(weights, weights.row_tile_of<Tile::kWeights>(member, first_column, up_row));
  typename Reader::Words ahead[kAhead];
  const int32_t first = converter / Tile::kTeam;
#pragma unroll
  for (int32_t i = 0; i < kAhead; ++i) reader.read(first + i * kTeams, ahead[i]);
  const uint32_t data =
      shared_address(ring.data) +
      static_cast<uint32_t>(member * kPackedRows * 128 +
                            first % Tile::kUnits * Tile::kUnitTiles * Tile::kWeightBytes);
  const uint32_t scales =
      shared_address(sum_scales) + static_cast<uint32_t>(member * sizeof(float));
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
      reader.write(unit, ahead[i], data + static_cast<uint32_t>(stage * Tile::kStageBytes),
                   scales + static_cast<uint32_t>(stage * sizeof(sum_scales[0])));
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

// Adds the sums over the columns of a stage, times the scales of their rows of weights, which are
// in shared memory at `scales`.
template <class Tile>
__device__ __forceinline__ void add_parts(Accumulators<Tile>& sums, const Accumulators<Tile>& parts,
                                          uint32_t scales) {
  constexpr int32_t kSums = Tile::kColumns / 2;
  // A warp has 16 rows of weights, or of tokens; then 16 columns, 8 sums of a thread, are weights.
  constexpr int32_t kScaled = Tile::kWeightsAreRows ? kSums : 8;
  if constexpr (Tile::kWeightsAreRows) {
    scales += static_cast<uint32_t>(threadIdx.x / 32 * sizeof(float));
  }
#pragma unroll
  for (int32_t first = 0; first < kSums; first += kScaled) {
    const float by = __uint_as_float(
        load_shared_4(scales + static_cast<uint32_t>(first / kScaled * sizeof(float))));
#pragma unroll
    for (int32_t i = first; i < first + kScaled; ++i) sums[i] = __fmaf_rn(by, parts[i], sums[i]);
  }
}

// Multiplies the stages as they arrive, and adds up the sums of each, times its scales, while the
// products of the next one run; called by a warpgroup.
template <class Tile>
__device__ __forceinline__ void consume_scaled(const Ring<Tile>& ring,
                                               const SumScales<Tile>& sum_scales,
                                               const GemmArgs& args, int32_t num_blocks,
                                               Accumulators<Tile>& sums) {
  const uint32_t data = uniform(shared_address(ring.data));
  const uint32_t full = uniform(shared_address(ring.full));
  const uint32_t empty = uniform(shared_address(ring.empty));
  const uint32_t scales = uniform(shared_address(sum_scales));
  int32_t stage = 0;
  uint32_t parity = 0;
  const auto begin = [&](Accumulators<Tile>& parts) {
    barrier_wait(full + stage * static_cast<uint32_t>(sizeof(uint64_t)), parity);
    fence_shared_for_wgmma();
    begin_products<Tile, /*kIsFirst=*/true>(uniform(data + stage * Tile::kStageBytes), /*group=*/0,
                                            args, parts);
    if (++stage == ring.num_stages) {
      stage = 0;
      parity ^= 1;
    }
  };
  int32_t ending = 0;  // the stage whose products end next
  const auto end = [&](Accumulators<Tile>& parts) {
    pin(parts);
    add_parts<Tile>(sums, parts, scales + static_cast<uint32_t>(ending * sizeof(sum_scales[0])));
    __syncwarp();  // the arrival of one lane hands back what all lanes have read
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(empty + ending * static_cast<uint32_t>(sizeof(uint64_t)));
    }
    if (++ending == ring.num_stages) ending = 0;
  };
  Accumulators<Tile> parts[2] = {};
  begin(parts[0]);
  int32_t block = 1;
  for (; block + 1 < num_blocks; block += 2) {
    begin(parts[1]);
    wgmma_wait<1>();
    end(parts[0]);
    begin(parts[0]);
    wgmma_wait<1>();
    end(parts[1]);
  }
  if (block < num_blocks) {
    begin(parts[1]);
    wgmma_wait<1>();
    end(parts[0]);
    wgmma_wait<0>();
    end(parts[1]);
  } else {
    wgmma_wait<0>();
    end(parts[0]);
  }
}

// ScaleUse::kRowSums: multiplies the sums of the tile whose weights begin at `first_row` by the
// scales of their rows; called by a warpgroup.
template <class Tile>
__device__ __forceinline__ void scale_sums(const PackedArgs& weights, int32_t first_row,
                                           Accumulators<Tile>& sums) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  if constexpr (Tile::kWeightsAreRows) {
    const auto row_tile = static_cast<int32_t>(threadIdx.x) / 32;
    scale_rows(weights, /*expert=*/0, first_row + row_tile * kPackedRows + lane / 4, sums);
  } else {
#pragma unroll
    for (int32_t i = 0; i < Tile::kColumns / 2; ++i) {
      // Sums 4 j to 4 j + 3 are of columns 8 j + 2 (lane % 4) and the next one, for two rows each.
      const int32_t column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      sums[i] = __fmul_rn(row_scale(weights, /*expert=*/0, first_row + column), sums[i]);
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
  __shared__ SumScales<Tile> sum_scales;
  const Ring<Tile> ring = begin_ring<Tile>(ring_storage, full, empty, args, Tile::kArrivals);
  const TilePlace place = place_of<Tile>(args);
  const int32_t num_blocks = num_blocks_of<Tile>(args);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread < Tile::kConsumers) {
    if constexpr (Tile::kMovesRegisters) take_registers<Tile::kConsumerRegisters>();
    return compute_tile<__nv_bfloat16, Tile>(ring.data, args, place, [&](Accumulators<Tile>& sums) {
      if constexpr (Tile::kHasTileSums) {
        consume_scaled<Tile>(ring, sum_scales, args, num_blocks, sums);
      } else {
        consume<Tile>(ring, args, num_blocks, sums);
      }
      if constexpr (Tile::kFormat == WeightFormat::kFp8 && !Tile::kHasTileSums) {
        if (weights.scales.use == ScaleUse::kRowSums) {
          scale_sums<Tile>(weights, place.first_column, sums);
        }
      }
    });
  }
  if constexpr (Tile::kMovesRegisters) give_registers<Tile::kConverterRegisters>();
  if (thread < Tile::kFirstConverter) {
    if (thread == Tile::kConsumers) {
      return fill_with_tokens<Tile>(ring, token_copies<Tile>(&token_map, args, place.first_token),
                                    num_blocks);
    }
  } else {
    // Weights do not depend on the predecessor.
    fill_with_weights<Tile>(ring, weights, sum_scales, (thread - Tile::kFirstConverter) / 32,
                            place.first_column, args.gated.up_row, num_blocks);
  }
  wait_for_predecessor();
}

}  // namespace paceline::cuda
