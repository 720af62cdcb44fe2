// SPDX-License-Identifier: Apache-2.0

// Scores of compressed entries. A block takes 128 entries of a sequence, whose keys its four warps
// keep in registers as the rows of mma.sync products, and the heads of up to 16 rows of the
// sequence, one row after the other, as the columns. A score is a sum over the heads: in a thread
// over every fourth pair of heads, ascending, then over the four threads that share an entry.
// Nothing depends on where a row or an entry lies in a block, so rows are invariant.

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "attention/paged_attention_rows.cuh"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "ops/compressed.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kTileRows = 16;

// The rows of a block that need scores, and the entries they see.
struct ScoredRows {
  int32_t first;
  uint32_t needed;  // bit i: row first + i
  int32_t end;      // one past the last entry that any of them sees
  int32_t seq_slot;
};

// Tiles of the rows of each sequence, as in paged attention; every lane of a warp gets the same
// answer.
__device__ __forceinline__ ScoredRows find_rows(const IndexScoresParams& p, int32_t tiles_per_seq,
                                                int32_t first_entry) {
  ScoredRows rows = {.first = 0, .needed = 0, .end = 0, .seq_slot = -1};
  const int32_t num_rows = min(*p.num_rows, p.max_rows);
  const auto index = static_cast<int32_t>(blockIdx.y);
  int32_t count = 1;
  if (p.row_indptr == nullptr) {
    rows.first = index;
  } else {
    const int32_t num_seqs = min(*p.num_seqs, p.max_seqs);
    paged::Tile tile;
    if (tiles_per_seq == 1) {
      if (index >= num_seqs) return rows;
      const int32_t first = p.row_indptr[index];
      tile = {.first_row = first, .num_rows = p.row_indptr[index + 1] - first, .index = 0};
    } else if (!paged::find_tile(p.row_indptr, num_seqs, 1, kTileRows, index, &tile)) {
      return rows;
    }
    rows.first = tile.first_row + tile.index * kTileRows;
    count = min(tile.num_rows - tile.index * kTileRows, kTileRows);
  }
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t row = rows.first + lane;
  int32_t seq_slot = -1;
  int32_t end = 0;
  if (lane < count && row < num_rows) {
    seq_slot = p.seq_slot[row];
    end = p.entry_end[row];
  }
  // All entries of a row that sees no more than top_k are chosen anyway.
  const bool is_needed = seq_slot >= 0 && end > p.top_k && end > first_entry;
  rows.needed = __ballot_sync(kAllLanes, is_needed);
  rows.end = __reduce_max_sync(kAllLanes, is_needed ? end : 0);
  rows.seq_slot = __reduce_max_sync(kAllLanes, is_needed ? seq_slot : -1);
  return rows;
}

__device__ __forceinline__ const std::byte* key_at(const IndexScoresParams& p, int32_t seq_slot,
                                                   int32_t entry, int64_t key_bytes) {
  const int32_t block = p.table.blocks[seq_slot * p.table.stride + entry / p.table.block_size];
  return p.keys.base + block * p.keys.block_bytes + p.keys.k_offset +
         entry % p.table.block_size * key_bytes;
}

// --- bfloat16, 64 heads of 128 elements ----------------------------------------------------------

constexpr int32_t kHeads = 64;
constexpr int32_t kDim = 128;
constexpr int32_t kUnits = kDim / 8;  // of 16 bytes
constexpr int32_t kEntries = 128;     // of a block
constexpr int32_t kThreads = 128;
constexpr int32_t kWarpEntries = kEntries / (kThreads / 32);
constexpr int32_t kKeyTiles = kWarpEntries / 16;
constexpr int32_t kHeadTiles = 4;  // of 8 heads, whose products are in registers at once
constexpr int32_t kKeyBytes = kEntries * kDim * 2;
constexpr int32_t kQueryBytes = kHeads * kDim * 2;
constexpr int32_t kQuerySlots = 2;
constexpr int32_t kSharedBytes = kKeyBytes + kQuerySlots * kQueryBytes;

// Copies the queries of a row, and commits.
__device__ __forceinline__ void request_queries(const IndexScoresParams& p, int32_t row,
                                                uint32_t to) {
  const auto* const q = static_cast<const __nv_bfloat16*>(p.q) + int64_t{row} * kHeads * kDim;
#pragma unroll
  for (int32_t i = 0; i < kHeads * kUnits / kThreads; ++i) {
    const int32_t at = static_cast<int32_t>(threadIdx.x) + i * kThreads;
    cp_async_16(to + paged::swizzled(at / kUnits, at % kUnits, kUnits), q + at * 8, true);
  }
  cp_async_commit();
}

__global__ void __launch_bounds__(kThreads, 3)
    index_scores_kernel(const __grid_constant__ IndexScoresParams p, const int32_t tiles_per_seq) {
  extern __shared__ __align__(1024) std::byte shared[];
  __shared__ const std::byte* keys[kEntries];
  let_successor_start();
  wait_for_predecessor();
  const int32_t first_entry = static_cast<int32_t>(blockIdx.x) * kEntries;
  const ScoredRows rows = find_rows(p, tiles_per_seq, first_entry);
  uint32_t left = rows.needed;
  if (left == 0) return;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const int32_t warp = thread / 32;
  const uint32_t key_shared = shared_address(shared);
  const uint32_t query_shared = key_shared + kKeyBytes;

  keys[thread] = first_entry + thread < rows.end
                     ? key_at(p, rows.seq_slot, first_entry + thread, kDim * 2)
                     : nullptr;
  __syncthreads();
#pragma unroll 4
  for (int32_t i = 0; i < kEntries * kUnits / kThreads; ++i) {
    const int32_t at = thread + i * kThreads;
    const int32_t unit = at % kUnits;
    const std::byte* const key = keys[at / kUnits];
    cp_async_16(key_shared + paged::swizzled(at / kUnits, unit, kUnits),
                key == nullptr ? p.keys.base : key + unit * 16, key != nullptr);
  }
  int32_t next = __ffs(static_cast<int>(left)) - 1;
  request_queries(p, rows.first + next, query_shared);
  cp_async_wait<0>();
  __syncthreads();
  uint32_t a[kKeyTiles][kDim / 16][4];
#pragma unroll
  for (int32_t m = 0; m < kKeyTiles; ++m) {
#pragma unroll
    for (int32_t k = 0; k < kDim / 16; ++k) {
      const int32_t key = warp * kWarpEntries + m * 16 + lane % 16;
      ldmatrix_x4(a[m][k], key_shared + paged::swizzled(key, 2 * k + lane / 16, kUnits));
    }
  }

  int32_t slot = 0;
  while (left != 0) {
    const int32_t row = rows.first + next;
    left &= left - 1;
    if (left != 0) {
      next = __ffs(static_cast<int>(left)) - 1;
      request_queries(p, rows.first + next, query_shared + (slot ^ 1) * kQueryBytes);
    }
    const uint32_t queries = query_shared + slot * kQueryBytes;
    const float* const weights = p.weights + row * p.weights_stride + 2 * (lane % 4);
    float sums[kKeyTiles][2] = {};
#pragma unroll
    for (int32_t first = 0; first < kHeads / 8; first += kHeadTiles) {
      float2 w[kHeadTiles];
#pragma unroll
      for (int32_t n = 0; n < kHeadTiles; ++n) {
        w[n] = make_float2(weights[(first + n) * 8], weights[(first + n) * 8 + 1]);
      }
      float products[kKeyTiles][kHeadTiles][4] = {};
#pragma unroll
      for (int32_t k = 0; k < kDim / 16; ++k) {
        uint32_t b[kHeadTiles / 2][4];
#pragma unroll
        for (int32_t n = 0; n < kHeadTiles / 2; ++n) {
          const int32_t head = first * 8 + n * 16 + lane % 8 + lane / 16 * 8;
          ldmatrix_x4(b[n], queries + paged::swizzled(head, 2 * k + lane / 8 % 2, kUnits));
        }
#pragma unroll
        for (int32_t m = 0; m < kKeyTiles; ++m) {
#pragma unroll
          for (int32_t n = 0; n < kHeadTiles; ++n) {
            mma_16x8x16(products[m][n], a[m][k], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
          }
        }
      }
#pragma unroll
      for (int32_t m = 0; m < kKeyTiles; ++m) {
#pragma unroll
        for (int32_t n = 0; n < kHeadTiles; ++n) {
#pragma unroll
          for (int32_t half = 0; half < 2; ++half) {
            float& sum = sums[m][half];
            sum = __fmaf_rn(w[n].x, fmaxf(products[m][n][2 * half], 0.0f), sum);
            sum = __fmaf_rn(w[n].y, fmaxf(products[m][n][2 * half + 1], 0.0f), sum);
          }
        }
      }
    }
    const int32_t end = p.entry_end[row];
    float* const scores = p.scores + row * p.scores_stride;
#pragma unroll
    for (int32_t m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        float sum = sums[m][half];
        sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, 2));
        const int32_t entry = first_entry + warp * kWarpEntries + m * 16 + half * 8 + lane / 4;
        if (lane % 4 == 0 && entry < end) scores[entry] = __fmul_rn(p.scale, sum);
      }
    }
    // The next row's queries have arrived, and no warp reads this row's any more.
    cp_async_wait<0>();
    __syncthreads();
    slot ^= 1;
  }
}

// --- any other shape: for tests ------------------------------------------------------------------

// A thread scores one entry for one row.
template <class T, class Kv>
__global__ void __launch_bounds__(kThreads)
    plain_index_scores_kernel(const __grid_constant__ IndexScoresParams p) {
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.y);
  const auto entry = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (row >= min(*p.num_rows, p.max_rows)) return;
  const int32_t seq_slot = p.seq_slot[row];
  const int32_t end = p.entry_end[row];
  if (seq_slot < 0 || end <= p.top_k || entry >= end) return;
  const T* q = static_cast<const T*>(p.q) + int64_t{row} * p.num_heads * p.head_dim;
  const float* const weights = p.weights + row * p.weights_stride;
  const auto* const key = reinterpret_cast<const Kv*>(
      key_at(p, seq_slot, entry, p.head_dim * static_cast<int64_t>(sizeof(Kv))));
  float sum = 0.0f;
  for (int32_t head = 0; head < p.num_heads; ++head, q += p.head_dim) {
    float product = 0.0f;
    for (int32_t i = 0; i < p.head_dim; ++i) {
      product = __fmaf_rn(widen(q[i]), widen(key[i]), product);
    }
    sum = __fmaf_rn(weights[head], fmaxf(product, 0.0f), sum);
  }
  p.scores[row * p.scores_stride + entry] = __fmul_rn(p.scale, sum);
}

}  // namespace
}  // namespace cuda

void index_scores(CudaContext& ctx, const IndexScoresParams& params) {
  using namespace cuda;
  constexpr const char* kName = "index_scores";
  IndexScoresParams p = params;
  if (p.max_seqs == 0 || p.row_indptr == nullptr) {
    // Every row is its own sequence.
    p.row_indptr = nullptr;
    p.max_seqs = p.max_rows;
    p.max_rows_per_seq = 1;
  }
  PACELINE_CHECK(p.row_indptr == nullptr || p.num_seqs != nullptr, "row_indptr without num_seqs");
  const auto entry_tiles = static_cast<uint32_t>((p.scores_stride + kEntries - 1) / kEntries);
  const bool has_instance = p.dtype == DType::kBFloat16 && p.keys.dtype == DType::kBFloat16 &&
                            p.num_heads == kHeads && p.head_dim == kDim &&
                            p.keys.block_bytes % 16 == 0 && p.keys.k_offset % 16 == 0 &&
                            is_vector_aligned(p.q);
  if (!has_instance) {
    with_element_type(p.dtype, "q", [&](auto element) {
      with_element_type(p.keys.dtype, "KV cache", [&](auto kv_element) {
        launch(ctx, kName, plain_index_scores_kernel<decltype(element), decltype(kv_element)>,
               dim3(entry_tiles, static_cast<uint32_t>(p.max_rows)), dim3(kThreads), 0, p);
      });
    });
    return;
  }
  static OncePerDevice allow;
  allow([] { allow_shared_bytes(index_scores_kernel, kSharedBytes, "index_scores"); });
  const int32_t tiles_per_seq = (p.max_rows_per_seq + kTileRows - 1) / kTileRows;
  int64_t tiles = int64_t{p.max_seqs} * tiles_per_seq;
  if (p.row_indptr != nullptr) {
    // Each sequence rounds up at most once.
    tiles = std::min<int64_t>(tiles, p.max_rows / kTileRows + p.max_seqs);
  }
  launch(ctx, kName, index_scores_kernel, dim3(entry_tiles, static_cast<uint32_t>(tiles)),
         dim3(kThreads), kSharedBytes, p, tiles_per_seq);
}

}  // namespace paceline
