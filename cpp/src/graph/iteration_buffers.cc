// SPDX-License-Identifier: Apache-2.0

// The memory of an iteration, and the bounds of its passes.

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/overloaded.h"
#include "graph/iteration.h"
#include "graph/iteration_ring.h"
#include "metadata/pass_rows.h"
#include "wire/batch_shape.h"
#include "wire/blocks.h"
#include "wire/limits.h"
#include "wire/sequence_result.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {
namespace {

// `num_seqs` null: each row is a sequence of its own.
PassRows allocate_rows(DeviceArena& arena, int32_t capacity, const int32_t* num_seqs,
                       const int32_t* row_indptr) {
  auto* num_rows = arena.allocate<int32_t>(1, "rows");
  return {.num_rows = num_rows,
          .token_ids = arena.allocate<int32_t>(capacity, "rows"),
          .positions = arena.allocate<int32_t>(capacity, "rows"),
          .seq_slot = arena.allocate<int32_t>(capacity, "rows"),
          .capacity = capacity,
          .num_seqs = num_seqs != nullptr ? num_seqs : num_rows,
          .row_indptr = row_indptr,
          .max_seqs = 0,  // with_extent sets these two
          .max_rows_per_seq = 0};
}

GroupMetadata allocate_metadata(DeviceArena& arena, const KvGroup& group, const BlockTable& table,
                                int32_t capacity) {
  auto* slots = arena.allocate<int64_t>(capacity, "metadata");
  const auto full = [&]() -> GroupMetadata {
    return FullMetadata{.slot_mapping = slots,
                        .kv_end = arena.allocate<int32_t>(capacity, "metadata"),
                        .table = table};
  };
  const auto sliding_entries = [&](int32_t window) -> GroupMetadata {
    return SlidingMetadata{.slot_mapping = slots,
                           .kv_begin = arena.allocate<int32_t>(capacity, "metadata"),
                           .kv_end = arena.allocate<int32_t>(capacity, "metadata"),
                           .window = window,
                           .table = table};
  };
  const auto entries_of_tokens = [&]() -> GroupMetadata {
    return CompressedMetadata{.slot_mapping = slots,
                              .entry_end = arena.allocate<int32_t>(capacity, "metadata"),
                              .table = table};
  };
  return std::visit(
      Overloaded{[&](const FullKv&) { return full(); }, [&](const LatentKv&) { return full(); },
                 [&](const SlidingKv& sliding) { return sliding_entries(sliding.window); },
                 [&](const WindowEntryKv& entries) { return sliding_entries(entries.window); },
                 [&](const TailKv& tail) { return sliding_entries(tail.window); },
                 [&](const CompressedKv&) { return entries_of_tokens(); },
                 [&](const StateKv&) { return entries_of_tokens(); },
                 [&](const RecordKv&) { return full(); }},
      group.kind);
}

StagedInputs allocate_staged(DeviceArena& arena, const InputCapacity& capacity) {
  StagedInputs staged{};
  const int64_t bytes = place_inputs(capacity, InputSide::kDevice, nullptr, staged);
  place_inputs(capacity, InputSide::kDevice, arena.allocate<std::byte>(bytes, "staged inputs"),
               staged);
  return staged;
}

SamplingState allocate_sampling(DeviceArena& arena, const BatchShape& shape, int32_t vocab_size) {
  const int64_t num_seqs = shape.max_seqs;
  const auto ints = [&](int64_t count) { return arena.allocate<int32_t>(count, "sampling"); };
  const auto floats = [&](int64_t count) { return arena.allocate<float>(count, "sampling"); };
  const auto masks = [&] {
    return arena.allocate<uint32_t>(num_seqs * mask_words(vocab_size), "sampling");
  };
  return {.adjusts = ints(num_seqs),
          .truncates = ints(num_seqs),
          .repetition_penalty = floats(num_seqs),
          .presence_penalty = floats(num_seqs),
          .frequency_penalty = floats(num_seqs),
          .prompt_len = ints(num_seqs),
          .min_tokens = ints(num_seqs),
          .num_bias = ints(num_seqs),
          .bias_ids = ints(num_seqs * kMaxLogitBias),
          .bias_values = floats(num_seqs * kMaxLogitBias),
          .num_bad_words = ints(num_seqs),
          .bad_word_ends = ints(num_seqs * kMaxBadWords),
          .bad_word_tokens = ints(num_seqs * kMaxBadWordTokens),
          .has_allowed = ints(num_seqs),
          .allowed = masks(),
          .first_mask = ints(num_seqs),
          .masks = nullptr,
          .masks_offset = arena.allocate<int64_t>(1, "sampling"),
          .top_k = ints(num_seqs),
          .top_p = floats(num_seqs),
          .min_p = floats(num_seqs),
          .num_logprobs = ints(num_seqs),
          .num_prompt_logprobs = ints(num_seqs),
          .counts = ints(num_seqs * vocab_size),
          .seen = masks(),
          .vocab_size = vocab_size};
}

// Gives the metadata of blocks the rules of their layers.
GroupMetadata with_block(GroupMetadata metadata, const BlockConfig& block) {
  std::visit(Overloaded{[&](FullMetadata& full) { full.block.sees_all = !block.full.is_causal; },
                        [&](SlidingMetadata& sliding) {
                          sliding.block = {.sees_all = !block.sliding.is_causal,
                                           .is_anchored = block.sliding.is_anchored};
                        },
                        [](CompressedMetadata&) {}},
             metadata);
  return metadata;
}

int64_t padded_rows(const IterationOptions& options, int32_t rows) {
  return options.padded_rows != nullptr ? options.padded_rows(rows) : rows;
}

// `rows`: of one draft of each sequence, `all_rows`: of all drafts.
BlockHeadScratch allocate_heads(DeviceArena& arena, const DecoderConfig& draft, int64_t rows,
                                int64_t all_rows, DType activation_dtype) {
  const BlockConfig& block = draft.drafter->block;
  const auto floats = [&](int64_t width) { return arena.allocate<float>(rows * width, "logits"); };
  const auto activations = [&](int64_t width) {
    return arena.allocate<std::byte>(rows * width * dtype_bytes(activation_dtype), "activations");
  };
  BlockHeadScratch heads;
  if (const SelectorConfig& selector = block.selector; selector.top > 0) {
    const int64_t count = all_rows * selector.top;
    heads.lists = {.ids = arena.allocate<int32_t>(count, "proposals"),
                   .logits = arena.allocate<float>(count, "proposals"),
                   .scores = arena.allocate<float>(count * selector.top, "proposals"),
                   .count = selector.top};
    heads.projected = arena.allocate<float>(all_rows * selector.rank, "logits");
    heads.followed = floats(selector.top);
  }
  if (block.markov == MarkovHead::kNone) return heads;
  if (block.has_markov_mix() || block.confidence == ConfidenceHead::kHiddenAndToken) {
    heads.e = floats(block.markov_rank);
  }
  if (block.has_markov_mix()) {
    heads.factors = activations(block.markov_rank);
    heads.inputs = activations(block.markov_inputs(draft.hidden));
    heads.mix = floats(block.markov_outputs());
  }
  if (block.markov == MarkovHead::kRnn) heads.state = floats(block.markov_rank);
  return heads;
}

BlockBuffers allocate_blocks(DeviceArena& arena, const IterationOptions& options,
                             const KvLayout& layout, std::span<const BlockTable> tables,
                             const int32_t* num_drafting, const DecoderConfig& draft,
                             DType activation_dtype) {
  const BlockConfig& block = draft.drafter->block;
  const int32_t max_seqs = options.shape.max_seqs;
  const int32_t k = options.shape.num_draft_tokens;
  const int32_t capacity = max_seqs * block.num_rows(k);
  BlockBuffers b;
  b.row_indptr = arena.allocate<int32_t>(max_seqs + 1, "rows");
  b.rows = allocate_rows(arena, capacity, num_drafting, b.row_indptr);
  b.rows.block_first = arena.allocate<int32_t>(capacity, "rows");
  b.rows.block_last = arena.allocate<int32_t>(capacity, "rows");
  for (size_t g = 0; g < layout.groups.size(); ++g) {
    const bool is_used = layout.is_read_by(KvOwner::kDraft, static_cast<GroupId>(g));
    b.metadata.push_back(
        is_used ? with_block(allocate_metadata(arena, layout.groups[g], tables[g], capacity), block)
                : GroupMetadata{});
  }
  b.predicting_rows = arena.allocate<int32_t>(int64_t{max_seqs} * k, "rows");
  b.num_predicting = arena.allocate<int32_t>(1, "rows");
  b.tokens = arena.allocate<int32_t>(int64_t{max_seqs} * (k + 1), "draws");
  b.heads = allocate_heads(arena, draft, padded_rows(options, max_seqs),
                           padded_rows(options, max_seqs * k), activation_dtype);
  if (block.conv.is_used()) {
    b.conv_delta = arena.allocate<float>(
        padded_rows(options, capacity) * block.conv.outputs(draft.hidden), "activations");
  }
  return b;
}

SequenceState allocate_sequences(DeviceArena& arena, const BatchShape& shape,
                                 int32_t max_model_len) {
  const int64_t num_seqs = shape.max_seqs;
  const auto ints = [&](int64_t count) { return arena.allocate<int32_t>(count, "sequence state"); };
  return {.known_len = ints(num_seqs),
          .limit = ints(num_seqs),
          .max_drafts = ints(num_seqs),
          .is_active = ints(num_seqs),
          .seed = arena.allocate<uint64_t>(num_seqs, "sequence state"),
          .temperature = arena.allocate<float>(num_seqs, "sequence state"),
          .num_stop_ids = ints(num_seqs),
          .stop_ids = ints(num_seqs * kMaxStopIds),
          .history = ints(num_seqs * max_model_len),
          .history_stride = max_model_len,
          .draft_tokens = ints(num_seqs * std::max(shape.num_draft_tokens, 1)),
          .draft_len = ints(num_seqs),
          .sources = ints(num_seqs),
          .draft_source = ints(num_seqs),
          .num_draft_tokens = shape.num_draft_tokens};
}

// The first pass also has a row for the token that is drawn after a finished prompt.
int32_t max_first_rows(const BatchShape& shape) { return shape.max_verify_rows + shape.max_seqs; }

// The block table of each group, and its metadata for each pass.
void allocate_groups(DeviceArena& arena, const BatchShape& shape, int32_t max_model_len,
                     const KvLayout& layout, IterationBuffers& b) {
  const int32_t first_capacity = max_first_rows(shape);
  const int32_t output_capacity = std::max(shape.max_logit_rows, shape.max_seqs);
  for (const KvGroup& group : layout.groups) {
    // At least one: ops may compute addresses of entries that are not there.
    const int64_t stride = std::max(num_blocks(group, max_model_len), 1);
    const BlockTable table{
        .blocks = arena.allocate<int32_t>(stride * shape.max_seqs, "block tables"),
        .stride = stride,
        .block_size = group.block_size,
        .tokens_per_entry = tokens_per_entry(group.kind)};
    b.block_tables.push_back(table);
    const auto id = static_cast<GroupId>(b.block_tables.size() - 1);
    const bool is_drafted_from = layout.is_read_by(KvOwner::kDraft, id);
    const auto metadata = [&](bool is_used, int32_t capacity) {
      return is_used ? allocate_metadata(arena, group, table, capacity) : GroupMetadata{};
    };
    b.verify_metadata.push_back(
        metadata(layout.is_read_by(KvOwner::kTarget, id), shape.max_verify_rows));
    b.first_metadata.push_back(metadata(is_drafted_from, first_capacity));
    b.step_metadata.push_back(metadata(is_drafted_from, shape.max_seqs));
    b.output.metadata.push_back(metadata(/*is_used=*/true, output_capacity));
  }
}

// What a draft head needs beyond the buffers of a model: the target's hidden states, and its own
// outputs from one draft step to the next.
void allocate_draft_head(DeviceArena& arena, const IterationOptions& options,
                         const DecoderConfig& target, const DecoderConfig& draft,
                         DType activation_dtype, IterationBuffers& b) {
  const BatchShape& shape = options.shape;
  const int32_t first_capacity = max_first_rows(shape);
  const auto padded = [&](int32_t rows) { return padded_rows(options, rows); };
  const DrafterConfig& drafter = *draft.drafter;
  const auto num_parts = static_cast<int32_t>(std::max<size_t>(drafter.aux_layers.size(), 1));
  const bool averages = drafter.averages_streams();
  const auto width = static_cast<int32_t>(
      num_parts * (averages ? int64_t{target.hidden} : target.residual_width()));
  const int64_t row_bytes = width * dtype_bytes(activation_dtype);
  const auto window_rows = static_cast<int32_t>(padded(first_capacity));
  int64_t num_rows = window_rows;
  const bool keeps_hidden =
      shape.first_rows == FirstRows::kWindow && options.kept_hidden_tokens > 0;
  if (keeps_hidden) {
    b.kept_hidden = {.first_row = window_rows + 1,
                     .num_tokens = options.kept_hidden_tokens,
                     .zero_row = window_rows};
    num_rows += 1 + int64_t{shape.max_seqs} * options.kept_hidden_tokens;
    b.gathered_hidden = arena.allocate<std::byte>(window_rows * row_bytes, "hidden states");
  }
  b.target_hidden = {.data = arena.allocate<std::byte>(num_rows * row_bytes, "hidden states"),
                     .width = width,
                     .aux_layers = drafter.aux_layers,
                     .averages_streams = averages};
  if (keeps_hidden || shape.first_rows == FirstRows::kLast) {
    b.hidden_rows = arena.allocate<int32_t>(first_capacity, "rows");
  }
  // It cannot share b.gathered, since it carries state from one draft step to the next.
  DraftHeadOutput& output = b.draft_output;
  output.feedback = arena.allocate<float>(
      padded(shape.max_seqs) * std::max<int64_t>(draft.residual_width(), draft.embed_width()),
      "hidden states");
  if (const CentroidsConfig& centroids = drafter.centroids; centroids.count > 0) {
    output.centroid_scores =
        arena.allocate<float>(padded(shape.max_seqs) * centroids.count, "logits");
    output.clusters = arena.allocate<int32_t>(int64_t{shape.max_seqs} * centroids.top, "logits");
    output.tokens = arena.allocate<int32_t>(int64_t{shape.max_seqs} * draft.num_logits(), "logits");
  }
}

}  // namespace

IterationExtent full_extent(const BatchShape& shape) {
  return {.num_drafts = shape.num_draft_tokens,
          .num_seqs = shape.max_seqs,
          .num_drafting = shape.max_seqs,
          .num_verify_rows = shape.max_verify_rows,
          .num_first_rows = shape.max_verify_rows + shape.max_seqs,
          .num_logit_rows = shape.max_logit_rows,
          .num_prompt_rows = shape.max_prompt_rows,
          .verify_rows_per_seq = shape.max_verify_rows,
          .logit_rows_per_seq = shape.max_logit_rows,
          .first_rows_per_seq = shape.max_verify_rows + 1,
          .num_forks = shape.max_seqs,
          .num_block_copies = shape.max_seqs * kMaxKvGroups};
}

IterationExtent decode_extent(const BatchShape& shape, int32_t num_seqs, int32_t num_drafts,
                              bool has_logit_work, bool keeps_hidden) {
  const int32_t width = num_drafts + 1;
  return {.num_drafts = num_drafts,
          .num_seqs = num_seqs,
          .num_drafting = num_drafts > 0 ? num_seqs : 0,
          .num_verify_rows = num_seqs * width,
          .num_first_rows = num_seqs * shape.first_rows_per_decode(num_drafts),
          .num_logit_rows = num_seqs * width,
          .verify_rows_per_seq = width,
          .logit_rows_per_seq = width,
          .first_rows_per_seq = shape.first_rows_per_decode(num_drafts),
          .keeps_hidden = keeps_hidden,
          .has_logit_work = has_logit_work};
}

IterationBuffers allocate_iteration_buffers(DeviceArena& arena, const IterationOptions& options,
                                            const KvLayout& layout, const DecoderConfig& target,
                                            const DecoderConfig* draft, DType activation_dtype) {
  const BatchShape& shape = options.shape;
  PACELINE_CHECK(layout.groups.size() <= kMaxKvGroups, layout.groups.size(), " KV groups; at most ",
                 kMaxKvGroups);
  const int32_t first_capacity = max_first_rows(shape);
  IterationBuffers b;
  b.staged = allocate_staged(
      arena, input_capacity(shape, layout, options.max_model_len, target.vocab_size));
  b.sequences = allocate_sequences(arena, shape, options.max_model_len);
  b.sampling = allocate_sampling(arena, shape, target.vocab_size);
  b.current_draft_step = arena.allocate<int32_t>(1, "step state");
  const int32_t output_capacity = std::max(shape.max_logit_rows, shape.max_seqs);
  const int32_t identity_length = std::max(output_capacity, kMaxDraftTokens) + 1;
  std::vector<int32_t> identity(static_cast<size_t>(identity_length));
  std::iota(identity.begin(), identity.end(), 0);
  b.identity = arena.allocate_copy<int32_t>(identity, "draws");
  b.verify_rows = allocate_rows(arena, shape.max_verify_rows, &b.staged.counts->num_seqs,
                                b.staged.verify_indptr);
  b.first_rows =
      allocate_rows(arena, first_capacity, &b.staged.counts->num_seqs, b.staged.first_indptr);
  b.step_rows = allocate_rows(arena, shape.max_seqs, /*num_seqs=*/nullptr, b.identity);
  b.output.rows =
      allocate_rows(arena, output_capacity, /*num_seqs=*/nullptr, /*row_indptr=*/nullptr);
  allocate_groups(arena, shape, options.max_model_len, layout, b);
  ActivationWidths widths;
  widths.merge(target, options.max_model_len);
  if (draft != nullptr) widths.merge(*draft, options.max_model_len);
  const auto padded = [&](int32_t rows) { return padded_rows(options, rows); };
  b.activations =
      allocate_activations(arena, padded(draft != nullptr ? first_capacity : shape.max_verify_rows),
                           widths, activation_dtype);
  b.output.qkv = arena.allocate<std::byte>(
      padded(output_capacity) * widths.qkv * dtype_bytes(activation_dtype), "activations");
  b.output.residual = arena.allocate<float>(output_capacity * widths.residual, "activations");
  b.gathered = arena.allocate<float>(shape.max_logit_rows * widths.residual, "logits");
  b.logits = arena.allocate<float>(
      padded(shape.max_logit_rows) *
          std::max(target.num_logits(), draft != nullptr ? draft->num_logits() : 0),
      "logits");
  b.target_tokens = arena.allocate<int32_t>(shape.max_logit_rows, "draws");
  b.drawn = arena.allocate<int32_t>(shape.max_seqs, "draws");
  b.first_last_row = arena.allocate<int32_t>(shape.max_seqs, "rows");
  b.draft_output = {.feedback = b.gathered, .logits = b.logits};
  if (draft != nullptr && draft->drafter) {
    allocate_draft_head(arena, options, target, *draft, activation_dtype, b);
  }
  const bool drafts_in_blocks =
      draft != nullptr && draft->drafter && draft->drafter->block.size > 0;
  if (drafts_in_blocks) {
    b.blocks = allocate_blocks(arena, options, layout, b.block_tables,
                               &b.staged.counts->num_drafting, *draft, activation_dtype);
  }
  b.draft_stop.keep_drafting = arena.allocate<int32_t>(1, "step state");
  if (options.draft_stop_threshold > 0) {
    const int32_t drafts_per_pass = drafts_in_blocks ? shape.num_draft_tokens : 1;
    b.draft_stop.probabilities =
        arena.allocate<float>(int64_t{shape.max_seqs} * drafts_per_pass, "draws");
    b.draft_stop.threshold = static_cast<float>(options.draft_stop_threshold);
  }
  b.results = arena.allocate<SequenceResult>(shape.max_seqs, "results");
  if (shape.max_logprobs > 0) b.logprobs = allocate_logprobs(arena, shape, target.vocab_size);
  int32_t num_proposals = options.draft_proposals;
  // A selector draws from no more than its candidates.
  if (num_proposals == 0 && drafts_in_blocks) num_proposals = draft->drafter->block.selector.top;
  b.rejection = allocate_rejection(arena, shape, options.rejection_sample_method,
                                   options.samples_drafts && draft != nullptr, num_proposals);
  return b;
}

}  // namespace paceline
