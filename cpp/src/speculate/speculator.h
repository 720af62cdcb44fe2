// SPDX-License-Identifier: Apache-2.0
#pragma once

// The closed set of speculators behind the one draft loop. Rooms ask traits, never names.

#include <cstdint>
#include <memory>
#include <span>
#include <variant>

#include <paceline/config.h>

#include "metadata/pass_rows.h"
#include "model/decoder.h"
#include "model/draft_head.h"
#include "wire/batch_shape.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {

struct SpecTraits {
  bool drafts = false;                      // proposes anything at all
  bool owns_kv_groups = false;              // has a KV cache of its own
  bool takes_target_hidden = false;         // its first pass reads hidden states of the target
  bool feeds_hidden_back = false;           // a step hands its hidden state to the next
  bool advances_positions = false;          // each step is one position further on
  bool has_variable_draft_len = false;      // may propose fewer than k
  FirstRows first_rows = FirstRows::kNone;  // kNone: no passes, drafts come from the history
  int32_t draw_ahead = 1;                   // from a row's position to that of the token it draws
};

// Plain decoding: a verify window of width 1.
struct NoSpeculator {
  static constexpr SpecTraits kTraits{};
};

// Any decoder with the target's token ids. Its first pass runs over the last accepted token, whose
// KV is missing when the whole window was accepted, and the new one; the rest of its KV is right
// already, because an accepted draft is the token that the drafter itself has processed.
struct DraftModelSpeculator {
  static constexpr SpecTraits kTraits{.drafts = true,
                                      .owns_kv_groups = true,
                                      .advances_positions = true,
                                      .first_rows = FirstRows::kNewest};
  Decoder decoder;
};

// EAGLE and EAGLE-3: a head on the target's hidden states. Its first pass runs over the rows of the
// verify pass, since the KV that it made of its own hidden states gives way to that of the
// target's.
struct EagleSpeculator {
  static constexpr SpecTraits kTraits{.drafts = true,
                                      .owns_kv_groups = true,
                                      .takes_target_hidden = true,
                                      .feeds_hidden_back = true,
                                      .advances_positions = true,
                                      .first_rows = FirstRows::kWindow,
                                      .draw_ahead = 2};
  DraftHead head;
};

// Gemma 4 MTP: a head whose layers have no KV of their own and read the target's, up to the token
// before the newest. So its rows stay at one position while the drafts go on.
struct MtpSpeculator {
  static constexpr SpecTraits kTraits{.drafts = true,
                                      .takes_target_hidden = true,
                                      .feeds_hidden_back = true,
                                      .first_rows = FirstRows::kLast,
                                      .draw_ahead = 2};
  DraftHead head;
};

// Prompt lookup: no model; drafts are what followed the same tokens before.
struct NgramSpeculator {
  static constexpr SpecTraits kTraits{.drafts = true, .has_variable_draft_len = true};
  int32_t min_tokens = 0;
  int32_t max_tokens = 0;
};

using Speculator = std::variant<NoSpeculator, DraftModelSpeculator, EagleSpeculator, MtpSpeculator,
                                NgramSpeculator>;

static_assert(!NoSpeculator::kTraits.drafts);
static_assert(NgramSpeculator::kTraits.first_rows == FirstRows::kNone);

// Prompt lookup as options ask for it; max_tokens 0: not at all.
struct NgramOptions {
  int32_t min_tokens = 0;
  int32_t max_tokens = 0;
};

// Traits of the speculator that `draft` (null: none) and the options make.
[[nodiscard]] SpecTraits traits_for(const DecoderConfig* draft, const NgramOptions& ngram);

[[nodiscard]] inline SpecTraits traits_of(const Speculator& speculator) {
  return std::visit([](const auto& s) { return s.kTraits; }, speculator);
}

// Throws InvalidArgument, with the two values that disagree, unless `draft` can draft for `target`.
void check_drafter(const Model& draft, const Model& target);

// The speculator of a runner. `target` must outlive it.
[[nodiscard]] Speculator make_speculator(std::shared_ptr<const Model> draft,
                                         const NgramOptions& ngram, DraftPosition draft_position,
                                         const Decoder& target, const KvLayout& layout,
                                         std::byte* kv_pool, int32_t max_positions,
                                         DeviceArena& arena);

// The drafter's layers and lm_head, for planning products; null without a model.
[[nodiscard]] const Decoder* decoder_of(const Speculator& speculator);

// The head of a speculator that is one, or null.
[[nodiscard]] const DraftHead* draft_head_of(const Speculator& speculator);

// The target tokens of the drafter's logits; null: they are the same. `output` is what draft_logits
// had.
struct TokenMap {
  const int32_t* tokens = nullptr;
  int64_t stride = 0;  // between rows; 0: all rows share one
};
[[nodiscard]] TokenMap token_map(const Speculator& speculator, const DraftHeadOutput& output);

// One pass of a speculator that has passes; see Decoder and Head.
template <class Ctx>
void draft_forward(Ctx& ctx, const Speculator& speculator, const PassRows& rows,
                   std::span<const GroupMetadata> groups, const Activations& activations,
                   const DraftHeadInput& input);
template <class Ctx>
void draft_logits(Ctx& ctx, const Speculator& speculator, const int32_t* num_rows, int32_t max_rows,
                  const int32_t* row_index, const Activations& activations,
                  const DraftHeadOutput& output);

// The drafts of a speculator without passes, after acceptance.
template <class Ctx>
void propose(Ctx& ctx, const Speculator& speculator, const StagedInputs& inputs,
             const SequenceState& sequences, int32_t max_seqs);

}  // namespace paceline
