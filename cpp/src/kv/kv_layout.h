// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the KV cache of a target and its drafter is divided: every attention layer belongs to exactly
// one KvGroup (or reads one), and all groups share one pool of bytes. The layout is planned once at
// start and is plain data afterwards. It knows neither memory nor sequences.
//
// A layer of compressed attention has up to three *stores*, each with a group of its own kind
// (model/description/kv_shapes.h). Every store counts here as a layer.

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <paceline/dtype.h>

#include "wire/blocks.h"

namespace paceline {

inline constexpr int32_t kMaxBlockSize = 256;  // tokens, or entries of CompressedKv
// Alignment of the address of every block within the pool.
inline constexpr int64_t kKvAlignment = 64;

// The kinds of KV groups: what a token stores and which keys a query sees (docs/kv-groups.md). Code
// that depends on the kind visits it with an Overloaded that has an answer for each.
struct FullKv {  // every key up to the query's own
  [[nodiscard]] bool operator==(const FullKv&) const = default;
};
struct SlidingKv {
  int32_t window = 0;  // number of keys, the query's own included

  [[nodiscard]] bool operator==(const SlidingKv&) const = default;
};
struct LatentKv {  // every entry up to the query's own
  // An entry is a key whose first `rank` elements are the value, too. There is one KV head, and
  // head_dim is the width of an entry.
  int32_t rank = 0;

  [[nodiscard]] bool operator==(const LatentKv&) const = default;
};
// The stores of a layer of compressed attention. Each has one KV head.
struct WindowEntryKv {  // every entry of the window
  int32_t window = 0;   // as in SlidingKv; an entry is both key and value, head_dim wide

  [[nodiscard]] bool operator==(const WindowEntryKv&) const = default;
};
struct TailKv {        // what compressed entries are made of, head_dim float32 values a token
  int32_t window = 0;  // number of tokens that an entry is made of, the last one included

  [[nodiscard]] bool operator==(const TailKv&) const = default;
};
struct CompressedKv {  // every entry whose tokens are all at or below the query's position
  int32_t tokens_per_entry = 0;
  int32_t index_dim = 0;  // elements of the indexer's key, which an entry has besides head_dim

  [[nodiscard]] bool operator==(const CompressedKv&) const = default;
};
// The stores of a recurrent layer (ops/recurrent.h). A block of either covers tokens_per_entry tokens,
// the block size, and a row needs the block of its own position and the one before.
struct StateKv {  // the state after the last token of each block, always float32
  int32_t tokens_per_entry = 0;  // plan_kv_layout sets it; 0 before

  [[nodiscard]] bool operator==(const StateKv&) const = default;
};
struct RecordKv {  // what replays the tokens since a state, in the dtype of KV; one KV head
  int32_t num_taps = 0;          // a row reads this many inputs, its own included
  int32_t tokens_per_state = 0;  // as StateKv::tokens_per_entry; at least num_taps - 1

  [[nodiscard]] bool operator==(const RecordKv&) const = default;
};
using KvKind = std::variant<FullKv, SlidingKv, LatentKv, WindowEntryKv, TailKv, CompressedKv, StateKv,
                            RecordKv>;

enum class KvOwner : uint8_t { kTarget, kDraft };

[[nodiscard]] std::string_view kv_kind_name(const KvKind& kind);
// The number of keys that a query sees; 0: all up to its own position.
[[nodiscard]] int32_t kv_window(const KvKind& kind);
// The number of tokens that one entry stands for: 1 except in compressed groups and in those of
// states.
[[nodiscard]] int32_t tokens_per_entry(const KvKind& kind);
// Whether the rows of a pass hand on to each other what they store in a layer of this kind, so that
// a pass reads nothing of it that it has written itself. A block that later passes do not need is
// then never allocated, and one in the middle of a sequence may be cached without those before it.
[[nodiscard]] bool hands_on(const KvKind& kind);
[[nodiscard]] std::string_view kv_owner_name(KvOwner owner);

// What an entry stores in a layer of this kind, in units of [num_kv_heads, head_dim]: K and V, or
// one vector. The indexer's key comes in addition.
[[nodiscard]] int32_t kv_parts(const KvKind& kind);

// The KV requirements of one attention layer, or of one of its stores.
struct KvLayerShape {
  KvKind kind;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  // The layer whose cache this layer reads (a reader has no cache of its own): one of the same
  // shape that owns a cache. -1: this layer owns its cache.
  int32_t source = -1;
  // true: `source` is a layer of the target; false: an earlier layer of the same model.
  bool reads_target = false;
};
// The same layer where blocks cover block_size tokens: sets the fields that depend on it.
[[nodiscard]] KvLayerShape with_block_size(KvLayerShape shape, int32_t block_size);
// Bytes of one entry. TailKv and StateKv are float32, all others have the dtype of KV.
[[nodiscard]] int64_t entry_bytes(const KvLayerShape& shape, DType dtype);

// Layers of one model that share kind (with its window), heads, head size and owner.
struct KvGroup {
  KvOwner owner = KvOwner::kTarget;
  KvKind kind;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t block_size = 0;  // tokens, or entries of CompressedKv; 1 in StateKv
  DType dtype = DType::kFloat32;
  std::vector<int32_t> layers;  // layer numbers of the owner, ascending, without readers; the i-th
                                // is at i * layer_bytes in a block
  // One layer in a block: K and then V, each [block_size, heads, dim]; or entries, [block_size,
  // dim], and then the indexer's keys of CompressedKv, [block_size, index_dim].
  int64_t layer_bytes = 0;
  int64_t content_bytes = 0;  // layers * layer_bytes
  int64_t block_bytes = 0;    // allocated bytes: content plus padding, a multiple of kKvAlignment
};

// Tokens that a block of the group covers.
[[nodiscard]] int32_t block_tokens(const KvGroup& group);
// The number of blocks that num_tokens tokens need, and of those that they fill.
[[nodiscard]] int32_t num_blocks(const KvGroup& group, int64_t num_tokens);
[[nodiscard]] int32_t num_whole_blocks(const KvGroup& group, int64_t num_tokens);

struct KvLayout {
  int32_t block_size = 0;                      // as planned; tokens of a block in most kinds
  std::vector<KvGroup> groups;                 // the target's groups first
  std::vector<GroupId> target_layer_to_group;  // [target layers]
  std::vector<GroupId> draft_layer_to_group;   // [draft layers]
  // The index of a layer among the layers of its group; for a reader, the index of the layer that
  // it reads. The layer's KV is at this index times layer_bytes in a block.
  std::vector<int32_t> target_layer_index;  // [target layers]
  std::vector<int32_t> draft_layer_index;   // [draft layers]
  int64_t slab_bytes = 0;                   // a multiple of every group's block_bytes
  int64_t num_slabs = 0;                    // slab 0 is reserved: it holds every null block
  int64_t pool_bytes = 0;                   // num_slabs * slab_bytes, at most the requested bytes

  [[nodiscard]] const std::vector<GroupId>& layer_to_group(KvOwner model) const {
    return model == KvOwner::kTarget ? target_layer_to_group : draft_layer_to_group;
  }
  [[nodiscard]] const std::vector<int32_t>& layer_index(KvOwner model) const {
    return model == KvOwner::kTarget ? target_layer_index : draft_layer_index;
  }
  // Whether any layer of `model` reads KV of `group`, as its owner or from the other model.
  [[nodiscard]] bool is_read_by(KvOwner model, GroupId group) const {
    const std::vector<GroupId>& groups_read = layer_to_group(model);
    return std::find(groups_read.begin(), groups_read.end(), group) != groups_read.end();
  }
  // The slabs that sequences can use.
  [[nodiscard]] int64_t num_usable_slabs() const { return num_slabs - 1; }
  [[nodiscard]] int64_t blocks_per_slab(GroupId group) const {
    return slab_bytes / groups[group].block_bytes;
  }
};

// The least bytes of a pool that plan_kv_layout accepts for these layers.
[[nodiscard]] int64_t least_kv_cache_bytes(std::span<const KvLayerShape> target,
                                           std::span<const KvLayerShape> draft, int32_t block_size,
                                           DType dtype);

// Groups layers of equal shape and chooses block and slab bytes. A reader joins the group that it
// reads and takes no bytes.
//
// Slab bytes are a common multiple of the groups' block bytes, because block ids count from the
// start of the pool: only then does every slab begin at a whole block of every group. On average
// half a slab per group is idle, and slab 0 always is, so slabs should be small. If the least
// common multiple exceeds 1/64 of the pool, blocks are padded by at most 3 % each (or to the next
// 64 bytes, if that is more), so that a smaller multiple exists. Among those the planner takes the
// one with the least estimated waste (idle slabs plus padding); if none is at most 1/64 of the
// pool, one of at most 1/8. Throws InvalidArgument if that fails too (the message states the bytes
// needed) or if a value is out of range. A slab has at least least_slab_bytes where the pool has
// room for enough such slabs.
[[nodiscard]] KvLayout plan_kv_layout(std::span<const KvLayerShape> target,
                                      std::span<const KvLayerShape> draft, int32_t block_size,
                                      DType dtype, int64_t kv_cache_bytes,
                                      int64_t least_slab_bytes = 0);

}  // namespace paceline
