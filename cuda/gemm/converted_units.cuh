// SPDX-License-Identifier: Apache-2.0
#pragma once

// How a warp of converted_kernel.cuh reads packed weights ahead of their use, converts them to
// bfloat16, and stores them where products read them. A unit is Tile::kUnitTiles packed tiles along
// k of Tile::kRowTiles row tiles.

#include <cstddef>
#include <cstdint>

#include "common/packed_copies.cuh"
#include "common/reduce.cuh"
#include "gemm/gemm_epilogue.cuh"
#include "gemm/int4_elements.cuh"
#include "gemm/nvfp4_elements.cuh"
#include "gemm/packed_args.h"
#include "gemm/packed_elements.cuh"
#include "gemm/packed_weights.h"

namespace paceline::cuda {

// Where the elements of a converter's rows lie.
template <class Tile>
class UnitElements {
 public:
  static constexpr int32_t kTileBytes = packed_tile_bytes(Tile::kFormat);
  // A lane has 16 bytes of each 512 of a packed tile.
  static constexpr int32_t kPieces = kTileBytes / 512;
  using Words = uint4[Tile::kRowTiles][Tile::kUnitTiles][kPieces];

  // member: the converter's place in its team.
  __device__ __forceinline__ UnitElements(const PackedArgs& weights, int32_t member,
                                          int32_t first_column, int32_t up_row)
      : policy_(weights.weight_policy),
        num_tiles_((weights.k + kPackedColumns - 1) / kPackedColumns) {
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
#pragma unroll
    for (int32_t r = 0; r < Tile::kRowTiles; ++r) {
      row_tiles_[r] =
          weights.row_tile_of<Tile::kWeights>(member * Tile::kRowTiles + r, first_column, up_row);
      bytes_[r] = int64_t{row_tiles_[r] - row_tiles_[0]} * num_tiles_ * kTileBytes;
    }
    data_ = weights.data + int64_t{row_tiles_[0]} * num_tiles_ * kTileBytes + lane * 16;
  }

  // Row tile r of the converter, in the matrix.
  [[nodiscard]] __device__ __forceinline__ int32_t row_tile(int32_t r) const {
    return row_tiles_[r];
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

  __device__ __forceinline__ void read(int32_t tile, int32_t t, Words& to) const {
    const std::byte* const from = data_ + int64_t{tile} * kTileBytes;
#pragma unroll
    for (int32_t r = 0; r < Tile::kRowTiles; ++r) {
#pragma unroll
      for (int32_t i = 0; i < kPieces; ++i) {
        to[r][t][i] = read_weights_16(from + bytes_[r] + i * 512, policy_);
      }
    }
  }

 private:
  uint64_t policy_;
  int32_t num_tiles_;
  const std::byte* data_;
  int32_t row_tiles_[Tile::kRowTiles];
  int64_t bytes_[Tile::kRowTiles];  // from the first row tile to each
};

// Where a lane stores a unit whose place in the ring is `to`: rows of 128 bytes in the swizzle of
// 128 bytes, tile t of row tile r at `to` + r * 2,048 + t * Tile::kWeightBytes.
template <class Tile>
struct UnitPlace {
  uint32_t at;  // the lane's row of a store of four matrices, and its 16 bytes in 16 columns

  __device__ __forceinline__ explicit UnitPlace(uint32_t to) {
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    at = to + static_cast<uint32_t>(lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16);
  }

  // Stores the operand of a step of 16 columns.
  __device__ __forceinline__ void store(int32_t r, int32_t t, int32_t step,
                                        const uint32_t (&a)[4]) const {
    const uint32_t tile =
        at + static_cast<uint32_t>(r * kPackedRows * 128 + t * Tile::kWeightBytes);
    store_matrices(tile ^ static_cast<uint32_t>(step * 32), a);
  }
};

// The word of a lane's four that has a step of 16 columns.
__device__ __forceinline__ uint32_t word_of_step(const uint4& four, int32_t step) {
  return step == 0 ? four.x : step == 1 ? four.y : step == 2 ? four.z : four.w;
}

// Reads and converts units. `Words` are what a lane converts of one.
template <class Tile, WeightFormat format>
class UnitReader;

template <class Tile>
class UnitReader<Tile, WeightFormat::kInt4> {
 public:
  struct Words {
    typename UnitElements<Tile>::Words codes;
    uint32_t scales[Tile::kRowTiles][Tile::kUnitTiles];  // and zero points
  };

  __device__ __forceinline__ UnitReader(const PackedArgs& weights, int32_t member,
                                        int32_t first_column, int32_t up_row)
      : codes_(weights, member, first_column, up_row),
        groups_(weights, /*expert=*/0, codes_.row_tile(0)) {
    has_one_group_ = groups_.are_whole(Tile::kUnitTiles * kPackedColumns);
#pragma unroll
    for (int32_t r = 0; r < Tile::kRowTiles; ++r) {
      scale_bytes_[r] = (codes_.row_tile(r) - codes_.row_tile(0)) * groups_.row_bytes();
    }
  }

  __device__ __forceinline__ void read(int32_t unit, Words& to) const {
#pragma unroll
    for (int32_t t = 0; t < Tile::kUnitTiles; ++t) {
      const int32_t tile = codes_.tile_of(unit, t);
      codes_.read(tile, t, to.codes);
      if (t > 0 && has_one_group_) continue;
      const std::byte* const word = groups_.word_of(tile);
#pragma unroll
      for (int32_t r = 0; r < Tile::kRowTiles; ++r) {
        to.scales[r][t] = read_weights_4(word + scale_bytes_[r], codes_.policy());
      }
    }
  }

  __device__ __forceinline__ void write(int32_t unit, const Words& from, uint32_t to,
                                        uint32_t /*sum_scales*/) const {
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
#pragma unroll
    for (int32_t r = 0; r < Tile::kRowTiles; ++r) {
      Int4Multipliers by[2];
#pragma unroll
      for (int32_t t = 0; t < Tile::kUnitTiles; ++t) {
        const int32_t tile = unit * Tile::kUnitTiles + t;
        if (!has_one_group_) {
          groups_.template multipliers<is_float16, /*kHasHalves=*/true>(from.scales[r][t], tile,
                                                                        by);
        } else if (t == 0) {
          groups_.template multipliers<is_float16, /*kHasHalves=*/false>(from.scales[r][t], tile,
                                                                         by);
        }
#pragma unroll
        for (int32_t step = 0; step < 4; ++step) {
          uint32_t a[4];
          convert_int4<is_float16>(word_of_step(from.codes[r][t][0], step), by[step / 2], a);
          place.store(r, t, step, a);
        }
      }
    }
  }

  UnitElements<Tile> codes_;
  Int4Groups groups_;
  bool has_one_group_;  // all columns of a unit have the same scales
  int32_t scale_bytes_[Tile::kRowTiles];
};

template <class Tile>
class UnitReader<Tile, WeightFormat::kNvfp4> {
 public:
  struct Words {
    typename UnitElements<Tile>::Words elements;
    Nvfp4Lines lines[Tile::kRowTiles][Tile::kUnitTiles];
  };

  __device__ __forceinline__ UnitReader(const PackedArgs& weights, int32_t member,
                                        int32_t first_column, int32_t up_row)
      : elements_(weights, member, first_column, up_row) {
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    const int64_t row_bytes = int64_t{elements_.num_tiles()} * kPackedNvfp4ScaleBytes;
    lines_ = weights.scales.scales + elements_.row_tile(0) * row_bytes + lane * 8;
#pragma unroll
    for (int32_t r = 0; r < Tile::kRowTiles; ++r) {
      line_bytes_[r] = (elements_.row_tile(r) - elements_.row_tile(0)) * row_bytes;
    }
  }

  __device__ __forceinline__ void read(int32_t unit, Words& to) const {
#pragma unroll
    for (int32_t t = 0; t < Tile::kUnitTiles; ++t) {
      const int32_t tile = elements_.tile_of(unit, t);
      elements_.read(tile, t, to.elements);
      const std::byte* const from = lines_ + int64_t{tile} * kPackedNvfp4ScaleBytes;
#pragma unroll
      for (int32_t r = 0; r < Tile::kRowTiles; ++r) {
        const uint2 line = read_weights_8(from + line_bytes_[r], elements_.policy());
        to.lines[r][t] = {.slope = line.x, .offset = line.y};
      }
    }
  }

  __device__ __forceinline__ void write(int32_t /*unit*/, const Words& from, uint32_t to,
                                        uint32_t /*sum_scales*/) const {
    const UnitPlace<Tile> place(to);
#pragma unroll
    for (int32_t r = 0; r < Tile::kRowTiles; ++r) {
#pragma unroll
      for (int32_t t = 0; t < Tile::kUnitTiles; ++t) {
#pragma unroll
        for (int32_t step = 0; step < 4; ++step) {
          uint32_t a[4];
          convert_elements<false>(word_of_step(from.elements[r][t][0], step), from.lines[r][t],
                                  step, a);
          place.store(r, t, step, a);
        }
      }
    }
  }

 private:
  UnitElements<Tile> elements_;
  const std::byte* lines_;
  int64_t line_bytes_[Tile::kRowTiles];
};

// A unit has 128 columns, which share a scale.
template <class Tile>
class UnitReader<Tile, WeightFormat::kFp8> {
  static_assert(Tile::kUnitTiles * kPackedColumns == 128);
  // ScaleUse::kTileSums: all rows of a row tile have the same scale, and the consumers get it.
  static constexpr int32_t kScales = Tile::kHasTileSums ? 1 : 2;

 public:
  struct Words {
    typename UnitElements<Tile>::Words elements;
    // Of the row tile; or, if the scales are part of the values, of rows g and g + 8.
    float scales[Tile::kRowTiles][kScales];
  };

  __device__ __forceinline__ UnitReader(const PackedArgs& weights, int32_t member,
                                        int32_t first_column, int32_t up_row)
      : elements_(weights, member, first_column, up_row),
        last_scale_(weights.scales.columns - 1),
        reads_scales_(Tile::kHasTileSums || weights.scales.use == ScaleUse::kValues) {
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    table_ = reinterpret_cast<const float*>(weights.scales.scales);
#pragma unroll
    for (int32_t r = 0; r < Tile::kRowTiles; ++r) {
#pragma unroll
      for (int32_t i = 0; i < kScales; ++i) {
        const int32_t of_tile = Tile::kHasTileSums ? 0 : lane / 4 + 8 * i;
        const int32_t row = min(elements_.row_tile(r) * kPackedRows + of_tile, weights.n - 1);
        first_scale_[r][i] = (row >> weights.scales.row_shift) * weights.scales.columns;
      }
    }
  }

  __device__ __forceinline__ void read(int32_t unit, Words& to) const {
#pragma unroll
    for (int32_t t = 0; t < Tile::kUnitTiles; ++t) {
      elements_.read(elements_.tile_of(unit, t), t, to.elements);
    }
    const int32_t column = min(unit, last_scale_);
#pragma unroll
    for (int32_t r = 0; r < Tile::kRowTiles; ++r) {
#pragma unroll
      for (int32_t i = 0; i < kScales; ++i) {
        to.scales[r][i] = reads_scales_ ? __ldg(table_ + first_scale_[r][i] + column) : 1.0f;
      }
    }
  }

  // sum_scales: the address in shared memory of the scales of the unit's row tiles, for consumers.
  __device__ __forceinline__ void write(int32_t /*unit*/, const Words& from, uint32_t to,
                                        uint32_t sum_scales) const {
    const UnitPlace<Tile> place(to);
#pragma unroll
    for (int32_t r = 0; r < Tile::kRowTiles; ++r) {
      if constexpr (Tile::kHasTileSums) {
        if (threadIdx.x % 32 == 0) {
          store_shared_4(sum_scales + static_cast<uint32_t>(r * sizeof(float)),
                         __float_as_uint(from.scales[r][0]));
        }
        write_rows<false>(r, from, fp8_multipliers<false>(1.0f, 1.0f), place);
      } else {
        const float low = from.scales[r][0];
        const float high = from.scales[r][1];
        const float most = fmaxf(fabsf(low), fabsf(high));
        if (__any_sync(kAllLanes, most > PackedElements<WeightFormat::kFp8>::kMaxScale)) {
          write_rows<true>(r, from, fp8_multipliers<true>(low, high), place);
        } else {
          write_rows<false>(r, from, fp8_multipliers<false>(low, high), place);
        }
      }
    }
  }

 private:
  template <bool kIsTwice>
  __device__ __forceinline__ static void write_rows(int32_t r, const Words& from,
                                                    const RowMultipliers& by,
                                                    const UnitPlace<Tile>& place) {
#pragma unroll
    for (int32_t t = 0; t < Tile::kUnitTiles; ++t) {
#pragma unroll
      for (int32_t step = 0; step < 4; ++step) {
        const uint4& two = from.elements[r][t][step / 2];
        uint32_t a[4];
        PackedElements<WeightFormat::kFp8>::convert<kIsTwice>(step % 2 == 0 ? two.x : two.z,
                                                              step % 2 == 0 ? two.y : two.w, by, a);
        place.store(r, t, step, a);
      }
    }
  }

  UnitElements<Tile> elements_;
  int32_t last_scale_;
  bool reads_scales_;
  const float* table_;
  int32_t first_scale_[Tile::kRowTiles][kScales];
};

}  // namespace paceline::cuda
