// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tests that need a GPU: skipped where there is none, failed there when PACELINE_REQUIRE_GPU=1.

#include <gtest/gtest.h>

#include <cstdlib>
#include <string_view>

#include <paceline/device.h>

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

}  // namespace paceline::testing
