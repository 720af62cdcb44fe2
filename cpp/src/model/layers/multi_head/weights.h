// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "model/layers/multi_head/config.h"
#include "model/weights/linear.h"
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
  layer.linear(weights.o, "attn.o", o, q_size, ShardAxis::kColumns, attention.o);
  if (attention.has_o_bias) layer.bias(weights.o, o);
}

// What the context of a block drafter is multiplied by: the rows of a plain qkv that compute keys
// and values.
[[nodiscard]] inline Linear context_rows(const MultiHeadAttention& attention,
                                         const MultiHeadAttentionWeights& weights) {
  Linear kv = weights.qkv;
  const int32_t q_rows = attention.num_qo_heads * attention.head_dim;
  kv.weight.data += q_rows * kv.weight.row_bytes();
  kv.weight.n -= q_rows;
  if (kv.bias != nullptr) kv.bias += q_rows;
  return kv;
}

}  // namespace paceline
