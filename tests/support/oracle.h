// SPDX-License-Identifier: Apache-2.0
#pragma once

// A target whose next token is a function f of the current one, and heads that compute the same f:
// from the token they are given, or from the hidden state that goes with it. If tokens, hidden
// states or noise are off by one position, such a draft head no longer agrees with its target.

#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "support/raw_models.h"

namespace paceline::testing {

inline constexpr int32_t kOracleVocab = 64;  // and hidden size: states are one-hot
inline constexpr int32_t kOracleDraftVocab = 40;

// Tokens that the target ever draws: all, or those of a reduced draft vocabulary.
inline std::vector<int64_t> oracle_tokens(bool is_reduced) {
  std::vector<int64_t> tokens(is_reduced ? kOracleDraftVocab : kOracleVocab);
  std::iota(tokens.begin(), tokens.end(), 0);
  for (int64_t& token : tokens) token = is_reduced ? token * 3 / 2 + 2 : token;
  return tokens;
}

inline int64_t oracle_next(bool is_reduced, int64_t token) {
  const std::vector<int64_t> tokens = oracle_tokens(is_reduced);
  return tokens[static_cast<size_t>(token * 7 + 3) % tokens.size()];
}

// One attention head, as wide as the hidden state, of a size that a GPU kernel has.
inline TinyModel oracle_decoder(std::vector<int32_t> windows) {
  TinyModel decoder = llama_of(std::move(windows));
  decoder.hidden = decoder.head_dim = kOracleVocab;
  decoder.num_qo_heads = decoder.num_kv_heads = 1;
  return decoder;
}

// E[t] = sqrt(hidden) e_t; layers that add nothing; the lm_head reads f.
inline RawModel oracle_target(bool is_reduced) {
  RawModel m = random_raw_model(tiny_config_json(oracle_decoder({8, 0, 0})), 5);
  constexpr size_t kSize = kOracleVocab;
  const auto clear = [&](const std::string& name, float value) {
    std::fill(m.at(name).values.begin(), m.at(name).values.end(), value);
  };
  for (auto& [name, tensor] : m.tensors) {
    if (name.find("norm") != std::string::npos) clear(name, 1);
    if (name.find(".o.") != std::string::npos || name.find(".down.") != std::string::npos) {
      clear(name, 0);
    }
  }
  clear("embed.weight", 0);
  clear("lm_head.weight", -4);  // never drawn, but for those set below
  for (const int64_t token : oracle_tokens(is_reduced)) {
    float* const row = m.at("lm_head.weight").values.data() + static_cast<size_t>(token) * kSize;
    std::fill_n(row, kSize, 0.0f);
  }
  for (size_t t = 0; t < kSize; ++t) {
    m.at("embed.weight").values[t * kSize + t] = std::sqrt(static_cast<float>(kSize));
    const auto next = static_cast<size_t>(oracle_next(is_reduced, static_cast<int64_t>(t)));
    m.at("lm_head.weight").values[next * kSize + t] = 0.5f;  // a logit of 4 against 0
  }
  return m;
}

struct Oracle {
  DrafterKind kind = DrafterKind::kEagle;
  bool reads_hidden = false;  // else the token
  bool is_reduced = false;    // kEagle3: a draft vocabulary of its own
  bool norm_before_residual = false;
  bool norm_output = false;
  size_t aux_part = 1;  // kEagle3: which of the aux layers it reads
};

inline RawModel oracle_head(const Oracle& o, const RawModel& target) {
  const bool is_eagle3 = o.kind == DrafterKind::kEagle3;
  const bool is_mtp = o.kind == DrafterKind::kGemma4Mtp;
  TinyDraftHead shape{.kind = o.kind,
                      .target_hidden = kOracleVocab,
                      .norm_before_residual = o.norm_before_residual,
                      .fc_norm = o.kind == DrafterKind::kMtp,
                      .norm_output = o.norm_output,
                      .owns_lm_head = o.is_reduced || is_mtp,
                      .draft_vocab_size = o.is_reduced ? kOracleDraftVocab : kOracleVocab};
  // A window of one: attention hands on its own row's v. MTP's layers read the target's KV and add
  // nothing.
  shape.decoder = oracle_decoder(is_mtp ? std::vector<int32_t>{8, 0} : std::vector<int32_t>{1});
  RawModel m = random_raw_model(head_config_json(shape), 6);
  constexpr size_t kSize = kOracleVocab;
  for (auto& [name, tensor] : m.tensors) {
    const bool is_norm = name.find("norm") != std::string::npos;
    std::fill(tensor.values.begin(), tensor.values.end(), is_norm ? 1.0f : 0.0f);
  }
  const auto add = [&](const std::string& name, size_t row, size_t col, float value) {
    RawTensor& tensor = m.at(name);
    tensor.values[row * static_cast<size_t>(tensor.shape[1]) + col] += value;
  };
  for (size_t t = 0; t < kSize; ++t) {
    const auto next = static_cast<size_t>(oracle_next(o.is_reduced, static_cast<int64_t>(t)));
    // A draft step passes on the hidden state that the target would have produced.
    if (is_mtp) add("feedback.weight", t, t, 1);
    if (!is_eagle3) {
      // x = E[token], or E[f(the token that the hidden state is of)].
      if (o.reads_hidden) {
        add("fc.weight", next, kSize + t, 1);
      } else {
        add("fc.weight", t, t, 1);
      }
      continue;
    }
    // g = E[the token that the hidden state is of]; x = g + v, where v takes g out again.
    add("fc.weight", t, o.aux_part * kSize + t, 1);
    add("layers.0.attn.o.weight", t, t, 1);
    add("layers.0.attn.v.weight", t, kSize + t, -1);
    if (o.reads_hidden) {
      add("layers.0.attn.v.weight", next, kSize + t, 1);
    } else {
      add("layers.0.attn.v.weight", t, t, 1);
    }
  }
  if (is_mtp) m.at("lm_head.weight") = target.at("lm_head.weight");
  if (o.is_reduced) {
    m.draft_to_target = oracle_tokens(true);
    const std::vector<float>& head = target.at("lm_head.weight").values;
    for (size_t row = 0; row < m.draft_to_target.size(); ++row) {
      const auto token = static_cast<size_t>(m.draft_to_target[row]);
      std::copy_n(head.begin() + static_cast<int64_t>(token * kSize), kSize,
                  m.at("lm_head.weight").values.begin() + static_cast<int64_t>(row * kSize));
    }
  }
  return m;
}

}  // namespace paceline::testing
