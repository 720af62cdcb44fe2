// SPDX-License-Identifier: Apache-2.0
#pragma once

// How truncate_logits computes softmax weights and compares logits: the single specification that
// both backends share, bit for bit. All excluded logits lie below one threshold, which is searched
// digit by digit on the logits as ordered integers. A product that is added to something is written
// as fmaf, so that the rounding does not depend on the compiler.

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "base/ordered.h"
#include "sample/logits.h"

namespace paceline {

// The digits of a key, highest first: 11, 11 and 10 bits.
inline constexpr int32_t kNumDigits = 3;
inline constexpr int32_t kMaxDigitValues = 1 << 11;
[[nodiscard]] PACELINE_HOST_DEVICE constexpr int32_t digit_shift(int32_t digit) {
  return digit == 0 ? 21 : digit == 1 ? 10 : 0;
}
[[nodiscard]] PACELINE_HOST_DEVICE constexpr int32_t digit_values(int32_t digit) {
  return digit == 2 ? 1 << 10 : 1 << 11;
}
[[nodiscard]] PACELINE_HOST_DEVICE inline int32_t digit_of(uint32_t key, int32_t digit) {
  return static_cast<int32_t>(key >> digit_shift(digit)) & (digit_values(digit) - 1);
}
// The bits of all digits before this one.
[[nodiscard]] PACELINE_HOST_DEVICE constexpr uint32_t bits_before(int32_t digit) {
  return digit == 0 ? 0u : ~0u << digit_shift(digit - 1);
}

// to_ordered(-inf). Such keys have weight 0, and skipping them is faster than counting them: there
// may be many where tokens are banned.
inline constexpr uint32_t kNoLogitKey = 0x007fffffu;

// The truncation parameters of a row; the temperature is 0 if nothing is to be done.
struct RowLimits {
  float temperature;
  int32_t top_k;
  float top_p;
  float min_p;
};

[[nodiscard]] PACELINE_HOST_DEVICE inline RowLimits row_limits(const TruncateLogitsParams& p,
                                                               int32_t row) {
  const int32_t seq_slot = p.seq_slot[p.row_index[row]];
  if (seq_slot < 0 || p.sampling.truncates[seq_slot] == 0) return {0.0f, 0, 1.0f, 0.0f};
  return {p.temperatures[seq_slot], p.sampling.top_k[seq_slot], p.sampling.top_p[seq_slot],
          p.sampling.min_p[seq_slot]};
}

// exp((logit - highest) / temperature) in units of 2^-40, rounded down: at most 2^40, so that the
// sum of kMaxTruncatedVocab weights fits 63 bits.
struct SoftmaxWeights {
  float highest;
  float lowest_step;  // logits this far or further below `highest` have weight 0
  float rate;         // log2(e) / temperature
};

[[nodiscard]] PACELINE_HOST_DEVICE inline SoftmaxWeights softmax_weights_of(float highest,
                                                                            float temperature) {
  // Beyond these limits all logits have the same weight, or only the highest has any.
  constexpr float kLeast = 1e-30f;
  constexpr float kMost = 1e30f;
  temperature = temperature < kLeast ? kLeast : temperature > kMost ? kMost : temperature;
  return {highest, -28.5f * temperature, 1.44269504f / temperature};  // 41 log 2 = 28.4
}

[[nodiscard]] PACELINE_HOST_DEVICE inline uint64_t weight_of(const SoftmaxWeights& weights,
                                                             float logit) {
  const float distance = logit - weights.highest;
  const float step = distance < weights.lowest_step ? weights.lowest_step : distance;
  // 2^(n + f), with n an integer and f in [-1/2, 1/2]: adding kRound rounds to an integer, which is
  // then in the low bits of the mantissa. The polynomial is that of Cephes' exp2f (S. Moshier).
  constexpr float kRound = 0x1.8p23f;
  const float shifted = fmaf(step, weights.rate, kRound);
  const float n = shifted - kRound;
  const float f = fmaf(step, weights.rate, -n);
  float power = fmaf(f, 1.535336188319500e-4f, 1.339887440266574e-3f);
  power = fmaf(f, power, 9.618437357674640e-3f);
  power = fmaf(f, power, 5.550332471162809e-2f);
  power = fmaf(f, power, 2.402264791363012e-1f);
  power = fmaf(f, power, 6.931472028550421e-1f);
  power = fmaf(f, power, 1.0f);
  const uint32_t bits = bits_of(power) + ((bits_of(shifted) - bits_of(kRound)) << 23);
  // The power is 1.mantissa * 2^-halvings; the 24 bits of the mantissa represent 1 as 2^23.
  const uint32_t halvings = 127 - (bits >> 23);
  const uint64_t mantissa = (bits & 0x7fffffu) | 0x800000u;
  return mantissa << 17 >> halvings;
}

// The weight that the logits kept by top-p must reach, out of `total` > 0.
[[nodiscard]] PACELINE_HOST_DEVICE inline uint64_t top_p_target(float top_p, uint64_t total) {
  const double share = ceil(static_cast<double>(top_p) * static_cast<double>(total));
  const auto target = static_cast<uint64_t>(share);
  return target < 1 ? 1 : target > total ? total : target;
}

// The lowest key that min-p > 0 keeps.
[[nodiscard]] PACELINE_HOST_DEVICE inline uint32_t min_p_key(float highest, float temperature,
                                                             float min_p) {
  const double lowest = fma(static_cast<double>(temperature), log(static_cast<double>(min_p)),
                            static_cast<double>(highest));
  const float rounded = static_cast<float>(lowest);
  uint32_t key = to_ordered(rounded + 0.0f);
  if (static_cast<double>(rounded) < lowest) ++key;
  const uint32_t highest_key = to_ordered(highest);
  return key < highest_key ? key : highest_key;
}

}  // namespace paceline
