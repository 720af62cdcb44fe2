// SPDX-License-Identifier: Apache-2.0
#pragma once

// Models whose weights a test can read and change: named tensors and a config, for decoders and
// draft heads; and a second implementation of both in double precision, written from the equations.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include <paceline/model.h>

#include "model/decoder_config.h"
#include "support/kv_layers.h"
#include "support/tiny_models.h"

namespace paceline::testing {

struct RawTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;
};

struct RawModel {
  std::string json;
  DecoderConfig config;
  std::map<std::string, RawTensor> tensors;
  std::vector<int64_t> draft_to_target;  // empty: none
  std::vector<int64_t> token_ordering;   // empty: none

  [[nodiscard]] RawTensor& at(const std::string& name) { return tensors.at(name); }
  [[nodiscard]] const RawTensor& at(const std::string& name) const { return tensors.at(name); }
  [[nodiscard]] std::shared_ptr<const Model> build(DType dtype = DType::kFloat32,
                                                   Device device = Device::kCpu) const {
    ModelBuilder builder(json, dtype, device);
    for (const auto& [name, tensor] : tensors) {
      builder.put(name, DType::kFloat32, tensor.shape, {}, tensor.values.data());
    }
    const auto put_tokens = [&](const char* name, const std::vector<int64_t>& tokens) {
      if (tokens.empty()) return;
      const auto count = static_cast<int64_t>(tokens.size());
      builder.put(name, DType::kInt64, std::vector<int64_t>{count}, {}, tokens.data());
    };
    put_tokens("draft_to_target", draft_to_target);
    put_tokens("token_ordering", token_ordering);
    return builder.finish();
  }
};

// A decoder like Llama; window 0 is full attention.
inline TinyModel llama_of(std::vector<int32_t> windows) {
  TinyModel model;
  model.windows = std::move(windows);
  model.is_gemma = false;
  return model;
}

// A draft head of tests, besides the decoder of its layers. Its `windows` have an entry for each
// layer of the head.
struct TinyDraftHead {
  TinyModel decoder = llama_of({0});
  DrafterKind kind = DrafterKind::kEagle;
  int32_t target_hidden = 32;
  std::vector<int32_t> aux_layers = {0, 1, 2};  // kEagle3
  bool norm_before_residual = false;
  bool norm_before_fc = false;
  bool fc_norm = false;
  bool norm_output = false;
  bool has_fc_bias = false;
  bool owns_embedding = false;
  bool owns_lm_head = false;  // with draft_vocab_size rows
  int32_t draft_vocab_size = 64;
  int32_t num_centroids = 0;  // kGemma4Mtp: 0 for a head over all tokens
  int32_t top_centroids = 0;
};

inline std::string head_config_json(const TinyDraftHead& head) {
  const auto boolean = [](bool value) { return value ? "true" : "false"; };
  const bool is_eagle3 = head.kind == DrafterKind::kEagle3;
  const bool is_mtp = head.kind == DrafterKind::kGemma4Mtp;
  std::ostringstream out;
  out << R"(,"drafter":{"kind":")"
      << (is_mtp      ? "gemma4_mtp"
          : is_eagle3 ? "eagle3"
                      : "eagle")
      << R"(","target_hidden_size":)" << head.target_hidden;
  if (is_eagle3) {
    out << R"(,"aux_layers":[)";
    for (size_t i = 0; i < head.aux_layers.size(); ++i) {
      out << (i > 0 ? "," : "") << head.aux_layers[i];
    }
    out << "]";
  }
  out << R"(,"norm_before_residual":)" << boolean(head.norm_before_residual)
      << R"(,"norm_before_fc":)" << boolean(head.norm_before_fc) << R"(,"fc_norm":)"
      << boolean(head.fc_norm) << R"(,"norm_output":)" << boolean(head.norm_output)
      << R"(,"has_fc_bias":)" << boolean(head.has_fc_bias) << R"(,"has_attn_norm":)"
      << boolean(is_eagle3 || is_mtp) << R"(,"has_final_norm":)" << boolean(is_eagle3 || is_mtp)
      << R"(,"owns_embedding":)" << boolean(head.owns_embedding) << R"(,"owns_lm_head":)"
      << boolean(head.owns_lm_head || is_mtp) << R"(,"draft_vocab_size":)" << head.draft_vocab_size;
  if (head.num_centroids > 0) {
    out << R"(,"centroids":{"count":)" << head.num_centroids << R"(,"top":)" << head.top_centroids
        << "}";
  }
  out << "}}";
  std::string json = tiny_config_json(head.decoder);
  if (is_mtp) {
    const std::string before = R"("attention":{)";
    for (size_t at = 0; (at = json.find(before, at)) != std::string::npos; at += before.size()) {
      json.insert(at + before.size(), R"("reads_target":true,)");
    }
  }
  const std::string tied = R"("ties_lm_head":true)";
  if (const size_t found = json.find(tied); found != std::string::npos) {
    json.replace(found, tied.size(), R"("ties_lm_head":false)");  // owns_lm_head says it
  }
  json.pop_back();
  return json + out.str();
}

// Names and shapes of all tensors that a config needs.
inline std::map<std::string, std::vector<int64_t>> tensor_shapes(const DecoderConfig& c) {
  std::map<std::string, std::vector<int64_t>> shapes;
  const int64_t hidden = c.hidden;
  const DrafterConfig* d = c.drafter ? &*c.drafter : nullptr;
  if (d == nullptr || d->owns_embedding) shapes["embed.weight"] = {c.vocab_size, hidden};
  if (d == nullptr ? !c.ties_lm_head : d->owns_lm_head) {
    shapes["lm_head.weight"] = {c.lm_head_rows(), hidden};
  }
  if (d == nullptr || d->has_final_norm) shapes["final_norm.weight"] = {hidden};
  if (d != nullptr) {
    const int64_t width = d->fc_width();
    shapes["fc.weight"] = {hidden, width};
    if (d->has_fc_bias) shapes["fc.bias"] = {hidden};
    if (d->norm_before_fc) shapes["fc_input_norm.weight"] = {width};
    for (size_t i = 0; d->has_fc_norm && i < d->aux_layers.size(); ++i) {
      shapes["fc_norm." + std::to_string(i) + ".weight"] = {d->target_hidden};
    }
    if (d->kind == DrafterKind::kEagle3) shapes["layers.0.hidden_norm.weight"] = {hidden};
    if (d->kind == DrafterKind::kGemma4Mtp) shapes["feedback.weight"] = {d->target_hidden, hidden};
    if (d->centroids.count > 0) shapes["centroids.weight"] = {d->centroids.count, hidden};
  }
  for (size_t i = 0; i < c.layers.size(); ++i) {
    const AttentionConfig& a = c.layers[i].attention;
    const std::string name = "layers." + std::to_string(i) + ".";
    const int64_t q = int64_t{a.num_qo_heads} * a.head_dim;
    const int64_t kv = int64_t{a.num_kv_heads} * a.head_dim;
    if (i > 0 || d == nullptr || d->has_attn_norm) shapes[name + "attn_norm.weight"] = {hidden};
    shapes[name + "mlp_norm.weight"] = {hidden};
    if (c.has_post_norms) {
      shapes[name + "attn_post_norm.weight"] = {hidden};
      shapes[name + "mlp_post_norm.weight"] = {hidden};
    }
    if (a.has_qk_norm) {
      shapes[name + "attn.q_norm.weight"] = {a.head_dim};
      if (!a.reads_target) shapes[name + "attn.k_norm.weight"] = {a.head_dim};
    }
    const auto inputs = [&](const std::string& which, int64_t rows) {
      shapes[name + "attn." + which + ".weight"] = {rows, c.qkv_inputs(i)};
      if (a.has_qkv_bias) shapes[name + "attn." + which + ".bias"] = {rows};
    };
    inputs("q", q);
    if (!a.reads_target) {
      inputs("k", kv);
      inputs("v", kv);
    }
    shapes[name + "attn.o.weight"] = {hidden, q};
    const int64_t intermediate = std::get<DenseMlp>(c.layers[i].mlp).intermediate;
    shapes[name + "mlp.gate.weight"] = {intermediate, hidden};
    shapes[name + "mlp.up.weight"] = {intermediate, hidden};
    shapes[name + "mlp.down.weight"] = {hidden, intermediate};
  }
  return shapes;
}

// Matrices normal with std 0.25, norms near neutral.
inline RawModel random_raw_model(std::string json, uint64_t seed) {
  RawModel model{.json = std::move(json)};
  model.config = parse_decoder_config(model.json);
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  for (const auto& [name, shape] : tensor_shapes(model.config)) {
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    const bool is_norm = name.find("norm") != std::string::npos;
    RawTensor& tensor = model.tensors[name];
    tensor.shape = shape;
    for (int64_t i = 0; i < count; ++i) {
      tensor.values.push_back((is_norm ? 1.0f - model.config.norm_weight_offset : 0.0f) +
                              (is_norm ? 0.1f : 0.25f) * normal(random));
    }
  }
  return model;
}

inline RawModel random_raw_head(const TinyDraftHead& head, uint64_t seed) {
  RawModel model = random_raw_model(head_config_json(head), seed);
  if (head.owns_lm_head && head.draft_vocab_size != head.decoder.vocab_size) {
    // Tokens of the target in ascending order, as such tables have them.
    std::mt19937_64 random(seed + 1);
    std::vector<int64_t> tokens(static_cast<size_t>(head.decoder.vocab_size));
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int64_t>(i);
    std::shuffle(tokens.begin(), tokens.end(), random);
    tokens.resize(static_cast<size_t>(head.draft_vocab_size));
    std::sort(tokens.begin(), tokens.end());
    model.draft_to_target = tokens;
  }
  if (head.num_centroids > 0) {
    std::mt19937_64 random(seed + 1);
    model.token_ordering.resize(static_cast<size_t>(head.draft_vocab_size));
    for (size_t i = 0; i < model.token_ordering.size(); ++i) {
      model.token_ordering[i] = static_cast<int64_t>(i);
    }
    std::shuffle(model.token_ordering.begin(), model.token_ordering.end(), random);
  }
  return model;
}

// --- The reference ---------------------------------------------------------------------------

namespace reference {

using Vector = std::vector<double>;
using Rows = std::vector<Vector>;

inline Vector linear(const RawTensor& weight, const Vector& x) {
  const auto n = static_cast<size_t>(weight.shape[0]);
  const auto k = static_cast<size_t>(weight.shape[1]);
  Vector y(n);
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < k; ++j) y[i] += double{weight.values[i * k + j]} * x[j];
  }
  return y;
}

inline Vector rms(const DecoderConfig& c, const RawTensor& weight, const Vector& x) {
  double squares = 0;
  for (const double value : x) squares += value * value;
  const double factor = 1 / std::sqrt(squares / static_cast<double>(x.size()) + c.norm_eps);
  Vector y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    y[i] = x[i] * factor * (double{weight.values[i]} + c.norm_weight_offset);
  }
  return y;
}

inline Vector join(Vector a, const Vector& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

inline Vector add(Vector a, const Vector& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

inline Vector embedding(const RawModel& m, double scale, int32_t token) {
  const RawTensor& table = m.at("embed.weight");
  const auto hidden = static_cast<size_t>(table.shape[1]);
  Vector x(hidden);
  for (size_t i = 0; i < hidden; ++i) {
    x[i] = scale * table.values[static_cast<size_t>(token) * hidden + i];
  }
  return x;
}

inline void rotate(const RopeConfig& rope, size_t position, double* head, size_t head_dim) {
  for (size_t i = 0; i < head_dim / 2; ++i) {
    const double angle = static_cast<double>(position) * rope.inv_freq[i];
    const double a = head[i];
    const double b = head[i + head_dim / 2];
    head[i] = (a * std::cos(angle) - b * std::sin(angle)) * rope.scale;
    head[i + head_dim / 2] = (b * std::cos(angle) + a * std::sin(angle)) * rope.scale;
  }
}

// q, k or v of layer `index`; q and k are normed and rotated to `position`.
inline Vector project(const RawModel& m, size_t index, const std::string& which, const Vector& x,
                      size_t position) {
  const DecoderConfig& c = m.config;
  const AttentionConfig& a = c.layers[index].attention;
  const std::string name = "layers." + std::to_string(index) + ".attn." + which;
  const auto head_dim = static_cast<size_t>(a.head_dim);
  Vector y = linear(m.at(name + ".weight"), x);
  if (a.has_qkv_bias) {
    const RawTensor& bias = m.at(name + ".bias");
    for (size_t i = 0; i < y.size(); ++i) y[i] += bias.values[i];
  }
  for (size_t h = 0; which != "v" && h < y.size() / head_dim; ++h) {
    if (a.has_qk_norm) {
      const Vector head(y.begin() + static_cast<int64_t>(h * head_dim),
                        y.begin() + static_cast<int64_t>((h + 1) * head_dim));
      const Vector normed = rms(c, m.at(name + "_norm.weight"), head);
      std::copy(normed.begin(), normed.end(), y.begin() + static_cast<int64_t>(h * head_dim));
    }
    rotate(c.ropes[static_cast<size_t>(a.rope)], position, y.data() + h * head_dim, head_dim);
  }
  return y;
}

// Attention of one row over the last keys of a window that ends with key `last`.
inline Vector attend(const AttentionConfig& a, const Vector& q, const Rows& k, const Rows& v,
                     size_t last) {
  const auto head_dim = static_cast<size_t>(a.head_dim);
  const auto group = static_cast<size_t>(a.num_qo_heads / a.num_kv_heads);
  const auto begin = static_cast<size_t>(first_visible(a.kind, static_cast<int32_t>(last)));
  Vector out(q.size());
  for (size_t h = 0; h < static_cast<size_t>(a.num_qo_heads); ++h) {
    Vector weights;
    double highest = -1e300;
    for (size_t j = begin; j <= last; ++j) {
      double score = 0;
      for (size_t d = 0; d < head_dim; ++d) {
        score += q[h * head_dim + d] * k[j][h / group * head_dim + d];
      }
      weights.push_back(score * a.scale);
      highest = std::max(highest, weights.back());
    }
    double sum = 0;
    for (double& weight : weights) {
      weight = std::exp(weight - highest);
      sum += weight;
    }
    for (size_t j = begin; j <= last; ++j) {
      for (size_t d = 0; d < head_dim; ++d) {
        out[h * head_dim + d] += weights[j - begin] / sum * v[j][h / group * head_dim + d];
      }
    }
  }
  return out;
}

// Layer `index` after its attention, for one row.
inline void finish_layer(const RawModel& m, size_t index, const Vector& attended,
                         Vector& residual) {
  const DecoderConfig& c = m.config;
  const std::string name = "layers." + std::to_string(index) + ".";
  Vector branch = linear(m.at(name + "attn.o.weight"), attended);
  if (c.has_post_norms) branch = rms(c, m.at(name + "attn_post_norm.weight"), branch);
  residual = add(residual, branch);
  const Vector x = rms(c, m.at(name + "mlp_norm.weight"), residual);
  Vector gate = linear(m.at(name + "mlp.gate.weight"), x);
  const Vector up = linear(m.at(name + "mlp.up.weight"), x);
  for (size_t d = 0; d < gate.size(); ++d) {
    const double g = gate[d];
    gate[d] =
        up[d] *
        (std::get<DenseMlp>(c.layers[index].mlp).activation == Activation::kSilu
             ? g / (1 + std::exp(-g))
             : 0.5 * g *
                   (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (g + 0.044715 * g * g * g))));
  }
  branch = linear(m.at(name + "mlp.down.weight"), gate);
  if (c.has_post_norms) branch = rms(c, m.at(name + "mlp_post_norm.weight"), branch);
  residual = add(residual, branch);
}

// Layer `index` for rows at positions 0, 1, 2, ...; `inputs` is what its attention reads. Stores
// its keys and values.
inline void layer(const RawModel& m, size_t index, const Rows& inputs, Rows& residual, Rows& k,
                  Rows& v) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    k.push_back(project(m, index, "k", inputs[i], i));
    v.push_back(project(m, index, "v", inputs[i], i));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Vector q = project(m, index, "q", inputs[i], i);
    finish_layer(m, index, attend(m.config.layers[index].attention, q, k, v, i), residual[i]);
  }
}

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
      const AttentionConfig& a = c.layers[index].attention;
      size_t source = target.config.layers.size() - 1;
      while (target.config.layers[source].attention.kind != a.kind) --source;
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
// models.md 3.1 and 3.2, line by line.
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
      if (d.kind == DrafterKind::kEagle) {
        Vector x = linear(m.at("fc.weight"),
                          join(e, is_first ? states.normed[i] : feedback[i - num_first]));
        for (size_t j = 0; d.has_fc_bias && j < x.size(); ++j) x[j] += m.at("fc.bias").values[j];
        inputs.push_back(x);
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
