// SPDX-License-Identifier: Apache-2.0

// One warp per sequence; lane j judges draft j. A lane loads its target token, draft and stop token
// at once, and judge(), which the CPU shares, gets the lanes' findings as bits. Sequences are
// independent of each other.

#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "sample/accept.h"
#include "sample/judge.h"
#include "wire/batch_shape.h"
#include "wire/limits.h"
#include "wire/sequence_result.h"
#include "wire/sequence_state.h"

namespace paceline {
namespace cuda {
namespace {

static_assert(kMaxDraftTokens + 1 <= 32 && kMaxStopIds <= 32);

__global__ void __launch_bounds__(32) accept_kernel(const __grid_constant__ AcceptParams p) {
  let_successor_start();
  wait_for_predecessor();
  const SequenceState& s = p.sequences;
  const int32_t i = static_cast<int32_t>(blockIdx.x);
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  if (i >= p.inputs.counts->num_seqs) return;
  const int32_t seq_slot = p.inputs.seq_slot[i];
  const auto kind = static_cast<RowKind>(p.inputs.kind[i]);
  const int32_t first_logit = p.inputs.logit_indptr[i];
  const int32_t num_logits = p.inputs.logit_indptr[i + 1] - first_logit;

  const bool is_active = s.is_active[seq_slot] != 0;
  const int32_t known_len = s.known_len[seq_slot];
  const int32_t room = s.limit[seq_slot] - known_len;
  const int32_t draft_len = s.draft_len[seq_slot];
  const auto source = static_cast<DraftSource>(s.draft_source[seq_slot]);
  const uint64_t seed = s.seed[seq_slot];
  const int32_t num_stop_ids = s.num_stop_ids[seq_slot];
  const int32_t stop_id = lane < kMaxStopIds ? s.stop_ids[seq_slot * kMaxStopIds + lane] : 0;
  const int32_t draw = lane < num_logits ? p.target_tokens[first_logit + lane] : -1;
  const int32_t draft = lane < s.num_draft_tokens
                            ? s.draft_tokens[int64_t{seq_slot} * s.num_draft_tokens + lane]
                            : -1;

  SequenceResult& result = p.results[i];
  const bool may_emit = kind == RowKind::kDecode || kind == RowKind::kPrefillFinal;
  if (!may_emit || !is_active) {
    if (lane == 0) result = SequenceResult{};
    return;
  }
  const int32_t num_drafts = kind == RowKind::kDecode ? min(draft_len, num_logits - 1) : 0;
  bool is_accepted = false;
  if (lane < num_drafts) {
    is_accepted = p.num_accepted != nullptr ? lane < p.num_accepted[i]
                  : p.method == AcceptMethod::kSynthetic
                      ? is_accepted_synthetically(seed, known_len, lane, p.synthetic_rate[lane])
                      : draw == draft;
  }
  // The drafts before the first rejected one; a lane without a draft counts as a rejection.
  const int32_t num_accepted = __ffs(static_cast<int>(~__ballot_sync(kAllLanes, is_accepted))) - 1;
  const int32_t recovered_token = p.num_accepted != nullptr ? p.recovered_tokens[i] : -1;
  const bool emits_drafts = p.num_accepted != nullptr || p.method == AcceptMethod::kSynthetic;
  const int32_t token = emits_drafts && lane < num_accepted            ? draft
                        : lane == num_accepted && recovered_token >= 0 ? recovered_token
                                                                       : draw;
  bool is_stop = false;
  for (int32_t j = 0; j < num_stop_ids; ++j) {
    is_stop |= token == __shfl_sync(kAllLanes, stop_id, j);
  }
  const Verdict verdict = judge(num_accepted, num_drafts, room, __ballot_sync(kAllLanes, token < 0),
                                __ballot_sync(kAllLanes, is_stop));

  const bool is_emitted = lane < verdict.emitted_len;
  if (lane < kMaxDraftTokens + 1) result.tokens[lane] = is_emitted ? token : 0;
  if (is_emitted) s.history[seq_slot * s.history_stride + known_len + lane] = token;
  if (lane == 0) {
    result.emitted_len = verdict.emitted_len;
    result.accepted_len = verdict.accepted_len;
    result.drafted_len = verdict.drafted_len;
    result.discarded_len = verdict.discarded_len;
    result.source = source;
    result.outcome = verdict.outcome;
    s.known_len[seq_slot] = known_len + verdict.emitted_len;
    s.is_active[seq_slot] = verdict.outcome == SequenceOutcome::kRunning ? 1 : 0;
    s.draft_len[seq_slot] = 0;
    s.draft_source[seq_slot] = static_cast<int32_t>(DraftSource::kModel);
  }
}

}  // namespace
}  // namespace cuda

void accept(CudaContext& ctx, const AcceptParams& p) {
  cuda::launch(ctx, "accept", cuda::accept_kernel, dim3(static_cast<unsigned>(p.max_seqs)),
               dim3(32), 0, p);
}

}  // namespace paceline
