// SPDX-License-Identifier: Apache-2.0
#pragma once

// Decides which sequences take part in the next iteration, and owns their blocks and slots:
// continuous batching, chunked prefill beside decoding rows, first come first served. When blocks
// run out the youngest running sequence is preempted and later recomputed from its known tokens.
//
// The samples of a request are sequences of their own. The first to run prefills the prompt; the
// others wait for that and then fork from whichever sample has it: they begin at the prompt's last
// token, which each computes for itself, and share or copy the KV below. A sample that finds none
// to fork from (all gone, preempted, or windows moved on) prefills by itself; the output is the
// same.
//
// Plans ahead of results: a decoding sequence is planned with the most tokens it may have by then,
// and never again once it must already be finished. Host only; not thread-safe.

#include <cstdint>
#include <deque>
#include <vector>

#include "kv/slab_pool.h"
#include "request/sequence.h"
#include "scheduler/iteration_plan.h"

namespace paceline {

struct SchedulerOptions {
  int32_t max_num_seqs = 0;
  int32_t max_num_batched_tokens = 0;
  int32_t prefill_chunk_size = 0;  // most prefill rows of one sequence in one iteration; > 0
  int32_t max_score_rows = 0;      // most rows of scored or rated prompts in one iteration; > 0
  int32_t num_draft_tokens = 0;    // k
  int32_t max_in_flight = 0;       // iterations launched and unread at most, the next included
};

class Scheduler {
 public:
  Scheduler(const SchedulerOptions& options, SlabPool& pool);

  // Whether the sequence could run if it were alone: an upper bound of its blocks fits the pool.
  [[nodiscard]] bool fits_alone(int32_t prompt_len, int32_t limit) const;

  // Queues a sequence behind those that came before. The caller keeps ownership until `retire`.
  void add(Sequence& sequence);

  // Fills `plan` for `plan.iteration` and returns true, or returns false when nothing can be
  // launched now (idle, or everything waits for iterations in flight).
  [[nodiscard]] bool plan(IterationPlan& plan);

  // Results of a launch have been read into sequence.tokens: blocks that fell out of every sliding
  // window go back.
  void advance(Sequence& sequence, const PlannedSequence& launch);

  // The sequence is over (finished, cancelled, failed): slot and blocks go back.
  void finish(Sequence& sequence);

  // The device has completed every iteration up to this one.
  void complete(int64_t iteration) { pool_.complete(iteration); }

  [[nodiscard]] bool has_work() const { return !running_.empty() || !waiting_.empty(); }
  [[nodiscard]] int32_t num_running() const { return static_cast<int32_t>(running_.size()); }
  [[nodiscard]] int32_t num_waiting() const { return static_cast<int32_t>(waiting_.size()); }
  // Requests of which any sample waits.
  [[nodiscard]] int64_t num_waiting_requests() const { return num_waiting_requests_; }
  [[nodiscard]] int64_t num_preemptions() const { return num_preemptions_; }
  // Tokens of prompts that forks have not had to prefill.
  [[nodiscard]] int64_t num_shared_tokens() const { return num_shared_tokens_; }

 private:
  // What became of the attempt to give a running sequence the blocks it needs.
  enum class Room : uint8_t { kReserved, kStalled, kPreemptedItself };

  // Whom a waiting sample may fork from in the iteration that is being planned.
  struct Parent {
    const Sequence* sequence = nullptr;
    bool comes_later = false;  // nobody yet, but a sample that prefills just now
  };

  [[nodiscard]] Parent find_parent(const Sequence& sequence, int64_t iteration) const;
  void remove_waiting(size_t index);
  [[nodiscard]] bool must_be_finished(const Sequence& sequence) const;
  [[nodiscard]] PlannedSequence next_rows(const Sequence& sequence, int32_t prefill_budget,
                                          int32_t score_budget) const;
  [[nodiscard]] int32_t tokens_to_reserve(const Sequence& sequence,
                                          const PlannedSequence& rows) const;
  [[nodiscard]] Room make_room(Sequence& sequence, const PlannedSequence& rows,
                               IterationPlan& plan);
  // `parent`: to fork from, or null.
  [[nodiscard]] bool admit(Sequence& sequence, const PlannedSequence& rows, const Sequence* parent,
                           IterationPlan& plan);
  void launch(Sequence& sequence, PlannedSequence rows, IterationPlan& plan);
  void preempt(Sequence& sequence);
  void give_back(Sequence& sequence);
  [[nodiscard]] int32_t window_slack() const;

  SchedulerOptions options_;
  SlabPool& pool_;
  std::vector<Sequence*> running_;  // by arrival; samples of a request side by side
  std::deque<Sequence*> waiting_;   // the same
  std::vector<int32_t> free_seq_slots_;
  std::vector<Sequence*> considered_;  // scratch of plan(): running_ as it was when it began
  int64_t newest_planned_ = -1;
  int64_t num_preemptions_ = 0;
  int64_t num_shared_tokens_ = 0;
  int64_t num_waiting_requests_ = 0;
};

}  // namespace paceline
