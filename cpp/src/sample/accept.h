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

// The verdict, and the only writer of what a sequence has become: drafts are kept while they equal
// the target's own draws (coupled acceptance; Daliri, Musco, Suresh, "Coupling without
// communication and drafter-invariant speculative decoding", 2024), then one more target token
// follows. A plain decode is the same with no drafts. Cut at the first stop token and at the limit.
//
// kStandard and kBlock: reject_drafts has counted the drafts that are kept, and they are emitted as
// they are. The token after them is the recovered_token drawn from what is left of the target's law
// where there is one, else the target's own draw.
//
// kSynthetic: the verdict is overridden; draft j is kept with probability synthetic_rate[j] given
// that all before it were, and kept drafts are emitted as they are.
struct AcceptParams {
  StagedInputs inputs;
  SequenceState sequences;
  const int32_t* target_tokens;  // [max_logit_rows] the target's draws; see DrawParams
  SequenceResult* results;       // [max_seqs] by batch row
  int32_t max_seqs;              // of this pass
  AcceptMethod method;
  const int32_t* num_accepted = nullptr;  // [max_seqs] by batch row; kStandard and kBlock only
  const int32_t* recovered_tokens =
      nullptr;  // [max_seqs] with `num_accepted`: tokens; below 0: none
  float synthetic_rate[kMaxDraftTokens];
};
void accept(CpuContext&, const AcceptParams&);
void accept(CudaContext&, const AcceptParams&);

}  // namespace paceline
