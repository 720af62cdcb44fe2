// SPDX-License-Identifier: Apache-2.0
#pragma once

// One iteration as it is launched: the inputs of the device, and what only the host needs.

#include <cstdint>
#include <memory>
#include <vector>

#include "wire/staged_inputs.h"

namespace paceline {

// Logits of a scored chunk, to be copied to the host.
struct ScoreCopy {
  int32_t first_logit_row = 0;
  int32_t num_rows = 0;
  std::shared_ptr<std::vector<float>> destination;  // [prompt_len, vocab]
  int32_t destination_row = 0;
};

struct Batch {
  int64_t iteration = 0;
  bool has_prefill = false;     // any kind of row but kDecode
  bool has_logit_work = false;  // some sequence wants more of its logits than a draw
  // In the runner's memory, bound before the batch is built; the device reads it until the
  // iteration has completed.
  StagedInputs inputs{};
  InputCapacity capacity;
  std::vector<ScoreCopy> score_copies;

  [[nodiscard]] const IterationCounts& counts() const { return *inputs.counts; }
};

}  // namespace paceline
