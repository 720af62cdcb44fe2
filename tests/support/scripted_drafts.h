// SPDX-License-Identifier: Apache-2.0
#pragma once

// A device and a drafter whose times and acceptance are given, which a DraftChooser drives.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <random>
#include <vector>

#include "tuning/draft_chooser.h"

namespace paceline {

// As in an engine, a choice is made before the results of the iteration before it are known.
struct ScriptedDrafts {
  std::vector<int32_t> lengths = {0, 1, 2, 3};
  std::vector<int32_t> buckets = {1, 2, 4, 8, 16, 64};
  // Time of an iteration with k' drafts and these sequences.
  std::function<double(int32_t, int32_t)> us = [](int32_t k, int32_t) { return 100 + 10 * k; };
  // Probability that draft i is accepted if those before it are.
  std::function<double(int32_t)> acceptance = [](int32_t) { return 0.8; };
  double noise = 0;   // relative standard deviation of times
  double spikes = 0;  // share of times that other work makes up to 3 times as long
  // Relative standard deviation of the machine's speed, which changes every 30 iterations or so.
  double speeds = 0;
  bool is_timed = true;
  // Of an iteration after as many others: the sequences for which an exploration can draft while k'
  // is 0. If it cannot for all, its time says nothing.
  std::function<int32_t(int64_t, int32_t)> num_ready = [](int64_t, int32_t num_seqs) {
    return num_seqs;
  };

  double speed = 1;
  std::mt19937_64 random{1};
  DraftChooser chooser{lengths, buckets};
  std::deque<DraftChooser::Iteration> unread;
  int32_t last = -1;
  int32_t last_drafting = 0;  // sequences
  int64_t num_run = 0;
  std::array<int64_t, 17> counts{};
  int64_t num_explored = 0;
  int64_t num_changes = 0;
  int32_t last_choice = -1;
  // Of all iterations, without noise.
  double sum_us = 0;
  double sum_tokens = 0;
  // Of an engine with each fixed number of drafts in the same time, by index in `lengths`: tokens.
  std::vector<double> fixed_tokens;

  void run(int32_t iterations, int32_t num_seqs) {
    for (int32_t n = 0; n < iterations; ++n) run_one(num_seqs);
  }
  // Tokens of a window with k drafts, on average.
  double tokens(int32_t k) {
    double sum = 1;
    double product = 1;
    for (int32_t i = 0; i < k; ++i) sum += product *= acceptance(i);
    return sum;
  }
  double unit() { return std::uniform_real_distribution<double>(0, 1)(random); }
  // The tokens of the choices as a share of those of the best fixed number in the same time.
  [[nodiscard]] double share_of_best() const {
    return sum_tokens / *std::max_element(fixed_tokens.begin(), fixed_tokens.end());
  }
  void clear() {
    counts = {};
    num_explored = num_changes = 0;
    sum_us = sum_tokens = 0;
    fixed_tokens.assign(lengths.size(), 0);
  }

 private:
  // What is measured instead of 1 us.
  double measured() {
    std::normal_distribution<double> normal(1, noise);
    if (speeds > 0 && unit() < 1.0 / 30) {
      speed = std::lognormal_distribution<double>(0, speeds)(random);
    }
    const double factor = speed * (noise > 0 ? std::max(0.3, normal(random)) : 1);
    return spikes > 0 && unit() < spikes ? factor * (1 + 2 * unit()) : factor;
  }
  void run_one(int32_t num_seqs) {
    const int32_t ready = num_ready(num_run++, num_seqs);
    const DraftChooser::Choice choice = chooser.choose(num_seqs, ready);
    const bool is_part = choice.explores && chooser.current() == 0 && choice.num_drafts > 0;
    const int32_t num_drafting = is_part ? ready : num_seqs;
    ++counts[static_cast<size_t>(choice.num_drafts)];
    num_explored += choice.explores ? 1 : 0;
    if (!choice.explores) {
      num_changes += last_choice >= 0 && choice.num_drafts != last_choice ? 1 : 0;
      last_choice = choice.num_drafts;
    }
    DraftChooser::Iteration iteration{.num_seqs = num_seqs, .num_drafts = choice.num_drafts};
    const int32_t verified = last < 0 ? 0 : std::min(last, choice.num_drafts);
    const int32_t num_windows = std::min(num_drafting, last_drafting);
    for (int32_t i = 0; i < num_windows && verified > 0; ++i) {
      int32_t accepted = 0;
      while (accepted < verified && unit() < acceptance(accepted)) ++accepted;
      iteration.add_window(verified, accepted);
    }
    const double time = us(choice.num_drafts, num_seqs);
    sum_us += time;
    sum_tokens += num_seqs * tokens(verified);
    fixed_tokens.resize(lengths.size());
    for (size_t i = 0; i < lengths.size(); ++i) {
      fixed_tokens[i] += time / us(lengths[i], num_seqs) * num_seqs * tokens(lengths[i]);
    }
    const bool is_whole = num_drafting == num_seqs;
    if (is_timed && is_whole && (choice.num_drafts == 0 || choice.num_drafts == last)) {
      iteration.us = time * measured();
    }
    last = choice.num_drafts;
    last_drafting = num_drafting;
    unread.push_back(iteration);
    if (unread.size() < 2) return;
    chooser.observe(unread.front());
    unread.pop_front();
  }
};

}  // namespace paceline
