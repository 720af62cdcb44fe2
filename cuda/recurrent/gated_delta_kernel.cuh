// SPDX-License-Identifier: Apache-2.0
#pragma once

// The kernel of gated_delta for all sizes. A cluster of up to eight blocks has one value head of
// one sequence; each block has some columns of its state S, in the registers of its consumers.
// Columns depend on each other only by the gated norm. Without clusters one block of more consumers
// has all columns.
//
// Rows come in chunks, first those that are replayed. A chunk passes three phases with a barrier of
// the cluster between them, so that three chunks are under way:
//   produce  a warp convolves and normalises a row's q, k and v, and sends them to the blocks that
//            need them. It also writes the row's record. Rows go to the blocks by turns.
//   consume  the recurrence, row by row. Eight lanes share a column, each with keys of its own. A
//            column of the output goes to the block that has produced the row.
//   finish   that block applies the gated norm.
// Consumers help in the first phase, while S arrives, and in the last one.
//
// Every sum has one order: that of keys in a lane, then lanes 4, 2 and 1 apart; of channels in a
// lane, then the lanes of a warp. It depends neither on the number of blocks nor on the chunk. All
// roundings are explicit.
//
// The kernel reads records and entries of positions before the sequence's first row only, and
// writes those of its rows. So no block reads what another one writes.

#include <cstdint>
#include <type_traits>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "ops/recurrent.h"
#include "recurrent/pass_rows.cuh"

namespace paceline::cuda {
namespace {

constexpr int32_t kProducerWarps = 1;
constexpr int32_t kConsumersOfCluster = 4;  // of a block: one for each scheduler
constexpr int32_t kSharers = 8;             // lanes of a column
constexpr int32_t kGroups = 32 / kSharers;  // of lanes in a warp
constexpr int32_t kPiece = 128;             // channels that a warp takes at once, four a lane
constexpr int32_t kMaxBlocks = 8;           // of a cluster

// Input: elements of x, ba and y. Stored: of records. Heads have sizes up to the padded ones.
template <class InputT, class StoredT, int32_t kLaneKeys, int32_t kLaneColumns,
          int32_t kConsumers = kConsumersOfCluster>
struct Variant {
  using Input = InputT;
  using Stored = StoredT;
  static constexpr int32_t kKeysOfLane = kLaneKeys;
  static constexpr int32_t kColumnsOfLane = kLaneColumns;
  static constexpr int32_t kKeys = kSharers * kLaneKeys;
  static constexpr int32_t kPieces = kKeys / kPiece;
  static constexpr int32_t kWarps = kProducerWarps + kConsumers;
  static constexpr int32_t kThreads = 32 * kWarps;
  static constexpr int32_t kColumns = kConsumers * kGroups * kLaneColumns;  // of a block
  static constexpr int32_t kChunk = 8;                                      // rows
  static_assert(kLaneColumns % 2 == 0);
  static_assert(kKeys % kPiece == 0);
};

// What the consumers need of a row beside q, k and v.
struct __align__(16) RowScalars {
  float decay;
  float beta;
  int64_t entry;  // block of the entry that the row completes, or 0
};
static_assert(sizeof(RowScalars) == 16);

// Shared memory of a block.
template <class V>
struct SharedRows {
  static constexpr int32_t kRowFloats = 2 * V::kKeys + V::kColumns + 4;
  static constexpr int32_t kWidth = V::kPieces * kPiece;  // of outputs and gates

  std::byte* base;
  int32_t rows_of_block;  // that it produces of a chunk, at most

  [[nodiscard]] static constexpr size_t num_bytes(int32_t rows_of_block) {
    return sizeof(float) * (2 * V::kChunk * kRowFloats + 5 * rows_of_block * kWidth);
  }
  // q [kKeys], k [kKeys], v [kColumns] and RowScalars of row `i` of a chunk.
  [[nodiscard]] __device__ __forceinline__ float* row(int32_t chunk, int32_t i) const {
    return reinterpret_cast<float*>(base) + (chunk % 2 * V::kChunk + i) * kRowFloats;
  }
  [[nodiscard]] static __device__ __forceinline__ RowScalars* scalars(float* row) {
    return reinterpret_cast<RowScalars*>(row + 2 * V::kKeys + V::kColumns);
  }
  // All columns of the output of the block's `own`-th row of a chunk.
  [[nodiscard]] __device__ __forceinline__ float* output(int32_t chunk, int32_t own) const {
    return row(0, 0) + 2 * V::kChunk * kRowFloats + (chunk % 2 * rows_of_block + own) * kWidth;
  }
  // The factors of the gated norm, those of the norm's weights included.
  [[nodiscard]] __device__ __forceinline__ float* gate(int32_t chunk, int32_t own) const {
    return output(0, 0) + (2 + chunk % 3) * rows_of_block * kWidth + own * kWidth;
  }
};

// The rows of one value head of one sequence.
template <class V>
struct HeadRows : PassRows<typename V::Input, typename V::Stored> {
  int32_t value_head;

  [[nodiscard]] __device__ __forceinline__ int32_t key_dim() const { return this->p.shape.key_dim; }
  [[nodiscard]] __device__ __forceinline__ int32_t value_dim() const {
    return this->p.shape.value_dim;
  }
  [[nodiscard]] __device__ __forceinline__ int32_t taps() const { return this->p.shape.num_taps; }
  [[nodiscard]] __device__ __forceinline__ int32_t num_blocks() const {
    return static_cast<int32_t>(gridDim.x);
  }
};

// The value as a record has it.
template <class Stored>
__device__ __forceinline__ float as_stored(float value) {
  if constexpr (std::is_same_v<Stored, float>) {
    return value;
  } else {
    return widen(__float2bfloat16_rn(value));
  }
}

// --- produce -------------------------------------------------------------------------------------

// Four channels of a lane for each piece.
template <class V>
using Channels = float[V::kPieces][4];

// Convolves the `width` channels from channel `channel` of the inputs on. `raw`: the row's own
// inputs.
template <class V>
__device__ __forceinline__ void convolve(const HeadRows<V>& head,
                                         const std::byte* const (&inputs)[kMaxConvTaps],
                                         int32_t position, int32_t channel, int32_t width,
                                         int32_t lane, Channels<V>& raw, Channels<V>& to) {
  using Input = typename V::Input;
  using Stored = typename V::Stored;
  const int32_t taps = head.taps();
#pragma unroll
  for (int piece = 0; piece < V::kPieces; ++piece) {
    const int32_t at = piece * kPiece + 4 * lane;
    const float* const weights = head.p.conv + int64_t{channel + at} * taps;
    float weight[4][kMaxConvTaps];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int tap = 0; tap < kMaxConvTaps; ++tap) {
        weight[i][tap] = at + i < width && tap < taps ? weights[i * taps + tap] : 0.0f;
      }
      to[piece][i] = 0.0f;
    }
#pragma unroll
    for (int tap = 0; tap < kMaxConvTaps; ++tap) {
      if (tap >= taps) break;
      float u[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (inputs[tap] != nullptr) {
        const bool is_stored = position - taps + 1 + tap < head.start;
        if (std::is_same_v<Input, Stored> || is_stored) {
          load_first<false>(reinterpret_cast<const Stored*>(inputs[tap]) + channel + at, width - at,
                            u);
        } else {
          load_first<false>(reinterpret_cast<const Input*>(inputs[tap]) + channel + at, width - at,
                            u);
#pragma unroll
          for (float& value : u) value = as_stored<Stored>(value);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[piece][i] = __fmaf_rn(weight[i][tap], u[i], to[piece][i]);
        raw[piece][i] = u[i];
      }
    }
#pragma unroll
    for (float& value : to[piece]) value = silu_of(value);
  }
}

template <class V>
__device__ __forceinline__ float sum_of_squares(const Channels<V>& x) {
  float sum = 0.0f;
#pragma unroll
  for (const auto& piece : x) {
#pragma unroll
    for (const float value : piece) sum = __fmaf_rn(value, value, sum);
  }
  return warp_sum(sum);
}

template <class V>
__device__ __forceinline__ void scale_by(float factor, Channels<V>& x) {
#pragma unroll
  for (auto& piece : x) {
#pragma unroll
    for (float& value : piece) value = __fmul_rn(value, factor);
  }
}

template <class V>
__device__ __forceinline__ void store_channels(const Channels<V>& x, int32_t width, int32_t lane,
                                               typename V::Stored* to) {
#pragma unroll
  for (int piece = 0; piece < V::kPieces; ++piece) {
    const int32_t at = piece * kPiece + 4 * lane;
    store_first<false>(x[piece], width - at, to + at);
  }
}

// Makes row `i` of a chunk, by a warp.
template <class V>
__device__ __forceinline__ void produce(const HeadRows<V>& head, const SharedRows<V>& shared,
                                        int32_t chunk, int32_t i, int32_t lane) {
  using Input = typename V::Input;
  using Stored = typename V::Stored;
  const GatedDeltaParams& p = head.p;
  const int32_t position = head.first + chunk * V::kChunk + i;
  const bool is_live = position >= head.start;
  const int32_t row = head.row_at(position);
  const int32_t taps = head.taps();
  const int32_t key_dim = head.key_dim();
  const int32_t value_dim = head.value_dim();
  // A lane for each tap finds the inputs.
  const std::byte* found = nullptr;
  if (lane < taps) found = head.inputs_at(position - taps + 1 + lane);
  const std::byte* inputs[kMaxConvTaps];
#pragma unroll
  for (int tap = 0; tap < kMaxConvTaps; ++tap) {
    inputs[tap] = reinterpret_cast<const std::byte*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(found), tap));
  }

  const int32_t heads_of_key = p.shape.num_value_heads / p.shape.num_key_heads;
  const int32_t key_head = head.value_head / heads_of_key;
  const int32_t q_channel = key_head * key_dim;
  const int32_t k_channel = p.shape.keys_width() + q_channel;
  const int32_t v_channel = 2 * p.shape.keys_width() + head.value_head * value_dim;
  const int32_t num_channels = p.shape.num_channels();
  const int32_t b_at = num_channels + head.value_head;
  const int32_t a_at = b_at + p.shape.num_value_heads;

  // The row's own record. The null block is never read, and rows would race on it.
  Stored* record = nullptr;
  RowScalars scalars = {0.0f, 0.0f, 0};
  float b;
  float a;
  if (is_live) {
    const Input* const ba = static_cast<const Input*>(p.ba) + row * p.ba_stride;
    b = as_stored<Stored>(widen(ba[head.value_head]));
    a = as_stored<Stored>(widen(ba[p.shape.num_value_heads + head.value_head]));
    scalars.entry = p.entry_slots[row];
    record = head.own_record(position, p.record_slots[row]);
    if (record != nullptr && lane == 0) {
      narrow(b, record + b_at);
      narrow(a, record + a_at);
    }
  } else {
    const std::byte* const own = reinterpret_cast<const std::byte*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(found), taps - 1));
    b = widen(reinterpret_cast<const Stored*>(own)[b_at]);
    a = widen(reinterpret_cast<const Stored*>(own)[a_at]);
  }
  const bool writes_keys = record != nullptr && head.value_head % heads_of_key == 0;

  Channels<V> raw;
  Channels<V> x;
  float* const to = shared.row(chunk, i);
  const int32_t num_blocks = head.num_blocks();
  const auto send_to_all = [&](float* at) {
#pragma unroll
    for (int piece = 0; piece < V::kPieces; ++piece) {
      auto* const target = reinterpret_cast<float4*>(at + piece * kPiece + 4 * lane);
      const float4 values = {x[piece][0], x[piece][1], x[piece][2], x[piece][3]};
      for (int32_t rank = 0; rank < num_blocks; ++rank) store_to_cluster(target, rank, values);
    }
  };
  convolve(head, inputs, position, q_channel, key_dim, lane, raw, x);
  if (writes_keys) store_channels<V>(raw, key_dim, lane, record + q_channel);
  scale_by<V>(__fmul_rn(rsqrtf(__fadd_rn(sum_of_squares<V>(x), kL2Eps)),
                        rsqrtf(static_cast<float>(key_dim))),
              x);
  send_to_all(to);
  convolve(head, inputs, position, k_channel, key_dim, lane, raw, x);
  if (writes_keys) store_channels<V>(raw, key_dim, lane, record + k_channel);
  scale_by<V>(rsqrtf(__fadd_rn(sum_of_squares<V>(x), kL2Eps)), x);
  send_to_all(to + V::kKeys);
  convolve(head, inputs, position, v_channel, value_dim, lane, raw, x);
  if (record != nullptr) store_channels<V>(raw, value_dim, lane, record + v_channel);
#pragma unroll
  for (int piece = 0; piece < V::kPieces; ++piece) {
    const int32_t column = piece * kPiece + 4 * lane;
    const int32_t rank = column / V::kColumns;
    if (rank >= num_blocks) continue;
    store_to_cluster(reinterpret_cast<float4*>(to + 2 * V::kKeys + (column - rank * V::kColumns)),
                     rank, {x[piece][0], x[piece][1], x[piece][2], x[piece][3]});
  }

  scalars.beta = sigmoid_of(b);
  scalars.decay = decay_of(a, p.a_log[head.value_head], p.dt_bias[head.value_head]);
  if (lane < num_blocks) {
    float4 values;
    memcpy(&values, &scalars, sizeof(values));
    store_to_cluster(reinterpret_cast<float4*>(shared.scalars(to)), lane, values);
  }

  if (!is_live) return;
  const Input* const z = static_cast<const Input*>(p.x) + row * p.x_stride + num_channels +
                         int64_t{head.value_head} * value_dim;
#pragma unroll
  for (int piece = 0; piece < V::kPieces; ++piece) {
    const int32_t at = piece * kPiece + 4 * lane;
    float gate[4];
    float norm[4];
    load_first<false>(z + at, value_dim - at, gate);
    load_first<false>(p.norm + at, value_dim - at, norm);
#pragma unroll
    for (int j = 0; j < 4; ++j) gate[j] = __fmul_rn(norm[j], silu_of(gate[j]));
    store_vector(gate, shared.gate(chunk, i / num_blocks) + at);
  }
}

// --- consume -------------------------------------------------------------------------------------

// This lane's part of S, which is key `key_at(i)` of column `column + c`.
template <class V>
struct State {
  float s[V::kColumnsOfLane][V::kKeysOfLane];
  int32_t sharer;  // of the column's lanes
  int32_t column;  // the first one, of the value head
  int32_t column_of_block;

  __device__ __forceinline__ State(int32_t warp, int32_t lane, int32_t rank)
      : sharer(lane % kSharers),
        column_of_block((warp * kGroups + lane / kSharers) * V::kColumnsOfLane) {
    column = rank * V::kColumns + column_of_block;
#pragma unroll
    for (auto& keys : s) {
#pragma unroll
      for (float& value : keys) value = 0.0f;
    }
  }
  // Four keys in a row of each 4 * kSharers.
  [[nodiscard]] __device__ __forceinline__ int32_t key_at(int32_t i) const {
    return i / 4 * (4 * kSharers) + 4 * sharer + i % 4;
  }

  __device__ __forceinline__ void load(const HeadRows<V>& head, int64_t block) {
#pragma unroll
    for (int c = 0; c < V::kColumnsOfLane; ++c) {
      if (column + c >= head.value_dim()) break;
      const float* const from = head.entry_at(block, head.value_head, column + c);
#pragma unroll
      for (int i = 0; i < V::kKeysOfLane; i += 4) {
        float keys[4];
        load_first<false>(from + key_at(i), head.key_dim() - key_at(i), keys);
#pragma unroll
        for (int j = 0; j < 4; ++j) s[c][i + j] = keys[j];
      }
    }
  }
  __device__ __forceinline__ void store(const HeadRows<V>& head, int64_t block) const {
#pragma unroll
    for (int c = 0; c < V::kColumnsOfLane; ++c) {
      if (column + c >= head.value_dim()) break;
      float* const to = head.entry_at(block, head.value_head, column + c);
#pragma unroll
      for (int i = 0; i < V::kKeysOfLane; i += 4) {
        const float keys[4] = {s[c][i], s[c][i + 1], s[c][i + 2], s[c][i + 3]};
        store_first<false>(keys, head.key_dim() - key_at(i), to + key_at(i));
      }
    }
  }

  // This lane's keys of a row of shared memory.
  __device__ __forceinline__ void load_keys(const float* row, float (&to)[V::kKeysOfLane]) const {
#pragma unroll
    for (int i = 0; i < V::kKeysOfLane; i += 4) {
      float keys[4];
      load_vector(row + key_at(i), keys);
#pragma unroll
      for (int j = 0; j < 4; ++j) to[i + j] = keys[j];
    }
  }
  // This lane's part of the product of column c with `keys`.
  [[nodiscard]] __device__ __forceinline__ float product(
      int32_t c, const float (&keys)[V::kKeysOfLane]) const {
    float sums[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[j] = __fmul_rn(s[c][j], keys[j]);
#pragma unroll
    for (int i = 4; i < V::kKeysOfLane; i += 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[j] = __fmaf_rn(s[c][i + j], keys[i + j], sums[j]);
    }
    return __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
  }
};

// What the recurrence needs of a row first.
template <class V>
struct RowInputs {
  float k[V::kKeysOfLane];
  float v[V::kColumnsOfLane];
  float decay;
  float beta;

  __device__ __forceinline__ void load(const State<V>& state, float* row) {
    state.load_keys(row + V::kKeys, k);
    load_vector(row + 2 * V::kKeys + state.column_of_block, v);
    const float2 factors = *reinterpret_cast<const float2*>(SharedRows<V>::scalars(row));
    decay = factors.x;
    beta = factors.y;
  }
};

// The sum over the column's lanes, in each of them.
__device__ __forceinline__ float sum_over_sharers(float value) {
#pragma unroll
  for (int step = kSharers / 2; step > 0; step /= 2) {
    value = __fadd_rn(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

// The same sums of two columns, in the same order; a lane gets that of column `which`.
__device__ __forceinline__ float sum_over_sharers(const float (&values)[2], int32_t sharer,
                                                  int32_t& which) {
  constexpr int32_t kBit = kSharers / 2;
  which = (sharer & kBit) != 0 ? 1 : 0;
  const float sent = which != 0 ? values[0] : values[1];
  float sum = __fadd_rn(which != 0 ? values[1] : values[0], __shfl_xor_sync(kAllLanes, sent, kBit));
#pragma unroll
  for (int step = kBit / 2; step > 0; step /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, step));
  }
  return sum;
}

// Rows [begin, end) of a chunk.
template <class V, bool kIsLive>
__device__ __forceinline__ void consume(const HeadRows<V>& head, const SharedRows<V>& shared,
                                        int32_t chunk, int32_t begin, int32_t end,
                                        State<V>& state) {
  if (begin >= end) return;
  const int32_t num_blocks = head.num_blocks();
  RowInputs<V> next;
  next.load(state, shared.row(chunk, begin));
  for (int32_t i = begin; i < end; ++i) {
    float* const row = shared.row(chunk, i);
    const RowInputs<V> in = next;
    next.load(state, shared.row(chunk, min(i + 1, end - 1)));
    float q[V::kKeysOfLane];
    if constexpr (kIsLive) state.load_keys(row, q);
    float reads[V::kColumnsOfLane];
#pragma unroll
    for (int c = 0; c < V::kColumnsOfLane; ++c) reads[c] = state.product(c, in.k);
#pragma unroll
    for (int c = 0; c < V::kColumnsOfLane; ++c) {
      const float read = sum_over_sharers(reads[c]);
      const float correction = __fmul_rn(in.beta, __fmaf_rn(-in.decay, read, in.v[c]));
#pragma unroll
      for (int j = 0; j < V::kKeysOfLane; ++j) {
        state.s[c][j] = __fmaf_rn(in.k[j], correction, __fmul_rn(state.s[c][j], in.decay));
      }
    }
    if constexpr (kIsLive) {
#pragma unroll
      for (int c = 0; c < V::kColumnsOfLane; c += 2) {
        const float outputs[2] = {state.product(c, q), state.product(c + 1, q)};
        int32_t which;
        const float output = sum_over_sharers(outputs, state.sharer, which);
        if (state.sharer % (kSharers / 2) == 0) {
          store_to_cluster(shared.output(chunk, i / num_blocks) + state.column + c + which,
                           i % num_blocks, output);
        }
      }
      const int64_t entry = SharedRows<V>::scalars(row)->entry;
      if (entry > 0) state.store(head, entry);
    }
  }
}

// --- finish --------------------------------------------------------------------------------------

// The gated norm of row `i` of a chunk, by a warp.
template <class V>
__device__ __forceinline__ void finish(const HeadRows<V>& head, const SharedRows<V>& shared,
                                       int32_t chunk, int32_t i, int32_t lane) {
  using Input = typename V::Input;
  const GatedDeltaParams& p = head.p;
  const int32_t position = head.first + chunk * V::kChunk + i;
  if (position < head.start) return;
  const int32_t own = i / head.num_blocks();
  const int32_t value_dim = head.value_dim();
  Channels<V> x;
#pragma unroll
  for (int piece = 0; piece < V::kPieces; ++piece) {
    const int32_t at = piece * kPiece + 4 * lane;
    load_first<false>(shared.output(chunk, own) + at, value_dim - at, x[piece]);
  }
  const float mean = __fdiv_rn(sum_of_squares<V>(x), static_cast<float>(value_dim));
  const float factor = rsqrtf(__fadd_rn(mean, p.norm_eps));
  Input* const y =
      static_cast<Input*>(p.y) +
      (int64_t{head.row_at(position)} * p.shape.num_value_heads + head.value_head) * value_dim;
#pragma unroll
  for (int piece = 0; piece < V::kPieces; ++piece) {
    const int32_t at = piece * kPiece + 4 * lane;
    float gate[4];
    load_vector(shared.gate(chunk, own) + at, gate);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[piece][j] = __fmul_rn(__fmul_rn(x[piece][j], factor), gate[j]);
    }
    store_first<false>(x[piece], value_dim - at, y + at);
  }
}

// --- the kernel ----------------------------------------------------------------------------------

// Grid: blocks of a cluster, or one, value heads, sequences.
template <class V>
__global__ void __launch_bounds__(V::kThreads)
    gated_delta_kernel(const __grid_constant__ GatedDeltaParams p) {
  extern __shared__ __align__(16) std::byte shared[];
  let_successor_start();
  wait_for_predecessor();
  const auto rank = static_cast<int32_t>(blockIdx.x);
  const auto sequence = static_cast<int32_t>(blockIdx.z);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / 32;
  const int32_t lane = thread % 32;
  const auto value_head = static_cast<int32_t>(blockIdx.y);
  const auto num_blocks = static_cast<int32_t>(gridDim.x);
  RowRange range;
  // Blocks of a cluster have the same sequence, and leave together.
  if (!find_rows<V::kWarps, typename V::Input>(p, sequence, value_head, rank, num_blocks, range)) {
    return;
  }
  const HeadRows<V> head = {{range, p}, value_head};
  cluster_arrive();

  const bool is_producer = warp < kProducerWarps;
  State<V> state(warp - kProducerWarps, lane, rank);
  if (!is_producer && head.first > 0) state.load(head, head.first_entry());
  cluster_wait();  // all blocks have begun

  const SharedRows<V> rows = {shared, (V::kChunk + num_blocks - 1) / num_blocks};
  const int32_t num_rows = head.end() - head.first;
  const int32_t num_chunks = (num_rows + V::kChunk - 1) / V::kChunk;
  for (int32_t phase = 0;; ++phase) {
    const int32_t stride =
        num_blocks * (phase == 0 || phase > num_chunks ? V::kWarps : kProducerWarps);
    const bool helps = is_producer || phase == 0 || phase > num_chunks;
    if (helps && phase > 1) {
      const int32_t count = min(num_rows - (phase - 2) * V::kChunk, V::kChunk);
      for (int32_t i = rank + warp * num_blocks; i < count; i += stride) {
        finish(head, rows, phase - 2, i, lane);
      }
    }
    if (phase > num_chunks) return;
    if (helps && phase < num_chunks) {
      const int32_t count = min(num_rows - phase * V::kChunk, V::kChunk);
      for (int32_t i = rank + warp * num_blocks; i < count; i += stride) {
        produce(head, rows, phase, i, lane);
      }
    }
    if (!is_producer && phase > 0) {
      const int32_t chunk = phase - 1;
      const int32_t count = min(num_rows - chunk * V::kChunk, V::kChunk);
      const int32_t num_replayed = min(max(head.start - head.first - chunk * V::kChunk, 0), count);
      consume<V, false>(head, rows, chunk, 0, num_replayed, state);
      consume<V, true>(head, rows, chunk, num_replayed, count, state);
    }
    cluster_barrier();
  }
}

template <class V>
void launch_variant(CudaContext& ctx, const GatedDeltaParams& p) {
  const int32_t num_blocks = (p.shape.value_dim + V::kColumns - 1) / V::kColumns;
  static_assert(V::kPieces * kPiece <= kMaxBlocks * V::kColumns);
  const size_t bytes = SharedRows<V>::num_bytes((V::kChunk + num_blocks - 1) / num_blocks);
  constexpr auto* kKernel = &gated_delta_kernel<V>;
  static OncePerDevice allow;
  allow([] { allow_shared_bytes(kKernel, SharedRows<V>::num_bytes(V::kChunk), "gated_delta"); });
  launch_clusters(
      ctx, "gated_delta", kKernel,
      dim3(static_cast<uint32_t>(num_blocks), static_cast<uint32_t>(p.shape.num_value_heads),
           static_cast<uint32_t>(p.max_seqs)),
      dim3(V::kThreads), dim3(static_cast<uint32_t>(num_blocks)), bytes, p);
}

}  // namespace
}  // namespace paceline::cuda
