// SPDX-License-Identifier: Apache-2.0
#pragma once

// The world as an op sees it on the CPU backend, and the one door every op call goes through.
// `run` executes the op, or records it when a Program is being captured; ops never know which.
// Not thread-safe: one context belongs to one device thread.

#include <type_traits>

#include "graph/program.h"

namespace paceline {

struct CpuContext {
  int num_threads = 1;           // of the parallel regions of an op
  Program* capturing = nullptr;  // not null while a program is being recorded

  template <class Params>
  void run(void (*op)(CpuContext&, const Params&), const Params& params) {
    static_assert(std::is_trivially_copyable_v<Params>,
                  "params are recorded by copy: pointers and constants only");
    if (capturing != nullptr) {
      capturing->record(op, params);
    } else {
      op(*this, params);
    }
  }
};

}  // namespace paceline
