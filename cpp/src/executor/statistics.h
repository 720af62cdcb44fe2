// SPDX-License-Identifier: Apache-2.0
#pragma once

// The counts of the engine: of one iteration, since the last reset, and of one sample.

#include <cstdint>

#include <paceline/executor.h>

#include "executor/runner.h"
#include "scheduler/scheduler.h"
#include "wire/batch_shape.h"
#include "wire/sequence_result.h"

namespace paceline {

// Adds what an iteration did to a sample's counters.
void count(const SequenceResult& result, SpeculationCounters& counters);

struct IterationStatistics {
  int32_t num_decoding = 0;  // sequences that emitted from a verify window
  int32_t num_prefill = 0;   // sequences with prefill or score rows
  // Tokens that were delivered, drafts that acceptance decided on, and drafts that it accepted.
  int64_t num_emitted = 0;
  int64_t num_drafted = 0;
  int64_t num_accepted = 0;

  // `is_delivered`: the sequence has not been cancelled or preempted since the launch.
  void add(RowKind kind, const SequenceResult& result, bool is_delivered);
};

// Not thread-safe.
class EngineStatistics {
 public:
  [[nodiscard]] const ExecutorStats& stats() const { return stats_; }
  void reset();

  // Adds all numbers, or throws std::bad_alloc and adds none.
  void add(const IterationStatistics& iteration, const Runner::Timing& timing);
  void add_host_time(int64_t us) { stats_.host_us += static_cast<double>(us); }
  // Sets the numbers of running and waiting sequences, and the scheduler's counters.
  void set_load(const Scheduler& scheduler);

 private:
  ExecutorStats stats_;
  int64_t preemptions_at_reset_ = 0;
  int64_t shared_tokens_at_reset_ = 0;
};

}  // namespace paceline
