// SPDX-License-Identifier: Apache-2.0
#pragma once

// The scratch buffers of a forward pass.

#include <cstdint>
#include <tuple>
#include <variant>

#include <paceline/dtype.h>

#include "device/device_arena.h"
#include "device/rank_group.h"
#include "model/description/decoder_config.h"
#include "model/forward/layer_pass.h"
#include "model/layers/compressed/layer.h"
#include "model/layers/dense/layer.h"
#include "model/layers/latent/layer.h"
#include "model/layers/moe/layer.h"
#include "model/layers/multi_head/layer.h"
#include "model/layers/parallel/layer.h"
#include "model/layers/recurrent/layer.h"

namespace paceline {

// The scratch of all kinds of layers.
template <class Attention, class Mlp>
struct KindsScratch;
template <class... Kinds, class... Mlps>
struct KindsScratch<std::variant<Kinds...>, std::variant<Mlps...>> {
  using Widths = std::tuple<WidthsOf<Kinds>..., WidthsOf<Mlps>...>;
  using Scratch =
      std::tuple<typename WidthsOf<Kinds>::Scratch..., typename WidthsOf<Mlps>::Scratch...>;
};
using AllKinds = KindsScratch<AttentionConfig, MlpConfig>;

// Scratch buffers of one forward pass, shared by all passes and models and sized for the largest.
struct Activations {
  float* residual;  // [rows, residual_width]
  // In models with several residual streams, else null.
  float* embedded;           // [rows, hidden]
  float* mix;                // [rows, mix_width]
  int32_t* num_stream_rows;  // [1] rows of products with every stream
  void* normed;  // [rows, normed] dtype, as all below: output of a norm, or the concatenated input
                 // of a draft head's fc or attention
  void* qkv;     // [rows, projected_width] of the attention's kind
  void* attention;  // [rows, output_width]
  void* branch;     // [rows, hidden] output of a branch before it joins the residual
  void* gate_up;    // [rows, 2 * intermediate], or as many for each expert row
  void* activated;  // [rows, intermediate], or as many for each expert row
  void* per_layer;  // [rows, layers * per_layer_inputs.size], valid for the whole pass; or null
  // [rows of blocks, BlockConvConfig::outputs] in a block drafter's pass over blocks that are
  // convolved, else null
  float* conv_delta = nullptr;
  AllKinds::Scratch kinds;
  DType dtype;
  // With several ranks: [rows, DecoderConfig::gathered_width] dtype, inputs of a product of which
  // each rank has computed a part, from all of them; and the ranks. Else null.
  void* gathered = nullptr;
  RankHandle ranks = {};

  // The scratch of a kind, by its type.
  template <class Scratch>
  [[nodiscard]] const Scratch& of() const {
    return std::get<Scratch>(kinds);
  }
};

// Widths of the Activations buffers: maxima over layers and, after merge, over models.
struct ActivationWidths {
  int64_t hidden = 0;
  int64_t residual = 0;
  int64_t mix = 0;  // 0: no model has several residual streams
  int64_t normed = 0;
  int64_t qkv = 0;
  int64_t attention = 0;
  int64_t gate_up = 0;  // of all places of a row
  int64_t per_layer = 0;
  int64_t gathered = 0;  // 0: one rank
  int64_t joined = 0;    // intermediate size of shared experts with expert rows
  AllKinds::Widths kinds;

  // `max_tokens`: of a sequence.
  void merge(const DecoderConfig& config, int64_t max_tokens);
};

[[nodiscard]] Activations allocate_activations(DeviceArena& arena, int64_t rows,
                                               const ActivationWidths& widths, DType dtype);

}  // namespace paceline
