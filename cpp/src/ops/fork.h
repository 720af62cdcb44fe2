// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the device does for a sequence that takes over the first positions of another one, before
// the first row of the iteration that it begins in: KV of blocks that the two cannot share, block
// tables, token history, and the tokens that penalties look at.
//
// Order: copy_blocks anywhere before the rows; fork_sequences after clear_counts.

#include <cstddef>
#include <cstdint>

#include "metadata/group_metadata.h"
#include "wire/blocks.h"
#include "wire/limits.h"
#include "wire/sequence_state.h"

namespace paceline {

struct CpuContext;
struct CudaContext;

// Copies whole blocks within the KV pool: all layers, K and V, of all their tokens. Copies know
// nothing of each other.
struct CopyBlocksParams {
  const int32_t* num_copies;  // [1]
  int32_t max_copies;         // at most so many are made
  const BlockCopy* copies;    // [max_copies] no destination twice, none is a source
  std::byte* pool;            // block b of group g lies at b * block_bytes[g]; aligned to 64
  int64_t block_bytes[kMaxKvGroups];  // multiples of 64
};
void copy_blocks(CpuContext&, const CopyBlocksParams&);
void copy_blocks(CudaContext&, const CopyBlocksParams&);

// For each fork: the first num_tokens of the parent's history; of the parent's block tables, in
// every group, the entries of blocks that lie wholly below num_tokens, those that a window has
// passed too, which nobody reads; and for slots that adjust, those tokens as seen. All of them are
// of the prompt, so there is no output to count.
struct ForkSequencesParams {
  const int32_t* num_forks;   // [1]
  int32_t max_forks;          // at most so many are made
  const SequenceFork* forks;  // [max_forks] no slot twice, none is a parent's
  SequenceState sequences;    // history is read and written
  SamplingState sampling;     // adjusts is read; seen is written
  BlockTable tables[kMaxKvGroups];
  int32_t num_tables;
};
void fork_sequences(CpuContext&, const ForkSequencesParams&);
void fork_sequences(CudaContext&, const ForkSequencesParams&);

}  // namespace paceline
