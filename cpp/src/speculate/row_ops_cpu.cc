// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "device/cpu_context.h"
#include "scheduler/step_plan.h"
#include "speculate/row_ops.h"

namespace paceline {
namespace {

void set_row(const PassRows& rows, int32_t row, bool is_live, int32_t seq_slot, int32_t position,
             int32_t token) {
  rows.seq_slot[row] = is_live ? seq_slot : -1;
  rows.positions[row] = is_live ? position : 0;
  rows.token_ids[row] = is_live ? token : 0;
}

}  // namespace

void assemble_verify_rows(CpuContext&, const AssembleVerifyRowsParams& p) {
  const SequenceState& s = p.sequences;
  *p.rows.num_rows = *p.inputs.num_verify_rows;
  for (int32_t i = 0; i < *p.inputs.num_seqs; ++i) {
    const int32_t slot = p.inputs.seq_slot[i];
    const int32_t begin = p.inputs.verify_indptr[i];
    const int32_t num_rows = p.inputs.verify_indptr[i + 1] - begin;
    int32_t* history = s.history + slot * s.history_stride;
    if (p.inputs.kind[i] == static_cast<int32_t>(RowKind::kDecode)) {
      const int32_t known_len = s.known_len[slot];
      const int32_t* drafts = s.draft_tokens + int64_t{slot} * s.num_draft_tokens;
      for (int32_t r = 0; r < num_rows; ++r) {
        const bool is_live = s.is_active[slot] != 0 && r <= s.draft_len[slot] &&
                             known_len + r < s.limit[slot];
        const int32_t token = r == 0 ? history[known_len - 1] : drafts[r - 1];
        set_row(p.rows, begin + r, is_live, slot, known_len - 1 + r, token);
      }
    } else {
      const int32_t start = p.inputs.prefill_start[i];
      for (int32_t r = 0; r < num_rows; ++r) {
        const int32_t token = p.inputs.prefill_tokens[begin + r];
        history[start + r] = token;
        set_row(p.rows, begin + r, s.is_active[slot] != 0, slot, start + r, token);
      }
      s.known_len[slot] = start + num_rows;
      s.draft_len[slot] = 0;
    }
  }
}

void assemble_first_rows(CpuContext&, const AssembleFirstRowsParams& p) {
  const SequenceState& s = p.sequences;
  *p.rows.num_rows = *p.inputs.num_first_rows;
  for (int32_t i = 0; i < *p.inputs.num_seqs; ++i) {
    const int32_t slot = p.inputs.seq_slot[i];
    const int32_t begin = p.inputs.first_indptr[i];
    const int32_t num_rows = p.inputs.first_indptr[i + 1] - begin;
    const int32_t first = s.known_len[slot] - num_rows;
    const int32_t* history = s.history + slot * s.history_stride;
    for (int32_t r = 0; r < num_rows; ++r) {
      const bool is_live = s.is_active[slot] != 0;
      set_row(p.rows, begin + r, is_live, slot, first + r, is_live ? history[first + r] : 0);
    }
  }
}

void begin_draft_steps(CpuContext&, const BeginDraftStepsParams& p) {
  const SequenceState& s = p.sequences;
  const int32_t num_drafting = *p.inputs.num_drafting;
  *p.rows.num_rows = num_drafting;
  for (int32_t i = 0; i < num_drafting; ++i) {
    const int32_t slot = p.inputs.seq_slot[i];
    const int32_t known_len = s.known_len[slot];
    const int32_t room = s.limit[slot] - known_len;  // tokens that may still come
    const bool is_active = s.is_active[slot] != 0;
    s.draft_len[slot] = is_active ? std::clamp(room, 0, s.num_draft_tokens) : 0;
    if (is_active) s.draft_tokens[int64_t{slot} * s.num_draft_tokens] = p.drawn[i];
    set_row(p.rows, i, is_active && known_len + 1 < s.limit[slot], slot, known_len, p.drawn[i]);
  }
  *p.current_draft_step = 1;
}

void store_draft(CpuContext&, const StoreDraftParams& p) {
  const SequenceState& s = p.sequences;
  const int32_t column = *p.current_draft_step;
  for (int32_t i = 0; i < *p.rows.num_rows; ++i) {
    const int32_t slot = p.rows.seq_slot[i];
    if (slot >= 0) s.draft_tokens[int64_t{slot} * s.num_draft_tokens + column] = p.drawn[i];
  }
}

}  // namespace paceline
