// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "batch/iteration_inputs.h"
#include "executor/runner.h"
#include "wire/blocks.h"
#include "wire/sequence_result.h"

namespace paceline {

// A device that does nothing: every emitting row brings token 0 at once, up to its limit. What
// remains of an iteration is the host's work, which this exists to measure and to test.
class NullRunner final : public Runner {
 public:
  NullRunner(int32_t max_num_seqs, int32_t max_in_flight);

  void launch(const IterationInputs& inputs) override;
  void wait(int64_t) override {}
  [[nodiscard]] int64_t completed() override { return completed_; }
  [[nodiscard]] std::span<const SequenceResult> results(int64_t iteration) override;
  [[nodiscard]] Timing timing(int64_t) override { return {}; }
  void poison(GroupId, BlockId) override {}
  [[nodiscard]] std::map<std::string, int64_t, std::less<>> workspace_bytes() const override {
    return {};
  }

 private:
  struct RingEntry {
    std::vector<SequenceResult> results;
    int32_t num_seqs = 0;
  };

  int64_t completed_ = -1;
  std::vector<RingEntry> ring_;
  std::vector<int32_t> known_len_;  // by slot
  std::vector<int32_t> limit_;      // by slot
};

}  // namespace paceline
