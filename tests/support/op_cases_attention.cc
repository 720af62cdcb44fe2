// SPDX-License-Identifier: Apache-2.0
//
// The op cases of paged attention.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>

#include "ops/latent.h"
#include "support/op_cases.h"

namespace paceline::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

enum Purpose : uint64_t { kQuery = 100, kKey, kValue, kSinks, kPlaces };

// Where the sequences of a batch lie. Block 0 is the null block and block 1 belongs to no sequence;
// entries of the block table that must not be followed point to it. Both are NaN, as is every token
// that no row of the batch sees.
struct Placement {
  std::vector<int32_t> slot_of;              // by sequence of the batch
  std::vector<std::vector<int32_t>> blocks;  // by sequence of the batch
  std::vector<int32_t> table;
  int32_t table_stride = 0;
  int32_t num_blocks = 0;
};

int32_t first_visible(const AttentionSpec& s, const AttentionSequence& sequence) {
  return s.window == 0 ? 0 : std::max(0, sequence.length - sequence.num_rows - s.window + 1);
}

Placement place(const AttentionSpec& s, const AttentionBatch& batch, uint64_t seed) {
  Placement placement;
  Stream stream(seed, kPlaces);
  const auto blocks_of = [&](const AttentionSequence& sequence) {
    return sequence.num_rows == 0 ? 0 : (sequence.length + s.block_size - 1) / s.block_size;
  };
  int32_t longest = 0;
  placement.num_blocks = 2;
  for (const AttentionSequence& sequence : batch.sequences) {
    longest = std::max(longest, blocks_of(sequence));
    placement.num_blocks += blocks_of(sequence);
  }
  std::vector<int32_t> free(static_cast<size_t>(placement.num_blocks - 2));
  std::iota(free.begin(), free.end(), 2);
  shuffle(free, stream);
  placement.table_stride = longest + 3;
  placement.slot_of.resize(batch.sequences.size() + 2);
  std::iota(placement.slot_of.begin(), placement.slot_of.end(), 0);
  shuffle(placement.slot_of, stream);
  placement.table.assign(placement.slot_of.size() * static_cast<size_t>(placement.table_stride), 1);
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    const AttentionSequence& sequence = batch.sequences[i];
    placement.blocks.emplace_back();
    int32_t* const entries =
        placement.table.data() + int64_t{placement.slot_of[i]} * placement.table_stride;
    for (int32_t b = 0; b < blocks_of(sequence); ++b) {
      placement.blocks[i].push_back(free.back());
      free.pop_back();
      // A block before every row's window has been given back.
      const bool is_gone = (b + 1) * s.block_size <= first_visible(s, sequence);
      entries[b] = is_gone ? 1 : placement.blocks[i].back();
    }
  }
  return placement;
}

}  // namespace

OpInstance make_attention(const AttentionSpec& s, const AttentionBatch& batch, uint64_t seed) {
  OpInstance op;
  const Element element = element_of(s.dtype);
  const DType kv_dtype = s.has_bf16_cache ? DType::kBFloat16 : s.dtype;
  const Element kv_element = element_of(kv_dtype);
  const int64_t width =
      int64_t{qkv_heads(s.num_qo_heads, s.num_kv_heads, s.kv_inputs)} * s.head_dim;
  const int64_t q_width = int64_t{s.num_qo_heads} * s.head_dim;
  const int64_t y_width = s.value_dim > 0 ? int64_t{s.num_qo_heads} * s.value_dim : q_width;
  const int64_t token = int64_t{s.num_kv_heads} * s.head_dim;
  const int64_t part = token * s.block_size;
  const int64_t gap = 64;
  const int64_t block = 2 * part + 3 * gap;
  const Placement placement = place(s, batch, seed);

  std::vector<int32_t> seq_slot;
  std::vector<int32_t> kv_begin;
  std::vector<int32_t> kv_end;
  std::vector<int32_t> indptr = {0};
  int32_t longest = 0;
  int32_t most_rows = 0;
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    const AttentionSequence& sequence = batch.sequences[i];
    for (int32_t r = 0; r < sequence.num_rows + sequence.num_inert; ++r) {
      const bool is_live = r < sequence.num_rows;
      const int32_t position = sequence.length - sequence.num_rows + r;
      seq_slot.push_back(is_live ? placement.slot_of[i] : -1);
      kv_begin.push_back(is_live && s.window > 0 ? std::max(0, position - s.window + 1) : 0);
      kv_end.push_back(is_live ? position + 1 : 0);
    }
    indptr.push_back(static_cast<int32_t>(seq_slot.size()));
    longest = std::max(longest, sequence.length);
    most_rows = std::max(most_rows, sequence.num_rows + sequence.num_inert);
  }
  op.num_rows = static_cast<int32_t>(seq_slot.size());
  op.max_model_len = std::max({batch.max_model_len, longest, 1});
  const int32_t max_rows = op.num_rows + batch.extra_rows;
  const int32_t num_seqs = static_cast<int32_t>(batch.sequences.size());
  const int32_t max_seqs = num_seqs + batch.extra_seqs;
  const int32_t max_rows_per_seq = most_rows + batch.extra_rows_per_seq;
  // Stale entries of an earlier, larger batch.
  seq_slot.resize(static_cast<size_t>(max_rows), placement.slot_of[0]);
  kv_begin.resize(static_cast<size_t>(max_rows), 0);
  kv_end.resize(static_cast<size_t>(max_rows), 1);
  indptr.resize(static_cast<size_t>(max_seqs) + 1, op.num_rows + 1);

  const Handle num_rows = op.add(int_array<int32_t>("num_rows", Role::kInput, {op.num_rows}));
  OpArray fused = float_array("qkv", Element::kF32, element, max_rows * width, [=](float* to) {
    std::fill_n(to, max_rows * width, kNan);  // k and v are read from the cache
    for (const AttentionSequence& sequence : batch.sequences) {
      for (int32_t r = 0; r < sequence.num_rows + sequence.num_inert; ++r, to += width) {
        const int32_t position = sequence.length - sequence.num_rows + r;
        if (r >= sequence.num_rows) continue;  // inert rows may hold anything
        Stream(seed, kQuery, static_cast<uint64_t>(sequence.id), static_cast<uint64_t>(position))
            .fill(to, q_width);
      }
    }
  });
  fused.row_length = width;
  if (s.reads_early) fused.late = {{0, max_rows * width}};
  const Handle qkv = op.add(std::move(fused));
  const Handle slots = op.add(int_array("seq_slot", Role::kInput, seq_slot));
  const Handle begins =
      s.window > 0 ? op.add(int_array("kv_begin", Role::kInput, kv_begin)) : kNoArray;
  const Handle ends = op.add(int_array("kv_end", Role::kInput, kv_end));
  const Handle table = op.add(int_array("block_table", Role::kInput, placement.table));
  const int64_t pool_count = placement.num_blocks * block;
  const auto fill_pool = [=](float* to) {
    std::fill_n(to, pool_count, kNan);
    for (size_t i = 0; i < batch.sequences.size(); ++i) {
      const AttentionSequence& sequence = batch.sequences[i];
      if (sequence.num_rows == 0) continue;
      for (int32_t at = first_visible(s, sequence); at < sequence.length; ++at) {
        const int64_t b = placement.blocks[i][static_cast<size_t>(at / s.block_size)];
        float* const key = to + b * block + gap + at % s.block_size * token;
        const auto id = static_cast<uint64_t>(sequence.id);
        Stream(seed, kKey, id, static_cast<uint64_t>(at)).fill(key, token);
        if (s.value_dim > 0) continue;  // the memory of values must not be read
        Stream(seed, kValue, id, static_cast<uint64_t>(at)).fill(key + part + gap, token);
      }
    }
  };
  OpArray blocks = float_array("pool", kv_element, kv_element, pool_count, fill_pool);
  const bool has_late = s.reads_early && s.value_dim == 0;
  for (size_t i = 0; has_late && i < batch.sequences.size(); ++i) {
    const AttentionSequence& sequence = batch.sequences[i];
    for (int32_t r = sequence.length - sequence.num_rows; r < sequence.length; ++r) {
      const int64_t b = placement.blocks[i][static_cast<size_t>(r / s.block_size)];
      const int64_t key = b * block + gap + r % s.block_size * token;
      blocks.late.insert(blocks.late.end(), {{key, token}, {key + part + gap, token}});
    }
  }
  const Handle pool = op.add(std::move(blocks));
  const Handle sinks =
      s.has_sinks ? op.add(float_array(
                        "sinks", Element::kF32, Element::kF32, s.num_qo_heads,
                        [=](float* to) { Stream(seed, kSinks).fill(to, s.num_qo_heads, 2.0f); }))
                  : kNoArray;
  const Handle y = op.add(output_array("y", Element::kF32, element, max_rows * y_width, y_width));
  const Handle num_seqs_at = op.add(int_array<int32_t>("num_seqs", Role::kInput, {num_seqs}));
  const Handle row_indptr = op.add(int_array("row_indptr", Role::kInput, indptr));
  const int64_t table_stride = placement.table_stride;
  const int32_t num_sms = batch.num_sms;
  op.set_run([=](auto& of, const Addresses& at) {
    auto ctx = of;
    if constexpr (std::is_same_v<decltype(ctx), CudaContext>) {
      if (num_sms > 0) ctx.num_sms = num_sms;
    }
    const int64_t bytes = element_bytes(kv_element);
    if (s.value_dim > 0) {
      latent_attention(
          ctx, LatentAttentionParams{.num_rows = at.get<int32_t>(num_rows),
                                     .max_rows = max_rows,
                                     .q = at.raw(qkv),
                                     .seq_slot = at.get<int32_t>(slots),
                                     .kv_end = at.get<int32_t>(ends),
                                     .block_table = at.get<int32_t>(table),
                                     .block_table_stride = table_stride,
                                     .entries = {.base = at.raw(pool),
                                                 .block_bytes = block * bytes,
                                                 .k_offset = gap * bytes,
                                                 .v_offset = gap * bytes,
                                                 .block_size = s.block_size,
                                                 .dtype = kv_dtype},
                                     .scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim)),
                                     .y = at.raw(y),
                                     .num_heads = s.num_qo_heads,
                                     .kv_lora_rank = s.value_dim,
                                     .qk_rope_head_dim = s.head_dim - s.value_dim,
                                     .dtype = activation_dtype(ctx, s.dtype),
                                     .num_seqs = at.get<int32_t>(num_seqs_at),
                                     .row_indptr = at.get<int32_t>(row_indptr),
                                     .max_seqs = max_seqs,
                                     .max_rows_per_seq = max_rows_per_seq,
                                     .reads_early = s.reads_early});
      return;
    }
    paged_attention(ctx,
                    PagedAttentionParams{.num_rows = at.get<int32_t>(num_rows),
                                         .max_rows = max_rows,
                                         .qkv = at.raw(qkv),
                                         .seq_slot = at.get<int32_t>(slots),
                                         .kv_begin = at.get<int32_t>(begins),
                                         .kv_end = at.get<int32_t>(ends),
                                         .block_table = at.get<int32_t>(table),
                                         .block_table_stride = table_stride,
                                         .kv = {.base = at.raw(pool),
                                                .block_bytes = block * bytes,
                                                .k_offset = gap * bytes,
                                                .v_offset = (2 * gap + part) * bytes,
                                                .block_size = s.block_size,
                                                .dtype = kv_dtype},
                                         .scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim)),
                                         .soft_cap = s.soft_cap,
                                         .sinks = at.get<float>(sinks),
                                         .y = at.raw(y),
                                         .num_qo_heads = s.num_qo_heads,
                                         .num_kv_heads = s.num_kv_heads,
                                         .head_dim = s.head_dim,
                                         .dtype = activation_dtype(ctx, s.dtype),
                                         .num_seqs = at.get<int32_t>(num_seqs_at),
                                         .row_indptr = at.get<int32_t>(row_indptr),
                                         .max_seqs = max_seqs,
                                         .max_rows_per_seq = max_rows_per_seq,
                                         .kv_inputs = s.kv_inputs,
                                         .reads_early = s.reads_early});
  });
  return op;
}

namespace {

void add_attention(std::vector<OpCase>& cases, const AttentionSpec& s) {
  const std::string name =
      "attention_" + std::to_string(s.num_qo_heads) + "x" + std::to_string(s.num_kv_heads) + "_d" +
      std::to_string(s.head_dim) + "_b" + std::to_string(s.block_size) +
      (s.window > 0 ? "_w" + std::to_string(s.window) : "") + (s.soft_cap > 0 ? "_cap" : "") +
      (s.has_sinks ? "_sinks" : "") +
      (s.kv_inputs == KvInputs::kKeys   ? "_keys"
       : s.kv_inputs == KvInputs::kNone ? "_q"
                                        : "") +
      (s.value_dim > 0 ? "_v" + std::to_string(s.value_dim) : "") +
      (s.reads_early ? "_early" : "") + (s.dtype == DType::kFloat32 ? "_f32" : "_bf16") +
      (s.has_bf16_cache ? "_cache_bf16" : "");
  const auto add = [&](const char* batch_name, const AttentionBatch& batch) {
    cases.push_back({name + "_" + batch_name,
                     [s, batch](uint64_t seed) { return make_attention(s, batch, seed); }});
  };
  // {id, length, rows, inert rows}. Lengths at the edges of chunks, of blocks (full; one token) and
  // at neither; ended sequences in between.
  add("none", {.sequences = {}, .extra_rows = 4, .extra_seqs = 2, .extra_rows_per_seq = 1});
  add("decode", {.sequences = {{0, 1, 1, 0},
                               {1, 127, 1, 0},
                               {2, 1, 0, 1},
                               {3, 128, 1, 0},
                               {4, 129, 1, 0},
                               {5, 1000, 1, 0},
                               {6, 2100, 1, 0},
                               {7, 1, 0, 1},
                               {8, 48, 1, 0},
                               {9, 49, 1, 0},
                               {10, 257, 1, 0}},
                 .extra_rows = 5,
                 .extra_seqs = 5});
  add("verify3", {.sequences = {{0, 3, 3, 0},
                                {1, 128, 2, 1},
                                {2, 1000, 3, 0},
                                {3, 1, 0, 3},
                                {4, 129, 1, 2},
                                {5, 130, 3, 0}},
                  .extra_rows = 7,
                  .extra_seqs = 1});
  add("verify17", {.sequences = {{0, 17, 17, 0},
                                 {1, 1, 1, 16},
                                 {2, 129, 17, 0},
                                 {3, 1000, 9, 8},
                                 {4, 2100, 17, 0},
                                 {5, 1, 0, 17}},
                   .extra_rows = 1});
  add("prefill", {.sequences = {{0, 1, 1, 0}, {1, 200, 200, 0}, {2, 1000, 130, 0}, {3, 129, 64, 0}},
                  .extra_rows = 100,
                  .extra_seqs = 3,
                  .max_model_len = 8192});
  add("mixed", {.sequences = {{0, 300, 5, 0},
                              {1, 128, 1, 4},
                              {2, 260, 5, 0},
                              {3, 0, 0, 0},
                              {4, 90, 90, 0},
                              {5, 513, 33, 0}},
                .extra_rows = 17,
                .extra_seqs = 10,
                .extra_rows_per_seq = 400,
                .max_model_len = 40000});
  if (s.value_dim == 0 && s.dtype == DType::kBFloat16) {
    // Sequences on either side of the prefill kernel's least number of rows, prompts that end
    // within a tile, and inert rows in one.
    const std::vector<AttentionSequence> prompts = {
        {0, 700, 700, 0}, {1, 1, 1, 0}, {2, 1300, 300, 0}, {3, 260, 5, 0},
        {4, 129, 64, 3},  {5, 0, 0, 0}, {6, 1, 0, 250},    {7, 513, 193, 30}};
    add("prompts", {.sequences = prompts, .extra_rows = 9, .extra_seqs = 2, .num_sms = 1});
    add("one_prompt", {.sequences = {{0, 900, 387, 0}}, .num_sms = 1});
    add("one_row", {.sequences = {{0, 300, 1, 0}}, .extra_rows_per_seq = 500, .num_sms = 1});
    // Contexts whose chunks the blocks of one cluster share, one each.
    add("one_cluster", {.sequences = {{0, 300, 3, 0}}});
    // More tiles than a device has room for: any, and one of 16 multiprocessors alone.
    const std::vector<AttentionSequence> tiles = {
        {0, 385, 1, 3}, {1, 129, 4, 0}, {2, 1, 0, 4}, {3, 257, 3, 1}};
    add("many_tiles", {.sequences = tiles, .num_sms = 1});
    add("many_seqs", {.sequences = tiles, .extra_seqs = 50});
    // About 100 tiles, of which each has two blocks that take its chunks by turns.
    add("two_blocks", {.sequences = {{0, 513, 3, 0},
                                     {1, 300, 1, 2},
                                     {2, 700, 4, 0},
                                     {3, 256, 2, 0},
                                     {4, 1, 0, 4},
                                     {5, 897, 2, 1}},
                       .extra_seqs = std::max(100 / s.num_kv_heads - 6, 0)});
    add("full_clusters", {.sequences = {{0, 1024, 4, 0}, {1, 900, 1, 3}, {2, 1025, 2, 0}}});
  }
  if (s.value_dim != 512 || s.dtype != DType::kBFloat16) return;
  // Latent attention on tensor cores. Its chunks have 64 entries, and 16 chunks are a segment: long
  // contexts, the edges of both, and the bounds by which a context is divided into single chunks,
  // into segments, and not at all.
  const std::vector<AttentionSequence> edges = {{0, 4100, 4, 0}, {1, 64, 4, 0},   {2, 65, 3, 1},
                                                {3, 1023, 4, 0}, {4, 1024, 4, 0}, {5, 1025, 4, 0},
                                                {6, 2048, 1, 3}, {7, 1, 0, 4},    {8, 2051, 4, 0}};
  add("long", {.sequences = {{0, 8192, 4, 0}}});
  add("edges", {.sequences = edges});
  add("edges_of_60", {.sequences = edges, .extra_seqs = 51, .max_model_len = 8192});
  add("edges_undivided", {.sequences = edges, .extra_rows = 2000, .extra_seqs = 200});
}

}  // namespace

std::vector<OpCase> attention_op_cases() {
  std::vector<OpCase> cases;
  constexpr DType kB = DType::kBFloat16;
  constexpr DType kF = DType::kFloat32;
  for (const DType dtype : {kB, kF}) {
    add_attention(cases, {4, 4, 64, 16, 0, 0.0f, false, dtype});
    add_attention(cases, {8, 2, 128, 16, 0, 0.0f, false, dtype});
    add_attention(cases, {4, 1, 256, 16, 512, 0.0f, false, dtype});
    add_attention(cases, {4, 2, 128, 24, 100, 5.0f, true, dtype});
  }
  add_attention(cases, {4, 2, 64, 1, 0, 0.0f, false, kB});
  add_attention(cases, {8, 1, 64, 16, 0, 0.0f, true, kB});
  add_attention(cases, {8, 1, 128, 256, 0, 30.0f, false, kB});
  add_attention(cases, {8, 2, 128, 256, 1, 0.0f, false, kB});
  add_attention(cases, {2, 2, 128, 16, 1024, 0.0f, false, kB});
  add_attention(cases, {8, 1, 256, 24, 129, 0.0f, true, kB});
  add_attention(cases, {2, 2, 256, 256, 0, 50.0f, false, kB});
  add_attention(cases, {4, 1, 512, 16, 0, 0.0f, false, kB});
  add_attention(cases, {4, 2, 512, 24, 128, 5.0f, true, kB});
  add_attention(cases, {6, 2, 128, 16, 0, 0.0f, false, kB});  // a group of three
  add_attention(cases, {4, 2, 64, 24, 100, 5.0f, true, kF, KvInputs::kKeysAndValues, true});
  // GPT-OSS: groups of eight, in a window and not, and its own number of heads.
  add_attention(cases, {16, 2, 64, 16, 0, 0.0f, true, kB});
  add_attention(cases, {16, 2, 64, 16, 128, 0.0f, true, kB});
  add_attention(cases, {64, 8, 64, 16, 128, 0.0f, true, kB});
  // Every head size behind a product that delays its successor.
  for (AttentionSpec spec : {AttentionSpec{8, 2, 128, 16, 0, 0.0f, false, kB},
                             AttentionSpec{4, 4, 64, 16, 0, 0.0f, false, kB},
                             AttentionSpec{16, 2, 64, 24, 128, 0.0f, true, kB},
                             AttentionSpec{4, 1, 256, 16, 512, 0.0f, false, kB},
                             AttentionSpec{4, 1, 512, 16, 0, 0.0f, false, kB}}) {
    spec.reads_early = true;
    add_attention(cases, spec);
  }
  // Latent attention: GLM-4.7-Flash's 20 heads and other numbers of them, and other widths.
  const auto latent = [&](int32_t num_heads, int32_t width, int32_t rank, int32_t block_size,
                          DType dtype, bool has_bf16_cache = false) {
    add_attention(cases, {.num_qo_heads = num_heads,
                          .num_kv_heads = 1,
                          .head_dim = width,
                          .block_size = block_size,
                          .dtype = dtype,
                          .kv_inputs = KvInputs::kNone,
                          .has_bf16_cache = has_bf16_cache,
                          .value_dim = rank,
                          .reads_early = block_size == 16});
  };
  latent(20, 576, 512, 16, kB);
  latent(16, 576, 512, 1, kB);
  latent(5, 576, 512, 256, kB);
  latent(24, 576, 512, 24, kB);  // tiles that end within a row
  latent(84, 576, 512, 64, kB);  // a row has two tiles
  latent(20, 576, 512, 16, kF);
  latent(3, 576, 512, 16, kF, true);
  latent(3, 56, 40, 24, kB);
  for (const KvInputs inputs : {KvInputs::kKeys, KvInputs::kNone}) {
    add_attention(cases, {8, 1, 256, 16, 512, 0.0f, false, kB, inputs});
    add_attention(cases, {8, 2, 512, 16, 0, 0.0f, false, kB, inputs});
    add_attention(cases, {4, 2, 64, 16, 100, 0.0f, false, kF, inputs});
  }
  return cases;
}

}  // namespace paceline::testing
