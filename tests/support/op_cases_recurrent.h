// SPDX-License-Identifier: Apache-2.0
#pragma once

// The op cases of recurrent layers.

#include <cstdint>
#include <vector>

#include <paceline/dtype.h>

#include "ops/recurrent.h"
#include "support/op_cases.h"

namespace paceline::testing {

struct RecurrentSpec {
  RecurrentShape shape = {};
  int32_t block_size = 16;           // tokens of a state
  DType dtype = DType::kBFloat16;    // of x and y
  DType records = DType::kBFloat16;  // of records
  int32_t x_padding = 8;
  int32_t extra_seqs = 2;        // max_seqs beyond the sequences there are
  int32_t max_rows_per_seq = 0;  // 0: that of the longest sequence
};
// The known tokens of a sequence, which earlier passes have left as records and entries. What later
// passes do not need of it is NaN. Sequences with the same content have the same inputs.
struct RecurrentSequence {
  int64_t content = 0;
  int32_t num_known = 0;
};
// Rows of a sequence in a pass, then inert ones.
struct RecurrentRows {
  int32_t sequence = 0;
  int32_t start = 0;
  int32_t num_rows = 0;
  int32_t num_inert = 0;
  int32_t num_rejected = 0;     // of the rows, the last ones: other inputs than the sequence has
  bool stores_nothing = false;  // records and entries go to the null block
  int32_t first_entry = 0;      // entries before this one go to the null block
};
// Passes one after the other, in one call of the case.
struct RecurrentBatch {
  std::vector<RecurrentSequence> sequences;
  std::vector<std::vector<RecurrentRows>> passes;
  int32_t extra_rows = 0;  // max_rows beyond the rows there are
  // max_seqs beyond the sequences there are, of the passes by turns; empty: RecurrentSpec's.
  std::vector<int32_t> extra_seqs = {};
};
// Rows of the same content and position, and entries of the same content, must have the same bits.
[[nodiscard]] OpInstance make_gated_delta(const RecurrentSpec& spec, const RecurrentBatch& batch,
                                          uint64_t seed);
[[nodiscard]] std::vector<OpCase> recurrent_op_cases();

}  // namespace paceline::testing
