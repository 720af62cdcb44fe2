// SPDX-License-Identifier: Apache-2.0
#include "scheduler/scheduler.h"

#include <algorithm>

#include "base/check.h"
#include "request/sequence.h"
#include "scheduler/iteration_plan.h"
#include "wire/batch_shape.h"

namespace paceline {
namespace {

// Rows of logits beyond those that a sequence draws from.
int32_t score_rows(const PlannedSequence& rows) {
  return rows.kind == RowKind::kScore ? rows.num_rows : rows.num_prompt_rows;
}

// Ids ascend with arrival.
bool arrived_before(const Sequence* a, const Sequence* b) {
  return a->id != b->id ? a->id < b->id : a->sample < b->sample;
}

// Positions that a fork takes over: all of the prompt but its last token. That token's row draws
// the first of the output, and what a drafter keeps of it may depend on what is drawn.
int32_t num_forkable(const Sequence& sequence) { return sequence.prompt_len - 1; }

}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options, SlabPool& pool)
    : options_(options), pool_(pool) {
  for (int32_t seq_slot = options.max_num_seqs - 1; seq_slot >= 0; --seq_slot)
    free_seq_slots_.push_back(seq_slot);
}

int32_t Scheduler::window_slack() const {
  const int32_t width = options_.num_draft_tokens + 1;
  const int32_t rows = std::max(options_.prefill_chunk_size, width);
  // Held and quarantined together: every iteration in flight pushes the window on by its rows, and
  // as many again leave only when those iterations have completed; the reservation itself runs
  // ahead by two windows of drafts.
  return 2 * options_.max_in_flight * rows + 2 * width;
}

bool Scheduler::fits_alone(int32_t prompt_len, int32_t limit) const {
  return pool_.fits_alone(peak_blocks(pool_.layout(), std::max(prompt_len, limit), window_slack()));
}

void Scheduler::add(Sequence& sequence) {
  sequence.phase = Sequence::Phase::kWaiting;
  sequence.blocks = SequenceBlocks(static_cast<int32_t>(pool_.layout().groups.size()));
  // A preempted sequence goes back to its place in the line.
  const auto place = std::upper_bound(waiting_.begin(), waiting_.end(), &sequence, &arrived_before);
  const bool has_company = (place != waiting_.end() && (*place)->id == sequence.id) ||
                           (place != waiting_.begin() && (*std::prev(place))->id == sequence.id);
  if (!has_company) ++num_waiting_requests_;
  waiting_.insert(place, &sequence);
}

void Scheduler::remove_waiting(size_t index) {
  const RequestId id = waiting_[index]->id;
  const bool has_company = (index > 0 && waiting_[index - 1]->id == id) ||
                           (index + 1 < waiting_.size() && waiting_[index + 1]->id == id);
  if (!has_company) --num_waiting_requests_;
  waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(index));
}

Scheduler::Parent Scheduler::find_parent(const Sequence& sequence, int64_t iteration) const {
  const int32_t num_tokens = num_forkable(sequence);
  if (sequence.num_samples == 1 || num_tokens == 0) return {};
  if (sequence.prompt_logprobs != nullptr) return {};  // still to be rated, row by row
  Parent found;
  const auto first =
      std::lower_bound(running_.begin(), running_.end(), sequence.id,
                       [](const Sequence* running, RequestId id) { return running->id < id; });
  for (auto it = first; it != running_.end() && (*it)->id == sequence.id; ++it) {
    const Sequence& sibling = **it;
    // Blocks are copied before the iteration's first row, so what it writes itself is too late.
    if (sibling.num_prefilled < num_tokens || sibling.newest_prefill >= iteration) {
      found.comes_later = true;
    } else if (sibling.blocks.can_fork(pool_.layout(), num_tokens)) {
      return {.sequence = &sibling};
    }
  }
  return found;
}

bool Scheduler::must_be_finished(const Sequence& sequence) const {
  // Every emitting launch brings at least one token.
  return sequence.known_len() + sequence.emitting_in_flight >= sequence.limit &&
         sequence.phase == Sequence::Phase::kDecode;
}

PlannedSequence Scheduler::next_rows(const Sequence& sequence, int32_t prefill_budget,
                                     int32_t score_budget) const {
  PlannedSequence rows;
  rows.epoch = sequence.epoch;
  if (sequence.phase == Sequence::Phase::kDecode) {
    rows.kind = RowKind::kDecode;
    rows.num_rows = options_.num_draft_tokens + 1;
    return rows;
  }
  rows.start = sequence.num_prefilled;
  const int32_t left = sequence.known_len() - sequence.num_prefilled;
  rows.num_rows = std::min({left, options_.prefill_chunk_size, prefill_budget});
  if (sequence.is_score) {
    rows.kind = RowKind::kScore;
    rows.num_rows = std::min(rows.num_rows, score_budget);
  } else {
    const bool is_rated = sequence.prompt_logprobs != nullptr;
    if (is_rated) rows.num_rows = std::min(rows.num_rows, score_budget);
    rows.kind = rows.num_rows == left ? RowKind::kPrefillFinal : RowKind::kPrefillPartial;
    if (is_rated) {
      rows.num_prompt_rows = rows.num_rows - (rows.kind == RowKind::kPrefillFinal ? 1 : 0);
    }
  }
  rows.num_rows = std::max(rows.num_rows, 0);
  return rows;
}

int32_t Scheduler::tokens_to_reserve(const Sequence& sequence, const PlannedSequence& rows) const {
  const int32_t k = options_.num_draft_tokens;
  switch (rows.kind) {
    case RowKind::kDecode: {
      // The device may be ahead by k+1 tokens for each launch in flight; this one adds as many,
      // and the drafter then looks k further.
      const int32_t most_known = sequence.known_len() + sequence.emitting_in_flight * (k + 1);
      return std::min(sequence.limit, most_known + (k + 1) + k);
    }
    case RowKind::kPrefillFinal:
      return std::max(std::min(sequence.limit, sequence.known_len() + 1 + k), sequence.known_len());
    case RowKind::kPrefillPartial:
    case RowKind::kScore:
      return rows.start + rows.num_rows;
  }
  return 0;
}

void Scheduler::give_back(Sequence& sequence) {
  sequence.blocks.release_all(pool_, newest_planned_);
  if (sequence.seq_slot >= 0) free_seq_slots_.push_back(sequence.seq_slot);
  sequence.seq_slot = -1;
}

void Scheduler::preempt(Sequence& sequence) {
  give_back(sequence);
  std::erase(running_, &sequence);
  ++sequence.epoch;
  sequence.emitting_in_flight = 0;
  sequence.num_prefilled = 0;
  ++num_preemptions_;
  add(sequence);
}

Scheduler::Room Scheduler::make_room(Sequence& sequence, const PlannedSequence& rows,
                                     IterationPlan& plan) {
  const int32_t num_tokens = tokens_to_reserve(sequence, rows);
  while (!sequence.blocks.reserve(pool_, num_tokens, sequence.seq_slot, plan.table_writes)) {
    Sequence* youngest = running_.back();
    // Blocks on their way back will do: wait for the iterations that still use them.
    if (pool_.num_quarantined() > 0) return Room::kStalled;
    // Entries that this plan has already written for it: its slot may pass to another sequence, and
    // the device writes all entries of a plan side by side.
    std::erase_if(plan.table_writes,
                  [&](const TableWrite& write) { return write.seq_slot == youngest->seq_slot; });
    preempt(*youngest);
    // Alone and still without room: its own blocks are scattered over more slabs than it needs.
    // Recomputed from nothing it lies compactly, and `fits_alone` has promised that this fits.
    if (youngest == &sequence) return Room::kPreemptedItself;
  }
  return Room::kReserved;
}

bool Scheduler::admit(Sequence& sequence, const PlannedSequence& rows, const Sequence* parent,
                      IterationPlan& plan) {
  const KvLayout& layout = pool_.layout();
  // Not only this chunk but all that is known must fit, or admission would soon preempt.
  const int32_t k = options_.num_draft_tokens;
  const int32_t soon = std::max(std::min(sequence.limit, sequence.known_len() + 2 * (k + 1) + k),
                                sequence.known_len());
  std::vector<int64_t> counts = peak_blocks(layout, soon, window_slack());
  for (size_t g = 0; parent != nullptr && g < counts.size(); ++g) {
    // What is shared is there already. Not so for long in a sliding group, which moves on to blocks
    // of the fork's own.
    if (layout.groups[g].kind == KvKind::kFull) {
      counts[g] -= rows.start / layout.groups[g].block_size;
    }
  }
  if (!pool_.can_allocate(counts)) return false;
  sequence.seq_slot = free_seq_slots_.back();
  if (parent != nullptr) sequence.blocks.fork(pool_, parent->blocks, rows.start);
  if (!sequence.blocks.reserve(pool_, tokens_to_reserve(sequence, rows), sequence.seq_slot,
                               plan.table_writes)) {
    sequence.blocks.release_all(pool_, newest_planned_);
    sequence.seq_slot = -1;
    return false;
  }
  if (parent != nullptr) {
    sequence.blocks.append_copies(layout, parent->blocks, rows.start, plan.block_copies);
    plan.forks.push_back({.parent_seq_slot = parent->seq_slot,
                          .seq_slot = sequence.seq_slot,
                          .num_tokens = rows.start});
    num_shared_tokens_ += rows.start;
  }
  free_seq_slots_.pop_back();
  sequence.phase = Sequence::Phase::kPrefill;
  sequence.needs_reset = true;
  running_.insert(std::upper_bound(running_.begin(), running_.end(), &sequence, &arrived_before),
                  &sequence);
  return true;
}

void Scheduler::launch(Sequence& sequence, PlannedSequence rows, IterationPlan& plan) {
  rows.sequence = &sequence;
  rows.resets_state = sequence.needs_reset;
  sequence.needs_reset = false;
  ++sequence.launches_in_flight;
  if (rows.kind == RowKind::kDecode) {
    ++sequence.emitting_in_flight;
  } else {
    sequence.num_prefilled += rows.num_rows;
    sequence.newest_prefill = plan.iteration;
    if (rows.kind == RowKind::kPrefillFinal) {
      sequence.phase = Sequence::Phase::kDecode;
      ++sequence.emitting_in_flight;
    }
  }
  plan.sequences.push_back(rows);
}

bool Scheduler::plan(IterationPlan& plan) {
  plan.sequences.clear();
  plan.table_writes.clear();
  plan.forks.clear();
  plan.block_copies.clear();
  const int32_t width = options_.num_draft_tokens + 1;

  int32_t prefill_budget = options_.max_num_batched_tokens;
  int32_t score_budget = options_.max_score_rows;
  for (const Sequence* sequence : running_) {
    if (sequence->phase == Sequence::Phase::kDecode) prefill_budget -= width;
  }

  // Oldest first, so that whoever is preempted has not been planned yet.
  bool has_preempted = false;
  considered_ = running_;
  for (Sequence* sequence : considered_) {
    if (sequence->phase == Sequence::Phase::kWaiting) continue;  // preempted just now
    if (must_be_finished(*sequence)) continue;
    if (sequence->phase == Sequence::Phase::kPrefill &&
        sequence->num_prefilled == sequence->known_len()) {
      continue;  // a scored prompt, completely launched
    }
    const PlannedSequence rows = next_rows(*sequence, prefill_budget, score_budget);
    if (rows.num_rows == 0) continue;
    const int64_t preemptions = num_preemptions_;
    const Room room = make_room(*sequence, rows, plan);
    has_preempted |= num_preemptions_ != preemptions || room == Room::kStalled;
    if (room != Room::kReserved) continue;
    if (rows.kind != RowKind::kDecode) prefill_budget -= rows.num_rows;
    score_budget -= score_rows(rows);
    launch(*sequence, rows, plan);
  }

  // Nobody is admitted over the heads of those who have just lost their blocks, unless nothing
  // else would run. All releases of this plan have come before the first fork, so whatever takes
  // the source of a copy away later tags it with this iteration at least.
  size_t index = 0;
  while (index < waiting_.size() && !free_seq_slots_.empty() &&
         (!has_preempted || (plan.sequences.empty() && running_.empty()))) {
    Sequence* sequence = waiting_[index];
    const Parent parent = find_parent(*sequence, plan.iteration);
    if (parent.sequence == nullptr && parent.comes_later) {
      ++index;  // the others need not wait for its prompt
      continue;
    }
    sequence->num_prefilled = parent.sequence != nullptr ? num_forkable(*sequence) : 0;
    const PlannedSequence rows = next_rows(*sequence, prefill_budget, score_budget);
    if (rows.num_rows == 0 || !admit(*sequence, rows, parent.sequence, plan)) {
      sequence->num_prefilled = 0;
      break;
    }
    remove_waiting(index);
    prefill_budget -= rows.num_rows;
    score_budget -= score_rows(rows);
    launch(*sequence, rows, plan);
  }

  // Preempting may have undone reservations made earlier in this call for sequences that are not
  // planned now; their slots are rewritten when they are admitted again.
  if (plan.sequences.empty()) return false;
  std::stable_sort(plan.sequences.begin(), plan.sequences.end(),
                   [](const PlannedSequence& a, const PlannedSequence& b) {
                     return static_cast<int32_t>(a.kind) < static_cast<int32_t>(b.kind);
                   });
  newest_planned_ = plan.iteration;
  return true;
}

void Scheduler::advance(Sequence& sequence, const PlannedSequence& launch) {
  // The earliest position that a later launch can query: the drafter goes back to the token before
  // the newest one.
  const int32_t first_query =
      launch.kind == RowKind::kDecode || launch.kind == RowKind::kPrefillFinal
          ? sequence.known_len() - 2
          : launch.start + launch.num_rows;
  if (first_query > 0) sequence.blocks.release_below(pool_, first_query, newest_planned_);
}

void Scheduler::finish(Sequence& sequence) {
  if (sequence.phase == Sequence::Phase::kWaiting) {
    const auto found = std::find(waiting_.begin(), waiting_.end(), &sequence);
    PACELINE_CHECK(found != waiting_.end(), "request ", sequence.id, " waits in no line");
    remove_waiting(static_cast<size_t>(found - waiting_.begin()));
  } else {
    std::erase(running_, &sequence);
  }
  give_back(sequence);
  sequence.phase = Sequence::Phase::kFinished;
}

}  // namespace paceline
