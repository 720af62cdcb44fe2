// SPDX-License-Identifier: Apache-2.0
#pragma once

// A decoder as data: everything that the forward pass depends on.
//
// Families (Llama 3, Qwen3, Gemma 3, ...) exist only in the Python loader, which writes this
// description as JSON. docs/model-format.md describes every key.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "kv/kv_layout.h"
#include "ops/moe.h"
#include "ops/ops.h"
#include "ops/weight_matrix.h"

namespace paceline {

// Rotary embedding: angle = position * inv_freq[i]; cos and sin times `scale`. Pair i consists of
// elements i and i + head_dim / 2 (split halves) or, interleaved, of 2i and 2i + 1.
struct RopeConfig {
  std::vector<float> inv_freq;  // [head_dim / 2]
  float scale = 1.0f;
  bool is_interleaved = false;
};

// The scales of an fp8 matrix in a checkpoint.
enum class Fp8Scales : uint8_t {
  kTensor,  // one for the matrix
  kRow,
  kBlock,  // one for each tile of kFp8Block x kFp8Block elements
};
inline constexpr int32_t kFp8Block = 128;

struct MatrixFormat {
  WeightFormat format = WeightFormat::kPlain;
  Fp8Scales scales = Fp8Scales::kTensor;  // kFp8
  bool has_exact_scales = false;          // kFp8: every scale must be a power of two

  friend bool operator==(const MatrixFormat&, const MatrixFormat&) = default;
};

// K and V of their own for every KV head.
struct MultiHeadAttention {
  KvKind kind;  // FullKv or SlidingKv
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;  // divides num_qo_heads
  int32_t head_dim = 0;      // even
  float scale = 0;           // scores are multiplied by it; > 0
  float soft_cap = 0;        // scores become soft_cap * tanh(score / soft_cap); 0 is off
  int32_t rope = 0;          // index into DecoderConfig::ropes
  bool has_qk_norm = false;
  bool has_v_norm = false;  // v is divided by its root mean square, without a weight
  bool has_qkv_bias = false;
  bool has_o_bias = false;
  bool k_eq_v = false;     // no v projection: v is k before its norm and rotation
  int32_t kv_source = -1;  // a reader's earlier layer whose KV it reads; -1: it has its own KV
  // A reader in a drafter: it reads the KV of the target's last layer of the same kind that has its
  // own KV.
  bool reads_target = false;
  bool has_sinks =
      false;  // each query head has a further logit in its softmax sum, without a value
  MatrixFormat qkv;
  MatrixFormat o;
};

// What the qkv projection of a layer yields beside q.
[[nodiscard]] constexpr KvInputs kv_inputs(const MultiHeadAttention& attention) {
  if (attention.kv_source >= 0 || attention.reads_target) return KvInputs::kNone;
  return attention.k_eq_v ? KvInputs::kKeys : KvInputs::kKeysAndValues;
}

// Rows of a layer's qkv projection.
[[nodiscard]] constexpr int32_t qkv_rows(const MultiHeadAttention& attention) {
  return qkv_heads(attention.num_qo_heads, attention.num_kv_heads, kv_inputs(attention)) *
         attention.head_dim;
}

// Latent attention (MLA). An entry of the KV cache, which all heads share, is a row's latent and
// its rotated key: [norm(c) ; rope(k)] with [c ; k] = kv_a x. With one matrix K_h
// [qk_nope_head_dim, kv_lora_rank] and one V_h [v_head_dim, kv_lora_rank] for each head, from kv_b,
// head h scores an entry with the absorbed query [K_h^T q_nope ; rope(q_rope)], and its output is
// V_h times the weighted sum of latents. q = q_b norm(q_a x) or, without a q_lora_rank, q x.
struct LatentAttention {
  int32_t num_qo_heads = 0;
  int32_t q_lora_rank = 0;  // 0: q is projected from x
  int32_t kv_lora_rank = 0;
  int32_t qk_nope_head_dim = 0;  // the first elements of a head of q, which are not rotated
  int32_t qk_rope_head_dim = 0;  // even; the rest of a head of q, and the rotated key
  int32_t v_head_dim = 0;
  float scale = 0;     // scores are multiplied by it; > 0
  float norm_eps = 0;  // of the norms of q_a x and of c
  int32_t rope = 0;    // index into DecoderConfig::ropes
  MatrixFormat qkv_a;  // q_a (or q) rows, then kv_a rows
  MatrixFormat q_b;
  MatrixFormat o;

  // Rows of q_b, or of q.
  [[nodiscard]] constexpr int64_t q_rows() const {
    return int64_t{num_qo_heads} * (qk_nope_head_dim + qk_rope_head_dim);
  }
  // Elements of a row of qkv_a: q_a x (or q x), c and k.
  [[nodiscard]] constexpr int64_t qkv_a_rows() const {
    return (q_lora_rank > 0 ? q_lora_rank : q_rows()) + entry_width();
  }
  // Elements of an entry and of an absorbed query.
  [[nodiscard]] constexpr int32_t entry_width() const { return kv_lora_rank + qk_rope_head_dim; }
  // Rows of kv_b: those of K_h and then those of V_h, head by head.
  [[nodiscard]] constexpr int64_t kv_b_rows() const {
    return int64_t{num_qo_heads} * (qk_nope_head_dim + v_head_dim);
  }
};

// Groups of tokens_per_entry tokens as one entry of the KV cache (docs/kv-groups.md). Each token
// projects a value and a gate for each element of the entry, and the entry is their weighted mean.
struct CompressorConfig {
  int32_t tokens_per_entry = 0;
  // An entry also covers the tokens of the entry before it, with elements of their own: a token
  // projects twice as many values and gates, first those for the next entry, then those for its
  // own.
  bool overlaps = false;
};

// Chooses the entries that a row sees: those with the highest scores, at most top_k of the visible
// ones. It has entries of its own, of head_dim elements, which are made like those of the
// compressor, and its own queries.
struct IndexerConfig {
  int32_t num_heads = 0;
  int32_t head_dim = 0;  // the last rope_head_dim of its elements are rotated
  int32_t top_k = 0;
  MatrixFormat q;
};

// Compressed attention (DeepSeek-V4). A token has one vector for all heads, its key and its value
// alike: norm(kv x), the last rope_head_dim elements of which are rotated. A row sees the last
// `window` of them and, with a compressor, entries that stand for tokens_per_entry tokens each. Its
// queries are q_b norm(q_a x), each head divided by its root mean square and rotated like keys;
// every head has a sink. The output of a head is rotated back. The heads are o_groups groups in
// order, o_a multiplies each with a matrix of its own, and o_b all of that.
struct CompressedAttention {
  int32_t num_qo_heads = 0;   // a multiple of o_groups
  int32_t head_dim = 0;       // even
  int32_t rope_head_dim = 0;  // even, at most head_dim
  int32_t q_lora_rank = 0;
  int32_t window = 0;
  int32_t o_groups = 0;
  int32_t o_lora_rank = 0;  // elements that o_a makes of a group
  float scale = 0;          // scores are multiplied by it; > 0
  int32_t rope = 0;         // index into DecoderConfig::ropes
  MatrixFormat qkv_a;       // q_a rows, then kv rows
  MatrixFormat q_b;
  MatrixFormat o_a;
  MatrixFormat o_b;
  std::optional<CompressorConfig> compressor;
  std::optional<IndexerConfig> indexer;  // only with a compressor

  // Elements of all heads.
  [[nodiscard]] constexpr int64_t q_rows() const { return int64_t{num_qo_heads} * head_dim; }
  // Elements of a row of qkv_a: q_a x, then kv x.
  [[nodiscard]] constexpr int64_t qkv_a_rows() const { return int64_t{q_lora_rank} + head_dim; }
  // Elements that o_a reads of a group, and that it makes of all groups.
  [[nodiscard]] constexpr int64_t o_group_width() const { return q_rows() / o_groups; }
  [[nodiscard]] constexpr int64_t o_a_rows() const { return int64_t{o_groups} * o_lora_rank; }
  // Values, or gates, that a token projects for entries, and for the indexer's.
  [[nodiscard]] constexpr int32_t entry_inputs() const {
    return compressor ? head_dim * (compressor->overlaps ? 2 : 1) : 0;
  }
  [[nodiscard]] constexpr int32_t index_inputs() const {
    return indexer ? indexer->head_dim * (compressor->overlaps ? 2 : 1) : 0;
  }
  // What a token stores for the compressor: values and gates, then the indexer's.
  [[nodiscard]] constexpr int32_t tail_width() const {
    return 2 * (entry_inputs() + index_inputs());
  }
  // Elements of a row of CompressedAttentionWeights::compress: the tail, then the indexer's weights
  // of its heads.
  [[nodiscard]] constexpr int32_t compress_rows() const {
    return tail_width() + (indexer ? indexer->num_heads : 0);
  }
  // Elements of all heads of the indexer.
  [[nodiscard]] constexpr int64_t index_q_rows() const {
    return indexer ? int64_t{indexer->num_heads} * indexer->head_dim : 0;
  }
};

using AttentionConfig = std::variant<MultiHeadAttention, LatentAttention, CompressedAttention>;

struct DenseMlp {
  int32_t intermediate = 0;
  Activation activation = Activation::kSilu;
  float alpha = 0;        // kSwigluOai
  float limit = 0;        // kSwigluOai, kClampedSilu
  bool has_bias = false;  // of gate, up and down
  MatrixFormat gate_up;
  MatrixFormat down;

  friend bool operator==(const DenseMlp&, const DenseMlp&) = default;
};

// A mixture of experts: a router gives every row its top_k experts, and the row's output is the sum
// of theirs, by weight.
struct MoeMlp {
  int32_t num_experts = 0;  // at most kMaxExperts
  int32_t top_k = 0;        // at most num_experts and kMaxTopK
  DenseMlp expert;          // each of them
  // A further expert that every row visits. The sum begins with its output.
  std::optional<DenseMlp> shared;
  RouterRule router = RouterRule::kSoftmaxOfChosen;
  ScoreRouting scoring;  // of rules with scores
  // kSqrtSoftplus: a table has the experts of each token, instead of a correction.
  bool has_token_experts = false;
  bool has_router_bias = false;
  bool is_interleaved = false;  // rows of gate and up alternate, gate first
  bool is_transposed = false;   // a checkpoint stores the experts' matrices [in, out]
  bool is_per_expert = false;   // a checkpoint has a gate, an up and a down tensor for each expert

  // The matrices of the shared expert follow those of the last expert, so that passes of up to
  // kMaxJoinedRows rows compute it in the same products.
  [[nodiscard]] bool joins_shared() const {
    return shared == expert && !is_interleaved && !expert.has_bias;
  }
};
// In larger passes, the tiles that fit the other experts are too narrow for the shared one's rows.
inline constexpr int32_t kMaxJoinedRows = 32;

using MlpConfig = std::variant<DenseMlp, MoeMlp>;

// A small input for every layer, computed from the token and its embedding x:
//   P = scale * (rms_norm(proj_scale * proj x) + embed_scale * table[token])   [layers, size]
// The end of layer l adds it to the residual stream:
//   x += rms_norm(proj_l (activation(gate_l x) * P[l])).
struct PerLayerInputsConfig {
  int32_t size = 0;        // of one layer's input; 0: the model has none
  int32_t vocab_size = 0;  // rows of the table; ids beyond it add nothing
  float embed_scale = 1;
  float proj_scale = 1;
  float scale = 1;
  Activation activation = Activation::kGeluTanh;
};

// Several residual streams that layers mix (ops/streams.h). They begin as copies of the embedding.
struct StreamsConfig {
  int32_t count = 1;  // 1: the residual stream is one, and nothing is mixed
  int32_t sinkhorn_iterations = 0;
  float eps = 0;
};

struct LayerConfig {
  AttentionConfig attention;
  MlpConfig mlp;
};

enum class DrafterKind : uint8_t { kEagle, kEagle3, kMtp, kGemma4Mtp, kBlock };

// The head of a block drafter that makes a draft depend on the one before it, x, with e = W1[x].
// The row of the block that predicts the draft has the hidden state h, which the lm_head reads, and
// the logits U.
//   kNone:     logits = U
//   kVanilla:  logits = U + W2 e
//   kGated:    logits = U + W2 (sigmoid(Wg [h ; e] + bg) * e)
//   kRnn:      [g ; c ; o] = Wz [s ; e ; h] + bz
//              s' = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)
//              logits = U + W2 tanh(o)
// The state s of a sequence is 0 before the first row of a block, and s' is that of the next row. A
// first row that predicts nothing also updates s, with its own token as x.
enum class MarkovHead : uint8_t { kNone, kVanilla, kGated, kRnn };

// What a block drafter's estimate of the probability of acceptance reads. The estimate is
// sigmoid(w h + b) or sigmoid(w [h ; e] + b), with h and e of MarkovHead; in place of h it may be z
// (BlockConfig::confidence_before_norm).
enum class ConfidenceHead : uint8_t { kNone, kHidden, kHiddenAndToken };

// What the rows of a block see of each other in one kind of layers.
struct BlockMask {
  bool is_causal = false;  // a row sees those before it; otherwise every row of its block
  // Sliding layers: all rows see the window of the first one. Otherwise each row has its own.
  bool is_anchored = false;
};

// A block drafter. Its rows are the newest token, followed by `mask_token`, and one pass over them
// makes all drafts.
struct BlockConfig {
  int32_t size = 0;  // rows of the longest block that it was trained for
  int32_t mask_token = 0;
  // Row i predicts the token after its position; otherwise that at its position, and row 0, the
  // newest token, predicts nothing.
  bool samples_from_anchor = false;
  BlockMask full;
  BlockMask sliding;
  MarkovHead markov = MarkovHead::kNone;
  int32_t markov_rank = 0;
  ConfidenceHead confidence = ConfidenceHead::kNone;  // kHiddenAndToken only with a Markov head
  // The confidence head reads z, the sum of the residual streams that the final norm makes h of, in
  // float32. Only with several streams.
  bool confidence_before_norm = false;
  bool has_confidence_bias = false;  // b; otherwise it is 0

  // Inputs and outputs of Wg or Wz, in a drafter of `hidden`.
  [[nodiscard]] int64_t markov_inputs(int32_t hidden) const {
    return int64_t{hidden} + (markov == MarkovHead::kRnn ? 2 : 1) * markov_rank;
  }
  [[nodiscard]] int64_t markov_outputs() const {
    return (markov == MarkovHead::kRnn ? 3 : 1) * int64_t{markov_rank};
  }
  // Whether Wg or Wz exists.
  [[nodiscard]] bool has_markov_mix() const {
    return markov == MarkovHead::kGated || markov == MarkovHead::kRnn;
  }
  // Whether a first row that predicts nothing has an effect on the state.
  [[nodiscard]] bool begins_with_state() const {
    return markov == MarkovHead::kRnn && !samples_from_anchor;
  }
  [[nodiscard]] int64_t confidence_inputs(int32_t hidden) const {
    return int64_t{hidden} + (confidence == ConfidenceHead::kHiddenAndToken ? markov_rank : 0);
  }
  // The most drafts of a block.
  [[nodiscard]] int32_t max_drafts() const { return samples_from_anchor ? size : size - 1; }
  // Rows of a block that makes `num_drafts` drafts, and the first of them that predicts one.
  [[nodiscard]] int32_t num_rows(int32_t num_drafts) const {
    return num_drafts + first_predicting_row();
  }
  [[nodiscard]] int32_t first_predicting_row() const { return samples_from_anchor ? 0 : 1; }
};

// An LM head over clusters of tokens. Each cluster has a centroid, and only the tokens of the
// clusters with the best centroid scores get a logit.
struct CentroidsConfig {
  int32_t count = 0;  // divides the rows of the lm_head; 0: there are none
  int32_t top = 0;    // number of clusters that get logits
};

// The part of a description that makes a decoder a draft head, a drafter that reads hidden states
// of its target. The vocab_size of its description is the target's, the rows of the embedding
// table.
//   EAGLE:   x = fc([E[t] ; h]), then layers; h is the target's output after its final norm.
//   EAGLE-3: g = fc(residual streams of the target entering aux_layers), and the first layer's
//            attention reads [attn_norm(E[t]) ; hidden_norm(g)], twice as wide.
//   MTP, of DeepSeek-V3 and GLM: x = fc([norm(E[t]) ; norm(h)]), then layers; h is the target's
//            output after its final norm.
//   MTP, of DeepSeek-V4: x_s = fc norm(E[t]) + fc_hidden norm(h_s) for each residual stream s, then
//            layers; h_s are the target's streams after its last layer.
//   Gemma 4 MTP: x = fc([E[t] ; h]), E[t] being the target's and h its output after its final norm,
//            then layers that all read the target's KV.
//   Block (DFlash, DSpark): c = hidden_norm(fc(residual streams of the target entering
//            aux_layers)), of tokens whose hidden states are known; of several streams, their mean.
//            Each layer makes their K and V from c. A block of rows then passes through the layers
//            and attends to these, too.
// A draft step takes the output of the previous step as h or g: the residual stream (all of them)
// after the last layer or, for Gemma 4 MTP, the product of DraftHeadWeights::feedback with the
// final norm's output.
struct DrafterConfig {
  DrafterKind kind = DrafterKind::kEagle;
  int32_t target_hidden = 0;
  // kEagle3, kBlock: of the target, in the order of fc's input. Of a target with several residual
  // streams, its number of layers stands for the output of the last one.
  std::vector<int32_t> aux_layers;
  bool norm_before_residual = false;  // kEagle3: the residual stream starts from hidden_norm(g)
  bool norm_before_fc = false;        // kEagle3: one norm over all of fc's input
  // kEagle3: a norm over each layer's part of fc's input; kMtp: norms over both halves.
  bool has_fc_norm = false;
  bool norm_output = false;  // kEagle3, kMtp: a step passes on the final norm of its output
  bool has_fc_bias = false;
  bool has_attn_norm = false;    // of the first layer
  bool has_final_norm = false;   // before the lm_head
  bool owns_embedding = false;   // otherwise it uses the target's
  bool owns_lm_head = false;     // otherwise it uses the target's
  int32_t draft_vocab_size = 0;  // rows of the lm_head; see DecoderWeights::draft_to_target
  MatrixFormat fc;               // of fc and fc_hidden, with several residual streams
  CentroidsConfig centroids;     // kGemma4Mtp
  BlockConfig block;             // kBlock

  // Whether it reads the mean of several residual streams of the target instead of each of them.
  [[nodiscard]] bool averages_streams() const { return kind == DrafterKind::kBlock; }
  // Width of fc's input.
  [[nodiscard]] int64_t fc_width() const {
    const int64_t parts = aux_layers.empty() ? 2 : static_cast<int64_t>(aux_layers.size());
    return parts * target_hidden;
  }
  // Norms over parts of fc's input, each of them target_hidden wide.
  [[nodiscard]] size_t num_fc_norms() const {
    if (!has_fc_norm) return 0;
    return kind == DrafterKind::kEagle3 ? aux_layers.size() : 2;
  }
  // The number of tokens of a cluster.
  [[nodiscard]] int32_t cluster_size() const { return draft_vocab_size / centroids.count; }
};

struct DecoderConfig {
  std::string name;  // for messages and reports, e.g. "gemma3"
  int32_t vocab_size = 0;
  int32_t hidden = 0;
  int32_t max_position = 0;  // number of positions that the model was made for
  float norm_eps = 0;
  float norm_weight_offset = 0;  // 0, or 1 where norms multiply by (1 + w)
  float embed_scale = 1;
  float logit_soft_cap = 0;      // as AttentionConfig::soft_cap, for logits
  bool ties_lm_head = false;     // the embedding table is the lm_head
  bool has_post_norms = false;   // Gemma's sandwich: norms after attention and after the MLP
  bool has_layer_scale = false;  // the end of a layer multiplies the residual stream by a number
  PerLayerInputsConfig per_layer_inputs;
  StreamsConfig streams;
  std::vector<RopeConfig> ropes;
  std::vector<LayerConfig> layers;
  std::optional<DrafterConfig> drafter;  // of a draft head only

  // Columns of the first projection of a layer's attention.
  [[nodiscard]] int64_t qkv_inputs(size_t layer) const {
    const bool is_wide = layer == 0 && drafter && drafter->kind == DrafterKind::kEagle3;
    return is_wide ? int64_t{2} * hidden : hidden;
  }
  // Elements of all residual streams of a row.
  [[nodiscard]] int64_t residual_width() const { return int64_t{streams.count} * hidden; }
  // Columns of the embedding table.
  [[nodiscard]] int32_t embed_width() const {
    const bool is_other = drafter && drafter->kind == DrafterKind::kGemma4Mtp;
    return is_other ? drafter->target_hidden : hidden;
  }
  // Rows of the lm_head.
  [[nodiscard]] int32_t lm_head_rows() const {
    return drafter ? drafter->draft_vocab_size : vocab_size;
  }
  // Width of the logits.
  [[nodiscard]] int32_t num_logits() const {
    const bool has_centroids = drafter && drafter->centroids.count > 0;
    return has_centroids ? drafter->centroids.top * drafter->cluster_size() : lm_head_rows();
  }
};

// Parses and checks the canonical JSON. Throws InvalidArgument naming the key, the value seen and
// the values allowed; unknown keys are refused.
[[nodiscard]] DecoderConfig parse_decoder_config(std::string_view json);

}  // namespace paceline
