// SPDX-License-Identifier: Apache-2.0
#pragma once

// What an op of the CPU backend runs on. Every op call goes through `run`, which executes the op,
// or records it while a Program is captured. Ops do not know which. Not thread-safe: one context
// belongs to one device thread.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "device/program.h"
#include "device/thread_pool.h"

namespace paceline {

struct CpuContext {
  int num_threads = 1;            // an op splits its work into at least this many parts
  ThreadPool* threads = nullptr;  // runs the parts; null: the caller runs them in turn
  Program* capturing = nullptr;   // not null while a program is being recorded

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

  // Calls body(begin, end) on contiguous pieces that cover [0, count), with `pieces_per_thread`
  // pieces for each thread. More than one balances pieces that take unequal time.
  template <class Body>
  void for_ranges(int64_t count, int32_t pieces_per_thread, const Body& body) const {
    const int64_t wanted = int64_t{num_threads} * pieces_per_thread;
    const int64_t num_pieces =
        std::clamp<int64_t>(count, 0, std::min(wanted, ThreadPool::kMaxParts));
    const auto piece = [&](int64_t i) {
      body(count * i / num_pieces, count * (i + 1) / num_pieces);
    };
    if (threads != nullptr) {
      threads->parallel_for(num_pieces, piece);
    } else {
      for (int64_t i = 0; i < num_pieces; ++i) piece(i);
    }
  }
};

}  // namespace paceline
