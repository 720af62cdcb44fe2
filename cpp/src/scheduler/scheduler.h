// SPDX-License-Identifier: Apache-2.0
#pragma once

// Decides which sequences take part in the next iteration, and owns their blocks and sequence
// slots: continuous batching, chunked prefill beside decoding rows, first come first served. When
// blocks run out, the scheduler preempts the youngest running sequence, which is later recomputed
// from its known tokens.
//
// The samples of a request are separate sequences. The first to run prefills the prompt. The others
// wait for it and then fork from any sample that has the prompt's KV: they begin at the prompt's
// last token, which each computes for itself, and share or copy the KV below. A sample that finds
// no sibling to fork from (all have ended, are preempted, or have windows that moved on) prefills
// the prompt itself; its output is the same.
//
// A sequence without such a sibling begins with the longest prefix of its tokens that the prefix
// cache has, and computes at least the last known token. The cache learns of blocks when results
// are read, so it has only KV that the device has written.
//
// A guided sequence, whose verify windows the host makes, is planned only once its last result has
// been read and its next window is there. The others are planned as if it were not.
//
// The scheduler plans ahead of results: it plans a decoding sequence for the most tokens that it
// may have by then, and stops planning it once it must have finished. Host only; not thread-safe.

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "kv/prefix_cache.h"
#include "kv/slab_pool.h"
#include "request/sequence.h"
#include "scheduler/iteration_plan.h"
#include "wire/sequence_result.h"

namespace paceline {

struct SchedulerOptions {
  int32_t max_num_seqs = 0;
  int32_t max_num_batched_tokens = 0;
  int32_t prefill_chunk_size = 0;  // maximum prefill rows of one sequence in an iteration; > 0
  int32_t row_step = 1;            // products are fast for multiples of as many rows
  // Maximum rows of scored prompts and prompt logprobs in an iteration; > 0.
  int32_t max_score_rows = 0;
  int32_t num_draft_tokens = 0;  // k
  // The values of k' for which there are graphs, ascending: 0, k and others. Empty: 0 and k.
  std::vector<int32_t> draft_lengths;
  bool drafter_falls_behind = false;  // it has KV of its own, for which it must see all tokens
  // It can catch up with any tokens later, prompts too. So iterations may leave it out, and so may
  // the prefix cache.
  bool may_miss_prompts = false;
  // After it has missed more tokens of a sequence, the drafter does not draft for it again, since
  // its windows have moved on; 0: no bound.
  int32_t max_missed = 0;
  // The most tokens missed after which the drafter's KV can be as if it had missed none. Of a draft
  // head, hidden states are kept for one token more; none are if there is no bound.
  int32_t max_exact_missed = INT32_MAX;
  int32_t max_in_flight = 0;  // maximum iterations launched but not read, including the next
  bool enable_prefix_caching = false;
  // The prefix cache keeps states of recurrent layers at multiples of this many tokens; 0: only at
  // the ends of prompts and outputs, and where prompts part.
  int32_t state_interval = 0;
  // 1 if the drafter's KV at a position depends on the next token, too; else 0.
  int32_t kv_lookahead = 0;
  // Whether the drafter's KV of a token comes from the target's hidden state, which the newest
  // token does not have.
  bool follows_hidden = false;
  // Maximum tokens that the sequences of one iteration take over from the prefix cache; at least
  // the length of the longest sequence.
  int32_t max_adopted_tokens = 0;
};

// The most blocks of each group that a sequence of `num_tokens` tokens has at a time.
[[nodiscard]] std::vector<int64_t> most_blocks(const SchedulerOptions& options,
                                               const KvLayout& layout, int32_t num_tokens);

class Scheduler {
 public:
  Scheduler(const SchedulerOptions& options, SlabPool& pool);

  // Whether the sequence could run alone: an upper bound of its blocks fits the pool.
  [[nodiscard]] bool fits_alone(int32_t prompt_len, int32_t limit) const;

  // Queues a sequence by order of arrival. The caller owns it and keeps it alive at least until
  // `finish`.
  void add(Sequence& sequence);

  // Fills `plan` for `plan.iteration` and returns true. Returns false if nothing can be launched
  // now: there is no work, or all of it waits for iterations in flight.
  [[nodiscard]] bool plan(IterationPlan& plan);

  // The caller has read the results of a launch into sequence.tokens; `outcome` is part of them.
  // Adds what has been computed to the prefix cache, and releases the blocks that have left every
  // sliding window. A sequence that has ended needs `finish`, too.
  void advance(Sequence& sequence, const PlannedSequence& launch,
               SequenceOutcome outcome = SequenceOutcome::kRunning);

  // The sequence has finished, was cancelled or has failed. Releases its sequence slot and blocks.
  void finish(Sequence& sequence);

  // Forgets every sequence and takes all blocks and sequence slots back. Every launched iteration,
  // the newest being `completed`, has completed. Works from any state that an exception has left,
  // and allocates nothing. The sequences may be added again.
  void reset(int64_t completed);

  // Forgets every sequence, as `reset` does, and goes on with other options and with `pool`, which
  // is empty and may have another layout. Iterations count from 0 again; the counters go on. `pool`
  // gets the pool so far. Changes nothing if it throws.
  void restart(const SchedulerOptions& options, SlabPool& pool);

  // Empties the prefix cache, for weights that have changed.
  void forget_prefixes();

  // Tells the scheduler that the device has completed all iterations up to this one.
  void complete(int64_t iteration) { pool_.complete(iteration); }

  [[nodiscard]] bool has_work() const { return !running_.empty() || !waiting_.empty(); }
  [[nodiscard]] int32_t num_running() const { return static_cast<int32_t>(running_.size()); }
  [[nodiscard]] int32_t num_waiting() const { return static_cast<int32_t>(waiting_.size()); }
  // Running sequences whose prompt has been launched.
  [[nodiscard]] int32_t num_decoding() const {
    return static_cast<int32_t>(std::count_if(running_.begin(), running_.end(), [](const auto* s) {
      return s->phase == Sequence::Phase::kDecode;
    }));
  }
  // Those of them for which the drafter can draft if it catches up with this many tokens at most.
  [[nodiscard]] int32_t num_ready_to_draft(int64_t max_catch_up) const;
  // Number of requests with at least one waiting sample.
  [[nodiscard]] int64_t num_waiting_requests() const { return num_waiting_requests_; }
  [[nodiscard]] int64_t num_preemptions() const { return num_preemptions_; }
  // Number of prompt tokens that forks and hits of the prefix cache did not have to prefill.
  [[nodiscard]] int64_t num_shared_tokens() const { return num_shared_tokens_; }
  // Of the sequences admitted: prompt tokens that the prefix cache was asked for, and those that it
  // had.
  [[nodiscard]] int64_t num_queried_tokens() const { return num_queried_tokens_; }
  [[nodiscard]] int64_t num_hit_tokens() const { return num_hit_tokens_; }
  // Null if it is switched off.
  [[nodiscard]] const PrefixCache* prefix_cache() const { return cache_.get(); }

 private:
  // Result of an attempt to reserve the blocks of a running sequence.
  enum class Reservation : uint8_t { kReserved, kStalled, kPreemptedItself };

  // What the rest of a plan may still have.
  struct Budget {
    int32_t prefill = 0;  // rows
    int32_t score = 0;    // rows
    int32_t adopted = 0;  // tokens
    int32_t drafts = 0;   // of a window
  };

  // The sequence from which a waiting sample may fork in the planned iteration.
  struct Parent {
    const Sequence* sequence = nullptr;
    bool is_pending = false;  // there is none yet, but a sibling is prefilling the prompt
  };

  [[nodiscard]] Parent find_parent(const Sequence& sequence, int64_t iteration) const;
  void remove_waiting(size_t index);
  [[nodiscard]] bool must_be_finished(const Sequence& sequence) const;
  [[nodiscard]] PlannedSequence next_rows(const Sequence& sequence, const Budget& budget) const;
  [[nodiscard]] int32_t tokens_to_reserve(const Sequence& sequence,
                                          const PlannedSequence& rows) const;
  // Where the prefix cache keeps states of the sequence while it runs.
  [[nodiscard]] KeptStates kept_states(const Sequence& sequence) const;
  // The blocks that planned rows leave to later passes.
  [[nodiscard]] PassEnd pass_end(const Sequence& sequence, const PlannedSequence& rows) const;
  [[nodiscard]] Reservation reserve_blocks(Sequence& sequence, const PlannedSequence& rows,
                                           IterationPlan& plan);
  // Tokens that the sequence may take over from the prefix cache.
  [[nodiscard]] int32_t num_adoptable(const Sequence& sequence) const;
  // Whether the drafter leaves out the prompt of a sequence that begins.
  [[nodiscard]] bool misses_prompt(const Sequence& sequence, const IterationPlan& plan) const;
  // Whether it leaves out a planned chunk.
  [[nodiscard]] bool misses_chunk(const PlannedSequence& rows) const;
  // The prefix of a sequence that the prefix cache has, of at most num_tokens.
  [[nodiscard]] PrefixCache::Match find_prefix(const Sequence& sequence, const IterationPlan& plan,
                                               int32_t num_tokens);
  // Finds what each first row of the sequence may follow, and admits it there.
  [[nodiscard]] bool admit_next(Sequence& sequence, const Sequence* parent, Budget& budget,
                                IterationPlan& plan);
  // `parent`: the sequence to fork from, or null. `match`: without a parent, what it adopts.
  [[nodiscard]] bool admit(Sequence& sequence, const PlannedSequence& rows, const Sequence* parent,
                           const PrefixCache::Match& match, IterationPlan& plan);
  void launch(Sequence& sequence, PlannedSequence rows, IterationPlan& plan);
  // Drafts that the device may have for the next window of a sequence, at most num_drafts.
  [[nodiscard]] int32_t num_ready_drafts(const Sequence& sequence, int32_t num_drafts) const;
  // Whether the hidden states of all tokens that a draft head has missed were kept. Others need
  // none.
  [[nodiscard]] bool is_kept(const Sequence& sequence) const {
    return !options_.follows_hidden || sequence.num_kept == sequence.num_missed;
  }
  // Whether some sequence needs its hidden states later, since the drafter misses its tokens now.
  [[nodiscard]] bool wants_hidden(const IterationPlan& plan) const;
  // Decides whether the iteration keeps hidden states, and counts those that each sequence has.
  void plan_hidden(IterationPlan& plan) const;
  // Decides what the drafter does in the planned iteration.
  void plan_drafts(IterationPlan& plan) const;
  // Gives the rows the tokens that the drafter has missed, as far as there is room in the first
  // pass, or leaves the sequence out.
  void catch_up(PlannedSequence& rows, bool is_bounded, int32_t& room) const;
  // Whether the drafter may get what it has missed of a sequence, as far as there is room.
  [[nodiscard]] bool can_catch_up(const Sequence& sequence, const IterationPlan& plan) const;
  void preempt(Sequence& sequence);
  void release(Sequence& sequence);
  void free_all_slots();
  void forget_sequences(int64_t completed);

  SchedulerOptions options_;
  SlabPool& pool_;
  std::unique_ptr<PrefixCache> cache_;  // null: switched off
  std::vector<Sequence*> running_;      // by arrival; samples of a request are adjacent
  std::deque<Sequence*> waiting_;       // in the same order
  std::vector<int32_t> free_seq_slots_;
  std::vector<Sequence*> candidates_;  // scratch of plan(): running_ as it was at the start
  // Set when a sequence has lacked blocks although it ran alone: the next one is admitted to an
  // empty pool and is `alone_` until it ends.
  bool needs_empty_pool_ = false;
  const Sequence* alone_ = nullptr;
  int64_t newest_planned_ = -1;
  int64_t num_preemptions_ = 0;
  int64_t num_shared_tokens_ = 0;
  int64_t num_queried_tokens_ = 0;
  int64_t num_hit_tokens_ = 0;
  // The most slabs that a sequence of those that run may need.
  int64_t most_slabs_ = 0;
  int64_t num_waiting_requests_ = 0;
  // Sequences in a row whose prompts the drafter has left out only because it was not wanted then.
  int32_t num_left_out_ = 0;
};

}  // namespace paceline
