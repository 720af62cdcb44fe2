// SPDX-License-Identifier: Apache-2.0
// What the choice of k' loses against the best fixed k', on random tables of times and acceptances.
// No test depends on a clock. A failure prints the seed; PACELINE_SEED repeats it.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "runner/iteration_runner.h"
#include "support/scripted_drafts.h"
#include "support/seed.h"
#include "tuning/draft_chooser.h"

namespace paceline {
namespace {

using ::paceline::testing::base_seed;
using ::paceline::testing::test_level;

int num_tables() { return test_level() >= 3 ? 2000 : 100; }

// A machine and a drafter. Half of the machines are like a GPU, on which some rows cost little and
// times hardly vary. The others are like CPU cores beside other work, on which every row counts.
class Table {
 public:
  // `is_shared`: other programs and other machines on the same host change the speed all the time.
  explicit Table(uint64_t seed, bool is_shared = false)
      : random_(seed), drafts_{.buckets = decode_buckets(64)} {
    const bool is_gpu = seed % 2 == 0;
    plain_us_ = ratio(150, 50000);
    row_us_ = plain_us_ * (is_gpu ? ratio(0.002, 0.03) : ratio(0.05, 0.6));
    num_free_rows_ = is_gpu ? ratio(16, 128) : between(1, 8);
    draft_us_ = plain_us_ * ratio(0.03, 0.5);
    draft_row_us_ = row_us_ * between(0.02, 0.6);
    acceptance_ = between(0.02, 0.95);
    next_acceptance_ = between(0.75, 1);
    for (int32_t k = 0; k <= 7; ++k) {
      for (const int32_t n : drafts_.buckets) rest_[{k, n}] = between(0.97, 1.03);
    }
    const std::array<std::vector<int32_t>, 3> lengths = {
        {{0, 1, 2, 3}, {0, 1, 2, 4}, {0, 1, 2, 4, 7}}};
    drafts_.lengths = lengths[seed / 2 % 3];
    drafts_.noise = is_gpu ? between(0, 0.02) : between(0.01, 0.06);
    drafts_.spikes = is_gpu ? 0.001 : 0.02;
    if (is_shared) {
      drafts_.speeds = 0.2;
      drafts_.noise = 0.08;
      drafts_.spikes = 0.04;
    }
    drafts_.random.seed(seed);
    drafts_.acceptance = [this](int32_t i) {
      return std::clamp(acceptance_ * std::pow(next_acceptance_, i) + acceptance_shift_, 0.01,
                        0.98);
    };
    drafts_.us = [this](int32_t k, int32_t n) {
      const double rows = std::max(0.0, n * (k + 1) - num_free_rows_);
      const double drafting = k * (draft_us_ + draft_row_us_ * n);
      return load_ * rest_.at({k, n}) * (plain_us_ + row_us_ * rows_factor_ * rows + drafting);
    };
    drafts_.chooser = DraftChooser(drafts_.lengths, drafts_.buckets);
  }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // Load, the cost of rows and acceptance are a little different in each part.
  double run_drifting(int32_t parts, int32_t iterations, int32_t num_seqs) {
    drafts_.clear();
    for (int32_t i = 0; i < parts; ++i) {
      drift();
      drafts_.run(iterations, num_seqs);
    }
    return drafts_.share_of_best();
  }
  // Some iterations with each smaller number of sequences, as while requests come, and then with
  // all. At the end no sequence is left. Returns the share of the best fixed k' in the last part.
  double run_batch(int32_t iterations, int32_t num_seqs) {
    for (const int32_t n : drafts_.buckets) {
      if (n < num_seqs) drafts_.run(1, n);
    }
    drafts_.clear();
    drafts_.run(iterations, num_seqs);
    (void)drafts_.chooser.choose(0, 0);
    return drafts_.share_of_best();
  }
  double run(int32_t iterations, int32_t num_seqs) {
    drafts_.clear();
    drafts_.run(iterations, num_seqs);
    return drafts_.share_of_best();
  }

 private:
  void drift() {
    load_ = std::clamp(load_ * between(0.85, 1.18), 0.5, 3.0);
    rows_factor_ = std::clamp(rows_factor_ * between(0.95, 1.05), 0.5, 2.0);
    acceptance_shift_ = std::clamp(acceptance_shift_ + between(-0.06, 0.06), -0.5, 0.5);
  }
  double between(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random_);
  }
  // Uniform in its logarithm.
  double ratio(double low, double high) { return std::exp(between(std::log(low), std::log(high))); }

  std::mt19937_64 random_;
  double plain_us_ = 0;
  double row_us_ = 0;
  double num_free_rows_ = 0;
  double draft_us_ = 0;
  double draft_row_us_ = 0;  // of each sequence, in each draft step
  double acceptance_ = 0;    // of the first draft
  double next_acceptance_ = 0;
  std::map<std::pair<int32_t, int32_t>, double> rest_;  // what the formula does not know
  double load_ = 1;
  double rows_factor_ = 1;
  double acceptance_shift_ = 0;
  ScriptedDrafts drafts_;
};

// Shares of the best fixed k', one for each table.
class Shares {
 public:
  void add(double share, uint64_t seed) { all_.emplace_back(share, seed); }
  // Random tables have no worst case: of 500 tables one may be below `least`, so of 100 none.
  void check(double least, double mean, const std::string& of) {
    std::sort(all_.begin(), all_.end());
    const auto below = std::count_if(all_.begin(), all_.end(),
                                     [&](const auto& table) { return table.first < least; });
    const auto [share, seed] = all_.front();
    EXPECT_LE(below, static_cast<int64_t>(all_.size() / 500))
        << of << ": below " << least << "; the lowest is " << share << ", PACELINE_SEED=" << seed;
    EXPECT_GE(share, 0.7) << of << ", PACELINE_SEED=" << seed;
    const double sum =
        std::accumulate(all_.begin(), all_.end(), 0.0,
                        [](double total, const auto& table) { return total + table.first; });
    EXPECT_GE(sum / static_cast<double>(all_.size()), mean) << of;
  }
  // After `check`: a twentieth of all are at most this.
  [[nodiscard]] double low() const { return all_[all_.size() / 20].first; }

 private:
  std::vector<std::pair<double, uint64_t>> all_;
};

// A new engine, the same number of sequences all the time.
TEST(DraftChooserRegret, LosesTwoPercentAtMostOnceItHasLearnt) {
  for (const int32_t num_seqs : {1, 4, 16, 64}) {
    Shares first;
    Shares later;
    for (int i = 0; i < num_tables(); ++i) {
      const uint64_t seed = base_seed() + static_cast<uint64_t>(i);
      Table table(seed);
      first.add(table.run(4000, num_seqs), seed);
      later.add(table.run(8000, num_seqs), seed);
    }
    const std::string of = std::to_string(num_seqs) + " sequences, ";
    first.check(0.9, 0.99, of + "the first 4,000 iterations");
    EXPECT_GE(first.low(), 0.98) << num_seqs << " sequences";
    later.check(0.98, 0.995, of + "after 4,000 iterations");
  }
}

// Batches of 1, 16 and 64 sequences by turns, as in `paceline bench latency`. What one number of
// sequences teaches must not mislead another.
TEST(DraftChooserRegret, LosesLittleInBatchesOfDifferentSizes) {
  struct Size {
    int32_t num_seqs;
    int32_t iterations;
    double first;  // the least share in the first round, of a table and on average
    double first_mean;
  };
  std::map<int32_t, Shares> first;
  std::map<int32_t, Shares> later;
  const std::array<Size, 3> sizes = {
      {{1, 1000, 0.9, 0.98}, {16, 256, 0.9, 0.98}, {64, 128, 0.8, 0.975}}};
  for (int i = 0; i < num_tables(); ++i) {
    const uint64_t seed = base_seed() + static_cast<uint64_t>(i);
    Table table(seed);
    std::map<int32_t, double> sum;
    for (int round = 0; round < 9; ++round) {
      for (const Size& size : sizes) {
        const double share = table.run_batch(size.iterations, size.num_seqs);
        if (round == 0) first[size.num_seqs].add(share, seed);
        if (round > 0) sum[size.num_seqs] += share / 8;
      }
    }
    for (const Size& size : sizes) later[size.num_seqs].add(sum[size.num_seqs], seed);
  }
  for (const Size& size : sizes) {
    const std::string of = std::to_string(size.num_seqs) + " sequences, ";
    first[size.num_seqs].check(size.first, size.first_mean, of + "the first batch");
    later[size.num_seqs].check(0.93, 0.995, of + "later batches");
    EXPECT_GE(later[size.num_seqs].low(), 0.98) << size.num_seqs << " sequences";
  }
}

// The machine's speed changes every 30 iterations or so, by a fifth, which was measured on two
// cores of a virtual machine. Explorations of three iterations are then often wrong.
TEST(DraftChooserRegret, LosesLittleOnASharedMachine) {
  for (const int32_t num_seqs : {1, 16, 64}) {
    Shares steady;
    for (int i = 0; i < num_tables(); ++i) {
      const uint64_t seed = base_seed() + static_cast<uint64_t>(i);
      Table table(seed, /*is_shared=*/true);
      table.run(4000, num_seqs);
      steady.add(table.run(8000, num_seqs), seed);
    }
    steady.check(0.85, 0.992, std::to_string(num_seqs) + " sequences");
    EXPECT_GE(steady.low(), 0.97) << num_seqs << " sequences";
  }
}

// Load, the cost of rows and acceptance change all the time.
TEST(DraftChooserRegret, FollowsWhatDrifts) {
  for (const int32_t num_seqs : {1, 16, 64}) {
    Shares shares;
    for (int i = 0; i < num_tables(); ++i) {
      const uint64_t seed = base_seed() + static_cast<uint64_t>(i);
      Table table(seed);
      table.run(2000, num_seqs);
      shares.add(table.run_drifting(60, 200, num_seqs), seed);
    }
    shares.check(0.94, 0.995, std::to_string(num_seqs) + " sequences, with drift");
    EXPECT_GE(shares.low(), 0.98) << num_seqs << " sequences";
  }
}

}  // namespace
}  // namespace paceline
