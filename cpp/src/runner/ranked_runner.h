// SPDX-License-Identifier: Apache-2.0
#pragma once

// Several runners that compute every iteration together, each with a part of the target
// (docs/tensor-parallel.md). All get the same batches and draw the same tokens; what is read comes
// from rank 0. To the engine they are one runner.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "device/rank_group.h"
#include "runner/runner.h"

namespace paceline {

class RankedRunner final : public Runner {
 public:
  // Makes the runner of one rank, which gets the handle as RunnerOptions::ranks.
  using MakeRank = std::function<std::unique_ptr<Runner>(const RankHandle&)>;

  // Makes one runner for each rank of `group`, and uses the group alone. max_in_flight: the number
  // of iterations that each of these runners takes at once. has_threads: each runner is made and
  // launched on a thread of its own, because its launch() waits for its device where that waits for
  // another rank.
  RankedRunner(std::unique_ptr<RankGroup> group, int32_t max_in_flight, const MakeRank& make_rank,
               bool has_threads = false);
  // Ends the iterations in flight.
  ~RankedRunner() override;
  RankedRunner(const RankedRunner&) = delete;
  RankedRunner& operator=(const RankedRunner&) = delete;

  void bind(Batch& batch) override { first().bind(batch); }
  void launch(const Batch& batch) override;
  // Times the kernels of all ranks; returns those of rank 0.
  [[nodiscard]] std::vector<KernelTime> launch_traced(const Batch& batch) override;
  void release(int64_t iteration) override;
  void abort(std::exception_ptr cause) override;
  [[nodiscard]] std::string delay_cause() const override;
  // Throws DeviceError with the rank and the cause if a rank has failed, and InternalError if the
  // ranks have not drawn the same tokens.
  void wait(int64_t iteration) override;
  [[nodiscard]] int64_t completed() override;
  [[nodiscard]] std::span<const SequenceResult> results(int64_t iteration) override {
    return first().results(iteration);
  }
  [[nodiscard]] std::span<const TokenLogprob> logprobs(int64_t iteration) override {
    return first().logprobs(iteration);
  }
  [[nodiscard]] std::span<const ProposedDrafts> drafts(int64_t iteration) override {
    return first().drafts(iteration);
  }
  [[nodiscard]] Timing timing(int64_t iteration) override { return first().timing(iteration); }
  [[nodiscard]] std::array<ExpertCounts, kNumModels> experts(int64_t iteration) override {
    return first().experts(iteration);
  }
  void poison(GroupId group, BlockId block) override;
  // Of all ranks together.
  [[nodiscard]] std::map<std::string, int64_t, std::less<>> workspace_bytes() const override;
  [[nodiscard]] int64_t graph_bytes() const override;
  [[nodiscard]] std::vector<RankBytes> rank_bytes() const override;
  [[nodiscard]] KvPools shared_kv_pools() const override;

 private:
  // Launches the iterations of a rank, in order, on a thread.
  class Launcher;

  [[nodiscard]] Runner& first() { return *runners_.front(); }
  // Calls launch_rank(rank, its copy of the batch) for every rank, the first one last.
  template <class LaunchRank>
  void launch_ranks(const Batch& batch, const LaunchRank& launch_rank);
  // Waits until what was launched has reached the devices. Throws DeviceError if a rank has failed.
  void drain();
  void check_results(int64_t iteration);

  std::unique_ptr<RankGroup> group_;
  std::vector<std::vector<Batch>> batches_;           // by rank - 1 and iteration, modulo its size
  std::vector<std::unique_ptr<Runner>> runners_;      // by rank; their threads use the rest
  std::vector<std::unique_ptr<Launcher>> launchers_;  // by rank, or empty; last: they use runners
};

}  // namespace paceline
