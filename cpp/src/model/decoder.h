// SPDX-License-Identifier: Apache-2.0
#pragma once

// One decoder (target or drafter) on a device: weights, rotary tables, where its layers' KV lies,
// and the forward pass, which only sequences op calls. The pass works on whatever rows and metadata
// it is given; it does not know of requests, drafts or acceptance.

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "device/device_arena.h"
#include "kv/kv_layout.h"
#include "metadata/group_metadata.h"
#include "metadata/pass_rows.h"
#include "model/model_impl.h"
#include "ops/ops.h"

namespace paceline {

// Scratch of one forward pass, shared by all passes and models: sized for the largest.
struct Activations {
  float* residual;  // [rows, hidden]
  void* normed;     // [rows, hidden] dtype, as all below
  void* qkv;        // [rows, qkv_rows(attention)]
  void* attention;  // [rows, num_qo_heads * head_dim]
  void* branch;     // [rows, hidden] output of a branch before it joins the residual
  void* gate_up;    // [rows, 2 * intermediate]
  void* activated;  // [rows, intermediate]
  void* per_layer;  // [rows, layers * per_layer_inputs.size], for the whole pass; or empty
  DType dtype;
};

// Widths of Activations, maxima over layers (and, merged, over models).
struct ActivationWidths {
  int64_t hidden = 0;
  int64_t qkv = 0;
  int64_t attention = 0;
  int64_t gate_up = 0;
  int64_t per_layer = 0;

  void merge(const DecoderConfig& config);
};

[[nodiscard]] Activations allocate_activations(DeviceArena& arena, int64_t rows,
                                               const ActivationWidths& widths, DType dtype);

class Decoder {
 public:
  // `role`: whose layers in `layout` are meant. Rotary tables cover positions [0, max_positions).
  Decoder(std::shared_ptr<const Model> model, const KvLayout& layout, KvOwner role,
          std::byte* kv_pool, int32_t max_positions, DeviceArena& arena);

  [[nodiscard]] const DecoderConfig& config() const { return model_->config; }

  // Token ids of `rows` -> residual stream after the last layer, in activations.residual (before
  // the final norm). `groups` is indexed by GroupId.
  template <class Ctx>
  void forward(Ctx& ctx, const PassRows& rows, std::span<const GroupMetadata> groups,
               const Activations& activations) const;

  // Residual rows `row_index` -> logits [max_logit_rows, vocab_size]. `gathered` is scratch of
  // [max_logit_rows, hidden]; activations.normed is overwritten.
  template <class Ctx>
  void logits(Ctx& ctx, const int32_t* num_logit_rows, int32_t max_logit_rows,
              const int32_t* row_index, const Activations& activations, float* gathered,
              float* logits) const;

 private:
  struct RopeTable {
    const float* cos;  // [max_positions, head_dim / 2]
    const float* sin;
  };

  template <class Ctx>
  void attention(Ctx& ctx, int32_t layer, const PassRows& rows,
                 std::span<const GroupMetadata> groups, const Activations& activations) const;
  template <class Ctx>
  void mlp(Ctx& ctx, int32_t layer, const PassRows& rows, const Activations& activations) const;
  // Of models with per-layer inputs: those of all layers, and the branch of one layer.
  template <class Ctx>
  void make_per_layer_inputs(Ctx& ctx, const PassRows& rows, const Activations& activations) const;
  template <class Ctx>
  void per_layer_branch(Ctx& ctx, int32_t layer, const PassRows& rows,
                        const Activations& activations) const;

  std::shared_ptr<const Model> model_;
  std::vector<GroupId> layer_to_group_;
  std::vector<KvLayerView> kv_;   // by layer
  std::vector<RopeTable> ropes_;  // by DecoderConfig::ropes
};

// The KV shapes of a decoder's layers, for plan_kv_layout.
[[nodiscard]] std::vector<KvLayerShape> kv_layer_shapes(const DecoderConfig& config);

}  // namespace paceline
