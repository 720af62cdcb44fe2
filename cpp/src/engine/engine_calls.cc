// SPDX-License-Identifier: Apache-2.0

// The engine's calls, which any thread may make. They leave requests, cancellations and flags for
// the engine's thread and take its events.

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/start_thread.h"
#include "engine/engine.h"
#include "engine/request_checks.h"

namespace paceline {

void Engine::check_request(const Request& request) const {
  paceline::check_request(request, {.max_model_len = options_.max_model_len,
                                    .vocab_size = options_.vocab_size,
                                    .num_layers = options_.num_layers,
                                    .num_streams = options_.num_streams,
                                    .max_logprobs = options_.shape.max_logprobs,
                                    .num_draft_tokens = options_.shape.num_draft_tokens,
                                    .methods = options_.methods,
                                    .allows_constraints = options_.allows_constraints});
  const auto prompt_len = static_cast<int64_t>(request.prompt.size());
  const int64_t num_output = int64_t{request.sampling.max_tokens} - request.num_resumed_tokens;
  const auto limit = static_cast<int32_t>(std::min<int64_t>(
      is_score(request) ? prompt_len : prompt_len + num_output, options_.max_model_len));
  if (!scheduler_.fits_alone(static_cast<int32_t>(prompt_len), limit)) {
    throw InvalidArgument(concat("a request of ", prompt_len, " prompt tokens and ", limit,
                                 " tokens in all needs more KV blocks than the whole pool of ",
                                 layout_->pool_bytes >> 10,
                                 " KiB has; raise kv_cache_bytes or lower max_tokens"));
  }
}

std::optional<std::vector<RequestId>> Engine::queue(std::vector<Samples> requests) {
  if (std::any_of(requests.begin(), requests.end(),
                  [](const Samples& samples) { return samples.front()->guide != nullptr; })) {
    windows_.start();
  }
  std::vector<RequestId> ids;
  ids.reserve(requests.size());
  std::unique_lock lock(mutex_);
  fail_if_hung(lock);
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
      open_.emplace(id, OpenRequest{.num_samples = num_samples, .num_left = num_samples});
      incoming_.push_back(std::move(samples));
      ids.push_back(id);
    }
  } catch (...) {
    open_.erase(next_id_ - 1);
    for (const RequestId id : ids) open_.erase(id);
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
  const std::scoped_lock admission(admission_mutex_);
  check_request(request);
  std::vector<Samples> one;
  one.push_back(make_samples(std::move(request), sample_bounds()));
  const std::optional<std::vector<RequestId>> ids = queue(std::move(one));
  return ids.has_value() ? std::optional(ids->front()) : std::nullopt;
}

std::optional<std::vector<RequestId>> Engine::add_requests(std::vector<Request> requests) {
  const std::scoped_lock admission(admission_mutex_);
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
  for (Request& request : requests)
    all.push_back(make_samples(std::move(request), sample_bounds()));
  return queue(std::move(all));
}

bool Engine::cancel(RequestId id, std::optional<int32_t> sample) {
  const std::scoped_lock lock(mutex_);
  const auto found = open_.find(id);
  if (found == open_.end()) return false;
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
  prepare_to_throw();  // usually the first call of the caller's own thread
  std::unique_lock lock(mutex_);
  const auto is_ready = [&] { return !events_.empty() || failure_ != nullptr; };
  if (timeout_ms > 0) {
    wake_caller_.wait_for(lock, std::chrono::milliseconds(timeout_ms), is_ready);
  }
  fail_if_hung(lock);
  if (events_.empty() && failure_ != nullptr) std::rethrow_exception(failure_);
  return std::exchange(events_, {});
}

ExecutorStats Engine::stats() {
  const std::scoped_lock lock(mutex_);
  ExecutorStats stats = statistics_.stats(options_.shape.num_draft_tokens);
  stats.is_adaptive = chooser_.has_value();
  if (stats.is_adaptive) {
    stats.num_drafts = chooser_->current();
    const auto estimates = chooser_->estimates(chooser_->current_seqs());
    for (size_t i = 0; i < estimates.size(); ++i) {
      ExecutorStats::Drafts& drafts = stats.drafts[static_cast<size_t>(estimates[i].num_drafts)];
      drafts.expected_us = estimates[i].us;
      drafts.expected_tokens = estimates[i].tokens;
    }
    for (int32_t i = 0; i < options_.shape.num_draft_tokens; ++i) {
      stats.expected_acceptance.push_back(chooser_->acceptance(i));
    }
    for (const DraftChooser::Cost& cost : chooser_->costs()) {
      stats.costs.push_back({.num_seqs = cost.num_seqs,
                             .num_drafts = cost.num_drafts,
                             .num_samples = cost.num_samples,
                             .us = cost.us});
    }
  }
  stats.uptime_s = static_cast<double>(now_us() - start_us_) * 1e-6;
  stats.kv_num_slabs = layout_->num_usable_slabs();
  stats.kv_free_slabs = usage_.free_slabs;
  for (size_t g = 0; g < layout_->groups.size(); ++g) {
    const int64_t blocks_per_slab = layout_->blocks_per_slab(static_cast<GroupId>(g));
    const PrefixCache::GroupCounts& hits = usage_.prefix_counts[g];
    const PrefixCache::GroupCounts& at_reset = prefix_counts_at_reset_[g];
    stats.kv_groups.push_back({.held_blocks = usage_.held_blocks[g],
                               .quarantined_blocks = usage_.quarantined_blocks[g],
                               .cached_blocks = usage_.cached_blocks[g],
                               .hit_blocks = hits.hit_blocks - at_reset.hit_blocks,
                               .evicted_blocks = hits.evicted_blocks - at_reset.evicted_blocks,
                               .max_blocks = stats.kv_num_slabs * blocks_per_slab});
  }
  return stats;
}

IterationTimes Engine::iteration_times() {
  const std::scoped_lock lock(mutex_);
  return statistics_.times();
}

void Engine::reset_stats() {
  const std::scoped_lock lock(mutex_);
  statistics_.reset();
  prefix_counts_at_reset_ = usage_.prefix_counts;
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

int64_t Engine::while_idle(const std::function<void()>& body) {
  std::unique_lock lock(mutex_);
  if (!is_held_ && failure_ == nullptr && !open_.empty()) {
    return static_cast<int64_t>(open_.size());
  }
  run_held(lock, /*is_between=*/false, body);
  return 0;
}

void Engine::run_held(std::unique_lock<std::mutex>& lock, bool is_between,
                      const std::function<void()>& body) {
  if (failure_ != nullptr) std::rethrow_exception(failure_);
  if (is_held_) {
    throw InvalidArgument(
        "another update of the weights or of the drafter is under way; wait until it has ended");
  }
  is_held_ = true;
  is_held_between_ = is_between;
  const auto release = [&] {
    is_held_ = is_held_between_ = is_at_rest_ = false;
    if (!is_between) forgets_prefixes_ = true;
    wake_engine_.notify_one();
  };
  // Iterations that were launched ahead of the last result still read the weights.
  wake_engine_.notify_one();
  wake_caller_.wait(lock, [&] { return is_at_rest_ || failure_ != nullptr; });
  if (failure_ != nullptr) {
    release();
    std::rethrow_exception(failure_);
  }
  lock.unlock();
  try {
    body();
  } catch (...) {
    lock.lock();
    release();
    throw;
  }
  lock.lock();
  release();
}

}  // namespace paceline
