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

// Ids that are looked at together, in vectors.
constexpr int32_t kStretch = 64;

// The best candidates so far, best first.
struct BestList {
  uint64_t candidates[kMaxLogprobs];
  int32_t size = 0;
  int32_t wanted = 0;
  float lowest =
      kNegInf;  // of a full list: what does not exceed it, with a higher id, is no better

  void offer(float logit, int32_t id) {
    const uint64_t candidate = best_candidate(logit, id);
    int32_t at = size < wanted ? size++ : wanted - 1;
    for (; at > 0 && candidates[at - 1] < candidate; --at) candidates[at] = candidates[at - 1];
    candidates[at] = candidate;
    if (size == wanted) lowest = logit_of(candidates[wanted - 1]);
  }
};

struct RateKernel {
  [[gnu::always_inline]] static void run(const RatedRow* row, int32_t n) {
    const float* const logits = row->logits;
    float highest = kNegInf;
    for (int32_t id = 0; id < n; ++id) highest = std::max(highest, comparable(logits[id]));
    const float own = comparable(logits[row->token]);
    uint64_t total = 0;
    int32_t num_higher = 0;
    BestList best;
    best.wanted = row->num_best;
    for (int32_t first = 0; first < n; first += kStretch) {
      const int32_t count = std::min(kStretch, n - first);
      float values[kStretch];
      uint64_t shares[kStretch];
      for (int32_t i = 0; i < count; ++i) values[i] = comparable(logits[first + i]);
      for (int32_t i = 0; i < count; ++i) shares[i] = share_of(highest, values[i]);
      int32_t is_any_better = best.size < best.wanted ? 1 : 0;
      for (int32_t i = 0; i < count; ++i) {
        total += shares[i];
        num_higher += values[i] > own ? 1 : 0;
        is_any_better |= values[i] > best.lowest ? 1 : 0;
      }
      if (is_any_better == 0 || best.wanted == 0) continue;
      for (int32_t i = 0; i < count; ++i) {
        if (best.size < best.wanted || values[i] > best.lowest) best.offer(values[i], first + i);
      }
    }
    row->to[0] = {row->token, logprob_of(own, highest, total), 1 + num_higher};
    Ranking ranking;
    for (int32_t i = 0; i < best.size; ++i) {
      row->to[1 + i] = ranking.next(best.candidates[i], highest, total);
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
  PACELINE_CHECK(p.sampling.vocab_size <= kMaxTruncatedVocab, p.sampling.vocab_size,
                 " ids; at most ", kMaxTruncatedVocab);
  ctx.for_ranges(num_ratable_rows(p), /*pieces_per_thread=*/4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const RatedRow row = rated_row(p, static_cast<int32_t>(i));
      if (row.token < 0) continue;
      run_best_isa<RateKernel>(&row, p.sampling.vocab_size);
    }
  });
}

}  // namespace paceline
