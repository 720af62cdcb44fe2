// SPDX-License-Identifier: Apache-2.0
#pragma once

// The scales of a block's weights, in shared memory. They are few (a seventeenth of the bytes of
// mxfp4), at addresses that suit no copy engine, and needed again at every stage; so the warpgroups
// copy all of their tile before the first stage.

#include <cstddef>
#include <cstdint>

#include "gemm/weight_fragments.cuh"

namespace paceline::cuda {

// What a matrix's scales do.
enum class ScaleUse : uint8_t {
  kNone,     // there are none
  kValues,   // they are part of the values that are multiplied
  kRowSums,  // kFp8, one scale a row, multiplies the sum over K
  kTileSums  // kFp8, a scale for 128 columns, multiplies the sum over them
};

struct ScaleArgs {
  const std::byte* scales;
  int64_t expert_stride;  // bytes
  int32_t columns;        // of the table of scales
  int32_t row_shift;      // kFp8: log2 of the rows that share a scale
  ScaleUse use;
};

template <WeightFormat format>
class WeightScales;

template <>
class WeightScales<WeightFormat::kMxfp4> {
 public:
  // Room for the scales of a tile. A tail of K may read up to three scales behind the last one,
  // which are zero.
  static constexpr int32_t bytes(int32_t tile_rows, const ScaleArgs& args) {
    return tile_rows * args.columns + 4;
  }

  __device__ __forceinline__ WeightScales(std::byte* table, const ScaleArgs& args,
                                          int32_t row_in_tile)
      : table_(reinterpret_cast<uint8_t*>(table)),
        row_(table_ + row_in_tile * args.columns),
        row_step_(8 * args.columns) {}

  // Copies the scales of `num_rows` rows from `first_row`, whose room is for tile_rows. Returns
  // whether one that the calling thread has copied needs a second multiplication.
  __device__ __forceinline__ bool copy(const ScaleArgs& args, int32_t expert, int32_t first_row,
                                       int32_t num_rows, int32_t tile_rows, int32_t thread,
                                       int32_t num_threads) const {
    const auto* const from = reinterpret_cast<const uint8_t*>(args.scales) +
                             expert * args.expert_stride + int64_t{first_row} * args.columns;
    const int32_t count = num_rows * args.columns;
    const int32_t room = tile_rows * args.columns + 4;
    bool is_large = false;
    // A tile's scales begin at a multiple of 64 bytes from those of the expert.
    const int32_t whole = reinterpret_cast<uintptr_t>(from) % 16 == 0 ? count / 16 * 16 : 0;
    for (int32_t i = thread * 16; i < whole; i += num_threads * 16) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(from + i));
      *reinterpret_cast<uint4*>(table_ + i) = v;
      const uint32_t highest = __vmaxu4(__vmaxu4(v.x, v.y), __vmaxu4(v.z, v.w));
      is_large |= __vcmpgtu4(highest, kMaxBytes) != 0;
    }
    for (int32_t i = whole + thread; i < room; i += num_threads) {
      const uint8_t byte = i < count ? from[i] : uint8_t{0};
      table_[i] = byte;
      is_large |= byte > Bits::kMaxScaleByte;
    }
    return is_large;
  }

  // What multiplies a half of stage `stage`: of(i, piece) is for row `row_in_tile + 8 i` and the
  // half's 32 columns `piece`.
  template <bool kIsTwice>
  __device__ __forceinline__ auto multipliers(int32_t stage, int32_t half) const {
    return [this, at = 4 * stage + 2 * half](int32_t i, int32_t piece) -> Multiplier {
      // A bfloat16 2^e has the bits (e + 127) << 7; the scale is 2^(byte - 127), or 2^-127, which
      // is subnormal.
      constexpr uint32_t kOne = 0x00800080u;
      const uint32_t byte = row_[i * row_step_ + at + piece];
      if constexpr (kIsTwice) {
        return {.first = twice(Bits::kPower), .second = byte == 0 ? kOne / 2 : byte * kOne};
      } else {
        return {.first = byte * kOne + 126 * kOne, .second = 0};
      }
    };
  }

 private:
  using Bits = ElementBits<WeightFormat::kMxfp4>;
  static constexpr uint32_t kMaxBytes = 0x01010101u * Bits::kMaxScaleByte;

  uint8_t* table_;
  const uint8_t* row_;
  int32_t row_step_;
};

template <>
class WeightScales<WeightFormat::kFp8> {
 public:
  static constexpr int32_t bytes(int32_t tile_rows, const ScaleArgs& args) {
    return num_table_rows(tile_rows, args) * args.columns * static_cast<int32_t>(sizeof(float));
  }

  __device__ __forceinline__ WeightScales(std::byte* table, const ScaleArgs& args,
                                          int32_t row_in_tile)
      : table_(reinterpret_cast<float*>(table)),
        is_in_values_(args.use == ScaleUse::kValues),
        is_by_stage_(args.columns > 1),
        rows_{table_ + (row_in_tile >> args.row_shift) * args.columns,
              table_ + ((row_in_tile + 8) >> args.row_shift) * args.columns} {}

  __device__ __forceinline__ bool copy(const ScaleArgs& args, int32_t expert, int32_t first_row,
                                       int32_t num_rows, int32_t tile_rows, int32_t thread,
                                       int32_t num_threads) const {
    // A tile begins at a multiple of the rows that share a scale, or lies within them.
    const auto* const from =
        reinterpret_cast<const float*>(args.scales + expert * args.expert_stride) +
        int64_t{first_row >> args.row_shift} * args.columns;
    const int32_t count = num_table_rows(num_rows, args) * args.columns;
    const int32_t room = num_table_rows(tile_rows, args) * args.columns;
    bool is_large = false;
    for (int32_t i = thread; i < room; i += num_threads) {
      const float scale = i < count ? from[i] : 0.0f;
      table_[i] = scale;
      is_large |= fabsf(scale) > ElementBits<WeightFormat::kFp8>::kMaxScale;
    }
    return is_large && is_in_values_;
  }

  template <bool kIsTwice>
  __device__ __forceinline__ auto multipliers(int32_t stage, int32_t /*half*/) const {
    return [low = multiplier<kIsTwice>(0, stage), high = multiplier<kIsTwice>(1, stage)](
               int32_t i, int32_t /*piece*/) { return i == 0 ? low : high; };
  }

  // The scale of row `row_in_tile + 8 i` in stage `stage`.
  __device__ __forceinline__ float scale(int32_t i, int32_t stage) const {
    return rows_[i][is_by_stage_ ? stage : 0];
  }

 private:
  static constexpr __host__ __device__ int32_t num_table_rows(int32_t tile_rows,
                                                              const ScaleArgs& args) {
    return (tile_rows + (1 << args.row_shift) - 1) >> args.row_shift;
  }

  template <bool kIsTwice>
  __device__ __forceinline__ Multiplier multiplier(int32_t i, int32_t stage) const {
    using Bits = ElementBits<WeightFormat::kFp8>;
    const float value = is_in_values_ ? scale(i, stage) : 1.0f;
    if (kIsTwice && fabsf(value) > Bits::kMaxScale) {
      return {.first = twice(Bits::kPower), .second = twice(value)};
    }
    return {.first = twice(value * Bits::kPower), .second = twice(1.0f)};
  }

  float* table_;
  bool is_in_values_;
  bool is_by_stage_;
  const float* rows_[2];
};

}  // namespace paceline::cuda
