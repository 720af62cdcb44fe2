// SPDX-License-Identifier: Apache-2.0
#pragma once

// What makes the drafts of a verify window: a model or, in front of it, prompt lookup.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/host_device.h"

namespace paceline {

enum class DraftSource : int32_t {
  kModel = 0,   // or the caller's drafter
  kLookup = 1,  // prompt lookup
};
inline constexpr int32_t kNumDraftSources = 2;

// The sources that may draft for a sequence, as bits.
[[nodiscard]] PACELINE_HOST_DEVICE constexpr int32_t source_bit(DraftSource source) {
  return 1 << static_cast<int32_t>(source);
}
inline constexpr int32_t kAllSources = (1 << kNumDraftSources) - 1;

// The method of each source under its name in Python; "": there is no such source.
using SourceMethods = std::array<std::string_view, kNumDraftSources>;

// The sources with this method, as bits.
[[nodiscard]] constexpr int32_t sources_of(std::string_view method, const SourceMethods& methods) {
  int32_t sources = 0;
  for (size_t i = 0; i < methods.size(); ++i) sources |= methods[i] == method ? 1 << i : 0;
  return sources;
}

}  // namespace paceline
