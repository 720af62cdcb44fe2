// SPDX-License-Identifier: Apache-2.0
#include "base/overloaded.h"
#include "device/cpu_context.h"
#include "metadata/group_metadata.h"
#include "metadata/metadata_rows.h"
#include "metadata/pass_rows.h"

namespace paceline {
namespace {

// Calls visit(row, sequence slot or -1, position) for every row to build.
template <class Visit>
void for_each_row(const PassRows& rows, int32_t padded_rows, Visit visit) {
  const int32_t num_rows = *rows.num_rows;
  for (int32_t row = 0; row < num_rows; ++row) visit(row, rows.seq_slot[row], rows.positions[row]);
  for (int32_t row = num_rows; row < padded_rows; ++row) visit(row, -1, 0);
}

}  // namespace

void build_full(CpuContext&, const BuildFullParams& p) {
  for_each_row(p.rows, p.padded_rows, [&](int32_t row, int32_t seq_slot, int32_t position) {
    build_row(p.rows, p.metadata, row, seq_slot, position);
  });
}

void build_sliding(CpuContext&, const BuildSlidingParams& p) {
  for_each_row(p.rows, p.padded_rows, [&](int32_t row, int32_t seq_slot, int32_t position) {
    build_row(p.rows, p.metadata, row, seq_slot, position);
  });
}

void build_compressed(CpuContext&, const BuildCompressedParams& p) {
  for_each_row(p.rows, p.padded_rows, [&](int32_t row, int32_t seq_slot, int32_t position) {
    build_row(p.rows, p.metadata, row, seq_slot, position);
  });
}

void advance_draft_step(CpuContext&, const AdvanceParams& p) {
  const int32_t step = *p.current_draft_step;
  if (step + 1 >= p.sequences.num_draft_tokens) {  // that was the last one
    set_keep_drafting(p.stop, false);
    return;
  }
  const int32_t num_rows = *p.rows.num_rows;
  bool is_any_live = false;
  for (int32_t row = 0; row < num_rows; ++row) is_any_live |= advance_row(p, row, step);
  *p.current_draft_step = step + 1;
  set_keep_drafting(p.stop, is_any_live);
}

AdvanceGroup advance_group(const GroupMetadata& metadata) {
  return std::visit(Overloaded{[](const FullMetadata& full) -> AdvanceGroup {
                                 return {.slot_mapping = full.slot_mapping,
                                         .kv_begin = nullptr,
                                         .kv_end = full.kv_end,
                                         .window = 0,
                                         .table = full.table};
                               },
                               [](const SlidingMetadata& sliding) -> AdvanceGroup {
                                 return {.slot_mapping = sliding.slot_mapping,
                                         .kv_begin = sliding.kv_begin,
                                         .kv_end = sliding.kv_end,
                                         .window = sliding.window,
                                         .table = sliding.table};
                               },
                               [](const CompressedMetadata& compressed) -> AdvanceGroup {
                                 return {.slot_mapping = compressed.slot_mapping,
                                         .kv_begin = nullptr,
                                         .kv_end = compressed.entry_end,
                                         .window = 0,
                                         .table = compressed.table};
                               }},
                    metadata);
}

const int64_t* slot_mapping(const GroupMetadata& metadata) {
  return std::visit([](const auto& m) -> const int64_t* { return m.slot_mapping; }, metadata);
}

}  // namespace paceline
