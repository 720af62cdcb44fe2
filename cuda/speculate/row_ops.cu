// SPDX-License-Identifier: Apache-2.0

// The division of speculate/sequence_rows.h, shared with the CPU, among threads. Sequences are
// independent of each other, so their rows are invariant.

#include <algorithm>

#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "speculate/row_ops.h"
#include "speculate/sequence_rows.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kMaxSequenceThreads = 512;  // of a block, which assembles one sequence
constexpr int32_t kStoreThreads = 128;
constexpr int32_t kMaxStepThreads = 1024;
constexpr int32_t kNgramThreads = 512;
constexpr int32_t kKeepThreads = 256;
constexpr int32_t kKeepBlocks = 8;  // of a sequence

int32_t whole_warps(int32_t count, int32_t most) {
  return std::clamp((count + 31) / 32 * 32, 32, most);
}

__global__ void __launch_bounds__(kMaxSequenceThreads)
    assemble_verify_rows_kernel(const __grid_constant__ AssembleVerifyRowsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t i = static_cast<int32_t>(blockIdx.x);
  if (i == 0 && threadIdx.x == 0) *p.rows.num_rows = p.inputs.counts->num_verify_rows;
  if (i >= p.inputs.counts->num_seqs) return;
  assemble_verify_sequence(p, i, static_cast<int32_t>(threadIdx.x),
                           static_cast<int32_t>(blockDim.x));
}

__global__ void __launch_bounds__(kMaxSequenceThreads)
    assemble_first_rows_kernel(const __grid_constant__ AssembleFirstRowsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t i = static_cast<int32_t>(blockIdx.x);
  if (i == 0 && threadIdx.x == 0) *p.rows.num_rows = p.inputs.counts->num_first_rows;
  if (i >= p.inputs.counts->num_seqs) return;
  assemble_first_sequence(p, i, static_cast<int32_t>(threadIdx.x),
                          static_cast<int32_t>(blockDim.x));
}

// One block, because it must know whether any sequence goes on.
__global__ void __launch_bounds__(kMaxStepThreads)
    begin_draft_steps_kernel(const __grid_constant__ BeginDraftStepsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t num_drafting = p.inputs.counts->num_drafting;
  bool is_live = false;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < num_drafting;
       i += static_cast<int32_t>(blockDim.x)) {
    is_live |= begin_draft_sequence(p, i);
  }
  const bool is_any_live = __syncthreads_or(is_live) != 0;
  if (threadIdx.x != 0) return;
  *p.rows.num_rows = num_drafting;
  *p.current_draft_step = 1;
  set_keep_drafting(p.stop, is_any_live && p.sequences.num_draft_tokens > 1);
}

__global__ void __launch_bounds__(kStoreThreads)
    assemble_block_rows_kernel(const __grid_constant__ AssembleBlockRowsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t i = static_cast<int32_t>(blockIdx.x * kStoreThreads + threadIdx.x);
  if (i == 0) {
    *p.rows.num_rows = p.inputs.counts->num_drafting * p.rows_per_seq;
    *p.num_predicting = p.num_drafts * p.num_seqs;
    p.row_indptr[0] = 0;
  }
  if (i < p.num_seqs) assemble_block_sequence(p, i);
}

__global__ void __launch_bounds__(kStoreThreads)
    store_block_drafts_kernel(const __grid_constant__ StoreBlockDraftsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t i = static_cast<int32_t>(blockIdx.x * kStoreThreads + threadIdx.x);
  if (i == 0) set_keep_drafting(p.stop, false);
  if (i < p.inputs.counts->num_drafting) store_block_sequence(p, i);
}

__global__ void __launch_bounds__(kStoreThreads)
    store_draft_kernel(const __grid_constant__ StoreDraftParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t i = static_cast<int32_t>(blockIdx.x * kStoreThreads + threadIdx.x);
  const int32_t column = *p.current_draft_step;
  if (i < min(*p.rows.num_rows, p.rows.capacity)) store_draft_sequence(p, i, column);
}

// One block per sequence. The best candidate is a maximum of distinct numbers, in any order.
__global__ void __launch_bounds__(kNgramThreads)
    propose_ngram_kernel(const __grid_constant__ ProposeNgramParams p) {
  __shared__ uint64_t winners[kNgramThreads / 32];
  let_successor_start();
  wait_for_predecessor();
  const int32_t i = static_cast<int32_t>(blockIdx.x);
  if (i >= p.inputs.counts->num_drafting) return;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t seq_slot = p.inputs.seq_slot[i];
  uint64_t best = warp_max(best_ngram(p, seq_slot, thread, kNgramThreads));
  if (thread % 32 == 0) winners[thread / 32] = best;
  __syncthreads();
#pragma unroll
  for (const uint64_t winner : winners) best = max(best, winner);
  store_ngram(p, seq_slot, best, thread, kNgramThreads);
}

__global__ void __launch_bounds__(kKeepThreads)
    keep_hidden_kernel(const __grid_constant__ KeepHiddenParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t i = static_cast<int32_t>(blockIdx.y);
  if (i >= p.inputs.counts->num_seqs) return;
  keep_hidden_of_sequence(p, i, static_cast<int32_t>(blockIdx.x * kKeepThreads + threadIdx.x),
                          kKeepBlocks * kKeepThreads);
}

// One block per sequence, and one without sequences, since the kernel writes the number of rows.
template <class Params>
void launch_assemble(CudaContext& ctx, const char* name, void (*kernel)(Params), const Params& p) {
  const int32_t num_threads = whole_warps(p.rows.max_rows_per_seq, kMaxSequenceThreads);
  launch(ctx, name, kernel, dim3(static_cast<unsigned>(std::max(p.rows.max_seqs, 1))),
         dim3(static_cast<unsigned>(num_threads)), 0, p);
}

}  // namespace
}  // namespace cuda

void assemble_verify_rows(CudaContext& ctx, const AssembleVerifyRowsParams& p) {
  cuda::launch_assemble(ctx, "assemble_verify_rows", cuda::assemble_verify_rows_kernel, p);
}

void assemble_first_rows(CudaContext& ctx, const AssembleFirstRowsParams& p) {
  cuda::launch_assemble(ctx, "assemble_first_rows", cuda::assemble_first_rows_kernel, p);
}

void begin_draft_steps(CudaContext& ctx, const BeginDraftStepsParams& p) {
  const int32_t num_threads = cuda::whole_warps(p.rows.capacity, cuda::kMaxStepThreads);
  cuda::launch(ctx, "begin_draft_steps", cuda::begin_draft_steps_kernel, dim3(1),
               dim3(static_cast<unsigned>(num_threads)), 0, p);
}

void propose_ngram(CudaContext& ctx, const ProposeNgramParams& p) {
  cuda::launch(ctx, "propose_ngram", cuda::propose_ngram_kernel,
               dim3(static_cast<unsigned>(p.max_seqs)), dim3(cuda::kNgramThreads), 0, p);
}

void keep_hidden(CudaContext& ctx, const KeepHiddenParams& p) {
  cuda::launch(ctx, "keep_hidden", cuda::keep_hidden_kernel,
               dim3(cuda::kKeepBlocks, static_cast<unsigned>(std::max(p.max_seqs, 1))),
               dim3(cuda::kKeepThreads), 0, p);
}

void assemble_block_rows(CudaContext& ctx, const AssembleBlockRowsParams& p) {
  const int32_t num_blocks = (p.num_seqs + cuda::kStoreThreads - 1) / cuda::kStoreThreads;
  cuda::launch(ctx, "assemble_block_rows", cuda::assemble_block_rows_kernel,
               dim3(static_cast<unsigned>(num_blocks)), dim3(cuda::kStoreThreads), 0, p);
}

void store_block_drafts(CudaContext& ctx, const StoreBlockDraftsParams& p) {
  const int32_t num_blocks = (p.num_seqs + cuda::kStoreThreads - 1) / cuda::kStoreThreads;
  cuda::launch(ctx, "store_block_drafts", cuda::store_block_drafts_kernel,
               dim3(static_cast<unsigned>(num_blocks)), dim3(cuda::kStoreThreads), 0, p);
}

void store_draft(CudaContext& ctx, const StoreDraftParams& p) {
  const int32_t num_blocks = (p.rows.capacity + cuda::kStoreThreads - 1) / cuda::kStoreThreads;
  cuda::launch(ctx, "store_draft", cuda::store_draft_kernel,
               dim3(static_cast<unsigned>(num_blocks)), dim3(cuda::kStoreThreads), 0, p);
}

}  // namespace paceline
