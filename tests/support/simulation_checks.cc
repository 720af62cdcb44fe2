// SPDX-License-Identifier: Apache-2.0
#include "support/simulation_checks.h"

#include <algorithm>

namespace paceline::testing {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool must_be_finished(const Sequence& sequence) {
  return sequence.phase == Sequence::Phase::kDecode &&
         sequence.known_len() + sequence.emitting_in_flight >= sequence.limit;
}

const PlannedSequence* launch_of(const IterationPlan& plan, const Sequence& sequence) {
  for (const PlannedSequence& launch : plan.sequences) {
    if (launch.sequence == &sequence) return &launch;
  }
  return nullptr;
}

// For messages, which are made whether or not they are needed.
int32_t request_of(const SimulatedSequence* live) {
  return live == nullptr ? -1 : live->owner.request;
}

bool is_admitted(const SimulatedSequence& live) {
  return live.was_launched && live.phase_before == Sequence::Phase::kWaiting;
}

}  // namespace

SimulationChecks::SimulationChecks(const SchedulerOptions& options, const SlabPool& pool,
                                   const Scheduler& scheduler, const Sequences& live,
                                   SimulationReport& report, int32_t least_prompt_rows)
    : options_(options),
      least_prompt_rows_(least_prompt_rows),
      pool_(pool),
      scheduler_(scheduler),
      live_(live),
      report_(report) {
  const KvLayout& layout = pool.layout();
  for (const KvGroup& group : layout.groups) {
    holders_.emplace_back(static_cast<size_t>(layout.pool_bytes / group.block_bytes));
  }
}

void SimulationChecks::add(SimulatedSequence& sequence, const SimulatedRequest& request) {
  sequence.work = work_of(request);
  most_iterations_ += 2 * (sequence.work + options_.max_in_flight);
}

void SimulationChecks::before_plan() {
  for (const auto& live : live_) {
    live->phase_before = live->sequence.phase;
    live->epoch_before = live->sequence.epoch;
    live->was_launched = false;
  }
  quarantined_before_ = pool_.num_quarantined();
}

void SimulationChecks::after_plan(const IterationPlan& plan, bool is_launched) {
  check_plan(plan);
  if (!is_launched) return;
  check_waits(plan.iteration);
  ++report_.num_iterations;
  require(report_.num_iterations <= most_iterations_, "all work should have taken at most ",
          most_iterations_, " iterations");
}

// Invariants 4, 5 and 6.
void SimulationChecks::check_plan(const IterationPlan& plan) {
  check_limits(plan);
  for (const auto& live : live_) {
    live->take_allocations(plan, is_admitted(*live));
  }

  int32_t prefill_left = options_.max_num_batched_tokens;
  int32_t score_left = options_.max_score_rows;
  bool decodes = false;
  for (const auto& live : live_) {
    if (live->phase_before == Sequence::Phase::kDecode) {
      prefill_left -= live->sequence.max_drafts + 1;
      decodes = true;
    }
  }
  if (decodes) prefill_left = std::min(prefill_left, plan.max_prompt_rows);
  bool lacks_blocks = false;
  const SimulatedSequence* oldest_preempted = nullptr;
  const SimulatedSequence* oldest_blocked = nullptr;
  is_oldest_stalled_ = false;
  for (const auto& entry : live_) {
    SimulatedSequence& live = *entry;
    const Sequence& sequence = live.sequence;
    const bool was_running = live.phase_before != Sequence::Phase::kWaiting;
    if (sequence.epoch != live.epoch_before) {
      ++report_.num_preemptions;
      lacks_blocks = true;
      if (oldest_preempted == nullptr) oldest_preempted = &live;
      require(quarantined_before_ == 0, "a sequence is preempted although ", quarantined_before_,
              " blocks are on their way back");
      if (oldest_blocked == nullptr) check_margin(live, "preempts itself");
      if (&live == live_.front().get()) add_recomputation(live);
      oldest_blocked = &live;
      continue;
    }
    if (live.was_launched) {
      require(oldest_preempted == nullptr || !was_running, "request ", live.owner.request,
              " keeps its blocks, but the older request ", request_of(oldest_preempted),
              " is preempted");
      const PlannedSequence& launch = *launch_of(plan, sequence);
      if (launch.kind != RowKind::kDecode) prefill_left -= launch.num_rows;
      score_left -= launch.kind == RowKind::kScore ? launch.num_rows : launch.num_prompt_rows;
      if (!was_running) {
        live.has_window = false;
        require(oldest_blocked == nullptr || live_.front().get() == &live, "request ",
                live.owner.request, " is admitted before request ", request_of(oldest_blocked));
      } else if (launch.kind == RowKind::kDecode) {
        live.has_window = true;
      }
      continue;
    }
    if (was_running) {
      if (has_no_rows(sequence, prefill_left, score_left)) continue;
      ++report_.num_stalls;
      lacks_blocks = true;
      is_oldest_stalled_ |= &live == live_.front().get();
      require(pool_.num_quarantined() > 0, "request ", live.owner.request,
              " is passed over although no block is on its way back");
      if (oldest_blocked == nullptr) check_margin(live, "stalls");
      oldest_blocked = &live;
    } else if (!waits_for_sibling(live, plan.iteration)) {
      if (oldest_blocked == nullptr) oldest_blocked = &live;
    }
  }
  for (const auto& live : live_) {
    require(!is_admitted(*live) || !lacks_blocks || live == live_.front(), "request ",
            live->owner.request, " is admitted while a running sequence lacks blocks");
  }
}

void SimulationChecks::check_limits(const IterationPlan& plan) const {
  int32_t num_rows = 0;
  int32_t num_prompt_rows = 0;
  bool decodes = false;
  int32_t num_score_rows = 0;
  int32_t num_adopted = 0;
  std::vector<bool> is_taken(static_cast<size_t>(options_.max_num_seqs));
  for (const PlannedSequence& launch : plan.sequences) {
    num_rows += launch.num_rows;
    decodes |= launch.kind == RowKind::kDecode;
    if (launch.kind != RowKind::kDecode) num_prompt_rows += launch.num_rows;
    num_adopted += launch.num_adopted;
    const bool is_score = launch.kind == RowKind::kScore;
    num_score_rows += is_score ? launch.num_rows : launch.num_prompt_rows;
    require(launch.kind == RowKind::kDecode ||
                (launch.num_rows > 0 && launch.num_rows <= options_.prefill_chunk_size),
            "a chunk has ", launch.num_rows, " rows");
    const auto slot = static_cast<size_t>(launch.sequence->seq_slot);
    require(slot < is_taken.size() && !is_taken[slot], "two sequences have slot ", slot);
    is_taken[slot] = true;
  }
  require(num_rows <= options_.max_num_batched_tokens, "a plan has ", num_rows, " rows");
  require(!decodes || num_prompt_rows <= plan.max_prompt_rows,
          "a plan with decoding sequences has ", num_prompt_rows, " prompt rows");
  require(num_adopted <= options_.max_adopted_tokens, "a plan adopts ", num_adopted, " tokens");
  require(num_score_rows <= options_.max_score_rows, "a plan scores ", num_score_rows, " rows");
  require(scheduler_.num_running() <= options_.max_num_seqs, scheduler_.num_running(),
          " sequences run");
}

void SimulationChecks::check_margin(const SimulatedSequence& live, const char* what) const {
  require(live.has_window || live.num_taken_by_others > 0, "request ", live.owner.request, " ",
          what, " before its first window, though no other sequence has taken a block since it ",
          "was admitted");
}

// Invariant 7.
void SimulationChecks::check_waits(int64_t iteration) {
  check_stall();
  int64_t work_ahead = 0;
  for (const auto& entry : live_) {
    SimulatedSequence& live = *entry;
    const bool waits_for_results = live.sequence.seq_slot >= 0 &&
                                   has_no_rows(live.sequence, /*prefill_left=*/1, /*score_left=*/1);
    if (live.was_launched || waits_for_results) {
      live.waited = 0;
    } else {
      if (live.waited++ == 0) live.allowed = options_.max_in_flight + work_ahead;
      if (live.sequence.seq_slot < 0 && waits_for_sibling(live, iteration)) {
        live.allowed = std::max(live.allowed, live.waited + options_.max_in_flight + work_ahead +
                                                  running_work_behind(live));
      }
      if (is_oldest_stalled_) ++live.allowed;
      report_.longest_wait = std::max(report_.longest_wait, static_cast<double>(live.waited) /
                                                                static_cast<double>(live.allowed));
      require(live.waited <= live.allowed, "request ", live.owner.request, ", sample ",
              live.owner.sample, " has waited for ", live.waited,
              " iterations; the work ahead of it takes at most ", live.allowed);
    }
    work_ahead += live.work + options_.max_in_flight;
  }
}

// How long the oldest sequence may lack blocks.
void SimulationChecks::check_stall() {
  if (!is_oldest_stalled_) {
    stalled_for_ = 0;
    return;
  }
  if (stalled_for_++ == 0) {
    stall_allowed_ = options_.max_in_flight + running_work_behind(*live_.front());
  }
  report_.longest_stall = std::max(report_.longest_stall, stalled_for_);
  require(stalled_for_ <= stall_allowed_, "the oldest request has lacked blocks for ", stalled_for_,
          " iterations; those that run need at most ", stall_allowed_);
}

void SimulationChecks::add_recomputation(SimulatedSequence& oldest) {
  ++report_.num_self_preemptions;
  require(!oldest.was_preempted_alone, "request ", oldest.owner.request, ", sample ",
          oldest.owner.sample, " preempts itself again although it is the oldest");
  oldest.was_preempted_alone = true;
  most_iterations_ += oldest.work;
  for (const auto& live : live_) live->allowed += oldest.work;
}

// Whether a running sequence that the plan does not have needs nothing, or only waits for rows that
// older ones have taken.
bool SimulationChecks::has_no_rows(const Sequence& sequence, int32_t prefill_left,
                                   int32_t score_left) const {
  if (sequence.phase == Sequence::Phase::kDecode) return must_be_finished(sequence);
  if (sequence.num_prefilled == sequence.known_len()) return true;
  const bool is_rated = sequence.is_score || sequence.prompt_logprobs != nullptr;
  return prefill_left <= 0 || (is_rated && score_left <= 0);
}

bool SimulationChecks::waits_for_sibling(const SimulatedSequence& live, int64_t iteration) const {
  for (const auto& other : live_) {
    const Sequence& sibling = other->sequence;
    if (other.get() != &live && other->owner.request == live.owner.request &&
        sibling.phase != Sequence::Phase::kWaiting &&
        (sibling.num_prefilled < sibling.prompt_len - 1 || sibling.newest_prefill >= iteration)) {
      return true;
    }
  }
  return false;
}

int64_t SimulationChecks::running_work_behind(const SimulatedSequence& older) const {
  int64_t work = 0;
  bool is_behind = false;
  for (const auto& live : live_) {
    if (is_behind && live->sequence.seq_slot >= 0) work += live->work + options_.max_in_flight;
    is_behind |= live.get() == &older;
  }
  return work;
}

int64_t SimulationChecks::work_of(const SimulatedRequest& request) const {
  const int32_t width = options_.num_draft_tokens + 1;
  int32_t chunk = std::min(options_.prefill_chunk_size,
                           options_.max_num_batched_tokens - width * (options_.max_num_seqs - 1));
  if (least_prompt_rows_ > 0) chunk = std::min(chunk, least_prompt_rows_);
  if (request.is_score || request.has_prompt_logprobs) {
    chunk = std::min(chunk, options_.max_score_rows);
  }
  return divide_up(request.limit(), chunk) + request.limit() - request.prompt_len + 1;
}

// Invariant 3.
void SimulationChecks::check_blocks() {
  const std::string broken = pool_.check_integrity();
  require(broken.empty(), broken);
  for (size_t g = 0; g < pool_.layout().groups.size(); ++g) {
    const auto group = static_cast<GroupId>(g);
    std::vector<uint16_t>& holders = holders_[g];
    std::fill(holders.begin(), holders.end(), 0);
    int64_t num_held = 0;
    for (const auto& live : live_) {
      for (const BlockId block : live->sequence.blocks.table(group)) {
        if (block != kNullBlock && ++holders[static_cast<size_t>(block)] == 1) ++num_held;
      }
    }
    require(pool_.num_held(group) == num_held, "group ", g, ": the pool counts ",
            pool_.num_held(group), " held blocks, the sequences ", num_held);
    for (size_t block = 0; block < holders.size(); ++block) {
      if (holders[block] < 2) continue;
      require(pool_.num_holders(group, static_cast<BlockId>(block)) == holders[block], "block ",
              block, " of group ", g, " has ", holders[block], " holders");
    }
  }
}

}  // namespace paceline::testing
