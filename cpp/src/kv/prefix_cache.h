// SPDX-License-Identifier: Apache-2.0
#pragma once

// Finds the KV of earlier sequences that begin with the same tokens. docs/prefix-cache.md describes
// the rules.
//
// The index is a tree. A node stands for block_size tokens after those of its parent, so the path
// to it stands for all tokens from the start. It is found by a hash over its parent and its tokens,
// and the tokens are compared, so a collision cannot give the KV of other tokens. A node has the
// block of each group that ends with its tokens.
//
// Each salt has a tree of its own: the nodes of depth 0 have the salt beside their tokens, and it
// is compared like these. So sequences of different salts never share a node, nor a block.
//
// With `lookahead` 1 the KV of the drafter at position i depends on token i + 1. The tokens of all
// nodes are then shifted by one, and a first node has one more: the path to a node of depth d
// stands for the first (d + 1) * block_size + lookahead tokens, and its blocks hold the KV of the
// first (d + 1) * block_size.
//
// What a kind of group sees decides which blocks a hit needs. A group that sees everything needs
// the block of every node, so a node without that block is removed, with all below it. A sliding
// group needs the blocks of the last window only.
//
// A group that hands on (hands_on) may have blocks in the middle of a sequence without those before
// them. Its blocks are large, so nodes get only those that the sequence keeps (KeptStates) and, when
// it ends, its last ones.
//
// If the drafter may lack KV, its groups are optional: a node may lack their blocks, and so do then
// all nodes below it. A sequence that follows the path later adds the blocks, and if one of them is
// evicted, its node is removed with all below it as for any other group.
//
// Host only: handles ids, never memory. Not thread-safe.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kv/sequence_blocks.h"
#include "kv/slab_pool.h"
#include "wire/blocks.h"

namespace paceline {

// The salt of a sequence, which its samples and nodes share; null is the empty one.
using CacheSalt = std::shared_ptr<const std::string>;

class PrefixCache {
 public:
  // A node that may have been removed since.
  struct Cursor {
    int32_t node = 0;  // 0: the root
    uint32_t generation = 0;
  };
  struct Match {
    int32_t num_tokens = 0;  // whose KV is cached in all groups, or in those of the target
    int32_t num_known = 0;   // at least as many: that some earlier sequence has begun with
    Cursor end;
    int32_t num_drafted = 0;  // of which in those of the drafter, too
    Cursor drafted_end;

    // The part that all groups have.
    [[nodiscard]] Match drafted() const {
      return {num_drafted, num_known, drafted_end, num_drafted, drafted_end};
    }
  };
  // Groups whose KV is complete.
  enum class Parts : uint8_t { kAll, kTarget };
  struct GroupCounts {
    int64_t hit_blocks = 0;      // adopted
    int64_t evicted_blocks = 0;  // cached blocks that were forgotten to make room
  };

  // Registers itself with the pool, which must outlive it. `may_lack_drafter`: nodes may lack the
  // blocks of the drafter's groups, none of which is sliding.
  PrefixCache(SlabPool& pool, int32_t lookahead, bool may_lack_drafter = false);
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  // The longest prefix of `tokens`, of at most max_tokens, that every group can serve, or every
  // group of the target if the drafter's blocks may be lacking.
  [[nodiscard]] Match find(std::span<const int32_t> tokens, const CacheSalt& salt,
                           int32_t max_tokens);
  // The blocks of a match that queries after it see, for SequenceBlocks::adopt: [groups][blocks],
  // kNullBlock where no query sees the block. Valid until the next call.
  [[nodiscard]] const std::vector<std::vector<BlockId>>& blocks_of(const Match& match);
  // A sequence runs with the blocks of a match.
  void count_hit(const SequenceBlocks& blocks, const Match& match);

  // Adds the full blocks among the first `num_computed` tokens of a sequence, whose KV is complete
  // in the groups of `parts`. `cursor` is where its last call with the same parts ended, at first
  // the root or the end of the match that it began with. Of groups that hand on, only blocks that
  // `kept` keeps are added.
  void extend(Cursor& cursor, std::span<const int32_t> tokens, const CacheSalt& salt,
              int32_t num_computed, const SequenceBlocks& blocks, Parts parts = Parts::kAll,
              const KeptStates& kept = {});
  // Adds the blocks of groups that hand on where the last extend of a sequence has ended.
  void keep_end(const Cursor& cursor, const SequenceBlocks& blocks, Parts parts);

  // Forgets everything; the KV of new weights differs. Blocks stay with their holders.
  void clear();
  // The same after SlabPool::reset. Allocates nothing.
  void reset();

  [[nodiscard]] const GroupCounts& counts(GroupId group) const { return counts_.at(group); }
  [[nodiscard]] int64_t num_nodes() const { return num_nodes_; }

  // Checks the tree, its hash table and that pool and tree know the same blocks. Returns an empty
  // string, or a description of what is broken. O(nodes + blocks).
  [[nodiscard]] std::string check_integrity() const;

 private:
  friend class PrefixCacheTestPeer;  // plants corruption to prove that check_integrity detects it

  static constexpr int32_t kRoot = 0;
  static constexpr int32_t kNone = -1;

  struct Node {
    int32_t parent = kNone;
    int32_t depth = -1;
    int32_t first_child = kNone;
    int32_t prev_sibling = kNone;
    int32_t next_sibling = kNone;
    int32_t next_in_bucket = kNone;  // or the next free node
    uint32_t generation = 0;
    uint64_t hash = 0;
    CacheSalt salt;  // of a node of depth 0; null below
  };
  struct Group {
    int32_t nodes_per_block = 1;
    bool sees_all = true;
    bool hands_on = false;
    bool is_optional = false;      // of the drafter, if its blocks may be lacking
    std::vector<int32_t> node_of;  // [blocks] kNone: unknown
  };

  [[nodiscard]] std::span<const int32_t> key(std::span<const int32_t> tokens, int32_t depth) const;
  [[nodiscard]] uint64_t hash_of(int32_t parent, std::span<const int32_t> key,
                                 const CacheSalt& salt) const;
  [[nodiscard]] std::span<const int32_t> key_of(int32_t node) const;
  // Below the root the path has the salt.
  [[nodiscard]] int32_t child(int32_t parent, std::span<const int32_t> key,
                              const CacheSalt& salt) const;
  [[nodiscard]] bool is_current(const Cursor& cursor) const {
    return nodes_[static_cast<size_t>(cursor.node)].generation == cursor.generation;
  }
  [[nodiscard]] BlockId& block(int32_t node, size_t group) {
    return blocks_[static_cast<size_t>(node) * groups_.size() + group];
  }
  [[nodiscard]] BlockId block(int32_t node, size_t group) const {
    return blocks_[static_cast<size_t>(node) * groups_.size() + group];
  }
  [[nodiscard]] bool has_blocks(int32_t node) const;
  // Returns kNone if the tree is full.
  int32_t create(int32_t parent, std::span<const int32_t> key, const CacheSalt& salt);
  // `keeps`: whether groups that hand on keep their blocks of this node.
  void attach(int32_t node, const SequenceBlocks& blocks, Parts parts, bool keeps);
  // Tokens of a match whose blocks a group has.
  [[nodiscard]] int32_t num_served(size_t group, const Match& match) const {
    return groups_[group].is_optional ? match.num_drafted : match.num_tokens;
  }
  void evict(GroupId group, BlockId block);
  void drop_block(int32_t node, size_t group);
  void remove_subtree(int32_t node);
  void remove_leaf(int32_t node);
  void remove_bare_leaves(int32_t node);  // the node and its ancestors, while they are bare leaves
  void grow_buckets();

  SlabPool& pool_;
  const int32_t block_size_;
  const int32_t lookahead_;
  // Drawn for each cache, so that a client cannot choose prompts whose hashes collide, which would
  // make lookups slow.
  const uint64_t hash_seed_;
  int32_t nodes_per_hit_ = 1;  // hits end at a multiple of this many nodes
  int64_t max_nodes_ = 0;
  std::vector<Group> groups_;
  std::vector<GroupCounts> counts_;
  std::vector<Node> nodes_;       // 0 is the root
  std::vector<int32_t> tokens_;   // [nodes, block_size + lookahead]
  std::vector<BlockId> blocks_;   // [nodes, groups]
  std::vector<int32_t> buckets_;  // first node by hash; a power of two
  int32_t first_free_node_ = kNone;
  int64_t num_nodes_ = 0;                           // without the root
  std::vector<int32_t> runs_;                       // scratch of find: [groups]
  std::vector<std::vector<BlockId>> match_blocks_;  // of blocks_of
};

}  // namespace paceline
