// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <paceline/executor.h>

namespace paceline::testing {

// Options of an engine for tiny models with k drafts. A test sets the options that it is about. The
// number of drafts is fixed, so that it does not depend on times.
inline ExecutorOptions small_engine_options(int32_t k) {
  ExecutorOptions options;
  options.max_model_len = 256;
  options.max_num_seqs = 8;
  options.max_num_batched_tokens = 256;
  options.kv_cache_bytes = 4 << 20;
  options.num_threads = 1;
  options.speculative.num_speculative_tokens = k;
  options.speculative.adaptive = false;
  return options;
}

}  // namespace paceline::testing
