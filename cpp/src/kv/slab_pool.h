// SPDX-License-Identifier: Apache-2.0
#pragma once

// Hands out block ids of one byte pool to several groups with different block bytes. The pool is
// divided into slabs. A slab belongs to one group at a time and is returned when its last block is
// free. Block b of group g is at pool + int64(b) * block_bytes(g), so ids of different groups
// overlap in bytes, and only the owner of the slab tells which group they belong to.
//
// Host only: handles ids, never memory. Not thread-safe. Running out of blocks is a return value.
//
// The host runs ahead of the device, so launched iterations may still read or write a released
// block. `release` therefore puts it into quarantine under the newest launched iteration, and
// `complete` makes it reusable once that iteration has completed. Iterations are numbered from 0;
// -1 means that none has been launched yet.
//
// A block may have several holders: `share` adds one and `release` removes one. Only the last
// release puts the block into quarantine. Tags never decrease, so the last holder's tag is the
// newest. Holders must ensure that none writes to a block that others hold (kv/sequence_blocks.h).
//
// A block whose contents a PrefixCache knows (`mark_known`) becomes *cached* where another would
// become free: no one holds it, its contents stay, and `adopt` takes it back. Cached blocks count
// as free in every question about room. Where `allocate` needs one, the pool asks the cache to
// forget the contents (`set_on_evict`), the least recently used first: slabs in the order in which
// their last block was released, blocks of a slab that is in use in the order of their release.
//
// Guarantees against fragmentation:
// - A group takes another slab only when its own slabs are full, or to spare cached blocks while
//   more slabs are free than `keep_free_slabs` says. So a sequence that starts on an
//   empty pool and never has more than n(g) blocks held or quarantined at once occupies at most
//   ceil(n(g) / blocks_per_slab(g)) slabs of each group beyond those taken to spare cached blocks.
//   `fits_alone` tests exactly this: such a sequence can always run when it is the only one.
// - When all sequences except one have been released and completed, every slab that the remaining
//   one does not touch is free, and whatever fits those slabs is admitted.
// Not guaranteed: a slab is returned only with its last block. After other sequences have left, the
// blocks of the last running sequence may be scattered over more slabs than they need, and it may
// be unable to grow although it fits alone. Blocks are never moved. As a last resort the scheduler
// preempts that sequence too and admits no other until it ends: the pool is then empty once the
// launched iterations have completed, and recomputing the sequence lays it out compactly, so that
// the first guarantee holds.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
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
  // With its callbacks.
  SlabPool(SlabPool&&) = default;
  SlabPool& operator=(SlabPool&&) = default;

  // Allocates a block of the group from its fullest slab with an empty block, else from a slab that
  // is free, else in place of a cached block; nullopt if there is none of these. Never the null
  // block.
  [[nodiscard]] std::optional<BlockId> allocate(GroupId group);

  // Whether `counts[g]` more blocks of every group g can be allocated now, all of them together.
  [[nodiscard]] bool can_allocate(std::span<const int64_t> counts) const;
  // The number of slabs that `counts[g]` blocks of every group g take.
  [[nodiscard]] int64_t num_slabs_for(std::span<const int64_t> counts) const;
  // Whether an empty pool has these blocks. A request that needs more is never admitted.
  [[nodiscard]] bool fits_alone(std::span<const int64_t> counts) const;

  // Adds a holder to a held block.
  void share(GroupId group, BlockId block);

  // Removes a holder. With the last one the block is released: it becomes reusable once
  // `complete(newest_launched)` has been called, or at once if it already has. `newest_launched`
  // never decreases from call to call.
  void release(GroupId group, BlockId block, int64_t newest_launched);
  // Releases a block that no launched iteration has used (a reservation that is rolled back) and
  // that is not shared.
  void release_unused(GroupId group, BlockId block);

  // A PrefixCache knows the contents of a held block, which are never written again. Without a
  // holder the block becomes cached instead of free.
  void mark_known(GroupId group, BlockId block);
  // The PrefixCache forgets the contents. A cached block becomes free.
  void forget(GroupId group, BlockId block);
  // Adds a holder to a known block, whether it is held, in quarantine or cached.
  void adopt(GroupId group, BlockId block);
  // Takes back an `adopt` that no launched iteration has used.
  void return_adopted(GroupId group, BlockId block);
  // Must call `forget` for this block, and may for others.
  void set_on_evict(std::function<void(GroupId, BlockId)> callback);
  // While more slabs than this are free, `allocate` takes one of them rather than a cached block
  // in a slab that is in use. At first no number is large enough.
  void keep_free_slabs(int64_t num_slabs) { kept_slabs_ = num_slabs; }

  // Tells the pool that every iteration up to and including `iteration` has completed on the
  // device.
  void complete(int64_t iteration);

  // Takes every block back from whatever holds or knows it and starts anew. Every launched
  // iteration, the newest being `completed`, has completed. Allocates nothing, so it works when
  // memory is out.
  void reset(int64_t completed);

  // The callback receives each block when its memory becomes reusable: when it becomes free, also
  // from release_unused, but not when it becomes cached. Tests poison the memory. It must not call
  // the pool.
  void set_on_reusable(std::function<void(GroupId, BlockId)> callback);

  // Number of held blocks; a block with several holders counts once.
  [[nodiscard]] int64_t num_held(GroupId group) const;
  // Number of holders of a held block.
  [[nodiscard]] int32_t num_holders(GroupId group, BlockId block) const;
  [[nodiscard]] int64_t num_quarantined(GroupId group) const;
  [[nodiscard]] int64_t num_quarantined() const;
  [[nodiscard]] int64_t num_cached(GroupId group) const;
  // Number of blocks whose contents a PrefixCache knows: cached, held or in quarantine.
  [[nodiscard]] int64_t num_known(GroupId group) const;
  [[nodiscard]] bool is_known(GroupId group, BlockId block) const;
  [[nodiscard]] bool is_cached(GroupId group, BlockId block) const;
  // Number of slabs that belong to no group, without the reserved slab 0. They may have cached
  // blocks.
  [[nodiscard]] int64_t num_free_slabs() const;
  [[nodiscard]] const KvLayout& layout() const;

  // Checks that free + cached + held + quarantined = total in every group, that no slab is owned
  // twice, that lists are consistent, and that only held blocks have more than one holder. Returns
  // an empty string, or a description of what is broken. O(blocks).
  [[nodiscard]] std::string check_integrity() const;

 private:
  friend class SlabPoolTestPeer;  // plants corruption to prove that check_integrity detects it

  static constexpr GroupId kUnowned = -1;
  static constexpr GroupId kReserved = -2;  // slab 0
  static constexpr int32_t kNoSlab = -1;
  static constexpr int32_t kWordBits = 64;

  struct Slab {
    GroupId owner;
    int32_t num_free;  // blocks of the owner that are not held, quarantined or cached; 0 if unowned
    int32_t prev;      // previous slab in its list, which is that of the owner's slabs with the
                       // same num_free, or that of unowned slabs with cached blocks
    int32_t next;      // next slab in that list, or the next slab without owner and contents
    int32_t num_cached;
    GroupId content;  // group of the cached blocks; unowned without any
  };

  struct BlockList {
    BlockId first = kNullBlock;
    BlockId last = kNullBlock;
    int64_t size = 0;
  };
  struct BlockLinks {
    BlockId prev = kNullBlock;
    BlockId next = kNullBlock;
  };

  struct Group {
    int32_t blocks_per_slab = 0;
    int64_t num_held = 0;
    int64_t num_quarantined = 0;
    int64_t num_free = 0;    // free blocks in the group's own slabs
    int64_t num_cached = 0;  // in all slabs
    int64_t num_known = 0;   // cached, held or in quarantine
    BlockList cached;        // cached blocks in the group's own slabs, least recently used first
    // first_slab lists the slabs with free blocks by num_free in 1..blocks_per_slab - 1, and a bit
    // of `nonempty` is set for each list that has any: the fullest slab is the head of the first
    // nonempty list. Full slabs are in no list.
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
  // The parts of check_integrity, in slab_pool_check.cc. Each returns the first fault, or "".
  struct Found;
  struct FoundBits;
  [[nodiscard]] std::string check_slab(size_t s, Found& found) const;
  [[nodiscard]] std::string check_bits(size_t s, FoundBits& bits, Found& found) const;
  [[nodiscard]] std::string check_group(size_t g, const Found& found) const;
  [[nodiscard]] std::string check_cached_list(size_t g, int64_t num_cached) const;
  [[nodiscard]] std::string check_slab_lists(size_t g, int64_t num_with_room) const;
  [[nodiscard]] std::string check_free_slabs(const Found& found) const;
  [[nodiscard]] std::string check_quarantine(const Found& found) const;
  void link(int32_t slab);
  void unlink(int32_t slab);
  // Throws InternalError unless the group holds the block; returns the slab of the block. The
  // message contains `verb`.
  int32_t check_held(GroupId group, BlockId block, const char* verb) const;
  uint16_t& more_holders(int32_t slab, BlockId block);
  // Of the per-block arrays, which have words_per_slab_ * 64 elements a slab.
  [[nodiscard]] size_t block_index(GroupId group, BlockId block) const {
    const int32_t blocks_per_slab = groups_[group].blocks_per_slab;
    return static_cast<size_t>(block / blocks_per_slab) * words_per_slab_ * kWordBits +
           static_cast<size_t>(block % blocks_per_slab);
  }
  [[nodiscard]] static uint64_t bit(int32_t index) { return uint64_t{1} << (index % kWordBits); }
  [[nodiscard]] static bool get(const std::vector<uint64_t>& bits, size_t index) {
    return (bits[index / kWordBits] >> (index % kWordBits) & 1) != 0;
  }
  [[nodiscard]] size_t check_known(GroupId group, BlockId block, const char* verb) const;
  // Whether the block of a quarantine entry has been adopted since.
  [[nodiscard]] bool is_passed_over(const Quarantined& entry) const {
    const size_t at = block_index(entry.group, entry.block);
    return !get(quarantined_, at) || release_tag_[at] != entry.newest_launched;
  }
  void append_cached(GroupId group, BlockId block);
  void remove_cached(GroupId group, BlockId block);
  void add_empty(GroupId group, int32_t slab);
  void disown(int32_t slab);
  void own_again(GroupId group, int32_t slab);
  void unlink_cached_slab(int32_t slab);
  void push_free_slab(int32_t slab);
  void make_room(GroupId group);
  void evict(GroupId group, BlockId block);
  void make_reusable(GroupId group, BlockId block);
  void drop_completed_entries();
  void free_all_slabs();

  KvLayout layout_;
  std::vector<Group> groups_;
  std::vector<Slab> slabs_;
  int32_t first_free_slab_;  // without cached blocks
  int32_t first_cached_slab_ =
      kNoSlab;  // unowned slabs with cached blocks, least recently used first
  int32_t last_cached_slab_ = kNoSlab;
  int64_t num_free_slabs_ = 0;  // unowned
  int64_t kept_slabs_ = std::numeric_limits<int64_t>::max();

  // One bit per block, words_per_slab_ words per slab, by the index of the block in its slab.
  int64_t words_per_slab_ = 0;
  std::vector<uint64_t> used_;         // held or quarantined
  std::vector<uint64_t> quarantined_;  // a subset of used_
  std::vector<uint64_t> known_;        // to a PrefixCache; cached where not in used_

  // Number of holders of a block beyond the first; words_per_slab_ * 64 entries per slab, by the
  // index of the block in its slab.
  std::vector<uint16_t> more_holders_;
  int64_t num_more_holders_ = 0;  // their sum
  // Of each block, by the same index.
  std::vector<BlockLinks> links_;     // in Group::cached
  std::vector<int64_t> release_tag_;  // of its last release

  // First in, first out, since tags never decrease. A vector with a moving head keeps its memory,
  // which a deque would not: an iteration allocates nothing once the pool has seen its largest
  // backlog.
  // The entry of a block that was adopted from quarantine stays and is passed over: the block is
  // not in quarantine or has a newer tag.
  std::vector<Quarantined> quarantine_;
  size_t quarantine_head_ = 0;
  int64_t num_quarantined_ = 0;
  int64_t newest_tag_ = -1;
  int64_t completed_ = -1;
  std::function<void(GroupId, BlockId)> on_reusable_;
  std::function<void(GroupId, BlockId)> on_evict_;
};

}  // namespace paceline
