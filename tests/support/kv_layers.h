// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention layers as the KV layout sees them.

#include <cstdint>

#include "kv/kv_layout.h"

namespace paceline::testing {

inline KvLayerShape full(int32_t heads, int32_t dim) { return {KvKind::kFull, 0, heads, dim}; }
inline KvLayerShape sliding(int32_t window, int32_t heads, int32_t dim) {
  return {KvKind::kSliding, window, heads, dim};
}

}  // namespace paceline::testing
