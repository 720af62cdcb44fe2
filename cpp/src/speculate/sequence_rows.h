// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the row ops handle one sequence of the batch: the single specification that the CPU loops
// over and CUDA threads run. Sequences own different sequence slots and rows, so they may be
// handled in parallel. If a sequence may have many rows, worker `worker` of `num_workers` handles
// every num_workers-th row. No worker reads what another one writes.

#include <cstdint>

#include "base/host_device.h"
#include "metadata/pass_rows.h"
#include "speculate/row_ops.h"
#include "wire/batch_shape.h"
#include "wire/sequence_state.h"

namespace paceline {

PACELINE_HOST_DEVICE inline void set_row(const PassRows& rows, int32_t row, bool is_live,
                                         int32_t seq_slot, int32_t position, int32_t token) {
  rows.seq_slot[row] = is_live ? seq_slot : -1;
  rows.positions[row] = is_live ? position : 0;
  rows.token_ids[row] = is_live ? token : 0;
}

PACELINE_HOST_DEVICE inline void assemble_verify_sequence(const AssembleVerifyRowsParams& p,
                                                          int32_t i, int32_t worker,
                                                          int32_t num_workers) {
  const SequenceState& s = p.sequences;
  const int32_t seq_slot = p.inputs.seq_slot[i];
  const int32_t begin = p.inputs.verify_indptr[i];
  const int32_t num_rows = p.inputs.verify_indptr[i + 1] - begin;
  const int32_t kind = p.inputs.kind[i];
  const int32_t start = p.inputs.prefill_start[i];
  const bool is_active = s.is_active[seq_slot] != 0;
  int32_t* history = s.history + seq_slot * s.history_stride;
  if (worker == 0) {
    const int32_t num_drafts = p.inputs.num_drafts[i];
    s.max_drafts[seq_slot] = num_drafts > 0 ? num_drafts : 0;
  }
  if (kind == static_cast<int32_t>(RowKind::kDecode)) {
    const int32_t known_len = s.known_len[seq_slot];
    const int32_t draft_len = s.draft_len[seq_slot];
    const int32_t limit = s.limit[seq_slot];
    const int32_t* drafts = s.draft_tokens + int64_t{seq_slot} * s.num_draft_tokens;
    for (int32_t r = worker; r < num_rows; r += num_workers) {
      const bool is_live = is_active && r <= draft_len && known_len + r < limit;
      const int32_t token = r == 0 ? history[known_len - 1] : drafts[r - 1];
      set_row(p.rows, begin + r, is_live, seq_slot, known_len - 1 + r, token);
    }
    return;
  }
  for (int32_t r = worker; r < num_rows; r += num_workers) {
    const int32_t token = p.inputs.prefill_tokens[begin + r];
    history[start + r] = token;
    set_row(p.rows, begin + r, is_active, seq_slot, start + r, token);
  }
  if (worker == 0) {
    s.known_len[seq_slot] = start + num_rows;
    s.draft_len[seq_slot] = 0;
  }
}

PACELINE_HOST_DEVICE inline void assemble_first_sequence(const AssembleFirstRowsParams& p,
                                                         int32_t i, int32_t worker,
                                                         int32_t num_workers) {
  const SequenceState& s = p.sequences;
  const int32_t seq_slot = p.inputs.seq_slot[i];
  const int32_t begin = p.inputs.first_indptr[i];
  const int32_t num_rows = p.inputs.first_indptr[i + 1] - begin;
  const int32_t known_len = s.known_len[seq_slot];
  const bool is_active = s.is_active[seq_slot] != 0;
  const bool is_decode = p.inputs.kind[i] == static_cast<int32_t>(RowKind::kDecode);
  const int32_t* history = s.history + seq_slot * s.history_stride;
  // Row r is at position first + r and holds the token `ahead` positions later. Rows of a chunk are
  // live even if their sequence has just ended: another sequence may fork from the KV that they
  // write.
  int32_t first = p.inputs.prefill_start[i];
  int32_t num_live = num_rows;
  int32_t window_position = 0;  // of row window_begin of the verify pass
  const int32_t window_begin = p.inputs.verify_indptr[i];
  const int32_t num_window_rows = p.inputs.verify_indptr[i + 1] - window_begin;
  const int32_t ahead = p.first_rows == FirstRows::kNewest ? 0 : 1;
  const bool takes_part = is_active && p.inputs.num_drafts[i] != kLeftOut;
  if (p.first_rows == FirstRows::kLast) {
    first = known_len - 2;
    num_live = is_active ? num_rows : 0;
  } else if (is_decode && p.first_rows == FirstRows::kWindow) {
    const int32_t emitted_len = p.results[i].emitted_len;
    const int32_t num_missed = num_rows - num_window_rows;
    window_position = known_len - emitted_len - 1;
    if (first == kNoPart) {
      first = window_position - num_missed;
      num_live = num_missed + emitted_len;
    }
    if (!takes_part) num_live = 0;
  } else if (is_decode) {
    if (first == kNoPart) {
      if (p.follows_windows) {
        // All tokens that were emitted, and at least the newest two.
        const int32_t emitted_len = p.results[i].emitted_len;
        const int32_t num_missed = num_rows - (num_window_rows > 2 ? num_window_rows : 2);
        num_live = num_missed + (emitted_len > 2 ? emitted_len : 2);
      }
      first = known_len - num_live;
    }
    if (!takes_part) num_live = 0;
  } else {
    window_position = first;
    if (p.inputs.num_drafts[i] == kLeftOut) num_live = 0;
  }
  for (int32_t r = worker; r < num_rows; r += num_workers) {
    const bool is_live = r < num_live;
    int32_t token = 0;
    if (is_live) {
      const int32_t position = first + r + ahead;
      // Only the host knows the token after an unfinished chunk. (If the sequence has failed there
      // is no token after its prompt, and the KV of that row is never read.)
      token = position < known_len ? history[position] : p.inputs.next_token[i];
    }
    set_row(p.rows, begin + r, is_live, seq_slot, first + r, token);
    if (p.hidden_rows != nullptr && p.first_rows == FirstRows::kWindow) {
      const int32_t in_window = first + r - window_position;
      int32_t hidden_row = window_begin;
      if (is_live && in_window >= 0) hidden_row = window_begin + in_window;
      if (is_live && in_window < 0) {
        // The newest state that is kept is that of the token before the newest.
        const bool is_kept =
            -in_window <= p.inputs.num_kept[i] && first + r + p.kept.num_tokens >= known_len - 1;
        hidden_row = is_kept ? p.kept.first_row + seq_slot * p.kept.num_tokens +
                                   (first + r) % p.kept.num_tokens
                             : p.kept.zero_row;
      }
      p.hidden_rows[begin + r] = hidden_row;
    } else if (p.hidden_rows != nullptr) {
      // In a window the row that drew the newest token; otherwise the last row.
      const int32_t last = p.inputs.verify_indptr[i + 1] - 1;
      const int32_t drew = p.inputs.verify_indptr[i] + p.results[i].emitted_len - 1;
      p.hidden_rows[begin + r] = is_live && is_decode ? drew : last;
    }
  }
  if (worker == 0 && i < p.inputs.counts->num_drafting) {
    p.last_row[i] = begin + (num_live > 0 ? num_live : num_rows) - 1;
  }
}

// Worker `worker` of `num_workers` copies every num_workers-th word of each row.
PACELINE_HOST_DEVICE inline void keep_hidden_of_sequence(const KeepHiddenParams& p, int32_t i,
                                                         int32_t worker, int32_t num_workers) {
  const SequenceState& s = p.sequences;
  const int32_t seq_slot = p.inputs.seq_slot[i];
  const bool is_decode = p.inputs.kind[i] == static_cast<int32_t>(RowKind::kDecode);
  if (!is_decode || s.is_active[seq_slot] == 0) return;
  const int32_t emitted_len = p.results[i].emitted_len;
  const int32_t first = s.known_len[seq_slot] - emitted_len - 1;
  for (int32_t r = 0; r < emitted_len; ++r) {
    const int32_t kept_row =
        p.kept.first_row + seq_slot * p.kept.num_tokens + (first + r) % p.kept.num_tokens;
    const int32_t* const from = p.hidden + int64_t{p.inputs.verify_indptr[i] + r} * p.row_words;
    int32_t* const to = p.hidden + int64_t{kept_row} * p.row_words;
    for (int32_t w = worker; w < p.row_words; w += num_workers) to[w] = from[w];
  }
}

// Returns whether the sequence has a draft step to run.
PACELINE_HOST_DEVICE inline bool begin_draft_sequence(const BeginDraftStepsParams& p, int32_t i) {
  const SequenceState& s = p.sequences;
  const int32_t seq_slot = p.inputs.seq_slot[i];
  const int32_t drawn = p.drawn[i];
  const bool is_stopped = stops(p.stop, i);
  const int32_t known_len = s.known_len[seq_slot];
  const int32_t limit = s.limit[seq_slot];
  const bool is_active = s.is_active[seq_slot] != 0;
  const int32_t room = limit > known_len ? limit - known_len : 0;  // tokens that still fit
  const int32_t max_drafts = s.max_drafts[seq_slot];
  const int32_t longest = is_stopped && max_drafts > 1 ? 1 : max_drafts;
  s.draft_len[seq_slot] = !is_active ? 0 : room < longest ? room : longest;
  if (is_active) s.draft_tokens[int64_t{seq_slot} * s.num_draft_tokens] = drawn;
  const bool is_live = is_active && longest > 1 && known_len + 1 < limit;
  const int32_t position = known_len - p.draw_ahead + (p.advances_positions ? 1 : 0);
  set_row(p.rows, i, is_live, seq_slot, position, drawn);
  return is_live;
}

// Also for i >= num_drafting, up to num_seqs.
PACELINE_HOST_DEVICE inline void assemble_block_sequence(const AssembleBlockRowsParams& p,
                                                         int32_t i) {
  const SequenceState& s = p.sequences;
  const bool drafts = i < p.inputs.counts->num_drafting;
  const int32_t begin = i * p.rows_per_seq;
  for (int32_t j = 0; j < p.num_drafts; ++j) {
    p.predicting_rows[j * p.num_seqs + i] = drafts ? begin + p.first_predicting_row + j : 0;
  }
  if (!drafts) {
    p.newest_tokens[i] = 0;
    return;
  }
  p.row_indptr[i + 1] = begin + p.rows_per_seq;
  const int32_t seq_slot = p.inputs.seq_slot[i];
  const int32_t known_len = s.known_len[seq_slot];
  const bool is_active = s.is_active[seq_slot] != 0;
  const int32_t first = known_len - 1;
  const int32_t room = s.limit[seq_slot] - known_len;  // tokens that still fit
  // No more rows than drafts that the sequence may have: blocks of the cache are reserved for these
  // only, and so its drafts do not depend on the other sequences.
  const int32_t wanted =
      p.num_drafts < s.max_drafts[seq_slot] ? p.num_drafts : s.max_drafts[seq_slot];
  const int32_t num_drafts = room < wanted ? room : wanted;
  const int32_t num_live = !is_active || num_drafts <= 0 ? 0 : num_drafts + p.first_predicting_row;
  const int32_t newest = is_active ? s.history[seq_slot * s.history_stride + first] : 0;
  p.newest_tokens[i] = newest;
  for (int32_t r = 0; r < p.rows_per_seq; ++r) {
    set_row(p.rows, begin + r, r < num_live, seq_slot, first + r, r == 0 ? newest : p.mask_token);
    p.rows.block_first[begin + r] = r < num_live ? first : 0;
    p.rows.block_last[begin + r] = r < num_live ? first + num_live - 1 : 0;
  }
}

PACELINE_HOST_DEVICE inline void store_block_sequence(const StoreBlockDraftsParams& p, int32_t i) {
  const SequenceState& s = p.sequences;
  const int32_t seq_slot = p.inputs.seq_slot[i];
  const int32_t known_len = s.known_len[seq_slot];
  const int32_t room = s.limit[seq_slot] - known_len;
  int32_t most = p.num_drafts < s.max_drafts[seq_slot] ? p.num_drafts : s.max_drafts[seq_slot];
  if (room < most) most = room;
  if (s.is_active[seq_slot] == 0 || most < 0) most = 0;
  int32_t* const drafts = s.draft_tokens + int64_t{seq_slot} * s.num_draft_tokens;
  int32_t count = 0;
  while (count < most) {
    const int32_t at = count * p.num_seqs + i;
    const bool is_stopped = stops(p.stop, at);
    if (is_stopped && p.stops_before) break;
    drafts[count] = p.drawn[at];
    ++count;
    if (is_stopped) break;
  }
  s.draft_len[seq_slot] = count;
}

PACELINE_HOST_DEVICE inline void store_draft_sequence(const StoreDraftParams& p, int32_t i,
                                                      int32_t column) {
  const SequenceState& s = p.sequences;
  const int32_t seq_slot = p.rows.seq_slot[i];
  if (seq_slot < 0) return;
  s.draft_tokens[int64_t{seq_slot} * s.num_draft_tokens + column] = p.drawn[i];
  if (stops(p.stop, i) && s.draft_len[seq_slot] > column + 1) s.draft_len[seq_slot] = column + 1;
}

// A candidate encodes a match as one number; a higher number is a better candidate: more tokens
// matched, then the later occurrence. 0: no match. Returns the best of the candidates that worker
// `worker` of `num_workers` examines.
PACELINE_HOST_DEVICE inline uint64_t best_ngram(const ProposeNgramParams& p, int32_t seq_slot,
                                                int32_t worker, int32_t num_workers) {
  const SequenceState& s = p.sequences;
  if (s.is_active[seq_slot] == 0) return 0;
  if ((s.sources[seq_slot] & source_bit(DraftSource::kLookup)) == 0) return 0;
  const int32_t* history = s.history + seq_slot * s.history_stride;
  const int32_t last = s.known_len[seq_slot] - 1;
  uint64_t best = 0;
  // `end` is the last token of an earlier occurrence; at least one token follows it.
  for (int32_t end = p.min_tokens - 1 + worker; end < last; end += num_workers) {
    const int32_t most = end + 1 < p.max_tokens ? end + 1 : p.max_tokens;
    int32_t matched = 0;
    while (matched < most && history[end - matched] == history[last - matched]) ++matched;
    if (matched < p.min_tokens) continue;
    const uint64_t found =
        uint64_t{static_cast<uint32_t>(matched)} << 32 | static_cast<uint32_t>(end);
    best = found > best ? found : best;
  }
  return best;
}

// Writes the drafts of `best`, the best candidate of all workers.
PACELINE_HOST_DEVICE inline void store_ngram(const ProposeNgramParams& p, int32_t seq_slot,
                                             uint64_t best, int32_t worker, int32_t num_workers) {
  const SequenceState& s = p.sequences;
  const int32_t* history = s.history + seq_slot * s.history_stride;
  const int32_t known_len = s.known_len[seq_slot];
  const int32_t from = static_cast<int32_t>(static_cast<uint32_t>(best)) + 1;
  int32_t count = 0;
  if (best != 0) {
    const int32_t room = s.limit[seq_slot] - known_len;  // tokens that still fit
    count = known_len - from;
    count = count < s.max_drafts[seq_slot] ? count : s.max_drafts[seq_slot];
    count = count < room ? count : room;
  }
  const bool may_keep = (s.sources[seq_slot] & source_bit(DraftSource::kModel)) != 0;
  if (count == 0 && p.keeps_drafts && may_keep) return;
  int32_t* drafts = s.draft_tokens + int64_t{seq_slot} * s.num_draft_tokens;
  for (int32_t j = worker; j < count; j += num_workers) drafts[j] = history[from + j];
  if (worker != 0) return;
  s.draft_len[seq_slot] = count;
  s.draft_source[seq_slot] = static_cast<int32_t>(DraftSource::kLookup);
}

}  // namespace paceline
