// SPDX-License-Identifier: Apache-2.0
#include "runner/ranked_runner.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/start_thread.h"
#include "wire/staged_inputs.h"

namespace paceline {
namespace {

// Copies the used elements of all arrays.
void copy_inputs(const StagedInputs& from, const StagedInputs& to) {
  *to.counts = *from.counts;
  const auto copy = [&](auto array, int32_t, auto count, int32_t extra) {
    std::copy_n(from.*array, from.counts->*count + extra, to.*array);
  };
  visit_staged_arrays({}, copy);
  visit_ring_arrays({}, copy);
}

[[nodiscard]] bool are_equal(const SequenceResult& a, const SequenceResult& b) {
  return a.emitted_len == b.emitted_len && a.accepted_len == b.accepted_len &&
         a.drafted_len == b.drafted_len && a.discarded_len == b.discarded_len &&
         a.outcome == b.outcome && std::equal(a.tokens, a.tokens + a.emitted_len, b.tokens);
}

}  // namespace

class RankedRunner::Launcher {
 public:
  // At most `max_in_flight` iterations are launched and not drained.
  Launcher(Runner& runner, const RankHandle& ranks, int32_t max_in_flight)
      : runner_(runner), ranks_(ranks), queue_(static_cast<size_t>(max_in_flight) + 1) {
    thread_ = start_thread("the thread that launches a rank", [this] { loop(); });
  }
  ~Launcher() {
    {
      const std::scoped_lock lock(mutex_);
      stops_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  // times: of the kernels, if they are timed; written before drain() returns.
  void launch(const Batch& batch, std::vector<KernelTime>* times) {
    {
      const std::scoped_lock lock(mutex_);
      PACELINE_CHECK(num_given_ - num_launched_ < queue_.size(), "too many iterations in flight");
      queue_[num_given_ % queue_.size()] = {&batch, times};
      ++num_given_;
    }
    changed_.notify_all();
  }
  void drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_launched_ == num_given_; });
  }

 private:
  struct Launch {
    const Batch* batch = nullptr;
    std::vector<KernelTime>* times = nullptr;
  };

  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stops_ || num_launched_ < num_given_; });
      if (num_launched_ == num_given_) return;
      const auto [batch, times] = queue_[num_launched_ % queue_.size()];
      lock.unlock();
      try {
        if (ranks_.group->has_failed()) {
          // The other ranks do not come any more.
        } else if (times != nullptr) {
          *times = runner_.launch_traced(*batch);
        } else {
          runner_.launch(*batch);
        }
      } catch (...) {
        ranks_.group->fail(ranks_.rank, std::current_exception());
      }
      lock.lock();
      ++num_launched_;
      changed_.notify_all();
    }
  }

  Runner& runner_;
  RankHandle ranks_;
  std::vector<Launch> queue_;
  uint64_t num_given_ = 0;
  uint64_t num_launched_ = 0;
  bool stops_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;
};

RankedRunner::RankedRunner(std::unique_ptr<RankGroup> group, int32_t max_in_flight,
                           const MakeRank& make_rank, bool has_threads)
    : group_(std::move(group)),
      batches_(static_cast<size_t>(group_->num_ranks()) - 1,
               std::vector<Batch>(static_cast<size_t>(max_in_flight) + 1)),
      runners_(static_cast<size_t>(group_->num_ranks())) {
  const auto handle = [&](size_t rank) {
    return RankHandle{.group = group_.get(), .rank = static_cast<int32_t>(rank)};
  };
  std::vector<std::exception_ptr> failures(runners_.size());
  const auto make = [&](size_t rank) {
    try {
      runners_[rank] = make_rank(handle(rank));
    } catch (...) {
      failures[rank] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (size_t rank = 1; has_threads && rank < runners_.size(); ++rank) {
    threads.push_back(start_thread("the thread that makes a rank", [&, rank] { make(rank); }));
  }
  for (size_t rank = 0; rank < (has_threads ? 1 : runners_.size()); ++rank) make(rank);
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure != nullptr) std::rethrow_exception(failure);
  }
  for (size_t rank = 0; has_threads && rank < runners_.size(); ++rank) {
    launchers_.push_back(std::make_unique<Launcher>(*runners_[rank], handle(rank), max_in_flight));
  }
  group_->set_on_failure([this] {
    std::exception_ptr cause;
    try {
      throw DeviceError(group_->failure());
    } catch (...) {
      cause = std::current_exception();
    }
    abort(std::move(cause));
  });
}

RankedRunner::~RankedRunner() {
  // After an error a rank may be in an iteration that another one does not begin any more.
  group_->fail(0, std::make_exception_ptr(DeviceError("the engine ends")));
}

template <class LaunchRank>
void RankedRunner::launch_ranks(const Batch& batch, const LaunchRank& launch_rank) {
  for (size_t rank = 1; rank < runners_.size(); ++rank) {
    std::vector<Batch>& of_rank = batches_[rank - 1];
    Batch& own = of_rank[static_cast<size_t>(batch.iteration) % of_rank.size()];
    own = batch;
    // Rank 0 copies what requests ask for. The passes of all ranks are the same.
    own.score_copies.clear();
    for (HiddenCopy& copy : own.hidden_copies) copy.destination.data = nullptr;
    runners_[rank]->bind(own);
    copy_inputs(batch.inputs, own.inputs);
    launch_rank(rank, own);
  }
  launch_rank(0, batch);
}

void RankedRunner::launch(const Batch& batch) {
  launch_ranks(batch, [&](size_t rank, const Batch& own) {
    if (launchers_.empty()) {
      runners_[rank]->launch(own);
    } else {
      launchers_[rank]->launch(own, nullptr);
    }
  });
}

// All ranks are traced: a traced iteration has bounds of its own, on which the form of an exchange
// depends.
std::vector<KernelTime> RankedRunner::launch_traced(const Batch& batch) {
  if (launchers_.empty()) return Runner::launch_traced(batch);
  std::vector<std::vector<KernelTime>> times(runners_.size());
  launch_ranks(batch,
               [&](size_t rank, const Batch& own) { launchers_[rank]->launch(own, &times[rank]); });
  drain();
  return times.front();
}

void RankedRunner::drain() {
  for (const auto& launcher : launchers_) launcher->drain();
  if (group_->has_failed()) throw DeviceError(group_->failure());
}

void RankedRunner::release(int64_t iteration) {
  for (const auto& runner : runners_) runner->release(iteration);
}

void RankedRunner::abort(std::exception_ptr cause) {
  for (const auto& runner : runners_) runner->abort(cause);
}

std::string RankedRunner::delay_cause() const {
  const std::string awaited = group_->awaited();
  return awaited.empty() ? awaited : concat(", the others wait for ", awaited);
}

void RankedRunner::wait(int64_t iteration) {
  // A rank that is late on purpose starts only now, and the others need it.
  release(iteration);
  if (!launchers_.empty()) drain();
  for (const auto& runner : runners_) runner->wait(iteration);
  check_results(iteration);
}

void RankedRunner::check_results(int64_t iteration) {
  const std::span<const SequenceResult> expected = first().results(iteration);
  for (size_t rank = 1; rank < runners_.size(); ++rank) {
    const std::span<const SequenceResult> results = runners_[rank]->results(iteration);
    PACELINE_CHECK(std::ranges::equal(expected, results, are_equal), "ranks 0 and ", rank, " of ",
                   runners_.size(), " have drawn different tokens in iteration ", iteration);
  }
}

int64_t RankedRunner::completed() {
  int64_t least = first().completed();
  for (const auto& runner : runners_) least = std::min(least, runner->completed());
  return least;
}

void RankedRunner::poison(GroupId group, BlockId block) {
  if (!launchers_.empty()) drain();
  for (const auto& runner : runners_) runner->poison(group, block);
}

std::map<std::string, int64_t, std::less<>> RankedRunner::workspace_bytes() const {
  std::map<std::string, int64_t, std::less<>> all;
  for (const auto& runner : runners_) {
    for (const auto& [purpose, bytes] : runner->workspace_bytes()) all[purpose] += bytes;
  }
  all["exchange of ranks"] = group_->bytes();
  return all;
}

std::vector<Runner::RankBytes> RankedRunner::rank_bytes() const {
  std::vector<RankBytes> all;
  for (const auto& runner : runners_) {
    RankBytes& own = all.emplace_back(runner->rank_bytes().front());
    own.workspace += group_->bytes() / group_->num_ranks();
  }
  return all;
}

Runner::KvPools RankedRunner::shared_kv_pools() const {
  KvPools all;
  for (const auto& runner : runners_) all.push_back(runner->shared_kv_pools().front());
  return all;
}

int64_t RankedRunner::graph_bytes() const {
  int64_t bytes = 0;
  for (const auto& runner : runners_) bytes += runner->graph_bytes();
  return bytes;
}

}  // namespace paceline
