// SPDX-License-Identifier: Apache-2.0
#pragma once

// Chooses how many prompt rows an iteration may have while sequences decode, since these wait for
// it: as many as make it about 2.75 times as long as one without prompts. Both times are
// measured. docs/architecture.md describes the rules.
//
// Host only; allocates nothing after construction. Not thread-safe.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline {

class ChunkChooser {
 public:
  // One iteration, as its results are read.
  struct Iteration {
    int32_t num_decoding = 0;     // sequences; not 0
    int32_t num_prompt_rows = 0;  // of the other sequences together
    double us = 0;
  };

  // What is chosen before there are times.
  static constexpr int32_t kFirstRows = 384;

  // `buckets`: numbers of sequences, ascending; the times of iterations are kept for each.
  // `fewest_rows`: of what is chosen, since fewer would waste time.
  ChunkChooser(std::vector<int32_t> buckets, int32_t fewest_rows);

  // The most prompt rows of an iteration in which this many sequences decode, which is not 0.
  [[nodiscard]] int32_t choose(int32_t num_decoding) const;
  void observe(const Iteration& iteration);

 private:
  [[nodiscard]] size_t bucket_of(int32_t num_seqs) const;
  // Time of an iteration without prompts; from the nearest bucket that is known, and 0 if none is.
  [[nodiscard]] double decode_us(int32_t num_seqs) const;

  std::vector<int32_t> buckets_;
  int32_t fewest_rows_;
  std::vector<double> decode_us_;  // by bucket; 0: not known
  double row_us_ = 0;              // that a prompt row adds; 0: not known
};

}  // namespace paceline
