// SPDX-License-Identifier: Apache-2.0
#pragma once

// How large the KV pool becomes when `ExecutorOptions::kv_cache_bytes` is 0.

#include <cstdint>
#include <optional>
#include <span>

#include <paceline/executor.h>

#include "kv/kv_layout.h"

namespace paceline {

// As the public `default_kv_cache_size`, of layers alone. free_bytes: memory that is free beside
// the weights; none: unknown, which on the CPU means enough.
[[nodiscard]] KvCacheSize default_kv_cache_size(std::span<const KvLayerShape> target,
                                                std::span<const KvLayerShape> draft, DType dtype,
                                                Device device, const ExecutorOptions& options,
                                                std::optional<int64_t> free_bytes);

}  // namespace paceline
