// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>

#include "base/check.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/candidates.h"
#include "ops/for_rows.h"

namespace paceline {
namespace {

// y = e * projected.
template <class T>
struct WeighKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const T* e, const float* projected, int32_t rank,
                                         float* y) {
    for (int32_t i = 0; i < rank; i += 16) {
      store_up_to(y + i,
                  load_up_to<Lanes>(e + i, rank - i) * load_up_to<Lanes>(projected + i, rank - i),
                  rank - i);
    }
  }
};

// sum = weighed . e
template <class T>
struct DotKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const float* weighed, const T* e, int32_t rank,
                                         float* sum) {
    Lanes sums = {};
    for (int32_t i = 0; i < rank; i += 16) {
      sums += load_up_to<Lanes>(weighed + i, rank - i) * load_up_to<Lanes>(e + i, rank - i);
    }
    *sum = sum_lanes(sums);
  }
};

template <class T>
void score_row(const ScorePairsParams& p, int32_t row) {
  const int32_t count = p.lists.count;
  const int32_t* const ids = p.lists.ids + int64_t{row} * count;
  const float* const logits = p.lists.logits + int64_t{row} * count;
  const float* const projected = p.projected + int64_t{row} * p.rank;
  const bool is_first = row < p.max_seqs;
  const int32_t* const before =
      is_first ? p.newest + row : p.lists.ids + int64_t{row - p.max_seqs} * count;
  float* scores = p.lists.scores + int64_t{row} * count * count;
  const auto is_token = [&](int32_t token) { return token >= 0 && token < p.vocab_size; };
  const auto row_of = [&](const void* codebook, int32_t token) {
    return static_cast<const T*>(codebook) + int64_t{token} * p.rank;
  };
  std::array<float, kMaxSelectorRank> weighed;
  for (int32_t a = 0; a < (is_first ? 1 : count); ++a, scores += count) {
    const bool has_before = is_token(before[a]);
    if (has_before) {
      run_best_isa<WeighKernel<T>>(row_of(p.predecessors, before[a]), projected, p.rank,
                                   weighed.data());
    }
    for (int32_t c = 0; c < count; ++c) {
      float sum = 0.0f;
      if (has_before && is_token(ids[c])) {
        run_best_isa<DotKernel<T>>(weighed.data(), row_of(p.successors, ids[c]), p.rank, &sum);
      }
      scores[c] = logits[c] + sum;
    }
  }
}

}  // namespace

void check_pairs(const ScorePairsParams& p) {
  PACELINE_CHECK(p.lists.count >= 1 && p.lists.count <= kMaxCandidates, p.lists.count,
                 " candidates; allowed: 1 to ", kMaxCandidates);
  PACELINE_CHECK(p.rank >= 1 && p.rank <= kMaxSelectorRank, "codebooks of ", p.rank,
                 " columns; allowed: 1 to ", kMaxSelectorRank);
}

void score_pairs(CpuContext& ctx, const ScorePairsParams& p) {
  check_pairs(p);
  const int32_t num_seqs = std::min(*p.num_seqs, p.max_seqs);
  const int64_t row_bytes = int64_t{p.lists.count} * p.lists.count * p.rank * 4;
  for_rows(ctx, num_seqs * p.num_drafts, row_bytes, [&](int32_t i) {
    const int32_t row = i / num_seqs * p.max_seqs + i % num_seqs;
    if (p.dtype == DType::kFloat32) {
      score_row<float>(p, row);
    } else {
      score_row<uint16_t>(p, row);
    }
  });
}

void follow_candidates(CpuContext&, const FollowCandidatesParams& p) {
  const int32_t num_seqs = std::min(*p.num_seqs, p.max_seqs);
  for (int32_t i = 0; i < num_seqs; ++i) {
    int32_t from = 0;
    if (p.before != nullptr) {
      const int32_t* const before = p.before + int64_t{i} * p.count;
      const int32_t found =
          static_cast<int32_t>(std::find(before, before + p.count, p.previous[i]) - before);
      from = found < p.count ? found : 0;
    }
    std::copy_n(p.scores + (int64_t{i} * p.count + from) * p.count, p.count,
                p.y + int64_t{i} * p.count);
  }
}

void check_walk(const WalkCandidatesParams& p) {
  PACELINE_CHECK(p.lists.count >= 1 && p.lists.count <= kMaxCandidates, p.lists.count,
                 " candidates; allowed: 1 to ", kMaxCandidates);
  const DrawParams& d = p.draw;
  PACELINE_CHECK(d.probabilities == nullptr && d.logit_rows == nullptr &&
                     d.steps_ahead == nullptr && d.salts == nullptr,
                 "a walk draws with the target's noise alone");
}

DrawParams draw_of_draft(const WalkCandidatesParams& p, int32_t j) {
  const int64_t at = int64_t{j} * p.max_seqs;
  DrawParams draw = p.draw;
  draw.num_rows = p.num_seqs;
  draw.max_rows = p.max_seqs;
  draw.logits = p.followed;
  draw.logits_stride = p.lists.count;
  draw.vocab_limit = p.lists.count;
  draw.row_index += at;
  draw.tokens += at;
  draw.token_map = p.lists.ids + at * p.lists.count;
  draw.token_map_stride = p.lists.count;
  return draw;
}

void walk_candidates(CpuContext& ctx, const WalkCandidatesParams& p) {
  check_walk(p);
  const int64_t count = p.lists.count;
  for (int32_t j = 0; j < p.num_drafts; ++j) {
    const int64_t at = int64_t{j} * p.max_seqs;
    const int64_t last = at - p.max_seqs;
    follow_candidates(ctx, {.num_seqs = p.num_seqs,
                            .max_seqs = p.max_seqs,
                            .count = p.lists.count,
                            .scores = p.lists.scores + at * count * count,
                            .before = j > 0 ? p.lists.ids + last * count : nullptr,
                            .previous = j > 0 ? p.draw.tokens + last : nullptr,
                            .y = p.followed});
    draw(ctx, draw_of_draft(p, j));
  }
}

}  // namespace paceline
