// SPDX-License-Identifier: Apache-2.0
#pragma once

// The closed set of speculators behind the draft loop. Other rooms ask for traits and never for the
// type of a speculator.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <variant>

#include <paceline/config.h>

#include "metadata/pass_rows.h"
#include "model/forward/block_drafter.h"
#include "model/forward/decoder.h"
#include "model/forward/draft_head.h"
#include "wire/batch_shape.h"
#include "wire/draft_source.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {

struct SpecTraits {
  bool drafts = false;                      // proposes drafts
  bool owns_kv_groups = false;              // has its own KV cache
  bool kv_looks_ahead = false;              // its KV at a position depends on the next token, too
  bool takes_target_hidden = false;         // its first pass reads hidden states of the target
  bool feeds_hidden_back = false;           // a draft step passes its hidden state to the next
  bool advances_positions = false;          // each draft step is one position further
  bool has_variable_draft_len = false;      // may propose fewer than k drafts
  bool drafts_in_blocks = false;            // one pass makes all drafts; there are no draft steps
  FirstRows first_rows = FirstRows::kNone;  // kNone: no passes, drafts are copied from the history
  // Distance from a row's position to that of the token it draws.
  int32_t draw_ahead = 1;
};

// Plain decoding: a verify window of width 1.
struct NoSpeculator {
  static constexpr SpecTraits kTraits{};
};

// A draft model: any decoder with the target's token ids. Its first pass runs over the last
// accepted token, whose KV is missing if the whole window was accepted, and the new token. The rest
// of its KV is already correct, because every accepted draft is a token that the drafter itself has
// processed. Behind prompt lookup it runs over all tokens of the window (BatchShape).
struct DraftModelSpeculator {
  static constexpr SpecTraits kTraits{.drafts = true,
                                      .owns_kv_groups = true,
                                      .advances_positions = true,
                                      .first_rows = FirstRows::kNewest};
  Decoder decoder;
};

// EAGLE, EAGLE-3 and MTP: a draft head on the target's hidden states. Its first pass runs over the
// rows of the verify pass, because KV that the draft head computed from its own hidden states is
// overwritten by KV from the target's.
struct EagleSpeculator {
  static constexpr SpecTraits kTraits{.drafts = true,
                                      .owns_kv_groups = true,
                                      .kv_looks_ahead = true,
                                      .takes_target_hidden = true,
                                      .feeds_hidden_back = true,
                                      .advances_positions = true,
                                      .first_rows = FirstRows::kWindow,
                                      .draw_ahead = 2};
  DraftHead head;
};

// DFlash and DSpark: a drafter that makes all drafts in one pass over a block of rows. Its KV of
// known tokens comes from the target's hidden states; that of a block is overwritten by the next
// one.
struct BlockSpeculator {
  static constexpr SpecTraits kTraits{.drafts = true,
                                      .owns_kv_groups = true,
                                      .takes_target_hidden = true,
                                      .drafts_in_blocks = true,
                                      .first_rows = FirstRows::kWindow};
  BlockDrafter drafter;
};

// Gemma 4 MTP: a draft head whose layers have no KV of their own and read the target's KV, up to
// the token before the newest. Therefore its rows stay at one position while it drafts.
struct Gemma4MtpSpeculator {
  static constexpr SpecTraits kTraits{.drafts = true,
                                      .takes_target_hidden = true,
                                      .feeds_hidden_back = true,
                                      .first_rows = FirstRows::kLast,
                                      .draw_ahead = 2};
  DraftHead head;
};

// Prompt lookup: there is no model; drafts are the tokens that followed the same tokens earlier.
struct NgramSpeculator {
  static constexpr SpecTraits kTraits{.drafts = true, .has_variable_draft_len = true};
  int32_t min_tokens = 0;
  int32_t max_tokens = 0;
};

// A function of the caller: the host writes its drafts to the sequence slot before the verify pass.
struct HostSpeculator {
  static constexpr SpecTraits kTraits{.drafts = true, .has_variable_draft_len = true};
};

using Speculator =
    std::variant<NoSpeculator, DraftModelSpeculator, EagleSpeculator, Gemma4MtpSpeculator,
                 BlockSpeculator, NgramSpeculator, HostSpeculator>;

static_assert(!NoSpeculator::kTraits.drafts);
static_assert(NgramSpeculator::kTraits.first_rows == FirstRows::kNone);

// The options of prompt lookup; max_tokens 0: disabled.
struct NgramOptions {
  int32_t min_tokens = 0;
  int32_t max_tokens = 0;
};

// What drafts where no model does.
struct ModelFreeOptions {
  NgramOptions ngram;
  bool drafts_on_host = false;
};
[[nodiscard]] ModelFreeOptions model_free_options(const SpeculativeOptions& options);

// Traits of the speculator that `draft` (null: no model) and the options select.
[[nodiscard]] SpecTraits traits_for(const DecoderConfig* draft, const ModelFreeOptions& model_free);

// A way to draft, under its name in Python.
struct DraftMethod {
  std::string_view name;  // "": nothing drafts
  SpecTraits traits;
};

// The method of a name; nullopt: there is none.
[[nodiscard]] std::optional<DraftMethod> draft_method(std::string_view name);

// The method that `draft` (null: no model) and the options select.
[[nodiscard]] DraftMethod draft_method(const DecoderConfig* draft,
                                       const ModelFreeOptions& model_free);

// The methods of all sources of drafts: two where prompt lookup stands in front of a model.
[[nodiscard]] SourceMethods source_methods(const DecoderConfig* draft,
                                           const ModelFreeOptions& model_free);

[[nodiscard]] inline SpecTraits traits_of(const Speculator& speculator) {
  return std::visit([](const auto& s) { return s.kTraits; }, speculator);
}

// Throws InvalidArgument, naming the two values that disagree, unless `draft` can draft for
// `target`.
void check_drafter(const Model& draft, const Model& target);

// Makes the speculator of a runner. `target` must outlive it.
[[nodiscard]] Speculator make_speculator(std::shared_ptr<const Model> draft,
                                         const ModelFreeOptions& model_free,
                                         DraftPosition draft_position, const Decoder& target,
                                         const KvLayout& layout, std::byte* kv_pool,
                                         int32_t max_positions, DeviceArena& arena);

// The drafter's decoder, whose matrix products are planned; null without a model.
[[nodiscard]] const Decoder* decoder_of(const Speculator& speculator);

// The draft head of a speculator, or null if it has none.
[[nodiscard]] const DraftHead* draft_head_of(const Speculator& speculator);

// The drafter of a speculator that drafts in blocks, or null.
[[nodiscard]] const BlockDrafter* block_drafter_of(const Speculator& speculator);

// The target token of each of the drafter's logits; null: index and token are the same. `output` is
// the one passed to draft_logits.
struct TokenMap {
  const int32_t* tokens = nullptr;
  int64_t stride = 0;  // distance between the maps of two rows; 0: all rows share one
};
[[nodiscard]] TokenMap token_map(const Speculator& speculator, const DraftHeadOutput& output);

// One pass of a speculator that has passes; see Decoder and DraftHead.
template <class Ctx>
void draft_forward(Ctx& ctx, const Speculator& speculator, const PassRows& rows,
                   std::span<const GroupMetadata> groups, const Activations& activations,
                   const DraftHeadInput& input);
template <class Ctx>
void draft_logits(Ctx& ctx, const Speculator& speculator, const int32_t* num_rows, int32_t max_rows,
                  const int32_t* row_index, const Activations& activations,
                  const DraftHeadOutput& output, LogitIds of_ids);

// Makes the drafts of a speculator without passes, after acceptance.
template <class Ctx>
void propose(Ctx& ctx, const Speculator& speculator, const StagedInputs& inputs,
             const SequenceState& sequences, int32_t max_seqs);

}  // namespace paceline
