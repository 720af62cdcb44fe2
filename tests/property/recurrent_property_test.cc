// SPDX-License-Identifier: Apache-2.0
// Hybrids of recurrent layers and attention: rows have the same bits in every way of computing
// them, also after drafts were rejected at any place around the end of a block, and faults that are
// planted in recorded programs are seen.

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "device/program.h"
#include "ops/recurrent.h"
#include "support/invariance.h"
#include "support/recurrent_models.h"
#include "support/rejected_windows.h"
#include "support/seed.h"

namespace paceline {
namespace {

using testing::by_chunks;
using testing::by_rejected_windows;
using testing::DirectOptions;
using testing::expect_same_bits;
using testing::expect_same_bits_on_every_path;
using testing::largest_difference;
using testing::long_sequence_options;
using testing::random_tokens;
using testing::recurrent_model;
using testing::Trace;

constexpr int32_t kVocab = 64;

TEST(RecurrentInvariance, SameBitsOnEveryPath) {
  const uint64_t first_seed = testing::seed_from_env(1);
  for (uint64_t seed = first_seed; seed < first_seed + 4; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const DType dtype = seed % 2 == 0 ? DType::kBFloat16 : DType::kFloat32;
    const auto model = recurrent_model({.layers = seed % 4 < 2 ? "rrgr" : "rrfr"}, seed, dtype);
    const auto length = static_cast<int32_t>(200 + random() % 40);
    const std::vector<int32_t> tokens = random_tokens(random, length, kVocab);
    // The block size, and so the number of records that are replayed, changes no bit.
    expect_same_bits_on_every_path(model, tokens, long_sequence_options(), {3, 8, 64}, random);
  }
}

// Every number of accepted drafts at every place of a window relative to the end of a block, after
// every number of them in the window before. A block is what a state is stored for.
TEST(RecurrentInvariance, RejectionsAtEveryPlaceLeaveNoTrace) {
  const auto model = recurrent_model({.layers = "rgr"}, 3);
  std::mt19937_64 random(9);
  const int32_t length = 330;
  const std::vector<int32_t> tokens = random_tokens(random, length, kVocab);
  for (const int32_t block_size : {4, 16}) {
    DirectOptions options = long_sequence_options();
    options.block_size = block_size;
    const Trace reference = by_chunks(model, tokens, {length}, options, 0, random);
    for (const int32_t k : {1, 3, 8}) {
      SCOPED_TRACE("block_size " + std::to_string(block_size) + ", k " + std::to_string(k));
      // Where a window begins in its block, drafts accepted in the window before, and in this one.
      std::set<std::array<int32_t, 3>> seen;
      const auto num_places = static_cast<size_t>(block_size * (k + 1) * (k + 1));
      for (int32_t run = 0; run < 100 && seen.size() < num_places && !HasFailure(); ++run) {
        int32_t before = -1;  // the first window follows none
        const auto num_right = [&](int32_t base) {
          auto accepted = static_cast<int32_t>(random() % static_cast<uint64_t>(k + 1));
          for (int32_t i = 0; i < k && seen.contains({base % block_size, before, accepted}); ++i) {
            accepted = (accepted + 1) % (k + 1);
          }
          // At the end of the tokens a window has fewer drafts.
          const bool is_whole = base + accepted + 1 < length;
          if (before >= 0 && is_whole) seen.insert({base % block_size, before, accepted});
          return before = accepted;
        };
        expect_same_bits(by_rejected_windows(
                             model, tokens, {.first = 37, .k = k, .num_right = num_right}, options),
                         reference);
      }
      EXPECT_EQ(seen.size(), num_places);
    }
  }
}

TEST(PlantedFault, RecurrentLayersSeeThemAll) {
  const auto model = recurrent_model({.layers = "rfr"}, 3);
  std::mt19937_64 random(9);
  const int32_t length = 150;
  const std::vector<int32_t> tokens = random_tokens(random, length, kVocab);
  const Trace sound = by_chunks(model, tokens, {length}, long_sequence_options(), 0, random);
  struct Fault {
    const char* name;
    std::function<void(GatedDeltaParams&)> plant;
  };
  static int64_t no_slots[64] = {};
  const std::vector<Fault> faults = {
      {"states that are never written", [](GatedDeltaParams& p) { p.entry_slots = no_slots; }},
      {"records that are never written", [](GatedDeltaParams& p) { p.record_slots = no_slots; }},
      {"the state one block too early", [](GatedDeltaParams& p) { --p.entry_table.blocks; }},
      {"the state one block too late", [](GatedDeltaParams& p) { ++p.entry_table.blocks; }},
      {"the records of the block before", [](GatedDeltaParams& p) { --p.record_table.blocks; }},
      {"the decay of the next head", [](GatedDeltaParams& p) { ++p.a_log; }},
      {"inputs that are off by one", [](GatedDeltaParams& p) { ++p.conv; }},
      {"b in place of a",
       [](GatedDeltaParams& p) {
         p.ba = static_cast<const float*>(p.ba) + p.shape.num_value_heads;
       }},
  };
  const auto run = [&](const std::function<void(GatedDeltaParams&)>& plant) {
    return by_rejected_windows(
        model, tokens,
        {.first = 20,
         .k = 5,
         .num_right = [](int32_t base) { return base % 6; },
         .plant =
             [&](Program& program) {
               for (auto* p : program.params_of<GatedDeltaParams>(gated_delta)) plant(*p);
             }},
        long_sequence_options());
  };
  expect_same_bits(run([](GatedDeltaParams&) {}), sound);
  for (const Fault& fault : faults) {
    EXPECT_GT(largest_difference(run(fault.plant), sound), 1e-4) << fault.name;
  }
}

}  // namespace
}  // namespace paceline
