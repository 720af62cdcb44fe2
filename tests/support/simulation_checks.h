// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the simulator checks of each plan, and of the pool after each tick.
//
// The invariants:
//
// 1. The device reads and writes only blocks that are still the sequence's own, inside what has
//    been reserved and above what its windows have released, and finds there the KV of the output
//    or of the drafts of the same window (simulated_device.cc).
// 2. Outputs are complete: the host reads every token once, in order, up to where the sample ends.
// 3. Blocks are conserved: those in the tables of running sequences are those that the pool counts
//    as held, with as many holders; at the end all are free.
// 4. A plan keeps its limits: rows, scored rows, chunks, sequences, slots.
// 5. First come, first served: no sequence is admitted before an older one, unless that one waits
//    for the prompt of its own request. No sequence is admitted while a running one lacks blocks,
//    except the oldest sequence when none runs. The youngest is preempted first, and only when
//    no block is on its way back.
// 6. Admission leaves room up to the first window: until then no sequence stalls or preempts itself
//    unless others have taken blocks meanwhile.
// 7. No sequence waits longer than the work ahead of it takes. The clock counts launched
// iterations. The
//    oldest sequence is launched in every iteration except while it lacks blocks or while all of
//    its tokens may be in flight, which takes max_in_flight iterations at most. Each of its
//    launches brings a chunk of at least `chunk` tokens or one token of output, so once it is the
//    oldest it needs at most
//        work = ceil(limit / chunk) + (limit - prompt_len) + 1
//    launches, even if it has to be recomputed from nothing. So a sequence waits, from its arrival
//    to its first launch and from one launch to the next, at most
//        max_in_flight + sum over older unfinished sequences of (work + max_in_flight)
//    iterations, plus those in which the oldest lacks blocks. It lacks them only while younger
//    sequences put blocks into quarantine; meanwhile none is admitted (5), so that lasts at most
//    as long as those that run have work:
//        max_in_flight + sum over younger running sequences of (work + max_in_flight).
//    A sequence that preempts itself as the oldest adds its work once more. While a sample
//    waits for the prompt of its request, it lets later requests pass; from then on the work of
//    those that run adds to its bound.
// 8. Everything ends: all iterations together are bounded by twice the sum of all work.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kv/slab_pool.h"
#include "request/sequence.h"
#include "scheduler/scheduler.h"
#include "support/simulated_device.h"
#include "support/simulator.h"

namespace paceline::testing {

// A sample of a request that has arrived and is not over, as the simulator sees it.
struct SimulatedSequence {
  SimulatedOwner owner;
  SimulatedOutput output;
  Sequence sequence;
  int64_t work = 0;
  std::vector<bool> is_rated;  // has_prompt_logprobs, is_score: by position

  // Since it was admitted.
  bool has_window = false;
  int64_t num_taken_by_others = 0;  // blocks

  // Of the plan that is being checked: what was before it.
  Sequence::Phase phase_before = Sequence::Phase::kWaiting;
  int64_t epoch_before = 0;
  bool was_launched = false;

  bool was_preempted_alone = false;

  int64_t waited = 0;   // iterations since the last launch
  int64_t allowed = 0;  // bound of that

  SimulatedSequence(const SimulatedRequest& request, int32_t index, int32_t sample)
      : owner{.request = index, .sample = sample, .is_score = request.is_score},
        output(request, sample) {
    owner.output = &output;
  }
  SimulatedSequence(const SimulatedSequence&) = delete;

  // Counts the blocks that other sequences take once this one is admitted. In the plan that admits
  // it, these are the writes after its own. If it has none there, because its first tokens complete
  // no entry, they are the writes of prefilling sequences that arrived later.
  void take_allocations(const IterationPlan& plan, bool is_admitted) {
    if (is_admitted) num_taken_by_others = 0;
    const std::vector<TableWrite>& writes = plan.table_writes;
    const auto is_own = [&](const TableWrite& write) {
      return write.seq_slot == sequence.seq_slot;
    };
    auto from = writes.begin();
    if (is_admitted) from = std::find_if(writes.begin(), writes.end(), is_own);
    if (from == writes.end()) {
      for (const PlannedSequence& other : plan.sequences) {
        const bool is_later = std::pair(other.sequence->id, other.sequence->sample) >
                              std::pair(sequence.id, sequence.sample);
        if (!is_later || other.kind == RowKind::kDecode) continue;
        num_taken_by_others +=
            std::count_if(writes.begin(), writes.end(), [&](const TableWrite& write) {
              return write.seq_slot == other.sequence->seq_slot && write.block != kNullBlock;
            });
      }
    }
    num_taken_by_others += std::count_if(from, writes.end(), [&](const TableWrite& write) {
      return !is_own(write) && write.block != kNullBlock;
    });
  }
};

class SimulationChecks {
 public:
  using Sequences = std::vector<std::unique_ptr<SimulatedSequence>>;  // by arrival

  SimulationChecks(const SchedulerOptions& options, const SlabPool& pool,
                   const Scheduler& scheduler, const Sequences& live, SimulationReport& report,
                   int32_t least_prompt_rows);

  // A request has arrived: its sequence's work, and what that adds to the bound of all iterations.
  void add(SimulatedSequence& sequence, const SimulatedRequest& request);
  void before_plan();
  // `is_launched`: what plan() returned.
  void after_plan(const IterationPlan& plan, bool is_launched);
  void check_blocks();

 private:
  void check_plan(const IterationPlan& plan);
  void check_limits(const IterationPlan& plan) const;
  void check_margin(const SimulatedSequence& live, const char* what) const;
  void check_waits(int64_t iteration);
  void check_stall();
  void add_recomputation(SimulatedSequence& oldest);
  [[nodiscard]] bool has_no_rows(const Sequence& sequence, int32_t prefill_left,
                                 int32_t score_left) const;
  [[nodiscard]] bool waits_for_sibling(const SimulatedSequence& live, int64_t iteration) const;
  [[nodiscard]] int64_t running_work_behind(const SimulatedSequence& older) const;
  [[nodiscard]] int64_t work_of(const SimulatedRequest& request) const;

  const SchedulerOptions& options_;
  int32_t least_prompt_rows_;
  const SlabPool& pool_;
  const Scheduler& scheduler_;
  const Sequences& live_;
  SimulationReport& report_;
  std::vector<std::vector<uint16_t>> holders_;  // scratch of check_blocks: [groups][blocks]
  int64_t quarantined_before_ = 0;              // the plan
  bool is_oldest_stalled_ = false;
  int64_t stalled_for_ = 0;      // iterations, of the oldest
  int64_t stall_allowed_ = 0;    // bound of that
  int64_t most_iterations_ = 0;  // that all work so far may take
};

}  // namespace paceline::testing
