// SPDX-License-Identifier: Apache-2.0
#include "tuning/chunk_chooser.h"

#include <algorithm>
#include <utility>

namespace paceline {
namespace {

// An iteration with prompt rows may take this many times as long as one without.
constexpr double kMostTimes = 2.75;
// How much the newest time counts in a mean.
constexpr double kNewest = 0.3;
// The time of a row is at most multiplied or divided by this at once.
constexpr double kLargestStep = 2;

double mean(double old, double newest) {
  return old == 0 ? newest : old + kNewest * (newest - old);
}

}  // namespace

ChunkChooser::ChunkChooser(std::vector<int32_t> buckets, int32_t fewest_rows)
    : buckets_(std::move(buckets)), fewest_rows_(fewest_rows), decode_us_(buckets_.size()) {}

size_t ChunkChooser::bucket_of(int32_t num_seqs) const {
  const auto found = std::lower_bound(buckets_.begin(), buckets_.end(), num_seqs);
  return std::min(static_cast<size_t>(found - buckets_.begin()), buckets_.size() - 1);
}

double ChunkChooser::decode_us(int32_t num_seqs) const {
  const size_t bucket = bucket_of(num_seqs);
  for (size_t distance = 0; distance < buckets_.size(); ++distance) {
    if (distance <= bucket && decode_us_[bucket - distance] > 0) {
      return decode_us_[bucket - distance];
    }
    if (bucket + distance < buckets_.size() && decode_us_[bucket + distance] > 0) {
      return decode_us_[bucket + distance];
    }
  }
  return 0;
}

int32_t ChunkChooser::choose(int32_t num_decoding) const {
  const double us = decode_us(num_decoding);
  if (us == 0 || row_us_ == 0) return kFirstRows;
  const double rows = (kMostTimes - 1) * us / row_us_;
  return static_cast<int32_t>(std::clamp<double>(rows, fewest_rows_, INT32_MAX));
}

void ChunkChooser::observe(const Iteration& iteration) {
  if (iteration.us <= 0) return;
  if (iteration.num_prompt_rows == 0) {
    double& us = decode_us_[bucket_of(iteration.num_decoding)];
    us = mean(us, iteration.us);
    return;
  }
  const double us = decode_us(iteration.num_decoding);
  if (us == 0) return;
  // The first rows cost less than later ones, since the weights are read in any case: few rows say
  // nothing about many, unless they took too long.
  const bool is_short = iteration.num_prompt_rows < choose(iteration.num_decoding) / 2;
  if (is_short && iteration.us < kMostTimes * us) return;
  double row_us = std::max(iteration.us - us, 0.0) / iteration.num_prompt_rows;
  if (row_us_ > 0) row_us = std::clamp(row_us, row_us_ / kLargestStep, row_us_ * kLargestStep);
  row_us_ = mean(row_us_, row_us);
}

}  // namespace paceline
