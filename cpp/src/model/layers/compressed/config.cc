// SPDX-License-Identifier: Apache-2.0
#include "model/layers/compressed/config.h"

#include <array>
#include <optional>

#include "model/description/config_reading.h"
#include "ops/compressed.h"

namespace paceline {
namespace {

[[nodiscard]] CompressorConfig read_compressor(const Json& json) {
  constexpr std::array<std::string_view, 2> kKeys = {"tokens_per_entry", "overlaps"};
  json.check_keys(kKeys);
  return {.tokens_per_entry = read_int(json, "tokens_per_entry", 2, kMaxTokensPerEntry),
          .overlaps = json.at("overlaps").as_bool()};
}

[[nodiscard]] IndexerConfig read_indexer(const Json& json, const CompressedAttention& attention,
                                         int32_t max_position) {
  constexpr std::array<std::string_view, 3> kKeys = {"num_heads", "head_dim", "top_k"};
  constexpr std::array<std::string_view, 1> kOptional = {"q"};
  json.check_keys(kKeys, kOptional);
  IndexerConfig indexer;
  indexer.num_heads = read_int(json, "num_heads", 1, kMaxHeads);
  // Rows of projections then begin at 16 bytes.
  if (indexer.num_heads % 4 != 0) json.at("num_heads").refuse("a multiple of 4");
  indexer.head_dim = read_int(json, "head_dim", attention.rope_head_dim, kMaxCompressedHeadDim);
  if (indexer.head_dim % 2 != 0) json.at("head_dim").refuse("an even number");
  indexer.top_k = read_int(json, "top_k", 1, kMaxIndexTopK);
  const int32_t num_entries = max_position / attention.compressor->tokens_per_entry;
  if (indexer.top_k > num_entries) {
    json.at("top_k").refuse(
        concat("1 to ", num_entries, ", the entries of max_position (", max_position, ") tokens"));
  }
  indexer.q = read_format(json, "q", {"q_lora_rank", attention.q_lora_rank},
                          /*is_of_experts=*/false);
  return indexer;
}

}  // namespace

CompressedAttention CompressedAttention::read(const Json& json, const DecoderConfig& config) {
  constexpr std::array<std::string_view, 10> kKeys = {
      "kind",   "num_qo_heads", "head_dim",    "rope_head_dim", "q_lora_rank",
      "window", "o_groups",     "o_lora_rank", "scale",         "rope"};
  constexpr std::array<std::string_view, 6> kOptional = {"compressor", "indexer", "qkv_a",
                                                         "q_b",        "o_a",     "o_b"};
  if (config.drafter && config.drafter->kind == DrafterKind::kGemma4Mtp) {
    json.at("kind").refuse("'full', 'sliding' in a drafter of kind 'gemma4_mtp'");
  }
  json.check_keys(kKeys, kOptional);
  CompressedAttention attention;
  attention.num_qo_heads = read_int(json, "num_qo_heads", 1, kMaxHeads);
  attention.head_dim = read_int(json, "head_dim", 2, kMaxCompressedHeadDim);
  attention.rope_head_dim = read_int(json, "rope_head_dim", 2, attention.head_dim);
  for (const char* const key : {"head_dim", "rope_head_dim"}) {
    if (json.at(key).as_int(2, kMaxHeadDim) % 2 != 0) json.at(key).refuse("an even number");
  }
  attention.q_lora_rank = read_int(json, "q_lora_rank", 1, kMaxHidden);
  attention.window = read_int(json, "window", 1, kMaxPosition);
  attention.o_groups = read_int(json, "o_groups", 1, attention.num_qo_heads);
  if (attention.num_qo_heads % attention.o_groups != 0) {
    json.at("o_groups").refuse(concat("divisors of num_qo_heads, ", attention.num_qo_heads));
  }
  attention.o_lora_rank = read_int(json, "o_lora_rank", 1, kMaxHidden);
  attention.scale = read_positive(json.at("scale"));
  attention.rope = read_rope_index(json, config.ropes, attention.rope_head_dim, "rope_head_dim",
                                   /*allows_interleaved=*/true);
  const auto format = [&](std::string_view key, const char* width, int64_t columns) {
    return read_format(json, key, {width, columns}, /*is_of_experts=*/false);
  };
  attention.qkv_a = format("qkv_a", "hidden_size", config.hidden);
  attention.q_b = format("q_b", "q_lora_rank", attention.q_lora_rank);
  attention.o_a = format("o_a", "num_qo_heads * head_dim / o_groups", attention.o_group_width());
  attention.o_b = format("o_b", "o_groups * o_lora_rank", attention.o_a_rows());
  if (const std::optional<Json> compressor = json.find("compressor")) {
    attention.compressor = read_compressor(*compressor);
  }
  if (const std::optional<Json> indexer = json.find("indexer")) {
    if (!attention.compressor) indexer->refuse("no such key without a compressor");
    attention.indexer = read_indexer(*indexer, attention, config.max_position);
  }
  return attention;
}

void CompressedAttention::append_stores(std::vector<KvLayerShape>& shapes) const {
  shapes.push_back({.kind = WindowEntryKv{window}, .num_kv_heads = 1, .head_dim = head_dim});
  if (!compressor) return;
  const int32_t ratio = compressor->tokens_per_entry;
  shapes.push_back({.kind = TailKv{compressor->overlaps ? 2 * ratio : ratio},
                    .num_kv_heads = 1,
                    .head_dim = tail_width()});
  shapes.push_back({.kind = CompressedKv{ratio, indexer ? indexer->head_dim : 0},
                    .num_kv_heads = 1,
                    .head_dim = head_dim});
}

}  // namespace paceline
