// SPDX-License-Identifier: Apache-2.0

// ops/fork_rules.h, shared with the CPU, decides what a fork copies. Forks and copies are
// independent of each other, and the order in which bits are set does not matter.

#include <algorithm>

#include "common/launch.cuh"
#include "ops/fork.h"
#include "ops/fork_rules.h"
#include "wire/blocks.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kCopyThreads = 256;
constexpr int32_t kCopyPieces = 32;  // blocks of threads that share a KV block
constexpr int32_t kForkThreads = 256;
constexpr int32_t kForkPieces = 8;        // blocks of threads that share a fork
constexpr int32_t kMaxRowsAtOnce = 4096;  // of a grid, whose blocks loop over the rest

__global__ void __launch_bounds__(kCopyThreads)
    copy_blocks_kernel(const __grid_constant__ CopyBlocksParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t num_copies = min(*p.num_copies, p.max_copies);
  const int32_t first = static_cast<int32_t>(blockIdx.x * kCopyThreads + threadIdx.x);
  for (int32_t i = static_cast<int32_t>(blockIdx.y); i < num_copies;
       i += static_cast<int32_t>(gridDim.y)) {
    const BlockCopy copy = p.copies[i];
    const int64_t bytes = p.block_bytes[copy.group];
    const auto* const from = reinterpret_cast<const uint4*>(p.pool + copy.source * bytes);
    auto* const to = reinterpret_cast<uint4*>(p.pool + copy.destination * bytes);
    const int64_t num_words = bytes / static_cast<int64_t>(sizeof(uint4));
    for (int64_t word = first; word < num_words; word += kCopyPieces * kCopyThreads) {
      to[word] = from[word];
    }
  }
}

__global__ void __launch_bounds__(kForkThreads)
    fork_sequences_kernel(const __grid_constant__ ForkSequencesParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t num_forks = min(*p.num_forks, p.max_forks);
  const int32_t worker = static_cast<int32_t>(blockIdx.x * kForkThreads + threadIdx.x);
  for (int32_t i = static_cast<int32_t>(blockIdx.y); i < num_forks;
       i += static_cast<int32_t>(gridDim.y)) {
    fork_sequence(p, i, worker, kForkPieces * kForkThreads,
                  [](uint32_t* word, uint32_t bits) { atomicOr(word, bits); });
  }
}

dim3 grid_of(int32_t num_pieces, int32_t num_rows) {
  return dim3(static_cast<unsigned>(num_pieces),
              static_cast<unsigned>(std::min(num_rows, kMaxRowsAtOnce)));
}

}  // namespace
}  // namespace cuda

void copy_blocks(CudaContext& ctx, const CopyBlocksParams& p) {
  cuda::launch(ctx, "copy_blocks", cuda::copy_blocks_kernel,
               cuda::grid_of(cuda::kCopyPieces, p.max_copies), dim3(cuda::kCopyThreads), 0, p);
}

void fork_sequences(CudaContext& ctx, const ForkSequencesParams& p) {
  cuda::launch(ctx, "fork_sequences", cuda::fork_sequences_kernel,
               cuda::grid_of(cuda::kForkPieces, p.max_forks), dim3(cuda::kForkThreads), 0, p);
}

}  // namespace paceline
