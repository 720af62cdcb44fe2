// SPDX-License-Identifier: Apache-2.0
#pragma once

// The op cases of DFlash2: the convolution over blocks, and drafts that are chosen from candidates.
// A row of a case is a sequence.

#include <cstdint>
#include <vector>

#include <paceline/dtype.h>

#include "support/op_cases.h"

namespace paceline::testing {

struct ConvolveSpec {
  int32_t hidden = 0;
  int32_t group = 0;
  int32_t num_taps = 0;
  int32_t rows_per_seq = 0;
  DType dtype = DType::kBFloat16;
};
[[nodiscard]] OpInstance make_convolve_blocks(const ConvolveSpec& spec, const Rows& rows,
                                              uint64_t seed);

struct CandidateSpec {
  int32_t count = 0;
  int32_t num_drafts = 0;
  int32_t rank = 0;                // of score_pairs
  DType dtype = DType::kBFloat16;  // of the codebooks
  bool has_ties = false;           // of a walk: scores are few integers
};
[[nodiscard]] OpInstance make_score_pairs(const CandidateSpec& spec, const Rows& rows,
                                          uint64_t seed);
// The walk, and on the same backend follow_candidates and `draw` for each draft, which must draw
// the same tokens.
[[nodiscard]] OpInstance make_walk(const CandidateSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] std::vector<RowWiseCase> candidate_row_wise_cases();

}  // namespace paceline::testing
