// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "sample/logits.h"
#include "sample/truncate_rules.h"
#include "wire/limits.h"

namespace paceline {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Number of ids whose keys and amounts are computed together, in vectors.
constexpr int32_t kStretch = 64;

// The highest key such that the keys from it on, among those that are at least `floor`, have
// amounts that sum to at least `target_of(sum of all)`; `floor` if all of them sum to less.
// `measure` gives the amount of a logit, an integer.
template <class Measure, class Target>
[[gnu::always_inline]] inline uint32_t search(const float* logits, int32_t n, uint32_t floor,
                                              const Measure& measure, const Target& target_of) {
  uint64_t sums[kMaxDigitValues];
  uint32_t prefix = 0;
  uint64_t target = 0;
  uint64_t above = 0;  // sum of the amounts of keys above those with the prefix
  for (int32_t digit = 0; digit < kNumDigits; ++digit) {
    const uint32_t before = bits_before(digit);
    std::fill_n(sums, digit_values(digit), uint64_t{0});
    for (int32_t first = 0; first < n; first += kStretch) {
      const int32_t count = std::min(kStretch, n - first);
      uint32_t keys[kStretch];
      uint32_t is_counted[kStretch];
      uint32_t is_any_counted = 0;
      for (int32_t i = 0; i < count; ++i) {
        keys[i] = to_ordered(comparable(logits[first + i]));
        is_counted[i] = static_cast<uint32_t>(keys[i] > kNoLogitKey) &
                        static_cast<uint32_t>(keys[i] >= floor) &
                        static_cast<uint32_t>(((keys[i] ^ prefix) & before) == 0);
        is_any_counted |= is_counted[i];
      }
      if (is_any_counted == 0) continue;
      uint64_t amounts[kStretch];
      for (int32_t i = 0; i < count; ++i) {
        amounts[i] = is_counted[i] * measure(from_ordered(keys[i]));
      }
      for (int32_t i = 0; i < count; ++i) sums[digit_of(keys[i], digit)] += amounts[i];
    }
    if (digit == 0) {
      uint64_t total = 0;
      for (const uint64_t sum : sums) total += sum;
      target = target_of(total);
      if (total < target) return floor;
    }
    int32_t value = digit_values(digit) - 1;
    while (above + sums[value] < target) above += sums[value--];
    prefix |= static_cast<uint32_t>(value) << digit_shift(digit);
  }
  return prefix;
}

struct TruncateKernel {
  [[gnu::always_inline]] static void run(const RowLimits* limits, float* logits, int32_t n) {
    float highest = -kInf;
    for (int32_t id = 0; id < n; ++id) highest = std::max(highest, comparable(logits[id]));
    if (highest == -kInf || highest == kInf) return;
    uint32_t threshold_key = 0;
    if (limits->top_k > 0 && limits->top_k < n) {
      threshold_key = search(
          logits, n, threshold_key, [](float) { return uint64_t{1}; },
          [&](uint64_t) { return static_cast<uint64_t>(limits->top_k); });
    }
    if (limits->top_p < 1.0f) {
      const SoftmaxWeights weights = softmax_weights_of(highest, limits->temperature);
      threshold_key = search(
          logits, n, threshold_key, [&](float logit) { return weight_of(weights, logit); },
          [&](uint64_t total) { return top_p_target(limits->top_p, total); });
    }
    if (limits->min_p > 0.0f) {
      threshold_key =
          std::max(threshold_key, min_p_key(highest, limits->temperature, limits->min_p));
    }
    if (threshold_key == 0) return;
    const float threshold = from_ordered(threshold_key);
    for (int32_t id = 0; id < n; ++id) {
      if (!(logits[id] >= threshold)) logits[id] = -kInf;
    }
  }
};

}  // namespace

void truncate_logits(CpuContext& ctx, const TruncateLogitsParams& p) {
  PACELINE_CHECK(p.vocab_limit <= kMaxTruncatedVocab, "vocab_limit is ", p.vocab_limit,
                 "; allowed: at most ", kMaxTruncatedVocab);
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  ctx.for_ranges(num_rows, /*pieces_per_thread=*/4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const RowLimits limits = row_limits(p, static_cast<int32_t>(i));
      if (!(limits.temperature > 0.0f)) continue;
      run_best_isa<TruncateKernel>(&limits, p.logits + i * p.logits_stride, p.vocab_limit);
    }
  });
}

}  // namespace paceline
