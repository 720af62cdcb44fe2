// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "model/layers/compressed/config.h"
#include "model/weights/linear.h"
#include "model/weights/rank_split.h"
#include "model/weights/weight_parts.h"

namespace paceline {

struct CompressedAttentionWeights {
  Linear qkv_a;                    // q_a rows, then kv rows
  const float* q_norm = nullptr;   // [q_lora_rank]
  const float* kv_norm = nullptr;  // [head_dim]
  Linear q_b;
  const float* sinks = nullptr;  // [num_qo_heads]
  Linear o_a;                    // a product with o_groups groups
  Linear o_b;
  // With a compressor, else absent. The rows of `compress` are values and gates for entries, those
  // for the indexer's, and the weights of the indexer's heads.
  Linear compress;
  const float* position_bias = nullptr;  // [tokens_per_entry, entry_inputs]
  const float* entry_norm = nullptr;     // [head_dim]
  // With an indexer, else absent.
  Linear index_q;
  const float* index_position_bias = nullptr;  // [tokens_per_entry, index_inputs]
  const float* index_norm = nullptr;           // [IndexerConfig::head_dim]
};

template <>
struct KindWeights<CompressedAttention> {
  using Type = CompressedAttentionWeights;
};

template <class Weights, class Visitor>
void visit_kind_weights(const CompressedAttention& attention, const WeightSizes& sizes,
                        Weights& weights, const LayerVisitor<Visitor>& layer) {
  const std::string name = layer.name + "attn.";
  const int64_t q_rank = attention.q_lora_rank;
  // Every rank needs whole entries, and q_a x as a whole.
  layer.linear(weights.qkv_a, "attn.qkv_a",
               {{name + "q_a", q_rank}, {name + "kv", attention.head_dim}}, sizes.inputs,
               ShardAxis::kNone, attention.qkv_a);
  layer.norm(weights.q_norm, "attn.q_a_norm", q_rank);
  layer.norm(weights.kv_norm, "attn.kv_norm", attention.head_dim);
  layer.linear(weights.q_b, "attn.q_b", {{name + "q_b", attention.q_rows()}}, q_rank,
               ShardAxis::kRows, attention.q_b);
  layer.visit.vector(weights.sinks, VectorKind::kSinks, {{name + "sinks", attention.num_qo_heads}});
  layer.visit.linear(weights.o_a, {.name = name + "o_a",
                                   .parts = {{name + "o_a", attention.o_a_rows()}},
                                   .cols = attention.o_group_width(),
                                   .shard = ShardAxis::kRows,
                                   .format = attention.o_a,
                                   .num_groups = attention.o_groups});
  layer.linear(weights.o_b, "attn.o_b", {{name + "o_b", sizes.hidden}}, attention.o_a_rows(),
               ShardAxis::kRows, attention.o_b);
  if (!attention.compressor) return;
  const int64_t width = attention.entry_inputs();
  std::vector<WeightPart> compress = {{name + "compressor.kv", width},
                                      {name + "compressor.gate", width}};
  if (attention.indexer) {
    compress.push_back({name + "indexer.kv", attention.index_inputs()});
    compress.push_back({name + "indexer.gate", attention.index_inputs()});
    compress.push_back({name + "indexer.weights", attention.indexer->num_heads});
  }
  layer.visit.linear(weights.compress, {.name = name + "compress",
                                        .parts = std::move(compress),
                                        .cols = sizes.inputs,
                                        .has_float_output = true});
  const int64_t tokens = attention.compressor->tokens_per_entry;
  layer.visit.floats(weights.position_bias, {name + "compressor.position_bias", tokens}, width);
  layer.norm(weights.entry_norm, "attn.compressor.norm", attention.head_dim);
  if (!attention.indexer) return;
  layer.linear(weights.index_q, "attn.indexer.q", {{name + "indexer.q", attention.index_q_rows()}},
               q_rank, ShardAxis::kNone, attention.indexer->q);
  layer.visit.floats(weights.index_position_bias, {name + "indexer.position_bias", tokens},
                     attention.index_inputs());
  layer.norm(weights.index_norm, "attn.indexer.norm", attention.indexer->head_dim);
}

// Ranks share the groups of o_a with their heads. Each has the entries of all tokens, and chooses
// among them as the others do.
[[nodiscard]] inline std::string split_refusal(const CompressedAttention& attention,
                                               const CompressedAttentionWeights& weights,
                                               int32_t num_ranks) {
  if (attention.o_groups < num_ranks) return concat(attention.o_groups, " groups of heads");
  std::string why = rows_refusal("attn.q_b", weights.q_b.weight, attention.o_groups, num_ranks);
  const auto group_rows = static_cast<int32_t>(attention.o_a_rows() / attention.o_groups);
  if (why.empty() && group_rows % rows_a_scale(weights.o_a.weight) != 0) {
    why = concat("groups of ", group_rows, " rows that share scales");
  }
  if (!why.empty()) return why;
  return rows_refusal("attn.o_b", weights.o_b.weight, weights.o_b.weight.n, num_ranks);
}

inline int64_t split_layer(CompressedAttention& attention, CompressedAttentionWeights& weights,
                           const RankShare& share) {
  const LinearRange groups = share.of(attention.o_groups);
  const auto of_groups = [&](int64_t count) {  // `count`: of all groups
    const auto each = static_cast<int32_t>(count / attention.o_groups);
    return LinearRange{.first = groups.first * each, .count = groups.count * each};
  };
  const int64_t all_outputs = attention.o_a_rows();
  const LinearRange heads = of_groups(attention.num_qo_heads);
  keep_rows(weights.q_b, {of_groups(attention.q_rows())});
  weights.sinks += heads.first;
  // A group multiplies heads of its own, so its rows are whole.
  weights.o_a.num_groups = 1;
  weights.o_a = rows_of(weights.o_a, of_groups(all_outputs));
  weights.o_a.num_groups = groups.count;
  const auto group_outputs = static_cast<int32_t>(all_outputs / attention.o_groups);
  split_outputs(weights.o_b, share, share.columns(attention.o_groups, 1, group_outputs));
  attention.num_qo_heads = heads.count;
  attention.o_groups = groups.count;
  return all_outputs;
}

// What the context of a block drafter is multiplied by.
[[nodiscard]] inline Linear context_rows(const CompressedAttention&,
                                         const CompressedAttentionWeights& weights) {
  return weights.qkv_a;
}

}  // namespace paceline
