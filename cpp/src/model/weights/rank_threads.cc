// SPDX-License-Identifier: Apache-2.0
#include "model/weights/rank_threads.h"

#include <paceline/version.h>

#include <algorithm>

#include "base/start_thread.h"

namespace paceline {

RankThreads::RankThreads(int32_t num_ranks) : ranks_(static_cast<size_t>(num_ranks)) {
  const int32_t num_threads = std::max(build_info().num_cores / num_ranks, 1);
  for (Rank& rank : ranks_) {
    rank.pool = std::make_unique<ThreadPool>(num_threads);
    rank.ctx = {.num_threads = num_threads, .threads = rank.pool.get()};
  }
  try {
    for (size_t i = 0; i < ranks_.size(); ++i) {
      ranks_[i].thread = start_thread("the thread that loads a rank", [this, i] { work(i); });
    }
  } catch (...) {
    stop();
    throw;
  }
}

RankThreads::~RankThreads() { stop(); }

void RankThreads::stop() noexcept {
  {
    const std::scoped_lock lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  for (Rank& rank : ranks_) {
    if (rank.thread.joinable()) rank.thread.join();
  }
}

void RankThreads::run(const Body& body) {
  std::unique_lock lock(mutex_);
  for (Rank& rank : ranks_) rank.failure = nullptr;
  body_ = &body;
  num_running_ = ranks_.size();
  ++num_runs_;
  changed_.notify_all();
  changed_.wait(lock, [&] { return num_running_ == 0; });
  for (const Rank& rank : ranks_) {
    if (rank.failure != nullptr) std::rethrow_exception(rank.failure);
  }
}

void RankThreads::work(size_t rank) {
  std::unique_lock lock(mutex_);
  for (int64_t num_done = 0;; ++num_done) {
    changed_.wait(lock, [&] { return stops_ || num_runs_ > num_done; });
    if (stops_) return;
    const Body& body = *body_;
    lock.unlock();
    std::exception_ptr failure;
    try {
      body(rank, ranks_[rank].ctx);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    ranks_[rank].failure = failure;
    if (--num_running_ == 0) changed_.notify_all();
  }
}

}  // namespace paceline
