// SPDX-License-Identifier: Apache-2.0
#pragma once

// Models like DeepSeek-V4, with random weights: compressed attention of every kind of layer, four
// residual streams, and experts by score and by token.

#include <cmath>
#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <paceline/model.h>

namespace paceline::testing {

struct CompressedModel {
  // Tokens of a compressed entry, by layer; 0: none. With 4, entries overlap and an indexer
  // chooses.
  std::vector<int32_t> ratios = {0, 4, 16};
  int32_t hidden = 64;
  int32_t num_qo_heads = 4;
  int32_t head_dim = 32;
  int32_t rope_head_dim = 8;
  int32_t q_lora_rank = 48;
  int32_t window = 12;
  int32_t index_heads = 4;
  int32_t index_dim = 16;
  int32_t top_k = 5;
  int32_t num_experts = 8;
  int32_t vocab_size = 64;
  int32_t max_position = 2304;
  bool is_mtp_layer = false;  // a draft head of such a model; `ratios` has one layer
  bool has_formats = false;   // fp8 and mxfp4
};

inline std::string compressed_json(const CompressedModel& m) {
  std::ostringstream out;
  out.precision(9);
  out << R"({"format":"paceline-decoder-1","name":"tiny-v4","vocab_size":)" << m.vocab_size
      << R"(,"hidden_size":)" << m.hidden << R"(,"max_position":)" << m.max_position
      << R"(,"norm_eps":1e-6,"norm_weight_offset":0,"embed_scale":1,"logit_soft_cap":0)"
      << R"(,"ties_lm_head":false,"has_post_norms":false)"
      << R"(,"streams":{"count":4,"sinkhorn_iterations":20,"eps":1e-6})";
  if (m.is_mtp_layer) {
    out << R"(,"drafter":{"kind":"mtp","target_hidden_size":)" << m.hidden
        << R"(,"norm_before_residual":false,"norm_before_fc":false,"fc_norm":true)"
        << R"(,"norm_output":false,"has_fc_bias":false,"has_attn_norm":true)"
        << R"(,"has_final_norm":true,"owns_embedding":false,"owns_lm_head":false)"
        << R"(,"draft_vocab_size":)" << m.vocab_size << "}";
  }
  out << R"(,"ropes":[)";
  for (const double theta : {1e4, 1.6e5}) {
    out << (theta > 1e4 ? "," : "") << R"({"scale":1,"interleaved":true,"inv_freq":[)";
    for (int i = 0; i < m.rope_head_dim / 2; ++i) {
      out << (i > 0 ? "," : "") << std::pow(theta, -2.0 * i / m.rope_head_dim);
    }
    out << "]}";
  }
  out << R"(],"layers":[)";
  const auto fp8 = [&](const char* key) {
    if (!m.has_formats) return;
    out << R"(,")" << key << R"(":{"format":"fp8","scales":[128,128]})";
  };
  for (size_t layer = 0; layer < m.ratios.size(); ++layer) {
    const int32_t ratio = m.ratios[layer];
    out << (layer > 0 ? "," : "") << R"({"attention":{"kind":"compressed","num_qo_heads":)"
        << m.num_qo_heads << R"(,"head_dim":)" << m.head_dim << R"(,"rope_head_dim":)"
        << m.rope_head_dim << R"(,"q_lora_rank":)" << m.q_lora_rank << R"(,"window":)" << m.window
        << R"(,"o_groups":2,"o_lora_rank":128,"scale":)"
        << 1.0 / std::sqrt(static_cast<double>(m.head_dim)) << R"(,"rope":)" << (ratio > 0 ? 1 : 0);
    for (const char* const key : {"qkv_a", "q_b", "o_a", "o_b"}) fp8(key);
    if (ratio > 0) {
      out << R"(,"compressor":{"tokens_per_entry":)" << ratio << R"(,"overlaps":)"
          << (ratio == 4 ? "true" : "false") << "}";
    }
    if (ratio == 4) {
      out << R"(,"indexer":{"num_heads":)" << m.index_heads << R"(,"head_dim":)" << m.index_dim
          << R"(,"top_k":)" << m.top_k;
      fp8("q");
      out << "}";
    }
    out << R"(},"mlp":{"num_experts":)" << m.num_experts
        << R"(,"top_k":3,"intermediate":64,"activation":"clamped_silu","limit":10)"
        << R"(,"has_bias":false,"router":"sqrt_softplus","has_router_bias":false)"
        << R"(,"normalises_weights":true,"weight_scale":1.5,"per_expert":true)"
        << R"(,"has_token_experts":)" << (layer == 0 && !m.is_mtp_layer ? "true" : "false");
    if (m.has_formats) out << R"(,"gate_up":{"format":"mxfp4"},"down":{"format":"mxfp4"})";
    out << R"(,"shared":{"intermediate":64,"activation":"clamped_silu","limit":10)"
        << R"(,"has_bias":false)";
    fp8("gate_up");
    fp8("down");
    out << "}}}";
  }
  out << "]}";
  return out.str();
}

inline std::shared_ptr<const Model> compressed_model(const CompressedModel& m, uint64_t seed,
                                                     DType dtype = DType::kFloat32,
                                                     Device device = Device::kCpu) {
  ModelBuilder builder(compressed_json(m), dtype, device);
  builder.fill_dummy(seed);
  return builder.finish();
}

}  // namespace paceline::testing
