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
#include <vector>

#include "model/description/layer_config.h"
#include "model/description/matrix_format.h"
#include "ops/ops.h"

namespace paceline {

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

// The convolution of a block drafter's layers, over the rows of a block (ops/block_conv.h). Around
// attention, and in the same way around the MLP, with weights of its own:
//   n = rms_norm(x);  [delta_in ; delta_out] = kernel n
//   n = conv(n, base_in, delta_in);  o = attention(n);  x += conv(o, base_out, delta_out)
// Rows of the context pass through none.
struct BlockConvConfig {
  int32_t taps = 0;   // rows that a row reads, its own first; 0: there is no convolution
  int32_t group = 0;  // elements that share an element of delta; divides hidden

  [[nodiscard]] bool is_used() const { return taps > 0; }
  // Outputs of the kernel: taps of delta_in, then taps of delta_out.
  [[nodiscard]] int64_t outputs(int32_t hidden) const {
    return int64_t{2} * taps * (hidden / group);
  }
};

// The head of DFlash2, which chooses a draft among the `top` tokens with the highest logits U by
// the token before, x, and the hidden state h that the lm_head reads (ops/candidates.h):
//   score(c) = U[c] + sum over r of predecessors[x]_r (W h)_r successors[c]_r
struct SelectorConfig {
  int32_t rank = 0;
  int32_t top = 0;  // 0: there is no selector
};

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
  BlockConvConfig conv;
  SelectorConfig selector;

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
//   Block (DFlash, DFlash2, DSpark): c = hidden_norm(fc(residual streams of the target entering
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
  float logit_scale = 1;         // logits are lm_head x, times this, and then capped
  float logit_soft_cap = 0;      // as AttentionConfig::soft_cap, for logits
  bool ties_lm_head = false;     // the embedding table is the lm_head
  bool has_post_norms = false;   // Gemma's sandwich: norms after attention and after the MLP
  bool has_layer_scale = false;  // the end of a layer multiplies the residual stream by a number
  PerLayerInputsConfig per_layer_inputs;
  StreamsConfig streams;
  std::vector<RopeConfig> ropes;
  std::vector<LayerConfig> layers;
  std::optional<DrafterConfig> drafter;  // of a draft head only
  // In the description of a rank's part of a model (rank_model.h): the most elements of a row that
  // are gathered at once from all ranks; else 0.
  int64_t gathered_width = 0;

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
