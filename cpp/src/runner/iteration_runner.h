// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs iterations on one backend. It decides which graphs are captured, which graph an iteration
// launches, and what runs op by op. A pure decode iteration is one launch of the graph that was
// captured for its bucket of sequences. An iteration with prefill rows makes the same op calls on
// the same buffers one by one and then launches the captured draft steps. The backends differ only
// in their context and graph types. The Runner decides on which thread this runs and who waits for
// it.

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "batch/batch.h"
#include "device/counting_memory.h"
#include "device/device_arena.h"
#include "device/device_memory.h"
#include "graph/iteration.h"
#include "graph/iteration_ring.h"
#include "runner/runner.h"

namespace paceline {

// Numbers of sequences that batches are rounded up to, ascending; the last is max_seqs. Graphs of
// GPUs are captured for these, and times of iterations are kept by them.
[[nodiscard]] std::vector<int32_t> decode_buckets(int32_t max_seqs);

// The numbers of rows of this batch, which are the bounds of an eager iteration.
[[nodiscard]] IterationExtent extent_of(const Batch& batch);

template <class Ctx, class Graph>
class IterationRunner {
 public:
  // Allocates all buffers, and the KV pool unless the options have its memory. `draft` may be null.
  // References must outlive the object.
  IterationRunner(Ctx& ctx, DeviceMemory& memory, DeviceArena& arena,
                  std::shared_ptr<const Model> target, std::shared_ptr<const Model> draft,
                  const KvLayout& layout, const RunnerOptions& options, DType activation_dtype);

  // Captures the graphs of decode iterations for each number of sequences in `buckets`, which are
  // ascending, and each k' of the options. An iteration uses the smallest bucket that is large
  // enough. Does nothing for the eager driver.
  void capture(std::span<const int32_t> buckets,
               const std::function<void(int32_t done, int32_t total)>& on_capture);

  void bind(Batch& batch) const;
  void run(const Batch& batch);
  // Enqueues all ops of a decode iteration, with its draft steps unrolled.
  void enqueue_decode(const IterationExtent& extent);

  // For completed iterations; see Runner.
  [[nodiscard]] std::span<const SequenceResult> results(int64_t iteration) const;
  [[nodiscard]] std::span<const TokenLogprob> logprobs(int64_t iteration) const;
  [[nodiscard]] std::span<const ProposedDrafts> drafts(int64_t iteration) const;
  [[nodiscard]] Runner::Timing timing(int64_t iteration) const;
  [[nodiscard]] std::array<ExpertCounts, kNumModels> experts(int64_t iteration) const;

  [[nodiscard]] const IterationOptions& options() const { return options_.iteration; }
  [[nodiscard]] std::span<const int32_t> draft_lengths() const { return options_.draft_lengths; }
  [[nodiscard]] const IterationRing& ring() const { return ring_; }
  [[nodiscard]] const IterationBuffers& buffers() const { return buffers_; }
  [[nodiscard]] const Iteration& iteration() const { return iteration_; }
  [[nodiscard]] const Decoder& target() const { return target_; }
  [[nodiscard]] const Speculator& speculator() const { return speculator_; }
  [[nodiscard]] const DeviceBuffer& kv_pool() const { return *pool_; }
  [[nodiscard]] const std::shared_ptr<const DeviceBuffer>& shared_kv_pool() const { return pool_; }
  [[nodiscard]] std::span<std::byte> kv_block(GroupId group, BlockId block) const;
  // Every captured graph, for tests that plant faults.
  [[nodiscard]] std::vector<Graph*> graphs();

 private:
  struct Graphs {
    // begin, verify and first draft pass; also the draft steps and end, unless steps are replayed
    Graph decode;
    Graph draft_steps;  // all draft steps, or the one step that is replayed
  };
  // The graphs of a bucket of sequences and a k'.
  struct Variant {
    Graphs plain;  // for batches without logit work; see IterationExtent
    Graphs full;   // for all others
  };
  struct Bucket {
    int32_t num_seqs = 0;
    std::vector<Variant> variants;  // by index in draft_lengths
    Variant keeping;                // k' = 0 where hidden states are kept; see Batch
  };

  [[nodiscard]] Graphs capture_graphs(const IterationExtent& extent);
  // The graphs for this number of sequences, and the batch's k' and logit work.
  [[nodiscard]] const Graphs& graphs_of(int32_t num_seqs, const Batch& batch) const;
  [[nodiscard]] ExpertCounters expert_counters() const;
  void begin();
  void end(bool has_logit_work);
  void run_eagerly(const Batch& batch);
  void run_draft_steps(int32_t num_drafting, const Batch& batch, const IterationExtent& extent);
  void copy_scores(const Batch& batch);

  Ctx& ctx_;
  const KvLayout& layout_;
  RunnerOptions options_;
  std::shared_ptr<const DeviceBuffer> pool_;
  IterationBuffers buffers_;
  Decoder target_;
  Speculator speculator_;
  Iteration iteration_;
  IterationRing ring_;
  std::vector<Bucket> buckets_;
};

// The bytes that an IterationRunner allocates on the device beside the KV pool. Touches no device.
template <class Ctx, class Graph>
[[nodiscard]] int64_t count_workspace(std::shared_ptr<const Model> target,
                                      std::shared_ptr<const Model> draft, const KvLayout& layout,
                                      const RunnerOptions& options, DType activation_dtype) {
  Ctx unused{};
  CountingMemory memory;
  DeviceArena arena(memory);
  const IterationRunner<Ctx, Graph> runner(unused, memory, arena, std::move(target),
                                           std::move(draft), layout, options, activation_dtype);
  return memory.bytes() - layout.pool_bytes;
}

}  // namespace paceline
