// SPDX-License-Identifier: Apache-2.0
#pragma once

// The blocks that one sequence owns, in all groups or in none, and the verbs on them. Reservations
// run ahead of what the host knows and only grow: accepting or rejecting drafts moves no block.
// Move-only, since a copy would give the same blocks back twice. The destructor releases nothing:
// call release_all first. Not thread-safe.

#include <cstdint>
#include <span>
#include <vector>

#include "kv/slab_pool.h"

namespace paceline {

// One changed entry of a sequence's block table, to be applied on the device.
struct TableWrite {
  int32_t seq_slot;   // row of the block tables
  GroupId group;
  int32_t index;      // logical block: position / block_size
  BlockId block;
};

class SequenceBlocks {
 public:
  explicit SequenceBlocks(int32_t num_groups = 0);
  SequenceBlocks(SequenceBlocks&&) = default;
  SequenceBlocks& operator=(SequenceBlocks&&) = default;

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

  // Gives everything back; the object is as new afterwards.
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
