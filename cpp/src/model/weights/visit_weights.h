// SPDX-License-Identifier: Apache-2.0
#pragma once

// The weights that a decoder has, in the order of their arena. Every shape is stated here and only
// here: the layout, the limit on bytes, the plans of products and the cost table visit this list.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/check.h"
#include "base/overloaded.h"
#include "model/description/decoder_config.h"
#include "model/weights/linear.h"
#include "model/weights/weights.h"
#include "ops/streams.h"

namespace paceline {

// One of the tensors of a checkpoint that are adjacent in one region of the arena. It has `rows`
// rows of the matrix, or elements of the vector.
struct WeightPart {
  std::string name;  // canonical, without ".weight", ".scales" or ".bias"
  int64_t rows;
  // Above 0: one tensor has `rows` rows for each expert, or each expert has a tensor of its own
  // (LinearShape::is_per_expert), whose name ends with the expert's number.
  int32_t num_experts = 0;
};

// The rows that a product is computed for.
enum class LinearRows : uint8_t {
  kPass,     // all rows of a pass
  kStreams,  // every residual stream of these rows
  kLogits,   // rows whose logits are computed
};

struct LinearShape {
  std::string name;  // of the product, e.g. "layers.0.attn.qkv"
  std::vector<WeightPart> parts;
  int64_t cols;
  ShardAxis shard = ShardAxis::kNone;
  LinearRows rows = LinearRows::kPass;
  bool has_float_output = false;  // float32; otherwise the dtype of the activations
  MatrixFormat format = {};
  // Each head uses rows of its own: the ops of ops/latent.h multiply by the matrix, not `gemm`.
  bool is_by_head = false;
  int32_t num_groups = 1;      // GemmParams::num_groups; cols are those that a group reads
  int32_t top_k = 0;           // of experts: how many a row chooses
  bool is_transposed = false;  // of experts: the tensors are [num_experts, cols, rows]
  bool is_per_expert = false;  // of experts: the parts of an expert follow each other
  bool has_room = false;       // of experts: for one more matrix after that of the last
  std::string room_of = {};    // the name of the experts in whose room the matrix is; or empty
  // false: the matrix is the embedding table or belongs to the target. The model has no tensors
  // for it.
  bool is_owned = true;

  // Rows of the whole matrix.
  [[nodiscard]] int64_t num_rows() const {
    int64_t rows_so_far = 0;
    for (const WeightPart& part : parts) rows_so_far += part.rows;
    return rows_so_far;
  }
  // 0: the matrix is no expert's.
  [[nodiscard]] int32_t num_experts() const { return parts.front().num_experts; }
};

// What a vector of floats is.
enum class VectorKind : uint8_t { kNorm, kBias, kSinks, kScale };

// A visitor has the members
//   linear(Linear&, const LinearShape&)
//   experts(ExpertLinears&, const LinearShape&)
//   vector(const float*&, VectorKind, const std::vector<WeightPart>&)
//   table(const std::byte*&, const WeightPart&, int64_t cols)     rows are looked up by token
//   floats(const float*&, const WeightPart&, int64_t cols)        a float32 matrix outside products
//   tokens(const int32_t*&, const WeightPart&, bool is_optional)  ids of tokens
//   experts_of_tokens(const int32_t*&, const WeightPart&, int32_t top_k, int32_t num_experts)
// where the first argument is the member of `weights`, const if those are.

// `name` ends with "mlp." or "mlp.shared.". `experts`: the prefix of the experts' names if the
// matrices are in the room after those experts; else "".
template <class Weights, class Visitor>
void visit_mlp_weights(const DenseMlp& mlp, const std::string& name, const std::string& experts,
                       int64_t hidden, Weights& weights, Visitor& visit) {
  const auto room = [&](const char* which) { return experts.empty() ? "" : experts + which; };
  const std::vector<WeightPart> gate_up = {{name + "gate", mlp.intermediate},
                                           {name + "up", mlp.intermediate}};
  const std::vector<WeightPart> down = {{name + "down", hidden}};
  visit.linear(weights.gate_up, {.name = name + "gate_up",
                                 .parts = gate_up,
                                 .cols = hidden,
                                 .shard = ShardAxis::kRows,
                                 .format = mlp.gate_up,
                                 .room_of = room("gate_up")});
  visit.linear(weights.down, {.name = name + "down",
                              .parts = down,
                              .cols = mlp.intermediate,
                              .shard = ShardAxis::kColumns,
                              .format = mlp.down,
                              .room_of = room("down")});
  if (mlp.has_bias) {
    visit.vector(weights.gate_up.bias, VectorKind::kBias, gate_up);
    visit.vector(weights.down.bias, VectorKind::kBias, down);
  }
}

template <class Weights, class Visitor>
void visit_mlp_weights(const MoeMlp& mlp, const std::string& name, int64_t hidden,
                       int64_t vocab_size, Weights& weights, Visitor& visit) {
  const std::vector<WeightPart> router = {{name + "router", mlp.num_experts}};
  const DenseMlp& expert = mlp.expert;
  const int64_t intermediate = expert.intermediate;
  std::vector<WeightPart> gate_up = {{name + "experts.gate_up", 2 * intermediate, mlp.num_experts}};
  if (mlp.is_per_expert) {
    gate_up = {{name + "experts.gate", intermediate, mlp.num_experts},
               {name + "experts.up", intermediate, mlp.num_experts}};
  }
  const std::vector<WeightPart> down = {{name + "experts.down", hidden, mlp.num_experts}};
  visit.linear(
      weights.router,
      {.name = name + "router", .parts = router, .cols = hidden, .has_float_output = true});
  if (mlp.has_router_bias) visit.vector(weights.router.bias, VectorKind::kBias, router);
  if (mlp.has_token_experts) {
    visit.experts_of_tokens(weights.token_experts, {name + "router.token_experts", vocab_size},
                            mlp.top_k, mlp.num_experts);
  } else if (mlp.router != RouterRule::kSoftmaxOfChosen) {
    visit.vector(weights.correction, VectorKind::kBias,
                 {{name + "router.correction", mlp.num_experts}});
  }
  visit.experts(weights.gate_up, {.name = name + "experts.gate_up",
                                  .parts = gate_up,
                                  .cols = hidden,
                                  .shard = ShardAxis::kRows,
                                  .format = expert.gate_up,
                                  .top_k = mlp.top_k,
                                  .is_transposed = mlp.is_transposed,
                                  .is_per_expert = mlp.is_per_expert,
                                  .has_room = mlp.joins_shared()});
  visit.experts(weights.down, {.name = name + "experts.down",
                               .parts = down,
                               .cols = expert.intermediate,
                               .shard = ShardAxis::kColumns,
                               .format = expert.down,
                               .top_k = mlp.top_k,
                               .is_transposed = mlp.is_transposed,
                               .is_per_expert = mlp.is_per_expert,
                               .has_room = mlp.joins_shared()});
  if (expert.has_bias) {
    visit.vector(weights.gate_up.bias, VectorKind::kBias, gate_up);
    visit.vector(weights.down.bias, VectorKind::kBias, down);
  }
  if (mlp.shared) {
    visit_mlp_weights(*mlp.shared, name + "shared.", mlp.joins_shared() ? name + "experts." : "",
                      hidden, weights.shared, visit);
  }
}

// Calls the visitor for the weights of one layer, whose names begin with `name`.
template <class Visitor>
struct LayerVisitor {
  std::string name;  // e.g. "layers.3."
  Visitor& visit;

  void norm(auto& vector, const char* which, int64_t size) const {
    visit.vector(vector, VectorKind::kNorm, {{name + which, size}});
  }
  void bias(auto& matrix, const std::vector<WeightPart>& parts) const {
    visit.vector(matrix.bias, VectorKind::kBias, parts);
  }
  void linear(auto& matrix, const char* which, std::vector<WeightPart> parts, int64_t cols,
              ShardAxis shard, const MatrixFormat& format, bool is_by_head = false) const {
    visit.linear(matrix, {.name = name + which,
                          .parts = std::move(parts),
                          .cols = cols,
                          .shard = shard,
                          .format = format,
                          .is_by_head = is_by_head});
  }
};

// `inputs`: DecoderConfig::qkv_inputs.
template <class Weights, class Visitor>
void visit_attention_weights(const MultiHeadAttention& attention, int64_t hidden, int64_t inputs,
                             Weights& weights, const LayerVisitor<Visitor>& layer) {
  const int64_t head_dim = attention.head_dim;
  const int64_t q_size = attention.num_qo_heads * head_dim;
  const int64_t kv_size = attention.num_kv_heads * head_dim;
  const KvInputs has = kv_inputs(attention);
  std::vector<WeightPart> qkv = {{layer.name + "attn.q", q_size}};
  if (has != KvInputs::kNone) qkv.push_back({layer.name + "attn.k", kv_size});
  if (has == KvInputs::kKeysAndValues) qkv.push_back({layer.name + "attn.v", kv_size});
  layer.linear(weights.qkv, "attn.qkv", qkv, inputs, ShardAxis::kRows, attention.qkv);
  if (attention.has_qkv_bias) layer.bias(weights.qkv, qkv);
  if (attention.has_qk_norm) {
    layer.norm(weights.q_norm, "attn.q_norm", head_dim);
    if (has != KvInputs::kNone) layer.norm(weights.k_norm, "attn.k_norm", head_dim);
  }
  if (attention.has_sinks) {
    layer.visit.vector(weights.sinks, VectorKind::kSinks,
                       {{layer.name + "attn.sinks", attention.num_qo_heads}});
  }
  const std::vector<WeightPart> o = {{layer.name + "attn.o", hidden}};
  layer.linear(weights.o, "attn.o", o, q_size, ShardAxis::kColumns, attention.o);
  if (attention.has_o_bias) layer.bias(weights.o, o);
}

template <class Weights, class Visitor>
void visit_attention_weights(const LatentAttention& attention, int64_t hidden, int64_t inputs,
                             Weights& weights, const LayerVisitor<Visitor>& layer) {
  const std::string name = layer.name + "attn.";
  const int64_t q_rank = attention.q_lora_rank;
  const std::vector<WeightPart> qkv_a = {
      q_rank > 0 ? WeightPart{name + "q_a", q_rank} : WeightPart{name + "q", attention.q_rows()},
      {name + "kv_a", attention.entry_width()}};
  // Every device needs whole entries, and q_a x as a whole.
  layer.linear(weights.qkv_a, "attn.qkv_a", qkv_a, inputs, ShardAxis::kNone, attention.qkv_a);
  if (q_rank > 0) {
    layer.norm(weights.q_a_norm, "attn.q_a_norm", q_rank);
    layer.linear(weights.q_b, "attn.q_b", {{name + "q_b", attention.q_rows()}}, q_rank,
                 ShardAxis::kRows, attention.q_b);
  }
  layer.norm(weights.kv_a_norm, "attn.kv_a_norm", attention.kv_lora_rank);
  layer.linear(weights.kv_b, "attn.kv_b", {{name + "kv_b", attention.kv_b_rows()}},
               attention.kv_lora_rank, ShardAxis::kRows, /*format=*/{}, /*is_by_head=*/true);
  layer.linear(weights.o, "attn.o", {{name + "o", hidden}},
               int64_t{attention.num_qo_heads} * attention.v_head_dim, ShardAxis::kColumns,
               attention.o);
}

template <class Weights, class Visitor>
void visit_attention_weights(const CompressedAttention& attention, int64_t hidden, int64_t inputs,
                             Weights& weights, const LayerVisitor<Visitor>& layer) {
  const std::string name = layer.name + "attn.";
  const int64_t q_rank = attention.q_lora_rank;
  // Every device needs whole entries, and q_a x as a whole.
  layer.linear(weights.qkv_a, "attn.qkv_a",
               {{name + "q_a", q_rank}, {name + "kv", attention.head_dim}}, inputs,
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
  layer.linear(weights.o_b, "attn.o_b", {{name + "o_b", hidden}}, attention.o_a_rows(),
               ShardAxis::kColumns, attention.o_b);
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
                                        .cols = inputs,
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

// Nothing with one residual stream. `name` ends with "mix".
template <class Weights, class Visitor>
void visit_stream_mix(const DecoderConfig& config, const std::string& name, bool is_end,
                      Weights& weights, Visitor& visit) {
  if (config.streams.count == 1) return;
  const int32_t width = mix_width(config.streams.count, is_end);
  visit.floats(weights.weight, {name + ".matrix", width}, config.residual_width());
  visit.vector(weights.base, VectorKind::kBias, {{name, width}});
  visit.vector(weights.scale, VectorKind::kScale, {{name + ".scale", is_end ? 1 : 3}});
}

template <class Layer, class Visitor>
void visit_layer_weights(const DecoderConfig& config, size_t index, Layer& weights,
                         Visitor& visit) {
  const LayerConfig& layer = config.layers[index];
  const int64_t hidden = config.hidden;
  const LayerVisitor<Visitor> its = {.name = concat("layers.", index, "."), .visit = visit};

  const bool has_attn_norm = index > 0 || !config.drafter || config.drafter->has_attn_norm;
  if (has_attn_norm) its.norm(weights.attn_norm, "attn_norm", hidden);
  const int64_t inputs = config.qkv_inputs(index);
  std::visit(
      Overloaded{
          [&](const MultiHeadAttention& attention) {
            visit_attention_weights(attention, hidden, inputs,
                                    std::get<MultiHeadAttentionWeights>(weights.attention), its);
          },
          [&](const LatentAttention& attention) {
            visit_attention_weights(attention, hidden, inputs,
                                    std::get<LatentAttentionWeights>(weights.attention), its);
          },
          [&](const CompressedAttention& attention) {
            visit_attention_weights(attention, hidden, inputs,
                                    std::get<CompressedAttentionWeights>(weights.attention), its);
          }},
      layer.attention);
  if (config.has_post_norms) its.norm(weights.attn_post_norm, "attn_post_norm", hidden);

  its.norm(weights.mlp_norm, "mlp_norm", hidden);
  std::visit(Overloaded{[&](const DenseMlp& mlp) {
                          visit_mlp_weights(mlp, its.name + "mlp.", /*experts=*/"", hidden,
                                            std::get<DenseMlpWeights>(weights.mlp), visit);
                        },
                        [&](const MoeMlp& mlp) {
                          visit_mlp_weights(mlp, its.name + "mlp.", hidden, config.vocab_size,
                                            std::get<MoeMlpWeights>(weights.mlp), visit);
                        }},
             layer.mlp);
  if (config.has_post_norms) its.norm(weights.mlp_post_norm, "mlp_post_norm", hidden);

  if (const int64_t size = config.per_layer_inputs.size; size > 0) {
    its.linear(weights.per_layer_gate, "per_layer.gate", {{its.name + "per_layer.gate", size}},
               hidden, ShardAxis::kNone, {});
    its.linear(weights.per_layer_proj, "per_layer.proj", {{its.name + "per_layer.proj", hidden}},
               size, ShardAxis::kNone, {});
    its.norm(weights.per_layer_norm, "per_layer.norm", hidden);
  }
  if (config.has_layer_scale) {
    visit.vector(weights.scale, VectorKind::kScale, {{its.name + "scale", 1}});
  }
  visit_stream_mix(config, its.name + "attn_mix", /*is_end=*/false, weights.attn_mix, visit);
  visit_stream_mix(config, its.name + "mlp_mix", /*is_end=*/false, weights.mlp_mix, visit);
}

// The weights of a draft head besides its layers.
template <class Head, class Visitor>
void visit_head_weights(const DecoderConfig& config, Head& weights, Visitor& visit) {
  const DrafterConfig& drafter = *config.drafter;
  const auto norm = [&](auto& vector, std::string name, int64_t size) {
    visit.vector(vector, VectorKind::kNorm, {{std::move(name), size}});
  };
  // fc and fc_hidden multiply embeddings and streams, which other kinds concatenate.
  const bool has_fc_hidden = config.streams.count > 1 && !drafter.averages_streams();
  const int64_t fc_width = has_fc_hidden ? config.hidden : drafter.fc_width();
  const std::vector<WeightPart> fc = {{"fc", config.hidden}};
  visit.linear(weights.fc, {.name = "fc",
                            .parts = fc,
                            .cols = fc_width,
                            .has_float_output = true,
                            .format = drafter.fc});
  if (has_fc_hidden) {
    visit.linear(weights.fc_hidden, {.name = "fc_hidden",
                                     .parts = {{"fc_hidden", config.hidden}},
                                     .cols = config.hidden,
                                     .rows = LinearRows::kStreams,
                                     .has_float_output = true,
                                     .format = drafter.fc});
  }
  if (drafter.has_fc_bias) visit.vector(weights.fc.bias, VectorKind::kBias, fc);
  if (drafter.norm_before_fc) norm(weights.fc_input_norm, "fc_input_norm", fc_width);
  for (size_t i = 0; i < weights.fc_norms.size(); ++i) {
    norm(weights.fc_norms[i], concat("fc_norm.", i), drafter.target_hidden);
  }
  if (drafter.kind == DrafterKind::kEagle3) {
    norm(weights.hidden_norm, "layers.0.hidden_norm", config.hidden);
  }
  if (drafter.kind == DrafterKind::kBlock) norm(weights.hidden_norm, "hidden_norm", config.hidden);
  const BlockConfig& block = drafter.block;
  if (block.markov != MarkovHead::kNone) {
    visit.table(weights.markov_table, {"markov.table", config.vocab_size}, block.markov_rank);
    visit.linear(weights.markov, {.name = "markov",
                                  .parts = {{"markov", drafter.draft_vocab_size}},
                                  .cols = block.markov_rank,
                                  .rows = LinearRows::kLogits,
                                  .has_float_output = true});
  }
  if (block.has_markov_mix()) {
    const std::vector<WeightPart> mix = {{"markov.mix", block.markov_outputs()}};
    visit.linear(weights.markov_mix, {.name = "markov.mix",
                                      .parts = mix,
                                      .cols = block.markov_inputs(config.hidden),
                                      .rows = LinearRows::kLogits,
                                      .has_float_output = true});
    visit.vector(weights.markov_mix.bias, VectorKind::kBias, mix);
  }
  if (block.confidence != ConfidenceHead::kNone) {
    visit.floats(weights.confidence, {"confidence.weight", 1},
                 block.confidence_inputs(config.hidden));
    if (block.has_confidence_bias) {
      visit.vector(weights.confidence_bias, VectorKind::kBias, {{"confidence", 1}});
    }
  }
  if (drafter.kind == DrafterKind::kGemma4Mtp) {
    visit.linear(weights.feedback, {.name = "feedback",
                                    .parts = {{"feedback", drafter.target_hidden}},
                                    .cols = config.hidden,
                                    .rows = LinearRows::kLogits,
                                    .has_float_output = true});
  }
  if (const CentroidsConfig& centroids = drafter.centroids; centroids.count > 0) {
    visit.linear(weights.centroids, {.name = "centroids",
                                     .parts = {{"centroids", centroids.count}},
                                     .cols = config.hidden,
                                     .rows = LinearRows::kLogits,
                                     .has_float_output = true});
    visit.tokens(weights.token_ordering, {"token_ordering", drafter.draft_vocab_size},
                 /*is_optional=*/false);
  } else if (drafter.owns_lm_head) {
    // Without this table, row i of an LM head over the whole vocabulary is that of token i.
    visit.tokens(weights.draft_to_target, {"draft_to_target", drafter.draft_vocab_size},
                 /*is_optional=*/drafter.draft_vocab_size == config.vocab_size);
  }
}

// `weights`: DecoderWeights, const or not, after size_weights.
template <class Weights, class Visitor>
void visit_weights(const DecoderConfig& config, Weights& weights, Visitor& visit) {
  const DrafterConfig* drafter = config.drafter ? &*config.drafter : nullptr;
  if (drafter == nullptr || drafter->owns_embedding) {
    visit.table(weights.embed, {"embed", config.vocab_size}, config.hidden);
  }
  visit.linear(weights.lm_head,
               {.name = "lm_head",
                .parts = {{"lm_head", config.lm_head_rows()}},
                .cols = config.hidden,
                .shard = ShardAxis::kRows,
                .rows = LinearRows::kLogits,
                .has_float_output = true,
                .is_owned = drafter != nullptr ? drafter->owns_lm_head : !config.ties_lm_head});
  if (drafter == nullptr || drafter->has_final_norm) {
    visit.vector(weights.final_norm, VectorKind::kNorm, {{"final_norm", config.hidden}});
  }
  visit_stream_mix(config, "end_mix", /*is_end=*/true, weights.end_mix, visit);
  if (const PerLayerInputsConfig& inputs = config.per_layer_inputs; inputs.size > 0) {
    const int64_t width = inputs.size * static_cast<int64_t>(config.layers.size());
    visit.table(weights.per_layer_embed, {"per_layer.embed", inputs.vocab_size}, width);
    visit.linear(
        weights.per_layer_proj,
        {.name = "per_layer.proj", .parts = {{"per_layer.proj", width}}, .cols = config.hidden});
    visit.vector(weights.per_layer_norm, VectorKind::kNorm, {{"per_layer.norm", inputs.size}});
  }
  for (size_t i = 0; i < config.layers.size(); ++i) {
    visit_layer_weights(config, i, weights.layers[i], visit);
  }
  if (drafter != nullptr) visit_head_weights(config, weights.head, visit);
}

// The visitor that sees matrices of products only.
template <class Function>
struct LinearVisitor {
  const Function& f;
  void linear(auto& linear, const LinearShape& shape) { f(linear, shape); }
  void experts(auto& experts, const LinearShape& shape) { f(experts, shape); }
  void vector(const auto&, VectorKind, const std::vector<WeightPart>&) {}
  void table(const auto&, const WeightPart&, int64_t) {}
  void floats(const auto&, const WeightPart&, int64_t) {}
  void experts_of_tokens(const auto&, const WeightPart&, int32_t, int32_t) {}
  void tokens(const auto&, const WeightPart&, bool) {}
};

// Calls f(linear, shape) for every Linear and every ExpertLinears. An lm_head that the target owns
// has no data.
template <class Weights, class Function>
void for_each_linear(const DecoderConfig& config, Weights& weights, const Function& f) {
  LinearVisitor<Function> visitor{f};
  visit_weights(config, weights, visitor);
}

// Gives the vectors of `weights` the sizes, and attention and MLPs the kinds, that `config` asks
// for.
void size_weights(const DecoderConfig& config, DecoderWeights& weights);

}  // namespace paceline
