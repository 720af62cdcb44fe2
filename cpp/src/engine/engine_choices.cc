// SPDX-License-Identifier: Apache-2.0

// What the engine chooses by measured times before it plans an iteration, and what it learns from
// the times of one.

#include <algorithm>
#include <mutex>

#include "engine/engine.h"
#include "runner/iteration_runner.h"
#include "scheduler/iteration_plan.h"
#include "wire/batch_shape.h"

namespace paceline {
namespace {

// Fewest prompt rows that are chosen for an iteration. A GPU computes this many in the time that it
// takes to read the weights.
constexpr int32_t kFewestRows = 128;
constexpr int32_t kFewestRowsCpu = 16;

// Most tokens with which a drafter catches up to explore a number of drafts.
constexpr int32_t kMostExploredCatchUp = 128;

// If this many sequences wait for their first token, prompt rows are not limited. Large chunks take
// less time for each row, and the queue must not grow.
constexpr int32_t kManyPrompts = 8;

}  // namespace

ChunkChooser Engine::make_chunk_chooser(const EngineOptions& options) {
  return ChunkChooser(decode_buckets(options.scheduler.max_num_seqs),
                      options.device == Device::kCpu ? kFewestRowsCpu : kFewestRows);
}

void Engine::choose_drafts(IterationPlan& plan) {
  plan.max_catch_up = INT32_MAX;
  plan.num_drafts = options_.shape.num_draft_tokens;
  plan.skips_prompts = false;
  if (draft_schedule_.is_given()) {
    plan.num_drafts = draft_schedule_.next();
    plan.skips_prompts = draft_schedule_.skips_prompts();
  } else if (chooser_.has_value()) {
    const std::scoped_lock lock(mutex_);
    const DraftChooser::Choice choice = chooser_->choose(
        scheduler_.num_decoding(), scheduler_.num_ready_to_draft(kMostExploredCatchUp));
    // At most what is best once all prompts are computed: further drafts would then be dropped.
    const int32_t num_expected = num_expected_to_decode();
    const int32_t settled = chooser_->settled(num_expected);
    plan.num_drafts = choice.num_drafts;
    if (num_expected > scheduler_.num_decoding()) {
      plan.num_drafts = std::min(choice.num_drafts, settled);
    }
    // If no drafts pay then, the drafter need not compute prompts.
    plan.skips_prompts = settled == 0;
    // Catching up with many missed tokens would make an exploration expensive.
    if (choice.explores) plan.max_catch_up = kMostExploredCatchUp;
  }
}

void Engine::choose_prompt_rows(IterationPlan& plan) {
  plan.max_prompt_rows = INT32_MAX;
  if (draft_schedule_.is_given()) {
    plan.max_prompt_rows = draft_schedule_.next_prompt_rows();
    return;
  }
  const int32_t num_decoding = scheduler_.num_decoding();
  const int32_t num_others = scheduler_.num_running() + scheduler_.num_waiting() - num_decoding;
  if (num_decoding == 0 || num_others >= kManyPrompts) return;
  if (options_.prompt_rows == PromptRows::kFixed) {
    plan.max_prompt_rows = ChunkChooser::kFirstRows;
  } else if (options_.prompt_rows == PromptRows::kMeasured) {
    plan.max_prompt_rows = chunk_chooser_.choose(num_decoding);
  }
}

void Engine::observe(const InFlight& launched, DraftChooser::Iteration& observed,
                     const Runner::Timing& timing) {
  // Where the host is slower than the device, its time counts.
  const double us = timing.us + (launched.has_waited ? 0 : timing.idle_us);
  ChunkChooser::Iteration chunks{.us = us};
  for (const PlannedSequence& rows : launched.plan.sequences) {
    chunks.num_decoding += rows.kind == RowKind::kDecode ? 1 : 0;
    chunks.num_prompt_rows += rows.kind == RowKind::kDecode ? 0 : rows.num_rows;
  }
  if (chunks.num_decoding > 0 && !launched.is_traced) chunk_chooser_.observe(chunks);
  if (!chooser_.has_value()) return;
  observed.num_seqs = static_cast<int32_t>(launched.plan.sequences.size());
  observed.num_drafts = launched.plan.num_drafts;
  if (launched.is_typical) observed.us = us;
  chooser_->observe(observed);
}

}  // namespace paceline
