// SPDX-License-Identifier: Apache-2.0
#include "kv/prefix_cache.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <string_view>
#include <utility>

#include "base/check.h"

namespace paceline {
namespace {

constexpr size_t kFirstBuckets = 64;

uint64_t mixed(uint64_t value) {
  value ^= value >> 32;
  value *= 0xd6e8feb86659fd93u;
  value ^= value >> 32;
  return value;
}

std::string_view text_of(const CacheSalt& salt) {
  return salt == nullptr ? std::string_view() : std::string_view(*salt);
}

}  // namespace

PrefixCache::PrefixCache(SlabPool& pool, int32_t lookahead, bool may_lack_drafter)
    : pool_(pool),
      block_size_(pool.layout().block_size),
      lookahead_(lookahead),
      hash_seed_(std::random_device()()) {
  const KvLayout& layout = pool.layout();
  for (const KvGroup& kv_group : layout.groups) {
    Group group;
    PACELINE_CHECK(block_tokens(kv_group) % block_size_ == 0, "a block has ",
                   block_tokens(kv_group), " tokens and not a multiple of ", block_size_);
    group.nodes_per_block = block_tokens(kv_group) / block_size_;
    group.sees_all = kv_window(kv_group.kind) == 0;
    group.hands_on = paceline::hands_on(kv_group.kind);
    group.is_optional = may_lack_drafter && kv_group.owner == KvOwner::kDraft;
    PACELINE_CHECK(group.sees_all || !group.is_optional, "a sliding group of the drafter");
    const int64_t num_blocks = layout.pool_bytes / kv_group.block_bytes;
    group.node_of.assign(static_cast<size_t>(num_blocks), kNone);
    nodes_per_hit_ = std::lcm(nodes_per_hit_, group.nodes_per_block);
    max_nodes_ = std::max(max_nodes_, num_blocks);
    groups_.push_back(std::move(group));
  }
  counts_.resize(groups_.size());
  runs_.resize(groups_.size());
  match_blocks_.resize(groups_.size());
  nodes_.resize(1);
  tokens_.resize(static_cast<size_t>(block_size_ + lookahead_));
  blocks_.assign(groups_.size(), kNullBlock);
  buckets_.assign(kFirstBuckets, kNone);
  pool_.set_on_evict([this](GroupId group, BlockId block) { evict(group, block); });
}

std::span<const int32_t> PrefixCache::key(std::span<const int32_t> tokens, int32_t depth) const {
  const auto begin = static_cast<size_t>(depth == 0 ? 0 : depth * block_size_ + lookahead_);
  const auto end = static_cast<size_t>((depth + 1) * block_size_ + lookahead_);
  return tokens.size() < end ? std::span<const int32_t>() : tokens.subspan(begin, end - begin);
}

std::span<const int32_t> PrefixCache::key_of(int32_t node) const {
  const auto stride = static_cast<size_t>(block_size_ + lookahead_);
  const bool is_first = nodes_[static_cast<size_t>(node)].depth == 0;
  return {tokens_.data() + static_cast<size_t>(node) * stride,
          is_first ? stride : static_cast<size_t>(block_size_)};
}

uint64_t PrefixCache::hash_of(int32_t parent, std::span<const int32_t> key,
                              const CacheSalt& salt) const {
  uint64_t hash = mixed(mixed(hash_seed_ + 0x9e3779b97f4a7c15u) + static_cast<uint64_t>(parent));
  if (parent == kRoot) {
    for (const char byte : text_of(salt)) {
      hash = mixed(hash + static_cast<unsigned char>(byte) + 0x9e3779b97f4a7c15u);
    }
  }
  for (const int32_t token : key) {
    hash = mixed(hash + static_cast<uint32_t>(token) + 0x9e3779b97f4a7c15u);
  }
  return hash;
}

int32_t PrefixCache::child(int32_t parent, std::span<const int32_t> key,
                           const CacheSalt& salt) const {
  const uint64_t hash = hash_of(parent, key, salt);
  int32_t node = buckets_[hash & (buckets_.size() - 1)];
  for (; node != kNone; node = nodes_[static_cast<size_t>(node)].next_in_bucket) {
    const Node& found = nodes_[static_cast<size_t>(node)];
    const bool has_salt = parent != kRoot || text_of(found.salt) == text_of(salt);
    if (found.hash == hash && found.parent == parent && has_salt &&
        std::ranges::equal(key_of(node), key)) {
      break;
    }
  }
  return node;
}

PrefixCache::Match PrefixCache::find(std::span<const int32_t> tokens, const CacheSalt& salt,
                                     int32_t max_tokens) {
  Match match;
  std::fill(runs_.begin(), runs_.end(), 0);
  int32_t node = kRoot;
  bool is_drafted = true;
  for (int32_t depth = 0; (depth + 1) * block_size_ <= max_tokens; ++depth) {
    const std::span<const int32_t> wanted = key(tokens, depth);
    node = wanted.empty() ? kNone : child(node, wanted, salt);
    if (node == kNone) break;
    const int32_t num_tokens = (depth + 1) * block_size_;
    match.num_known = num_tokens;
    bool is_served = (depth + 1) % nodes_per_hit_ == 0;
    for (size_t g = 0; g < groups_.size(); ++g) {
      if (groups_[g].is_optional) {
        const bool ends_block = (depth + 1) % groups_[g].nodes_per_block == 0;
        is_drafted &= !ends_block || block(node, g) != kNullBlock;
      }
      if (groups_[g].sees_all) continue;  // a node without its block would not be here
      runs_[g] = block(node, g) != kNullBlock ? runs_[g] + 1 : 0;
      const int32_t num_passed = num_passed_blocks(pool_.layout().groups[g], num_tokens);
      is_served &= runs_[g] >= depth + 1 - num_passed;
    }
    if (is_served) {
      match.num_tokens = num_tokens;
      match.end = {.node = node, .generation = nodes_[static_cast<size_t>(node)].generation};
    }
    if (is_served && is_drafted) {
      match.num_drafted = match.num_tokens;
      match.drafted_end = match.end;
    }
  }
  return match;
}

const std::vector<std::vector<BlockId>>& PrefixCache::blocks_of(const Match& match) {
  PACELINE_CHECK(is_current(match.end), "the prefix cache has changed since the match");
  for (size_t g = 0; g < groups_.size(); ++g) {
    const KvGroup& group = pool_.layout().groups[g];
    match_blocks_[g].assign(static_cast<size_t>(num_served(g, match) / block_tokens(group)),
                            kNullBlock);
  }
  for (int32_t node = match.end.node; node != kRoot;
       node = nodes_[static_cast<size_t>(node)].parent) {
    const int32_t depth = nodes_[static_cast<size_t>(node)].depth;
    for (size_t g = 0; g < groups_.size(); ++g) {
      if ((depth + 1) % groups_[g].nodes_per_block != 0) continue;
      const int32_t index = (depth + 1) / groups_[g].nodes_per_block - 1;
      if (index < num_passed_blocks(pool_.layout().groups[g], match.num_tokens)) continue;
      if (static_cast<size_t>(index) >= match_blocks_[g].size()) continue;
      match_blocks_[g][static_cast<size_t>(index)] = block(node, g);
    }
  }
  return match_blocks_;
}

void PrefixCache::count_hit(const SequenceBlocks& blocks, const Match& match) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const auto adopted = blocks.table(static_cast<GroupId>(g))
                             .first(num_served(g, match) / block_tokens(pool_.layout().groups[g]));
    counts_[g].hit_blocks +=
        std::ranges::count_if(adopted, [](BlockId block) { return block != kNullBlock; });
  }
}

void PrefixCache::extend(Cursor& cursor, std::span<const int32_t> tokens, const CacheSalt& salt,
                         int32_t num_computed, const SequenceBlocks& blocks, Parts parts,
                         const KeptStates& kept) {
  if (!is_current(cursor)) cursor = {};
  int32_t node = cursor.node;
  int32_t depth = nodes_[static_cast<size_t>(node)].depth + 1;
  for (; (depth + 1) * block_size_ <= num_computed; ++depth) {
    const std::span<const int32_t> wanted = key(tokens, depth);
    if (wanted.empty()) break;
    int32_t next = child(node, wanted, salt);
    if (next == kNone) next = create(node, wanted, salt);
    if (next == kNone) break;
    node = next;
    attach(node, blocks, parts, kept.keeps((depth + 1) * block_size_));
  }
  cursor = {.node = node, .generation = nodes_[static_cast<size_t>(node)].generation};
  remove_bare_leaves(node);
}

void PrefixCache::keep_end(const Cursor& cursor, const SequenceBlocks& blocks, Parts parts) {
  if (cursor.node != kRoot && is_current(cursor)) {
    attach(cursor.node, blocks, parts, /*keeps=*/true);
  }
}

void PrefixCache::attach(int32_t node, const SequenceBlocks& blocks, Parts parts, bool keeps) {
  const int32_t depth = nodes_[static_cast<size_t>(node)].depth;
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    if ((depth + 1) % group.nodes_per_block != 0 || block(node, g) != kNullBlock) continue;
    if (group.is_optional && parts == Parts::kTarget) continue;
    if (group.hands_on && !keeps) continue;
    const auto index = static_cast<size_t>((depth + 1) / group.nodes_per_block - 1);
    const std::span<const BlockId> table = blocks.table(static_cast<GroupId>(g));
    if (index >= table.size() || table[index] == kNullBlock) continue;
    pool_.mark_known(static_cast<GroupId>(g), table[index]);
    block(node, g) = table[index];
    group.node_of[static_cast<size_t>(table[index])] = node;
  }
}

bool PrefixCache::has_blocks(int32_t node) const {
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (block(node, g) != kNullBlock) return true;
  }
  return false;
}

int32_t PrefixCache::create(int32_t parent, std::span<const int32_t> key, const CacheSalt& salt) {
  if (num_nodes_ >= max_nodes_) return kNone;
  const auto stride = static_cast<size_t>(block_size_ + lookahead_);
  if (first_free_node_ == kNone) {
    // Allocates all memory first: a node is in all arrays or in none.
    const size_t count = nodes_.size() + 1;
    if (count > nodes_.capacity()) {
      nodes_.reserve(2 * count);
      tokens_.reserve(2 * count * stride);
      blocks_.reserve(2 * count * groups_.size());
    }
    tokens_.resize(count * stride);
    blocks_.resize(count * groups_.size(), kNullBlock);
    nodes_.emplace_back();
    first_free_node_ = static_cast<int32_t>(count - 1);
  }
  if (static_cast<size_t>(num_nodes_) >= buckets_.size()) grow_buckets();
  const int32_t id = first_free_node_;
  Node& node = nodes_[static_cast<size_t>(id)];
  first_free_node_ = node.next_in_bucket;
  Node& above = nodes_[static_cast<size_t>(parent)];
  const uint64_t hash = hash_of(parent, key, salt);
  int32_t& bucket = buckets_[hash & (buckets_.size() - 1)];
  node = {.parent = parent,
          .depth = above.depth + 1,
          .next_sibling = above.first_child,
          .next_in_bucket = std::exchange(bucket, id),
          .generation = node.generation,
          .hash = hash,
          .salt = parent == kRoot ? salt : nullptr};
  if (above.first_child != kNone) {
    nodes_[static_cast<size_t>(above.first_child)].prev_sibling = id;
  }
  above.first_child = id;
  std::copy(key.begin(), key.end(), tokens_.begin() + static_cast<std::ptrdiff_t>(id * stride));
  ++num_nodes_;
  return id;
}

void PrefixCache::grow_buckets() {
  std::vector<int32_t> grown(2 * buckets_.size(), kNone);
  for (int32_t first : buckets_) {
    for (int32_t id = first; id != kNone;) {
      Node& node = nodes_[static_cast<size_t>(id)];
      int32_t& bucket = grown[node.hash & (grown.size() - 1)];
      const int32_t next = std::exchange(node.next_in_bucket, bucket);
      bucket = id;
      id = next;
    }
  }
  buckets_ = std::move(grown);
}

void PrefixCache::evict(GroupId group, BlockId evicted) {
  const int32_t node = groups_[static_cast<size_t>(group)].node_of[static_cast<size_t>(evicted)];
  PACELINE_CHECK(node != kNone, "block ", evicted, " of group ", group, " is in no node");
  const int32_t parent = nodes_[static_cast<size_t>(node)].parent;
  if (groups_[static_cast<size_t>(group)].sees_all) {
    remove_subtree(node);
    remove_bare_leaves(parent);
    return;
  }
  drop_block(node, static_cast<size_t>(group));
  remove_bare_leaves(node);
}

void PrefixCache::drop_block(int32_t node, size_t g) {
  const BlockId dropped = std::exchange(block(node, g), kNullBlock);
  if (dropped == kNullBlock) return;
  const auto group = static_cast<GroupId>(g);
  groups_[g].node_of[static_cast<size_t>(dropped)] = kNone;
  counts_[g].evicted_blocks += pool_.is_cached(group, dropped) ? 1 : 0;
  pool_.forget(group, dropped);
}

// Removes the deepest nodes first, without recursion: a path may be long.
void PrefixCache::remove_subtree(int32_t top) {
  const int32_t end = nodes_[static_cast<size_t>(top)].parent;
  for (int32_t node = top; node != end;) {
    const int32_t below = nodes_[static_cast<size_t>(node)].first_child;
    if (below != kNone) {
      node = below;
      continue;
    }
    const int32_t parent = nodes_[static_cast<size_t>(node)].parent;
    for (size_t g = 0; g < groups_.size(); ++g) drop_block(node, g);
    remove_leaf(node);
    node = node == top ? end : parent;
  }
}

void PrefixCache::remove_leaf(int32_t id) {
  Node& node = nodes_[static_cast<size_t>(id)];
  if (node.next_sibling != kNone) {
    nodes_[static_cast<size_t>(node.next_sibling)].prev_sibling = node.prev_sibling;
  }
  (node.prev_sibling != kNone ? nodes_[static_cast<size_t>(node.prev_sibling)].next_sibling
                              : nodes_[static_cast<size_t>(node.parent)].first_child) =
      node.next_sibling;
  int32_t* link = &buckets_[node.hash & (buckets_.size() - 1)];
  while (*link != id) link = &nodes_[static_cast<size_t>(*link)].next_in_bucket;
  *link = node.next_in_bucket;
  node = {.next_in_bucket = std::exchange(first_free_node_, id), .generation = node.generation + 1};
  --num_nodes_;
}

void PrefixCache::remove_bare_leaves(int32_t node) {
  while (node != kRoot && nodes_[static_cast<size_t>(node)].first_child == kNone &&
         !has_blocks(node)) {
    const int32_t parent = nodes_[static_cast<size_t>(node)].parent;
    remove_leaf(node);
    node = parent;
  }
}

void PrefixCache::clear() {
  const std::vector<GroupCounts> counts = counts_;  // nothing makes room
  while (nodes_[kRoot].first_child != kNone) remove_subtree(nodes_[kRoot].first_child);
  counts_ = counts;
}

void PrefixCache::reset() {
  for (Group& group : groups_) std::fill(group.node_of.begin(), group.node_of.end(), kNone);
  std::fill(buckets_.begin(), buckets_.end(), kNone);
  std::fill(blocks_.begin(), blocks_.end(), kNullBlock);
  nodes_[kRoot].first_child = kNone;
  first_free_node_ = kNone;
  num_nodes_ = 0;
  for (size_t id = 1; id < nodes_.size(); ++id) {
    const uint32_t generation = nodes_[id].generation + 1;
    nodes_[id] = {.next_in_bucket = std::exchange(first_free_node_, static_cast<int32_t>(id)),
                  .generation = generation};
  }
}

}  // namespace paceline
