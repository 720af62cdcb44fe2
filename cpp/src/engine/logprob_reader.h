// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads the logprobs of an iteration on the host.

#include <cstdint>
#include <span>
#include <vector>

#include <paceline/request.h>

#include "batch/batch.h"
#include "scheduler/iteration_plan.h"
#include "wire/sequence_result.h"

namespace paceline {

class LogprobReader {
 public:
  // The iteration must have completed. `entries` is what Runner::logprobs returned; if
  // `max_logprobs` is 0, nothing is read. References must outlive the object.
  LogprobReader(const IterationPlan& plan, const Batch& batch,
                std::span<const TokenLogprob> entries, int32_t max_logprobs, int32_t vocab_size);

  // Returns logprobs of the tokens that the sequence in batch row `i` has emitted; empty if it
  // requested none.
  [[nodiscard]] std::vector<std::vector<TokenLogprob>> emitted(int32_t i,
                                                               const SequenceResult& result) const;

  // Writes the prompt logprobs of the chunk in batch row `i` to its sequence.
  void store_prompt(int32_t i) const;

 private:
  // The first `1 + num_best` entries of a row of logits.
  [[nodiscard]] std::vector<TokenLogprob> row(int32_t logit_row, int32_t num_best) const;

  const IterationPlan& plan_;
  const Batch& batch_;
  std::span<const TokenLogprob> entries_;
  int32_t max_logprobs_;
  int32_t vocab_size_;
};

}  // namespace paceline
