// SPDX-License-Identifier: Apache-2.0
#pragma once

// What host and device tell each other about an iteration, in host memory that both use: a ring of
// entries, one for each iteration in flight and one more. The host builds a batch in an entry
// before it launches; the iteration's first op copies it to the device's own arrays. The last op
// writes results and times back and then, as the sign that they are there, the iteration's number.
// The device counts iterations itself to find the entry, so one captured program serves all of
// them, and nobody copies or waits in between.

#include <cstddef>
#include <cstdint>

#include <paceline/request.h>

#include "device/device_arena.h"
#include "device/device_memory.h"
#include "kv/kv_layout.h"
#include "metadata/group_metadata.h"
#include "wire/batch_shape.h"
#include "wire/limits.h"
#include "wire/sequence_result.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {

struct CpuContext;
struct CudaContext;

// Written by the device.
struct CompletionRecord {
  uint64_t begin_ns;  // of the device's clock, when the first op ran
  uint64_t end_ns;    // and when the last one did
  int64_t iteration;  // written last; -1 before the first use
};

// Where the entry of an iteration lies: e = iteration % num_entries.
struct RingPosition {
  int64_t* counter;  // [1] number of the running iteration; device memory
  int32_t num_entries;
  int64_t entry_bytes;  // between entries
};

// One array that the first op copies. Addresses are those of entry 0; 4-byte words.
struct StagedCopy {
  const int32_t* from;
  int32_t* to;
  int32_t count_index;  // of its count among the words of IterationCounts
  int32_t extra;        // elements beyond that count
  int32_t item_words;   // words of an element
};

// Copies the iteration's inputs, resets the state of sequences that begin, and writes new entries
// of block tables.
struct BeginIterationParams {
  RingPosition ring;
  CompletionRecord* completion;  // of entry 0
  StagedInputs entry;            // of entry 0
  IterationCounts* counts;       // [1] the device's copy
  StagedCopy copies[kNumStagedArrays];
  SequenceState sequences;
  SamplingState sampling;
  int32_t* lists;  // [max_list_words] where a GPU keeps the lists while it applies them
  BlockTable tables[kMaxKvGroups];
};
void begin_iteration(CpuContext&, const BeginIterationParams&);
void begin_iteration(CudaContext&, const BeginIterationParams&);

// Writes results, the logprobs that were asked for, and the completion record.
struct EndIterationParams {
  RingPosition ring;
  CompletionRecord* completion;   // of entry 0
  SequenceResult* results_to;     // of entry 0, [max_seqs] by batch row
  TokenLogprob* logprobs_to;      // of entry 0, [max_logit_rows, row_entries]
  const SequenceResult* results;  // [max_seqs]
  const TokenLogprob* logprobs;   // [max_logit_rows, row_entries]; null: there are none
  int32_t row_entries;            // 1 + max_logprobs
  StagedInputs inputs;            // the device's copy
  const int32_t* num_logprobs;    // [max_seqs] by sequence slot; below 0: none asked for
};
void end_iteration(CpuContext&, const EndIterationParams&);
void end_iteration(CudaContext&, const EndIterationParams&);

// The memory of the ring, seen from the host. Not thread-safe; the arrays of an entry belong to the
// device from the launch of its iteration until the record shows that it has completed.
class IterationRing {
 public:
  // `memory` must outlive the ring.
  IterationRing(DeviceMemory& memory, const BatchShape& shape, const KvLayout& layout,
                int32_t max_model_len, int32_t vocab_size, int32_t num_entries, DeviceArena& arena);
  ~IterationRing();
  IterationRing(const IterationRing&) = delete;
  IterationRing& operator=(const IterationRing&) = delete;

  [[nodiscard]] const InputCapacity& capacity() const { return capacity_; }
  // Where the batch of an iteration is built.
  [[nodiscard]] StagedInputs inputs(int64_t iteration) const;

  // `staged` is the device's copy, which place_inputs has laid out for this capacity.
  [[nodiscard]] BeginIterationParams begin_params(const StagedInputs& staged,
                                                  const SequenceState& sequences,
                                                  const SamplingState& sampling,
                                                  const std::vector<BlockTable>& tables) const;
  // `logprobs` null: there are none.
  [[nodiscard]] EndIterationParams end_params(const StagedInputs& staged,
                                              const SamplingState& sampling,
                                              const SequenceResult* results,
                                              const TokenLogprob* logprobs) const;

  // What the device has written. Results and logprobs only of a complete iteration.
  [[nodiscard]] bool is_complete(int64_t iteration) const;
  [[nodiscard]] const CompletionRecord& completion(int64_t iteration) const;
  [[nodiscard]] const SequenceResult* results(int64_t iteration) const;
  [[nodiscard]] const TokenLogprob* logprobs(int64_t iteration) const;

 private:
  [[nodiscard]] std::byte* entry(int64_t iteration) const {
    return data_ + iteration % num_entries_ * entry_bytes_;
  }
  [[nodiscard]] RingPosition position() const;

  DeviceMemory& memory_;
  InputCapacity capacity_;
  int32_t num_entries_;
  int32_t row_entries_ = 0;  // logprobs of a row of logits; 0: there are none
  int64_t completion_offset_ = 0;
  int64_t results_offset_ = 0;
  int64_t logprobs_offset_ = 0;
  int64_t entry_bytes_ = 0;
  std::byte* data_ = nullptr;
  int64_t* counter_ = nullptr;  // device memory
  int32_t* lists_ = nullptr;    // device memory
};

// Room for what the batches of an engine may hold.
[[nodiscard]] InputCapacity input_capacity(const BatchShape& shape, const KvLayout& layout,
                                           int32_t max_model_len, int32_t vocab_size);

}  // namespace paceline
