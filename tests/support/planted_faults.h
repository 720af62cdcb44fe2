// SPDX-License-Identifier: Apache-2.0
#pragma once

// The logits of a model whose recorded programs a test has changed on purpose, and how far they are
// from the reference.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "device/program.h"
#include "runner/cpu_runner.h"
#include "support/direct_runner.h"
#include "support/invariance.h"
#include "support/reference_model.h"

namespace paceline::testing {

// The positions that planted_logits prefills; it returns those after them.
inline constexpr int32_t kPlantPrefilled = 20;

// The logits of `tokens` from position kPlantPrefilled on, from recorded programs that `plant`
// has changed.
inline std::vector<std::vector<float>> planted_logits(const std::shared_ptr<const Model>& model,
                                                      const std::vector<int32_t>& tokens,
                                                      const std::function<void(Program&)>& plant) {
  const Trace trace = by_windows(model, tokens, kPlantPrefilled, 4, {}, [&](DirectRunner& direct) {
    for (Program* const program : dynamic_cast<CpuRunner&>(direct.runner()).programs()) {
      plant(*program);
    }
  });
  return {trace.logits.begin() + kPlantPrefilled, trace.logits.end()};
}

// The largest difference from the reference, relative to the logits' RMS.
inline double relative_error(const std::vector<std::vector<float>>& logits,
                             const reference::Rows& expected) {
  double largest = 0;
  double squares = 0;
  int64_t count = 0;
  for (size_t position = 0; position < expected.size(); ++position) {
    for (size_t i = 0; i < expected[position].size(); ++i, ++count) {
      const double want = expected[position][i];
      largest = std::max(largest, std::fabs(double{logits[position][i]} - want));
      squares += want * want;
    }
  }
  return largest / std::sqrt(squares / static_cast<double>(count));
}

}  // namespace paceline::testing
