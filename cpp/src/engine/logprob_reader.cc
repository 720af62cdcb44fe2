// SPDX-License-Identifier: Apache-2.0
#include "engine/logprob_reader.h"

#include <algorithm>

#include <paceline/error.h>

#include "base/check.h"
#include "batch/batch.h"
#include "scheduler/iteration_plan.h"
#include "wire/sequence_result.h"

namespace paceline {

LogprobReader::LogprobReader(const IterationPlan& plan, const Batch& batch,
                             std::span<const TokenLogprob> entries, int32_t max_logprobs,
                             int32_t vocab_size)
    : plan_(plan),
      batch_(batch),
      entries_(entries),
      max_logprobs_(max_logprobs),
      vocab_size_(vocab_size) {}

std::vector<TokenLogprob> LogprobReader::row(int32_t logit_row, int32_t num_best) const {
  const auto first = static_cast<size_t>(logit_row) * static_cast<size_t>(1 + max_logprobs_);
  const auto count = static_cast<size_t>(1 + std::min(num_best, vocab_size_));
  const std::span<const TokenLogprob> entries = entries_.subspan(first, count);
  return {entries.begin(), entries.end()};
}

std::vector<std::vector<TokenLogprob>> LogprobReader::emitted(int32_t i,
                                                              const SequenceResult& result) const {
  std::vector<std::vector<TokenLogprob>> rows;
  const int32_t num_best = plan_.sequences[i].sequence->sampling.logprobs;
  if (num_best < 0) return rows;
  for (int32_t j = 0; j < result.emitted_len; ++j) {
    rows.push_back(row(batch_.inputs.logit_indptr[i] + j, num_best));
  }
  return rows;
}

void LogprobReader::store_prompt(int32_t i) const {
  const PlannedSequence& planned = plan_.sequences[i];
  if (planned.num_prompt_rows == 0) return;
  int32_t first = batch_.counts().num_logit_rows;
  for (int32_t before = 0; before < i; ++before) {
    first += plan_.sequences[before].num_prompt_rows;
  }
  const int32_t num_best = planned.sequence->sampling.prompt_logprobs;
  for (int32_t r = 0; r < planned.num_prompt_rows; ++r) {
    (*planned.sequence->prompt_logprobs)[planned.start + r] = row(first + r, num_best);
  }
}

}  // namespace paceline
