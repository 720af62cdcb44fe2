// SPDX-License-Identifier: Apache-2.0
#pragma once

// Whether counts follow a distribution: Pearson's test with the likelihood ratio (a G-test).

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace paceline::testing {

// P(chi-square of `freedom` degrees > x): the upper incomplete gamma function, by its series or its
// continued fraction.
inline double chi_square_tail(double x, double freedom) {
  const double a = freedom / 2;
  const double z = x / 2;
  if (z <= 0) return 1.0;
  const double scale = std::exp(a * std::log(z) - z - std::lgamma(a));
  if (z < a + 1) {
    double term = 1 / a;
    double sum = term;
    for (double k = a + 1; std::fabs(term) > 1e-16 * sum; ++k) sum += term *= z / k;
    return 1.0 - scale * sum;
  }
  constexpr double kTiny = 1e-300;
  double b = z + 1 - a;
  double c = 1 / kTiny;
  double d = 1 / b;
  double fraction = d;
  for (int i = 1; i < 10000; ++i) {
    const double numerator = -i * (i - a);
    b += 2;
    d = numerator * d + b;
    c = b + numerator / c;
    d = 1 / (std::fabs(d) < kTiny ? kTiny : d);
    c = std::fabs(c) < kTiny ? kTiny : c;
    fraction *= d * c;
    if (std::fabs(d * c - 1) < 1e-15) break;
  }
  return scale * fraction;
}

// The p-value of the counts under `distribution`. A cell that the distribution excludes must be
// empty; cells with an expectation below ten are merged.
inline double g_test(const std::vector<int64_t>& counts, const std::vector<double>& distribution) {
  const double total =
      static_cast<double>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  double g = 0;
  double freedom = -1;
  double rare_expected = 0;
  double rare_count = 0;
  const auto add = [&](double count, double expected) {
    if (count > 0) g += 2 * count * std::log(count / expected);
    ++freedom;
  };
  for (size_t i = 0; i < counts.size(); ++i) {
    const double expected = total * distribution[i];
    const auto count = static_cast<double>(counts[i]);
    if (expected == 0 && count > 0) return 0.0;
    if (expected >= 10) {
      add(count, expected);
    } else {
      rare_expected += expected;
      rare_count += count;
    }
  }
  if (rare_expected >= 10) {
    add(rare_count, rare_expected);
  } else if (rare_count > rare_expected + 60) {
    return 0.0;
  }
  return freedom < 1 ? 1.0 : chi_square_tail(std::max(g, 0.0), freedom);
}

}  // namespace paceline::testing
