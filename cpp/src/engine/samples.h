// SPDX-License-Identifier: Apache-2.0
#pragma once

// Makes the sequences of a request: one for each of its samples.

#include <cstdint>
#include <memory>
#include <vector>

#include <paceline/request.h>

#include "request/sequence.h"
#include "wire/draft_source.h"

namespace paceline {

// All samples of a request, in order; null for a sample that has ended.
using Samples = std::vector<std::unique_ptr<Sequence>>;

struct SampleBounds {
  int32_t max_model_len = 0;
  int32_t vocab_size = 0;
  int32_t hidden_size = 0;
  Device device = Device::kCpu;               // holds what a request leaves on the device
  int32_t num_draft_tokens = 0;               // k
  std::shared_ptr<HostDrafter> host_drafter;  // null: the device drafts
  SourceMethods methods;                      // that draft
};

// The request must have been checked. Throws OutOfMemory where the memory of what it returns cannot
// be allocated. Its tokens and lists are moved, not copied.
[[nodiscard]] Samples make_samples(Request request, const SampleBounds& bounds);

}  // namespace paceline
