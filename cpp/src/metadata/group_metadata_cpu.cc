// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "device/cpu_context.h"
#include "metadata/group_metadata.h"

namespace paceline {
namespace {

int64_t slot_of(const BlockTable& table, int32_t seq_slot, int32_t position) {
  const int32_t block = table.blocks[seq_slot * table.stride + position / table.block_size];
  return static_cast<int64_t>(block) * table.block_size + position % table.block_size;
}

int32_t window_begin(int32_t position, int32_t window) {
  return std::max(0, position - window + 1);
}

// Rows to build and whether each of them is live.
template <class Visit>
void for_each_row(const PassRows& rows, int32_t padded_rows, Visit visit) {
  const int32_t num_rows = *rows.num_rows;
  for (int32_t row = 0; row < num_rows; ++row) visit(row, rows.seq_slot[row] >= 0);
  for (int32_t row = num_rows; row < padded_rows; ++row) visit(row, false);
}

}  // namespace

void build_full(CpuContext&, const BuildFullParams& p) {
  const FullMetadata& m = p.metadata;
  for_each_row(p.rows, p.padded_rows, [&](int32_t row, bool is_live) {
    const int32_t position = p.rows.positions[row];
    m.slot_mapping[row] = is_live ? slot_of(m.table, p.rows.seq_slot[row], position) : 0;
    m.kv_end[row] = is_live ? position + 1 : 0;
  });
}

void build_sliding(CpuContext&, const BuildSlidingParams& p) {
  const SlidingMetadata& m = p.metadata;
  for_each_row(p.rows, p.padded_rows, [&](int32_t row, bool is_live) {
    const int32_t position = p.rows.positions[row];
    m.slot_mapping[row] = is_live ? slot_of(m.table, p.rows.seq_slot[row], position) : 0;
    m.kv_begin[row] = is_live ? window_begin(position, m.window) : 0;
    m.kv_end[row] = is_live ? position + 1 : 0;
  });
}

void build_window_list(CpuContext&, const BuildWindowListParams& p) {
  const WindowListMetadata& m = p.metadata;
  for_each_row(p.rows, p.padded_rows, [&](int32_t row, bool is_live) {
    if (!is_live) {
      m.slot_mapping[row] = 0;
      m.window_count[row] = 0;
      return;
    }
    const int32_t position = p.rows.positions[row];
    const int32_t seq_slot = p.rows.seq_slot[row];
    int64_t* list = m.window_slots + int64_t{row} * m.window;
    for (int32_t visible = window_begin(position, m.window); visible <= position; ++visible) {
      list[visible % m.window] = slot_of(m.table, seq_slot, visible);
    }
    m.slot_mapping[row] = slot_of(m.table, seq_slot, position);
    m.window_count[row] = std::min(position + 1, m.window);
  });
}

void advance_draft_step(CpuContext&, const AdvanceParams& p) {
  const int32_t step = *p.current_draft_step;
  if (step + 1 >= p.sequences.num_draft_tokens) return;  // that was the last one
  const int32_t num_rows = *p.rows.num_rows;
  for (int32_t row = 0; row < num_rows; ++row) {
    const int32_t seq_slot = p.rows.seq_slot[row];
    if (seq_slot < 0) continue;
    const int32_t position = p.rows.positions[row] + 1;
    // A row is worth its work while the token it would draw lies below the limit.
    const bool is_live = position + 1 < p.sequences.limit[seq_slot];
    p.rows.seq_slot[row] = is_live ? seq_slot : -1;
    p.rows.positions[row] = is_live ? position : 0;
    p.rows.token_ids[row] = is_live ? p.drawn[row] : 0;
    for (int32_t g = 0; g < p.num_groups; ++g) {
      const AdvanceGroup& group = p.groups[g];
      group.slot_mapping[row] = is_live ? slot_of(group.table, seq_slot, position) : 0;
      if (group.kv_begin != nullptr) {
        group.kv_begin[row] = is_live ? window_begin(position, group.window) : 0;
      }
      if (group.kv_end != nullptr) group.kv_end[row] = is_live ? position + 1 : 0;
    }
  }
  *p.current_draft_step = step + 1;
}

void advance_window_list(CpuContext&, const AdvanceWindowListParams& p) {
  const WindowListMetadata& m = p.metadata;
  const int32_t num_rows = *p.rows.num_rows;
  for (int32_t row = 0; row < num_rows; ++row) {
    if (p.rows.seq_slot[row] < 0) {
      m.window_count[row] = 0;
      continue;
    }
    const int32_t position = p.rows.positions[row];
    m.window_slots[int64_t{row} * m.window + position % m.window] = m.slot_mapping[row];
    m.window_count[row] = std::min(position + 1, m.window);
  }
}

AdvanceGroup advance_group(const GroupMetadata& metadata) {
  AdvanceGroup group{};
  if (const auto* full = std::get_if<FullMetadata>(&metadata)) {
    group.slot_mapping = full->slot_mapping;
    group.kv_end = full->kv_end;
    group.table = full->table;
  } else if (const auto* sliding = std::get_if<SlidingMetadata>(&metadata)) {
    group.slot_mapping = sliding->slot_mapping;
    group.kv_begin = sliding->kv_begin;
    group.kv_end = sliding->kv_end;
    group.window = sliding->window;
    group.table = sliding->table;
  } else {
    const auto& list = std::get<WindowListMetadata>(metadata);
    group.slot_mapping = list.slot_mapping;
    group.table = list.table;
  }
  return group;
}

const int64_t* slot_mapping(const GroupMetadata& metadata) {
  return std::visit([](const auto& m) -> const int64_t* { return m.slot_mapping; }, metadata);
}

}  // namespace paceline
