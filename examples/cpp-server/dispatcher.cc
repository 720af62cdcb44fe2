// SPDX-License-Identifier: Apache-2.0
#include "dispatcher.h"

#include <exception>
#include <utility>
#include <vector>

namespace {

constexpr int kPollMs = 100;  // how late the end of the dispatcher is noticed

}  // namespace

Dispatcher::Dispatcher(paceline::Executor& executor)
    : executor_(executor), thread_([this] { poll_events(); }) {}

Dispatcher::~Dispatcher() {
  {
    const std::scoped_lock lock(mutex_);
    is_closed_ = true;
  }
  thread_.join();
}

std::shared_ptr<Dispatcher::Running> Dispatcher::start(paceline::Request request) {
  const int32_t num_samples = request.num_samples;
  std::shared_ptr<Running> running;  // outlives the lock, which its destructor takes
  // Held until the request is known here, so that no event can come before.
  const std::scoped_lock lock(mutex_);
  check_running_locked();
  const std::optional<paceline::RequestId> id = executor_.add_request(std::move(request));
  if (!id) return nullptr;
  running = std::make_shared<Running>(*this, *id, num_samples);
  running_.emplace(*id, running.get());
  return running;
}

bool Dispatcher::drain(std::chrono::seconds timeout) {
  std::unique_lock lock(mutex_);
  is_draining_ = true;
  return changed_.wait_for(lock, timeout, [this] { return running_.empty(); });
}

void Dispatcher::check_running() const {
  const std::scoped_lock lock(mutex_);
  check_running_locked();
}

void Dispatcher::check_running_locked() const {
  if (!failure_.empty()) throw Unavailable(failure_);
  if (is_draining_) throw Unavailable("the server is about to end");
}

void Dispatcher::poll_events() try {
  for (;;) {
    std::vector<paceline::RequestEvent> events = executor_.poll(kPollMs);
    const std::scoped_lock lock(mutex_);
    if (is_closed_) return;
    for (paceline::RequestEvent& event : events) {
      const auto found = running_.find(event.request_id);
      if (found == running_.end()) continue;  // its client has gone away
      found->second->inbox_.push_back(std::move(event));
    }
    if (!events.empty()) changed_.notify_all();
  }
} catch (const std::exception& error) {
  const std::scoped_lock lock(mutex_);
  failure_ = error.what();
  changed_.notify_all();
}

Dispatcher::Running::Running(Dispatcher& dispatcher, paceline::RequestId id, int32_t num_samples)
    : dispatcher_(dispatcher), id_(id), num_open_(num_samples) {}

Dispatcher::Running::~Running() {
  const std::scoped_lock lock(dispatcher_.mutex_);
  dispatcher_.running_.erase(id_);
  if (!has_ended()) (void)dispatcher_.executor_.cancel(id_);
  dispatcher_.changed_.notify_all();
}

std::optional<paceline::RequestEvent> Dispatcher::Running::next(std::chrono::milliseconds timeout) {
  std::unique_lock lock(dispatcher_.mutex_);
  dispatcher_.changed_.wait_for(
      lock, timeout, [this] { return !inbox_.empty() || !dispatcher_.failure_.empty(); });
  if (inbox_.empty()) {
    if (!dispatcher_.failure_.empty()) throw Unavailable(dispatcher_.failure_);
    return std::nullopt;
  }
  paceline::RequestEvent event = std::move(inbox_.front());
  inbox_.pop_front();
  if (event.finish_reason != paceline::FinishReason::kNone) --num_open_;
  return event;
}
