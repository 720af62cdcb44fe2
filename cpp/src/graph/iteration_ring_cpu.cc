// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>

#include "device/cpu_context.h"
#include "graph/iteration_ring.h"
#include "sample/sequence_reset_rules.h"

namespace paceline {
namespace {

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

// Returns the same array in the entry of the running iteration.
template <class T>
T* in_entry(T* of_entry_0, const RingPosition& ring) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(of_entry_0) +
                              *ring.counter % ring.num_entries * ring.entry_bytes);
}

void copy_rows(const EndIterationParams& p, int64_t first_row, int64_t num_rows) {
  const int64_t first = first_row * p.row_entries;
  std::copy_n(p.logprobs + first, num_rows * p.row_entries,
              in_entry(p.logprobs_to, p.ring) + first);
}

}  // namespace

void begin_iteration(CpuContext&, const BeginIterationParams& p) {
  in_entry(p.completion, p.ring)->begin_ns = now_ns();
  for (int64_t* const counters : p.experts) {
    if (counters != nullptr) counters[0] = counters[1] = 0;
  }
  *p.counts = *in_entry(p.entry.counts, p.ring);
  const auto* const count_words = reinterpret_cast<const int32_t*>(p.counts);
  for (const StagedCopy& copy : p.copies) {
    const int64_t num_items = count_words[copy.count_index] + copy.extra;
    std::copy_n(in_entry(copy.from, p.ring), num_items * copy.item_words, copy.to);
  }
  const SequenceReset* const resets = in_entry(p.entry.resets, p.ring);
  const int32_t* const lists = in_entry(p.entry.lists, p.ring);
  for (int32_t i = 0; i < p.counts->num_resets; ++i) {
    reset_sequence(p.sequences, resets[i], /*worker=*/0, /*num_workers=*/1);
    reset_sampling(p.sampling, resets[i], lists + resets[i].first_list_word, /*worker=*/0,
                   /*num_workers=*/1);
  }
  const HostWindow* const windows = in_entry(p.entry.windows, p.ring);
  for (int32_t i = 0; i < p.counts->num_windows; ++i) {
    set_window(p.sequences, p.sampling, windows[i], /*worker=*/0, /*num_workers=*/1);
  }
  *p.sampling.masks_offset = words_to_entry(p.ring, *p.ring.counter);
  const TableWrite* const writes = in_entry(p.entry.table_writes, p.ring);
  for (int32_t i = 0; i < p.counts->num_table_writes; ++i) {
    const BlockTable& table = p.tables[writes[i].group];
    table.blocks[writes[i].seq_slot * table.stride + writes[i].index] = writes[i].block;
  }
}

void end_iteration(CpuContext&, const EndIterationParams& p) {
  const IterationCounts& counts = *p.inputs.counts;
  std::copy_n(p.results, counts.num_seqs, in_entry(p.results_to, p.ring));
  if (p.logprobs != nullptr) {
    for (int32_t i = 0; i < counts.num_seqs; ++i) {
      if (p.num_logprobs[p.inputs.seq_slot[i]] < 0) continue;
      copy_rows(p, p.inputs.logit_indptr[i], p.results[i].emitted_len);
    }
    copy_rows(p, counts.num_logit_rows, counts.num_prompt_rows);
  }
  if (p.drafts_to != nullptr) {
    for (int32_t i = 0; i < counts.num_seqs; ++i) {
      const int32_t seq_slot = p.inputs.seq_slot[i];
      if (p.first_mask[seq_slot] < 0) continue;
      ProposedDrafts& drafts = in_entry(p.drafts_to, p.ring)[i];
      drafts.count = p.sequences.draft_len[seq_slot];
      std::copy_n(p.sequences.draft_tokens + int64_t{seq_slot} * p.sequences.num_draft_tokens,
                  drafts.count, drafts.tokens);
    }
  }
  CompletionRecord* const completion = in_entry(p.completion, p.ring);
  for (int32_t model = 0; model < kNumModels; ++model) {
    const int64_t* const counters = p.experts[model];
    if (counters != nullptr) completion->experts[model] = {counters[0], counters[1]};
  }
  const int64_t iteration = (*p.ring.counter)++;
  completion->end_ns = now_ns();
  std::atomic_ref(completion->iteration).store(iteration, std::memory_order_release);
}

}  // namespace paceline
