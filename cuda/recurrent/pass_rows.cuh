// SPDX-License-Identifier: Apache-2.0
#pragma once

// What both kernels of gated_delta need: where the rows of a sequence, their inputs and their
// stores are, and the functions of a row's scalars.

#include <cstdint>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "ops/recurrent.h"

namespace paceline::cuda {
namespace {

constexpr float kL2Eps = 1e-6f;
constexpr float kLinearSoftplus = 20.0f;  // softplus(x) = x above

__device__ __forceinline__ float sigmoid_of(float x) {
  constexpr float kMinusLog2E = -1.4426950408889634f;
  return reciprocal_approx(__fadd_rn(1.0f, exp2_approx(__fmul_rn(x, kMinusLog2E))));
}
__device__ __forceinline__ float silu_of(float x) { return __fmul_rn(x, sigmoid_of(x)); }
__device__ __forceinline__ float softplus_of(float x) {
  return x > kLinearSoftplus ? x : log1pf(expf(x));
}
__device__ __forceinline__ float decay_of(float a, float a_log, float dt_bias) {
  return expf(__fmul_rn(-expf(a_log), softplus_of(__fadd_rn(a, dt_bias))));
}

// The rows of a sequence in a pass.
struct RowRange {
  int32_t begin;     // the first row,
  int32_t start;     // its position,
  int32_t num_live;  // and the number of live rows
  int32_t seq_slot;
  int32_t first;  // position of the first row to replay

  [[nodiscard]] __device__ __forceinline__ int32_t end() const { return start + num_live; }
};

// The same with the pass. Input: elements of x, ba and y. Stored: of records.
template <class InputT, class StoredT>
struct PassRows : RowRange {
  using Input = InputT;
  using Stored = StoredT;

  const GatedDeltaParams& p;

  __device__ __forceinline__ PassRows(const RowRange& range, const GatedDeltaParams& params)
      : RowRange(range), p(params) {}
  [[nodiscard]] __device__ __forceinline__ int32_t row_at(int32_t position) const {
    return begin + (position - start);
  }
  // The inputs of a token: in x, or before the pass in its record; null before position 0.
  [[nodiscard]] __device__ __forceinline__ const std::byte* inputs_at(int32_t position) const {
    if (position < 0) return nullptr;
    if (position >= start) {
      return reinterpret_cast<const std::byte*>(static_cast<const Input*>(p.x) +
                                                row_at(position) * p.x_stride);
    }
    return record_of(position);
  }
  // The block of the record of a position, as the table has it.
  [[nodiscard]] __device__ __forceinline__ int32_t record_block(int32_t position) const {
    return p.record_table
        .blocks[seq_slot * p.record_table.stride + position / p.record_table.block_size];
  }
  [[nodiscard]] __device__ __forceinline__ std::byte* record_in(int64_t block,
                                                                int32_t position) const {
    return p.records.base + block * p.records.block_bytes + p.records.k_offset +
           int64_t{position % p.record_table.block_size} * p.shape.record_width() *
               static_cast<int32_t>(sizeof(Stored));
  }
  [[nodiscard]] __device__ __forceinline__ std::byte* record_of(int32_t position) const {
    return record_in(record_block(position), position);
  }
  // Where the row at `position` writes its record: the block of `slot` is that of the table, or the
  // null block, which is never read, and where rows would race; null then.
  [[nodiscard]] __device__ __forceinline__ Stored* own_record(int32_t position,
                                                              int64_t slot) const {
    if (slot < p.records.block_size) return nullptr;
    return reinterpret_cast<Stored*>(record_of(position));
  }
  // Column `column` of a value head in the entry in `block`.
  [[nodiscard]] __device__ __forceinline__ float* entry_at(int64_t block, int32_t value_head,
                                                           int32_t column) const {
    std::byte* const entry = p.entries.base + block * p.entries.block_bytes + p.entries.k_offset;
    return reinterpret_cast<float*>(entry) +
           (int64_t{value_head} * p.shape.value_dim + column) * p.shape.key_dim;
  }
  // The block with the state before `first`, which is not 0.
  [[nodiscard]] __device__ __forceinline__ int32_t first_entry() const {
    const int32_t index = first / p.entry_table.tokens_per_entry - 1;
    return p.entry_table.blocks[seq_slot * p.entry_table.stride + index];
  }
};

// The number of live rows, which come first.
template <int32_t kNumWarps>
__device__ __forceinline__ int32_t count_live(const int32_t* seq_slot, int32_t begin, int32_t end,
                                              int32_t warp, int32_t lane) {
  __shared__ int32_t counts[kNumWarps];
  int32_t count = 0;
  for (int32_t row = begin + static_cast<int32_t>(threadIdx.x); row < end; row += 32 * kNumWarps) {
    count += seq_slot[row] >= 0 ? 1 : 0;
  }
  count = __reduce_add_sync(kAllLanes, count);
  if (lane == 0) counts[warp] = count;
  __syncthreads();
  int32_t all = 0;
#pragma unroll
  for (const int32_t of_warp : counts) all += of_warp;
  return all;
}

// Finds the rows of sequence `sequence`. Returns false if none is live, to all threads of a block.
// Zeros the outputs of inert rows, for one value head; `part` of `num_parts` blocks does a share.
template <int32_t kNumWarps, class Input>
__device__ __forceinline__ bool find_rows(const GatedDeltaParams& p, int32_t sequence,
                                          int32_t value_head, int32_t part, int32_t num_parts,
                                          RowRange& rows) {
  // All at once, before the first branch: what there is of other sequences may be read as well.
  const int32_t num_seqs = *p.num_seqs;
  rows.begin = p.row_indptr[sequence];
  const int32_t end = min(p.row_indptr[sequence + 1], *p.num_rows);
  if (sequence >= num_seqs || rows.begin >= end) return false;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  rows.start = p.positions[rows.begin];
  rows.seq_slot = p.seq_slot[rows.begin];
  rows.num_live = count_live<kNumWarps>(p.seq_slot, rows.begin, end, thread / 32, thread % 32);
  const int32_t tokens = p.entry_table.tokens_per_entry;
  rows.first = rows.start / tokens * tokens;
  const int32_t value_dim = p.shape.value_dim;
  for (int32_t row = rows.begin + rows.num_live + part; row < end; row += num_parts) {
    for (int32_t i = thread; i < value_dim; i += 32 * kNumWarps) {
      narrow(0.0f, static_cast<Input*>(p.y) +
                       (int64_t{row} * p.shape.num_value_heads + value_head) * value_dim + i);
    }
  }
  return rows.num_live > 0;
}

}  // namespace
}  // namespace paceline::cuda
