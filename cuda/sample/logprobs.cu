// SPDX-License-Identifier: Apache-2.0

// A cluster of eight blocks computes a row; each block holds an eighth of its ids in shared memory.
// Without clusters one block reads the row again and again.
// sample/logprob_rules.h maps logits to shares, which are integers: the order of their sum does not
// matter, so rows are invariant. Each block finds its own best ids one by one; then the first warp
// of the cluster merges eight sorted lists and writes the entries.
//
// The grid is only as large as the GPU, and clusters loop over the rows: a batch without a request
// for logprobs costs one look at each row.

#include "base/check.h"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "sample/logprob_rules.h"
#include "sample/row_pieces.cuh"
#include "wire/limits.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kSaveThreads = 256;
constexpr int32_t kIdsPerSaveBlock = 32768;

__global__ void __launch_bounds__(kSaveThreads)
    save_kernel(const __grid_constant__ SaveRawLogitsParams p, const bool is_vector) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  if (row >= *p.num_rows || !is_row_saved(p, row)) return;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t begin = static_cast<int32_t>(blockIdx.y) * kIdsPerSaveBlock;
  const int32_t end = min(begin + kIdsPerSaveBlock, p.sampling.vocab_size);
  const float* const from = p.logits + row * p.logits_stride;
  float* const to = p.raw_logits + row * p.logits_stride;
  const int32_t vector_end = is_vector ? end / 4 * 4 : begin;
  for (int32_t i = begin + thread * 4; i < vector_end; i += kSaveThreads * 4) {
    float four[4];
    load_vector(from + i, four);
    store_vector(four, to + i);
  }
  for (int32_t i = vector_end + thread; i < end; i += kSaveThreads) to[i] = from[i];
}

// Shared memory besides the block's logits. The block writes what other blocks of the cluster read
// before one cluster_barrier; until the next one all blocks only read it.
struct Shared {
  uint64_t best[kMaxLogprobs];  // the block's best candidates, best first; 0 where it has no more
  uint64_t total;               // of the block's shares
  int32_t num_higher;           // the block's ids with a higher logit than the row's token
  uint32_t highest;             // key of its highest logit
  // Only this block uses the following.
  uint64_t warp_winners[2][kWarps];
  uint64_t warp_totals[kWarps];
  int32_t warp_counts[kWarps];
  uint32_t warp_words[kWarps];
};

// The best of the thread's candidates below `limit`; 0 if there is none.
template <class P>
__device__ __forceinline__ uint64_t best_below(const P& piece, int32_t first_id, uint64_t limit) {
  uint64_t best = 0;
  piece.for_quads([&](int32_t i, const float (&four)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j >= piece.count) continue;
      const uint64_t candidate = best_candidate(four[j], first_id + i + j);
      if (candidate < limit) best = max(best, candidate);
    }
  });
  return best;
}

// Fills shared.best with the block's `count` best candidates. Called by all threads of the block.
template <class P>
__device__ __forceinline__ void find_best(const P& piece, int32_t first_id, int32_t count,
                                          Shared& shared) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  uint64_t own = count > 0 ? best_below(piece, first_id, ~uint64_t{0}) : 0;
  for (int32_t round = 0; round < count; ++round) {
    // Two arrays in alternation: a warp can be one round ahead of warps that still read.
    uint64_t (&winners)[kWarps] = shared.warp_winners[round % 2];
    const uint64_t of_warp = warp_max(own);
    if (thread % 32 == 0) winners[thread / 32] = of_warp;
    __syncthreads();
    const uint64_t best = warp_max(winners[thread % kWarps]);
    if (thread == 0) shared.best[round] = best;
    if (best != 0 && own == best) own = best_below(piece, first_id, best);
  }
}

template <int32_t kBlocks, bool kIsVector>
__device__ void compute_row(const LogprobRow& row, const Piece<kBlocks, kIsVector>& piece,
                            int32_t first_id, float* values, Shared& shared) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / 32;
  const int32_t lane = thread % 32;
  const float highest = from_ordered(
      highest_key<kBlocks>(load_piece(piece, values), shared.highest, shared.warp_words));
  const float own = comparable(row.logits[row.token]);
  uint64_t total = 0;
  int32_t num_higher = 0;
  piece.for_quads([&](int32_t, const float (&four)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      total += logprob_weight(highest, four[j]);
      num_higher += four[j] > own ? 1 : 0;
    }
  });
  total = warp_sum(total);
  num_higher = __reduce_add_sync(kAllLanes, num_higher);
  if (lane == 0) {
    shared.warp_totals[warp] = total;
    shared.warp_counts[warp] = num_higher;
  }
  __syncthreads();
  if (thread == 0) {
    uint64_t total_of_block = 0;
    int32_t higher_of_block = 0;
    for (int32_t i = 0; i < kWarps; ++i) {
      total_of_block += shared.warp_totals[i];
      higher_of_block += shared.warp_counts[i];
    }
    shared.total = total_of_block;
    shared.num_higher = higher_of_block;
  }
  find_best(piece, first_id, row.num_best, shared);
  cluster_barrier();

  if (piece.rank == 0 && warp == 0) {
    // One lane per block. The other lanes read the same blocks again, and their values are dropped.
    const bool has_block = lane < kBlocks;
    const int32_t rank = lane % kBlocks;
    const uint64_t total_of_block = *in_cluster(&shared.total, rank);
    const int32_t higher_of_block = *in_cluster(&shared.num_higher, rank);
    total = warp_sum(has_block ? total_of_block : uint64_t{0});
    num_higher = __reduce_add_sync(kAllLanes, has_block ? higher_of_block : 0);
    if (lane == 0) row.out[0] = {row.token, logprob_of(own, highest, total), 1 + num_higher};
    const auto best_of_block = [&](int32_t at) {
      return has_block && at < row.num_best ? *in_cluster(&shared.best[at], rank) : uint64_t{0};
    };
    int32_t num_taken = 0;  // of the lane's block
    uint64_t next = best_of_block(0);
    Ranking ranking;
    for (int32_t i = 0; i < row.num_best; ++i) {
      const uint64_t best = warp_max(next);
      if (lane == 0) row.out[1 + i] = ranking.next(best, highest, total);
      if (next == best) next = best_of_block(++num_taken);
    }
  }
  // No block continues or exits while others read its shared memory.
  cluster_barrier();
}

template <int32_t kBlocks, bool kIsVector>
__global__ void PACELINE_CLUSTER_DIMS(kBlocks) __launch_bounds__(kThreads, kBlocksPerSm)
    logprobs_kernel(const __grid_constant__ TokenLogprobsParams p, const int32_t piece_size) {
  extern __shared__ __align__(16) float values[];  // [piece_size]
  __shared__ Shared shared;
  __shared__ uint32_t wanted[kWarps];
  let_successor_start();
  wait_for_predecessor();
  const int32_t rank = static_cast<int32_t>(blockIdx.x);
  const int32_t first_id = rank * piece_size;
  const int32_t count = max(min(p.sampling.vocab_size - first_id, piece_size), 0);
  for_wanted_rows(
      max_logprob_rows(p), wanted, [&](int32_t row) { return logprob_row(p, row).token >= 0; },
      [&](int32_t at) {
        const LogprobRow row = logprob_row(p, at);
        const Piece<kBlocks, kIsVector> piece = {.logits = row.logits + first_id,
                                                 .count = count,
                                                 .values = values,
                                                 .size = piece_size,
                                                 .rank = rank};
        compute_row(row, piece, first_id, values, shared);
      });
}

}  // namespace
}  // namespace cuda

void save_raw_logits(CudaContext& ctx, const SaveRawLogitsParams& p) {
  using namespace cuda;
  const bool is_vector =
      p.logits_stride % 4 == 0 && is_vector_aligned(p.logits) && is_vector_aligned(p.raw_logits);
  const int32_t num_pieces = (p.sampling.vocab_size + kIdsPerSaveBlock - 1) / kIdsPerSaveBlock;
  launch(ctx, "save_raw_logits", save_kernel,
         dim3(static_cast<unsigned>(p.max_rows), static_cast<unsigned>(num_pieces)),
         dim3(kSaveThreads), 0, p, is_vector);
}

void token_logprobs(CudaContext& ctx, const TokenLogprobsParams& p) {
  using namespace cuda;
  PACELINE_CHECK(p.sampling.vocab_size <= kMaxTruncatedVocab, p.sampling.vocab_size,
                 " ids; at most ", kMaxTruncatedVocab);
  const auto launch_with = [&]<bool kIsVector>() {
    constexpr const char* kName = "token_logprobs";
    if (!ctx.has_clusters) {
      return launch_whole_rows<&logprobs_kernel<1, kIsVector>>(ctx, kName, p.sampling.vocab_size,
                                                               max_logprob_rows(p), p);
    }
    launch_row_pieces<&logprobs_kernel<kClusterBlocks, kIsVector>>(
        ctx, kName, p.sampling.vocab_size, max_logprob_rows(p), p);
  };
  const bool is_vector =
      p.logits_stride % 4 == 0 && is_vector_aligned(p.logits) && is_vector_aligned(p.raw_logits);
  is_vector ? launch_with.operator()<true>() : launch_with.operator()<false>();
}

}  // namespace paceline
