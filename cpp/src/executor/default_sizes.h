// SPDX-License-Identifier: Apache-2.0
#pragma once

// The sizes that an engine chooses by the memory of its device: max_model_len and the KV pool,
// where ExecutorOptions have 0 for them.

#include <cstdint>
#include <optional>
#include <string>

#include <paceline/executor.h>

namespace paceline {

struct DefaultSizes {
  ExecutorOptions options;     // those given, with all defaults
  std::string kv_cache_rule;   // the reason for kv_cache_bytes
  std::string model_len_rule;  // the reason for max_model_len; empty if it was given
  bool is_shortened = false;   // max_model_len is a default below the positions of the target
};

// max_model_len becomes longest_model_len() if one such sequence fits the KV pool, and its token
// history, block tables and activations fit beside the pool; otherwise the largest multiple of
// block_size that does. `draft` may be null. free_bytes: memory that is free beside the weights;
// nullopt: ask the system. Throws OutOfMemory where a GPU has no room for a pool.
[[nodiscard]] DefaultSizes choose_sizes(const ExecutorOptions& given, const Model& target,
                                        const Model* draft, std::optional<int64_t> free_bytes);

}  // namespace paceline
