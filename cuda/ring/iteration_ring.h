// SPDX-License-Identifier: Apache-2.0
#pragma once

// What host and GPU tell each other about an iteration, in pinned host memory that both see: the
// host fills a slot before it launches, the iteration's first kernel fetches it; the iteration's
// last kernel writes results and the time back and then, as the sign that they are there, its
// number. Nobody copies, nobody synchronises. Which slot an iteration uses the device counts
// itself, so that a captured graph serves all of them.

#include <cstddef>
#include <cstdint>
#include <vector>

#include <paceline/request.h>

#include "batch/iteration_inputs.h"
#include "device/cuda_context.h"
#include "device/device_arena.h"
#include "kv/kv_layout.h"
#include "metadata/group_metadata.h"
#include "wire/batch_shape.h"
#include "wire/blocks.h"
#include "wire/sequence_result.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {

// The fixed part of a slot. Offsets of the arrays behind it are the same in all slots.
struct RingEntryHeader {
  int64_t iteration;
  int32_t num_seqs;
  int32_t num_drafting;
  int32_t num_verify_rows;
  int32_t num_first_rows;
  int32_t num_logit_rows;
  int32_t num_prompt_rows;
  int32_t num_resets;
  int32_t num_list_words;
  int32_t num_table_writes;
  int32_t has_prefill;
  int32_t num_forks;
  int32_t num_block_copies;
};

// Written by the device.
struct CompletionRecord {
  uint64_t begin_ns;  // of the GPU's global timer, first and last kernel
  uint64_t end_ns;
  int64_t iteration;  // written last; -1 before the first use
};

struct RingEntryOffsets {
  int64_t seq_slot, kind, prefill_start, next_token, verify_indptr, first_indptr, logit_indptr,
      logit_rows, prompt_targets, prefill_tokens, resets, lists, table_writes, forks, block_copies,
      outcome, results, logprobs, bytes;
  int32_t max_table_writes;
  int32_t max_list_words;
  int32_t max_forks;
  int32_t max_block_copies;
};

class IterationRing {
 public:
  IterationRing(const BatchShape& shape, const KvLayout& layout, int32_t max_model_len,
                int32_t vocab_size, int32_t num_entries, DeviceArena& arena);
  ~IterationRing();
  IterationRing(const IterationRing&) = delete;
  IterationRing& operator=(const IterationRing&) = delete;

  // Host: fills the iteration's slot.
  void write(const IterationInputs& inputs);

  // Enqueue (or capture) the first and the last kernel of an iteration.
  void enqueue_begin(CudaContext& ctx, const StagedInputs& staged, const SequenceState& sequences,
                     const SamplingState& sampling, const BlockTable* tables,
                     int32_t num_tables) const;
  // `logprobs` null: there are none.
  void enqueue_end(CudaContext& ctx, const StagedInputs& staged, const SamplingState& sampling,
                   const SequenceResult* results, const TokenLogprob* logprobs) const;

  // Host: what the device has written.
  [[nodiscard]] bool is_complete(int64_t iteration) const;
  [[nodiscard]] const SequenceResult* results(int64_t iteration) const;
  [[nodiscard]] const TokenLogprob* logprobs(int64_t iteration) const;
  [[nodiscard]] const CompletionRecord& outcome(int64_t iteration) const;

  [[nodiscard]] int64_t bytes() const { return offsets_.bytes * num_entries_; }

 private:
  [[nodiscard]] std::byte* entry(int64_t iteration) const {
    return data_ + iteration % num_entries_ * offsets_.bytes;
  }

  void keep_last_writes(const std::vector<TableWrite>& writes);

  RingEntryOffsets offsets_{};
  int32_t logprob_row_words_ = 0;  // of a row of logits
  int32_t num_entries_;
  std::vector<int32_t> order_;            // scratch of keep_last_writes
  std::vector<TableWrite> table_writes_;  // what it leaves
  std::byte* data_ = nullptr;             // pinned, mapped: the GPU uses the same address
  int64_t* device_counter_ = nullptr;     // [1] number of the running iteration; device memory
  int32_t* device_lists_ = nullptr;       // [max_list_words] lists of the resets; device memory
};

}  // namespace paceline
