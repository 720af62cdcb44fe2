// SPDX-License-Identifier: Apache-2.0
// Hybrids of recurrent layers and attention: rows have the same bits in every way of computing
// them, also after drafts were rejected at any place around the end of a block, and faults that are
// planted in recorded programs are seen.

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <random>
#include <set>
#include <utility>
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
    const auto model = recurrent_model({.layers = "rrfr"}, seed, dtype);
    const auto length = static_cast<int32_t>(200 + random() % 40);
    const std::vector<int32_t> tokens = random_tokens(random, length, kVocab);
    // The block size, and so the number of records that are replayed, changes no bit.
    expect_same_bits_on_every_path(model, tokens, long_sequence_options(), {3, 8, 64}, random);
  }
}

// Every number of accepted drafts at every place of a window relative to the end of a block, once
// and again in the next window.
TEST(RecurrentInvariance, RejectionsAtEveryPlaceLeaveNoTrace) {
  const auto model = recurrent_model({.layers = "rfr"}, 3);
  std::mt19937_64 random(9);
  const int32_t length = 330;
  const std::vector<int32_t> tokens = random_tokens(random, length, kVocab);
  for (const int32_t block_size : {4, 16}) {
    DirectOptions options = long_sequence_options();
    options.block_size = block_size;
    const Trace reference = by_chunks(model, tokens, {length}, options, 0, random);
    for (const int32_t k : {1, 3, 8}) {
      std::set<std::pair<int32_t, int32_t>> places;  // window begin in its block, accepted drafts
      const int32_t num_runs = block_size == 16 && k == 8 ? 20 : 10;
      for (int32_t run = 0; run < num_runs && !HasFailure(); ++run) {
        const auto num_right = [&](int32_t base) {
          const auto accepted = static_cast<int32_t>(random() % static_cast<uint64_t>(k + 1));
          places.insert({base % block_size, accepted});
          return accepted;
        };
        expect_same_bits(by_rejected_windows(
                             model, tokens, {.first = 37, .k = k, .num_right = num_right}, options),
                         reference);
      }
      EXPECT_EQ(places.size(), static_cast<size_t>(block_size * (k + 1))) << "k " << k;
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
