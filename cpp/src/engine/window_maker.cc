// SPDX-License-Identifier: Apache-2.0
#include "engine/window_maker.h"

#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/start_thread.h"
#include "wire/sequence_state.h"

namespace paceline {
namespace {

bool is_allowed(std::span<const uint32_t> masks, int64_t row, int32_t num_words, int32_t token) {
  const uint32_t word = masks[static_cast<size_t>(row * num_words + token / 32)];
  return (word >> token % 32 & 1) != 0;
}

void check_drafts(const char* what, const std::vector<int32_t>& drafts, int32_t max_drafts,
                  int32_t vocab_size) {
  if (drafts.size() > static_cast<size_t>(max_drafts)) {
    throw InvalidArgument(
        concat(what, " returned ", drafts.size(), " drafts; allowed: at most ", max_drafts));
  }
  for (size_t i = 0; i < drafts.size(); ++i) {
    if (drafts[i] >= 0 && drafts[i] < vocab_size) continue;
    throw InvalidArgument(concat(what, " returned token ", drafts[i], " as draft ", i,
                                 "; allowed: 0 to ", vocab_size - 1));
  }
}

}  // namespace

WindowMaker::WindowMaker(const WindowMakerOptions& options, Deliver deliver)
    : options_(options), deliver_(std::move(deliver)) {}

WindowMaker::~WindowMaker() { stop(); }

void WindowMaker::start() {
  const std::scoped_lock lock(mutex_);
  threads_.reserve(static_cast<size_t>(options_.num_threads));
  while (threads_.size() < static_cast<size_t>(options_.num_threads)) {
    threads_.push_back(start_thread("a thread for constraints", [this] { loop(); }));
  }
}

void WindowMaker::stop() {
  std::vector<std::thread> threads;
  {
    const std::scoped_lock lock(mutex_);
    stops_ = true;
    threads.swap(threads_);
  }
  wake_.notify_all();
  for (std::thread& thread : threads) thread.join();
}

void WindowMaker::ask(WindowQuestion question) {
  {
    const std::scoped_lock lock(mutex_);
    questions_.push_back(std::move(question));
  }
  wake_.notify_one();
}

void WindowMaker::drop(std::shared_ptr<WindowGuide> guide) noexcept {
  try {
    WindowQuestion last;
    last.guide = std::move(guide);
    ask(std::move(last));
  } catch (const std::bad_alloc&) {
    // The guide has been destroyed here, which may have taken longer.
  }
}

void WindowMaker::loop() {
  for (;;) {
    WindowQuestion question;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stops_ || !questions_.empty(); });
      if (stops_) return;
      question = std::move(questions_.front());
      questions_.pop_front();
    }
    if (question.answer.empty()) continue;
    answer(question);
    deliver_(std::move(question.answer));
  }
}

void WindowMaker::answer(WindowQuestion& question) const {
  WindowAnswer& answer = question.answer.front();
  try {
    try {
      answer.window = make(question);
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& error) {
      answer.error = error.what();
      if (answer.error.empty()) answer.error = "the guide has thrown an exception without a text";
    } catch (...) {
      answer.error = "the guide has thrown an exception of an unknown type";
    }
  } catch (const std::bad_alloc&) {
    answer.error = "out of memory";  // short enough for a string without an allocation
  }
}

GuidedWindow WindowMaker::make(WindowQuestion& question) const {
  WindowGuide& guide = *question.guide;
  GuidedWindow window{.num_tokens = question.num_tokens};
  std::vector<int32_t> proposed = std::move(question.drafts);
  if (guide.drafter != nullptr) {
    guide.tokens.insert(guide.tokens.end(), question.emitted.begin(), question.emitted.end());
    proposed.clear();
    if (question.max_drafts > 0) {
      proposed = guide.drafter->draft(guide.tokens, question.max_drafts);
    }
    check_drafts("the drafter", proposed, question.max_drafts, options_.vocab_size);
  } else {
    // A drafter without a valid logit drafts no token.
    proposed.erase(std::find_if(proposed.begin(), proposed.end(), [](int32_t t) { return t < 0; }),
                   proposed.end());
    proposed.resize(std::min(proposed.size(), static_cast<size_t>(question.max_drafts)));
  }
  if (guide.constraint == nullptr) {
    window.drafts = std::move(proposed);
    return window;
  }

  const int32_t num_words = mask_words(options_.vocab_size);
  window.masks.assign(static_cast<size_t>(question.max_drafts + 1) * num_words, 0);
  window.drafts = proposed;
  guide.constraint->constrain(question.emitted, window.drafts, question.max_drafts, window.masks);
  check_drafts("the constraint", window.drafts, question.max_drafts, options_.vocab_size);
  for (size_t i = 0; i < window.drafts.size(); ++i) {
    if (is_allowed(window.masks, static_cast<int64_t>(i), num_words, window.drafts[i])) continue;
    window.drafts.resize(i);  // it would be rejected
  }
  const auto kept = static_cast<size_t>(
      std::mismatch(proposed.begin(), proposed.end(), window.drafts.begin(), window.drafts.end())
          .first -
      proposed.begin());
  const DraftRule rule = guide.drafter != nullptr ? DraftRule::kReplace : options_.rule;
  if (rule != DraftRule::kReplace) window.drafts.resize(kept);
  if (rule == DraftRule::kKeepRejected && kept < proposed.size()) {
    const auto row = static_cast<int64_t>(kept);
    if (is_allowed(window.masks, row, num_words, proposed[kept])) {
      throw InvalidArgument(concat("the constraint dropped draft ", kept, ", token ",
                                   proposed[kept], ", which its own mask allows"));
    }
    window.drafts.push_back(proposed[kept]);
    // No token is ever drawn after a rejected draft.
    std::copy_n(window.masks.begin() + row * num_words, num_words,
                window.masks.begin() + (row + 1) * num_words);
  }
  window.masks.resize((window.drafts.size() + 1) * static_cast<size_t>(num_words));
  return window;
}

}  // namespace paceline
