// SPDX-License-Identifier: Apache-2.0
#pragma once

// Hybrids like Qwen3.5, with random weights: layers of the gated delta rule and full attention.

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <paceline/model.h>

namespace paceline::testing {

struct RecurrentModel {
  // By layer: 'r' recurrent, 'f' full attention, 'g' full attention as the published models have
  // it: with an output gate, of heads whose first quarter is rotated.
  std::string layers = "rrf";
  int32_t hidden = 64;
  int32_t num_key_heads = 2;
  int32_t num_value_heads = 4;
  int32_t key_head_dim = 16;
  int32_t value_head_dim = 24;
  int32_t conv_size = 4;
  int32_t vocab_size = 64;
  int32_t max_position = 2304;
};

inline std::string recurrent_json(const RecurrentModel& m) {
  std::ostringstream out;
  out.precision(9);
  out << R"({"format":"paceline-decoder-1","name":"tiny-hybrid","vocab_size":)" << m.vocab_size
      << R"(,"hidden_size":)" << m.hidden << R"(,"max_position":)" << m.max_position
      << R"(,"norm_eps":1e-6,"norm_weight_offset":1,"embed_scale":1,"logit_soft_cap":0)"
      << R"(,"ties_lm_head":false,"has_post_norms":false,"ropes":[{"scale":1,"inv_freq":[)";
  for (int i = 0; i < 8; ++i) out << (i > 0 ? "," : "") << std::pow(1e4, -i / 8.0);
  out << "]}";
  if (m.layers.find('g') != std::string::npos) {
    out << R"(,{"scale":1,"inv_freq":[1,)" << std::pow(1e4, -0.5) << "]}";
  }
  out << R"(],"layers":[)";
  for (size_t layer = 0; layer < m.layers.size(); ++layer) {
    out << (layer > 0 ? "," : "") << R"({"attention":)";
    if (m.layers[layer] == 'r') {
      out << R"({"kind":"gated_delta","num_key_heads":)" << m.num_key_heads
          << R"(,"num_value_heads":)" << m.num_value_heads << R"(,"key_head_dim":)"
          << m.key_head_dim << R"(,"value_head_dim":)" << m.value_head_dim << R"(,"conv_size":)"
          << m.conv_size << R"(,"norm_eps":1e-6})";
    } else {
      const bool is_gated = m.layers[layer] == 'g';
      out << R"({"kind":"full","window":0,"num_qo_heads":4,"num_kv_heads":2,"head_dim":16)"
          << R"(,"scale":0.25,"soft_cap":0,"rope":)" << (is_gated ? 1 : 0)
          << R"(,"has_qk_norm":true,"has_qkv_bias":false,"has_o_bias":false)"
          << (is_gated ? R"(,"rope_head_dim":4,"has_output_gate":true})" : "}");
    }
    out << R"(,"mlp":{"intermediate":96,"activation":"silu","has_bias":false}})";
  }
  out << "]}";
  return out.str();
}

// Matrices as dummies have them, but those of recurrent layers large enough that a state holds much
// of what it has read, for tens of tokens, and those of output gates large enough to open and
// close.
inline std::shared_ptr<const Model> recurrent_model(const RecurrentModel& m, uint64_t seed,
                                                    DType dtype = DType::kFloat32,
                                                    Device device = Device::kCpu) {
  ModelBuilder builder(recurrent_json(m), dtype, device);
  std::mt19937_64 random(seed);
  const auto put = [&](const std::string& name, const std::vector<int64_t>& shape, float mean,
                       float deviation) {
    std::normal_distribution<float> normal(mean, deviation);
    std::vector<float> values(static_cast<size_t>(shape[0] * (shape.size() > 1 ? shape[1] : 1)));
    for (float& value : values) value = normal(random);
    builder.put(name, DType::kFloat32, shape, {}, values.data());
  };
  const int64_t keys = int64_t{m.num_key_heads} * m.key_head_dim;
  const int64_t values = int64_t{m.num_value_heads} * m.value_head_dim;
  for (size_t layer = 0; layer < m.layers.size(); ++layer) {
    const std::string name = "layers." + std::to_string(layer) + ".attn.";
    if (m.layers[layer] == 'g') put(name + "gate.weight", {64, m.hidden}, 0, 0.3f);
    if (m.layers[layer] != 'r') continue;
    for (const auto& [part, rows] :
         std::vector<std::pair<const char*, int64_t>>{{"q", keys},
                                                      {"k", keys},
                                                      {"v", values},
                                                      {"z", values},
                                                      {"b", m.num_value_heads},
                                                      {"a", m.num_value_heads}}) {
      put(name + part + ".weight", {rows, m.hidden}, 0, 0.15f);
    }
    put(name + "conv", {2 * keys + values, m.conv_size}, 0, 0.5f);
    put(name + "a_log", {m.num_value_heads}, -2.5f, 0.7f);
    put(name + "dt_bias", {m.num_value_heads}, 0, 0.5f);
    put(name + "norm", {m.value_head_dim}, 1, 0.2f);
    put(name + "o.weight", {m.hidden, values}, 0, 0.15f);
  }
  builder.fill_dummy(seed);
  return builder.finish();
}

}  // namespace paceline::testing
