// SPDX-License-Identifier: Apache-2.0
#include "base/sha256.h"

#include <cpuid.h>
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace paceline {
namespace {

constexpr std::array<uint32_t, 8> kStart = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                            0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
alignas(16) constexpr std::array<uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

bool has_instructions() {
  static const bool has = [] {
    uint32_t a = 0;
    uint32_t b = 0;
    uint32_t c = 0;
    uint32_t d = 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (b >> 29 & 1) == 0) return false;
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.1") != 0 && __builtin_cpu_supports("ssse3") != 0;
  }();
  return has;
}

void add_portably(std::array<uint32_t, 8>& state, const uint8_t* data, size_t num_blocks) {
  for (; num_blocks > 0; --num_blocks, data += 64) {
    uint32_t w[64];
    for (int t = 0; t < 16; ++t) {
      w[t] = uint32_t{data[4 * t]} << 24 | uint32_t{data[4 * t + 1]} << 16 |
             uint32_t{data[4 * t + 2]} << 8 | uint32_t{data[4 * t + 3]};
    }
    for (int t = 16; t < 64; ++t) {
      const uint32_t low = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
      const uint32_t high = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
      w[t] = w[t - 16] + low + w[t - 7] + high;
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (int t = 0; t < 64; ++t) {
      const uint32_t of_e = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const uint32_t of_a = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const uint32_t first = h + of_e + ((e & f) ^ (~e & g)) + kRounds[t] + w[t];
      const uint32_t second = of_a + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + first;
      d = c, c = b, b = a, a = first + second;
    }
    const std::array<uint32_t, 8> sums = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) state[i] += sums[i];
  }
}

// The instructions keep the state as (a, b, e, f) and (c, d, g, h), highest element first, and do
// two rounds each; four words of the message schedule are made at a time.
[[gnu::target("sha,sse4.1,ssse3")]] void add_by_instructions(std::array<uint32_t, 8>& state,
                                                             const uint8_t* data,
                                                             size_t num_blocks) {
  const __m128i big_endian = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
  auto* const words = reinterpret_cast<__m128i*>(state.data());
  const __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xB1);
  const __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1B);
  __m128i abef = _mm_alignr_epi8(badc, hgfe, 8);
  __m128i cdgh = _mm_blend_epi16(hgfe, badc, 0xF0);
  for (; num_blocks > 0; --num_blocks, data += 64) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; ++i) {
      const auto* const from = reinterpret_cast<const __m128i*>(data + 16 * i);
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128(from), big_endian);
    }
    for (int group = 0; group < 16; ++group) {
      __m128i& now = w[group & 3];
      const __m128i last = w[(group + 3) & 3];
      const auto* const constants = reinterpret_cast<const __m128i*>(kRounds.data() + 4 * group);
      const __m128i sum = _mm_add_epi32(now, _mm_load_si128(constants));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
      if (group >= 12) continue;
      const __m128i low = _mm_sha256msg1_epu32(now, w[(group + 1) & 3]);
      const __m128i seventh = _mm_alignr_epi8(last, w[(group + 2) & 3], 4);
      now = _mm_sha256msg2_epu32(_mm_add_epi32(low, seventh), last);
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
}

}  // namespace

Sha256::Sha256(bool uses_instructions)
    : state_(kStart), block_{}, uses_instructions_(uses_instructions && has_instructions()) {}

void Sha256::add_blocks(const uint8_t* data, size_t num_blocks) {
  if (uses_instructions_) {
    add_by_instructions(state_, data, num_blocks);
  } else {
    add_portably(state_, data, num_blocks);
  }
}

void Sha256::add(std::span<const std::byte> bytes) {
  const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
  size_t left = bytes.size();
  const size_t num_waiting = num_bytes_ % 64;
  num_bytes_ += left;
  if (num_waiting > 0) {
    const size_t count = std::min(left, 64 - num_waiting);
    std::copy_n(data, count, block_.begin() + static_cast<std::ptrdiff_t>(num_waiting));
    data += count;
    left -= count;
    if (num_waiting + count < 64) return;
    add_blocks(block_.data(), 1);
  }
  add_blocks(data, left / 64);
  std::copy_n(data + left / 64 * 64, left % 64, block_.begin());
}

Sha256::Digest Sha256::finish() {
  const uint64_t num_bits = num_bytes_ * 8;
  std::array<uint8_t, 72> end = {0x80};  // zeros up to 8 bytes before the end of a block
  const size_t num_zeros = (119 - num_bytes_ % 64) % 64;
  for (size_t i = 0; i < 8; ++i) {
    end[1 + num_zeros + i] = static_cast<uint8_t>(num_bits >> (56 - 8 * i));
  }
  add(std::as_bytes(std::span(end).first(num_zeros + 9)));
  Digest digest;
  for (size_t i = 0; i < 32; ++i) {
    digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  }
  state_ = kStart;
  num_bytes_ = 0;
  return digest;
}

std::string hex(const Sha256::Digest& digest) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : digest) {
    text += kHex[byte >> 4];
    text += kHex[byte & 15];
  }
  return text;
}

std::string sha256_hex(std::string_view text) {
  Sha256 sha256;
  sha256.add(text);
  return hex(sha256.finish());
}

}  // namespace paceline
