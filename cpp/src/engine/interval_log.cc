// SPDX-License-Identifier: Apache-2.0
#include "engine/interval_log.h"

#include <algorithm>
#include <iomanip>
#include <numeric>
#include <sstream>

namespace paceline {
namespace {

double ratio(int64_t a, int64_t b) {
  return b == 0 ? 0 : static_cast<double>(a) / static_cast<double>(b);
}

}  // namespace

std::string IntervalLog::line(const EngineCounts& counts, int32_t num_running, int32_t num_waiting,
                              double kv_usage, int32_t num_draft_tokens,
                              const DraftChoice& choice) const {
  const EngineCounts all = counts.since(at_last_line_);
  const double seconds = std::max(static_cast<double>(worked_us_) * 1e-6, 1e-6);
  const auto rate = [&](int64_t count) { return static_cast<double>(count) / seconds; };
  std::ostringstream out;
  out << std::fixed << std::setprecision(1);
  out << "Running: " << num_running << " samples, waiting: " << num_waiting
      << " samples, prompt throughput: " << rate(all.prompt_tokens)
      << " tokens/s, generation throughput: " << rate(all.emitted_tokens)
      << " tokens/s, KV cache usage: " << 100 * kv_usage << "%, preemptions: " << all.preemptions;
  if (!choice.estimates.empty()) {
    // What is chosen, for how much of the time, and why.
    const double us = static_cast<double>(std::max<int64_t>(
        std::accumulate(all.us_per_length.begin(), all.us_per_length.end(), int64_t{0}), 1));
    out << ". Drafts: " << choice.num_drafts << " now";
    for (const DraftChooser::Estimate& of : choice.estimates) {
      const auto i = static_cast<size_t>(of.num_drafts);
      out << (of.num_drafts == 0 ? " (" : "; ") << of.num_drafts << ": "
          << 100 * static_cast<double>(all.us_per_length[i]) / us << "% of the time, "
          << std::setprecision(2) << of.tokens << " tokens in ";
      if (of.us > 0) {
        out << of.us * 1e-3 << " ms";
      } else {
        out << "unknown time";
      }
      out << std::setprecision(1);
    }
    out << ")";
  }
  if (all.verify_windows == 0) return out.str();
  out << ". Speculative decoding: mean acceptance length: " << std::setprecision(2)
      << 1 + ratio(all.accepted_tokens, all.verify_windows) << std::setprecision(1)
      << ", draft acceptance rate: " << 100 * ratio(all.accepted_tokens, all.draft_tokens)
      << "%, accepted: " << rate(all.accepted_tokens)
      << " tokens/s, drafted: " << rate(all.draft_tokens)
      << " tokens/s, acceptance per position: " << std::setprecision(3);
  for (int32_t i = 0; i < num_draft_tokens; ++i) {
    out << (i > 0 ? ", " : "") << ratio(all.accepted_per_position[i], all.drafted_per_position[i]);
  }
  return out.str();
}

void IntervalLog::restart(const EngineCounts& counts) {
  at_last_line_ = counts;
  worked_us_ = 0;
}

}  // namespace paceline
