// SPDX-License-Identifier: Apache-2.0
#pragma once

// A constraint without a grammar: which tokens may follow is a pure function of a salt and of the
// tokens so far. Sometimes one token is forced, often few are allowed, sometimes many.

#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include <paceline/guide.h>

#include "support/jobs.h"
#include "wire/sequence_state.h"

namespace paceline::testing {

class ToyConstraint : public TokenConstraint {
 public:
  ToyConstraint(uint64_t salt, int32_t vocab, int32_t max_delay_us = 0)
      : state_(salt), vocab_(vocab), max_delay_us_(max_delay_us) {}

  void constrain(std::span<const int32_t> emitted, std::vector<int32_t>& drafts, int32_t max_drafts,
                 std::span<uint32_t> masks) override {
    if (max_delay_us_ > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(state_ % max_delay_us_));
    }
    for (const int32_t token : emitted) state_ = next(state_, token);
    uint64_t state = state_;
    const int32_t num_words = mask_words(vocab_);
    for (size_t row = 0;; ++row) {
      int32_t last = -1;
      int32_t num_allowed = 0;
      for (int32_t token = 0; token < vocab_; ++token) {
        if (!allows(state, token)) continue;
        masks[row * num_words + static_cast<size_t>(token / 32)] |= uint32_t{1} << token % 32;
        last = token;
        ++num_allowed;
      }
      if (row < drafts.size() && !allows(state, drafts[row])) drafts.resize(row);
      if (row == drafts.size()) {
        if (num_allowed != 1 || row == static_cast<size_t>(max_drafts)) return;
        drafts.push_back(last);
      }
      state = next(state, drafts[row]);
    }
  }

  // Whether a constraint with this salt allows the tokens, from the first on.
  [[nodiscard]] static bool accepts(uint64_t salt, int32_t vocab,
                                    const std::vector<int32_t>& tokens) {
    const ToyConstraint toy(salt, vocab);
    uint64_t state = salt;
    for (const int32_t token : tokens) {
      if (!toy.allows(state, token)) return false;
      state = next(state, token);
    }
    return true;
  }

 private:
  static uint64_t mix(uint64_t x) {
    x ^= x >> 31;
    x *= 0x9e3779b97f4a7c15u;
    return x ^ x >> 29;
  }
  static uint64_t next(uint64_t state, int32_t token) {
    return mix(state + static_cast<uint64_t>(token) * 0xbf58476d1ce4e5b9u + 1);
  }
  [[nodiscard]] bool allows(uint64_t state, int32_t token) const {
    const auto only = static_cast<int32_t>(mix(state) % static_cast<uint64_t>(vocab_));
    if (token == only) return true;
    switch (state % 4) {
      case 0:
        return false;  // forced
      case 1:
        return mix(state ^ static_cast<uint64_t>(token)) % 16 == 0;
      default:
        return mix(state ^ static_cast<uint64_t>(token)) % 2 == 0;
    }
  }

  uint64_t state_;
  int32_t vocab_;
  int32_t max_delay_us_;
};

// Gives three of four jobs a constraint, whose salt is the job's seed.
inline void constrain_some(std::vector<Job>& jobs, std::mt19937_64& random, int32_t vocab,
                           int32_t max_delay_us = 0) {
  for (Job& job : jobs) {
    if (random() % 4 == 0) continue;
    job.make_constraint = [=, salt = job.sampling.seed] {
      return std::make_shared<ToyConstraint>(salt, vocab, max_delay_us);
    };
  }
}

}  // namespace paceline::testing
