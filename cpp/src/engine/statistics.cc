// SPDX-License-Identifier: Apache-2.0
#include "engine/statistics.h"

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/reserve_more.h"
#include "request/sequence.h"
#include "wire/batch_shape.h"

namespace paceline {
namespace {

constexpr size_t kMaxIterationSamples = 65536;

using PerPosition = std::array<int64_t, kMaxDraftTokens>;
using PerLength = std::array<int64_t, kMaxDraftTokens + 1>;

// All counts of EngineCounts, for sums and differences.
constexpr std::array kCounts = {&EngineCounts::iterations,
                                &EngineCounts::finished,
                                &EngineCounts::failed,
                                &EngineCounts::cancelled,
                                &EngineCounts::preemptions,
                                &EngineCounts::prompt_tokens,
                                &EngineCounts::shared_tokens,
                                &EngineCounts::queried_tokens,
                                &EngineCounts::hit_tokens,
                                &EngineCounts::emitted_tokens,
                                &EngineCounts::verify_windows,
                                &EngineCounts::draft_tokens,
                                &EngineCounts::accepted_tokens,
                                &EngineCounts::target_mixture_layers,
                                &EngineCounts::target_experts_hit,
                                &EngineCounts::draft_mixture_layers,
                                &EngineCounts::draft_experts_hit,
                                &EngineCounts::host_us};
constexpr std::array kPositionCounts = {&EngineCounts::drafted_per_position,
                                        &EngineCounts::accepted_per_position};
constexpr std::array kLengthCounts = {&EngineCounts::iterations_per_length,
                                      &EngineCounts::us_per_length};
static_assert(sizeof(EngineCounts) == kCounts.size() * sizeof(int64_t) +
                                          kPositionCounts.size() * sizeof(PerPosition) +
                                          kLengthCounts.size() * sizeof(PerLength));

// Counts that IterationTimes has for each iteration.
struct TimedCount {
  std::vector<int32_t> IterationTimes::* times;
  int64_t EngineCounts::* count;
};
constexpr TimedCount kTimedCounts[] = {
    {&IterationTimes::target_mixture_layers, &EngineCounts::target_mixture_layers},
    {&IterationTimes::target_experts_hit, &EngineCounts::target_experts_hit},
    {&IterationTimes::draft_mixture_layers, &EngineCounts::draft_mixture_layers},
    {&IterationTimes::draft_experts_hit, &EngineCounts::draft_experts_hit},
};

// Adds `factor` times `b` to `a`.
void add_times(EngineCounts& a, const EngineCounts& b, int64_t factor) {
  for (const auto count : kCounts) a.*count += factor * b.*count;
  for (const auto counts : kPositionCounts) {
    for (size_t i = 0; i < (a.*counts).size(); ++i) (a.*counts)[i] += factor * (b.*counts)[i];
  }
  for (const auto counts : kLengthCounts) {
    for (size_t i = 0; i < (a.*counts).size(); ++i) (a.*counts)[i] += factor * (b.*counts)[i];
  }
}

// Adds the windows of each length to every position that they reach.
void add_per_position(PerPosition& counts, std::span<const int32_t> num_windows_by_length) {
  int64_t num_longer = 0;
  for (size_t i = counts.size(); i-- > 0;) {
    num_longer += num_windows_by_length[i + 1];
    counts[i] += num_longer;
  }
}

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

EngineCounts EngineCounts::since(const EngineCounts& earlier) const {
  EngineCounts difference = *this;
  add_times(difference, earlier, -1);
  return difference;
}

void IterationStatistics::add(const PlannedSequence& launch, const SequenceResult& result,
                              bool is_delivered) {
  const bool is_decode = launch.kind == RowKind::kDecode;
  num_decoding += is_decode && result.emitted_len > 0 ? 1 : 0;
  num_prefill += is_decode ? 0 : 1;
  if (!is_decode) {
    // A preempted sequence computes its output tokens again, too.
    const int32_t end = std::min(launch.start + launch.num_rows, launch.sequence->prompt_len);
    counts.prompt_tokens += std::max(end - launch.start, 0);
  }
  if (!is_delivered) return;
  counts.emitted_tokens += result.emitted_len;
  if (result.drafted_len + result.discarded_len == 0) return;
  ++counts.verify_windows;
  counts.draft_tokens += result.drafted_len;
  counts.accepted_tokens += result.accepted_len;
  ++num_drafted[result.drafted_len];
  ++num_accepted[result.accepted_len];
  Drafted& drafted = by_source[static_cast<size_t>(result.source)];
  ++drafted.windows;
  drafted.drafted += result.drafted_len;
  drafted.accepted += result.accepted_len;
}

void IterationStatistics::add(const std::array<ExpertCounts, kNumModels>& experts) {
  const auto& [target, draft] = experts;
  counts.target_mixture_layers += target.layers;
  counts.target_experts_hit += target.experts_hit;
  counts.draft_mixture_layers += draft.layers;
  counts.draft_experts_hit += draft.experts_hit;
}

ExecutorStats EngineStatistics::stats(int32_t num_draft_tokens) const {
  const EngineCounts counts = counts_.since(at_reset_);
  const auto per_position = [&](const PerPosition& all) {
    return std::vector<int64_t>(all.begin(), all.begin() + num_draft_tokens);
  };
  std::vector<ExecutorStats::Drafts> drafts;
  for (int32_t n = 0; n <= num_draft_tokens; ++n) {
    const auto i = static_cast<size_t>(n);
    drafts.push_back({.num_drafts = n,
                      .num_iterations = counts.iterations_per_length[i],
                      .us = static_cast<double>(counts.us_per_length[i])});
  }
  std::vector<ExecutorStats::Method> methods = methods_;
  for (size_t i = 0; i < methods_at_reset_.size(); ++i) {
    methods[i].num_verify_windows -= methods_at_reset_[i].num_verify_windows;
    methods[i].num_draft_tokens -= methods_at_reset_[i].num_draft_tokens;
    methods[i].num_accepted_tokens -= methods_at_reset_[i].num_accepted_tokens;
  }
  return {.num_iterations = counts.iterations,
          .num_finished = counts.finished,
          .num_failed = counts.failed,
          .num_cancelled = counts.cancelled,
          .num_preemptions = counts.preemptions,
          .num_prompt_tokens = counts.prompt_tokens,
          .num_shared_tokens = counts.shared_tokens,
          .num_prefix_query_tokens = counts.queried_tokens,
          .num_prefix_hit_tokens = counts.hit_tokens,
          .num_emitted_tokens = counts.emitted_tokens,
          .num_verify_windows = counts.verify_windows,
          .num_draft_tokens = counts.draft_tokens,
          .num_accepted_tokens = counts.accepted_tokens,
          .drafted_per_position = per_position(counts.drafted_per_position),
          .accepted_per_position = per_position(counts.accepted_per_position),
          .methods = std::move(methods),
          .num_target_mixture_layers = counts.target_mixture_layers,
          .num_target_experts_hit = counts.target_experts_hit,
          .num_draft_mixture_layers = counts.draft_mixture_layers,
          .num_draft_experts_hit = counts.draft_experts_hit,
          .host_us = static_cast<double>(counts.host_us),
          .drafts = std::move(drafts),
          .num_drafts = num_draft_tokens,
          .num_running = num_running_,
          .num_waiting = num_waiting_};
}

void EngineStatistics::reset() {
  methods_at_reset_ = methods_;
  at_reset_ = counts_;
  times_ = {};
}

void EngineStatistics::add_methods(const SourceMethods& methods) {
  for (const std::string_view method : methods) {
    const bool is_known =
        std::ranges::find(methods_, method, &ExecutorStats::Method::name) != methods_.end();
    if (!method.empty() && !is_known) methods_.push_back({.name = std::string(method)});
  }
}

void EngineStatistics::add(const IterationStatistics& iteration, const Runner::Timing& timing,
                           const SourceMethods& methods) {
  const bool has_room = times_.us.size() < kMaxIterationSamples;
  if (has_room) {
    reserve_more(times_.us, 1);
    reserve_more(times_.idle_us, 1);
    reserve_more(times_.num_decoding, 1);
    reserve_more(times_.num_prefill, 1);
    for (const auto& [times, count] : kTimedCounts) reserve_more(times_.*times, 1);
  }
  add_times(counts_, iteration.counts, 1);
  for (size_t i = 0; i < methods.size(); ++i) {
    const auto found = std::ranges::find(methods_, methods[i], &ExecutorStats::Method::name);
    if (found == methods_.end()) continue;  // there is no such source
    const IterationStatistics::Drafted& drafted = iteration.by_source[i];
    found->num_verify_windows += drafted.windows;
    found->num_draft_tokens += drafted.drafted;
    found->num_accepted_tokens += drafted.accepted;
  }
  add_per_position(counts_.drafted_per_position, iteration.num_drafted);
  add_per_position(counts_.accepted_per_position, iteration.num_accepted);
  ++counts_.iterations;
  const auto length = static_cast<size_t>(iteration.num_drafts);
  ++counts_.iterations_per_length[length];
  counts_.us_per_length[length] += static_cast<int64_t>(timing.us);
  if (!has_room) return;
  times_.us.push_back(timing.us);
  times_.idle_us.push_back(timing.idle_us);
  times_.num_decoding.push_back(iteration.num_decoding);
  times_.num_prefill.push_back(iteration.num_prefill);
  for (const auto& [times, count] : kTimedCounts) {
    (times_.*times).push_back(static_cast<int32_t>(iteration.counts.*count));
  }
}

void EngineStatistics::add_end(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return;
    case FinishReason::kStop:
    case FinishReason::kLength:
      ++counts_.finished;
      return;
    case FinishReason::kCancelled:
      ++counts_.cancelled;
      return;
    case FinishReason::kError:
      ++counts_.failed;
      return;
  }
}

void EngineStatistics::set_load(const Scheduler& scheduler) {
  num_running_ = scheduler.num_running();
  num_waiting_ = scheduler.num_waiting();
  counts_.preemptions = scheduler.num_preemptions();
  counts_.shared_tokens = scheduler.num_shared_tokens();
  counts_.queried_tokens = scheduler.num_queried_tokens();
  counts_.hit_tokens = scheduler.num_hit_tokens();
}

}  // namespace paceline
