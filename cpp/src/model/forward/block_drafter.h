// SPDX-License-Identifier: Apache-2.0
#pragma once

// A drafter that makes all drafts of a window in one pass (DFlash, DFlash2, DSpark; DrafterConfig
// has the equations). Its layers attend to keys and values of two kinds: those of tokens whose
// hidden states the target has computed, made from these states, and those of the block's own rows,
// which the next pass overwrites. Like Decoder it only sequences op calls.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "metadata/pass_rows.h"
#include "model/forward/decoder.h"
#include "model/forward/layer_ops.h"
#include "ops/candidates.h"
#include "sample/reject.h"

namespace paceline {

// The scratch of the heads of a block drafter, for one draft of each sequence, and of a selector
// for all drafts. What the drafter's heads do not use is null.
struct BlockHeadScratch {
  float* e = nullptr;          // [max_seqs, markov_rank] rows of W1, where more than W2 reads them
  void* inputs = nullptr;      // [max_seqs, markov_inputs] dtype of the activations: of Wg or Wz
  float* mix = nullptr;        // [max_seqs, markov_outputs] of Wg or Wz
  float* state = nullptr;      // [max_seqs, markov_rank] of MarkovHead::kRnn, from draft to draft
  void* factors = nullptr;     // [max_seqs, markov_rank] dtype of the activations: the input of W2
  CandidateLists lists;        // of a selector: [max_seqs * k] rows
  float* projected = nullptr;  // [max_seqs * k, selector rank] W h
  float* followed = nullptr;   // [max_seqs, selector top] scores of a draft's candidates
};

// The drafts of the sequences of a pass: draft j of sequence i is row j * max_seqs + i.
struct AllDrafts {
  const int32_t* num_seqs;  // [1] those that draft
  int32_t max_seqs;
  int32_t num_drafts;
  const int32_t* num_rows;   // [1] num_drafts * max_seqs
  const int32_t* row_index;  // [num_drafts * max_seqs] rows of seq_slot
  const int32_t* seq_slot;   // by row of the pass
  const int32_t* newest;     // [max_seqs] the token before the first draft
};

// One draft of the sequences of a pass, which depends on the token before it.
struct ChainedDraft {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const int32_t* previous;  // [max_rows] the token before
  // The draft's first row of activations.normed, as `logits` leaves it: h of MarkovHead.
  int64_t first_hidden_row;
  bool is_first;       // no state yet
  float* probability;  // [max_rows] the confidence head's estimate; null: not wanted
};

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

  // Residual rows `row_index` -> their hidden states h in activations.normed, which stay there
  // until the next pass, and their logits without the Markov head, those of `of_ids`. `gathered`:
  // [max_rows, hidden].
  template <class Ctx>
  void logits(Ctx& ctx, const int32_t* num_rows, int32_t max_rows, const int32_t* row_index,
              const Activations& activations, float* gathered, float* logits,
              LogitIds of_ids) const;

  // Passes the first row of every block, which predicts nothing, through the state of the Markov
  // head. Where that has no effect (BlockConfig::begins_with_state) it does nothing. Runs before
  // `logits`. `first_rows`: [max_rows] residual rows. `draft.previous` has their own tokens.
  template <class Ctx>
  void begin_chain(Ctx& ctx, const int32_t* first_rows, const ChainedDraft& draft,
                   const Activations& activations, const BlockHeadScratch& scratch,
                   float* gathered) const;

  // Adds to `logits` [max_rows, num_logits] what the Markov head says of a draft, and estimates
  // whether it will be accepted if the confidence head reads the token before it. With `drawing` it
  // also draws the draft, and leaves `logits` undefined (MarkovDraftParams). Without a Markov head
  // it must not be called.
  template <class Ctx>
  void add_markov(Ctx& ctx, const ChainedDraft& draft, const Activations& activations,
                  const BlockHeadScratch& scratch, float* logits, const DrawParams* drawing) const;

  // Right after `logits`: the candidates of all drafts, and the score of each pair of candidates of
  // two drafts, to scratch.lists. Only with a selector.
  template <class Ctx>
  void score_candidates(Ctx& ctx, const AllDrafts& drafts, const Activations& activations,
                        const float* logits, int32_t vocab_limit,
                        const BlockHeadScratch& scratch) const;

  // For the rows of `logits`, right after it: what a confidence head reads before the final norm,
  // to activations.embedded, where it stays until the next pass; and the estimates of one that
  // reads hidden states alone. `gathered` is that of `logits`. Other heads need nothing here.
  template <class Ctx>
  void estimate_drafts(Ctx& ctx, const int32_t* num_rows, int32_t max_rows,
                       const Activations& activations, const float* gathered,
                       float* probability) const;

 private:
  // scratch.e, of the token before a draft.
  template <class Ctx>
  void embed_previous(Ctx& ctx, const ChainedDraft& draft, const BlockHeadScratch& scratch) const;
  // scratch.factors of a head with Wg or Wz, and the new state of one that has it.
  template <class Ctx>
  void make_factors(Ctx& ctx, const ChainedDraft& draft, const Activations& activations,
                    const BlockHeadScratch& scratch) const;
  // The estimates for rows of `logits` from `first_row` on and, if the head reads them, the rows e
  // of W1.
  template <class Ctx>
  void estimate(Ctx& ctx, const RowCount& rows, int64_t first_row, const float* e,
                const Activations& activations, float* probability) const;
  [[nodiscard]] const std::byte* hidden_rows(const ChainedDraft& draft,
                                             const Activations& activations) const;
  // Row `row` of h [rows, hidden].
  [[nodiscard]] const std::byte* rows_from(const void* h, int64_t row, DType dtype) const;

  Decoder decoder_;
};

}  // namespace paceline
