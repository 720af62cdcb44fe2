// SPDX-License-Identifier: Apache-2.0
#include "sample/accept.h"

#include <algorithm>

#include "device/cpu_context.h"
#include "sample/judge.h"
#include "scheduler/step_plan.h"

namespace paceline {
namespace {

// Drafts kept, of `num_drafts`, of batch row i.
int32_t count_kept(const AcceptParams& p, int32_t i, int32_t slot, const int32_t* drafts,
                   int32_t num_drafts, const int32_t* draws) {
  if (p.kept != nullptr) return p.kept[i];
  const SequenceState& s = p.sequences;
  int32_t kept = 0;
  if (p.method != AcceptMethod::kSynthetic) {
    while (kept < num_drafts && draws[kept] == drafts[kept]) ++kept;
  } else {
    while (kept < num_drafts &&
           keeps_synthetically(s.seed[slot], s.known_len[slot], kept, p.synthetic_rate[kept])) {
      ++kept;
    }
  }
  return kept;
}

bool is_stop(const SequenceState& s, int32_t slot, int32_t token) {
  const int32_t* begin = s.stop_ids + int64_t{slot} * kMaxStopIds;
  const int32_t* end = begin + s.num_stop_ids[slot];
  return std::find(begin, end, token) != end;
}

void accept_one(const AcceptParams& p, int32_t i, int32_t slot, const int32_t* draws,
                int32_t num_drafts, SequenceResult& result) {
  const SequenceState& s = p.sequences;
  const int32_t* drafts = s.draft_tokens + int64_t{slot} * s.num_draft_tokens;
  const int32_t known_len = s.known_len[slot];
  const int32_t kept = count_kept(p, i, slot, drafts, num_drafts, draws);
  const int32_t replacement = p.kept != nullptr ? p.replacements[i] : -1;
  const bool emits_drafts = p.kept != nullptr || p.method == AcceptMethod::kSynthetic;
  int32_t tokens[kMaxDraftTokens + 1];
  uint32_t invalid_bits = 0;
  uint32_t stop_bits = 0;
  for (int32_t j = 0; j <= kept; ++j) {
    tokens[j] = emits_drafts && j < kept        ? drafts[j]
                : j == kept && replacement >= 0 ? replacement
                                                : draws[j];
    invalid_bits |= uint32_t{tokens[j] < 0} << j;
    stop_bits |= uint32_t{is_stop(s, slot, tokens[j])} << j;
  }
  const int32_t room = s.limit[slot] - known_len;
  const Verdict verdict = judge(kept, num_drafts, room, invalid_bits, stop_bits);
  result.emitted_len = verdict.emitted_len;
  result.accepted_len = verdict.accepted_len;
  result.drafted_len = verdict.drafted_len;
  result.discarded_len = verdict.discarded_len;
  result.outcome = verdict.outcome;
  std::copy_n(tokens, verdict.emitted_len, result.tokens);
  std::copy_n(tokens, verdict.emitted_len, s.history + slot * s.history_stride + known_len);
  s.known_len[slot] = known_len + verdict.emitted_len;
  s.is_active[slot] = verdict.outcome == SlotOutcome::kRunning ? 1 : 0;
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
    accept_one(p, i, slot, p.target_tokens + p.inputs.logit_indptr[i], num_drafts, result);
  }
}

}  // namespace paceline
