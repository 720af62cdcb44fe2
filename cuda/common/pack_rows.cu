// SPDX-License-Identifier: Apache-2.0

// The kernel that packs rows of weights: gemm/packed_weights.h has the bits.
//
// A block writes tiles of 16 rows, side by side: it copies their rows into shared memory, and each
// thread makes whole units of 16 or 4 bytes of them. Reads and writes are contiguous. A unit may
// have elements of a row that is not written now; their bits are kept. No other block writes to it.

#include "common/pack_rows.h"

#include <cuda_bf16.h>

#include "base/check.h"
#include "common/status.h"

namespace paceline::cuda {
namespace {

constexpr int32_t kPackThreads = 128;

struct PackArgs {
  PackedTensor to;
  const uint8_t* from;  // row `first`
  int64_t first;
  int64_t count;
  int64_t tile_row_bytes;
  int64_t tile_rows;       // of the tensor in each matrix
  int64_t first_tile_row;  // of those of all matrices
  int64_t chunks;          // blocks for a row of tiles
  bool is_aligned;         // rows begin and end at multiples of 16 bytes
};

// How a kind is packed: `kWords` words make a unit. With g = group(unit), word() makes one of them
// from the rows g and g + 8 of a tile, of which row r begins at `tile + r * pitch`; low_bits() are
// the bits of that word which come from row g.
template <PackedKind kind>
struct Packing;

template <>
struct Packing<PackedKind::kFp8> {
  static constexpr int32_t kTileRowBytes = packed_tile(PackedKind::kFp8).row_bytes;
  static constexpr int32_t kTileBytes = packed_tile(PackedKind::kFp8).bytes();
  static constexpr int32_t kChunkBytes = 512;  // of a row that a block packs
  static constexpr int32_t kWords = 4;
  static constexpr int32_t kUnits = 64;  // of a tile

  __device__ __forceinline__ static int32_t group(int32_t unit) { return unit % 32 / 4; }
  __device__ __forceinline__ static uint32_t low_bits(int32_t word) {
    return word % 2 == 0 ? 0xffffffffu : 0u;
  }
  __device__ __forceinline__ static uint32_t word(const uint8_t* tile, int32_t pitch, int32_t unit,
                                                  int32_t word) {
    const uint8_t* const at = tile + (group(unit) + 8 * (word % 2)) * pitch + unit / 32 * 32 +
                              word / 2 * 16 + unit % 4 * 2;
    const uint32_t a = at[0] | uint32_t{at[1]} << 16;
    const uint32_t b = at[8] | uint32_t{at[9]} << 16;
    return (a & 0x00800080u) << 8 | (a & 0x007f007fu) << 4 | (b & 0x00800080u) << 4 |
           (b & 0x00700070u) << 8 | (b & 0x000f000fu);
  }
};

// Elements of 4 bits.
template <PackedKind kind>
struct NibblePacking {
  static constexpr int32_t kTileRowBytes = packed_tile(kind).row_bytes;
  static constexpr int32_t kTileBytes = packed_tile(kind).bytes();
  static constexpr int32_t kChunkBytes = 512;
  static constexpr int32_t kWords = 4;
  static constexpr int32_t kUnits = 32;

  __device__ __forceinline__ static int32_t group(int32_t unit) { return unit / 4; }
  // The two elements of a byte, in the lower and in the upper half.
  __device__ __forceinline__ static uint32_t spread(uint32_t byte) {
    return (byte & 0x0fu) | (byte & 0xf0u) << 12;
  }
};

// Scales and zero points: a word of two rows.
template <PackedKind kind>
struct ScalePacking {
  static constexpr int32_t kTileRowBytes = packed_tile(kind).row_bytes;
  static constexpr int32_t kTileBytes = packed_tile(kind).bytes();
  static constexpr int32_t kChunkBytes = 128;
  static constexpr int32_t kWords = 1;
  static constexpr int32_t kUnits = 8;

  __device__ __forceinline__ static int32_t group(int32_t unit) { return unit; }
};

template <>
struct Packing<PackedKind::kMxfp4> : NibblePacking<PackedKind::kMxfp4> {
  __device__ __forceinline__ static uint32_t low_bits(int32_t) { return 0x83c783c7u; }
  __device__ __forceinline__ static uint32_t word(const uint8_t* tile, int32_t pitch, int32_t unit,
                                                  int32_t word) {
    const uint8_t* const low = tile + group(unit) * pitch + word * 8 + unit % 4;
    const uint8_t* const high = low + 8 * pitch;
    const uint32_t a0 = spread(low[0]);
    const uint32_t a1 = spread(high[0]);
    const uint32_t a2 = spread(low[4]);
    const uint32_t a3 = spread(high[4]);
    return (a0 & kSign) << 12 | (a0 & kRest) << 6 | __byte_perm(a1 & kSign, 0, 0x1032) |
           (a1 & kRest) << 10 | (a2 & kSign) << 6 | (a2 & kRest) | (a3 & kSign) << 10 |
           (a3 & 0x00040004u) << 12 | (a3 & 0x00030003u) << 4;
  }

 private:
  static constexpr uint32_t kSign = 0x00080008u;
  static constexpr uint32_t kRest = 0x00070007u;
};

template <>
struct Packing<PackedKind::kMxfp4Scales> : ScalePacking<PackedKind::kMxfp4Scales> {
  __device__ __forceinline__ static uint32_t low_bits(int32_t) { return 0x00ff00ffu; }
  __device__ __forceinline__ static uint32_t word(const uint8_t* tile, int32_t pitch, int32_t unit,
                                                  int32_t) {
    const uint8_t* const low = tile + unit * pitch;
    const uint8_t* const high = low + 8 * pitch;
    return low[0] | uint32_t{high[0]} << 8 | uint32_t{low[1]} << 16 | uint32_t{high[1]} << 24;
  }
};

template <>
struct Packing<PackedKind::kInt4> : NibblePacking<PackedKind::kInt4> {
  __device__ __forceinline__ static uint32_t low_bits(int32_t) { return 0x0f0f0f0fu; }
  __device__ __forceinline__ static uint32_t word(const uint8_t* tile, int32_t pitch, int32_t unit,
                                                  int32_t word) {
    const uint8_t* const low = tile + group(unit) * pitch + word * 8 + unit % 4;
    const uint8_t* const high = low + 8 * pitch;
    return spread(low[0]) | spread(high[0]) << 4 | spread(low[4]) << 8 | spread(high[4]) << 12;
  }
};

template <>
struct Packing<PackedKind::kInt4Scales> : ScalePacking<PackedKind::kInt4Scales> {
  __device__ __forceinline__ static uint32_t low_bits(int32_t) { return 0x0000ffffu; }
  __device__ __forceinline__ static uint32_t word(const uint8_t* tile, int32_t pitch, int32_t unit,
                                                  int32_t) {
    const uint8_t* const low = tile + unit * pitch;
    const uint8_t* const high = low + 8 * pitch;
    return low[0] | uint32_t{low[1]} << 8 | uint32_t{high[0]} << 16 | uint32_t{high[1]} << 24;
  }
};

// The scales of kNvfp4 become lines: a unit has those of 16 columns of rows g and g + 8.
template <>
struct Packing<PackedKind::kNvfp4Scales> {
  static constexpr int32_t kTileRowBytes = packed_tile(PackedKind::kNvfp4Scales).row_bytes;
  static constexpr int32_t kTileBytes = packed_tile(PackedKind::kNvfp4Scales).bytes();
  static constexpr int32_t kChunkBytes = 128;
  static constexpr int32_t kWords = 2;  // slopes, offsets
  static constexpr int32_t kUnits = 32;

  __device__ __forceinline__ static int32_t group(int32_t unit) { return unit / 4; }
  __device__ __forceinline__ static uint32_t low_bits(int32_t) { return 0x0000ffffu; }
  __device__ __forceinline__ static uint32_t word(const uint8_t* tile, int32_t pitch, int32_t unit,
                                                  int32_t word) {
    const uint8_t* const low = tile + group(unit) * pitch + unit % 4 * 4;
    return bits_of_line(low, word) | bits_of_line(low + 8 * pitch, word) << 16;
  }

 private:
  __device__ __forceinline__ static float rounded(float value) {
    return __bfloat162float(__float2bfloat16_rn(value));
  }
  // The bfloat16 slope (word 0) or offset (word 1) of a scale. No operation on them rounds.
  __device__ __forceinline__ static uint32_t bits_of_line(const uint8_t* scale, int32_t word) {
    const float value = *reinterpret_cast<const float*>(scale);
    const float of_1 = rounded(value);
    const float slope = 2.0f * (rounded(1.5f * value) - of_1);
    return __float_as_uint(word == 0 ? slope : of_1 - slope) >> 16;
  }
};

// Rows of the chunk in shared memory; eight of them begin in different banks.
template <PackedKind kind>
constexpr int32_t kPackPitch = Packing<kind>::kChunkBytes + 16;

// What block `block` packs.
struct PackBlock {
  int64_t from_row;  // the row of `from` that is row 0 of the tiles; it need not exist
  int32_t begin;     // rows [begin, end) of the tiles are written
  int32_t end;
  int64_t chunk;
  std::byte* tiles;  // of the whole row of tiles

  __device__ __forceinline__ PackBlock(const PackArgs& args, int64_t block) {
    const PackedTensor& to = args.to;
    chunk = block % args.chunks;
    const int64_t index = args.first_tile_row + block / args.chunks;
    const int64_t matrix = index / args.tile_rows;
    const int64_t tile_row = to.first_row / kPackedRows + index % args.tile_rows;
    tiles = to.matrix + matrix * to.matrix_stride + tile_row * args.tile_row_bytes;
    // Row r of the tiles is this plus r in the tensor's part of the matrix.
    const int64_t row = tile_row * kPackedRows - to.first_row;
    from_row = matrix * to.num_rows + row - args.first;
    begin = static_cast<int32_t>(clamp(-row > -from_row ? -row : -from_row));
    const int64_t behind_part = to.num_rows - row;
    const int64_t behind_all = args.count - from_row;
    end = static_cast<int32_t>(clamp(behind_part < behind_all ? behind_part : behind_all));
  }

  __device__ __forceinline__ bool has(int32_t row) const { return row >= begin && row < end; }

 private:
  __device__ __forceinline__ static int64_t clamp(int64_t row) {
    return row < 0 ? 0 : row > kPackedRows ? kPackedRows : row;
  }
};

struct alignas(16) PackedBytes {
  uint32_t words[4];
};

// Copies a thread's part of a chunk of the rows. Bytes that do not exist become zero.
template <PackedKind kind>
__device__ __forceinline__ void load_chunk(const PackArgs& args, const PackBlock& block,
                                           int32_t thread, uint8_t* rows) {
  constexpr int32_t kBytes = Packing<kind>::kChunkBytes;
  const int64_t row_bytes = args.to.row_bytes;
  const int64_t first_byte = block.chunk * kBytes;
  if (args.is_aligned) {
    constexpr int32_t kPieces = kBytes / 16;
#pragma unroll
    for (int32_t i = 0; i < kPackedRows * kPieces / kPackThreads; ++i) {
      const int32_t piece = i * kPackThreads + thread;
      const int32_t row = piece / kPieces;
      const int32_t byte = piece % kPieces * 16;
      PackedBytes bytes = {};
      if (block.has(row) && first_byte + byte < row_bytes) {
        bytes = *reinterpret_cast<const PackedBytes*>(
            args.from + (block.from_row + row) * row_bytes + first_byte + byte);
      }
      *reinterpret_cast<PackedBytes*>(rows + row * kPackPitch<kind> + byte) = bytes;
    }
    return;
  }
#pragma unroll 8
  for (int32_t at = thread; at < kPackedRows * kBytes; at += kPackThreads) {
    const int32_t row = at / kBytes;
    const int32_t byte = at % kBytes;
    const bool exists = block.has(row) && first_byte + byte < row_bytes;
    rows[row * kPackPitch<kind> + byte] =
        exists ? args.from[(block.from_row + row) * row_bytes + first_byte + byte] : uint8_t{0};
  }
}

// Writes a thread's units of the chunk.
template <PackedKind kind>
__device__ __forceinline__ void write_chunk(const PackArgs& args, const PackBlock& block,
                                            int32_t thread, const uint8_t* rows) {
  using Pack = Packing<kind>;
  constexpr int32_t kTileRowBytes = Pack::kTileRowBytes;
  constexpr int32_t kTileBytes = Pack::kTileBytes;
  constexpr int32_t kTiles = Pack::kChunkBytes / kTileRowBytes;
  struct alignas(4 * Pack::kWords) Unit {
    uint32_t words[Pack::kWords];
  };
  static_assert(Pack::kUnits * sizeof(Unit) == kTileBytes);
  const int64_t num_tiles = (args.to.row_bytes + kTileRowBytes - 1) / kTileRowBytes;
#pragma unroll
  for (int32_t i = 0; i < kTiles * Pack::kUnits / kPackThreads; ++i) {
    const int32_t at = i * kPackThreads + thread;
    const int32_t tile = at / Pack::kUnits;
    const int32_t unit = at % Pack::kUnits;
    const bool has_low = block.has(Pack::group(unit));
    const bool has_high = block.has(Pack::group(unit) + 8);
    const int64_t index = block.chunk * kTiles + tile;
    if (index >= num_tiles || !(has_low || has_high)) continue;
    auto* const to = reinterpret_cast<Unit*>(block.tiles + index * kTileBytes) + unit;
    Unit packed;
#pragma unroll
    for (int32_t word = 0; word < Pack::kWords; ++word) {
      packed.words[word] = Pack::word(rows + tile * kTileRowBytes, kPackPitch<kind>, unit, word);
    }
    if (!(has_low && has_high)) {
      const Unit old = *to;
#pragma unroll
      for (int32_t word = 0; word < Pack::kWords; ++word) {
        const uint32_t mine = has_low ? Pack::low_bits(word) : ~Pack::low_bits(word);
        packed.words[word] = (packed.words[word] & mine) | (old.words[word] & ~mine);
      }
    }
    *to = packed;
  }
}

// The arguments for rows [first, first + count), and how many blocks they take.
template <PackedKind kind>
PackArgs pack_args(const PackedTensor& to, int64_t first, int64_t count, const std::byte* from,
                   int64_t& num_blocks) {
  const int64_t skipped = to.first_row / kPackedRows;
  const int64_t tile_rows = (to.first_row + to.num_rows - 1) / kPackedRows + 1 - skipped;
  const auto tile_row_of = [&](int64_t row) {
    return row / to.num_rows * tile_rows + (to.first_row + row % to.num_rows) / kPackedRows -
           skipped;
  };
  const int64_t first_tile_row = tile_row_of(first);
  constexpr int32_t kBytes = Packing<kind>::kChunkBytes;
  const int64_t chunks = (to.row_bytes + kBytes - 1) / kBytes;
  num_blocks = (tile_row_of(first + count - 1) - first_tile_row + 1) * chunks;
  return {.to = to,
          .from = reinterpret_cast<const uint8_t*>(from),
          .first = first,
          .count = count,
          .tile_row_bytes = to.tile_row_bytes(),
          .tile_rows = tile_rows,
          .first_tile_row = first_tile_row,
          .chunks = chunks,
          .is_aligned = to.row_bytes % 16 == 0};
}

template <PackedKind kind>
__global__ void __launch_bounds__(kPackThreads)
    pack_rows_kernel(const __grid_constant__ PackArgs args) {
  __shared__ __align__(16) uint8_t rows[kPackedRows * kPackPitch<kind>];
  const PackBlock block(args, blockIdx.x);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  load_chunk<kind>(args, block, thread, rows);
  __syncthreads();
  write_chunk<kind>(args, block, thread, rows);
}

template <PackedKind kind>
void launch_pack(cudaStream_t stream, const PackedTensor& to, int64_t first, int64_t count,
                 const std::byte* from) {
  int64_t num_blocks = 0;
  const PackArgs args = pack_args<kind>(to, first, count, from, num_blocks);
  PACELINE_CHECK(num_blocks < int64_t{1} << 31, num_blocks);
  pack_rows_kernel<kind><<<static_cast<uint32_t>(num_blocks), kPackThreads, 0, stream>>>(args);
}

}  // namespace

void pack_rows(cudaStream_t stream, const PackedTensor& to, int64_t first, int64_t count,
               const std::byte* from) {
  if (count == 0) return;
  PACELINE_CHECK(reinterpret_cast<uintptr_t>(from) % 16 == 0, "rows must be 16 B aligned");
  switch (to.kind) {
    case PackedKind::kFp8:
      launch_pack<PackedKind::kFp8>(stream, to, first, count, from);
      break;
    case PackedKind::kMxfp4:
      launch_pack<PackedKind::kMxfp4>(stream, to, first, count, from);
      break;
    case PackedKind::kMxfp4Scales:
      launch_pack<PackedKind::kMxfp4Scales>(stream, to, first, count, from);
      break;
    case PackedKind::kInt4:
      launch_pack<PackedKind::kInt4>(stream, to, first, count, from);
      break;
    case PackedKind::kInt4Scales:
      launch_pack<PackedKind::kInt4Scales>(stream, to, first, count, from);
      break;
    case PackedKind::kNvfp4Scales:
      launch_pack<PackedKind::kNvfp4Scales>(stream, to, first, count, from);
      break;
  }
  check(cudaGetLastError(), "packing weights");
}

}  // namespace paceline::cuda
