// SPDX-License-Identifier: Apache-2.0

// What the drafter does in a planned iteration: for which sequences it drafts, how many tokens, and
// which tokens that it has missed it gets before.

#include <algorithm>

#include "base/check.h"
#include "scheduler/scheduler.h"
#include "wire/staged_inputs.h"

namespace paceline {
namespace {

bool draws(RowKind kind) { return kind == RowKind::kDecode || kind == RowKind::kPrefillFinal; }

// Where the drafter leaves out prompts only because drafting does not pay now, it follows one
// prompt in this many, so that explorations find sequences for which it can draft.
constexpr int32_t kFollowedEvery = 8;

// Most missed tokens that a drafter gets in an iteration if it may miss whole prompts: sequences
// that decode must not wait for long.
constexpr int32_t kMostCaughtUp = 512;

}  // namespace

int32_t Scheduler::num_ready_drafts(const Sequence& sequence, int32_t num_drafts) const {
  // So that it is known how many tokens the drafter misses.
  if (sequence.num_missed > 0) return 0;
  const int32_t ready = sequence.guide != nullptr
                            ? static_cast<int32_t>(sequence.window.drafts.size())
                            : sequence.num_drafts_ahead;
  return std::min({sequence.max_drafts, num_drafts, ready});
}

bool Scheduler::misses_prompt(const Sequence& sequence, const IterationPlan& plan) const {
  // Samples share the KV of their prompt, which must not be written later.
  if (!options_.may_miss_prompts || sequence.is_score || sequence.num_samples > 1) return false;
  const bool never_drafts = sequence.max_drafts == 0 || sequence.known_len() + 1 >= sequence.limit;
  return never_drafts || (plan.skips_prompts && num_left_out_ + 1 < kFollowedEvery);
}

bool Scheduler::misses_chunk(const PlannedSequence& rows) const {
  const Sequence& sequence = *rows.sequence;
  return rows.kind != RowKind::kDecode && rows.kind != RowKind::kScore &&
         options_.may_miss_prompts && (sequence.misses_prompt || sequence.num_missed > 0);
}

PrefixCache::Match Scheduler::find_prefix(const Sequence& sequence, int32_t num_tokens) {
  const PrefixCache::Match match = cache_->find(sequence.tokens, sequence.cache_salt, num_tokens);
  return sequence.num_samples > 1 ? match.drafted() : match;
}

int32_t Scheduler::num_ready_to_draft(int64_t max_catch_up) const {
  int32_t count = 0;
  for (const Sequence* sequence : running_) {
    if (sequence->phase != Sequence::Phase::kDecode || sequence->num_missed > max_catch_up)
      continue;
    max_catch_up -= sequence->num_missed;
    ++count;
  }
  return count;
}

bool Scheduler::can_catch_up(const Sequence& sequence, const IterationPlan& plan) const {
  return sequence.num_missed <= plan.max_catch_up &&
         (options_.max_missed == 0 || sequence.num_missed <= options_.max_missed);
}

void Scheduler::catch_up(PlannedSequence& rows, bool is_bounded, int32_t& room) const {
  Sequence& sequence = *rows.sequence;
  const int32_t missed = sequence.num_missed;
  sequence.num_missed += rows.num_rows;  // unless it gets all
  if (rows.num_drafts == 0) {
    rows.num_drafts = kLeftOut;
    return;
  }
  if (missed <= room) {
    room -= missed;
    rows.num_missed = missed;
    sequence.num_missed = 0;
    sequence.has_holes |= missed > options_.max_exact_missed;
    return;
  }
  // A part of them. Where it begins is known once no launch is in flight that may emit several
  // tokens.
  const bool is_known =
      sequence.known_len() + sequence.emitting_in_flight - 1 - missed == sequence.num_followed;
  if (room == 0 || is_bounded || !is_known) {
    rows.num_drafts = kLeftOut;
    return;
  }
  rows.num_drafts = 0;
  rows.num_missed = room;
  rows.catch_up_start = sequence.num_followed - 1;
  sequence.num_followed += room;
  sequence.num_missed -= room;
  sequence.has_holes |= missed > options_.max_exact_missed;
  room = 0;
}

void Scheduler::plan_drafts(IterationPlan& plan) const {
  int32_t longest = 0;
  for (PlannedSequence& rows : plan.sequences) {
    if (!draws(rows.kind)) continue;
    rows.num_drafts = can_catch_up(*rows.sequence, plan) && !misses_chunk(rows)
                          ? std::min(rows.sequence->max_drafts, plan.num_drafts)
                          : 0;
    longest = std::max(longest, rows.num_drafts);
  }
  const auto length =
      std::lower_bound(options_.draft_lengths.begin(), options_.draft_lengths.end(), longest);
  PACELINE_CHECK(length != options_.draft_lengths.end(), longest, " drafts");
  plan.num_drafts = *length;
  plan.is_whole = true;
  plan.has_prefill = std::any_of(plan.sequences.begin(), plan.sequences.end(),
                                 [](const auto& rows) { return rows.kind != RowKind::kDecode; });
  const bool follows_beside_chunks = plan.has_prefill && options_.follows_hidden;
  // Rows of the first pass: each sequence has its own, and may have those of missed tokens before.
  int32_t room = options_.max_num_batched_tokens;
  for (const PlannedSequence& rows : plan.sequences) room -= rows.num_rows;
  room = std::clamp(room, 0, plan.max_catch_up);
  if (options_.may_miss_prompts) room = std::min(room, kMostCaughtUp);
  for (PlannedSequence& rows : plan.sequences) {
    Sequence& sequence = *rows.sequence;
    if (misses_chunk(rows)) {
      if (draws(rows.kind)) rows.num_drafts = kLeftOut;
      sequence.num_missed += rows.num_rows;
      rows.is_followed = rows.is_cacheable = false;
    }
    if (!draws(rows.kind)) continue;
    if (options_.drafter_falls_behind && rows.kind == RowKind::kDecode) {
      if (plan.num_drafts == 0) {
        if (follows_beside_chunks && sequence.num_missed > 0) rows.num_drafts = kLeftOut;
        if (!follows_beside_chunks || sequence.num_missed > 0) sequence.num_missed += rows.num_rows;
      } else if (sequence.num_missed > 0) {
        catch_up(rows, plan.max_catch_up < INT32_MAX, room);
        plan.is_whole = false;
      }
    }
    rows.is_followed = sequence.num_missed == 0;
    rows.is_cacheable = rows.is_followed && !sequence.has_holes;
    sequence.num_drafts_ahead = std::max(rows.num_drafts, 0);
  }
}

}  // namespace paceline
