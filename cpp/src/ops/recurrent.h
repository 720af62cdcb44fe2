// SPDX-License-Identifier: Apache-2.0
#pragma once

// The op of recurrent layers (docs/recurrent.md), under the rules of ops.h.
//
// The gated delta rule keeps a matrix S [key_dim, value_dim] for each value head of a sequence. The
// row at position t makes of its inputs u (all channels), b and a (one of each for a value head):
//
//   y[c] = silu(sum over j ascending of conv[c][j] * u_{t - taps + 1 + j}[c]), where inputs before
//          position 0 are 0; the channels are the q of all key heads, their k, and all v
//   q, k = q * rsqrt(sum q^2 + 1e-6) * key_dim^-1/2, k * rsqrt(sum k^2 + 1e-6), of a key head;
//          value head h has key head h / (num_value_heads / num_key_heads)
//   beta = sigmoid(b),  g = -exp(a_log) * softplus(a + dt_bias)
//   S'   = exp(g) * S,  d = beta * (v - S'^T k),  S = S' + k d^T,  o = S^T q
//   out  = o * rsqrt(mean o^2 + norm_eps) * norm * silu(z)
//
// all in float32. Two stores of the KV cache make a rejected row harmless. Each token writes a
// *record*, its u, b and a in the dtype of KV, and the row that completes a block of block_size
// tokens writes the *state*, all S after it in float32, as the entry of this block. The first row
// of a sequence in a pass reads the entry of the block before its own, and the records since then;
// so what a rejected row has written is never read: a row at its position writes it anew first. A
// row uses its own inputs as its record has them, so replaying records has the bits of going on,
// and the bits of a row do not depend on the pass it is in. On a CPU, and in float32 on a GPU, they
// do not depend on the block size either; in bfloat16 on a GPU all block sizes that are multiples
// of 16 give the same bits.
//
// Rows of a pass hand on S and their inputs to the next row. So a pass reads of its own rows
// neither records nor entries, and where later passes need none of either, their blocks may be the
// null block: nothing is written there.

#include <cstdint>

#include <paceline/dtype.h>

#include "base/host_device.h"
#include "metadata/group_metadata.h"
#include "ops/ops.h"

namespace paceline {

inline constexpr int32_t kMaxConvTaps = 8;
inline constexpr int32_t kMaxRecurrentHeadDim = 256;

// The sizes of a recurrent layer.
struct RecurrentShape {
  int32_t num_key_heads = 0;
  int32_t num_value_heads = 0;  // a multiple of num_key_heads
  int32_t key_dim = 0;          // of a head, at most kMaxRecurrentHeadDim
  int32_t value_dim = 0;        // of a head, at most kMaxRecurrentHeadDim
  int32_t num_taps = 0;         // 2 to kMaxConvTaps

  [[nodiscard]] PACELINE_HOST_DEVICE constexpr int32_t keys_width() const {
    return num_key_heads * key_dim;
  }
  [[nodiscard]] PACELINE_HOST_DEVICE constexpr int32_t values_width() const {
    return num_value_heads * value_dim;
  }
  // Channels of the convolution: q, k, v.
  [[nodiscard]] PACELINE_HOST_DEVICE constexpr int32_t num_channels() const {
    return 2 * keys_width() + values_width();
  }
  // Elements of a record: u, then b and a of all value heads.
  [[nodiscard]] PACELINE_HOST_DEVICE constexpr int32_t record_width() const {
    return num_channels() + 2 * num_value_heads;
  }
  // Elements of a state.
  [[nodiscard]] constexpr int32_t state_width() const {
    return num_value_heads * key_dim * value_dim;
  }
  [[nodiscard]] bool operator==(const RecurrentShape&) const = default;
};

struct GatedDeltaParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  // Rows of projections, dtype. u [num_channels] begins at 0, z [values_width] follows it.
  const void* x;     // [max_rows, x_stride]
  int64_t x_stride;  // elements
  // b [num_value_heads], then a [num_value_heads]; dtype.
  const void* ba;            // [max_rows, ba_stride]
  int64_t ba_stride;         // elements
  const int32_t* positions;  // [max_rows] ascending by 1 in the rows of a sequence
  const int32_t* seq_slot;  // [max_rows] row of the tables; -1: inert, y is zero. The inert rows of
                            // a sequence follow its live ones
  const int64_t* record_slots;  // [max_rows] block * block_size + offset of the row's own record
  BlockTable record_table;
  KvLayerView records;  // a token has record_width elements at k_offset
  // [max_rows] the block of the entry that the row completes; 0: it completes none
  const int64_t* entry_slots;
  BlockTable entry_table;  // block_size 1; tokens_per_entry is at least num_taps - 1
  KvLayerView entries;   // an entry has state_width float32 elements at k_offset: [num_value_heads,
                         // value_dim, key_dim]; block_size 1
  const float* conv;     // [num_channels, num_taps]; the last tap meets the row itself
  const float* a_log;    // [num_value_heads]
  const float* dt_bias;  // [num_value_heads]
  const float* norm;     // [value_dim]
  float norm_eps;
  void* y;  // [max_rows, values_width] dtype
  RecurrentShape shape;
  DType dtype = DType::kFloat32;
  // Which rows belong to the same sequence, as in PagedAttentionParams.
  const int32_t* num_seqs = nullptr;    // [1]
  const int32_t* row_indptr = nullptr;  // [max_seqs + 1]
  int32_t max_seqs = 0;
  int32_t max_rows_per_seq = 0;
};
void gated_delta(CpuContext&, const GatedDeltaParams&);
void gated_delta(CudaContext&, const GatedDeltaParams&);

}  // namespace paceline
