// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tests that need a GPU: skipped where there is none, failed there when PACELINE_REQUIRE_GPU=1.

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <string_view>
#include <vector>

#include <paceline/device.h>
#include <paceline/executor.h>

namespace paceline::testing {

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const CudaStatus status = cuda_status();
    if (status.is_usable) return;
    const char* const required = std::getenv("PACELINE_REQUIRE_GPU");
    if (required != nullptr && std::string_view(required) == "1") {
      FAIL() << "PACELINE_REQUIRE_GPU=1, but " << status.reason;
    }
    GTEST_SKIP() << status.reason;
  }
};

// A GPU for each rank, or the first one for all.
inline std::vector<int32_t> gpus_for(int32_t num_ranks) {
  std::vector<int32_t> gpus(static_cast<size_t>(num_ranks), 0);
  if (cuda_status().num_gpus >= num_ranks) std::iota(gpus.begin(), gpus.end(), 0);
  return gpus;
}

// Options of an engine with k drafts, whose number does not depend on times.
inline ExecutorOptions gpu_engine_options(int32_t k, int32_t max_num_seqs, int64_t kv_cache_bytes) {
  ExecutorOptions options;
  options.max_model_len = 700;
  options.max_num_seqs = max_num_seqs;
  options.max_num_batched_tokens = max_num_seqs * 17;
  options.kv_cache_bytes = kv_cache_bytes;
  options.speculative.num_speculative_tokens = k;
  options.speculative.adaptive = false;
  return options;
}

}  // namespace paceline::testing
