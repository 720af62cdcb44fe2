// SPDX-License-Identifier: Apache-2.0

// The times of iterations that DraftChooser expects, from those that it has measured.

#include <algorithm>
#include <utility>

#include "tuning/draft_chooser.h"

namespace paceline {
namespace {

// What a draft adds to the time of a plain iteration, if none is known: before any time is, and to
// see whether another k' is worth a trial.
constexpr double kDraftShare = 0.1;
constexpr double kFirstDraftSharePerSequence = 0.03;
constexpr double kDraftSharePerSequence = 0.002;
// An extrapolated time is at least this share of a known one.
constexpr double kLeastShare = 0.2;

}  // namespace

auto DraftChooser::measured(size_t bucket) const -> Costs {
  Costs costs{};
  const Bucket& state = states_[bucket];
  for (size_t i = 0; i < lengths_.size(); ++i) {
    costs[i] = state.cells[i].median * state.level;
  }
  return costs;
}

auto DraftChooser::costs_of(size_t bucket) const -> Costs {
  Costs costs = measured(bucket);
  Costs linear = costs;
  const auto num_known =
      std::count_if(costs.begin(), costs.end(), [](double us) { return us > 0; });
  if (num_known > 1) extrapolate(bucket, linear);
  for (size_t i = 1; i < lengths_.size(); ++i) {
    if (costs[i] == 0) add_cost_of_other(bucket, i, costs);
    costs[i] = std::max(costs[i], linear[i]);
  }
  extrapolate(bucket, costs);
  return costs;
}

size_t DraftChooser::nearest(size_t bucket, size_t length) const {
  // Outwards from the bucket, alternately below and above, by the quotient to it.
  size_t below = bucket;
  size_t above = bucket + 1;
  while (below > 0 || above < states_.size()) {
    const bool takes_below =
        above == states_.size() || (below > 0 && int64_t{buckets_[above]} * buckets_[below - 1] >=
                                                     int64_t{buckets_[bucket]} * buckets_[bucket]);
    const size_t other = takes_below ? --below : above++;
    if (states_[other].cells[length].median > 0) return other;
  }
  return kUnset;
}

// What a row of the target adds to a plain iteration with at least as many sequences as `other`,
// whose times are given.
double DraftChooser::row_cost(size_t other, const Costs& known) const {
  const double plain = states_[other].cells[0].median > 0 ? known[0] : 0;
  for (size_t b = 0; b < states_.size() && plain > 0; ++b) {
    const double another = measured(b)[0];
    if (b == other || another == 0) continue;
    return std::max(0.0, (plain - another) / (buckets_[other] - buckets_[b]));
  }
  // At most this, if draft steps cost nothing.
  const size_t last = lengths_.size() - 1;
  return std::max(0.0, known[last] - known[0]) / (lengths_[last] * buckets_[other]);
}

double DraftChooser::plain_cost(size_t bucket, size_t other, const Costs& known,
                                const Costs& own) const {
  for (size_t i = 1; i < lengths_.size(); ++i) {
    if (own[i] == 0) continue;
    const int32_t k = lengths_[i];
    return std::clamp((own[i] - known[i] + (k + 1) * known[0]) / (k + 1), kLeastShare * own[i],
                      own[i]);
  }
  const int32_t more = std::max(0, buckets_[bucket] - buckets_[other]);
  return known[0] + more * row_cost(other, known);
}

// An iteration with k' drafts takes longer than a plain one by k' draft steps, and by the rows of
// k' tokens of each sequence. What other sequences add to a plain iteration is the time of their
// rows.
void DraftChooser::add_cost_of_other(size_t bucket, size_t length, Costs& costs) const {
  const size_t other = nearest(bucket, length);
  if (other == kUnset) return;
  Costs known = measured(other);
  extrapolate(other, known);
  if (costs[0] == 0) costs[0] = plain_cost(bucket, other, known, costs);
  const double added = known[length] - known[0];
  // With fewer sequences in proportion, as if draft steps cost nothing: trying that costs little.
  const double ratio = static_cast<double>(buckets_[bucket]) / buckets_[other];
  const double of_rows = std::max(0.0, lengths_[length] * (costs[0] - known[0]));
  costs[length] = costs[0] + std::min(ratio, 1.0) * added + of_rows;
}

// Those that no bucket knows: linear in k'.
void DraftChooser::extrapolate(size_t bucket, Costs& costs) const {
  const Costs known = costs;
  const auto below = [&](size_t end) {
    while (end-- > 0) {
      if (known[end] > 0) return end;
    }
    return kUnset;
  };
  const auto from = [&](size_t begin) {
    while (begin < lengths_.size() && known[begin] == 0) ++begin;
    return begin < lengths_.size() ? begin : kUnset;
  };
  for (size_t i = 0; i < lengths_.size(); ++i) {
    if (known[i] > 0) continue;
    // The two nearest, on both sides if there are such.
    size_t low = below(i);
    size_t high = from(i);
    if (low == kUnset && high == kUnset) return;
    if (low == kUnset) low = std::exchange(high, from(high + 1));
    if (high == kUnset) {
      if (const size_t lower = below(low); lower != kUnset) high = std::exchange(low, lower);
    }
    double per_draft = 0;
    if (high != kUnset) {
      per_draft = (known[high] - known[low]) / (lengths_[high] - lengths_[low]);
    } else {
      const double share = kDraftShare + kDraftSharePerSequence * buckets_[bucket];
      per_draft = known[low] * share / (1 + share * lengths_[low]);
    }
    costs[i] =
        std::max(known[low] + per_draft * (lengths_[i] - lengths_[low]), kLeastShare * known[low]);
  }
}

auto DraftChooser::first_costs(size_t bucket) const -> Costs {
  Costs costs{};
  const double share = kDraftShare + kFirstDraftSharePerSequence * buckets_[bucket];
  for (size_t i = 0; i < lengths_.size(); ++i) costs[i] = 1 + share * lengths_[i];
  return costs;
}

}  // namespace paceline
