// SPDX-License-Identifier: Apache-2.0
#pragma once

// The size of the KV pool if `ExecutorOptions::kv_cache_bytes` is 0.

#include <cstdint>
#include <optional>
#include <span>

#include <paceline/executor.h>

#include "kv/kv_layout.h"

namespace paceline {

// Like the public `default_kv_cache_size`, but takes layers instead of models. `free_bytes`: memory
// that is free after the weights have been loaded; nullopt: unknown, which on the CPU means enough.
[[nodiscard]] KvCacheSize default_kv_cache_size(std::span<const KvLayerShape> target,
                                                std::span<const KvLayerShape> draft, DType dtype,
                                                Device device, const ExecutorOptions& options,
                                                std::optional<int64_t> free_bytes);

}  // namespace paceline
