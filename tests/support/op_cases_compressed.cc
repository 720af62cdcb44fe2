// SPDX-License-Identifier: Apache-2.0
//
// Builders of the op cases of compressed attention.

#include "support/op_cases_compressed.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "ops/compressed.h"
#include "support/rope_arrays.h"
#include "support/row_arrays.h"
#include "support/row_values.h"
#include "support/store_arrays.h"

namespace paceline::testing {
namespace {

constexpr int32_t kMaxPositions = 2048;
constexpr int32_t kOffset = 1;
// A number of a row in [0, count).
int32_t number_of(uint64_t seed, uint64_t purpose, int64_t id, int32_t count) {
  return Stream(seed, purpose, static_cast<uint64_t>(id)).below(count);
}

// The sequences of rows whose sequences do not matter otherwise.
Handle add_seq_slots(OpInstance& op, const Rows& rows, bool is_one) {
  return op.add(row_ints<int32_t>("seq_slot", rows, [&](int64_t id) -> int32_t {
    return is_inert(id) ? -1 : is_one ? 1 : static_cast<int32_t>(id % kSequences);
  }));
}

// How many entries a row sees: none, all, as many as are chosen or one more, or any number.
int32_t visible_entries(const EntriesSpec& s, uint64_t seed, int64_t id) {
  if (s.sees_all) return s.num_entries;
  if (is_inert(id)) return 0;
  const int32_t edges[] = {s.num_entries, 0, 1, s.top_k, s.top_k + 1, s.num_entries - 1};
  const int32_t any = number_of(seed, kBias, id, s.num_entries + 1);
  return std::clamp(id < 6 ? edges[id] : any, 0, s.num_entries);
}

// Pieces of the rows as sequences.
struct SequenceArrays {
  SequenceArrays(OpInstance& op, const Rows& rows, int32_t rows_per_seq, uint64_t seed) {
    const auto count = static_cast<int32_t>(rows.ids.size());
    std::vector<int32_t> indptr = {0};
    Stream stream(seed, kNoise, static_cast<uint64_t>(count));
    while (indptr.back() < count) {
      const int32_t any = stream.below(stream.one_in(3) ? 100 : 5);
      const int32_t own = rows_per_seq > 0 ? rows_per_seq : any;
      indptr.push_back(std::min(indptr.back() + own, count));
      max_rows_per_seq = std::max(max_rows_per_seq, indptr.back() - indptr[indptr.size() - 2]);
    }
    const auto seqs = static_cast<int32_t>(indptr.size()) - 1;
    max_seqs = seqs + 2;
    indptr.resize(static_cast<size_t>(max_seqs) + 1, count + 1);  // stale
    num_seqs = op.add(int_array<int32_t>("num_seqs", Role::kInput, {seqs}));
    row_indptr = op.add(int_array("row_indptr", Role::kInput, indptr));
  }
  int32_t max_seqs = 0;
  int32_t max_rows_per_seq = 1;
  Handle num_seqs = kNoArray;
  Handle row_indptr = kNoArray;
};

}  // namespace

OpInstance make_append_window_entries(const WindowEntrySpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const Element element = element_of(s.dtype);
  const int64_t width = s.q_width + s.head_dim;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle qkv_a = op.add(normal_rows("qkv_a", element, rows, width, width, seed, kX,
                                          /*varies_in_scale=*/true, Role::kInOut));
  const RopeArrays rope(op, rows, seed, s.rope_head_dim, kMaxPositions, kOffset);
  const Handle slots = add_slots(op, "slot_mapping", rows, s.block_size);
  const Handle q_norm = op.add(normal_constant("q_norm", Element::kF32, s.q_width, seed, kWeight));
  const Handle entry_norm =
      op.add(normal_constant("entry_norm", Element::kF32, s.head_dim, seed, kXWeight));
  const WrittenStore entries(op, "pool", element, s.head_dim, s.block_size, rows);
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    append_window_entries(ctx, AppendWindowEntriesParams{.num_rows = at.get<int32_t>(num_rows),
                                                         .max_rows = max_rows,
                                                         .qkv_a = at.raw(qkv_a),
                                                         .q_width = s.q_width,
                                                         .slot_mapping = at.get<int64_t>(slots),
                                                         .q_norm = at.get<float>(q_norm),
                                                         .entry_norm = at.get<float>(entry_norm),
                                                         .norm_weight_offset = 1.0f,
                                                         .norm_eps = 1e-6f,
                                                         .rope = rope.at(at, s.is_interleaved),
                                                         .entries = entries.view(at),
                                                         .head_dim = s.head_dim,
                                                         .rope_head_dim = s.rope_head_dim,
                                                         .dtype = activation_dtype(ctx, s.dtype)});
  });
  return op;
}

OpInstance make_rotate_heads(const WindowEntrySpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int64_t width = int64_t{s.num_heads} * s.head_dim;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle x = op.add(normal_rows("x", element_of(s.dtype), rows, width, width, seed, kX,
                                      /*varies_in_scale=*/true, Role::kInOut));
  const RopeArrays rope(op, rows, seed, s.rope_head_dim, kMaxPositions, kOffset);
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    rotate_heads(ctx, RotateHeadsParams{.num_rows = at.get<int32_t>(num_rows),
                                        .max_rows = max_rows,
                                        .x = at.raw(x),
                                        .has_norm = s.has_norm,
                                        .norm_eps = 1e-6f,
                                        .rope = rope.at(at, s.is_interleaved),
                                        .is_inverse = s.is_inverse,
                                        .num_heads = s.num_heads,
                                        .head_dim = s.head_dim,
                                        .rope_head_dim = s.rope_head_dim,
                                        .dtype = activation_dtype(ctx, s.dtype)});
  });
  return op;
}

OpInstance make_append_tail(const CompressSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int64_t stride = s.dim + 8;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle x = op.add(normal_rows("x", Element::kF32, rows, s.dim, stride, seed, kX));
  const Handle slots = add_slots(op, "slot_mapping", rows, s.block_size);
  const WrittenStore tail(op, "pool", Element::kF32, s.dim, s.block_size, rows);
  op.arrays[static_cast<size_t>(tail.pool)].compare = Compare::kExact;  // copies
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    append_tail(ctx, AppendTailParams{.num_rows = at.get<int32_t>(num_rows),
                                      .max_rows = max_rows,
                                      .x = at.get<float>(x),
                                      .x_stride = stride,
                                      .slot_mapping = at.get<int64_t>(slots),
                                      .tail = tail.view(at),
                                      .width = s.dim});
  });
  return op;
}

OpInstance make_compress(const CompressSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const Element element = element_of(s.dtype);
  const int32_t parts = s.overlaps ? 2 : 1;
  const int32_t used_width = 2 * parts * (s.dim + s.index_dim);
  const int32_t tail_width = (used_width + 3) / 4 * 4 + 4;
  const Handle num_rows = add_num_rows(op, rows);
  RopeArrays rope(op, rows, seed, s.rope_head_dim, kMaxPositions, kOffset);
  // Most rows complete an entry; some of them the first one, which has no entry before it.
  const auto position_of = [=](int64_t id) -> int32_t {
    if (is_inert(id)) return 0;
    const int32_t entry =
        id % 4 == 1 ? 0 : number_of(seed, kIndex, id, kMaxPositions / s.tokens_per_entry);
    return entry * s.tokens_per_entry + s.tokens_per_entry - 1;
  };
  const auto completes = [=](int64_t id) { return !is_inert(id) && id % 5 != 3; };
  const Handle positions = op.add(row_ints<int32_t>("positions of rows", rows, [&](int64_t id) {
    return position_of(id) - (completes(id) || is_inert(id) ? 0 : 1);
  }));
  const Handle seq_slots = add_seq_slots(op, rows, false);
  const Handle slots = op.add(row_ints<int64_t>("entry_slots", rows, [&](int64_t id) -> int64_t {
    return completes(id) ? s.block_size + id : 0;
  }));
  const StoreArrays tail(op, "tail", Element::kF32, kMaxPositions, tail_width, 16, seed, kKeys);
  const auto compressor = [&](const char* name, int32_t dim, uint64_t salt) {
    return std::array{
        op.add(normal_constant(std::string("bias of ") + name, Element::kF32,
                               int64_t{s.tokens_per_entry} * parts * dim, seed + salt, kBias)),
        op.add(normal_constant(std::string("norm of ") + name, Element::kF32, dim, seed + salt,
                               kWeight))};
  };
  const std::array<Handle, 2> of_entries = compressor("entries", s.dim, 0);
  const WrittenStore entries(op, "entries", element, s.dim, s.block_size, rows);
  const bool has_index = s.index_dim > 0;
  const std::array<Handle, 2> of_keys = has_index ? compressor("keys", s.index_dim, 1) : of_entries;
  const WrittenStore keys =
      has_index ? WrittenStore(op, "keys", element, s.index_dim, s.block_size, rows) : entries;
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    compress(ctx, CompressParams{.num_rows = at.get<int32_t>(num_rows),
                                 .max_rows = max_rows,
                                 .positions = at.get<int32_t>(positions),
                                 .seq_slot = at.get<int32_t>(seq_slots),
                                 .entry_slots = at.get<int64_t>(slots),
                                 .tail = tail.view(at),
                                 .tail_table = tail.blocks(at),
                                 .tail_width = tail_width,
                                 .tokens_per_entry = s.tokens_per_entry,
                                 .overlaps = s.overlaps,
                                 .compressors = {{.dim = s.dim,
                                                  .tail_offset = 0,
                                                  .position_bias = at.get<float>(of_entries[0]),
                                                  .norm = at.get<float>(of_entries[1]),
                                                  .entries = entries.view(at)},
                                                 {.dim = s.index_dim,
                                                  .tail_offset = 2 * parts * s.dim,
                                                  .position_bias = at.get<float>(of_keys[0]),
                                                  .norm = at.get<float>(of_keys[1]),
                                                  .entries = keys.view(at)}},
                                 .num_compressors = has_index ? 2 : 1,
                                 .norm_weight_offset = 1.0f,
                                 .norm_eps = 1e-6f,
                                 .rope = rope.at(at, s.is_interleaved),
                                 .rope_head_dim = s.rope_head_dim});
  });
  return op;
}

OpInstance make_index_scores(const EntriesSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const Element element = element_of(s.dtype);
  const int64_t width = int64_t{s.num_heads} * s.head_dim;
  const int64_t weights_stride = s.num_heads + 5;
  const int64_t scores_stride = s.num_entries + 3;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle q = op.add(normal_rows("q", element, rows, width, width, seed, kX));
  const Handle weights = op.add(
      normal_rows("weights", Element::kF32, rows, s.num_heads, weights_stride, seed, kWeight));
  const Handle seq_slots = add_seq_slots(op, rows, s.rows_per_seq != 0);
  const Handle ends = op.add(row_ints<int32_t>(
      "entry_end", rows, [&](int64_t id) { return visible_entries(s, seed, id); }));
  const StoreArrays keys(op, "keys", element, s.num_entries, s.head_dim, s.block_size, seed, kKeys);
  const int32_t max_rows = rows.max_rows;
  OpArray out =
      output_array("scores", Element::kF32, Element::kF32, max_rows * scores_stride, scores_stride);
  out.rms_bound = kTensorCoreBound;
  const Handle scores = op.add(std::move(out));
  const SequenceArrays sequences(op, rows, s.rows_per_seq, seed);
  op.set_run([=](auto& ctx, const Addresses& at) {
    IndexScoresParams p = {.num_rows = at.get<int32_t>(num_rows),
                           .max_rows = max_rows,
                           .q = at.raw(q),
                           .weights = at.get<float>(weights),
                           .weights_stride = weights_stride,
                           .seq_slot = at.get<int32_t>(seq_slots),
                           .entry_end = at.get<int32_t>(ends),
                           .table = keys.blocks(at),
                           .keys = keys.view(at),
                           .scale = 0.01f,
                           .num_heads = s.num_heads,
                           .head_dim = s.head_dim,
                           .top_k = s.top_k,
                           .scores = at.get<float>(scores),
                           .scores_stride = scores_stride,
                           .dtype = activation_dtype(ctx, s.dtype)};
    if (s.rows_per_seq != 0) {
      p.num_seqs = at.get<int32_t>(sequences.num_seqs);
      p.row_indptr = at.get<int32_t>(sequences.row_indptr);
      p.max_seqs = sequences.max_seqs;
      p.max_rows_per_seq = sequences.max_rows_per_seq;
    }
    index_scores(ctx, p);
  });
  return op;
}

OpInstance make_choose_entries(const EntriesSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const int64_t stride = s.num_entries + 3;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle scores = op.add(
      row_array("scores", Element::kF32, Element::kF32, rows, stride, [=](int64_t id, float* to) {
        // What the row does not see is higher than all it sees.
        std::fill_n(to, stride, kInf);
        fill_logits(s.scores, visible_entries(s, seed, id), id, seed, to);
      }));
  const Handle seq_slots = add_seq_slots(op, rows, false);
  const Handle ends = op.add(row_ints<int32_t>(
      "entry_end", rows, [&](int64_t id) { return visible_entries(s, seed, id); }));
  const int32_t max_rows = rows.max_rows;
  const Handle chosen = op.add(
      output_array("chosen", Element::kI32, Element::kI32, int64_t{max_rows} * s.top_k, s.top_k));
  const Handle counts =
      op.add(output_array("num_chosen", Element::kI32, Element::kI32, max_rows, 1));
  op.set_run([=](auto& ctx, const Addresses& at) {
    choose_entries(ctx, ChooseEntriesParams{.num_rows = at.get<int32_t>(num_rows),
                                            .max_rows = max_rows,
                                            .scores = at.get<float>(scores),
                                            .scores_stride = stride,
                                            .seq_slot = at.get<int32_t>(seq_slots),
                                            .entry_end = at.get<int32_t>(ends),
                                            .top_k = s.top_k,
                                            .chosen = at.get<int32_t>(chosen),
                                            .num_chosen = at.get<int32_t>(counts)});
  });
  return op;
}

OpInstance make_compressed_attention(const EntriesSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const Element element = element_of(s.dtype);
  const int64_t width = int64_t{s.num_heads} * s.head_dim;
  const int32_t length = std::max(2 * s.window, 300);  // tokens in the window's store
  const Handle num_rows = add_num_rows(op, rows);
  const Handle q = op.add(normal_rows("q", element, rows, width, width, seed, kX));
  const Handle seq_slots = add_seq_slots(op, rows, false);
  const auto window_end = [=](int64_t id) -> int32_t {
    if (is_inert(id)) return 0;
    return id < 4 ? (id == 0 ? length : static_cast<int32_t>(id))
                  : 1 + number_of(seed, kUp, id, length);
  };
  const Handle begins = op.add(row_ints<int32_t>(
      "window_begin", rows, [&](int64_t id) { return std::max(window_end(id) - s.window, 0); }));
  const Handle window_ends = op.add(row_ints<int32_t>("window_end", rows, window_end));
  const StoreArrays window(op, "window", element, length, s.head_dim, 16, seed, kKeys);
  const Handle ends =
      s.has_entries
          ? op.add(row_ints<int32_t>("entry_end", rows,
                                     [&](int64_t id) { return visible_entries(s, seed, id); }))
          : kNoArray;
  const StoreArrays entries(op, "entries", element, s.num_entries, s.head_dim, s.block_size, seed,
                            kResidual);
  const int32_t max_rows = rows.max_rows;
  Handle chosen = kNoArray;
  Handle counts = kNoArray;
  if (s.top_k > 0) {
    // Any ascending entries of the visible ones.
    std::vector<int32_t> lists(static_cast<size_t>(max_rows) * static_cast<size_t>(s.top_k),
                               kMaxInt);
    std::vector<int32_t> counts_of_rows(static_cast<size_t>(max_rows), 0);
    for (size_t i = 0; i < rows.ids.size(); ++i) {
      std::vector<int32_t> all(static_cast<size_t>(visible_entries(s, seed, rows.ids[i])));
      std::iota(all.begin(), all.end(), 0);
      Stream stream(seed, kOrdering, static_cast<uint64_t>(rows.ids[i]));
      shuffle(all, stream);
      all.resize(std::min(all.size(), static_cast<size_t>(s.top_k)));
      std::sort(all.begin(), all.end());
      counts_of_rows[i] = static_cast<int32_t>(all.size());
      std::copy(all.begin(), all.end(), lists.begin() + static_cast<int64_t>(i) * int64_t{s.top_k});
    }
    chosen = op.add(int_array("chosen", Role::kInput, lists));
    counts = op.add(int_array("num_chosen", Role::kInput, counts_of_rows));
  }
  const Handle sinks =
      s.has_sinks ? op.add(normal_constant("sinks", Element::kF32, s.num_heads, seed, kBias, 2.0f))
                  : kNoArray;
  const Handle y =
      op.add(output_array("y", Element::kF32, element, int64_t{max_rows} * width, width));
  op.set_run([=](auto& ctx, const Addresses& at) {
    compressed_attention(
        ctx, CompressedAttentionParams{.num_rows = at.get<int32_t>(num_rows),
                                       .max_rows = max_rows,
                                       .q = at.raw(q),
                                       .seq_slot = at.get<int32_t>(seq_slots),
                                       .window_begin = at.get<int32_t>(begins),
                                       .window_end = at.get<int32_t>(window_ends),
                                       .window_table = window.blocks(at),
                                       .window = window.view(at),
                                       .entry_end = at.get<int32_t>(ends),
                                       .entry_table = entries.blocks(at),
                                       .entries = entries.view(at),
                                       .chosen = at.get<int32_t>(chosen),
                                       .num_chosen = at.get<int32_t>(counts),
                                       .top_k = s.top_k,
                                       .scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim)),
                                       .sinks = at.get<float>(sinks),
                                       .y = at.raw(y),
                                       .num_heads = s.num_heads,
                                       .head_dim = s.head_dim,
                                       .dtype = activation_dtype(ctx, s.dtype)});
  });
  return op;
}

}  // namespace paceline::testing
