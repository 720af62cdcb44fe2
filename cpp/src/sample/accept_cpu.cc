// SPDX-License-Identifier: Apache-2.0
#include "sample/accept.h"

#include <algorithm>

#include "device/cpu_context.h"
#include "sample/judge.h"
#include "wire/batch_shape.h"
#include "wire/limits.h"
#include "wire/sequence_result.h"
#include "wire/sequence_state.h"

namespace paceline {
namespace {

// Number of accepted drafts among the `num_drafts` of batch row i.
int32_t count_accepted(const AcceptParams& p, int32_t i, int32_t seq_slot, const int32_t* drafts,
                       int32_t num_drafts, const int32_t* draws) {
  if (p.num_accepted != nullptr) return p.num_accepted[i];
  const SequenceState& s = p.sequences;
  int32_t num_accepted = 0;
  if (p.method != AcceptMethod::kSynthetic) {
    while (num_accepted < num_drafts && draws[num_accepted] == drafts[num_accepted]) ++num_accepted;
  } else {
    while (num_accepted < num_drafts &&
           is_accepted_synthetically(s.seed[seq_slot], s.known_len[seq_slot], num_accepted,
                                     p.synthetic_rate[num_accepted])) {
      ++num_accepted;
    }
  }
  return num_accepted;
}

bool is_stop(const SequenceState& s, int32_t seq_slot, int32_t token) {
  const int32_t* begin = s.stop_ids + int64_t{seq_slot} * kMaxStopIds;
  const int32_t* end = begin + s.num_stop_ids[seq_slot];
  return std::find(begin, end, token) != end;
}

void accept_one(const AcceptParams& p, int32_t i, int32_t seq_slot, const int32_t* draws,
                int32_t num_drafts, SequenceResult& result) {
  const SequenceState& s = p.sequences;
  const int32_t* drafts = s.draft_tokens + int64_t{seq_slot} * s.num_draft_tokens;
  const int32_t known_len = s.known_len[seq_slot];
  const int32_t num_accepted = count_accepted(p, i, seq_slot, drafts, num_drafts, draws);
  const int32_t recovered_token = p.num_accepted != nullptr ? p.recovered_tokens[i] : -1;
  const bool emits_drafts = p.num_accepted != nullptr || p.method == AcceptMethod::kSynthetic;
  int32_t tokens[kMaxDraftTokens + 1];
  uint32_t invalid_bits = 0;
  uint32_t stop_bits = 0;
  for (int32_t j = 0; j <= num_accepted; ++j) {
    tokens[j] = emits_drafts && j < num_accepted            ? drafts[j]
                : j == num_accepted && recovered_token >= 0 ? recovered_token
                                                            : draws[j];
    invalid_bits |= uint32_t{tokens[j] < 0} << j;
    stop_bits |= uint32_t{is_stop(s, seq_slot, tokens[j])} << j;
  }
  const int32_t room = s.limit[seq_slot] - known_len;
  const Verdict verdict = judge(num_accepted, num_drafts, room, invalid_bits, stop_bits);
  result.emitted_len = verdict.emitted_len;
  result.accepted_len = verdict.accepted_len;
  result.drafted_len = verdict.drafted_len;
  result.discarded_len = verdict.discarded_len;
  result.outcome = verdict.outcome;
  std::copy_n(tokens, verdict.emitted_len, result.tokens);
  std::copy_n(tokens, verdict.emitted_len, s.history + seq_slot * s.history_stride + known_len);
  s.known_len[seq_slot] = known_len + verdict.emitted_len;
  s.is_active[seq_slot] = verdict.outcome == SequenceOutcome::kRunning ? 1 : 0;
}

}  // namespace

void accept(CpuContext&, const AcceptParams& p) {
  const SequenceState& s = p.sequences;
  for (int32_t i = 0; i < p.inputs.counts->num_seqs; ++i) {
    SequenceResult& result = p.results[i];
    result = SequenceResult{};
    const int32_t seq_slot = p.inputs.seq_slot[i];
    const auto kind = static_cast<RowKind>(p.inputs.kind[i]);
    const bool may_emit = kind == RowKind::kDecode || kind == RowKind::kPrefillFinal;
    if (!may_emit || s.is_active[seq_slot] == 0) continue;
    const int32_t num_rows = p.inputs.logit_indptr[i + 1] - p.inputs.logit_indptr[i];
    const int32_t num_drafts =
        kind == RowKind::kDecode ? std::min(s.draft_len[seq_slot], num_rows - 1) : 0;
    accept_one(p, i, seq_slot, p.target_tokens + p.inputs.logit_indptr[i], num_drafts, result);
    result.source = static_cast<DraftSource>(s.draft_source[seq_slot]);
    s.draft_len[seq_slot] = 0;
    s.draft_source[seq_slot] = static_cast<int32_t>(DraftSource::kModel);
  }
}

}  // namespace paceline
