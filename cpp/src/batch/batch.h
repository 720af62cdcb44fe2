// SPDX-License-Identifier: Apache-2.0
#pragma once

// The batch of one iteration: the inputs of the device, and what only the host needs.

#include <cstdint>
#include <memory>
#include <vector>

#include "wire/staged_inputs.h"

namespace paceline {

// The logits of a scored chunk, which the runner copies to the host.
struct ScoreCopy {
  int32_t first_logit_row = 0;
  int32_t num_rows = 0;
  std::shared_ptr<std::vector<float>> destination;  // [prompt_len, vocab]
  int32_t destination_row = 0;
};

struct Batch {
  int64_t iteration = 0;
  bool has_prefill = false;     // some sequence has rows that are not kDecode
  bool has_logit_work = false;  // some sequence uses the logits pipeline or logprobs
  // The runner owns this memory; `Runner::bind` sets it before the batch is built. The device reads
  // it until the iteration has completed.
  StagedInputs inputs{};
  InputCapacity capacity;
  std::vector<ScoreCopy> score_copies;

  [[nodiscard]] const IterationCounts& counts() const { return *inputs.counts; }
};

}  // namespace paceline
