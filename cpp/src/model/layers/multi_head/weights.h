// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "model/layers/multi_head/config.h"
#include "model/weights/linear.h"
#include "model/weights/rank_split.h"
#include "model/weights/weight_parts.h"

namespace paceline {

struct MultiHeadAttentionWeights {
  Linear qkv;                     // q rows, k rows, v rows
  const float* q_norm = nullptr;  // [head_dim], or null
  const float* k_norm = nullptr;  // [head_dim], or null; always null in a reader
  const float* sinks = nullptr;   // [num_qo_heads], or null
  Linear gate;                    // [num_qo_heads * head_dim, hidden], with an output gate
  Linear o;
};

template <>
struct KindWeights<MultiHeadAttention> {
  using Type = MultiHeadAttentionWeights;
};

template <class Weights, class Visitor>
void visit_kind_weights(const MultiHeadAttention& attention, const WeightSizes& sizes,
                        Weights& weights, const LayerVisitor<Visitor>& layer) {
  const int64_t head_dim = attention.head_dim;
  const int64_t q_size = attention.num_qo_heads * head_dim;
  const int64_t kv_size = attention.num_kv_heads * head_dim;
  const KvInputs has = attention.kv_inputs();
  std::vector<WeightPart> qkv = {{layer.name + "attn.q", q_size}};
  if (has != KvInputs::kNone) qkv.push_back({layer.name + "attn.k", kv_size});
  if (has == KvInputs::kKeysAndValues) qkv.push_back({layer.name + "attn.v", kv_size});
  layer.linear(weights.qkv, "attn.qkv", qkv, sizes.inputs, ShardAxis::kRows, attention.qkv);
  if (attention.has_qkv_bias) layer.bias(weights.qkv, qkv);
  if (attention.has_qk_norm) {
    layer.norm(weights.q_norm, "attn.q_norm", head_dim);
    if (has != KvInputs::kNone) layer.norm(weights.k_norm, "attn.k_norm", head_dim);
  }
  if (attention.has_sinks) {
    layer.visit.vector(weights.sinks, VectorKind::kSinks,
                       {{layer.name + "attn.sinks", attention.num_qo_heads}});
  }
  if (attention.has_output_gate) {
    layer.linear(weights.gate, "attn.gate", {{layer.name + "attn.gate", q_size}}, sizes.inputs,
                 ShardAxis::kRows, attention.qkv);
  }
  const std::vector<WeightPart> o = {{layer.name + "attn.o", sizes.hidden}};
  layer.linear(weights.o, "attn.o", o, q_size, ShardAxis::kRows, attention.o);
  if (attention.has_o_bias) layer.bias(weights.o, o);
}

// Ranks share the heads. Where there are more ranks than KV heads, several have the same KV head.
[[nodiscard]] inline std::string split_refusal(const MultiHeadAttention& attention,
                                               const MultiHeadAttentionWeights& weights,
                                               int32_t num_ranks) {
  const int32_t num_kv_heads = attention.num_kv_heads;
  const bool divides = num_kv_heads % num_ranks == 0 || num_ranks % num_kv_heads == 0;
  if (!divides || attention.num_qo_heads % num_ranks != 0) {
    return concat(attention.num_qo_heads, " query heads and ", num_kv_heads, " KV heads");
  }
  const std::string why =
      rows_refusal("attn.qkv", weights.qkv.weight, attention.num_qo_heads, num_ranks);
  if (!why.empty()) return why;
  return rows_refusal("attn.o", weights.o.weight, weights.o.weight.n, num_ranks);
}

inline int64_t split_layer(MultiHeadAttention& attention, MultiHeadAttentionWeights& weights,
                           const RankShare& share) {
  const int32_t head_dim = attention.head_dim;
  const auto rows = [&](const LinearRange& heads, int32_t first_row) {
    return LinearRange{.first = first_row + heads.first * head_dim,
                       .count = heads.count * head_dim};
  };
  const LinearRange q = share.of(attention.num_qo_heads);
  LinearRange kv = share.of(attention.num_kv_heads);
  kv.count = std::max(kv.count, 1);
  const int32_t all_q_rows = attention.num_qo_heads * head_dim;
  const int32_t all_kv_rows = attention.num_kv_heads * head_dim;
  std::vector<LinearRange> qkv = {rows(q, 0)};
  const KvInputs has = attention.kv_inputs();
  if (has != KvInputs::kNone) qkv.push_back(rows(kv, all_q_rows));
  if (has == KvInputs::kKeysAndValues) qkv.push_back(rows(kv, all_q_rows + all_kv_rows));
  keep_rows(weights.qkv, qkv);
  if (attention.has_output_gate) keep_rows(weights.gate, {rows(q, 0)});
  if (weights.sinks != nullptr) weights.sinks += q.first;
  split_outputs(weights.o, share, share.columns(attention.num_qo_heads, 1, head_dim));
  attention.num_qo_heads = q.count;
  attention.num_kv_heads = kv.count;
  return all_q_rows;
}

// What the context of a block drafter is multiplied by: the rows of a plain qkv that compute keys
// and values.
[[nodiscard]] inline Linear context_rows(const MultiHeadAttention& attention,
                                         const MultiHeadAttentionWeights& weights) {
  return rows_from(weights.qkv, attention.num_qo_heads * attention.head_dim);
}

}  // namespace paceline
