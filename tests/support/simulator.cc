// SPDX-License-Identifier: Apache-2.0
#include "support/simulator.h"

#include <algorithm>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "base/check.h"
#include "batch/batch_builder.h"
#include "kv/slab_pool.h"
#include "support/host_batch.h"
#include "support/simulated_device.h"
#include "support/simulation_checks.h"
#include "tuning/draft_schedule.h"

namespace paceline::testing {
namespace {

class Simulation {
 public:
  Simulation(const SimulationScript& script, SimulatedFault fault)
      : script_(script),
        options_(with_fault(script.options, fault)),
        fault_(fault),
        layout_(script.layout()),
        pool_(layout_),
        scheduler_(options_, pool_),
        device_(script, layout_),
        ring_(static_cast<size_t>(options_.max_in_flight + 1)),
        draft_schedule_(script.draft_schedule_seed, script.options.draft_lengths),
        checks_(options_, pool_, scheduler_, live_, report_, script.least_prompt_rows) {
    const int32_t width = options_.num_draft_tokens + 1;
    shape_ = {.max_seqs = options_.max_num_seqs,
              .max_verify_rows = options_.max_num_batched_tokens,
              .max_logit_rows = options_.max_num_seqs * width + options_.max_score_rows,
              .num_draft_tokens = options_.num_draft_tokens,
              .first_rows = script.first_rows,
              .follows_windows = script.follows_windows,
              .max_prompt_rows = options_.max_score_rows,
              .max_logprobs = 1,
              .max_adopted_tokens = options_.max_adopted_tokens};
    for (InFlight& entry : ring_) entry.batch.emplace(shape_);
    pool_.set_on_reusable([this](GroupId g, BlockId b) { device_.become_reusable(g, b); });
  }

  void run() {
    while (!is_over()) {
      tick();
      ++report_.num_ticks;
    }
    scheduler_.complete(newest_launched_);
    require(!scheduler_.has_work(), "the scheduler still has work");
    for (GroupId g = 0; g < static_cast<GroupId>(layout_.groups.size()); ++g) {
      require(pool_.num_held(g) + pool_.num_quarantined(g) == 0, "group ", g,
              " has blocks in the end");
    }
    require(pool_.num_free_slabs() == layout_.num_slabs - 1, "not all slabs are free in the end");
    require(scheduler_.num_waiting_requests() == 0, "requests are counted as waiting in the end");
  }

  [[nodiscard]] SimulationReport report() const {
    SimulationReport report = report_;
    for (GroupId g = 0; g < static_cast<GroupId>(layout_.groups.size()); ++g) {
      const PrefixCache* cache = scheduler_.prefix_cache();
      report.num_evicted += cache != nullptr ? cache->counts(g).evicted_blocks : 0;
    }
    return report;
  }
  [[nodiscard]] int64_t now() const { return now_; }

 private:
  struct InFlight {
    IterationPlan plan;
    std::optional<HostBatch> batch;
    std::vector<SimulatedSequence*> rows;
  };

  static SchedulerOptions with_fault(SchedulerOptions options, SimulatedFault fault) {
    if (fault == SimulatedFault::kNoLookahead) options.kv_lookahead = 0;
    if (fault == SimulatedFault::kForgetsLag) options.max_missed = 0;
    return options;
  }

  [[nodiscard]] int64_t in_flight() const { return newest_launched_ - newest_read_; }
  [[nodiscard]] bool is_over() const {
    return next_request_ == script_.requests.size() && live_.empty() && in_flight() == 0;
  }

  void tick() {
    take_in();
    cancel_due();
    const bool reads_early =
        in_flight() > 0 &&
        static_cast<int32_t>(mix(script_.seed ^ mix(static_cast<uint64_t>(now_))) % 100) <
            script_.percent_early;
    const bool has_launched = !reads_early && in_flight() < options_.max_in_flight && launch_next();
    if (in_flight() > 0 && (in_flight() >= options_.max_in_flight || !has_launched)) {
      read_oldest();
    } else {
      require(has_launched || !scheduler_.has_work(),
              "work is waiting, but nothing can be launched");
    }
    checks_.check_blocks();
    if (const PrefixCache* cache = scheduler_.prefix_cache()) {
      const std::string broken = cache->check_integrity();
      require(broken.empty(), broken);
    }
    ++now_;
    const bool is_idle = live_.empty() && in_flight() == 0;
    if (is_idle && next_request_ < script_.requests.size()) {
      now_ = std::max(now_, script_.requests[next_request_].arrival);
    }
  }

  void take_in() {
    for (; next_request_ < script_.requests.size(); ++next_request_) {
      const SimulatedRequest& request = script_.requests[next_request_];
      if (request.arrival > now_) return;
      require(scheduler_.fits_alone(request.prompt_len, request.limit()), "request ", next_request_,
              " does not fit alone");
      for (int32_t sample = 0; sample < request.num_samples; ++sample) {
        SimulatedSequence& live = *live_.emplace_back(std::make_unique<SimulatedSequence>(
            request, static_cast<int32_t>(next_request_), sample));
        Sequence& sequence = live.sequence;
        sequence.id = static_cast<RequestId>(next_request_) + 1;
        sequence.sample = sample;
        sequence.num_samples = request.num_samples;
        sequence.is_score = request.is_score;
        sequence.prompt_len = request.prompt_len;
        sequence.limit = request.limit();
        sequence.max_drafts = request.max_drafts;
        if (request.cache_salt != 0 && fault_ != SimulatedFault::kIgnoresSalt) {
          sequence.cache_salt =
              std::make_shared<const std::string>(std::to_string(request.cache_salt));
        }
        for (int32_t p = 0; p < request.prompt_len; ++p) {
          sequence.tokens.push_back(live.output.token(p));
        }
        if (request.is_score) sequence.logits = std::make_shared<std::vector<float>>();
        if (request.has_prompt_logprobs && sample == 0) {
          sequence.sampling.prompt_logprobs = 1;
          sequence.prompt_logprobs = std::make_shared<std::vector<std::vector<TokenLogprob>>>();
        }
        live.is_rated.resize(static_cast<size_t>(request.prompt_len));
        checks_.add(live, request);
        scheduler_.add(sequence);
      }
    }
  }

  void cancel_due() {
    for (size_t i = 0; i < live_.size();) {
      SimulatedSequence& live = *live_[i];
      const SimulatedRequest& request = script_.requests[static_cast<size_t>(live.owner.request)];
      const bool is_meant =
          request.cancelled_sample < 0 || request.cancelled_sample == live.owner.sample;
      if (request.cancel_tick < 0 || request.cancel_tick > now_ || !is_meant) {
        ++i;
        continue;
      }
      ++report_.num_cancelled;
      if (fault_ == SimulatedFault::kKeepsCancelled) {
        live.sequence.blocks = SequenceBlocks(static_cast<int32_t>(layout_.groups.size()));
      }
      finish(live);
    }
  }

  void finish(SimulatedSequence& live) {
    scheduler_.finish(live.sequence);
    const auto found = std::find_if(live_.begin(), live_.end(),
                                    [&](const auto& other) { return other.get() == &live; });
    leaving_.push_back(std::move(*found));
    live_.erase(found);
    drop_left();
  }
  void drop_left() {
    std::erase_if(leaving_,
                  [](const auto& live) { return live->sequence.launches_in_flight == 0; });
  }

  bool launch_next() {
    InFlight& entry = ring_[static_cast<size_t>(newest_launched_ + 1) % ring_.size()];
    entry.plan.iteration = newest_launched_ + 1;
    entry.plan.num_drafts =
        draft_schedule_.is_given() ? draft_schedule_.next() : script_.options.num_draft_tokens;
    entry.plan.max_catch_up =
        draft_schedule_.is_given() && mix(static_cast<uint64_t>(now_)) % 4 == 0 ? 4 : INT32_MAX;
    entry.plan.skips_prompts = draft_schedule_.is_given() && draft_schedule_.skips_prompts();
    if (script_.least_prompt_rows > 0) {
      const uint64_t more = mix(static_cast<uint64_t>(now_) + 5) % 8;
      entry.plan.max_prompt_rows = script_.least_prompt_rows + static_cast<int32_t>(more);
    }
    checks_.before_plan();
    const bool is_launched = scheduler_.plan(entry.plan);
    entry.rows.clear();
    std::vector<SimulatedOwner> owners;
    for (PlannedSequence& launch : entry.plan.sequences) {
      if (fault_ == SimulatedFault::kDropsMissed && launch.catch_up_start == kNoPart) {
        launch.num_missed = 0;
      }
      const bool misses_chunk = launch.kind != RowKind::kDecode && !launch.is_followed;
      if (launch.resets_state) check_is_followed(launch, entry.plan.skips_prompts);
      if (fault_ == SimulatedFault::kDropsPrompt && misses_chunk) launch.sequence->num_missed = 0;
      if (fault_ == SimulatedFault::kClaimsKept) launch.num_kept = launch.num_missed;
      if (fault_ == SimulatedFault::kForgetsHoles) {
        launch.sequence->has_holes = false;
        launch.is_cacheable = launch.is_followed;
      }
      SimulatedSequence& live = live_of(*launch.sequence);
      require(!live.was_launched, "a sequence is planned twice");
      live.was_launched = true;
      entry.rows.push_back(&live);
      owners.push_back(live.owner);
      report_.num_catch_ups += launch.num_missed > 0 ? 1 : 0;
      report_.num_parts += launch.catch_up_start != kNoPart ? 1 : 0;
      report_.num_left_out += launch.num_drafts == kLeftOut ? 1 : 0;
      report_.num_missed_chunks += misses_chunk ? 1 : 0;
    }
    if (script_.keeps_trace) trace(entry);
    checks_.after_plan(entry.plan, is_launched);
    if (!is_launched) return false;
    ++newest_launched_;
    Batch& batch = **entry.batch;
    batch.iteration = entry.plan.iteration;
    build_batch(entry.plan, shape_, batch);
    check_prompt_rows(entry);
    report_.num_forks += static_cast<int64_t>(entry.plan.forks.size());
    for (const PlannedSequence& launch : entry.plan.sequences) {
      report_.num_adoptions += launch.num_adopted > 0 ? 1 : 0;
    }
    IterationCounts& counts = *batch.inputs.counts;
    if (fault_ == SimulatedFault::kDropsTableWrite && counts.num_table_writes > 0) {
      --counts.num_table_writes;
    }
    if (fault_ == SimulatedFault::kDropsBlockCopy) counts.num_block_copies = 0;
    device_.launch(batch, std::move(owners));
    return true;
  }

  // A draft head has the hidden states of a whole prompt that begins while drafts pay.
  void check_is_followed(const PlannedSequence& launch, bool skips_prompts) const {
    const Sequence& sequence = *launch.sequence;
    const bool may_draft = sequence.max_drafts > 0 && sequence.known_len() + 1 < sequence.limit;
    if (skips_prompts || !may_draft || script_.first_rows != FirstRows::kWindow) return;
    require(sequence.num_missed == 0, "a prompt begins without the draft head");
  }

  // A line for each plan: who runs, with what, and who waits.
  void trace(const InFlight& entry) {
    std::ostringstream out;
    out << "  tick " << now_ << ", iteration " << entry.plan.iteration << ":";
    const auto name = [&](const SimulatedSequence& live) {
      out << " " << live.owner.request << "." << live.owner.sample;
    };
    for (size_t i = 0; i < entry.rows.size(); ++i) {
      const PlannedSequence& launch = entry.plan.sequences[i];
      name(*entry.rows[i]);
      if (launch.kind == RowKind::kDecode) {
        out << "(decode at " << launch.sequence->known_len() << ")";
      } else {
        out << "(" << launch.start << " to " << launch.start + launch.num_rows << ")";
      }
    }
    for (const auto& live : live_) {
      if (live->was_launched) continue;
      name(*live);
      const bool is_preempted = live->epoch_before != live->sequence.epoch;
      out << (is_preempted ? " preempted" : live->sequence.seq_slot >= 0 ? " pauses" : " waits");
    }
    out << "; blocks held+quarantined:";
    for (GroupId g = 0; g < static_cast<GroupId>(layout_.groups.size()); ++g) {
      out << " " << pool_.num_held(g) << "+" << pool_.num_quarantined(g);
    }
    report_.trace += out.str() + "; free slabs " + std::to_string(pool_.num_free_slabs()) + "\n";
  }

  void read_oldest() {
    const int64_t iteration = newest_read_ + 1;
    InFlight& entry = ring_[static_cast<size_t>(iteration) % ring_.size()];
    if (fault_ == SimulatedFault::kCompletesEarly) scheduler_.complete(iteration + 1);
    const std::vector<SequenceResult> results = device_.execute();
    newest_read_ = iteration;
    scheduler_.complete(iteration);
    for (size_t i = 0; i < entry.rows.size(); ++i) {
      apply(*entry.rows[i], entry.plan.sequences[i], results[i]);
    }
    drop_left();
  }

  // As Engine::apply does it.
  void apply(SimulatedSequence& live, const PlannedSequence& launch, const SequenceResult& result) {
    Sequence& sequence = live.sequence;
    --sequence.launches_in_flight;
    if (sequence.phase == Sequence::Phase::kFinished || launch.epoch != sequence.epoch) return;
    if (launch.kind == RowKind::kDecode || launch.kind == RowKind::kPrefillFinal) {
      --sequence.emitting_in_flight;
      require(sequence.emitting_in_flight >= 0, "more results than launches");
    }
    for (int32_t j = 0; j < result.emitted_len; ++j) {
      require(result.tokens[j] == live.output.token(sequence.known_len()), "request ",
              live.owner.request, ", sample ", live.owner.sample, ": token ", sequence.known_len(),
              " is read from another position");
      sequence.tokens.push_back(result.tokens[j]);
    }
    if (fault_ == SimulatedFault::kAppendsTwice && result.emitted_len > 0 &&
        sequence.known_len() < sequence.limit) {
      sequence.tokens.push_back(sequence.tokens.back());
    }
    if (result.emitted_len > 0 && sequence.prompt_logprobs != nullptr) {
      sequence.prompt_logprobs = nullptr;
      require_all_rated(live, sequence.prompt_len - 1);
    }
    if (fault_ == SimulatedFault::kAdvancesTooFar) {
      sequence.blocks.release_below(pool_, sequence.known_len() + 1, newest_launched_);
    }
    const int64_t num_held = sequence.blocks.num_held();
    PlannedSequence advanced = launch;
    if (fault_ == SimulatedFault::kCachesMissed) advanced.is_cacheable = true;
    scheduler_.advance(
        sequence, advanced,
        fault_ == SimulatedFault::kCachesEnd ? SequenceOutcome::kRunning : result.outcome);
    report_.num_window_releases += num_held - sequence.blocks.num_held();
    if (result.outcome != SequenceOutcome::kRunning) {
      require(sequence.known_len() == live.output.end_len(), "request ", live.owner.request,
              ", sample ", live.owner.sample, " ends after ", sequence.known_len(), " of ",
              live.output.end_len(), " tokens");
      report_.num_stopped += result.outcome == SequenceOutcome::kStop ? 1 : 0;
      finish(live);
      return;
    }
    if (launch.kind == RowKind::kScore && launch.start + launch.num_rows == sequence.prompt_len) {
      require_all_rated(live, sequence.prompt_len);
      finish(live);
    }
  }

  static void require_all_rated(const SimulatedSequence& live, int32_t count) {
    for (int32_t p = 0; p < count; ++p) {
      require(live.is_rated[static_cast<size_t>(p)], "request ", live.owner.request,
              ": the logits of prompt position ", p, " have not been returned");
    }
  }

  SimulatedSequence& live_of(const Sequence& sequence) {
    for (const auto& live : live_) {
      if (&live->sequence == &sequence) return *live;
    }
    throw SimulationViolation("a sequence that is over has been planned");
  }

  // Rows of scores and of prompt logprobs.
  void check_prompt_rows(const InFlight& entry) const {
    const Batch& batch = **entry.batch;
    const StagedInputs& in = batch.inputs;
    int32_t at = in.counts->num_logit_rows;
    for (size_t i = 0; i < entry.rows.size(); ++i) {
      SimulatedSequence& live = *entry.rows[i];
      const PlannedSequence& launch = entry.plan.sequences[i];
      const int32_t num_rated =
          launch.kind == RowKind::kScore ? launch.num_rows : launch.num_prompt_rows;
      for (int32_t row = 0; row < num_rated; ++row) {
        const int32_t position = launch.start + row;
        live.is_rated[static_cast<size_t>(position)] = true;
        if (launch.kind == RowKind::kScore) continue;
        require(in.logit_rows[at] == in.verify_indptr[i] + row &&
                    in.prompt_targets[at - in.counts->num_logit_rows] ==
                        live.output.token(position + 1),
                "row ", row, " of prompt logprobs is another one's");
        ++at;
      }
    }
    for (const ScoreCopy& copy : batch.score_copies) {
      const auto is_same = [&](const SimulatedSequence* live) {
        return live->sequence.logits == copy.destination;
      };
      const auto found = std::find_if(entry.rows.begin(), entry.rows.end(), is_same);
      require(found != entry.rows.end(), "logits are copied to nowhere");
      const PlannedSequence& launch =
          entry.plan.sequences[static_cast<size_t>(found - entry.rows.begin())];
      require(copy.num_rows == launch.num_rows && copy.destination_row == launch.start,
              "logits of a chunk are copied to another place");
    }
  }

  const SimulationScript& script_;
  const SchedulerOptions options_;
  const SimulatedFault fault_;
  const KvLayout layout_;
  SlabPool pool_;
  Scheduler scheduler_;
  SimulatedDevice device_;
  BatchShape shape_;
  std::vector<InFlight> ring_;
  std::vector<std::unique_ptr<SimulatedSequence>> live_;     // by arrival
  std::vector<std::unique_ptr<SimulatedSequence>> leaving_;  // over, but launches refer to them
  SimulationReport report_;
  DraftSchedule draft_schedule_;
  SimulationChecks checks_;
  size_t next_request_ = 0;
  int64_t now_ = 0;
  int64_t newest_launched_ = -1;
  int64_t newest_read_ = -1;
};

}  // namespace

SimulationReport simulate(const SimulationScript& script, SimulatedFault fault) {
  std::optional<Simulation> simulation;
  try {
    simulation.emplace(script, fault);
    simulation->run();
    return simulation->report();
  } catch (const std::exception& error) {
    SimulationReport report;
    if (simulation.has_value()) report = simulation->report();
    report.violation =
        concat("tick ", simulation.has_value() ? simulation->now() : 0, ": ", error.what());
    return report;
  }
}

}  // namespace paceline::testing
