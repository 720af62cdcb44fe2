// SPDX-License-Identifier: Apache-2.0
#pragma once

// The iteration ring carries the inputs of iterations to the device and their results back. It lies
// in host memory that both access and has one entry for each iteration in flight and one more. The
// host builds a batch in an entry before the launch. The iteration's first op copies the batch to
// the device's own arrays. The last op writes results and times to the entry, and then the
// iteration's number, which tells the host that they are complete. The device counts iterations
// itself to find the entry. So one captured graph serves all iterations, and the host neither
// copies nor waits between them.

#include <array>
#include <cstddef>
#include <cstdint>

#include <paceline/request.h>

#include "base/host_device.h"
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

constexpr int32_t kNumModels = 2;  // the target and the drafter

// What the passes of an iteration over a model with a mixture of experts counted.
struct ExpertCounts {
  int64_t experts_hit;  // experts that had rows, summed over layers and passes
  int64_t layers;       // mixture layers that ran
};

// SortExpertRowsParams::counters of the target and of the drafter; null without a mixture.
using ExpertCounters = std::array<int64_t*, kNumModels>;

// Written by the device.
struct CompletionRecord {
  uint64_t begin_ns;                 // device clock when the first op ran
  uint64_t end_ns;                   // device clock when the last op ran
  ExpertCounts experts[kNumModels];  // zeros without a mixture
  int64_t iteration;                 // written last; -1 before the first use
};

// Locates the entry of the running iteration, which is entry iteration % num_entries.
struct RingPosition {
  int64_t* counter;  // [1] number of the running iteration; device memory
  int32_t num_entries;
  int64_t entry_bytes;  // from one entry to the next
};

// Words from the arrays of entry 0 to those of the entry of an iteration.
[[nodiscard]] PACELINE_HOST_DEVICE inline int64_t words_to_entry(const RingPosition& ring,
                                                                 int64_t iteration) {
  return iteration % ring.num_entries * (ring.entry_bytes / static_cast<int64_t>(sizeof(int32_t)));
}

// One array that the first op copies, as 4-byte words.
struct StagedCopy {
  const int32_t* from;  // in entry 0
  int32_t* to;          // the device's array
  int32_t count_index;  // index of its count among the words of IterationCounts
  int32_t extra;        // elements beyond that count
  int32_t item_words;   // words of an element
};

// Copies the iteration's inputs, resets the counters of experts and the state of sequences that
// start, and writes new entries of block tables and the verify windows that the host has made.
struct BeginIterationParams {
  RingPosition ring;
  CompletionRecord* completion;  // in entry 0
  StagedInputs entry;            // in entry 0
  IterationCounts* counts;       // [1] the device's copy
  StagedCopy copies[kNumStagedArrays];
  SequenceState sequences;
  SamplingState sampling;
  int32_t* lists;  // [max_list_words] a GPU copies the lists here before it applies them
  BlockTable tables[kMaxKvGroups];
  int64_t* experts[kNumModels];  // see ExpertCounters
};
void begin_iteration(CpuContext&, const BeginIterationParams&);
void begin_iteration(CudaContext&, const BeginIterationParams&);

// Writes the results, the requested logprobs, the drafts of sequences with masks, the counters of
// experts and the completion record.
struct EndIterationParams {
  RingPosition ring;
  CompletionRecord* completion;   // in entry 0
  SequenceResult* results_to;     // in entry 0, [max_seqs] by batch row
  TokenLogprob* logprobs_to;      // in entry 0, [max_logit_rows, row_entries]
  const SequenceResult* results;  // [max_seqs]
  const TokenLogprob* logprobs;   // [max_logit_rows, row_entries]; null: logprobs are off
  int32_t row_entries;            // 1 + max_logprobs
  // In entry 0, [max_seqs] by batch row, written for sequences with masks; null: there are none.
  ProposedDrafts* drafts_to;
  SequenceState sequences;
  const int32_t* first_mask;     // [max_seqs] by sequence slot; see SamplingState
  StagedInputs inputs;           // the device's copy
  const int32_t* num_logprobs;   // [max_seqs] by sequence slot; below 0: none requested
  int64_t* experts[kNumModels];  // see ExpertCounters
};
void end_iteration(CpuContext&, const EndIterationParams&);
void end_iteration(CudaContext&, const EndIterationParams&);

// The host's side of the ring; owns its memory. Not thread-safe. From the launch of an iteration
// until its completion record is written, the arrays of its entry belong to the device.
class IterationRing {
 public:
  // `memory` must outlive the ring.
  IterationRing(DeviceMemory& memory, const BatchShape& shape, const KvLayout& layout,
                int32_t max_model_len, int32_t vocab_size, int32_t num_entries, DeviceArena& arena);
  ~IterationRing();
  IterationRing(const IterationRing&) = delete;
  IterationRing& operator=(const IterationRing&) = delete;

  [[nodiscard]] const InputCapacity& capacity() const { return capacity_; }
  // The arrays in which the batch of an iteration is built.
  [[nodiscard]] StagedInputs inputs(int64_t iteration) const;

  // `staged` is the device's copy, which place_inputs has laid out for this capacity.
  [[nodiscard]] BeginIterationParams begin_params(const StagedInputs& staged,
                                                  const SequenceState& sequences,
                                                  const SamplingState& sampling,
                                                  const std::vector<BlockTable>& tables,
                                                  const ExpertCounters& experts) const;
  // `logprobs` is null if logprobs are off. `has_masks`: whether sequences may have masks.
  [[nodiscard]] EndIterationParams end_params(const StagedInputs& staged,
                                              const SequenceState& sequences,
                                              const SamplingState& sampling,
                                              const SequenceResult* results,
                                              const TokenLogprob* logprobs,
                                              const ExpertCounters& experts, bool has_masks) const;

  // What the device has written. Results and logprobs are valid only for a complete iteration.
  [[nodiscard]] bool is_complete(int64_t iteration) const;
  [[nodiscard]] const CompletionRecord& completion(int64_t iteration) const;
  [[nodiscard]] const SequenceResult* results(int64_t iteration) const;
  [[nodiscard]] const TokenLogprob* logprobs(int64_t iteration) const;
  [[nodiscard]] const ProposedDrafts* drafts(int64_t iteration) const;

 private:
  [[nodiscard]] std::byte* entry(int64_t iteration) const {
    return data_ + iteration % num_entries_ * entry_bytes_;
  }
  [[nodiscard]] RingPosition position() const;

  DeviceMemory& memory_;
  InputCapacity capacity_;
  int32_t num_entries_;
  int32_t row_entries_ = 0;  // logprob entries per row of logits; 0: logprobs are off
  int64_t completion_offset_ = 0;
  int64_t results_offset_ = 0;
  int64_t drafts_offset_ = 0;
  int64_t logprobs_offset_ = 0;
  int64_t entry_bytes_ = 0;
  std::byte* data_ = nullptr;
  int64_t* counter_ = nullptr;  // device memory
  int32_t* lists_ = nullptr;    // device memory
};

// The largest extents that the batches of an engine need.
[[nodiscard]] InputCapacity input_capacity(const BatchShape& shape, const KvLayout& layout,
                                           int32_t max_model_len, int32_t vocab_size);

}  // namespace paceline
