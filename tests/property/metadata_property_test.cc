// SPDX-License-Identifier: Apache-2.0
// advance^j == build at step j, over every field, for every kind of group, on random batches with
// positions at block edges, window edges and the length limit.

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <set>

#include "device/cpu_context.h"
#include "device/device_arena.h"
#include "graph/iteration.h"
#include "metadata/metadata_rows.h"
#include "metadata/pass_rows.h"
#include "model/description/kv_shapes.h"
#include "speculate/row_ops.h"
#include "support/kv_layers.h"
#include "support/seed.h"
#include "support/tiny_models.h"
#include "wire/batch_shape.h"
#include "wire/sequence_state.h"

namespace paceline {
namespace {

using testing::tiny_config_json;
using testing::TinyModel;

constexpr int32_t kMaxSeqs = 12;
constexpr int32_t kMaxLen = 420;  // beyond three windows of 128

// The draft side of an iteration on hand-made state, without any model.
struct Bench {
  Bench(int32_t k, int32_t block_size, std::vector<int32_t> windows, bool is_latent)
      : windows(windows),
        config(parse_decoder_config(
            tiny_config_json({.windows = std::move(windows), .kv_lora_rank = is_latent ? 24 : 0}))),
        layout(plan_kv_layout(shapes_of(config), shapes_of(config), block_size, DType::kFloat32,
                              64 << 20)),
        options{.shape = {.max_seqs = kMaxSeqs,
                          .max_verify_rows = 64,
                          .max_logit_rows = 64,
                          .num_draft_tokens = k,
                          .first_rows = FirstRows::kNewest},
                .max_model_len = kMaxLen},
        buffers(allocate_iteration_buffers(arena, options, layout, config, &config)),
        fresh(allocate_iteration_buffers(arena, options, layout, config, &config)) {}

  // The layers, and the stores of DeepSeek-V4's layers at its two ratios: 4 with overlap, and 128.
  static std::vector<KvLayerShape> shapes_of(const DecoderConfig& config) {
    std::vector<KvLayerShape> shapes = kv_layer_shapes(config);
    shapes.insert(shapes.end(), {testing::tail(8, 24), testing::compressed(4, 16, 8),
                                 testing::tail(128, 16), testing::compressed(128, 16)});
    return shapes;
  }

  std::vector<int32_t> windows;  // by layer; 0: full attention
  DecoderConfig config;          // of the target and of the drafter
  KvLayout layout;
  IterationOptions options;
  DeviceArena arena;
  IterationBuffers buffers;
  IterationBuffers fresh;  // where `build` from scratch goes
  CpuContext context;
};

void randomize_tables(Bench& bench, std::mt19937_64& random) {
  for (const BlockTable& table : bench.buffers.block_tables) {
    for (int64_t i = 0; i < table.stride * kMaxSeqs; ++i) {
      table.blocks[i] = static_cast<int32_t>(1 + random() % 1000);
    }
  }
}

void randomize(Bench& bench, std::mt19937_64& random) {
  const auto edge = [&](int32_t size) {  // near a multiple
    return static_cast<int32_t>(size * (1 + random() % 4) + random() % 3) - 1;
  };
  IterationBuffers& b = bench.buffers;
  SequenceState& s = b.sequences;
  randomize_tables(bench, random);
  const auto num_seqs = static_cast<int32_t>(random() % (kMaxSeqs + 1));
  b.staged.counts->num_seqs = num_seqs;
  b.staged.counts->num_drafting = num_seqs;
  std::vector<int32_t> slots(kMaxSeqs);
  for (int32_t i = 0; i < kMaxSeqs; ++i) slots[i] = i;
  std::shuffle(slots.begin(), slots.end(), random);
  for (int32_t i = 0; i < num_seqs; ++i) {
    const int32_t slot = slots[i];
    b.staged.seq_slot[i] = slot;
    int32_t known = 0;
    switch (random() % 4) {
      case 0:
        known = edge(b.block_tables[0].block_size);
        break;
      case 1:
        known = edge(std::max(bench.windows[random() % bench.windows.size()], 8));
        break;
      case 2:
        known = kMaxLen - static_cast<int32_t>(random() % 20);
        break;
      default:
        known = static_cast<int32_t>(2 + random() % 300);
        break;
    }
    s.known_len[slot] = std::clamp(known, 2, kMaxLen);
    s.limit[slot] =
        std::min<int32_t>(kMaxLen, s.known_len[slot] + static_cast<int32_t>(random() % 24));
    s.is_active[slot] = random() % 6 != 0 && s.known_len[slot] < s.limit[slot] ? 1 : 0;
    const int32_t k = s.num_draft_tokens;
    s.max_drafts[slot] =
        random() % 2 == 0 ? k : static_cast<int32_t>(random() % static_cast<uint64_t>(k + 1));
  }
}

// Where the rows of draft steps are.
struct Steps {
  int32_t draw_ahead;              // from a row's position to that of the token it draws, at first
  bool advances_positions = true;  // else rows stay, and what they draw moves away from them
};

// What the rows of draft step j must be, from the definition alone: `draw_ahead` before the token
// that they draw, or before the one that the first pass drew.
void expected_rows(const Bench& bench, int32_t j, const Steps& steps, const PassRows& rows) {
  const IterationBuffers& b = bench.buffers;
  const SequenceState& s = b.sequences;
  *rows.num_rows = b.staged.counts->num_drafting;
  for (int32_t i = 0; i < *rows.num_rows; ++i) {
    const int32_t slot = b.staged.seq_slot[i];
    const int32_t drawn_at = s.known_len[slot] + j;
    const int32_t position =
        (steps.advances_positions ? drawn_at : s.known_len[slot]) - steps.draw_ahead;
    const bool is_live =
        s.is_active[slot] != 0 && drawn_at < s.limit[slot] && j < s.max_drafts[slot];
    rows.seq_slot[i] = is_live ? slot : -1;
    rows.positions[i] = is_live ? position : 0;
    rows.token_ids[i] = is_live ? s.draft_tokens[slot * s.num_draft_tokens + j - 1] : 0;
  }
}

void expect_equal(const GroupMetadata& actual, const GroupMetadata& expected, int32_t num_rows) {
  const auto same = [&](const auto* a, const auto* e, const char* field) {
    for (int32_t row = 0; row < kMaxSeqs; ++row) {
      ASSERT_EQ(a[row], e[row]) << field << " of row " << row << " of " << num_rows;
    }
  };
  if (const auto* full = std::get_if<FullMetadata>(&actual)) {
    same(full->slot_mapping, std::get<FullMetadata>(expected).slot_mapping, "slot_mapping");
    same(full->kv_end, std::get<FullMetadata>(expected).kv_end, "kv_end");
  } else if (const auto* sliding = std::get_if<SlidingMetadata>(&actual)) {
    const auto& e = std::get<SlidingMetadata>(expected);
    same(sliding->slot_mapping, e.slot_mapping, "slot_mapping");
    same(sliding->kv_begin, e.kv_begin, "kv_begin");
    same(sliding->kv_end, e.kv_end, "kv_end");
  } else {
    const auto& compressed = std::get<CompressedMetadata>(actual);
    const auto& e = std::get<CompressedMetadata>(expected);
    same(compressed.slot_mapping, e.slot_mapping, "slot_mapping");
    same(compressed.entry_end, e.entry_end, "entry_end");
  }
}

// One iteration's draft steps on random state. Returns how many live rows were compared.
int64_t check_draft_steps(Bench& bench, const Steps& steps, std::mt19937_64& random) {
  IterationBuffers& b = bench.buffers;
  CpuContext& ctx = bench.context;
  const int32_t k = bench.options.shape.num_draft_tokens;
  const auto draw_all = [&] {
    for (int32_t i = 0; i < kMaxSeqs; ++i) b.drawn[i] = static_cast<int32_t>(random() % 64);
  };
  for (size_t g = 0; g < bench.layout.groups.size(); ++g) {
    bench.fresh.block_tables[g] = b.block_tables[g];
    std::visit([&](auto& m) { m.table = b.block_tables[g]; }, bench.fresh.step_metadata[g]);
  }
  draw_all();
  begin_draft_steps(ctx, {.inputs = b.staged,
                          .sequences = b.sequences,
                          .drawn = b.drawn,
                          .rows = b.step_rows,
                          .current_draft_step = b.current_draft_step,
                          .draw_ahead = steps.draw_ahead,
                          .advances_positions = steps.advances_positions});
  AdvanceParams advance{.current_draft_step = b.current_draft_step,
                        .rows = b.step_rows,
                        .drawn = b.drawn,
                        .sequences = b.sequences,
                        .groups = {},
                        .num_groups = 0,
                        .draw_ahead = steps.draw_ahead,
                        .advances_positions = steps.advances_positions};
  for (size_t g = 0; g < bench.layout.groups.size(); ++g) {
    if (bench.layout.groups[g].owner != KvOwner::kDraft) continue;
    build(ctx, b.step_rows, b.step_metadata[g], kMaxSeqs);
    advance.groups[advance.num_groups++] = advance_group(b.step_metadata[g]);
  }
  int64_t num_live = 0;
  for (int32_t j = 1; j < k; ++j) {
    EXPECT_EQ(*b.current_draft_step, j);
    const PassRows& expected = bench.fresh.step_rows;
    expected_rows(bench, j, steps, expected);
    for (int32_t i = 0; i < *expected.num_rows; ++i) {
      EXPECT_EQ(b.step_rows.seq_slot[i], expected.seq_slot[i]) << "row " << i << " step " << j;
      EXPECT_EQ(b.step_rows.positions[i], expected.positions[i]);
      EXPECT_EQ(b.step_rows.token_ids[i], expected.token_ids[i]);
      num_live += expected.seq_slot[i] >= 0 ? 1 : 0;
    }
    for (size_t g = 0; g < bench.layout.groups.size(); ++g) {
      if (bench.layout.groups[g].owner != KvOwner::kDraft) continue;
      build(ctx, expected, bench.fresh.step_metadata[g], kMaxSeqs);
      expect_equal(b.step_metadata[g], bench.fresh.step_metadata[g], *expected.num_rows);
    }
    draw_all();
    store_draft(ctx, {.current_draft_step = b.current_draft_step,
                      .rows = b.step_rows,
                      .sequences = b.sequences,
                      .drawn = b.drawn});
    advance_draft_step(ctx, advance);
  }
  // The step after the last one must not have advanced.
  EXPECT_EQ(*b.current_draft_step, std::max(1, k - 1));
  return num_live;
}

TEST(Metadata, AdvanceEqualsBuild) {
  const uint64_t first_seed = testing::seed_from_env(1);
  // Rows of a draft model, of a draft head one position behind, and of a draft head that stays at
  // its position.
  constexpr std::array<Steps, 3> kSteps = {{{1}, {2}, {2, /*advances_positions=*/false}}};
  std::array<int64_t, kSteps.size()> num_live{};
  for (uint64_t seed = first_seed; seed < first_seed + 300; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto k = static_cast<int32_t>(1 + random() % 16);
    const int32_t block_size = std::array{8, 16, 32, 3}[random() % 4];
    // The last is GPT-OSS 20B for 120B: two groups on each side.
    const std::vector<int32_t> windows = std::array<std::vector<int32_t>, 3>{
        {{8, 0, 31}, {1, 16, 0}, {128, 0, 128, 0}}}[random() % 3];
    Bench bench(k, block_size, windows, /*is_latent=*/seed % 3 == 0);
    const size_t num_groups = std::set<int32_t>(windows.begin(), windows.end()).size();
    ASSERT_EQ(bench.layout.groups.size(), 2 * (num_groups + 4));
    for (size_t i = 0; i < 15 && !HasFatalFailure(); ++i) {
      SCOPED_TRACE("steps " + std::to_string(i % kSteps.size()));
      randomize(bench, random);
      num_live[i % kSteps.size()] += check_draft_steps(bench, kSteps[i % kSteps.size()], random);
    }
    if (HasFailure()) return;
  }
  for (const int64_t live : num_live) EXPECT_GT(live, 25000);
}

// The same for every kind of group at every position, and so at every position modulo 4 and 128:
// the ratios of compressed attention and the longest window. Each row makes 1 to 15 steps.
TEST(Metadata, AdvanceEqualsBuildAtEveryPosition) {
  constexpr int32_t kMostDrafts = 16;
  std::mt19937_64 random(7);
  for (const bool is_latent : {false, true}) {
    Bench bench(kMostDrafts, /*block_size=*/3, {128, 0, 4}, is_latent);
    randomize_tables(bench, random);
    IterationBuffers& b = bench.buffers;
    b.staged.counts->num_seqs = b.staged.counts->num_drafting = kMaxSeqs;
    int64_t num_live = 0;
    int64_t expected = 0;
    for (int32_t first = 2; first + kMaxSeqs + kMostDrafts <= kMaxLen; first += kMaxSeqs) {
      for (int32_t slot = 0; slot < kMaxSeqs; ++slot) {
        b.staged.seq_slot[slot] = slot;
        b.sequences.known_len[slot] = first + slot;
        b.sequences.limit[slot] = kMaxLen;
        b.sequences.is_active[slot] = 1;
        b.sequences.max_drafts[slot] = kMostDrafts;
      }
      num_live += check_draft_steps(bench, {.draw_ahead = 1}, random);
      expected += int64_t{kMaxSeqs} * (kMostDrafts - 1);
      if (HasFailure()) return;
    }
    EXPECT_EQ(num_live, expected);
  }
}

// The definition of a compressed group, at every position modulo 4 and 128: an entry is written by
// the row of its last token and visible from that row on, after 1 to 16 advances as after `build`.
TEST(Metadata, EntriesAreVisibleOnceTheirLastTokenIs) {
  for (const int32_t ratio : {4, 128}) {
    const int32_t block_size = 3;
    std::vector<int32_t> blocks(512 / ratio / block_size + 1);
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<int32_t>(7 * i + 2);
    int64_t slot = 0;
    int32_t entry_end = 0;
    const CompressedMetadata metadata{.slot_mapping = &slot,
                                      .entry_end = &entry_end,
                                      .table = {.blocks = blocks.data(),
                                                .stride = static_cast<int64_t>(blocks.size()),
                                                .block_size = block_size,
                                                .tokens_per_entry = ratio}};
    const auto check = [&](int32_t position) {
      int32_t num_complete = 0;
      for (int32_t entry = 0; entry < 512; ++entry) {
        if ((entry + 1) * ratio - 1 <= position) ++num_complete;
      }
      EXPECT_EQ(entry_end, num_complete) << "position " << position;
      const int32_t last = num_complete - 1;
      const bool completes = last >= 0 && (last + 1) * ratio - 1 == position;
      const int64_t block = completes ? blocks[static_cast<size_t>(last / block_size)] : 0;
      EXPECT_EQ(slot, completes ? block * block_size + last % block_size : 0);
    };
    for (int32_t start = 0; start < 3 * ratio; ++start) {
      build_row(PassRows{}, metadata, 0, 0, start);
      check(start);
      int32_t num_rows = 1, token = 5, position = start, seq_slot = 0, drawn = 5, limit = 500;
      int32_t step = 0;
      int32_t max_drafts = 17;
      AdvanceParams advance{
          .current_draft_step = &step,
          .rows = {.num_rows = &num_rows,
                   .token_ids = &token,
                   .positions = &position,
                   .seq_slot = &seq_slot,
                   .capacity = 1},
          .drawn = &drawn,
          .sequences = {.limit = &limit, .max_drafts = &max_drafts, .num_draft_tokens = max_drafts},
          .groups = {advance_group(metadata)},
          .num_groups = 1};
      CpuContext ctx;
      for (int32_t j = 1; j <= 16 && !::testing::Test::HasFailure(); ++j) {
        advance_draft_step(ctx, advance);
        check(start + j);
      }
    }
  }
}

}  // namespace
}  // namespace paceline
