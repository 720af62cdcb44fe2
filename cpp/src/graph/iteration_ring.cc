// SPDX-License-Identifier: Apache-2.0
#include "graph/iteration_ring.h"

#include <algorithm>
#include <atomic>

#include "base/check.h"

namespace paceline {
namespace {

template <class T>
T* shifted(T* pointer, int64_t bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<std::byte*>(pointer) + bytes);
}

// The most block table entries that one iteration may write, over all groups: those of the new
// blocks that its rows reach, with room for the reservations that run ahead (kv/sequence_blocks.h).
// If whole tables are small, the result is the number of all their entries.
int32_t max_table_writes(const BatchShape& shape, const KvLayout& layout, int32_t max_model_len) {
  constexpr int64_t kSmall = 1 << 16;
  int64_t reached = 0;
  int64_t all = 0;
  for (const KvGroup& group : layout.groups) {
    const int64_t ahead = 4 * (int64_t{shape.num_draft_tokens} + 2);
    reached += (shape.max_verify_rows + shape.max_adopted_tokens + shape.max_seqs * ahead) /
                   block_tokens(group) +
               int64_t{4} * shape.max_seqs;
    all += int64_t{shape.max_seqs} * (max_model_len / block_tokens(group) + 1);
  }
  return static_cast<int32_t>(std::min(all, std::max(reached, kSmall)));
}

// The masks that one iteration may have: at least one for each sequence. The batch builder shortens
// windows to fit.
int32_t max_masks(const BatchShape& shape) {
  constexpr int32_t kMasks = 256;
  return std::max(shape.max_seqs, std::min(shape.max_seqs * (shape.num_draft_tokens + 1), kMasks));
}

}  // namespace

InputCapacity input_capacity(const BatchShape& shape, const KvLayout& layout, int32_t max_model_len,
                             int32_t vocab_size) {
  constexpr int32_t kMostListWords = 2 * kMaxLogitBias + kMaxBadWords + kMaxBadWordTokens;
  return {.seqs = shape.max_seqs,
          .verify_rows = shape.max_verify_rows,
          .logit_rows = shape.max_logit_rows,
          .prompt_rows = shape.max_prompt_rows,
          .list_words = shape.max_seqs * (kMostListWords + mask_words(vocab_size)),
          .block_copies = shape.max_seqs * static_cast<int32_t>(layout.groups.size()),
          .table_writes = max_table_writes(shape, layout, max_model_len),
          .adopted_tokens = shape.max_adopted_tokens,
          .mask_words = max_masks(shape) * mask_words(vocab_size)};
}

IterationRing::IterationRing(DeviceMemory& memory, const BatchShape& shape, const KvLayout& layout,
                             int32_t max_model_len, int32_t vocab_size, int32_t num_entries,
                             DeviceArena& arena)
    : memory_(memory),
      capacity_(input_capacity(shape, layout, max_model_len, vocab_size)),
      num_entries_(num_entries) {
  StagedInputs unplaced{};
  int64_t end = place_inputs(capacity_, InputSide::kRing, nullptr, unplaced);
  const auto place = [&](int64_t bytes) {
    const int64_t offset = end;
    end += (bytes + 63) / 64 * 64;
    return offset;
  };
  completion_offset_ = place(sizeof(CompletionRecord));
  results_offset_ = place(int64_t{shape.max_seqs} * static_cast<int64_t>(sizeof(SequenceResult)));
  drafts_offset_ = place(int64_t{shape.max_seqs} * static_cast<int64_t>(sizeof(ProposedDrafts)));
  if (shape.max_logprobs > 0) {
    row_entries_ = 1 + shape.max_logprobs;
    logprobs_offset_ = place(int64_t{shape.max_logit_rows} * row_entries_ *
                             static_cast<int64_t>(sizeof(TokenLogprob)));
  }
  entry_bytes_ = (end + 4095) / 4096 * 4096;
  counter_ = arena.allocate<int64_t>(1, "iteration ring");
  lists_ = arena.allocate<int32_t>(capacity_.list_words, "iteration ring");
  data_ = memory_.allocate_shared(entry_bytes_ * num_entries_, "the iteration ring");
  for (int32_t e = 0; e < num_entries_; ++e) {
    auto* const record = reinterpret_cast<CompletionRecord*>(entry(e) + completion_offset_);
    *record = {.begin_ns = 0, .end_ns = 0, .experts = {}, .iteration = -1};
  }
}

IterationRing::~IterationRing() { memory_.release_shared(data_, entry_bytes_ * num_entries_); }

RingPosition IterationRing::position() const {
  return {.counter = counter_, .num_entries = num_entries_, .entry_bytes = entry_bytes_};
}

StagedInputs IterationRing::inputs(int64_t iteration) const {
  StagedInputs inputs{};
  place_inputs(capacity_, InputSide::kRing, entry(iteration), inputs);
  return inputs;
}

BeginIterationParams IterationRing::begin_params(const StagedInputs& staged,
                                                 const SequenceState& sequences,
                                                 const SamplingState& sampling,
                                                 const std::vector<BlockTable>& tables,
                                                 const ExpertCounters& experts) const {
  BeginIterationParams params{
      .ring = position(),
      .completion = reinterpret_cast<CompletionRecord*>(entry(0) + completion_offset_),
      .entry = inputs(0),
      .counts = staged.counts,
      .copies = {},
      .sequences = sequences,
      .sampling = sampling,
      .lists = lists_,
      .tables = {},
      .experts = {experts[0], experts[1]}};
  const IterationCounts counts{};
  int32_t num_copies = 0;
  visit_staged_arrays(capacity_, [&](auto array, int32_t, auto count, int32_t extra) {
    using Item = std::remove_reference_t<decltype(*(staged.*array))>;
    static_assert(sizeof(Item) % sizeof(int32_t) == 0);
    params.copies[num_copies++] = {
        .from = reinterpret_cast<const int32_t*>(params.entry.*array),
        .to = reinterpret_cast<int32_t*>(staged.*array),
        .count_index = static_cast<int32_t>(&(counts.*count) - &counts.num_seqs),
        .extra = extra,
        .item_words = static_cast<int32_t>(sizeof(Item) / sizeof(int32_t))};
  });
  PACELINE_CHECK(num_copies == kNumStagedArrays, num_copies,
                 " staged arrays, but kNumStagedArrays is ", kNumStagedArrays);
  std::copy(tables.begin(), tables.end(), params.tables);
  return params;
}

EndIterationParams IterationRing::end_params(const StagedInputs& staged,
                                             const SequenceState& sequences,
                                             const SamplingState& sampling,
                                             const SequenceResult* results,
                                             const TokenLogprob* logprobs,
                                             const ExpertCounters& experts, bool has_masks) const {
  return {.ring = position(),
          .completion = reinterpret_cast<CompletionRecord*>(entry(0) + completion_offset_),
          .results_to = reinterpret_cast<SequenceResult*>(entry(0) + results_offset_),
          .logprobs_to = reinterpret_cast<TokenLogprob*>(entry(0) + logprobs_offset_),
          .results = results,
          .logprobs = logprobs,
          .row_entries = row_entries_,
          .drafts_to =
              has_masks ? reinterpret_cast<ProposedDrafts*>(entry(0) + drafts_offset_) : nullptr,
          .sequences = sequences,
          .first_mask = sampling.first_mask,
          .inputs = staged,
          .num_logprobs = sampling.num_logprobs,
          .experts = {experts[0], experts[1]}};
}

bool IterationRing::is_complete(int64_t iteration) const {
  const std::atomic_ref<int64_t> seen(
      reinterpret_cast<CompletionRecord*>(entry(iteration) + completion_offset_)->iteration);
  return seen.load(std::memory_order_acquire) == iteration;
}

const CompletionRecord& IterationRing::completion(int64_t iteration) const {
  return *reinterpret_cast<const CompletionRecord*>(entry(iteration) + completion_offset_);
}

const SequenceResult* IterationRing::results(int64_t iteration) const {
  return reinterpret_cast<const SequenceResult*>(entry(iteration) + results_offset_);
}

const ProposedDrafts* IterationRing::drafts(int64_t iteration) const {
  return reinterpret_cast<const ProposedDrafts*>(entry(iteration) + drafts_offset_);
}

const TokenLogprob* IterationRing::logprobs(int64_t iteration) const {
  if (row_entries_ == 0) return nullptr;
  return reinterpret_cast<const TokenLogprob*>(entry(iteration) + logprobs_offset_);
}

}  // namespace paceline
