// SPDX-License-Identifier: Apache-2.0
#include "executor/kv_cache_size.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <paceline/error.h>

#include "executor/setup.h"
#include "kv/slab_pool.h"
#include "scheduler/scheduler.h"
#include "support/errors.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

constexpr int64_t kMib = int64_t{1} << 20;
constexpr int64_t kGib = int64_t{1} << 30;

// Layers of 2 heads of 16: 256 bytes a token and layer as float32, 128 as bfloat16.
KvLayerShape full() { return {.num_kv_heads = 2, .head_dim = 16}; }
KvLayerShape sliding(int32_t window) {
  return {.kind = SlidingKv{window}, .num_kv_heads = 2, .head_dim = 16};
}
KvLayerShape reader() { return {.num_kv_heads = 2, .head_dim = 16, .source = 0}; }

ExecutorOptions options(int32_t max_num_seqs, int32_t max_model_len, int32_t k = 0) {
  ExecutorOptions o;
  o.max_num_seqs = max_num_seqs;
  o.max_model_len = max_model_len;
  o.max_num_batched_tokens = 2048;
  o.speculative.num_speculative_tokens = k;
  return o;
}

KvCacheSize size(Device device, const std::vector<KvLayerShape>& layers, const ExecutorOptions& o,
                 std::optional<int64_t> free_bytes) {
  return default_kv_cache_size(layers, {}, DType::kFloat32, device, o, {.free = free_bytes});
}

TEST(KvCacheSizeTest, HoldsAllTokensOfFullLayers) {
  // 4 * (k + 1) + 2 * 16 tokens for iterations in flight and block edges; an eighth for slabs.
  const KvCacheSize found =
      size(Device::kCpu, {full(), full()}, options(64, 4096, 4), std::nullopt);
  EXPECT_EQ(found.bytes, int64_t{2} * 256 * 64 * (4096 + 20 + 32) * 9 / 8);
  EXPECT_EQ(found.reason, "default: enough for 64 sequences of 4096 tokens");
}

TEST(KvCacheSizeTest, HoldsTheWindowsOfSlidingLayers) {
  ExecutorOptions o = options(64, 4096);
  const int64_t windows = 64 * (512 + 4 + 32);
  EXPECT_EQ(size(Device::kCpu, {sliding(512)}, o, std::nullopt).bytes,
            256 * (windows + 4 * 2048) * 9 / 8);
  o.prefill_chunk_size = 100;
  EXPECT_EQ(size(Device::kCpu, {sliding(512)}, o, std::nullopt).bytes,
            256 * (windows + 4 * 100) * 9 / 8);
  // Never more than all tokens.
  EXPECT_EQ(size(Device::kCpu, {sliding(4096)}, o, std::nullopt).bytes, 256 * 64 * 4096 / 8 * 9);
}

TEST(KvCacheSizeTest, CountsTheDrafterAndNotLayersThatReadAnother) {
  const ExecutorOptions o = options(64, 4096);
  const std::vector<KvLayerShape> target = {full(), reader()};
  const std::vector<KvLayerShape> draft = {full(), reader()};
  const auto bytes = [&](DType dtype) {
    return default_kv_cache_size(target, draft, dtype, Device::kCpu, o, {}).bytes;
  };
  EXPECT_EQ(bytes(DType::kFloat32), int64_t{2} * 256 * 64 * (4096 + 36) * 9 / 8);
  EXPECT_EQ(bytes(DType::kBFloat16), bytes(DType::kFloat32) / 2);
}

TEST(KvCacheSizeTest, IsNeverTiny) {
  for (const Device device : {Device::kCpu, Device::kCuda}) {
    EXPECT_EQ(size(device, {full()}, options(1, 16), 100 * kGib).bytes, 8 * kMib);
  }
}

TEST(KvCacheSizeTest, HoldsTheSlabsOfManyGroups) {
  // Six groups whose blocks take 0.3 to 4 MB: the slabs of one short sequence alone exceed 8 MiB.
  std::vector<KvLayerShape> layers;
  for (const int32_t heads : {2, 3, 5, 6, 10, 15}) {
    for (int i = 0; i < 16; ++i) layers.push_back({.num_kv_heads = heads, .head_dim = 128});
  }
  const ExecutorOptions o = options(1, 100);
  for (const Device device : {Device::kCpu, Device::kCuda}) {
    const int64_t bytes = size(device, layers, o, 100 * kGib).bytes;
    const KvLayout layout = plan_kv_layout(layers, {}, o.block_size, DType::kFloat32, bytes);
    int64_t slabs = 0;
    for (GroupId g = 0; g < static_cast<GroupId>(layout.groups.size()); ++g) {
      const int64_t blocks = num_blocks(layout.groups[g], o.max_model_len);
      slabs += (blocks + layout.blocks_per_slab(g) - 1) / layout.blocks_per_slab(g);
    }
    EXPECT_GT(bytes, 8 * kMib);
    EXPECT_LE(slabs, layout.num_usable_slabs());
  }
}

TEST(KvCacheSizeTest, HoldsTheWindowOfOneSequence) {
  // A decode moves a window on by k + 1 tokens, which may be more than a chunk of a prompt.
  const KvLayerShape layer = {.kind = SlidingKv{8}, .num_kv_heads = 16, .head_dim = 256};
  const std::vector<KvLayerShape> layers(4, layer);
  ExecutorOptions o = options(1, 1000, 16);
  o.prefill_chunk_size = 1;
  for (const Device device : {Device::kCpu, Device::kCuda}) {
    const int64_t bytes = size(device, layers, o, 100 * kGib).bytes;
    const KvLayout layout = plan_kv_layout(layers, {}, o.block_size, DType::kFloat32, bytes);
    SlabPool pool(layout);
    const Scheduler scheduler({.max_num_seqs = 1,
                               .max_num_batched_tokens = o.max_num_batched_tokens,
                               .prefill_chunk_size = o.prefill_chunk_size,
                               .num_draft_tokens = 16,
                               .max_in_flight = 2},
                              pool);
    EXPECT_TRUE(scheduler.fits_alone(1, o.max_model_len));
  }
}

TEST(KvCacheSizeTest, TakesAtMostAQuarterOfFreeMemory) {
  const ExecutorOptions o = options(64, 4096);
  const int64_t wanted = size(Device::kCpu, {full()}, o, std::nullopt).bytes;
  EXPECT_EQ(size(Device::kCpu, {full()}, o, 4 * wanted).bytes, wanted);
  const KvCacheSize found = size(Device::kCpu, {full()}, o, 40 * kMib);
  EXPECT_EQ(found.bytes, 10 * kMib);
  EXPECT_THAT(found.reason, HasSubstr("a quarter of the 41943040 bytes of free memory"));
  EXPECT_THAT(found.reason, HasSubstr("would take " + std::to_string(wanted)));
}

TEST(KvCacheSizeTest, LeavesRoomOnAGpu) {
  const std::vector<KvLayerShape> layers = {full(), sliding(8), full()};
  const ExecutorOptions o = options(1024, 4096 - 36);
  const int64_t wanted = int64_t{3} * 256 * 1024 * 4096 * 9 / 8;  // as if none had a window
  KvCacheSize found = size(Device::kCuda, layers, o, 140 * kGib);
  EXPECT_EQ(found.bytes, wanted);
  EXPECT_THAT(found.reason, HasSubstr("enough for 1024 sequences of 4096 tokens, as if no layer"));
  found = size(Device::kCuda, layers, o, 3 * kGib);
  EXPECT_EQ(found.bytes, static_cast<int64_t>(0.9 * 3 * kGib) - 2 * kGib);
  EXPECT_THAT(found.reason, HasSubstr("90% of the 3221225472 bytes that are free on the GPU"));
  EXPECT_THAT(found.reason, HasSubstr("would take " + std::to_string(wanted)));
}

// With a default max_model_len: room for many short sequences at a time, or for one long one.
TEST(KvCacheSizeTest, HoldsShortSequencesOrOneLongOne) {
  const auto bytes = [](Device device, int32_t max_num_seqs, int32_t len, int32_t shared_len) {
    return default_kv_cache_size(std::vector{full()}, {}, DType::kFloat32, device,
                                 options(max_num_seqs, len), {.free = 100 * kGib}, shared_len);
  };
  for (const Device device : {Device::kCpu, Device::kCuda}) {
    EXPECT_EQ(bytes(device, 64, 100'000, 4096).bytes, bytes(device, 64, 4096, 0).bytes);
    EXPECT_EQ(bytes(device, 64, 1'000'000, 4096).bytes, bytes(device, 1, 1'000'000, 0).bytes);
    EXPECT_EQ(bytes(device, 64, 2000, 2000).reason, bytes(device, 64, 2000, 0).reason);
  }
  EXPECT_EQ(bytes(Device::kCpu, 64, 100'000, 4096).reason,
            "default: enough for 64 sequences of 4096 tokens, or for one of 100000");
}

TEST(KvCacheSizeTest, CountsWhatLiesBesideThePool) {
  ExecutorOptions o = options(64, 4096);
  o.kv_cache_bytes = 5 * kGib;
  EXPECT_TRUE(has_room_beside(o, 2 * kGib, Device::kCpu, 7 * kGib));
  EXPECT_FALSE(has_room_beside(o, 2 * kGib + 1, Device::kCpu, 7 * kGib));
  EXPECT_TRUE(has_room_beside(o, kGib, Device::kCuda, 7 * kGib)) << "and 1 GiB of graphs";
  EXPECT_FALSE(has_room_beside(o, kGib + 1, Device::kCuda, 7 * kGib));
}

// Qwen3-8B in int4 with groups of 128, beside which a drafter's head is small.
TEST(KvCacheSizeTest, FitsBesideInt4On12GiB) {
  constexpr int64_t kLayers = 36;
  constexpr int64_t kHidden = 4096;
  constexpr int64_t kKvHeads = 8;
  constexpr int64_t kHeadDim = 128;
  constexpr int64_t kIntermediate = 12288;
  constexpr int64_t kVocab = 151936;
  // Weights of a layer: q and o, k and v, gate, up and down. A weight has 4 bits, and a group a
  // bfloat16 scale.
  constexpr int64_t kLayer =
      2 * kHidden * kHidden + 2 * kHidden * kKvHeads * kHeadDim + 3 * kHidden * kIntermediate;
  constexpr int64_t kPacked = kLayers * kLayer * 33 / 64;
  constexpr int64_t kPlain = 2 * 2 * kVocab * kHidden;  // embeddings and LM head in bfloat16
  // A display and the CUDA context take 0.8 GiB.
  constexpr int64_t kFree = 12 * kGib - kGib * 8 / 10 - kPacked - kPlain;
  const std::vector<KvLayerShape> layers(
      kLayers, {.num_kv_heads = kKvHeads, .head_dim = static_cast<int32_t>(kHeadDim)});
  ExecutorOptions o = options(64, 4096, 3);
  o.kv_cache_bytes =
      default_kv_cache_size(layers, {}, DType::kBFloat16, Device::kCuda, o, {.free = kFree}).bytes;
  constexpr int64_t kTokenBytes = kLayers * 2 * kKvHeads * kHeadDim * 2;
  EXPECT_GE(o.kv_cache_bytes / kTokenBytes, 20'000);
  EXPECT_LT(o.kv_cache_bytes / kTokenBytes, 24'000);
  // What else an engine takes: scratch of the kernels and their counters, activations of all rows,
  // and logits of all windows in float32, twice, as drafts have them too.
  constexpr int64_t kRows = 2048;
  constexpr int64_t kRowElements =
      2 * kHidden + (kHidden + 2 * kKvHeads * kHeadDim) + kHidden + 3 * kIntermediate;
  constexpr int64_t kScratch = 256 * kMib + kMib;
  constexpr int64_t kActivations = 2 * kRows * kRowElements;
  constexpr int64_t kLogits = int64_t{2} * 64 * 4 * kVocab * 4;
  constexpr int64_t kWorkspace = kScratch + kActivations + kLogits;
  EXPECT_TRUE(has_room_beside(o, kWorkspace, Device::kCuda, kFree));
  // Trials of products end before graphs are captured: two outputs of at most 512 MiB, an input and
  // the workspace of a library.
  constexpr int64_t kTrials = 2 * 512 * kMib + 2 * kRows * kIntermediate + 64 * kMib;
  EXPECT_LE(o.kv_cache_bytes + kWorkspace + kTrials, kFree);
  // A GPU of 8 GiB has no room.
  EXPECT_THAT(message_of<OutOfMemory>([&] {
                o.kv_cache_bytes = 0;
                static_cast<void>(default_kv_cache_size(layers, {}, DType::kBFloat16, Device::kCuda,
                                                        o, {.free = kFree - 4 * kGib}));
              }),
              HasSubstr("which leaves no room for a KV pool"));
}

TEST(KvCacheSizeTest, RefusesAGpuWithoutRoom) {
  const std::string message = message_of<OutOfMemory>(
      [] { static_cast<void>(size(Device::kCuda, {full()}, options(4, 1000), 2 * kGib)); });
  EXPECT_THAT(message, HasSubstr("the GPU has 2048.0 MiB free beside the weights"));
  EXPECT_THAT(message, HasSubstr("90% of it less 2048.0 MiB"));
  EXPECT_THAT(message, HasSubstr("set kv_cache_bytes"));
}

// A GPU of 80 GiB with 16 GiB of weights and 3 GiB of workspace.
KvCacheSize size_with(double utilization, int64_t free_bytes) {
  ExecutorOptions o = options(1024, 4096 - 36);
  o.gpu_memory_utilization = utilization;
  const std::vector<KvLayerShape> layers(32, full());
  return default_kv_cache_size(
      layers, {}, DType::kFloat32, Device::kCuda, o,
      {.free = free_bytes, .total = 80 * kGib, .weights = 16 * kGib, .workspace = 3 * kGib});
}

TEST(KvCacheSizeTest, TakesWhatTheUtilizationLeaves) {
  // 1 GiB is reserved for captured graphs.
  const int64_t wanted = int64_t{32} * 256 * 1024 * 4096 * 9 / 8;  // 36 GiB
  KvCacheSize found = size_with(0.5, 64 * kGib);
  EXPECT_EQ(found.bytes, (40 - 16 - 3 - 1) * kGib);
  EXPECT_THAT(found.reason,
              HasSubstr("gpu_memory_utilization is 0.5, which allows 40960.0 of the GPU's 81920.0 "
                        "MiB; the weights take 16384.0 MiB, the workspace 3072.0 MiB, and 1024.0 "
                        "MiB are reserved for captured graphs"));
  EXPECT_EQ(size_with(0.26, 64 * kGib).bytes,
            static_cast<int64_t>(0.26 * 80 * kGib) - (16 + 3 + 1) * kGib);
  // Never more than all sequences can use.
  found = size_with(1, 64 * kGib);
  EXPECT_EQ(found.bytes, wanted);
  EXPECT_THAT(found.reason, HasSubstr("all sequences can use no more"));
  EXPECT_LT(size_with(0.69, 64 * kGib).bytes, wanted);
}

TEST(KvCacheSizeTest, RefusesAUtilizationThatLeavesNothing) {
  EXPECT_THAT(message_of<OutOfMemory>([] { static_cast<void>(size_with(0.25, 64 * kGib)); }),
              AllOf(HasSubstr("gpu_memory_utilization is 0.25"), HasSubstr("weights take 16384.0"),
                    HasSubstr("leaves no room for a KV pool; raise gpu_memory_utilization")));
  // Other processes use 24 GiB.
  EXPECT_EQ(size_with(0.8, 40 * kGib).bytes, 36 * kGib);
  EXPECT_THAT(message_of<OutOfMemory>([] { static_cast<void>(size_with(0.8, 39 * kGib)); }),
              AllOf(HasSubstr("KV pool 36864.0 MiB, but only 39936.0 MiB are free"),
                    HasSubstr("lower gpu_memory_utilization")));
}

TEST(KvCacheSizeTest, RefusesAUtilizationThatTheGraphsExceed) {
  ExecutorOptions o;
  const MemoryReport report = {.target_weight_bytes = 10 * kGib,
                               .draft_weight_bytes = 2 * kGib,
                               .kv_pool_bytes = 20 * kGib,
                               .workspace_bytes = 6 * kGib,
                               .graph_bytes = 2 * kGib};
  check_gpu_memory_use(o, 80 * kGib, report);  // not given
  o.gpu_memory_utilization = 0.5;
  check_gpu_memory_use(o, 80 * kGib, report);
  EXPECT_THAT(message_of<OutOfMemory>([&] { check_gpu_memory_use(o, 79 * kGib, report); }),
              AllOf(HasSubstr("with 2048.0 MiB of captured graphs the engine uses 40960.0 of the "
                              "GPU's 80896.0 MiB"),
                    HasSubstr("set kv_cache_bytes to less than 21474836480")));
}

TEST(KvCacheSizeTest, RefusesAUtilizationByName) {
  const std::shared_ptr<const Model> model = testing::tiny_model({}, 1);
  const auto refusal = [&](double utilization, int64_t kv_cache_bytes) {
    ExecutorOptions o = options(2, 64);
    o.gpu_memory_utilization = utilization;
    o.kv_cache_bytes = kv_cache_bytes;
    return message_of<InvalidArgument>([&] { Executor(model, nullptr, o); });
  };
  for (const double value : {-0.1, 1.01, std::nan("")}) {
    EXPECT_THAT(refusal(value, 0), HasSubstr("allowed: above 0 to 1"));
  }
  EXPECT_THAT(refusal(0.9, 0), HasSubstr("gpu_memory_utilization is 0.9, but the models are on "
                                         "device cpu; allowed there: 0; set kv_cache_bytes"));
}

// What gpu_memory_utilization counts on is what a runner allocates.
TEST(KvCacheSizeTest, CountsTheWorkspaceWithoutAllocatingIt) {
  const std::shared_ptr<const Model> model = testing::tiny_model({.windows = {8, 0}}, 1);
  for (const int32_t k : {0, 3}) {
    ExecutorOptions o = options(64, 512, k);
    o.max_num_batched_tokens = 8192;
    o.max_logprobs = 5;
    o.kv_cache_bytes = 16 * kMib;
    const Model* const draft = k > 0 ? model.get() : nullptr;
    const int64_t counted = workspace_bytes(o, *model, draft);
    const MemoryReport report = Executor(model, k > 0 ? model : nullptr, o).memory_report();
    EXPECT_GE(counted, report.workspace_bytes);
    EXPECT_LE(counted, report.workspace_bytes + 4 * kMib) << "small buffers share chunks of a MiB";
    EXPECT_GT(report.workspace_bytes, 4 * kMib);
  }
}

TEST(KvCacheSizeTest, DoesNotOverflow) {
  const KvLayerShape huge = {.num_kv_heads = 1 << 16, .head_dim = 1 << 16};
  const ExecutorOptions o = options(1024, 1 << 30);
  EXPECT_EQ(size(Device::kCpu, {huge, huge}, o, std::nullopt).bytes,
            std::numeric_limits<int64_t>::max());
  EXPECT_EQ(size(Device::kCpu, {huge, huge}, o, 4 * kGib).bytes, kGib);
  EXPECT_EQ(size(Device::kCuda, {huge, huge}, o, 4 * kGib).bytes,
            static_cast<int64_t>(0.9 * 4 * kGib) - 2 * kGib);
}

TEST(KvCacheSizeTest, IsWhatAnExecutorTakesWithoutASize) {
  const std::shared_ptr<const Model> model = testing::tiny_model({}, 1);
  ExecutorOptions o = options(2, 64);
  const KvCacheSize expected = default_kv_cache_size(*model, nullptr, o);
  const Executor executor(model, nullptr, o);
  EXPECT_EQ(executor.options().kv_cache_bytes, expected.bytes);
  EXPECT_EQ(executor.memory_report().kv_cache_rule, expected.reason);
  EXPECT_LE(executor.memory_report().kv_pool_bytes, expected.bytes);
  o.kv_cache_bytes = 16 * kMib;
  const Executor given(model, nullptr, o);
  EXPECT_EQ(given.options().kv_cache_bytes, 16 * kMib);
  EXPECT_EQ(given.memory_report().kv_cache_rule, "as given");
  o.kv_cache_bytes = -1;
  EXPECT_THAT(message_of<InvalidArgument>([&] { Executor(model, nullptr, o); }),
              HasSubstr("kv_cache_bytes is -1; allowed: 0 (default_kv_cache_size() chooses) to"));
}

}  // namespace
}  // namespace paceline
