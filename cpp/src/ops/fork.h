// SPDX-License-Identifier: Apache-2.0
#pragma once

// A fork is a sequence that takes over the first positions of another sequence, its parent, or of
// the prefix cache.
// Before the first row of the iteration in which the fork begins, these ops copy to it: the KV of
// blocks that the two cannot share, the block tables, the token history, and the set of tokens that
// penalties consider.
//
// Order: copy_blocks at any time before the rows; fork_sequences after clear_counts.

#include <cstddef>
#include <cstdint>

#include "metadata/group_metadata.h"
#include "wire/blocks.h"
#include "wire/limits.h"
#include "wire/sequence_state.h"

namespace paceline {

struct CpuContext;
struct CudaContext;

// Copies whole blocks within the KV pool: all layers, K and V, of all their tokens. No copy reads
// what another one writes.
struct CopyBlocksParams {
  const int32_t* num_copies;  // [1]
  int32_t max_copies;         // upper bound of num_copies
  const BlockCopy* copies;    // [max_copies] destinations are distinct, and none is a source
  std::byte* pool;            // block b of group g is at b * block_bytes[g]; 64 B aligned
  int64_t block_bytes[kMaxKvGroups];  // multiples of 64
};
void copy_blocks(CpuContext&, const CopyBlocksParams&);
void copy_blocks(CudaContext&, const CopyBlocksParams&);

// For each fork, copies from its parent the first num_tokens tokens of the history and, in every
// group, the block table entries of blocks that lie wholly below num_tokens. That includes entries
// of blocks that a sliding window has passed, which nothing reads. For sequence slots that adjust
// logits it also marks those tokens as seen. All of them are prompt tokens, so there is no output
// to count. Of a fork without a parent the tokens come from adopted_tokens, and its block table is
// already written.
struct ForkSequencesParams {
  const int32_t* num_forks;       // [1]
  int32_t max_forks;              // upper bound of num_forks
  const SequenceFork* forks;      // [max_forks] sequence slots are distinct, and none is a parent
  const int32_t* adopted_tokens;  // histories of forks without a parent
  SequenceState sequences;        // history is read and written
  SamplingState sampling;         // adjusts is read; seen is written
  BlockTable tables[kMaxKvGroups];
  int32_t num_tables;
};
void fork_sequences(CpuContext&, const ForkSequencesParams&);
void fork_sequences(CudaContext&, const ForkSequencesParams&);

}  // namespace paceline
