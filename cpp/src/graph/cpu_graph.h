// SPDX-License-Identifier: Apache-2.0
#pragma once

// Captured graphs of the CPU backend, with the interface of CudaGraph (cuda/graph/cuda_graph.h).

#include <cstdint>
#include <functional>

#include "device/program.h"

namespace paceline {

class CpuGraph {
 public:
  using Enqueue = std::function<void()>;

  // Records all op calls that `enqueue` makes on the context, without executing them.
  [[nodiscard]] static CpuGraph capture(CpuContext& ctx, const Enqueue& enqueue);

  // Records a graph that runs `before`, then repeats `body` while *keep_going ([1]) is not 0, read
  // before every round, then runs `after`.
  [[nodiscard]] static CpuGraph capture_while(CpuContext& ctx, const Enqueue& before,
                                              const Enqueue& body, const Enqueue& after,
                                              const int32_t* keep_going);

  void launch(CpuContext& ctx) const;

  // The recorded calls, for tests that inspect them or plant faults.
  [[nodiscard]] std::vector<Program*> programs() { return {&before_, &body_, &after_}; }

 private:
  Program before_;
  Program body_;
  Program after_;
  const int32_t* keep_going_ = nullptr;  // null: there is no body
};

}  // namespace paceline
