// SPDX-License-Identifier: Apache-2.0
#pragma once

// How a warp of converted_kernel.cuh reads packed weights ahead of their use, converts them to
// bfloat16, and stores them where products read them. A unit is Tile::kUnitTiles packed tiles along
// k of one row tile.

#include <cstddef>
#include <cstdint>

#include "common/mma.cuh"
#include "common/packed_copies.cuh"
#include "common/reduce.cuh"
#include "gemm/gemm_epilogue.cuh"
#include "gemm/int4_elements.cuh"
#include "gemm/nvfp4_elements.cuh"
#include "gemm/packed_args.h"
#include "gemm/packed_elements.cuh"
#include "gemm/packed_weights.h"

namespace paceline::cuda {

// Where the elements of a row tile lie.
template <class Tile>
class UnitElements {
 public:
  static constexpr int32_t kTileBytes = packed_tile_bytes(Tile::kFormat);
  // A lane has 16 bytes of each 512 of a packed tile.
  static constexpr int32_t kPieces = kTileBytes / 512;
  using Words = uint4[Tile::kUnitTiles][kPieces];

  __device__ __forceinline__ UnitElements(const PackedArgs& weights, int32_t row_tile)
      : policy_(weights.weight_policy),
        num_tiles_((weights.k + kPackedColumns - 1) / kPackedColumns) {
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    data_ = weights.data + int64_t{row_tile} * num_tiles_ * kTileBytes + lane * 16;
  }

  [[nodiscard]] __device__ __forceinline__ int32_t num_tiles() const { return num_tiles_; }
  [[nodiscard]] __device__ __forceinline__ uint64_t policy() const { return policy_; }

  // Packed tile t of a unit, along k. Tiles behind the last one are the last one: they meet the
  // columns of the tokens beyond K, which arrive as zeros. (A branch that writes zeros instead
  // costs a tenth of the time of few rows, taken or not: its registers wait for the stores before
  // it.)
  [[nodiscard]] __device__ __forceinline__ int32_t tile_of(int32_t unit, int32_t t) const {
    return min(unit * Tile::kUnitTiles + t, num_tiles_ - 1);
  }

  __device__ __forceinline__ void read(int32_t tile, uint4 (&to)[kPieces]) const {
    const std::byte* const from = data_ + int64_t{tile} * kTileBytes;
#pragma unroll
    for (int32_t i = 0; i < kPieces; ++i) to[i] = read_weights_16(from + i * 512, policy_);
  }

 private:
  uint64_t policy_;
  int32_t num_tiles_;
  const std::byte* data_;
};

// Where a lane stores a unit whose place in the ring is `to`: rows of 128 bytes in the swizzle of
// 128 bytes, tile t at `to` + t * Tile::kWeightBytes.
template <class Tile>
struct UnitPlace {
  uint32_t at;  // the lane's row of a store of four matrices, and its 16 bytes in 16 columns

  __device__ __forceinline__ explicit UnitPlace(uint32_t to) {
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    at = to + static_cast<uint32_t>(lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16);
  }

  // Stores the operand of a step of 16 columns.
  __device__ __forceinline__ void store(int32_t t, int32_t step, const uint32_t (&a)[4]) const {
    const uint32_t tile = at + static_cast<uint32_t>(t * Tile::kWeightBytes);
    store_matrices(tile ^ static_cast<uint32_t>(step * 32), a);
  }
};

// Reads and converts the units of a row tile. `Words` are what a lane converts of one.
template <class Tile, WeightFormat format>
class UnitReader;

template <class Tile>
class UnitReader<Tile, WeightFormat::kInt4> {
 public:
  struct Words {
    typename UnitElements<Tile>::Words codes;
    uint32_t scales[Tile::kUnitTiles];  // and zero points
  };

  __device__ __forceinline__ UnitReader(const PackedArgs& weights, int32_t row_tile)
      : codes_(weights, row_tile),
        groups_(weights, /*expert=*/0, row_tile),
        has_one_group_(groups_.are_whole(Tile::kUnitTiles * kPackedColumns)) {}

  __device__ __forceinline__ void read(int32_t unit, Words& to) const {
#pragma unroll
    for (int32_t t = 0; t < Tile::kUnitTiles; ++t) {
      const int32_t tile = codes_.tile_of(unit, t);
      codes_.read(tile, to.codes[t]);
      if (t > 0 && has_one_group_) continue;
      to.scales[t] = read_weights_4(groups_.word_of(tile), codes_.policy());
    }
  }

  __device__ __forceinline__ void write(int32_t unit, const Words& from, uint32_t to,
                                        uint32_t /*sum_scale*/) const {
    const UnitPlace<Tile> place(to);
    if (groups_.has_float16_scales()) {
      write_unit<true>(unit, from, place);
    } else {
      write_unit<false>(unit, from, place);
    }
  }

 private:
  template <bool is_float16>
  __device__ __forceinline__ void write_unit(int32_t unit, const Words& from,
                                             const UnitPlace<Tile>& place) const {
    Int4Multipliers by[2];
#pragma unroll
    for (int32_t t = 0; t < Tile::kUnitTiles; ++t) {
      const int32_t tile = unit * Tile::kUnitTiles + t;
      if (!has_one_group_) {
        groups_.template multipliers<is_float16, /*kHasHalves=*/true>(from.scales[t], tile, by);
      } else if (t == 0) {
        groups_.template multipliers<is_float16, /*kHasHalves=*/false>(from.scales[t], tile, by);
      }
#pragma unroll
      for (int32_t step = 0; step < 4; ++step) {
        uint32_t a[4];
        convert_int4<is_float16>(word_of_step(from.codes[t][0], step), by[step / 2], a);
        place.store(t, step, a);
      }
    }
  }

  UnitElements<Tile> codes_;
  Int4Groups groups_;
  bool has_one_group_;  // all columns of a unit have the same scales
};

template <class Tile>
class UnitReader<Tile, WeightFormat::kNvfp4> {
 public:
  struct Words {
    typename UnitElements<Tile>::Words elements;
    Nvfp4Lines lines[Tile::kUnitTiles];
  };

  __device__ __forceinline__ UnitReader(const PackedArgs& weights, int32_t row_tile)
      : elements_(weights, row_tile) {
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    const int64_t row_bytes = int64_t{elements_.num_tiles()} * kPackedNvfp4ScaleBytes;
    lines_ = weights.scales.scales + row_tile * row_bytes + lane * 8;
  }

  __device__ __forceinline__ void read(int32_t unit, Words& to) const {
#pragma unroll
    for (int32_t t = 0; t < Tile::kUnitTiles; ++t) {
      const int32_t tile = elements_.tile_of(unit, t);
      elements_.read(tile, to.elements[t]);
      const uint2 line =
          read_weights_8(lines_ + int64_t{tile} * kPackedNvfp4ScaleBytes, elements_.policy());
      to.lines[t] = {.slope = line.x, .offset = line.y};
    }
  }

  __device__ __forceinline__ void write(int32_t /*unit*/, const Words& from, uint32_t to,
                                        uint32_t /*sum_scale*/) const {
    const UnitPlace<Tile> place(to);
#pragma unroll
    for (int32_t t = 0; t < Tile::kUnitTiles; ++t) {
#pragma unroll
      for (int32_t step = 0; step < 4; ++step) {
        uint32_t a[4];
        convert_elements<false>(word_of_step(from.elements[t][0], step), from.lines[t], step, a);
        place.store(t, step, a);
      }
    }
  }

 private:
  UnitElements<Tile> elements_;
  const std::byte* lines_;
};

// A unit has 128 columns, which share a scale.
template <class Tile>
class UnitReader<Tile, WeightFormat::kFp8> {
  static_assert(Tile::kUnitTiles * kPackedColumns == 128);
  // ScaleUse::kTileSums: all rows of the row tile have the same scale, and the consumers get it.
  static constexpr int32_t kScales = Tile::kHasTileSums ? 1 : 2;

 public:
  struct Words {
    typename UnitElements<Tile>::Words elements;
    // Of the row tile; or, if the scales are part of the values, of rows g and g + 8.
    float scales[kScales];
  };

  __device__ __forceinline__ UnitReader(const PackedArgs& weights, int32_t row_tile)
      : elements_(weights, row_tile),
        last_scale_(weights.scales.columns - 1),
        reads_scales_(Tile::kHasTileSums || weights.scales.use == ScaleUse::kValues) {
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    table_ = reinterpret_cast<const float*>(weights.scales.scales);
#pragma unroll
    for (int32_t i = 0; i < kScales; ++i) {
      const int32_t of_tile = Tile::kHasTileSums ? 0 : lane / 4 + 8 * i;
      const int32_t row = min(row_tile * kPackedRows + of_tile, weights.n - 1);
      first_scale_[i] = (row >> weights.scales.row_shift) * weights.scales.columns;
    }
  }

  __device__ __forceinline__ void read(int32_t unit, Words& to) const {
#pragma unroll
    for (int32_t t = 0; t < Tile::kUnitTiles; ++t) {
      elements_.read(elements_.tile_of(unit, t), to.elements[t]);
    }
    const int32_t column = min(unit, last_scale_);
#pragma unroll
    for (int32_t i = 0; i < kScales; ++i) {
      to.scales[i] = reads_scales_ ? __ldg(table_ + first_scale_[i] + column) : 1.0f;
    }
  }

  // sum_scale: where in shared memory consumers look for the scale of the unit.
  __device__ __forceinline__ void write(int32_t /*unit*/, const Words& from, uint32_t to,
                                        uint32_t sum_scale) const {
    const UnitPlace<Tile> place(to);
    if constexpr (Tile::kHasTileSums) {
      if (threadIdx.x % 32 == 0) store_shared_4(sum_scale, __float_as_uint(from.scales[0]));
      write_unit<false>(from, fp8_multipliers<false>(1.0f, 1.0f), place);
    } else {
      const float low = from.scales[0];
      const float high = from.scales[1];
      const float most = fmaxf(fabsf(low), fabsf(high));
      if (__any_sync(kAllLanes, most > PackedElements<WeightFormat::kFp8>::kMaxScale)) {
        write_unit<true>(from, fp8_multipliers<true>(low, high), place);
      } else {
        write_unit<false>(from, fp8_multipliers<false>(low, high), place);
      }
    }
  }

 private:
  template <bool kIsTwice>
  __device__ __forceinline__ static void write_unit(const Words& from, const RowMultipliers& by,
                                                    const UnitPlace<Tile>& place) {
#pragma unroll
    for (int32_t t = 0; t < Tile::kUnitTiles; ++t) {
#pragma unroll
      for (int32_t step = 0; step < 4; ++step) {
        const uint4& two = from.elements[t][step / 2];
        uint32_t a[4];
        PackedElements<WeightFormat::kFp8>::convert<kIsTwice>(step % 2 == 0 ? two.x : two.z,
                                                              step % 2 == 0 ? two.y : two.w, by, a);
        place.store(t, step, a);
      }
    }
  }

  UnitElements<Tile> elements_;
  int32_t last_scale_;
  bool reads_scales_;
  const float* table_;
  int32_t first_scale_[kScales];
};

}  // namespace paceline::cuda
