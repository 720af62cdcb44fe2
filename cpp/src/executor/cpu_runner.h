// SPDX-License-Identifier: Apache-2.0
#pragma once

// The CPU backend as an asynchronous device: its own thread takes launched iterations in order,
// uploads their inputs and runs them, by captured programs where it can.

#include <array>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "batch/iteration_inputs.h"
#include "device/cpu_context.h"
#include "device/program.h"
#include "executor/runner.h"
#include "graph/iteration.h"
#include "wire/blocks.h"
#include "wire/sequence_result.h"

namespace paceline {

struct CpuRunnerOptions {
  IterationOptions iteration;
  DraftDriver driver = DraftDriver::kUnrolled;
  int32_t num_threads = 1;
  int32_t max_in_flight = 2;
  // Iteration i starts only when i + lateness has been launched, or somebody waits for i.
  int32_t lateness = 0;
  bool poison_pool = false;  // fill the KV pool with NaN at start
};

class CpuRunner final : public Runner {
 public:
  // `draft` may be null. The layout must outlive the runner.
  CpuRunner(std::shared_ptr<const Model> target, std::shared_ptr<const Model> draft,
            const KvLayout& layout, const CpuRunnerOptions& options);
  ~CpuRunner() override;
  CpuRunner(const CpuRunner&) = delete;
  CpuRunner& operator=(const CpuRunner&) = delete;

  void launch(const IterationInputs& inputs) override;
  void wait(int64_t iteration) override;
  [[nodiscard]] int64_t completed() override;
  [[nodiscard]] std::span<const SequenceResult> results(int64_t iteration) override;
  [[nodiscard]] std::span<const TokenLogprob> logprobs(int64_t iteration) override;
  [[nodiscard]] Timing timing(int64_t iteration) override;
  void poison(GroupId group, BlockId block) override;
  [[nodiscard]] std::map<std::string, int64_t, std::less<>> workspace_bytes() const override {
    return arena_.bytes_by_purpose();
  }

  // For tests, which read device memory and plant faults in recorded calls. Only while idle.
  [[nodiscard]] const IterationBuffers& buffers() const { return buffers_; }
  [[nodiscard]] const Iteration& iteration() const { return *iteration_; }
  [[nodiscard]] const IterationExtent& extent() const { return extent_; }
  [[nodiscard]] CpuContext& context() { return context_; }
  [[nodiscard]] Program& decode_program() { return decode_program_; }
  [[nodiscard]] Program& draft_step_program() { return draft_step_program_; }
  [[nodiscard]] std::byte* kv_pool() const { return pool_.data(); }
  // Everything one launch does, on the calling thread.
  void run_now(const IterationInputs& inputs);

 private:
  struct RingEntry {
    const IterationInputs* inputs = nullptr;
    std::vector<SequenceResult> results;
    std::vector<TokenLogprob> logprobs;  // [max_logit_rows, 1 + max_logprobs] by row of logits
    Timing timing;
  };

  void capture();
  void upload(const IterationInputs& inputs);
  void execute(const IterationInputs& inputs);
  // Of the entries of all rows: those of sequences that asked for none are whatever was there.
  void copy_logprobs(const IterationInputs& inputs, std::vector<TokenLogprob>& to) const;
  void copy_scores(const IterationInputs& inputs) const;
  void run_draft_step();
  void run_draft_steps();
  void device_loop();
  [[nodiscard]] RingEntry& ring_entry(int64_t iteration) {
    return ring_[static_cast<size_t>(iteration) % ring_.size()];
  }

  const KvLayout& layout_;
  CpuRunnerOptions options_;
  IterationExtent extent_;  // the CPU's loops end at the device's counts: bounds are the largest
  ThreadPool threads_;
  CpuContext context_;
  DeviceArena arena_;
  AlignedBuffer pool_;
  std::unique_ptr<Decoder> target_;
  Speculator speculator_;
  IterationBuffers buffers_;
  std::unique_ptr<Iteration> iteration_;

  Program draft_step_program_;  // S: one draft step
  Program decode_program_;      // a pure-decode iteration; with its draft steps when unrolled

  std::mutex mutex_;
  std::condition_variable wake_device_;
  std::condition_variable wake_host_;
  std::vector<RingEntry> ring_;
  int64_t launched_ = -1;
  int64_t completed_ = -1;
  int64_t awaited_ = -1;  // newest iteration that somebody waits for
  bool stops_ = false;
  std::exception_ptr failure_;
  std::thread thread_;  // last: everything above must exist before it starts
};

}  // namespace paceline
