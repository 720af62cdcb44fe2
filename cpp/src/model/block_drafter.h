// SPDX-License-Identifier: Apache-2.0
#pragma once

// A drafter that makes all drafts of a window in one pass (DFlash, DSpark; DrafterConfig has the
// equations). Its layers attend to keys and values of two kinds: those of tokens whose hidden
// states the target has computed, made from these states, and those of the block's own rows, which
// the next pass overwrites. Like Decoder it only sequences op calls.

#include <cstdint>
#include <memory>
#include <span>

#include "metadata/pass_rows.h"
#include "model/decoder.h"

namespace paceline {

class BlockDrafter {
 public:
  // The drafter uses weights of `target`, which must outlive it, for those that it does not own.
  BlockDrafter(std::shared_ptr<const Model> model, const Decoder& target, const KvLayout& layout,
               std::byte* kv_pool, int32_t max_positions, DeviceArena& arena);

  [[nodiscard]] const DecoderConfig& config() const { return decoder_.config(); }
  [[nodiscard]] const BlockConfig& block() const { return config().drafter->block; }
  [[nodiscard]] const Decoder& decoder() const { return decoder_; }
  [[nodiscard]] const int32_t* draft_to_target() const {
    return decoder_.weights().head.draft_to_target;
  }

  // The keys and values of every layer for rows whose hidden states are known. `target_hidden`:
  // [rows, fc_width] dtype of the activations, as HiddenTaps defines them.
  template <class Ctx>
  void write_context(Ctx& ctx, const PassRows& rows, std::span<const GroupMetadata> groups,
                     const Activations& activations, const void* target_hidden) const;

  // The rows of blocks -> residual stream after the last layer, in activations.residual.
  template <class Ctx>
  void forward(Ctx& ctx, const PassRows& rows, std::span<const GroupMetadata> groups,
               const Activations& activations) const;

  // Residual rows `row_index` -> their logits, without the Markov head. `gathered`: [max_rows,
  // hidden].
  template <class Ctx>
  void logits(Ctx& ctx, const int32_t* num_rows, int32_t max_rows, const int32_t* row_index,
              const Activations& activations, float* gathered, float* logits) const;

  // Adds to `logits` [max_rows, num_logits] what the Markov head says of the token after
  // `previous` [max_rows]. `bias`: [max_rows, num_logits], for the op's own use. Without a Markov
  // head it does nothing.
  template <class Ctx>
  void add_markov(Ctx& ctx, const int32_t* num_rows, int32_t max_rows, const int32_t* previous,
                  const Activations& activations, float* bias, float* logits) const;

 private:
  Decoder decoder_;
};

}  // namespace paceline
