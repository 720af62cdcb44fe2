// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <paceline/config.h>
#include <paceline/model.h>

namespace paceline {

// Tokens of a sequence, as far as the target supports them, for which a KV pool of the default size
// has room with max_num_seqs sequences at a time, if max_model_len is not given. A draft model that
// supports fewer is refused: it would end requests that do well without it.
inline constexpr int32_t kLeastDefaultLen = 4096;

// Whether layers choose what they see by scores of all entries. A row has room for the scores of
// max_model_len tokens, and on a GPU an iteration has thread blocks for all of them.
[[nodiscard]] bool has_indexer(const Model& model);

// The max_model_len of an engine that has enough memory: the positions of the target, or of a draft
// model that supports fewer, but at least kLeastDefaultLen if the target supports those. With an
// indexer it is at most that.
[[nodiscard]] int32_t longest_model_len(const Model& target, const Model* draft);

// Replaces the options whose 0 stands for a default, except kv_cache_bytes: max_num_batched_tokens,
// num_speculative_tokens with a drafter that knows its default, and max_model_len, which
// choose_sizes (default_sizes.h) lowers to what the memory allows. `draft` may be null. Checks
// nothing.
[[nodiscard]] ExecutorOptions with_defaults(ExecutorOptions options, const Model& target,
                                            const Model* draft);

}  // namespace paceline
