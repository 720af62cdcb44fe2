// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a layer gets when it runs: the interface between the walk over layers (decoder.h) and the
// kinds of layers (model/layers/).

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "device/device_arena.h"
#include "kv/kv_layout.h"
#include "metadata/group_metadata.h"
#include "metadata/pass_rows.h"
#include "model/description/decoder_config.h"
#include "model/weights/linear.h"
#include "ops/gather.h"
#include "ops/latent.h"
#include "ops/ops.h"

namespace paceline {

struct Activations;

// The rows of a pass whose output is read: those that draw or whose logits are wanted. The last
// layer computes keys and values of all rows, and everything after that for these rows only. Their
// output is row by row in `residual`, with the same bits.
struct OutputRows {
  PassRows rows;             // with metadata in `groups`, which the caller has built
  const int32_t* row_index;  // [capacity] row of the pass, ascending
  std::span<const GroupMetadata> groups;
  void* qkv;        // [capacity, qkv of the last layer] dtype of the activations
  float* residual;  // [capacity, residual_width]
};

struct RopeTable {
  const float* cos;  // [max_positions, head_dim / 2]
  const float* sin;
};

// What a branch (attention or MLP) does besides its own work, in the same launches where it can.
struct BranchEnds {
  // The op that makes the branch's input, which the branch runs before its first product. Only for
  // kinds that takes_norm().
  std::optional<RmsNormParams> norm = std::nullopt;
  // [rows, hidden]: the branch adds its output to it, and activations.branch stays as it is; null:
  // the output is activations.branch. Only for kinds with a last_product().
  float* residual = nullptr;
  // Where ranks share the last product, its exchange may be left to the caller, who joins it with
  // what follows: it is here then, and activations.branch has the outputs of this rank. Null: the
  // branch makes the exchange.
  std::optional<GatherColumnsParams>* exchange = nullptr;
};

// Whether the first product of a kind's branch is the only reader of its input.
template <class Kind, class Weights>
[[nodiscard]] bool takes_norm(const Kind&, const Weights&) {
  return false;
}
// The product whose output is that of the branch; null: the kind has none, or something follows it.
template <class Kind, class Weights>
[[nodiscard]] const Linear* last_product(const Kind&, const Weights&) {
  return nullptr;
}

// The attention of a layer for some rows. It reads `input`, and its output is activations.branch.
struct AttentionPass {
  const DecoderConfig& config;
  const void* input;  // [rows, DecoderConfig::qkv_inputs] dtype of the activations
  const PassRows& rows;
  std::span<const GroupMetadata> groups;  // by GroupId
  const Activations& activations;
  const OutputRows* output;                // the rows to attend from; null: all
  std::span<const KvLayerView> stores;     // of the layer
  std::span<const GroupId> store_groups;   // the group of each
  std::span<const RopeTable> rope_tables;  // by DecoderConfig::ropes
  int32_t rope_offset;                     // rows are rotated to positions this much higher
  BranchEnds ends = {};

  [[nodiscard]] const GroupMetadata& metadata(std::span<const GroupMetadata> of,
                                              size_t store = 0) const {
    return of[store_groups[store]];
  }
  [[nodiscard]] LatentRope rope(int32_t index, const PassRows& of) const {
    const auto at = static_cast<size_t>(index);
    return {.positions = of.positions,
            .cos = rope_tables[at].cos,
            .sin = rope_tables[at].sin,
            .position_offset = rope_offset,
            .is_interleaved = config.ropes[at].is_interleaved};
  }
};

// The MLP of a layer. It reads activations.normed, and its output is activations.branch.
struct MlpPass {
  const DecoderConfig& config;
  const PassRows& rows;
  const Activations& activations;
  int64_t* expert_counters;  // SortExpertRowsParams::counters, or null without a mixture
  BranchEnds ends = {};
};

// What the scratch of a kind depends on besides its configuration.
struct ScratchSizes {
  int64_t hidden;
  int64_t max_tokens;  // of a sequence
};

// The scratch of a kind: KindWidths<Kind>::Type has the widths of its buffers, maxima over layers
// and models, and its type Scratch the buffers (docs/architecture.md, layers). Most kinds have
// none.
template <class Kind>
struct NoWidths {
  struct Scratch {};
  void merge(const Kind&, const ScratchSizes&) {}
  [[nodiscard]] Scratch allocate(DeviceArena&, int64_t /*rows*/, DType) const { return {}; }
};
template <class Kind>
struct KindWidths {
  using Type = NoWidths<Kind>;
};
template <class Kind>
using WidthsOf = typename KindWidths<Kind>::Type;

}  // namespace paceline
