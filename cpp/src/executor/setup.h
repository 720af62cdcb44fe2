// SPDX-License-Identifier: Apache-2.0
#pragma once

// Makes the parts of an executor from its options, which must have been checked.

#include <cstdint>
#include <memory>
#include <vector>

#include <paceline/executor.h>

#include "engine/engine.h"
#include "kv/kv_layout.h"
#include "runner/runner.h"

namespace paceline {

// `draft` may be null in all functions. Throws Unsupported for more than kMaxKvGroups KV
// groups. least_slab_bytes: see plan_kv_layout.
[[nodiscard]] KvLayout plan_layout(const ExecutorOptions& options, const Model& target,
                                   const Model* draft, int64_t least_slab_bytes = 0);

[[nodiscard]] EngineOptions engine_options(const ExecutorOptions& options, const Model& target,
                                           const Model* draft);

// The bytes of the workspace that a runner of these models would allocate, without captured graphs.
[[nodiscard]] int64_t workspace_bytes(const ExecutorOptions& options, const Model& target,
                                      const Model* draft);

// A model for each rank. The whole model must outlive them.
using RankModels = std::vector<std::shared_ptr<const Model>>;
// The whole target, or the part that each of several ranks computes.
[[nodiscard]] RankModels rank_targets(const std::shared_ptr<const Model>& whole,
                                      const ExecutorOptions& options);
// The whole drafter for each rank, or the part that it computes
// (SpeculativeOptions::draft_tensor_parallel_size), or null.
[[nodiscard]] RankModels rank_drafts(const std::shared_ptr<const Model>& whole,
                                     const ExecutorOptions& options);

// Makes the runner of the models' device, or the null runner. `layout` is that of each rank, and
// must outlive the runner. kv_pools: of another runner, or empty; see RunnerOptions::kv_pool.
[[nodiscard]] std::unique_ptr<Runner> make_runner(const RankModels& targets,
                                                  const RankModels& drafts, const KvLayout& layout,
                                                  const ExecutorOptions& options,
                                                  const Executor::Progress& progress,
                                                  const Runner::KvPools& kv_pools);

}  // namespace paceline
