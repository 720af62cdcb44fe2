// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention layers as the KV layout sees them.

#include <algorithm>
#include <cstdint>
#include <variant>

#include "base/overloaded.h"
#include "kv/kv_layout.h"

namespace paceline::testing {

inline KvLayerShape full(int32_t heads, int32_t dim) { return {FullKv{}, heads, dim}; }
inline KvLayerShape sliding(int32_t window, int32_t heads, int32_t dim) {
  return {SlidingKv{window}, heads, dim};
}
inline KvLayerShape latent(int32_t rank, int32_t entry_width) {
  return {LatentKv{rank}, 1, entry_width};
}

// The first position that a query at `position` sees.
inline int32_t first_visible(const KvKind& kind, int32_t position) {
  return std::visit(
      Overloaded{[](const FullKv&) { return 0; }, [](const LatentKv&) { return 0; },
                 [&](const SlidingKv& seen) { return std::max(0, position - seen.window + 1); }},
      kind);
}

}  // namespace paceline::testing
