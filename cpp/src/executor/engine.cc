// SPDX-License-Identifier: Apache-2.0
#include "executor/engine.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <new>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/check.h"
#include "base/reserve_more.h"
#include "base/start_thread.h"
#include "batch/batch_builder.h"
#include "executor/request_checks.h"
#include "request/sequence.h"
#include "scheduler/iteration_plan.h"
#include "wire/batch_shape.h"
#include "wire/blocks.h"
#include "wire/sequence_result.h"

namespace paceline {
namespace {

constexpr size_t kMaxIterationSamples = 65536;

// The pause before the engine asks for memory again that it could not have.
constexpr std::chrono::milliseconds kMemoryRetry{10};

int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

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

// Whether any token may be ruled out, so that in the end all may be.
bool rules_out(const SamplingOptions& s) {
  return !s.bad_words.empty() || !s.allowed_token_ids.empty() || s.min_tokens > 0;
}

void count(const SequenceResult& result, SpeculationCounters& counters) {
  if (result.drafted_len + result.discarded_len == 0) return;
  ++counters.num_iterations;
  counters.num_draft_tokens += result.drafted_len;
  counters.num_accepted_tokens += result.accepted_len;
  counters.num_discarded_tokens += result.discarded_len;
  for (int32_t i = 0; i < result.drafted_len; ++i) ++counters.drafted_per_position[i];
  for (int32_t i = 0; i < result.accepted_len; ++i) ++counters.accepted_per_position[i];
}

bool has_begun(const std::unique_ptr<Sequence>& sample) {
  return sample == nullptr || sample->newest_prefill >= 0;  // null: it has ended
}

// Sample `index` of the request that `first` is sample 0 of, before it has run.
std::unique_ptr<Sequence> sample_like(const Sequence& first, int32_t index) {
  auto sample = std::make_unique<Sequence>();
  sample->sample = index;
  sample->num_samples = first.num_samples;
  sample->sampling = first.sampling;
  sample->sampling.seed += static_cast<uint64_t>(index);  // modulo 2^64
  sample->sampling.prompt_logprobs = -1;  // the prompt is the same: the first has them for all
  sample->allowed = first.allowed;
  sample->tokens = first.tokens;
  sample->prompt_len = first.prompt_len;
  sample->limit = first.limit;
  sample->counters = first.counters;
  sample->arrival_us = first.arrival_us;
  return sample;
}

}  // namespace

Engine::Engine(const EngineOptions& options, const KvLayout& layout, std::unique_ptr<Runner> runner)
    : options_(options),
      layout_(layout),
      runner_(std::move(runner)),
      pool_(layout),
      scheduler_(options.scheduler, pool_),
      ring_(options.scheduler.max_in_flight + 1) {
  if (options.poisons_freed_blocks) {
    pool_.set_on_reusable([this](GroupId group, BlockId block) { runner_->poison(group, block); });
  }
  publish_usage();
  thread_ = start_thread("the thread of the engine", [this] { loop(); });
}

Engine::~Engine() {
  {
    const std::scoped_lock lock(mutex_);
    stops_ = true;
  }
  wake_engine_.notify_all();
  thread_.join();
  runner_.reset();  // after a failure it may still read the inputs of what was launched
}

void Engine::check_request(const Request& request) const {
  paceline::check_request(request, {.max_model_len = options_.max_model_len,
                                    .vocab_size = options_.vocab_size,
                                    .max_logprobs = options_.shape.max_logprobs});
  const auto prompt_len = static_cast<int64_t>(request.prompt.size());
  const auto limit = static_cast<int32_t>(std::min<int64_t>(
      request.score_prompt ? prompt_len : prompt_len + request.sampling.max_tokens,
      options_.max_model_len));
  if (!scheduler_.fits_alone(static_cast<int32_t>(prompt_len), limit)) {
    throw InvalidArgument(concat("a request of ", prompt_len, " prompt tokens and ", limit,
                                 " in all needs more KV blocks than the whole pool of ",
                                 layout_.pool_bytes >> 10,
                                 " KiB has; raise kv_cache_bytes or lower max_tokens"));
  }
}

Engine::Samples Engine::make_samples(Request request) const {
  auto first = std::make_unique<Sequence>();
  first->tokens = std::move(request.prompt);
  first->prompt_len = first->known_len();
  first->num_samples = request.num_samples;
  first->sampling = std::move(request.sampling);
  first->is_score = request.score_prompt;
  if (const std::vector<int32_t>& allowed = first->sampling.allowed_token_ids; !allowed.empty()) {
    first->allowed.assign(static_cast<size_t>((options_.vocab_size + 31) / 32), 0);
    for (const int32_t token : allowed) {
      first->allowed[static_cast<size_t>(token / 32)] |= uint32_t{1} << (token % 32);
    }
  }
  first->limit =
      first->is_score
          ? first->prompt_len
          : static_cast<int32_t>(std::min<int64_t>(
                int64_t{first->prompt_len} + first->sampling.max_tokens, options_.max_model_len));
  if (first->is_score) {
    first->logits = std::make_shared<std::vector<float>>(
        static_cast<size_t>(checked_mul(first->prompt_len, options_.vocab_size)));
  }
  if (first->sampling.prompt_logprobs >= 0) {
    first->prompt_logprobs = std::make_shared<std::vector<std::vector<TokenLogprob>>>(
        static_cast<size_t>(first->prompt_len - 1));
  }
  const auto k = static_cast<size_t>(options_.shape.num_draft_tokens);
  first->counters.accepted_per_position.assign(k, 0);
  first->counters.drafted_per_position.assign(k, 0);
  first->arrival_us = now_us();

  Samples samples;
  samples.push_back(std::move(first));
  for (int32_t i = 1; i < request.num_samples; ++i) {
    samples.push_back(sample_like(*samples.front(), i));
  }
  return samples;
}

std::optional<std::vector<RequestId>> Engine::queue(std::vector<Samples> requests) {
  std::vector<RequestId> ids;
  ids.reserve(requests.size());
  const std::scoped_lock lock(mutex_);
  if (failure_ != nullptr) std::rethrow_exception(failure_);
  const auto count = static_cast<int64_t>(requests.size());
  if (options_.max_waiting_requests > 0 && num_queued_ + count > options_.max_waiting_requests) {
    return std::nullopt;
  }
  try {
    for (Samples& samples : requests) {
      const RequestId id = next_id_++;
      for (const std::unique_ptr<Sequence>& sample : samples) sample->id = id;
      const auto num_samples = static_cast<int32_t>(samples.size());
      live_.emplace(id, Live{.num_samples = num_samples, .num_left = num_samples});
      incoming_.push_back(std::move(samples));
      ids.push_back(id);
    }
  } catch (...) {
    live_.erase(next_id_ - 1);
    for (const RequestId id : ids) live_.erase(id);
    incoming_.erase(incoming_.end() - static_cast<std::ptrdiff_t>(ids.size()), incoming_.end());
    throw;
  }
  if (count == 0) return ids;
  num_queued_ += count;
  is_idle_ = false;
  wake_engine_.notify_one();
  return ids;
}

std::optional<RequestId> Engine::add_request(Request request) {
  check_request(request);
  std::vector<Samples> one;
  one.push_back(make_samples(std::move(request)));
  const std::optional<std::vector<RequestId>> ids = queue(std::move(one));
  return ids.has_value() ? std::optional(ids->front()) : std::nullopt;
}

std::optional<std::vector<RequestId>> Engine::add_requests(std::vector<Request> requests) {
  if (options_.max_waiting_requests > 0 &&
      requests.size() > static_cast<size_t>(options_.max_waiting_requests)) {
    throw InvalidArgument(concat("requests has ", requests.size(),
                                 " entries; allowed: at most max_waiting_requests, which is ",
                                 options_.max_waiting_requests, "; add fewer at once or raise it"));
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    try {
      check_request(requests[i]);
    } catch (const InvalidArgument& error) {
      if (requests.size() == 1) throw;
      throw InvalidArgument(concat("request ", i, " of ", requests.size(), ": ", error.what()));
    }
  }
  std::vector<Samples> all;
  all.reserve(requests.size());
  for (Request& request : requests) all.push_back(make_samples(std::move(request)));
  return queue(std::move(all));
}

bool Engine::cancel(RequestId id, std::optional<int32_t> sample) {
  const std::scoped_lock lock(mutex_);
  const auto found = live_.find(id);
  if (found == live_.end()) return false;
  const int32_t num_samples = found->second.num_samples;
  if (sample.has_value() && (*sample < 0 || *sample >= num_samples)) {
    throw InvalidArgument(concat("sample is ", *sample, "; allowed: 0 to ", num_samples - 1,
                                 " (request ", id, " has ", num_samples, " samples)"));
  }
  cancellations_.push_back({.id = id, .sample = sample});
  wake_engine_.notify_one();
  return true;
}

std::vector<RequestEvent> Engine::poll(int32_t timeout_ms) {
  std::unique_lock lock(mutex_);
  const auto is_ready = [&] { return !events_.empty() || failure_ != nullptr; };
  if (timeout_ms > 0) {
    wake_caller_.wait_for(lock, std::chrono::milliseconds(timeout_ms), is_ready);
  }
  if (events_.empty() && failure_ != nullptr) std::rethrow_exception(failure_);
  return std::exchange(events_, {});
}

ExecutorStats Engine::stats() {
  const std::scoped_lock lock(mutex_);
  return stats_;
}

void Engine::reset_stats() {
  const std::scoped_lock lock(mutex_);
  preemptions_at_reset_ += stats_.num_preemptions;
  shared_tokens_at_reset_ += stats_.num_shared_tokens;
  stats_ = ExecutorStats{};
}

Engine::KvUsage Engine::kv_usage() {
  const std::scoped_lock lock(mutex_);
  return usage_;
}

std::vector<KernelTime> Engine::trace_iteration(int32_t timeout_ms) {
  std::unique_lock lock(mutex_);
  wants_trace_ = true;
  trace_.reset();
  wake_caller_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                        [&] { return trace_.has_value() || failure_ != nullptr; });
  wants_trace_ = false;
  if (failure_ != nullptr) std::rethrow_exception(failure_);
  return trace_.value_or(std::vector<KernelTime>());
}

std::string Engine::check_integrity() {
  std::unique_lock lock(mutex_);
  wants_integrity_ = true;
  integrity_.reset();
  wake_engine_.notify_one();
  wake_caller_.wait(lock, [&] { return integrity_.has_value() || failure_ != nullptr; });
  if (!integrity_.has_value()) std::rethrow_exception(failure_);
  return *integrity_;
}

template <class Call>
auto Engine::on_device(Call call) {
  try {
    return call();
  } catch (...) {
    has_device_failed_ = true;
    throw;
  }
}

void Engine::loop() {
  try {
    for (bool goes_on = true; goes_on;) {
      try {
        goes_on = iterate();
      } catch (const std::bad_alloc&) {
        if (has_device_failed_) throw;
        goes_on = recover();
      }
    }
    if (newest_launched_ >= 0) runner_->wait(newest_launched_);
  } catch (...) {
    fail(std::current_exception());
  }
}

bool Engine::iterate() {
  if (!take_in()) return false;
  // One iteration ahead: launch the next before the last one has been read.
  const auto in_flight = [&] { return newest_launched_ - newest_read_; };
  const bool has_launched = in_flight() < options_.scheduler.max_in_flight && launch_next();
  const bool is_full = in_flight() >= options_.scheduler.max_in_flight;
  if (in_flight() > 0 && (is_full || !has_launched)) {
    read_oldest();
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
      return stops_ || wants_integrity_ || !incoming_.empty() || !cancellations_.empty();
    };
    if (is_idle()) {
      is_idle_ = true;
      if (wants_integrity_ && incoming_.empty()) {
        std::string integrity = pool_.check_integrity();
        for (GroupId g = 0; g < static_cast<GroupId>(layout_.groups.size()); ++g) {
          if (integrity.empty() && pool_.num_held(g) + pool_.num_quarantined(g) > 0) {
            integrity = concat("idle, but group ", g, " holds ", pool_.num_held(g),
                               " blocks and quarantines ", pool_.num_quarantined(g));
          }
        }
        integrity_ = std::move(integrity);
        wants_integrity_ = false;
        wake_caller_.notify_all();
      }
      wake_engine_.wait(lock, has_news);
    }
    if (stops_) return false;
    while (!incoming_.empty()) {
      // In one of the two at any time, so that an exception loses none.
      Samples& samples = requests_[incoming_.front().front()->id];
      samples.swap(incoming_.front());
      incoming_.pop_front();
      for (const std::unique_ptr<Sequence>& sample : samples) scheduler_.add(*sample);
    }
    if (to_cancel_.empty()) {
      to_cancel_.swap(cancellations_);
      std::reverse(to_cancel_.begin(), to_cancel_.end());
    }
  }
  for (; !to_cancel_.empty(); to_cancel_.pop_back()) cancel_now(to_cancel_.back());
  return true;
}

bool Engine::launch_next() {
  const int64_t start = now_us();
  InFlight& launched = ring_[static_cast<size_t>(newest_launched_ + 1) % ring_.size()];
  launched.plan.iteration = newest_launched_ + 1;
  delay();
  if (!scheduler_.plan(launched.plan)) return false;
  launched.batch.iteration = launched.plan.iteration;
  runner_->bind(launched.batch);
  build_batch(launched.plan, options_.shape, launched.batch);
  delay();
  bool is_traced = false;
  if (!launched.batch.has_prefill) {
    const std::scoped_lock lock(mutex_);
    is_traced = std::exchange(wants_trace_, false);
  }
  std::vector<KernelTime> trace;
  on_device([&] {
    if (is_traced) {
      trace = runner_->launch_traced(launched.batch);
    } else {
      runner_->launch(launched.batch);
    }
  });
  ++newest_launched_;
  const std::scoped_lock lock(mutex_);
  if (is_traced) {
    trace_ = std::move(trace);
    wake_caller_.notify_all();
  }
  stats_.host_us += static_cast<double>(now_us() - start);
  return true;
}

void Engine::read_oldest() {
  const int64_t iteration = newest_read_ + 1;
  delay();
  on_device([&] { runner_->wait(iteration); });
  const int64_t start = now_us();
  InFlight& launched = ring_[static_cast<size_t>(iteration) % ring_.size()];
  newest_read_ = iteration;
  scheduler_.complete(iteration);
  const std::span<const SequenceResult> results = runner_->results(iteration);
  const LogprobReader logprobs(launched.plan, launched.batch, runner_->logprobs(iteration),
                               options_.shape.max_logprobs, options_.vocab_size);
  int32_t num_decoding = 0;
  int64_t num_emitted = 0;
  int64_t num_drafted = 0;
  int64_t num_accepted = 0;
  for (size_t i = 0; i < launched.plan.sequences.size(); ++i) {
    const bool is_decode = launched.plan.sequences[i].kind == RowKind::kDecode;
    num_decoding += is_decode && results[i].emitted_len > 0 ? 1 : 0;
    if (!apply(launched.plan.sequences[i], results[i], logprobs, static_cast<int32_t>(i))) continue;
    num_emitted += results[i].emitted_len;
    num_drafted += results[i].drafted_len;
    num_accepted += results[i].accepted_len;
  }
  launched.batch.score_copies.clear();  // they hold on to the logits, which may be large
  std::erase_if(leaving_, [](const auto& sequence) { return sequence->launches_in_flight == 0; });
  publish_usage();
  const std::scoped_lock lock(mutex_);
  int32_t num_prefill = 0;
  for (const PlannedSequence& launch : launched.plan.sequences) {
    num_prefill += launch.kind == RowKind::kDecode ? 0 : 1;
  }
  ++stats_.num_iterations;
  stats_.num_emitted_tokens += num_emitted;
  stats_.num_draft_tokens += num_drafted;
  stats_.num_accepted_tokens += num_accepted;
  stats_.num_preemptions = scheduler_.num_preemptions() - preemptions_at_reset_;
  stats_.num_shared_tokens = scheduler_.num_shared_tokens() - shared_tokens_at_reset_;
  publish_load();
  deliver();
  if (stats_.iteration_us.size() < kMaxIterationSamples) {
    reserve_more(stats_.iteration_us, 1);
    reserve_more(stats_.iteration_idle_us, 1);
    reserve_more(stats_.iteration_num_decoding, 1);
    reserve_more(stats_.iteration_num_prefill, 1);
    const Runner::Timing timing = runner_->timing(iteration);
    stats_.iteration_us.push_back(timing.us);
    stats_.iteration_idle_us.push_back(timing.idle_us);
    stats_.iteration_num_decoding.push_back(num_decoding);
    stats_.iteration_num_prefill.push_back(num_prefill);
  }
  stats_.host_us += static_cast<double>(now_us() - start);
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
    // The first emission comes after all of the prompt, which is thus delivered once: what is
    // recomputed later is not rated again.
    outgoing_.push_back({.id = sequence.id,
                         .sample = sequence.sample,
                         .token_ids = {result.tokens, result.tokens + result.emitted_len},
                         .logprobs = logprobs.emitted(i, result),
                         .prompt_logprobs = std::exchange(sequence.prompt_logprobs, nullptr),
                         .num_drafted = result.drafted_len,
                         .num_accepted = result.accepted_len});
  }
  if (has_ended) {
    finish(sequence, reason_of(result.outcome),
           result.outcome == SequenceOutcome::kNoLogits
               ? concat("no token can be drawn at position ", sequence.known_len(), ": ",
                        rules_out(sequence.sampling)
                            ? "bad_words, allowed_token_ids and min_tokens rule out all, or the "
                              "weights or the prompt produce NaN or infinity"
                            : "the weights or the prompt produce NaN or infinity")
               : std::string());
    return true;
  }
  if (launch.kind == RowKind::kScore && launch.start + launch.num_rows == sequence.prompt_len) {
    finish(sequence, FinishReason::kLength);
    return true;
  }
  scheduler_.advance(sequence, launch);
  return true;
}

void Engine::finish(Sequence& sequence, FinishReason reason, std::string error) {
  // All memory first: once the scheduler has let go of the sequence, nothing throws.
  reserve_more(outgoing_, 1);
  reserve_more(leaving_, 1);
  scheduler_.finish(sequence);
  // The last tokens and the end travel in one event.
  RequestEvent event{.id = sequence.id, .sample = sequence.sample};
  if (!outgoing_.empty() && outgoing_.back().id == sequence.id &&
      outgoing_.back().sample == sequence.sample && reason != FinishReason::kCancelled) {
    event = std::move(outgoing_.back());
    outgoing_.pop_back();
  }
  event.finish_reason = reason;
  event.error = std::move(error);
  event.counters = std::move(sequence.counters);
  // Of a score that was cut short some are missing, and launches in flight still write others.
  if (reason == FinishReason::kLength) event.logits = sequence.logits;
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
  const auto live = live_.find(sequence.id);
  if (--live->second.num_left == 0) live_.erase(live);
}

void Engine::cancel_now(const Cancellation& cancellation) {
  const auto found = requests_.find(cancellation.id);
  if (found == requests_.end()) return;  // ended meanwhile
  std::vector<Sequence*> running;        // the request itself goes with its last sample
  for (const std::unique_ptr<Sequence>& sample : found->second) {
    if (sample != nullptr && sample->sample == cancellation.sample.value_or(sample->sample)) {
      running.push_back(sample.get());
    }
  }
  for (Sequence* sample : running) finish(*sample, FinishReason::kCancelled);
  std::erase_if(leaving_, [](const auto& sequence) { return sequence->launches_in_flight == 0; });
  publish_usage();
  const std::scoped_lock lock(mutex_);
  publish_load();  // no iteration may follow
  deliver();
}

bool Engine::recover() {
  if (newest_launched_ >= 0) on_device([&] { runner_->wait(newest_launched_); });
  newest_read_ = newest_launched_;
  leaving_.clear();
  for (InFlight& entry : ring_) entry.batch.score_copies.clear();
  // Where nothing has begun, what waits is what cannot be served.
  const bool ends_all = std::none_of(requests_.begin(), requests_.end(), [](const auto& request) {
    return std::any_of(request.second.begin(), request.second.end(), has_begun);
  });
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (wake_engine_.wait_for(lock, kMemoryRetry, [&] { return stops_; })) return false;
    }
    try {
      restart(ends_all);
      return true;
    } catch (const std::bad_alloc&) {
      if (has_device_failed_) throw;
    }
  }
}

void Engine::restart(bool ends_all) {
  on_device([&] { scheduler_.reset(newest_launched_); });  // which may poison blocks
  for (auto request = requests_.begin(); request != requests_.end();) {
    Samples& samples = request->second;
    if (!ends_all && std::none_of(samples.begin(), samples.end(), has_begun)) {
      for (const std::unique_ptr<Sequence>& sample : samples) scheduler_.add(*sample);
      ++request;
      continue;
    }
    for (std::unique_ptr<Sequence>& sample : samples) {
      if (sample == nullptr) continue;
      RequestEvent event{
          .id = sample->id,
          .sample = sample->sample,
          .finish_reason = FinishReason::kError,
          .error =
              "the process ran out of memory while the request ran; requests that waited go "
              "on. Free memory, or lower max_num_seqs or the logprobs asked for"};
      event.counters = sample->counters;
      event.arrival_us = sample->arrival_us;
      event.first_token_us = sample->first_token_us;
      event.finish_us = now_us();
      outgoing_.push_back(std::move(event));
      sample.reset();
      const std::scoped_lock lock(mutex_);
      const auto live = live_.find(request->first);
      if (--live->second.num_left == 0) live_.erase(live);
    }
    request = requests_.erase(request);
  }
  publish_usage();
  const std::scoped_lock lock(mutex_);
  publish_load();
  deliver();
}

void Engine::delay() {
  if (options_.host_delay_max_us == 0) return;
  const auto range = static_cast<uint32_t>(options_.host_delay_max_us) + 1;
  std::this_thread::sleep_for(std::chrono::microseconds(delays_() % range));
}

void Engine::publish_usage() {
  const std::scoped_lock lock(mutex_);
  const auto num_groups = static_cast<GroupId>(layout_.groups.size());
  usage_.held_blocks.resize(num_groups);
  usage_.quarantined_blocks.resize(num_groups);
  for (GroupId g = 0; g < num_groups; ++g) {
    usage_.held_blocks[g] = pool_.num_held(g);
    usage_.quarantined_blocks[g] = pool_.num_quarantined(g);
  }
  usage_.free_slabs = pool_.num_free_slabs();
}

void Engine::publish_load() {
  stats_.num_running = scheduler_.num_running();
  stats_.num_waiting = scheduler_.num_waiting();
  num_queued_ = scheduler_.num_waiting_requests() + static_cast<int64_t>(incoming_.size());
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

void Engine::fail(std::exception_ptr cause) {
  std::unique_lock lock(mutex_);
  do {
    try {
      deliver();
    } catch (const std::bad_alloc&) {
      // Room comes with memory, or when a caller takes the events there are.
    }
  } while (!outgoing_.empty() &&
           !wake_engine_.wait_for(lock, kMemoryRetry, [&] { return stops_; }));
  failure_ = std::move(cause);
  wake_caller_.notify_all();
}

}  // namespace paceline
