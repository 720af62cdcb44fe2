// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <paceline/config.h>

#include "wire/limits.h"
#include "wire/sequence_result.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {

struct CpuContext;
struct CudaContext;

// Acceptance: decides how many drafts each sequence accepts. It is the only op that writes a
// sequence's output and that ends a sequence. A draft is accepted while it equals the token that
// the target itself drew (coupled acceptance; Daliri, Musco, Suresh, "Coupling without
// communication and drafter-invariant speculative decoding", 2024). One more token of the target
// follows. A plain decode is the same with no drafts. The op cuts the output at the first stop
// token and at the limit. Drafts beyond the rows of the window are dropped: the host may lay out
// fewer than were made.
//
// kStandard and kBlock: reject_drafts has counted the accepted drafts, and they are emitted
// unchanged. The token after them is the recovered token, drawn from the residual distribution, if
// there is one; otherwise it is the target's own draw.
//
// kSynthetic: overrides the verdict. Draft j is accepted with probability synthetic_rate[j], given
// that all drafts before it were, and accepted drafts are emitted unchanged.
struct AcceptParams {
  StagedInputs inputs;
  SequenceState sequences;
  const int32_t* target_tokens;  // [max_logit_rows] tokens that the target drew; see DrawParams
  SequenceResult* results;       // [max_seqs] by batch row
  int32_t max_seqs;              // in this pass
  AcceptMethod method;
  const int32_t* num_accepted = nullptr;  // [max_seqs] by batch row; kStandard and kBlock only
  // [max_seqs] used with `num_accepted`: recovered tokens; negative: none.
  const int32_t* recovered_tokens = nullptr;
  float synthetic_rate[kMaxDraftTokens];
};
void accept(CpuContext&, const AcceptParams&);
void accept(CudaContext&, const AcceptParams&);

}  // namespace paceline
