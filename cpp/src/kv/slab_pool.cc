// SPDX-License-Identifier: Apache-2.0
#include "kv/slab_pool.h"

#include "base/check.h"
#include "wire/blocks.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

namespace paceline {
namespace {

// A dead head of the quarantine shorter than this is not worth moving the rest for.
constexpr size_t kMinCompaction = 256;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

SlabPool::SlabPool(const KvLayout& layout) : layout_(layout), first_free_slab_(kNoSlab) {
  PACELINE_CHECK(layout_.num_slabs >= 1 && layout_.slab_bytes > 0, "num_slabs is ",
                 layout_.num_slabs, ", slab_bytes is ", layout_.slab_bytes);
  int64_t most_blocks = 1;
  for (const KvGroup& kv_group : layout_.groups) {
    PACELINE_CHECK(kv_group.block_bytes > 0 && layout_.slab_bytes % kv_group.block_bytes == 0,
                   "slab_bytes is ", layout_.slab_bytes, ", block_bytes is ", kv_group.block_bytes);
    const int64_t blocks_per_slab = layout_.slab_bytes / kv_group.block_bytes;
    PACELINE_CHECK(layout_.num_slabs <= std::numeric_limits<BlockId>::max() / blocks_per_slab,
                   "block ids exceed 32 bits: ", layout_.num_slabs, " slabs of ", blocks_per_slab);
    Group group;
    group.blocks_per_slab = static_cast<int32_t>(blocks_per_slab);
    group.first_slab.assign(static_cast<size_t>(blocks_per_slab), kNoSlab);
    group.nonempty.assign(static_cast<size_t>(divide_up(blocks_per_slab, kWordBits)), 0);
    groups_.push_back(std::move(group));
    most_blocks = std::max(most_blocks, blocks_per_slab);
  }
  words_per_slab_ = divide_up(most_blocks, kWordBits);
  used_.assign(static_cast<size_t>(layout_.num_slabs * words_per_slab_), 0);
  quarantined_.assign(used_.size(), 0);
  known_.assign(used_.size(), 0);
  links_.resize(used_.size() * kWordBits);
  release_tag_.assign(used_.size() * kWordBits, -1);
  more_holders_.assign(used_.size() * kWordBits, 0);
  slabs_.resize(static_cast<size_t>(layout_.num_slabs));
  free_all_slabs();
}

void SlabPool::free_all_slabs() {
  std::fill(slabs_.begin(), slabs_.end(), Slab{kUnowned, 0, kNoSlab, kNoSlab, 0, kUnowned});
  slabs_[0].owner = kReserved;
  first_free_slab_ = first_cached_slab_ = last_cached_slab_ = kNoSlab;
  for (auto slab = static_cast<int32_t>(layout_.num_slabs) - 1; slab > 0; --slab) {
    slabs_[slab].next = std::exchange(first_free_slab_, slab);
  }
  num_free_slabs_ = layout_.num_slabs - 1;
}

void SlabPool::reset(int64_t completed) {
  for (int32_t slab = 1; on_reusable_ && slab < static_cast<int32_t>(slabs_.size()); ++slab) {
    const GroupId owner =
        slabs_[slab].owner == kUnowned ? slabs_[slab].content : slabs_[slab].owner;
    if (owner == kUnowned) continue;
    const int32_t blocks_per_slab = groups_[owner].blocks_per_slab;
    for (int32_t index = 0; index < blocks_per_slab; ++index) {
      const BlockId block = slab * blocks_per_slab + index;
      const size_t at = block_index(owner, block);
      if (get(used_, at) || get(known_, at)) on_reusable_(owner, block);
    }
  }
  for (Group& group : groups_) {
    group.num_held = 0;
    group.num_quarantined = 0;
    group.num_free = 0;
    group.num_cached = 0;
    group.num_known = 0;
    group.cached = {};
    std::fill(group.first_slab.begin(), group.first_slab.end(), kNoSlab);
    std::fill(group.nonempty.begin(), group.nonempty.end(), 0);
  }
  std::fill(used_.begin(), used_.end(), 0);
  std::fill(quarantined_.begin(), quarantined_.end(), 0);
  std::fill(known_.begin(), known_.end(), 0);
  std::fill(release_tag_.begin(), release_tag_.end(), -1);
  std::fill(more_holders_.begin(), more_holders_.end(), 0);
  num_more_holders_ = 0;
  free_all_slabs();
  quarantine_.clear();
  quarantine_head_ = 0;
  num_quarantined_ = 0;
  newest_tag_ = completed;
  completed_ = completed;
}

void SlabPool::link(int32_t slab) {
  Slab& entry = slabs_[slab];
  Group& group = groups_[entry.owner];
  int32_t& first = group.first_slab[entry.num_free];
  entry.prev = kNoSlab;
  entry.next = first;
  if (first != kNoSlab) slabs_[first].prev = slab;
  first = slab;
  group.nonempty[entry.num_free / kWordBits] |= bit(entry.num_free);
}

void SlabPool::unlink(int32_t slab) {
  const Slab& entry = slabs_[slab];
  Group& group = groups_[entry.owner];
  if (entry.next != kNoSlab) slabs_[entry.next].prev = entry.prev;
  if (entry.prev != kNoSlab) {
    slabs_[entry.prev].next = entry.next;
    return;
  }
  group.first_slab[entry.num_free] = entry.next;
  if (entry.next == kNoSlab) group.nonempty[entry.num_free / kWordBits] &= ~bit(entry.num_free);
}

std::optional<BlockId> SlabPool::allocate(GroupId group_id) {
  PACELINE_CHECK(group_id >= 0 && group_id < static_cast<GroupId>(groups_.size()), "group is ",
                 group_id);
  Group& group = groups_[group_id];
  if (group.num_free == 0) make_room(group_id);
  int32_t slab = kNoSlab;
  if (group.num_free > 0) {
    size_t word = 0;
    while (group.nonempty[word] == 0) ++word;
    slab = group.first_slab[word * kWordBits + std::countr_zero(group.nonempty[word])];
    unlink(slab);
  } else if (first_free_slab_ != kNoSlab) {
    slab = std::exchange(first_free_slab_, slabs_[first_free_slab_].next);
    --num_free_slabs_;
    slabs_[slab].owner = group_id;
    slabs_[slab].num_free = group.blocks_per_slab;
    group.num_free += group.blocks_per_slab;
  } else {
    return std::nullopt;
  }

  // Bits past blocks_per_slab look free, but a lower bit is free too, since num_free > 0.
  uint64_t* const words = used(slab);
  const uint64_t* const known = known_.data() + int64_t{slab} * words_per_slab_;
  int32_t word = 0;
  while (~(words[word] | known[word]) == 0) ++word;
  const int32_t index = word * kWordBits + std::countr_one(words[word] | known[word]);
  words[word] |= bit(index);

  --group.num_free;
  ++group.num_held;
  if (--slabs_[slab].num_free > 0) link(slab);
  return slab * group.blocks_per_slab + index;
}

bool SlabPool::can_allocate(std::span<const int64_t> counts) const {
  PACELINE_CHECK(counts.size() == groups_.size(), counts.size(), " counts for ", groups_.size(),
                 " groups");
  int64_t num_slabs = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const int64_t room = groups_[g].num_free + groups_[g].cached.size;
    const int64_t missing = std::max<int64_t>(0, counts[g] - room);
    num_slabs += divide_up(missing, groups_[g].blocks_per_slab);
  }
  return num_slabs <= num_free_slabs_;
}

int64_t SlabPool::num_slabs_for(std::span<const int64_t> counts) const {
  PACELINE_CHECK(counts.size() == groups_.size(), counts.size(), " counts for ", groups_.size(),
                 " groups");
  int64_t num_slabs = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    num_slabs += divide_up(counts[g], groups_[g].blocks_per_slab);
  }
  return num_slabs;
}

bool SlabPool::fits_alone(std::span<const int64_t> counts) const {
  return num_slabs_for(counts) <= layout_.num_slabs - 1;
}

int32_t SlabPool::check_held(GroupId group_id, BlockId block, const char* verb) const {
  PACELINE_CHECK(group_id >= 0 && group_id < static_cast<GroupId>(groups_.size()), "group is ",
                 group_id);
  const int32_t blocks_per_slab = groups_[group_id].blocks_per_slab;
  const int32_t slab = block / blocks_per_slab;
  PACELINE_CHECK(
      block > 0 && slab < static_cast<int32_t>(slabs_.size()) && slabs_[slab].owner == group_id,
      "group ", group_id, " ", verb, " block ", block, ", which it does not own");
  const int32_t index = block % blocks_per_slab;
  const auto word = static_cast<size_t>(slab * words_per_slab_ + index / kWordBits);
  PACELINE_CHECK((used_[word] & ~quarantined_[word] & bit(index)) != 0, "group ", group_id, " ",
                 verb, " block ", block, ", which is already ",
                 (used_[word] & bit(index)) != 0 ? "in quarantine" : "free");
  return slab;
}

uint16_t& SlabPool::more_holders(int32_t slab, BlockId block) {
  const int32_t index = block % groups_[slabs_[slab].owner].blocks_per_slab;
  return more_holders_[static_cast<size_t>(slab * words_per_slab_ * kWordBits + index)];
}

void SlabPool::share(GroupId group_id, BlockId block) {
  const int32_t slab = check_held(group_id, block, "shares");
  uint16_t& more = more_holders(slab, block);
  PACELINE_CHECK(more < std::numeric_limits<uint16_t>::max(), "group ", group_id, " shares block ",
                 block, " with more than ", more, " others");
  ++more;
  ++num_more_holders_;
}

void SlabPool::make_reusable(GroupId group_id, BlockId block) {
  const int32_t slab = block / groups_[group_id].blocks_per_slab;
  const int32_t index = block % groups_[group_id].blocks_per_slab;
  used(slab)[index / kWordBits] &= ~bit(index);
  quarantined(slab)[index / kWordBits] &= ~bit(index);
  if (get(known_, block_index(group_id, block))) {
    ++slabs_[slab].num_cached;
    ++groups_[group_id].num_cached;
    slabs_[slab].content = group_id;
    append_cached(group_id, block);
    if (slabs_[slab].num_free + slabs_[slab].num_cached == groups_[group_id].blocks_per_slab) {
      disown(slab);
    }
    return;
  }
  add_empty(group_id, slab);
  if (on_reusable_) on_reusable_(group_id, block);
}

// Counts one more empty block in a slab that the group owns.
void SlabPool::add_empty(GroupId group_id, int32_t slab) {
  Group& group = groups_[group_id];
  Slab& entry = slabs_[slab];
  if (entry.num_free > 0) unlink(slab);
  ++group.num_free;
  ++entry.num_free;
  if (entry.num_free < group.blocks_per_slab) link(slab);
  if (entry.num_free + entry.num_cached == group.blocks_per_slab) disown(slab);
}

void SlabPool::release(GroupId group_id, BlockId block, int64_t newest_launched) {
  const int32_t slab = check_held(group_id, block, "releases");
  PACELINE_CHECK(newest_launched >= newest_tag_, "newest_launched is ", newest_launched, " after ",
                 newest_tag_);
  newest_tag_ = newest_launched;
  if (uint16_t& more = more_holders(slab, block); more > 0) {
    --more;
    --num_more_holders_;
    return;
  }
  Group& group = groups_[group_id];
  int64_t& tag = release_tag_[block_index(group_id, block)];
  // Adopted from quarantine, and released again before another launch: its entry is still there.
  const bool is_listed = tag == newest_launched && tag > completed_;
  tag = newest_launched;
  if (newest_launched <= completed_) {
    --group.num_held;
    make_reusable(group_id, block);
    return;
  }
  if (!is_listed) quarantine_.push_back({newest_launched, group_id, block});
  const int32_t index = block % group.blocks_per_slab;
  quarantined(slab)[index / kWordBits] |= bit(index);
  --group.num_held;
  ++group.num_quarantined;
  ++num_quarantined_;
}

void SlabPool::release_unused(GroupId group_id, BlockId block) {
  const int32_t slab = check_held(group_id, block, "releases");
  PACELINE_CHECK(more_holders(slab, block) == 0, "group ", group_id, " releases block ", block,
                 " as unused, but others hold it");
  --groups_[group_id].num_held;
  make_reusable(group_id, block);
}

void SlabPool::complete(int64_t iteration) {
  completed_ = std::max(completed_, iteration);
  while (quarantine_head_ < quarantine_.size() &&
         quarantine_[quarantine_head_].newest_launched <= completed_) {
    const Quarantined entry = quarantine_[quarantine_head_++];
    if (is_passed_over(entry)) continue;
    --groups_[entry.group].num_quarantined;
    --num_quarantined_;
    make_reusable(entry.group, entry.block);
  }
  drop_completed_entries();
}

void SlabPool::drop_completed_entries() {
  const size_t num_left = quarantine_.size() - quarantine_head_;
  // Moves at most as many entries as it drops, which keeps this O(1) per entry.
  if (num_left != 0 && (quarantine_head_ < kMinCompaction || quarantine_head_ < num_left)) return;
  quarantine_.erase(quarantine_.begin(),
                    quarantine_.begin() + static_cast<std::ptrdiff_t>(quarantine_head_));
  quarantine_head_ = 0;
}

void SlabPool::set_on_reusable(std::function<void(GroupId, BlockId)> callback) {
  on_reusable_ = std::move(callback);
}

int64_t SlabPool::num_held(GroupId group) const { return groups_.at(group).num_held; }

int32_t SlabPool::num_holders(GroupId group_id, BlockId block) const {
  const int32_t slab = check_held(group_id, block, "counts the holders of");
  const int32_t index = block % groups_[group_id].blocks_per_slab;
  return 1 + more_holders_[static_cast<size_t>(slab * words_per_slab_ * kWordBits + index)];
}

int64_t SlabPool::num_quarantined(GroupId group) const { return groups_.at(group).num_quarantined; }

int64_t SlabPool::num_quarantined() const { return num_quarantined_; }

int64_t SlabPool::num_free_slabs() const { return num_free_slabs_; }

const KvLayout& SlabPool::layout() const { return layout_; }

}  // namespace paceline
