// SPDX-License-Identifier: Apache-2.0
#include "executor/kv_cache_size.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <string>
#include <utility>

#include "base/boundary.h"
#include "base/check.h"
#include "executor/default_sizes.h"

namespace paceline {
namespace {

constexpr int64_t kMinBytes = int64_t{8} << 20;
constexpr int64_t kCpuShare = 4;  // a quarter of free memory
constexpr double kCudaShare = 0.9;
constexpr int64_t kCudaReserveBytes = int64_t{2} << 30;  // for workspace and captured graphs
// With a known workspace. On an H100, the graphs of a target of 64 layers and a draft model of 28
// took 120 MiB with k = 4 and 64 sequences, and about this much with k = 16 and 1,024 sequences.
constexpr int64_t kGraphReserveBytes = int64_t{1} << 30;

// Saturating arithmetic: sizes beyond any machine's memory become the largest int64.
int64_t times(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::numeric_limits<int64_t>::max();
  return product;
}
int64_t plus(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return std::numeric_limits<int64_t>::max();
  return sum;
}

// Bytes that `num_tokens` tokens store in a layer; 0 for a layer that reads another layer's KV.
int64_t layer_bytes(const KvLayerShape& layer, DType dtype, int64_t num_tokens) {
  if (layer.source >= 0) return 0;
  return times(entry_bytes(layer, dtype), num_tokens / tokens_per_entry(layer.kind));
}

std::string mib(int64_t bytes) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f", static_cast<double>(bytes) / (1 << 20));
  return text.data();
}

// Tokens that a sequence holds beyond its length or a window, for two iterations in flight and
// block edges.
int64_t extra_tokens(const ExecutorOptions& o, int32_t tokens_per_entry = 1) {
  return 4 * (int64_t{o.speculative.num_speculative_tokens} + 1) +
         2 * int64_t{o.block_size} * tokens_per_entry;
}

// Tokens that all sequences hold in a layer that sees all positions.
int64_t all_tokens(const KvLayerShape& layer, const ExecutorOptions& o) {
  return times(o.max_num_seqs, o.max_model_len + extra_tokens(o, tokens_per_entry(layer.kind)));
}

// Tokens that all sequences hold in a layer with a window.
int64_t window_tokens(int32_t window, const ExecutorOptions& o) {
  // The scheduler reserves this much: two iterations in flight advance the window, and the blocks
  // before it can be reused two iterations later.
  const int32_t chunk = o.prefill_chunk_size > 0 ? o.prefill_chunk_size : o.max_num_batched_tokens;
  const int64_t rows = std::max(chunk, o.speculative.num_speculative_tokens + 1);
  const int64_t held = o.max_num_seqs * (window + extra_tokens(o));
  return std::min(held + 4 * rows, times(o.max_num_seqs, o.max_model_len));
}

// Tokens whose blocks all sequences hold in a layer that hands on, and those that the prefix cache
// keeps of as many sequences.
int64_t handed_on_tokens(const ExecutorOptions& o) {
  // The block before the row's own, its own, and two that later ones begin or that wait in
  // quarantine.
  constexpr int64_t kHeld = 4;
  // Chunks of a prompt that are in flight, or whose blocks wait in quarantine.
  constexpr int64_t kChunks = 5;
  const int64_t interval = std::max(o.state_interval, 1);
  const int64_t held = kHeld + extra_tokens(o) / o.block_size - 2;
  const int64_t kept = 2 + o.max_model_len / interval;
  // Each chunk leaves two blocks beside those that it keeps.
  const int32_t rows = o.prefill_chunk_size > 0 ? o.prefill_chunk_size : o.max_num_batched_tokens;
  const int64_t of_prompts = 2 * kChunks + 3 + kChunks * rows / interval;
  const int64_t blocks = times(o.max_num_seqs, held + kept) + of_prompts;
  return times(blocks, o.block_size);
}

struct Layers {
  std::vector<KvLayerShape> target;
  std::vector<KvLayerShape> draft;
  DType dtype;
};

// Layers whose blocks have block_size tokens.
std::vector<KvLayerShape> with_blocks(std::span<const KvLayerShape> shapes, int32_t block_size) {
  std::vector<KvLayerShape> sized;
  for (const KvLayerShape& shape : shapes) sized.push_back(with_block_size(shape, block_size));
  return sized;
}

// Bytes that all layers store, of which each stores tokens_of(layer) tokens.
template <class TokensOf>
int64_t stored_bytes(const Layers& layers, TokensOf tokens_of) {
  int64_t sum = 0;
  for (const std::vector<KvLayerShape>* const model : {&layers.target, &layers.draft}) {
    for (const KvLayerShape& layer : *model) {
      sum = plus(sum, layer_bytes(layer, layers.dtype, tokens_of(layer)));
    }
  }
  return sum;
}

// The number of slabs of `layout` in which every group stores tokens_of(layer) tokens.
template <class TokensOf>
int64_t num_slabs(const Layers& layers, const KvLayout& layout, TokensOf tokens_of) {
  int64_t slabs = 1;  // slab 0 holds no sequence
  for (GroupId g = 0; g < static_cast<GroupId>(layout.groups.size()); ++g) {
    const KvGroup& group = layout.groups[g];
    const auto& model = group.owner == KvOwner::kTarget ? layers.target : layers.draft;
    const int64_t blocks = num_blocks(group, tokens_of(model[group.layers[0]]));
    slabs += (blocks + layout.blocks_per_slab(g) - 1) / layout.blocks_per_slab(g);
  }
  return slabs;
}

// The bytes of a pool in which every layer stores tokens_of(layer) tokens.
template <class TokensOf>
int64_t pool_bytes(const Layers& layers, const ExecutorOptions& o, TokensOf tokens_of) {
  // An eighth for slabs, since each group may leave one partly empty.
  const int64_t stored = stored_bytes(layers, tokens_of);
  int64_t bytes = std::max(plus(stored, stored / 8), kMinBytes);
  // In a small pool the slabs of many groups, or of groups with large blocks, take more than that.
  // A larger pool may have larger slabs, so this repeats; in pools above kMostPlanned an eighth is
  // ample, and block ids could overflow.
  constexpr int64_t kMostPlanned = int64_t{1} << 36;
  for (int round = 0; round < 8 && bytes <= kMostPlanned; ++round) {
    bytes = std::max(bytes,
                     least_kv_cache_bytes(layers.target, layers.draft, o.block_size, layers.dtype));
    const KvLayout layout =
        plan_kv_layout(layers.target, layers.draft, o.block_size, layers.dtype, bytes);
    const int64_t needed = times(num_slabs(layers, layout, tokens_of), layout.slab_bytes);
    if (needed <= bytes) break;
    bytes = needed;
  }
  return bytes;
}

// The bytes of a pool with room for max_num_seqs sequences of `shared_len` tokens at a time, and
// for one of max_model_len tokens alone. `bytes_of` gives the bytes for options.
template <class BytesOf>
int64_t wanted_bytes(const ExecutorOptions& o, int32_t shared_len, BytesOf bytes_of) {
  ExecutorOptions shared = o;
  shared.max_model_len = shared_len;
  if (shared_len >= o.max_model_len) return bytes_of(shared);
  ExecutorOptions alone = o;
  alone.max_num_seqs = 1;
  return std::max(bytes_of(shared), bytes_of(alone));
}

// "64 sequences of 4096 tokens, or for one of 32768".
std::string room_of(const ExecutorOptions& o, int32_t shared_len, int64_t extra) {
  const std::string shared =
      concat(o.max_num_seqs, " sequences of ", shared_len + extra, " tokens");
  if (shared_len >= o.max_model_len) return shared;
  return concat(shared, ", or for one of ", o.max_model_len + extra);
}

KvCacheSize size_on_cpu(const Layers& layers, const ExecutorOptions& given,
                        std::optional<int64_t> free_bytes, int32_t shared_len) {
  const int64_t wanted = wanted_bytes(given, shared_len, [&](const ExecutorOptions& o) {
    return pool_bytes(layers, o, [&](const KvLayerShape& layer) {
      if (hands_on(layer.kind)) return handed_on_tokens(o);
      const int32_t window = kv_window(layer.kind);
      return window == 0 ? all_tokens(layer, o) : window_tokens(window, o);
    });
  });
  const std::string room = room_of(given, shared_len, 0);
  if (!free_bytes || wanted <= *free_bytes / kCpuShare) {
    return {wanted, concat("default: enough for ", room)};
  }
  return {*free_bytes / kCpuShare, concat("default: a quarter of the ", *free_bytes,
                                          " bytes of free memory; ", room, " would take ", wanted)};
}

// What gpu_memory_utilization leaves for the pool, of which `wanted` bytes are of use.
KvCacheSize size_by_utilization(const ExecutorOptions& o, const DeviceBytes& memory,
                                int64_t wanted) {
  const auto budget =
      static_cast<int64_t>(static_cast<double>(memory.total) * o.gpu_memory_utilization);
  const int64_t others = memory.weights + memory.workspace + kGraphReserveBytes;
  const std::string sum =
      concat("gpu_memory_utilization is ", o.gpu_memory_utilization, ", which allows ", mib(budget),
             " of the GPU's ", mib(memory.total), " MiB; the weights take ", mib(memory.weights),
             " MiB, the workspace ", mib(memory.workspace), " MiB, and ", mib(kGraphReserveBytes),
             " MiB are reserved for captured graphs");
  const int64_t size = std::min(budget - others, wanted);
  if (size < kMinBytes) {
    throw OutOfMemory(concat(sum,
                             ", which leaves no room for a KV pool; raise "
                             "gpu_memory_utilization, lower max_num_seqs, max_num_batched_tokens "
                             "or max_logprobs, or use a smaller model"));
  }
  const int64_t free = memory.free.value_or(0);
  if (size + memory.workspace + kGraphReserveBytes > free) {
    throw OutOfMemory(concat(sum, " and the KV pool ", mib(size), " MiB, but only ", mib(free),
                             " MiB are free beside the weights, since others use the GPU too; end "
                             "them or lower gpu_memory_utilization"));
  }
  return {size, concat(sum, size == wanted ? "; all sequences can use no more" : "")};
}

KvCacheSize size_on_cuda(const Layers& layers, const ExecutorOptions& given,
                         const DeviceBytes& memory, int32_t shared_len) {
  const int64_t free_bytes = memory.free.value_or(0);
  // This counts every layer as if it held all tokens, but for the tails, which are far larger than
  // what they are compressed to, and for recurrent layers.
  const auto bytes_of = [&](const ExecutorOptions& o) {
    return pool_bytes(layers, o, [&](const KvLayerShape& layer) {
      if (hands_on(layer.kind)) return handed_on_tokens(o);
      const auto* const tail = std::get_if<TailKv>(&layer.kind);
      return tail == nullptr ? all_tokens(layer, o) : window_tokens(tail->window, o);
    });
  };
  if (given.gpu_memory_utilization > 0) {
    return size_by_utilization(given, memory, bytes_of(given));
  }
  const int64_t wanted = wanted_bytes(given, shared_len, bytes_of);
  const std::string room = room_of(given, shared_len, extra_tokens(given));
  const int64_t available =
      static_cast<int64_t>(static_cast<double>(free_bytes) * kCudaShare) - kCudaReserveBytes;
  if (wanted <= available) {
    return {wanted, concat("default: enough for ", room, ", as if no layer had a window")};
  }
  if (available < kMinBytes) {
    throw OutOfMemory(
        concat("the GPU has ", mib(free_bytes),
               " MiB free beside the weights, which leaves no room for a KV pool: 90% of it less ",
               mib(kCudaReserveBytes),
               " MiB for workspace and graphs; free memory of the GPU, use a smaller model or "
               "dtype, or set kv_cache_bytes"));
  }
  return {available,
          concat("default: 90% of the ", free_bytes, " bytes that are free on the GPU, less ",
                 kCudaReserveBytes, " for workspace and graphs; ", room, " would take ", wanted)};
}

}  // namespace

KvCacheSize default_kv_cache_size(std::span<const KvLayerShape> target,
                                  std::span<const KvLayerShape> draft, DType dtype, Device device,
                                  const ExecutorOptions& options, const DeviceBytes& memory,
                                  int32_t shared_len) {
  const Layers layers = {with_blocks(target, options.block_size),
                         with_blocks(draft, options.block_size), dtype};
  if (shared_len == 0) shared_len = options.max_model_len;
  if (device == Device::kCuda) return size_on_cuda(layers, options, memory, shared_len);
  return size_on_cpu(layers, options, memory.free, shared_len);
}

bool has_room_beside(const ExecutorOptions& options, int64_t workspace_bytes, Device device,
                     int64_t free_bytes) {
  const int64_t reserve = device == Device::kCuda ? kGraphReserveBytes : 0;
  return plus(options.kv_cache_bytes, plus(workspace_bytes, reserve)) <= free_bytes;
}

void check_gpu_memory_use(const ExecutorOptions& o, int64_t total_bytes,
                          const MemoryReport& report) {
  if (o.gpu_memory_utilization == 0) return;
  const int64_t used = report.target_weight_bytes + report.draft_weight_bytes +
                       report.kv_pool_bytes + report.workspace_bytes + report.graph_bytes;
  if (static_cast<double>(used) <= static_cast<double>(total_bytes) * o.gpu_memory_utilization) {
    return;
  }
  throw OutOfMemory(concat("gpu_memory_utilization is ", o.gpu_memory_utilization, ", but with ",
                           mib(report.graph_bytes), " MiB of captured graphs the engine uses ",
                           mib(used), " of the GPU's ", mib(total_bytes),
                           " MiB; set kv_cache_bytes to less than ", report.kv_pool_bytes));
}

KvCacheSize default_kv_cache_size(const Model& target, const Model* draft,
                                  const ExecutorOptions& given, std::optional<int64_t> free_bytes) {
  return at_boundary([&] {
    ExecutorOptions options = given;
    options.kv_cache_bytes = 0;
    DefaultSizes sizes = choose_sizes(options, target, draft, free_bytes);
    return KvCacheSize{sizes.options.kv_cache_bytes, std::move(sizes.kv_cache_rule)};
  });
}

}  // namespace paceline
