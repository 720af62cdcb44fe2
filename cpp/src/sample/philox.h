// SPDX-License-Identifier: Apache-2.0
#pragma once

// The one source of random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", SC 2011), a pure function of its key and counter, so CPU and GPU draw the same bits
// and a draw never depends on what was drawn before.

#include <array>
#include <cstdint>

namespace paceline {

// Independent streams. Coupled and plain decoding use kTarget only.
enum class NoiseStream : uint32_t { kTarget = 0, kSynthetic = 1 };

// Where a number belongs: same identity, same bits.
struct NoiseKey {
  uint64_t seed;       // request seed + sample index
  NoiseStream stream;
  uint32_t position;   // absolute position of the token being drawn
  uint32_t salt;       // 0 for kTarget
};

// Four 32-bit numbers, for `index` = token id / 4.
[[nodiscard]] inline std::array<uint32_t, 4> philox(const NoiseKey& key, uint32_t index) {
  std::array<uint32_t, 4> counter = {index, key.position, static_cast<uint32_t>(key.stream),
                                     key.salt};
  uint32_t k0 = static_cast<uint32_t>(key.seed);
  uint32_t k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ k0, static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ k1, static_cast<uint32_t>(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

// (0, 1), never 0 or 1: (bits + 0.5) * 2^-32, rounded to float below 1.
[[nodiscard]] inline float uniform_open(uint32_t bits) {
  const float u = (static_cast<float>(bits) + 0.5f) * 0x1p-32f;
  return u < 1.0f ? u : 0x1.fffffep-1f;
}

}  // namespace paceline
