// SPDX-License-Identifier: Apache-2.0
#pragma once

// The size of the KV pool if `ExecutorOptions::kv_cache_bytes` is 0.

#include <cstdint>
#include <optional>
#include <span>

#include <paceline/executor.h>

#include "kv/kv_layout.h"

namespace paceline {

// Memory of a device, in bytes.
struct DeviceBytes {
  // Free after the weights have been loaded; nullopt: unknown, which on the CPU means enough.
  std::optional<int64_t> free;
  // For gpu_memory_utilization only: all memory, the weights of both models, and the engine's
  // workspace.
  int64_t total = 0;
  int64_t weights = 0;
  int64_t workspace = 0;
};

// Like the public `default_kv_cache_size`, but takes layers instead of models, and options without
// defaults (default_options.h). `shared_len`: the tokens of each of max_num_seqs sequences for
// which there is room at a time; the pool has room for one of max_model_len tokens in any case. 0:
// that is max_model_len, too, as it is with gpu_memory_utilization.
[[nodiscard]] KvCacheSize default_kv_cache_size(std::span<const KvLayerShape> target,
                                                std::span<const KvLayerShape> draft, DType dtype,
                                                Device device, const ExecutorOptions& options,
                                                const DeviceBytes& memory, int32_t shared_len = 0);

// Whether the pool of options.kv_cache_bytes and a workspace, and on a GPU the captured graphs, fit
// `free_bytes` together.
[[nodiscard]] bool has_room_beside(const ExecutorOptions& options, int64_t workspace_bytes,
                                   Device device, int64_t free_bytes);

// Throws OutOfMemory if an engine with gpu_memory_utilization uses more than that: its graphs have
// turned out larger than what default_kv_cache_size reserves for them.
void check_gpu_memory_use(const ExecutorOptions& options, int64_t total_bytes,
                          const MemoryReport& report);

}  // namespace paceline
