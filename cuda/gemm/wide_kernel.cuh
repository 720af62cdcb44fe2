// SPDX-License-Identifier: Apache-2.0
#pragma once

// One tile of y = x W_e^T, e being the expert of its rows, for packed weights of 4 or 8 bits and
// more rows than narrow_kernel.cuh takes. Each output is the sum that gemm_kernel.cuh computes: K
// in steps of 16, ascending, in one float32 accumulator; so the bits are equal.
//
// - Weights are the rows of the product, and its register operand. A warpgroup converts 64 columns
//   of K (wide_operand.cuh) while the tensor cores multiply the 64 before.
// - Scales that are not part of the values multiply the sums of 128 columns, one stage.

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "elementwise/gate_up.cuh"
#include "gemm/expert_tiles.cuh"
#include "gemm/gemm_epilogue.cuh"
#include "gemm/row_scales.cuh"
#include "gemm/wgmma.cuh"
#include "gemm/wgmma_products.cuh"
#include "gemm/wide_operand.cuh"
#include "gemm/wide_ring.cuh"

namespace paceline::cuda {

// sums += by * parts. by: of rows g and g + 8.
template <int32_t kCount>
__device__ __forceinline__ void add_parts(float (&sums)[kCount], const float (&parts)[kCount],
                                          const float (&by)[2]) {
#pragma unroll
  for (int32_t j = 0; j < kCount; ++j) sums[j] = __fmaf_rn(by[j / 2 % 2], parts[j], sums[j]);
}

// The products of a part of a stage with kTokens tokens, begun but not awaited.
template <int32_t kTokens, bool kIsFirst, int32_t kRegisters>
__device__ __forceinline__ void multiply_part(const uint32_t (&a)[kRegisters], uint64_t tokens,
                                              float (&sums)[kTokens / 2]) {
  pin(sums);
  wgmma_begin();
  wgmma<kTokens, kIsFirst ? 0 : 1>(sums, a, tokens);
#pragma unroll
  for (int32_t i = 1; i < kRegisters / 4; ++i) {
    wgmma<kTokens>(sums, a + 4 * i, tokens + i * kNext16Columns);
  }
  wgmma_commit();
  pin(sums);
}

// Multiplies the stages as they arrive with their first kTokens tokens; called by a warpgroup.
// kVariant: see variant_of.
template <class Shape, int32_t kTokens, bool kHasTileSums, bool kVariant>
__device__ __forceinline__ void multiply_stages(const PackedArgs& args, const WideRing<Shape>& ring,
                                                int32_t num_blocks, int32_t row_tile,
                                                float (&sums)[kTokens / 2]) {
  StageOperand<Shape, kHasTileSums, kVariant> operand(args, row_tile);
  uint32_t a[2][4 * Shape::kSteps];
  float parts[kTokens / 2] = {};  // of a stage
  float by[2] = {0.0f, 0.0f};
  RingPlace place;
  int32_t previous = -1;
  // After the last stage (`is_stage` is false) it does not wait: what it reads is not used.
  const auto begin = [&](bool is_stage) {
    if (is_stage) barrier_wait(&ring.full[place.stage], place.parity);
    operand.read(ring.weights(place.stage), 0);
    operand.read_scales(ring.scales(place.stage));
    operand.convert(0, a[0]);
  };
  // All lanes have read the stage; one of them says so.
  const auto release = [&](int32_t stage) {
    __syncwarp();
    if (stage >= 0 && threadIdx.x % 32 == 0) barrier_arrive(&ring.empty[stage]);
  };
  // Multiplies the stage that has begun, and begins the next: a part is converted while the
  // products of the part before run.
  const auto multiply = [&](float (&to)[kTokens / 2], bool is_last) {
    const int32_t stage = place.stage;
    const uint64_t tokens = tile_descriptor(uniform(ring.tokens(stage)));
    if constexpr (kHasTileSums) {
      by[0] = operand.scale(0);
      by[1] = operand.scale(1);
    }
    const auto multiply_one = [&]<int32_t kPart>() {
      constexpr int32_t kStep = kPart * Shape::kSteps;
      constexpr bool kIsLast = kPart + 1 == Shape::kParts;
      if constexpr (!kIsLast) operand.read(ring.weights(stage), kPart + 1);
      multiply_part<kTokens, kHasTileSums && kPart == 0>(
          a[kPart % 2], tokens + kStep / 4 * (Shape::kTokenBytes >> 4) + kStep % 4 * kNext16Columns,
          to);
      // The products before these are done.
      wgmma_wait<1>();
      if constexpr (!kHasTileSums && kPart == 0) {
        release(previous);
        previous = stage;
      }
      if constexpr (kIsLast) {
        place.next(ring.num_stages);
        begin(!is_last);
      } else {
        operand.convert(kPart + 1, a[(kPart + 1) % 2]);
      }
    };
    multiply_one.template operator()<0>();
    multiply_one.template operator()<1>();
    if constexpr (Shape::kParts == 4) {
      multiply_one.template operator()<2>();
      multiply_one.template operator()<3>();
    }
    if constexpr (kHasTileSums) {
      wgmma_wait<0>();
      pin(to);
      release(stage);
      add_parts(sums, parts, by);
    }
  };
  begin(true);
  for (int32_t block = 0; block < num_blocks; ++block) {
    if constexpr (kHasTileSums) {
      multiply(parts, block == num_blocks - 1);
    } else {
      multiply(sums, block == num_blocks - 1);
    }
  }
  if constexpr (!kHasTileSums) {
    wgmma_wait<0>();
    pin(sums);
  }
}

// The same with two multiplications for each weight of kMxfp4, which is rare: it does one thing
// after the other, in few registers.
template <class Shape, int32_t kTokens>
__device__ __forceinline__ void multiply_large_stages(const PackedArgs& args,
                                                      const WideRing<Shape>& ring,
                                                      int32_t num_blocks, int32_t row_tile,
                                                      float (&sums)[kTokens / 2]) {
  StageOperand<Shape, /*kHasTileSums=*/false, /*kVariant=*/true> operand(args, row_tile);
  RingPlace place;
  for (int32_t block = 0; block < num_blocks; ++block) {
    barrier_wait(&ring.full[place.stage], place.parity);
    operand.read_scales(ring.scales(place.stage));
    const uint64_t tokens = tile_descriptor(ring.tokens(place.stage));
#pragma unroll
    for (int32_t part = 0; part < Shape::kParts; ++part) {
      const int32_t step = part * Shape::kSteps;
      uint32_t a[4 * Shape::kSteps];
      operand.read(ring.weights(place.stage), part);
      operand.convert(part, a);
      multiply_part<kTokens, false>(
          a, tokens + step / 4 * (Shape::kTokenBytes >> 4) + step % 4 * kNext16Columns, sums);
      wgmma_wait<0>();
      pin(sums);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&ring.empty[place.stage]);
    place.next(ring.num_stages);
  }
}

// Writes the activation of a staged tile whose columns are gate and up by turns. Call it after all
// threads have stored their parts.
template <class Shape>
__device__ __forceinline__ void write_gated_tile(const PackedArgs& args, const ExpertTile& tile,
                                                 const StagedTile<__nv_bfloat16, Shape>& staged) {
  using Staged = StagedTile<__nv_bfloat16, Shape>;
  const int32_t first_column = tile.column_tile * Shape::kWeights;
  const int32_t num_columns = min(args.n - first_column, Shape::kWeights) / 2;
  auto* const y =
      static_cast<__nv_bfloat16*>(args.y) + tile.first_row * args.y_stride + first_column / 2;
  const bool is_aligned = args.y_stride % 8 == 0 && reinterpret_cast<uintptr_t>(y) % 16 == 0;
  constexpr int32_t kPieces = Shape::kWeights / 16;  // of one token, 8 outputs each
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < tile.num_rows * kPieces;
       i += Shape::kConsumers) {
    const int32_t token = i / kPieces;
    const int32_t begin = i % kPieces * 8;
    float both[16];
    load_vector(staged.data + token * Staged::kPitch + 2 * begin, both);
    float values[8];
#pragma unroll
    for (int32_t j = 0; j < 8; ++j) {
      values[j] = gate_up(args.end.activation, both[2 * j], both[2 * j + 1], args.end.alpha,
                          args.end.limit);
    }
    __nv_bfloat16* const to = y + token * args.y_stride + begin;
    if (is_aligned && begin + 8 <= num_columns) {
      store_vector(values, to);
    } else {
      store_first<false>(values, num_columns - begin, to);
    }
  }
}

// Writes the tile's outputs, through the ring's memory, which is idle by now. The sums are those of
// 16 weights and of the tokens from `first_token`.
template <class Out, class Shape, int32_t kCount>
__device__ __forceinline__ void write_wide_tile(const PackedArgs& args, const ExpertTile& tile,
                                                std::byte* ring_data, int32_t row_tile,
                                                int32_t first_token, const float (&sums)[kCount]) {
  using Staged = StagedTile<Out, Shape>;
  const Staged staged = {reinterpret_cast<Out*>(ring_data)};
  const int32_t first_column = tile.column_tile * Shape::kWeights;
  const float* const bias =
      args.bias != nullptr ? args.bias + int64_t{tile.expert} * args.n + first_column : nullptr;
  const Staged own = {staged.data + first_token * Staged::kPitch};
  own.put_weight_rows(sums, row_tile * kPackedRows, [&](int32_t column) {
    return bias != nullptr && first_column + column < args.n ? bias[column] : 0.0f;
  });
  asm volatile("bar.sync 1, %0;" ::"n"(Shape::kConsumers) : "memory");
  if constexpr (sizeof(Out) == 2 && Shape::kFormat == WeightFormat::kMxfp4) {
    if (args.end.is_gated) return write_gated_tile<Shape>(args, tile, staged);
  }
  staged.write(static_cast<Out*>(args.y) + tile.first_row * args.y_stride + first_column,
               args.y_stride, tile.num_rows, min(args.n - first_column, Shape::kWeights));
}

// Computes and writes the tile with its first kTokens tokens; called by the consumers.
template <class Shape, bool kHasTileSums, int32_t kTokens>
__device__ __forceinline__ void compute_wide_tile(const PackedArgs& args, const ExpertTile& tile,
                                                  const WideRing<Shape>& ring, std::byte* ring_data,
                                                  int32_t num_blocks) {
  const int32_t row_tile = static_cast<int32_t>(threadIdx.x) / 32;
  float sums[kTokens / 2] = {};
  if (!variant_of<Shape>(args, tile, row_tile)) {
    multiply_stages<Shape, kTokens, kHasTileSums, false>(args, ring, num_blocks, row_tile, sums);
  } else if constexpr (Shape::kFormat == WeightFormat::kInt4) {
    multiply_stages<Shape, kTokens, kHasTileSums, true>(args, ring, num_blocks, row_tile, sums);
  } else if constexpr (Shape::kScansScales) {
    multiply_large_stages<Shape, kTokens>(args, ring, num_blocks, row_tile, sums);
  }
  if constexpr (Shape::kFormat == WeightFormat::kFp8 && !kHasTileSums) {
    if (args.scales.use == ScaleUse::kRowSums) {
      const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
      scale_rows(args, tile.expert,
                 tile.column_tile * Shape::kWeights + row_tile * kPackedRows + lane / 4, sums);
    }
  }
  asm volatile("bar.sync 1, %0;" ::"n"(Shape::kConsumers) : "memory");
  if (args.is_y_float) {
    write_wide_tile<float, Shape>(args, tile, ring_data, row_tile, 0, sums);
  } else {
    write_wide_tile<__nv_bfloat16, Shape>(args, tile, ring_data, row_tile, 0, sums);
  }
}

template <class Shape, bool kHasTileSums>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    wide_gemm_kernel(const __grid_constant__ CUtensorMap weight_map,
                     const __grid_constant__ PackedArgs args) {
  extern __shared__ __align__(1024) std::byte storage[];
  __shared__ uint64_t full[kMaxWideStages];
  __shared__ uint64_t empty[kMaxWideStages];
  // Aligned for the swizzle.
  std::byte* const ring_data = storage + (-shared_address(storage) & 1023u);
  const uint32_t data = shared_address(ring_data);
  const uint32_t scale_data = data + static_cast<uint32_t>(args.num_stages * Shape::kTileBytes);
  const WideRing<Shape> ring = {.data = data,
                                .scale_data = scale_data,
                                .full = full,
                                .empty = empty,
                                .num_stages = args.num_stages};
  const bool is_mixture = args.rows.expert_begin != nullptr;
  const int32_t num_blocks = (args.k + Shape::kStageDepth - 1) / Shape::kStageDepth;
  const auto thread = static_cast<int32_t>(threadIdx.x);

  if (thread == 0) {
    for (int32_t stage = 0; stage < args.num_stages; ++stage) {
      barrier_init(&full[stage], Shape::kArrivals);
      barrier_init(&empty[stage], Shape::kGroups * 4);
    }
    barrier_init_fence();
  }
  __syncthreads();
  // As in expert_kernel.cuh.
  const bool is_early = !is_mixture || args.follows_product;
  if (is_early && !args.rows.delays_successor) let_successor_start();

  ExpertTile tile = {.expert = 0,
                     .column_tile = column_tile_of(args.rows, Shape::kTokens),
                     .first_row = 0,
                     .num_rows = 0};
  if (is_mixture) {
    if (!is_early) {
      wait_for_predecessor();
      let_successor_start();
    }
    tile = find_tile</*kIsEarly=*/true>(args.rows, Shape::kTokens);
    if (tile.num_rows == 0) {
      wait_for_predecessor();
      return;
    }
  }
  if (thread >= Shape::kConsumers) {
    if constexpr (Shape::kMovesRegisters) give_registers<88>();
    const int32_t producer = thread - Shape::kConsumers;
    if (producer >= 32 * Shape::kTokenWarps) {
      // Weights do not depend on the predecessor.
      if (producer < 32 * (Shape::kTokenWarps + 1)) {
        produce_weights<Shape>(ring, args, &weight_map, tile, num_blocks);
      }
      if (is_early) wait_for_predecessor();
      return;
    }
    if (is_early) wait_for_predecessor();
    if (!is_mixture) tile = find_tile(args.rows, Shape::kTokens);
    produce_tokens<Shape>(ring, args, tile, producer, num_blocks);
    return;
  }
  if constexpr (Shape::kMovesRegisters) take_registers<208>();
  if (is_early) wait_for_predecessor();
  if (!is_mixture) tile = find_tile(args.rows, Shape::kTokens);
  if constexpr (Shape::kTokens >= 64) {
    // The last rows of an expert often fill less than half of a tile.
    if (tile.num_rows <= Shape::kTokens / 2) {
      return compute_wide_tile<Shape, kHasTileSums, Shape::kTokens / 2>(args, tile, ring, ring_data,
                                                                        num_blocks);
    }
  }
  compute_wide_tile<Shape, kHasTileSums, Shape::kTokens>(args, tile, ring, ring_data, num_blocks);
}

}  // namespace paceline::cuda
