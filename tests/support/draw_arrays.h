// SPDX-License-Identifier: Apache-2.0
#pragma once

// The arrays of a draw and the judgement of what was drawn, for the cases of ops that draw.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "support/op_cases.h"

namespace paceline::testing {

struct DrawArrays {
  DrawSpec spec;
  Rows rows;
  uint64_t seed = 0;
  Handle num_rows = kNoArray;
  Handle row_index = kNoArray;
  Handle seq_slot = kNoArray;
  Handle positions = kNoArray;
  Handle seeds = kNoArray;
  Handle temperatures = kNoArray;
  Handle token_map = kNoArray;
  Handle salts = kNoArray;
  Handle logit_rows = kNoArray;  // with has_own_noise
  Handle steps_ahead = kNoArray;
  Handle tokens = kNoArray;
  Handle probabilities = kNoArray;

  [[nodiscard]] int64_t stride() const { return spec.vocab_limit + spec.padding; }
  [[nodiscard]] DrawParams params(const Addresses& at, const float* logits) const;
};

[[nodiscard]] DrawArrays add_draw(OpInstance& op, const DrawSpec& spec, const Rows& rows,
                                  uint64_t seed);
// The logits of rows of this spec, by identity.
void fill_draw_logits(const DrawSpec& spec, int64_t id, uint64_t seed, float* to);

// The first error in what CUDA drew, or an empty string. `logits_of(i, to)` writes the logits,
// `stride` of them, that row i drew from; those of the two backends are equal if `are_exact`, and
// nearly equal otherwise.
[[nodiscard]] std::string judge_draws(const DrawArrays& draws,
                                      const std::function<void(size_t row, float* to)>& logits_of,
                                      bool are_exact, const ArrayBytes& cpu, const ArrayBytes& cuda,
                                      int64_t* num_different);

}  // namespace paceline::testing
