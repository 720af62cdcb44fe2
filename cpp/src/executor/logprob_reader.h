// SPDX-License-Identifier: Apache-2.0
#pragma once

// Logprobs on the host: what an iteration has left behind of them.

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
  // Of a completed iteration. `entries` is what Runner::logprobs returned; with `max_logprobs` 0
  // nothing is read. References must outlive the object.
  LogprobReader(const IterationPlan& plan, const Batch& batch,
                std::span<const TokenLogprob> entries, int32_t max_logprobs, int32_t vocab_size);

  // Of the tokens that the sequence in batch row `i` has emitted; empty if it wants none.
  [[nodiscard]] std::vector<std::vector<TokenLogprob>> emitted(int32_t i,
                                                               const SequenceResult& result) const;

  // Writes those of the chunk in batch row `i` into its sequence.
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
