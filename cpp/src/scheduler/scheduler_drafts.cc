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
// A draft head follows one in as many as run, and one in this many at least: hidden states must be
// kept for the sequences that it follows, which takes time where many run.
constexpr int32_t kHeadFollowsEvery = 16;

// While no drafts pay, hidden states are kept for the first tokens that a draft head misses of a
// sequence: an exploration may use it until then.
constexpr int32_t kMostKept = 16;

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
  const int32_t every =
      options_.follows_hidden ? std::min(num_running(), kHeadFollowsEvery) : kFollowedEvery;
  return never_drafts || (plan.skips_prompts && num_left_out_ + 1 < every);
}

bool Scheduler::misses_chunk(const PlannedSequence& rows) const {
  const Sequence& sequence = *rows.sequence;
  return rows.kind != RowKind::kDecode && rows.kind != RowKind::kScore &&
         options_.may_miss_prompts && (sequence.misses_prompt || sequence.num_missed > 0);
}

PrefixCache::Match Scheduler::find_prefix(const Sequence& sequence, const IterationPlan& plan,
                                          int32_t num_tokens) {
  const PrefixCache::Match match = cache_->find(sequence.tokens, sequence.cache_salt, num_tokens);
  // A draft head that drafts needs the hidden states of the whole prompt.
  const bool is_followed = options_.follows_hidden && !misses_prompt(sequence, plan);
  return sequence.num_samples > 1 || is_followed ? match.drafted() : match;
}

int32_t Scheduler::num_ready_to_draft(int64_t max_catch_up) const {
  int32_t count = 0;
  for (const Sequence* sequence : running_) {
    if (sequence->phase != Sequence::Phase::kDecode || sequence->num_missed > max_catch_up ||
        !is_kept(*sequence)) {
      continue;
    }
    max_catch_up -= sequence->num_missed;
    ++count;
  }
  return count;
}

bool Scheduler::can_catch_up(const Sequence& sequence, const IterationPlan& plan) const {
  // An exploration would learn the acceptance of drafts without hidden states.
  const bool is_bounded = plan.max_catch_up < INT32_MAX;
  return sequence.num_missed <= plan.max_catch_up && (!is_bounded || is_kept(sequence)) &&
         (options_.max_missed == 0 || sequence.num_missed <= options_.max_missed);
}

void Scheduler::catch_up(PlannedSequence& rows, bool is_bounded, int32_t& room) const {
  Sequence& sequence = *rows.sequence;
  const int32_t missed = sequence.num_missed;
  const bool is_exact = missed <= options_.max_exact_missed && is_kept(sequence);
  sequence.num_missed += rows.num_rows;  // unless it gets all
  if (rows.num_drafts == 0) {
    rows.num_drafts = kLeftOut;
    return;
  }
  if (missed <= room) {
    room -= missed;
    rows.num_missed = missed;
    rows.num_kept = sequence.num_kept;
    sequence.num_missed = 0;
    sequence.has_holes |= !is_exact;
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
  rows.num_kept = sequence.num_kept;
  rows.catch_up_start = sequence.num_followed - 1;
  sequence.num_followed += room;
  sequence.num_missed -= room;
  sequence.has_holes |= !is_exact;
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
  plan.follows_chunks =
      options_.follows_hidden && std::ranges::any_of(plan.sequences, [&](const auto& rows) {
        return rows.kind != RowKind::kDecode && !misses_chunk(rows);
      });
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
        if (plan.follows_chunks && sequence.num_missed > 0) rows.num_drafts = kLeftOut;
        if (!plan.follows_chunks || sequence.num_missed > 0) sequence.num_missed += rows.num_rows;
      } else if (sequence.num_missed > 0) {
        catch_up(rows, plan.max_catch_up < INT32_MAX, room);
        plan.is_whole = false;
      }
    }
    rows.is_followed = sequence.num_missed == 0;
    rows.is_cacheable = rows.is_followed && !sequence.has_holes;
    sequence.num_drafts_ahead = std::max(rows.num_drafts, 0);
  }
  plan_hidden(plan);
}

bool Scheduler::wants_hidden(const IterationPlan& plan) const {
  return std::ranges::any_of(plan.sequences, [&](const PlannedSequence& rows) {
    const Sequence& sequence = *rows.sequence;
    const int32_t missed_before = sequence.num_missed - rows.num_rows;
    return rows.kind == RowKind::kDecode && sequence.num_missed > 0 && sequence.max_drafts > 0 &&
           (!plan.skips_prompts ||
            (sequence.num_kept == missed_before && missed_before < kMostKept));
  });
}

void Scheduler::plan_hidden(IterationPlan& plan) const {
  // With drafts it keeps them where it runs op by op, for sequences that are left out.
  const bool may_keep =
      plan.num_drafts == 0 || plan.has_prefill ||
      std::ranges::any_of(plan.sequences, [](const auto& rows) { return rows.num_missed > 0; });
  const bool has_room = options_.follows_hidden && options_.max_exact_missed < INT32_MAX;
  plan.keeps_hidden = has_room && may_keep && wants_hidden(plan);
  for (const PlannedSequence& rows : plan.sequences) {
    Sequence& sequence = *rows.sequence;
    if (rows.kind != RowKind::kDecode) continue;
    sequence.num_kept =
        plan.keeps_hidden ? std::min(sequence.num_kept + rows.num_rows, sequence.num_missed) : 0;
  }
}

}  // namespace paceline
