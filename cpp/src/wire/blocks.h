// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the host names KV blocks to the device: block ids, new entries of block tables, and the
// copies that a fork needs.

#include <cstdint>

namespace paceline {

using BlockId = int32_t;  // id 0 is the null block of every group: padding writes there
using GroupId = int32_t;  // index into KvLayout::groups

inline constexpr BlockId kNullBlock = 0;

// One changed entry of a sequence's block table, which the device applies.
struct TableWrite {
  int32_t seq_slot;  // row of the block tables
  GroupId group;
  int32_t index;  // logical block: position / block_size
  BlockId block;
};

// A whole block of the group, which an iteration copies within the pool before its first row runs.
struct BlockCopy {
  GroupId group;
  BlockId source;
  BlockId destination;
};

// A planned sequence that starts from the first positions of another one. The device copies history
// and block tables from one sequence slot to the other, and the blocks that are shared in part.
//
// Or one that takes over a prefix from the prefix cache: the host sends its history, and the table
// entries are among the iteration's TableWrites.
struct SequenceFork {
  int32_t parent_seq_slot;  // -1: none, the prefix comes from the cache
  int32_t seq_slot;
  int32_t num_tokens;       // positions [0, num_tokens); the fork's first row is at num_tokens
  int32_t first_token = 0;  // without a parent: index of the history in adopted_tokens
};

}  // namespace paceline
