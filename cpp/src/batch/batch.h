// SPDX-License-Identifier: Apache-2.0
#pragma once

// The batch of one iteration: the inputs of the device, and what only the host needs.

#include <cstdint>
#include <memory>
#include <vector>

#include <paceline/request.h>

#include "wire/staged_inputs.h"

namespace paceline {

// The logits of a scored chunk, which the runner copies.
struct ScoreCopy {
  int32_t first_logit_row = 0;
  int32_t num_rows = 0;
  // [prompt_len, vocab], on the host or on the device: one of the two.
  std::shared_ptr<std::vector<float>> destination;
  DeviceValues device_destination;
  int32_t destination_row = 0;
};

// The hidden states of a chunk, which the forward pass copies.
struct HiddenCopy {
  int32_t first_verify_row = 0;
  int32_t num_rows = 0;
  std::vector<int32_t> layers;  // see Request::hidden_layers
  DeviceValues destination;     // [layers, prompt_len, hidden]; null: another rank copies them
  int32_t destination_row = 0;
};

struct Batch {
  int64_t iteration = 0;
  // k': what the drafter drafts at most. With 0 it makes no drafts, so that an iteration without
  // prefill rows is one of plain decoding.
  int32_t num_drafts = 0;
  bool has_prefill = false;     // some sequence has rows that are not kDecode
  bool has_logit_work = false;  // some sequence uses the logits pipeline or logprobs
  bool returns_logits = false;  // some sequence gets its logits: on rank 0 in score_copies
  bool catches_up = false;      // the first pass has rows for tokens that the drafter has missed
  // Rows of the first pass and of the verify pass differ, though the one reads hidden states of the
  // other.
  bool gathers_hidden = false;
  // The target's hidden states are kept for a drafter that does not see all tokens now. An
  // iteration with k' = 0 that keeps none is the same as that of an engine without a drafter.
  bool keeps_hidden = false;
  // The runner owns this memory; `Runner::bind` sets it before the batch is built. The device reads
  // it until the iteration has completed.
  StagedInputs inputs{};
  InputCapacity capacity;
  std::vector<ScoreCopy> score_copies;
  std::vector<HiddenCopy> hidden_copies;

  // Drops the copies, which own memory that may be large.
  void drop_copies() {
    score_copies.clear();
    hidden_copies.clear();
  }

  [[nodiscard]] const IterationCounts& counts() const { return *inputs.counts; }
  // Whether the batch has rows for which no graph is captured.
  [[nodiscard]] bool needs_eager_run() const { return has_prefill || catches_up; }
};

}  // namespace paceline
