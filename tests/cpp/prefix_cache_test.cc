// SPDX-License-Identifier: Apache-2.0
// The prefix cache over the pool, one behaviour a test. scheduler_simulation_test has random
// sequences of operations.

#include "kv/prefix_cache.h"

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <paceline/error.h>

#include "kv/kv_layout.h"
#include "kv/sequence_blocks.h"
#include "kv/slab_pool.h"
#include "support/kv_layers.h"

namespace paceline {

// Changes private state of a cache, as a bug would.
class PrefixCacheTestPeer {
 public:
  static void change_token(PrefixCache& cache, int32_t node) { ++cache.tokens_[node * 4]; }
  static void change_salt(PrefixCache& cache, int32_t node) {
    cache.nodes_[node].salt = std::make_shared<const std::string>("other");
  }
  static void lose_child(PrefixCache& cache) { cache.nodes_[0].first_child = -1; }
  static void lose_block(PrefixCache& cache, int32_t node) { cache.block(node, 0) = kNullBlock; }
  static void forget_node(PrefixCache& cache, BlockId block) {
    cache.groups_[0].node_of[block] = -1;
  }
  static void count_node(PrefixCache& cache) { ++cache.num_nodes_; }
  // Drops the block of a node, and nothing else.
  static void drop(PrefixCache& cache, int32_t node, size_t group) {
    cache.drop_block(node, group);
  }
  // Node d + 1 is that of depth d where one sequence has been served.
  static void evict(PrefixCache& cache, GroupId group, int32_t depth) {
    cache.evict(group, cache.block(depth + 1, static_cast<size_t>(group)));
  }
};

namespace {

using Peer = PrefixCacheTestPeer;
using testing::full;
using testing::sliding;

constexpr int32_t kBlockSize = 4;

KvLayout layout_of(const std::vector<KvLayerShape>& target, int64_t num_blocks,
                   const std::vector<KvLayerShape>& draft = {}) {
  KvLayout layout = plan_kv_layout(target, draft, kBlockSize, DType::kFloat32, 1 << 20);
  layout.num_slabs = num_blocks + 1;
  layout.pool_bytes = layout.num_slabs * layout.slab_bytes;
  return layout;
}

std::vector<int32_t> tokens_from(int32_t first, int32_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

std::vector<int32_t> joined(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

using Parts = PrefixCache::Parts;

struct Host {
  explicit Host(const KvLayout& layout, int32_t lookahead = 0, bool may_lack_drafter = false)
      : pool(layout),
        cache(pool, lookahead, may_lack_drafter),
        num_groups(static_cast<int32_t>(layout.groups.size())) {}

  // A sequence that computes all tokens but the last and ends.
  void serve(const std::vector<int32_t>& tokens, Parts parts = Parts::kAll,
             const CacheSalt& salt = nullptr) {
    SequenceBlocks blocks = start(tokens, parts, salt);
    end(blocks);
  }
  SequenceBlocks start(const std::vector<int32_t>& tokens, Parts parts = Parts::kAll,
                       const CacheSalt& salt = nullptr) {
    SequenceBlocks blocks(num_groups);
    PrefixCache::Cursor cursor;
    const auto size = static_cast<int32_t>(tokens.size());
    EXPECT_TRUE(blocks.reserve(pool, size, 0, writes));
    cache.extend(cursor, tokens, salt, size - 1, blocks, parts);
    expect_intact();
    return blocks;
  }
  void end(SequenceBlocks& blocks) {
    blocks.release_all(pool, ++iteration);
    pool.complete(iteration);
    expect_intact();
  }
  int32_t found(const std::vector<int32_t>& tokens, const CacheSalt& salt = nullptr) {
    return cache.find(tokens, salt, static_cast<int32_t>(tokens.size()) - 1).num_tokens;
  }
  void expect_intact() const {
    EXPECT_EQ(pool.check_integrity(), "");
    EXPECT_EQ(cache.check_integrity(), "");
  }

  SlabPool pool;
  PrefixCache cache;
  int32_t num_groups;
  int64_t iteration = 0;
  std::vector<TableWrite> writes;
};

TEST(PrefixCache, FindsWholeBlocksOfTheSameTokensFromTheStart) {
  Host host(layout_of({full(1, 8)}, 20));
  const std::vector<int32_t> tokens = tokens_from(0, 14);  // three blocks
  host.serve(tokens);
  EXPECT_EQ(host.found(tokens), 12);
  EXPECT_EQ(host.found(tokens_from(0, 13)), 12);
  EXPECT_EQ(host.found(tokens_from(0, 12)), 8) << "the last token is computed";
  EXPECT_EQ(host.found(joined(tokens_from(0, 7), tokens_from(90, 9))), 4);
  EXPECT_EQ(host.found(joined({99}, tokens_from(1, 13))), 0);
  EXPECT_EQ(host.found(joined(tokens_from(90, 4), tokens_from(4, 8))), 0) << "not from the start";
  EXPECT_EQ(host.cache.num_nodes(), 3);
  EXPECT_EQ(host.pool.num_cached(0), 3);
  host.serve(joined(tokens_from(0, 8), tokens_from(50, 9)));
  EXPECT_EQ(host.cache.num_nodes(), 5) << "two nodes below a shared path";
}

CacheSalt salt_of(const char* text) { return std::make_shared<const std::string>(text); }

TEST(PrefixCache, SequencesOfDifferentSaltsShareNothing) {
  for (const int32_t lookahead : {0, 1}) {
    Host host(layout_of({full(1, 8)}, 40), lookahead);
    const std::vector<int32_t> tokens = tokens_from(0, 14);  // three blocks
    host.serve(tokens, Parts::kAll, salt_of("a"));
    EXPECT_EQ(host.found(tokens, salt_of("a")), 12) << "an equal salt, not the same object";
    for (const CacheSalt& other : {CacheSalt(), salt_of(""), salt_of("b"), salt_of("aa")}) {
      EXPECT_EQ(host.found(tokens, other), 0);
    }
    // The same tokens again, in blocks of their own.
    host.serve(tokens, Parts::kAll, salt_of("b"));
    host.serve(tokens);
    EXPECT_EQ(host.cache.num_nodes(), 9);
    EXPECT_EQ(host.pool.num_cached(0), 9);
    EXPECT_EQ(host.found(tokens, salt_of("")), 12) << "the empty salt is none";
    // One tree grows and is evicted without the others.
    host.serve(tokens_from(0, 18), Parts::kAll, salt_of("b"));
    EXPECT_EQ(host.found(tokens_from(0, 18), salt_of("b")), 16);
    EXPECT_EQ(host.found(tokens_from(0, 18), salt_of("a")), 12);
    Peer::evict(host.cache, 0, 0);  // the first node, of salt a
    host.expect_intact();
    EXPECT_EQ(host.found(tokens, salt_of("a")), 0);
    EXPECT_EQ(host.found(tokens, salt_of("b")), 12);
    host.cache.clear();
    host.expect_intact();
    EXPECT_EQ(host.found(tokens, salt_of("b")), 0);
  }
}

// A salt is never compared by its hash alone, nor mixed up with tokens.
TEST(PrefixCache, ManySaltsOfOnePromptAreKeptApart) {
  constexpr int32_t kNumSalts = 300;  // the hash table grows
  Host host(layout_of({full(1, 8)}, 2 * kNumSalts));
  const std::vector<int32_t> tokens = tokens_from(0, 5);
  for (int32_t i = 0; i < kNumSalts; ++i) {
    const CacheSalt salt = salt_of(std::to_string(i).c_str());
    EXPECT_EQ(host.found(tokens, salt), 0) << i;
    host.serve(tokens, Parts::kAll, salt);
    EXPECT_EQ(host.found(tokens, salt), 4) << i;
  }
  EXPECT_EQ(host.cache.num_nodes(), kNumSalts);
  host.pool.reset(host.iteration);
  host.cache.reset();
  host.expect_intact();
  EXPECT_EQ(host.found(tokens, salt_of("7")), 0);
}

TEST(PrefixCache, WithLookaheadABlockNeedsItsNextToken) {
  Host host(layout_of({full(1, 8)}, 20), /*lookahead=*/1);
  host.serve(tokens_from(0, 14));
  EXPECT_EQ(host.found(tokens_from(0, 14)), 12);
  EXPECT_EQ(host.found(joined(tokens_from(0, 8), tokens_from(90, 6))), 4);
  EXPECT_EQ(host.found(joined(tokens_from(0, 9), tokens_from(90, 6))), 8);
  EXPECT_EQ(host.found(tokens_from(0, 9)), 8);
  EXPECT_EQ(host.found(tokens_from(0, 8)), 4);
}

TEST(PrefixCache, SlidingGroupsNeedTheLastWindowOnly) {
  Host host(layout_of({full(1, 8), sliding(6, 1, 8)}, 40));
  SequenceBlocks blocks = host.start(tokens_from(0, 25));  // six blocks
  blocks.release_below(host.pool, 24, ++host.iteration);   // sliding blocks before position 19
  host.pool.complete(host.iteration);
  EXPECT_EQ(host.pool.num_cached(1), 4);
  EXPECT_EQ(host.pool.num_cached(0), 0);
  EXPECT_EQ(host.found(tokens_from(0, 25)), 24);
  // Without the block of positions 8 to 11, no hit ends where its window would see it.
  Peer::evict(host.cache, 1, 2);
  host.expect_intact();
  EXPECT_EQ(host.found(tokens_from(0, 25)), 24);
  EXPECT_EQ(host.found(tokens_from(0, 21)), 20);
  EXPECT_EQ(host.found(tokens_from(0, 17)), 8);
  const PrefixCache::Match match = host.cache.find(tokens_from(0, 25), nullptr, 24);
  const auto& tables = host.cache.blocks_of(match);
  EXPECT_EQ(tables[1][3], kNullBlock);
  EXPECT_NE(tables[1][4], kNullBlock);
  host.end(blocks);
}

TEST(PrefixCache, AnEvictedBlockTakesWhatFollowsAlong) {
  Host host(layout_of({full(1, 8), sliding(6, 1, 8)}, 40));
  SequenceBlocks first = host.start(tokens_from(0, 14));
  // The same tokens and more, in blocks of its own: only those that follow are added.
  const std::vector<int32_t> longer = tokens_from(0, 22);
  SequenceBlocks second(2);
  PrefixCache::Cursor cursor;
  ASSERT_TRUE(second.reserve(host.pool, 22, 1, host.writes));
  host.cache.extend(cursor, longer, nullptr, 21, second);
  EXPECT_EQ(host.pool.num_known(0), 5);
  EXPECT_NE(second.table(0)[0], first.table(0)[0]);
  host.end(first);
  EXPECT_EQ(host.pool.num_cached(0), 3);
  EXPECT_EQ(host.found(longer), 20);
  Peer::evict(host.cache, 0, 1);
  host.expect_intact();
  EXPECT_EQ(host.found(longer), 4);
  EXPECT_EQ(host.pool.num_known(0), 1) << "blocks that follow are forgotten although they are held";
  EXPECT_EQ(host.cache.counts(0).evicted_blocks, 2);
  EXPECT_EQ(host.cache.counts(1).evicted_blocks, 2);
  // The sequence that runs adds its own.
  host.cache.extend(cursor, longer, nullptr, 21, second);
  host.expect_intact();
  EXPECT_EQ(host.found(longer), 20);
  host.end(second);
  EXPECT_EQ(host.found(longer), 20);
  host.cache.clear();
  host.expect_intact();
  EXPECT_EQ(host.pool.num_known(0) + host.pool.num_known(1) + host.cache.num_nodes(), 0);
  EXPECT_EQ(host.cache.counts(0).evicted_blocks, 2);
}

TEST(PrefixCache, BlocksAreAdoptedFromHoldersQuarantineAndCache) {
  const std::vector<int32_t> tokens = tokens_from(0, 14);
  for (const bool is_returned : {false, true}) {
    Host host(layout_of({full(1, 8)}, 20));
    SequenceBlocks parent = host.start(tokens);
    const auto adopt = [&](SequenceBlocks& blocks) {
      blocks.adopt(host.pool, host.cache.blocks_of(host.cache.find(tokens, nullptr, 13)), 12);
      host.expect_intact();
      EXPECT_EQ(host.pool.num_cached(0), 0);
      EXPECT_EQ(blocks.num_held(), 3);
    };
    SequenceBlocks shares(1);
    adopt(shares);
    EXPECT_EQ(host.pool.num_holders(0, shares.table(0)[0]), 2);
    shares.return_adopted(host.pool);
    parent.release_all(host.pool, 7);
    EXPECT_EQ(host.pool.num_quarantined(0), 4);
    SequenceBlocks early(1);
    adopt(early);
    EXPECT_EQ(host.pool.num_quarantined(0), 1);
    if (is_returned) {
      early.return_adopted(host.pool);
    } else {
      early.release_all(host.pool, 7);  // before another launch
    }
    host.expect_intact();
    EXPECT_EQ(host.pool.num_quarantined(0), 4);
    host.pool.complete(7);
    EXPECT_EQ(host.pool.num_cached(0), 3);
    SequenceBlocks late(1);
    adopt(late);
    late.release_all(host.pool, 9);
    host.pool.complete(8);
    EXPECT_EQ(host.pool.num_quarantined(0), 3) << "the entry of iteration 7 no longer counts";
    host.pool.complete(9);
    host.expect_intact();
    EXPECT_EQ(host.pool.num_cached(0), 3);
    EXPECT_EQ(host.pool.num_free_slabs(), 20) << "cached blocks count as free";
  }
}

// Group 0 is the target's, group 1 the drafter's.
TEST(PrefixCache, BlocksOfTheDrafterMayBeLacking) {
  Host host(layout_of({full(1, 8)}, 40, {full(1, 8)}), /*lookahead=*/0, /*may_lack_drafter=*/true);
  const std::vector<int32_t> tokens = tokens_from(0, 22);  // five blocks
  const auto find = [&] { return host.cache.find(tokens, nullptr, 21); };
  host.serve(tokens_from(0, 9));
  host.serve(tokens, Parts::kTarget);
  EXPECT_EQ(find().num_tokens, 20);
  EXPECT_EQ(find().num_drafted, 8);
  EXPECT_EQ(find().drafted().num_tokens, 8);
  EXPECT_EQ(host.pool.num_cached(0), 5);
  EXPECT_EQ(host.pool.num_cached(1), 2);

  // A sequence adopts what there is, and has blocks of its own where the drafter's are lacking.
  SequenceBlocks blocks(2);
  const PrefixCache::Match match = find();
  blocks.adopt(host.pool, host.cache.blocks_of(match), match.num_tokens);
  EXPECT_EQ(blocks.table(0).size(), 5u);
  EXPECT_EQ(blocks.table(1).size(), 2u);
  ASSERT_TRUE(blocks.reserve(host.pool, 22, 0, host.writes));
  EXPECT_EQ(blocks.table(1).size(), 6u);
  host.cache.count_hit(blocks, match);
  EXPECT_EQ(host.cache.counts(0).hit_blocks, 5);
  EXPECT_EQ(host.cache.counts(1).hit_blocks, 2);
  // Once its drafter has caught up, all have them.
  PrefixCache::Cursor cursor = match.drafted_end;
  host.cache.extend(cursor, tokens, nullptr, 21, blocks);
  host.expect_intact();
  EXPECT_EQ(find().num_drafted, 20);
  host.end(blocks);
  EXPECT_EQ(host.pool.num_cached(1), 5);

  // An evicted block of the drafter takes what follows along, too.
  Peer::evict(host.cache, 1, 3);
  host.expect_intact();
  EXPECT_EQ(find().num_tokens, 12);
  EXPECT_EQ(find().num_drafted, 12);
  // A block of the drafter below one that is lacking would never be found.
  Peer::drop(host.cache, 2, 1);
  EXPECT_NE(host.cache.check_integrity().find("but those above it do not"), std::string::npos)
      << host.cache.check_integrity();
}

// Blocks of 2 units and of 1: slabs of 1 and 2 blocks.
TEST(PrefixCache, FreeSlabsSpareCachedBlocksWhileThereAreEnough) {
  for (const int64_t kept : {0, 100}) {
    Host host(layout_of({full(1, 8), full(1, 8), sliding(40, 1, 8)}, 20));
    ASSERT_EQ(host.pool.layout().blocks_per_slab(1), 2);
    host.pool.keep_free_slabs(kept);
    const BlockId neighbour = host.pool.allocate(1).value();
    host.serve(tokens_from(0, 6));  // its sliding block lies beside the neighbour
    ASSERT_EQ(host.found(tokens_from(0, 6)), 4);
    (void)host.pool.allocate(1).value();
    host.expect_intact();
    EXPECT_EQ(host.found(tokens_from(0, 6)), kept == 0 ? 4 : 0);
    host.pool.release(1, neighbour, host.iteration);
    host.expect_intact();
  }
}

TEST(PrefixCache, IntegritySeesWhatIsBroken) {
  const auto message = [](const auto& damage) {
    Host host(layout_of({full(1, 8)}, 20));
    SequenceBlocks blocks = host.start(tokens_from(0, 14));
    damage(host, blocks.table(0)[0]);
    return host.cache.check_integrity();
  };
  const auto has = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  has(message([](Host& host, BlockId) { Peer::change_token(host.cache, 2); }), "by its tokens");
  has(message([](Host& host, BlockId) { Peer::change_salt(host.cache, 1); }), "by its tokens");
  has(message([](Host& host, BlockId) { Peer::change_salt(host.cache, 2); }), "has a salt");
  has(message([](Host& host, BlockId) { Peer::lose_child(host.cache); }), "among the children");
  has(message([](Host& host, BlockId) { Peer::lose_block(host.cache, 2); }), "lacks its block");
  has(message([](Host& host, BlockId) { Peer::count_node(host.cache); }), "counted");
  has(message([](Host& host, BlockId block) { Peer::forget_node(host.cache, block); }), "table");
  has(message([](Host& host, BlockId block) { host.pool.forget(0, block); }), "do not know");
}

TEST(PrefixCache, MisuseIsAnInternalError) {
  Host host(layout_of({full(1, 8)}, 20));
  const BlockId block = host.pool.allocate(0).value();
  EXPECT_THROW(host.pool.adopt(0, block), InternalError);
  EXPECT_THROW(host.pool.forget(0, block), InternalError);
  EXPECT_THROW(host.pool.return_adopted(0, block), InternalError);
  EXPECT_THROW(host.pool.mark_known(0, block + 1), InternalError);
  host.serve(tokens_from(0, 14));
  const PrefixCache::Match match = host.cache.find(tokens_from(0, 14), nullptr, 13);
  host.cache.clear();
  EXPECT_THROW((void)host.cache.blocks_of(match), InternalError);
}

}  // namespace
}  // namespace paceline
