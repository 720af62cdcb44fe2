// SPDX-License-Identifier: Apache-2.0
#pragma once

// The op cases of a block drafter's heads.

#include <cstdint>
#include <vector>

#include <paceline/dtype.h>

#include "support/op_cases.h"

namespace paceline::testing {

struct MarkovSpec {
  int32_t hidden = 0;
  int32_t rank = 0;
  DType dtype = DType::kBFloat16;
  bool has_state = false;  // of join_parts: three parts; of advance_markov: no first draft
  bool has_bias = true;    // of estimate_acceptance
};

[[nodiscard]] OpInstance make_join_parts(const MarkovSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_gate_embeddings(const MarkovSpec& spec, const Rows& rows,
                                              uint64_t seed);
[[nodiscard]] OpInstance make_advance_markov(const MarkovSpec& spec, const Rows& rows,
                                             uint64_t seed);
[[nodiscard]] OpInstance make_estimate_acceptance(const MarkovSpec& spec, const Rows& rows,
                                                  uint64_t seed);

// A draft of a Markov chain: the fused op, and on a copy of the logits the product without the draw
// and then `draw`, which must give the same tokens on the same backend.
struct ChainSpec {
  int32_t rank = 0;
  DType dtype = DType::kBFloat16;
  bool has_factors = false;  // given; otherwise rows of W1, for some tokens that W1 does not have
  DrawSpec draw = {};        // without probabilities
  bool is_alone = false;     // only the fused op, to be timed; its tokens are compared with nothing
};
[[nodiscard]] OpInstance make_chain(const ChainSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] std::vector<RowWiseCase> markov_row_wise_cases();

}  // namespace paceline::testing
