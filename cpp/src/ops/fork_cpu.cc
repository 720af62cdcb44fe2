// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstring>

#include "device/cpu_context.h"
#include "ops/fork.h"
#include "ops/fork_rules.h"
#include "wire/blocks.h"

namespace paceline {

void copy_blocks(CpuContext&, const CopyBlocksParams& p) {
  for (int32_t i = 0; i < std::min(*p.num_copies, p.max_copies); ++i) {
    const BlockCopy& copy = p.copies[i];
    const int64_t bytes = p.block_bytes[copy.group];
    std::memcpy(p.pool + copy.destination * bytes, p.pool + copy.source * bytes,
                static_cast<size_t>(bytes));
  }
}

void fork_sequences(CpuContext&, const ForkSequencesParams& p) {
  for (int32_t i = 0; i < std::min(*p.num_forks, p.max_forks); ++i) {
    fork_sequence(p, i, /*worker=*/0, /*num_workers=*/1,
                  [](uint32_t* word, uint32_t bits) { *word |= bits; });
  }
}

}  // namespace paceline
