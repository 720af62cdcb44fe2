// SPDX-License-Identifier: Apache-2.0
#pragma once

// The kinds of layers. These two lists name them, and nothing else outside of their folders does: a
// kind is a folder of model/layers/, and all code that handles layers of any kind asks it.
//
// A kind of attention is a struct, `config.h`, with
//   kNames                 the values of "kind" that a description has for it
//   read(json, config)     reads its other keys, as config_reading.h says
//   projected_width()      elements of a row of its first projection, for Activations::qkv
//   output_width()         elements of a row before its last one, for Activations::attention
//   append_stores(shapes)  appends what it keeps in the KV cache; `source` is a layer
//   reads_target           whether its KV is that of a layer of the target
//   kPicksRows             whether the last layer can attend from some rows only
//   kWritesContext         whether keys and values can be written without queries (layer.h)
//   writes_context()       whether this layer's can; context_rows (weights.h) multiply them then
//   scores_entries()       whether scratch grows with the length of a sequence
//   unsupported_on_gpu()   why GPUs have no kernels for it; empty: they have
// and a kind of MLP one with projected_width(), for Activations::gate_up, joined_width(), for
// further rows there, and has_experts(). Of both, `weights.h` has the weights and their list
// (WeightsOf, visit_kind_weights), and `layer.h` the scratch (WidthsOf) and the forward pass
// (run_attention, run_mlp).

#include <variant>

#include "model/layers/compressed/config.h"
#include "model/layers/dense/config.h"
#include "model/layers/latent/config.h"
#include "model/layers/moe/config.h"
#include "model/layers/multi_head/config.h"
#include "model/layers/parallel/config.h"
#include "model/layers/recurrent/config.h"

namespace paceline {

using AttentionConfig =
    std::variant<MultiHeadAttention, LatentAttention, CompressedAttention, RecurrentAttention>;
using MlpConfig = std::variant<DenseMlp, MoeMlp, ParallelMlp>;

struct LayerConfig {
  AttentionConfig attention;
  MlpConfig mlp;
};

}  // namespace paceline
