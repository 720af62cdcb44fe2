// SPDX-License-Identifier: Apache-2.0
#pragma once

// KV blocks as the host names them to the device: their ids, new entries of block tables, and what
// a fork takes over.

#include <cstdint>

namespace paceline {

using BlockId = int32_t;  // id 0 is the null block of every group: padding writes there
using GroupId = int32_t;  // index into KvLayout::groups

inline constexpr BlockId kNullBlock = 0;

// One changed entry of a sequence's block table, to be applied on the device.
struct TableWrite {
  int32_t seq_slot;  // row of the block tables
  GroupId group;
  int32_t index;  // logical block: position / block_size
  BlockId block;
};

// Bytes that an iteration copies within the pool before its first row: a whole block of the group.
struct BlockCopy {
  GroupId group;
  BlockId source;
  BlockId destination;
};

// A sequence of the plan that takes over the first positions of another one: the device copies
// history and block tables from slot to slot, and the blocks that are shared in part.
struct SequenceFork {
  int32_t parent_seq_slot;
  int32_t seq_slot;
  int32_t num_tokens;  // positions [0, num_tokens); the fork's first row is at num_tokens
};

}  // namespace paceline
