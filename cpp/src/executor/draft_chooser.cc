// SPDX-License-Identifier: Apache-2.0
#include "executor/draft_chooser.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace paceline {
namespace {

// Another k' must promise this much more, so that noise does not change the choice.
constexpr double kMargin = 1.01;
// The share of iterations that explore.
constexpr double kExploredShare = 0.01;
// Iterations of an exploration. The first verifies what the one before has drafted, so its time is
// used. The host chooses before it has read the newest results.
constexpr int32_t kExploredIterations = 4;
// Times that are not older, in iterations with as many sequences, can be compared with those of
// now: other work on the machine comes and goes.
constexpr int64_t kRecent = 64;
// Iterations that may explore are saved up to as many.
constexpr double kMostCredit = 40;
// Iterations with a number of sequences before values of k' are explored for it.
constexpr int64_t kSettled = 6;
// How often a k' that cannot be the best is passed over before it is explored.
constexpr int32_t kSkipped = 8;
// Times of which the median is a cost.
constexpr int64_t kFewestTimes = 2;
// Acceptance is a mean over about as many windows, or iterations where there are fewer windows.
constexpr double kRememberedWindows = 1024;
constexpr double kRememberedIterations = 1000;
// Before the first windows: drafts that are as if verified, and accepted.
constexpr double kFirstReached = 8;
constexpr double kFirstAccepted = 6;
// What has been learned is not forgotten below as many.
constexpr double kFewestReached = kFirstReached;
// Numbers of sequences whose costs are alike: their quotient is at most this.
constexpr double kNearby = 1.6;

}  // namespace

void DraftChooser::Iteration::add_window(int32_t num_drafts, int32_t num_accepted) {
  for (int32_t i = 0; i < std::min(num_drafts, num_accepted + 1); ++i) {
    ++reached[static_cast<size_t>(i)];
    accepted[static_cast<size_t>(i)] += i < num_accepted ? 1 : 0;
  }
}

void DraftChooser::Cell::add(double us) {
  times[static_cast<size_t>(count % kNumTimes)] = static_cast<float>(us);
  ++count;
  std::array<float, kNumTimes> sorted = times;
  const auto end = sorted.begin() + std::min<int64_t>(count, kNumTimes);
  const auto middle = sorted.begin() + (end - sorted.begin()) / 2;
  std::nth_element(sorted.begin(), middle, end);
  median = *middle;
}

bool DraftChooser::Cell::is_known() const { return count >= kFewestTimes; }

DraftChooser::DraftChooser(std::vector<int32_t> lengths, std::vector<int32_t> buckets)
    : lengths_(std::move(lengths)),
      buckets_(std::move(buckets)),
      states_(buckets_.size()),
      num_skipped_(lengths_.size()),
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

bool DraftChooser::is_known_nearby(size_t bucket, size_t length) const {
  for (size_t b = 0; b < states_.size(); ++b) {
    const double quotient = static_cast<double>(std::max(buckets_[b], buckets_[bucket])) /
                            std::min(buckets_[b], buckets_[bucket]);
    if (quotient <= kNearby && states_[b].cells[length].is_known()) return true;
  }
  return false;
}

double DraftChooser::cost(size_t bucket, size_t length) const {
  const std::vector<Cell>& cells = states_[bucket].cells;
  if (cells[length].is_known()) return cells[length].median;
  // From the nearest bucket that knows this k' and one that this bucket knows, too.
  double best = 0;
  double nearest = INFINITY;
  for (size_t b = 0; b < states_.size(); ++b) {
    const std::vector<Cell>& others = states_[b].cells;
    if (!others[length].is_known()) continue;
    const double distance = std::abs(std::log(static_cast<double>(buckets_[b]) / buckets_[bucket]));
    if (distance >= nearest) continue;
    for (size_t i = 0; i < cells.size(); ++i) {
      if (!cells[i].is_known() || !others[i].is_known()) continue;
      nearest = distance;
      best = cells[i].median * others[length].median / others[i].median;
      break;
    }
  }
  return best;
}

size_t DraftChooser::settle(size_t bucket) {
  Bucket& state = states_[bucket];
  if (state.choice == kUnset) state.choice = current_;
  const double us = cost(bucket, state.choice);
  if (us == 0) return kUnset;
  size_t best = state.choice;
  double most = kMargin * tokens(best) / us;
  for (size_t i = 0; i < lengths_.size(); ++i) {
    const double other_us = cost(bucket, i);
    if (other_us == 0 || tokens(i) / other_us <= most) continue;
    most = tokens(i) / other_us;
    best = i;
  }
  Cell& cell = state.cells[best];
  if (best != state.choice && cell.is_known() && state.num_visits - cell.newest > kRecent) {
    cell = {};
    return best;
  }
  state.choice = best;
  return kUnset;
}

size_t DraftChooser::next_to_explore(size_t bucket) {
  const Bucket& state = states_[bucket];
  if (state.num_visits < kSettled || !state.cells[state.choice].is_known()) return kUnset;
  // First every k' of which nothing is known, then one after another.
  for (size_t i = 0; i < lengths_.size(); ++i) {
    if (!is_known_nearby(bucket, i)) return i;
  }
  const double us = cost(bucket, state.choice);
  for (size_t n = 0; n < lengths_.size() && (pending_ == kUnset || pending_ == state.choice); ++n) {
    pending_ = next_;
    next_ = (next_ + 1) % lengths_.size();
    if (pending_ == state.choice) continue;
    // Even if all drafts were accepted, it would not be the best, unless its time has changed.
    const double other_us = cost(bucket, pending_);
    const bool is_hopeless =
        other_us > 0 && (lengths_[pending_] + 1) / other_us <= tokens(state.choice) / us;
    if (is_hopeless && ++num_skipped_[pending_] < kSkipped) pending_ = kUnset;
  }
  if (pending_ == kUnset || pending_ == state.choice) return kUnset;
  // One that takes longer is explored less often.
  const double iterations = kExploredIterations * std::max(1.0, cost(bucket, pending_) / us);
  if (credit_ < iterations) return kUnset;
  credit_ -= iterations;
  num_skipped_[pending_] = 0;
  return std::exchange(pending_, kUnset);
}

auto DraftChooser::choose(int32_t num_seqs) -> Choice {
  const size_t bucket = bucket_of(std::max(num_seqs, 1));
  Bucket& state = states_[bucket];
  ++state.num_visits;
  credit_ = std::min(credit_ + kExploredShare, kMostCredit);
  if (num_left_ > 0 && explored_bucket_ == bucket) {
    --num_left_;
    return {.num_drafts = lengths_[explored_], .explores = true};
  }
  num_left_ = 0;
  explored_ = settle(bucket);
  current_ = state.choice;
  current_seqs_ = num_seqs;
  if (explored_ == kUnset) explored_ = next_to_explore(bucket);
  if (explored_ == kUnset) return {.num_drafts = lengths_[current_]};
  explored_bucket_ = bucket;
  num_left_ = kExploredIterations - 1;
  return {.num_drafts = lengths_[explored_], .explores = true};
}

void DraftChooser::observe(const Iteration& iteration) {
  for (size_t i = 0; i < reached_.size(); ++i) {
    const double forgotten = reached_[i] > kFewestReached ? 1 / kRememberedIterations : 0;
    const double kept = std::exp(-iteration.reached[i] / kRememberedWindows - forgotten);
    reached_[i] = reached_[i] * kept + iteration.reached[i];
    accepted_[i] = accepted_[i] * kept + iteration.accepted[i];
  }
  if (iteration.us <= 0) return;
  const auto length = std::find(lengths_.begin(), lengths_.end(), iteration.num_drafts);
  if (length == lengths_.end()) return;
  Bucket& state = states_[bucket_of(iteration.num_seqs)];
  Cell& cell = state.cells[static_cast<size_t>(length - lengths_.begin())];
  cell.add(iteration.us);
  cell.newest = state.num_visits;
}

std::vector<DraftChooser::Estimate> DraftChooser::estimates(int32_t num_seqs) const {
  std::vector<Estimate> all;
  const size_t bucket = bucket_of(std::max(num_seqs, 1));
  for (size_t i = 0; i < lengths_.size(); ++i) {
    all.push_back({.num_drafts = lengths_[i], .tokens = tokens(i), .us = cost(bucket, i)});
  }
  return all;
}

std::vector<DraftChooser::Cost> DraftChooser::costs() const {
  std::vector<Cost> all;
  for (size_t b = 0; b < states_.size(); ++b) {
    for (size_t i = 0; i < lengths_.size(); ++i) {
      const Cell& cell = states_[b].cells[i];
      if (cell.count == 0) continue;
      all.push_back({.num_seqs = buckets_[b],
                     .num_drafts = lengths_[i],
                     .num_samples = static_cast<int32_t>(std::min<int64_t>(cell.count, kNumTimes)),
                     .us = cell.median});
    }
  }
  return all;
}

}  // namespace paceline
