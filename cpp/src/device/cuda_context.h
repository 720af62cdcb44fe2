// SPDX-License-Identifier: Apache-2.0
#pragma once

// The world as an op sees it on the CUDA backend. Ops enqueue kernels on `stream` and return at
// once; when the stream is being captured, the same calls build a graph. Free of CUDA headers, so
// that the rooms which only sequence ops need none. Not thread-safe: one context belongs to one
// engine thread.

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace paceline {

class GemmPlanner;  // cuda/gemm: tensor maps, library algorithms
class KernelTrace;  // cuda/common

struct CudaContext {
  CUstream_st* stream = nullptr;
  int32_t num_sms = 0;
  GemmPlanner* gemm = nullptr;
  KernelTrace* trace = nullptr;  // not null while kernels are timed one by one

  // Scratch of the op that runs; kernels of one stream use it one after the other. 256 B aligned.
  std::byte* workspace = nullptr;
  int64_t workspace_bytes = 0;
  // [num_counters] int32, zero between kernels: whoever counts one up puts it back to zero.
  int32_t* counters = nullptr;
  int32_t num_counters = 0;

  // Host-side bounds on the rows of each sequence are in the params; this one is on keys: no row of
  // a pass sees more than max_model_len.
  int32_t max_model_len = 0;

  template <class Params>
  void run(void (*op)(CudaContext&, const Params&), const Params& params) {
    op(*this, params);
  }
};

}  // namespace paceline
