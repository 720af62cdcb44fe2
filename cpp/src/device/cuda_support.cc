// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_support.h"

#include <algorithm>
#include <charconv>
#include <vector>

#include "base/check.h"

namespace paceline {
namespace {

struct Architecture {
  int32_t number;
  bool is_special;  // with a letter: code for this capability alone
};

std::vector<Architecture> parse(std::string_view list) {
  std::vector<Architecture> all;
  while (!list.empty()) {
    const size_t end = std::min(list.find_first_of(";,"), list.size());
    const std::string_view one = list.substr(0, end);
    Architecture architecture = {};
    const auto [rest, error] =
        std::from_chars(one.data(), one.data() + one.size(), architecture.number);
    PACELINE_CHECK(error == std::errc(), "no architecture: ", one);
    architecture.is_special = rest != one.data() + one.size();
    all.push_back(architecture);
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return all;
}

// Processors of embedded devices (Orin, Thor) do not run code of cards of the same generation.
bool is_embedded(int32_t capability) { return capability == 87 || capability == 110; }

bool has_code(const Architecture& of, int32_t capability) {
  if (of.number == capability) return true;
  return !of.is_special && of.number / 10 == capability / 10 && of.number < capability &&
         !is_embedded(of.number) && !is_embedded(capability);
}

std::string listed(const std::vector<Architecture>& all) {
  std::string text;
  for (const Architecture& one : all) {
    text += concat(text.empty() ? "sm_" : ", sm_", one.number, one.is_special ? "a" : "");
  }
  return text;
}

}  // namespace

CudaKernels cuda_kernels_for(const std::string& name, int32_t capability,
                             std::string_view architectures) {
  CudaKernels kernels;
  if (capability < kLeastCudaCapability) {
    kernels.reason =
        concat("GPU 0 is ", name, " (sm_", capability, "); allowed: sm_", kLeastCudaCapability,
               " and newer (A100, RTX 30 and later); use device 'cpu', or choose another GPU with "
               "CUDA_VISIBLE_DEVICES");
    return kernels;
  }
  const std::vector<Architecture> all = parse(architectures);
  int32_t newest = 0;  // without a letter
  for (const Architecture& one : all) {
    if (!one.is_special) newest = std::max(newest, one.number);
    if (!has_code(one, capability) || one.number < kernels.architecture) continue;
    kernels.architecture = one.number;
    kernels.has_sm90a = one.number == 90 && one.is_special;
  }
  if (kernels.architecture == 0 && newest > 0 && newest <= capability) {
    kernels.architecture = newest;
  }
  if (kernels.architecture == 0) {
    kernels.reason = concat(
        "GPU 0 is ", name, " (sm_", capability, "); this build has kernels for ", listed(all),
        newest > 0 ? " and newer" : "", "; build with -DPACELINE_CUDA_ARCHITECTURES=", capability,
        capability == 90 ? "a" : "", ", or use device 'cpu'");
  }
  return kernels;
}

bool has_cuda_capability_run(int32_t capability) { return capability == 90; }

}  // namespace paceline
