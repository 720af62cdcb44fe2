// SPDX-License-Identifier: Apache-2.0
#pragma once

// Random requests, and an engine driven until all of them have been answered.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <paceline/executor.h>

#include "support/seed.h"

namespace paceline::testing {

struct Job {
  std::vector<int32_t> prompt;
  SamplingOptions sampling;
  // See Request.
  int32_t num_resumed_tokens = 0;
  int32_t num_speculative_tokens = -1;
  std::function<std::shared_ptr<TokenConstraint>()> make_constraint;  // null: none

  [[nodiscard]] Request request() const {
    Request request{.prompt = prompt, .sampling = sampling};
    request.num_resumed_tokens = num_resumed_tokens;
    request.num_speculative_tokens = num_speculative_tokens;
    if (make_constraint) request.constraints.push_back(make_constraint());
    return request;
  }
};

struct Outcome {
  std::vector<int32_t> tokens;
  FinishReason reason = FinishReason::kNone;
  std::string error;
  SpeculationCounters counters;
  int32_t num_cached_tokens = 0;
  std::vector<std::vector<TokenLogprob>> logprobs;         // by token
  std::vector<std::vector<TokenLogprob>> prompt_logprobs;  // by prompt token from the second on
  int32_t num_prompt_deliveries = 0;                       // of those
};

// Picks one of its arguments at random: `const Pick pick{random};`, then pick(1, 7, 24).
struct Pick {
  std::mt19937_64& random;

  template <class... Values>
  auto operator()(Values... values) const {
    const std::array all = {values...};
    return all[random() % all.size()];
  }
};

inline std::vector<Job> random_jobs(std::mt19937_64& random, int32_t count, int32_t vocab,
                                    double temperature, int32_t longest_prompt = 60,
                                    int32_t most_tokens = 40) {
  std::vector<Job> jobs;
  for (int32_t i = 0; i < count; ++i) {
    Job job;
    const auto length = static_cast<int32_t>(1 + random() % longest_prompt);
    for (int32_t t = 0; t < length; ++t) {
      job.prompt.push_back(static_cast<int32_t>(random() % vocab));
    }
    job.sampling.temperature = temperature;
    job.sampling.seed = random();
    job.sampling.max_tokens = static_cast<int32_t>(1 + random() % most_tokens);
    if (random() % 3 == 0) job.sampling.stop_token_ids = {static_cast<int32_t>(random() % vocab)};
    jobs.push_back(job);
  }
  return jobs;
}

// Gives each job its own random parameters of the logits pipeline.
inline void mix_sampling(std::vector<Job>& jobs, std::mt19937_64& random, int32_t vocab) {
  const auto one_in = [&](uint64_t n) { return random() % n == 0; };
  const auto token = [&] { return static_cast<int32_t>(random() % static_cast<uint64_t>(vocab)); };
  const auto real = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
  };
  for (Job& job : jobs) {
    SamplingOptions& s = job.sampling;
    if (one_in(3)) s.top_k = static_cast<int32_t>(1 + random() % 20);
    if (one_in(3)) s.top_p = real(0.3, 1.0);
    if (one_in(4)) s.min_p = real(0.0, 0.3);
    if (one_in(4)) s.repetition_penalty = real(0.8, 1.8);
    if (one_in(4)) s.presence_penalty = real(-1.0, 2.0);
    if (one_in(4)) s.frequency_penalty = real(-0.5, 1.5);
    // With few tokens to choose from a stop token is likely; it would end most requests at once.
    if (one_in(3) || !s.stop_token_ids.empty()) {
      s.min_tokens = static_cast<int32_t>(random() % (s.max_tokens + 1));
    }
    if (one_in(4)) {
      // A request may have 1,024 of them.
      for (int32_t t = token() % 5; t < vocab; t += std::max(7, vocab / 1000)) {
        s.logit_bias.push_back({t, static_cast<float>(real(-5, 5))});
      }
    }
    for (uint64_t i = 0, count = one_in(3) ? random() % 6 : 0; i < count; ++i) {
      std::vector<int32_t>& word = s.bad_words.emplace_back(1 + random() % 3);
      for (int32_t& t : word) t = token();
    }
    if (one_in(4)) {
      for (int32_t t = 0; t < vocab; ++t) {
        if (one_in(2)) s.allowed_token_ids.push_back(t);
      }
      if (s.allowed_token_ids.empty()) s.allowed_token_ids = {token()};
    }
  }
}

// Makes some of the jobs ask for logprobs, of outputs or prompts or both.
inline void mix_logprobs(std::vector<Job>& jobs, std::mt19937_64& random, int32_t max_logprobs) {
  const auto pick = [&] {
    const int32_t choices[] = {-1, 0, 1, max_logprobs};
    return choices[random() % 4];
  };
  for (Job& job : jobs) {
    job.sampling.logprobs = pick();
    job.sampling.prompt_logprobs = pick();
  }
}

// Gives half of the jobs fewer drafts than k, or none.
inline void mix_num_drafts(std::vector<Job>& jobs, std::mt19937_64& random, int32_t k) {
  for (Job& job : jobs) {
    if (random() % 2 != 0) continue;
    job.num_speculative_tokens = static_cast<int32_t>(random() % static_cast<uint64_t>(k + 1));
  }
}

// Whether two lists of logprobs are equal, bit for bit.
inline bool same_logprobs(const std::vector<std::vector<TokenLogprob>>& a,
                          const std::vector<std::vector<TokenLogprob>>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.size() == y.size() &&
           std::memcmp(x.data(), y.data(), x.size() * sizeof(TokenLogprob)) == 0;
  });
}

// What the runs of an equality test have met: the test proves nothing unless drafts were accepted
// and rejected and sequences preempted.
struct Tally {
  int64_t accepted = 0;
  int64_t drafted = 0;
  int64_t preemptions = 0;

  void add(const Executor& executor, const std::vector<Outcome>& outcomes) {
    for (const Outcome& outcome : outcomes) {
      accepted += outcome.counters.num_accepted_tokens;
      drafted += outcome.counters.num_draft_tokens;
    }
    preemptions += executor.stats().num_preemptions;
  }
  void expect_both_verdicts() const {
    EXPECT_GT(accepted, drafted / 20);
    EXPECT_LT(accepted, drafted * 19 / 20);
  }
  void expect_all(int64_t min_preemptions = 20) const {
    expect_both_verdicts();
    EXPECT_GT(preemptions, min_preemptions);
  }
};

// The counters of a job are those of its own drafts: none beyond the number that it may have.
inline void expect_own_drafts(const Job& job, const Outcome& outcome, int32_t k) {
  const SpeculationCounters& counted = outcome.counters;
  const int32_t own = job.num_speculative_tokens < 0 ? k : job.num_speculative_tokens;
  const auto sum = [](const std::vector<int64_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), int64_t{0});
  };
  EXPECT_EQ(counted.drafted_per_position.size(), static_cast<size_t>(own));
  EXPECT_EQ(counted.accepted_per_position.size(), static_cast<size_t>(own));
  EXPECT_EQ(counted.num_draft_tokens, sum(counted.drafted_per_position));
  EXPECT_EQ(counted.num_accepted_tokens, sum(counted.accepted_per_position));
  EXPECT_LE(counted.num_draft_tokens + counted.num_discarded_tokens, counted.num_iterations * own);
}

// Runs all jobs at once; `cancelled` of them are neighbours that get cancelled at random moments.
inline std::vector<Outcome> run(Executor& executor, const std::vector<Job>& jobs,
                                const std::vector<Job>& neighbours = {}, uint64_t seed = 0) {
  std::mt19937_64 random(seed);
  std::map<RequestId, size_t> index;
  std::vector<RequestId> to_cancel;
  std::vector<Outcome> outcomes(jobs.size());
  std::vector<Request> requests;
  for (size_t i = 0; i < std::max(jobs.size(), neighbours.size()); ++i) {
    if (i < neighbours.size()) requests.push_back(neighbours[i].request());
    if (i < jobs.size()) requests.push_back(jobs[i].request());
  }
  // At once, so that how many are preempted depends on no thread being late.
  const std::vector<RequestId> ids = executor.add_requests(std::move(requests)).value();
  for (size_t i = 0, next = 0; next < ids.size(); ++i) {
    if (i < neighbours.size()) to_cancel.push_back(ids[next++]);
    if (i < jobs.size()) index[ids[next++]] = i;
  }
  size_t left = jobs.size();
  while (left > 0) {
    if (!to_cancel.empty() && random() % 4 == 0) {
      executor.cancel(to_cancel.back());
      to_cancel.pop_back();
    }
    for (RequestEvent& event : executor.poll(1)) {
      const auto found = index.find(event.request_id);
      if (found == index.end()) continue;
      Outcome& outcome = outcomes[found->second];
      outcome.tokens.insert(outcome.tokens.end(), event.token_ids.begin(), event.token_ids.end());
      outcome.logprobs.insert(outcome.logprobs.end(), event.logprobs.begin(), event.logprobs.end());
      if (event.prompt_logprobs != nullptr) {
        ++outcome.num_prompt_deliveries;
        outcome.prompt_logprobs = *event.prompt_logprobs;
      }
      if (event.finish_reason == FinishReason::kNone) continue;
      outcome.reason = event.finish_reason;
      outcome.error = event.error;
      outcome.counters = event.counters;
      outcome.num_cached_tokens = event.num_cached_tokens;
      --left;
    }
  }
  for (const RequestId id : to_cancel) executor.cancel(id);
  return outcomes;
}

// Outcomes of the same jobs that must not differ.
inline void expect_same(const std::vector<Outcome>& actual, const std::vector<Outcome>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(actual[i].error, expected[i].error) << "job " << i;
    ASSERT_EQ(actual[i].tokens, expected[i].tokens) << "job " << i;
    ASSERT_EQ(actual[i].reason, expected[i].reason) << "job " << i;
    EXPECT_TRUE(same_logprobs(actual[i].logprobs, expected[i].logprobs)) << "job " << i;
    EXPECT_TRUE(same_logprobs(actual[i].prompt_logprobs, expected[i].prompt_logprobs))
        << "job " << i;
  }
}

}  // namespace paceline::testing
