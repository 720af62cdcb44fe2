// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the rows of a chunk are made, for chunk_kernel.cuh: the chunk in shared memory, and the warps
// that convolve q, k and v and normalise q and k.

#include <cstdint>

#include "common/convert.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "gemm/wgmma.cuh"
#include "ops/recurrent.h"
#include "recurrent/pass_rows.cuh"

namespace paceline::cuda {
namespace {

constexpr int32_t kHeadDim = 128;
constexpr int32_t kTaps = 4;
constexpr int32_t kChunkRows = 16;
constexpr float kQueryScale = 0.08838834764831845f;       // kHeadDim^-1/2
constexpr int32_t kWarpColumns = 16;                      // of S
constexpr int32_t kChunkWarps = kHeadDim / kWarpColumns;  // that consume
constexpr int32_t kRelaters = 4;                          // warps that relate rows
constexpr int32_t kWarpRows = kChunkRows / kChunkWarps;   // that a warp makes or finishes at a time
// The rows g of the products' operands lie in different banks, and the rows 2 t of v.
constexpr int32_t kRowFloats = kHeadDim + 4;

using ChunkRowsOf = PassRows<__nv_bfloat16, __nv_bfloat16>;

// What is the same for all columns of a chunk. A value of each row, and the columns of `inverse`
// and `weights`, are in the order of place_of.
struct __align__(16) Chunk {
  float q[kChunkRows][kRowFloats];
  float k[kChunkRows][kRowFloats];
  float v[kChunkRows][kRowFloats];    // then the outputs
  float keys[kHeadDim][kChunkRows];   // k by keys; the rows as key_place says
  float gates[kChunkRows][kHeadDim];  // silu(z), times the weights of the norm
  float inverse[kChunkRows][kChunkRows];
  float weights[kChunkRows][kChunkRows];
  float from_start[kChunkRows];  // G_t
  float to_end[kChunkRows];      // G_15,t
  float beta[kChunkRows];
  float b[kChunkRows];  // by row, as a
  float a[kChunkRows];
  int32_t entry;  // the block of the entry that the last row completes, or 0
};

// Rows 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t, which lane t of a product needs, follow each other.
__device__ __forceinline__ int32_t place_of(int32_t row) {
  return row % 8 / 2 * 4 + row / 8 * 2 + row % 2;
}

// Where lane t finds its four rows of a key. Units of four rows change places with the key, so that
// few lanes that write the same rows of different keys meet in a bank.
__device__ __forceinline__ int32_t key_place(int32_t key, int32_t t) {
  return 4 * (t ^ key / 4 % 4);
}

// Four channels of a lane as they are in memory.
using RawChannels = uint2;

__device__ __forceinline__ void widen_channels(const RawChannels& raw, float (&to)[4]) {
  to[0] = __uint_as_float(raw.x << 16);
  to[1] = __uint_as_float(raw.x & 0xffff0000u);
  to[2] = __uint_as_float(raw.y << 16);
  to[3] = __uint_as_float(raw.y & 0xffff0000u);
}

enum Part : int32_t { kQ, kK, kV, kNumParts };  // of the convolution

// A value head and the channels of a lane in it and in its key head.
struct HeadChannels {
  int32_t value_head;
  int32_t first[kNumParts];
  int32_t z;
  bool writes_keys;  // to the records

  __device__ __forceinline__ HeadChannels(const RecurrentShape& s, int32_t head, int32_t lane)
      : value_head(head) {
    const int32_t heads_of_key = s.num_value_heads / s.num_key_heads;
    first[kQ] = head / heads_of_key * kHeadDim + 4 * lane;
    first[kK] = s.keys_width() + first[kQ];
    first[kV] = 2 * s.keys_width() + head * kHeadDim + 4 * lane;
    z = s.num_channels() + head * kHeadDim + 4 * lane;
    writes_keys = head % heads_of_key == 0;
  }
};

// What kRows rows are made of.
template <int32_t kRows>
struct RowSources {
  static constexpr int32_t kTokens = kTaps + kRows - 1;
  RawChannels u[kNumParts][kTokens];
  RawChannels z[kRows];
  int64_t slots[kRows];   // of their records
  int32_t blocks[kRows];  // where these are, unless the slot is of the null block
  __nv_bfloat16 b[kRows];
  __nv_bfloat16 a[kRows];
};

__device__ __forceinline__ RawChannels load_channels(const __nv_bfloat16* from) {
  return *reinterpret_cast<const RawChannels*>(from);
}

// Begins to read what the rows at `position` and after it are made of, by a warp.
template <int32_t kRows>
__device__ __forceinline__ void begin_rows(const ChunkRowsOf& rows, const HeadChannels& channels,
                                           int32_t position, int32_t lane,
                                           RowSources<kRows>& inputs) {
  constexpr int32_t kTokens = RowSources<kRows>::kTokens;
  const GatedDeltaParams& p = rows.p;
  const int32_t end = rows.end();
  const __nv_bfloat16* rates[kRows];  // in records
  if (position - kTaps + 1 >= rows.start && position + kRows <= end) {
    const __nv_bfloat16* token =
        static_cast<const __nv_bfloat16*>(p.x) + rows.row_at(position - kTaps + 1) * p.x_stride;
#pragma unroll
    for (int i = 0; i < kTokens; ++i, token += p.x_stride) {
#pragma unroll
      for (int part = 0; part < kNumParts; ++part) {
        inputs.u[part][i] = load_channels(token + channels.first[part]);
      }
    }
  } else {
    // A lane for each token finds the inputs.
    const std::byte* found = nullptr;
    const int32_t of_lane = position - kTaps + 1 + lane;
    if (lane < kTokens && of_lane < end) found = rows.inputs_at(of_lane);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const auto* const token = reinterpret_cast<const __nv_bfloat16*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(found), i));
#pragma unroll
      for (int part = 0; part < kNumParts; ++part) {
        inputs.u[part][i] = {};
        if (token != nullptr) inputs.u[part][i] = load_channels(token + channels.first[part]);
      }
      if (i >= kTaps - 1) rates[i - kTaps + 1] = token + p.shape.num_channels();
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    inputs.slots[r] = 0;
    inputs.blocks[r] = 0;
    inputs.z[r] = {};
    if (position + r >= end) continue;
    if (position + r >= rows.start) {
      const int32_t row = rows.row_at(position + r);
      inputs.z[r] =
          load_channels(static_cast<const __nv_bfloat16*>(p.x) + row * p.x_stride + channels.z);
      rates[r] = static_cast<const __nv_bfloat16*>(p.ba) + row * p.ba_stride;
      inputs.slots[r] = p.record_slots[row];
      inputs.blocks[r] = rows.record_block(position + r);
    }
    inputs.b[r] = rates[r][channels.value_head];
    inputs.a[r] = rates[r][p.shape.num_value_heads + channels.value_head];
  }
}

__device__ __forceinline__ float product_of(const float (&a)[4], const float (&b)[4]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum = __fmaf_rn(a[i], b[i], sum);
  return warp_sum(sum);
}

// The chunk that rows are made for: this block's, or that of block 0 of the cluster.
template <bool kIsRemote>
struct ChunkTarget {
  Chunk& chunk;
  uint64_t* are_made;

  template <class T>
  __device__ __forceinline__ void send(T* to, const T& value) const {
    if constexpr (kIsRemote) {
      store_async(to, 0, value, are_made);
    } else {
      *to = value;
    }
  }
  __device__ __forceinline__ void send_channels(float* to, const float (&x)[4]) const {
    send(reinterpret_cast<float4*>(to), float4{x[0], x[1], x[2], x[3]});
  }
};

// Convolves a part of kRows rows.
template <Part kPart, int32_t kRows>
__device__ __forceinline__ void convolve(const float* conv, const RowSources<kRows>& inputs,
                                         float (&x)[kRows][4]) {
  float weights[4][kTaps];
#pragma unroll
  for (int i = 0; i < 4; ++i) load_vector(conv + i * kTaps, weights[i]);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (float& value : x[r]) value = 0.0f;
  }
#pragma unroll
  for (int token = 0; token < RowSources<kRows>::kTokens; ++token) {
    float u[4];
    widen_channels(inputs.u[kPart][token], u);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (token < r || token >= r + kTaps) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) x[r][i] = __fmaf_rn(weights[i][token - r], u[i], x[r][i]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (float& value : x[r]) value = silu_of(value);
  }
}

// Makes q, k, v, b, a and the gate of kRows rows, and writes their records. Those of the rows that
// the pass does not have are zero.
template <class Target, int32_t kRows>
__device__ __forceinline__ void make_rows(const ChunkRowsOf& rows, const HeadChannels& channels,
                                          int32_t position, int32_t lane,
                                          const RowSources<kRows>& inputs, const Target& target) {
  const GatedDeltaParams& p = rows.p;
  Chunk& chunk = target.chunk;
  const int32_t first_row = position % kChunkRows;
  const int32_t num_known = min(max(rows.end() - position, 0), kRows);
  // All is computed before anything is stored, since a store keeps the compiler from loading ahead.
  float q[kRows][4];
  float k[kRows][4];
  float v[kRows][4];
  float gates[kRows][4];
  if (num_known > 0) {
    convolve<kQ>(p.conv + int64_t{channels.first[kQ]} * kTaps, inputs, q);
    convolve<kK>(p.conv + int64_t{channels.first[kK]} * kTaps, inputs, k);
    convolve<kV>(p.conv + int64_t{channels.first[kV]} * kTaps, inputs, v);
    float norm[4];
    load_vector(p.norm + 4 * lane, norm);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float q_scale = __fmul_rn(rsqrtf(__fadd_rn(product_of(q[r], q[r]), kL2Eps)),
                                      kBeforeTf32Cut * kQueryScale);
      const float k_scale =
          __fmul_rn(rsqrtf(__fadd_rn(product_of(k[r], k[r]), kL2Eps)), kBeforeTf32Cut);
      widen_channels(inputs.z[r], gates[r]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        q[r][i] = __fmul_rn(q[r][i], q_scale);
        k[r][i] = __fmul_rn(k[r][i], k_scale);
        gates[r][i] = __fmul_rn(norm[i], silu_of(gates[r][i]));
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int32_t row = first_row + r;
    const bool is_known = r < num_known;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (is_known) continue;
      q[r][i] = k[r][i] = v[r][i] = gates[r][i] = 0.0f;
    }
    target.send_channels(chunk.q[row] + 4 * lane, q[r]);
    target.send_channels(chunk.k[row] + 4 * lane, k[r]);
    target.send_channels(chunk.v[row] + 4 * lane, v[r]);
    target.send_channels(chunk.gates[row] + 4 * lane, gates[r]);
    if (lane == 0) {
      target.send(&chunk.b[row], is_known ? widen(inputs.b[r]) : negative_infinity());  // beta = 0
      target.send(&chunk.a[row], is_known ? widen(inputs.a[r]) : 0.0f);
    }
    if (inputs.slots[r] < p.records.block_size) continue;  // the null block
    auto* const record =
        reinterpret_cast<__nv_bfloat16*>(rows.record_in(inputs.blocks[r], position + r));
#pragma unroll
    for (int part = 0; part < kNumParts; ++part) {
      if (part != kV && !channels.writes_keys) continue;
      *reinterpret_cast<RawChannels*>(record + channels.first[part]) =
          inputs.u[part][kTaps - 1 + r];
    }
    if (lane == 0) {
      __nv_bfloat16* const rates = record + p.shape.num_channels() + channels.value_head;
      rates[0] = inputs.b[r];
      rates[p.shape.num_value_heads] = inputs.a[r];
    }
  }
}

}  // namespace
}  // namespace paceline::cuda
