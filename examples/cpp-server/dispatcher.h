// SPDX-License-Identifier: Apache-2.0
#pragma once

// Gives the events of an engine to the requests that wait for them.

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include <paceline/executor.h>

// No request can run any more: the engine has failed, or the server is about to end.
class Unavailable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One thread polls the engine, so the events of a sample stay in order. All methods are
// thread-safe. Requests must end before their dispatcher.
class Dispatcher {
 public:
  class Running;

  explicit Dispatcher(paceline::Executor& executor);
  ~Dispatcher();
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  // Queues a request; null when the queue is full. Throws Unavailable, and what
  // Executor::add_request throws.
  [[nodiscard]] std::shared_ptr<Running> start(paceline::Request request);

  // From now on `start` throws Unavailable. Returns once all requests have ended, or after
  // `timeout`; whether they have ended.
  [[nodiscard]] bool drain(std::chrono::seconds timeout);

  // Throws Unavailable when `start` would.
  void check_running() const;

 private:
  void poll_events();
  void check_running_locked() const;

  paceline::Executor& executor_;
  mutable std::mutex mutex_;  // protects all below, and the inboxes
  std::condition_variable changed_;
  std::map<paceline::RequestId, Running*> running_;
  std::string failure_;  // of the engine; empty: none
  bool is_draining_ = false;
  bool is_closed_ = false;
  std::thread thread_;
};

// A request that has been queued. Its destructor cancels what still runs, so the request of a
// client that has gone away gives its KV blocks back.
class Dispatcher::Running {
 public:
  Running(Dispatcher& dispatcher, paceline::RequestId id, int32_t num_samples);
  ~Running();
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  // Waits up to `timeout` for the next event of any sample; nullopt if there is none. Throws
  // Unavailable when the engine has failed.
  [[nodiscard]] std::optional<paceline::RequestEvent> next(std::chrono::milliseconds timeout);

  // Whether `next` has returned the last event of every sample.
  [[nodiscard]] bool has_ended() const { return num_open_ == 0; }

 private:
  friend class Dispatcher;

  Dispatcher& dispatcher_;
  paceline::RequestId id_;
  int32_t num_open_;  // samples whose last event `next` has not returned
  std::deque<paceline::RequestEvent> inbox_;
};
