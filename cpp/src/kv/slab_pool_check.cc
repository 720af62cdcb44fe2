// SPDX-License-Identifier: Apache-2.0
#include <bit>

#include "base/check.h"
#include "kv/slab_pool.h"
#include "wire/blocks.h"

namespace paceline {

// The counts that a walk over all slabs has found.
struct SlabPool::Found {
  struct GroupTotals {
    int64_t slabs = 0;
    int64_t held = 0;
    int64_t quarantined = 0;
    int64_t free = 0;
    int64_t cached = 0;        // in all slabs
    int64_t cached_owned = 0;  // in slabs that the group owns
    int64_t with_room = 0;
  };
  std::vector<GroupTotals> totals;
  int64_t num_unowned = 0;
  int64_t num_with_contents = 0;  // of the unowned
  int64_t num_more_holders = 0;
};

// The counts that the bits of one slab give.
struct SlabPool::FoundBits {
  int32_t num_used = 0;
  int32_t num_quarantined = 0;
  int32_t num_cached = 0;
  int32_t end = 0;  // one past the last used block
};

std::string SlabPool::check_integrity() const {
  Found found;
  found.totals.resize(groups_.size());
  for (size_t s = 0; s < slabs_.size(); ++s) {
    if (std::string fault = check_slab(s, found); !fault.empty()) return fault;
  }
  if (found.num_more_holders != num_more_holders_) {
    return concat("holders beyond the first: counted ", num_more_holders_, ", found ",
                  found.num_more_holders);
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (std::string fault = check_group(g, found); !fault.empty()) return fault;
  }
  if (std::string fault = check_free_slabs(found); !fault.empty()) return fault;
  return check_quarantine(found);
}

std::string SlabPool::check_slab(size_t s, Found& found) const {
  const Slab& slab = slabs_[s];
  FoundBits bits;
  if (std::string fault = check_bits(s, bits, found); !fault.empty()) return fault;
  if ((slab.owner == kReserved) != (s == 0)) {
    return concat("slab ", s, ": only slab 0 is reserved, owner is ", slab.owner);
  }
  const GroupId content = slab.owner >= 0 ? slab.owner : slab.content;
  if (slab.num_cached != bits.num_cached || (slab.content != kUnowned) != (bits.num_cached > 0) ||
      (bits.num_cached > 0 && slab.content != content)) {
    return concat("slab ", s, ": counts ", slab.num_cached, " cached blocks of group ",
                  slab.content, "; found ", bits.num_cached);
  }
  if (bits.num_cached > 0 && content < static_cast<GroupId>(groups_.size())) {
    found.totals[content].cached += bits.num_cached;
    if (slab.owner >= 0) found.totals[content].cached_owned += bits.num_cached;
  }
  if (slab.owner < 0) {
    if (bits.num_used != 0 || slab.num_free != 0) {
      return concat("slab ", s, ": has ", bits.num_used, " blocks in use but no owner");
    }
    found.num_unowned += slab.owner == kUnowned;
    found.num_with_contents += bits.num_cached > 0;
    return {};
  }
  if (slab.owner >= static_cast<GroupId>(groups_.size())) {
    return concat("slab ", s, ": owner is ", slab.owner);
  }
  const int32_t blocks_per_slab = groups_[slab.owner].blocks_per_slab;
  if (bits.end > blocks_per_slab) return concat("slab ", s, ": a block beyond the slab is in use");
  if (bits.num_used == 0) return concat("slab ", s, ": empty but not given back");
  if (slab.num_free + bits.num_cached + bits.num_used != blocks_per_slab) {
    return concat("slab ", s, ": free ", slab.num_free, " + cached ", bits.num_cached, " + held ",
                  bits.num_used - bits.num_quarantined, " + quarantined ", bits.num_quarantined,
                  " != ", blocks_per_slab);
  }
  Found::GroupTotals& total = found.totals[slab.owner];
  ++total.slabs;
  total.held += bits.num_used - bits.num_quarantined;
  total.quarantined += bits.num_quarantined;
  total.free += slab.num_free;
  total.with_room += slab.num_free > 0;
  return {};
}

std::string SlabPool::check_bits(size_t s, FoundBits& bits, Found& found) const {
  const uint64_t* const used = used_.data() + s * words_per_slab_;
  const uint64_t* const quarantined = quarantined_.data() + s * words_per_slab_;
  const uint64_t* const known = known_.data() + s * words_per_slab_;
  for (int32_t w = 0; w < words_per_slab_; ++w) {
    if ((quarantined[w] & ~used[w]) != 0) {
      return concat("slab ", s, ": a block is in quarantine but not in use");
    }
    bits.num_used += std::popcount(used[w]);
    bits.num_quarantined += std::popcount(quarantined[w]);
    bits.num_cached += std::popcount(known[w] & ~used[w]);
    const uint64_t any = used[w] | known[w];
    if (any != 0) bits.end = (w + 1) * kWordBits - std::countl_zero(any);
    const uint16_t* const more = more_holders_.data() + (s * words_per_slab_ + w) * kWordBits;
    for (int32_t index = 0; index < kWordBits; ++index) {
      found.num_more_holders += more[index];
      if (more[index] > 0 && (used[w] & ~quarantined[w] & bit(index)) == 0) {
        return concat("slab ", s, ": ", more[index],
                      " extra holders of a block that is not held, at index ",
                      w * kWordBits + index);
      }
    }
  }
  return {};
}

std::string SlabPool::check_group(size_t g, const Found& found) const {
  const Group& group = groups_[g];
  const Found::GroupTotals& total = found.totals[g];
  if (group.num_held != total.held || group.num_quarantined != total.quarantined ||
      group.num_free != total.free || group.num_cached != total.cached ||
      group.num_free + total.cached_owned + group.num_held + group.num_quarantined !=
          total.slabs * group.blocks_per_slab) {
    return concat("group ", g, ": counts free ", group.num_free, ", cached ", group.num_cached,
                  ", held ", group.num_held, ", quarantined ", group.num_quarantined, "; found ",
                  total.free, ", ", total.cached, ", ", total.held, ", ", total.quarantined);
  }
  if (std::string fault = check_cached_list(g, total.cached_owned); !fault.empty()) return fault;
  return check_slab_lists(g, total.with_room);
}

std::string SlabPool::check_cached_list(size_t g, int64_t num_cached) const {
  const Group& group = groups_[g];
  int64_t num_linked = 0;
  BlockId before = kNullBlock;
  for (BlockId block = group.cached.first; block != kNullBlock;
       block = links_[block_index(static_cast<GroupId>(g), block)].next) {
    const auto id = static_cast<GroupId>(g);
    if (!is_cached(id, block) || slabs_[block / group.blocks_per_slab].owner != id ||
        links_[block_index(id, block)].prev != before) {
      return concat("group ", g, ": block ", block, " is wrongly listed as cached");
    }
    before = block;
    if (++num_linked > num_cached) break;
  }
  if (num_linked != num_cached || group.cached.size != num_linked || group.cached.last != before) {
    return concat("group ", g, ": ", num_linked, " cached blocks listed, counted ",
                  group.cached.size, ", found ", num_cached);
  }
  return {};
}

std::string SlabPool::check_slab_lists(size_t g, int64_t num_with_room) const {
  const Group& group = groups_[g];
  // Each slab records its list and its predecessor, so no slab is visited twice.
  int64_t num_listed = 0;
  for (int32_t num_free = 0; num_free < group.blocks_per_slab; ++num_free) {
    const int32_t first = group.first_slab[num_free];
    if ((first != kNoSlab) != ((group.nonempty[num_free / kWordBits] & bit(num_free)) != 0)) {
      return concat("group ", g, ": list of slabs with ", num_free, " free is mismarked");
    }
    int32_t prev = kNoSlab;
    for (int32_t s = first; s != kNoSlab; s = slabs_[s].next) {
      if (s < 0 || s >= static_cast<int32_t>(slabs_.size())) {
        return concat("group ", g, ": slab ", s, " is listed");
      }
      const Slab& slab = slabs_[s];
      if (slab.owner != static_cast<GroupId>(g) || slab.num_free != num_free || num_free == 0 ||
          slab.prev != prev) {
        return concat("group ", g, ": slab ", s, " is in the wrong list");
      }
      prev = s;
      ++num_listed;
    }
  }
  if (num_listed != num_with_room) {
    return concat("group ", g, ": ", num_listed, " slabs listed, ", num_with_room, " have room");
  }
  return {};
}

std::string SlabPool::check_free_slabs(const Found& found) const {
  int64_t num_with_contents = found.num_with_contents;
  int64_t num_chained = 0;
  for (int32_t s = first_free_slab_; s != kNoSlab; s = slabs_[s].next) {
    if (s < 0 || s >= static_cast<int32_t>(slabs_.size()) || slabs_[s].owner != kUnowned ||
        slabs_[s].num_cached > 0) {
      return concat("slab ", s, " is in the free list but not free");
    }
    if (++num_chained > found.num_unowned) return "the list of free slabs has a cycle";
  }
  int32_t slab_before = kNoSlab;
  for (int32_t s = first_cached_slab_; s != kNoSlab; s = slabs_[s].next) {
    if (slabs_[s].owner != kUnowned || slabs_[s].num_cached == 0 || slabs_[s].prev != slab_before) {
      return concat("slab ", s, " is wrongly listed as one with cached blocks only");
    }
    slab_before = s;
    if (--num_with_contents < 0) return "the list of slabs with cached blocks has a cycle";
    ++num_chained;
  }
  if (num_with_contents != 0 || last_cached_slab_ != slab_before) {
    return concat(num_with_contents, " slabs with cached blocks are not listed");
  }
  if (num_chained != found.num_unowned || num_chained != num_free_slabs_) {
    return concat("free slabs: ", num_chained, " listed, ", found.num_unowned, " unowned, counted ",
                  num_free_slabs_);
  }
  return {};
}

std::string SlabPool::check_quarantine(const Found& found) const {
  std::vector<uint64_t> unlisted = quarantined_;
  int64_t num_bits = 0;
  for (const Found::GroupTotals& total : found.totals) num_bits += total.quarantined;
  int64_t num_listed = 0;
  int64_t tag = completed_;
  for (size_t i = quarantine_head_; i < quarantine_.size(); ++i) {
    const Quarantined& entry = quarantine_[i];
    // The first entry is newer than completed_, the others at least as new as their predecessor.
    if (entry.newest_launched < tag + (i == quarantine_head_)) {
      return concat("quarantine: iteration ", entry.newest_launched, " after ", tag);
    }
    tag = entry.newest_launched;
    if (entry.group < 0 || entry.group >= static_cast<GroupId>(groups_.size())) {
      return concat("quarantine: group is ", entry.group);
    }
    const int32_t blocks_per_slab = groups_[entry.group].blocks_per_slab;
    const int32_t slab = entry.block / blocks_per_slab;
    const int32_t index = entry.block % blocks_per_slab;
    if (entry.block <= 0 || slab >= static_cast<int32_t>(slabs_.size()) ||
        slabs_[slab].owner != entry.group) {
      return concat("quarantine: group ", entry.group, " does not own block ", entry.block);
    }
    if (is_passed_over(entry)) continue;
    ++num_listed;
    uint64_t& word = unlisted[slab * words_per_slab_ + index / kWordBits];
    if ((word & bit(index)) == 0) {
      return concat("quarantine: block ", entry.block, " of group ", entry.group,
                    " is listed twice or not marked");
    }
    word &= ~bit(index);
  }
  if (num_bits != num_listed || num_bits != num_quarantined_) {
    return concat("quarantine: ", num_listed, " listed, ", num_bits, " marked, ", num_quarantined_,
                  " counted");
  }
  return {};
}

}  // namespace paceline
