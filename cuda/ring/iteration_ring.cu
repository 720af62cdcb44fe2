// SPDX-License-Identifier: Apache-2.0
#include "ring/iteration_ring.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <tuple>
#include <type_traits>

#include "batch/iteration_inputs.h"
#include "common/launch.cuh"
#include "sample/sampling_reset.h"
#include "wire/batch_shape.h"
#include "wire/blocks.h"
#include "wire/limits.h"
#include "wire/sequence_result.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kMaxTables = kMaxKvGroups;

__device__ __forceinline__ uint64_t global_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

struct BeginArgs {
  std::byte* ring;
  RingEntryOffsets offsets;
  int32_t num_entries;
  const int64_t* counter;  // [1]
  StagedInputs staged;
  SequenceState sequences;
  SamplingState sampling;
  int32_t* lists;  // [max_list_words] device memory
  BlockTable tables[kMaxTables];
};

// One slot of the per-sequence state, by the whole block.
__device__ void reset_sequence(const BeginArgs& args, const std::byte* ring_entry, int32_t i) {
  __shared__ SequenceReset reset;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  static_assert(sizeof(SequenceReset) % 4 == 0 && std::is_trivially_copyable_v<SequenceReset>);
  constexpr int32_t kWords = sizeof(SequenceReset) / 4;
  __syncthreads();  // the one before is done with
  if (thread < kWords) {
    reinterpret_cast<int32_t*>(&reset)[thread] = __ldcv(
        reinterpret_cast<const int32_t*>(ring_entry + args.offsets.resets) + i * kWords + thread);
  }
  __syncthreads();
  reset_sampling(args.sampling, reset, args.lists + reset.first_list_word, thread,
                 static_cast<int32_t>(blockDim.x));
  const SequenceState& s = args.sequences;
  const int32_t at = reset.seq_slot;
  if (thread < kMaxStopIds) s.stop_ids[int64_t{at} * kMaxStopIds + thread] = reset.stop_ids[thread];
  if (thread != 0) return;
  args.staged.reset_seq_slots[i] = at;
  s.known_len[at] = 0;
  s.limit[at] = reset.limit;
  s.is_active[at] = 1;
  s.seed[at] = reset.seed;
  s.temperature[at] = reset.temperature;
  s.num_stop_ids[at] = reset.num_stop_ids;
  s.draft_len[at] = 0;
}

// One block: a few kilobytes over the bus, all of it in flight at once. The header and the arrays
// are fetched with loads that bypass the caches, since the host rewrites them.
__global__ void __launch_bounds__(1024) begin_kernel(const __grid_constant__ BeginArgs args) {
  let_successor_start();
  wait_for_predecessor();
  const uint64_t begin_ns = global_ns();
  std::byte* const entry = args.ring + *args.counter % args.num_entries * args.offsets.bytes;
  __shared__ RingEntryHeader header;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  constexpr int32_t kWords = sizeof(RingEntryHeader) / 4;
  if (thread < kWords) {
    reinterpret_cast<int32_t*>(&header)[thread] =
        __ldcv(reinterpret_cast<const int32_t*>(entry) + thread);
  }
  __syncthreads();
  const StagedInputs& to = args.staged;
  if (thread == 0) {
    reinterpret_cast<CompletionRecord*>(entry + args.offsets.outcome)->begin_ns = begin_ns;
    *to.num_seqs = header.num_seqs;
    *to.num_drafting = header.num_drafting;
    *to.num_verify_rows = header.num_verify_rows;
    *to.num_first_rows = header.num_first_rows;
    *to.num_logit_rows = header.num_logit_rows;
    *to.num_all_logit_rows = header.num_logit_rows + header.num_prompt_rows;
    *to.num_resets = header.num_resets;
    *to.num_forks = header.num_forks;
    *to.num_block_copies = header.num_block_copies;
  }
  const auto fetch = [&](int64_t offset, int32_t count, int32_t* into) {
    const auto* const from = reinterpret_cast<const int32_t*>(entry + offset);
    for (int32_t i = thread; i < count; i += static_cast<int32_t>(blockDim.x)) {
      into[i] = __ldcv(from + i);
    }
  };
  const int32_t num_seqs = header.num_seqs;
  fetch(args.offsets.seq_slot, num_seqs, to.seq_slot);
  fetch(args.offsets.kind, num_seqs, to.kind);
  fetch(args.offsets.prefill_start, num_seqs, to.prefill_start);
  fetch(args.offsets.next_token, num_seqs, to.next_token);
  fetch(args.offsets.verify_indptr, num_seqs + 1, to.verify_indptr);
  fetch(args.offsets.first_indptr, num_seqs + 1, to.first_indptr);
  fetch(args.offsets.logit_indptr, num_seqs + 1, to.logit_indptr);
  fetch(args.offsets.logit_rows, header.num_logit_rows + header.num_prompt_rows, to.logit_rows);
  fetch(args.offsets.prompt_targets, header.num_prompt_rows, to.prompt_targets);
  if (header.has_prefill != 0) {
    fetch(args.offsets.prefill_tokens, header.num_verify_rows, to.prefill_tokens);
  }
  static_assert(sizeof(SequenceFork) % 4 == 0 && sizeof(BlockCopy) % 4 == 0);
  fetch(args.offsets.forks, header.num_forks * static_cast<int32_t>(sizeof(SequenceFork) / 4),
        reinterpret_cast<int32_t*>(to.forks));
  fetch(args.offsets.block_copies,
        header.num_block_copies * static_cast<int32_t>(sizeof(BlockCopy) / 4),
        reinterpret_cast<int32_t*>(to.block_copies));
  if (header.num_resets > 0) {  // the same for the whole block
    fetch(args.offsets.lists, header.num_list_words, args.lists);
    __syncthreads();
    for (int32_t i = 0; i < header.num_resets; ++i) reset_sequence(args, entry, i);
  }
  const auto* const writes =
      reinterpret_cast<const volatile TableWrite*>(entry + args.offsets.table_writes);
  for (int32_t i = thread; i < header.num_table_writes; i += static_cast<int32_t>(blockDim.x)) {
    const volatile TableWrite& write = writes[i];
    const BlockTable& table = args.tables[write.group];
    table.blocks[write.seq_slot * table.stride + write.index] = write.block;
  }
}

struct EndArgs {
  std::byte* ring;
  RingEntryOffsets offsets;
  int32_t num_entries;
  int64_t* counter;  // [1], incremented
  StagedInputs staged;
  SamplingState sampling;
  const SequenceResult* results;  // [max_seqs]
  const TokenLogprob* logprobs;   // [max_logit_rows, 1 + max_logprobs]; null: there are none
  int32_t logprob_row_words;      // of such a row
};

// The rows of logprobs that somebody wants, of sequences by a warp each and of prompts by all.
__device__ void publish_logprobs(const EndArgs& args, std::byte* ring_entry) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const auto num_threads = static_cast<int32_t>(blockDim.x);
  const int64_t row_words = args.logprob_row_words;
  const auto* const from = reinterpret_cast<const int32_t*>(args.logprobs);
  auto* const to = reinterpret_cast<int32_t*>(ring_entry + args.offsets.logprobs);
  for (int32_t i = thread / 32; i < *args.staged.num_seqs; i += num_threads / 32) {
    if (args.sampling.num_logprobs[args.staged.seq_slot[i]] < 0) continue;
    const int64_t begin = args.staged.logit_indptr[i] * row_words;
    const int64_t end = begin + args.results[i].emitted_len * row_words;
    for (int64_t word = begin + thread % 32; word < end; word += 32) to[word] = from[word];
  }
  const int64_t end = *args.staged.num_all_logit_rows * row_words;
  for (int64_t word = *args.staged.num_logit_rows * row_words + thread; word < end;
       word += num_threads) {
    to[word] = from[word];
  }
}

__global__ void __launch_bounds__(1024) end_kernel(const __grid_constant__ EndArgs args) {
  let_successor_start();
  wait_for_predecessor();
  const int64_t iteration = *args.counter;
  std::byte* const entry = args.ring + iteration % args.num_entries * args.offsets.bytes;
  static_assert(sizeof(SequenceResult) % 4 == 0);
  const auto* const from = reinterpret_cast<const int32_t*>(args.results);
  auto* const to = reinterpret_cast<int32_t*>(entry + args.offsets.results);
  const int32_t count = *args.staged.num_seqs * static_cast<int32_t>(sizeof(SequenceResult) / 4);
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count;
       i += static_cast<int32_t>(blockDim.x)) {
    to[i] = from[i];
  }
  if (args.logprobs != nullptr) publish_logprobs(args, entry);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x != 0) return;
  *args.counter = iteration + 1;
  auto* const outcome = reinterpret_cast<volatile CompletionRecord*>(entry + args.offsets.outcome);
  outcome->end_ns = global_ns();
  __threadfence_system();
  outcome->iteration = iteration;
}

}  // namespace
}  // namespace cuda

namespace {

// Table entries that one iteration may write: what its rows reach in new blocks, with room for the
// reservations that run ahead (kv/sequence_blocks.h), in every group; where whole tables are small,
// all of them.
int32_t max_table_writes(const BatchShape& shape, const KvLayout& layout, int32_t max_model_len) {
  constexpr int64_t kSmall = 1 << 16;
  int64_t reached = 0;
  int64_t all = 0;
  for (const KvGroup& group : layout.groups) {
    const int64_t ahead = 4 * (int64_t{shape.num_draft_tokens} + 2);
    reached += (shape.max_verify_rows + shape.max_seqs * ahead) / group.block_size +
               int64_t{4} * shape.max_seqs;
    all += int64_t{shape.max_seqs} * (max_model_len / group.block_size + 1);
  }
  return static_cast<int32_t>(std::min(all, std::max(reached, kSmall)));
}

}  // namespace

IterationRing::IterationRing(const BatchShape& shape, const KvLayout& layout, int32_t max_model_len,
                             int32_t vocab_size, int32_t num_entries, DeviceArena& arena)
    : num_entries_(num_entries) {
  int64_t at = 0;
  const auto place = [&](int64_t bytes) {
    const int64_t offset = at;
    at += (bytes + 63) / 64 * 64;
    return offset;
  };
  const auto ints = [&](int64_t count) { return place(count * 4); };
  place(sizeof(RingEntryHeader));
  offsets_.seq_slot = ints(shape.max_seqs);
  offsets_.kind = ints(shape.max_seqs);
  offsets_.prefill_start = ints(shape.max_seqs);
  offsets_.next_token = ints(shape.max_seqs);
  offsets_.verify_indptr = ints(shape.max_seqs + 1);
  offsets_.first_indptr = ints(shape.max_seqs + 1);
  offsets_.logit_indptr = ints(shape.max_seqs + 1);
  offsets_.logit_rows = ints(shape.max_logit_rows);
  offsets_.prompt_targets = ints(shape.max_prompt_rows);
  offsets_.prefill_tokens = ints(shape.max_verify_rows);
  offsets_.resets = place(int64_t{shape.max_seqs} * static_cast<int64_t>(sizeof(SequenceReset)));
  constexpr int32_t kMostListWords = 2 * kMaxLogitBias + kMaxBadWords + kMaxBadWordTokens;
  offsets_.max_list_words = shape.max_seqs * (kMostListWords + mask_words(vocab_size));
  offsets_.lists = ints(offsets_.max_list_words);
  offsets_.max_table_writes = max_table_writes(shape, layout, max_model_len);
  offsets_.table_writes =
      place(int64_t{offsets_.max_table_writes} * static_cast<int64_t>(sizeof(TableWrite)));
  offsets_.max_forks = shape.max_seqs;
  offsets_.forks = place(int64_t{shape.max_seqs} * static_cast<int64_t>(sizeof(SequenceFork)));
  offsets_.max_block_copies = shape.max_seqs * static_cast<int32_t>(layout.groups.size());
  offsets_.block_copies =
      place(int64_t{offsets_.max_block_copies} * static_cast<int64_t>(sizeof(BlockCopy)));
  offsets_.outcome = place(sizeof(CompletionRecord));
  offsets_.results = place(int64_t{shape.max_seqs} * static_cast<int64_t>(sizeof(SequenceResult)));
  if (shape.max_logprobs > 0) {
    logprob_row_words_ =
        (1 + shape.max_logprobs) * static_cast<int32_t>(sizeof(TokenLogprob) / sizeof(int32_t));
    offsets_.logprobs = ints(int64_t{shape.max_logit_rows} * logprob_row_words_);
  }
  offsets_.bytes = (at + 4095) / 4096 * 4096;
  order_.reserve(static_cast<size_t>(offsets_.max_table_writes));
  table_writes_.reserve(static_cast<size_t>(offsets_.max_table_writes));
  device_counter_ = arena.allocate<int64_t>(1, "iteration ring");
  device_lists_ = arena.allocate<int32_t>(offsets_.max_list_words, "iteration ring");
  cuda::check(cudaHostAlloc(reinterpret_cast<void**>(&data_), static_cast<size_t>(bytes()),
                            cudaHostAllocMapped | cudaHostAllocPortable),
              "pinned memory of the iteration ring");
  std::memset(data_, 0, static_cast<size_t>(bytes()));
  for (int32_t i = 0; i < num_entries; ++i) {
    reinterpret_cast<CompletionRecord*>(entry(i) + offsets_.outcome)->iteration = -1;
  }
}

IterationRing::~IterationRing() { cudaFreeHost(data_); }

// The device applies writes side by side, so of several to one entry (a slot that changed hands
// within one plan) only the last may reach it.
void IterationRing::keep_last_writes(const std::vector<TableWrite>& writes) {
  const auto key = [&](int32_t i) {
    const TableWrite& write = writes[static_cast<size_t>(i)];
    return std::tuple(write.group, write.seq_slot, write.index, i);
  };
  order_.resize(writes.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) { return key(a) < key(b); });
  table_writes_.clear();
  for (size_t i = 0; i < order_.size(); ++i) {
    const TableWrite& write = writes[static_cast<size_t>(order_[i])];
    const bool is_last = i + 1 == order_.size() || [&] {
      const TableWrite& next = writes[static_cast<size_t>(order_[i + 1])];
      return next.group != write.group || next.seq_slot != write.seq_slot ||
             next.index != write.index;
    }();
    if (is_last) table_writes_.push_back(write);
  }
}

void IterationRing::write(const IterationInputs& in) {
  std::byte* const to = entry(in.iteration);
  const auto put = [&](int64_t offset, const auto& from, int64_t count) {
    std::memcpy(to + offset, from.data(), static_cast<size_t>(count) * sizeof(from[0]));
  };
  const auto num_resets = static_cast<int32_t>(in.resets.size());
  const auto num_list_words = static_cast<int32_t>(in.lists.size());
  PACELINE_CHECK(num_list_words <= offsets_.max_list_words, num_list_words, " of ",
                 offsets_.max_list_words, " words of lists");
  keep_last_writes(in.table_writes);
  const auto num_writes = static_cast<int32_t>(table_writes_.size());
  PACELINE_CHECK(num_writes <= offsets_.max_table_writes, num_writes, " table writes of ",
                 offsets_.max_table_writes);
  const auto num_forks = static_cast<int32_t>(in.forks.size());
  const auto num_block_copies = static_cast<int32_t>(in.block_copies.size());
  PACELINE_CHECK(num_forks <= offsets_.max_forks && num_block_copies <= offsets_.max_block_copies,
                 num_forks, " forks of ", offsets_.max_forks, ", ", num_block_copies,
                 " block copies of ", offsets_.max_block_copies);
  const RingEntryHeader header = {.iteration = in.iteration,
                                  .num_seqs = in.num_seqs,
                                  .num_drafting = in.num_drafting,
                                  .num_verify_rows = in.num_verify_rows,
                                  .num_first_rows = in.num_first_rows,
                                  .num_logit_rows = in.num_logit_rows,
                                  .num_prompt_rows = in.num_prompt_rows,
                                  .num_resets = num_resets,
                                  .num_list_words = num_list_words,
                                  .num_table_writes = num_writes,
                                  .has_prefill = in.has_prefill ? 1 : 0,
                                  .num_forks = num_forks,
                                  .num_block_copies = num_block_copies};
  std::memcpy(to, &header, sizeof(header));
  put(offsets_.seq_slot, in.seq_slot, in.num_seqs);
  put(offsets_.kind, in.kind, in.num_seqs);
  put(offsets_.prefill_start, in.prefill_start, in.num_seqs);
  put(offsets_.next_token, in.next_token, in.num_seqs);
  put(offsets_.verify_indptr, in.verify_indptr, in.num_seqs + 1);
  put(offsets_.first_indptr, in.first_indptr, in.num_seqs + 1);
  put(offsets_.logit_indptr, in.logit_indptr, in.num_seqs + 1);
  put(offsets_.logit_rows, in.logit_rows, in.num_logit_rows + in.num_prompt_rows);
  if (in.num_prompt_rows > 0) put(offsets_.prompt_targets, in.prompt_targets, in.num_prompt_rows);
  if (in.has_prefill) put(offsets_.prefill_tokens, in.prefill_tokens, in.num_verify_rows);
  if (num_resets > 0) put(offsets_.resets, in.resets, num_resets);
  if (num_list_words > 0) put(offsets_.lists, in.lists, num_list_words);
  if (num_forks > 0) put(offsets_.forks, in.forks, num_forks);
  if (num_block_copies > 0) put(offsets_.block_copies, in.block_copies, num_block_copies);
  std::memcpy(to + offsets_.table_writes, table_writes_.data(),
              table_writes_.size() * sizeof(TableWrite));
  std::atomic_thread_fence(std::memory_order_release);
}

void IterationRing::enqueue_begin(CudaContext& ctx, const StagedInputs& staged,
                                  const SequenceState& sequences, const SamplingState& sampling,
                                  const BlockTable* tables, int32_t num_tables) const {
  cuda::BeginArgs args = {.ring = data_,
                          .offsets = offsets_,
                          .num_entries = num_entries_,
                          .counter = device_counter_,
                          .staged = staged,
                          .sequences = sequences,
                          .sampling = sampling,
                          .lists = device_lists_,
                          .tables = {}};
  std::copy_n(tables, num_tables, args.tables);
  cuda::launch(ctx, "begin iteration", &cuda::begin_kernel, dim3(1), dim3(1024), 0, args);
}

void IterationRing::enqueue_end(CudaContext& ctx, const StagedInputs& staged,
                                const SamplingState& sampling, const SequenceResult* results,
                                const TokenLogprob* logprobs) const {
  const cuda::EndArgs args = {.ring = data_,
                              .offsets = offsets_,
                              .num_entries = num_entries_,
                              .counter = device_counter_,
                              .staged = staged,
                              .sampling = sampling,
                              .results = results,
                              .logprobs = logprobs,
                              .logprob_row_words = logprob_row_words_};
  cuda::launch(ctx, "end iteration", &cuda::end_kernel, dim3(1), dim3(1024), 0, args);
}

bool IterationRing::is_complete(int64_t iteration) const {
  const std::atomic_ref<int64_t> seen(
      reinterpret_cast<CompletionRecord*>(entry(iteration) + offsets_.outcome)->iteration);
  return seen.load(std::memory_order_acquire) == iteration;
}

const SequenceResult* IterationRing::results(int64_t iteration) const {
  return reinterpret_cast<const SequenceResult*>(entry(iteration) + offsets_.results);
}

const TokenLogprob* IterationRing::logprobs(int64_t iteration) const {
  return reinterpret_cast<const TokenLogprob*>(entry(iteration) + offsets_.logprobs);
}

const CompletionRecord& IterationRing::outcome(int64_t iteration) const {
  return *reinterpret_cast<const CompletionRecord*>(entry(iteration) + offsets_.outcome);
}

}  // namespace paceline
