// SPDX-License-Identifier: Apache-2.0
#pragma once

// The metadata ops, for one row. This is the only specification: the CPU loops over it, and a CUDA
// thread runs it. `seq_slot` -1 makes the row inert, whatever its position.

#include <cstdint>

#include "base/host_device.h"
#include "metadata/group_metadata.h"

namespace paceline {

// `entry`: a position, or in compressed groups the number of an entry.
PACELINE_HOST_DEVICE inline int64_t slot_of(const BlockTable& table, int32_t seq_slot,
                                            int32_t entry) {
  const int32_t block = table.blocks[seq_slot * table.stride + entry / table.block_size];
  return static_cast<int64_t>(block) * table.block_size + entry % table.block_size;
}

// The slot that the row at `position` writes; 0 if it completes no entry.
PACELINE_HOST_DEVICE inline int64_t written_slot(const BlockTable& table, int32_t seq_slot,
                                                 int32_t position) {
  if (table.tokens_per_entry == 1) return slot_of(table, seq_slot, position);
  if ((position + 1) % table.tokens_per_entry != 0) return 0;
  return slot_of(table, seq_slot, position / table.tokens_per_entry);
}

// One past the last entry that the row at `position` sees.
PACELINE_HOST_DEVICE inline int32_t visible_end(const BlockTable& table, int32_t position) {
  return table.tokens_per_entry == 1 ? position + 1 : (position + 1) / table.tokens_per_entry;
}

PACELINE_HOST_DEVICE inline int32_t window_begin(int32_t position, int32_t window) {
  const int32_t begin = position - window + 1;
  return begin > 0 ? begin : 0;
}

// The last position that a live row at `position` sees.
PACELINE_HOST_DEVICE inline int32_t last_visible(const PassRows& rows, const BlockVisibility& block,
                                                 int32_t row, int32_t position) {
  return block.sees_all ? rows.block_last[row] : position;
}

PACELINE_HOST_DEVICE inline void build_row(const PassRows& rows, const FullMetadata& m, int32_t row,
                                           int32_t seq_slot, int32_t position) {
  const bool is_live = seq_slot >= 0;
  m.slot_mapping[row] = is_live ? slot_of(m.table, seq_slot, position) : 0;
  m.kv_end[row] = is_live ? last_visible(rows, m.block, row, position) + 1 : 0;
}

PACELINE_HOST_DEVICE inline void build_row(const PassRows& rows, const SlidingMetadata& m,
                                           int32_t row, int32_t seq_slot, int32_t position) {
  const bool is_live = seq_slot >= 0;
  m.slot_mapping[row] = is_live ? slot_of(m.table, seq_slot, position) : 0;
  const int32_t from = is_live && m.block.is_anchored ? rows.block_first[row] : position;
  m.kv_begin[row] = is_live ? window_begin(from, m.window) : 0;
  // A window of its own ends at the same distance behind the row as it begins before it. The
  // position of an inert row may be any number.
  const int32_t last = is_live ? last_visible(rows, m.block, row, position) : -1;
  const bool is_near = !is_live || m.block.is_anchored || last - position < m.window;
  m.kv_end[row] = is_near ? last + 1 : position + m.window;
}

PACELINE_HOST_DEVICE inline void build_row(const PassRows&, const CompressedMetadata& m,
                                           int32_t row, int32_t seq_slot, int32_t position) {
  const bool is_live = seq_slot >= 0;
  m.slot_mapping[row] = is_live ? written_slot(m.table, seq_slot, position) : 0;
  m.entry_end[row] = is_live ? visible_end(m.table, position) : 0;
}

// Advances one row for advance_draft_step, if there is a step after `step`. Returns whether the row
// remains live.
PACELINE_HOST_DEVICE inline bool advance_row(const AdvanceParams& p, int32_t row, int32_t step) {
  const int32_t seq_slot = p.rows.seq_slot[row];
  if (seq_slot < 0) return false;
  const int32_t position = p.rows.positions[row] + (p.advances_positions ? 1 : 0);
  const int32_t token = p.drawn[row];
  // A row is live only while the token that it would draw next is below the limit and one of the
  // drafts that its sequence may have.
  const int32_t ahead = p.draw_ahead + (p.advances_positions ? 0 : step + 1);
  const bool is_live = position + ahead < p.sequences.limit[seq_slot] &&
                       step + 1 < p.sequences.max_drafts[seq_slot] && !stops(p.stop, row);
  p.rows.seq_slot[row] = is_live ? seq_slot : -1;
  p.rows.positions[row] = is_live ? position : 0;
  p.rows.token_ids[row] = is_live ? token : 0;
  for (int32_t g = 0; g < p.num_groups; ++g) {
    const AdvanceGroup& group = p.groups[g];
    group.slot_mapping[row] = is_live ? written_slot(group.table, seq_slot, position) : 0;
    if (group.kv_begin != nullptr) {
      group.kv_begin[row] = is_live ? window_begin(position, group.window) : 0;
    }
    if (group.kv_end != nullptr) {
      group.kv_end[row] = is_live ? visible_end(group.table, position) : 0;
    }
  }
  return is_live;
}

}  // namespace paceline
