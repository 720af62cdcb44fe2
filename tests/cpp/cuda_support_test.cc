// SPDX-License-Identifier: Apache-2.0
//
// Which devices a CUDA build runs on, and which can share a model, with devices that only say what
// they are.

#include "device/cuda_support.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include <paceline/error.h>

#include "device/rank_gpus.h"
#include "support/errors.h"

namespace paceline {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::string_view kAll = "80;86;89;90a;100;120";

CudaKernels kernels_of(int32_t capability, std::string_view architectures) {
  return cuda_kernels_for("a card", capability, architectures);
}

TEST(CudaSupport, DefaultBuildRunsOnEveryCardSinceSm80) {
  for (const auto& [capability, architecture] : {std::pair{80, 80},
                                                 {86, 86},
                                                 {89, 89},
                                                 {90, 90},
                                                 {100, 100},
                                                 {103, 100},
                                                 {120, 120},
                                                 {121, 120}}) {
    const CudaKernels kernels = kernels_of(capability, kAll);
    EXPECT_EQ(kernels.reason, "") << capability;
    EXPECT_EQ(kernels.architecture, architecture) << capability;
    EXPECT_EQ(kernels.has_sm90a, capability == 90) << capability;
  }
}

TEST(CudaSupport, DriverCompilesTheNewestArchitectureForLaterDevices) {
  EXPECT_EQ(kernels_of(130, kAll).architecture, 120);
  EXPECT_EQ(kernels_of(90, "80").architecture, 80);
  EXPECT_FALSE(kernels_of(90, "80").has_sm90a);
  // Code of cards does not run on embedded processors.
  EXPECT_EQ(kernels_of(87, "80").architecture, 80);
  EXPECT_THAT(kernels_of(87, kAll).reason, HasSubstr("-DPACELINE_CUDA_ARCHITECTURES=87,"));
  EXPECT_EQ(kernels_of(87, "87;120").architecture, 87);
}

TEST(CudaSupport, CodeOfALaterArchitectureDoesNotRun) {
  EXPECT_NE(kernels_of(86, "89;90a").reason, "");
  EXPECT_NE(kernels_of(100, "90a;103").reason, "");
  EXPECT_EQ(kernels_of(89, "80;90a").architecture, 80);
}

TEST(CudaSupport, BuildWithoutTheDeviceSaysWhatItHasAndTheCure) {
  EXPECT_EQ(cuda_kernels_for("NVIDIA GeForce RTX 4090", 89, "90a").reason,
            "GPU 0 is NVIDIA GeForce RTX 4090 (sm_89); this build has kernels for sm_90a; build "
            "with -DPACELINE_CUDA_ARCHITECTURES=89, or use device 'cpu'");
  EXPECT_THAT(kernels_of(90, "100;120").reason,
              AllOf(HasSubstr("for sm_100, sm_120 and newer"), HasSubstr("ARCHITECTURES=90a,")));
}

TEST(CudaSupport, DeviceBelowSm80IsRefusedByAnyBuild) {
  for (const std::string_view architectures : {kAll, std::string_view("80")}) {
    EXPECT_EQ(cuda_kernels_for("Tesla T4", 75, architectures).reason,
              "GPU 0 is Tesla T4 (sm_75); allowed: sm_80 and newer (A100, RTX 30 and later); use "
              "device 'cpu', or choose another GPU with CUDA_VISIBLE_DEVICES");
  }
}

TEST(RankGpus, UnequalOnesAreRefusedByName) {
  constexpr int64_t kGiB = int64_t{1} << 30;
  const auto refusal = [](const std::vector<GpuFacts>& gpus) {
    return testing::message_of<Unsupported>([&] { check_equal_gpus(gpus); });
  };
  const GpuFacts first = {.gpu = 2, .name = "NVIDIA H200", .memory_bytes = 140 * kGiB};
  EXPECT_EQ(refusal({first}), "");
  // The memory of equal cards may differ by a few bytes.
  EXPECT_EQ(refusal({first, {.gpu = 3, .name = "NVIDIA H200", .memory_bytes = 140 * kGiB + 8}}),
            "");
  EXPECT_EQ(
      refusal({first, first, {.gpu = 3, .name = "NVIDIA H100", .memory_bytes = 80 * kGiB}}),
      "GPU 2 is NVIDIA H200 with 143360 MiB, but GPU 3 is NVIDIA H100 with 81920 MiB; allowed: "
      "GPUs of one kind, since all compute equal parts");
  // A part of a card (MIG) has its name, and less memory.
  EXPECT_THAT(refusal({first, {.gpu = 3, .name = "NVIDIA H200", .memory_bytes = 70 * kGiB}}),
              HasSubstr("but GPU 3 is NVIDIA H200 with 71680 MiB; allowed: GPUs of one kind"));
}

TEST(RankGpus, OnesThatCannotAccessEachOtherAreRefusedByName) {
  const auto refusal = [](bool can_access) {
    return testing::message_of<Unsupported>([&] { check_peer_access(1, 4, can_access); });
  };
  EXPECT_EQ(refusal(true), "");
  EXPECT_THAT(refusal(false), AllOf(HasSubstr("GPU 1 cannot access the memory of GPU 4; allowed: "),
                                    HasSubstr("NVLink")));
}

}  // namespace
}  // namespace paceline
