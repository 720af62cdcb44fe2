// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "kv/kv_layout.h"
#include "model/description/matrix_format.h"

namespace paceline {

struct DecoderConfig;

// Groups of tokens_per_entry tokens as one entry of the KV cache (docs/kv-groups.md). Each token
// projects a value and a gate for each element of the entry, and the entry is their weighted mean.
struct CompressorConfig {
  int32_t tokens_per_entry = 0;
  // An entry also covers the tokens of the entry before it, with elements of their own: a token
  // projects twice as many values and gates, first those for the next entry, then those for its
  // own.
  bool overlaps = false;
};

// Chooses the entries that a row sees: those with the highest scores, at most top_k of the visible
// ones. It has entries of its own, of head_dim elements, which are made like those of the
// compressor, and its own queries.
struct IndexerConfig {
  int32_t num_heads = 0;
  int32_t head_dim = 0;  // the last rope_head_dim of its elements are rotated
  int32_t top_k = 0;
  MatrixFormat q;
};

// Compressed attention (DeepSeek-V4). A token has one vector for all heads, its key and its value
// alike: norm(kv x), the last rope_head_dim elements of which are rotated. A row sees the last
// `window` of them and, with a compressor, entries that stand for tokens_per_entry tokens each. Its
// queries are q_b norm(q_a x), each head divided by its root mean square and rotated like keys;
// every head has a sink. The output of a head is rotated back. The heads are o_groups groups in
// order, o_a multiplies each with a matrix of its own, and o_b all of that.
struct CompressedAttention {
  static constexpr std::array<std::string_view, 1> kNames = {"compressed"};
  static constexpr bool reads_target = false;
  static constexpr bool kPicksRows = false;
  static constexpr bool kWritesContext = true;

  int32_t num_qo_heads = 0;   // a multiple of o_groups
  int32_t head_dim = 0;       // even
  int32_t rope_head_dim = 0;  // even, at most head_dim
  int32_t q_lora_rank = 0;
  int32_t window = 0;
  int32_t o_groups = 0;
  int32_t o_lora_rank = 0;  // elements that o_a makes of a group
  float scale = 0;          // scores are multiplied by it; > 0
  int32_t rope = 0;         // index into DecoderConfig::ropes
  MatrixFormat qkv_a;       // q_a rows, then kv rows
  MatrixFormat q_b;
  MatrixFormat o_a;
  MatrixFormat o_b;
  std::optional<CompressorConfig> compressor;
  std::optional<IndexerConfig> indexer;  // only with a compressor

  // Elements of all heads.
  [[nodiscard]] constexpr int64_t q_rows() const { return int64_t{num_qo_heads} * head_dim; }
  // Elements of a row of qkv_a: q_a x, then kv x.
  [[nodiscard]] constexpr int64_t qkv_a_rows() const { return int64_t{q_lora_rank} + head_dim; }
  // Elements that o_a reads of a group, and that it makes of all groups.
  [[nodiscard]] constexpr int64_t o_group_width() const { return q_rows() / o_groups; }
  [[nodiscard]] constexpr int64_t o_a_rows() const { return int64_t{o_groups} * o_lora_rank; }
  // Values, or gates, that a token projects for entries, and for the indexer's.
  [[nodiscard]] constexpr int32_t entry_inputs() const {
    return compressor ? head_dim * (compressor->overlaps ? 2 : 1) : 0;
  }
  [[nodiscard]] constexpr int32_t index_inputs() const {
    return indexer ? indexer->head_dim * (compressor->overlaps ? 2 : 1) : 0;
  }
  // What a token stores for the compressor: values and gates, then the indexer's.
  [[nodiscard]] constexpr int32_t tail_width() const {
    return 2 * (entry_inputs() + index_inputs());
  }
  // Elements of a row of CompressedAttentionWeights::compress: the tail, then the indexer's weights
  // of its heads.
  [[nodiscard]] constexpr int32_t compress_rows() const {
    return tail_width() + (indexer ? indexer->num_heads : 0);
  }
  // Elements of all heads of the indexer.
  [[nodiscard]] constexpr int64_t index_q_rows() const {
    return indexer ? int64_t{indexer->num_heads} * indexer->head_dim : 0;
  }

  [[nodiscard]] static CompressedAttention read(const Json& json, const DecoderConfig& config);
  [[nodiscard]] constexpr int64_t projected_width() const { return qkv_a_rows(); }
  [[nodiscard]] constexpr int64_t output_width() const { return q_rows(); }
  void append_stores(std::vector<KvLayerShape>& shapes) const;
  [[nodiscard]] bool writes_context() const { return !compressor; }
  [[nodiscard]] bool scores_entries() const { return indexer.has_value(); }
  [[nodiscard]] static std::string unsupported_on_gpu() { return {}; }
};

}  // namespace paceline
