// SPDX-License-Identifier: Apache-2.0
#include "executor/null_runner.h"
#include "batch/iteration_inputs.h"
#include "wire/batch_shape.h"
#include "wire/sequence_result.h"
#include "wire/sequence_state.h"

#include <algorithm>

namespace paceline {

NullRunner::NullRunner(int32_t max_num_seqs, int32_t max_in_flight)
    : ring_(max_in_flight + 1), known_len_(max_num_seqs), limit_(max_num_seqs) {
  for (RingEntry& seq_slot : ring_) seq_slot.results.resize(max_num_seqs);
}

void NullRunner::launch(const IterationInputs& inputs) {
  completed_ = inputs.iteration;
  RingEntry& ring_entry = ring_[static_cast<size_t>(completed_) % ring_.size()];
  ring_entry.num_seqs = inputs.num_seqs;
  for (const SequenceReset& reset : inputs.resets) limit_[reset.seq_slot] = reset.limit;
  for (int32_t i = 0; i < inputs.num_seqs; ++i) {
    const int32_t seq_slot = inputs.seq_slot[i];
    SequenceResult& result = ring_entry.results[i];
    result = SequenceResult{};
    const auto kind = static_cast<RowKind>(inputs.kind[i]);
    if (kind != RowKind::kDecode) {
      known_len_[seq_slot] =
          inputs.prefill_start[i] + inputs.verify_indptr[i + 1] - inputs.verify_indptr[i];
    }
    const bool may_emit = kind == RowKind::kDecode || kind == RowKind::kPrefillFinal;
    if (!may_emit || known_len_[seq_slot] >= limit_[seq_slot]) continue;
    result.emitted_len = 1;
    ++known_len_[seq_slot];
    if (known_len_[seq_slot] == limit_[seq_slot]) result.outcome = SequenceOutcome::kLength;
  }
}

std::span<const SequenceResult> NullRunner::results(int64_t iteration) {
  const RingEntry& seq_slot = ring_[static_cast<size_t>(iteration) % ring_.size()];
  return {seq_slot.results.data(), static_cast<size_t>(seq_slot.num_seqs)};
}

}  // namespace paceline
