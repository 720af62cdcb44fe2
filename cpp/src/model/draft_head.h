// SPDX-License-Identifier: Apache-2.0
#pragma once

// A drafter that rides on its target's hidden states: EAGLE, EAGLE-3 and Gemma 4 MTP (DrafterConfig
// has their equations). A row at position i pairs the token at i + 1 with the hidden state at i,
// and predicts the token at i + 2. Like Decoder it only sequences op calls.

#include <cstdint>
#include <memory>
#include <span>

#include "metadata/pass_rows.h"
#include "model/decoder.h"

namespace paceline {

// What a head takes from elsewhere than its rows; one of the two, by pass.
struct DraftHeadInput {
  // The first pass: of the target, as HiddenTaps has it; may be overwritten.
  void* target_hidden = nullptr;
  const int32_t* hidden_rows = nullptr;  // [rows] which row of it; null: row by row
  // A draft step: what the head has put out for each row a step before [rows, feedback_width].
  const float* feedback = nullptr;
};

// What a head puts out for the rows that draw.
struct DraftHeadOutput {
  float* feedback = nullptr;         // [max_rows, at least hidden and feedback_width]
  float* logits = nullptr;           // [max_rows, num_logits]
  float* centroid_scores = nullptr;  // [max_rows, centroids.count], or null without centroids
  int32_t* clusters = nullptr;       // [max_rows, centroids.top], likewise
  int32_t* tokens = nullptr;         // [max_rows, num_logits] the token of each logit, likewise
};

class DraftHead {
 public:
  // Weights that the head does not own are those of `target`, which must outlive it. Rows are
  // rotated to `rope_offset` positions further on than they are.
  DraftHead(std::shared_ptr<const Model> model, const Decoder& target, const KvLayout& layout,
            std::byte* kv_pool, int32_t max_positions, DeviceArena& arena, int32_t rope_offset = 0);

  [[nodiscard]] const DecoderConfig& config() const { return decoder_.config(); }
  [[nodiscard]] const DrafterConfig& drafter() const { return *config().drafter; }
  [[nodiscard]] const Decoder& decoder() const { return decoder_; }
  [[nodiscard]] const int32_t* draft_to_target() const {
    return decoder_.weights().head.draft_to_target;
  }

  // Rows -> residual stream after the last layer, in activations.residual.
  template <class Ctx>
  void forward(Ctx& ctx, const PassRows& rows, std::span<const GroupMetadata> groups,
               const Activations& activations, const DraftHeadInput& input) const;

  // Residual rows `row_index` -> their logits, and what the next step takes for these rows.
  template <class Ctx>
  void logits(Ctx& ctx, const int32_t* num_rows, int32_t max_rows, const int32_t* row_index,
              const Activations& activations, const DraftHeadOutput& output) const;

 private:
  // [embedding ; hidden], of EAGLE and of Gemma 4 MTP.
  template <class Ctx>
  void join_pair(Ctx& ctx, const PassRows& rows, const Activations& activations,
                 const DraftHeadInput& input) const;
  template <class Ctx>
  void join_eagle3(Ctx& ctx, const PassRows& rows, const Activations& activations,
                   const DraftHeadInput& input) const;
  // y = fc(x) in activations.residual.
  template <class Ctx>
  void run_fc(Ctx& ctx, const PassRows& rows, const void* x, const Activations& activations) const;

  // Logits of the tokens in the clusters whose centroids score best.
  template <class Ctx>
  void cluster_rows(Ctx& ctx, const int32_t* num_rows, int32_t max_rows,
                    const Activations& activations, const DraftHeadOutput& output) const;

  Decoder decoder_;
};

// Throws InvalidArgument, with the two values that disagree, unless `model` is a head for `target`.
void check_head(const Model& model, const Model& target);

}  // namespace paceline
