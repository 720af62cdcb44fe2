// SPDX-License-Identifier: Apache-2.0
#pragma once

// A drafter that works on its target's hidden states: EAGLE, EAGLE-3, MTP and Gemma 4 MTP
// (DrafterConfig has their equations). A row at position i combines the token at i + 1 with the
// hidden state at i, and predicts the token at i + 2. Like Decoder it only sequences op calls.

#include <cstdint>
#include <memory>
#include <span>

#include "metadata/pass_rows.h"
#include "model/forward/decoder.h"

namespace paceline {

// The inputs of a draft head besides its rows: target_hidden in the first pass, feedback in a draft
// step.
struct DraftHeadInput {
  // First pass: hidden states of the target, as HiddenTaps defines them; may be overwritten.
  void* target_hidden = nullptr;
  // [rows] row of target_hidden for each row; null: row i for row i.
  const int32_t* hidden_rows = nullptr;
  // Draft step: the feedback of the previous step for each row [rows, feedback_width].
  const float* feedback = nullptr;
  // The rows whose output is read; see Decoder::forward.
  const OutputRows* output = nullptr;
};

// The outputs of a draft head for the rows that draw.
struct DraftHeadOutput {
  float* feedback = nullptr;         // [max_rows, max(hidden, feedback_width)]
  float* logits = nullptr;           // [max_rows, num_logits]
  float* centroid_scores = nullptr;  // [max_rows, centroids.count]; null without centroids
  int32_t* clusters = nullptr;       // [max_rows, centroids.top]; null without centroids
  int32_t* tokens = nullptr;  // [max_rows, num_logits] token of each logit; null without centroids
};

class DraftHead {
 public:
  // The draft head uses weights of `target`, which must outlive it, for those that it does not own.
  // Rows are rotated to positions `rope_offset` higher than their own.
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

  // Residual rows `row_index` -> their logits, those of `of_ids`, and the feedback for the next
  // draft step of these rows. With centroids, all logits.
  template <class Ctx>
  void logits(Ctx& ctx, const int32_t* num_rows, int32_t max_rows, const int32_t* row_index,
              const Activations& activations, const DraftHeadOutput& output, LogitIds of_ids) const;

 private:
  // The input of all kinds but EAGLE-3, with one residual stream: [embedding ; hidden], normalised
  // in MTP.
  template <class Ctx>
  void join_pair(Ctx& ctx, const PassRows& rows, const Activations& activations,
                 const DraftHeadInput& input) const;
  // The same with several residual streams: each is the embedding's product plus its own.
  template <class Ctx>
  void join_streams(Ctx& ctx, const PassRows& rows, const Activations& activations,
                    const DraftHeadInput& input) const;
  template <class Ctx>
  void join_eagle3(Ctx& ctx, const PassRows& rows, const Activations& activations,
                   const DraftHeadInput& input) const;
  // y = fc(x), float32.
  template <class Ctx>
  void run_fc(Ctx& ctx, const PassRows& rows, const void* x, float* y,
              const Activations& activations) const;

  // Computes the logits of the tokens in the clusters with the highest centroid scores.
  template <class Ctx>
  void cluster_rows(Ctx& ctx, const int32_t* num_rows, int32_t max_rows,
                    const Activations& activations, const DraftHeadOutput& output) const;

  Decoder decoder_;
};

// Throws InvalidArgument, naming the two values that disagree, unless `model` is a draft head for
// `target`.
void check_draft_head(const Model& model, const Model& target);

}  // namespace paceline
