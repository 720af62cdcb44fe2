// SPDX-License-Identifier: Apache-2.0
#pragma once

// The metadata ops, for one row. This is the only specification: the CPU loops over it, and a CUDA
// thread runs it. `seq_slot` -1 makes the row inert, whatever its position.

#include <cstdint>

#include "base/host_device.h"
#include "metadata/group_metadata.h"

namespace paceline {

PACELINE_HOST_DEVICE inline int64_t slot_of(const BlockTable& table, int32_t seq_slot,
                                            int32_t position) {
  const int32_t block = table.blocks[seq_slot * table.stride + position / table.block_size];
  return static_cast<int64_t>(block) * table.block_size + position % table.block_size;
}

PACELINE_HOST_DEVICE inline int32_t window_begin(int32_t position, int32_t window) {
  const int32_t begin = position - window + 1;
  return begin > 0 ? begin : 0;
}

PACELINE_HOST_DEVICE inline int32_t window_count(int32_t position, int32_t window) {
  return position + 1 < window ? position + 1 : window;
}

PACELINE_HOST_DEVICE inline void build_row(const FullMetadata& m, int32_t row, int32_t seq_slot,
                                           int32_t position) {
  const bool is_live = seq_slot >= 0;
  m.slot_mapping[row] = is_live ? slot_of(m.table, seq_slot, position) : 0;
  m.kv_end[row] = is_live ? position + 1 : 0;
}

PACELINE_HOST_DEVICE inline void build_row(const SlidingMetadata& m, int32_t row, int32_t seq_slot,
                                           int32_t position) {
  const bool is_live = seq_slot >= 0;
  m.slot_mapping[row] = is_live ? slot_of(m.table, seq_slot, position) : 0;
  m.kv_begin[row] = is_live ? window_begin(position, m.window) : 0;
  m.kv_end[row] = is_live ? position + 1 : 0;
}

// Worker `worker` of `num_workers` writes its share of the row's list; worker 0 also writes the
// rest of the row.
PACELINE_HOST_DEVICE inline void build_row(const WindowListMetadata& m, int32_t row,
                                           int32_t seq_slot, int32_t position, int32_t worker,
                                           int32_t num_workers) {
  const bool is_live = seq_slot >= 0;
  if (worker == 0) {
    m.slot_mapping[row] = is_live ? slot_of(m.table, seq_slot, position) : 0;
    m.window_count[row] = is_live ? window_count(position, m.window) : 0;
  }
  if (!is_live) return;
  int64_t* list = m.window_slots + int64_t{row} * m.window;
  for (int32_t visible = window_begin(position, m.window) + worker; visible <= position;
       visible += num_workers) {
    list[visible % m.window] = slot_of(m.table, seq_slot, visible);
  }
}

// Advances one row for advance_draft_step, if there is a step after `step`. Returns whether the row
// remains live.
PACELINE_HOST_DEVICE inline bool advance_row(const AdvanceParams& p, int32_t row, int32_t step) {
  const int32_t seq_slot = p.rows.seq_slot[row];
  if (seq_slot < 0) return false;
  const int32_t position = p.rows.positions[row] + (p.advances_positions ? 1 : 0);
  const int32_t token = p.drawn[row];
  // A row is live only while the token that it would draw next is below the limit.
  const int32_t ahead = p.draw_ahead + (p.advances_positions ? 0 : step + 1);
  const bool is_live = position + ahead < p.sequences.limit[seq_slot] && !stops(p.stop, row);
  p.rows.seq_slot[row] = is_live ? seq_slot : -1;
  p.rows.positions[row] = is_live ? position : 0;
  p.rows.token_ids[row] = is_live ? token : 0;
  for (int32_t g = 0; g < p.num_groups; ++g) {
    const AdvanceGroup& group = p.groups[g];
    group.slot_mapping[row] = is_live ? slot_of(group.table, seq_slot, position) : 0;
    if (group.kv_begin != nullptr) {
      group.kv_begin[row] = is_live ? window_begin(position, group.window) : 0;
    }
    if (group.kv_end != nullptr) group.kv_end[row] = is_live ? position + 1 : 0;
  }
  return is_live;
}

PACELINE_HOST_DEVICE inline void advance_window_row(const AdvanceWindowListParams& p, int32_t row) {
  const WindowListMetadata& m = p.metadata;
  if (p.rows.seq_slot[row] < 0) {
    m.window_count[row] = 0;
    return;
  }
  const int32_t position = p.rows.positions[row];
  m.window_slots[int64_t{row} * m.window + position % m.window] = m.slot_mapping[row];
  m.window_count[row] = window_count(position, m.window);
}

}  // namespace paceline
