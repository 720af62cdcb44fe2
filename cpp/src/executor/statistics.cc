// SPDX-License-Identifier: Apache-2.0
#include "executor/statistics.h"

#include "base/reserve_more.h"

namespace paceline {
namespace {

constexpr size_t kMaxIterationSamples = 65536;

}  // namespace

void count(const SequenceResult& result, SpeculationCounters& counters) {
  if (result.drafted_len + result.discarded_len == 0) return;
  ++counters.num_iterations;
  counters.num_draft_tokens += result.drafted_len;
  counters.num_accepted_tokens += result.accepted_len;
  counters.num_discarded_tokens += result.discarded_len;
  for (int32_t i = 0; i < result.drafted_len; ++i) ++counters.drafted_per_position[i];
  for (int32_t i = 0; i < result.accepted_len; ++i) ++counters.accepted_per_position[i];
}

void IterationStatistics::add(RowKind kind, const SequenceResult& result, bool is_delivered) {
  const bool is_decode = kind == RowKind::kDecode;
  num_decoding += is_decode && result.emitted_len > 0 ? 1 : 0;
  num_prefill += is_decode ? 0 : 1;
  if (!is_delivered) return;
  num_emitted += result.emitted_len;
  num_drafted += result.drafted_len;
  num_accepted += result.accepted_len;
}

void EngineStatistics::reset() {
  preemptions_at_reset_ += stats_.num_preemptions;
  shared_tokens_at_reset_ += stats_.num_shared_tokens;
  stats_ = ExecutorStats{};
}

void EngineStatistics::add(const IterationStatistics& iteration, const Runner::Timing& timing) {
  const bool has_room = stats_.iteration_us.size() < kMaxIterationSamples;
  if (has_room) {
    reserve_more(stats_.iteration_us, 1);
    reserve_more(stats_.iteration_idle_us, 1);
    reserve_more(stats_.iteration_num_decoding, 1);
    reserve_more(stats_.iteration_num_prefill, 1);
  }
  ++stats_.num_iterations;
  stats_.num_emitted_tokens += iteration.num_emitted;
  stats_.num_draft_tokens += iteration.num_drafted;
  stats_.num_accepted_tokens += iteration.num_accepted;
  if (!has_room) return;
  stats_.iteration_us.push_back(timing.us);
  stats_.iteration_idle_us.push_back(timing.idle_us);
  stats_.iteration_num_decoding.push_back(iteration.num_decoding);
  stats_.iteration_num_prefill.push_back(iteration.num_prefill);
}

void EngineStatistics::set_load(const Scheduler& scheduler) {
  stats_.num_running = scheduler.num_running();
  stats_.num_waiting = scheduler.num_waiting();
  stats_.num_preemptions = scheduler.num_preemptions() - preemptions_at_reset_;
  stats_.num_shared_tokens = scheduler.num_shared_tokens() - shared_tokens_at_reset_;
}

}  // namespace paceline
