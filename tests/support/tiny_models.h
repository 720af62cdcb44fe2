// SPDX-License-Identifier: Apache-2.0
#pragma once

// Small random decoders for C++ tests: every switch of DecoderConfig, weights from a seed, and
// drafters that agree with a target as often as a test wants.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include <paceline/model.h>

#include "model/decoder_config.h"
#include "model/model_impl.h"

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
  bool is_gemma = true;                   // post norms, q/k norms, (1 + w), gelu, tied head
  bool has_bias = false;
  int32_t nan_token = -1;  // its embedding is NaN
};

inline std::string tiny_config_json(const TinyModel& m) {
  std::ostringstream out;
  out.precision(9);
  const auto boolean = [](bool value) { return value ? "true" : "false"; };
  out << R"({"format":"paceline-decoder-1","name":"tiny","vocab_size":)" << m.vocab_size
      << R"(,"hidden_size":)" << m.hidden << R"(,"max_position":)" << m.max_position
      << R"(,"norm_eps":1e-6,"norm_weight_offset":)" << (m.is_gemma ? 1 : 0) << R"(,"embed_scale":)"
      << (m.is_gemma ? std::sqrt(static_cast<double>(m.hidden)) : 1.0)
      << R"(,"logit_soft_cap":0,"ties_lm_head":)" << boolean(m.is_gemma) << R"(,"has_post_norms":)"
      << boolean(m.is_gemma) << R"(,"ropes":[)";
  for (int rope = 0; rope < 2; ++rope) {
    out << (rope > 0 ? "," : "") << R"({"scale":1.0,"inv_freq":[)";
    const double theta = rope == 0 ? 1e4 : 1e5;
    for (int i = 0; i < m.head_dim / 2; ++i) {
      out << (i > 0 ? "," : "") << std::pow(theta, -2.0 * i / m.head_dim);
    }
    out << "]}";
  }
  out << R"(],"layers":[)";
  for (size_t layer = 0; layer < m.windows.size(); ++layer) {
    const bool slides = m.windows[layer] > 0;
    out << (layer > 0 ? "," : "") << R"({"attention":{"kind":")" << (slides ? "sliding" : "full")
        << R"(","window":)" << m.windows[layer] << R"(,"num_qo_heads":)" << m.num_qo_heads
        << R"(,"num_kv_heads":)" << m.num_kv_heads << R"(,"head_dim":)" << m.head_dim
        << R"(,"scale":)" << 1.0 / std::sqrt(static_cast<double>(m.head_dim))
        << R"(,"soft_cap":0,"rope":)" << (slides ? 0 : 1) << R"(,"has_qk_norm":)"
        << boolean(m.is_gemma) << R"(,"has_qkv_bias":)" << boolean(m.has_bias)
        << R"(,"has_o_bias":false},"mlp":{"intermediate":)" << m.intermediate
        << R"(,"activation":")" << (m.is_gemma ? "gelu_tanh" : "silu") << R"(","has_bias":false}})";
  }
  out << "]}";
  return out.str();
}

// Weights normal with std 0.25 (norms near neutral), so that logits are far from uniform. Those of
// `noise_seed` are mixed in with weight `noise`: 0 gives the same model again, small values a
// drafter that often agrees.
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
    const float std_dev = is_norm ? 0.1f : 0.25f;
    const float mean = is_norm ? 1.0f - config.norm_weight_offset : 0.0f;
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) {
      value = mean + std_dev * (normal(weights) + noise * normal(noises));
    }
    if (name == "embed.weight" && m.nan_token >= 0) {
      std::fill_n(values.begin() + int64_t{m.nan_token} * m.hidden, m.hidden, std::nanf(""));
    }
    builder.put(name, DType::kFloat32, shape, {}, values.data());
  };
  const int64_t q_rows = int64_t{m.num_qo_heads} * m.head_dim;
  const int64_t kv_rows = int64_t{m.num_kv_heads} * m.head_dim;
  put("embed.weight", {m.vocab_size, m.hidden});
  if (!m.is_gemma) put("lm_head.weight", {m.vocab_size, m.hidden});
  put("final_norm.weight", {m.hidden});
  for (size_t i = 0; i < m.windows.size(); ++i) {
    const std::string layer = "layers." + std::to_string(i) + ".";
    put(layer + "attn_norm.weight", {m.hidden});
    put(layer + "mlp_norm.weight", {m.hidden});
    if (m.is_gemma) {
      put(layer + "attn_post_norm.weight", {m.hidden});
      put(layer + "mlp_post_norm.weight", {m.hidden});
      put(layer + "attn.q_norm.weight", {m.head_dim});
      put(layer + "attn.k_norm.weight", {m.head_dim});
    }
    put(layer + "attn.q.weight", {q_rows, m.hidden});
    put(layer + "attn.k.weight", {kv_rows, m.hidden});
    put(layer + "attn.v.weight", {kv_rows, m.hidden});
    if (m.has_bias) {
      put(layer + "attn.q.bias", {q_rows});
      put(layer + "attn.k.bias", {kv_rows});
      put(layer + "attn.v.bias", {kv_rows});
    }
    put(layer + "attn.o.weight", {m.hidden, q_rows});
    put(layer + "mlp.gate.weight", {m.intermediate, m.hidden});
    put(layer + "mlp.up.weight", {m.intermediate, m.hidden});
    put(layer + "mlp.down.weight", {m.hidden, m.intermediate});
  }
  return builder.finish();
}

}  // namespace paceline::testing
