// SPDX-License-Identifier: Apache-2.0
#pragma once

// Chooses k', the number of drafts, for each iteration: the one that promises the most tokens a
// second. The promise is the quotient of two measurements. The tokens come from the acceptance of
// each draft position. The time comes from earlier iterations with as many sequences and the same
// k'. docs/adaptive.md describes the rules.
//
// Host only; allocates nothing after construction. Not thread-safe.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "wire/limits.h"

namespace paceline {

class DraftChooser {
 public:
  struct Choice {
    int32_t num_drafts = 0;
    bool explores = false;  // it measures a k' that is not thought to be the best
  };

  // One iteration, as its results are read.
  struct Iteration {
    int32_t num_seqs = 0;
    int32_t num_drafts = 0;
    double us = 0;  // 0: the time says nothing about iterations like it
    // Verify windows that had at least i + 1 drafts, the first i of which were accepted, and those
    // of them that accepted draft i, too.
    std::array<int32_t, kMaxDraftTokens> reached{};
    std::array<int32_t, kMaxDraftTokens> accepted{};

    // Adds a window with this many drafts, some of which were accepted.
    void add_window(int32_t num_drafts, int32_t num_accepted);
  };

  // What is known of a k' with a number of sequences.
  struct Estimate {
    int32_t num_drafts = 0;
    double tokens = 0;  // that a sequence is expected to get
    double us = 0;      // 0: not known
  };

  // `lengths`: the values of k', ascending from 0. `buckets`: numbers of sequences, ascending; the
  // times of iterations are kept for each.
  DraftChooser(std::vector<int32_t> lengths, std::vector<int32_t> buckets);

  // The k' of the next iteration, in which this many sequences decode. An exploration can draft for
  // `num_ready` of them, since the drafter has missed too many tokens of the others.
  [[nodiscard]] Choice choose(int32_t num_seqs, int32_t num_ready);
  // The k' that measurements have shown to be the best for a number of sequences; the largest one
  // if there are too few of them.
  [[nodiscard]] int32_t settled(int32_t num_seqs) const;
  void observe(const Iteration& iteration);

  // The k' that was chosen last, without explorations, and the sequences for which.
  [[nodiscard]] int32_t current() const { return lengths_[current_]; }
  [[nodiscard]] int32_t current_seqs() const { return current_seqs_; }
  // By k', for a number of sequences.
  [[nodiscard]] std::vector<Estimate> estimates(int32_t num_seqs) const;
  // The probability that a draft is accepted if those before it are, by position.
  [[nodiscard]] double acceptance(int32_t position) const;
  // The times that have been measured.
  struct Cost {
    int32_t num_seqs = 0;  // the bucket
    int32_t num_drafts = 0;
    int32_t num_samples = 0;
    double us = 0;
  };
  [[nodiscard]] std::vector<Cost> costs() const;

 private:
  static constexpr int32_t kNumTimes = 15;
  static constexpr int32_t kNumLevels = 5;
  static constexpr size_t kUnset = SIZE_MAX;
  // By index in lengths_.
  using Costs = std::array<double, kMaxDraftTokens + 1>;

  // The newest times of one k' with one number of sequences, each divided by the level of the
  // bucket then. Their median is the cost at level 1.
  struct Cell {
    std::array<float, kNumTimes> times{};  // the oldest first
    int32_t num_times = 0;
    double median = 0;    // 0: not known
    int32_t num_new = 0;  // times of this batch that followed each other soon
    int64_t batch = 0;    // of the newest time
    int64_t newest = 0;   // visit of the bucket
    // Visits of the bucket: not explored or tried before this one, and how long it then waits.
    int64_t retry = 0;
    int64_t patience = 0;
    double expected_us = 0;  // when it was last explored or tried
    bool is_once = false;    // the newest exploration measures it only once

    // Returns whether there is a median. A single time is one if it is at least `long_time`.
    bool add(double time, double long_time);
    // Keeps the newest `count` times at most.
    void drop_old(int32_t count);
    void wait(int64_t num_visits);
  };
  struct Bucket {
    std::vector<Cell> cells;  // by k'
    size_t choice = kUnset;   // index in lengths_
    int64_t num_visits = 0;
    // How slow all iterations are, in comparison: other work on the machine comes and goes, and
    // contexts grow. The median of the newest times of choices, each divided by its cost.
    double level = 1;
    std::array<float, kNumLevels> levels{};
    int64_t num_levels = 0;
    double credit = 0;   // iterations that explorations may lose
    size_t former = 0;   // the choice before, which is measured again
    int64_t review = 0;  // visit of that; 0: it has been measured often enough
    int32_t num_reviews = 0;
    size_t again = kUnset;  // explored at once, since its first times were a surprise
  };

  [[nodiscard]] size_t bucket_of(int32_t num_seqs) const;
  // The tokens that a sequence is expected to get, if the probability of each acceptance is larger
  // than its estimate by this many standard errors.
  [[nodiscard]] double tokens(size_t length, double num_errors = 0) const;
  // The times of iterations; those that are not known are estimated. All 0 if nothing is known.
  [[nodiscard]] Costs costs_of(size_t bucket) const;
  // Before anything is known: in plain iterations.
  [[nodiscard]] Costs first_costs(size_t bucket) const;
  // The measured times; others 0.
  [[nodiscard]] Costs measured(size_t bucket) const;
  // The bucket of the most similar number of sequences for which a k' is measured, or kUnset.
  [[nodiscard]] size_t nearest(size_t bucket, size_t length) const;
  // Estimates from the times `known` of another bucket.
  [[nodiscard]] double row_cost(size_t other, const Costs& known) const;
  [[nodiscard]] double plain_cost(size_t bucket, size_t other, const Costs& known,
                                  const Costs& own) const;
  void add_cost_of_other(size_t bucket, size_t length, Costs& costs) const;
  void extrapolate(size_t bucket, Costs& costs) const;
  [[nodiscard]] bool is_known_nearby(size_t bucket, size_t length) const;
  // Sets the choice of a bucket. Returns a k' to try before it is chosen, or kUnset.
  [[nodiscard]] size_t settle(size_t bucket, const Costs& costs);
  // The former choice, if it is to be measured again now, or kUnset.
  [[nodiscard]] size_t next_to_review(size_t bucket, const Costs& costs);
  // The k' to explore next, or kUnset.
  [[nodiscard]] size_t next_to_explore(size_t bucket, const Costs& costs, bool reaches_all,
                                       bool reaches_some);
  [[nodiscard]] size_t next_unknown(size_t bucket, const Costs& costs);
  [[nodiscard]] size_t next_affordable(size_t bucket, const Costs& costs);
  // More drafts than the next value of k' are explored only if that one has been measured, for as
  // many sequences or nearly as many. Estimates for many more rows may be far too low.
  [[nodiscard]] bool may_explore(size_t bucket, size_t length) const;
  // Iterations that an exploration is expected to lose.
  [[nodiscard]] double loss(const Bucket& bucket, const Costs& costs, size_t length) const;

  std::vector<int32_t> lengths_;
  std::vector<int32_t> buckets_;
  std::vector<Bucket> states_;
  std::array<double, kMaxDraftTokens> reached_{};
  std::array<double, kMaxDraftTokens> accepted_{};
  size_t current_ = 0;
  int32_t current_seqs_ = 0;
  int64_t batch_ = 0;         // grows when no sequence decodes
  size_t measured_ = kUnset;  // k' of the exploration or trial under way
  size_t measured_bucket_ = 0;
  bool is_trial_ = false;
  int32_t num_left_ = 0;  // iterations of it
};

}  // namespace paceline
