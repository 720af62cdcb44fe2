// SPDX-License-Identifier: Apache-2.0
#pragma once

// The scratch and the forward pass of compressed attention.

#include <cstdint>

#include "model/forward/layer_pass.h"
#include "model/layers/compressed/config.h"
#include "model/layers/compressed/weights.h"

namespace paceline {

// Scratch buffers of compressed attention; null in models without it.
struct CompressedScratch {
  void* q;        // [rows, num_qo_heads, head_dim] dtype of the activations
  void* groups;   // [rows, o_a_rows] dtype: the output of o_a
  float* inputs;  // [rows, compress_rows]; null without a compressor
  // Null without an indexer.
  void* index_q;          // [rows, heads of the indexer, its head_dim] dtype
  float* scores;          // [rows, scores_stride] of the visible entries
  int64_t scores_stride;  // entries of the longest sequence
  int32_t* chosen;        // [rows, top_k] entries
  int32_t* num_chosen;    // [rows]
};
struct CompressedWidths {
  using Scratch = CompressedScratch;
  int64_t q = 0;
  int64_t groups = 0;
  int64_t inputs = 0;
  int64_t index_q = 0;
  int64_t index_entries = 0;  // that a row can see where an indexer chooses
  int64_t index_top_k = 0;

  void merge(const CompressedAttention& attention, const ScratchSizes& sizes);
  [[nodiscard]] CompressedScratch allocate(DeviceArena& arena, int64_t rows, DType dtype) const;
};
template <>
struct KindWidths<CompressedAttention> {
  using Type = CompressedWidths;
};

template <class Ctx>
void run_attention(Ctx& ctx, const CompressedAttention& attention,
                   const WeightsOf<CompressedAttention>& weights, const AttentionPass& pass);

// Writes the window entries of the rows to the cache, computed from pass.input, and norm(q_a) to
// activations.qkv.
template <class Ctx>
void write_keys_values(Ctx& ctx, const CompressedAttention& attention,
                       const WeightsOf<CompressedAttention>& weights, const AttentionPass& pass);

}  // namespace paceline
