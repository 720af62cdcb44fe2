// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a fork copies: the single specification that the CPU loops over and CUDA threads run. Worker
// `worker` of `num_workers` handles every num_workers-th element. No worker reads what another one
// writes.

#include <cstdint>

#include "base/host_device.h"
#include "ops/fork.h"
#include "wire/blocks.h"
#include "wire/sequence_state.h"

namespace paceline {

// `mark(word, bits)` sets bits of a word of `seen`. Several workers may set bits of the same word
// at the same time.
template <class Mark>
PACELINE_HOST_DEVICE inline void fork_sequence(const ForkSequencesParams& p, int32_t i,
                                               int32_t worker, int32_t num_workers,
                                               const Mark& mark) {
  const SequenceFork fork = p.forks[i];
  const SequenceState& s = p.sequences;
  const bool has_parent = fork.parent_seq_slot >= 0;
  const int32_t* from = has_parent ? s.history + fork.parent_seq_slot * s.history_stride
                                   : p.adopted_tokens + fork.first_token;
  int32_t* to = s.history + fork.seq_slot * s.history_stride;
  const bool is_counted = p.sampling.adjusts[fork.seq_slot] != 0;
  uint32_t* seen = p.sampling.seen + int64_t{fork.seq_slot} * mask_words(p.sampling.vocab_size);
  for (int32_t position = worker; position < fork.num_tokens; position += num_workers) {
    const int32_t token = from[position];
    to[position] = token;
    if (is_counted && token < p.sampling.vocab_size) {
      mark(seen + token / 32, uint32_t{1} << token % 32);
    }
  }
  for (int32_t g = 0; has_parent && g < p.num_tables; ++g) {
    const BlockTable& table = p.tables[g];
    const int32_t* parent = table.blocks + fork.parent_seq_slot * table.stride;
    int32_t* child = table.blocks + fork.seq_slot * table.stride;
    const int32_t num_whole = fork.num_tokens / table.tokens_per_entry / table.block_size;
    for (int32_t block = worker; block < num_whole; block += num_workers) {
      child[block] = parent[block];
    }
  }
}

}  // namespace paceline
