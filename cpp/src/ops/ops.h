// SPDX-License-Identifier: Apache-2.0
#pragma once

// The ops of a decoder's forward pass: one params struct and one overload per backend. The CPU
// implementation is the specification. Rules that all ops share:
// - `num_rows` points to a device scalar. An op computes rows [0, *num_rows), at most `max_rows`.
//   The count is read from memory, so that one recorded call serves every batch size.
// - Row invariance: the bits of a row depend only on that row's inputs, never on num_rows, on the
//   row's index or on other rows.
// - Weights are float32 or bfloat16, and ops accumulate in float32. Values passed between ops have
//   the dtype that the params name: on the CPU always float32; on a GPU the dtype of the weights,
//   except for the residual stream and the logits, which are float32 everywhere.
// - Ops assign their outputs and do not accumulate into them, unless the field says so. Strides are
//   in elements.
// - Ops never allocate. Zero rows are valid.

#include <cstdint>

#include <paceline/dtype.h>

#include "base/host_device.h"
#include "base/philox.h"
#include "ops/weight_matrix.h"

namespace paceline {

struct CpuContext;
struct CudaContext;

// y = x W^T (+ bias). With groups, the outputs of group g, [g n / num_groups, (g + 1) n /
// num_groups), read the inputs [g k, (g + 1) k) of a row of x. Every output is one sum over K in
// one fixed lane order, on every path (with scales for parts of K, one sum for each part:
// WeightMatrix). With bfloat16 weights, x may first be rounded to bfloat16 on machines that have a
// bfloat16 dot product.
struct GemmParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* x;  // [max_rows, num_groups * k] x_dtype, rows x_stride apart; on CUDA rows are 16 B
                  // aligned
  int64_t x_stride;
  WeightMatrix weight;  // [n, k]; k > 0, and multiples of 32 are fastest
  const float* bias;    // [n], or null
  void* y;              // [max_rows, n] y_dtype, rows y_stride apart
  int64_t y_stride;
  DType x_dtype = DType::kFloat32;  // on CUDA the dtype of the weights
  DType y_dtype = DType::kFloat32;
  int32_t num_groups = 1;  // divides n
  // Whether a GPU lets the op's successor start only when the op's predecessor has ended. What was
  // written before this op is then complete when the successor starts; see reads_early of
  // PagedAttentionParams.
  bool delays_successor = false;
};
void gemm(CpuContext&, const GemmParams&);
void gemm(CudaContext&, const GemmParams&);

// y = scale * table[token]. Rows whose token is outside [0, vocab_size) become zero.
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

// y = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset).
// - With a `residual`, the op first computes residual += x and normalises that sum instead of x.
// - With an `x_weight` as well (Gemma's norm after a branch), the op first normalises x with that
//   weight and adds the result to the residual.
// - With a `residual_scale` (Gemma 4's layer scalar), the op multiplies the sum, which is the new
//   residual, by it before it normalises.
// - Without a `weight`, y is the value that would have been normalised, unchanged.
struct RmsNormParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* x;  // [max_rows, hidden] x_dtype, rows x_stride apart
  int64_t x_stride;
  float* residual;      // [max_rows, hidden], updated as above; or null
  const float* weight;  // [hidden], or null: no norm
  float weight_offset;  // 0, or 1 for Gemma 3's (1 + w)
  float eps;
  void* y;  // [max_rows, hidden] y_dtype; may be x itself. With a residual it may be null: only the
            // residual is updated
  int64_t y_stride;
  int32_t hidden;
  const float* x_weight = nullptr;        // [hidden], or null; only with a residual
  const float* residual_scale = nullptr;  // [1], or null; only with a residual
  DType x_dtype = DType::kFloat32;
  DType y_dtype = DType::kFloat32;
};
void rms_norm(CpuContext&, const RmsNormParams&);
void rms_norm(CudaContext&, const RmsNormParams&);

enum class Activation : uint8_t {
  kSilu,
  kGeluTanh,
  // GPT-OSS: with g = min(gate, limit) and u = clamp(up, -limit, limit),
  // y = (u + 1) * g * sigmoid(alpha * g). NaN stays NaN.
  kSwigluOai,
  // DeepSeek-V4: with the same g and u, y = g * sigmoid(g) * u. NaN stays NaN.
  kClampedSilu,
  // An output gate: y = up * sigmoid(gate).
  kSigmoid,
};

// y = activation(gate) * up, or what the activation says. Each row of x holds gate and then up; or
// their elements in turn; or only the gate, and `up` points to the other factor.
struct GatedActivationParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* x;  // [max_rows, 2 * intermediate] dtype, gate and then up; with `up`, [max_rows,
                  // intermediate]: only the gate
  void* y;        // [max_rows, intermediate] dtype; may be `up` where that has no gaps
  int32_t intermediate;
  Activation activation;
  DType dtype = DType::kFloat32;  // dtype of x, up and y
  const void* up = nullptr;       // [max_rows, intermediate], rows up_stride apart; or null
  int64_t up_stride = 0;
  float alpha = 0;  // of kSwigluOai
  float limit = 0;  // of kSwigluOai and kClampedSilu, > 0
  // gate is in the even and up in the odd elements of x; without `up`
  bool is_interleaved = false;
};
void gated_activation(CpuContext&, const GatedActivationParams&);
void gated_activation(CudaContext&, const GatedActivationParams&);

// gemm, and gated_activation with its y as x. That y may stay unwritten, because a backend may fuse
// the two.
struct ActivatedGemmParams {
  GemmParams product;  // of [2 * intermediate, k]
  GatedActivationParams activation;
};
// Throws InternalError where the activation does not read the product.
void check_activation(const ActivatedGemmParams& p);
void activated_gemm(CpuContext&, const ActivatedGemmParams&);
void activated_gemm(CudaContext&, const ActivatedGemmParams&);

// rms_norm, and then gemm or activated_gemm with its y as x. That y, and the product where an
// activation reads it, may stay unwritten, because a backend may fuse the ops.
struct NormedGemmParams {
  RmsNormParams norm;
  GemmParams product;
  GatedActivationParams activation = {};  // where has_activation
  bool has_activation = false;
};
// Throws InternalError where the product does not read the norm.
void check_norm(const NormedGemmParams& p);
void normed_gemm(CpuContext&, const NormedGemmParams&);
void normed_gemm(CudaContext&, const NormedGemmParams&);

// gemm, and then residual += y. y may stay unwritten, because a backend may fuse the two.
struct AddedGemmParams {
  GemmParams product;
  float* residual;  // [max_rows, n], 16 B aligned
};
// The addition as an op of its own.
[[nodiscard]] inline RmsNormParams addition_of(const AddedGemmParams& p) {
  const GemmParams& product = p.product;
  return {.num_rows = product.num_rows,
          .max_rows = product.max_rows,
          .x = product.y,
          .x_stride = product.y_stride,
          .residual = p.residual,
          .weight = nullptr,
          .weight_offset = 0,
          .eps = 0,
          .y = nullptr,
          .y_stride = 0,
          .hidden = product.weight.n,
          .x_dtype = product.y_dtype};
}
void added_gemm(CpuContext&, const AddedGemmParams&);
void added_gemm(CudaContext&, const AddedGemmParams&);
// Whether a product adds its output to the residual in one kernel. If not, a norm does it for less.
[[nodiscard]] bool adds_in_product(const CpuContext&, const GemmParams&);
[[nodiscard]] bool adds_in_product(const CudaContext&, const GemmParams&);

// Gemma's per-layer inputs, in place over their projection. Each layer has `size` consecutive
// elements of a row, which become
//   scale * (rms_norm(x_scale * x, weight) + table_scale * table[token])
// The table's part is zero in rows whose token is outside [0, vocab_size).
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
  DType dtype = DType::kFloat32;  // dtype of x
};
void per_layer_inputs(CpuContext&, const PerLayerInputsParams&);
void per_layer_inputs(CudaContext&, const PerLayerInputsParams&);

// Where the KV of one layer lies in the pool. Block b starts at base + int64(b) * block_bytes.
// Within the block, K is [block_size, num_kv_heads, head_dim] at k_offset, and V has the same shape
// at v_offset.
struct KvLayerView {
  std::byte* base;  // start of the pool; 64 B aligned
  int64_t block_bytes;
  int64_t k_offset;    // bytes inside a block
  int64_t v_offset;    // with latent entries: k_offset
  int32_t block_size;  // tokens
  DType dtype;         // kFloat32 or kBFloat16 (written round-to-nearest-even)
};

// What follows the q heads in a row of the fused qkv buffer.
enum class KvInputs : uint8_t {
  kKeysAndValues,
  kKeys,  // v is k before its norm and rotation
  kNone,  // the layer reads another layer's cache
};

// Number of heads in a row of the qkv buffer.
[[nodiscard]] PACELINE_HOST_DEVICE constexpr int32_t qkv_heads(int32_t num_qo_heads,
                                                               int32_t num_kv_heads,
                                                               KvInputs inputs) {
  return num_qo_heads + (2 - static_cast<int32_t>(inputs)) * num_kv_heads;
}
static_assert(qkv_heads(4, 2, KvInputs::kKeysAndValues) == 8);
static_assert(qkv_heads(4, 2, KvInputs::kNone) == 4);

// Per row of the fused qkv buffer: computes the RMS norm of each q and k head (when weights are
// given) and the split-half rotary embedding of the first rope_head_dim elements of each, then
// writes k and v to the KV slot of the row. A zero frequency (cos 1, sin 0) leaves its pair of
// elements unchanged.
struct QkNormRopeAppendParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  void* qkv;  // [max_rows, qkv_heads(...) * head_dim] qkv_dtype; q is updated in place, k and v are
              // only read
  const int32_t* positions;     // [max_rows]
  const int64_t* slot_mapping;  // [max_rows] block * block_size + offset. The op may leave slots of
                                // the null block unwritten (below block_size; inert rows have 0).
                                // With kv_inputs kNone neither this field nor the cache is read
  const float* q_norm;          // [head_dim], or null for none
  const float* k_norm;          // [head_dim], or null
  float norm_weight_offset;     // 0 or 1
  float norm_eps;
  const float* rope_cos;  // [max_positions, rotated elements / 2]
  const float* rope_sin;  // [max_positions, rotated elements / 2]
  KvLayerView kv;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim;  // even
  DType qkv_dtype = DType::kFloat32;
  KvInputs kv_inputs = KvInputs::kKeysAndValues;
  // v is divided by its root mean square (with norm_eps), without a weight.
  bool has_v_norm = false;
  int32_t position_offset = 0;  // q and k are rotated to position positions[row] + position_offset
  int32_t rope_head_dim = 0;    // rotated elements of a head, even; 0: all
  // Whether the ops since a product with delays_successor have written nothing that this op reads
  // but qkv. A GPU then reads the rest before the op's predecessor has ended.
  bool reads_early = false;
};
void qk_norm_rope_append(CpuContext&, const QkNormRopeAppendParams&);
void qk_norm_rope_append(CudaContext&, const QkNormRopeAppendParams&);

// Attention walks keys in chunks aligned at absolute positions. Each chunk has its own (max, sum,
// accumulator), and chunks are merged in ascending order. So the bits of a row do not depend on
// which pass computed it.
inline constexpr int32_t kAttentionChunk = 128;

// Softmax attention of each row over the keys [kv_begin, kv_end) of its sequence. The row's own KV
// has already been appended. Rows with kv_end == 0 are inert: their output is zero. The rows of a
// sequence are adjacent and at ascending positions, so that a backend can load a key once for all
// of them.
struct PagedAttentionParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* qkv;             // [max_rows, qkv_heads(...) * head_dim] dtype; q first
  const int32_t* seq_slot;     // [max_rows] row of block_table; -1: inert
  const int32_t* kv_begin;     // [max_rows] first visible position; null: 0 in every row
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
  DType dtype = DType::kFloat32;  // dtype of qkv and y
  // Which rows belong to the same sequence. The CPU computes row by row and does not read these
  // fields.
  const int32_t* num_seqs = nullptr;  // [1]
  // [max_seqs + 1] sequence i has rows [indptr[i], indptr[i + 1]).
  const int32_t* row_indptr = nullptr;
  int32_t max_seqs = 0;
  int32_t max_rows_per_seq = 0;  // maximum over the sequences
  KvInputs kv_inputs = KvInputs::kKeysAndValues;
  // Whether the ops since a product with delays_successor have written nothing that this op reads
  // but qkv, and the keys and values of the rows: of a sequence with n rows, at none but the last n
  // positions that its rows see. A GPU then reads the rest before the op's predecessor has ended.
  bool reads_early = false;
};
void paged_attention(CpuContext&, const PagedAttentionParams&);
void paged_attention(CudaContext&, const PagedAttentionParams&);

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

// y[i] = x[row_index[i]], converted to y_dtype. Copies between buffers of different models.
struct CopyRowsParams {
  const int32_t* num_rows;  // [1] rows of y
  int32_t max_rows;
  const int32_t* row_index;  // [max_rows] row of x; null: y[i] = x[i]
  const void* x;             // [*, width] x_dtype, rows x_stride apart
  int64_t x_stride;
  void* y;  // [max_rows, width] y_dtype, rows y_stride apart; must not overlap x
  int64_t y_stride;
  int32_t width;
  DType x_dtype = DType::kFloat32;
  DType y_dtype = DType::kFloat32;
};
void copy_rows(CpuContext&, const CopyRowsParams&);
void copy_rows(CudaContext&, const CopyRowsParams&);

// For each row, the `top` clusters with the highest scores, best first. Among equal scores the
// cluster with the lower number comes first. NaN counts as -inf.
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

// The logits of the tokens in the selected clusters of each row. A cluster has `cluster_size`
// entries of `token_ordering`, and the logit of a token is x . weight[token].
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

// logits = cap * tanh(scale * logits / cap), in place; without a cap logits = scale * logits.
struct SoftCapParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  float* logits;  // [max_rows, n], updated, rows `stride` apart
  float cap;      // > 0, or 0: none
  int32_t n;
  float scale = 1;
  int64_t stride = 0;  // 0: n

  [[nodiscard]] int64_t row_stride() const { return stride > 0 ? stride : n; }
};
void soft_cap(CpuContext&, const SoftCapParams&);
void soft_cap(CudaContext&, const SoftCapParams&);

// Samples one token per row by Gumbel-max: argmax over ids < vocab_limit of logit / temperature +
// noise(seed, position of the drawn token, id). Temperature 0 is the plain argmax. Ties go to the
// lowest id. NaN counts as -inf. A row without any logit above -inf draws -2, "no valid logit", and
// the caller ends that request with an error.
//
// Target and drafter call this with the same seed and position, so they share their noise. With a
// `token_map`, ids are rows of the drafter's smaller vocabulary: the op uses the noise of the token
// that an id maps to and returns that token. It never draws ids whose tokens are at or beyond
// token_limit.
struct DrawParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* logits;  // [max_rows, logits_stride]
  int64_t logits_stride;
  int32_t vocab_limit;        // ids [0, vocab_limit) may be drawn
  const int32_t* row_index;   // [max_rows] row of positions and seq_slot for row i
  const int32_t* seq_slot;    // per pass row: sequence slot; -1: inert, draws -1
  const int32_t* positions;   // per pass row; the drawn token's position is draw_ahead higher
  const uint64_t* seeds;      // [max_seqs] by sequence slot
  const float* temperatures;  // [max_seqs] by sequence slot; null: 0 for all
  int32_t* tokens;            // [max_rows]
  // [max_rows] the drawn id's probability: softmax at temperature 1 over the ids that may be drawn;
  // 0 where nothing was drawn. Null: not computed.
  float* probabilities = nullptr;
  // Distance from the row's position to the drawn token's. 1: the row holds the token just before
  // it.
  int32_t draw_ahead = 1;
  // Token of each id: [vocab_limit] if all rows share one map, [max_rows, token_map_stride] if each
  // row has its own. Null: an id is its token.
  const int32_t* token_map = nullptr;
  int32_t token_limit = 0;       // used with token_map; tokens at or beyond it are not drawn
  int64_t token_map_stride = 0;  // 0: all rows share one map
  // [1] draft steps since the rows' positions last changed, which is added to the drawn token's
  // position; or null: 0.
  const int32_t* steps_ahead = nullptr;
  // [max_rows] row of `logits` (and of per-row maps) that row i draws from; negative: none, row i
  // is inert. Null: row i draws from row i.
  const int32_t* logit_rows = nullptr;
  NoiseStream stream = NoiseStream::kTarget;
  // [max_seqs] by sequence slot: salt of the noise; null: 0 for all.
  const int32_t* salts = nullptr;
};
void draw(CpuContext&, const DrawParams&);
void draw(CudaContext&, const DrawParams&);

}  // namespace paceline
