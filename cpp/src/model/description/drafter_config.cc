// SPDX-License-Identifier: Apache-2.0

// The key "drafter" of a decoder description.

#include <algorithm>
#include <array>
#include <optional>
#include <span>

#include "model/description/config_reading.h"
#include "ops/block_conv.h"
#include "ops/candidates.h"

namespace paceline {
namespace {

[[nodiscard]] std::vector<int32_t> read_aux_layers(const Json& json) {
  if (json.kind() != JsonKind::kList || json.size() < 1 || json.size() > kMaxAuxLayers) {
    json.refuse(concat("a list of 1 to ", kMaxAuxLayers, " layers of the target"));
  }
  std::vector<int32_t> layers;
  for (const Json& layer : json.elements()) {
    layers.push_back(static_cast<int32_t>(layer.as_int(0, kMaxLayers - 1)));
    if (layers.size() > 1 && layers.back() <= layers[layers.size() - 2]) {
      layer.refuse("layers in ascending order");
    }
  }
  return layers;
}

[[nodiscard]] CentroidsConfig read_centroids(const Json& json, int32_t num_tokens) {
  constexpr std::array<std::string_view, 2> kKeys = {"count", "top"};
  json.check_keys(kKeys);
  CentroidsConfig centroids;
  centroids.count = read_int(json, "count", 1, num_tokens);
  if (num_tokens % centroids.count != 0) {
    json.at("count").refuse(concat("divisors of draft_vocab_size, ", num_tokens));
  }
  centroids.top = read_int(json, "top", 1, centroids.count);
  return centroids;
}

[[nodiscard]] BlockMask read_block_mask(const Json& json, bool is_sliding) {
  constexpr std::array<std::string_view, 1> kKeys = {"is_causal"};
  constexpr std::array<std::string_view, 2> kSlidingKeys = {"is_causal", "is_anchored"};
  if (is_sliding) {
    json.check_keys(kSlidingKeys);
  } else {
    json.check_keys(kKeys);
  }
  return {.is_causal = json.at("is_causal").as_bool(),
          .is_anchored = is_sliding && json.at("is_anchored").as_bool()};
}

void read_markov(const Json& json, int32_t hidden, BlockConfig& block) {
  constexpr std::array<std::string_view, 2> kKeys = {"kind", "rank"};
  json.check_keys(kKeys);
  const Json kind = json.at("kind");
  if (kind.as_string() == "vanilla") {
    block.markov = MarkovHead::kVanilla;
  } else if (kind.as_string() == "gated") {
    block.markov = MarkovHead::kGated;
  } else if (kind.as_string() == "rnn") {
    block.markov = MarkovHead::kRnn;
  } else {
    kind.refuse("'vanilla', 'gated', 'rnn'");
  }
  block.markov_rank = read_int(json, "rank", 1, hidden);
}

void read_confidence(const Json& json, bool is_chain, BlockConfig& block) {
  constexpr std::array<std::string_view, 1> kKeys = {"reads_token"};
  constexpr std::array<std::string_view, 2> kOptional = {"before_norm", "lacks_bias"};
  json.check_keys(kKeys, kOptional);
  const Json reads_token = json.at("reads_token");
  if (reads_token.as_bool() && !is_chain) reads_token.refuse("false where kind is not 'dspark'");
  block.confidence =
      reads_token.as_bool() ? ConfidenceHead::kHiddenAndToken : ConfidenceHead::kHidden;
  block.confidence_before_norm = read_switch(json, "before_norm");
  block.has_confidence_bias = !read_switch(json, "lacks_bias");
}

[[nodiscard]] BlockConvConfig read_convolution(const Json& json, int32_t hidden) {
  constexpr std::array<std::string_view, 2> kKeys = {"taps", "group"};
  json.check_keys(kKeys);
  BlockConvConfig conv;
  conv.taps = read_int(json, "taps", 1, kMaxBlockConvTaps);
  conv.group = read_int(json, "group", 1, hidden);
  if (hidden % conv.group != 0) {
    json.at("group").refuse(concat("divisors of hidden_size, ", hidden));
  }
  return conv;
}

[[nodiscard]] SelectorConfig read_selector(const Json& json, int32_t vocab_size) {
  constexpr std::array<std::string_view, 2> kKeys = {"rank", "top"};
  json.check_keys(kKeys);
  return {.rank = read_int(json, "rank", 1, kMaxSelectorRank),
          .top = read_int(json, "top", 1, std::min(kMaxCandidates, vocab_size))};
}

// `kind`: "dflash", "dflash2" or "dspark", whose drafts depend on those before them by a Markov
// head.
[[nodiscard]] BlockConfig read_block(const Json& json, std::string_view kind, int32_t hidden,
                                     int32_t vocab_size) {
  constexpr std::array<std::string_view, 5> kKeys = {"size", "mask_token", "samples_from_anchor",
                                                     "full", "sliding"};
  constexpr std::array<std::string_view, 1> kOptional = {"confidence"};
  constexpr std::array<std::string_view, 2> kChainKeys = {"confidence", "markov"};
  constexpr std::array<std::string_view, 3> kSelectorKeys = {"confidence", "convolution",
                                                             "selector"};
  const bool is_chain = kind == "dspark";
  const bool selects = kind == "dflash2";
  std::span<const std::string_view> optional = kOptional;
  if (is_chain) optional = kChainKeys;
  if (selects) optional = kSelectorKeys;
  json.check_keys(kKeys, optional);
  BlockConfig block;
  block.samples_from_anchor = json.at("samples_from_anchor").as_bool();
  block.size = read_int(json, "size", block.samples_from_anchor ? 1 : 2, kMaxDraftBlock);
  block.mask_token = read_int(json, "mask_token", 0, vocab_size - 1);
  block.full = read_block_mask(json.at("full"), /*is_sliding=*/false);
  block.sliding = read_block_mask(json.at("sliding"), /*is_sliding=*/true);
  if (is_chain) read_markov(json.at("markov"), hidden, block);
  if (selects) {
    block.conv = read_convolution(json.at("convolution"), hidden);
    block.selector = read_selector(json.at("selector"), vocab_size);
  }
  if (const std::optional<Json> confidence = json.find("confidence")) {
    read_confidence(*confidence, is_chain, block);
  }
  return block;
}

}  // namespace

DrafterConfig read_drafter(const Json& json, int32_t hidden, int32_t vocab_size) {
  constexpr std::array<std::string_view, 12> kKeys = {
      "kind",           "target_hidden_size", "norm_before_residual", "norm_before_fc",
      "fc_norm",        "norm_output",        "has_fc_bias",          "has_attn_norm",
      "has_final_norm", "owns_embedding",     "owns_lm_head",         "draft_vocab_size"};
  constexpr std::array<std::string_view, 1> kEagle3Keys = {"aux_layers"};
  constexpr std::array<std::string_view, 1> kGemma4MtpKeys = {"centroids"};
  constexpr std::array<std::string_view, 1> kMtpKeys = {"fc"};
  constexpr std::array<std::string_view, 3> kBlockKeys = {"aux_layers", "block", "fc"};
  DrafterConfig drafter;
  const Json kind = json.at("kind");
  std::span<const std::string_view> optional;
  if (kind.as_string() == "eagle3") {
    drafter.kind = DrafterKind::kEagle3;
    optional = kEagle3Keys;
  } else if (kind.as_string() == "mtp") {
    drafter.kind = DrafterKind::kMtp;
    optional = kMtpKeys;
  } else if (kind.as_string() == "gemma4_mtp") {
    drafter.kind = DrafterKind::kGemma4Mtp;
    optional = kGemma4MtpKeys;
  } else if (kind.as_string() == "dflash" || kind.as_string() == "dflash2" ||
             kind.as_string() == "dspark") {
    drafter.kind = DrafterKind::kBlock;
    optional = kBlockKeys;
  } else if (kind.as_string() != "eagle") {
    kind.refuse("'eagle', 'eagle3', 'mtp', 'gemma4_mtp', 'dflash', 'dflash2', 'dspark'");
  }
  const bool is_eagle3 = drafter.kind == DrafterKind::kEagle3;
  const bool is_mtp = drafter.kind == DrafterKind::kMtp;
  const bool is_gemma4_mtp = drafter.kind == DrafterKind::kGemma4Mtp;
  json.check_keys(kKeys, optional);
  drafter.target_hidden = read_int(json, "target_hidden_size", 1, kMaxHidden);
  if ((drafter.kind == DrafterKind::kEagle || is_mtp) && drafter.target_hidden != hidden) {
    json.at("target_hidden_size")
        .refuse(concat(hidden, ", the hidden_size of this draft head: kind '", kind.as_string(),
                       "' feeds its own output back instead of the target's"));
  }
  if (is_mtp) {
    drafter.fc = read_format(json, "fc", {"hidden_size", hidden}, /*is_of_experts=*/false);
  }
  const bool is_block = drafter.kind == DrafterKind::kBlock;
  if (is_eagle3 || is_block) drafter.aux_layers = read_aux_layers(json.at("aux_layers"));
  if (is_block) {
    drafter.block = read_block(json.at("block"), kind.as_string(), hidden, vocab_size);
    drafter.fc = read_format(json, "fc", {"fc's input", drafter.fc_width()},
                             /*is_of_experts=*/false);
  }
  // For keys that only some kinds may set.
  const auto read_bool_of = [&](bool may_be_true, const char* key) {
    const bool value = json.at(key).as_bool();
    if (value && !may_be_true) {
      json.at(key).refuse(concat("false where kind is '", kind.as_string(), "'"));
    }
    return value;
  };
  drafter.norm_before_residual = read_bool_of(is_eagle3, "norm_before_residual");
  drafter.norm_before_fc = read_bool_of(is_eagle3, "norm_before_fc");
  drafter.has_fc_norm = read_bool_of(is_eagle3 || is_mtp, "fc_norm");
  if (is_mtp && !drafter.has_fc_norm) json.at("fc_norm").refuse("true where kind is 'mtp'");
  if (drafter.has_fc_norm && drafter.norm_before_fc) {
    json.at("fc_norm").refuse("false where norm_before_fc is true");
  }
  drafter.norm_output = read_bool_of(is_eagle3 || is_mtp, "norm_output");
  drafter.has_fc_bias = json.at("has_fc_bias").as_bool();
  // For keys that only EAGLE may leave false.
  const auto read_needed_bool = [&](const char* key) {
    const bool value = json.at(key).as_bool();
    if (!value && drafter.kind != DrafterKind::kEagle) {
      json.at(key).refuse(concat("true where kind is '", kind.as_string(), "'"));
    }
    return value;
  };
  drafter.has_attn_norm = read_needed_bool("has_attn_norm");
  drafter.has_final_norm = read_needed_bool("has_final_norm");
  drafter.owns_embedding = json.at("owns_embedding").as_bool();
  drafter.owns_lm_head = json.at("owns_lm_head").as_bool();
  drafter.draft_vocab_size = read_int(json, "draft_vocab_size", 1, kMaxVocab);
  if (!drafter.owns_lm_head && drafter.draft_vocab_size != vocab_size) {
    json.at("draft_vocab_size")
        .refuse(concat(vocab_size, ", the vocab_size, where owns_lm_head is false"));
  }
  if (is_gemma4_mtp) {
    // It uses the target's embeddings, in the target's width.
    if (drafter.owns_embedding)
      json.at("owns_embedding").refuse("false where kind is 'gemma4_mtp'");
    if (!drafter.owns_lm_head) json.at("owns_lm_head").refuse("true where kind is 'gemma4_mtp'");
    if (const std::optional<Json> centroids = json.find("centroids")) {
      drafter.centroids = read_centroids(*centroids, drafter.draft_vocab_size);
    }
  }
  return drafter;
}

}  // namespace paceline
