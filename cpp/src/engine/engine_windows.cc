// SPDX-License-Identifier: Apache-2.0

// How the engine gets the verify windows of guided sequences. A question leaves once the results of
// a sequence's last window have been read, and the sequence joins the next launch after the answer.

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/engine.h"

namespace paceline {
namespace {

// How long a launch waits for answers: at most half of an iteration, so that sequences without a
// guide are hardly held up, and at most this. With nothing else to launch, it waits for the first.
constexpr double kMostWaitUs = 2000;

}  // namespace

void Engine::ask_for_window(Sequence& sequence, std::vector<int32_t> drafts) {
  if (sequence.guide == nullptr) return;
  // The first question comes before the prompt's last row, whose draw needs a mask but no drafts.
  const bool is_first = sequence.num_guided == 0;
  const int32_t known = is_first ? sequence.prompt_len : sequence.num_guided;
  const int32_t room = sequence.limit - sequence.known_len();
  WindowQuestion question{
      .guide = sequence.guide,
      .emitted = {sequence.tokens.begin() + known, sequence.tokens.end()},
      .drafts = std::move(drafts),
      .num_tokens = sequence.known_len(),
      .max_drafts = is_first && sequence.needs_masks() ? 0 : std::min(sequence.max_drafts, room)};
  question.answer.push_back({.id = sequence.id, .sample = sequence.sample});
  windows_.ask(std::move(question));
  sequence.num_guided = sequence.known_len();
  ++num_unanswered_;
}

void Engine::begin_sample(Sequence& sequence) {
  scheduler_.add(sequence);
  // After an exception the sample may have asked already.
  if (sequence.needs_masks() && sequence.num_guided == 0) ask_for_window(sequence, {});
}

void Engine::take_answers() {
  if (num_unanswered_ == 0) return;
  {
    const std::scoped_lock lock(mutex_);
    taken_answers_.splice(taken_answers_.end(), answers_);
  }
  bool has_ended = false;
  for (; !taken_answers_.empty(); taken_answers_.pop_front(), --num_unanswered_) {
    WindowAnswer& answer = taken_answers_.front();
    const auto request = requests_.find(answer.id);
    Sequence* const sequence = request == requests_.end()
                                   ? nullptr
                                   : request->second[static_cast<size_t>(answer.sample)].get();
    if (sequence == nullptr) continue;  // it has been cancelled
    if (answer.error.empty()) {
      sequence->window = std::move(answer.window);
    } else {
      finish(*sequence, FinishReason::kError, answer.error);
      has_ended = true;
    }
  }
  if (!has_ended) return;
  std::erase_if(leaving_, [](const auto& left) { return left->launches_in_flight == 0; });
  publish_usage();
  const std::scoped_lock lock(mutex_);
  publish_load();
  deliver();
}

void Engine::await_answers(std::optional<double> most_us) {
  std::unique_lock lock(mutex_);
  const auto num_left = [&] { return num_unanswered_ - static_cast<int64_t>(answers_.size()); };
  if (most_us.has_value()) {
    const auto most = std::chrono::duration<double, std::micro>(std::min(*most_us, kMostWaitUs));
    wake_engine_.wait_for(lock, most, [&] { return stops_ || num_left() <= 0; });
    return;
  }
  wake_engine_.wait(lock, [&] {
    return stops_ || is_held_ || !answers_.empty() || !incoming_.empty() || !cancellations_.empty();
  });
}

void Engine::receive(std::list<WindowAnswer> answer) {
  const std::scoped_lock lock(mutex_);
  answers_.splice(answers_.end(), answer);
  wake_engine_.notify_one();
}

}  // namespace paceline
