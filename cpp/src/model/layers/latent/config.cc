// SPDX-License-Identifier: Apache-2.0
#include "model/layers/latent/config.h"

#include <array>

#include "model/description/config_reading.h"
#include "ops/latent.h"

namespace paceline {

LatentAttention LatentAttention::read(const Json& json, const DecoderConfig& config) {
  constexpr std::array<std::string_view, 9> kKeys = {
      "kind",       "num_qo_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
      "v_head_dim", "scale",        "rope",         "latent_norm_eps"};
  constexpr std::array<std::string_view, 4> kOptional = {"q_lora_rank", "qkv_a", "q_b", "o"};
  if (config.drafter && config.drafter->kind == DrafterKind::kGemma4Mtp) {
    json.at("kind").refuse("'full', 'sliding' in a drafter of kind 'gemma4_mtp'");
  }
  json.check_keys(kKeys, kOptional);
  LatentAttention attention;
  attention.num_qo_heads = read_int(json, "num_qo_heads", 1, kMaxHeads);
  if (json.find("q_lora_rank")) {
    attention.q_lora_rank = read_int(json, "q_lora_rank", 1, kMaxHidden);
  }
  attention.kv_lora_rank = read_int(json, "kv_lora_rank", 1, kMaxLatentRank);
  attention.qk_nope_head_dim = read_int(json, "qk_nope_head_dim", 1, kMaxHeadDim);
  attention.qk_rope_head_dim = read_int(json, "qk_rope_head_dim", 2, kMaxHeadDim);
  if (attention.qk_rope_head_dim % 2 != 0) {
    json.at("qk_rope_head_dim").refuse("an even number");
  }
  attention.v_head_dim = read_int(json, "v_head_dim", 1, kMaxHeadDim);
  attention.scale = read_positive(json.at("scale"));
  attention.norm_eps = read_positive(json.at("latent_norm_eps"));
  attention.rope = read_rope_index(json, config.ropes, attention.qk_rope_head_dim,
                                   "qk_rope_head_dim", /*allows_interleaved=*/true);
  attention.qkv_a =
      read_format(json, "qkv_a", {"hidden_size", config.qkv_inputs(config.layers.size())},
                  /*is_of_experts=*/false);
  if (attention.q_lora_rank == 0 && json.find("q_b")) {
    json.at("q_b").refuse("no such key without a q_lora_rank");
  }
  attention.q_b = read_format(json, "q_b", {"q_lora_rank", attention.q_lora_rank},
                              /*is_of_experts=*/false);
  attention.o = read_format(
      json, "o",
      {"num_qo_heads * v_head_dim", int64_t{attention.num_qo_heads} * attention.v_head_dim},
      /*is_of_experts=*/false);
  return attention;
}

void LatentAttention::append_stores(std::vector<KvLayerShape>& shapes) const {
  shapes.push_back({.kind = LatentKv{kv_lora_rank}, .num_kv_heads = 1, .head_dim = entry_width()});
}

std::string LatentAttention::unsupported_on_gpu() const {
  if (kv_lora_rank <= kMaxCudaLatentRank && entry_width() <= kMaxCudaEntryWidth) return {};
  return concat("latent attention with kv_lora_rank ", kv_lora_rank, " and qk_rope_head_dim ",
                qk_rope_head_dim, "; supported on a GPU: kv_lora_rank up to ", kMaxCudaLatentRank,
                ", and up to ", kMaxCudaEntryWidth, " for both together");
}

}  // namespace paceline
