// SPDX-License-Identifier: Apache-2.0
#include "executor/draft_chooser.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace paceline {
namespace {

// Another k' must promise this much more, so that noise does not change the choice.
constexpr double kMargin = 1.01;
// The share of a bucket's iterations that explorations may lose, how many of them are saved up, and
// those of a new bucket.
constexpr double kLostShare = 0.004;
constexpr double kMostCredit = 30;
constexpr double kFirstCredit = 1;
// What an exploration costs at least, so that values of k' that are alike are not explored often.
constexpr double kLeastLoss = 1;
// Iterations of an exploration. The first verifies what the one before has drafted, so its time is
// not used. The host chooses before it has read the newest results.
constexpr int32_t kExploredIterations = 3;
// The same, if an iteration takes as many times as long as one of the choice: then one time is
// enough to see that it does not pay. If the time is a shorter one after all, it is measured once
// more.
constexpr double kDear = 2;
constexpr int32_t kDearIterations = 2;
// Times of which the median is a cost otherwise.
constexpr int64_t kFewestTimes = 2;
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
// Where nothing is known of as many sequences, iterations are plain until two of them have been
// timed. Plain iterations are the shortest, and they tell what a row costs. After as many without a
// time, since some sequence always has prompt rows, estimates decide.
constexpr int64_t kPlainFirst = 16;
// A k' without a time is measured soon only if it may give this share of the best throughput.
constexpr double kHopeful = 0.85;
// Numbers of sequences whose costs are alike: their quotient is at most this.
constexpr double kNearby = 2;
// What a draft adds to the time of a plain iteration, if none is known: before any time is, and to
// see whether another k' is worth a trial.
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

// Of an exploration. `time`: of one of them, in comparison with the choice.
int32_t num_explored_iterations(double time) {
  return time < kDear ? kExploredIterations : kDearIterations;
}

}  // namespace

void DraftChooser::Iteration::add_window(int32_t num_drafts, int32_t num_accepted) {
  for (int32_t i = 0; i < std::min(num_drafts, num_accepted + 1); ++i) {
    ++reached[static_cast<size_t>(i)];
    accepted[static_cast<size_t>(i)] += i < num_accepted ? 1 : 0;
  }
}

bool DraftChooser::Cell::add(double us, double long_us) {
  times[static_cast<size_t>(count % kNumTimes)] = static_cast<float>(us);
  ++count;
  if (count < kFewestTimes && us < long_us) return false;
  std::array<float, kNumTimes> sorted = times;
  const auto end = sorted.begin() + std::min<int64_t>(count, kNumTimes);
  // The smaller one of two: other work on the machine makes times longer, never shorter.
  const auto middle = sorted.begin() + (end - sorted.begin() - 1) / 2;
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
  for (Bucket& bucket : states_) {
    bucket.cells.resize(lengths_.size());
    bucket.credit = kFirstCredit;
  }
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

auto DraftChooser::measured(size_t bucket) const -> Costs {
  Costs costs{};
  const Bucket& state = states_[bucket];
  for (size_t i = 0; i < lengths_.size(); ++i) {
    costs[i] = state.cells[i].median * state.level / state.cells[i].level;
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

bool DraftChooser::is_known_nearby(size_t bucket, size_t length) const {
  for (size_t b = 0; b < states_.size(); ++b) {
    const double quotient = static_cast<double>(std::max(buckets_[b], buckets_[bucket])) /
                            std::min(buckets_[b], buckets_[bucket]);
    if (quotient <= kNearby && states_[b].cells[length].median > 0) return true;
  }
  return false;
}

size_t DraftChooser::settle(size_t bucket, const Costs& costs) {
  Bucket& state = states_[bucket];
  const bool is_first = state.choice == kUnset;
  if (is_first) state.choice = is_known_nearby(bucket, 0) ? current_ : 0;
  if (state.choice == 0 && state.cells[0].median == 0 && state.num_visits <= kPlainFirst) {
    return kUnset;
  }
  size_t best = state.choice;
  double most = (is_first ? 1 : kMargin) * tokens(best) / costs[best];
  for (size_t i = 0; i < lengths_.size(); ++i) {
    if (tokens(i) / costs[i] <= most || !may_explore(bucket, i)) continue;
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
  return std::clamp(num_explored_iterations(time) * (time - gained) + change, kLeastLoss,
                    kMostCredit);
}

bool DraftChooser::may_explore(size_t bucket, size_t length) const {
  const Bucket& state = states_[bucket];
  if (length == state.choice) return false;
  return length <= state.choice + 1 || state.cells[length].median > 0 ||
         is_known_nearby(bucket, length - 1);
}

size_t DraftChooser::next_unknown(size_t bucket, const Costs& costs) {
  Bucket& state = states_[bucket];
  const double best = tokens(state.choice) / costs[state.choice];
  for (size_t distance = 1; distance < lengths_.size(); ++distance) {
    for (const size_t i : {state.choice + distance, state.choice - distance}) {
      if (i >= lengths_.size() || !may_explore(bucket, i)) continue;
      if (state.num_visits < state.cells[i].retry) continue;
      if (is_known_nearby(bucket, i) || tokens(i) / costs[i] < kHopeful * best) continue;
      state.cells[i].wait(state.num_visits);
      return i;
    }
  }
  return kUnset;
}

size_t DraftChooser::next_affordable(size_t bucket, const Costs& costs) {
  Bucket& state = states_[bucket];
  size_t next = kUnset;
  double most = 0;
  for (size_t i = 0; i < lengths_.size(); ++i) {
    const Cell& cell = state.cells[i];
    const auto age = static_cast<double>(state.num_visits - cell.newest);
    if (!may_explore(bucket, i) || age < kRecent) continue;
    // The older its times, and the less it costs, the sooner.
    const double urgency = age / loss(state, costs, i);
    if (urgency <= most) continue;
    most = urgency;
    next = i;
  }
  if (next == kUnset || state.credit < loss(state, costs, next)) return kUnset;
  state.credit -= loss(state, costs, next);
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
    const size_t again = std::exchange(state.again, kUnset);
    if (again != kUnset && again != state.choice) return again;
    if (const size_t next = next_unknown(bucket, costs); next != kUnset) return next;
  }
  return reaches_some ? next_affordable(bucket, costs) : kUnset;
}

auto DraftChooser::choose(int32_t num_seqs, int32_t num_ready) -> Choice {
  if (num_seqs == 0) {
    ++batch_;
    return {.num_drafts = lengths_[current_]};
  }
  const size_t bucket = bucket_of(num_seqs);
  Bucket& state = states_[bucket];
  ++state.num_visits;
  state.credit = std::min(state.credit + kLostShare, kMostCredit);
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
  const size_t tried = settle(bucket, costs);
  current_ = state.choice;
  current_seqs_ = num_seqs;
  is_trial_ = tried != kUnset;
  if (is_trial_) {
    measured_ = tried;
    state.cells[tried].is_once = false;
    return {.num_drafts = lengths_[tried]};
  }
  num_left_ = 0;
  // Plain decoding can always be explored.
  const bool is_plain = current_ == 0;
  measured_ = next_to_explore(bucket, costs, /*reaches_all=*/!is_plain || num_ready >= num_seqs,
                              /*reaches_some=*/!is_plain || num_ready > 0);
  if (measured_ == kUnset) return {.num_drafts = lengths_[current_]};
  num_left_ = num_explored_iterations(costs[measured_] / costs[current_]) - 1;
  state.cells[measured_].is_once = num_left_ < kFewestTimes;
  return {.num_drafts = lengths_[measured_], .explores = true};
}

int32_t DraftChooser::settled(int32_t num_seqs) const {
  const Bucket& state = states_[bucket_of(std::max(num_seqs, 1))];
  const bool is_known = state.choice != kUnset && state.cells[state.choice].count >= kSettled;
  return is_known ? lengths_[state.choice] : lengths_.back();
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
  const double chosen_us =
      is_choice || state.choice == kUnset ? 0 : state.cells[state.choice].median;
  if (!cell.add(iteration.us, chosen_us > 0 ? kDear * chosen_us : HUGE_VAL)) {
    if (cell.is_once) state.again = length;
    return;
  }
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
