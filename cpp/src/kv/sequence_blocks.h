// SPDX-License-Identifier: Apache-2.0
#pragma once

// The blocks that one sequence holds, in all groups or in none, and the verbs on them. Reservations
// run ahead of what the host knows and only grow: accepting or rejecting drafts moves no block.
//
// A sequence may begin as a fork of another whose KV of the first positions it needs, too (`fork`).
// It then holds the blocks that lie wholly below `num_tokens` together with its parent, and nobody
// writes to those ever again: the parent's launched chunks have covered these positions, no pass
// goes back below the token before the newest one, and the fork's own first row is at num_tokens.
// The block that num_tokens lies in is its own, and the device copies the parent's into it.
//
// Move-only, since a copy would give the same blocks back twice. The destructor releases nothing:
// call release_all first. Not thread-safe.

#include <cstdint>
#include <span>
#include <vector>

#include "kv/slab_pool.h"
#include "wire/blocks.h"

namespace paceline {

class SequenceBlocks {
 public:
  explicit SequenceBlocks(int32_t num_groups = 0);
  SequenceBlocks(SequenceBlocks&&) = default;
  SequenceBlocks& operator=(SequenceBlocks&&) = default;

  // Whether the blocks hold what a sequence that begins at position `num_tokens` sees below it: a
  // sliding group may have let go of it. Says nothing of whether KV has been written.
  [[nodiscard]] bool can_fork(const KvLayout& layout, int32_t num_tokens) const;

  // Before the first reserve: holds the blocks of `parent`, which can_fork, that lie wholly below
  // num_tokens and that queries from there on see. `reserve` for more than num_tokens comes next;
  // it writes no table entries for what is shared, those the device copies from the parent's.
  void fork(SlabPool& pool, const SequenceBlocks& parent, int32_t num_tokens);

  // After that reserve: appends what has to be copied of the blocks that num_tokens lies in. The
  // sources are the parent's; whatever gives them back later does so under the copying iteration
  // or a newer one, so quarantine keeps them until it has completed.
  void append_copies(const KvLayout& layout, const SequenceBlocks& parent, int32_t num_tokens,
                     std::vector<BlockCopy>& copies) const;

  // Makes every group cover positions [first needed, num_tokens): allocates the missing blocks in
  // all groups or in none. On success appends the new entries to `writes` and returns true; else
  // nothing has changed. Blocks of a sliding group below its released watermark stay released.
  [[nodiscard]] bool reserve(SlabPool& pool, int32_t num_tokens, int32_t seq_slot,
                             std::vector<TableWrite>& writes);

  // Before the first reserve of a (re)started sequence nothing has been released; a sliding group
  // whose queries start at `first_query_position` never needs blocks wholly below
  // first_query_position - window + 1: they are released (to quarantine) now. A position lower
  // than before changes nothing. Writes no table entry: the device's table keeps the stale ids.
  void release_below(SlabPool& pool, int32_t first_query_position, int64_t newest_launched);

  // Gives everything back, shared blocks for its own part; the object is as new afterwards.
  void release_all(SlabPool& pool, int64_t newest_launched);

  // Block ids by logical index; kNullBlock where released. [groups][blocks]
  [[nodiscard]] std::span<const BlockId> table(GroupId group) const;
  [[nodiscard]] int64_t num_held() const;

 private:
  struct Group {
    std::vector<BlockId> table;
    int32_t num_released = 0;  // entries below this are (or, past the end, will be) the null block
  };

  [[nodiscard]] int64_t num_missing(const Group& group, int64_t num_blocks) const;

  std::vector<Group> groups_;
  std::vector<int64_t> missing_;  // scratch of reserve: [groups]
};

// Most blocks of each group that a sequence of num_tokens has held or in quarantine at once, if in
// sliding groups at most `window_slack` tokens beyond the window are unavailable at once: from the
// oldest position whose block has not become reusable to the end of the reservation. With r rows an
// iteration and results n iterations late, reserving the rows in flight, this is r * (2n + 1):
// (n + 1) iterations reserved past the known length, n more behind it in quarantine.
[[nodiscard]] std::vector<int64_t> peak_blocks(const KvLayout& layout, int32_t num_tokens,
                                               int32_t window_slack);

}  // namespace paceline
