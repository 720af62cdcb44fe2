// SPDX-License-Identifier: Apache-2.0
#pragma once

// The ops of latent attention in its absorbed form (docs/kv-groups.md), under the rules of ops.h:
//
//   append_latents -> absorb_queries -> latent_attention -> project_values
//
// A token stores one entry, which all heads share: its normed latent c [kv_lora_rank] and its
// rotated key k [qk_rope_head_dim]. Head h has the matrices K_h [qk_nope_head_dim, kv_lora_rank]
// and V_h [v_head_dim, kv_lora_rank]. Without absorption its keys would be [K_h c ; k] and its
// values V_h c. Here K_h^T multiplies the query instead, and V_h the weighted sum of latents.

#include <cstdint>

#include <paceline/dtype.h>

#include "ops/ops.h"
#include "ops/weight_matrix.h"

namespace paceline {

inline constexpr int32_t kMaxLatentRank = 1024;  // of kv_lora_rank
// What latent_attention takes on a GPU.
inline constexpr int32_t kMaxCudaLatentRank = 512;
inline constexpr int32_t kMaxCudaEntryWidth = 640;

// A rotary embedding of `width` elements at positions[row] + position_offset.
struct LatentRope {
  const int32_t* positions;  // [max_rows]
  const float* cos;          // [max_positions, width / 2]
  const float* sin;          // [max_positions, width / 2]
  int32_t position_offset = 0;
  // true: pair i is elements 2i and 2i + 1; false: i and i + width / 2
  bool is_interleaved = false;
};

// Norms the parts of a row of qkv_a and writes the entry to the KV slot of the row.
struct AppendLatentsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  // [max_rows, q_width + kv_lora_rank + qk_rope_head_dim] dtype: q_a x or q x, then c, then k. With
  // a q_norm the first part is normed in place; c and k are only read
  void* qkv_a;
  int32_t q_width;
  const int64_t* slot_mapping;  // [max_rows] as in QkNormRopeAppendParams
  const float* q_norm;          // [q_width], or null
  const float* latent_norm;     // [kv_lora_rank]
  float norm_weight_offset;     // 0 or 1
  float norm_eps;
  LatentRope rope;
  KvLayerView entries;  // a token has kv_lora_rank + qk_rope_head_dim elements at k_offset
  int32_t kv_lora_rank;
  int32_t qk_rope_head_dim;
  DType dtype = DType::kFloat32;
};
void append_latents(CpuContext&, const AppendLatentsParams&);
void append_latents(CudaContext&, const AppendLatentsParams&);

// The matrices of all heads: the rows of K_h and then those of V_h, head by head.
struct LatentHeads {
  WeightMatrix kv_b;  // plain, [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]
  int32_t num_heads;
  int32_t qk_nope_head_dim;
  int32_t v_head_dim;
};

// y = [K_h^T q_nope ; rope(q_rope)] for each head h of q. An element of the first part is one sum
// over ascending elements of q_nope.
struct AbsorbQueriesParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* q;  // [max_rows, num_heads * (qk_nope_head_dim + qk_rope_head_dim)] dtype, rows
                  // q_stride apart; a head has q_nope and then q_rope
  int64_t q_stride;
  LatentHeads heads;
  LatentRope rope;
  void* y;  // [max_rows, num_heads, kv_lora_rank + qk_rope_head_dim] dtype
  int32_t qk_rope_head_dim;
  DType dtype = DType::kFloat32;
};
void absorb_queries(CpuContext&, const AbsorbQueriesParams&);
void absorb_queries(CudaContext&, const AbsorbQueriesParams&);

// Softmax attention of each row over the entries [0, kv_end) of its sequence, in chunks at absolute
// positions: y is the weighted sum of latents. Rows are as in PagedAttentionParams.
struct LatentAttentionParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* q;               // [max_rows, num_heads, kv_lora_rank + qk_rope_head_dim] dtype
  const int32_t* seq_slot;     // [max_rows] row of block_table; -1: inert
  const int32_t* kv_end;       // [max_rows] one past the last visible position
  const int32_t* block_table;  // [max_seqs, max_blocks] block ids
  int64_t block_table_stride;  // elements between rows of block_table
  KvLayerView entries;         // as in AppendLatentsParams
  float scale;
  void* y;  // [max_rows, num_heads, kv_lora_rank] dtype
  int32_t num_heads;
  int32_t kv_lora_rank;  // at most kMaxLatentRank
  int32_t qk_rope_head_dim;
  DType dtype = DType::kFloat32;
  // Which rows belong to the same sequence, as in PagedAttentionParams.
  const int32_t* num_seqs = nullptr;    // [1]
  const int32_t* row_indptr = nullptr;  // [max_seqs + 1]
  int32_t max_seqs = 0;
  int32_t max_rows_per_seq = 0;
  // Whether the ops since a product with delays_successor (GemmParams) have written nothing that
  // this op reads but q. A GPU then reads the rest before the op's predecessor has ended.
  bool reads_early = false;
};
void latent_attention(CpuContext&, const LatentAttentionParams&);
void latent_attention(CudaContext&, const LatentAttentionParams&);

// y = V_h x for each head h. Every output is a sum as gemm computes it.
struct ProjectValuesParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* x;  // [max_rows, num_heads, kv_lora_rank] dtype
  LatentHeads heads;
  void* y;  // [max_rows, num_heads, v_head_dim] dtype
  DType dtype = DType::kFloat32;
};
void project_values(CpuContext&, const ProjectValuesParams&);
void project_values(CudaContext&, const ProjectValuesParams&);

}  // namespace paceline
