// SPDX-License-Identifier: Apache-2.0
#pragma once

// The op calls that `standard` and `block` acceptance add to an iteration. Coupled acceptance needs
// only those in graph/iteration.h.

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

// Proposals per draft if draft_proposals is 0.
inline constexpr int32_t kDefaultDraftProposals = 64;

struct RejectionBuffers {
  Proposals proposals{};  // empty if drafts are not sampled, so that their probability is 1
  int32_t* proposal_rows = nullptr;  // [max_seqs] rows of `proposals` that the running pass writes
  float* highest = nullptr;          // [max_logit_rows] see softmax_sums
  uint64_t* sums = nullptr;          // [max_logit_rows]
  int32_t* num_accepted = nullptr;   // [max_seqs] see reject_drafts
  int32_t* residual_rows = nullptr;  // [max_seqs]
  int32_t* residual_pass_rows = nullptr;  // [max_seqs]
  int32_t* recovered_tokens = nullptr;    // [max_seqs] drawn from the residual rows

  [[nodiscard]] bool is_used() const { return num_accepted != nullptr; }
};

// The buffers are empty for other methods, and if nothing is drafted. `samples_drafts`: drafts are
// sampled, so their distributions are stored. `num_proposals`: tokens per draft distribution; 0 for
// kDefaultDraftProposals.
[[nodiscard]] RejectionBuffers allocate_rejection(DeviceArena& arena, const BatchShape& shape,
                                                  AcceptMethod method, bool samples_drafts,
                                                  int32_t num_proposals);

// Returns the params that replace `coupled`, which would draw the draft with the target's noise.
// With proposals, this selects them first; the draft is then drawn from them with noise of its own
// stream. Without proposals, the draft is the most probable token. `steps` [1]: number of drafts of
// the window so far; null: 0. The sequences' known_len is that at the start of the window.
template <class Ctx>
[[nodiscard]] DrawParams propose_draft(Ctx& ctx, const RejectionBuffers& b,
                                       const SequenceState& sequences, const DrawParams& coupled,
                                       const int32_t* steps);

// A verify pass after the target's tokens have been drawn.
struct VerifiedWindows {
  StagedInputs inputs;
  SequenceState sequences;
  PassRows rows;
  AcceptMethod method;
  const int32_t* target_tokens;  // [max_logit_rows]
  float* logits;  // [max_logit_rows, vocab_size] those of the draws; updated in place
  int32_t vocab_size;
  int32_t num_logit_rows;  // upper bound
  int32_t num_seqs;        // upper bound
};
// Writes num_accepted and recovered_tokens, which `accept` reads.
template <class Ctx>
void reject(Ctx& ctx, const RejectionBuffers& b, const VerifiedWindows& windows);

}  // namespace paceline
