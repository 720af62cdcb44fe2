// SPDX-License-Identifier: Apache-2.0
#include "graph/iteration_ring.h"

#include <type_traits>

#include "common/launch.cuh"
#include "sample/sequence_reset_rules.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kThreads = 1024;

__device__ __forceinline__ uint64_t global_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

__device__ __forceinline__ int64_t bytes_to_entry(const RingPosition& ring, int64_t iteration) {
  return iteration % ring.num_entries * ring.entry_bytes;
}

// Returns the same array in the entry that is `bytes` after entry 0.
template <class T>
__device__ __forceinline__ T* in_entry(T* of_entry_0, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(of_entry_0) + bytes);
}

// Copies the staged arrays in chunks of four words per lane. The chunks of all arrays are numbered
// through, and warp w takes chunks w, w + 32, ... So the arrays of a decode batch cross the bus
// together, in one round trip instead of one per array. The loads bypass the caches, since the host
// rewrites the ring.
__device__ void fetch_staged_arrays(const BeginIterationParams& p, int64_t entry_bytes,
                                    const int32_t* count_words) {
  constexpr int32_t kLoads = 4;
  constexpr int32_t kChunk = 32 * kLoads;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  auto chunk = static_cast<int32_t>(threadIdx.x / 32);
  int32_t first_chunk = 0;
  for (int32_t a = 0; a < kNumStagedArrays; ++a) {
    const StagedCopy& copy = p.copies[a];
    const int32_t num_words = (count_words[copy.count_index] + copy.extra) * copy.item_words;
    const int32_t end_chunk = first_chunk + (num_words + kChunk - 1) / kChunk;
    const int32_t* const from = in_entry(copy.from, entry_bytes);
    for (; chunk < end_chunk; chunk += kThreads / 32) {
      const int32_t begin = (chunk - first_chunk) * kChunk + lane;
      int32_t words[kLoads];
#pragma unroll
      for (int32_t i = 0; i < kLoads; ++i) {
        if (begin + 32 * i < num_words) words[i] = __ldcv(from + begin + 32 * i);
      }
#pragma unroll
      for (int32_t i = 0; i < kLoads; ++i) {
        if (begin + 32 * i < num_words) copy.to[begin + 32 * i] = words[i];
      }
    }
    first_chunk = end_chunk;
  }
}

// Applies reset `i` with all threads of the block. Its lists are in p.lists.
__device__ void apply_reset(const BeginIterationParams& p, int64_t entry_bytes, int32_t i) {
  __shared__ SequenceReset reset;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  static_assert(sizeof(SequenceReset) % 4 == 0 && std::is_trivially_copyable_v<SequenceReset>);
  constexpr int32_t kWords = sizeof(SequenceReset) / 4;
  __syncthreads();  // the reset before this one has been read
  if (thread < kWords) {
    const auto* const from =
        reinterpret_cast<const int32_t*>(in_entry(p.entry.resets, entry_bytes) + i);
    reinterpret_cast<int32_t*>(&reset)[thread] = __ldcv(from + thread);
  }
  __syncthreads();
  reset_sequence(p.sequences, reset, thread, kThreads);
  reset_sampling(p.sampling, reset, p.lists + reset.first_list_word, thread, kThreads);
}

// Applies a window with all lanes of the warp.
__device__ void apply_window(const BeginIterationParams& p, const HostWindow* from) {
  __shared__ HostWindow windows[kThreads / 32];
  static_assert(sizeof(HostWindow) % 4 == 0 && std::is_trivially_copyable_v<HostWindow>);
  constexpr int32_t kWords = sizeof(HostWindow) / 4;
  static_assert(kWords <= 32);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  HostWindow& window = windows[threadIdx.x / 32];
  __syncwarp();  // the window before this one has been read
  if (lane < kWords) {
    reinterpret_cast<int32_t*>(&window)[lane] =
        __ldcv(reinterpret_cast<const int32_t*>(from) + lane);
  }
  __syncwarp();
  set_window(p.sequences, p.sampling, window, lane, /*num_workers=*/32);
}

// One block suffices, since the kernel moves only a few kilobytes over the bus.
__global__ void __launch_bounds__(kThreads)
    begin_kernel(const __grid_constant__ BeginIterationParams p) {
  let_successor_start();
  wait_for_predecessor();
  const uint64_t begin_ns = global_ns();
  const int64_t entry_bytes = bytes_to_entry(p.ring, *p.ring.counter);
  __shared__ IterationCounts counts;
  auto* const count_words = reinterpret_cast<int32_t*>(&counts);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  constexpr int32_t kCountWords = sizeof(IterationCounts) / 4;
  if (thread < kCountWords) {
    const int32_t word =
        __ldcv(reinterpret_cast<const int32_t*>(in_entry(p.entry.counts, entry_bytes)) + thread);
    count_words[thread] = word;
    reinterpret_cast<int32_t*>(p.counts)[thread] = word;
  }
  if (thread == 0) in_entry(p.completion, entry_bytes)->begin_ns = begin_ns;
  if (thread < kNumModels && p.experts[thread] != nullptr) {
    p.experts[thread][0] = p.experts[thread][1] = 0;
  }
  __syncthreads();
  fetch_staged_arrays(p, entry_bytes, count_words);
  if (counts.num_resets > 0) {  // uniform over the block, so __syncthreads is allowed
    const int32_t* const lists = in_entry(p.entry.lists, entry_bytes);
    for (int32_t i = thread; i < counts.num_list_words; i += kThreads) {
      p.lists[i] = __ldcv(lists + i);
    }
    __syncthreads();
    for (int32_t i = 0; i < counts.num_resets; ++i) apply_reset(p, entry_bytes, i);
  }
  if (counts.num_windows > 0) {
    __syncthreads();  // the resets of the same sequence slots come first
    for (int32_t i = thread / 32; i < counts.num_windows; i += kThreads / 32) {
      apply_window(p, in_entry(p.entry.windows, entry_bytes) + i);
    }
  }
  if (thread == 0) *p.sampling.masks_offset = entry_bytes / 4;
  const auto* const writes =
      static_cast<const volatile TableWrite*>(in_entry(p.entry.table_writes, entry_bytes));
  for (int32_t i = thread; i < counts.num_table_writes; i += kThreads) {
    const volatile TableWrite& write = writes[i];
    const BlockTable& table = p.tables[write.group];
    table.blocks[write.seq_slot * table.stride + write.index] = write.block;
  }
}

// Writes the requested rows of logprobs. One warp writes those of a sequence; all threads write
// those of prompts.
__device__ void publish_logprobs(const EndIterationParams& p, int64_t entry_bytes) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  static_assert(sizeof(TokenLogprob) % 4 == 0);
  const int64_t row_words =
      p.row_entries * static_cast<int64_t>(sizeof(TokenLogprob) / sizeof(int32_t));
  const auto* const from = reinterpret_cast<const int32_t*>(p.logprobs);
  auto* const to = reinterpret_cast<int32_t*>(in_entry(p.logprobs_to, entry_bytes));
  for (int32_t i = thread / 32; i < p.inputs.counts->num_seqs; i += kThreads / 32) {
    if (p.num_logprobs[p.inputs.seq_slot[i]] < 0) continue;
    const int64_t begin = p.inputs.logit_indptr[i] * row_words;
    const int64_t end = begin + p.results[i].emitted_len * row_words;
    for (int64_t word = begin + thread % 32; word < end; word += 32) to[word] = from[word];
  }
  const int64_t end = p.inputs.counts->num_all_logit_rows * row_words;
  for (int64_t word = p.inputs.counts->num_logit_rows * row_words + thread; word < end;
       word += kThreads) {
    to[word] = from[word];
  }
}

// One warp writes the drafts of a sequence with masks.
__device__ void publish_drafts(const EndIterationParams& p, int64_t entry_bytes) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  ProposedDrafts* const to = in_entry(p.drafts_to, entry_bytes);
  for (auto i = static_cast<int32_t>(threadIdx.x / 32); i < p.inputs.counts->num_seqs;
       i += kThreads / 32) {
    const int32_t seq_slot = p.inputs.seq_slot[i];
    if (p.first_mask[seq_slot] < 0) continue;
    const int32_t count = p.sequences.draft_len[seq_slot];
    const int32_t* const drafts =
        p.sequences.draft_tokens + int64_t{seq_slot} * p.sequences.num_draft_tokens;
    if (lane == 0) to[i].count = count;
    if (lane < count) to[i].tokens[lane] = drafts[lane];
  }
}

__global__ void __launch_bounds__(kThreads)
    end_kernel(const __grid_constant__ EndIterationParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int64_t iteration = *p.ring.counter;
  const int64_t entry_bytes = bytes_to_entry(p.ring, iteration);
  static_assert(sizeof(SequenceResult) % 4 == 0);
  const auto* const from = reinterpret_cast<const int32_t*>(p.results);
  auto* const to = reinterpret_cast<int32_t*>(in_entry(p.results_to, entry_bytes));
  const int32_t num_words =
      p.inputs.counts->num_seqs * static_cast<int32_t>(sizeof(SequenceResult) / 4);
  for (auto i = static_cast<int32_t>(threadIdx.x); i < num_words; i += kThreads) to[i] = from[i];
  if (p.logprobs != nullptr) publish_logprobs(p, entry_bytes);
  if (p.drafts_to != nullptr) publish_drafts(p, entry_bytes);
  volatile CompletionRecord* const completion = in_entry(p.completion, entry_bytes);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread < kNumModels && p.experts[thread] != nullptr) {
    completion->experts[thread].experts_hit = p.experts[thread][0];
    completion->experts[thread].layers = p.experts[thread][1];
  }
  __threadfence_system();
  __syncthreads();
  if (thread != 0) return;
  *p.ring.counter = iteration + 1;
  completion->end_ns = global_ns();
  __threadfence_system();
  completion->iteration = iteration;
}

}  // namespace
}  // namespace cuda

void begin_iteration(CudaContext& ctx, const BeginIterationParams& p) {
  cuda::launch(ctx, "begin iteration", &cuda::begin_kernel, dim3(1), dim3(cuda::kThreads), 0, p);
}

void end_iteration(CudaContext& ctx, const EndIterationParams& p) {
  cuda::launch(ctx, "end iteration", &cuda::end_kernel, dim3(1), dim3(cuda::kThreads), 0, p);
}

}  // namespace paceline
