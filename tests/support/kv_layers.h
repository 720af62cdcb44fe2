// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention layers as the KV layout sees them.

#include <algorithm>
#include <cstdint>
#include <utility>

#include "kv/kv_layout.h"

namespace paceline::testing {

inline KvLayerShape full(int32_t heads, int32_t dim) { return {FullKv{}, heads, dim}; }
inline KvLayerShape sliding(int32_t window, int32_t heads, int32_t dim) {
  return {SlidingKv{window}, heads, dim};
}
inline KvLayerShape latent(int32_t rank, int32_t entry_width) {
  return {LatentKv{rank}, 1, entry_width};
}

inline KvLayerShape window_entries(int32_t window, int32_t width) {
  return {WindowEntryKv{window}, 1, width};
}
inline KvLayerShape tail(int32_t window, int32_t width) { return {TailKv{window}, 1, width}; }
inline KvLayerShape compressed(int32_t tokens_per_entry, int32_t width, int32_t index_dim = 0) {
  return {CompressedKv{tokens_per_entry, index_dim}, 1, width};
}

// The first position whose token a query at `position` sees.
inline int32_t first_visible(const KvKind& kind, int32_t position) {
  const int32_t window = kv_window(kind);
  return window == 0 ? 0 : std::max(0, position - window + 1);
}

// The positions [first, second) of which a pass over the rows [begin, end) reads what they store.
inline std::pair<int32_t, int32_t> read_positions(const KvKind& kind, int32_t begin, int32_t end) {
  if (const auto* const state = std::get_if<StateKv>(&kind)) {
    const int32_t block_begin = begin / state->tokens_per_entry * state->tokens_per_entry;
    return {std::max(block_begin - 1, 0), block_begin};
  }
  if (const auto* const record = std::get_if<RecordKv>(&kind)) {
    const int32_t block_begin = begin / record->tokens_per_state * record->tokens_per_state;
    return {std::max(block_begin - record->num_taps + 1, 0), begin};
  }
  return {first_visible(kind, begin), end};
}

// Of the tokens before position `num_tokens`, the number of those that complete an entry.
inline int32_t num_entries(const KvKind& kind, int32_t num_tokens) {
  return num_tokens / tokens_per_entry(kind);
}

// Whether the token at `position` is the last one of an entry.
inline bool completes_entry(const KvKind& kind, int32_t position) {
  return num_entries(kind, position + 1) > num_entries(kind, position);
}

}  // namespace paceline::testing
