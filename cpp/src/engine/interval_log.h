// SPDX-License-Identifier: Apache-2.0
#pragma once

// The line of figures that an engine logs after each interval of work.

#include <cstdint>
#include <string>
#include <vector>

#include "engine/statistics.h"
#include "tuning/draft_chooser.h"

namespace paceline {

// With `adaptive`, the choice of the number of drafts and what it follows from.
struct DraftChoice {
  int32_t num_drafts = 0;
  std::vector<DraftChooser::Estimate> estimates;
};

// Measures the time for which the engine has worked since the last line. Not thread-safe.
class IntervalLog {
 public:
  // interval_s: 0 is no line.
  explicit IntervalLog(double interval_s) : interval_us_(static_cast<int64_t>(interval_s * 1e6)) {}

  // The engine has waited for requests until now.
  void resume(int64_t now_us) { last_us_ = now_us; }
  // The engine has worked until now. Returns whether a line is due.
  [[nodiscard]] bool advance(int64_t now_us) {
    worked_us_ += now_us - last_us_;
    last_us_ = now_us;
    return interval_us_ > 0 && worked_us_ >= interval_us_;
  }
  // The line of the interval that ends with these counts. kv_usage: the share of the pool in use.
  [[nodiscard]] std::string line(const EngineCounts& counts, int32_t num_running,
                                 int32_t num_waiting, double kv_usage, int32_t num_draft_tokens,
                                 const DraftChoice& choice = {}) const;
  // Begins the next interval.
  void restart(const EngineCounts& counts);

 private:
  int64_t interval_us_;
  int64_t last_us_ = 0;
  int64_t worked_us_ = 0;
  EngineCounts at_last_line_;
};

}  // namespace paceline
