// SPDX-License-Identifier: Apache-2.0
// Compressed attention in models like DeepSeek-V4: rows have the same bits in every way of
// computing them, also after drafts were rejected at any place around the last token of an entry,
// and faults that are planted in recorded programs are seen.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "device/program.h"
#include "ops/compressed.h"
#include "support/compressed_models.h"
#include "support/invariance.h"
#include "support/rejected_windows.h"
#include "support/seed.h"

namespace paceline {
namespace {

using testing::by_chunks;
using testing::by_rejected_windows;
using testing::compressed_model;
using testing::CompressedModel;
using testing::expect_same_bits;
using testing::expect_same_bits_on_every_path;
using testing::largest_difference;
using testing::long_sequence_options;
using testing::random_tokens;
using testing::Trace;

constexpr int32_t kVocab = 64;

// Layers with a window alone, with overlap and an indexer, and at DeepSeek-V4's other ratio.
const std::vector<int32_t> kRatios = {0, 4, 128, 4};

TEST(CompressedInvariance, SameBitsOnEveryPath) {
  const uint64_t first_seed = testing::seed_from_env(1);
  for (uint64_t seed = first_seed; seed < first_seed + 4; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const DType dtype = seed % 2 == 0 ? DType::kBFloat16 : DType::kFloat32;
    const auto model = compressed_model({.ratios = kRatios}, seed, dtype);
    // Across attention chunks, three entries of the large ratio and the indexer's top_k.
    const auto length = static_cast<int32_t>(390 + random() % 40);
    const std::vector<int32_t> tokens = random_tokens(random, length, kVocab);
    expect_same_bits_on_every_path(model, tokens, long_sequence_options(), {3}, random);
  }
}

// Every number of accepted drafts at every place of a window relative to the ends of entries.
TEST(CompressedInvariance, RejectionsAtEveryPlaceLeaveNoTrace) {
  const auto model = compressed_model({.ratios = kRatios}, 3);
  std::mt19937_64 random(9);
  const int32_t length = 420;
  const std::vector<int32_t> tokens = random_tokens(random, length, kVocab);
  const Trace reference = by_chunks(model, tokens, {length}, long_sequence_options(), 0, random);
  for (const int32_t k : {1, 3, 16}) {
    std::set<std::pair<int32_t, int32_t>> small_places;  // window begin modulo 4, accepted drafts
    std::set<std::pair<int32_t, int32_t>> large_places;  // the last token of a large entry in the
                                                         // window, accepted drafts
    const int32_t num_runs = k == 16 ? 50 : 12;
    for (int32_t run = 0; run < num_runs && !HasFailure(); ++run) {
      // Near the end of a large entry the window begins, run by run, at each of its last tokens.
      const auto num_right = [&](int32_t base) {
        const int32_t to_end = 127 - base % 128;
        int32_t accepted = static_cast<int32_t>(random() % static_cast<uint64_t>(k + 1));
        if (to_end > k && to_end <= 3 * k) {
          accepted =
              std::min(k, std::max(0, to_end - 1 - static_cast<int32_t>(random() % (k + 1))));
        }
        small_places.insert({base % 4, accepted});
        if (to_end <= k) large_places.insert({to_end, accepted});
        return accepted;
      };
      expect_same_bits(
          by_rejected_windows(model, tokens, {.first = 90, .k = k, .num_right = num_right},
                              long_sequence_options()),
          reference);
    }
    EXPECT_EQ(small_places.size(), static_cast<size_t>(4 * (k + 1))) << "k " << k;
    EXPECT_GT(large_places.size(), static_cast<size_t>((k + 1) * (k + 1) / 2)) << "k " << k;
  }
}

// The rows of a window, where each row is, and what the fault says that it sees.
constexpr int32_t kWidth = 17;
struct Seen {
  std::map<int32_t, std::array<int32_t, kWidth>> entry_end;  // by tokens per entry
  std::array<int32_t, kWidth> window_begin;
  std::array<int32_t, kWidth> window_end;

  void set(int32_t base, int32_t window, int32_t entry_shift, int32_t window_shift) {
    for (int32_t row = 0; row < kWidth; ++row) {
      const int32_t position = base + row;
      for (auto& [ratio, ends] : entry_end) {
        ends[static_cast<size_t>(row)] = (position + 1 + entry_shift) / ratio;
      }
      const int32_t last = position + window_shift;
      window_begin[static_cast<size_t>(row)] = std::max(last - window + 1, 0);
      window_end[static_cast<size_t>(row)] = last + 1;
    }
  }
};

TEST(PlantedFault, CompressedAttentionSeesThemAll) {
  const CompressedModel shape{.ratios = kRatios};
  const auto model = compressed_model(shape, 3);
  std::mt19937_64 random(9);
  const int32_t length = 300;
  const std::vector<int32_t> tokens = random_tokens(random, length, kVocab);
  const Trace sound = by_chunks(model, tokens, {length}, long_sequence_options(), 0, random);
  Seen seen{.entry_end = {{4, {}}, {128, {}}}, .window_begin = {}, .window_end = {}};

  const auto attentions = [](Program& program) {
    return program.params_of<CompressedAttentionParams>(compressed_attention);
  };
  const auto plant_entries = [&](Program& program, int32_t ratio) {
    for (auto* p : attentions(program)) {
      if (p->entry_end != nullptr && p->entry_table.tokens_per_entry == ratio) {
        p->entry_end = seen.entry_end.at(ratio).data();
      }
    }
    if (ratio != 4) return;
    for (auto* p : program.params_of<IndexScoresParams>(index_scores)) {
      p->entry_end = seen.entry_end.at(4).data();
    }
    for (auto* p : program.params_of<ChooseEntriesParams>(choose_entries)) {
      p->entry_end = seen.entry_end.at(4).data();
    }
  };
  const auto plant_window = [&](Program& program) {
    for (auto* p : attentions(program)) {
      p->window_begin = seen.window_begin.data();
      p->window_end = seen.window_end.data();
    }
  };
  const auto plant_all = [&](Program& program) {
    plant_entries(program, 4);
    plant_entries(program, 128);
    plant_window(program);
  };
  // The rope of layers without a compressor.
  const auto other_rope = [](Program& program, LatentRope& rope) {
    const LatentRope& other =
        program.params_of<AppendWindowEntriesParams>(append_window_entries).at(0)->rope;
    rope.cos = other.cos;
    rope.sin = other.sin;
  };
  struct Fault {
    const char* name;
    std::function<void(Program&)> plant;
    int32_t entry_shift = 0;
    int32_t window_shift = 0;
  };
  const std::vector<Fault> faults = {
      {"an entry of 4 tokens is visible one token early",
       [&](Program& program) { plant_entries(program, 4); }, 1},
      {"an entry of 4 tokens is visible one token late",
       [&](Program& program) { plant_entries(program, 4); }, -1},
      {"an entry of 128 tokens is visible one token early",
       [&](Program& program) { plant_entries(program, 128); }, 1},
      {"an entry of 128 tokens is visible one token late",
       [&](Program& program) { plant_entries(program, 128); }, -1},
      {"the window of the row before", plant_window, 0, -1},
      {"the entries that the row before has chosen",
       [](Program& program) {
         for (auto* p : program.params_of<ChooseEntriesParams>(choose_entries)) {
           p->chosen += p->top_k;
           ++p->num_chosen;
         }
       }},
      {"queries with the rope of the other kind of layer",
       [&](Program& program) {
         for (auto* p : program.params_of<RotateHeadsParams>(rotate_heads)) {
           if (p->has_norm) other_rope(program, p->rope);
         }
       }},
      {"outputs rotated back by the rope of the other kind of layer",
       [&](Program& program) {
         for (auto* p : program.params_of<RotateHeadsParams>(rotate_heads)) {
           if (p->is_inverse) other_rope(program, p->rope);
         }
       }},
      {"compressed entries with the rope of the other kind of layer",
       [&](Program& program) {
         for (auto* p : program.params_of<CompressParams>(compress)) other_rope(program, p->rope);
       }},
      {"compressed entries that are rotated to the position after their first",
       [](Program& program) {
         for (auto* p : program.params_of<CompressParams>(compress)) ++p->rope.position_offset;
       }},
      {"entries without overlap",
       [](Program& program) {
         for (auto* p : program.params_of<CompressParams>(compress)) p->overlaps = false;
       }},
      {"a tail that is not written",
       [](Program& program) {
         static int32_t no_rows = 0;
         for (auto* p : program.params_of<AppendTailParams>(append_tail)) p->num_rows = &no_rows;
       }},
      {"outputs that are not rotated back",
       [](Program& program) {
         for (auto* p : program.params_of<RotateHeadsParams>(rotate_heads)) {
           if (p->is_inverse) p->rope_head_dim = 0;
         }
       }},
      {"no sinks",
       [&](Program& program) {
         for (auto* p : attentions(program)) p->sinks = nullptr;
       }},
  };
  const auto run = [&](const Fault& fault) {
    return by_rejected_windows(model, tokens,
                               {.first = 100,
                                .k = 5,
                                .num_right = [](int32_t) { return 5; },
                                .plant = fault.plant,
                                .before_window =
                                    [&](int32_t base) {
                                      seen.set(base, shape.window, fault.entry_shift,
                                               fault.window_shift);
                                    }},
                               long_sequence_options());
  };
  // Without a fault, the arrays of the test change nothing.
  expect_same_bits(run({"none", plant_all}), sound);
  for (const Fault& fault : faults) {
    EXPECT_GT(largest_difference(run(fault), sound), 1e-4) << fault.name;
  }
}

}  // namespace
}  // namespace paceline
