// SPDX-License-Identifier: Apache-2.0
#pragma once

// The blocks that one sequence holds, in all groups or in none, and the operations on them.
// Reservations run ahead of what the host knows and only grow: accepting or rejecting drafts moves
// no block.
//
// A sequence may begin as a fork of another one, its parent, whose KV of the first positions it
// needs too (`fork`). It then shares with its parent the blocks that lie wholly below `num_tokens`.
// Those blocks are never written again: the parent's launched chunks have covered these positions,
// no pass goes back below the token before the newest one, and the fork's own first row is at
// num_tokens. The fork has its own block for the one that contains num_tokens, and the device
// copies the parent's block into it.
//
// Where the rows of a pass hand on what they store (hands_on), a sequence has blocks only where later
// passes begin, or where the prefix cache keeps one; the null block stands for the others.
//
// Or it may begin with blocks of a PrefixCache (`adopt`). These end at a multiple of every group's
// block, are full, and are never written again either.
//
// The class is move-only, since a copy would release the same blocks twice. The destructor releases
// nothing: call release_all first. Not thread-safe.

#include <cstdint>
#include <span>
#include <vector>

#include "kv/slab_pool.h"
#include "wire/blocks.h"

namespace paceline {

// Number of blocks wholly below the keys that a query at `position` sees in the group.
[[nodiscard]] int32_t num_passed_blocks(const KvGroup& group, int32_t position);

// Where a sequence keeps the blocks of groups that hand on for the prefix cache: those that end at
// these positions.
struct KeptStates {
  int32_t interval = 0;        // at its multiples; 0: at none
  int32_t ends[2] = {-1, -1};  // and at these two

  [[nodiscard]] bool keeps(int32_t num_tokens) const {
    return (interval > 0 && num_tokens % interval == 0) || num_tokens == ends[0] ||
           num_tokens == ends[1];
  }
  // The most blocks that are kept among those of `num_tokens` tokens in a row.
  [[nodiscard]] int32_t most_kept(int32_t num_tokens) const {
    return 2 + (interval > 0 ? num_tokens / interval + 1 : 0);
  }
};

// What the last rows of a pass leave to later passes, for SequenceBlocks::reserve.
struct PassEnd {
  // Later passes have no row below this position; 0: where they begin is not known, so that every
  // block is needed.
  int32_t next_position = 0;
  int32_t draft_lag = 0;  // as in release_below
  KeptStates kept;
};

class SequenceBlocks {
 public:
  explicit SequenceBlocks(int32_t num_groups = 0);
  SequenceBlocks(SequenceBlocks&&) = default;
  SequenceBlocks& operator=(SequenceBlocks&&) = default;

  // Whether the blocks contain the KV that a sequence beginning at position `num_tokens` sees below
  // it; a sliding group may have released some of it. Does not tell whether that KV has been
  // written.
  [[nodiscard]] bool can_fork(const KvLayout& layout, int32_t num_tokens) const;

  // Call before the first reserve, with a `parent` that can_fork. Shares its blocks that lie wholly
  // below num_tokens and that queries from there on see. Then call `reserve` for more than
  // num_tokens; it writes no table entries for shared blocks, because the device copies those
  // entries from the parent.
  void fork(SlabPool& pool, const SequenceBlocks& parent, int32_t num_tokens);

  // Call after that reserve. Appends the copies of the blocks that contain num_tokens. The sources
  // are blocks of the parent. If they are released later, it is under the copying iteration or a
  // newer one, so quarantine keeps them until the copy has completed.
  void append_copies(const KvLayout& layout, const SequenceBlocks& parent, int32_t num_tokens,
                     std::vector<BlockCopy>& copies) const;

  // Call before the first reserve. Takes the blocks of a PrefixCache's match,
  // PrefixCache::blocks_of, which hold the KV of the first `num_tokens` tokens.
  void adopt(SlabPool& pool, std::span<const std::vector<BlockId>> tables, int32_t num_tokens);
  // Takes back an adopt that no launched iteration has used, and nothing else has followed.
  void return_adopted(SlabPool& pool);
  // Appends the table entries of all held blocks.
  void append_writes(int32_t seq_slot, std::vector<TableWrite>& writes) const;

  // Makes every group cover positions [first needed, num_tokens): allocates the missing blocks in
  // all groups or in none. On success appends the new entries to `writes` and returns true;
  // otherwise nothing changes. Blocks of a sliding group below its released watermark stay
  // released.
  // `end` says which blocks of groups that hand on are needed after the pass; the others are null.
  [[nodiscard]] bool reserve(SlabPool& pool, int32_t num_tokens, int32_t seq_slot,
                             std::vector<TableWrite>& writes, const PassEnd& end = {});

  // Releases the blocks (to quarantine) that a sliding group no longer needs because its queries
  // start at `first_query_position`: those wholly below first_query_position - window + 1. A
  // position lower than before changes nothing. Nothing has been released before the first reserve
  // of a (re)started sequence. Writes no table entry: the device's table keeps the stale ids. In
  // the drafter's groups queries start `draft_lag` positions earlier.
  void release_below(SlabPool& pool, int32_t first_query_position, int64_t newest_launched,
                     int32_t draft_lag = 0);

  // Releases all blocks, and for shared blocks its own hold; the object is then as new. The last
  // blocks of all groups go first, so that a prefix stays cached longer than what follows it.
  void release_all(SlabPool& pool, int64_t newest_launched);

  // Block ids by logical index; kNullBlock where released, or never needed. [groups][blocks]
  [[nodiscard]] std::span<const BlockId> table(GroupId group) const;
  [[nodiscard]] int64_t num_held() const;

 private:
  struct Group {
    std::vector<BlockId> table;
    // Entries below this are the null block or, past the end of the table, will be.
    int32_t num_released = 0;
  };


  std::vector<Group> groups_;
  std::vector<int64_t> missing_;  // scratch of reserve: [groups]
};

// What iterations in flight add to the blocks of a sequence.
struct PeakSlack {
  // In sliding groups at most this many tokens beyond the window are unavailable at once: from the
  // oldest position whose block is not yet reusable to the end of the reservation. With r rows per
  // iteration and results n iterations late, reserving the rows in flight, this is r * (2n + 1):
  // (n + 1) iterations reserved past the known length, and n more behind it in quarantine.
  int32_t window = 0;
  // In groups that hand on: the same, with the rows of a verify window as r; 2n + 1, the chunks of
  // a prompt each of which leaves blocks for the next; and what they keep.
  int32_t verify_window = 0;
  int32_t num_chunks = 0;
  KeptStates kept;
  int32_t draft_lag = 0;  // that of release_below
};

// Upper bound of the blocks of each group that a sequence of num_tokens holds or has in quarantine
// at once.
[[nodiscard]] std::vector<int64_t> peak_blocks(const KvLayout& layout, int32_t num_tokens,
                                               const PeakSlack& slack);

}  // namespace paceline
