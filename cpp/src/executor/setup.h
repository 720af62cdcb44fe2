// SPDX-License-Identifier: Apache-2.0
#pragma once

// The parts of an executor as its options describe them. The options have been checked.

#include <cstdint>
#include <memory>

#include <paceline/executor.h>

#include "executor/engine.h"
#include "executor/runner.h"
#include "kv/kv_layout.h"

namespace paceline {

// `draft` may be null in all of these. Throws Unsupported for more than kMaxKvGroups KV groups.
[[nodiscard]] KvLayout plan_layout(const ExecutorOptions& options, const Model& target,
                                   const Model* draft);

[[nodiscard]] EngineOptions engine_options(const ExecutorOptions& options, int32_t vocab_size,
                                           const Model* draft);

// The device of the models, or the null device. The layout must outlive the runner.
[[nodiscard]] std::unique_ptr<Runner> make_runner(const std::shared_ptr<const Model>& target,
                                                  const std::shared_ptr<const Model>& draft,
                                                  const KvLayout& layout,
                                                  const ExecutorOptions& options,
                                                  const Executor::Progress& progress);

}  // namespace paceline
