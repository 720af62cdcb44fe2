// SPDX-License-Identifier: Apache-2.0
#pragma once

// Block drafters whose every draft is right, for the target of oracle.h, whose next token is a
// function f of the current one. Head h of their first layer sees distance h alone: queries and
// keys are constants that rotation turns, with phases that cancel there. Its output is f^h of the
// token at that distance.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "support/oracle.h"
#include "support/raw_models.h"

namespace paceline::testing {

// Where an oracle finds the token that it starts from.
enum class BlockSource {
  kNewest,   // the first row of the block
  kContext,  // the hidden state of the token before; right at temperature 0
  kChain,    // the token before each draft, by the Markov head; right at any temperature
  kSelector  // the same, by the candidate selector
};

struct BlockOracle {
  BlockSource source = BlockSource::kNewest;
  std::vector<int32_t> windows = {0};
  TinyBlock block = {};
};

// The target of block oracles. Its vocabulary is reduced, so that the mask token is never drawn.
inline RawModel block_oracle_target() { return oracle_target(/*is_reduced=*/true); }

// That of an oracle of kSelector: it draws no more tokens than there can be candidates.
inline std::vector<int64_t> selector_tokens() {
  std::vector<int64_t> tokens = oracle_tokens(/*is_reduced=*/true);
  tokens.resize(24);
  return tokens;
}
inline RawModel selector_oracle_target() {
  constexpr size_t kSize = kOracleVocab;
  RawModel m = block_oracle_target();
  std::vector<float>& rows = m.at("lm_head.weight").values;
  std::fill(rows.begin(), rows.end(), -4.0f);
  const std::vector<int64_t> tokens = selector_tokens();
  for (const int64_t token : tokens) {
    std::fill_n(rows.begin() + token * static_cast<int64_t>(kSize), kSize, 0.0f);
  }
  for (size_t t = 0; t < kSize; ++t) {
    const auto next = static_cast<size_t>(tokens[(t * 7 + 3) % tokens.size()]);
    rows[next * kSize + t] = 0.5f;
  }
  return m;
}
inline RawModel block_oracle_target(BlockSource source) {
  return source == BlockSource::kSelector ? selector_oracle_target() : block_oracle_target();
}

inline RawModel block_oracle(const BlockOracle& o, const RawModel& target) {
  constexpr size_t kSize = kOracleVocab;
  // Elements of the residual stream: the token of a block's row, then the token of a context row
  // or the output of a block's row, a constant, and one that makes the norm of mask rows the same.
  constexpr size_t kConstant = 2 * kSize;
  constexpr size_t kFill = kConstant + 1;
  const auto num_heads = static_cast<size_t>(o.block.size + 1);
  TinyDraftHead shape{.decoder = oracle_decoder(o.windows),
                      .kind = DrafterKind::kBlock,
                      .target_hidden = kOracleVocab,
                      .aux_layers = {1},
                      .owns_embedding = true,
                      .owns_lm_head = true,
                      .block = o.block};
  shape.decoder.hidden = 2 * kOracleVocab + 8;
  shape.decoder.num_qo_heads = static_cast<int32_t>(num_heads);
  if (o.source == BlockSource::kChain) shape.block.markov_rank = kOracleVocab;
  if (o.source == BlockSource::kSelector) {
    shape.block.taps = 2;
    shape.block.selector_rank = kOracleVocab;
    shape.block.selector_top = 32;
  }
  RawModel m = random_raw_model(head_config_json(shape), 6);
  for (auto& [name, tensor] : m.tensors) {
    const bool is_norm = name.find("norm") != std::string::npos;
    std::fill(tensor.values.begin(), tensor.values.end(), is_norm ? 1.0f : 0.0f);
  }
  const auto set = [&](const std::string& name, size_t row, size_t col, float value) {
    RawTensor& tensor = m.at(name);
    tensor.values[row * static_cast<size_t>(tensor.shape[1]) + col] = value;
  };
  const auto mask = static_cast<size_t>(o.block.mask_token);
  for (size_t t = 0; t < kSize; ++t) {
    set("embed.weight", t, kConstant, 1);
    set("embed.weight", t, t == mask ? kFill : t, 1);
    set("lm_head.weight", t, kSize + t, 1);
    // The target's embeddings are sqrt(kSize) e_t.
    set("fc.weight", kSize + t, t, 0.125f);
    set("fc.weight", kConstant, t, 0.125f);
  }
  if (o.source == BlockSource::kChain) {
    for (size_t t = 0; t < kSize; ++t) set("markov.table.weight", t, t, 1);
    m.at("markov.weight") = target.at("lm_head.weight");
    for (float& value : m.at("markov.weight").values) value *= std::sqrt(float{kSize});
    return m;
  }
  if (o.source == BlockSource::kSelector) {
    // Convolutions that change nothing, and rows with two elements of one size after the norm.
    for (const char* const name : {"layers.0.attn_conv.base", "layers.0.mlp_conv.base"}) {
      RawTensor& base = m.at(name);
      for (int64_t side = 0; side < 2; ++side) {
        std::fill_n(base.values.begin() + side * base.shape[1] * base.shape[2], base.shape[2],
                    1.0f);
      }
    }
    const float eps = m.config.norm_eps;
    const float constant = 1 / std::sqrt(2 / static_cast<float>(shape.decoder.hidden) + eps);
    // The logits of tokens that the target draws are 0, so that sums with scores round nothing.
    std::fill(m.at("lm_head.weight").values.begin(), m.at("lm_head.weight").values.end(), 0.0f);
    const std::vector<int64_t> drawn = selector_tokens();
    for (size_t t = 0; t < kSize; ++t) {
      const bool is_drawn = std::find(drawn.begin(), drawn.end(), t) != drawn.end();
      if (!is_drawn) set("lm_head.weight", t, kConstant, -64.0f / constant);
      set("selector.predecessors.weight", t, t, 1);
      set("selector.weight", t, kConstant, 1.0f / constant);
    }
    m.at("selector.successors.weight") = target.at("lm_head.weight");
    for (float& value : m.at("selector.successors.weight").values) {
      value *= std::sqrt(float{kSize} / (1 + eps));  // as the target's norm leaves them
    }
    return m;
  }
  const double theta = o.windows[0] > 0 ? 1e4 : 1e5;  // as tiny_config_json has them
  const size_t first = o.source == BlockSource::kContext ? kSize : 0;
  for (size_t t = 0; t < kSize; ++t) set("layers.0.attn.v.weight", t, first + t, 1);
  for (size_t i = 0; i < kSize / 2; ++i) {
    const double frequency = std::pow(theta, -2.0 * static_cast<double>(i) / kSize);
    constexpr double kSharp = 2.5;
    set("layers.0.attn.k.weight", i, kConstant, static_cast<float>(kSharp));
    for (size_t h = 0; h < num_heads; ++h) {
      const double phase = frequency * static_cast<double>(h);
      set("layers.0.attn.q.weight", h * kSize + i, kConstant,
          static_cast<float>(kSharp * std::cos(phase)));
      set("layers.0.attn.q.weight", h * kSize + kSize / 2 + i, kConstant,
          static_cast<float>(-kSharp * std::sin(phase)));
    }
  }
  for (size_t t = 0; t < kSize; ++t) {
    auto token = static_cast<int64_t>(t);
    if (o.block.samples_from_anchor) token = oracle_next(true, token);
    for (size_t h = 0; h < num_heads; ++h) {
      // At larger distances are older tokens of the context, or no tokens: then a head sees the
      // nearest one. The nearest head that sees a token counts most.
      const double weight = std::pow(0.25, static_cast<double>(h));
      set("layers.0.attn.o.weight", kSize + static_cast<size_t>(token), h * kSize + t,
          static_cast<float>(weight));
      token = oracle_next(true, token);
    }
  }
  return m;
}

}  // namespace paceline::testing
