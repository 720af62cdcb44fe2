// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "model/layers/latent/config.h"
#include "model/weights/linear.h"
#include "model/weights/rank_split.h"
#include "model/weights/weight_parts.h"

namespace paceline {

struct LatentAttentionWeights {
  Linear qkv_a;                      // q_a rows (or q rows), then kv_a rows
  const float* q_a_norm = nullptr;   // [q_lora_rank], or null
  Linear q_b;                        // absent without a q_lora_rank
  const float* kv_a_norm = nullptr;  // [kv_lora_rank]
  Linear kv_b;  // the rows of K_h and then those of V_h, head by head; the ops on heads read it
  Linear o;
};

template <>
struct KindWeights<LatentAttention> {
  using Type = LatentAttentionWeights;
};

template <class Weights, class Visitor>
void visit_kind_weights(const LatentAttention& attention, const WeightSizes& sizes,
                        Weights& weights, const LayerVisitor<Visitor>& layer) {
  const std::string name = layer.name + "attn.";
  const int64_t q_rank = attention.q_lora_rank;
  const std::vector<WeightPart> qkv_a = {
      q_rank > 0 ? WeightPart{name + "q_a", q_rank} : WeightPart{name + "q", attention.q_rows()},
      {name + "kv_a", attention.entry_width()}};
  // Every rank needs whole entries, and q_a x as a whole.
  layer.linear(weights.qkv_a, "attn.qkv_a", qkv_a, sizes.inputs,
               q_rank > 0 ? ShardAxis::kNone : ShardAxis::kRows, attention.qkv_a);
  if (q_rank > 0) {
    layer.norm(weights.q_a_norm, "attn.q_a_norm", q_rank);
    layer.linear(weights.q_b, "attn.q_b", {{name + "q_b", attention.q_rows()}}, q_rank,
                 ShardAxis::kRows, attention.q_b);
  }
  layer.norm(weights.kv_a_norm, "attn.kv_a_norm", attention.kv_lora_rank);
  layer.linear(weights.kv_b, "attn.kv_b", {{name + "kv_b", attention.kv_b_rows()}},
               attention.kv_lora_rank, ShardAxis::kRows, /*format=*/{}, /*is_by_head=*/true);
  layer.linear(weights.o, "attn.o", {{name + "o", sizes.hidden}},
               int64_t{attention.num_qo_heads} * attention.v_head_dim, ShardAxis::kRows,
               attention.o);
}

// Ranks share the heads, and each has the entries of all tokens.
[[nodiscard]] inline std::string split_refusal(const LatentAttention& attention,
                                               const LatentAttentionWeights& weights,
                                               int32_t num_ranks) {
  if (attention.num_qo_heads < num_ranks) return concat(attention.num_qo_heads, " heads");
  const Linear& q = attention.q_lora_rank > 0 ? weights.q_b : weights.qkv_a;
  const std::string why = rows_refusal("attn.q", q.weight, attention.num_qo_heads, num_ranks);
  if (!why.empty()) return why;
  return rows_refusal("attn.o", weights.o.weight, weights.o.weight.n, num_ranks);
}

inline int64_t split_layer(LatentAttention& attention, LatentAttentionWeights& weights,
                           const RankShare& share) {
  const LinearRange heads = share.of(attention.num_qo_heads);
  const auto of_heads = [&](int64_t rows) {  // `rows`: of all heads
    const auto each = static_cast<int32_t>(rows / attention.num_qo_heads);
    return LinearRange{.first = heads.first * each, .count = heads.count * each};
  };
  const int64_t all_outputs = attention.output_width();
  if (attention.q_lora_rank > 0) {
    keep_rows(weights.q_b, {of_heads(attention.q_rows())});
  } else {
    const LinearRange entries = {.first = static_cast<int32_t>(attention.q_rows()),
                                 .count = attention.entry_width()};
    keep_rows(weights.qkv_a, {of_heads(attention.q_rows()), entries});
  }
  weights.kv_b = rows_of(weights.kv_b, of_heads(attention.kv_b_rows()));
  const auto head_outputs = static_cast<int32_t>(all_outputs / attention.num_qo_heads);
  split_outputs(weights.o, share, share.columns(attention.num_qo_heads, 1, head_outputs));
  attention.num_qo_heads = heads.count;
  return all_outputs;
}

}  // namespace paceline
