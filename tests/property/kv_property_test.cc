// SPDX-License-Identifier: Apache-2.0
// Random operations on the pool (support/kv_machine.h).
//
// PACELINE_SEED=n runs another seed, PACELINE_TEST_LEVEL=3 five of them.
#include "support/kv_machine.h"

#include <gtest/gtest.h>

#include <iostream>
#include <vector>

#include "support/kv_layers.h"
#include "support/seed.h"

namespace paceline::testing {
namespace {

// Few slabs, so that the pool is full most of the time.
KvLayout planned(const std::vector<KvLayerShape>& target, const std::vector<KvLayerShape>& draft,
                 int64_t num_slabs) {
  KvLayout layout = plan_kv_layout(target, draft, /*block_size=*/4, DType::kFloat32, 4 << 20);
  layout.num_slabs = num_slabs;
  layout.pool_bytes = num_slabs * layout.slab_bytes;
  return layout;
}

// 15, 10, 24 and 6 blocks a slab.
KvLayout few_blocks_per_slab() {
  const KvLayerShape slides = sliding(12, 1, 8);
  return planned({full(1, 8), slides, full(1, 8), slides, slides}, {full(1, 10), sliding(6, 1, 40)},
                 14);
}

// 3, 96, 384 and 128 blocks a slab: more than a word of bits.
KvLayout many_blocks_per_slab() {
  const KvLayerShape slides = sliding(6, 1, 2);
  return planned({full(4, 32), sliding(12, 1, 8), full(4, 32)},
                 {full(1, 2), slides, slides, slides}, 24);
}

// The stores of a layer with a compressor, at two ratios.
KvLayout entries_of_several_tokens() {
  return planned(
      {window_entries(12, 8), tail(8, 32), compressed(4, 8, 4), tail(7, 16), compressed(7, 8)},
      {window_entries(12, 8), full(1, 8)}, 20);
}

void run_seeds(const KvLayout& layout, int64_t num_operations) {
  const uint64_t first_seed = seed_from_env(20250601);
  const uint64_t num_seeds = test_level() >= 3 ? 5 : 1;
  for (uint64_t seed = first_seed; seed < first_seed + num_seeds; ++seed) {
    std::cout << "PACELINE_SEED=" << seed << std::endl;
    try {
      KvMachine machine(layout, seed, KvFault::kNone);
      machine.run(num_operations);
      std::cout << machine.summary() << std::endl;
      EXPECT_TRUE(machine.is_thorough());
    } catch (const KvViolation& violation) {
      FAIL() << "PACELINE_SEED=" << seed << ": " << violation.what();
    }
  }
}

TEST(KvProperty, AMillionRandomOperations) { run_seeds(few_blocks_per_slab(), 1'000'000); }

TEST(KvProperty, EntriesOfSeveralTokens) { run_seeds(entries_of_several_tokens(), 100'000); }

TEST(KvProperty, SlabsOfManyBlocks) { run_seeds(many_blocks_per_slab(), 100'000); }

// A machine that cannot fail proves nothing.
TEST(KvProperty, TheMachineSeesPlantedFaults) {
  for (const KvFault fault :
       {KvFault::kCompletesEarly, KvFault::kStaleTag, KvFault::kKeepsPartOfFailed,
        KvFault::kLosesBlock, KvFault::kReleasesTwice, KvFault::kReleasesSource}) {
    KvMachine machine(few_blocks_per_slab(), /*seed=*/1, fault);
    try {
      machine.run(10'000);
      ADD_FAILURE() << "fault " << static_cast<int32_t>(fault) << " goes unseen";
    } catch (const KvViolation& violation) {
      std::cout << "fault " << static_cast<int32_t>(fault) << ": " << violation.what() << "\n";
    }
  }
}

}  // namespace
}  // namespace paceline::testing
