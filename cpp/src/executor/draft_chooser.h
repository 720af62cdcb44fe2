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

  // The k' of the next iteration, in which this many sequences decode.
  [[nodiscard]] Choice choose(int32_t num_seqs);
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
  static constexpr int32_t kNumTimes = 9;
  static constexpr size_t kUnset = SIZE_MAX;

  // The newest times of one k' with one number of sequences; their median is the cost.
  struct Cell {
    std::array<float, kNumTimes> times{};
    int64_t count = 0;
    double median = 0;
    int64_t newest = 0;  // visit of the bucket when the newest time came

    void add(double us);
    [[nodiscard]] bool is_known() const;
  };
  struct Bucket {
    std::vector<Cell> cells;  // by k'
    size_t choice = kUnset;   // index in lengths_
    int64_t num_visits = 0;
  };

  [[nodiscard]] size_t bucket_of(int32_t num_seqs) const;
  [[nodiscard]] double tokens(size_t length) const;
  // Time of an iteration; from another bucket if it is not known, and 0 if there is none either.
  [[nodiscard]] double cost(size_t bucket, size_t length) const;
  [[nodiscard]] bool is_known_nearby(size_t bucket, size_t length) const;
  // Sets the bucket's choice. Returns a k' that would be better by times that are old, and must be
  // measured anew first, or kUnset.
  [[nodiscard]] size_t settle(size_t bucket);
  // The k' to explore next, or kUnset.
  [[nodiscard]] size_t next_to_explore(size_t bucket);

  std::vector<int32_t> lengths_;
  std::vector<int32_t> buckets_;
  std::vector<Bucket> states_;
  std::array<double, kMaxDraftTokens> reached_{};
  std::array<double, kMaxDraftTokens> accepted_{};
  std::vector<int32_t> num_skipped_;  // by k': how often it was not explored because it is hopeless
  size_t current_ = 0;
  int32_t current_seqs_ = 0;
  double credit_ = 0;         // iterations that may explore
  size_t next_ = 0;           // the k' to explore after the pending one
  size_t pending_ = kUnset;   // the k' to explore once there is credit
  size_t explored_ = kUnset;  // k' of the exploration under way
  size_t explored_bucket_ = 0;
  int32_t num_left_ = 0;  // iterations of it
};

}  // namespace paceline
