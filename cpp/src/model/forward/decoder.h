// SPDX-License-Identifier: Apache-2.0
#pragma once

// One decoder (target or drafter) on a device: weights, rotary tables, the location of its layers'
// KV, and the forward pass, which only sequences op calls. The pass works on the rows and metadata
// that it is given; it knows nothing of requests, drafts or acceptance.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "device/device_arena.h"
#include "kv/kv_layout.h"
#include "metadata/group_metadata.h"
#include "metadata/pass_rows.h"
#include "model/forward/activations.h"
#include "model/forward/layer_pass.h"
#include "model/weights/model_impl.h"
#include "ops/moe.h"
#include "ops/ops.h"
#include "wire/blocks.h"

namespace paceline {

// The hidden states of some rows, which a forward pass copies for a request
// (Request::hidden_layers). These copies are not recorded, so they occur in passes that run op by
// op only.
struct HiddenCapture {
  int32_t first_row = 0;
  int32_t num_rows = 0;
  std::span<const int32_t> layers;
  float* to = nullptr;       // the values of first_row for layers[0]; null: nothing is copied, but
                             // the pass is the same
  int64_t layer_stride = 0;  // elements from one layer to the next
};

// The ids of the LM head whose logits a pass computes: all, or where ranks share the head only
// those of the rank itself, in their places among all.
enum class LogitIds : uint8_t { kAll, kOwn };

// Hidden states that a forward pass stores for a draft head. Each copy is an op of the pass, so it
// is captured with the pass.
struct HiddenTaps {
  void* data = nullptr;  // [rows, width] dtype of the activations; null: nothing is stored
  int32_t width = 0;
  // The layers whose input residual streams are stored, ascending, concatenated; the number of
  // layers stands for the output of the last one. Empty: the output of the final norm is stored, or
  // in models with several residual streams all of them, after the last layer.
  std::span<const int32_t> aux_layers;
  // With several residual streams: for each of aux_layers only their mean is stored.
  bool averages_streams = false;
  std::span<const HiddenCapture> captures;
};

// The weights of the target that a draft head shares.
struct SharedWeights {
  const std::byte* embed = nullptr;
  Linear lm_head;
};

struct Branch;

class Decoder {
 public:
  // `role` selects the layers in `layout`. Rows are at positions [0, max_positions) and are rotated
  // to positions `rope_offset` higher.
  Decoder(std::shared_ptr<const Model> model, const KvLayout& layout, KvOwner role,
          std::byte* kv_pool, int32_t max_positions, DeviceArena& arena,
          const SharedWeights& shared = {}, int32_t rope_offset = 0);

  [[nodiscard]] const DecoderConfig& config() const { return model_->config; }
  // [2] what passes over a mixture count (SortExpertRowsParams::counters), on the device; null
  // without a mixture.
  [[nodiscard]] int64_t* expert_counters() const { return expert_counters_; }
  [[nodiscard]] const DecoderWeights& weights() const { return model_->weights; }
  // The lm_head of the decoder, its own or shared.
  [[nodiscard]] const Linear& lm_head() const { return lm_head_; }
  [[nodiscard]] SharedWeights shareable_weights() const { return {embed_, lm_head_}; }

  // Token ids of `rows` -> residual stream (or streams) after the last layer, in
  // activations.residual (before the final norm). `groups` is indexed by GroupId. `output`: the
  // rows whose output is read, which is then in output->residual; null: all, and otherwise only
  // where picks_output() and neither the taps nor the captures have the output of the last layer.
  template <class Ctx>
  void forward(Ctx& ctx, const PassRows& rows, std::span<const GroupMetadata> groups,
               const Activations& activations, const HiddenTaps& taps = {},
               const OutputRows* output = nullptr) const;

  // The parts of forward, for draft heads. embed_tokens: token ids -> activations.residual, or
  // activations.embedded with several residual streams. spread_embeddings, which does something
  // with several streams only: activations.embedded to, or added to, every stream.
  // run_layers: the layers, where the attention of the first layer reads `first_input` [rows,
  // DecoderConfig::qkv_inputs] (dtype of the activations; null: the norm of the residual stream).
  template <class Ctx>
  void embed_tokens(Ctx& ctx, const PassRows& rows, const Activations& activations) const;
  template <class Ctx>
  void spread_embeddings(Ctx& ctx, const PassRows& rows, const Activations& activations,
                         bool adds) const;
  template <class Ctx>
  void run_layers(Ctx& ctx, const PassRows& rows, std::span<const GroupMetadata> groups,
                  const Activations& activations, const void* first_input, const HiddenTaps& taps,
                  const OutputRows* output) const;

  // The keys and values of one layer for `rows`, computed from `input` [rows, hidden] (dtype of the
  // activations), to its cache. No query attends. The layer has multi-head attention with weights
  // in plain format, or compressed attention without a compressor, whose window entries they are.
  template <class Ctx>
  void write_keys_values(Ctx& ctx, int32_t layer, const void* input, const PassRows& rows,
                         std::span<const GroupMetadata> groups,
                         const Activations& activations) const;

  // Copies the output of the final norm for the captures that have it. Writes over
  // activations.residual (with several streams activations.embedded), and so comes after `logits`.
  template <class Ctx>
  void capture_output(Ctx& ctx, const PassRows& rows, const Activations& activations,
                      std::span<const HiddenCapture> captures) const;

  // Residual rows `row_index` -> activations.normed, after the final norm. `gathered` receives
  // those rows [max_logit_rows, residual_width] before the norm.
  template <class Ctx>
  void output_rows(Ctx& ctx, const int32_t* num_logit_rows, int32_t max_logit_rows,
                   const int32_t* row_index, const Activations& activations, float* gathered) const;
  // output_rows, and then their logits [max_logit_rows, num_logits], of which those of `of_ids` are
  // there afterwards.
  template <class Ctx>
  void logits(Ctx& ctx, const int32_t* num_logit_rows, int32_t max_logit_rows,
              const int32_t* row_index, const Activations& activations, float* gathered,
              float* logits, LogitIds of_ids) const;

  // Whether the last layer can compute some of the rows only.
  [[nodiscard]] bool picks_output() const;

 private:
  // [rows, hidden] float32, where one vector a row goes.
  [[nodiscard]] float* single_residual(const Activations& activations) const {
    return config().streams.count > 1 ? activations.embedded : activations.residual;
  }
  // The attention of a layer as its kind does it. `input`: [rows, DecoderConfig::qkv_inputs].
  // `output`: the rows to attend from; null: all.
  [[nodiscard]] AttentionPass attention_pass(int32_t layer, const void* input, const PassRows& rows,
                                             std::span<const GroupMetadata> groups,
                                             const Activations& activations,
                                             const OutputRows* output) const;
  template <class Ctx>
  void attention(Ctx& ctx, int32_t layer, const AttentionPass& pass) const;
  // Its output is activations.branch. A mixture leaves its last op to the caller, who may join it
  // with the norm that follows.
  template <class Ctx>
  [[nodiscard]] std::optional<CombineExpertsParams> mlp(Ctx& ctx, int32_t layer,
                                                        const PassRows& rows,
                                                        const Activations& activations,
                                                        const BranchEnds& ends) const;
  // The residual that a branch with this last product adds its output to by itself; null: it joins
  // in an op of its own, as it does where more than the sum is made of it.
  template <class Ctx>
  [[nodiscard]] float* residual_of(const Ctx& ctx, const Linear* last, const Branch& branch,
                                   const BlockConvWeights& conv, const PassRows& rows,
                                   const Activations& activations) const;
  // The convolution around a branch (BlockConvConfig), which does nothing in a model without it:
  // of the branch's input, with the deltas of both, and of its output.
  template <class Ctx>
  void convolve_input(Ctx& ctx, const BlockConvWeights& weights, const PassRows& rows,
                      const Activations& activations) const;
  template <class Ctx>
  void convolve_output(Ctx& ctx, const BlockConvWeights& weights, const PassRows& rows,
                       const Activations& activations) const;
  // What follows the attention of the last layer, of the rows whose output is read.
  template <class Ctx>
  void finish_rows(Ctx& ctx, int32_t layer, const Branch& attended, const OutputRows& output,
                   const Activations& activations) const;
  // For models with per-layer inputs: the inputs of all layers, and the branch of one layer.
  template <class Ctx>
  void make_per_layer_inputs(Ctx& ctx, const PassRows& rows, const Activations& activations) const;
  template <class Ctx>
  void per_layer_branch(Ctx& ctx, int32_t layer, const PassRows& rows,
                        const Activations& activations) const;

  std::shared_ptr<const Model> model_;
  // By layer (KvStores::first), and at the end the number of stores.
  std::vector<int32_t> first_store_;
  std::vector<GroupId> store_to_group_;  // by store
  int32_t rope_offset_;
  std::vector<KvLayerView> kv_;   // by store
  std::vector<RopeTable> ropes_;  // by DecoderConfig::ropes
  int64_t* expert_counters_ = nullptr;
  const std::byte* embed_;
  Linear lm_head_;
};

}  // namespace paceline
