// SPDX-License-Identifier: Apache-2.0
#pragma once

// Every op of a decoder forward: one params struct and one overload a backend. The CPU twin is the
// specification. Rules that all ops share:
// - `num_rows` points to a device scalar; rows [0, *num_rows) are computed, at most `max_rows`. It
//   is memory, not a value, so that a recorded call serves every batch size.
// - Row invariance: the bits of a row depend on that row's inputs alone, never on num_rows, on the
//   row's index, or on other rows.
// - Weights are float32 or bfloat16, accumulation is float32. What passes between ops has the dtype
//   that the params name: on the CPU always float32; on a GPU that of the weights, but for the
//   residual stream and the logits, which are float32 everywhere.
// - Outputs are assigned, never accumulated, unless the field says so. Strides are in elements.
// - Nothing allocates; zero rows are fine.

#include <cstdint>

#include <paceline/dtype.h>

#include "base/host_device.h"
#include "base/philox.h"

namespace paceline {

struct CpuContext;
struct CudaContext;

// y = x W^T (+ bias). Every output is one sum over K in one fixed lane order, on every path. Beside
// bfloat16 weights x may be rounded to bfloat16 first, where the machine has a dot product for it.
struct GemmParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* x;  // [max_rows, k] x_dtype, rows x_stride apart; CUDA: 16 B aligned rows
  int64_t x_stride;
  const void* weight;  // [n, k] row-major, weight_dtype, 64 B aligned base
  DType weight_dtype;  // kFloat32 or kBFloat16
  const float* bias;   // [n], or null
  void* y;             // [max_rows, n] y_dtype, rows y_stride apart
  int64_t y_stride;
  int32_t n;
  int32_t k;                        // any positive value; multiples of 32 are fast
  DType x_dtype = DType::kFloat32;  // CUDA: weight_dtype
  DType y_dtype = DType::kFloat32;
};
void gemm(CpuContext&, const GemmParams&);
void gemm(CudaContext&, const GemmParams&);

// y = scale * table[token]; rows whose token is outside [0, vocab) become zero.
struct EmbedParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const int32_t* token_ids;  // [max_rows]
  const void* table;         // [vocab_size, hidden], table_dtype
  DType table_dtype;
  float scale;
  float* y;  // [max_rows, hidden]
  int32_t vocab_size;
  int32_t hidden;
};
void embed(CpuContext&, const EmbedParams&);
void embed(CudaContext&, const EmbedParams&);

// y = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset). With a `residual`, first
// residual += x, and it is that sum which is normalised. With an `x_weight` as well (Gemma's norm
// after a branch), x itself is normalised first, with that weight, before it joins the residual.
// With a `residual_scale` (Gemma 4's layer scalar) the sum is multiplied by it before all else.
// Without a `weight`, y is what would have been normalised, as it is.
struct RmsNormParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* x;  // [max_rows, hidden] x_dtype, rows x_stride apart
  int64_t x_stride;
  float* residual;      // [max_rows, hidden], updated to residual + x; or null
  const float* weight;  // [hidden], or null for no norm
  float weight_offset;  // 0, or 1 for Gemma 3's (1 + w)
  float eps;
  void* y;  // [max_rows, hidden] y_dtype; may be x itself; null with a residual:
            // only the residual is wanted
  int64_t y_stride;
  int32_t hidden;
  const float* x_weight = nullptr;        // [hidden], or null; only with a residual
  const float* residual_scale = nullptr;  // [1], or null; only with a residual
  DType x_dtype = DType::kFloat32;
  DType y_dtype = DType::kFloat32;
};
void rms_norm(CpuContext&, const RmsNormParams&);
void rms_norm(CudaContext&, const RmsNormParams&);

enum class Activation : uint8_t { kSilu, kGeluTanh };

// y = activation(gate) * up, gate and up being the halves of each row of x; or x is the gate alone
// and `up` stands elsewhere.
struct GatedActivationParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* x;  // [max_rows, 2 * intermediate] dtype: gate then up; with `up` only the gate
  void* y;        // [max_rows, intermediate] dtype
  int32_t intermediate;
  Activation activation;
  DType dtype = DType::kFloat32;  // of x, up and y
  const void* up = nullptr;       // [max_rows, intermediate], rows up_stride apart; or null
  int64_t up_stride = 0;
};
void gated_activation(CpuContext&, const GatedActivationParams&);
void gated_activation(CudaContext&, const GatedActivationParams&);

// Gemma's per-layer inputs, in place over their projection: each stretch of `size` elements is one
// layer's, and becomes
//   scale * (rms_norm(x_scale * x, weight) + table_scale * table[token])
// Rows whose token is outside [0, vocab) have a zero for the table's part.
struct PerLayerInputsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  void* x;                   // [max_rows, num_layers * size] dtype, updated
  const int32_t* token_ids;  // [max_rows]
  const void* table;         // [vocab_size, num_layers * size], table_dtype
  DType table_dtype;
  int32_t vocab_size;
  const float* weight;  // [size]
  float weight_offset;
  float eps;
  float x_scale;
  float table_scale;
  float scale;
  int32_t num_layers;
  int32_t size;
  DType dtype = DType::kFloat32;  // of x
};
void per_layer_inputs(CpuContext&, const PerLayerInputsParams&);
void per_layer_inputs(CudaContext&, const PerLayerInputsParams&);

// Where the KV of one layer lies in the pool: block b starts at base + int64(b) * block_bytes; in
// it K is [block_size, num_kv_heads, head_dim] at k_offset and V the same at v_offset.
struct KvLayerView {
  std::byte* base;  // of the pool; 64 B aligned
  int64_t block_bytes;
  int64_t k_offset;  // bytes inside a block
  int64_t v_offset;
  int32_t block_size;  // tokens
  DType dtype;         // kFloat32 or kBFloat16 (written round-to-nearest-even)
};

// What a row of the fused qkv buffer holds after its q heads.
enum class KvInputs : uint8_t {
  kKeysAndValues,
  kKeys,  // v is k as it stands there, before norm and rotation
  kNone,  // a layer that reads the cache of another
};

// Heads in a row of the qkv buffer.
[[nodiscard]] PACELINE_HOST_DEVICE constexpr int32_t qkv_heads(int32_t num_qo_heads,
                                                               int32_t num_kv_heads,
                                                               KvInputs inputs) {
  return num_qo_heads + (2 - static_cast<int32_t>(inputs)) * num_kv_heads;
}
static_assert(qkv_heads(4, 2, KvInputs::kKeysAndValues) == 8);
static_assert(qkv_heads(4, 2, KvInputs::kNone) == 4);

// Per row, in place in the fused qkv buffer: RMS norm of each q and k head (when weights are
// given), split-half rotary embedding of q and k, then k and v go to the KV slot of the row. A zero
// frequency (cos 1, sin 0) leaves its pair as it is.
struct QkNormRopeAppendParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  void* qkv;                    // [max_rows, qkv_heads(...) * head_dim] qkv_dtype; q is updated in
                                // place, k and v are only read
  const int32_t* positions;     // [max_rows]
  const int64_t* slot_mapping;  // [max_rows] block * block_size + offset; slots of the null block
                                // (below block_size; inert rows have 0) may be left unwritten. Not
                                // read, nor is the cache, where kv_inputs is kNone
  const float* q_norm;          // [head_dim], or null for none
  const float* k_norm;          // [head_dim], or null
  float norm_weight_offset;     // 0 or 1
  float norm_eps;
  const float* rope_cos;  // [max_positions, head_dim / 2]
  const float* rope_sin;  // [max_positions, head_dim / 2]
  KvLayerView kv;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim;  // even
  DType qkv_dtype = DType::kFloat32;
  KvInputs kv_inputs = KvInputs::kKeysAndValues;
  bool has_v_norm = false;      // v over its root mean square (with norm_eps), without a weight
  int32_t position_offset = 0;  // q and k are rotated to positions[row] + position_offset
};
void qk_norm_rope_append(CpuContext&, const QkNormRopeAppendParams&);
void qk_norm_rope_append(CudaContext&, const QkNormRopeAppendParams&);

// Keys are walked in chunks aligned at absolute positions, a fresh (max, sum, accumulator) each,
// merged in ascending order: so a row's bits do not depend on how it came to be computed.
inline constexpr int32_t kAttentionChunk = 128;

// Softmax attention of each row over the keys [kv_begin, kv_end) of its sequence. The row's own KV
// is already appended. Rows with kv_end == 0 are inert: their output is zero. The rows of a
// sequence lie side by side, at ascending positions, so that a backend may load a key once for all
// of them.
struct PagedAttentionParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* qkv;             // [max_rows, qkv_heads(...) * head_dim] dtype; q first
  const int32_t* seq_slot;     // [max_rows] row of block_table; -1: inert
  const int32_t* kv_begin;     // [max_rows] first visible position; null: 0 for every row
  const int32_t* kv_end;       // [max_rows] one past the last visible position
  const int32_t* block_table;  // [max_seqs, max_blocks] block ids
  int64_t block_table_stride;  // elements between rows of block_table
  KvLayerView kv;
  float scale;
  float soft_cap;      // 0: none, else scores = cap * tanh(scores / cap)
  const float* sinks;  // [num_qo_heads] extra logit in the softmax sum, unscaled; or null
  void* y;             // [max_rows, num_qo_heads * head_dim] dtype
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  DType dtype = DType::kFloat32;  // of qkv and y
  // Which rows belong together; the CPU twin takes row by row and does not read them.
  const int32_t* num_seqs = nullptr;  // [1]
  const int32_t* row_indptr =
      nullptr;  // [max_seqs + 1] rows of sequence i: [indptr[i], indptr[i+1])
  int32_t max_seqs = 0;
  int32_t max_rows_per_seq = 0;  // of any sequence
  KvInputs kv_inputs = KvInputs::kKeysAndValues;
};
void paged_attention(CpuContext&, const PagedAttentionParams&);
void paged_attention(CudaContext&, const PagedAttentionParams&);

// The test-only reader of window lists: attention over the slots listed for each row, in list
// order. Exists so that a stale list changes logits.
struct ListAttentionParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* qkv;              // as in PagedAttentionParams
  const int64_t* window_slots;  // [max_rows, window] block * block_size + offset
  const int32_t* window_count;  // [max_rows] valid entries: list indices [0, count); 0: inert
  int32_t window;
  KvLayerView kv;
  float scale;
  void* y;  // [max_rows, num_qo_heads * head_dim] dtype
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  DType dtype = DType::kFloat32;  // of qkv and y
  KvInputs kv_inputs = KvInputs::kKeysAndValues;
};
void list_attention(CpuContext&, const ListAttentionParams&);
void list_attention(CudaContext&, const ListAttentionParams&);

// y[i] = x[row_index[i]].
struct GatherRowsParams {
  const int32_t* num_rows;  // [1] rows of y
  int32_t max_rows;
  const int32_t* row_index;  // [max_rows] row of x
  const float* x;            // [*, hidden]
  float* y;                  // [max_rows, hidden]
  int32_t hidden;
};
void gather_rows(CpuContext&, const GatherRowsParams&);
void gather_rows(CudaContext&, const GatherRowsParams&);

// y[i] = x[row_index[i]], converted. Between the buffers of one model and another.
struct CopyRowsParams {
  const int32_t* num_rows;  // [1] rows of y
  int32_t max_rows;
  const int32_t* row_index;  // [max_rows] row of x; null: row i is row i
  const void* x;             // [*, width] x_dtype, rows x_stride apart
  int64_t x_stride;
  void* y;  // [max_rows, width] y_dtype, rows y_stride apart; apart from x
  int64_t y_stride;
  int32_t width;
  DType x_dtype = DType::kFloat32;
  DType y_dtype = DType::kFloat32;
};
void copy_rows(CpuContext&, const CopyRowsParams&);
void copy_rows(CudaContext&, const CopyRowsParams&);

// Of each row, the `top` clusters with the highest scores, best first; the lower number comes first
// among equals. NaN counts as -inf.
struct SelectClustersParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* scores;  // [max_rows, num_clusters]
  int32_t num_clusters;
  int32_t top;        // 1 to num_clusters
  int32_t* clusters;  // [max_rows, top]
};
void select_clusters(CpuContext&, const SelectClustersParams&);
void select_clusters(CudaContext&, const SelectClustersParams&);

// The logits of the tokens of some clusters of each row: a cluster's tokens are `cluster_size`
// entries of `token_ordering`, and a token's logit is x . weight[token].
struct ClusterLogitsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* x;            // [max_rows, hidden] x_dtype
  const int32_t* clusters;  // [max_rows, top]
  int32_t top;
  const int32_t* token_ordering;  // [clusters * cluster_size]
  int32_t cluster_size;
  const void* weight;  // [tokens, hidden] weight_dtype
  float* logits;       // [max_rows, top * cluster_size]
  int32_t* tokens;     // [max_rows, top * cluster_size] the token of each logit
  int32_t hidden;
  DType x_dtype = DType::kFloat32;
  DType weight_dtype = DType::kFloat32;
};
void cluster_logits(CpuContext&, const ClusterLogitsParams&);
void cluster_logits(CudaContext&, const ClusterLogitsParams&);

// logits = cap * tanh(logits / cap), in place.
struct SoftCapParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  float* logits;  // [max_rows, n], updated
  float cap;      // > 0
  int32_t n;
};
void soft_cap(CpuContext&, const SoftCapParams&);
void soft_cap(CudaContext&, const SoftCapParams&);

// One draw a row by Gumbel-max: argmax over ids < vocab_limit of logit / temperature + noise(seed,
// position of the drawn token, id); temperature 0 is the plain argmax. Ties go to the lowest id.
// NaN counts as -inf; a row without any logit above -inf draws -2, "no valid logit", on which the
// caller ends that request with an error.
// Target and drafter call this with the same seed and position and so share their noise. With a
// `token_map`, ids are rows of a drafter's smaller vocabulary: the noise is that of the token an id
// maps to, and the token is what is drawn; ids of tokens at or beyond token_limit are not drawn.
struct DrawParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* logits;  // [max_rows, logits_stride]
  int64_t logits_stride;
  int32_t vocab_limit;        // ids [0, vocab_limit) may be drawn
  const int32_t* row_index;   // [max_rows] row of positions / seq_slot that row i belongs to
  const int32_t* seq_slot;    // per pass row: sequence slot; -1: inert, draws -1
  const int32_t* positions;   // per pass row: the drawn token's is draw_ahead further on
  const uint64_t* seeds;      // [max_seqs] by sequence slot
  const float* temperatures;  // [max_seqs] by sequence slot; null: 0 for all
  int32_t* tokens;            // [max_rows]
  // [max_rows] softmax of what may be drawn at temperature 1, taken at the drawn id; 0
  // where nothing was drawn. Or null: not wanted.
  float* probabilities = nullptr;
  int32_t draw_ahead = 1;  // 1: the row's position is that of its input token
  // Token of each id: [vocab_limit] where all rows share one, [max_rows, token_map_stride] where
  // each has its own; null: an id is its token.
  const int32_t* token_map = nullptr;
  int32_t token_limit = 0;       // with token_map
  int64_t token_map_stride = 0;  // 0: all rows share one
  // [1] steps since the rows were at their positions, which have not moved on; or null: the drawn
  // token's position is so much further on.
  const int32_t* steps_ahead = nullptr;
  // [max_rows] row of `logits`, and of maps of each row's own, that row i draws from; below 0:
  // none, row i is inert. Null: row i draws from row i.
  const int32_t* logit_rows = nullptr;
  NoiseStream stream = NoiseStream::kTarget;
  const int32_t* salts = nullptr;  // [max_seqs] by sequence slot, of the noise; null: 0 for all
};
void draw(CpuContext&, const DrawParams&);
void draw(CudaContext&, const DrawParams&);

}  // namespace paceline
