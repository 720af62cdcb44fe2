// SPDX-License-Identifier: Apache-2.0
//
// The op cases of compressed attention.

#include <string>
#include <vector>

#include "support/op_case_table.h"
#include "support/op_cases_compressed.h"

namespace paceline::testing {
namespace {

constexpr DType kB = DType::kBFloat16;
constexpr DType kF = DType::kFloat32;

void add_rows(TableBuilder& table, DType dtype) {
  const WindowEntrySpec specs[] = {
      // DeepSeek-V4's, and the queries of its indexer
      {.num_heads = 64, .head_dim = 512, .rope_head_dim = 64, .q_width = 1024, .dtype = dtype},
      {.num_heads = 64, .head_dim = 128, .rope_head_dim = 64, .q_width = 40, .dtype = dtype},
      {.num_heads = 3,
       .head_dim = 48,
       .rope_head_dim = 16,
       .q_width = 24,
       .block_size = 1,
       .dtype = dtype},
      {.num_heads = 3,
       .head_dim = 1024,
       .rope_head_dim = 1024,
       .q_width = 2056,
       .block_size = 1,
       .dtype = dtype,
       .is_interleaved = false},
      // Of odd sizes, which no vector load fits.
      {.num_heads = 5,
       .head_dim = 37,
       .rope_head_dim = 6,
       .q_width = 33,
       .block_size = 1,
       .dtype = dtype},
      {.num_heads = 1,
       .head_dim = 2,
       .rope_head_dim = 2,
       .q_width = 1,
       .block_size = 1,
       .dtype = dtype,
       .is_interleaved = false}};
  for (const WindowEntrySpec& s : specs) {
    const std::string name = std::to_string(s.num_heads) + "x" + std::to_string(s.head_dim) + "_" +
                             std::to_string(s.rope_head_dim) + (s.is_interleaved ? "_pairs" : "") +
                             dtype_suffix(s.dtype);
    table.add("append_window_entries_" + name, make_append_window_entries, s, s.block_size == 1);
    WindowEntrySpec rotate = s;
    table.add("rotate_heads_norm_" + name, make_rotate_heads, rotate, true);
    rotate.has_norm = false;
    table.add("rotate_heads_" + name, make_rotate_heads, rotate, s.num_heads == 5);
    rotate.is_inverse = true;
    table.add("rotate_heads_inverse_" + name, make_rotate_heads, rotate, true);
  }
}

void add_compressors(TableBuilder& table, DType dtype) {
  const CompressSpec specs[] = {
      // DeepSeek-V4's two
      {.dim = 512,
       .index_dim = 128,
       .rope_head_dim = 64,
       .tokens_per_entry = 4,
       .overlaps = true,
       .block_size = 1,
       .dtype = dtype},
      {.dim = 512, .rope_head_dim = 64, .tokens_per_entry = 128, .block_size = 1, .dtype = dtype},
      {.dim = 96,
       .index_dim = 32,
       .rope_head_dim = 16,
       .tokens_per_entry = 3,
       .overlaps = true,
       .dtype = dtype,
       .is_interleaved = false},
      // The tail is longer than what a block of the cluster would have.
      {.dim = 256,
       .index_dim = 37,
       .rope_head_dim = 34,
       .tokens_per_entry = 4,
       .block_size = 1,
       .dtype = dtype},
      {.dim = 1024,
       .index_dim = 256,
       .rope_head_dim = 128,
       .tokens_per_entry = 128,
       .overlaps = true,
       .block_size = 16,
       .dtype = dtype},
      {.dim = 6, .rope_head_dim = 2, .tokens_per_entry = 1024, .block_size = 1, .dtype = dtype}};
  for (const CompressSpec& s : specs) {
    table.add("compress_" + std::to_string(s.dim) + "_" + std::to_string(s.index_dim) + "_of" +
                  std::to_string(s.tokens_per_entry) + (s.overlaps ? "_overlap" : "") +
                  dtype_suffix(s.dtype),
              make_compress, s, s.block_size == 1);
  }
}

void add_entries(TableBuilder& table, DType dtype) {
  const EntriesSpec scored[] = {
      // DeepSeek-V4's indexer; rows alone and several of a sequence
      {.num_heads = 64, .head_dim = 128, .num_entries = 1100, .top_k = 512, .dtype = dtype},
      {.num_heads = 64,
       .head_dim = 128,
       .num_entries = 700,
       .top_k = 5,
       .block_size = 1,
       .dtype = dtype,
       .rows_per_seq = kAnyRows},
      {.num_heads = 3, .head_dim = 40, .num_entries = 200, .top_k = 7, .dtype = dtype},
      {.num_heads = 4,
       .head_dim = 33,
       .num_entries = 150,
       .top_k = 1,
       .block_size = 24,
       .dtype = dtype,
       .rows_per_seq = kAnyRows}};
  for (const EntriesSpec& s : scored) {
    table.add("index_scores_" + std::to_string(s.num_heads) + "x" + std::to_string(s.head_dim) +
                  "_n" + std::to_string(s.num_entries) + (s.rows_per_seq != 0 ? "_together" : "") +
                  dtype_suffix(dtype),
              make_index_scores, s, true);
  }
  const EntriesSpec read[] = {
      // DeepSeek-V4's layers with chosen entries, with all entries and without
      {.num_heads = 64, .head_dim = 512, .num_entries = 900, .top_k = 512, .dtype = dtype},
      {.num_heads = 64, .head_dim = 512, .num_entries = 300, .dtype = dtype},
      {.num_heads = 64, .head_dim = 512, .num_entries = 1, .dtype = dtype, .has_entries = false},
      // More chunks than blocks, a tile of heads that is not full, a long window.
      {.num_heads = 5,
       .head_dim = 512,
       .num_entries = 1700,
       .window = 200,
       .block_size = 24,
       .dtype = dtype,
       .has_sinks = false},
      {.num_heads = 20,
       .head_dim = 512,
       .num_entries = 400,
       .top_k = 130,
       .window = 1,
       .block_size = 1,
       .dtype = dtype},
      {.num_heads = 17,
       .head_dim = 512,
       .num_entries = 1,
       .window = 300,
       .dtype = dtype,
       .has_entries = false},
      {.num_heads = 3, .head_dim = 40, .num_entries = 300, .top_k = 37, .dtype = dtype},
      {.num_heads = 2, .head_dim = 1024, .num_entries = 140, .window = 130, .dtype = dtype}};
  for (const EntriesSpec& s : read) {
    table.add("compressed_attention_" + std::to_string(s.num_heads) + "x" +
                  std::to_string(s.head_dim) + "_w" + std::to_string(s.window) +
                  (s.has_entries ? "_n" + std::to_string(s.num_entries) : "") +
                  (s.top_k > 0 ? "_top" + std::to_string(s.top_k) : "") + dtype_suffix(dtype),
              make_compressed_attention, s, true);
  }
}

void add_choices(TableBuilder& table) {
  for (const auto& [count, top_k] : {std::pair{1, 1},
                                     {33, 1},
                                     {700, 512},
                                     {1025, 37},
                                     {9000, 512},
                                     {5000, 4096},
                                     {2048, 2047}}) {
    for (const auto& [kind, suffix] : kAllLogits) {
      if (kind == LogitKind::kPeaked) continue;
      table.add(
          "choose_entries_n" + std::to_string(count) + "_top" + std::to_string(top_k) + suffix,
          make_choose_entries, EntriesSpec{.num_entries = count, .top_k = top_k, .scores = kind},
          count == 700 || count == 1025);
    }
  }
}

}  // namespace

std::vector<RowWiseCase> compressed_row_wise_cases() {
  TableBuilder table;
  for (const DType dtype : {kF, kB}) {
    add_rows(table, dtype);
    add_compressors(table, dtype);
    add_entries(table, dtype);
  }
  for (const int32_t width : {4, 40, 2560}) {
    table.add("append_tail_w" + std::to_string(width), make_append_tail,
              CompressSpec{.dim = width, .block_size = 1}, true);
  }
  add_choices(table);
  return table.cases;
}

}  // namespace paceline::testing
