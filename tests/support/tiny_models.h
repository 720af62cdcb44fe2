// SPDX-License-Identifier: Apache-2.0
#pragma once

// Small random decoders for C++ tests: every switch of DecoderConfig, weights from a seed, and
// drafters with a chosen acceptance rate.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <paceline/model.h>

#include "model/description/decoder_config.h"
#include "model/weights/model_impl.h"
#include "support/mxfp4_weights.h"

namespace paceline::testing {

struct TinyModel {
  int32_t vocab_size = 64;
  int32_t hidden = 32;
  int32_t num_qo_heads = 4;
  int32_t num_kv_heads = 2;
  int32_t head_dim = 16;
  int32_t intermediate = 48;
  int32_t max_position = 512;
  std::vector<int32_t> windows = {8, 0};  // by layer; 0 = full attention
  double rope_scale = 1;                  // of rotated q and k, as with YaRN
  bool is_gemma = true;                   // post norms, q/k norms, (1 + w), gelu, tied head
  bool has_bias = false;
  bool has_sinks = false;
  int32_t nan_token = -1;  // its embedding is NaN
  // On top of is_gemma: plain norm weights, v norms, layer scales, scores unscaled, logits capped,
  // a quarter of a full layer's pairs rotated. The fields below are for it alone.
  bool is_gemma4 = false;
  int32_t full_head_dim = 0;   // of full layers; 0: head_dim
  int32_t full_kv_heads = 0;   // of full layers; 0: num_kv_heads
  bool k_eq_v = false;         // full layers have no v
  int32_t num_shared = 0;      // last layers that read KV where they can, with MLPs twice as wide
  int32_t per_layer_size = 0;  // of per-layer inputs; 0: none
  // Every MLP is a mixture with biases, as in GPT-OSS; with is_gemma4, a mixture beside a dense
  // MLP; 0: dense. Not with is_gemma alone.
  int32_t num_experts = 0;
  int32_t top_k = 2;
  bool is_interleaved = true;
  bool is_mxfp4 = false;  // the experts' matrices; hidden and intermediate are multiples of 32
  float router_bias_scale = 1;  // a large one sends every row to the same experts
  // Mixtures are those of DeepSeek-V3 instead: sigmoid scores with a correction, SwiGLU without
  // biases. The fields below are for it alone.
  bool is_deepseek = false;
  int32_t num_groups = 1;
  int32_t top_groups = 1;
  int32_t shared_intermediate = 0;  // 0: no shared expert
  int32_t num_dense = 0;            // the first layers, which have no mixture
  bool is_per_expert = false;       // the tensors of the experts
  // Full layers have latent attention; 0: they do not. The fields below are for it alone. Not with
  // is_gemma4.
  int32_t kv_lora_rank = 0;
  int32_t q_lora_rank = 0;      // 0: q is projected from the hidden state
  bool has_paired_rope = true;  // pairs of adjacent elements
  int32_t qk_rope_head_dim = 8;
};

// Of tiny models with latent attention: neither fills whole vectors.
inline constexpr int32_t kTinyNopeDim = 12;
inline constexpr int32_t kTinyValueDim = 10;
inline constexpr double kTinyLatentEps = 1e-2;  // far from norm_eps

// Makes the full layers of a shape latent.
inline void make_latent(TinyModel& m, std::mt19937_64& random) {
  m.kv_lora_rank = std::array{24, 56, 120}[random() % 3];
  m.q_lora_rank = random() % 2 == 0 ? 0 : 24;
  m.has_paired_rope = random() % 3 != 0;
}

[[nodiscard]] inline bool has_o_bias(const TinyModel& m) { return m.has_bias && m.num_experts > 0; }

// Makes a mixture of a shape: as GPT-OSS is, with biases and sinks, or as DeepSeek-V3 is.
inline void make_mixture(TinyModel& m, std::mt19937_64& random) {
  m.is_gemma = false;
  m.is_deepseek = random() % 2 == 0;
  m.has_bias = m.has_sinks = !m.is_deepseek;
  m.num_experts = std::array{1, 4, 8, 40}[random() % 4];
  m.top_k = static_cast<int32_t>(1 + random() % static_cast<uint64_t>(std::min(4, m.num_experts)));
  m.is_interleaved = random() % 3 != 0;
  m.is_mxfp4 = m.hidden % 32 == 0 && random() % 2 == 0;
  if (m.is_mxfp4) m.intermediate = 64;
  if (!m.is_deepseek) return;
  if (m.num_experts >= 4 && random() % 3 != 0) {
    m.num_groups = random() % 2 == 0 ? 2 : m.num_experts / 2;
    const int32_t fewest = (m.top_k * m.num_groups + m.num_experts - 1) / m.num_experts;
    m.top_groups =
        fewest + static_cast<int32_t>(random() % static_cast<uint64_t>(m.num_groups - fewest + 1));
  }
  m.shared_intermediate = std::array{0, m.intermediate, 200}[random() % 3];
  m.num_dense = static_cast<int32_t>(random() % 2);
  m.is_per_expert = random() % 2 == 0;
  if (m.is_per_expert) m.is_interleaved = false;
}

[[nodiscard]] inline bool is_expert_matrix(const std::string& name) {
  return name.find(".experts.") != std::string::npos && name.ends_with(".weight");
}

using NamedShape = std::pair<std::string, std::vector<int64_t>>;

// The tensors of an MLP whose names begin with `name`.
inline std::vector<NamedShape> dense_mlp_shapes(int64_t intermediate, const std::string& name,
                                                int64_t hidden) {
  return {{name + "gate.weight", {intermediate, hidden}},
          {name + "up.weight", {intermediate, hidden}},
          {name + "down.weight", {hidden, intermediate}}};
}
inline std::vector<NamedShape> mixture_shapes(const MoeMlp& m, const std::string& name,
                                              int64_t hidden) {
  const int64_t num_experts = m.num_experts;
  const int64_t intermediate = m.expert.intermediate;
  const std::string experts = name + "experts.";
  std::vector<NamedShape> shapes = {{name + "router.weight", {num_experts, hidden}}};
  if (m.has_router_bias) shapes.push_back({name + "router.bias", {num_experts}});
  if (m.router == RouterRule::kSigmoid) {
    shapes.push_back({name + "router.correction.bias", {num_experts}});
  }
  if (m.has_expert_scales) shapes.push_back({name + "router.expert_scales", {num_experts}});
  for (int64_t e = 0; m.is_per_expert && e < num_experts; ++e) {
    const std::string suffix = "." + std::to_string(e) + ".weight";
    shapes.push_back({experts + "gate" + suffix, {intermediate, hidden}});
    shapes.push_back({experts + "up" + suffix, {intermediate, hidden}});
    shapes.push_back({experts + "down" + suffix, {hidden, intermediate}});
  }
  const auto joined = [&](const std::string& which, int64_t rows, int64_t cols) {
    if (m.is_per_expert) return;
    shapes.push_back({experts + which + ".weight", {num_experts, rows, cols}});
    if (m.expert.has_bias) shapes.push_back({experts + which + ".bias", {num_experts, rows}});
  };
  joined("gate_up", 2 * intermediate, hidden);
  joined("down", hidden, intermediate);
  if (m.shared) {
    for (NamedShape& shape : dense_mlp_shapes(m.shared->intermediate, name + "shared.", hidden)) {
      shapes.push_back(std::move(shape));
    }
  }
  return shapes;
}

inline std::vector<NamedShape> parallel_mlp_shapes(const ParallelMlp& m, const std::string& name,
                                                   int64_t hidden) {
  std::vector<NamedShape> shapes = mixture_shapes(m.mixture, name, hidden);
  for (NamedShape& shape : dense_mlp_shapes(m.dense.intermediate, name, hidden)) {
    shapes.push_back(std::move(shape));
  }
  for (const char* which : {"dense", "router", "expert", "mixture"}) {
    shapes.push_back({name + which + "_norm.weight", {hidden}});
  }
  return shapes;
}

// Makes a Gemma 4 of a shape, with switches at random and its layers twice over, so that some of
// the second half read the KV of the first.
inline void make_gemma4(TinyModel& m, std::mt19937_64& random) {
  m.is_gemma = true;
  m.is_gemma4 = true;
  m.full_head_dim = random() % 3 == 0 ? m.head_dim : 2 * m.head_dim;
  m.full_kv_heads = random() % 2 == 0 ? 1 : m.num_kv_heads;
  m.k_eq_v = random() % 2 == 0;
  m.num_shared = static_cast<int32_t>(random() % (m.windows.size() + 1));
  const std::vector<int32_t> windows = m.windows;
  m.windows.insert(m.windows.end(), windows.begin(), windows.end());
  m.per_layer_size = random() % 3 == 0 ? 0 : 8;
  m.num_experts = random() % 3 == 0 ? 8 : 0;
  m.top_k = static_cast<int32_t>(1 + random() % 4);
}

// What differs between the layers of a TinyModel.
struct TinyLayer {
  int32_t window;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t intermediate;
  int32_t kv_source;  // -1: none
  bool has_v;
  bool is_mixture;
  bool is_parallel;  // a mixture beside a dense MLP
  bool is_latent;
};

inline std::vector<TinyLayer> tiny_layers(const TinyModel& m) {
  std::vector<TinyLayer> layers;
  const auto num_layers = static_cast<int32_t>(m.windows.size());
  const int32_t first_shared = num_layers - (m.is_gemma4 ? m.num_shared : 0);
  for (int32_t i = 0; i < num_layers; ++i) {
    const bool is_full = m.windows[i] == 0;
    TinyLayer layer = {
        .window = m.windows[i],
        .num_kv_heads = m.num_kv_heads,
        .head_dim = m.head_dim,
        .intermediate = m.intermediate,
        .kv_source = -1,
        .has_v = !(m.is_gemma4 && m.k_eq_v && is_full),
        .is_mixture = m.num_experts > 0 && !m.is_gemma4 && !(m.is_deepseek && i < m.num_dense),
        .is_parallel = m.num_experts > 0 && m.is_gemma4,
        .is_latent = is_full && m.kv_lora_rank > 0};
    if (m.is_gemma4 && is_full && m.full_head_dim > 0) layer.head_dim = m.full_head_dim;
    if (m.is_gemma4 && is_full && m.full_kv_heads > 0) layer.num_kv_heads = m.full_kv_heads;
    for (int32_t j = 0; i >= first_shared && j < first_shared; ++j) {
      if (m.windows[j] == m.windows[i]) layer.kv_source = j;
    }
    if (layer.kv_source >= 0) layer.intermediate *= 2;
    layers.push_back(layer);
  }
  return layers;
}

inline std::string tiny_config_json(const TinyModel& m) {
  std::ostringstream out;
  out.precision(9);
  const auto boolean = [](bool value) { return value ? "true" : "false"; };
  out << R"({"format":"paceline-decoder-1","name":"tiny","vocab_size":)" << m.vocab_size
      << R"(,"hidden_size":)" << m.hidden << R"(,"max_position":)" << m.max_position
      << R"(,"norm_eps":1e-6,"norm_weight_offset":)" << (m.is_gemma && !m.is_gemma4 ? 1 : 0)
      << R"(,"embed_scale":)" << (m.is_gemma ? std::sqrt(static_cast<double>(m.hidden)) : 1.0)
      << R"(,"logit_soft_cap":)" << (m.is_gemma4 ? 30 : 0) << R"(,"ties_lm_head":)"
      << boolean(m.is_gemma) << R"(,"has_post_norms":)" << boolean(m.is_gemma)
      << R"(,"has_layer_scale":)" << boolean(m.is_gemma4);
  if (m.is_gemma4 && m.per_layer_size > 0) {
    out << R"(,"per_layer_inputs":{"size":)" << m.per_layer_size << R"(,"vocab_size":)"
        << m.vocab_size << R"(,"embed_scale":)" << std::sqrt(static_cast<double>(m.per_layer_size))
        << R"(,"proj_scale":)" << 1.0 / std::sqrt(static_cast<double>(m.hidden))
        << R"(,"scale":0.70710678,"activation":"gelu_tanh"})";
  }
  out << R"(,"ropes":[)";
  for (int rope = 0; rope < 2; ++rope) {
    out << (rope > 0 ? "," : "") << R"({"scale":)" << m.rope_scale << R"(,"inv_freq":[)";
    const double theta = rope == 0 ? 1e4 : 1e5;
    const bool is_partial = m.is_gemma4 && rope == 1;
    const int32_t head_dim = is_partial && m.full_head_dim > 0 ? m.full_head_dim : m.head_dim;
    const int32_t rotated = is_partial ? head_dim / 8 : head_dim / 2;
    for (int i = 0; i < head_dim / 2; ++i) {
      out << (i > 0 ? "," : "") << (i < rotated ? std::pow(theta, -2.0 * i / head_dim) : 0.0);
    }
    out << "]}";
  }
  if (m.kv_lora_rank > 0) {
    out << R"(,{"scale":)" << m.rope_scale << R"(,"interleaved":)" << boolean(m.has_paired_rope)
        << R"(,"inv_freq":[)";
    for (int i = 0; i < m.qk_rope_head_dim / 2; ++i) {
      out << (i > 0 ? "," : "") << std::pow(1e4, -2.0 * i / m.qk_rope_head_dim);
    }
    out << "]}";
  }
  out << R"(],"layers":[)";
  const std::vector<TinyLayer> layers = tiny_layers(m);
  for (size_t i = 0; i < layers.size(); ++i) {
    const TinyLayer& layer = layers[i];
    const bool slides = layer.window > 0;
    out << (i > 0 ? "," : "");
    if (layer.is_latent) {
      out << R"({"attention":{"kind":"latent","num_qo_heads":)" << m.num_qo_heads
          << R"(,"kv_lora_rank":)" << m.kv_lora_rank << R"(,"qk_nope_head_dim":)" << kTinyNopeDim
          << R"(,"qk_rope_head_dim":)" << m.qk_rope_head_dim << R"(,"v_head_dim":)" << kTinyValueDim
          << R"(,"scale":)" << 1.0 / std::sqrt(kTinyNopeDim + m.qk_rope_head_dim)
          << R"(,"rope":2,"latent_norm_eps":)" << kTinyLatentEps;
      if (m.q_lora_rank > 0) out << R"(,"q_lora_rank":)" << m.q_lora_rank;
    } else {
      out << R"({"attention":{"kind":")" << (slides ? "sliding" : "full") << R"(","window":)"
          << layer.window << R"(,"num_qo_heads":)" << m.num_qo_heads << R"(,"num_kv_heads":)"
          << layer.num_kv_heads << R"(,"head_dim":)" << layer.head_dim << R"(,"scale":)"
          << (m.is_gemma4 ? 1.0 : 1.0 / std::sqrt(static_cast<double>(layer.head_dim)))
          << R"(,"soft_cap":0,"rope":)" << (slides ? 0 : 1) << R"(,"has_qk_norm":)"
          << boolean(m.is_gemma) << R"(,"has_qkv_bias":)" << boolean(m.has_bias)
          << R"(,"has_o_bias":)" << boolean(has_o_bias(m)) << R"(,"has_sinks":)"
          << boolean(m.has_sinks);
      if (layer.kv_source >= 0) {
        out << R"(,"kv_source":)" << layer.kv_source;
      } else {
        out << R"(,"has_v_norm":)" << boolean(m.is_gemma4) << R"(,"k_eq_v":)"
            << boolean(!layer.has_v);
      }
    }
    out << R"(},"mlp":{)" << (layer.is_parallel ? R"("dense":{)" : "") << R"("intermediate":)"
        << layer.intermediate;
    if (layer.is_mixture) {
      out << R"(,"num_experts":)" << m.num_experts << R"(,"top_k":)" << m.top_k
          << R"(,"interleaved":)" << boolean(m.is_interleaved);
      if (m.is_deepseek) {
        out << R"(,"activation":"silu","has_bias":false,"router":"sigmoid","has_router_bias":false)"
            << R"(,"num_groups":)" << m.num_groups << R"(,"top_groups":)" << m.top_groups
            << R"(,"normalises_weights":true,"weight_scale":1.8,"per_expert":)"
            << boolean(m.is_per_expert);
        if (m.shared_intermediate > 0) {
          out << R"(,"shared":{"intermediate":)" << m.shared_intermediate
              << R"(,"activation":"silu","has_bias":false})";
        }
      } else {
        out << R"(,"activation":"swiglu_oai","alpha":1.702,"limit":7,"has_bias":true)"
            << R"(,"router":"softmax_of_chosen","has_router_bias":true)";
      }
      if (m.is_mxfp4) out << R"(,"gate_up":{"format":"mxfp4"},"down":{"format":"mxfp4"})";
      out << "}}";
    } else {
      out << R"(,"activation":")" << (m.is_gemma ? "gelu_tanh" : "silu")
          << R"(","has_bias":false})";
      if (layer.is_parallel) {
        out << R"(,"mixture":{"num_experts":)" << m.num_experts << R"(,"top_k":)" << m.top_k
            << R"(,"intermediate":24,"activation":"gelu_tanh","has_bias":false)"
            << R"(,"router":"softmax_of_chosen","has_router_bias":false,"logit_scale":0.2)"
            << R"(,"has_expert_scales":true}})";
      }
      out << "}";
    }
  }
  out << "]}";
  return out.str();
}

// Names and shapes of the tensors of latent attention in a layer.
inline std::vector<NamedShape> latent_shapes(const DecoderConfig& config, size_t layer) {
  const auto& a = std::get<LatentAttention>(config.layers[layer].attention);
  const std::string name = "layers." + std::to_string(layer) + ".attn.";
  const int64_t heads = a.num_qo_heads;
  const int64_t q_rows = heads * (a.qk_nope_head_dim + a.qk_rope_head_dim);
  const int64_t rank = a.kv_lora_rank;
  std::vector<NamedShape> shapes = {
      {name + "kv_a.weight", {rank + a.qk_rope_head_dim, config.qkv_inputs(layer)}},
      {name + "kv_a_norm.weight", {rank}},
      {name + "kv_b.weight", {heads * (a.qk_nope_head_dim + a.v_head_dim), rank}},
      {name + "o.weight", {config.hidden, heads * a.v_head_dim}}};
  if (a.q_lora_rank > 0) {
    shapes.push_back({name + "q_a.weight", {a.q_lora_rank, config.qkv_inputs(layer)}});
    shapes.push_back({name + "q_a_norm.weight", {a.q_lora_rank}});
    shapes.push_back({name + "q_b.weight", {q_rows, a.q_lora_rank}});
  } else {
    shapes.push_back({name + "q.weight", {q_rows, config.qkv_inputs(layer)}});
  }
  return shapes;
}

// Weights are normal with std 0.25 (norms near neutral), so that logits are far from uniform. The
// weights of `noise_seed` are mixed in with factor `noise`: 0 gives the same model again, small
// values a drafter that often agrees.
inline std::shared_ptr<const Model> tiny_model(const TinyModel& m, uint64_t seed, float noise = 0,
                                               uint64_t noise_seed = 0,
                                               DType dtype = DType::kFloat32,
                                               Device device = Device::kCpu) {
  const std::string json = tiny_config_json(m);
  ModelBuilder builder(json, dtype, device);
  const DecoderConfig config = parse_decoder_config(json);
  std::mt19937_64 weights(seed);
  std::mt19937_64 noises(noise_seed);
  std::normal_distribution<float> normal;
  const auto put = [&](const std::string& name, std::vector<int64_t> shape) {
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    const bool is_norm = name.find("norm") != std::string::npos;
    const bool is_scale = name.ends_with(".scale") || name.ends_with("_scales");
    const float std_dev = is_norm || is_scale ? 0.1f : name.ends_with(".sinks") ? 1.0f : 0.25f;
    const float mean = is_norm ? 1.0f - config.norm_weight_offset : is_scale ? 0.9f : 0.0f;
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) {
      value = mean + std_dev * (normal(weights) + noise * normal(noises));
    }
    if (name.ends_with("router.bias")) {
      for (float& value : values) value *= m.router_bias_scale;
    }
    if (name == "embed.weight" && m.nan_token >= 0) {
      std::fill_n(values.begin() + int64_t{m.nan_token} * m.hidden, m.hidden, std::nanf(""));
    }
    if (m.is_mxfp4 && is_expert_matrix(name)) {
      put_mxfp4(builder, name, shape, values);
    } else {
      builder.put(name, DType::kFloat32, shape, {}, values.data());
    }
  };
  put("embed.weight", {m.vocab_size, m.hidden});
  if (!m.is_gemma) put("lm_head.weight", {m.vocab_size, m.hidden});
  put("final_norm.weight", {m.hidden});
  const std::vector<TinyLayer> layers = tiny_layers(m);
  const int64_t per_layer_size = config.per_layer_inputs.size;
  if (per_layer_size > 0) {
    const int64_t width = per_layer_size * static_cast<int64_t>(layers.size());
    put("per_layer.embed.weight", {m.vocab_size, width});
    put("per_layer.proj.weight", {width, m.hidden});
    put("per_layer.norm.weight", {per_layer_size});
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    const TinyLayer& its = layers[i];
    const bool has_k = its.kv_source < 0;
    const bool has_v = has_k && its.has_v;
    const int64_t q_rows = int64_t{m.num_qo_heads} * its.head_dim;
    const int64_t kv_rows = int64_t{its.num_kv_heads} * its.head_dim;
    const std::string layer = "layers." + std::to_string(i) + ".";
    put(layer + "attn_norm.weight", {m.hidden});
    put(layer + "mlp_norm.weight", {m.hidden});
    if (m.is_gemma) {
      put(layer + "attn_post_norm.weight", {m.hidden});
      put(layer + "mlp_post_norm.weight", {m.hidden});
    }
    if (its.is_latent) {
      for (const auto& [name, shape] : latent_shapes(config, i)) put(name, shape);
    } else {
      if (m.is_gemma) {
        put(layer + "attn.q_norm.weight", {its.head_dim});
        if (has_k) put(layer + "attn.k_norm.weight", {its.head_dim});
      }
      put(layer + "attn.q.weight", {q_rows, m.hidden});
      if (has_k) put(layer + "attn.k.weight", {kv_rows, m.hidden});
      if (has_v) put(layer + "attn.v.weight", {kv_rows, m.hidden});
      if (m.has_bias) {
        put(layer + "attn.q.bias", {q_rows});
        if (has_k) put(layer + "attn.k.bias", {kv_rows});
        if (has_v) put(layer + "attn.v.bias", {kv_rows});
      }
      if (m.has_sinks) put(layer + "attn.sinks", {m.num_qo_heads});
      put(layer + "attn.o.weight", {m.hidden, q_rows});
      if (has_o_bias(m)) put(layer + "attn.o.bias", {m.hidden});
    }
    if (its.is_mixture) {
      const auto& mixture = std::get<MoeMlp>(config.layers[i].mlp);
      for (const auto& [name, shape] : mixture_shapes(mixture, layer + "mlp.", m.hidden)) {
        put(name, shape);
      }
    } else if (its.is_parallel) {
      const auto& parallel = std::get<ParallelMlp>(config.layers[i].mlp);
      for (const auto& [name, shape] : parallel_mlp_shapes(parallel, layer + "mlp.", m.hidden)) {
        put(name, shape);
      }
    } else {
      for (const auto& [name, shape] :
           dense_mlp_shapes(its.intermediate, layer + "mlp.", m.hidden)) {
        put(name, shape);
      }
    }
    if (per_layer_size > 0) {
      put(layer + "per_layer.gate.weight", {per_layer_size, m.hidden});
      put(layer + "per_layer.proj.weight", {m.hidden, per_layer_size});
      put(layer + "per_layer.norm.weight", {m.hidden});
    }
    if (m.is_gemma4) put(layer + "scale", {1});
  }
  return builder.finish();
}

}  // namespace paceline::testing
