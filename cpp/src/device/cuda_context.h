// SPDX-License-Identifier: Apache-2.0
#pragma once

// What an op of the CUDA backend runs on. Ops enqueue kernels on `stream` and return at once; while
// the stream is captured, the same calls build a graph. The header includes no CUDA header, so
// rooms that only sequence ops need none. Not thread-safe: one context belongs to one engine
// thread.

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace paceline {

class GemmPlanner;  // cuda/gemm: tensor maps, library algorithms
class KernelTrace;  // cuda/common

struct CudaContext {
  CUstream_st* stream = nullptr;
  int32_t num_sms = 0;
  // Bytes of shared memory that a block may have, and that the blocks of a multiprocessor share.
  int32_t block_shared_bytes = 0;
  int32_t sm_shared_bytes = 0;
  // Whether a kernel may start before its predecessor has ended (cuda/common/launch.cuh): since
  // sm_90.
  bool has_early_starts = false;
  // Whether ops use their kernels for every GPU since sm_80, and not those of sm_90a.
  bool is_portable = false;
  // Whether kernels may have clusters of blocks and bulk copies. Without them one block does what a
  // cluster does, with the same bits.
  bool has_clusters = false;
  GemmPlanner* gemm = nullptr;
  KernelTrace* trace = nullptr;  // not null while kernels are timed one by one

  // Whether the next kernel starts on an idle machine, behind a product of the library. A
  // multiprocessor divides its memory between L1 and shared memory only when it is idle. So that
  // kernel takes the largest share, as the product behind it, which starts while it ends, could
  // not.
  bool starts_idle = false;

  // Scratch memory of the running op. Kernels of one stream use it one after another. 256 B
  // aligned.
  std::byte* workspace = nullptr;
  int64_t workspace_bytes = 0;
  // [num_counters] int32, zero between kernels: a kernel that increments a counter resets it.
  int32_t* counters = nullptr;
  int32_t num_counters = 0;

  // No row of a pass sees more keys than this. The params of each op have the other host-side
  // bounds, on the rows of each sequence.
  int32_t max_model_len = 0;

  template <class Params>
  void run(void (*op)(CudaContext&, const Params&), const Params& params) {
    op(*this, params);
  }
};

}  // namespace paceline
