// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tiny decoder descriptions that together use every key, the tensors of the first, and
// folders with them, for tests that build models from descriptions.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/dtype.h>
#include <paceline/model.h>

#include "base/check.h"
#include "base/float_types.h"
#include "support/safetensors_writer.h"

namespace paceline::testing {

// A description with everything optional in layer 1 and nothing in layer 0. An edit replaces the
// first occurrence of a string, which must occur.
struct Edit {
  std::string from;
  std::string to;
};
inline void apply_edit(std::string& json, const Edit& edit) {
  const size_t at = json.find(edit.from);
  if (at == std::string::npos) throw std::logic_error("no " + edit.from);
  json.replace(at, edit.from.size(), edit.to);
}
inline std::string tiny_config(const std::vector<Edit>& edits = {}) {
  std::string json = R"({
    "format": "paceline-decoder-1", "name": "tiny", "vocab_size": 5, "hidden_size": 6,
    "max_position": 128, "norm_eps": 1e-6, "norm_weight_offset": 1, "embed_scale": 2.5,
    "logit_soft_cap": 30.0, "ties_lm_head": false, "has_post_norms": true,
    "ropes": [{"inv_freq": [1, 0.5], "scale": 1.0}, {"inv_freq": [0.25], "scale": 1.5}],
    "layers": [
      {"attention": {"kind": "full", "window": 0, "num_qo_heads": 4, "num_kv_heads": 2,
         "head_dim": 4, "scale": 0.5, "soft_cap": 0, "rope": 0, "has_qk_norm": false,
         "has_qkv_bias": false, "has_o_bias": false},
       "mlp": {"intermediate": 7, "activation": "silu", "has_bias": false}},
      {"attention": {"kind": "sliding", "window": 9, "num_qo_heads": 3, "num_kv_heads": 1,
         "head_dim": 2, "scale": 0.25, "soft_cap": 50, "rope": 1, "has_qk_norm": true,
         "has_qkv_bias": true, "has_o_bias": true},
       "mlp": {"intermediate": 3, "activation": "gelu_tanh", "has_bias": true}}]})";
  for (const Edit& edit : edits) apply_edit(json, edit);
  return json;
}

// tiny_config with the features of Gemma 4: layer 0 without a v projection, and a third layer that
// reads the KV of the second.
inline std::string shared_config(const std::vector<Edit>& edits = {}) {
  std::vector<Edit> all = {
      {"\"ropes\": [",
       "\"has_layer_scale\": true, \"per_layer_inputs\": {\"size\": 4, \"vocab_size\": 9, "
       "\"embed_scale\": 2, \"proj_scale\": 0.5, \"scale\": 0.75, \"activation\": "
       "\"gelu_tanh\"}, \"ropes\": ["},
      {"\"has_o_bias\": false}", "\"has_o_bias\": false, \"has_v_norm\": true, \"k_eq_v\": true}"},
      {"\"has_bias\": true}}]}",
       "\"has_bias\": true}}, {\"attention\": {\"kind\": \"sliding\", \"window\": 9, "
       "\"num_qo_heads\": 2, \"num_kv_heads\": 1, \"head_dim\": 2, \"scale\": 0.25, \"soft_cap\": "
       "0, "
       "\"rope\": 1, \"has_qk_norm\": true, \"has_qkv_bias\": true, \"has_o_bias\": false, "
       "\"kv_source\": 1}, \"mlp\": {\"intermediate\": 3, \"activation\": \"silu\", "
       "\"has_bias\": false}}]}"}};
  all.insert(all.end(), edits.begin(), edits.end());
  return tiny_config(all);
}

// A mixture of experts in layer 0 and every format: mxfp4 with and without experts, and fp8 with
// scales for tiles, rows and whole tensors.
inline std::string mixture_config(const std::vector<Edit>& edits = {}) {
  std::string json = R"({
    "format": "paceline-decoder-1", "name": "mixture", "vocab_size": 11, "hidden_size": 160,
    "max_position": 128, "norm_eps": 1e-5, "norm_weight_offset": 0, "embed_scale": 1,
    "logit_soft_cap": 0, "ties_lm_head": false, "has_post_norms": false,
    "ropes": [{"inv_freq": [1, 0.5, 0.25, 0.125, 1, 0.5, 0.25, 0.125], "scale": 1.25}],
    "layers": [
      {"attention": {"kind": "sliding", "window": 9, "num_qo_heads": 10, "num_kv_heads": 2,
         "head_dim": 16, "scale": 0.25, "soft_cap": 0, "rope": 0, "has_qk_norm": false,
         "has_qkv_bias": true, "has_o_bias": true, "has_sinks": true,
         "qkv": {"format": "fp8", "scales": [128, 128]},
         "o": {"format": "fp8", "scales": "row"}},
       "mlp": {"num_experts": 6, "top_k": 3, "intermediate": 96, "activation": "swiglu_oai",
         "alpha": 1.702, "limit": 7.0, "has_bias": true, "router": "softmax_of_chosen",
         "has_router_bias": true, "interleaved": true,
         "gate_up": {"format": "mxfp4"}, "down": {"format": "mxfp4"}}},
      {"attention": {"kind": "full", "window": 0, "num_qo_heads": 4, "num_kv_heads": 2,
         "head_dim": 16, "scale": 0.25, "soft_cap": 0, "rope": 0, "has_qk_norm": false,
         "has_qkv_bias": false, "has_o_bias": false},
       "mlp": {"intermediate": 64, "activation": "swiglu_oai", "alpha": 1.5, "limit": 6,
         "has_bias": false, "gate_up": {"format": "fp8", "scales": "tensor"},
         "down": {"format": "mxfp4"}}}]})";
  for (const Edit& edit : edits) apply_edit(json, edit);
  return json;
}

// mixture_config with int4 in place of all formats: groups, rows, zero points and orders.
inline std::string int4_config(const std::vector<Edit>& edits = {}) {
  std::vector<Edit> all = {
      {R"({"format": "fp8", "scales": [128, 128]})",
       R"({"format": "int4", "group": 32, "has_zeros": true})"},
      {R"({"format": "fp8", "scales": "row"})", R"({"format": "int4", "group": "row"})"},
      {R"("gate_up": {"format": "mxfp4"}, "down": {"format": "mxfp4"})",
       R"("gate_up": {"format": "int4", "group": 160, "has_zeros": true, "has_order": true},
          "down": {"format": "int4", "group": 32, "has_order": true})"},
      {R"({"format": "fp8", "scales": "tensor"})",
       R"({"format": "int4", "group": 32, "has_zeros": true, "has_order": true})"},
      {R"("down": {"format": "mxfp4"}}}]})", R"("down": {"format": "int4", "group": 64}}}]})"}};
  all.insert(all.end(), edits.begin(), edits.end());
  return mixture_config(all);
}

// mixture_config with nvfp4 in place of all formats.
inline std::string nvfp4_config() {
  constexpr const char* kNvfp4 = R"({"format": "nvfp4"})";
  return mixture_config(
      {{R"({"format": "fp8", "scales": [128, 128]})", kNvfp4},
       {R"({"format": "fp8", "scales": "row"})", kNvfp4},
       {R"("gate_up": {"format": "mxfp4"}, "down": {"format": "mxfp4"})",
        R"("gate_up": {"format": "nvfp4"}, "down": {"format": "nvfp4"})"},
       {R"({"format": "fp8", "scales": "tensor"})", kNvfp4},
       {R"("down": {"format": "mxfp4"}}}]})", R"("down": {"format": "nvfp4"}}}]})"}});
}

// Latent attention with a q_lora_rank and formats in layer 0, and without them in layer 1.
inline std::string latent_config(const std::vector<Edit>& edits = {}) {
  std::string json = R"({
    "format": "paceline-decoder-1", "name": "latent", "vocab_size": 11, "hidden_size": 160,
    "max_position": 128, "norm_eps": 1e-5, "norm_weight_offset": 0, "embed_scale": 1,
    "logit_soft_cap": 0, "ties_lm_head": false, "has_post_norms": false,
    "ropes": [{"inv_freq": [1, 0.5, 0.25, 0.125], "scale": 1.25, "interleaved": true},
              {"inv_freq": [1, 0.5, 0.25], "scale": 1}],
    "layers": [
      {"attention": {"kind": "latent", "num_qo_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 24,
         "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16, "scale": 0.25,
         "rope": 0, "latent_norm_eps": 1e-6, "qkv_a": {"format": "fp8", "scales": [128, 128]},
         "q_b": {"format": "mxfp4"}, "o": {"format": "fp8", "scales": "row"}},
       "mlp": {"intermediate": 64, "activation": "silu", "has_bias": false}},
      {"attention": {"kind": "latent", "num_qo_heads": 3, "kv_lora_rank": 20,
         "qk_nope_head_dim": 7, "qk_rope_head_dim": 6, "v_head_dim": 5, "scale": 0.5,
         "rope": 1, "latent_norm_eps": 1e-5},
       "mlp": {"intermediate": 64, "activation": "silu", "has_bias": false}}]})";
  for (const Edit& edit : edits) apply_edit(json, edit);
  return json;
}

// mixture_config with the mixture of DeepSeek-V3.
inline std::string deepseek_config(const std::vector<Edit>& edits = {}) {
  std::vector<Edit> all = {
      {R"("activation": "swiglu_oai",
         "alpha": 1.702, "limit": 7.0, "has_bias": true, "router": "softmax_of_chosen",
         "has_router_bias": true, "interleaved": true,)",
       R"("activation": "silu", "has_bias": false, "router": "sigmoid", "has_router_bias": false,
         "num_groups": 3, "top_groups": 2, "normalises_weights": true, "weight_scale": 2.5,
         "per_expert": true, "shared": {"intermediate": 40, "activation": "gelu_tanh",
         "has_bias": true},)"}};
  all.insert(all.end(), edits.begin(), edits.end());
  return mixture_config(all);
}

// Every tensor of tiny_config by the table of docs/model-format.md, written out by hand.
inline const std::map<std::string, std::vector<int64_t>>& tiny_shapes() {
  static const std::map<std::string, std::vector<int64_t>> shapes = {
      {"embed.weight", {5, 6}},
      {"lm_head.weight", {5, 6}},
      {"final_norm.weight", {6}},
      {"layers.0.attn_norm.weight", {6}},
      {"layers.0.attn_post_norm.weight", {6}},
      {"layers.0.attn.q.weight", {16, 6}},
      {"layers.0.attn.k.weight", {8, 6}},
      {"layers.0.attn.v.weight", {8, 6}},
      {"layers.0.attn.o.weight", {6, 16}},
      {"layers.0.mlp_norm.weight", {6}},
      {"layers.0.mlp_post_norm.weight", {6}},
      {"layers.0.mlp.gate.weight", {7, 6}},
      {"layers.0.mlp.up.weight", {7, 6}},
      {"layers.0.mlp.down.weight", {6, 7}},
      {"layers.1.attn_norm.weight", {6}},
      {"layers.1.attn_post_norm.weight", {6}},
      {"layers.1.attn.q.weight", {6, 6}},
      {"layers.1.attn.q.bias", {6}},
      {"layers.1.attn.k.weight", {2, 6}},
      {"layers.1.attn.k.bias", {2}},
      {"layers.1.attn.v.weight", {2, 6}},
      {"layers.1.attn.v.bias", {2}},
      {"layers.1.attn.o.weight", {6, 6}},
      {"layers.1.attn.o.bias", {6}},
      {"layers.1.attn.q_norm.weight", {2}},
      {"layers.1.attn.k_norm.weight", {2}},
      {"layers.1.mlp_norm.weight", {6}},
      {"layers.1.mlp_post_norm.weight", {6}},
      {"layers.1.mlp.gate.weight", {3, 6}},
      {"layers.1.mlp.gate.bias", {3}},
      {"layers.1.mlp.up.weight", {3, 6}},
      {"layers.1.mlp.up.bias", {3}},
      {"layers.1.mlp.down.weight", {6, 3}},
      {"layers.1.mlp.down.bias", {6}},
  };
  return shapes;
}

inline int64_t product(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// Distinct values that bfloat16 and float16 hold exactly: quarters up to 64 are 8 bits long.
inline std::map<std::string, std::vector<float>> tiny_values() {
  std::map<std::string, std::vector<float>> values;
  int which = 0;
  for (const auto& [name, shape] : tiny_shapes()) {
    std::vector<float>& tensor = values[name];
    for (int64_t i = 0; i < product(shape); ++i) {
      tensor.push_back(static_cast<float>((i * 7 + which * 31) % 255 - 127) / 4);
    }
    ++which;
  }
  return values;
}

// For values that float16 holds as a normal number.
inline uint16_t float_to_fp16_exact(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (value == 0) return static_cast<uint16_t>(bits >> 16);
  return static_cast<uint16_t>(((bits >> 16) & 0x8000u) |
                               ((((bits & 0x7fffffffu) >> 13) - (112u << 10)) & 0x7fffu));
}

inline std::string encode(const std::vector<float>& values, DType dtype) {
  if (dtype == DType::kFloat32) return test::bytes_of(values);
  std::vector<uint16_t> halves;
  for (float value : values) {
    halves.push_back(dtype == DType::kBFloat16 ? float_to_bf16(value) : float_to_fp16_exact(value));
  }
  return test::bytes_of(halves);
}

inline std::shared_ptr<const Model> build_tiny(DType stored, DType weights) {
  ModelBuilder builder(tiny_config(), weights);
  for (const auto& [name, values] : tiny_values()) {
    builder.put(name, stored, tiny_shapes().at(name), {}, encode(values, stored).data());
  }
  return builder.finish();
}

// The tensors of tiny_config as a safetensors file, stored as kFloat32, kBFloat16 or kFloat16.
inline std::string tiny_safetensors(DType stored = DType::kFloat32, bool misalign = false) {
  const std::string dtype = stored == DType::kFloat32    ? "F32"
                            : stored == DType::kBFloat16 ? "BF16"
                                                         : "F16";
  std::vector<test::WrittenTensor> tensors;
  for (const auto& [name, values] : tiny_values()) {
    tensors.push_back({name, dtype, tiny_shapes().at(name), encode(values, stored)});
  }
  return test::safetensors_bytes(tensors, misalign);
}

// tiny_config as the target or the drafter in a paceline.json.
inline std::string tiny_part(std::string_view file, std::string_view dtype = "float32") {
  return concat(R"({"weights": ")", file, R"(", "dtype": ")", dtype, R"(", "config": )",
                tiny_config(), "}");
}

// Fills a folder with a target and the end-of-sequence id 4. If k > 0, the target is also its own
// drafter, and k the folder's default.
inline void write_tiny_folder(const test::TemporaryFolder& folder, int32_t k) {
  const std::string part = tiny_part("model.safetensors");
  const std::string draft =
      k == 0 ? "" : concat(R"(, "draft": )", part, R"(, "num_speculative_tokens": )", k);
  test::write_file(folder.file("model.safetensors"), tiny_safetensors());
  test::write_file(folder.file("paceline.json"),
                   concat(R"({"format": "paceline-folder-1", "stop_token_ids": [4], "target": )",
                          part, draft, "}"));
}

}  // namespace paceline::testing
