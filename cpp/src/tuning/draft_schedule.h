// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace paceline {

// A random sequence of values of k', for tests: each stays for a random number of iterations. Also
// a random number of prompt rows for each iteration, and whether the drafter may miss prompts.
class DraftSchedule {
 public:
  // `lengths`: the values to choose from. seed 0: there is no schedule.
  DraftSchedule(uint64_t seed, std::vector<int32_t> lengths)
      : state_(seed), lengths_(std::move(lengths)) {}

  [[nodiscard]] bool is_given() const { return state_ != 0; }
  [[nodiscard]] int32_t next() {
    if (num_left_ == 0) {
      current_ = lengths_[static_cast<size_t>(draw() % lengths_.size())];
      num_left_ = 1 + static_cast<int32_t>(draw() % (draw() % 3 == 0 ? 24 : 3));
    }
    --num_left_;
    return current_;
  }
  [[nodiscard]] int32_t next_prompt_rows() {
    return 1 + static_cast<int32_t>(draw() % (draw() % 4 == 0 ? 300 : 16));
  }
  // Follows from the numbers that have been drawn.
  [[nodiscard]] bool skips_prompts() const { return (state_ >> 40) % 2 == 0; }

 private:
  uint64_t draw() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return state_ >> 33;
  }

  uint64_t state_;
  std::vector<int32_t> lengths_;
  int32_t current_ = 0;
  int32_t num_left_ = 0;
};

}  // namespace paceline
