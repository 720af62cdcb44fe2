// SPDX-License-Identifier: Apache-2.0
#pragma once

// The core of the executor: one thread that takes in requests, plans, builds batches, launches,
// reads results one iteration late and delivers events. It uses the Runner interface and knows no
// model, so tests run it on devices that are late or do nothing.
//
// No exception leaves the thread. A failure of the runner is final: every later call rethrows it.
// If the host runs out of memory, the requests that have begun end with an error, those that only
// wait stay queued, and the engine continues.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include <paceline/executor.h>

#include "batch/batch.h"
#include "engine/interval_log.h"
#include "engine/logprob_reader.h"
#include "engine/samples.h"
#include "engine/statistics.h"
#include "engine/window_maker.h"
#include "request/sequence.h"
#include "runner/runner.h"
#include "scheduler/iteration_plan.h"
#include "scheduler/scheduler.h"
#include "tuning/chunk_chooser.h"
#include "tuning/draft_chooser.h"
#include "tuning/draft_schedule.h"
#include "wire/batch_shape.h"
#include "wire/draft_source.h"
#include "wire/sequence_result.h"

namespace paceline {

// How many prompt rows an iteration has while sequences decode.
enum class PromptRows : uint8_t {
  kAll,       // as many as the scheduler's options allow
  kFixed,     // the same number at any time, whatever iterations take
  kMeasured,  // see ChunkChooser
};

struct EngineOptions {
  BatchShape shape;
  SchedulerOptions scheduler;
  int32_t max_model_len = 0;
  // Of the target.
  int32_t vocab_size = 0;
  int32_t hidden_size = 0;
  int32_t num_layers = 0;
  int32_t num_streams = 1;
  Device device = Device::kCpu;
  int32_t max_waiting_requests = 0;  // 0: no bound
  int32_t host_delay_max_us = 0;     // see ExecutorOptions
  bool poisons_freed_blocks = false;
  double log_interval_s = 0;
  double hang_timeout_s = 0;                  // 0: none
  std::shared_ptr<HostDrafter> host_drafter;  // null: the device drafts
  SourceMethods methods;                      // that draft
  WindowMakerOptions windows;
  bool allows_constraints = true;
  bool is_adaptive = false;
  PromptRows prompt_rows = PromptRows::kAll;
  uint64_t draft_schedule_seed = 0;  // see ExecutorOptions
};

// What a change of the drafter exchanges.
struct EngineParts {
  EngineOptions options;
  const KvLayout* layout = nullptr;  // outlives its use
  std::unique_ptr<Runner> runner;
};

class Engine {
 public:
  // The layout must outlive the engine.
  Engine(const EngineOptions& options, const KvLayout& layout, std::unique_ptr<Runner> runner);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // See Executor's methods of the same names.
  [[nodiscard]] std::optional<RequestId> add_request(Request request);
  [[nodiscard]] std::optional<std::vector<RequestId>> add_requests(std::vector<Request> requests);
  bool cancel(RequestId id, std::optional<int32_t> sample = std::nullopt);
  [[nodiscard]] std::vector<RequestEvent> poll(int32_t timeout_ms);
  [[nodiscard]] ExecutorStats stats();
  [[nodiscard]] IterationTimes iteration_times();
  void reset_stats();
  [[nodiscard]] std::vector<KernelTime> trace_iteration(int32_t timeout_ms);
  [[nodiscard]] std::string check_integrity();
  [[nodiscard]] int64_t while_idle(const std::function<void()>& body);
  void update_drafter(const std::function<void()>& body);

  // Runs `body` between two iterations, while the device rests.
  void rest_while(const std::function<void()>& body);

  // Goes on with other parts after the iterations in flight, and gives back those so far. All that
  // runs is computed again from its known tokens, as after a preemption; what waits keeps waiting.
  // The options may differ only in what follows from the drafter. `on_replaced` is called before
  // the next iteration, and must not throw. Changes nothing if it throws: InvalidArgument for a
  // request that needs more blocks than the new pool has, and while another call holds the engine.
  // Returns for how many microseconds the engine's thread rested.
  double replace(EngineParts& parts, const std::function<void()>& on_replaced);

  // Block counts of every group, for the memory report.
  struct KvUsage {
    std::vector<int64_t> held_blocks;
    std::vector<int64_t> quarantined_blocks;
    std::vector<int64_t> cached_blocks;
    std::vector<PrefixCache::GroupCounts> prefix_counts;
    int64_t free_slabs = 0;
  };
  [[nodiscard]] KvUsage kv_usage();

  // For tests that plant faults from inside Runner calls, which run on the engine's thread.
  [[nodiscard]] SlabPool& pool() { return pool_; }

 private:
  // One launched iteration. The device reads the inputs of `batch` until it has completed.
  struct InFlight {
    IterationPlan plan;
    Batch batch;
    // Whether its time is typical of iterations with this k' and as many sequences.
    bool is_typical = false;
    bool is_traced = false;
    bool has_waited = false;  // the device had nothing to do before the launch
  };

  struct OpenRequest {
    int32_t num_samples = 0;
    int32_t num_left = 0;  // samples that have not ended
  };

  struct Cancellation {
    RequestId id = 0;
    std::optional<int32_t> sample;  // none: all
  };

  void check_request(const Request& request) const;
  [[nodiscard]] std::string_view method_of(DraftSource source) const {
    return options_.methods[static_cast<size_t>(source)];
  }
  [[nodiscard]] SampleBounds sample_bounds() const {
    return {.max_model_len = options_.max_model_len,
            .vocab_size = options_.vocab_size,
            .hidden_size = options_.hidden_size,
            .device = options_.device,
            .num_draft_tokens = options_.shape.num_draft_tokens,
            .host_drafter = options_.host_drafter,
            .methods = options_.methods};
  }
  // Runs `body` on the calling thread while the engine's thread rests, `lock` unlocked: once
  // nothing is in flight, or with `is_between` between two iterations. Throws as while_idle does.
  void run_held(std::unique_lock<std::mutex>& lock, bool is_between,
                const std::function<void()>& body);
  // Every sample that has not ended; the caller holds the engine.
  void for_each_open(const std::function<void(Sequence&)>& visit);
  // Returns nullopt if the queue has no room for all.
  [[nodiscard]] std::optional<std::vector<RequestId>> queue(std::vector<Samples> requests);

  // All methods below run on the engine's thread.
  void loop();
  bool iterate();      // false: the engine shall stop
  bool take_in();      // requests and cancellations; false: the engine shall stop
  bool launch_next();  // plan -> batch -> launch; false: nothing to launch
  [[nodiscard]] static ChunkChooser make_chunk_chooser(const EngineOptions& options);
  void choose_drafts(IterationPlan& plan);
  void choose_prompt_rows(IterationPlan& plan);
  // While prompts are computed: the number of sequences that will decode after them, which probably
  // include the waiting requests.
  [[nodiscard]] int32_t num_expected_to_decode() const {
    const auto newest = static_cast<size_t>(std::max<int64_t>(newest_launched_, 0)) % ring_.size();
    const int32_t num_decoding = scheduler_.num_decoding();
    const bool has_prompts = ring_[newest].plan.has_prefill || num_decoding == 0;
    const int32_t num_coming = has_prompts ? scheduler_.num_waiting() : 0;
    return std::min(scheduler_.num_running() + num_coming, options_.scheduler.max_num_seqs);
  }
  // What the chooser learns of a launch whose results are read.
  void observe(const InFlight& launched, DraftChooser::Iteration& observed,
               const Runner::Timing& timing);
  void read_oldest();  // results -> sequences -> events
  // Applies the result of `launch`, which is in batch row `i`. Returns false if the sequence has
  // been cancelled or preempted since, so that its tokens are dropped.
  bool apply(const PlannedSequence& launch, const SequenceResult& result,
             const LogprobReader& logprobs, int32_t i);
  void finish(Sequence& sequence, FinishReason reason, std::string error = {});
  // After `replace`: gives all samples to the scheduler, which knows none.
  void requeue();
  // Gives a sample to the scheduler.
  void begin_sample(Sequence& sequence);
  // Asks the guide of a sequence, if it has one, for its next window. `drafts`: the device's.
  void ask_for_window(Sequence& sequence, std::vector<int32_t> drafts);
  void take_answers();
  // Waits until all questions are answered, but at most this time; without one, until there is an
  // answer or another event.
  void await_answers(std::optional<double> most_us);
  void cancel_now(const Cancellation& cancellation);
  // After an exception for lack of memory: waits for the device, ends the requests that have begun
  // and restarts with those that wait. Returns false if the engine shall stop.
  bool recover();
  // The same in the handler of that exception; rethrows it if it came from the device.
  bool recover_unless_lost();
  void restart(bool ends_all);
  // Makes a call into the runner. An exception from it is final for the engine.
  template <class Call>
  auto on_device(Call call) {
    try {
      return call();
    } catch (...) {
      has_device_failed_ = true;
      throw;
    }
  }
  void delay();  // for tests: sleeps for a random time
  void publish_usage();
  void publish_load();  // under mutex_: the scheduler's load and counters
  void log_interval();  // the figures since the last line
  void deliver();       // under mutex_: moves all of outgoing_ to events_, or throws
  // On the threads of windows_.
  void receive(std::list<WindowAnswer> answer);
  void fail(std::exception_ptr cause);
  // Called by callers, since the engine's thread may hang. Unlocks the lock for a while.
  void fail_if_hung(std::unique_lock<std::mutex>& lock);
  [[nodiscard]] bool is_idle() const {
    return requests_.empty() && newest_read_ == newest_launched_;
  }

  // `replace` exchanges these while the engine's thread rests, under both mutexes.
  EngineOptions options_;
  const KvLayout* layout_;
  std::unique_ptr<Runner> runner_;
  SlabPool pool_;
  Scheduler scheduler_;

  // Engine thread only.
  std::unordered_map<RequestId, Samples> requests_;  // with a sample that has not ended
  std::vector<std::unique_ptr<Sequence>> leaving_;   // ended; launches still refer to them
  std::vector<InFlight> ring_;
  int64_t newest_launched_ = -1;
  int64_t newest_read_ = -1;
  std::vector<RequestEvent> outgoing_;
  std::vector<Cancellation> to_cancel_;    // from cancellations_; the oldest is last
  std::list<WindowAnswer> taken_answers_;  // from answers_
  int64_t num_unanswered_ = 0;             // questions whose answers have not been taken
  double last_iteration_us_ = 0;           // device time of the iteration that was read last
  int32_t last_num_drafts_ = -1;           // k' of the newest launch
  bool has_device_failed_ = false;
  bool is_draining_ = false;  // nothing is launched until the engine has rested
  ChunkChooser chunk_chooser_;
  DraftSchedule draft_schedule_;
  IntervalLog interval_log_;
  std::minstd_rand delays_{12345};

  // Held while callers check and queue requests, which depends on the options; locked before
  // mutex_.
  std::mutex admission_mutex_;

  // Shared, under mutex_.
  std::mutex mutex_;
  std::condition_variable wake_engine_;
  std::condition_variable wake_caller_;
  std::deque<Samples> incoming_;
  std::vector<Cancellation> cancellations_;
  std::list<WindowAnswer> answers_;
  std::vector<RequestEvent> events_;
  std::unordered_map<RequestId, OpenRequest> open_;  // requests with samples that have not ended
  RequestId next_id_ = 1;
  int64_t num_queued_ = 0;  // requests, incoming and waiting
  EngineStatistics statistics_;
  std::optional<DraftChooser> chooser_;  // with is_adaptive
  const int64_t start_us_;
  std::atomic<int64_t> waits_since_us_ = 0;  // for an iteration to complete; 0: for none
  KvUsage usage_;
  std::vector<PrefixCache::GroupCounts> prefix_counts_at_reset_;
  bool is_idle_ = true;
  // While a call of run_held is under way: nothing is taken in; with is_held_between_ nothing is
  // launched; and, from is_at_rest_ on until it ends, the device rests.
  bool is_held_ = false;
  bool is_held_between_ = false;
  bool is_at_rest_ = false;
  bool requeues_ = false;          // after `replace`
  bool forgets_prefixes_ = false;  // a call has ended, so the weights may have changed
  bool stops_ = false;
  bool wants_trace_ = false;
  std::optional<std::vector<KernelTime>> trace_;
  bool wants_integrity_ = false;
  std::optional<std::string> integrity_;
  std::exception_ptr failure_;

  WindowMaker windows_;
  std::thread thread_;  // last: everything above must exist before it starts
};

}  // namespace paceline
