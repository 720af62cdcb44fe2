// SPDX-License-Identifier: Apache-2.0
// The pool and the blocks of a sequence, one behaviour a test. tests/property has random sequences
// of operations.
#include "base/overloaded.h"
#include "kv/kv_layout.h"
#include "kv/sequence_blocks.h"
#include "kv/slab_pool.h"
#include "support/errors.h"
#include "support/kv_layers.h"

#include <paceline/error.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace paceline {

// Reaches into a pool to break it.
class SlabPoolTestPeer {
 public:
  static void forget_use(SlabPool& pool, int32_t slab) {  // of its first block
    pool.used(slab)[0] &= pool.used(slab)[0] - 1;
  }
  static void mark_use(SlabPool& pool, int32_t slab, int32_t block) {
    pool.used(slab)[block / 64] |= uint64_t{1} << (block % 64);
  }
  static void mark_quarantined(SlabPool& pool, int32_t slab) { pool.quarantined(slab)[0] |= 1; }
  static void set_owner(SlabPool& pool, int32_t slab, GroupId owner) {
    pool.slabs_[slab].owner = owner;
  }
  static void add_free(SlabPool& pool, int32_t slab) { ++pool.slabs_[slab].num_free; }
  static void count_held(SlabPool& pool, GroupId group) { ++pool.groups_[group].num_held; }
  static void drop_lists(SlabPool& pool, GroupId group) {
    auto& lists = pool.groups_[group].first_slab;
    std::fill(lists.begin(), lists.end(), -1);
    auto& words = pool.groups_[group].nonempty;
    std::fill(words.begin(), words.end(), uint64_t{0});
  }
  static void break_free_list(SlabPool& pool) {
    pool.first_free_slab_ = pool.slabs_[pool.first_free_slab_].next;
  }
  static void loop_free_list(SlabPool& pool) {
    pool.slabs_[pool.first_free_slab_].next = pool.first_free_slab_;
  }
  static void repeat_quarantine(SlabPool& pool) {
    pool.quarantine_.back() = pool.quarantine_[pool.quarantine_head_];
  }
  static void lose_quarantine(SlabPool& pool) { pool.quarantine_.pop_back(); }
  static void date_quarantine_back(SlabPool& pool) { pool.quarantine_.back().newest_launched = -1; }
};

namespace {

using testing::expect_contains;
using testing::full;
using testing::message_of;
using testing::sliding;

// Groups of 8, 12, 5 and 20 units of 64 bytes in slabs of 120 units: 15, 10, 24 and 6 blocks.
// block_size 4; group 1 slides over 12 keys, group 3 over 6.
KvLayout small_layout(int64_t num_slabs) {
  const std::vector<KvLayerShape> target = {full(1, 8), sliding(12, 1, 8), full(1, 8),
                                            sliding(12, 1, 8), sliding(12, 1, 8)};
  const std::vector<KvLayerShape> draft = {full(1, 10), sliding(6, 1, 40)};
  KvLayout layout = plan_kv_layout(target, draft, 4, DType::kFloat32, int64_t{64} * 7680);
  EXPECT_EQ(layout.slab_bytes, 7680);
  layout.num_slabs = num_slabs;
  layout.pool_bytes = num_slabs * layout.slab_bytes;
  return layout;
}

void expect_intact(const SlabPool& pool) { EXPECT_EQ(pool.check_integrity(), ""); }

TEST(SlabPool, BlocksOfDifferentGroupsNeverShareBytes) {
  const KvLayout layout = small_layout(9);
  SlabPool pool(layout);
  std::set<std::pair<int64_t, int64_t>> ranges;  // begin, end
  std::vector<bool> is_full(layout.groups.size(), false);
  for (bool any = true; any;) {
    any = false;
    for (GroupId g = 0; g < 4; ++g) {
      const auto block = pool.allocate(g);
      if (!block) continue;
      any = true;
      const int64_t begin = int64_t{*block} * layout.groups[g].block_bytes;
      EXPECT_GE(begin, layout.slab_bytes) << "slab 0 is reserved";
      EXPECT_TRUE(ranges.emplace(begin, begin + layout.groups[g].block_bytes).second);
    }
  }
  int64_t end = 0;
  for (const auto& [begin, range_end] : ranges) {
    EXPECT_GE(begin, end);
    end = range_end;
  }
  EXPECT_LE(end, layout.pool_bytes);
  EXPECT_EQ(pool.num_free_slabs(), 0);
  expect_intact(pool);
}

TEST(SlabPool, PrefersTheFullestSlabWithRoom) {
  SlabPool pool(small_layout(9));
  std::vector<BlockId> blocks;
  for (int32_t i = 0; i < 45; ++i) blocks.push_back(*pool.allocate(0));  // slabs of 15
  // Leaves 14 - i, 10 and 12 blocks in the three slabs.
  for (int32_t i = 0; i < 7; ++i) pool.release_unused(0, blocks[i]);
  for (int32_t i = 15; i < 20; ++i) pool.release_unused(0, blocks[i]);
  for (int32_t i = 30; i < 33; ++i) pool.release_unused(0, blocks[i]);
  expect_intact(pool);
  std::vector<int32_t> slabs;
  for (int32_t i = 0; i < 15; ++i) slabs.push_back(*pool.allocate(0) / 15 - blocks[0] / 15);
  EXPECT_EQ(slabs, (std::vector<int32_t>{2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0}));
  expect_intact(pool);
}

TEST(SlabPool, EmptySlabChangesItsGroup) {
  SlabPool pool(small_layout(2));
  const BlockId block = *pool.allocate(0);
  EXPECT_EQ(pool.num_free_slabs(), 0);
  EXPECT_FALSE(pool.allocate(1).has_value());
  pool.release_unused(0, block);
  EXPECT_EQ(pool.num_free_slabs(), 1);
  EXPECT_TRUE(pool.allocate(1).has_value());
  expect_intact(pool);
}

TEST(SlabPool, CountsSlabsForAdmission) {
  SlabPool pool(small_layout(4));  // three slabs of 15, 10, 24 or 6 blocks
  const auto can = [&](std::vector<int64_t> counts) { return pool.can_allocate(counts); };
  EXPECT_TRUE(can({15, 10, 24, 0}));
  EXPECT_FALSE(can({16, 10, 24, 0}));
  EXPECT_FALSE(can({1, 1, 1, 1}));
  (void)*pool.allocate(3);
  EXPECT_TRUE(can({15, 10, 0, 5}));
  EXPECT_FALSE(can({15, 10, 0, 6}));
  EXPECT_TRUE(pool.fits_alone(std::vector<int64_t>{15, 10, 0, 6}));
  EXPECT_FALSE(pool.fits_alone(std::vector<int64_t>{15, 10, 1, 6}));
}

TEST(SlabPool, QuarantineHoldsUntilTheNewestLaunchedIterationCompletes) {
  SlabPool pool(small_layout(2));
  std::vector<BlockId> blocks;
  while (const auto block = pool.allocate(3)) blocks.push_back(*block);
  ASSERT_EQ(blocks.size(), 6u);
  pool.release(3, blocks[0], 4);
  pool.release(3, blocks[1], 5);
  EXPECT_EQ(pool.num_held(3), 4);
  EXPECT_EQ(pool.num_quarantined(3), 2);
  EXPECT_FALSE(pool.allocate(3).has_value());
  pool.complete(3);
  EXPECT_FALSE(pool.allocate(3).has_value());
  expect_intact(pool);
  pool.complete(4);
  EXPECT_EQ(pool.allocate(3), blocks[0]);
  EXPECT_FALSE(pool.allocate(3).has_value());
  pool.complete(5);
  EXPECT_EQ(pool.allocate(3), blocks[1]);
  EXPECT_EQ(pool.num_quarantined(), 0);
  // Iteration 5 is done: nothing launched can see the block any more.
  pool.release(3, blocks[2], 5);
  EXPECT_EQ(pool.allocate(3), blocks[2]);
  expect_intact(pool);
}

TEST(SlabPool, QuarantinedBlocksKeepTheirSlab) {
  SlabPool pool(small_layout(2));
  pool.release(0, *pool.allocate(0), 0);
  EXPECT_EQ(pool.num_free_slabs(), 0);
  EXPECT_FALSE(pool.allocate(1).has_value());
  pool.complete(0);
  EXPECT_EQ(pool.num_free_slabs(), 1);
}

// The check of the property test, in short: it must see a host that completes too early.
TEST(SlabPool, PlantedEarlyCompletionIsSeen) {
  for (const int64_t early_by : {0, 1}) {
    SlabPool pool(small_layout(2));
    const int64_t device_completed = 6;
    bool is_reused_early = false;
    int64_t tag = -1;
    pool.set_on_reusable([&](GroupId, BlockId) { is_reused_early = tag > device_completed; });
    tag = 7;
    pool.release(0, *pool.allocate(0), tag);
    pool.complete(device_completed + early_by);
    EXPECT_EQ(is_reused_early, early_by > 0);
  }
}

TEST(SlabPool, ReportsEachBlockWhenItBecomesReusable) {
  SlabPool pool(small_layout(3));
  std::vector<std::pair<GroupId, BlockId>> seen;
  pool.set_on_reusable([&](GroupId group, BlockId block) { seen.emplace_back(group, block); });
  const BlockId a = *pool.allocate(0);
  const BlockId b = *pool.allocate(1);
  const BlockId c = *pool.allocate(0);
  pool.release(0, a, 0);
  pool.release(1, b, 1);
  EXPECT_TRUE(seen.empty());
  pool.release_unused(0, c);
  EXPECT_EQ(seen, (std::vector<std::pair<GroupId, BlockId>>{{0, c}}));
  pool.complete(0);
  pool.complete(1);
  EXPECT_EQ(seen, (std::vector<std::pair<GroupId, BlockId>>{{0, c}, {0, a}, {1, b}}));
}

TEST(SlabPool, LongBacklogStaysInOrder) {
  KvLayout layout = small_layout(600);
  SlabPool pool(layout);
  int64_t num_reusable = 0;
  pool.set_on_reusable([&](GroupId, BlockId) { ++num_reusable; });
  for (int64_t i = 0; i < 5000; ++i) {
    pool.release(2, *pool.allocate(2), i);
    pool.complete(i - 1000);
    EXPECT_EQ(num_reusable, std::max<int64_t>(0, i - 999));
  }
  expect_intact(pool);
  pool.complete(5000);
  EXPECT_EQ(pool.num_free_slabs(), 599);
  expect_intact(pool);
}

TEST(SlabPool, MisuseIsAnInternalError) {
  SlabPool pool(small_layout(4));
  const BlockId a = *pool.allocate(0);
  const BlockId b = *pool.allocate(0);
  const BlockId c = *pool.allocate(0);
  pool.release_unused(0, a);
  EXPECT_THROW(pool.release_unused(0, a), InternalError);
  EXPECT_THROW(pool.release(0, a, 0), InternalError);
  pool.release(0, b, 3);
  expect_contains(message_of<InternalError>([&] { pool.release(0, b, 3); }), {"in quarantine"});
  EXPECT_THROW(pool.release_unused(0, b), InternalError);
  EXPECT_THROW(pool.release(0, c, 2), InternalError) << "the newest launched iteration went back";
  EXPECT_THROW(pool.release(1, c, 3), InternalError) << "another group's slab";
  EXPECT_THROW(pool.release(0, kNullBlock, 3), InternalError);
  EXPECT_THROW(pool.release(0, 3, 3), InternalError) << "slab 0";
  EXPECT_THROW(pool.release(0, -1, 3), InternalError);
  EXPECT_THROW(pool.release(0, 1 << 30, 3), InternalError);
  EXPECT_THROW(pool.release(9, c, 3), InternalError);
  EXPECT_THROW((void)pool.allocate(-1), InternalError);
  EXPECT_EQ(pool.num_held(0), 1);
  EXPECT_EQ(pool.num_quarantined(0), 1);
  expect_intact(pool);
}

TEST(SlabPool, IntegritySeesPlantedCorruption) {
  using Peer = SlabPoolTestPeer;
  const std::vector<std::pair<std::string, std::function<void(SlabPool&)>>> faults = {
      {"free ", [](SlabPool& pool) { Peer::forget_use(pool, 2); }},
      {"in quarantine but not in use", [](SlabPool& pool) { Peer::forget_use(pool, 1); }},
      {"free ", [](SlabPool& pool) { Peer::mark_use(pool, 1, 14); }},
      {"beyond the slab", [](SlabPool& pool) { Peer::mark_use(pool, 2, 20); }},
      {"no owner", [](SlabPool& pool) { Peer::mark_use(pool, 4, 0); }},
      {"reserved", [](SlabPool& pool) { Peer::set_owner(pool, 0, -1); }},
      {"reserved", [](SlabPool& pool) { Peer::set_owner(pool, 3, -2); }},
      {"", [](SlabPool& pool) { Peer::set_owner(pool, 2, 0); }},
      {"empty but not given back", [](SlabPool& pool) { Peer::set_owner(pool, 4, 0); }},
      {"owner is 7", [](SlabPool& pool) { Peer::set_owner(pool, 2, 7); }},
      {"free ", [](SlabPool& pool) { Peer::add_free(pool, 1); }},
      {"counts free", [](SlabPool& pool) { Peer::count_held(pool, 0); }},
      {"have room", [](SlabPool& pool) { Peer::drop_lists(pool, 0); }},
      {"free slabs", [](SlabPool& pool) { Peer::break_free_list(pool); }},
      {"cycle", [](SlabPool& pool) { Peer::loop_free_list(pool); }},
      {"counts free", [](SlabPool& pool) { Peer::mark_quarantined(pool, 2); }},
      {"listed twice", [](SlabPool& pool) { Peer::repeat_quarantine(pool); }},
      {"1 listed, 2 marked", [](SlabPool& pool) { Peer::lose_quarantine(pool); }},
      {"iteration -1", [](SlabPool& pool) { Peer::date_quarantine_back(pool); }}};
  for (size_t i = 0; i < faults.size(); ++i) {
    SlabPool pool(small_layout(6));
    const BlockId a = *pool.allocate(0);  // slab 1
    const BlockId b = *pool.allocate(0);
    (void)pool.allocate(0);
    (void)pool.allocate(1);  // slab 2
    (void)pool.allocate(1);
    pool.release(0, a, 0);
    pool.release(0, b, 1);
    expect_intact(pool);
    faults[i].second(pool);
    const std::string found = pool.check_integrity();
    EXPECT_NE(found, "") << "fault " << i << " goes unseen";
    expect_contains(found, {faults[i].first});
  }
}

TEST(SequenceBlocks, ReservesAllGroupsAndReportsNewEntries) {
  SlabPool pool(small_layout(9));
  SequenceBlocks blocks(4);
  std::vector<TableWrite> writes;
  ASSERT_TRUE(blocks.reserve(pool, 9, /*seq_slot=*/5, writes));  // 3 blocks of 4 tokens
  ASSERT_EQ(writes.size(), 12u);
  for (size_t i = 0; i < writes.size(); ++i) {
    const TableWrite& write = writes[i];
    EXPECT_EQ(write.seq_slot, 5);
    EXPECT_EQ(write.group, static_cast<GroupId>(i / 3));
    EXPECT_EQ(write.index, static_cast<int32_t>(i % 3));
    EXPECT_NE(write.block, kNullBlock);
    EXPECT_EQ(write.block, blocks.table(write.group)[write.index]);
  }
  EXPECT_EQ(blocks.num_held(), 12);
  ASSERT_TRUE(blocks.reserve(pool, 12, 5, writes));
  ASSERT_TRUE(blocks.reserve(pool, 4, 5, writes));
  EXPECT_EQ(writes.size(), 12u) << "already covered";
  ASSERT_TRUE(blocks.reserve(pool, 13, 5, writes));
  EXPECT_EQ(writes.size(), 16u);
  EXPECT_EQ(writes.back().index, 3);
  blocks.release_all(pool, -1);
  EXPECT_EQ(pool.num_free_slabs(), 8);
  EXPECT_EQ(blocks.num_held(), 0);
  EXPECT_TRUE(blocks.table(0).empty());
  expect_intact(pool);
}

TEST(SequenceBlocks, FailingMidwayChangesNothing) {
  // Three slabs: the groups 0..2 would get theirs before group 3 fails.
  SlabPool pool(small_layout(4));
  SequenceBlocks blocks(4);
  std::vector<TableWrite> writes;
  EXPECT_FALSE(blocks.reserve(pool, 1, 0, writes));
  EXPECT_TRUE(writes.empty());
  EXPECT_EQ(blocks.num_held(), 0);
  EXPECT_EQ(pool.num_free_slabs(), 3);
  for (GroupId g = 0; g < 4; ++g) {
    EXPECT_EQ(pool.num_held(g), 0);
    EXPECT_TRUE(blocks.table(g).empty());
  }
  expect_intact(pool);
}

TEST(SequenceBlocks, FailingToGrowKeepsTheHeldBlocks) {
  SlabPool pool(small_layout(5));  // group 3 has one slab: 6 blocks, 24 tokens
  SequenceBlocks blocks(4);
  std::vector<TableWrite> writes;
  ASSERT_TRUE(blocks.reserve(pool, 24, 0, writes));
  const size_t num_writes = writes.size();
  EXPECT_FALSE(blocks.reserve(pool, 25, 0, writes));
  EXPECT_EQ(writes.size(), num_writes);
  EXPECT_EQ(blocks.num_held(), 24);
  for (GroupId g = 0; g < 4; ++g) EXPECT_EQ(blocks.table(g).size(), 6u);
  expect_intact(pool);
  // The window of group 3 moves on; once its blocks are reusable the sequence grows.
  blocks.release_below(pool, 20, /*newest_launched=*/3);
  EXPECT_FALSE(blocks.reserve(pool, 25, 0, writes));
  pool.complete(3);
  EXPECT_TRUE(blocks.reserve(pool, 25, 0, writes));
  expect_intact(pool);
}

TEST(SequenceBlocks, ReleasesBlocksThatNoQueryOfTheWindowSees) {
  SlabPool pool(small_layout(9));
  SequenceBlocks blocks(4);
  std::vector<TableWrite> writes;
  ASSERT_TRUE(blocks.reserve(pool, 40, 0, writes));
  const auto first_kept = [&](GroupId g) {
    const auto table = blocks.table(g);
    return std::find_if(table.begin(), table.end(), [](BlockId b) { return b != kNullBlock; }) -
           table.begin();
  };
  for (int32_t position = 0; position < 40; ++position) {
    blocks.release_below(pool, position, 0);
    // The query at `position` sees keys from position - window + 1; blocks have 4 tokens.
    EXPECT_EQ(first_kept(0), 0);
    EXPECT_EQ(first_kept(1), std::max(0, position - 11) / 4);
    EXPECT_EQ(first_kept(2), 0);
    EXPECT_EQ(first_kept(3), std::max(0, position - 5) / 4);
  }
  blocks.release_below(pool, 3, 0);
  EXPECT_EQ(first_kept(3), 34 / 4) << "the window never moves back";
  EXPECT_EQ(blocks.num_held(), 40 - 7 - 8);
  EXPECT_EQ(pool.num_quarantined(1), 7);
  EXPECT_EQ(pool.num_quarantined(3), 8);
  blocks.release_all(pool, 0);
  EXPECT_EQ(pool.num_quarantined(), 40);
  pool.complete(0);
  EXPECT_EQ(pool.num_free_slabs(), 8);
  // As new: the whole prompt is needed again.
  ASSERT_TRUE(blocks.reserve(pool, 40, 0, writes));
  EXPECT_EQ(blocks.num_held(), 40);
  expect_intact(pool);
}

TEST(SequenceBlocks, WindowBeyondTheReservationLeavesNullBlocks) {
  SlabPool pool(small_layout(9));
  SequenceBlocks blocks(4);
  std::vector<TableWrite> writes;
  blocks.release_below(pool, 25, -1);  // group 3 needs nothing below position 20
  EXPECT_EQ(blocks.num_held(), 0);
  ASSERT_TRUE(blocks.reserve(pool, 24, 0, writes));
  EXPECT_EQ(writes.size(), 24u);
  EXPECT_EQ(blocks.num_held(), 6 + (6 - 3) + 6 + 1);
  EXPECT_EQ(blocks.table(3)[4], kNullBlock);
  EXPECT_NE(blocks.table(3)[5], kNullBlock);
  blocks.release_all(pool, -1);
  EXPECT_EQ(pool.num_free_slabs(), 8);
  expect_intact(pool);
}

TEST(SequenceBlocks, GroupsMustMatchThePool) {
  SlabPool pool(small_layout(9));
  SequenceBlocks blocks;
  std::vector<TableWrite> writes;
  EXPECT_THROW((void)blocks.reserve(pool, 1, 0, writes), InternalError);
}

// One sequence through all its iterations, results `lateness` iterations late: what it holds or has
// in quarantine never exceeds peak_blocks, and is exactly that for some alignment.
TEST(PeakBlocks, BoundsASimulatedSequence) {
  const KvLayout layout = small_layout(64);
  for (const int32_t num_tokens : {1, 4, 5, 23, 64, 90}) {
    for (const int32_t rows : {1, 2, 3, 5, 8}) {
      for (const int32_t lateness : {0, 1, 2}) {
        SCOPED_TRACE(::testing::Message()
                     << num_tokens << " tokens, " << rows << " rows, lateness " << lateness);
        SlabPool pool(layout);
        SequenceBlocks blocks(4);
        std::vector<TableWrite> writes;
        std::vector<int64_t> most(4, 0);
        for (int32_t t = 0; rows * t < num_tokens; ++t) {
          const int64_t completed = t - 1 - lateness;
          pool.complete(completed);
          const int32_t known = rows * std::max(0, t - lateness);
          blocks.release_below(pool, known, t - 1);
          ASSERT_TRUE(blocks.reserve(pool, std::min(num_tokens, rows * (t + 1)), 0, writes));
          for (GroupId g = 0; g < 4; ++g) {
            most[g] = std::max(most[g], pool.num_held(g) + pool.num_quarantined(g));
          }
        }
        const auto bound = peak_blocks(layout, num_tokens, {.window = rows * (2 * lateness + 1)});
        for (GroupId g = 0; g < 4; ++g) EXPECT_LE(most[g], bound[g]);
        EXPECT_EQ(most[0], bound[0]);
        EXPECT_EQ(most[2], bound[2]);
      }
    }
  }
}

TEST(PeakBlocks, IsTheMostThatAnyAlignmentTouches) {
  const KvLayout layout = small_layout(64);
  for (int32_t num_tokens = 1; num_tokens < 60; ++num_tokens) {
    for (int32_t slack = 0; slack < 20; ++slack) {
      std::vector<int64_t> most;
      for (const KvGroup& group : layout.groups) {
        const int32_t window = kv_window(group.kind);
        const int32_t span = window == 0 ? num_tokens : std::min(num_tokens, window + slack);
        int64_t touched = 0;
        for (int32_t begin = 0; begin + span <= num_tokens; ++begin) {
          touched = std::max<int64_t>(touched, (begin + span - 1) / 4 - begin / 4 + 1);
        }
        most.push_back(touched);
      }
      EXPECT_EQ(peak_blocks(layout, num_tokens, {.window = slack}), most) << num_tokens << ", " << slack;
    }
  }
}

}  // namespace
}  // namespace paceline
