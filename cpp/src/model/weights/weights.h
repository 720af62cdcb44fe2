// SPDX-License-Identifier: Apache-2.0
#pragma once

// The weights of one decoder in one arena, in the form that the forward pass reads: q, k and v rows
// in one matrix, gate and up rows in one matrix, norms and biases in float32. Once finished,
// only update_models writes to it.

#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include <paceline/dtype.h>

#include "device/device_memory.h"
#include "model/description/decoder_config.h"
#include "model/layers/compressed/weights.h"
#include "model/layers/dense/weights.h"
#include "model/layers/latent/weights.h"
#include "model/layers/moe/weights.h"
#include "model/layers/multi_head/weights.h"
#include "model/layers/parallel/weights.h"
#include "model/layers/recurrent/weights.h"
#include "model/weights/linear.h"
#include "model/weights/weight_parts.h"

namespace paceline {

// The variant of the weights of all kinds of a variant.
template <class Kinds>
struct KindsWeights;
template <class... Kinds>
struct KindsWeights<std::variant<Kinds...>> {
  using Type = std::variant<WeightsOf<Kinds>...>;
};

// What MixStreamsParams reads; null with one residual stream.
struct StreamMixWeights {
  const float* weight = nullptr;
  const float* base = nullptr;
  const float* scale = nullptr;
};

// The convolution around a branch of a block drafter's layer (BlockConvConfig), else absent.
struct BlockConvWeights {
  const float* base = nullptr;  // [2 * taps, hidden] taps of base_in, then of base_out
  Linear kernel;                // to [2 * taps * hidden / group]
};

// All pointers are 64 B aligned and point into DecoderWeights::arena. visit_weights.h has the
// shapes of the matrices.
struct LayerWeights {
  const float* attn_norm = nullptr;               // [hidden], or null in some draft heads
  KindsWeights<AttentionConfig>::Type attention;  // of the kind of LayerConfig::attention
  const float* attn_post_norm = nullptr;          // [hidden], or null
  const float* mlp_norm = nullptr;                // [hidden]
  KindsWeights<MlpConfig>::Type mlp;              // of the kind of LayerConfig::mlp
  const float* mlp_post_norm = nullptr;           // [hidden], or null
  // In models with per-layer inputs, else absent.
  Linear per_layer_gate;
  Linear per_layer_proj;
  const float* per_layer_norm = nullptr;  // [hidden]
  const float* scale = nullptr;           // [1] scale of the residual stream, or null
  StreamMixWeights attn_mix;
  StreamMixWeights mlp_mix;
  BlockConvWeights attn_conv;
  BlockConvWeights mlp_conv;
};

// The weights of a draft head (DrafterConfig) besides its layers.
struct DraftHeadWeights {
  Linear fc;
  Linear fc_hidden;                      // MTP with several residual streams, else absent
  Linear feedback;                       // to the target's width; absent but in Gemma 4 MTP
  const float* fc_input_norm = nullptr;  // [fc_width], or null
  std::vector<const float*> fc_norms;    // norms [target_hidden] of parts of fc's input, or empty
  const float* hidden_norm = nullptr;    // [hidden], or null
  // [draft_vocab_size] target token of each row of the lm_head; null: row and token are equal.
  const int32_t* draft_to_target = nullptr;
  // With a Markov head, else absent: W1 [vocab_size, markov_rank] and W2; and Wg or Wz of those
  // that have it.
  const std::byte* markov_table = nullptr;
  Linear markov;
  Linear markov_mix;
  // With a selector, else absent: the codebooks [vocab_size, rank], and W.
  const std::byte* predecessors = nullptr;
  const std::byte* successors = nullptr;
  Linear selector;
  // With a confidence head, else null: [BlockConfig::confidence_inputs] and, with a bias, [1].
  const float* confidence = nullptr;
  const float* confidence_bias = nullptr;
  // With centroids, else absent.
  Linear centroids;
  const int32_t* token_ordering = nullptr;  // [draft_vocab_size] tokens in order of clusters
};

// Where the weights of a decoder lie.
struct WeightPointers {
  DType dtype = DType::kFloat32;  // dtype of the matrices
  // [vocab_size, hidden]; null in a draft head that uses the target's.
  const std::byte* embed = nullptr;
  Linear lm_head;  // over `embed` when tied; absent in a draft head that uses the target's
  const float* final_norm = nullptr;  // [hidden], or null in some draft heads
  StreamMixWeights end_mix;
  // In models with per-layer inputs, else absent; width = layers * per_layer_inputs.size.
  const std::byte* per_layer_embed = nullptr;  // [per_layer_inputs.vocab_size, width]
  Linear per_layer_proj;                       // to `width`
  const float* per_layer_norm = nullptr;       // [per_layer_inputs.size]
  std::vector<LayerWeights> layers;
  DraftHeadWeights head;
};

struct DecoderWeights : WeightPointers {
  DeviceBuffer arena;
};

}  // namespace paceline
