// SPDX-License-Identifier: Apache-2.0
#pragma once

// Models whose weights a test can read and change: named tensors and a config, for decoders and
// draft heads.

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

#include "base/overloaded.h"
#include "model/description/decoder_config.h"
#include "support/mxfp4_weights.h"
#include "support/tiny_models.h"

namespace paceline::testing {

struct RawTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;
};

[[nodiscard]] inline bool has_mxfp4_experts(const DecoderConfig& config) {
  const auto* const mixture = std::get_if<MoeMlp>(&config.layers.back().mlp);
  return mixture != nullptr && mixture->expert.gate_up.format == WeightFormat::kMxfp4;
}

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
      if (has_mxfp4_experts(config) && is_expert_matrix(name)) {
        put_mxfp4(builder, name, tensor.shape, tensor.values);
      } else {
        builder.put(name, DType::kFloat32, tensor.shape, {}, tensor.values.data());
      }
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

// The block of a block drafter of tests.
struct TinyBlock {
  int32_t size = 17;
  int32_t mask_token = 4;
  bool samples_from_anchor = false;
  bool full_is_causal = false;
  bool sliding_is_causal = true;
  bool is_anchored = false;
  int32_t markov_rank = 0;  // above 0: DSpark
  // Above 0: DFlash2, with the other three.
  int32_t taps = 0;
  int32_t group = 8;
  int32_t selector_rank = 6;
  int32_t selector_top = 5;
};

// A draft head of tests, besides the decoder of its layers. Its `windows` have an entry for each
// layer of the head.
struct TinyDraftHead {
  TinyModel decoder = llama_of({0});
  DrafterKind kind = DrafterKind::kEagle;
  int32_t target_hidden = 32;
  std::vector<int32_t> aux_layers = {0, 1, 2};  // kEagle3, kBlock
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
  TinyBlock block = {};  // kBlock
};

inline std::string block_config_json(const TinyBlock& block) {
  const auto boolean = [](bool value) { return value ? "true" : "false"; };
  std::ostringstream out;
  out << R"(,"block":{"size":)" << block.size << R"(,"mask_token":)" << block.mask_token
      << R"(,"samples_from_anchor":)" << boolean(block.samples_from_anchor)
      << R"(,"full":{"is_causal":)" << boolean(block.full_is_causal)
      << R"(},"sliding":{"is_causal":)" << boolean(block.sliding_is_causal) << R"(,"is_anchored":)"
      << boolean(block.is_anchored) << "}";
  if (block.markov_rank > 0) {
    out << R"(,"markov":{"kind":"vanilla","rank":)" << block.markov_rank << "}";
  }
  if (block.taps > 0) {
    out << R"(,"convolution":{"taps":)" << block.taps << R"(,"group":)" << block.group
        << R"(},"selector":{"rank":)" << block.selector_rank << R"(,"top":)" << block.selector_top
        << "}";
  }
  out << "}";
  return out.str();
}

inline std::string head_config_json(const TinyDraftHead& head) {
  const auto boolean = [](bool value) { return value ? "true" : "false"; };
  const bool is_eagle3 = head.kind == DrafterKind::kEagle3;
  const bool is_mtp = head.kind == DrafterKind::kGemma4Mtp;
  const bool is_eagle = head.kind == DrafterKind::kEagle;
  const bool is_block = head.kind == DrafterKind::kBlock;
  std::ostringstream out;
  out << R"(,"drafter":{"kind":")"
      << (is_block    ? (head.block.taps > 0          ? "dflash2"
                         : head.block.markov_rank > 0 ? "dspark"
                                                      : "dflash")
          : is_mtp    ? "gemma4_mtp"
          : is_eagle3 ? "eagle3"
          : is_eagle  ? "eagle"
                      : "mtp")
      << R"(","target_hidden_size":)" << head.target_hidden;
  if (is_block) out << block_config_json(head.block);
  if (is_eagle3 || is_block) {
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
      << boolean(!is_eagle) << R"(,"has_final_norm":)" << boolean(!is_eagle)
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
    for (size_t i = 0; i < d->num_fc_norms(); ++i) {
      shapes["fc_norm." + std::to_string(i) + ".weight"] = {d->target_hidden};
    }
    if (d->kind == DrafterKind::kEagle3) shapes["layers.0.hidden_norm.weight"] = {hidden};
    if (d->kind == DrafterKind::kBlock) shapes["hidden_norm.weight"] = {hidden};
    if (const int64_t rank = d->block.markov_rank; rank > 0) {
      shapes["markov.table.weight"] = {c.vocab_size, rank};
      shapes["markov.weight"] = {d->draft_vocab_size, rank};
    }
    if (const SelectorConfig& selector = d->block.selector; selector.top > 0) {
      shapes["selector.predecessors.weight"] = {c.vocab_size, selector.rank};
      shapes["selector.successors.weight"] = {c.vocab_size, selector.rank};
      shapes["selector.weight"] = {selector.rank, hidden};
    }
    if (d->kind == DrafterKind::kGemma4Mtp) shapes["feedback.weight"] = {d->target_hidden, hidden};
    if (d->centroids.count > 0) shapes["centroids.weight"] = {d->centroids.count, hidden};
  }
  for (size_t i = 0; i < c.layers.size(); ++i) {
    const std::string name = "layers." + std::to_string(i) + ".";
    if (i > 0 || d == nullptr || d->has_attn_norm) shapes[name + "attn_norm.weight"] = {hidden};
    shapes[name + "mlp_norm.weight"] = {hidden};
    if (d != nullptr && d->block.conv.is_used()) {
      const BlockConvConfig& conv = d->block.conv;
      for (const char* const branch : {"attn_conv", "mlp_conv"}) {
        shapes[name + branch + ".base"] = {2, conv.taps, hidden};
        shapes[name + branch + ".kernel.weight"] = {conv.outputs(c.hidden), hidden};
      }
    }
    if (c.has_post_norms) {
      shapes[name + "attn_post_norm.weight"] = {hidden};
      shapes[name + "mlp_post_norm.weight"] = {hidden};
    }
    std::visit(Overloaded{[&](const MultiHeadAttention& a) {
                            const int64_t q = int64_t{a.num_qo_heads} * a.head_dim;
                            const int64_t kv = int64_t{a.num_kv_heads} * a.head_dim;
                            if (a.has_qk_norm) {
                              shapes[name + "attn.q_norm.weight"] = {a.head_dim};
                              if (!a.reads_target) {
                                shapes[name + "attn.k_norm.weight"] = {a.head_dim};
                              }
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
                            if (a.has_o_bias) shapes[name + "attn.o.bias"] = {hidden};
                            if (a.has_sinks) shapes[name + "attn.sinks"] = {a.num_qo_heads};
                          },
                          [&](const LatentAttention&) {
                            const std::vector<NamedShape> of_layer = latent_shapes(c, i);
                            shapes.insert(of_layer.begin(), of_layer.end());
                          },
                          [](const CompressedAttention&) {
                            throw std::logic_error("no raw model has compressed attention");
                          },
                          [](const RecurrentAttention&) {
                            throw std::logic_error("no raw model has recurrent layers");
                          }},
               c.layers[i].attention);
    const std::vector<NamedShape> of_mlp = std::visit(
        Overloaded{
            [&](const DenseMlp& m) {
              return dense_mlp_shapes(m.intermediate, name + "mlp.", hidden);
            },
            [&](const MoeMlp& m) { return mixture_shapes(m, name + "mlp.", hidden); },
            [&](const ParallelMlp& m) { return parallel_mlp_shapes(m, name + "mlp.", hidden); }},
        c.layers[i].mlp);
    shapes.insert(of_mlp.begin(), of_mlp.end());
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
    const float std_dev = is_norm ? 0.1f : name.ends_with(".sinks") ? 1.0f : 0.25f;
    RawTensor& tensor = model.tensors[name];
    tensor.shape = shape;
    for (int64_t i = 0; i < count; ++i) {
      tensor.values.push_back((is_norm ? 1.0f - model.config.norm_weight_offset : 0.0f) +
                              std_dev * normal(random));
    }
    if (has_mxfp4_experts(model.config) && is_expert_matrix(name)) {
      tensor.values = mxfp4_values(to_mxfp4(tensor.values));
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

}  // namespace paceline::testing
