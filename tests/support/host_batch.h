// SPDX-License-Identifier: Apache-2.0
#pragma once

// Inputs of an iteration in memory of the test's own.

#include <cstddef>
#include <cstring>
#include <vector>

#include "batch/batch.h"
#include "wire/batch_shape.h"
#include "wire/staged_inputs.h"

namespace paceline::testing {

// A batch to build in, without a runner. Movable; the memory moves along.
class HostBatch {
 public:
  explicit HostBatch(const BatchShape& shape) {
    batch_.capacity = {.seqs = shape.max_seqs,
                       .verify_rows = shape.max_verify_rows,
                       .logit_rows = shape.max_logit_rows,
                       .prompt_rows = shape.max_prompt_rows,
                       .list_words = 1 << 13,
                       .block_copies = 1 << 10,
                       .table_writes = 1 << 12,
                       .adopted_tokens = 1 << 12,
                       .mask_words = 1 << 6};
    const int64_t bytes = place_inputs(batch_.capacity, InputSide::kRing, nullptr, batch_.inputs);
    memory_.resize(static_cast<size_t>(bytes));
    place_inputs(batch_.capacity, InputSide::kRing, memory_.data(), batch_.inputs);
  }

  [[nodiscard]] Batch& operator*() { return batch_; }
  [[nodiscard]] const Batch& operator*() const { return batch_; }
  [[nodiscard]] Batch* operator->() { return &batch_; }

 private:
  std::vector<std::byte> memory_;
  Batch batch_;
};

// The counts as an array, for op cases.
[[nodiscard]] inline std::vector<int32_t> words_of(const IterationCounts& counts) {
  std::vector<int32_t> words(sizeof(counts) / sizeof(int32_t));
  std::memcpy(words.data(), &counts, sizeof(counts));
  return words;
}

}  // namespace paceline::testing
