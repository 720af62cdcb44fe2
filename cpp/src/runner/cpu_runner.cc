// SPDX-License-Identifier: Apache-2.0
#include "runner/cpu_runner.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/check.h"
#include "base/start_thread.h"
#include "runner/dtypes.h"

namespace paceline {
namespace {

void fill_nan(std::span<std::byte> bytes) {
  // All bits set is a NaN both in float32 and in bfloat16.
  std::fill(bytes.begin(), bytes.end(), std::byte{0xff});
}

}  // namespace

CpuRunner::CpuRunner(std::shared_ptr<const Model> target, std::shared_ptr<const Model> draft,
                     const KvLayout& layout, const CpuRunnerOptions& options)
    : options_(options),
      threads_(options.num_threads),
      context_{.num_threads = options.num_threads, .threads = &threads_},
      runner_(context_, host_memory(), arena_, target, draft, layout, options.runner,
              activation_dtype(*target, draft.get())),
      launches_(static_cast<size_t>(options.runner.max_in_flight) + 1) {
  const DeviceBuffer& pool = runner_.kv_pool();
  // What another runner's sequences have left there is as good.
  const bool is_new = options.runner.kv_pool == nullptr;
  if (options.poison_pool && is_new) fill_nan({pool.data(), static_cast<size_t>(pool.bytes())});
  // Ops read their row counts from memory, so one graph serves all numbers of sequences.
  runner_.capture({&options.runner.iteration.shape.max_seqs, 1}, /*on_capture=*/nullptr);
  thread_ = start_thread("the thread of the CPU device", [this] { device_loop(); });
}

CpuRunner::~CpuRunner() {
  {
    const std::scoped_lock lock(mutex_);
    stops_ = true;
  }
  wake_device_.notify_all();
  thread_.join();
}

void CpuRunner::launch(const Batch& batch) {
  {
    const std::scoped_lock lock(mutex_);
    PACELINE_CHECK(batch.iteration == launched_ + 1, "iteration ", batch.iteration,
                   " is launched after ", launched_);
    PACELINE_CHECK(launched_ - completed_ < options_.runner.max_in_flight,
                   "more than max_in_flight iterations are in flight");
    launched_ = batch.iteration;
    launches_[static_cast<size_t>(launched_) % launches_.size()] = &batch;
  }
  wake_device_.notify_one();
}

void CpuRunner::device_loop() {
  std::unique_lock lock(mutex_);
  const auto may_run = [&] {
    const int64_t next = completed_ + 1;
    return next <= launched_ && failure_ == nullptr &&
           (next + options_.lateness <= launched_ || next <= awaited_);
  };
  for (;;) {
    wake_device_.wait(lock, [&] { return stops_ || may_run(); });
    if (stops_) return;
    const Batch& batch = *launches_[static_cast<size_t>(completed_ + 1) % launches_.size()];
    lock.unlock();
    std::exception_ptr failure;
    try {
      runner_.run(batch);
    } catch (...) {
      failure = std::current_exception();
    }
    // The other ranks need not wait for this one.
    const RankHandle& ranks = options_.runner.ranks;
    if (failure != nullptr && ranks.group != nullptr) {
      ranks.group->fail(ranks.rank, failure);
    }
    lock.lock();
    if (failure == nullptr) ++completed_;
    if (failure_ == nullptr) failure_ = failure;
    wake_host_.notify_all();
  }
}

void CpuRunner::release(int64_t iteration) {
  const std::scoped_lock lock(mutex_);
  if (iteration <= awaited_) return;
  awaited_ = iteration;
  wake_device_.notify_one();
}

void CpuRunner::abort(std::exception_ptr cause) {
  const std::scoped_lock lock(mutex_);
  if (failure_ == nullptr) failure_ = std::move(cause);
  wake_host_.notify_all();
}

void CpuRunner::wait(int64_t iteration) {
  release(iteration);
  std::unique_lock lock(mutex_);
  PACELINE_CHECK(iteration <= launched_, "wait for iteration ", iteration,
                 ", but the newest launched one is ", launched_);
  wake_host_.wait(lock, [&] { return completed_ >= iteration || failure_ != nullptr; });
  if (completed_ < iteration) std::rethrow_exception(failure_);
}

int64_t CpuRunner::completed() {
  const std::scoped_lock lock(mutex_);
  return completed_;
}

void CpuRunner::poison(GroupId group, BlockId block) { fill_nan(runner_.kv_block(group, block)); }

std::vector<Program*> CpuRunner::programs() {
  std::vector<Program*> all;
  for (CpuGraph* const graph : runner_.graphs()) {
    for (Program* const program : graph->programs()) all.push_back(program);
  }
  return all;
}

}  // namespace paceline
