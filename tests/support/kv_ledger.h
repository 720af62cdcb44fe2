// SPDX-License-Identifier: Apache-2.0
#pragma once

// A dictionary of byte ranges that says which sequences hold which block of a pool, and which
// blocks are in quarantine. Its code is independent of the pool, which must agree with it.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/check.h"
#include "kv/kv_layout.h"
#include "kv/slab_pool.h"
#include "wire/blocks.h"

namespace paceline::testing {

struct KvViolation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) throw KvViolation(concat(parts...));
}

class KvLedger {
 public:
  explicit KvLedger(const KvLayout& layout)
      : layout_(layout),
        slabs_(static_cast<size_t>(layout.num_slabs)),
        num_held_(layout.groups.size()),
        num_quarantined_(layout.groups.size()) {}

  // Whether each group has at least the given number of free blocks.
  [[nodiscard]] bool can_allocate(const std::vector<int64_t>& counts) const {
    std::vector<int64_t> room(counts.size(), 0);
    int64_t num_free = -1;  // slab 0 is never used and never free
    for (const SlabUse& slab : slabs_) {
      if (slab.num_used == 0) {
        ++num_free;
      } else {
        room[slab.group] += layout_.blocks_per_slab(slab.group) - slab.num_used;
      }
    }
    for (GroupId g = 0; g < static_cast<GroupId>(counts.size()); ++g) {
      for (int64_t missing = counts[g] - room[g]; missing > 0; --num_free) {
        missing -= layout_.blocks_per_slab(g);
      }
    }
    return num_free >= 0;
  }

  // A sequence gets a block that no other has.
  void own(int32_t s, GroupId g, BlockId block) {
    const int64_t bytes = layout_.groups.at(g).block_bytes;
    const Range range{(int64_t{block} + 1) * bytes, g, block, uint32_t{1} << s, -1};
    const int64_t begin = block * bytes;
    require(begin >= layout_.slab_bytes && range.end <= layout_.pool_bytes, "block ", block,
            " of group ", g, " is in slab 0 or outside the pool");
    const auto next = ranges_.lower_bound(begin);
    const auto clash = [&](const Range& other) {
      return concat("block ", block, " of group ", g, " handed to ", s, " overlaps block ",
                    other.block, " of group ", other.group, ", held by mask ", other.holders,
                    other.holders == 0 ? " (quarantine)" : "");
    };
    if (next != ranges_.end()) {
      require(next->first >= range.end, clash(next->second));
    }
    if (next != ranges_.begin()) {
      const Range& prev = std::prev(next)->second;
      require(prev.end <= begin, clash(prev));
    }
    ranges_.emplace_hint(next, begin, range);
    SlabUse& slab = slabs_[static_cast<size_t>(begin / layout_.slab_bytes)];
    require(slab.num_used == 0 || slab.group == g, "two groups in a slab");
    slab.group = g;
    ++slab.num_used;
    ++num_held_[g];
  }

  // Adds a holder to a block that has one. Returns how many it has.
  int32_t hold(int32_t s, GroupId g, BlockId block) {
    Range& range = ranges_.at(block * layout_.groups[g].block_bytes);
    require(range.group == g && range.holders != 0, "block ", block, " is shared but not held");
    range.holders |= uint32_t{1} << s;
    return std::popcount(range.holders);
  }

  // The last holder that goes leaves the block in quarantine, under the newest launched iteration.
  void disown(int32_t s, GroupId g, BlockId block, int64_t launched) {
    Range& range = ranges_.at(block * layout_.groups[g].block_bytes);
    range.holders &= ~(uint32_t{1} << s);
    if (range.holders != 0) return;
    range.tag = launched;
    tags_.insert(launched);
    --num_held_[g];
    ++num_quarantined_[g];
  }

  // The pool may hand out a block again.
  void reuse(GroupId g, BlockId block, int64_t completed) {
    const auto entry = ranges_.find(block * layout_.groups[g].block_bytes);
    require(entry != ranges_.end() && entry->second.group == g, "no sequence held block ", block);
    const Range& range = entry->second;
    require(range.holders == 0, "block ", block, " is reusable but held by mask ", range.holders);
    for (const PendingCopy& pending : pending_copies_) {
      require(pending.copy.group != g ||
                  (pending.copy.source != block && pending.copy.destination != block),
              "block ", block, " is reusable, but iteration ", pending.iteration, " copies ",
              pending.copy.source, " to ", pending.copy.destination);
    }
    require(range.tag <= completed, "block ", block, " is reusable, but iteration ", range.tag,
            " may still use it: ", completed, " is the last that completed");
    tags_.erase(tags_.find(range.tag));
    --slabs_[static_cast<size_t>(entry->first / layout_.slab_bytes)].num_used;
    --num_quarantined_[g];
    ranges_.erase(entry);
  }

  // A copy of an iteration uses its two blocks until that iteration has completed.
  void begin_copy(int64_t iteration, const BlockCopy& copy) {
    pending_copies_.push_back({iteration, copy});
  }
  void end_copies(int64_t completed) {
    std::erase_if(pending_copies_,
                  [&](const PendingCopy& pending) { return pending.iteration <= completed; });
  }

  void check_quarantine(int64_t completed) const {
    require(tags_.empty() || *tags_.begin() > completed, "a block released under ",
            tags_.empty() ? -1 : *tags_.begin(), " is still in quarantine");
  }

  // The pool must have what the ledger has.
  void check(const SlabPool& pool) const {
    const std::string broken = pool.check_integrity();
    require(broken.empty(), broken);
    for (GroupId g = 0; g < static_cast<GroupId>(num_held_.size()); ++g) {
      require(pool.num_held(g) == num_held_[g], "group ", g, " holds ", pool.num_held(g), ", not ",
              num_held_[g]);
      require(pool.num_quarantined(g) == num_quarantined_[g], "group ", g, " has ",
              pool.num_quarantined(g), " in quarantine, not ", num_quarantined_[g]);
    }
    const auto num_empty = std::count_if(slabs_.begin(), slabs_.end(),
                                         [](const SlabUse& slab) { return slab.num_used == 0; });
    require(pool.num_free_slabs() == num_empty - 1, "free slabs");
  }

  [[nodiscard]] bool is_held(int32_t s, GroupId g, BlockId block) const {
    const Range& range = ranges_.at(block * layout_.groups[g].block_bytes);
    return (range.holders >> s & 1) != 0 && range.group == g;
  }

  // Every holder is a table entry, and the pool counts the same number of holders for each block.
  void check_holders(const SlabPool& pool, size_t num_entries) const {
    size_t num_holders = 0;
    size_t num_quarantined = 0;
    for (const auto& [begin, range] : ranges_) {
      const int32_t holders = std::popcount(range.holders);
      num_holders += static_cast<size_t>(holders);
      num_quarantined += holders == 0 ? 1 : 0;
      require(holders == 0 || pool.num_holders(range.group, range.block) == holders, "block ",
              range.block, " has ", holders, " holders");
    }
    require(num_entries == num_holders && num_quarantined == tags_.size(), "blocks are lost");
  }

 private:
  struct Range {
    int64_t end;
    GroupId group;
    BlockId block;
    uint32_t holders;  // a bit a sequence; none: in quarantine
    int64_t tag;       // in quarantine: the newest iteration launched when the last holder went
  };

  // A copy of an iteration that may still be under way.
  struct PendingCopy {
    int64_t iteration;
    BlockCopy copy;
  };
  struct SlabUse {
    GroupId group = 0;
    int32_t num_used = 0;  // held or in quarantine
  };

  const KvLayout layout_;
  std::map<int64_t, Range> ranges_;  // by first byte; held or in quarantine
  std::multiset<int64_t> tags_;      // of all blocks in quarantine
  std::vector<SlabUse> slabs_;
  std::vector<int64_t> num_held_;
  std::vector<int64_t> num_quarantined_;
  std::vector<PendingCopy> pending_copies_;
};

}  // namespace paceline::testing
