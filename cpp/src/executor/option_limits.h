// SPDX-License-Identifier: Apache-2.0
#pragma once

// The largest values of options. wire/limits.h has those that the device knows too.

#include <cstdint>

namespace paceline {

inline constexpr int32_t kMaxNumSeqs = 1024;
inline constexpr int32_t kMaxNumThreads = 1024;

// Rows of an iteration. Grids with a block for each 16 rows stay far below the limits of a launch,
// even with the additional rows of the drafter.
inline constexpr int32_t kMaxBatchedTokens = 1 << 19;

// A day, between two lines of figures in the log.
inline constexpr double kMaxLogIntervalS = 86'400;
inline constexpr double kMaxHangTimeoutS = 86'400;

// Tokens that prompt lookup compares. A longer n-gram would seldom match and never help.
inline constexpr int32_t kMaxNgram = 256;

}  // namespace paceline
