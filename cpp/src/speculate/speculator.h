// SPDX-License-Identifier: Apache-2.0
#pragma once

// The closed set of speculators behind the one draft loop. Rooms ask traits, never names.

#include <cstdint>
#include <variant>

#include "model/decoder.h"

namespace paceline {

struct SpecTraits {
  bool drafts = false;               // proposes anything at all
  bool owns_kv_groups = false;       // has a KV cache of its own
  bool takes_target_hidden = false;  // its first pass reads hidden states of the target
  bool feeds_hidden_back = false;    // a step hands its hidden state to the next
  bool advances_positions = false;   // each step is one position further on
  bool has_variable_draft_len = false;  // may propose fewer than k
  int32_t first_rows_per_decode = 0;    // rows of a decoding sequence in its first pass
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
                                      .first_rows_per_decode = 2};
  Decoder decoder;
};

using Speculator = std::variant<NoSpeculator, DraftModelSpeculator>;

static_assert(!NoSpeculator::kTraits.drafts && NoSpeculator::kTraits.first_rows_per_decode == 0);
static_assert(DraftModelSpeculator::kTraits.first_rows_per_decode == 2);

[[nodiscard]] inline SpecTraits traits_of(const Speculator& speculator) {
  return std::visit([](const auto& s) { return s.kTraits; }, speculator);
}

}  // namespace paceline
