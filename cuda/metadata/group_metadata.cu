// SPDX-License-Identifier: Apache-2.0

// The division of metadata/metadata_rows.h, shared with the CPU, among threads. A row depends only
// on its own entries and its sequence's block table, so rows are invariant.

#include <algorithm>

#include "common/launch.cuh"
#include "metadata/group_metadata.h"
#include "metadata/metadata_rows.h"
#include "metadata/pass_rows.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kThreads = 128;
constexpr int32_t kMaxStepThreads = 1024;
constexpr int32_t kNotMade = -2;  // the row is left as it is

unsigned num_blocks(int64_t num_threads) {
  return static_cast<unsigned>((num_threads + kThreads - 1) / kThreads);
}

__device__ __forceinline__ int64_t thread_index() {
  return int64_t{blockIdx.x} * kThreads + threadIdx.x;
}

// The sequence slot of `row`, -1 for an inert row, or kNotMade. Loads all inputs at once, within
// the bounds of the arrays.
__device__ __forceinline__ int32_t row_to_build(const PassRows& rows, int32_t padded_rows,
                                                int32_t row, int32_t& position) {
  const int32_t num_rows = *rows.num_rows;
  int32_t seq_slot = -1;
  position = 0;
  if (row < rows.capacity) {
    seq_slot = rows.seq_slot[row];
    position = rows.positions[row];
  }
  if (row < min(num_rows, rows.capacity)) return seq_slot;
  return row < padded_rows ? -1 : kNotMade;
}

template <class Params>
__global__ void __launch_bounds__(kThreads) build_kernel(const __grid_constant__ Params p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(thread_index());
  int32_t position;
  const int32_t seq_slot = row_to_build(p.rows, p.padded_rows, row, position);
  if (seq_slot != kNotMade) build_row(p.rows, p.metadata, row, seq_slot, position);
}

// One block, since every thread reads the step before one writes it.
__global__ void __launch_bounds__(kMaxStepThreads)
    advance_draft_step_kernel(const __grid_constant__ AdvanceParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t step = *p.current_draft_step;
  const int32_t num_rows = min(*p.rows.num_rows, p.rows.capacity);
  const bool was_last = step + 1 >= p.sequences.num_draft_tokens;
  bool is_live = false;
  if (!was_last) {
    for (int32_t row = static_cast<int32_t>(threadIdx.x); row < num_rows;
         row += static_cast<int32_t>(blockDim.x)) {
      is_live |= advance_row(p, row, step);
    }
  }
  const bool is_any_live = __syncthreads_or(is_live) != 0;
  if (threadIdx.x != 0) return;
  if (!was_last) *p.current_draft_step = step + 1;
  set_keep_drafting(p.stop, is_any_live);
}

template <class Params>
void launch_build(CudaContext& ctx, const char* name, const Params& p) {
  const int32_t num_rows = std::max(p.rows.capacity, p.padded_rows);
  launch(ctx, name, build_kernel<Params>, dim3(num_blocks(num_rows)), dim3(kThreads), 0, p);
}

}  // namespace
}  // namespace cuda

void build_full(CudaContext& ctx, const BuildFullParams& p) {
  cuda::launch_build(ctx, "build_full", p);
}

void build_sliding(CudaContext& ctx, const BuildSlidingParams& p) {
  cuda::launch_build(ctx, "build_sliding", p);
}

void build_compressed(CudaContext& ctx, const BuildCompressedParams& p) {
  cuda::launch_build(ctx, "build_compressed", p);
}

void advance_draft_step(CudaContext& ctx, const AdvanceParams& p) {
  const int32_t num_threads =
      std::clamp((p.rows.capacity + 31) / 32 * 32, 32, cuda::kMaxStepThreads);
  cuda::launch(ctx, "advance_draft_step", cuda::advance_draft_step_kernel, dim3(1),
               dim3(static_cast<unsigned>(num_threads)), 0, p);
}

}  // namespace paceline
