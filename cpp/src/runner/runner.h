// SPDX-License-Identifier: Apache-2.0
#pragma once

// The one virtual interface: the calls that the executor makes to a device, once per iteration.

#include <array>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <paceline/error.h>
#include <paceline/executor.h>

#include "batch/batch.h"
#include "device/device_memory.h"
#include "device/rank_group.h"
#include "graph/iteration.h"
#include "graph/iteration_ring.h"
#include "kv/kv_layout.h"
#include "wire/blocks.h"
#include "wire/sequence_result.h"

namespace paceline {

// How a runner drives its device.
struct RunnerOptions {
  IterationOptions iteration;
  DraftDriver driver = DraftDriver::kUnrolled;
  // The values of k' for which graphs are captured, ascending. Empty: 0 and k.
  std::vector<int32_t> draft_lengths;
  int32_t max_in_flight = 2;
  RankHandle ranks = {};  // where several runners compute an iteration together
  // Memory for the KV pool, at least as large as that of the layout; null: the runner allocates it.
  std::shared_ptr<const DeviceBuffer> kv_pool = nullptr;
};

class Runner {
 public:
  virtual ~Runner() = default;

  // Points batch.inputs at the memory in which the batch of batch.iteration is built. The iteration
  // that used this memory last, `max_in_flight + 1` earlier, must have completed and been read.
  virtual void bind(Batch& batch) = 0;

  // Queues an iteration after those launched before it; returns at once. `batch` must stay
  // untouched until the iteration has completed. Iterations are numbered 0, 1, 2, ...
  virtual void launch(const Batch& batch) = 0;

  // Lets a device start this iteration and those before it, as `wait` does, without waiting. Only a
  // device that is late on purpose needs it.
  virtual void release(int64_t /*iteration*/) {}

  // Makes every `wait` throw `cause`, also one that is waiting, unless the iteration has completed.
  // Only for runners that compute an iteration together.
  virtual void abort(std::exception_ptr /*cause*/) {}

  // Why an iteration takes long, as the end of a sentence; empty: not known. For any thread.
  [[nodiscard]] virtual std::string delay_cause() const { return {}; }

  // Blocks until the iteration has completed; rethrows an error of the device.
  virtual void wait(int64_t iteration) = 0;

  // Newest completed iteration, -1 before the first. Does not block.
  [[nodiscard]] virtual int64_t completed() = 0;

  // Results of a completed iteration by batch row; valid until `max_in_flight` later ones have been
  // launched.
  [[nodiscard]] virtual std::span<const SequenceResult> results(int64_t iteration) = 0;

  // Logprobs of a completed iteration, [max_logit_rows, 1 + max_logprobs] by row of logits; only
  // requested entries are written (see TokenLogprobsParams). Valid as long as the results; empty if
  // max_logprobs is 0.
  [[nodiscard]] virtual std::span<const TokenLogprob> logprobs(int64_t) { return {}; }

  // By batch row, the drafts that follow a completed iteration; only those of sequences with masks
  // are written. Valid as long as the results; empty if the device makes none.
  [[nodiscard]] virtual std::span<const ProposedDrafts> drafts(int64_t) { return {}; }

  // The time that a completed iteration took on the device, and the time for which the device was
  // idle between the previous iteration and this one.
  struct Timing {
    float us = 0;
    float idle_us = 0;
  };
  [[nodiscard]] virtual Timing timing(int64_t iteration) = 0;

  // What a completed iteration counted, by model: the target, the drafter. Zeros for models without
  // a mixture of experts.
  [[nodiscard]] virtual std::array<ExpertCounts, kNumModels> experts(int64_t) { return {}; }

  // Launches an iteration without prefill rows, times each of its kernels, and waits for it.
  [[nodiscard]] virtual std::vector<KernelTime> launch_traced(const Batch&) {
    throw Unsupported("this device does not time kernels");
  }

  // Overwrites a block with NaN; for tests.
  virtual void poison(GroupId group, BlockId block) = 0;

  // The memory of the KV pool of each rank, for a runner that takes this one's place; empty: it
  // cannot be handed on.
  using KvPools = std::vector<std::shared_ptr<const DeviceBuffer>>;
  [[nodiscard]] virtual KvPools shared_kv_pools() const { return {}; }

  // Bytes of buffers other than weights and the KV pool, by purpose, and bytes of captured graphs.
  [[nodiscard]] virtual std::map<std::string, int64_t, std::less<>> workspace_bytes() const = 0;
  [[nodiscard]] virtual int64_t graph_bytes() const { return 0; }
  // The sums of both, of each rank.
  struct RankBytes {
    int64_t workspace = 0;
    int64_t graphs = 0;
  };
  [[nodiscard]] virtual std::vector<RankBytes> rank_bytes() const {
    RankBytes own = {.graphs = graph_bytes()};
    for (const auto& [purpose, bytes] : workspace_bytes()) own.workspace += bytes;
    return {own};
  }
};

}  // namespace paceline
