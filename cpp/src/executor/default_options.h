// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <paceline/config.h>
#include <paceline/model.h>

namespace paceline {

// Replaces the options whose 0 stands for a default, except kv_cache_bytes: max_model_len,
// max_num_batched_tokens, and num_speculative_tokens with a drafter that knows its default. `draft`
// may be null. Checks nothing.
[[nodiscard]] ExecutorOptions with_defaults(ExecutorOptions options, const Model& target,
                                            const Model* draft);

}  // namespace paceline
