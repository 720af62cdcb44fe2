// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the op cases of op_cases_state.cc run on: sequences between iterations, one iteration's
// inputs, rows and metadata, all at random from a seed.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include "metadata/group_metadata.h"
#include "sample/accept.h"
#include "sample/logits.h"
#include "scheduler/iteration_plan.h"
#include "speculate/row_ops.h"
#include "support/host_batch.h"
#include "support/op_cases.h"
#include "support/sampling_handles.h"

namespace paceline::testing {

inline constexpr uint64_t kState = 105;  // purpose of its random stream
inline constexpr int32_t kMaxLen = 200;
inline constexpr int32_t kTokens = 30;  // few, so that drafts and stop tokens are hit by accident
inline constexpr int32_t kWindow = 24;
inline constexpr int32_t kTokensPerEntry = 4;

[[nodiscard]] inline int32_t vocab_size_of(const StateSpec& s) {
  return (kTokens - 1) * s.spread + 1;
}

// Arrays of the state of all sequences and of one iteration's inputs, and their structs once there
// are addresses.
class World {
 public:
  World(const StateSpec& spec, StateOp kind, uint64_t seed)
      : s_(spec),
        max_slots_(spec.max_seqs + 3),
        stream_(seed, kState, static_cast<uint64_t>(kind)) {
    make_batch(kind);
    make_sequences(kind);
  }

  [[nodiscard]] StagedInputs inputs(const Addresses& at) const {
    return {.counts = at.get<IterationCounts>(counts_),
            .seq_slot = at.get<int32_t>(batch_slot_),
            .kind = at.get<int32_t>(kind_),
            .prefill_start = at.get<int32_t>(prefill_start_),
            .next_token = at.get<int32_t>(next_token_),
            .num_drafts = at.get<int32_t>(num_drafts_),
            .num_kept = at.get<int32_t>(num_kept_),
            .verify_indptr = at.get<int32_t>(verify_indptr_),
            .first_indptr = at.get<int32_t>(first_indptr_),
            .logit_indptr = at.get<int32_t>(logit_indptr_),
            .logit_rows = nullptr,
            .prefill_tokens = at.get<int32_t>(prefill_tokens_)};
  }
  [[nodiscard]] SequenceState sequences(const Addresses& at) const {
    return {.known_len = at.get<int32_t>(known_len_),
            .limit = at.get<int32_t>(limit_),
            .max_drafts = at.get<int32_t>(max_drafts_),
            .is_active = at.get<int32_t>(is_active_),
            .seed = at.get<uint64_t>(seed_),
            .temperature = nullptr,
            .num_stop_ids = at.get<int32_t>(num_stop_ids_),
            .stop_ids = at.get<int32_t>(stop_ids_),
            .history = at.get<int32_t>(history_),
            .history_stride = kMaxLen,
            .draft_tokens = at.get<int32_t>(draft_tokens_),
            .draft_len = at.get<int32_t>(draft_len_),
            .sources = at.get<int32_t>(sources_),
            .draft_source = at.get<int32_t>(draft_source_),
            .num_draft_tokens = s_.num_draft_tokens};
  }

  struct RowHandles {
    Handle num_rows, token_ids, positions, seq_slot, num_seqs, row_indptr;
    int32_t capacity, max_seqs, max_rows_per_seq;
    [[nodiscard]] PassRows at(const Addresses& at) const {
      return {.num_rows = at.get<int32_t>(num_rows),
              .token_ids = at.get<int32_t>(token_ids),
              .positions = at.get<int32_t>(positions),
              .seq_slot = at.get<int32_t>(seq_slot),
              .capacity = capacity,
              .num_seqs = at.get<int32_t>(num_seqs),
              .row_indptr = at.get<int32_t>(row_indptr),
              .max_seqs = max_seqs,
              .max_rows_per_seq = max_rows_per_seq};
    }
  };
  // Rows that an op will write.
  RowHandles unwritten_rows(int32_t capacity, Handle indptr, int32_t max_rows_per_seq) {
    return {.num_rows = poison("rows.num_rows", 1),
            .token_ids = poison("rows.token_ids", capacity),
            .positions = poison("rows.positions", capacity),
            .seq_slot = poison("rows.seq_slot", capacity),
            .num_seqs = num_seqs_,
            .row_indptr = indptr,
            .capacity = capacity,
            .max_seqs = s_.max_seqs,
            .max_rows_per_seq = max_rows_per_seq};
  }
  // Rows of any kind, some of them inert, at positions around the edges of blocks and windows.
  RowHandles random_rows(int32_t num_rows, int32_t capacity) {
    std::vector<int32_t> slots(static_cast<size_t>(capacity), 0);
    std::vector<int32_t> positions(slots.size(), 0);
    std::vector<int32_t> indptr(slots.size() + 1);
    std::iota(indptr.begin(), indptr.end(), 0);
    for (size_t row = 0; row < slots.size(); ++row) {
      const int32_t edge = stream_.one_in(2) ? s_.block_size : stream_.one_in(2) ? kWindow : 7;
      const int32_t position = stream_.one_in(3) ? stream_.below(kMaxLen)
                                                 : edge * stream_.below(5) + stream_.below(3) - 1;
      const bool is_inert = stream_.one_in(5);
      slots[row] = is_inert ? -1 : stream_.below(max_slots_);
      positions[row] = is_inert ? 0 : std::clamp(position, 0, kMaxLen - 1);
    }
    return {.num_rows = ints<int32_t>("rows.num_rows", {num_rows}),
            .token_ids = ints("rows.token_ids", slots),
            .positions = ints("rows.positions", positions),
            .seq_slot = ints("rows.seq_slot", slots),
            .num_seqs = ints<int32_t>("rows.num_seqs", {num_rows}),
            .row_indptr = ints("rows.row_indptr", indptr),
            .capacity = capacity,
            .max_seqs = capacity,
            .max_rows_per_seq = 1};
  }

  // The metadata of a full, a sliding and a compressed group, for `capacity` rows.
  struct MetadataHandles {
    Handle tables[3], slots[3], sliding_begin, full_end, sliding_end, entry_end;
    int64_t table_stride;
    int32_t block_size;

    [[nodiscard]] std::vector<GroupMetadata> at(const Addresses& at) const {
      const auto table = [&](int i, int32_t tokens_per_entry = 1) {
        return BlockTable{.blocks = at.get<int32_t>(tables[i]),
                          .stride = table_stride,
                          .block_size = block_size,
                          .tokens_per_entry = tokens_per_entry};
      };
      return {FullMetadata{at.get<int64_t>(slots[0]), at.get<int32_t>(full_end), table(0)},
              SlidingMetadata{at.get<int64_t>(slots[1]), at.get<int32_t>(sliding_begin),
                              at.get<int32_t>(sliding_end), kWindow, table(1)},
              CompressedMetadata{at.get<int64_t>(slots[2]), at.get<int32_t>(entry_end),
                                 table(2, kTokensPerEntry)}};
    }
  };
  MetadataHandles metadata(int32_t capacity) {
    MetadataHandles m;
    m.block_size = s_.block_size;
    m.table_stride = (kMaxLen + s_.block_size - 1) / s_.block_size + 2;
    for (int g = 0; g < 3; ++g) {
      std::vector<int32_t> blocks(static_cast<size_t>(max_slots_ * m.table_stride));
      for (int32_t& block : blocks) block = 1 + stream_.below(1 << 28);
      m.tables[g] = ints("table", blocks);
      m.slots[g] = poison("slot_mapping", capacity, Element::kI64);
    }
    m.full_end = poison("full.kv_end", capacity);
    m.sliding_begin = poison("sliding.kv_begin", capacity);
    m.sliding_end = poison("sliding.kv_end", capacity);
    m.entry_end = poison("entry_end", capacity);
    return m;
  }

  // `count` random tokens for each sequence of the batch; some are -2, which draw may return.
  Handle drawn(const char* name, int32_t count = 1) {
    std::vector<int32_t> tokens(static_cast<size_t>(count) * static_cast<size_t>(s_.max_seqs));
    for (int32_t& token : tokens) token = stream_.one_in(20) ? -2 : any_token();
    return ints(name, tokens);
  }
  Handle probabilities(int32_t count = 1) {
    const int32_t size = count * s_.max_seqs;
    std::vector<float> values(static_cast<size_t>(size));
    for (float& value : values) value = static_cast<float>(stream_.below(1000)) * 1e-3f;
    return op.add(
        float_array("probabilities", Element::kF32, Element::kF32, size,
                    [values](float* to) { std::copy(values.begin(), values.end(), to); }));
  }
  // The number of accepted drafts of each sequence of the batch, at random.
  Handle num_accepted() {
    std::vector<int32_t> counts(static_cast<size_t>(s_.max_seqs));
    for (size_t i = 0; i < counts.size(); ++i) {
      const int32_t num_drafts = draft_lens_[static_cast<size_t>(batch_slots_[i])];
      const bool is_decode = kinds_[i] == static_cast<int32_t>(RowKind::kDecode);
      counts[i] = is_decode ? stream_.below(num_drafts + 1) : 0;
    }
    return ints("num_accepted", counts);
  }
  // Draws that follow the drafts most of the time.
  Handle target_tokens() {
    std::vector<int32_t> tokens(static_cast<size_t>(logit_ends_.back()) + 3, -1);
    for (int32_t i = 0; i < s_.num_seqs; ++i) {
      const auto slot = static_cast<size_t>(batch_slots_[static_cast<size_t>(i)]);
      for (int32_t row = logit_ends_[static_cast<size_t>(i)];
           row < logit_ends_[static_cast<size_t>(i) + 1]; ++row) {
        const int32_t j = row - logit_ends_[static_cast<size_t>(i)];
        const bool follows = j < s_.num_draft_tokens && !stream_.one_in(5);
        tokens[static_cast<size_t>(row)] =
            stream_.one_in(25) ? -2
            : follows
                ? drafts_[slot * static_cast<size_t>(s_.num_draft_tokens) + static_cast<size_t>(j)]
                : any_token();
      }
    }
    return ints("target_tokens", tokens);
  }

  template <class T>
  Handle ints(std::string name, const std::vector<T>& values) {
    return op.add(int_array(std::move(name), Role::kInOut, values));
  }
  Handle poison(std::string name, int64_t count, Element element = Element::kI32) {
    return op.add(output_array(std::move(name), element, element, count, 0));
  }
  [[nodiscard]] int32_t num_verify_rows() const { return verify_ends_.back(); }
  [[nodiscard]] int32_t num_first_rows() const { return first_ends_.back(); }
  [[nodiscard]] Handle verify_indptr() const { return verify_indptr_; }
  [[nodiscard]] Handle first_indptr() const { return first_indptr_; }
  // The SequenceResults of the batch; only emitted_len is set.
  Handle results() {
    constexpr size_t kWords = sizeof(SequenceResult) / 4;
    std::vector<int32_t> words(static_cast<size_t>(s_.max_seqs) * kWords);
    for (size_t i = 0; i < emitted_.size(); ++i) words[i * kWords] = emitted_[i];
    return ints("results", words);
  }
  // The same with tokens, a few of which are invalid.
  Handle emitted_results() {
    std::vector<int32_t> words(static_cast<size_t>(s_.max_seqs) * sizeof(SequenceResult) / 4);
    for (size_t i = 0; i < emitted_.size(); ++i) {
      SequenceResult result;
      result.emitted_len = emitted_[i];
      for (int32_t& token : result.tokens) {
        token = stream_.one_in(20) ? -2 : stream_.below(kTokens + 2) * s_.spread;
      }
      std::memcpy(words.data() + i * sizeof(result) / 4, &result, sizeof(result));
    }
    return ints("results", words);
  }
  // All sequence slots: some adjust, with prompts that end before, in and after what is prefilled.
  SamplingHandles sampling() {
    const int32_t vocab_size = vocab_size_of(s_);
    SamplingArrays arrays(max_slots_, vocab_size);
    for (int32_t slot = 0; slot < max_slots_; ++slot) {
      if (stream_.one_in(4)) continue;
      const int32_t len = lens_[static_cast<size_t>(slot)];
      arrays.set(slot, {.prompt_len = std::max(0, len - 10 + stream_.below(20))});
    }
    for (int32_t& count : arrays.counts) count = stream_.below(3);
    const auto num_words = static_cast<size_t>(mask_words(vocab_size));
    for (size_t i = 0; i < arrays.seen.size(); ++i) {
      const int32_t num_ids = vocab_size - 32 * static_cast<int32_t>(i % num_words);
      const uint32_t of_ids = num_ids >= 32 ? ~0u : (uint32_t{1} << num_ids) - 1;
      arrays.seen[i] = static_cast<uint32_t>(stream_.next()) & of_ids;
    }
    return {op, arrays, Role::kInOut};
  }
  // Some sequence slots, in random order.
  std::vector<int32_t> some_slots() {
    std::vector<int32_t> slots;
    for (const int32_t slot : batch_slots_) {
      if (stream_.one_in(2)) slots.push_back(slot);
    }
    return slots;
  }
  Stream& stream() { return stream_; }

  OpInstance op;

 private:
  int32_t any_token() { return stream_.below(kTokens) * s_.spread; }

  void make_batch(StateOp op_kind) {
    const auto size = static_cast<size_t>(s_.max_seqs);
    std::vector<int32_t> slots(static_cast<size_t>(max_slots_));
    std::iota(slots.begin(), slots.end(), 0);
    shuffle(slots, stream_);
    batch_slots_.assign(slots.begin(), slots.begin() + s_.max_seqs);
    kinds_.assign(size, 0);
    starts_.assign(size, kNoPart);
    lens_.assign(static_cast<size_t>(max_slots_), 1);
    // Only with a token before the newest is there a position with KV to draft from.
    const int32_t shortest = s_.drafted_by == DraftedBy::kFixed ? 2 : 1;
    for (int32_t& len : lens_) len = shortest + stream_.below(kMaxLen - 30);
    for (int32_t i = 0; i < s_.num_seqs; ++i) kinds_[static_cast<size_t>(i)] = stream_.below(4);
    std::sort(kinds_.begin(), kinds_.begin() + s_.num_seqs);
    int32_t num_drafting = 0;
    verify_ends_ = first_ends_ = logit_ends_ = {0};
    for (size_t i = 0; i < static_cast<size_t>(s_.num_seqs); ++i) {
      const auto kind = static_cast<RowKind>(kinds_[i]);
      int32_t& len = lens_[static_cast<size_t>(batch_slots_[i])];
      const bool is_decode = kind == RowKind::kDecode;
      const bool is_drafting = is_decode || kind == RowKind::kPrefillFinal;
      num_drafting += is_drafting;
      int32_t rows = s_.num_draft_tokens + 1;
      if (!is_decode) {
        rows = 1 + stream_.below(20);
        starts_[i] = len;
        // Before its chunk is assembled a sequence may still hold anything.
        if (op_kind != StateOp::kAssembleVerifyRows) len += rows;
        const bool has_drawn = s_.drafted_by != DraftedBy::kModel && is_drafting;
        if (has_drawn) ++len;  // the token just drawn
      }
      emitted_.push_back(is_decode ? std::min(1 + stream_.below(rows), len - 1) : 0);
      const int32_t first = first_rows_of(kind, rows, len);
      const int32_t logits = is_decode                          ? rows
                             : kind == RowKind::kPrefillFinal   ? 1
                             : kind == RowKind::kPrefillPartial ? 0
                                                                : rows;
      verify_ends_.push_back(verify_ends_.back() + rows);
      first_ends_.push_back(first_ends_.back() + first);
      logit_ends_.push_back(logit_ends_.back() + logits);
    }
    std::vector<int32_t> tokens(static_cast<size_t>(verify_ends_.back()) + 4);
    for (int32_t& token : tokens) token = any_token();
    const auto padded = [&](std::vector<int32_t> ends) {
      ends.resize(size + 1, 0);  // stale after the batch
      return ends;
    };
    num_seqs_ = ints<int32_t>("num_seqs", {s_.num_seqs});
    counts_ = ints("counts", words_of({.num_seqs = s_.num_seqs,
                                       .num_drafting = num_drafting,
                                       .num_verify_rows = verify_ends_.back(),
                                       .num_first_rows = first_ends_.back(),
                                       .num_logit_rows = logit_ends_.back()}));
    batch_slot_ = ints("batch_slot", batch_slots_);
    kind_ = ints("kind", kinds_);
    prefill_start_ = ints("prefill_start", starts_);
    std::vector<int32_t> next_tokens(size);
    for (int32_t& token : next_tokens) token = any_token();
    next_token_ = ints("next_token", next_tokens);
    std::vector<int32_t> num_drafts(size);
    for (int32_t& count : num_drafts) {
      count = stream_.one_in(5) ? kLeftOut : stream_.below(s_.num_draft_tokens + 1);
    }
    num_drafts_ = ints("num_drafts", num_drafts);
    std::vector<int32_t> num_kept(size);
    for (int32_t& count : num_kept) count = stream_.below(8);
    num_kept_ = ints("num_kept", num_kept);
    verify_indptr_ = ints("verify_indptr", padded(verify_ends_));
    first_indptr_ = ints("first_indptr", padded(first_ends_));
    logit_indptr_ = ints("logit_indptr", padded(logit_ends_));
    prefill_tokens_ = ints("prefill_tokens", tokens);
  }

  // Rows in the drafter's first pass of a sequence with `rows` in the verify pass.
  [[nodiscard]] int32_t first_rows_of(RowKind kind, int32_t rows, int32_t len) const {
    switch (s_.drafted_by) {
      case DraftedBy::kModel:
        return std::min(kind == RowKind::kDecode ? 2 : rows, len);
      case DraftedBy::kHead:
        return kind == RowKind::kScore ? 0 : rows;
      case DraftedBy::kFixed:
        return kind == RowKind::kDecode || kind == RowKind::kPrefillFinal ? 1 : 0;
    }
    return 0;
  }

  void make_sequences(StateOp op_kind) {
    const auto size = static_cast<size_t>(max_slots_);
    const int32_t k = s_.num_draft_tokens;
    std::vector<int32_t> limits(size);
    std::vector<int32_t> max_drafts(size);
    std::vector<int32_t> active(size);
    std::vector<uint64_t> seeds(size);
    std::vector<int32_t> num_stops(size);
    std::vector<int32_t> stops(size * kMaxStopIds, 12345);
    std::vector<int32_t> history(size * kMaxLen);
    std::vector<int32_t> draft_lens(size);
    drafts_.resize(size * static_cast<size_t>(k));
    // Few different tokens, where the op depends on repeated ones.
    const int32_t num_tokens = op_kind == StateOp::kProposeNgram ? 4 : kTokens;
    for (int32_t& token : history) token = stream_.below(num_tokens) * s_.spread;
    for (int32_t& token : drafts_) token = any_token();
    for (size_t slot = 0; slot < size; ++slot) {
      // Often only one or two more tokens fit.
      const int32_t room = stream_.one_in(2) ? stream_.below(3) : stream_.below(30);
      limits[slot] = std::min(kMaxLen, lens_[slot] + room);
      active[slot] = lens_[slot] < limits[slot] && !stream_.one_in(6) ? 1 : 0;
      seeds[slot] = stream_.next();
      num_stops[slot] = stream_.one_in(2) ? 0 : stream_.below(4);
      for (int32_t j = 0; j < num_stops[slot]; ++j) {
        stops[slot * kMaxStopIds + static_cast<size_t>(j)] = any_token();
      }
      draft_lens[slot] = std::min(stream_.one_in(2) ? k : stream_.below(k + 1),
                                  std::max(0, limits[slot] - lens_[slot]));
      max_drafts[slot] = stream_.one_in(2) ? k : stream_.below(k + 1);
    }
    known_len_ = ints("known_len", lens_);
    limit_ = ints("limit", limits);
    max_drafts_ = ints("max_drafts", max_drafts);
    is_active_ = ints("is_active", active);
    seed_ = ints("seed", seeds);
    num_stop_ids_ = ints("num_stop_ids", num_stops);
    stop_ids_ = ints("stop_ids", stops);
    history_ = ints("history", history);
    draft_tokens_ = ints("draft_tokens", drafts_);
    draft_len_ = ints("draft_len", draft_lens);
    draft_lens_ = draft_lens;
    std::vector<int32_t> sources(size);
    std::vector<int32_t> draft_sources(size);
    for (int32_t& of : sources) of = stream_.one_in(2) ? kAllSources : stream_.below(kAllSources);
    for (int32_t& source : draft_sources) source = stream_.below(kNumDraftSources);
    sources_ = ints("sources", sources);
    draft_source_ = ints("draft_source", draft_sources);
  }

  StateSpec s_;
  int32_t max_slots_;
  Stream stream_;
  std::vector<int32_t> batch_slots_, kinds_, starts_, lens_, drafts_, draft_lens_;
  std::vector<int32_t> verify_ends_, first_ends_, logit_ends_;
  std::vector<int32_t> emitted_;  // by sequence of the batch
  Handle num_seqs_, counts_, batch_slot_, kind_, prefill_start_, next_token_, num_drafts_,
      num_kept_, verify_indptr_, first_indptr_, logit_indptr_, prefill_tokens_;
  Handle known_len_, limit_, is_active_, seed_, num_stop_ids_, stop_ids_, history_, draft_tokens_,
      draft_len_, max_drafts_, sources_, draft_source_;
};

}  // namespace paceline::testing
