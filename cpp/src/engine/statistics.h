// SPDX-License-Identifier: Apache-2.0
#pragma once

// The counts of the engine: of one iteration, since the start, and of one sample.

#include <array>
#include <cstdint>
#include <vector>

#include <paceline/executor.h>

#include "runner/runner.h"
#include "scheduler/iteration_plan.h"
#include "scheduler/scheduler.h"
#include "wire/draft_source.h"
#include "wire/limits.h"
#include "wire/sequence_result.h"

namespace paceline {

// Adds what an iteration did to a sample's counters.
void count(const SequenceResult& result, SpeculationCounters& counters);

// Counts that only grow. ExecutorStats says what they count.
struct EngineCounts {
  int64_t iterations = 0;
  int64_t finished = 0;
  int64_t failed = 0;
  int64_t cancelled = 0;
  int64_t preemptions = 0;
  int64_t prompt_tokens = 0;
  int64_t shared_tokens = 0;
  int64_t queried_tokens = 0;
  int64_t hit_tokens = 0;
  int64_t emitted_tokens = 0;
  int64_t verify_windows = 0;
  int64_t draft_tokens = 0;
  int64_t accepted_tokens = 0;
  int64_t target_mixture_layers = 0;
  int64_t target_experts_hit = 0;
  int64_t draft_mixture_layers = 0;
  int64_t draft_experts_hit = 0;
  int64_t host_us = 0;
  std::array<int64_t, kMaxDraftTokens> drafted_per_position{};
  std::array<int64_t, kMaxDraftTokens> accepted_per_position{};
  // By k'.
  std::array<int64_t, kMaxDraftTokens + 1> iterations_per_length{};
  std::array<int64_t, kMaxDraftTokens + 1> us_per_length{};

  // What has been counted since an earlier state.
  [[nodiscard]] EngineCounts since(const EngineCounts& earlier) const;
};

// What one iteration did.
struct IterationStatistics {
  int32_t num_decoding = 0;  // sequences that emitted from a verify window
  int32_t num_prefill = 0;   // sequences with prefill or score rows
  int32_t num_drafts = 0;    // k'
  EngineCounts counts;       // without the counts per position
  // Verify windows by the number of drafts that were verified, and accepted.
  std::array<int32_t, kMaxDraftTokens + 1> num_drafted{};
  std::array<int32_t, kMaxDraftTokens + 1> num_accepted{};
  // Verify windows with drafts by the source of the drafts, and their drafts.
  struct Drafted {
    int32_t windows = 0;
    int32_t drafted = 0;
    int32_t accepted = 0;
  };
  std::array<Drafted, kNumDraftSources> by_source{};

  // `is_delivered`: the sequence has not been cancelled or preempted since the launch.
  void add(const PlannedSequence& launch, const SequenceResult& result, bool is_delivered);
  void add(const std::array<ExpertCounts, kNumModels>& experts);
};

// Not thread-safe.
class EngineStatistics {
 public:
  // Counts since the start.
  [[nodiscard]] const EngineCounts& counts() const { return counts_; }
  // Counts since the last reset, with k entries per position, and the load.
  [[nodiscard]] ExecutorStats stats(int32_t num_draft_tokens) const;
  [[nodiscard]] const IterationTimes& times() const { return times_; }
  void reset();

  // Makes room for the counts of these methods, which are kept when others take their place.
  void add_methods(const SourceMethods& methods);
  // Adds all numbers, or throws std::bad_alloc and adds none. `methods` have been added.
  void add(const IterationStatistics& iteration, const Runner::Timing& timing,
           const SourceMethods& methods);
  void add_host_time(int64_t us) { counts_.host_us += us; }
  // Counts a sample that has ended.
  void add_end(FinishReason reason);
  // Sets the numbers of running and waiting sequences, and the scheduler's counters.
  void set_load(const Scheduler& scheduler);
  [[nodiscard]] int32_t num_running() const { return num_running_; }
  [[nodiscard]] int32_t num_waiting() const { return num_waiting_; }

 private:
  EngineCounts counts_;
  EngineCounts at_reset_;
  std::vector<ExecutorStats::Method> methods_;
  std::vector<ExecutorStats::Method> methods_at_reset_;  // may be shorter
  IterationTimes times_;
  int32_t num_running_ = 0;
  int32_t num_waiting_ = 0;
};

}  // namespace paceline
