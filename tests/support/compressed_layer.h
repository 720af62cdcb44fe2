// SPDX-License-Identifier: Apache-2.0
#pragma once

// A layer of compressed attention with random weights and sequences, whose blocks lie anywhere in
// pools of NaN, and its ops on rows of those sequences.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "device/cpu_context.h"
#include "metadata/metadata_rows.h"
#include "ops/compressed.h"
#include "support/kv_pool.h"
#include "support/op_checks.h"

namespace paceline::testing::compressed_layer {

struct Shape {
  int32_t num_heads;
  int32_t head_dim;
  int32_t rope;
  int32_t q_width;
  int32_t window;
  int32_t ratio;  // tokens per entry
  int32_t block_size;
  bool overlaps;
  bool is_interleaved;
  DType entries;
  // The indexer; no heads: none.
  int32_t index_heads = 0;
  int32_t index_dim = 0;
  int32_t top_k = 0;

  [[nodiscard]] int32_t parts() const { return overlaps ? 2 : 1; }
  [[nodiscard]] bool has_index() const { return index_heads > 0; }
  [[nodiscard]] int32_t index_offset() const { return 2 * parts() * head_dim; }
  // What a token has in the tail store; a few elements more than are used.
  [[nodiscard]] int32_t tail_width() const {
    return (index_offset() + 2 * parts() * index_dim + 3) / 4 * 4;
  }
};

inline constexpr float kEps = 1e-3f;
inline constexpr int32_t kOffset = 1;  // position_offset
inline constexpr float kScale = 0.3f;
inline constexpr float kIndexScale = 0.2f;

using Vector = std::vector<double>;

// One pool with the blocks of every sequence in a random order.
struct Store {
  Store(DType dtype, const Shape& s, int32_t width, int32_t tokens_per_entry, int32_t num_seqs,
        int32_t longest, Random& random)
      : width(width),
        stride(longest / tokens_per_entry / s.block_size + 1),
        pool(dtype, s.block_size, stride * num_seqs + 1, /*kv_heads=*/1, width),
        blocks(static_cast<size_t>(stride * num_seqs)),
        tokens_per_entry(tokens_per_entry) {
    std::iota(blocks.begin(), blocks.end(), 1);
    std::shuffle(blocks.begin(), blocks.end(), random.engine());
  }
  [[nodiscard]] BlockTable table() {
    return {.blocks = blocks.data(),
            .stride = stride,
            .block_size = pool.view.block_size,
            .tokens_per_entry = tokens_per_entry};
  }
  // Element i of an entry.
  [[nodiscard]] float at(int32_t sequence, int32_t entry, int32_t i) {
    return element(pool.view.dtype, pool.token(slot_of(table(), sequence, entry), false), i);
  }

  int32_t width;
  int32_t stride;
  Pool pool;
  std::vector<int32_t> blocks;
  int32_t tokens_per_entry;
};

// Rows of a pass, with the metadata that `build` computes.
struct Batch {
  std::vector<int32_t> sequence;  // -1: inert
  std::vector<int32_t> position;

  void add(int32_t of, int32_t at) {
    sequence.push_back(of);
    position.push_back(at);
  }
  [[nodiscard]] int32_t size() const { return static_cast<int32_t>(sequence.size()); }
};

// The weights and the stores of a layer, and the inputs of every token of every sequence.
struct Layer {
  Layer(const Shape& shape, std::vector<int32_t> sequence_lengths, Random& random)
      : s(shape),
        lengths(std::move(sequence_lengths)),
        longest(*std::max_element(lengths.begin(), lengths.end())),
        window(s.entries, s, s.head_dim, 1, size(), longest, random),
        tail(DType::kFloat32, s, s.tail_width(), 1, size(), longest, random),
        entries(s.entries, s, s.head_dim, s.ratio, size(), longest, random),
        keys(s.entries, s, std::max(s.index_dim, 1), s.ratio, size(), longest, random),
        q_norm(random.normals(s.q_width)),
        window_norm(random.normals(s.head_dim)),
        entry_norm(random.normals(s.head_dim)),
        key_norm(random.normals(s.index_dim)),
        bias(random.normals(int64_t{s.ratio} * s.parts() * s.head_dim)),
        key_bias(random.normals(int64_t{s.ratio} * s.parts() * s.index_dim)),
        sinks(random.normals(s.num_heads)) {
    keys.blocks = entries.blocks;  // they are in the same block
    for (const int32_t length : lengths) {
      qkv_a.push_back(random.normals(int64_t{length} * (s.q_width + s.head_dim)));
      tails.push_back(random.normals(int64_t{length} * s.tail_width(), 2.0f));
    }
    for (int32_t position = 0; position < longest + kOffset; ++position) {
      for (int32_t i = 0; i < s.rope / 2; ++i) {
        const double angle = position * std::pow(100.0, -2.0 * i / s.rope);
        cos.push_back(static_cast<float>(std::cos(angle)));
        sin.push_back(static_cast<float>(std::sin(angle)));
      }
    }
  }

  [[nodiscard]] int32_t size() const { return static_cast<int32_t>(lengths.size()); }
  [[nodiscard]] LatentRope rope(const int32_t* positions) const {
    return {.positions = positions,
            .cos = cos.data(),
            .sin = sin.data(),
            .position_offset = kOffset,
            .is_interleaved = s.is_interleaved};
  }
  [[nodiscard]] std::vector<int64_t> slots(Store& store, const Batch& batch) const {
    std::vector<int64_t> slots;
    for (int32_t row = 0; row < batch.size(); ++row) {
      const auto at = static_cast<size_t>(row);
      slots.push_back(batch.sequence[at] < 0
                          ? 0
                          : written_slot(store.table(), batch.sequence[at], batch.position[at]));
    }
    return slots;
  }
  // The last elements of x rotated to `position`, or back.
  void rotate(double* x, int32_t dim, int32_t position, double direction = 1) const {
    double* const head = x + dim - s.rope;
    const Vector in(head, head + s.rope);
    for (int32_t i = 0; i < s.rope / 2; ++i) {
      const auto at = static_cast<size_t>((position + kOffset) * (s.rope / 2) + i);
      const auto a = static_cast<size_t>(s.is_interleaved ? 2 * i : i);
      const auto b = static_cast<size_t>(s.is_interleaved ? 2 * i + 1 : i + s.rope / 2);
      head[a] = in[a] * cos[at] - direction * in[b] * sin[at];
      head[b] = in[b] * cos[at] + direction * in[a] * sin[at];
    }
  }

  Shape s;
  std::vector<int32_t> lengths;
  int32_t longest;
  Store window, tail, entries, keys;
  std::vector<float> q_norm, window_norm, entry_norm, key_norm, bias, key_bias, sinks, cos, sin;
  std::vector<std::vector<float>> qkv_a;  // [sequences][tokens * (q_width + head_dim)]
  std::vector<std::vector<float>> tails;  // [sequences][tokens * tail_width]
};

// Runs the ops that write on the rows of a batch; returns the normed q of each row.
inline std::vector<float> append(Layer& layer, const Batch& batch, int num_threads) {
  const Shape& s = layer.s;
  const int32_t num_rows = batch.size();
  const int64_t fused_width = s.q_width + s.head_dim;
  const int64_t tail_stride = s.tail_width() + 4;
  std::vector<float> fused(static_cast<size_t>(num_rows * fused_width), 1.0f);
  std::vector<float> inputs(static_cast<size_t>(num_rows * tail_stride), kNan);
  for (int32_t row = 0; row < num_rows; ++row) {
    const auto at = static_cast<size_t>(row);
    if (batch.sequence[at] < 0) continue;
    const auto of = static_cast<size_t>(batch.sequence[at]);
    std::copy_n(layer.qkv_a[of].data() + batch.position[at] * fused_width, fused_width,
                fused.data() + row * fused_width);
    std::copy_n(layer.tails[of].data() + int64_t{batch.position[at]} * s.tail_width(),
                s.tail_width(), inputs.data() + row * tail_stride);
  }
  CpuContext ctx = context_of(num_threads);
  const std::vector<int64_t> window_slots = layer.slots(layer.window, batch);
  const std::vector<int64_t> tail_slots = layer.slots(layer.tail, batch);
  const std::vector<int64_t> entry_slots = layer.slots(layer.entries, batch);
  append_window_entries(ctx, {.num_rows = &num_rows,
                              .max_rows = num_rows,
                              .qkv_a = fused.data(),
                              .q_width = s.q_width,
                              .slot_mapping = window_slots.data(),
                              .q_norm = layer.q_norm.data(),
                              .entry_norm = layer.window_norm.data(),
                              .norm_weight_offset = 1,
                              .norm_eps = kEps,
                              .rope = layer.rope(batch.position.data()),
                              .entries = layer.window.pool.view,
                              .head_dim = s.head_dim,
                              .rope_head_dim = s.rope});
  append_tail(ctx, {.num_rows = &num_rows,
                    .max_rows = num_rows,
                    .x = inputs.data(),
                    .x_stride = tail_stride,
                    .slot_mapping = tail_slots.data(),
                    .tail = layer.tail.pool.view,
                    .width = s.tail_width()});
  CompressParams p = {.num_rows = &num_rows,
                      .max_rows = num_rows,
                      .positions = batch.position.data(),
                      .seq_slot = batch.sequence.data(),
                      .entry_slots = entry_slots.data(),
                      .tail = layer.tail.pool.view,
                      .tail_table = layer.tail.table(),
                      .tail_width = s.tail_width(),
                      .tokens_per_entry = s.ratio,
                      .overlaps = s.overlaps,
                      .compressors = {{.dim = s.head_dim,
                                       .tail_offset = 0,
                                       .position_bias = layer.bias.data(),
                                       .norm = layer.entry_norm.data(),
                                       .entries = layer.entries.pool.view},
                                      {.dim = s.index_dim,
                                       .tail_offset = s.index_offset(),
                                       .position_bias = layer.key_bias.data(),
                                       .norm = layer.key_norm.data(),
                                       .entries = layer.keys.pool.view}},
                      .num_compressors = s.has_index() ? 2 : 1,
                      .norm_weight_offset = 1,
                      .norm_eps = kEps,
                      .rope = layer.rope(nullptr),
                      .rope_head_dim = s.rope};
  compress(ctx, p);
  for (int32_t row = 0; row < num_rows; ++row) {
    std::copy_n(fused.begin() + row * fused_width, s.q_width, fused.begin() + row * s.q_width);
  }
  fused.resize(static_cast<size_t>(num_rows * s.q_width));
  return fused;
}

// All tokens, in passes that cut sequences anywhere and have inert rows.
inline void append_all(Layer& layer, Random& random) {
  std::vector<int32_t> done(layer.lengths.size());
  while (done != layer.lengths) {
    Batch batch;
    for (size_t i = 0; i < done.size(); ++i) {
      const int32_t end = std::min(layer.lengths[i], done[i] + random.below(40));
      for (; done[i] < end; ++done[i]) batch.add(static_cast<int32_t>(i), done[i]);
      if (random.one_in(3)) batch.add(-1, 0);
    }
    append(layer, batch, 2);
  }
}

struct Queries {
  Batch batch;
  std::vector<float> q;        // [rows, heads, head_dim]
  std::vector<float> index_q;  // [rows, index heads, index_dim]
  std::vector<float> weights;  // [rows, index heads + 3]
};

inline Queries random_queries(const Layer& layer, int32_t num_rows, Random& random) {
  const Shape& s = layer.s;
  Queries queries;
  for (int32_t row = 0; row < num_rows; ++row) {
    const int32_t sequence = random.one_in(5) ? -1 : random.below(layer.size());
    queries.batch.add(
        sequence, sequence < 0 ? 0 : random.below(layer.lengths[static_cast<size_t>(sequence)]));
  }
  queries.q = random.normals(int64_t{num_rows} * s.num_heads * s.head_dim);
  queries.index_q = random.normals(int64_t{num_rows} * s.index_heads * s.index_dim);
  queries.weights = random.normals(int64_t{num_rows} * (s.index_heads + 3));
  return queries;
}

struct Answers {
  std::vector<float> scores;  // [rows, stride]
  int64_t stride;
  std::vector<int32_t> chosen;  // [rows, top_k]
  std::vector<int32_t> num_chosen;
  std::vector<float> y;
};

// The ops that read.
inline Answers attend(Layer& layer, const Queries& queries, int num_threads) {
  const Shape& s = layer.s;
  const Batch& batch = queries.batch;
  const int32_t num_rows = batch.size();
  std::vector<int32_t> window_begin, window_end, entry_end;
  for (int32_t row = 0; row < num_rows; ++row) {
    const auto at = static_cast<size_t>(row);
    const bool is_live = batch.sequence[at] >= 0;
    const int32_t position = batch.position[at];
    window_begin.push_back(is_live ? std::max(position - s.window + 1, 0) : 0);
    window_end.push_back(is_live ? position + 1 : 0);
    entry_end.push_back(is_live ? (position + 1) / s.ratio : 0);
  }
  CpuContext ctx = context_of(num_threads);
  Answers a;
  a.stride = layer.longest / s.ratio + 2;
  a.scores.assign(static_cast<size_t>(num_rows * a.stride), kNan);
  a.chosen.assign(static_cast<size_t>(num_rows) * static_cast<size_t>(s.top_k), -1);
  a.num_chosen.assign(static_cast<size_t>(num_rows), -1);
  a.y.assign(queries.q.size(), kNan);
  if (s.has_index()) {
    index_scores(ctx, {.num_rows = &num_rows,
                       .max_rows = num_rows,
                       .q = queries.index_q.data(),
                       .weights = queries.weights.data(),
                       .weights_stride = s.index_heads + 3,
                       .seq_slot = batch.sequence.data(),
                       .entry_end = entry_end.data(),
                       .table = layer.keys.table(),
                       .keys = layer.keys.pool.view,
                       .scale = kIndexScale,
                       .num_heads = s.index_heads,
                       .head_dim = s.index_dim,
                       .top_k = s.top_k,
                       .scores = a.scores.data(),
                       .scores_stride = a.stride});
    choose_entries(ctx, {.num_rows = &num_rows,
                         .max_rows = num_rows,
                         .scores = a.scores.data(),
                         .scores_stride = a.stride,
                         .seq_slot = batch.sequence.data(),
                         .entry_end = entry_end.data(),
                         .top_k = s.top_k,
                         .chosen = a.chosen.data(),
                         .num_chosen = a.num_chosen.data()});
  }
  compressed_attention(ctx, {.num_rows = &num_rows,
                             .max_rows = num_rows,
                             .q = queries.q.data(),
                             .seq_slot = batch.sequence.data(),
                             .window_begin = window_begin.data(),
                             .window_end = window_end.data(),
                             .window_table = layer.window.table(),
                             .window = layer.window.pool.view,
                             .entry_end = entry_end.data(),
                             .entry_table = layer.entries.table(),
                             .entries = layer.entries.pool.view,
                             .chosen = s.has_index() ? a.chosen.data() : nullptr,
                             .num_chosen = a.num_chosen.data(),
                             .top_k = s.top_k,
                             .scale = kScale,
                             .sinks = layer.sinks.data(),
                             .y = a.y.data(),
                             .num_heads = s.num_heads,
                             .head_dim = s.head_dim});
  return a;
}

}  // namespace paceline::testing::compressed_layer
