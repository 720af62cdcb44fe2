// SPDX-License-Identifier: Apache-2.0

// How the engine's thread continues after it ran out of memory, and how it ends when the device
// fails.

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "engine/engine.h"

namespace paceline {
namespace {

// The pause before the engine tries again to allocate memory.
constexpr std::chrono::milliseconds kMemoryRetry{10};

bool has_begun(const std::unique_ptr<Sequence>& sample) {
  return sample == nullptr || sample->newest_prefill >= 0;  // null: it has ended
}

}  // namespace

bool Engine::recover_unless_lost() {
  if (has_device_failed_) throw;
  return recover();
}

bool Engine::recover() {
  log_line(LogLevel::kWarning,
           "the process ran out of memory; requests that have begun end with an error, the others "
           "wait until memory is free");
  if (newest_launched_ >= 0) on_device([&] { runner_->wait(newest_launched_); });
  newest_read_ = newest_launched_;
  waits_since_us_ = 0;
  leaving_.clear();
  for (InFlight& entry : ring_) entry.batch.drop_copies();
  // If no request has begun, those that wait are the ones for which the memory does not suffice.
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
  on_device([&] { scheduler_.reset(newest_launched_); });  // may poison blocks
  for (auto request = requests_.begin(); request != requests_.end();) {
    Samples& samples = request->second;
    if (!ends_all && std::none_of(samples.begin(), samples.end(), has_begun)) {
      for (const std::unique_ptr<Sequence>& sample : samples) begin_sample(*sample);
      ++request;
      continue;
    }
    for (std::unique_ptr<Sequence>& sample : samples) {
      if (sample == nullptr) continue;
      RequestEvent event{
          .request_id = sample->id,
          .sample = sample->sample,
          .finish_reason = FinishReason::kError,
          .error =
              "the process ran out of memory while the request ran; requests that had not "
              "begun continue. Free memory, or lower max_num_seqs or the number of logprobs"};
      event.counters = sample->counters;
      event.num_cached_tokens = sample->num_cached_tokens;
      event.arrival_us = sample->arrival_us;
      event.first_token_us = sample->first_token_us;
      event.finish_us = now_us();
      outgoing_.push_back(std::move(event));
      if (sample->guide != nullptr) windows_.drop(std::move(sample->guide));
      sample.reset();
      const std::scoped_lock lock(mutex_);
      statistics_.add_end(FinishReason::kError);
      const auto open = open_.find(request->first);
      if (--open->second.num_left == 0) open_.erase(open);
    }
    request = requests_.erase(request);
  }
  publish_usage();
  const std::scoped_lock lock(mutex_);
  publish_load();
  deliver();
}

void Engine::fail(std::exception_ptr cause) {
  log_made(LogLevel::kError, [&] {
    return concat("the engine has failed, every later call raises this: ", message_of(cause));
  });
  std::unique_lock lock(mutex_);
  do {
    try {
      deliver();
    } catch (const std::bad_alloc&) {
      // The next attempt succeeds once memory is free or a caller has taken the pending events.
    }
  } while (!outgoing_.empty() &&
           !wake_engine_.wait_for(lock, kMemoryRetry, [&] { return stops_; }));
  if (failure_ == nullptr) failure_ = std::move(cause);
  wake_caller_.notify_all();
}

void Engine::fail_if_hung(std::unique_lock<std::mutex>& lock) {
  const int64_t since = waits_since_us_;
  if (options_.hang_timeout_s == 0 || since == 0 || failure_ != nullptr) return;
  const double waited_s = static_cast<double>(now_us() - since) * 1e-6;
  if (waited_s <= options_.hang_timeout_s) return;
  failure_ = std::make_exception_ptr(DeviceError(
      concat("the device has not completed an iteration for ", waited_s, " s (hang_timeout_s is ",
             options_.hang_timeout_s, ")", runner_->delay_cause(),
             "; end this process and start another one, or raise hang_timeout_s if iterations "
             "may take so long")));
  wake_caller_.notify_all();
  lock.unlock();  // the log sink is called without it
  log_made(LogLevel::kError, [&] {
    return concat("the engine has failed, every later call raises this: ", message_of(failure_));
  });
  lock.lock();
}

}  // namespace paceline
