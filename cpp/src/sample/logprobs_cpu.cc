// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "sample/logprob_rules.h"
#include "wire/limits.h"

namespace paceline {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// Number of ids that are compared together, in vectors.
constexpr int32_t kStretch = 64;

// The best candidates so far, best first.
struct BestList {
  uint64_t candidates[kMaxLogprobs];
  int32_t size = 0;
  int32_t capacity = 0;
  // Lowest logit of a full list. A logit that does not exceed it, with a higher id, is no better.
  float lowest = kNegInf;

  void offer(float logit, int32_t id) {
    const uint64_t candidate = best_candidate(logit, id);
    int32_t index = size < capacity ? size++ : capacity - 1;
    for (; index > 0 && candidates[index - 1] < candidate; --index) {
      candidates[index] = candidates[index - 1];
    }
    candidates[index] = candidate;
    if (size == capacity) lowest = logit_of(candidates[capacity - 1]);
  }
};

struct LogprobKernel {
  [[gnu::always_inline]] static void run(const LogprobRow* row, int32_t n) {
    const float* const logits = row->logits;
    float highest = kNegInf;
    for (int32_t id = 0; id < n; ++id) highest = std::max(highest, comparable(logits[id]));
    const float own = comparable(logits[row->token]);
    uint64_t total = 0;
    int32_t num_higher = 0;
    BestList best;
    best.capacity = row->num_best;
    for (int32_t first = 0; first < n; first += kStretch) {
      const int32_t count = std::min(kStretch, n - first);
      float values[kStretch];
      uint64_t weights[kStretch];
      for (int32_t i = 0; i < count; ++i) values[i] = comparable(logits[first + i]);
      for (int32_t i = 0; i < count; ++i) weights[i] = logprob_weight(highest, values[i]);
      int32_t is_any_better = best.size < best.capacity ? 1 : 0;
      for (int32_t i = 0; i < count; ++i) {
        total += weights[i];
        num_higher += values[i] > own ? 1 : 0;
        is_any_better |= values[i] > best.lowest ? 1 : 0;
      }
      if (is_any_better == 0 || best.capacity == 0) continue;
      for (int32_t i = 0; i < count; ++i) {
        if (best.size < best.capacity || values[i] > best.lowest) best.offer(values[i], first + i);
      }
    }
    row->out[0] = {row->token, logprob_of(own, highest, total), 1 + num_higher};
    Ranking ranking;
    for (int32_t i = 0; i < best.size; ++i) {
      row->out[1 + i] = ranking.next(best.candidates[i], highest, total);
    }
  }
};

}  // namespace

void save_raw_logits(CpuContext& ctx, const SaveRawLogitsParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  ctx.for_ranges(num_rows, /*pieces_per_thread=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (!is_row_saved(p, static_cast<int32_t>(i))) continue;
      std::copy_n(p.logits + i * p.logits_stride, p.sampling.vocab_size,
                  p.raw_logits + i * p.logits_stride);
    }
  });
}

void token_logprobs(CpuContext& ctx, const TokenLogprobsParams& p) {
  PACELINE_CHECK(p.sampling.vocab_size <= kMaxTruncatedVocab, "vocab_size is ",
                 p.sampling.vocab_size, "; allowed: at most ", kMaxTruncatedVocab);
  ctx.for_ranges(max_logprob_rows(p), /*pieces_per_thread=*/4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const LogprobRow row = logprob_row(p, static_cast<int32_t>(i));
      if (row.token < 0) continue;
      run_best_isa<LogprobKernel>(&row, p.sampling.vocab_size);
    }
  });
}

}  // namespace paceline
