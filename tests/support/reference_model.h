// SPDX-License-Identifier: Apache-2.0
#pragma once

// A second implementation of decoders and draft heads in double precision, written from the
// equations.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "model/description/decoder_config.h"
#include "support/raw_models.h"
#include "support/reference_layers.h"

namespace paceline::testing {
namespace reference {

struct TargetStates {
  std::vector<Rows> entering;  // by layer: the residual streams
  std::vector<Rows> keys;      // by layer
  std::vector<Rows> values;
  Rows normed;  // the output after the final norm
  Rows logits;
};

inline const RawTensor& lm_head_of(const RawModel& target) {
  return target.at(target.config.ties_lm_head ? "embed.weight" : "lm_head.weight");
}

inline TargetStates run_target(const RawModel& m, const std::vector<int32_t>& tokens) {
  const DecoderConfig& c = m.config;
  TargetStates states;
  Rows residual;
  for (const int32_t token : tokens) residual.push_back(embedding(m, c.embed_scale, token));
  for (size_t index = 0; index < c.layers.size(); ++index) {
    states.entering.push_back(residual);
    Rows inputs;
    for (const Vector& row : residual) {
      inputs.push_back(rms(c, m.at("layers." + std::to_string(index) + ".attn_norm.weight"), row));
    }
    layer(m, index, inputs, residual, states.keys.emplace_back(), states.values.emplace_back());
  }
  for (const Vector& row : residual) {
    states.normed.push_back(rms(c, m.at("final_norm.weight"), row));
    states.logits.push_back(linear(lm_head_of(m), states.normed.back()));
  }
  return states;
}

// The logits of Gemma 4 MTP at its draft step `step`, the newest token being number `newest`;
// models.md 3.5, line by line. Tokens outside the chosen clusters have -inf. `ahead`: positions
// past the last key that q is rotated to.
inline Vector run_mtp(const RawModel& m, const RawModel& target, const TargetStates& states,
                      const std::vector<int32_t>& tokens, size_t newest, size_t step,
                      size_t ahead) {
  const DecoderConfig& c = m.config;
  const DrafterConfig& d = *c.drafter;
  Vector hidden = states.normed[newest - 1];
  Vector y;
  for (size_t s = 0; s <= step; ++s) {
    const Vector e = embedding(target, c.embed_scale, tokens[newest + s]);
    Vector x = linear(m.at("fc.weight"), join(e, hidden));
    for (size_t index = 0; index < c.layers.size(); ++index) {
      const MultiHeadAttention& a = attention_of(m, index);
      size_t source = target.config.layers.size() - 1;
      while (attention_of(target, source).kind != a.kind) --source;
      const Vector input = rms(c, m.at("layers." + std::to_string(index) + ".attn_norm.weight"), x);
      const Vector q = project(m, index, "q", input, newest - 1 + ahead);
      finish_layer(m, index, attend(a, q, states.keys[source], states.values[source], newest - 1),
                   x);
    }
    y = rms(c, m.at("final_norm.weight"), x);
    hidden = linear(m.at("feedback.weight"), y);
  }
  Vector logits = linear(m.at("lm_head.weight"), y);
  if (d.centroids.count == 0) return logits;
  const Vector scores = linear(m.at("centroids.weight"), y);
  std::vector<size_t> clusters(scores.size());
  for (size_t i = 0; i < clusters.size(); ++i) clusters[i] = i;
  std::sort(clusters.begin(), clusters.end(),
            [&](size_t i, size_t j) { return scores[i] > scores[j]; });
  const auto size = static_cast<size_t>(d.cluster_size());
  for (size_t rank = static_cast<size_t>(d.centroids.top); rank < clusters.size(); ++rank) {
    for (size_t i = 0; i < size; ++i) {
      const int64_t token = m.token_ordering[clusters[rank] * size + i];
      logits[static_cast<size_t>(token)] = -std::numeric_limits<double>::infinity();
    }
  }
  return logits;
}

// The draft head's logits for the row of pair `num_pairs - 1`. Pair i is (tokens[i + 1], hidden
// state i): the target's for the first `num_first`, then the head's own outputs.
// models.md 3.1, 3.2 and 3.3, line by line.
inline Vector run_head(const RawModel& m, const RawModel& target, const TargetStates& states,
                       const std::vector<int32_t>& tokens, size_t num_first, size_t num_pairs) {
  const DecoderConfig& c = m.config;
  const DrafterConfig& d = *c.drafter;
  const RawModel& table = d.owns_embedding ? m : target;
  Rows feedback;  // by step
  Rows out;
  for (size_t count = num_first; count <= num_pairs; ++count) {
    Rows inputs;
    Rows residual;
    for (size_t i = 0; i < count; ++i) {
      const Vector e = embedding(table, c.embed_scale, tokens[i + 1]);
      const bool is_first = i < num_first;
      if (d.kind != DrafterKind::kEagle3) {
        Vector half = e;
        Vector h = is_first ? states.normed[i] : feedback[i - num_first];
        if (d.kind == DrafterKind::kMtp) {
          half = rms(c, m.at("fc_norm.0.weight"), e);
          h = rms(c, m.at("fc_norm.1.weight"), h);
        }
        Vector x = linear(m.at("fc.weight"), join(half, h));
        for (size_t j = 0; d.has_fc_bias && j < x.size(); ++j) x[j] += m.at("fc.bias").values[j];
        inputs.push_back(d.has_attn_norm ? rms(c, m.at("layers.0.attn_norm.weight"), x) : x);
        residual.push_back(x);
        continue;
      }
      Vector g;
      if (is_first) {
        Vector aux;
        for (size_t part = 0; part < d.aux_layers.size(); ++part) {
          Vector r = states.entering[static_cast<size_t>(d.aux_layers[part])][i];
          if (d.has_fc_norm) r = rms(c, m.at("fc_norm." + std::to_string(part) + ".weight"), r);
          aux = join(aux, r);
        }
        if (d.norm_before_fc) aux = rms(c, m.at("fc_input_norm.weight"), aux);
        g = linear(m.at("fc.weight"), aux);
        for (size_t j = 0; d.has_fc_bias && j < g.size(); ++j) g[j] += m.at("fc.bias").values[j];
      } else {
        g = feedback[i - num_first];
      }
      const Vector n = rms(c, m.at("layers.0.hidden_norm.weight"), g);
      inputs.push_back(join(rms(c, m.at("layers.0.attn_norm.weight"), e), n));
      residual.push_back(d.norm_before_residual ? n : g);
    }
    for (size_t index = 0; index < c.layers.size(); ++index) {
      if (index > 0) {
        inputs.clear();
        for (const Vector& row : residual) {
          inputs.push_back(
              rms(c, m.at("layers." + std::to_string(index) + ".attn_norm.weight"), row));
        }
      }
      Rows k;
      Rows v;
      layer(m, index, inputs, residual, k, v);
    }
    out = residual;
    feedback.push_back(d.norm_output ? rms(c, m.at("final_norm.weight"), out.back()) : out.back());
  }
  const Vector u = d.has_final_norm ? rms(c, m.at("final_norm.weight"), out.back()) : out.back();
  return linear(d.owns_lm_head ? m.at("lm_head.weight") : lm_head_of(target), u);
}

}  // namespace reference
}  // namespace paceline::testing
