// SPDX-License-Identifier: Apache-2.0

#include "sample/reject.h"

#include <algorithm>
#include <array>
#include <limits>

#include "base/check.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "sample/rejection_window.h"
#include "wire/limits.h"

namespace paceline {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// --- select_proposals ----------------------------------------------------------------------------

// A candidate encodes a logit and an id as one number; a higher number is a better candidate: the
// higher logit, then the lower id.
uint64_t candidate(float logit, int32_t id) {
  return uint64_t{to_ordered(logit + 0.0f)} << 32 | ~static_cast<uint32_t>(id);
}
int32_t id_of(uint64_t candidate) {
  return static_cast<int32_t>(~static_cast<uint32_t>(candidate));
}

void select_row(const SelectProposalsParams& p, int32_t row) {
  const int32_t seq_slot = p.seq_slot[p.row_index[row]];
  if (seq_slot < 0 && !p.is_by_row) {
    p.proposal_rows[row] = -1;
    return;
  }
  const int32_t draft = p.draft_step != nullptr ? *p.draft_step : 0;
  const int32_t proposal_row = p.is_by_row ? row : seq_slot * p.num_draft_tokens + draft;
  const int32_t vocab_limit = seq_slot < 0 ? 0 : p.vocab_limit;
  const float* const logits = p.logits + row * p.logits_stride;
  const int32_t* const map =
      p.token_map != nullptr ? p.token_map + row * p.token_map_stride : nullptr;
  // A heap with the worst of the best candidates on top.
  std::array<uint64_t, kMaxDraftProposals> best;
  int32_t count = 0;
  const auto end = [&] { return best.begin() + count; };
  for (int32_t id = 0; id < vocab_limit; ++id) {
    if (!(logits[id] > -kInf) || (map != nullptr && map[id] >= p.token_limit)) continue;
    const uint64_t own = candidate(logits[id], id);
    if (count == p.proposals.per_draft) {
      if (own < best[0]) continue;
      std::pop_heap(best.begin(), end(), std::greater<>());
      --count;
    }
    best[static_cast<size_t>(count++)] = own;
    std::push_heap(best.begin(), end(), std::greater<>());
  }
  std::sort(best.begin(), end(), [](uint64_t a, uint64_t b) { return id_of(a) < id_of(b); });
  const int64_t first = int64_t{proposal_row} * p.proposals.per_draft;
  for (int32_t j = 0; j < p.proposals.per_draft; ++j) {
    const int32_t id = j < count ? id_of(best[static_cast<size_t>(j)]) : -1;
    p.proposals.ids[first + j] = id >= 0 && map != nullptr ? map[id] : id;
    p.proposals.logits[first + j] = id >= 0 ? logits[id] : -kInf;
  }
  if (!p.is_by_row) p.proposal_rows[row] = proposal_row;
}

// --- softmax_sums --------------------------------------------------------------------------------

struct RowWeight {
  float highest;
  uint64_t sum;
};

struct SoftmaxSumsKernel {
  [[gnu::always_inline]] static void run(const float* logits, int32_t n, float temperature,
                                         RowWeight* weight) {
    float highest = -kInf;
    for (int32_t id = 0; id < n; ++id) highest = std::max(highest, comparable(logits[id]));
    if (highest == -kInf || highest == kInf) return;
    const SoftmaxWeights weights = softmax_weights_of(highest, temperature);
    uint64_t sum = 0;
    for (int32_t id = 0; id < n; ++id) sum += weight_of(weights, comparable(logits[id]));
    *weight = {highest, sum};
  }
};

// --- reject_drafts -------------------------------------------------------------------------------

// A Team that walks its lists serially, with the sums of a warp of 32 lanes.
struct SerialTeam {
  template <class Value>
  [[nodiscard]] float max(int32_t n, const Value& value) const {
    float highest = -kInf;
    for (int32_t j = 0; j < n; ++j) highest = std::max(highest, value(j));
    return highest;
  }
  template <class Value>
  [[nodiscard]] uint64_t count(int32_t n, const Value& value) const {
    uint64_t sum = 0;
    for (int32_t j = 0; j < n; ++j) sum += value(j);
    return sum;
  }
  template <class Value>
  [[nodiscard]] double sum(int32_t n, const Value& value) const {
    std::array<double, 32> lanes = {};
    for (int32_t j = 0; j < n; ++j) lanes[static_cast<size_t>(j % 32)] += value(j);
    for (size_t step = 16; step > 0; step /= 2) {
      for (size_t lane = 0; lane < step; ++lane) lanes[lane] += lanes[lane + step];
    }
    return lanes[0];
  }
  template <class Visit>
  void for_each(int32_t n, const Visit& visit) const {
    for (int32_t j = 0; j < n; ++j) visit(j);
  }
  [[nodiscard]] bool is_leader() const { return true; }
};

}  // namespace

void select_proposals(CpuContext& ctx, const SelectProposalsParams& p) {
  PACELINE_CHECK(p.proposals.per_draft >= 1 && p.proposals.per_draft <= kMaxDraftProposals,
                 "per_draft is ", p.proposals.per_draft, "; allowed: 1..", kMaxDraftProposals);
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  ctx.for_ranges(num_rows, /*pieces_per_thread=*/4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) select_row(p, static_cast<int32_t>(i));
  });
}

void softmax_sums(CpuContext& ctx, const SoftmaxSumsParams& p) {
  PACELINE_CHECK(p.vocab_limit <= kMaxTruncatedVocab, "vocab_limit is ", p.vocab_limit,
                 "; allowed: at most ", kMaxTruncatedVocab);
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  ctx.for_ranges(num_rows, /*pieces_per_thread=*/4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int32_t seq_slot = p.seq_slot[p.row_index[i]];
      RowWeight weight = {-kInf, 0};
      if (seq_slot >= 0 && p.temperatures[seq_slot] > 0.0f) {
        run_best_isa<SoftmaxSumsKernel>(p.logits + i * p.logits_stride, p.vocab_limit,
                                        p.temperatures[seq_slot], &weight);
      }
      p.highest[i] = weight.highest;
      p.sums[i] = weight.sum;
    }
  });
}

void reject_drafts(CpuContext& ctx, const RejectDraftsParams& p) {
  const int32_t num_seqs = std::min(p.inputs.counts->num_seqs, p.max_seqs);
  ctx.for_ranges(num_seqs, /*pieces_per_thread=*/4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      reject_sequence(p, static_cast<int32_t>(i), SerialTeam{});
    }
  });
}

}  // namespace paceline
