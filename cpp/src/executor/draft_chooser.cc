// SPDX-License-Identifier: Apache-2.0
#include "executor/draft_chooser.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace paceline {
namespace {

// Another k' must promise this much more, so that noise does not change the choice.
constexpr double kMargin = 1.01;
// The share of iterations that explorations may lose, and how many of them are saved up.
constexpr double kLostShare = 0.004;
constexpr double kMostCredit = 30;
// What an exploration costs at least, so that values of k' that are alike are not explored often.
constexpr double kLeastLoss = 1;
// Iterations of an exploration. The first verifies what the one before has drafted, so its time is
// not used. The host chooses before it has read the newest results.
constexpr int32_t kExploredIterations = 3;
// A k' that promises more by old times is tried until it has as many new ones, and at most for as
// many iterations.
constexpr int64_t kTrialTimes = 4;
constexpr int32_t kTrialIterations = 10;
// After a change of the choice, the former one is measured anew, since other work on the machine
// may have ended just then.
constexpr int64_t kReviewedAfter = 12;
// Visits of a bucket between tries of the same k': doubled each time.
constexpr int64_t kFirstPatience = 16;
constexpr int64_t kMostPatience = 1024;
// Times that are not older, in iterations with as many sequences, can be compared with those of
// now.
constexpr int64_t kRecent = 64;
// Times of the choice before others are explored.
constexpr int64_t kSettled = 5;
// Times of which the median is a cost.
constexpr int64_t kFewestTimes = 2;
// A k' without a time is measured at once only if it may give this share of the best throughput.
constexpr double kHopeful = 0.7;
// Numbers of sequences whose costs are alike: their quotient is at most this.
constexpr double kNearby = 2;
// What a draft adds to the time of a plain iteration, before anything is known: for the first
// choice, which must not be far too many, and to see whether another k' is worth a trial.
constexpr double kDraftShare = 0.1;
constexpr double kFirstDraftSharePerSequence = 0.03;
constexpr double kDraftSharePerSequence = 0.002;
// An extrapolated time is at least this share of a known one.
constexpr double kLeastShare = 0.2;
// Acceptance is a mean over about as many windows, or iterations where there are fewer windows.
constexpr double kRememberedWindows = 1024;
constexpr double kRememberedIterations = 1000;
// Before the first windows: drafts that are as if verified, and accepted.
constexpr double kFirstReached = 4;
constexpr double kFirstAccepted = 3;
// What has been learned is not forgotten below as many.
constexpr double kFewestReached = 8;

}  // namespace

void DraftChooser::Iteration::add_window(int32_t num_drafts, int32_t num_accepted) {
  for (int32_t i = 0; i < std::min(num_drafts, num_accepted + 1); ++i) {
    ++reached[static_cast<size_t>(i)];
    accepted[static_cast<size_t>(i)] += i < num_accepted ? 1 : 0;
  }
}

bool DraftChooser::Cell::add(double us) {
  times[static_cast<size_t>(count % kNumTimes)] = static_cast<float>(us);
  ++count;
  if (count < kFewestTimes) return false;
  std::array<float, kNumTimes> sorted = times;
  const auto end = sorted.begin() + std::min<int64_t>(count, kNumTimes);
  // The larger one of two: few times shall not promise too much.
  const auto middle = sorted.begin() + (end - sorted.begin()) / 2;
  std::nth_element(sorted.begin(), middle, end);
  median = *middle;
  return true;
}

void DraftChooser::Cell::wait(int64_t num_visits) {
  patience = std::clamp(2 * patience, kFirstPatience, kMostPatience);
  retry = num_visits + patience;
}

DraftChooser::DraftChooser(std::vector<int32_t> lengths, std::vector<int32_t> buckets)
    : lengths_(std::move(lengths)),
      buckets_(std::move(buckets)),
      states_(buckets_.size()),
      current_(lengths_.size() - 1) {
  for (Bucket& bucket : states_) bucket.cells.resize(lengths_.size());
  reached_.fill(kFirstReached);
  accepted_.fill(kFirstAccepted);
}

size_t DraftChooser::bucket_of(int32_t num_seqs) const {
  const auto found = std::lower_bound(buckets_.begin(), buckets_.end(), num_seqs);
  return std::min(static_cast<size_t>(found - buckets_.begin()), buckets_.size() - 1);
}

double DraftChooser::acceptance(int32_t position) const {
  const auto i = static_cast<size_t>(position);
  return (accepted_[i] + 0.5) / (reached_[i] + 1);
}

double DraftChooser::tokens(size_t length) const {
  double sum = 1;
  double product = 1;
  for (int32_t i = 0; i < lengths_[length]; ++i) {
    product *= acceptance(i);
    sum += product;
  }
  return sum;
}

auto DraftChooser::costs_of(size_t bucket) const -> Costs {
  Costs costs{};
  const Bucket& state = states_[bucket];
  for (size_t i = 0; i < lengths_.size(); ++i) {
    costs[i] = state.cells[i].median * state.level / state.cells[i].level;
  }
  add_costs_of_others(bucket, costs);
  extrapolate(bucket, costs);
  return costs;
}

// Those of the nearest buckets, in proportion to a k' that is known for both.
void DraftChooser::add_costs_of_others(size_t bucket, Costs& costs) const {
  const auto own_end = costs.begin() + static_cast<std::ptrdiff_t>(lengths_.size());
  const auto is_known = [](double us) { return us > 0; };
  // Outwards from the bucket, alternately below and above, by the quotient to it.
  size_t below = bucket;
  size_t above = bucket + 1;
  while ((below > 0 || above < states_.size()) && !std::all_of(costs.begin(), own_end, is_known)) {
    const bool takes_below =
        above == states_.size() || (below > 0 && int64_t{buckets_[above]} * buckets_[below - 1] >=
                                                     int64_t{buckets_[bucket]} * buckets_[bucket]);
    const Bucket& other = states_[takes_below ? --below : above++];
    const auto cost_of = [&](size_t i) { return other.cells[i].median / other.cells[i].level; };
    double scale = std::any_of(costs.begin(), own_end, is_known) ? 0 : 1;
    for (size_t i = 0; i < lengths_.size() && scale == 0; ++i) {
      if (costs[i] > 0 && cost_of(i) > 0) scale = costs[i] / cost_of(i);
    }
    for (size_t i = 0; i < lengths_.size(); ++i) {
      if (costs[i] == 0) costs[i] = scale * cost_of(i);
    }
  }
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

bool DraftChooser::is_known_nearby(size_t bucket, size_t length) const {
  for (size_t b = 0; b < states_.size(); ++b) {
    const double quotient = static_cast<double>(std::max(buckets_[b], buckets_[bucket])) /
                            std::min(buckets_[b], buckets_[bucket]);
    if (quotient <= kNearby && states_[b].cells[length].median > 0) return true;
  }
  return false;
}

size_t DraftChooser::settle(Bucket& state, const Costs& costs) {
  const bool is_first = state.choice == kUnset;
  if (is_first) state.choice = current_;
  size_t best = state.choice;
  double most = (is_first ? 1 : kMargin) * tokens(best) / costs[best];
  for (size_t i = 0; i < lengths_.size(); ++i) {
    if (tokens(i) / costs[i] <= most) continue;
    most = tokens(i) / costs[i];
    best = i;
  }
  if (best == state.choice) return kUnset;
  Cell& cell = state.cells[best];
  const bool is_measured = cell.batch == batch_ && cell.count >= kTrialTimes &&
                           state.num_visits - cell.newest <= kRecent;
  const bool is_tried = is_trial_ && num_left_ > 0 && measured_ == best;
  if (state.cells[state.choice].median == 0) {
    state.choice = best;  // nothing is known of either here
  } else if (is_measured || (is_tried && num_left_ == 1)) {
    // A trial may end without times, since some sequence always has prompt rows or catches up.
    state.former = std::exchange(state.choice, best);
    state.review = state.num_visits + kReviewedAfter;
    cell.retry = cell.patience = 0;
  } else if (is_tried) {
    --num_left_;
    return best;
  } else if (state.num_visits >= cell.retry) {
    cell.wait(state.num_visits);
    num_left_ = kTrialIterations;
    return best;
  }
  return kUnset;
}

double DraftChooser::loss(const Bucket& state, const Costs& costs, size_t length) const {
  const double gained = tokens(length) / tokens(state.choice);
  const double time = costs[length] / costs[state.choice];
  // Drafts are lost when k' falls, and when it grows they are paid an iteration before.
  const double change = std::abs(gained - 1) + (length > state.choice ? time - 1 : 0);
  return std::clamp(kExploredIterations * (time - gained) + change, kLeastLoss, kMostCredit);
}

size_t DraftChooser::next_unknown(size_t bucket, const Costs& costs) {
  Bucket& state = states_[bucket];
  const double best = tokens(state.choice) / costs[state.choice];
  for (size_t distance = 1; distance < lengths_.size(); ++distance) {
    for (const size_t i : {state.choice + distance, state.choice - distance}) {
      if (i >= lengths_.size() || state.num_visits < state.cells[i].retry) continue;
      if (is_known_nearby(bucket, i) || tokens(i) / costs[i] < kHopeful * best) continue;
      state.cells[i].wait(state.num_visits);
      return i;
    }
  }
  return kUnset;
}

size_t DraftChooser::next_affordable(Bucket& state, const Costs& costs) {
  size_t next = kUnset;
  double most = 0;
  for (size_t i = 0; i < lengths_.size(); ++i) {
    const Cell& cell = state.cells[i];
    const auto age = static_cast<double>(state.num_visits - cell.newest);
    if (i == state.choice || age < kRecent) continue;
    // The older its times, and the less it costs, the sooner.
    const double urgency = age / loss(state, costs, i);
    if (urgency <= most) continue;
    most = urgency;
    next = i;
  }
  if (next == kUnset || credit_ < loss(state, costs, next)) return kUnset;
  credit_ -= loss(state, costs, next);
  return next;
}

size_t DraftChooser::next_to_explore(size_t bucket, const Costs& costs, bool reaches_all,
                                     bool reaches_some) {
  Bucket& state = states_[bucket];
  const Cell& chosen = state.cells[state.choice];
  if (state.review > 0 && state.num_visits >= state.review) {
    state.review = 0;
    if (reaches_all) return state.former;
  }
  if (chosen.batch != batch_ || chosen.count < kSettled) return kUnset;
  if (reaches_all) {
    if (const size_t next = next_unknown(bucket, costs); next != kUnset) return next;
  }
  return reaches_some ? next_affordable(state, costs) : kUnset;
}

auto DraftChooser::choose(int32_t num_seqs, int32_t num_ready) -> Choice {
  if (num_seqs == 0) {
    ++batch_;
    return {.num_drafts = lengths_[current_]};
  }
  const size_t bucket = bucket_of(num_seqs);
  Bucket& state = states_[bucket];
  ++state.num_visits;
  credit_ = std::min(credit_ + kLostShare, kMostCredit);
  if (measured_bucket_ != bucket) num_left_ = 0;
  if (num_left_ > 0 && !is_trial_) {
    --num_left_;
    return {.num_drafts = lengths_[measured_], .explores = true};
  }
  Costs costs = costs_of(bucket);
  if (costs[0] == 0) {
    const double share = kDraftShare + kFirstDraftSharePerSequence * buckets_[bucket];
    for (size_t i = 0; i < lengths_.size(); ++i) costs[i] = 1 + share * lengths_[i];
  }
  measured_bucket_ = bucket;
  const size_t tried = settle(state, costs);
  current_ = state.choice;
  current_seqs_ = num_seqs;
  is_trial_ = tried != kUnset;
  if (is_trial_) {
    measured_ = tried;
    return {.num_drafts = lengths_[tried]};
  }
  num_left_ = 0;
  // Plain decoding can always be explored.
  const bool is_plain = current_ == 0;
  measured_ = next_to_explore(bucket, costs, /*reaches_all=*/!is_plain || num_ready >= num_seqs,
                              /*reaches_some=*/!is_plain || num_ready > 0);
  if (measured_ == kUnset) return {.num_drafts = lengths_[current_]};
  num_left_ = kExploredIterations - 1;
  return {.num_drafts = lengths_[measured_], .explores = true};
}

void DraftChooser::observe(const Iteration& iteration) {
  for (size_t i = 0; i < reached_.size(); ++i) {
    const double forgotten = reached_[i] > kFewestReached ? 1 / kRememberedIterations : 0;
    const double kept = std::exp(-iteration.reached[i] / kRememberedWindows - forgotten);
    reached_[i] = reached_[i] * kept + iteration.reached[i];
    accepted_[i] = accepted_[i] * kept + iteration.accepted[i];
  }
  if (iteration.us <= 0) return;
  const auto found = std::find(lengths_.begin(), lengths_.end(), iteration.num_drafts);
  if (found == lengths_.end()) return;
  const auto length = static_cast<size_t>(found - lengths_.begin());
  Bucket& state = states_[bucket_of(iteration.num_seqs)];
  Cell& cell = state.cells[length];
  const bool is_choice = length == state.choice;
  // Contexts of another batch have other lengths.
  const bool is_old = !is_choice && state.num_visits - cell.newest > kRecent;
  if (cell.batch != batch_ || is_old) cell.count = 0;
  cell.batch = batch_;
  cell.newest = state.num_visits;
  const double before = cell.median;
  if (!cell.add(iteration.us)) return;
  if (is_choice && before > 0) state.level = cell.level * cell.median / before;
  cell.level = state.level;
}

std::vector<DraftChooser::Estimate> DraftChooser::estimates(int32_t num_seqs) const {
  std::vector<Estimate> all;
  const size_t bucket = bucket_of(std::max(num_seqs, 1));
  const Costs costs = costs_of(bucket);
  for (size_t i = 0; i < lengths_.size(); ++i) {
    all.push_back({.num_drafts = lengths_[i], .tokens = tokens(i), .us = costs[i]});
  }
  return all;
}

std::vector<DraftChooser::Cost> DraftChooser::costs() const {
  std::vector<Cost> all;
  for (size_t b = 0; b < states_.size(); ++b) {
    for (size_t i = 0; i < lengths_.size(); ++i) {
      const Cell& cell = states_[b].cells[i];
      if (cell.median == 0) continue;
      all.push_back({.num_seqs = buckets_[b],
                     .num_drafts = lengths_[i],
                     .num_samples = static_cast<int32_t>(std::min<int64_t>(cell.count, kNumTimes)),
                     .us = cell.median});
    }
  }
  return all;
}

}  // namespace paceline
