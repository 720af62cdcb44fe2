// SPDX-License-Identifier: Apache-2.0
#include "runner/null_runner.h"

#include "wire/batch_shape.h"

namespace paceline {

NullRunner::NullRunner(int32_t max_num_seqs, const InputCapacity& capacity, int32_t max_in_flight)
    : capacity_(capacity),
      ring_(static_cast<size_t>(max_in_flight) + 1),
      known_len_(static_cast<size_t>(max_num_seqs)),
      limit_(static_cast<size_t>(max_num_seqs)) {
  StagedInputs unplaced{};
  const int64_t bytes = place_inputs(capacity_, InputSide::kRing, nullptr, unplaced);
  for (RingEntry& entry : ring_) {
    entry.memory = AlignedBuffer(bytes, "the iteration ring");
    entry.results.resize(static_cast<size_t>(max_num_seqs));
  }
}

void NullRunner::bind(Batch& batch) {
  batch.capacity = capacity_;
  place_inputs(capacity_, InputSide::kRing, entry(batch.iteration).memory.data(), batch.inputs);
}

void NullRunner::launch(const Batch& batch) {
  const StagedInputs& inputs = batch.inputs;
  completed_ = batch.iteration;
  RingEntry& ring_entry = entry(completed_);
  ring_entry.num_seqs = inputs.counts->num_seqs;
  for (int32_t i = 0; i < inputs.counts->num_resets; ++i) {
    limit_[inputs.resets[i].seq_slot] = inputs.resets[i].limit;
  }
  for (int32_t i = 0; i < ring_entry.num_seqs; ++i) {
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
  const RingEntry& ring_entry = entry(iteration);
  return {ring_entry.results.data(), static_cast<size_t>(ring_entry.num_seqs)};
}

}  // namespace paceline
