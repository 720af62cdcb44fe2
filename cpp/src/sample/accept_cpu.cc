// SPDX-License-Identifier: Apache-2.0
#include "sample/accept.h"

#include <algorithm>

#include "device/cpu_context.h"
#include "sample/philox.h"
#include "scheduler/step_plan.h"

namespace paceline {
namespace {

// Drafts kept, of `num_drafts`.
int32_t count_kept(const AcceptParams& p, int32_t slot, const int32_t* drafts, int32_t num_drafts,
                   const int32_t* draws) {
  int32_t kept = 0;
  if (p.method == AcceptMethod::kCoupled) {
    while (kept < num_drafts && draws[kept] == drafts[kept]) ++kept;
    return kept;
  }
  for (; kept < num_drafts; ++kept) {
    const NoiseKey key{.seed = p.sequences.seed[slot],
                       .stream = NoiseStream::kSynthetic,
                       .position = static_cast<uint32_t>(p.sequences.known_len[slot] + kept),
                       .salt = static_cast<uint32_t>(p.sequences.known_len[slot])};
    if (uniform_open(philox(key, 0)[0]) >= p.synthetic_rate[kept]) break;
  }
  return kept;
}

bool is_stop(const SequenceState& s, int32_t slot, int32_t token) {
  const int32_t* begin = s.stop_ids + int64_t{slot} * kMaxStopIds;
  const int32_t* end = begin + s.num_stop_ids[slot];
  return std::find(begin, end, token) != end;
}

void judge(const AcceptParams& p, int32_t slot, const int32_t* draws, int32_t num_drafts,
           SequenceResult& result) {
  const SequenceState& s = p.sequences;
  const int32_t* drafts = s.draft_tokens + int64_t{slot} * s.num_draft_tokens;
  int32_t* history = s.history + slot * s.history_stride;
  const int32_t known_len = s.known_len[slot];
  const int32_t room = s.limit[slot] - known_len;
  const int32_t kept = count_kept(p, slot, drafts, num_drafts, draws);
  // All kept up to the limit leaves no room for the token after them.
  const int32_t most = std::min(kept + 1, room);

  int32_t emitted = 0;
  while (emitted < most && result.outcome == SlotOutcome::kRunning) {
    const bool takes_draft = p.method == AcceptMethod::kSynthetic && emitted < kept;
    const int32_t token = takes_draft ? drafts[emitted] : draws[emitted];
    if (token < 0) {
      result.outcome = SlotOutcome::kNoLogits;
      break;
    }
    result.tokens[emitted] = token;
    history[known_len + emitted] = token;
    ++emitted;
    if (is_stop(s, slot, token)) result.outcome = SlotOutcome::kStop;
  }
  if (result.outcome == SlotOutcome::kRunning && emitted == room) {
    result.outcome = SlotOutcome::kLength;
  }
  result.emitted_len = emitted;
  result.accepted_len = std::min(kept, emitted);
  // A stop among the kept drafts ends the judging.
  result.drafted_len = emitted <= kept ? std::min(emitted, num_drafts) : num_drafts;
  result.discarded_len = num_drafts - result.drafted_len;
  s.known_len[slot] = known_len + emitted;
  s.is_active[slot] = result.outcome == SlotOutcome::kRunning ? 1 : 0;
}

}  // namespace

void accept(CpuContext&, const AcceptParams& p) {
  const SequenceState& s = p.sequences;
  for (int32_t i = 0; i < *p.inputs.num_seqs; ++i) {
    SequenceResult& result = p.results[i];
    result = SequenceResult{};
    const int32_t slot = p.inputs.seq_slot[i];
    const auto kind = static_cast<RowKind>(p.inputs.kind[i]);
    const bool may_emit = kind == RowKind::kDecode || kind == RowKind::kPrefillFinal;
    if (!may_emit || s.is_active[slot] == 0) continue;
    const int32_t num_drafts = kind == RowKind::kDecode ? s.draft_len[slot] : 0;
    judge(p, slot, p.target_tokens + p.inputs.logit_indptr[i], num_drafts, result);
  }
}

}  // namespace paceline
