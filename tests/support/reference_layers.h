// SPDX-License-Identifier: Apache-2.0
#pragma once

// The parts of reference_model.h: products, norms, attention and MLPs in double precision, and a
// layer made of them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <variant>
#include <vector>

#include "base/overloaded.h"
#include "model/description/decoder_config.h"
#include "support/kv_layers.h"
#include "support/raw_models.h"

namespace paceline::testing {
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

inline Vector rms(const DecoderConfig& c, const RawTensor& weight, const Vector& x, double eps) {
  double squares = 0;
  for (const double value : x) squares += value * value;
  const double factor = 1 / std::sqrt(squares / static_cast<double>(x.size()) + eps);
  Vector y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    y[i] = x[i] * factor * (double{weight.values[i]} + c.norm_weight_offset);
  }
  return y;
}
inline Vector rms(const DecoderConfig& c, const RawTensor& weight, const Vector& x) {
  return rms(c, weight, x, c.norm_eps);
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
    double& first = head[rope.is_interleaved ? 2 * i : i];
    double& second = head[rope.is_interleaved ? 2 * i + 1 : i + head_dim / 2];
    const double a = first;
    const double b = second;
    first = (a * std::cos(angle) - b * std::sin(angle)) * rope.scale;
    second = (b * std::cos(angle) + a * std::sin(angle)) * rope.scale;
  }
}

inline const MultiHeadAttention& attention_of(const RawModel& m, size_t index) {
  return std::get<MultiHeadAttention>(m.config.layers[index].attention);
}

// q, k or v of layer `index`; q and k are normed and rotated to `position`.
inline Vector project(const RawModel& m, size_t index, const std::string& which, const Vector& x,
                      size_t position) {
  const DecoderConfig& c = m.config;
  const MultiHeadAttention& a = attention_of(m, index);
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
    rotate(c.ropes[static_cast<size_t>(a.rope)], position, y.data() + h * head_dim,
           static_cast<size_t>(a.rope_head_dim));
  }
  return y;
}

// Attention of one row over the last keys of a window that ends with key `last`. `sinks`: of the
// layer, or null.
inline Vector attend(const MultiHeadAttention& a, const Vector& q, const Rows& k, const Rows& v,
                     size_t last, const RawTensor* sinks = nullptr) {
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
    double sum = sinks != nullptr ? std::exp(sinks->values[h] - highest) : 0;
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

inline double gated(const DenseMlp& mlp, double gate, double up) {
  switch (mlp.activation) {
    case Activation::kSilu:
      return up * gate / (1 + std::exp(-gate));
    case Activation::kGeluTanh: {
      const double inner = std::sqrt(2 / std::acos(-1.0)) * (gate + 0.044715 * gate * gate * gate);
      return up * 0.5 * gate * (1 + std::tanh(inner));
    }
    case Activation::kSwigluOai: {
      const double limit = mlp.limit;
      const double g = std::min(gate, limit);
      const double u = std::clamp(up, -limit, limit);
      return (u + 1) * g / (1 + std::exp(-mlp.alpha * g));
    }
    case Activation::kClampedSilu: {
      const double limit = mlp.limit;
      const double g = std::min(gate, limit);
      return std::clamp(up, -limit, limit) * g / (1 + std::exp(-g));
    }
    case Activation::kSigmoid:
      return up / (1 + std::exp(-gate));
  }
  return 0;
}

inline Vector dense_mlp(const RawModel& m, const std::string& name, const DenseMlp& mlp,
                        const Vector& x) {
  Vector gate = linear(m.at(name + "gate.weight"), x);
  const Vector up = linear(m.at(name + "up.weight"), x);
  for (size_t i = 0; i < gate.size(); ++i) gate[i] = gated(mlp, gate[i], up[i]);
  return linear(m.at(name + "down.weight"), gate);
}

// The product of one expert. `per_expert`: names of its tensors where each expert has its own, rows
// of the first before those of the second.
inline Vector expert_linear(const RawModel& m, const std::string& name, bool has_bias,
                            const std::vector<std::string>& per_expert, size_t expert,
                            const Vector& x) {
  Vector y;
  for (const std::string& own : per_expert) {
    y = join(y, linear(m.at(own + "." + std::to_string(expert) + ".weight"), x));
  }
  if (!per_expert.empty()) return y;
  const auto part = [&](const RawTensor& all) {
    const auto size = static_cast<int64_t>(all.values.size()) / all.shape[0];
    const auto begin = all.values.begin() + static_cast<int64_t>(expert) * size;
    return RawTensor{.shape = {all.shape.begin() + 1, all.shape.end()},
                     .values = {begin, begin + size}};
  };
  y = linear(part(m.at(name + ".weight")), x);
  if (!has_bias) return y;
  const RawTensor bias = part(m.at(name + ".bias"));
  for (size_t i = 0; i < y.size(); ++i) y[i] += bias.values[i];
  return y;
}

// The numbers of the best `count` values, best first.
inline std::vector<size_t> best_of(const Vector& values, int32_t count) {
  std::vector<size_t> order(values.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return values[a] > values[b]; });
  order.resize(static_cast<size_t>(count));
  return order;
}

// The weight of every expert; 0 where it is not chosen.
inline Vector expert_weights(const RawModel& m, const std::string& name, const MoeMlp& moe,
                             const Vector& x) {
  Vector logits = linear(m.at(name + "router.weight"), x);
  for (size_t e = 0; moe.has_router_bias && e < logits.size(); ++e) {
    logits[e] += m.at(name + "router.bias").values[e];
  }
  Vector weights(logits.size());
  double sum = 0;
  if (has_softmax(moe.router)) {
    const std::vector<size_t> chosen = best_of(logits, moe.top_k);
    const auto term = [&](size_t e) {
      return std::exp((logits[e] - logits[chosen[0]]) * moe.logit_scale);
    };
    const bool is_of_chosen = moe.router == RouterRule::kSoftmaxOfChosen;
    for (const size_t e : is_of_chosen ? chosen : best_of(logits, moe.num_experts)) sum += term(e);
    for (const size_t e : chosen) {
      weights[e] = term(e) / sum;
      if (moe.has_expert_scales) weights[e] *= m.at(name + "router.expert_scales").values[e];
    }
    return weights;
  }
  Vector scores(logits.size());
  Vector choice(logits.size());
  for (size_t e = 0; e < logits.size(); ++e) {
    scores[e] = moe.router == RouterRule::kSigmoid ? 1 / (1 + std::exp(-logits[e]))
                                                   : std::sqrt(std::log1p(std::exp(logits[e])));
    choice[e] = scores[e] + m.at(name + "router.correction.bias").values[e];
  }
  const auto size = logits.size() / static_cast<size_t>(moe.scoring.num_groups);
  Vector groups;
  for (size_t begin = 0; moe.scoring.num_groups > 1 && begin < choice.size(); begin += size) {
    const Vector group(choice.begin() + static_cast<int64_t>(begin),
                       choice.begin() + static_cast<int64_t>(begin + size));
    groups.push_back(0);
    for (const size_t e : best_of(group, 2)) groups.back() += group[e];
  }
  if (!groups.empty()) {
    const std::vector<size_t> best = best_of(groups, moe.scoring.top_groups);
    for (size_t e = 0; e < choice.size(); ++e) {
      const bool is_open = std::find(best.begin(), best.end(), e / size) != best.end();
      if (!is_open) choice[e] = -std::numeric_limits<double>::infinity();
    }
  }
  const std::vector<size_t> chosen = best_of(choice, moe.top_k);
  for (const size_t e : chosen) sum += scores[e];
  for (const size_t e : chosen) {
    weights[e] = scores[e] / (moe.scoring.normalises ? sum : 1) * moe.scoring.scale;
  }
  return weights;
}

inline Vector mixture(const RawModel& m, const std::string& name, const MoeMlp& moe,
                      const Vector& router_x, const Vector& x) {
  const Vector weights = expert_weights(m, name, moe, router_x);
  Vector y(x.size());
  if (moe.shared) y = dense_mlp(m, name + "shared.", *moe.shared, x);
  const std::string experts = name + "experts.";
  std::vector<std::string> gate_up;
  std::vector<std::string> down;
  if (moe.is_per_expert) {
    gate_up = {experts + "gate", experts + "up"};
    down = {experts + "down"};
  }
  for (size_t e = 0; e < weights.size(); ++e) {
    if (weights[e] == 0) continue;
    const Vector both = expert_linear(m, experts + "gate_up", moe.expert.has_bias, gate_up, e, x);
    Vector inner(both.size() / 2);
    for (size_t i = 0; i < inner.size(); ++i) {
      inner[i] = moe.is_interleaved ? gated(moe.expert, both[2 * i], both[2 * i + 1])
                                    : gated(moe.expert, both[i], both[inner.size() + i]);
    }
    const Vector out = expert_linear(m, experts + "down", moe.expert.has_bias, down, e, inner);
    for (size_t i = 0; i < y.size(); ++i) y[i] += weights[e] * out[i];
  }
  return y;
}

// A dense MLP beside a mixture; x is the normed residual.
inline Vector parallel_mlp(const RawModel& m, const std::string& name, const ParallelMlp& mlp,
                           const Vector& residual, const Vector& x) {
  const auto norm = [&](const char* which, const Vector& of) {
    return rms(m.config, m.at(name + which + "_norm.weight"), of);
  };
  const Vector of_experts =
      mixture(m, name, mlp.mixture, norm("router", residual), norm("expert", residual));
  return add(norm("dense", dense_mlp(m, name, mlp.dense, x)), norm("mixture", of_experts));
}

// Layer `index` after its attention, for one row.
inline void finish_layer(const RawModel& m, size_t index, const Vector& attended,
                         Vector& residual) {
  const DecoderConfig& c = m.config;
  const std::string name = "layers." + std::to_string(index) + ".";
  Vector branch = linear(m.at(name + "attn.o.weight"), attended);
  if (m.tensors.contains(name + "attn.o.bias")) {
    const RawTensor& bias = m.at(name + "attn.o.bias");
    for (size_t i = 0; i < branch.size(); ++i) branch[i] += bias.values[i];
  }
  if (c.has_post_norms) branch = rms(c, m.at(name + "attn_post_norm.weight"), branch);
  residual = add(residual, branch);
  const Vector x = rms(c, m.at(name + "mlp_norm.weight"), residual);
  branch = std::visit(
      Overloaded{
          [&](const DenseMlp& mlp) { return dense_mlp(m, name + "mlp.", mlp, x); },
          [&](const MoeMlp& moe) { return mixture(m, name + "mlp.", moe, x, x); },
          [&](const ParallelMlp& mlp) { return parallel_mlp(m, name + "mlp.", mlp, residual, x); }},
      c.layers[index].mlp);
  if (c.has_post_norms) branch = rms(c, m.at(name + "mlp_post_norm.weight"), branch);
  residual = add(residual, branch);
}

// Latent attention as it is defined, with keys and values for every head: the output of all heads
// for rows at positions 0, 1, 2, ...
inline Rows latent_attention(const RawModel& m, size_t index, const Rows& inputs) {
  const DecoderConfig& c = m.config;
  const auto& a = std::get<LatentAttention>(c.layers[index].attention);
  const RopeConfig& rope = c.ropes[static_cast<size_t>(a.rope)];
  const std::string name = "layers." + std::to_string(index) + ".attn.";
  const auto nope = static_cast<size_t>(a.qk_nope_head_dim);
  const auto rotated = static_cast<size_t>(a.qk_rope_head_dim);
  const auto v_dim = static_cast<size_t>(a.v_head_dim);
  const auto part = [](const Vector& from, size_t begin, size_t size) {
    const auto at = from.begin() + static_cast<int64_t>(begin);
    return Vector(at, at + static_cast<int64_t>(size));
  };
  Rows keys_and_values;  // k_nope and v of every head
  Rows shared_keys;
  Rows out;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Vector& x = inputs[i];
    const auto rank = static_cast<size_t>(a.kv_lora_rank);
    const Vector kv = linear(m.at(name + "kv_a.weight"), x);
    keys_and_values.push_back(
        linear(m.at(name + "kv_b.weight"),
               rms(c, m.at(name + "kv_a_norm.weight"), part(kv, 0, rank), a.norm_eps)));
    Vector& shared = shared_keys.emplace_back(part(kv, rank, rotated));
    rotate(rope, i, shared.data(), rotated);
    const Vector q = a.q_lora_rank > 0
                         ? linear(m.at(name + "q_b.weight"),
                                  rms(c, m.at(name + "q_a_norm.weight"),
                                      linear(m.at(name + "q_a.weight"), x), a.norm_eps))
                         : linear(m.at(name + "q.weight"), x);
    Vector& y = out.emplace_back();
    for (size_t h = 0; h < static_cast<size_t>(a.num_qo_heads); ++h) {
      Vector head = part(q, h * (nope + rotated), nope + rotated);
      rotate(rope, i, head.data() + nope, rotated);
      double sum = 0;
      Vector mean(v_dim);
      for (size_t j = 0; j <= i; ++j) {
        const Vector own = part(keys_and_values[j], h * (nope + v_dim), nope + v_dim);
        double score = 0;
        for (size_t d = 0; d < nope; ++d) score += head[d] * own[d];
        for (size_t d = 0; d < rotated; ++d) score += head[nope + d] * shared_keys[j][d];
        const double weight = std::exp(score * a.scale);
        sum += weight;
        for (size_t d = 0; d < v_dim; ++d) mean[d] += weight * own[nope + d];
      }
      for (const double value : mean) y.push_back(value / sum);
    }
  }
  return out;
}

// Layer `index` for rows at positions 0, 1, 2, ...; `inputs` is what its attention reads. Stores
// its keys and values, but for latent attention.
inline void layer(const RawModel& m, size_t index, const Rows& inputs, Rows& residual, Rows& k,
                  Rows& v) {
  if (std::holds_alternative<LatentAttention>(m.config.layers[index].attention)) {
    const Rows attended = latent_attention(m, index, inputs);
    for (size_t i = 0; i < inputs.size(); ++i) finish_layer(m, index, attended[i], residual[i]);
    return;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    k.push_back(project(m, index, "k", inputs[i], i));
    v.push_back(project(m, index, "v", inputs[i], i));
  }
  const MultiHeadAttention& a = attention_of(m, index);
  const RawTensor* const sinks =
      a.has_sinks ? &m.at("layers." + std::to_string(index) + ".attn.sinks") : nullptr;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Vector q = project(m, index, "q", inputs[i], i);
    finish_layer(m, index, attend(a, q, k, v, i, sinks), residual[i]);
  }
}

}  // namespace reference
}  // namespace paceline::testing
