// SPDX-License-Identifier: Apache-2.0
#include "tuning/draft_chooser.h"

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
// What an exploration costs at least, so that values of k' that are alike are not explored often;
// and what it costs if the k' may be the best one, since few windows have shown its acceptance:
// with estimates that are too low by as many standard errors.
constexpr double kLeastLoss = 1;
constexpr double kLeastHopefulLoss = 0.2;
constexpr double kMostErrors = 1.5;
// Iterations of an exploration. The first verifies what the one before has drafted, so its time is
// not used. The host chooses before it has read the newest results.
constexpr int32_t kExploredIterations = 3;
// The same, if an iteration takes as many times as long as one of the choice: then one time is
// enough to see that it does not pay. If the time is a shorter one after all, it is measured once
// more, in full.
constexpr double kDear = 2;
constexpr int32_t kDearIterations = 2;
// A k' that is measured for the first time is measured once more, if it takes as many times as long
// as expected.
constexpr double kSurprise = 1.5;
// Times of which the median is a cost otherwise.
constexpr int32_t kFewestTimes = 2;
// A k' that promises more by old times is tried until it has as many new ones, and at most for as
// many iterations.
constexpr int64_t kTrialTimes = 4;
constexpr int32_t kTrialIterations = 10;
// After a change of the choice, the former one is measured anew, since other work on the machine
// may have ended just then: after as many iterations, and again after twice, four and eight times
// as many while it promises this share of the choice.
constexpr int64_t kReviewedAfter = 12;
constexpr int32_t kMostReviews = 4;
constexpr double kRivalShare = 0.9;
// Visits of a bucket between tries of the same k': doubled each time.
constexpr int64_t kFirstPatience = 16;
constexpr int64_t kMostPatience = 1024;
// Times that are not older, in iterations with as many sequences, can be compared with those of
// now.
constexpr int64_t kRecent = 64;
// Older times that count beside new ones. The median of a few new times is often wrong where other
// work on the machine comes and goes.
constexpr int32_t kKeptTimes = 7;
// They are dropped if two new ones are shorter than this share of the shortest. Other work explains
// times that are longer, but not such.
constexpr double kMuchShorter = 0.6;
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

// Of the first `count` values. Of two it is the smaller one: other work on the machine makes times
// longer, never shorter.
template <size_t kSize>
double lower_median(std::array<float, kSize> values, int64_t count) {
  const auto end = values.begin() + std::min<int64_t>(count, kSize);
  const auto middle = values.begin() + (end - values.begin() - 1) / 2;
  std::nth_element(values.begin(), middle, end);
  return *middle;
}

}  // namespace

void DraftChooser::Iteration::add_window(int32_t num_drafts, int32_t num_accepted) {
  for (int32_t i = 0; i < std::min(num_drafts, num_accepted + 1); ++i) {
    ++reached[static_cast<size_t>(i)];
    accepted[static_cast<size_t>(i)] += i < num_accepted ? 1 : 0;
  }
}

bool DraftChooser::Cell::add(double time, double long_time) {
  drop_old(kNumTimes - 1);
  times[static_cast<size_t>(num_times++)] = static_cast<float>(time);
  ++num_new;
  const auto newest = times.begin() + std::max(0, num_times - kFewestTimes);
  const auto end = times.begin() + num_times;
  if (newest > times.begin() &&
      *std::max_element(newest, end) < kMuchShorter * *std::min_element(times.begin(), newest)) {
    drop_old(kFewestTimes);
  }
  if (num_times < kFewestTimes && time < long_time) return false;
  median = lower_median(times, num_times);
  return true;
}

void DraftChooser::Cell::drop_old(int32_t count) {
  if (num_times <= count) return;
  std::copy(times.begin() + (num_times - count), times.begin() + num_times, times.begin());
  num_times = count;
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

double DraftChooser::tokens(size_t length, double num_errors) const {
  double sum = 1;
  double product = 1;
  for (int32_t i = 0; i < lengths_[length]; ++i) {
    const double p = acceptance(i);
    const double error = std::sqrt(p * (1 - p) / (reached_[static_cast<size_t>(i)] + 1));
    product *= std::min(1.0, p + num_errors * error);
    sum += product;
  }
  return sum;
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
  const bool is_measured = cell.batch == batch_ && cell.num_new >= kTrialTimes &&
                           state.num_visits - cell.newest <= kRecent;
  const bool is_tried = is_trial_ && num_left_ > 0 && measured_ == best;
  if (state.cells[state.choice].median == 0) {
    state.choice = best;  // nothing is known of either here
  } else if (is_measured || (is_tried && num_left_ == 1)) {
    // A trial may end without times, since some sequence always has prompt rows or catches up.
    state.former = std::exchange(state.choice, best);
    state.review = state.num_visits + kReviewedAfter;
    state.num_reviews = 0;
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
  const bool may_be_best = tokens(length, /*num_errors=*/kMostErrors) * costs[state.choice] >
                           tokens(state.choice) * costs[length];
  return std::clamp(num_explored_iterations(time) * (time - gained) + change,
                    may_be_best ? kLeastHopefulLoss : kLeastLoss, kMostCredit);
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

size_t DraftChooser::next_to_review(size_t bucket, const Costs& costs) {
  Bucket& state = states_[bucket];
  if (state.review == 0 || state.num_visits < state.review) return kUnset;
  const double share =
      tokens(state.former) * costs[state.choice] / (tokens(state.choice) * costs[state.former]);
  const bool is_reviewed = state.num_reviews == 0 || share >= kRivalShare;
  ++state.num_reviews;
  const bool goes_on = is_reviewed && state.num_reviews < kMostReviews;
  state.review = goes_on ? state.num_visits + (kReviewedAfter << state.num_reviews) : 0;
  return is_reviewed ? state.former : kUnset;
}

size_t DraftChooser::next_to_explore(size_t bucket, const Costs& costs, bool reaches_all,
                                     bool reaches_some) {
  Bucket& state = states_[bucket];
  const Cell& chosen = state.cells[state.choice];
  const size_t former = next_to_review(bucket, costs);
  if (former != kUnset && reaches_all) return former;
  if (chosen.batch != batch_ || chosen.num_new < kSettled) return kUnset;
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
  if (costs[0] == 0) costs = first_costs(bucket);
  measured_bucket_ = bucket;
  const size_t tried = settle(bucket, costs);
  current_ = state.choice;
  current_seqs_ = num_seqs;
  is_trial_ = tried != kUnset;
  if (is_trial_) {
    measured_ = tried;
    state.cells[tried].is_once = false;
    state.cells[tried].expected_us = costs[tried];
    return {.num_drafts = lengths_[tried]};
  }
  num_left_ = 0;
  // Plain decoding can always be explored.
  const bool is_plain = current_ == 0;
  const size_t again = state.again;
  const int64_t review = state.review;
  measured_ = next_to_explore(bucket, costs, /*reaches_all=*/!is_plain || num_ready >= num_seqs,
                              /*reaches_some=*/!is_plain || num_ready > 0);
  if (measured_ == kUnset) return {.num_drafts = lengths_[current_]};
  const double time = costs[measured_] / costs[current_];
  // Times that were a surprise, and those of a former choice, may be far from the truth.
  const bool is_review = measured_ == state.former && state.review != review;
  num_left_ =
      (is_review || measured_ == again ? kExploredIterations : num_explored_iterations(time)) - 1;
  state.cells[measured_].is_once = num_left_ < kFewestTimes;
  state.cells[measured_].expected_us = costs[measured_];
  return {.num_drafts = lengths_[measured_], .explores = true};
}

int32_t DraftChooser::settled(int32_t num_seqs) const {
  const Bucket& state = states_[bucket_of(std::max(num_seqs, 1))];
  const bool is_known = state.choice != kUnset && state.cells[state.choice].num_times >= kSettled;
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
  const bool is_old = !is_choice && state.num_visits - cell.newest > kRecent;
  if (cell.batch != batch_ || is_old) {
    cell.num_new = 0;
    if (!is_choice) cell.drop_old(kKeptTimes);
  }
  cell.batch = batch_;
  cell.newest = state.num_visits;
  if (is_choice && cell.num_times >= kSettled) {
    ++cell.num_new;
    auto& newest = state.levels[static_cast<size_t>(state.num_levels++ % kNumLevels)];
    newest = static_cast<float>(iteration.us / cell.median);
    state.level = lower_median(state.levels, state.num_levels);
    return;
  }
  const double chosen = is_choice || state.choice == kUnset ? 0 : state.cells[state.choice].median;
  const double long_time = chosen > 0 ? kDear * chosen : HUGE_VAL;
  const bool is_first = cell.median == 0;
  const bool is_known = cell.add(iteration.us / state.level, long_time);
  const bool is_surprise = is_first && is_known && cell.expected_us > 0 &&
                           cell.median * state.level > kSurprise * cell.expected_us;
  if (is_surprise || (cell.is_once && !is_known)) state.again = length;
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
                     .num_samples = cell.num_times,
                     .us = cell.median * states_[b].level});
    }
  }
  return all;
}

}  // namespace paceline
