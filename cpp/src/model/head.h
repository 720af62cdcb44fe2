// SPDX-License-Identifier: Apache-2.0
#pragma once

// A drafter that rides on its target's hidden states: EAGLE and EAGLE-3 (DrafterConfig has their
// equations). A row at position i pairs the token at i + 1 with the hidden state at i, and predicts
// the token at i + 2. Like Decoder it only sequences op calls.

#include <cstdint>
#include <memory>
#include <span>

#include "model/decoder.h"

namespace paceline {

// What a head takes from elsewhere than its rows; one of the two, by pass.
struct HeadInput {
  // The first pass: of the target, by row, as HiddenTaps has it; may be overwritten.
  void* target_hidden = nullptr;
  // A draft step: what the head has put out for each row a step before [rows, hidden].
  const float* feedback = nullptr;
};

class Head {
 public:
  // Weights that the head does not own are those of `target`, which must outlive it.
  Head(std::shared_ptr<const Model> model, const Decoder& target, const KvLayout& layout,
       std::byte* kv_pool, int32_t max_positions, DeviceArena& arena);

  [[nodiscard]] const DecoderConfig& config() const { return decoder_.config(); }
  [[nodiscard]] const DrafterConfig& drafter() const { return *config().drafter; }
  [[nodiscard]] const Decoder& decoder() const { return decoder_; }
  [[nodiscard]] const int32_t* draft_to_target() const {
    return decoder_.weights().head.draft_to_target;
  }

  // Rows -> residual stream after the last layer, in activations.residual.
  template <class Ctx>
  void forward(Ctx& ctx, const PassRows& rows, std::span<const GroupMetadata> groups,
               const Activations& activations, const HeadInput& input) const;

  // Residual rows `row_index` -> logits [max_rows, num_logits], and into `feedback` what the next
  // step takes for these rows.
  template <class Ctx>
  void logits(Ctx& ctx, const int32_t* num_rows, int32_t max_rows, const int32_t* row_index,
              const Activations& activations, float* feedback, float* logits) const;

 private:
  template <class Ctx>
  void join_eagle(Ctx& ctx, const PassRows& rows, const Activations& activations,
                  const HeadInput& input) const;
  template <class Ctx>
  void join_eagle3(Ctx& ctx, const PassRows& rows, const Activations& activations,
                   const HeadInput& input) const;
  // y = fc(x) in activations.residual.
  template <class Ctx>
  void run_fc(Ctx& ctx, const PassRows& rows, const void* x, const Activations& activations) const;

  Decoder decoder_;
};

// Throws InvalidArgument, with the two values that disagree, unless `model` is a head for `target`.
void check_head(const Model& model, const Model& target);

}  // namespace paceline
