// SPDX-License-Identifier: Apache-2.0
// Blocks with several holders: the pool's count of them, and sequences that fork.

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include <paceline/error.h>

#include "kv/kv_layout.h"
#include "kv/sequence_blocks.h"
#include "kv/slab_pool.h"
#include "wire/blocks.h"

namespace paceline {

// Reaches into a pool to break it.
class SlabPoolTestPeer {
 public:
  static void add_holder(SlabPool& pool, int32_t slab, BlockId block) {
    ++pool.more_holders(slab, block);
  }
  static void count_holder(SlabPool& pool) { ++pool.num_more_holders_; }
};

namespace {

// A full group and one that slides over 12 keys, in blocks of 4 tokens.
KvLayout small_layout(int64_t num_slabs = 40) {
  const std::vector<KvLayerShape> target = {
      {.kind = FullKv{}, .num_kv_heads = 1, .head_dim = 8},
      {.kind = SlidingKv{12}, .num_kv_heads = 1, .head_dim = 8}};
  KvLayout layout = plan_kv_layout(target, {}, 4, DType::kFloat32, 1 << 20);
  layout.slab_bytes = layout.groups[0].block_bytes;  // one block of either
  layout.num_slabs = num_slabs;
  layout.pool_bytes = num_slabs * layout.slab_bytes;
  return layout;
}

void expect_intact(const SlabPool& pool) { EXPECT_EQ(pool.check_integrity(), ""); }

TEST(SlabPool, ABlockIsReleasedWithItsLastHolder) {
  SlabPool pool(small_layout());
  const BlockId block = pool.allocate(0).value();
  EXPECT_EQ(pool.num_holders(0, block), 1);
  pool.share(0, block);
  pool.share(0, block);
  EXPECT_EQ(pool.num_holders(0, block), 3);
  EXPECT_EQ(pool.num_held(0), 1);
  expect_intact(pool);
  pool.release(0, block, 3);
  pool.release(0, block, 4);
  EXPECT_EQ(pool.num_holders(0, block), 1);
  EXPECT_EQ(pool.num_quarantined(0), 0);
  pool.complete(4);
  EXPECT_EQ(pool.num_held(0), 1);
  pool.release(0, block, 5);
  EXPECT_EQ(pool.num_held(0), 0);
  EXPECT_EQ(pool.num_quarantined(0), 1);
  expect_intact(pool);
  pool.complete(4);  // the last holder's tag counts
  EXPECT_EQ(pool.num_quarantined(0), 1);
  pool.complete(5);
  EXPECT_EQ(pool.num_quarantined(0), 0);
  EXPECT_EQ(pool.num_free_slabs(), pool.layout().num_slabs - 1);
  expect_intact(pool);
  EXPECT_EQ(pool.num_holders(0, pool.allocate(0).value()), 1) << "a block begins with one holder";
}

TEST(SlabPool, MisuseOfSharingIsAnInternalError) {
  SlabPool pool(small_layout());
  const BlockId block = pool.allocate(0).value();
  EXPECT_THROW(pool.share(0, block + 1), InternalError);
  EXPECT_THROW(pool.share(1, block), InternalError);
  EXPECT_THROW(pool.share(7, block), InternalError);
  EXPECT_THROW((void)pool.num_holders(1, block), InternalError);
  pool.share(0, block);
  EXPECT_THROW(pool.release_unused(0, block), InternalError);
  pool.release(0, block, 2);
  pool.release(0, block, 2);
  EXPECT_THROW(pool.share(0, block), InternalError);  // in quarantine
  expect_intact(pool);
}

TEST(SlabPool, IntegritySeesWrongHolders) {
  using Peer = SlabPoolTestPeer;
  SlabPool pool(small_layout());
  const BlockId block = pool.allocate(0).value();
  Peer::add_holder(pool, block, block);
  EXPECT_NE(pool.check_integrity().find("counted 0, found 1"), std::string::npos);
  Peer::count_holder(pool);
  expect_intact(pool);
  pool.release(0, block, 0);
  pool.release(0, block, 0);
  Peer::add_holder(pool, block, block);
  EXPECT_NE(pool.check_integrity().find("a block that is not held"), std::string::npos);
}

struct Pair {
  explicit Pair(int32_t parent_tokens) : pool(small_layout()), parent(2), child(2) {
    EXPECT_TRUE(parent.reserve(pool, parent_tokens, 0, writes));
    writes.clear();
  }
  bool fork(int32_t num_tokens, int32_t child_tokens) {
    if (!parent.can_fork(pool.layout(), num_tokens)) return false;
    child.fork(pool, parent, num_tokens);
    EXPECT_TRUE(child.reserve(pool, child_tokens, 1, writes));
    child.append_copies(pool.layout(), parent, num_tokens, copies);
    return true;
  }
  std::vector<BlockId> table(const SequenceBlocks& of, GroupId g) const {
    return {of.table(g).begin(), of.table(g).end()};
  }

  SlabPool pool;
  SequenceBlocks parent;
  SequenceBlocks child;
  std::vector<TableWrite> writes;
  std::vector<BlockCopy> copies;
};

TEST(SequenceBlocks, AForkSharesWholeBlocksAndCopiesTheLast) {
  Pair pair(40);
  ASSERT_TRUE(pair.fork(/*num_tokens=*/22, /*child_tokens=*/30));
  const auto parent_full = pair.table(pair.parent, 0);
  const auto child_full = pair.table(pair.child, 0);
  const auto child_sliding = pair.table(pair.child, 1);
  ASSERT_EQ(child_full.size(), 8u);
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(child_full[i], parent_full[i]);
    EXPECT_EQ(pair.pool.num_holders(0, child_full[i]), 2);
  }
  // The block of positions 20 to 23 is its own, with the parent's content.
  for (size_t i = 5; i < 8; ++i) {
    EXPECT_NE(child_full[i], parent_full[i]);
    EXPECT_EQ(pair.pool.num_holders(0, child_full[i]), 1);
    EXPECT_EQ(pair.pool.num_holders(0, parent_full[i]), 1);
  }
  // A query at 22 sees keys from 11 on: the first two blocks are passed.
  EXPECT_EQ(child_sliding[0], kNullBlock);
  EXPECT_EQ(child_sliding[1], kNullBlock);
  for (size_t i = 2; i < 5; ++i) EXPECT_EQ(child_sliding[i], pair.table(pair.parent, 1)[i]);
  ASSERT_EQ(pair.copies.size(), 2u);
  for (GroupId g = 0; g < 2; ++g) {
    const BlockCopy& copy = pair.copies[static_cast<size_t>(g)];
    EXPECT_EQ(copy.group, g);
    EXPECT_EQ(copy.source, pair.table(pair.parent, g)[5]);
    EXPECT_EQ(copy.destination, pair.table(pair.child, g)[5]);
  }
  // The device copies the entries of shared blocks.
  ASSERT_EQ(pair.writes.size(), 6u);
  for (const TableWrite& write : pair.writes) EXPECT_GE(write.index, 5);
  EXPECT_EQ(pair.child.num_held(), 8 + 6);
  expect_intact(pair.pool);

  pair.parent.release_all(pair.pool, 0);
  EXPECT_EQ(pair.pool.num_held(0), 8);
  EXPECT_EQ(pair.pool.num_held(1), 6);
  EXPECT_EQ(pair.pool.num_holders(0, child_full[0]), 1);
  pair.child.release_below(pair.pool, 40, 1);
  pair.child.release_all(pair.pool, 1);
  pair.pool.complete(1);
  EXPECT_EQ(pair.pool.num_free_slabs(), pair.pool.layout().num_slabs - 1);
  expect_intact(pair.pool);
}

TEST(SequenceBlocks, AForkOneBelowABlocksEdgeDoesNotShareTheBlock) {
  Pair pair(40);
  ASSERT_TRUE(pair.fork(/*num_tokens=*/23, /*child_tokens=*/25));
  EXPECT_EQ(pair.copies.size(), 2u);
  EXPECT_EQ(pair.pool.num_holders(0, pair.table(pair.parent, 0)[4]), 2);
  EXPECT_EQ(pair.pool.num_holders(0, pair.table(pair.parent, 0)[5]), 1);
}

TEST(SequenceBlocks, AForkAtABlocksEdgeCopiesNothing) {
  Pair pair(40);
  ASSERT_TRUE(pair.fork(/*num_tokens=*/24, /*child_tokens=*/25));
  EXPECT_TRUE(pair.copies.empty());
  EXPECT_EQ(pair.pool.num_holders(0, pair.table(pair.parent, 0)[5]), 2);
  EXPECT_EQ(pair.pool.num_holders(0, pair.table(pair.parent, 0)[6]), 1);
}

TEST(SequenceBlocks, CannotForkFromBlocksThatAWindowHasReleased) {
  Pair pair(60);
  // Below 22 a fork needs blocks from 2 on: the parent may have released 0 and 1.
  pair.parent.release_below(pair.pool, 22, 0);
  EXPECT_TRUE(pair.parent.can_fork(pair.pool.layout(), 22));
  pair.parent.release_below(pair.pool, 23, 0);  // keys from 12 on: block 2 goes not yet...
  EXPECT_FALSE(pair.parent.can_fork(pair.pool.layout(), 22)) << "...but at 12 it does";
  EXPECT_THROW(pair.child.fork(pair.pool, pair.parent, 22), InternalError);
  EXPECT_TRUE(pair.parent.can_fork(pair.pool.layout(), 23));
  EXPECT_FALSE(pair.parent.can_fork(pair.pool.layout(), 61)) << "more than it has reserved";
  EXPECT_EQ(pair.child.num_held(), 0);
}

TEST(SequenceBlocks, AForkWithoutEnoughBlocksReleasesItsShare) {
  Pair pair(60);
  const int64_t num_held = pair.pool.num_held(0);
  while (pair.pool.allocate(1).has_value()) {
  }
  pair.child.fork(pair.pool, pair.parent, 22);
  std::vector<TableWrite> writes;
  EXPECT_FALSE(pair.child.reserve(pair.pool, 30, 1, writes));
  EXPECT_TRUE(writes.empty());
  pair.child.release_all(pair.pool, -1);
  EXPECT_EQ(pair.pool.num_held(0), num_held);
  EXPECT_EQ(pair.pool.num_quarantined(), 0);
  for (const BlockId block : pair.table(pair.parent, 0)) {
    EXPECT_EQ(pair.pool.num_holders(0, block), 1);
  }
  expect_intact(pair.pool);
}

}  // namespace
}  // namespace paceline
