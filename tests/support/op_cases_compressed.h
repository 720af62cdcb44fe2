// SPDX-License-Identifier: Apache-2.0
#pragma once

// The op cases of compressed attention.

#include <cstdint>
#include <vector>

#include <paceline/dtype.h>

#include "support/op_cases.h"

namespace paceline::testing {

// append_window_entries, rotate_heads.
struct WindowEntrySpec {
  int32_t num_heads = 0;
  int32_t head_dim = 0;
  int32_t rope_head_dim = 0;
  int32_t q_width = 0;
  int32_t block_size = 16;
  DType dtype = DType::kBFloat16;
  bool is_interleaved = true;
  bool has_norm = true;
  bool is_inverse = false;
};
// append_tail, compress.
struct CompressSpec {
  int32_t dim = 0;        // of the entries
  int32_t index_dim = 0;  // of a second compressor's; 0: none
  int32_t rope_head_dim = 0;
  int32_t tokens_per_entry = 0;
  bool overlaps = false;
  int32_t block_size = 16;  // of the entries
  DType dtype = DType::kBFloat16;
  bool is_interleaved = true;
};
// index_scores, choose_entries, compressed_attention.
struct EntriesSpec {
  int32_t num_heads = 0;
  int32_t head_dim = 0;
  int32_t num_entries = 0;  // of a sequence
  int32_t top_k = 0;        // of compressed_attention: 0: all visible entries
  int32_t window = 128;     // of compressed_attention
  int32_t block_size = 16;
  DType dtype = DType::kBFloat16;
  // Not 0: every sequence has this number of rows, or with kAnyRows any number. All of them are in
  // one sequence slot.
  int32_t rows_per_seq = 0;
  bool has_entries = true;               // of compressed_attention
  LogitKind scores = LogitKind::kPlain;  // of choose_entries
  bool has_sinks = true;
  bool sees_all = false;  // every row sees all entries; for benches
};
inline constexpr int32_t kAnyRows = -1;

[[nodiscard]] OpInstance make_append_window_entries(const WindowEntrySpec& spec, const Rows& rows,
                                                    uint64_t seed);
[[nodiscard]] OpInstance make_rotate_heads(const WindowEntrySpec& spec, const Rows& rows,
                                           uint64_t seed);
[[nodiscard]] OpInstance make_append_tail(const CompressSpec& spec, const Rows& rows,
                                          uint64_t seed);
[[nodiscard]] OpInstance make_compress(const CompressSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_index_scores(const EntriesSpec& spec, const Rows& rows,
                                           uint64_t seed);
[[nodiscard]] OpInstance make_choose_entries(const EntriesSpec& spec, const Rows& rows,
                                             uint64_t seed);
[[nodiscard]] OpInstance make_compressed_attention(const EntriesSpec& spec, const Rows& rows,
                                                   uint64_t seed);
[[nodiscard]] std::vector<RowWiseCase> compressed_row_wise_cases();

}  // namespace paceline::testing
