// SPDX-License-Identifier: Apache-2.0
#include "kv/sequence_blocks.h"

#include "base/check.h"
#include "base/reserve_more.h"
#include "wire/blocks.h"

#include <algorithm>

namespace paceline {
namespace {

// Whether a pass leaves block `index` to no later one: its rows hand on what it would hold.
bool is_passed_over(const KvGroup& group, int32_t index, const PassEnd& end) {
  if (end.next_position <= 0 || !hands_on(group.kind)) return false;
  const int32_t lag = group.owner == KvOwner::kDraft ? end.draft_lag : 0;
  return index < num_passed_blocks(group, std::max(end.next_position - lag, 0)) &&
         !end.kept.keeps((index + 1) * block_tokens(group));
}

}  // namespace

int32_t num_passed_blocks(const KvGroup& group, int32_t position) {
  const int32_t window = kv_window(group.kind);
  const int64_t first_visible = window == 0 ? 0 : int64_t{position} - window + 1;
  return first_visible <= 0 ? 0 : num_whole_blocks(group, first_visible);
}

SequenceBlocks::SequenceBlocks(int32_t num_groups)
    : groups_(static_cast<size_t>(num_groups)), missing_(static_cast<size_t>(num_groups)) {}


bool SequenceBlocks::can_fork(const KvLayout& layout, int32_t num_tokens) const {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const int64_t num_needed = num_blocks(layout.groups[g], num_tokens);
    const int32_t num_passed = num_passed_blocks(layout.groups[g], num_tokens);
    const std::vector<BlockId>& table = groups_[g].table;
    if (groups_[g].num_released > num_passed || static_cast<int64_t>(table.size()) < num_needed) {
      return false;
    }
    if (!hands_on(layout.groups[g].kind)) continue;
    for (int64_t i = num_passed; i < num_needed; ++i) {
      if (table[static_cast<size_t>(i)] == kNullBlock) return false;
    }
  }
  return true;
}

void SequenceBlocks::fork(SlabPool& pool, const SequenceBlocks& parent, int32_t num_tokens) {
  const KvLayout& layout = pool.layout();
  PACELINE_CHECK(groups_.size() == layout.groups.size() && num_held() == 0, "a fork has ",
                 groups_.size(), " groups and ", num_held(), " blocks");
  PACELINE_CHECK(parent.can_fork(layout, num_tokens), "the parent lacks blocks below ", num_tokens);
  // Allocates all memory first, so that no block is shared and then lost.
  for (size_t g = 0; g < groups_.size(); ++g) {
    const int32_t num_whole = num_whole_blocks(layout.groups[g], num_tokens);
    groups_[g].table.reserve(static_cast<size_t>(num_whole) + 1);
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    const int32_t num_whole = num_whole_blocks(layout.groups[g], num_tokens);
    group.num_released = num_passed_blocks(layout.groups[g], num_tokens);
    for (int32_t i = 0; i < num_whole; ++i) {
      const bool is_shared = i >= group.num_released;
      if (is_shared) pool.share(static_cast<GroupId>(g), parent.groups_[g].table[i]);
      group.table.push_back(is_shared ? parent.groups_[g].table[i] : kNullBlock);
    }
  }
}

void SequenceBlocks::adopt(SlabPool& pool, std::span<const std::vector<BlockId>> tables,
                           int32_t num_tokens) {
  PACELINE_CHECK(groups_.size() == tables.size() && num_held() == 0, "a sequence with ", num_held(),
                 " blocks adopts those of ", tables.size(), " groups");
  for (size_t g = 0; g < groups_.size(); ++g) groups_[g].table = tables[g];
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    group.num_released = num_passed_blocks(pool.layout().groups[g], num_tokens);
    for (auto i = static_cast<size_t>(group.num_released); i < group.table.size(); ++i) {
      pool.adopt(static_cast<GroupId>(g), group.table[i]);
    }
  }
}

void SequenceBlocks::return_adopted(SlabPool& pool) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    for (auto i = group.table.size(); i > static_cast<size_t>(group.num_released); --i) {
      pool.return_adopted(static_cast<GroupId>(g), group.table[i - 1]);
    }
    group.table.clear();
    group.num_released = 0;
  }
}

void SequenceBlocks::append_writes(int32_t seq_slot, std::vector<TableWrite>& writes) const {
  for (const Group& group : groups_) reserve_more(writes, group.table.size());
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    for (auto i = group.num_released; i < static_cast<int32_t>(group.table.size()); ++i) {
      writes.push_back({seq_slot, static_cast<GroupId>(g), i, group.table[static_cast<size_t>(i)]});
    }
  }
}

void SequenceBlocks::append_copies(const KvLayout& layout, const SequenceBlocks& parent,
                                   int32_t num_tokens, std::vector<BlockCopy>& copies) const {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const auto index = static_cast<size_t>(num_whole_blocks(layout.groups[g], num_tokens));
    if (index == static_cast<size_t>(num_blocks(layout.groups[g], num_tokens))) continue;
    copies.push_back({.group = static_cast<GroupId>(g),
                      .source = parent.groups_[g].table.at(index),
                      .destination = groups_[g].table.at(index)});
  }
}

bool SequenceBlocks::reserve(SlabPool& pool, int32_t num_tokens, int32_t seq_slot,
                             std::vector<TableWrite>& writes, const PassEnd& end) {
  const std::vector<KvGroup>& kv_groups = pool.layout().groups;
  PACELINE_CHECK(groups_.size() == kv_groups.size(), "sequence has ", groups_.size(),
                 " groups, the pool ", kv_groups.size());
  size_t num_entries = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const int32_t num_needed = num_blocks(kv_groups[g], num_tokens);
    const auto size = static_cast<int32_t>(groups_[g].table.size());
    missing_[g] = 0;
    for (int32_t i = std::max(size, groups_[g].num_released); i < num_needed; ++i) {
      missing_[g] += is_passed_over(kv_groups[g], i, end) ? 0 : 1;
    }
    num_entries += static_cast<size_t>(std::max(0, num_needed - size));
  }
  if (num_entries == 0) return true;
  if (!pool.can_allocate(missing_)) return false;

  // Allocates all memory first: nothing after this point throws, so no block can be lost.
  reserve_more(writes, num_entries);
  for (size_t g = 0; g < groups_.size(); ++g) {
    const int64_t num_needed = num_blocks(kv_groups[g], num_tokens);
    const auto size = static_cast<int64_t>(groups_[g].table.size());
    if (num_needed > size) reserve_more(groups_[g].table, static_cast<size_t>(num_needed - size));
  }

  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    const int64_t num_needed = num_blocks(kv_groups[g], num_tokens);
    for (auto i = static_cast<int32_t>(group.table.size()); i < num_needed; ++i) {
      BlockId block = kNullBlock;
      if (i >= group.num_released && !is_passed_over(kv_groups[g], i, end)) {
        const std::optional<BlockId> allocated = pool.allocate(static_cast<GroupId>(g));
        PACELINE_CHECK(allocated.has_value(), "group ", g, ": can_allocate promised a block");
        block = *allocated;
      }
      group.table.push_back(block);
      writes.push_back({seq_slot, static_cast<GroupId>(g), i, block});
    }
  }
  return true;
}

void SequenceBlocks::release_below(SlabPool& pool, int32_t first_query_position,
                                   int64_t newest_launched, int32_t draft_lag) {
  const std::vector<KvGroup>& kv_groups = pool.layout().groups;
  PACELINE_CHECK(groups_.size() == kv_groups.size(), "sequence has ", groups_.size(),
                 " groups, the pool ", kv_groups.size());
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    const int32_t lag = kv_groups[g].owner == KvOwner::kDraft ? draft_lag : 0;
    const int32_t first_query = std::max(first_query_position - lag, 0);
    const int32_t num_released = num_passed_blocks(kv_groups[g], first_query);
    const auto end = std::min(num_released, static_cast<int32_t>(group.table.size()));
    for (int32_t i = group.num_released; i < end; ++i) {
      if (group.table[i] == kNullBlock) continue;
      pool.release(static_cast<GroupId>(g), group.table[i], newest_launched);
      group.table[i] = kNullBlock;
    }
    group.num_released = std::max(group.num_released, num_released);
  }
}

void SequenceBlocks::release_all(SlabPool& pool, int64_t newest_launched) {
  size_t longest = 0;
  for (const Group& group : groups_) longest = std::max(longest, group.table.size());
  for (size_t i = longest; i > 0; --i) {
    for (size_t g = 0; g < groups_.size(); ++g) {
      const Group& group = groups_[g];
      if (i > group.table.size() || i <= static_cast<size_t>(group.num_released)) continue;
      if (group.table[i - 1] == kNullBlock) continue;
      pool.release(static_cast<GroupId>(g), group.table[i - 1], newest_launched);
    }
  }
  for (Group& group : groups_) {
    group.table.clear();
    group.num_released = 0;
  }
}

std::span<const BlockId> SequenceBlocks::table(GroupId group) const {
  return groups_.at(group).table;
}

int64_t SequenceBlocks::num_held() const {
  int64_t num_held = 0;
  for (const Group& group : groups_) {
    for (auto i = static_cast<size_t>(group.num_released); i < group.table.size(); ++i) {
      num_held += group.table[i] != kNullBlock ? 1 : 0;
    }
  }
  return num_held;
}

std::vector<int64_t> peak_blocks(const KvLayout& layout, int32_t num_tokens,
                                 const PeakSlack& slack) {
  std::vector<int64_t> counts;
  counts.reserve(layout.groups.size());
  for (const KvGroup& group : layout.groups) {
    const int64_t all = num_blocks(group, num_tokens);
    const int32_t window = kv_window(group.kind);
    // Worst alignment: the span begins with the last token of a block.
    const int32_t lag = group.owner == KvOwner::kDraft ? slack.draft_lag : 0;
    const bool is_handed_on = hands_on(group.kind);
    const int64_t span =
        int64_t{window} + (is_handed_on ? slack.verify_window : slack.window) + lag;
    // In whole blocks, since a group may count blocks that are full only.
    int64_t most = 1 + (span - 1 + block_tokens(group) - 1) / block_tokens(group);
    if (is_handed_on) {
      // The block of the last position, the one before, and those that a late drafter may need.
      most += int64_t{slack.num_chunks} * (2 + (lag + block_tokens(group) - 1) / block_tokens(group));
      most += slack.kept.most_kept(slack.window);
    }
    counts.push_back(window == 0 ? all : std::min(all, most));
  }
  return counts;
}

}  // namespace paceline
