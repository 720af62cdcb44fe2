// SPDX-License-Identifier: Apache-2.0
#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/reserve_more.h"
#include "base/start_thread.h"
#include "batch/batch_builder.h"
#include "request/sequence.h"
#include "runner/iteration_runner.h"
#include "scheduler/iteration_plan.h"
#include "wire/batch_shape.h"
#include "wire/blocks.h"
#include "wire/sequence_result.h"

namespace paceline {
namespace {

FinishReason reason_of(SequenceOutcome outcome) {
  switch (outcome) {
    case SequenceOutcome::kRunning:
      return FinishReason::kNone;
    case SequenceOutcome::kStop:
      return FinishReason::kStop;
    case SequenceOutcome::kLength:
      return FinishReason::kLength;
    case SequenceOutcome::kNoLogits:
      return FinishReason::kError;
  }
  return FinishReason::kError;
}

// Whether the options exclude tokens, so that no token may be left.
bool excludes_tokens(const Sequence& sequence) {
  const SamplingOptions& s = sequence.sampling;
  return !s.bad_words.empty() || !s.allowed_token_ids.empty() || s.min_tokens > 0 ||
         sequence.needs_masks();
}

}  // namespace

Engine::Engine(const EngineOptions& options, const KvLayout& layout, std::unique_ptr<Runner> runner)
    : options_(options),
      layout_(&layout),
      runner_(std::move(runner)),
      pool_(layout),
      scheduler_(options.scheduler, pool_),
      ring_(options.scheduler.max_in_flight + 1),
      chunk_chooser_(make_chunk_chooser(options)),
      draft_schedule_(options.draft_schedule_seed, options.scheduler.draft_lengths),
      interval_log_(options.log_interval_s),
      start_us_(now_us()),
      windows_(options.windows,
               [this](std::list<WindowAnswer> answer) { receive(std::move(answer)); }) {
  if (options.is_adaptive) {
    chooser_.emplace(options.scheduler.draft_lengths,
                     decode_buckets(options.scheduler.max_num_seqs));
  }
  if (options.poisons_freed_blocks) {
    pool_.set_on_reusable([this](GroupId group, BlockId block) { runner_->poison(group, block); });
  }
  statistics_.add_methods(options.methods);
  publish_usage();
  prefix_counts_at_reset_ = usage_.prefix_counts;
  thread_ = start_thread("the thread of the engine", [this] { loop(); });
}

Engine::~Engine() {
  {
    const std::scoped_lock lock(mutex_);
    stops_ = true;
  }
  wake_engine_.notify_all();
  thread_.join();
  windows_.stop();
  runner_.reset();  // before ring_: after a failure the device may still read it
}

void Engine::loop() {
  try {
    for (bool goes_on = true; goes_on;) {
      try {
        goes_on = iterate();
      } catch (const std::bad_alloc&) {
        goes_on = recover_unless_lost();
      } catch (const OutOfMemory&) {
        goes_on = recover_unless_lost();
      }
    }
    if (newest_launched_ >= 0) runner_->wait(newest_launched_);
  } catch (...) {
    fail(std::current_exception());
  }
}

bool Engine::iterate() {
  if (!take_in()) return false;
  if (is_draining_) {
    if (newest_launched_ > newest_read_) read_oldest();
    return true;
  }
  // The host runs ahead: it launches the next iteration before it reads the last one.
  const auto in_flight = [&] { return newest_launched_ - newest_read_; };
  const bool has_launched = in_flight() < options_.scheduler.max_in_flight && launch_next();
  const bool is_full = in_flight() >= options_.scheduler.max_in_flight;
  if (in_flight() > 0 && (is_full || !has_launched)) {
    read_oldest();
    // An answer that comes soon is in time for the next launch.
    if (num_unanswered_ > 0) await_answers(last_iteration_us_ / 2);
  } else if (!has_launched && num_unanswered_ > 0) {
    await_answers(std::nullopt);
  } else {
    PACELINE_CHECK(has_launched || !scheduler_.has_work(),
                   "work is waiting but nothing can be launched");
  }
  return true;
}

bool Engine::take_in() {
  {
    std::unique_lock lock(mutex_);
    const auto has_news = [&] {
      // The caller that holds the engine works on it.
      if (is_held_) return !is_at_rest_;
      if (stops_ || !is_idle()) return true;
      return wants_integrity_ || !incoming_.empty() || !cancellations_.empty();
    };
    const bool is_between = is_held_between_ && newest_read_ == newest_launched_;
    if (is_idle() || is_between) {
      is_idle_ = is_idle();
      if (is_held_) {
        is_at_rest_ = true;
        wake_caller_.notify_all();
      }
      if (wants_integrity_ && incoming_.empty() && is_idle()) {
        std::string integrity = pool_.check_integrity();
        if (const PrefixCache* cache = scheduler_.prefix_cache(); cache && integrity.empty()) {
          integrity = cache->check_integrity();
        }
        for (GroupId g = 0; g < static_cast<GroupId>(layout_->groups.size()); ++g) {
          if (integrity.empty() && pool_.num_held(g) + pool_.num_quarantined(g) > 0) {
            integrity = concat("the engine is idle, but group ", g, " holds ", pool_.num_held(g),
                               " blocks and quarantines ", pool_.num_quarantined(g));
          }
        }
        integrity_ = std::move(integrity);
        wants_integrity_ = false;
        wake_caller_.notify_all();
      }
      wake_engine_.wait(lock, has_news);
      interval_log_.resume(now_us());
    }
    if (stops_ || failure_ != nullptr) return false;
    is_draining_ = is_held_between_;
    if (is_held_) return true;
    if (std::exchange(requeues_, false)) requeue();
    if (std::exchange(forgets_prefixes_, false)) scheduler_.forget_prefixes();
    while (!incoming_.empty()) {
      // The samples are always in incoming_ or in requests_, so an exception loses none.
      Samples& samples = requests_[incoming_.front().front()->id];
      samples.swap(incoming_.front());
      incoming_.pop_front();
      for (const std::unique_ptr<Sequence>& sample : samples) begin_sample(*sample);
    }
    if (to_cancel_.empty()) {
      to_cancel_.swap(cancellations_);
      std::reverse(to_cancel_.begin(), to_cancel_.end());
    }
  }
  for (; !to_cancel_.empty(); to_cancel_.pop_back()) cancel_now(to_cancel_.back());
  take_answers();
  return true;
}

bool Engine::launch_next() {
  const int64_t start = now_us();
  InFlight& launched = ring_[static_cast<size_t>(newest_launched_ + 1) % ring_.size()];
  launched.plan.iteration = newest_launched_ + 1;
  choose_drafts(launched.plan);
  choose_prompt_rows(launched.plan);
  delay();
  if (!scheduler_.plan(launched.plan)) return false;
  launched.batch.iteration = launched.plan.iteration;
  runner_->bind(launched.batch);
  build_batch(launched.plan, options_.shape, launched.batch);
  delay();
  bool is_traced = false;
  if (!launched.batch.needs_eager_run()) {
    const std::scoped_lock lock(mutex_);
    is_traced = std::exchange(wants_trace_, false);
  }
  std::vector<KernelTime> trace;
  if (newest_launched_ == newest_read_) waits_since_us_ = now_us();
  on_device([&] {
    if (is_traced) {
      trace = runner_->launch_traced(launched.batch);
    } else {
      runner_->launch(launched.batch);
    }
  });
  launched.is_traced = is_traced;
  launched.has_waited = newest_launched_ == newest_read_;
  // The first iteration with another k' verifies the drafts of the one before.
  const int32_t num_drafts = launched.plan.num_drafts;
  launched.is_typical = !launched.batch.needs_eager_run() && launched.plan.is_whole && !is_traced &&
                        (num_drafts == 0 || num_drafts == last_num_drafts_);
  last_num_drafts_ = num_drafts;
  ++newest_launched_;
  const std::scoped_lock lock(mutex_);
  if (is_traced) {
    trace_ = std::move(trace);
    wake_caller_.notify_all();
  }
  statistics_.add_host_time(now_us() - start);
  return true;
}

void Engine::read_oldest() {
  const int64_t iteration = newest_read_ + 1;
  delay();
  on_device([&] { runner_->wait(iteration); });
  const int64_t start = now_us();
  waits_since_us_ = newest_launched_ > iteration ? start : 0;
  InFlight& launched = ring_[static_cast<size_t>(iteration) % ring_.size()];
  newest_read_ = iteration;
  scheduler_.complete(iteration);
  const std::span<const SequenceResult> results = runner_->results(iteration);
  const std::span<const ProposedDrafts> drafts = runner_->drafts(iteration);
  const LogprobReader logprobs(launched.plan, launched.batch, runner_->logprobs(iteration),
                               options_.shape.max_logprobs, options_.vocab_size);
  IterationStatistics statistics;
  statistics.num_drafts = launched.plan.num_drafts;
  DraftChooser::Iteration observed;
  for (size_t i = 0; i < launched.plan.sequences.size(); ++i) {
    const PlannedSequence& launch = launched.plan.sequences[i];
    const bool is_delivered = apply(launch, results[i], logprobs, static_cast<int32_t>(i));
    statistics.add(launch, results[i], is_delivered);
    if (launch.kind == RowKind::kDecode && results[i].outcome == SequenceOutcome::kRunning &&
        results[i].emitted_len > 0) {
      observed.add_window(launch.num_rows - 1, results[i].accepted_len);
    }
    if (!is_delivered || results[i].emitted_len == 0 ||
        results[i].outcome != SequenceOutcome::kRunning) {
      continue;
    }
    std::vector<int32_t> proposed;
    if (launch.sequence->needs_masks() && i < drafts.size()) {
      proposed.assign(drafts[i].tokens, drafts[i].tokens + drafts[i].count);
    }
    ask_for_window(*launch.sequence, std::move(proposed));
  }
  statistics.add(runner_->experts(iteration));
  launched.batch.drop_copies();
  std::erase_if(leaving_, [](const auto& sequence) { return sequence->launches_in_flight == 0; });
  publish_usage();
  const int64_t end = [&] {
    const std::scoped_lock lock(mutex_);
    publish_load();
    deliver();
    const Runner::Timing timing = runner_->timing(iteration);
    last_iteration_us_ = timing.us;
    statistics_.add(statistics, timing, options_.methods);
    observe(launched, observed, timing);
    const int64_t now = now_us();
    statistics_.add_host_time(now - start);
    return now;
  }();
  if (interval_log_.advance(end)) log_interval();
}

bool Engine::apply(const PlannedSequence& launch, const SequenceResult& result,
                   const LogprobReader& logprobs, int32_t i) {
  Sequence& sequence = *launch.sequence;
  --sequence.launches_in_flight;
  const bool is_over = sequence.phase == Sequence::Phase::kFinished;
  if (is_over || launch.epoch != sequence.epoch) return false;
  if (launch.kind == RowKind::kDecode || launch.kind == RowKind::kPrefillFinal) {
    --sequence.emitting_in_flight;
  }

  const bool has_ended = result.outcome != SequenceOutcome::kRunning;
  if (result.emitted_len > 0) {
    sequence.tokens.insert(sequence.tokens.end(), result.tokens,
                           result.tokens + result.emitted_len);
    if (sequence.first_token_us == 0) sequence.first_token_us = now_us();
    count(result, sequence.counters);
  }
  logprobs.store_prompt(i);
  if (result.emitted_len > 0 || has_ended) {
    // The first emission follows the last chunk of the prompt, so prompt logprobs are delivered
    // once. A recomputed prompt gets no new ones.
    outgoing_.push_back({.request_id = sequence.id,
                         .sample = sequence.sample,
                         .token_ids = {result.tokens, result.tokens + result.emitted_len},
                         .logprobs = logprobs.emitted(i, result),
                         .prompt_logprobs = std::exchange(sequence.prompt_logprobs, nullptr),
                         .num_drafted = result.drafted_len,
                         .num_accepted = result.accepted_len,
                         .drafter = result.drafted_len > 0 ? method_of(result.source) : ""});
  }
  scheduler_.advance(sequence, launch, result.outcome);
  if (has_ended) {
    finish(sequence, reason_of(result.outcome),
           result.outcome == SequenceOutcome::kNoLogits
               ? concat("no token can be drawn at position ", sequence.known_len(), ": ",
                        excludes_tokens(sequence)
                            ? "bad_words, allowed_token_ids, min_tokens and the constraint rule "
                              "out all tokens, or the weights or the prompt produce NaN or infinity"
                            : "the weights or the prompt produce NaN or infinity")
               : std::string());
    return true;
  }
  if (launch.kind == RowKind::kScore && launch.start + launch.num_rows == sequence.prompt_len) {
    finish(sequence, FinishReason::kLength);
  }
  return true;
}

void Engine::finish(Sequence& sequence, FinishReason reason, std::string error) {
  // All memory is reserved first, so that nothing throws after scheduler_.finish().
  reserve_more(outgoing_, 1);
  reserve_more(leaving_, 1);
  scheduler_.finish(sequence);
  if (sequence.guide != nullptr) windows_.drop(std::move(sequence.guide));
  // One event delivers the last tokens and the finish reason.
  RequestEvent event{.request_id = sequence.id, .sample = sequence.sample};
  if (!outgoing_.empty() && outgoing_.back().request_id == sequence.id &&
      outgoing_.back().sample == sequence.sample && reason != FinishReason::kCancelled) {
    event = std::move(outgoing_.back());
    outgoing_.pop_back();
  }
  event.finish_reason = reason;
  event.error = std::move(error);
  event.counters = std::move(sequence.counters);
  event.num_cached_tokens = sequence.num_cached_tokens;
  // If a score was cut short, some logits are missing, and launches in flight still write others.
  if (reason == FinishReason::kLength) {
    event.logits = sequence.logits;
    event.device_logits = sequence.device_logits;
    event.hidden_states = sequence.hidden_states;
  }
  event.arrival_us = sequence.arrival_us;
  event.first_token_us = sequence.first_token_us;
  event.finish_us = now_us();
  outgoing_.push_back(std::move(event));
  const auto request = requests_.find(sequence.id);
  Samples& samples = request->second;
  leaving_.push_back(std::move(samples[static_cast<size_t>(sequence.sample)]));
  const bool is_last = std::all_of(samples.begin(), samples.end(),
                                   [](const auto& sample) { return sample == nullptr; });
  if (is_last) requests_.erase(request);
  const std::scoped_lock lock(mutex_);
  statistics_.add_end(reason);
  const auto open = open_.find(sequence.id);
  if (--open->second.num_left == 0) open_.erase(open);
}

void Engine::cancel_now(const Cancellation& cancellation) {
  const auto found = requests_.find(cancellation.id);
  if (found == requests_.end()) return;  // ended meanwhile
  std::vector<Sequence*> running;        // finish() erases the request with its last sample
  for (const std::unique_ptr<Sequence>& sample : found->second) {
    if (sample != nullptr && sample->sample == cancellation.sample.value_or(sample->sample)) {
      running.push_back(sample.get());
    }
  }
  for (Sequence* sample : running) finish(*sample, FinishReason::kCancelled);
  std::erase_if(leaving_, [](const auto& sequence) { return sequence->launches_in_flight == 0; });
  publish_usage();
  const std::scoped_lock lock(mutex_);
  publish_load();  // there may be no later iteration that does it
  deliver();
}

void Engine::delay() {
  if (options_.host_delay_max_us == 0) return;
  const auto range = static_cast<uint32_t>(options_.host_delay_max_us) + 1;
  std::this_thread::sleep_for(std::chrono::microseconds(delays_() % range));
}

void Engine::publish_usage() {
  const std::scoped_lock lock(mutex_);
  const auto num_groups = static_cast<GroupId>(layout_->groups.size());
  usage_.held_blocks.resize(num_groups);
  usage_.quarantined_blocks.resize(num_groups);
  usage_.cached_blocks.resize(num_groups);
  usage_.prefix_counts.resize(num_groups);
  for (GroupId g = 0; g < num_groups; ++g) {
    usage_.held_blocks[g] = pool_.num_held(g);
    usage_.quarantined_blocks[g] = pool_.num_quarantined(g);
    usage_.cached_blocks[g] = pool_.num_cached(g);
    if (const PrefixCache* cache = scheduler_.prefix_cache()) {
      usage_.prefix_counts[g] = cache->counts(g);
    }
  }
  usage_.free_slabs = pool_.num_free_slabs();
}

void Engine::publish_load() {
  statistics_.set_load(scheduler_);
  num_queued_ = scheduler_.num_waiting_requests() + static_cast<int64_t>(incoming_.size());
}

void Engine::log_interval() {
  EngineCounts counts;
  int32_t num_running = 0;
  int32_t num_waiting = 0;
  DraftChoice choice;
  {
    const std::scoped_lock lock(mutex_);
    if (chooser_.has_value()) {
      choice = {.num_drafts = chooser_->current(),
                .estimates = chooser_->estimates(chooser_->current_seqs())};
    }
    counts = statistics_.counts();
    num_running = statistics_.num_running();
    num_waiting = statistics_.num_waiting();
  }
  const auto num_slabs = static_cast<double>(layout_->num_usable_slabs());
  const double kv_usage = 1 - static_cast<double>(pool_.num_free_slabs()) / num_slabs;
  log_made(LogLevel::kInfo, [&] {
    return interval_log_.line(counts, num_running, num_waiting, kv_usage,
                              options_.shape.num_draft_tokens, choice);
  });
  interval_log_.restart(counts);
}

void Engine::deliver() {
  if (outgoing_.empty()) return;
  if (events_.empty()) {
    events_.swap(outgoing_);
  } else {
    reserve_more(events_, outgoing_.size());
    std::move(outgoing_.begin(), outgoing_.end(), std::back_inserter(events_));
    outgoing_.clear();
  }
  wake_caller_.notify_all();
}

}  // namespace paceline
