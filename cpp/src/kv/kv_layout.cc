// SPDX-License-Identifier: Apache-2.0
#include "kv/kv_layout.h"

#include "base/check.h"
#include "base/overloaded.h"
#include "wire/blocks.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace paceline {
namespace {

constexpr int64_t kMaxPaddingPercent = 3;
constexpr int64_t kPreferredSlabs = 64;
constexpr int64_t kMinSlabs = 8;
// Limit of heads, head_dim and layers: keeps all products within 64 bits.
constexpr int32_t kMaxExtent = 1 << 16;

// Limits the planner to about a tenth of a second; real models need a few thousand steps.
constexpr int64_t kMaxSearchSteps = 20'000'000;

// The rest of this file counts bytes in units of kKvAlignment.
struct BlockChoice {
  int64_t content_bytes;
  int64_t min_units;
  int64_t max_units;
};

struct SlabChoice {
  int64_t slab_units = 0;            // 0: none found
  std::vector<int64_t> block_units;  // [groups]
};

struct Cost {
  double per_slab_unit;
  double per_padding_byte;
};

void check_range(const std::string& name, int64_t value, int64_t lowest, int64_t highest) {
  if (value < lowest || value > highest) {
    throw InvalidArgument(concat(name, " is ", value, "; allowed: ", lowest, "..", highest));
  }
}

void check_shape(const KvLayerShape& shape, const std::string& layer) {
  check_range(concat(layer, ": num_kv_heads"), shape.num_kv_heads, 1, kMaxExtent);
  check_range(concat(layer, ": head_dim"), shape.head_dim, 1, kMaxExtent);
  const auto check_window = [&](int32_t window) {
    check_range(concat(layer, ": window of a ", kv_kind_name(shape.kind), " layer"), window, 1,
                std::numeric_limits<int32_t>::max());
  };
  const auto check_one_head = [&] {
    check_range(concat(layer, ": num_kv_heads of a ", kv_kind_name(shape.kind), " layer"),
                shape.num_kv_heads, 1, 1);
  };
  std::visit(
      Overloaded{
          [](const FullKv&) {}, [&](const SlidingKv& sliding) { check_window(sliding.window); },
          [&](const LatentKv& latent) {
            check_one_head();
            check_range(concat(layer, ": rank of a latent layer"), latent.rank, 1, shape.head_dim);
          },
          [&](const WindowEntryKv& entries) {
            check_one_head();
            check_window(entries.window);
          },
          [&](const TailKv& tail) {
            check_one_head();
            check_window(tail.window);
          },
          [&](const CompressedKv& compressed) {
            check_one_head();
            check_range(concat(layer, ": tokens_per_entry of a compressed layer"),
                        compressed.tokens_per_entry, 1, kMaxExtent);
            check_range(concat(layer, ": index_dim of a compressed layer"), compressed.index_dim, 0,
                        kMaxExtent);
          },
          [](const StateKv&) {},
          [&](const RecordKv& record) {
            check_one_head();
            check_range(concat("block_size, where ", layer, " is recurrent and reads ",
                               record.num_taps, " inputs,"),
                        record.tokens_per_state, record.num_taps - 1, kMaxBlockSize);
          }},
      shape.kind);
}

// The dtype of what a layer stores, where `dtype` is that of KV.
[[nodiscard]] DType stored_dtype(const KvKind& kind, DType dtype) {
  const bool is_float =
      std::holds_alternative<TailKv>(kind) || std::holds_alternative<StateKv>(kind);
  return is_float ? DType::kFloat32 : dtype;
}

[[nodiscard]] std::string shape_text(const KvLayerShape& shape) {
  return concat("kind '", kv_kind_name(shape.kind), "', window ", kv_window(shape.kind), ", ",
                shape.num_kv_heads, " KV heads of ", shape.head_dim);
}

// Checks that `reader`, a layer called `name`, can read the cache of its source. `sources` are the
// layers that it may read, of the model to which the source belongs.
void check_source(const KvLayerShape& reader, const std::string& name, KvOwner source_owner,
                  std::span<const KvLayerShape> sources) {
  const auto num_sources = static_cast<int32_t>(sources.size());
  const std::string range =
      num_sources > 0 ? concat("0..", num_sources - 1) : "none, as no layer comes before it";
  if (reader.source >= num_sources) {
    throw InvalidArgument(concat(name, " reads the KV cache of ", kv_owner_name(source_owner),
                                 " layer ", reader.source, "; allowed: ", range));
  }
  const KvLayerShape& source = sources[static_cast<size_t>(reader.source)];
  const std::string source_name = concat(kv_owner_name(source_owner), " layer ", reader.source);
  if (source.source >= 0) {
    throw InvalidArgument(concat(name, " reads the KV cache of ", source_name,
                                 ", which has no cache and reads that of layer ", source.source,
                                 "; allowed: a layer with a cache of its own"));
  }
  if (reader.kind != source.kind || reader.num_kv_heads != source.num_kv_heads ||
      reader.head_dim != source.head_dim) {
    throw InvalidArgument(concat(name, " with ", shape_text(reader), " reads the KV cache of ",
                                 source_name, " with ", shape_text(source),
                                 "; allowed: a layer of the same shape"));
  }
}

// Appends the groups of one model's layers in order of first appearance and records where the KV of
// each layer is. `target` holds the target's layers, for readers of the drafter.
void group_layers(std::span<const KvLayerShape> shapes, std::span<const KvLayerShape> target,
                  KvOwner owner, int32_t block_size, DType dtype, KvLayout& layout) {
  std::vector<KvGroup>& groups = layout.groups;
  const bool is_target = owner == KvOwner::kTarget;
  std::vector<GroupId>& layer_to_group =
      is_target ? layout.target_layer_to_group : layout.draft_layer_to_group;
  std::vector<int32_t>& layer_index =
      is_target ? layout.target_layer_index : layout.draft_layer_index;
  for (size_t layer = 0; layer < shapes.size(); ++layer) {
    const KvLayerShape shape = with_block_size(shapes[layer], block_size);
    const std::string name = concat(kv_owner_name(owner), " layer ", layer);
    check_shape(shape, name);
    if (shape.source >= 0) {
      if (shape.reads_target && is_target) {
        throw InvalidArgument(
            concat(name, " has reads_target; allowed: only for layers of the drafter"));
      }
      const KvOwner source_owner = shape.reads_target ? KvOwner::kTarget : owner;
      check_source(shape, name, source_owner, shape.reads_target ? target : shapes.first(layer));
      const auto source = static_cast<size_t>(shape.source);
      // Copies, because push_back may reallocate the vectors that they come from.
      const GroupId group = layout.layer_to_group(source_owner)[source];
      const int32_t index = layout.layer_index(source_owner)[source];
      layer_to_group.push_back(group);
      layer_index.push_back(index);
      continue;
    }
    const auto same = [&](const KvGroup& group) {
      return group.owner == owner && group.kind == shape.kind &&
             group.num_kv_heads == shape.num_kv_heads && group.head_dim == shape.head_dim;
    };
    auto group = std::find_if(groups.begin(), groups.end(), same);
    if (group == groups.end()) {
      KvGroup created;
      created.owner = owner;
      created.kind = shape.kind;
      created.num_kv_heads = shape.num_kv_heads;
      created.head_dim = shape.head_dim;
      created.block_size = std::holds_alternative<StateKv>(shape.kind) ? 1 : block_size;
      created.dtype = stored_dtype(shape.kind, dtype);
      created.layer_bytes = created.block_size * entry_bytes(shape, dtype);
      group = groups.insert(groups.end(), std::move(created));
    }
    layer_index.push_back(static_cast<int32_t>(group->layers.size()));
    group->layers.push_back(static_cast<int32_t>(layer));
    group->content_bytes += group->layer_bytes;
    layer_to_group.push_back(static_cast<GroupId>(group - groups.begin()));
  }
}

// The groups of both models, without a slab size.
KvLayout group_models(std::span<const KvLayerShape> target, std::span<const KvLayerShape> draft,
                      int32_t block_size, DType dtype) {
  check_range("block_size", block_size, 1, kMaxBlockSize);
  check_range("number of target layers", static_cast<int64_t>(target.size()), 1, kMaxExtent);
  check_range("number of draft layers", static_cast<int64_t>(draft.size()), 0, kMaxExtent);
  KvLayout layout;
  layout.block_size = block_size;
  group_layers(target, target, KvOwner::kTarget, block_size, dtype, layout);
  group_layers(draft, target, KvOwner::kDraft, block_size, dtype, layout);
  return layout;
}

// The block sizes that the planner may give each group.
std::vector<BlockChoice> block_choices(const std::vector<KvGroup>& groups) {
  // Larger blocks would overflow below; no pool could hold one anyway.
  constexpr int64_t kMostBlockBytes = int64_t{1} << 48;
  std::vector<BlockChoice> blocks;
  for (const KvGroup& group : groups) {
    check_range(concat("bytes of one block of ", kv_owner_name(group.owner), " '",
                       kv_kind_name(group.kind), "' layers"),
                group.content_bytes, 1, kMostBlockBytes);
    const int64_t min_units = (group.content_bytes + kKvAlignment - 1) / kKvAlignment;
    const int64_t padded = group.content_bytes / 100 * (100 + kMaxPaddingPercent) +
                           group.content_bytes % 100 * (100 + kMaxPaddingPercent) / 100;
    blocks.push_back({group.content_bytes, min_units, std::max(min_units, padded / kKvAlignment)});
  }
  return blocks;
}

// Returns 0 if the result does not fit 64 bits.
int64_t least_common_multiple(const std::vector<BlockChoice>& blocks) {
  int64_t result = 1;
  for (const BlockChoice& block : blocks) {
    const int64_t factor = block.min_units / std::gcd(result, block.min_units);
    if (__builtin_mul_overflow(result, factor, &result)) return 0;
  }
  return result;
}

// The smallest allowed block size that divides the slab; 0 if there is none.
int64_t block_dividing(int64_t slab_units, const BlockChoice& block, int64_t& steps) {
  const int64_t fewest = (slab_units + block.max_units - 1) / block.max_units;
  for (int64_t num_blocks = slab_units / block.min_units; num_blocks >= fewest; --num_blocks) {
    ++steps;
    if (slab_units % num_blocks == 0) return slab_units / num_blocks;
  }
  return 0;
}

// The cheapest slab of at most max_slab_units. Every slab is a multiple of an allowed size of the
// largest block, so the search tries those, small slabs first, until the cost of the size alone
// exceeds the best.
SlabChoice search_slab(const std::vector<BlockChoice>& blocks, int64_t max_slab_units, Cost cost) {
  std::vector<size_t> order(blocks.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return blocks[a].min_units > blocks[b].min_units; });
  const BlockChoice& largest = blocks[order[0]];

  SlabChoice best;
  double best_cost = std::numeric_limits<double>::infinity();
  std::vector<int64_t> block_units(blocks.size());
  int64_t steps = 0;
  for (int64_t count = 1; count <= max_slab_units / largest.min_units; ++count) {
    if (cost.per_slab_unit * static_cast<double>(count * largest.min_units) >= best_cost) break;
    for (int64_t units = largest.min_units; units <= largest.max_units; ++units) {
      const int64_t slab_units = count * units;
      if (slab_units > max_slab_units || ++steps > kMaxSearchSteps) break;
      double total = cost.per_slab_unit * static_cast<double>(slab_units);
      if (total >= best_cost) break;
      bool divides = true;
      for (size_t i = 0; i < order.size() && divides; ++i) {
        const BlockChoice& block = blocks[order[i]];
        const int64_t chosen = block_dividing(slab_units, block, steps);
        divides = chosen != 0;
        block_units[order[i]] = chosen;
        total += cost.per_padding_byte *
                 static_cast<double>(chosen * kKvAlignment - block.content_bytes);
      }
      if (divides && total < best_cost) {
        best_cost = total;
        best = {slab_units, block_units};
      }
    }
    if (steps > kMaxSearchSteps) break;
  }
  return best;
}

// The bytes of the smallest slab that holds whole blocks of every group.
int64_t least_slab_bytes(const std::vector<BlockChoice>& blocks) {
  constexpr int64_t kMostUnits = std::numeric_limits<int64_t>::max() / kKvAlignment / kMinSlabs;
  const int64_t unpadded = least_common_multiple(blocks);
  const int64_t highest = unpadded != 0 ? std::min(unpadded, kMostUnits) : kMostUnits;
  const SlabChoice least = search_slab(blocks, highest, Cost{1.0, 0.0});
  if (least.slab_units == 0) {
    throw InvalidArgument(
        concat("the KV layers of target and drafter have no common slab size even "
               "with ",
               kMaxPaddingPercent, " % padding; use another block_size"));
  }
  return least.slab_units * kKvAlignment;
}

SlabChoice choose_slab(const std::vector<BlockChoice>& blocks, int64_t kv_cache_bytes) {
  const int64_t pool_units = kv_cache_bytes / kKvAlignment;
  const int64_t unpadded = least_common_multiple(blocks);
  if (unpadded != 0 && unpadded <= pool_units / kPreferredSlabs) {
    SlabChoice choice{unpadded, {}};
    for (const BlockChoice& block : blocks) choice.block_units.push_back(block.min_units);
    return choice;
  }

  // Slab 0 is idle and, on average, half a slab of each group.
  int64_t content_bytes = 0;
  for (const BlockChoice& block : blocks) content_bytes += block.content_bytes;
  const double num_idle_slabs = 1.0 + 0.5 * static_cast<double>(blocks.size());
  const Cost waste{num_idle_slabs / static_cast<double>(std::max<int64_t>(pool_units, 1)),
                   1.0 / static_cast<double>(content_bytes)};
  for (int64_t num_slabs : {kPreferredSlabs, kMinSlabs}) {
    SlabChoice choice = search_slab(blocks, pool_units / num_slabs, waste);
    if (choice.slab_units != 0) return choice;
  }

  const int64_t slab_bytes = least_slab_bytes(blocks);
  throw InvalidArgument(concat("kv_cache_bytes is ", kv_cache_bytes, "; allowed: >= ",
                               kMinSlabs * slab_bytes, " (", kMinSlabs, " slabs of ", slab_bytes,
                               " bytes for these KV layers); raise kv_cache_bytes or lower "
                               "block_size"));
}

}  // namespace

std::string_view kv_kind_name(const KvKind& kind) {
  return std::visit(Overloaded{[](const FullKv&) -> std::string_view { return "full"; },
                               [](const SlidingKv&) -> std::string_view { return "sliding"; },
                               [](const LatentKv&) -> std::string_view { return "latent"; },
                               [](const WindowEntryKv&) -> std::string_view { return "window"; },
                               [](const TailKv&) -> std::string_view { return "tail"; },
                               [](const CompressedKv&) -> std::string_view { return "compressed"; },
                               [](const StateKv&) -> std::string_view { return "state"; },
                               [](const RecordKv&) -> std::string_view { return "record"; }},
                    kind);
}

int32_t kv_window(const KvKind& kind) {
  return std::visit(Overloaded{[](const FullKv&) { return 0; },
                               [](const SlidingKv& sliding) { return sliding.window; },
                               [](const LatentKv&) { return 0; },
                               [](const WindowEntryKv& entries) { return entries.window; },
                               [](const TailKv& tail) { return tail.window; },
                               [](const CompressedKv&) { return 0; },
                               [](const StateKv& state) { return state.tokens_per_entry + 1; },
                               [](const RecordKv& record) { return record.tokens_per_state + 1; }},
                    kind);
}

int32_t tokens_per_entry(const KvKind& kind) {
  return std::visit(
      Overloaded{[](const FullKv&) { return 1; }, [](const SlidingKv&) { return 1; },
                 [](const LatentKv&) { return 1; }, [](const WindowEntryKv&) { return 1; },
                 [](const TailKv&) { return 1; },
                 [](const CompressedKv& c) { return c.tokens_per_entry; },
                 [](const StateKv& state) { return std::max(state.tokens_per_entry, 1); },
                 [](const RecordKv&) { return 1; }},
      kind);
}

bool hands_on(const KvKind& kind) {
  return std::holds_alternative<StateKv>(kind) || std::holds_alternative<RecordKv>(kind);
}

KvLayerShape with_block_size(KvLayerShape shape, int32_t block_size) {
  if (auto* const state = std::get_if<StateKv>(&shape.kind)) state->tokens_per_entry = block_size;
  if (auto* const record = std::get_if<RecordKv>(&shape.kind))
    record->tokens_per_state = block_size;
  return shape;
}

int32_t kv_parts(const KvKind& kind) {
  return std::visit(
      Overloaded{[](const FullKv&) { return 2; }, [](const SlidingKv&) { return 2; },
                 [](const LatentKv&) { return 1; }, [](const WindowEntryKv&) { return 1; },
                 [](const TailKv&) { return 1; }, [](const CompressedKv&) { return 1; },
                 [](const StateKv&) { return 1; }, [](const RecordKv&) { return 1; }},
      kind);
}

int64_t entry_bytes(const KvLayerShape& shape, DType dtype) {
  int64_t elements = int64_t{kv_parts(shape.kind)} * shape.num_kv_heads * shape.head_dim;
  if (const auto* const c = std::get_if<CompressedKv>(&shape.kind)) elements += c->index_dim;
  return elements * dtype_bytes(stored_dtype(shape.kind, dtype));
}

int32_t block_tokens(const KvGroup& group) {
  return group.block_size * tokens_per_entry(group.kind);
}

int32_t num_blocks(const KvGroup& group, int64_t num_tokens) {
  const int64_t entries = num_tokens / tokens_per_entry(group.kind);
  return static_cast<int32_t>((entries + group.block_size - 1) / group.block_size);
}

int32_t num_whole_blocks(const KvGroup& group, int64_t num_tokens) {
  return static_cast<int32_t>(num_tokens / tokens_per_entry(group.kind) / group.block_size);
}

std::string_view kv_owner_name(KvOwner owner) {
  switch (owner) {
    case KvOwner::kTarget:
      return "target";
    case KvOwner::kDraft:
      return "draft";
  }
  return "unknown";
}

int64_t least_kv_cache_bytes(std::span<const KvLayerShape> target,
                             std::span<const KvLayerShape> draft, int32_t block_size, DType dtype) {
  const KvLayout layout = group_models(target, draft, block_size, dtype);
  return kMinSlabs * least_slab_bytes(block_choices(layout.groups));
}

KvLayout plan_kv_layout(std::span<const KvLayerShape> target, std::span<const KvLayerShape> draft,
                        int32_t block_size, DType dtype, int64_t kv_cache_bytes,
                        int64_t least_bytes) {
  KvLayout layout = group_models(target, draft, block_size, dtype);
  if (kv_cache_bytes <= 0) {
    throw InvalidArgument(concat("kv_cache_bytes is ", kv_cache_bytes, "; allowed: > 0"));
  }
  const SlabChoice choice = choose_slab(block_choices(layout.groups), kv_cache_bytes);
  layout.slab_bytes = choice.slab_units * kKvAlignment;
  const int64_t at_least = (least_bytes + layout.slab_bytes - 1) / layout.slab_bytes;
  if (at_least > 1 && kv_cache_bytes / kMinSlabs / layout.slab_bytes >= at_least) {
    layout.slab_bytes *= at_least;
  }
  layout.num_slabs = kv_cache_bytes / layout.slab_bytes;
  layout.pool_bytes = layout.num_slabs * layout.slab_bytes;
  for (size_t g = 0; g < layout.groups.size(); ++g) {
    layout.groups[g].block_bytes = choice.block_units[g] * kKvAlignment;
    const int64_t num_blocks = layout.pool_bytes / layout.groups[g].block_bytes;
    if (num_blocks > std::numeric_limits<BlockId>::max()) {
      throw InvalidArgument(concat("kv_cache_bytes is ", kv_cache_bytes, ", which makes ",
                                   num_blocks, " blocks; allowed: at most ",
                                   std::numeric_limits<BlockId>::max(),
                                   "; lower kv_cache_bytes or raise block_size"));
    }
  }
  return layout;
}

}  // namespace paceline
