// SPDX-License-Identifier: Apache-2.0
#pragma once

// The op calls that `standard` and `block` acceptance add to an iteration, beside the coupled one
// in graph/iteration.h.

#include <cstdint>

#include <paceline/config.h>

#include "device/device_arena.h"
#include "metadata/pass_rows.h"
#include "ops/ops.h"
#include "sample/reject.h"
#include "wire/batch_shape.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {

// Proposals of a draft where nobody says how many.
inline constexpr int32_t kDefaultDraftProposals = 64;

struct RejectionBuffers {
  Proposals proposals{};                  // empty where drafts are certain
  int32_t* proposal_rows = nullptr;       // [max_seqs] where the running step's lie
  float* highest = nullptr;               // [max_logit_rows] see softmax_sums
  uint64_t* sums = nullptr;               // [max_logit_rows]
  int32_t* num_accepted = nullptr;        // [max_seqs] see reject_drafts
  int32_t* residual_rows = nullptr;       // [max_seqs]
  int32_t* residual_pass_rows = nullptr;  // [max_seqs]
  int32_t* recovered_tokens = nullptr;    // [max_seqs] drawn from the residual rows

  [[nodiscard]] bool is_used() const { return num_accepted != nullptr; }
};

// Empty for other methods, and where nothing is drafted. `samples_drafts`: drafts have laws that
// are kept; `num_proposals`: tokens of each, 0 for kDefaultDraftProposals.
[[nodiscard]] RejectionBuffers allocate_rejection(DeviceArena& arena, const BatchShape& shape,
                                                  AcceptMethod method, bool samples_drafts,
                                                  int32_t num_proposals);

// How a draft is drawn, where the target's noise would draw it by `coupled`: from its proposals,
// which are selected first, with noise of its own; or, without proposals, the likeliest token.
// `steps` [1]: drafts of the window so far; null: none. The sequences' known_len is that at the
// start of the window.
template <class Ctx>
[[nodiscard]] DrawParams propose_draft(Ctx& ctx, const RejectionBuffers& b,
                                       const SequenceState& sequences, const DrawParams& coupled,
                                       const int32_t* steps);

// The verify pass whose target tokens have been drawn.
struct VerifiedWindows {
  StagedInputs inputs;
  SequenceState sequences;
  PassRows rows;
  AcceptMethod method;
  const int32_t* target_tokens;  // [max_logit_rows]
  float* logits;                 // [max_logit_rows, vocab_size] what was drawn from; updated
  int32_t vocab_size;
  int32_t num_logit_rows;  // at most
  int32_t num_seqs;        // at most
};
// The verdict: kept and recovered_tokens, for accept.
template <class Ctx>
void reject(Ctx& ctx, const RejectionBuffers& b, const VerifiedWindows& windows);

}  // namespace paceline
