// SPDX-License-Identifier: Apache-2.0

// The part of SlabPool that keeps the contents of blocks that no sequence holds.

#include <utility>

#include "base/check.h"
#include "kv/slab_pool.h"
#include "wire/blocks.h"

namespace paceline {

void SlabPool::set_on_evict(std::function<void(GroupId, BlockId)> callback) {
  on_evict_ = std::move(callback);
}

// No block of the slab is held or in quarantine any more: any group may have it.
void SlabPool::disown(int32_t slab) {
  Slab& entry = slabs_[slab];
  const GroupId owner = entry.owner;
  Group& group = groups_[owner];
  if (entry.num_free > 0 && entry.num_free < group.blocks_per_slab) unlink(slab);
  group.num_free -= entry.num_free;
  const BlockId begin = slab * group.blocks_per_slab;
  for (int32_t i = 0, left = entry.num_cached; left > 0; ++i) {
    if (!get(known_, block_index(owner, begin + i))) continue;
    remove_cached(owner, begin + i);
    --left;
  }
  entry.owner = kUnowned;
  entry.num_free = 0;
  ++num_free_slabs_;
  if (entry.num_cached == 0) {
    push_free_slab(slab);
    return;
  }
  entry.prev = last_cached_slab_;
  entry.next = kNoSlab;
  (last_cached_slab_ != kNoSlab ? slabs_[last_cached_slab_].next : first_cached_slab_) = slab;
  last_cached_slab_ = slab;
}

void SlabPool::push_free_slab(int32_t slab) {
  slabs_[slab] = Slab{kUnowned, 0, kNoSlab, std::exchange(first_free_slab_, slab), 0, kUnowned};
}

void SlabPool::unlink_cached_slab(int32_t slab) {
  const Slab& entry = slabs_[slab];
  (entry.prev != kNoSlab ? slabs_[entry.prev].next : first_cached_slab_) = entry.next;
  (entry.next != kNoSlab ? slabs_[entry.next].prev : last_cached_slab_) = entry.prev;
}

// Gives an unowned slab back to the group whose cached blocks it has. The caller marks one of them
// as used and then links the slab.
void SlabPool::own_again(GroupId group_id, int32_t slab) {
  Group& group = groups_[group_id];
  Slab& entry = slabs_[slab];
  unlink_cached_slab(slab);
  --num_free_slabs_;
  entry.owner = group_id;
  entry.num_free = group.blocks_per_slab - entry.num_cached;
  group.num_free += entry.num_free;
  const BlockId begin = slab * group.blocks_per_slab;
  for (int32_t i = 0, left = entry.num_cached; left > 0; ++i) {
    if (!get(known_, block_index(group_id, begin + i))) continue;
    append_cached(group_id, begin + i);
    --left;
  }
}

void SlabPool::append_cached(GroupId group_id, BlockId block) {
  BlockList& list = groups_[group_id].cached;
  links_[block_index(group_id, block)] = {.prev = list.last, .next = kNullBlock};
  (list.last != kNullBlock ? links_[block_index(group_id, list.last)].next : list.first) = block;
  list.last = block;
  ++list.size;
}

void SlabPool::remove_cached(GroupId group_id, BlockId block) {
  BlockList& list = groups_[group_id].cached;
  const BlockLinks links = links_[block_index(group_id, block)];
  (links.prev != kNullBlock ? links_[block_index(group_id, links.prev)].next : list.first) =
      links.next;
  (links.next != kNullBlock ? links_[block_index(group_id, links.next)].prev : list.last) =
      links.prev;
  --list.size;
}

// Makes an empty block in a slab of the group or an empty slab, if cached blocks allow it.
void SlabPool::make_room(GroupId group_id) {
  const BlockList& own = groups_[group_id].cached;
  if (own.size > 0 && num_free_slabs_ <= kept_slabs_) {
    evict(group_id, own.first);
    return;
  }
  if (first_free_slab_ != kNoSlab || first_cached_slab_ == kNoSlab) return;
  const int32_t slab = first_cached_slab_;
  const GroupId content = slabs_[slab].content;
  const int32_t blocks_per_slab = groups_[content].blocks_per_slab;
  for (int32_t i = 0; i < blocks_per_slab && slabs_[slab].num_cached > 0; ++i) {
    const BlockId block = slab * blocks_per_slab + i;
    if (get(known_, block_index(content, block))) evict(content, block);
  }
}

void SlabPool::evict(GroupId group_id, BlockId block) {
  on_evict_(group_id, block);
  PACELINE_CHECK(!is_known(group_id, block), "block ", block, " of group ", group_id,
                 " is evicted, but the prefix cache still knows it");
}

size_t SlabPool::check_known(GroupId group_id, BlockId block, const char* verb) const {
  PACELINE_CHECK(
      group_id >= 0 && group_id < static_cast<GroupId>(groups_.size()) && block > 0 &&
          block / groups_[group_id].blocks_per_slab < static_cast<int32_t>(slabs_.size()) &&
          is_known(group_id, block),
      "group ", group_id, " ", verb, " block ", block, ", which no prefix cache knows");
  return block_index(group_id, block);
}

void SlabPool::mark_known(GroupId group_id, BlockId block) {
  check_held(group_id, block, "marks");
  const size_t at = block_index(group_id, block);
  PACELINE_CHECK(!get(known_, at), "block ", block, " of group ", group_id, " is marked twice");
  known_[at / kWordBits] |= bit(static_cast<int32_t>(at % kWordBits));
  ++groups_[group_id].num_known;
}

void SlabPool::forget(GroupId group_id, BlockId block) {
  const size_t at = check_known(group_id, block, "forgets");
  known_[at / kWordBits] &= ~bit(static_cast<int32_t>(at % kWordBits));
  --groups_[group_id].num_known;
  if (get(used_, at)) return;
  const int32_t slab = block / groups_[group_id].blocks_per_slab;
  Slab& entry = slabs_[slab];
  --groups_[group_id].num_cached;
  if (--entry.num_cached == 0) entry.content = kUnowned;
  if (entry.owner == group_id) {
    remove_cached(group_id, block);
    add_empty(group_id, slab);
  } else if (entry.num_cached == 0) {
    unlink_cached_slab(slab);
    push_free_slab(slab);
  }
  if (on_reusable_) on_reusable_(group_id, block);
}

void SlabPool::adopt(GroupId group_id, BlockId block) {
  const size_t at = check_known(group_id, block, "adopts");
  if (get(used_, at) && !get(quarantined_, at)) {
    share(group_id, block);
    return;
  }
  Group& group = groups_[group_id];
  ++group.num_held;
  const uint64_t mask = bit(static_cast<int32_t>(at % kWordBits));
  if (get(quarantined_, at)) {
    quarantined_[at / kWordBits] &= ~mask;
    --group.num_quarantined;
    --num_quarantined_;
    return;
  }
  const int32_t slab = block / group.blocks_per_slab;
  Slab& entry = slabs_[slab];
  const bool is_unowned = entry.owner == kUnowned;
  if (is_unowned) own_again(group_id, slab);
  remove_cached(group_id, block);
  --group.num_cached;
  if (--entry.num_cached == 0) entry.content = kUnowned;
  used_[at / kWordBits] |= mask;
  if (is_unowned && entry.num_free > 0) link(slab);
}

void SlabPool::return_adopted(GroupId group_id, BlockId block) {
  const int32_t slab = check_held(group_id, block, "returns");
  const size_t at = check_known(group_id, block, "returns");
  if (uint16_t& more = more_holders(slab, block); more > 0) {
    --more;
    --num_more_holders_;
    return;
  }
  Group& group = groups_[group_id];
  --group.num_held;
  if (release_tag_[at] <= completed_) {
    make_reusable(group_id, block);
    return;
  }
  quarantined_[at / kWordBits] |= bit(static_cast<int32_t>(at % kWordBits));
  ++group.num_quarantined;
  ++num_quarantined_;
}

int64_t SlabPool::num_cached(GroupId group) const { return groups_.at(group).num_cached; }

int64_t SlabPool::num_known(GroupId group) const { return groups_.at(group).num_known; }

bool SlabPool::is_known(GroupId group, BlockId block) const {
  return get(known_, block_index(group, block));
}

bool SlabPool::is_cached(GroupId group, BlockId block) const {
  const size_t at = block_index(group, block);
  return get(known_, at) && !get(used_, at);
}

}  // namespace paceline
