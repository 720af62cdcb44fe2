// SPDX-License-Identifier: Apache-2.0
#pragma once

// The largest sizes that host and device agree on. Arrays in wire structs have these extents. The
// engine refuses requests and options that exceed them, with an error that names the argument.

#include <cstdint>

namespace paceline {

inline constexpr int32_t kMaxDraftTokens = 16;      // k
inline constexpr int32_t kMaxDraftProposals = 256;  // tokens that a draft is drawn from
inline constexpr int32_t kMaxKvGroups = 16;         // of target and drafter together
inline constexpr int32_t kMaxStopIds = 8;           // stop token ids of a request, EOS included
inline constexpr int32_t kMaxLogitBias = 1024;      // entries of logit_bias of a request
inline constexpr int32_t kMaxBadWords = 128;        // bad words of a request
inline constexpr int32_t kMaxBadWordTokens = 1024;  // tokens of all bad words of a request
inline constexpr int32_t kMaxLogprobs = 64;         // most probable tokens returned at a position
inline constexpr int32_t kMaxSamples = 128;         // samples of a request
inline constexpr int32_t kMaxCacheSaltBytes = 512;  // of the cache_salt of a request
// Draws are uniform long before this temperature. logit + temperature * g, with g up to 23, stays
// far from the largest float32.
inline constexpr double kMaxTemperature = 1e6;
// The softmax weights of this many tokens add up in 63 bits.
inline constexpr int32_t kMaxTruncatedVocab = 1 << 23;

}  // namespace paceline
