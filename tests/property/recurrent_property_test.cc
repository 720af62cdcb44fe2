// SPDX-License-Identifier: Apache-2.0
// Hybrids of recurrent layers and attention: rows have the same bits in every way of computing them,
// also after drafts were rejected at any place around the end of a block, and faults that are
// planted in recorded programs are seen.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
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
using testing::by_windows;
using testing::DirectOptions;
using testing::expect_same_bits;
using testing::random_tokens;
using testing::recurrent_model;
using testing::Trace;

constexpr int32_t kVocab = 64;

DirectOptions direct_options() {
  DirectOptions options;
  options.max_model_len = 640;
  options.max_verify_rows = 640;
  options.pool_bytes = 64 << 20;
  return options;
}

TEST(RecurrentInvariance, SameBitsOnEveryPath) {
  const uint64_t first_seed = testing::seed_from_env(1);
  for (uint64_t seed = first_seed; seed < first_seed + 4; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const DType dtype = seed % 2 == 0 ? DType::kBFloat16 : DType::kFloat32;
    const auto model = recurrent_model({.layers = "rrfr"}, seed, dtype);
    const auto length = static_cast<int32_t>(200 + random() % 40);
    const std::vector<int32_t> tokens = random_tokens(random, length, kVocab);
    DirectOptions options = direct_options();
    const Trace reference = by_chunks(model, tokens, {length}, options, 0, random);
    std::vector<int32_t> chunks;
    for (int32_t left = length; left > 0;) {
      chunks.push_back(static_cast<int32_t>(1 + random() % std::min(left, 50)));
      left -= chunks.back();
    }
    expect_same_bits(by_chunks(model, tokens, chunks, options, 2, random), reference);
    expect_same_bits(by_chunks(model, tokens, std::vector<int32_t>(length, 1), options, 0, random),
                     reference);
    options.num_threads = 2;
    for (const int32_t k : {0, 3, 16}) {
      expect_same_bits(by_windows(model, tokens, 30, k, options), reference);
    }
    // The block size, and so the number of records that are replayed, changes no bit.
    for (const int32_t block_size : {3, 8, 64}) {
      options.block_size = block_size;
      const Trace other = by_windows(model, tokens, 17, 3, options);
      ASSERT_EQ(other.logits, reference.logits) << "block_size " << block_size;
    }
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
    DirectOptions options = direct_options();
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
  const Trace sound = by_chunks(model, tokens, {length}, direct_options(), 0, random);
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
      {"b in place of a", [](GatedDeltaParams& p) {
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
        direct_options());
  };
  expect_same_bits(run([](GatedDeltaParams&) {}), sound);
  for (const Fault& fault : faults) {
    const Trace faulty = run(fault.plant);
    double furthest = 0;
    for (size_t position = 0; position < sound.logits.size(); ++position) {
      for (size_t i = 0; i < sound.logits[position].size(); ++i) {
        const double error =
            std::fabs(double{faulty.logits[position][i]} - sound.logits[position][i]);
        furthest = std::isnan(error) ? 1 : std::max(furthest, error);
      }
    }
    EXPECT_GT(furthest, 1e-4) << fault.name;
  }
}

}  // namespace
}  // namespace paceline
