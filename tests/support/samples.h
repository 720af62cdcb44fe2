// SPDX-License-Identifier: Apache-2.0
#pragma once

// Requests of several samples, and the same samples as requests of their own.

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "support/jobs.h"

namespace paceline::testing {

struct SampledJob {
  Job job;
  int32_t num_samples = 1;
};

inline std::vector<SampledJob> sampled(std::vector<Job> jobs, std::mt19937_64& random,
                                       int32_t most_samples) {
  std::vector<SampledJob> result;
  for (Job& job : jobs) {
    const auto count = static_cast<int32_t>(1 + random() % static_cast<uint64_t>(most_samples));
    result.push_back({.job = std::move(job), .num_samples = count});
  }
  return result;
}

// One job a sample, in the order of run_samples: what each must give.
inline std::vector<Job> apart(const std::vector<SampledJob>& jobs) {
  std::vector<Job> result;
  for (const SampledJob& sampled : jobs) {
    for (int32_t i = 0; i < sampled.num_samples; ++i) {
      result.push_back(sampled.job);
      result.back().sampling.seed += static_cast<uint64_t>(i);
    }
  }
  return result;
}

// Prompt tokens that are shared if every sample but the first of each request is a fork.
inline int64_t most_shared_tokens(const std::vector<SampledJob>& jobs) {
  int64_t count = 0;
  for (const SampledJob& sampled : jobs) {
    count += (sampled.num_samples - 1) * (static_cast<int64_t>(sampled.job.prompt.size()) - 1);
  }
  return count;
}

// Runs all jobs at once; `neighbours` get cancelled at random moments, samples of theirs first.
inline std::vector<Outcome> run_samples(Executor& executor, const std::vector<SampledJob>& jobs,
                                        const std::vector<SampledJob>& neighbours = {},
                                        uint64_t seed = 0) {
  std::mt19937_64 random(seed);
  std::vector<Request> requests;
  const auto add = [&](const SampledJob& sampled) {
    requests.push_back({.prompt = sampled.job.prompt,
                        .sampling = sampled.job.sampling,
                        .num_samples = sampled.num_samples});
  };
  for (size_t i = 0; i < std::max(jobs.size(), neighbours.size()); ++i) {
    if (i < neighbours.size()) add(neighbours[i]);
    if (i < jobs.size()) add(jobs[i]);
  }
  const std::vector<RequestId> ids = executor.add_requests(std::move(requests)).value();
  std::map<RequestId, size_t> first_outcome;
  std::vector<std::pair<RequestId, int32_t>> to_cancel;
  size_t left = 0;
  for (size_t i = 0, next = 0; next < ids.size(); ++i) {
    if (i < neighbours.size()) {
      to_cancel.emplace_back(ids[next++], neighbours[i].num_samples);
    }
    if (i < jobs.size()) {
      first_outcome[ids[next++]] = left;
      left += static_cast<size_t>(jobs[i].num_samples);
    }
  }
  std::vector<Outcome> outcomes(left);
  while (left > 0) {
    if (!to_cancel.empty() && random() % 3 == 0) {
      const auto [id, num_samples] = to_cancel.back();
      if (random() % 2 == 0) {
        const auto sample = static_cast<int32_t>(random() % static_cast<uint64_t>(num_samples));
        executor.cancel(id, sample);
      } else {
        executor.cancel(id);
        to_cancel.pop_back();
      }
    }
    for (RequestEvent& event : executor.poll(1)) {
      const auto found = first_outcome.find(event.request_id);
      if (found == first_outcome.end()) continue;
      Outcome& outcome = outcomes[found->second + static_cast<size_t>(event.sample)];
      outcome.tokens.insert(outcome.tokens.end(), event.token_ids.begin(), event.token_ids.end());
      if (event.finish_reason == FinishReason::kNone) continue;
      outcome.reason = event.finish_reason;
      outcome.counters = event.counters;
      outcome.num_cached_tokens = event.num_cached_tokens;
      --left;
    }
  }
  for (const auto& [id, num_samples] : to_cancel) executor.cancel(id);
  return outcomes;
}

}  // namespace paceline::testing
