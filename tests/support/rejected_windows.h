// SPDX-License-Identifier: Apache-2.0
#pragma once

// A sequence computed in verify windows of which drafts are rejected, for comparisons of bits.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "device/program.h"
#include "runner/cpu_runner.h"
#include "support/invariance.h"

namespace paceline::testing {

// Verify windows of width k + 1 from position `first` on. Of a window's drafts the first
// `num_right(base)` are the true tokens and the others are wrong; the next window then begins after
// the right ones, as after a rejection. `before_window(base)` runs before each.
struct Windows {
  int32_t first;
  int32_t k;
  std::function<int32_t(int32_t)> num_right;
  std::function<void(Program&)> plant = [](Program&) {};
  std::function<void(int32_t)> before_window = [](int32_t) {};
};

inline Trace by_rejected_windows(const std::shared_ptr<const Model>& model,
                                 const std::vector<int32_t>& tokens, const Windows& windows,
                                 DirectOptions options) {
  options.num_draft_tokens = windows.k;
  DirectRunner direct(model, nullptr, options);
  for (Program* const program : dynamic_cast<CpuRunner&>(direct.runner()).programs()) {
    windows.plant(*program);
  }
  const auto length = static_cast<int32_t>(tokens.size());
  direct.start(0, {tokens.begin(), tokens.begin() + windows.first}, length + windows.k + 1);
  Trace trace;
  direct.plan(0, RowKind::kScore, 0, windows.first);
  direct.run();
  for (auto& row : direct.logits_of(0)) trace.logits.push_back(std::move(row));
  for (int32_t base = windows.first; base < length;) {
    const int32_t num_right = std::min(windows.num_right(base), length - base - 1);
    std::vector<int32_t> drafts;
    for (int32_t i = 0; i < windows.k; ++i) {
      drafts.push_back(i < num_right ? tokens[static_cast<size_t>(base + 1 + i)]
                                     : (base + 7 * i) % 64);
    }
    direct.set_known(0, {tokens.begin(), tokens.begin() + base + 1}, drafts);
    direct.plan(0, RowKind::kDecode, 0, windows.k + 1);
    windows.before_window(base);
    direct.run();
    const auto rows = direct.logits_of(0);
    for (int32_t r = 0; r <= num_right; ++r) trace.logits.push_back(rows[static_cast<size_t>(r)]);
    base += num_right + 1;
  }
  collect_kv(direct, direct.layout(), length, trace);
  return trace;
}

}  // namespace paceline::testing
