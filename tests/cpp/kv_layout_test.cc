// SPDX-License-Identifier: Apache-2.0
// How the KV cache is cut up: groups, blocks and slabs, for real and for awkward models.

#include "kv/kv_layout.h"

#include <paceline/error.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "support/errors.h"
#include "support/kv_layers.h"

namespace paceline {
namespace {

using testing::expect_contains;
using testing::full;
using testing::latent;
using testing::message_of;
using testing::sliding;

// Every sixth layer is full, as in Gemma 3.
std::vector<KvLayerShape> gemma3(int32_t num_layers, int32_t window, int32_t heads, int32_t dim) {
  std::vector<KvLayerShape> shapes;
  for (int32_t i = 0; i < num_layers; ++i) {
    shapes.push_back(i % 6 == 5 ? full(heads, dim) : sliding(window, heads, dim));
  }
  return shapes;
}

const std::vector<KvLayerShape> kGemma27b = gemma3(62, 1024, 16, 128);
const std::vector<KvLayerShape> kGemma270m = gemma3(18, 512, 1, 256);

void expect_sound_layout(const KvLayout& layout, int64_t kv_cache_bytes) {
  EXPECT_EQ(layout.pool_bytes, layout.num_slabs * layout.slab_bytes);
  EXPECT_LE(layout.pool_bytes, kv_cache_bytes);
  EXPECT_GT(layout.pool_bytes + layout.slab_bytes, kv_cache_bytes);
  EXPECT_GE(layout.num_slabs, 8);
  for (const KvGroup& group : layout.groups) {
    const int64_t parts = std::holds_alternative<LatentKv>(group.kind) ? 1 : 2;
    EXPECT_EQ(group.layer_bytes, parts * int64_t{group.block_size} * group.num_kv_heads *
                                     group.head_dim * dtype_bytes(group.dtype));
    EXPECT_EQ(group.content_bytes, static_cast<int64_t>(group.layers.size()) * group.layer_bytes);
    EXPECT_TRUE(std::is_sorted(group.layers.begin(), group.layers.end()));
    EXPECT_EQ(layout.slab_bytes % group.block_bytes, 0);
    EXPECT_EQ(group.block_bytes % kKvAlignment, 0);
    EXPECT_GE(group.block_bytes, group.content_bytes);
    const int64_t aligned = (group.content_bytes + kKvAlignment - 1) / kKvAlignment * kKvAlignment;
    EXPECT_LE(group.block_bytes, std::max(aligned, group.content_bytes * 103 / 100));
    // Slab 0 holds every null block.
    EXPECT_LE((kNullBlock + 1) * group.block_bytes, layout.slab_bytes);
  }
}

TEST(KvLayout, GroupsEqualLayersOfEachModel) {
  const int64_t bytes = int64_t{20} << 30;
  const KvLayout layout = plan_kv_layout(kGemma27b, kGemma270m, 16, DType::kBFloat16, bytes);
  expect_sound_layout(layout, bytes);
  ASSERT_EQ(layout.groups.size(), 4u);
  const auto describe = [&](GroupId g) {
    const KvGroup& group = layout.groups[g];
    return std::string(kv_owner_name(group.owner)) + " " + std::string(kv_kind_name(group.kind)) +
           " " + std::to_string(kv_window(group.kind)) + " x" + std::to_string(group.layers.size());
  };
  EXPECT_EQ(describe(0), "target sliding 1024 x52");
  EXPECT_EQ(describe(1), "target full 0 x10");
  EXPECT_EQ(describe(2), "draft sliding 512 x15");
  EXPECT_EQ(describe(3), "draft full 0 x3");
  ASSERT_EQ(layout.target_layer_to_group.size(), 62u);
  ASSERT_EQ(layout.draft_layer_to_group.size(), 18u);
  for (int32_t i = 0; i < 62; ++i) EXPECT_EQ(layout.target_layer_to_group[i], i % 6 == 5 ? 1 : 0);
  for (int32_t i = 0; i < 18; ++i) EXPECT_EQ(layout.draft_layer_to_group[i], i % 6 == 5 ? 3 : 2);
  EXPECT_EQ(layout.groups[1].layers, (std::vector<int32_t>{5, 11, 17, 23, 29, 35, 41, 47, 53, 59}));
}

TEST(KvLayout, LatentLayersStoreOneEntryPerToken) {
  const std::vector<KvLayerShape> target = {latent(24, 32), full(1, 32), latent(24, 32),
                                            latent(16, 32)};
  const KvLayout layout =
      plan_kv_layout(target, std::vector{latent(24, 32)}, 16, DType::kBFloat16, 1 << 20);
  ASSERT_EQ(layout.groups.size(), 4u);
  EXPECT_EQ(layout.target_layer_to_group, (std::vector<GroupId>{0, 1, 0, 2}));
  EXPECT_EQ(layout.draft_layer_to_group, (std::vector<GroupId>{3}));
  EXPECT_EQ(layout.groups[0].layer_bytes, 16 * 32 * 2);  // values are a part of the key
  EXPECT_EQ(layout.groups[0].content_bytes, 2 * 16 * 32 * 2);
  EXPECT_EQ(layout.groups[1].layer_bytes, 2 * 16 * 32 * 2);
  EXPECT_EQ(kv_kind_name(layout.groups[0].kind), "latent");
  EXPECT_EQ(kv_window(layout.groups[0].kind), 0);

  const auto plan = [](const KvLayerShape& layer) {
    return message_of<InvalidArgument>([&] {
      static_cast<void>(plan_kv_layout(std::vector{layer}, {}, 16, DType::kFloat32, 1 << 20));
    });
  };
  expect_contains(plan(latent(33, 32)),
                  {"target layer 0: rank of a latent layer is 33; allowed: 1..32"});
  expect_contains(plan({LatentKv{16}, 2, 32}), {"num_kv_heads of a latent layer is 2"});
}

TEST(KvLayout, SlabsMayHaveToBeLarge) {
  const std::vector<KvLayerShape> target = {full(2, 32), full(2, 32)};
  const auto plan = [&](int64_t least_slab_bytes) {
    return plan_kv_layout(target, {}, 16, DType::kBFloat16, 1 << 20, least_slab_bytes);
  };
  const int64_t block_bytes = plan(0).slab_bytes;
  for (const auto& [least, blocks] :
       {std::pair{block_bytes, 1}, {block_bytes + 1, 2}, {3 * block_bytes, 3}}) {
    const KvLayout layout = plan(least);
    expect_sound_layout(layout, 1 << 20);
    EXPECT_EQ(layout.slab_bytes, blocks * block_bytes);
    EXPECT_EQ(layout.groups[0].block_bytes, block_bytes);
  }
  EXPECT_EQ(plan(1 << 19).slab_bytes, block_bytes);  // the pool has no room for eight of these
}

TEST(KvLayout, DoesNotPadWhileTheLeastCommonMultipleIsSmall) {
  const int64_t bytes = int64_t{20} << 30;
  const KvLayout layout = plan_kv_layout(kGemma27b, kGemma270m, 16, DType::kBFloat16, bytes);
  int64_t multiple = 1;
  for (const KvGroup& group : layout.groups) {
    EXPECT_EQ(group.block_bytes, group.content_bytes);
    multiple = std::lcm(multiple, group.content_bytes);
  }
  EXPECT_EQ(layout.slab_bytes, multiple);
}

TEST(KvLayout, PadsUpToThreePercentForSmallerSlabs) {
  const int64_t bytes = int64_t{2} << 30;
  const KvLayout layout = plan_kv_layout(kGemma27b, kGemma270m, 16, DType::kBFloat16, bytes);
  expect_sound_layout(layout, bytes);
  EXPECT_LE(layout.slab_bytes, bytes / 64);
  EXPECT_TRUE(std::any_of(layout.groups.begin(), layout.groups.end(), [](const KvGroup& group) {
    return group.block_bytes > group.content_bytes;
  }));
}

TEST(KvLayout, SoundForAwkwardModelsAndPools) {
  const std::vector<std::pair<std::vector<KvLayerShape>, std::vector<KvLayerShape>>> models = {
      {{full(1, 2)}, {}},
      {{full(7, 106), full(7, 106), sliding(100, 3, 62)}, {full(5, 74), sliding(9, 1, 34)}},
      {std::vector<KvLayerShape>(31, full(13, 254)), std::vector<KvLayerShape>(7, full(11, 106))},
      {kGemma27b, kGemma270m},
      {kGemma270m, {}},
      {kGemma270m, kGemma270m},
      {std::vector<KvLayerShape>(47, latent(512, 576)), {latent(512, 576)}},
      {{latent(20, 26), full(1, 26), latent(24, 26)}, {latent(20, 26)}}};
  for (const auto& [target, draft] : models) {
    for (int32_t block_size : {1, 16, 17, 256}) {
      for (int64_t bytes : {int64_t{1} << 28, (int64_t{5} << 30) + 12345, int64_t{140} << 30}) {
        try {
          const KvLayout layout =
              plan_kv_layout(target, draft, block_size, DType::kBFloat16, bytes);
          expect_sound_layout(layout, bytes);
        } catch (const InvalidArgument& error) {
          const std::string message = error.what();
          expect_contains(message, {"kv_cache_bytes is " + std::to_string(bytes), "allowed: "});
          const size_t at = message.find(">= ");
          if (at == std::string::npos) continue;  // too many blocks
          const int64_t needed = std::stoll(message.substr(at + 3));
          EXPECT_GT(needed, bytes);
          expect_sound_layout(plan_kv_layout(target, draft, block_size, DType::kBFloat16, needed),
                              needed);
        }
      }
    }
  }
}

TEST(KvLayout, RefusesASmallPoolAndTellsBytesThatSuffice) {
  const auto plan = [](int64_t bytes) {
    return plan_kv_layout(kGemma27b, kGemma270m, 16, DType::kBFloat16, bytes);
  };
  const std::string message = message_of<InvalidArgument>([&] { (void)plan(1000); });
  expect_contains(message, {"kv_cache_bytes is 1000", "allowed: >= ", "raise kv_cache_bytes"});
  const int64_t needed = std::stoll(message.substr(message.find(">= ") + 3));
  expect_sound_layout(plan(needed), needed);
  message_of<InvalidArgument>([&] { (void)plan(needed - 1); });
}

TEST(KvLayout, NamesTheArgumentAndItsRange) {
  const auto plan = [](std::vector<KvLayerShape> target, int32_t block_size, int64_t bytes) {
    return message_of<InvalidArgument>(
        [&] { (void)plan_kv_layout(target, {}, block_size, DType::kFloat32, bytes); });
  };
  expect_contains(plan({full(1, 8)}, 0, 1 << 20), {"block_size is 0", "1..256"});
  expect_contains(plan({full(1, 8)}, 257, 1 << 20), {"block_size is 257", "1..256"});
  expect_contains(plan({full(1, 8)}, 16, 0), {"kv_cache_bytes is 0", "> 0"});
  expect_contains(plan({full(1, 8)}, 16, -5), {"kv_cache_bytes is -5", "> 0"});
  expect_contains(plan({}, 16, 1 << 20), {"number of target layers is 0"});
  expect_contains(plan({full(1, 8), full(0, 8)}, 16, 1 << 20),
                  {"target layer 1", "num_kv_heads is 0", "1.."});
  expect_contains(plan({full(1, -2)}, 16, 1 << 20), {"target layer 0", "head_dim is -2"});
  expect_contains(plan({sliding(0, 1, 8)}, 16, 1 << 20), {"target layer 0", "window", "is 0"});
  expect_contains(message_of<InvalidArgument>([] {
                    const std::vector<KvLayerShape> target = {full(1, 8)};
                    const std::vector<KvLayerShape> draft = {full(1, 8), full(1, 0)};
                    (void)plan_kv_layout(target, draft, 16, DType::kFloat32, 1 << 20);
                  }),
                  {"draft layer 1", "head_dim is 0"});
  expect_contains(plan({full(1, 2)}, 1, int64_t{1} << 40), {"lower kv_cache_bytes", "block_size"});
}

KvLayerShape reads(KvLayerShape shape, int32_t source, bool reads_target = false) {
  shape.source = source;
  shape.reads_target = reads_target;
  return shape;
}

TEST(KvLayout, ReadersJoinTheGroupOfTheirSourceAndTakeNoBytes) {
  const KvLayerShape slides = sliding(12, 1, 8);
  const std::vector<KvLayerShape> target = {
      slides, slides, full(2, 16), reads(slides, 1), reads(slides, 0), reads(full(2, 16), 2)};
  // Its layer 2 reads the target's, as those of an assistant do.
  const std::vector<KvLayerShape> draft = {full(1, 8), reads(full(1, 8), 0),
                                           reads(slides, 1, /*reads_target=*/true)};
  const KvLayout layout = plan_kv_layout(target, draft, 4, DType::kFloat32, 1 << 22);
  expect_sound_layout(layout, 1 << 22);
  ASSERT_EQ(layout.groups.size(), 3u);
  EXPECT_EQ(layout.groups[0].layers, (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(layout.groups[0].content_bytes, 2 * layout.groups[0].layer_bytes);
  EXPECT_EQ(layout.groups[1].layers, (std::vector<int32_t>{2}));
  EXPECT_EQ(layout.groups[2].layers, (std::vector<int32_t>{0}));
  EXPECT_EQ(layout.target_layer_to_group, (std::vector<GroupId>{0, 0, 1, 0, 0, 1}));
  EXPECT_EQ(layout.target_layer_index, (std::vector<int32_t>{0, 1, 0, 1, 0, 0}));
  EXPECT_EQ(layout.draft_layer_to_group, (std::vector<GroupId>{2, 2, 0}));
  EXPECT_EQ(layout.draft_layer_index, (std::vector<int32_t>{0, 0, 1}));
  // The same groups as without the readers.
  const KvLayout without = plan_kv_layout(std::span(target).first(3), std::span(draft).first(1), 4,
                                          DType::kFloat32, 1 << 22);
  EXPECT_EQ(without.slab_bytes, layout.slab_bytes);
  for (size_t g = 0; g < 3; ++g) {
    EXPECT_EQ(without.groups[g].block_bytes, layout.groups[g].block_bytes);
  }
}

TEST(KvLayout, ADrafterMayOwnNothing) {
  const std::vector<KvLayerShape> target = {sliding(12, 1, 8), full(2, 16)};
  const std::vector<KvLayerShape> draft = {reads(sliding(12, 1, 8), 0, true),
                                           reads(full(2, 16), 1, true)};
  const KvLayout layout = plan_kv_layout(target, draft, 4, DType::kFloat32, 1 << 22);
  EXPECT_EQ(layout.groups.size(), 2u);
  EXPECT_EQ(layout.layer_to_group(KvOwner::kDraft), (std::vector<GroupId>{0, 1}));
  EXPECT_EQ(layout.layer_index(KvOwner::kDraft), (std::vector<int32_t>{0, 0}));
}

TEST(KvLayout, RefusesReadersWithoutASource) {
  const KvLayerShape slides = sliding(12, 1, 8);
  const auto plan = [](std::vector<KvLayerShape> target, std::vector<KvLayerShape> draft = {}) {
    return message_of<InvalidArgument>(
        [&] { (void)plan_kv_layout(target, draft, 4, DType::kFloat32, 1 << 22); });
  };
  expect_contains(plan({reads(slides, 0)}), {"target layer 0", "of target layer 0", "none"});
  expect_contains(plan({slides, reads(slides, 1)}), {"target layer 1", "layer 1", "0..0"});
  expect_contains(plan({slides, reads(slides, 0), reads(slides, 1)}),
                  {"target layer 2", "target layer 1", "reads that of layer 0", "of its own"});
  expect_contains(plan({slides, reads(sliding(13, 1, 8), 0)}),
                  {"target layer 1", "window 13", "target layer 0", "window 12", "same shape"});
  expect_contains(plan({slides, reads(full(1, 8), 0)}), {"'full'", "'sliding'"});
  expect_contains(plan({full(1, 8), reads(full(1, 16), 0)}), {"heads of 16", "heads of 8"});
  expect_contains(plan({slides, reads(slides, 0, true)}), {"target layer 1", "reads_target"});
  expect_contains(plan({slides}, {reads(slides, 1, true)}),
                  {"draft layer 0", "target layer 1", "0..0"});
}

}  // namespace
}  // namespace paceline
