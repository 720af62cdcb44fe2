// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the KV cache of a target and its drafter is cut up: every attention layer belongs to exactly
// one KvGroup (or reads one), all groups share one pool of bytes. Planned once at start; plain data
// afterwards. Knows no memory and no sequence.

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/dtype.h>

#include "wire/blocks.h"

namespace paceline {

inline constexpr int64_t kKvAlignment = 64;  // of every block's address within the pool

enum class KvKind : uint8_t { kFull, kSliding };
enum class KvOwner : uint8_t { kTarget, kDraft };

[[nodiscard]] std::string_view kv_kind_name(KvKind kind);
[[nodiscard]] std::string_view kv_owner_name(KvOwner owner);

// What one attention layer asks for.
struct KvLayerShape {
  KvKind kind = KvKind::kFull;
  int32_t window = 0;  // kSliding: keys visible to a query, itself included; else 0
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  // A reader has no cache of its own: the layer whose cache it reads, one of the same shape that
  // owns one. -1: none, this layer owns its cache.
  int32_t source = -1;
  bool reads_target = false;  // `source` is a layer of the target; else an earlier one of its model
};

// Layers of one model that share kind, window, heads, head size and owner.
struct KvGroup {
  KvOwner owner = KvOwner::kTarget;
  KvKind kind = KvKind::kFull;
  int32_t window = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t block_size = 0;  // tokens
  DType dtype = DType::kFloat32;
  std::vector<int32_t> layers;  // of the owner, ascending, without readers; i-th at i * layer_bytes
                                // in a block
  int64_t layer_bytes = 0;      // K then V of one layer in one block, each [block_size, heads, dim]
  int64_t content_bytes = 0;    // layers * layer_bytes
  int64_t block_bytes = 0;      // as allocated: content plus padding, a multiple of kKvAlignment
};

struct KvLayout {
  std::vector<KvGroup> groups;                 // target's first
  std::vector<GroupId> target_layer_to_group;  // [target layers]
  std::vector<GroupId> draft_layer_to_group;   // [draft layers]
  // Which of its group's layers a layer is; of a reader, which one it reads. Its KV lies at this
  // index times layer_bytes in a block.
  std::vector<int32_t> target_layer_index;  // [target layers]
  std::vector<int32_t> draft_layer_index;   // [draft layers]
  int64_t slab_bytes = 0;                   // a multiple of every group's block_bytes
  int64_t num_slabs = 0;                    // slab 0 is reserved: it holds every null block
  int64_t pool_bytes = 0;                   // num_slabs * slab_bytes <= what was asked for

  [[nodiscard]] const std::vector<GroupId>& layer_to_group(KvOwner model) const {
    return model == KvOwner::kTarget ? target_layer_to_group : draft_layer_to_group;
  }
  [[nodiscard]] const std::vector<int32_t>& layer_index(KvOwner model) const {
    return model == KvOwner::kTarget ? target_layer_index : draft_layer_index;
  }
  // Whether any layer of `model` reads KV of `group`, its own or the other's.
  [[nodiscard]] bool is_read_by(KvOwner model, GroupId group) const {
    const std::vector<GroupId>& groups_read = layer_to_group(model);
    return std::find(groups_read.begin(), groups_read.end(), group) != groups_read.end();
  }
  [[nodiscard]] int64_t blocks_per_slab(GroupId group) const {
    return slab_bytes / groups[group].block_bytes;
  }
};

// Groups equal layers and chooses block and slab bytes. A reader joins the group that it reads and
// takes no bytes.
//
// Slab bytes are a common multiple of the groups' block bytes, because block ids count from the
// start of the pool: only then does every slab begin at a whole block of every group. Half a slab
// per group stands idle on average, and slab 0 always, so slabs should be small: where the least
// common multiple exceeds 1/64 of the pool, blocks are padded by at most 3 % each (or to the next
// 64 bytes, if that is more) so that a smaller multiple exists. Among those the one with the least
// estimated waste, idle slabs plus padding, is taken; if none is <= 1/64 of the pool, one <= 1/8.
// Throws InvalidArgument when even that fails (says the bytes needed) or a value is out of range.
[[nodiscard]] KvLayout plan_kv_layout(std::span<const KvLayerShape> target,
                                      std::span<const KvLayerShape> draft, int32_t block_size,
                                      DType dtype, int64_t kv_cache_bytes);

}  // namespace paceline
