// SPDX-License-Identifier: Apache-2.0
#include "sample/synthetic_rates.h"

#include <algorithm>
#include <cstddef>

namespace paceline {
namespace {

// Tokens of a window with k drafts, each of which is accepted with this probability.
double emitted_tokens(double rate, int32_t k) {
  double sum = 1;
  double product = 1;
  for (int32_t i = 0; i < k; ++i) sum += product *= rate;
  return sum;
}

double even_rate(double length, int32_t k) {
  double low = 0;
  double high = 1;
  for (int32_t i = 0; i < 50; ++i) {
    const double middle = (low + high) / 2;
    (emitted_tokens(middle, k) < length ? low : high) = middle;
  }
  return high;
}

}  // namespace

std::array<float, kMaxDraftTokens> synthetic_rates(double length, int32_t k, bool is_even) {
  std::array<float, kMaxDraftTokens> rates{};
  const double even = is_even ? even_rate(length, k) : 0;
  for (int32_t i = 0; i < k; ++i) {
    rates[static_cast<size_t>(i)] =
        static_cast<float>(is_even ? even : std::clamp(length - 1 - i, 0.0, 1.0));
  }
  return rates;
}

}  // namespace paceline
