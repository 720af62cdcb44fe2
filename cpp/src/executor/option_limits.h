// SPDX-License-Identifier: Apache-2.0
#pragma once

// The largest values of options; those that the device knows too are in wire/limits.h.

#include <cstdint>

namespace paceline {

inline constexpr int32_t kMaxNumSeqs = 1024;
inline constexpr int32_t kMaxNumThreads = 1024;

// Rows of an iteration: grids with a block for each 16 of them stay far inside a launch's limits,
// the drafter's further rows included.
inline constexpr int32_t kMaxBatchedTokens = 1 << 19;

// Tokens that prompt lookup compares: more would seldom match and never help.
inline constexpr int32_t kMaxNgram = 256;

}  // namespace paceline
