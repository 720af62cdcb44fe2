// SPDX-License-Identifier: Apache-2.0
#pragma once

// Hands out block ids of one byte pool to several groups with different block bytes. The pool is
// cut into slabs; a slab belongs to one group at a time and goes back when its last block is
// free. Block b of group g lies at pool + int64(b) * block_bytes(g), so ids of different groups
// overlap in bytes and only the slab's owner tells whose they are.
//
// Host only: ids, never memory. Not thread-safe. Running out is a return value.
//
// The host runs ahead of the device, so a released block may still be read or written by launched
// iterations. `release` therefore puts it into quarantine under the newest launched iteration;
// `complete` makes it reusable once that one is done. Iterations are numbered from 0 upwards; -1
// says that none has been launched yet.
//
// A block may have several holders: `share` adds one, `release` takes one away, and only the last
// puts the block into quarantine. Tags never decrease, so the last holder's is the newest of all.
// That nobody writes to a block that others hold is up to the holders (kv/sequence_blocks.h).
//
// What is guaranteed against fragmentation:
// - A group takes an empty slab only when its own slabs are full, so whoever starts on an empty
//   pool and never has more than n(g) blocks held or quarantined at once occupies at most
//   ceil(n(g) / blocks_per_slab(g)) slabs of each group. `fits_alone` tests exactly this: such a
//   sequence is always served when it is the only one.
// - When all sequences but one have been released and completed, every slab that the one does not
//   touch is free, and whatever fits into those is admitted.
// What is not: a slab returns only when its last block does, so after others have left, the blocks
// of the last running sequence may lie scattered over more slabs than they need, and it may be
// unable to grow although it fits alone. Nothing is moved. The scheduler's last resort is to
// preempt that sequence too: the pool is then empty once the launched iterations have completed,
// and recomputing it lays it out compactly, for which the first guarantee holds.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kv/kv_layout.h"
#include "wire/blocks.h"

namespace paceline {

class SlabPool {
 public:
  explicit SlabPool(const KvLayout& layout);
  SlabPool(const SlabPool&) = delete;
  SlabPool& operator=(const SlabPool&) = delete;

  // A block of the group, from its fullest slab with room, else from an empty slab; nullopt when
  // there is neither. Never the null block.
  [[nodiscard]] std::optional<BlockId> allocate(GroupId group);

  // Whether `counts[g]` more blocks of every group g could be allocated now, all of them.
  [[nodiscard]] bool can_allocate(std::span<const int64_t> counts) const;
  // The same on an empty pool: what a request may need at most to ever be admitted.
  [[nodiscard]] bool fits_alone(std::span<const int64_t> counts) const;

  // One holder more of a held block.
  void share(GroupId group, BlockId block);

  // One holder less. With the last one the block goes back, reusable once
  // `complete(newest_launched)` has been called; at once if it has been already. `newest_launched`
  // never decreases from call to call.
  void release(GroupId group, BlockId block, int64_t newest_launched);
  // A block that no launched iteration has ever seen (a reservation rolled back) and that is not
  // shared.
  void release_unused(GroupId group, BlockId block);

  // Every iteration up to and including `iteration` has completed on the device.
  void complete(int64_t iteration);

  // Called with each block at the moment it becomes reusable, also by release_unused; tests poison
  // its memory. Must not call the pool.
  void set_on_reusable(std::function<void(GroupId, BlockId)> callback);

  // Blocks; one with several holders counts once.
  [[nodiscard]] int64_t num_held(GroupId group) const;
  // How many hold the block, which somebody does.
  [[nodiscard]] int32_t num_holders(GroupId group, BlockId block) const;
  [[nodiscard]] int64_t num_quarantined(GroupId group) const;
  [[nodiscard]] int64_t num_quarantined() const;
  // Slabs that belong to no group; the reserved slab 0 is not one of them.
  [[nodiscard]] int64_t num_free_slabs() const;
  [[nodiscard]] const KvLayout& layout() const;

  // free + held + quarantined = total in every group, no slab owned twice, lists consistent, only
  // held blocks have holders beyond the first. Empty when all holds, else what is broken.
  // O(blocks).
  [[nodiscard]] std::string check_integrity() const;

 private:
  friend class SlabPoolTestPeer;  // plants corruption to show that check_integrity sees it

  struct Slab {
    GroupId owner;
    int32_t num_free;  // blocks of the owner that are neither held nor quarantined; 0 if unowned
    int32_t prev;      // in the list of the owner's slabs with the same num_free
    int32_t next;      // same, or the next free slab
  };

  struct Group {
    int32_t blocks_per_slab = 0;
    int64_t num_held = 0;
    int64_t num_quarantined = 0;
    int64_t num_free = 0;  // in the group's own slabs
    // Slabs with room, listed by num_free in 1..blocks_per_slab - 1, and which lists have any: the
    // fullest slab is the head of the first nonempty list. Full slabs are in no list.
    std::vector<int32_t> first_slab;
    std::vector<uint64_t> nonempty;
  };

  struct Quarantined {
    int64_t newest_launched;
    GroupId group;
    BlockId block;
  };

  uint64_t* used(int32_t slab) { return used_.data() + int64_t{slab} * words_per_slab_; }
  uint64_t* quarantined(int32_t slab) {
    return quarantined_.data() + int64_t{slab} * words_per_slab_;
  }
  void link(int32_t slab);
  void unlink(int32_t slab);
  // Throws InternalError unless the group holds the block; returns its slab. `verb` is for the
  // message.
  int32_t check_held(GroupId group, BlockId block, const char* verb) const;
  uint16_t& more_holders(int32_t slab, BlockId block);
  void make_reusable(GroupId group, BlockId block);
  void drop_completed_entries();

  KvLayout layout_;
  std::vector<Group> groups_;
  std::vector<Slab> slabs_;
  int32_t first_free_slab_;
  int64_t num_free_slabs_ = 0;

  // One bit a block, words_per_slab_ words a slab, indexed by the block's place in its slab.
  int64_t words_per_slab_ = 0;
  std::vector<uint64_t> used_;         // held or quarantined
  std::vector<uint64_t> quarantined_;  // a subset of used_

  // Holders of a block beyond the first; words_per_slab_ * 64 entries a slab, by the block's place.
  std::vector<uint16_t> more_holders_;
  int64_t num_more_holders_ = 0;  // their sum

  // First in, first out, since tags never decrease. A vector with a moving head keeps its memory,
  // which a deque would not: the step allocates nothing once it has seen its largest backlog.
  std::vector<Quarantined> quarantine_;
  size_t quarantine_head_ = 0;
  int64_t newest_tag_ = -1;
  int64_t completed_ = -1;
  std::function<void(GroupId, BlockId)> on_reusable_;
};

}  // namespace paceline
