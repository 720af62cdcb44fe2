// SPDX-License-Identifier: Apache-2.0
#include "scheduler/scheduler.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "request/sequence.h"
#include "scheduler/iteration_plan.h"
#include "wire/batch_shape.h"

namespace paceline {
namespace {

// Number of rows of logits besides those from which the sequence draws.
int32_t score_rows(const Sequence& sequence, const PlannedSequence& rows) {
  if (rows.kind != RowKind::kScore) return rows.num_prompt_rows;
  return sequence.skips_logits ? 0 : rows.num_rows;
}

// Request ids ascend in order of arrival.
bool arrived_before(const Sequence* a, const Sequence* b) {
  return a->id != b->id ? a->id < b->id : a->sample < b->sample;
}

// Number of positions that a fork takes over: all of the prompt except its last token. The row of
// that token draws the first output token, and the state that a drafter keeps for it may depend on
// the draw.
int32_t num_forkable(const Sequence& sequence) { return sequence.prompt_len - 1; }

SchedulerOptions with_lengths(SchedulerOptions options) {
  std::vector<int32_t>& lengths = options.draft_lengths;
  if (lengths.empty()) lengths = {0, options.num_draft_tokens};
  return options;
}

std::unique_ptr<PrefixCache> make_cache(const SchedulerOptions& options, SlabPool& pool) {
  if (!options.enable_prefix_caching) return nullptr;
  return std::make_unique<PrefixCache>(pool, options.kv_lookahead, options.may_miss_prompts);
}

}  // namespace

std::vector<int64_t> most_blocks(const SchedulerOptions& options, const KvLayout& layout,
                                 int32_t num_tokens) {
  const int32_t width = options.num_draft_tokens + 1;
  const int32_t rows = std::max(options.prefill_chunk_size, width);
  // Counts held and quarantined tokens together. Every iteration in flight moves the window on by
  // its rows, and the same number is released only when those iterations have completed. The
  // reservation itself runs ahead by two windows of drafts.
  const auto slack = [&](int32_t num_rows) {
    return 2 * options.max_in_flight * num_rows + 2 * width;
  };
  return peak_blocks(layout, num_tokens,
                     {.window = slack(rows),
                      .verify_window = slack(width),
                      .num_chunks = 2 * options.max_in_flight + 1,
                      .kept = {.interval = options.state_interval},
                      .draft_lag = options.max_missed});
}

Scheduler::Scheduler(const SchedulerOptions& options, SlabPool& pool)
    : options_(with_lengths(options)), pool_(pool), cache_(make_cache(options, pool)) {
  free_all_slots();
}

void Scheduler::free_all_slots() {
  free_seq_slots_.clear();
  for (int32_t seq_slot = options_.max_num_seqs - 1; seq_slot >= 0; --seq_slot)
    free_seq_slots_.push_back(seq_slot);
}

void Scheduler::forget_sequences(int64_t completed) {
  running_.clear();
  waiting_.clear();
  num_waiting_requests_ = 0;
  needs_empty_pool_ = false;
  alone_ = nullptr;
  free_all_slots();
  newest_planned_ = completed;
}

void Scheduler::reset(int64_t completed) {
  forget_sequences(completed);
  pool_.reset(completed);
  if (cache_ != nullptr) cache_->reset();
}

void Scheduler::restart(const SchedulerOptions& options, SlabPool& pool) {
  SchedulerOptions next = with_lengths(options);
  std::vector<int32_t> seq_slots;
  seq_slots.reserve(static_cast<size_t>(next.max_num_seqs));
  // The cache refers to the pool by the place that the pool has from now on.
  std::swap(pool_, pool);
  std::unique_ptr<PrefixCache> cache;
  try {
    cache = make_cache(next, pool_);
  } catch (...) {
    std::swap(pool_, pool);
    throw;
  }
  options_ = std::move(next);
  cache_ = std::move(cache);
  free_seq_slots_ = std::move(seq_slots);
  most_slabs_ = 0;
  num_left_out_ = 0;
  forget_sequences(/*completed=*/-1);
}

bool Scheduler::fits_alone(int32_t prompt_len, int32_t limit) const {
  return pool_.fits_alone(most_blocks(options_, pool_.layout(), std::max(prompt_len, limit)));
}

void Scheduler::add(Sequence& sequence) {
  sequence.phase = Sequence::Phase::kWaiting;
  sequence.seq_slot = -1;
  sequence.num_prefilled = 0;
  sequence.num_computed = 0;
  sequence.cached_to = sequence.drafted_to = {};
  sequence.num_drafts_ahead = 0;
  sequence.num_missed = 0;
  sequence.num_kept = 0;
  sequence.num_followed = 1;
  sequence.misses_prompt = false;
  sequence.has_holes = false;
  sequence.parting = -1;
  sequence.blocks = SequenceBlocks(static_cast<int32_t>(pool_.layout().groups.size()));
  // A preempted sequence returns to its position in the queue.
  const auto position =
      std::upper_bound(waiting_.begin(), waiting_.end(), &sequence, &arrived_before);
  const bool has_sibling =
      (position != waiting_.end() && (*position)->id == sequence.id) ||
      (position != waiting_.begin() && (*std::prev(position))->id == sequence.id);
  if (!has_sibling) ++num_waiting_requests_;
  waiting_.insert(position, &sequence);
}

void Scheduler::remove_waiting(size_t index) {
  const RequestId id = waiting_[index]->id;
  const bool has_sibling = (index > 0 && waiting_[index - 1]->id == id) ||
                           (index + 1 < waiting_.size() && waiting_[index + 1]->id == id);
  if (!has_sibling) --num_waiting_requests_;
  waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(index));
}

Scheduler::Parent Scheduler::find_parent(const Sequence& sequence, int64_t iteration) const {
  const int32_t num_tokens = num_forkable(sequence);
  if (sequence.num_samples == 1 || num_tokens == 0) return {};
  // The logprobs of the prompt need all of its rows.
  if (sequence.prompt_logprobs != nullptr) return {};
  Parent found;
  const auto first =
      std::lower_bound(running_.begin(), running_.end(), sequence.id,
                       [](const Sequence* running, RequestId id) { return running->id < id; });
  for (auto it = first; it != running_.end() && (*it)->id == sequence.id; ++it) {
    const Sequence& sibling = **it;
    // Blocks are copied before the first row of the iteration, so KV that this iteration writes is
    // too late.
    if (sibling.num_prefilled < num_tokens || sibling.newest_prefill >= iteration) {
      found.is_pending = true;
    } else if (sibling.blocks.can_fork(pool_.layout(), num_tokens)) {
      return {.sequence = &sibling};
    }
  }
  return found;
}

bool Scheduler::must_be_finished(const Sequence& sequence) const {
  // Every launch that emits yields at least one token.
  return sequence.known_len() + sequence.emitting_in_flight >= sequence.limit &&
         sequence.phase == Sequence::Phase::kDecode;
}

PlannedSequence Scheduler::next_rows(const Sequence& sequence, const Budget& budget) const {
  PlannedSequence rows;
  rows.epoch = sequence.epoch;
  if (sequence.phase == Sequence::Phase::kDecode) {
    rows.kind = RowKind::kDecode;
    rows.num_rows = num_ready_drafts(sequence, budget.drafts) + 1;
    return rows;
  }
  rows.start = sequence.num_prefilled;
  const int32_t left = sequence.known_len() - sequence.num_prefilled;
  rows.num_rows = std::min({left, options_.prefill_chunk_size, budget.prefill});
  if (sequence.is_score) {
    rows.kind = RowKind::kScore;
    if (!sequence.skips_logits) rows.num_rows = std::min(rows.num_rows, budget.score);
  } else {
    const bool has_prompt_logprobs = sequence.prompt_logprobs != nullptr;
    if (has_prompt_logprobs) rows.num_rows = std::min(rows.num_rows, budget.score);
    rows.kind = rows.num_rows == left ? RowKind::kPrefillFinal : RowKind::kPrefillPartial;
    if (has_prompt_logprobs) {
      rows.num_prompt_rows = rows.num_rows - (rows.kind == RowKind::kPrefillFinal ? 1 : 0);
    }
  }
  rows.num_rows = std::max(rows.num_rows, 0);
  return rows;
}

int32_t Scheduler::tokens_to_reserve(const Sequence& sequence, const PlannedSequence& rows) const {
  const int32_t k = sequence.max_drafts;
  switch (rows.kind) {
    case RowKind::kDecode: {
      // The device may be ahead by k+1 tokens for each launch in flight. This launch adds as many,
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

KeptStates Scheduler::kept_states(const Sequence& sequence) const {
  if (cache_ == nullptr || sequence.is_score) return {};
  // The same prompt once more computes its last token at least.
  const int32_t block_size = pool_.layout().block_size;
  const int32_t prompt_end = (sequence.prompt_len - 1) / block_size * block_size;
  return {.interval = options_.state_interval, .ends = {prompt_end, sequence.parting}};
}

PassEnd Scheduler::pass_end(const Sequence& sequence, const PlannedSequence& rows) const {
  // How many rows of a verify window stay is not known yet.
  if (rows.kind == RowKind::kDecode) return {};
  // The other samples of a prompt begin with its last token.
  return {.next_position = rows.start + rows.num_rows - 1,
          .draft_lag = options_.max_missed,
          .kept = kept_states(sequence)};
}

void Scheduler::release(Sequence& sequence) {
  sequence.blocks.release_all(pool_, newest_planned_);
  if (sequence.seq_slot >= 0) free_seq_slots_.push_back(sequence.seq_slot);
  sequence.seq_slot = -1;
}

void Scheduler::preempt(Sequence& sequence) {
  release(sequence);
  std::erase(running_, &sequence);
  if (alone_ == &sequence) alone_ = nullptr;
  ++sequence.epoch;
  sequence.emitting_in_flight = 0;
  ++num_preemptions_;
  add(sequence);
}

Scheduler::Reservation Scheduler::reserve_blocks(Sequence& sequence, const PlannedSequence& rows,
                                                 IterationPlan& plan) {
  const int32_t num_tokens = tokens_to_reserve(sequence, rows);
  while (!sequence.blocks.reserve(pool_, num_tokens, sequence.seq_slot, plan.table_writes,
                                  pass_end(sequence, rows))) {
    Sequence* youngest = running_.back();
    // Blocks in quarantine will suffice: wait for the iterations that still use them.
    if (pool_.num_quarantined() > 0) return Reservation::kStalled;
    preempt(*youngest);
    // The sequence is alone and still lacks blocks: its own blocks are scattered over more slabs
    // than it needs. Recomputed on an empty pool it lies compactly, and `fits_alone` guarantees
    // that this fits, but only while it stays alone: beside others it would be scattered again,
    // without end.
    needs_empty_pool_ |= running_.empty();
    if (youngest == &sequence) return Reservation::kPreemptedItself;
  }
  return Reservation::kReserved;
}

int32_t Scheduler::num_adoptable(const Sequence& sequence) const {
  // All rows of a scored prompt, and of one whose logprobs are wanted, have results. An adopted
  // sequence would not be compact where it runs alone because its blocks were scattered.
  if (cache_ == nullptr || sequence.is_score || sequence.prompt_logprobs != nullptr ||
      needs_empty_pool_) {
    return 0;
  }
  // Output tokens that a penalty counts are counted as their rows are computed.
  const SamplingOptions& s = sequence.sampling;
  const bool counts_output = s.presence_penalty != 0 || s.frequency_penalty != 0;
  const int32_t most =
      counts_output ? std::min(sequence.prompt_len, sequence.known_len()) : sequence.known_len();
  // The last known token's row draws the next one.
  return most - 1;
}

bool Scheduler::admit_next(Sequence& sequence, const Sequence* parent, Budget& budget,
                           IterationPlan& plan) {
  PrefixCache::Match match;
  const int32_t num_adoptable = parent == nullptr ? this->num_adoptable(sequence) : 0;
  if (num_adoptable > 0) match = find_prefix(sequence, plan, num_adoptable);
  // Further prompts that begin as this one and an earlier one do will find a state there.
  sequence.parting = match.num_known > match.num_tokens ? match.num_known : -1;
  if (match.num_tokens > budget.adopted) return false;
  // Cached blocks may lie in more slabs than new ones would take. If there is no room beside them,
  // there may be without them.
  for (;;) {
    sequence.num_prefilled = parent != nullptr ? num_forkable(sequence) : match.num_tokens;
    PlannedSequence rows = next_rows(sequence, budget);
    rows.num_adopted = match.num_tokens;
    if (rows.num_rows > 0 && admit(sequence, rows, parent, match, plan)) {
      budget.prefill -= rows.num_rows;
      budget.score -= score_rows(sequence, rows);
      budget.adopted -= match.num_tokens;
      if (num_adoptable > 0) {
        num_queried_tokens_ += std::min(sequence.prompt_len, sequence.known_len());
        num_hit_tokens_ += std::min(match.num_tokens, sequence.prompt_len);
      }
      launch(sequence, rows, plan);
      return true;
    }
    sequence.num_prefilled = 0;
    if (rows.num_rows == 0 || match.num_tokens == 0) return false;
    match = {};
  }
}

bool Scheduler::admit(Sequence& sequence, const PlannedSequence& rows, const Sequence* parent,
                      const PrefixCache::Match& match, IterationPlan& plan) {
  const KvLayout& layout = pool_.layout();
  // All known tokens must fit, not only this chunk; otherwise the admission would soon cause a
  // preemption.
  const int32_t k = sequence.max_drafts;
  const int32_t soon = std::max(std::min(sequence.limit, sequence.known_len() + 2 * (k + 1) + k),
                                sequence.known_len());
  std::vector<int64_t> counts = most_blocks(options_, layout, soon);
  for (size_t g = 0; g < counts.size(); ++g) {
    const KvGroup& group = layout.groups[g];
    // Blocks that a fork shares or that come from the cache are already allocated. In a sliding
    // group they do not last: it moves on to blocks of the sequence's own.
    const bool is_drafted = group.owner == KvOwner::kDraft && match.num_tokens > 0;
    const int32_t num_shared = is_drafted ? match.num_drafted : rows.start;
    if (kv_window(group.kind) == 0) counts[g] -= num_whole_blocks(group, num_shared);
  }
  if (match.num_tokens > 0) {
    sequence.blocks.adopt(pool_, cache_->blocks_of(match), match.num_tokens);
  }
  if (!pool_.can_allocate(counts)) {
    sequence.blocks.return_adopted(pool_);
    return false;
  }
  most_slabs_ = std::max(running_.empty() ? 0 : most_slabs_,
                         pool_.num_slabs_for(most_blocks(
                             options_, layout, std::max(sequence.limit, sequence.known_len()))));
  pool_.keep_free_slabs(most_slabs_);
  sequence.seq_slot = free_seq_slots_.back();
  sequence.blocks.append_writes(sequence.seq_slot, plan.table_writes);
  if (parent != nullptr) sequence.blocks.fork(pool_, parent->blocks, rows.start);
  if (!sequence.blocks.reserve(pool_, tokens_to_reserve(sequence, rows), sequence.seq_slot,
                               plan.table_writes, pass_end(sequence, rows))) {
    std::erase_if(plan.table_writes,
                  [&](const TableWrite& write) { return write.seq_slot == sequence.seq_slot; });
    if (parent != nullptr) {
      sequence.blocks.release_all(pool_, newest_planned_);
    } else {
      sequence.blocks.return_adopted(pool_);
    }
    sequence.seq_slot = -1;
    return false;
  }
  if (match.num_tokens > 0) {
    cache_->count_hit(sequence.blocks, match);
    sequence.num_computed = match.num_tokens;
    sequence.cached_to = match.end;
    sequence.drafted_to = match.drafted_end;
    sequence.num_missed = match.num_tokens - match.num_drafted;
    sequence.num_followed = match.num_drafted + 1;
  }
  sequence.misses_prompt = misses_prompt(sequence, plan);
  if (plan.skips_prompts && sequence.max_drafts > 0 && !sequence.is_score) {
    num_left_out_ = sequence.misses_prompt ? num_left_out_ + 1 : 0;
  }
  if (parent != nullptr) {
    sequence.blocks.append_copies(layout, parent->blocks, rows.start, plan.block_copies);
    plan.forks.push_back({.parent_seq_slot = parent->seq_slot,
                          .seq_slot = sequence.seq_slot,
                          .num_tokens = rows.start});
    sequence.has_holes = parent->has_holes;
  }
  const int32_t num_shared = std::min(rows.start, sequence.prompt_len);
  num_shared_tokens_ += num_shared;
  if (sequence.epoch == 0) sequence.num_cached_tokens = num_shared;
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
  Budget budget{.prefill = options_.max_num_batched_tokens,
                .score = options_.max_score_rows,
                .adopted = options_.max_adopted_tokens,
                .drafts = plan.num_drafts};
  int32_t num_decode_rows = 0;
  for (const Sequence* sequence : running_) {
    if (sequence->phase != Sequence::Phase::kDecode) continue;
    budget.prefill -= sequence->max_drafts + 1;
    if (!must_be_finished(*sequence)) num_decode_rows += next_rows(*sequence, budget).num_rows;
  }
  if (num_decode_rows > 0 && plan.max_prompt_rows < budget.prefill) {
    const int32_t rows = num_decode_rows + plan.max_prompt_rows;
    const int32_t step = options_.row_step;
    int32_t nearest = (rows + step / 2) / step * step;
    if (nearest - num_decode_rows < plan.max_prompt_rows / 2) nearest += step;
    budget.prefill = std::min(budget.prefill, nearest - num_decode_rows);
  }

  // Oldest first, so that a preempted sequence has not been planned yet. It has no rows in this
  // plan and no new block table entries, so the entry of a sequence slot is written once at most.
  bool has_preempted = false;
  candidates_ = running_;
  for (Sequence* sequence : candidates_) {
    if (sequence->phase == Sequence::Phase::kWaiting) continue;  // preempted in this call
    if (must_be_finished(*sequence)) continue;
    if (sequence->phase == Sequence::Phase::kPrefill &&
        sequence->num_prefilled == sequence->known_len()) {
      continue;  // a scored prompt whose rows have all been launched
    }
    if (sequence->phase == Sequence::Phase::kDecode && sequence->lacks_window(RowKind::kDecode)) {
      continue;  // others are not held up
    }
    const PlannedSequence rows = next_rows(*sequence, budget);
    if (rows.num_rows == 0) continue;
    const int64_t preemptions = num_preemptions_;
    const Reservation reservation = reserve_blocks(*sequence, rows, plan);
    has_preempted |= num_preemptions_ != preemptions || reservation == Reservation::kStalled;
    if (reservation != Reservation::kReserved) continue;
    if (rows.kind != RowKind::kDecode) budget.prefill -= rows.num_rows;
    budget.score -= score_rows(*sequence, rows);
    launch(*sequence, rows, plan);
  }

  // Waiting sequences are not admitted ahead of running ones that have just lost their blocks or
  // have stalled, unless nothing else would run. All releases of this plan precede the first fork,
  // so a later release of the source of a copy carries the tag of this iteration or a newer one.
  size_t index = 0;
  while (index < waiting_.size() && !free_seq_slots_.empty() && alone_ == nullptr &&
         (!has_preempted || (plan.sequences.empty() && running_.empty()))) {
    if (needs_empty_pool_ && (!running_.empty() || pool_.num_quarantined() > 0)) break;
    Sequence* sequence = waiting_[index];
    // Once it is there, the window of a prompt stays, since no token is drawn until its last row.
    if (sequence->lacks_window(RowKind::kPrefillFinal)) {
      ++index;
      continue;
    }
    const Parent parent = find_parent(*sequence, plan.iteration);
    if (parent.sequence == nullptr && parent.is_pending) {
      ++index;  // other sequences need not wait for its prompt
      continue;
    }
    if (!admit_next(*sequence, parent.sequence, budget, plan)) break;
    remove_waiting(index);
    if (std::exchange(needs_empty_pool_, false)) alone_ = sequence;
  }

  // Preemption may have undone reservations made earlier in this call, for sequences that are no
  // longer planned. Their block tables are rewritten when they are admitted again.
  if (plan.sequences.empty()) return false;
  std::stable_sort(plan.sequences.begin(), plan.sequences.end(),
                   [](const PlannedSequence& a, const PlannedSequence& b) {
                     return static_cast<int32_t>(a.kind) < static_cast<int32_t>(b.kind);
                   });
  plan_drafts(plan);
  newest_planned_ = plan.iteration;
  return true;
}

void Scheduler::advance(Sequence& sequence, const PlannedSequence& launch,
                        SequenceOutcome outcome) {
  const bool is_running = outcome == SequenceOutcome::kRunning;
  const bool is_partial = launch.kind == RowKind::kPrefillPartial;
  // If a window ends its sequence, the drafter does not follow; in a chunk it does, since others
  // may fork from it.
  const bool is_complete = launch.kind != RowKind::kScore &&
                           outcome != SequenceOutcome::kNoLogits &&
                           (is_running || launch.kind != RowKind::kDecode);
  // What the drafter has missed is not cached if other sequences could not catch up.
  if (is_partial) {
    sequence.num_computed = launch.start + launch.num_rows;
  } else if (is_complete && (launch.is_cacheable || options_.may_miss_prompts)) {
    sequence.num_computed = sequence.known_len() - 1;  // the newest token has no KV yet
  }
  if (launch.is_followed) {
    sequence.num_followed = is_partial ? launch.start + launch.num_rows + 1 : sequence.known_len();
  }
  if (cache_ != nullptr && is_complete) {
    if (!sequence.has_holes && (launch.is_cacheable || !options_.may_miss_prompts)) {
      cache_->extend(sequence.drafted_to, sequence.tokens, sequence.cache_salt,
                     sequence.num_computed, sequence.blocks, PrefixCache::Parts::kAll,
                     kept_states(sequence));
      sequence.cached_to = sequence.drafted_to;
    } else if (options_.may_miss_prompts) {
      cache_->extend(sequence.cached_to, sequence.tokens, sequence.cache_salt,
                     sequence.num_computed, sequence.blocks, PrefixCache::Parts::kTarget,
                     kept_states(sequence));
    }
  }
  if (!is_running) return;
  // Below every position that a later launch can query: the drafter goes back to the token before
  // the newest one. As a launch emits at least one token before it drafts, known_len - 1 would do;
  // the one position more costs at most a block.
  const int32_t first_query =
      launch.kind == RowKind::kDecode || launch.kind == RowKind::kPrefillFinal
          ? sequence.known_len() - 2
          : launch.start + launch.num_rows;
  // The drafter may go back to tokens that it has missed.
  if (first_query > 0) {
    sequence.blocks.release_below(pool_, first_query, newest_planned_, options_.max_missed);
  }
}

void Scheduler::forget_prefixes() {
  if (cache_ != nullptr) cache_->clear();
}

void Scheduler::finish(Sequence& sequence) {
  if (sequence.phase == Sequence::Phase::kWaiting) {
    const auto found = std::find(waiting_.begin(), waiting_.end(), &sequence);
    PACELINE_CHECK(found != waiting_.end(), "request ", sequence.id,
                   " is waiting but not in the queue");
    remove_waiting(static_cast<size_t>(found - waiting_.begin()));
  } else {
    std::erase(running_, &sequence);
    // The next turn of a conversation begins with the tokens of this one.
    if (cache_ != nullptr && !sequence.is_score) {
      cache_->keep_end(sequence.drafted_to, sequence.blocks, PrefixCache::Parts::kAll);
      if (options_.may_miss_prompts) {
        cache_->keep_end(sequence.cached_to, sequence.blocks, PrefixCache::Parts::kTarget);
      }
    }
  }
  release(sequence);
  sequence.phase = Sequence::Phase::kFinished;
  if (alone_ == &sequence) alone_ = nullptr;
  if (!has_work()) needs_empty_pool_ = false;
}

}  // namespace paceline
