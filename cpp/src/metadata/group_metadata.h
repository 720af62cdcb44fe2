// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention metadata, keyed by (pass, KV group): one plain struct per kind of group, at fixed
// addresses, with two operations. `build` computes everything from the rows and the block tables.
// `advance` moves the draft step's metadata one token on, in place. After j advances every field
// equals, bit for bit, what `build` computes at step j. This holds for the valid extent of each row
// and for inert rows (padding, or sequences at their limit). Both run on the device and are
// captured.

#include <cstdint>
#include <variant>

#include "base/overloaded.h"
#include "metadata/pass_rows.h"
#include "wire/limits.h"
#include "wire/sequence_state.h"

namespace paceline {

struct CpuContext;
struct CudaContext;

// Block ids of every sequence slot in one group. Shared by all passes; written by begin_iteration
// and fork_sequences.
struct BlockTable {
  int32_t* blocks;     // [max_seqs, stride]
  int64_t stride;      // blocks of the longest sequence
  int32_t block_size;  // tokens, or entries of a compressed group
  // The number of tokens that one entry stands for: 1 except in compressed groups.
  int32_t tokens_per_entry = 1;
};

// What the rows of a block (PassRows::block_first) see of each other.
struct BlockVisibility {
  bool sees_all = false;     // a row sees all rows of its block, else those up to itself
  bool is_anchored = false;  // windows begin where that of the block's first row does
};

// Every position up to the row's own is visible, or up to the last one of its block: full and
// latent groups. Inert rows: slot_mapping 0, kv_end 0.
struct FullMetadata {
  int64_t* slot_mapping;  // [capacity] block * block_size + offset of the row's own token
  int32_t* kv_end;        // [capacity] last visible position + 1
  BlockTable table;
  BlockVisibility block = {};
};

// Inert rows: slot_mapping, kv_begin and kv_end 0.
struct SlidingMetadata {
  int64_t* slot_mapping;  // [capacity]
  int32_t* kv_begin;      // [capacity] first visible position: max(0, position - window + 1), with
                          // is_anchored of the position of the block's first row
  int32_t* kv_end;        // [capacity] last visible position + 1
  int32_t window;
  BlockTable table;
  BlockVisibility block = {};
};

// Of compressed groups, where table.tokens_per_entry tokens have one entry. Entry e is visible from
// the position of its last token on, and the row at that position writes it. Inert rows:
// slot_mapping and entry_end 0.
struct CompressedMetadata {
  // [capacity] slot of the entry that the row completes; 0, in the null block: it completes none
  int64_t* slot_mapping;
  int32_t* entry_end;  // [capacity] (position + 1) / tokens_per_entry: one past the last visible
  BlockTable table;
};

using GroupMetadata = std::variant<FullMetadata, SlidingMetadata, CompressedMetadata>;

struct BuildFullParams {
  PassRows rows;
  FullMetadata metadata;
  int32_t padded_rows;  // rows [num_rows, padded_rows) are made inert
};
void build_full(CpuContext&, const BuildFullParams&);
void build_full(CudaContext&, const BuildFullParams&);

struct BuildSlidingParams {
  PassRows rows;
  SlidingMetadata metadata;
  int32_t padded_rows;
};
void build_sliding(CpuContext&, const BuildSlidingParams&);
void build_sliding(CudaContext&, const BuildSlidingParams&);

struct BuildCompressedParams {
  PassRows rows;
  CompressedMetadata metadata;
  int32_t padded_rows;
};
void build_compressed(CpuContext&, const BuildCompressedParams&);
void build_compressed(CudaContext&, const BuildCompressedParams&);

// One group's part of the fused advance. Null pointers: the kind has no such field.
struct AdvanceGroup {
  int64_t* slot_mapping;  // [capacity]
  int32_t* kv_begin;      // [capacity] or null
  int32_t* kv_end;        // [capacity] or null; entry_end of a compressed group
  int32_t window;         // with kv_begin
  BlockTable table;
};

// Moves every row one draft token on: step, ids, positions, lengths and slots of all groups in one
// op. If the drafter's positions are fixed, positions, lengths and slots do not change. The op does
// nothing if the step that has just run was the last one. Rows at their limit and rows whose
// drafting stops early become inert.
struct AdvanceParams {
  int32_t* current_draft_step;  // [1] column that the step has written; incremented
  PassRows rows;                // of the draft step
  const int32_t* drawn;         // [capacity] tokens that the step has drawn
  SequenceState sequences;
  DraftStop stop;
  AdvanceGroup groups[kMaxKvGroups];
  int32_t num_groups;
  int32_t draw_ahead = 1;          // from a row's position to that of the token it draws
  bool advances_positions = true;  // false: rows stay at their positions and see the same keys
};
void advance_draft_step(CpuContext&, const AdvanceParams&);
void advance_draft_step(CudaContext&, const AdvanceParams&);

// Calls the `build` op of the metadata's kind.
template <class Ctx>
void build(Ctx& ctx, const PassRows& rows, const GroupMetadata& metadata, int32_t padded_rows) {
  std::visit(Overloaded{[&](const FullMetadata& full) {
                          ctx.run(build_full, BuildFullParams{rows, full, padded_rows});
                        },
                        [&](const SlidingMetadata& sliding) {
                          ctx.run(build_sliding, BuildSlidingParams{rows, sliding, padded_rows});
                        },
                        [&](const CompressedMetadata& compressed) {
                          ctx.run(build_compressed,
                                  BuildCompressedParams{rows, compressed, padded_rows});
                        }},
             metadata);
}

// The group's part of the fused advance.
[[nodiscard]] AdvanceGroup advance_group(const GroupMetadata& metadata);

// The slot_mapping of any kind.
[[nodiscard]] const int64_t* slot_mapping(const GroupMetadata& metadata);

}  // namespace paceline
