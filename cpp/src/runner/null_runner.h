// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "base/aligned_buffer.h"
#include "runner/runner.h"

namespace paceline {

// A device without work: every emitting row yields token 0 at once, until its sequence reaches its
// limit. It serves to measure and test the host's work alone.
class NullRunner final : public Runner {
 public:
  NullRunner(int32_t max_num_seqs, const InputCapacity& capacity, int32_t max_in_flight);

  void bind(Batch& batch) override;
  void launch(const Batch& batch) override;
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
    AlignedBuffer memory;
    std::vector<SequenceResult> results;
    int32_t num_seqs = 0;
  };
  [[nodiscard]] RingEntry& entry(int64_t iteration) {
    return ring_[static_cast<size_t>(iteration) % ring_.size()];
  }

  InputCapacity capacity_;
  int64_t completed_ = -1;
  std::vector<RingEntry> ring_;
  std::vector<int32_t> known_len_;  // by sequence slot
  std::vector<int32_t> limit_;      // by sequence slot
};

}  // namespace paceline
