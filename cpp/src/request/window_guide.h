// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the host adds to the verify windows of a guided sequence: drafts, masks or both.

#include <cstdint>
#include <memory>
#include <vector>

#include <paceline/guide.h>

namespace paceline {

// Makes the windows of one sample. Used on the threads of the WindowMaker only.
struct WindowGuide {
  std::shared_ptr<TokenConstraint> constraint;  // null: all tokens are allowed
  std::shared_ptr<HostDrafter> drafter;         // null: the device drafts
  std::vector<int32_t> tokens;                  // with a drafter: prompt and output so far
};

// The next verify window of a guided sequence.
struct GuidedWindow {
  int32_t num_tokens = -1;      // the known length that it is for; -1: there is none
  std::vector<int32_t> drafts;  // [at most k]
  std::vector<uint32_t> masks;  // [drafts + 1, mask words]; empty without a constraint
};

}  // namespace paceline
