// SPDX-License-Identifier: Apache-2.0
#pragma once

// The threads that make verify windows for guided sequences. They call the constraints and the
// drafter of the caller, which may take their time or wait for a lock such as Python's; the
// engine's thread never does. The first guided request starts them.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <paceline/request.h>

#include "request/window_guide.h"

namespace paceline {

// What becomes of the drafts of a window. Each rule keeps the promise of the acceptance method.
enum class DraftRule : uint8_t {
  kReplace,       // the window has the drafts that the constraint returns
  kCut,           // only those that were proposed: the drafter's KV would lack the others
  kKeepRejected,  // also the first draft that the constraint excludes. It is certain to be
                  // rejected, and sampled drafts need its residual distribution.
};

struct WindowAnswer {
  RequestId id = 0;
  int32_t sample = 0;
  GuidedWindow window;
  std::string error;  // not empty: the sample ends with it
};

// A request for the next window of a sample.
struct WindowQuestion {
  std::list<WindowAnswer> answer;  // one, to be filled; a list, so that delivering it cannot fail
  std::shared_ptr<WindowGuide> guide;
  std::vector<int32_t> emitted;  // output tokens since the last question
  std::vector<int32_t> drafts;   // the device's proposals
  int32_t num_tokens = 0;        // known length
  int32_t max_drafts = 0;
};

struct WindowMakerOptions {
  int32_t vocab_size = 0;
  DraftRule rule = DraftRule::kReplace;
  int32_t num_threads = 1;
};

class WindowMaker {
 public:
  // `deliver` is called on the threads, once for each question.
  using Deliver = std::function<void(std::list<WindowAnswer>)>;
  WindowMaker(const WindowMakerOptions& options, Deliver deliver);
  ~WindowMaker();
  WindowMaker(const WindowMaker&) = delete;
  WindowMaker& operator=(const WindowMaker&) = delete;

  // Starts the threads unless they run. Throws DeviceError when the system refuses one.
  void start();
  // Ends the threads when their current calls have returned. No answer comes later.
  void stop();

  // A sample with a constraint has one question at a time. A sample with only a drafter may have
  // two after a preemption; then there is one thread, which answers them in order.
  void ask(WindowQuestion question);
  // Destroys a guide on one of the threads, since its destructor may wait for a lock, too.
  void drop(std::shared_ptr<WindowGuide> guide) noexcept;

 private:
  void loop();
  void answer(WindowQuestion& question) const;
  [[nodiscard]] GuidedWindow make(WindowQuestion& question) const;

  const WindowMakerOptions options_;
  const Deliver deliver_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<WindowQuestion> questions_;  // without an answer: its guide is dropped
  bool stops_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace paceline
