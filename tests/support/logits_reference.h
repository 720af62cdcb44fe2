// SPDX-License-Identifier: Apache-2.0
#pragma once

// The logits pipeline of one row in double precision, written from the documented rules and not
// from the ops.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "support/sampling_arrays.h"

namespace paceline::testing {

inline constexpr double kImpossible = -std::numeric_limits<double>::infinity();

// The logits of the token that follows `tokens`, prompt and output.
inline std::vector<double> reference_adjusted(const Sampling& s, const std::vector<int32_t>& tokens,
                                              const std::vector<float>& logits) {
  std::vector<double> x(logits.begin(), logits.end());
  const auto ban = [&](int32_t id) {
    if (id >= 0 && static_cast<size_t>(id) < x.size()) x[static_cast<size_t>(id)] = kImpossible;
  };
  for (const auto& [id, value] : s.bias) x.at(static_cast<size_t>(id)) += double{value};
  for (size_t id = 0; id < x.size(); ++id) {
    const auto token = static_cast<int32_t>(id);
    const int64_t times = std::count(tokens.begin(), tokens.end(), token);
    const int64_t in_output = std::count(tokens.begin() + s.prompt_len, tokens.end(), token);
    if (times > 0) x[id] = x[id] > 0 ? x[id] / s.repetition_penalty : x[id] * s.repetition_penalty;
    x[id] -= double{s.frequency_penalty} * static_cast<double>(in_output);
    if (in_output > 0) x[id] -= double{s.presence_penalty};
  }
  for (const std::vector<int32_t>& word : s.bad_words) {
    const size_t before = word.size() - 1;
    if (before > tokens.size()) continue;
    if (std::equal(word.begin(), word.end() - 1, tokens.end() - static_cast<int64_t>(before))) {
      ban(word.back());
    }
  }
  if (!s.allowed.empty()) {
    for (int32_t id = 0; id < static_cast<int32_t>(x.size()); ++id) {
      if (std::find(s.allowed.begin(), s.allowed.end(), id) == s.allowed.end()) ban(id);
    }
  }
  if (static_cast<int32_t>(tokens.size()) - s.prompt_len < s.min_tokens) {
    for (const int32_t id : s.stop_ids) ban(id);
  }
  return x;
}

struct ReferenceKept {
  std::vector<bool> is_kept;
  std::vector<bool> is_close;  // to the threshold: rounding may decide
};

// The tokens that top-k, top-p and min-p keep of a row that has a finite highest logit.
template <class T>
ReferenceKept reference_kept(const Sampling& s, const std::vector<T>& logits) {
  constexpr double kClose = 1e-6;
  std::vector<double> x(logits.begin(), logits.end());
  for (double& value : x) value = std::isnan(value) ? kImpossible : value;
  std::vector<size_t> order(x.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return x[a] > x[b]; });
  const double highest = x[order[0]];
  const auto weight = [&](size_t id) { return std::exp((x[id] - highest) / s.temperature); };

  ReferenceKept result{std::vector<bool>(x.size(), false), std::vector<bool>(x.size(), false)};
  size_t num_kept = x.size();
  while (num_kept > 0 && x[order[num_kept - 1]] == kImpossible) --num_kept;
  const auto with_ties = [&](size_t count) {
    while (count < num_kept && x[order[count]] == x[order[count - 1]]) ++count;
    return count;
  };
  if (s.top_k > 0 && static_cast<size_t>(s.top_k) < num_kept) {
    num_kept = with_ties(static_cast<size_t>(s.top_k));
  }
  if (s.top_p < 1.0f) {
    double total = 0;
    for (size_t i = 0; i < num_kept; ++i) total += weight(order[i]);
    size_t count = 0;
    double sum = 0;
    while (count < num_kept && sum < s.top_p * total) {
      if (std::fabs(sum / total - s.top_p) < kClose) result.is_close[order[count]] = true;
      sum += weight(order[count++]);
      if (std::fabs(sum / total - s.top_p) < kClose && count < num_kept) {
        result.is_close[order[count]] = true;
      }
    }
    num_kept = with_ties(std::max<size_t>(count, 1));
  }
  for (size_t i = 0; i < num_kept; ++i) {
    const double w = weight(order[i]);
    result.is_kept[order[i]] = w >= s.min_p;
    if (std::fabs(w - s.min_p) < kClose * s.min_p && w < 1) result.is_close[order[i]] = true;
  }
  // Equal logits are kept or cut together.
  for (size_t i = 1; i < x.size(); ++i) {
    if (x[order[i]] == x[order[i - 1]] && result.is_close[order[i - 1]]) {
      result.is_close[order[i]] = true;
    }
  }
  return result;
}

// The distribution of the draw: the softmax of the kept logits.
template <class T>
std::vector<double> reference_distribution(const Sampling& s, const std::vector<T>& logits) {
  const ReferenceKept kept = reference_kept(s, logits);
  double highest = kImpossible;
  for (size_t id = 0; id < logits.size(); ++id) {
    if (kept.is_kept[id]) highest = std::max(highest, static_cast<double>(logits[id]));
  }
  std::vector<double> distribution(logits.size(), 0.0);
  double sum = 0;
  for (size_t id = 0; id < logits.size(); ++id) {
    if (kept.is_kept[id]) distribution[id] = std::exp((logits[id] - highest) / s.temperature);
    sum += distribution[id];
  }
  for (double& p : distribution) p /= sum;
  return distribution;
}

}  // namespace paceline::testing
