// SPDX-License-Identifier: Apache-2.0
#pragma once

// The ops of compressed attention (docs/kv-groups.md), under the rules of ops.h. A layer runs, in
// this order,
//
//   append_window_entries -> rotate_heads (queries) -> compressed_attention -> rotate_heads
//   (output)
//
// and a layer with a compressor, between the first two and compressed_attention, also
//
//   append_tail -> compress -> with an indexer: rotate_heads (its queries), index_scores,
//   choose_entries
//
// A token stores one entry of head_dim elements for its window, which all heads share and which is
// both key and value. Each tokens_per_entry tokens of a sequence together have one compressed
// entry: entry e is made of the tokens up to position (e + 1) * tokens_per_entry - 1, by the row at
// that position. A row at position p sees the compressed entries below (p + 1) / tokens_per_entry.
// The inputs of compressed entries wait in the tail store, which keeps the last tokens only.
//
// The last rope_head_dim elements of an entry and of a head carry the rotary embedding. Rows may be
// of any sequences, several of one sequence at ascending positions, in one pass. The rows of a pass
// that complete an entry write it before any row of the pass reads it, because each op reads what
// an earlier op has written.

#include <cstdint>

#include <paceline/dtype.h>

#include "metadata/group_metadata.h"
#include "ops/latent.h"
#include "ops/ops.h"

namespace paceline {

inline constexpr int32_t kMaxCompressedHeadDim = 1024;
inline constexpr int32_t kMaxTokensPerEntry = 1024;
inline constexpr int32_t kMaxIndexTopK = 4096;
inline constexpr int32_t kMaxCompressors = 2;  // of attention and of the indexer

// Norms the parts of a row of qkv_a and writes the window entry to the KV slot of the row:
// q becomes norm(q) in place, and the entry is norm(c), of which the end is rotated.
struct AppendWindowEntriesParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  void* qkv_a;  // [max_rows, q_width + head_dim] dtype: q, then c, which is only read
  int32_t q_width;
  const int64_t* slot_mapping;  // [max_rows] as in QkNormRopeAppendParams
  const float* q_norm;          // [q_width]
  const float* entry_norm;      // [head_dim]
  float norm_weight_offset;     // 0 or 1
  float norm_eps;
  LatentRope rope;      // of the last rope_head_dim elements
  KvLayerView entries;  // a token has head_dim elements at k_offset
  int32_t head_dim;     // at most kMaxCompressedHeadDim
  int32_t rope_head_dim;
  DType dtype = DType::kFloat32;
};
void append_window_entries(CpuContext&, const AppendWindowEntriesParams&);
void append_window_entries(CudaContext&, const AppendWindowEntriesParams&);

// Norms each head of x (or not) and rotates its last rope_head_dim elements, in place.
struct RotateHeadsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  void* x;  // [max_rows, num_heads, head_dim] dtype
  // true: each head is first divided by its root mean square, without a weight
  bool has_norm;
  float norm_eps;   // with has_norm
  LatentRope rope;  // of the last rope_head_dim elements
  // true: rotates by the negative angle, which undoes the rotation that keys have
  bool is_inverse;
  int32_t num_heads;
  int32_t head_dim;
  int32_t rope_head_dim;
  DType dtype = DType::kFloat32;
};
void rotate_heads(CpuContext&, const RotateHeadsParams&);
void rotate_heads(CudaContext&, const RotateHeadsParams&);

// Writes `width` values of a row to its slot of the tail store.
struct AppendTailParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* x;               // [max_rows, width], rows x_stride apart
  int64_t x_stride;             // a multiple of 4
  const int64_t* slot_mapping;  // [max_rows] as in QkNormRopeAppendParams
  KvLayerView tail;             // a token has `width` float32 elements at k_offset
  int32_t width;                // a multiple of 4
};
void append_tail(CpuContext&, const AppendTailParams&);
void append_tail(CudaContext&, const AppendTailParams&);

// One of the compressors of a layer: of the entries that attention reads, or of the indexer's keys.
// Its inputs in the tail store are kv [parts * dim] and then gate [parts * dim], where parts is 2
// if entries overlap and else 1.
struct Compressor {
  int32_t dim;          // of an entry
  int32_t tail_offset;  // of kv in what a token has in the tail store, in elements
  // [tokens_per_entry, parts * dim] added to the gate of the token at position % tokens_per_entry
  const float* position_bias;
  const float* norm;    // [dim]
  KvLayerView entries;  // an entry has dim elements at k_offset; block_size counts entries
};

// Every row that completes an entry makes it, for each compressor. Channel i of entry e is
//   sum over t of softmax over t of (gate_t + position_bias_t) * kv_t
// over the tokens e * tokens_per_entry + [0, tokens_per_entry), in ascending order and in float32.
// If entries overlap, the sum has twice as many terms: first channel i of the tokens of entry e - 1
// (which entry 0 lacks), then channel dim + i of the tokens of entry e. The entry is the norm of
// these channels, of which the end is then rotated to the position of its first token, e *
// tokens_per_entry (+ rope.position_offset).
struct CompressParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const int32_t* positions;    // [max_rows]
  const int32_t* seq_slot;     // [max_rows] row of tail_table; -1: inert
  const int64_t* entry_slots;  // [max_rows] block * block_size + offset of the entry that the row
                               // completes; in the null block: it completes none
  KvLayerView tail;            // a token has tail_width float32 elements at k_offset
  BlockTable tail_table;
  int32_t tail_width;  // a multiple of 4
  int32_t tokens_per_entry;
  bool overlaps;
  Compressor compressors[kMaxCompressors];
  int32_t num_compressors;
  float norm_weight_offset;  // 0 or 1
  float norm_eps;
  LatentRope rope;  // of the last rope_head_dim elements; `positions` is not read
  int32_t rope_head_dim;
};
void compress(CpuContext&, const CompressParams&);
void compress(CudaContext&, const CompressParams&);

// scores[row][e] = scale * sum over heads h, ascending, of weights[row][h] * max(q_h . key_e, 0)
// for each entry e that the row sees. Others are left as they are. The entries of a row that sees
// at most `top_k` need no score, so a backend may leave those, too.
struct IndexScoresParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* q;         // [max_rows, num_heads, head_dim] dtype, rotated
  const float* weights;  // [max_rows, num_heads], rows weights_stride apart
  int64_t weights_stride;
  const int32_t* seq_slot;   // [max_rows] row of table; -1: inert
  const int32_t* entry_end;  // [max_rows] number of entries that the row sees
  BlockTable table;          // of the entries
  KvLayerView keys;          // an entry has head_dim elements at k_offset
  float scale;
  int32_t num_heads;
  int32_t head_dim;
  int32_t top_k;
  float* scores;          // [max_rows, scores_stride]
  int64_t scores_stride;  // at least the largest entry_end
  DType dtype = DType::kFloat32;
  // Which rows belong to the same sequence, as in PagedAttentionParams.
  const int32_t* num_seqs = nullptr;    // [1]
  const int32_t* row_indptr = nullptr;  // [max_seqs + 1]
  int32_t max_seqs = 0;
  int32_t max_rows_per_seq = 0;
};
void index_scores(CpuContext&, const IndexScoresParams&);
void index_scores(CudaContext&, const IndexScoresParams&);

// The top_k entries with the highest scores of those that a row sees, in ascending order; all of
// them if there are at most top_k. Of equal scores the lower entry is chosen. NaN counts as the
// lowest score, and -0 as 0 (comparable() of base/ordered.h).
struct ChooseEntriesParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* scores;  // as in IndexScoresParams; read in rows that see more than top_k entries
  int64_t scores_stride;
  const int32_t* seq_slot;   // [max_rows] -1: inert
  const int32_t* entry_end;  // [max_rows] number of entries that the row sees
  int32_t top_k;             // 1..kMaxIndexTopK
  int32_t* chosen;           // [max_rows, top_k]; the first num_chosen of a row are valid
  int32_t* num_chosen;       // [max_rows] min(entry_end, top_k); 0 for inert rows
};
void choose_entries(CpuContext&, const ChooseEntriesParams&);
void choose_entries(CudaContext&, const ChooseEntriesParams&);

// Softmax attention of each row over the window entries [window_begin, window_end) of its sequence,
// then over compressed entries, and a sink for each head: all the compressed entries that the row
// sees, or the chosen ones in the order of their list. An entry is both key and value. Window
// entries are walked in the chunks of paged_attention, and then compressed entries in chunks of the
// same size by their index in the list; chunks are merged in this order. So a row has the same bits
// with a list of all visible entries and without a list.
struct CompressedAttentionParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* q;                // [max_rows, num_heads, head_dim] dtype, normed and rotated
  const int32_t* seq_slot;      // [max_rows] row of the tables; -1: inert, y is zero
  const int32_t* window_begin;  // [max_rows] first visible position
  const int32_t* window_end;    // [max_rows] one past the last visible position
  BlockTable window_table;
  KvLayerView window;  // a token has head_dim elements at k_offset
  // [max_rows] number of compressed entries that the row sees; null: the layer has no compressor,
  // and the other fields of compressed entries are not read
  const int32_t* entry_end;
  BlockTable entry_table;
  KvLayerView entries;        // an entry has head_dim elements at k_offset
  const int32_t* chosen;      // as ChooseEntriesParams has written it; null: all visible entries
  const int32_t* num_chosen;  // [max_rows], with `chosen`
  int32_t top_k;              // with `chosen`: its row length
  float scale;
  const float* sinks;  // [num_heads] extra logit in the softmax sum, unscaled; or null
  void* y;             // [max_rows, num_heads, head_dim] dtype
  int32_t num_heads;
  int32_t head_dim;  // at most kMaxCompressedHeadDim
  DType dtype = DType::kFloat32;
  // Which rows belong to the same sequence, as in PagedAttentionParams.
  const int32_t* num_seqs = nullptr;    // [1]
  const int32_t* row_indptr = nullptr;  // [max_seqs + 1]
  int32_t max_seqs = 0;
  int32_t max_rows_per_seq = 0;
};
void compressed_attention(CpuContext&, const CompressedAttentionParams&);
void compressed_attention(CudaContext&, const CompressedAttentionParams&);

}  // namespace paceline
