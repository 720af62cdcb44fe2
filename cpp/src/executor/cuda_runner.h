// SPDX-License-Identifier: Apache-2.0
#pragma once

// The CUDA backend behind the executor's seam. A pure-decode iteration is one launch of a graph
// captured at start for its bucket of sequences; one with prefill rows enqueues the same ops one by
// one on the same buffers. Neither copies, allocates or waits: inputs and results travel through
// pinned memory (cuda/ring/iteration_ring.h).

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "batch/iteration_inputs.h"
#include "device/cuda_context.h"
#include "device/device_arena.h"
#include "executor/runner.h"
#include "gemm/gemm_planner.h"
#include "graph/cuda_graph.h"
#include "graph/iteration.h"
#include "ring/iteration_ring.h"
#include "wire/blocks.h"
#include "wire/sequence_result.h"

namespace paceline {

struct CudaRunnerOptions {
  IterationOptions iteration;
  DraftDriver driver = DraftDriver::kUnrolled;
  int32_t max_in_flight = 2;
  bool poison_pool = false;  // fill the KV pool with NaN at start
  // Called as graphs are captured; may be null.
  std::function<void(int32_t done, int32_t total)> on_capture;
};

// Numbers of sequences that graphs are captured for: an iteration uses the next one up.
[[nodiscard]] std::vector<int32_t> decode_buckets(int32_t max_seqs);

class CudaRunner final : public Runner {
 public:
  // `draft` may be null. The layout must outlive the runner. Throws Unsupported (shapes, dtypes),
  // OutOfMemory, DeviceError.
  CudaRunner(std::shared_ptr<const Model> target, std::shared_ptr<const Model> draft,
             const KvLayout& layout, const CudaRunnerOptions& options);
  CudaRunner(const CudaRunner&) = delete;
  CudaRunner& operator=(const CudaRunner&) = delete;

  void launch(const IterationInputs& inputs) override;
  [[nodiscard]] std::vector<KernelTime> launch_traced(const IterationInputs& inputs) override;
  void wait(int64_t iteration) override;
  [[nodiscard]] int64_t completed() override;
  [[nodiscard]] std::span<const SequenceResult> results(int64_t iteration) override;
  [[nodiscard]] std::span<const TokenLogprob> logprobs(int64_t iteration) override;
  [[nodiscard]] Timing timing(int64_t iteration) override;
  void poison(GroupId group, BlockId block) override;
  [[nodiscard]] std::map<std::string, int64_t, std::less<>> workspace_bytes() const override {
    return arena_.bytes_by_purpose();
  }
  [[nodiscard]] int64_t graph_bytes() const override { return graph_bytes_; }

  // For tests and traces. Only while idle.
  [[nodiscard]] const IterationBuffers& buffers() const { return buffers_; }
  [[nodiscard]] const Iteration& iteration() const { return *iteration_; }
  [[nodiscard]] CudaContext& context() { return context_; }
  [[nodiscard]] std::byte* kv_pool() const { return pool_.data(); }
  void synchronize();

 private:
  struct Programs {
    CudaGraph decode;       // begin, verify, first draft pass; and the rest, unless replayed
    CudaGraph draft_steps;  // what follows the first draft pass: all steps, or one to be replayed
  };
  struct Bucket {
    int32_t num_seqs = 0;
    Programs plain;  // for batches without logit work; see IterationExtent
    Programs full;   // for all others

    [[nodiscard]] const Programs& programs(bool has_logit_work) const {
      return has_logit_work ? full : plain;
    }
  };

  void plan_products();
  void warm_up();
  void capture();
  [[nodiscard]] Programs capture_programs(const IterationExtent& extent);
  [[nodiscard]] const Bucket& bucket_of(int32_t num_seqs) const;
  void enqueue_begin();
  void enqueue_end();
  void run_draft_steps(const IterationExtent& extent);
  void begin_launch(const IterationInputs& inputs);
  void run_eagerly(const IterationInputs& inputs);
  void copy_scores(const IterationInputs& inputs);

  const KvLayout& layout_;
  CudaRunnerOptions options_;
  DeviceArena arena_;
  DeviceBuffer pool_;
  CudaContext context_;
  std::unique_ptr<GemmPlanner> planner_;
  std::shared_ptr<const Model> target_model_;
  std::shared_ptr<const Model> draft_model_;
  std::unique_ptr<Decoder> target_;
  Speculator speculator_;
  IterationBuffers buffers_;
  std::unique_ptr<Iteration> iteration_;
  std::unique_ptr<IterationRing> ring_;
  std::vector<Bucket> buckets_;
  int64_t graph_bytes_ = 0;

  std::vector<int32_t> num_seqs_;  // of the iterations in flight, by ring slot
  int64_t launched_ = -1;
  int64_t completed_ = -1;

  // Waits before it goes. Last, so that nothing that kernels in flight use is freed before, also
  // when the constructor throws.
  struct Stream {
    ~Stream();
    CUstream_st* handle = nullptr;
  };
  Stream stream_;
};

}  // namespace paceline
