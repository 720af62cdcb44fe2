// SPDX-License-Identifier: Apache-2.0
#pragma once

// The only source of random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as
// easy as 1, 2, 3", SC 2011). It is a pure function of its key and counter, so CPU and GPU draw the
// same bits, and a draw never depends on earlier draws.

#include <array>
#include <cstdint>

#include "base/host_device.h"

namespace paceline {

// Independent streams. Coupled and plain decoding use only kTarget. `standard` and `block`
// acceptance use the last three: for the drafts, for the verdict on a draft, and for the recovered
// token.
enum class NoiseStream : uint32_t {
  kTarget = 0,
  kSynthetic = 1,
  kDraft = 2,
  kAccept = 3,
  kResidual = 4
};

// Identifies a random number: the same key and index give the same bits.
struct NoiseKey {
  uint64_t seed;  // request seed + sample index
  NoiseStream stream;
  uint32_t position;  // absolute position of the token being drawn
  uint32_t salt;  // 0 for kTarget; otherwise the length of the sequence at the start of the window
                  // that verifies the token, so that each window draws anew
};

// The four numbers of `index` = token id / 4, written to plain memory: CUDA kernels call this,
// because std::array has no operators there.
PACELINE_HOST_DEVICE inline void philox_words(const NoiseKey& key, uint32_t index,
                                              uint32_t (&words)[4]) {
  uint32_t c0 = index;
  uint32_t c1 = key.position;
  uint32_t c2 = static_cast<uint32_t>(key.stream);
  uint32_t c3 = key.salt;
  uint32_t k0 = static_cast<uint32_t>(key.seed);
  uint32_t k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// Four 32-bit numbers, for `index` = token id / 4.
[[nodiscard]] inline std::array<uint32_t, 4> philox(const NoiseKey& key, uint32_t index) {
  uint32_t words[4];
  philox_words(key, index, words);
  return {words[0], words[1], words[2], words[3]};
}

// (0, 1), never 0 or 1: (bits + 0.5) * 2^-32, rounded to float below 1.
[[nodiscard]] PACELINE_HOST_DEVICE inline float uniform_open(uint32_t bits) {
  const float u = (static_cast<float>(bits) + 0.5f) * 0x1p-32f;
  return u < 1.0f ? u : 0x1.fffffep-1f;
}

}  // namespace paceline
