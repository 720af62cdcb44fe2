// SPDX-License-Identifier: Apache-2.0
#pragma once

// The kernel of gated_delta for heads of 128 elements, four taps, up to four value heads of a key
// head, and aligned rows. A cluster of eight blocks has one key head of one sequence, with all its
// value heads, since those share q and k. A block has 16 columns of each head's state S, in the
// registers of its consumers: a lane has the same column of all heads, and eight lanes share it,
// each with keys of its own.
//
// Rows come in chunks of eight, first those that are replayed. Three chunks are in shared memory:
//   produce  a warp convolves and normalises q and k of a row, or makes v and the factors of a
//            value head, and sends them to the blocks that need them. It also writes the record.
//   consume  the recurrence, row by row. A column of the output goes to the block that finishes the
//            row: block i has row i of each chunk. An mbarrier there counts the bytes, so consumers
//            need no fence.
//   finish   the gated norm of a row and head.
// All warps make the first two chunks. Then one producer warp of a block has q and k of the block's
// row, and one has each value head. They read the inputs of a row from memory one chunk before they
// are needed. Consumers arrive at the barrier of the cluster before a chunk, which frees the place
// of the chunk before, and wait after it, so the barrier's latency is hidden.
//
// o = S^T q is computed from the state before the row, as decay S_old^T q + (k q) d, so that both
// products with the state are under way at once.
//
// Every sum has one order, which depends neither on the chunk nor on what made the row. All
// roundings are explicit. The kernel reads records and entries of positions before the sequence's
// first row only, and writes those of its rows. So no block reads what another one writes.

#include <cstdint>
#include <cstring>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "gemm/wgmma.cuh"
#include "ops/recurrent.h"
#include "recurrent/gated_delta_kernel.cuh"

namespace paceline::cuda {
namespace {

constexpr int32_t kHeadDim = 128;
constexpr int32_t kTaps = 4;
constexpr int32_t kHeadBlocks = 8;                         // of a cluster
constexpr int32_t kBlockColumns = kHeadDim / kHeadBlocks;  // of each value head
constexpr int32_t kChunkRows = kHeadBlocks;
constexpr int32_t kRing = 3;         // chunks in shared memory
constexpr int32_t kFirstChunks = 2;  // made by all warps
constexpr int32_t kKeysOfSharer = kHeadDim / kSharers;
constexpr int32_t kMaxHeadsOfKey = 4;
static_assert(kBlockColumns == kConsumerWarps * kGroups);

// T: elements of x, ba, y and records. kHeads: value heads of a key head.
template <class T, int32_t kHeads>
struct KeyHeadVariant {
  using Element = T;
  static constexpr int32_t kNumHeads = kHeads;
  static constexpr int32_t kPadded = kHeads == 3 ? 4 : kHeads;
  static constexpr int32_t kItems = 1 + kHeads;  // of a row: q and k, and each v
  static constexpr int32_t kNumWarps = kConsumerWarps + kItems;
  static constexpr int32_t kNumThreads = 32 * kNumWarps;
  // Blocks that a multiprocessor has registers for.
  static constexpr int32_t kMinBlocks = kHeads == 4 || sizeof(T) == 4 ? 1 : 2;
};

// What consumers of a block need of a row. Values of several heads are next to each other.
template <int32_t kPadded>
struct __align__(16) PreparedRow {
  float q[kHeadDim];
  float k[kHeadDim];
  float v[kBlockColumns][kPadded];
  float decay[kPadded];
  float beta[kPadded];
  float product;  // of k and q
  int32_t entry;  // block of the entry that the row completes, or 0
};

template <class V>
struct KeyHeadShared {
  PreparedRow<V::kPadded> rows[kRing][kChunkRows];
  float outputs[kRing][V::kNumHeads][kHeadDim];  // of the block's row
  uint64_t are_complete[kRing][V::kNumHeads];    // mbarriers of outputs
};

// The rows of one key head of one sequence.
template <class T>
struct KeyHeadRows {
  const GatedDeltaParams& p;
  int32_t key_head;
  int32_t begin;     // the sequence's first row,
  int32_t start;     // its position,
  int32_t num_live;  // and the number of live rows
  int32_t seq_slot;
  int32_t first;  // position of the first row to replay

  [[nodiscard]] __device__ __forceinline__ int32_t end() const { return start + num_live; }
  [[nodiscard]] __device__ __forceinline__ int32_t row_at(int32_t position) const {
    return begin + (position - start);
  }
  [[nodiscard]] __device__ __forceinline__ std::byte* record_at(int64_t block,
                                                                int32_t offset) const {
    return p.records.base + block * p.records.block_bytes + p.records.k_offset +
           int64_t{offset} * p.shape.record_width() * static_cast<int32_t>(sizeof(T));
  }
  // The inputs of a token: in x, or before the pass in its record; null before position 0.
  [[nodiscard]] __device__ __forceinline__ const std::byte* inputs_at(int32_t position) const {
    if (position < 0) return nullptr;
    if (position >= start) {
      return reinterpret_cast<const std::byte*>(static_cast<const T*>(p.x) +
                                                row_at(position) * p.x_stride);
    }
    const int32_t block_size = p.record_table.block_size;
    const int32_t index = position / block_size;
    const int32_t block = p.record_table.blocks[seq_slot * p.record_table.stride + index];
    return record_at(block, position - index * block_size);
  }
  // Where the row's own record goes; null for the null block, which is never read, and where rows
  // would race.
  [[nodiscard]] __device__ __forceinline__ T* record_of(int64_t slot) const {
    const int32_t block_size = p.records.block_size;
    if (slot < block_size) return nullptr;
    const int64_t block = slot <= INT32_MAX
                              ? static_cast<int32_t>(slot) / block_size
                              : slot / block_size;
    return reinterpret_cast<T*>(record_at(block, static_cast<int32_t>(slot - block * block_size)));
  }
  // The column of a value head in the entry in `block`.
  [[nodiscard]] __device__ __forceinline__ float* entry_at(int64_t block, int32_t value_head,
                                                           int32_t column) const {
    std::byte* const entry = p.entries.base + block * p.entries.block_bytes + p.entries.k_offset;
    return reinterpret_cast<float*>(entry) + (int64_t{value_head} * kHeadDim + column) * kHeadDim;
  }
};

// --- produce -------------------------------------------------------------------------------------

// Four channels of a lane as they are in memory.
template <class T>
using RawChannels = typename MemoryWord<4 * sizeof(T)>::Type;

template <class T>
__device__ __forceinline__ void widen_channels(const RawChannels<T>& raw, float (&to)[4]) {
  T elements[4];
  memcpy(elements, &raw, sizeof(raw));
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = widen(elements[i]);
}

// What an item of a row is made of: q and k, or v in the first place.
template <class T>
struct RowLoads {
  RawChannels<T> inputs[2][kTaps];
  T b;
  T a;
  int64_t record_slot;
  int32_t entry;
};

struct ItemWeights {
  float conv[2][4][kTaps];
  float a_log;
  float dt_bias;

  template <class V>
  __device__ __forceinline__ void load(const GatedDeltaParams& p, int32_t key_head, int32_t item,
                                       int32_t lane);
};

// The item's first channel; that of k comes keys_width() after that of q.
template <class V>
__device__ __forceinline__ int32_t first_channel(const GatedDeltaParams& p, int32_t key_head,
                                                 int32_t item) {
  return item == 0 ? key_head * kHeadDim
                   : 2 * p.shape.keys_width() + (key_head * V::kNumHeads + item - 1) * kHeadDim;
}

template <class V>
__device__ __forceinline__ void ItemWeights::load(const GatedDeltaParams& p, int32_t key_head,
                                                  int32_t item, int32_t lane) {
  const float* from = p.conv + int64_t{first_channel<V>(p, key_head, item) + 4 * lane} * kTaps;
#pragma unroll
  for (int i = 0; i < 4; ++i) load_vector(from + i * kTaps, conv[0][i]);
  if (item == 0) {
    from += int64_t{p.shape.keys_width()} * kTaps;
#pragma unroll
    for (int i = 0; i < 4; ++i) load_vector(from + i * kTaps, conv[1][i]);
  } else {
    const int32_t value_head = key_head * V::kNumHeads + item - 1;
    a_log = p.a_log[value_head];
    dt_bias = p.dt_bias[value_head];
  }
}

// Begins to read what an item of the row at `position` is made of, by a warp.
template <class V>
__device__ __forceinline__ void begin_item(const KeyHeadRows<typename V::Element>& head,
                                           int32_t position, int32_t item, int32_t lane,
                                           RowLoads<typename V::Element>& loads) {
  using T = typename V::Element;
  using Raw = RawChannels<T>;
  const GatedDeltaParams& p = head.p;
  // A lane for each tap finds the inputs.
  const std::byte* found = nullptr;
  if (lane < kTaps) found = head.inputs_at(position - kTaps + 1 + lane);
  const T* inputs[kTaps];
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) {
    inputs[tap] = reinterpret_cast<const T*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(found), tap));
  }
  const int32_t at = first_channel<V>(p, head.key_head, item) + 4 * lane;
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) {
    loads.inputs[0][tap] = Raw{};
    if (inputs[tap] != nullptr) {
      loads.inputs[0][tap] = *reinterpret_cast<const Raw*>(inputs[tap] + at);
    }
  }
  if (item == 0) {
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      loads.inputs[1][tap] = Raw{};
      if (inputs[tap] != nullptr) {
        loads.inputs[1][tap] =
            *reinterpret_cast<const Raw*>(inputs[tap] + at + p.shape.keys_width());
      }
    }
  }
  const T* rates = inputs[kTaps - 1] + p.shape.num_channels();
  loads.record_slot = 0;
  loads.entry = 0;
  if (position >= head.start) {
    const int32_t row = head.row_at(position);
    rates = static_cast<const T*>(p.ba) + row * p.ba_stride;
    loads.record_slot = p.record_slots[row];
    if (item == 0) loads.entry = static_cast<int32_t>(p.entry_slots[row]);
  }
  if (item > 0) {
    const int32_t value_head = head.key_head * V::kNumHeads + item - 1;
    loads.b = rates[value_head];
    loads.a = rates[p.shape.num_value_heads + value_head];
  }
}

template <class T>
__device__ __forceinline__ void convolve_channels(const RawChannels<T> (&inputs)[kTaps],
                                                  const float (&weights)[4][kTaps],
                                                  float (&to)[4]) {
#pragma unroll
  for (float& value : to) value = 0.0f;
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) {
    float u[4];
    widen_channels<T>(inputs[tap], u);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = __fmaf_rn(weights[i][tap], u[i], to[i]);
  }
#pragma unroll
  for (float& value : to) value = silu_of(value);
}

__device__ __forceinline__ float product_of(const float (&a)[4], const float (&b)[4]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum = __fmaf_rn(a[i], b[i], sum);
  return warp_sum(sum);
}

__device__ __forceinline__ void scale_channels(float factor, float (&x)[4]) {
#pragma unroll
  for (float& value : x) value = __fmul_rn(value, factor);
}

// Makes the item, and sends it to the copies of `to`.
template <class V>
__device__ __forceinline__ void end_item(const KeyHeadRows<typename V::Element>& head, int32_t item,
                                         int32_t lane, const RowLoads<typename V::Element>& loads,
                                         const ItemWeights& weights, PreparedRow<V::kPadded>& to) {
  using T = typename V::Element;
  using Raw = RawChannels<T>;
  const GatedDeltaParams& p = head.p;
  T* const record = head.record_of(loads.record_slot);
  const int32_t channel = first_channel<V>(p, head.key_head, item) + 4 * lane;
  if (record != nullptr) {
    *reinterpret_cast<Raw*>(record + channel) = loads.inputs[0][kTaps - 1];
  }
  float x[4];
  convolve_channels<T>(loads.inputs[0], weights.conv[0], x);
  if (item == 0) {
    float k[4];
    convolve_channels<T>(loads.inputs[1], weights.conv[1], k);
    if (record != nullptr) {
      *reinterpret_cast<Raw*>(record + channel + p.shape.keys_width()) = loads.inputs[1][kTaps - 1];
    }
    scale_channels(__fmul_rn(rsqrtf(__fadd_rn(product_of(x, x), kL2Eps)),
                             rsqrtf(static_cast<float>(kHeadDim))),
                   x);
    scale_channels(rsqrtf(__fadd_rn(product_of(k, k), kL2Eps)), k);
    const float product = product_of(x, k);
    auto* const q_to = reinterpret_cast<float4*>(to.q + 4 * lane);
    auto* const k_to = reinterpret_cast<float4*>(to.k + 4 * lane);
#pragma unroll
    for (int32_t rank = 0; rank < kHeadBlocks; ++rank) {
      store_to_cluster(q_to, rank, float4{x[0], x[1], x[2], x[3]});
      store_to_cluster(k_to, rank, float4{k[0], k[1], k[2], k[3]});
    }
    if (lane < kHeadBlocks) {
      store_to_cluster(&to.product, lane, product);
      store_to_cluster(&to.entry, lane, loads.entry);
    }
  } else {
    const int32_t of_key = item - 1;
    const int32_t rank = 4 * lane / kBlockColumns;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      store_to_cluster(&to.v[4 * lane % kBlockColumns + i][of_key], rank, x[i]);
    }
    const float rate = -expf(weights.a_log);
    const float decay =
        expf(__fmul_rn(rate, softplus_of(__fadd_rn(widen(loads.a), weights.dt_bias))));
    const float beta = sigmoid_of(widen(loads.b));
    if (lane < kHeadBlocks) {
      store_to_cluster(&to.decay[of_key], lane, decay);
      store_to_cluster(&to.beta[of_key], lane, beta);
    }
    if (record != nullptr && lane == 0) {
      T* const rates = record + p.shape.num_channels() + head.key_head * V::kNumHeads + of_key;
      rates[0] = loads.b;
      rates[p.shape.num_value_heads] = loads.a;
    }
  }
}

// --- consume -------------------------------------------------------------------------------------

// This lane's part of S: key `4 * sharer + key_at(i)` of column `column` of each head.
template <class V>
struct HeadStates {
  float s[V::kNumHeads][kKeysOfSharer];
  // Neighbouring lanes have the same keys, which they read from shared memory together.
  int32_t sharer;
  int32_t column;  // of the block's

  __device__ __forceinline__ HeadStates(int32_t warp, int32_t lane)
      : sharer(lane / kGroups), column(warp * kGroups + lane % kGroups) {
#pragma unroll
    for (auto& keys : s) {
#pragma unroll
      for (float& value : keys) value = 0.0f;
    }
  }
  // Four keys in a row of each 4 * kSharers.
  [[nodiscard]] static __device__ __forceinline__ int32_t key_at(int32_t i) {
    return i / 4 * (4 * kSharers) + i % 4;
  }
  __device__ __forceinline__ void load_keys(const float* from, float (&to)[kKeysOfSharer]) const {
#pragma unroll
    for (int i = 0; i < kKeysOfSharer; i += 4) {
      float keys[4];
      load_vector(from + 4 * sharer + key_at(i), keys);
#pragma unroll
      for (int j = 0; j < 4; ++j) to[i + j] = keys[j];
    }
  }
  template <class T>
  __device__ __forceinline__ void load(const KeyHeadRows<T>& head, int32_t rank, int64_t block) {
#pragma unroll
    for (int h = 0; h < V::kNumHeads; ++h) {
      load_keys(
          head.entry_at(block, head.key_head * V::kNumHeads + h, rank * kBlockColumns + column),
          s[h]);
    }
  }
  template <class T>
  __device__ __forceinline__ void store(const KeyHeadRows<T>& head, int32_t rank,
                                        int64_t block) const {
#pragma unroll
    for (int h = 0; h < V::kNumHeads; ++h) {
      float* const to =
          head.entry_at(block, head.key_head * V::kNumHeads + h, rank * kBlockColumns + column) +
          4 * sharer;
#pragma unroll
      for (int i = 0; i < kKeysOfSharer; i += 4) {
        store_global_16(to + key_at(i), s[h][i], s[h][i + 1], s[h][i + 2], s[h][i + 3]);
      }
    }
  }
  // This lane's part of the product of the column of head h with `keys`.
  [[nodiscard]] __device__ __forceinline__ float product(int32_t h,
                                                         const float (&keys)[kKeysOfSharer]) const {
    float sums[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) sums[j] = __fmul_rn(s[h][j], keys[j]);
#pragma unroll
    for (int i = 2; i < kKeysOfSharer; i += 2) {
#pragma unroll
      for (int j = 0; j < 2; ++j) sums[j] = __fmaf_rn(s[h][i + j], keys[i + j], sums[j]);
    }
    return __fadd_rn(sums[0], sums[1]);
  }
};

// Sums over the lanes of a column, in each of them.
template <int kCount>
__device__ __forceinline__ void sum_columns(float (&values)[kCount]) {
#pragma unroll
  for (int step = kGroups * kSharers / 2; step >= kGroups; step /= 2) {
#pragma unroll
    for (float& value : values) {
      value = __fadd_rn(value, __shfl_xor_sync(kAllLanes, value, step));
    }
  }
}

// Rows [begin, end) of the chunk in place `place` of the ring.
template <class V, bool kIsLive>
__device__ __forceinline__ void consume_rows(const KeyHeadRows<typename V::Element>& head,
                                             KeyHeadShared<V>& shared, int32_t place, int32_t begin,
                                             int32_t end, int32_t rank, HeadStates<V>& state) {
  if (begin >= end) return;
  float k[kKeysOfSharer];
  state.load_keys(shared.rows[place][begin].k, k);
#pragma unroll 2
  for (int32_t i = begin; i < end; ++i) {
    const PreparedRow<V::kPadded>& row = shared.rows[place][i];
    float v[V::kPadded];
    float decay[V::kPadded];
    float beta[V::kPadded];
    load_vector(row.v[state.column], v);
    load_vector(row.decay, decay);
    load_vector(row.beta, beta);
    const float product = row.product;
    const int32_t entry = row.entry;
    float reads[V::kNumHeads];
#pragma unroll
    for (int h = 0; h < V::kNumHeads; ++h) reads[h] = state.product(h, k);
    float outputs[V::kNumHeads];
    if constexpr (kIsLive) {
      float q[kKeysOfSharer];
      state.load_keys(row.q, q);
#pragma unroll
      for (int h = 0; h < V::kNumHeads; ++h) outputs[h] = state.product(h, q);
    }
    sum_columns(reads);
    float next[kKeysOfSharer];
    state.load_keys(shared.rows[place][min(i + 1, end - 1)].k, next);
    float corrections[V::kNumHeads];
#pragma unroll
    for (int h = 0; h < V::kNumHeads; ++h) {
      corrections[h] = __fmul_rn(beta[h], __fmaf_rn(-decay[h], reads[h], v[h]));
#pragma unroll
      for (int j = 0; j < kKeysOfSharer; ++j) {
        state.s[h][j] = __fmaf_rn(k[j], corrections[h], __fmul_rn(state.s[h][j], decay[h]));
      }
    }
#pragma unroll
    for (int j = 0; j < kKeysOfSharer; ++j) k[j] = next[j];
    if constexpr (kIsLive) {
      sum_columns(outputs);
      // A lane of a column for each head sends.
      float output = 0.0f;
#pragma unroll
      for (int h = 0; h < V::kNumHeads; ++h) {
        const float value = __fmaf_rn(product, corrections[h], __fmul_rn(decay[h], outputs[h]));
        if (h == 0 || state.sharer == h) output = value;
      }
      if (state.sharer < V::kNumHeads) {
        store_async(&shared.outputs[place][state.sharer][rank * kBlockColumns + state.column], i,
                    output, &shared.are_complete[place][state.sharer]);
      }
      if (entry > 0) state.store(head, rank, entry);
    }
  }
}

// --- finish --------------------------------------------------------------------------------------

// The elements of z of a row and head.
template <class V>
__device__ __forceinline__ RawChannels<typename V::Element> begin_finish(
    const KeyHeadRows<typename V::Element>& head, int32_t position, int32_t of_key, int32_t lane) {
  using T = typename V::Element;
  if (position < head.start || position >= head.end()) return {};
  const T* const z = static_cast<const T*>(head.p.x) + head.row_at(position) * head.p.x_stride +
                     head.p.shape.num_channels() +
                     (head.key_head * V::kNumHeads + of_key) * kHeadDim;
  return *reinterpret_cast<const RawChannels<T>*>(z + 4 * lane);
}

// `phases` has a bit for each place: the parity of the mbarrier's phase.
template <class V>
__device__ __forceinline__ void end_finish(const KeyHeadRows<typename V::Element>& head,
                                           int32_t position, int32_t of_key, int32_t lane,
                                           const RawChannels<typename V::Element>& z,
                                           const float (&norm)[4], KeyHeadShared<V>& shared,
                                           int32_t place, uint32_t& phases) {
  using T = typename V::Element;
  if (position < head.start || position >= head.end()) return;
  uint64_t* const are_complete = &shared.are_complete[place][of_key];
  if (lane == 0) barrier_expect(are_complete, kHeadDim * sizeof(float));
  barrier_wait(are_complete, phases >> place & 1);
  phases ^= 1u << place;
  float x[4];
  load_vector(shared.outputs[place][of_key] + 4 * lane, x);
  float gate[4];
  widen_channels<T>(z, gate);
  const float mean = __fdiv_rn(product_of(x, x), static_cast<float>(kHeadDim));
  const float factor = rsqrtf(__fadd_rn(mean, head.p.norm_eps));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = __fmul_rn(__fmul_rn(x[i], factor), __fmul_rn(norm[i], silu_of(gate[i])));
  }
  store_vector(x, static_cast<T*>(head.p.y) +
                      (int64_t{head.row_at(position)} * head.p.shape.num_value_heads +
                       head.key_head * V::kNumHeads + of_key) *
                          kHeadDim +
                      4 * lane);
}

// --- the kernel ----------------------------------------------------------------------------------

// Grid: blocks of a cluster, key heads, sequences.
template <class V>
__global__ void __launch_bounds__(V::kNumThreads, V::kMinBlocks)
    key_head_kernel(const __grid_constant__ GatedDeltaParams p) {
  using T = typename V::Element;
  extern __shared__ __align__(16) std::byte shared[];
  auto& own = *reinterpret_cast<KeyHeadShared<V>*>(shared);
  let_successor_start();
  const auto rank = static_cast<int32_t>(blockIdx.x);
  const auto key_head = static_cast<int32_t>(blockIdx.y);
  const auto sequence = static_cast<int32_t>(blockIdx.z);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  // Tells the compiler that a warp has one number, so that it does not provide for divergence.
  const int32_t warp = __shfl_sync(kAllLanes, thread / 32, 0);
  const int32_t lane = thread % 32;
  // The first item that this warp makes.
  const int32_t first_at = rank + kHeadBlocks * warp;
  ItemWeights weights;
  weights.load<V>(p, key_head, first_at % V::kItems, lane);
  wait_for_predecessor();
  // Blocks of a cluster have the same sequence, and leave together.
  if (sequence >= *p.num_seqs) return;
  const int32_t begin = p.row_indptr[sequence];
  const int32_t end = min(p.row_indptr[sequence + 1], *p.num_rows);
  if (begin >= end) return;
  const int32_t start = p.positions[begin];
  const int32_t seq_slot = p.seq_slot[begin];
  const int32_t num_live = count_live<V::kNumWarps>(p.seq_slot, begin, end, warp, lane);
  const int32_t tokens = p.entry_table.tokens_per_entry;
  const int32_t first_block = start / tokens;
  const KeyHeadRows<T> head = {p, key_head, begin, start, num_live, seq_slot, first_block * tokens};
  for (int32_t row = begin + num_live + rank; row < end; row += kHeadBlocks) {
    for (int32_t i = thread; i < V::kNumHeads * kHeadDim; i += V::kNumThreads) {
      narrow(0.0f,
             static_cast<T*>(p.y) +
                 (int64_t{row} * p.shape.num_value_heads + key_head * V::kNumHeads) * kHeadDim + i);
    }
  }
  if (num_live == 0) return;
  if (thread < kRing * V::kNumHeads) {
    barrier_init(&own.are_complete[0][0] + thread, 1);
    barrier_init_fence();
  }
  cluster_arrive();

  const bool is_consumer = warp < kConsumerWarps;
  HeadStates<V> state(warp, lane);
  if (is_consumer && first_block > 0) {
    state.load(head, rank, p.entry_table.blocks[seq_slot * p.entry_table.stride + first_block - 1]);
  }
  const int32_t num_rows = head.end() - head.first;
  const int32_t num_chunks = (num_rows + kChunkRows - 1) / kChunkRows;
  const int32_t num_first = min(num_rows, kFirstChunks * kChunkRows) * V::kItems;
  bool has_begun = false;
#pragma unroll 1
  for (int32_t at = first_at; at < num_first; at += kHeadBlocks * V::kNumWarps) {
    const int32_t i = at / V::kItems;
    const int32_t item = at % V::kItems;
    RowLoads<T> loads;
    begin_item<V>(head, head.first + i, item, lane, loads);
    if (at != first_at) weights.load<V>(p, key_head, item, lane);
    if (!has_begun) cluster_wait();  // all blocks have begun
    has_begun = true;
    end_item<V>(head, item, lane, loads, weights, own.rows[i / kChunkRows][i % kChunkRows]);
  }
  if (!has_begun) cluster_wait();
  cluster_barrier();

  if (is_consumer) {
#pragma unroll 1
    for (int32_t chunk = 0; chunk < num_chunks; ++chunk) {
      cluster_arrive_relaxed();
      const int32_t at = chunk * kChunkRows;
      const int32_t count = min(num_rows - at, kChunkRows);
      const int32_t num_replayed = min(max(head.start - head.first - at, 0), count);
      consume_rows<V, false>(head, own, chunk % kRing, 0, num_replayed, rank, state);
      consume_rows<V, true>(head, own, chunk % kRing, num_replayed, count, rank, state);
      cluster_wait();
    }
    return;
  }

  // This warp has one item of the block's row of each chunk, and the end of the same value head.
  const int32_t item = warp - kConsumerWarps;
  const int32_t of_key = item - 1;
  const auto position_in = [&](int32_t chunk) { return head.first + chunk * kChunkRows + rank; };
  RowLoads<T> loads;
  RawChannels<T> z = {};
  uint32_t phases = 0;
  float norm[4] = {};
  if (item > 0) load_vector(p.norm + 4 * lane, norm);
  if (num_chunks > kFirstChunks) weights.load<V>(p, key_head, item, lane);
#pragma unroll 1
  for (int32_t chunk = 0; chunk < num_chunks; ++chunk) {
    // The barrier before this says that chunk - 2 is consumed. Its place gets chunk + 1, whose
    // inputs have been read; now those of chunk + 2 are.
    RowLoads<T> next_loads;
    if (position_in(chunk + 2) < head.end()) {
      begin_item<V>(head, position_in(chunk + 2), item, lane, next_loads);
    }
    RawChannels<T> next_z = {};
    if (item > 0) {
      if (chunk > 0) next_z = begin_finish<V>(head, position_in(chunk - 1), of_key, lane);
      if (chunk > 1) {
        end_finish<V>(head, position_in(chunk - 2), of_key, lane, z, norm, own, (chunk - 2) % kRing,
                      phases);
      }
    }
    if (chunk > 0 && position_in(chunk + 1) < head.end()) {
      end_item<V>(head, item, lane, loads, weights, own.rows[(chunk + 1) % kRing][rank]);
    }
    loads = next_loads;
    z = next_z;
    cluster_barrier();
  }
  if (item == 0) return;
  const RawChannels<T> last_z = begin_finish<V>(head, position_in(num_chunks - 1), of_key, lane);
  if (num_chunks > 1) {
    end_finish<V>(head, position_in(num_chunks - 2), of_key, lane, z, norm, own,
                  (num_chunks - 2) % kRing, phases);
  }
  end_finish<V>(head, position_in(num_chunks - 1), of_key, lane, last_z, norm, own,
                (num_chunks - 1) % kRing, phases);
}

}  // namespace
}  // namespace paceline::cuda
