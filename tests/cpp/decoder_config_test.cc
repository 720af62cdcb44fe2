// SPDX-License-Identifier: Apache-2.0
// Decoder descriptions: every key is read, and impossible ones are refused by name.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <paceline/error.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/description/decoder_config.h"
#include "model/weights/weight_limit.h"
#include "support/described_model.h"
#include "support/errors.h"

namespace paceline {
namespace {

using testing::deepseek_config;
using testing::Edit;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::latent_config;
using testing::message_of;
using testing::mixture_config;
using testing::shared_config;
using ::testing::SizeIs;
using testing::tiny_config;

TEST(DecoderConfig, ReadsEveryKey) {
  const DecoderConfig config = parse_decoder_config(tiny_config());
  EXPECT_EQ(config.name, "tiny");
  EXPECT_EQ(config.vocab_size, 5);
  EXPECT_EQ(config.hidden, 6);
  EXPECT_EQ(config.max_position, 128);
  EXPECT_EQ(config.norm_eps, 1e-6f);
  EXPECT_EQ(config.norm_weight_offset, 1);
  EXPECT_EQ(config.embed_scale, 2.5f);
  EXPECT_EQ(config.logit_soft_cap, 30);
  EXPECT_FALSE(config.ties_lm_head);
  EXPECT_TRUE(config.has_post_norms);
  ASSERT_THAT(config.ropes, SizeIs(2));
  EXPECT_THAT(config.ropes[0].inv_freq, ElementsAre(1, 0.5f));
  EXPECT_EQ(config.ropes[1].scale, 1.5f);
  ASSERT_THAT(config.layers, SizeIs(2));
  const auto& full = std::get<MultiHeadAttention>(config.layers[0].attention);
  EXPECT_EQ(full.kind, KvKind(FullKv{}));
  EXPECT_EQ(full.num_qo_heads, 4);
  EXPECT_FALSE(full.has_qk_norm || full.has_qkv_bias || full.has_o_bias);
  const auto& sliding = std::get<MultiHeadAttention>(config.layers[1].attention);
  EXPECT_EQ(sliding.kind, KvKind(SlidingKv{9}));
  EXPECT_EQ(sliding.num_kv_heads, 1);
  EXPECT_EQ(sliding.head_dim, 2);
  EXPECT_EQ(sliding.scale, 0.25f);
  EXPECT_EQ(sliding.soft_cap, 50);
  EXPECT_EQ(sliding.rope, 1);
  EXPECT_TRUE(sliding.has_qk_norm && sliding.has_qkv_bias && sliding.has_o_bias);
  EXPECT_EQ(std::get<DenseMlp>(config.layers[0].mlp).activation, Activation::kSilu);
  const auto& mlp = std::get<DenseMlp>(config.layers[1].mlp);
  EXPECT_EQ(mlp.activation, Activation::kGeluTanh);
  EXPECT_EQ(mlp.intermediate, 3);
  EXPECT_TRUE(mlp.has_bias);
}

TEST(DecoderConfig, ReadsOptionalKeys) {
  const DecoderConfig plain = parse_decoder_config(tiny_config());
  EXPECT_FALSE(plain.has_layer_scale);
  EXPECT_EQ(plain.per_layer_inputs.size, 0);
  const auto& owner = std::get<MultiHeadAttention>(plain.layers[0].attention);
  EXPECT_EQ(owner.kv_source, -1);
  EXPECT_EQ(owner.kv_inputs(), KvInputs::kKeysAndValues);
  EXPECT_EQ(owner.projected_width(), 32);

  const DecoderConfig config = parse_decoder_config(shared_config());
  EXPECT_TRUE(config.has_layer_scale);
  EXPECT_EQ(config.per_layer_inputs.size, 4);
  EXPECT_EQ(config.per_layer_inputs.vocab_size, 9);
  EXPECT_EQ(config.per_layer_inputs.embed_scale, 2);
  EXPECT_EQ(config.per_layer_inputs.proj_scale, 0.5f);
  EXPECT_EQ(config.per_layer_inputs.scale, 0.75f);
  EXPECT_EQ(config.per_layer_inputs.activation, Activation::kGeluTanh);
  ASSERT_THAT(config.layers, SizeIs(3));
  const auto& full = std::get<MultiHeadAttention>(config.layers[0].attention);
  EXPECT_TRUE(full.has_v_norm && full.k_eq_v);
  EXPECT_EQ(full.kv_inputs(), KvInputs::kKeys);
  EXPECT_EQ(full.projected_width(), 24);
  const auto& reader = std::get<MultiHeadAttention>(config.layers[2].attention);
  EXPECT_EQ(reader.kv_source, 1);
  EXPECT_EQ(reader.kv_inputs(), KvInputs::kNone);
  EXPECT_EQ(reader.projected_width(), 4);
}

TEST(DecoderConfig, ReadsMixturesAndFormats) {
  const DecoderConfig config = parse_decoder_config(mixture_config());
  const auto& attention = std::get<MultiHeadAttention>(config.layers[0].attention);
  EXPECT_TRUE(attention.has_sinks);
  EXPECT_EQ(attention.qkv.format, WeightFormat::kFp8);
  EXPECT_EQ(attention.qkv.scales, Fp8Scales::kBlock);
  EXPECT_EQ(attention.o.format, WeightFormat::kFp8);
  EXPECT_EQ(attention.o.scales, Fp8Scales::kRow);
  const auto& mixture = std::get<MoeMlp>(config.layers[0].mlp);
  EXPECT_EQ(mixture.num_experts, 6);
  EXPECT_EQ(mixture.top_k, 3);
  EXPECT_EQ(mixture.router, RouterRule::kSoftmaxOfChosen);
  EXPECT_TRUE(mixture.has_router_bias && mixture.is_interleaved && !mixture.is_transposed);
  EXPECT_EQ(mixture.expert.intermediate, 96);
  EXPECT_EQ(mixture.expert.activation, Activation::kSwigluOai);
  EXPECT_EQ(mixture.expert.alpha, 1.702f);
  EXPECT_EQ(mixture.expert.limit, 7);
  EXPECT_TRUE(mixture.expert.has_bias);
  EXPECT_EQ(mixture.expert.gate_up.format, WeightFormat::kMxfp4);
  EXPECT_EQ(mixture.expert.down.format, WeightFormat::kMxfp4);

  const auto& plain = std::get<MultiHeadAttention>(config.layers[1].attention);
  EXPECT_FALSE(plain.has_sinks);
  EXPECT_EQ(plain.qkv.format, WeightFormat::kPlain);
  EXPECT_EQ(plain.o.format, WeightFormat::kPlain);
  const auto& dense = std::get<DenseMlp>(config.layers[1].mlp);
  EXPECT_EQ(dense.alpha, 1.5f);
  EXPECT_EQ(dense.limit, 6);
  EXPECT_EQ(dense.gate_up.format, WeightFormat::kFp8);
  EXPECT_EQ(dense.gate_up.scales, Fp8Scales::kTensor);
  EXPECT_EQ(dense.down.format, WeightFormat::kMxfp4);
}

TEST(DecoderConfig, ReadsLatentAttention) {
  const DecoderConfig config = parse_decoder_config(latent_config());
  EXPECT_TRUE(config.ropes[0].is_interleaved && !config.ropes[1].is_interleaved);
  const auto& lora = std::get<LatentAttention>(config.layers[0].attention);
  EXPECT_EQ(lora.num_qo_heads, 4);
  EXPECT_EQ(lora.q_lora_rank, 96);
  EXPECT_EQ(lora.kv_lora_rank, 24);
  EXPECT_EQ(lora.qk_nope_head_dim, 12);
  EXPECT_EQ(lora.qk_rope_head_dim, 8);
  EXPECT_EQ(lora.v_head_dim, 16);
  EXPECT_EQ(lora.scale, 0.25f);
  EXPECT_EQ(lora.norm_eps, 1e-6f);
  EXPECT_EQ(lora.rope, 0);
  EXPECT_EQ(lora.qkv_a.scales, Fp8Scales::kBlock);
  EXPECT_EQ(lora.q_b.format, WeightFormat::kMxfp4);
  EXPECT_EQ(lora.o.scales, Fp8Scales::kRow);
  EXPECT_EQ(lora.q_rows(), 80);
  EXPECT_EQ(lora.qkv_a_rows(), 96 + 32);
  EXPECT_EQ(lora.entry_width(), 32);
  EXPECT_EQ(lora.kv_b_rows(), 112);
  const auto& plain = std::get<LatentAttention>(config.layers[1].attention);
  EXPECT_EQ(plain.q_lora_rank, 0);
  EXPECT_EQ(plain.norm_eps, 1e-5f);
  EXPECT_EQ(plain.rope, 1);
  EXPECT_EQ(plain.qkv_a.format, WeightFormat::kPlain);
  EXPECT_EQ(plain.qkv_a_rows(), 39 + 26);
}

TEST(DecoderConfig, RefusesLatentAttentionThatCannotBe) {
  const std::string kv_source = R"("latent_norm_eps": 1e-5, "kv_source": 0)";
  const std::vector<std::pair<Edit, std::string>> table = {
      {{"\"q_lora_rank\": 96, ", ""},
       "layers[0].attention.q_b is an object of 1 keys; allowed: no such key"},
      {{"\"q_lora_rank\": 96", "\"q_lora_rank\": 0"}, "q_lora_rank is 0; allowed: an integer from"},
      {{"\"q_lora_rank\": 96", "\"q_lora_rank\": 80"},
       "q_b.format is 'mxfp4'; allowed: a format only where q_lora_rank is a multiple of 32"},
      {{"\"kv_lora_rank\": 24,", ""}, "layers[0].attention.kv_lora_rank is missing"},
      {{"\"kv_lora_rank\": 24", "\"kv_lora_rank\": 5000"}, "kv_lora_rank is 5000; allowed: an int"},
      {{"\"qk_rope_head_dim\": 6", "\"qk_rope_head_dim\": 7"}, "7; allowed: an even number"},
      {{"\"rope\": 1", "\"rope\": 0"},
       "layers[1].attention.rope is 0; allowed: a rope with 3 inv_freq, qk_rope_head_dim / 2; this "
       "one has 4"},
      {{"\"qk_nope_head_dim\": 7", "\"qk_nope_head_dim\": 0"}, "qk_nope_head_dim is 0; allowed"},
      {{"\"v_head_dim\": 5", "\"v_head_dim\": 0"}, "layers[1].attention.v_head_dim is 0; allowed"},
      {{"\"latent_norm_eps\": 1e-6", "\"latent_norm_eps\": 0"}, "latent_norm_eps is 0; allowed"},
      {{"\"latent_norm_eps\": 1e-5", kv_source},
       "layers[1].attention.kv_source is an unknown key; allowed: kind, num_qo_heads"},
      {{"\"kind\": \"latent\"", "\"kind\": \"mla\""},
       "layers[0].attention.kind is 'mla'; allowed: 'full', 'sliding', 'latent'"},
  };
  for (const auto& [edit, expected] : table) {
    EXPECT_THAT(message_of<InvalidArgument>([&, &change = edit] {
                  static_cast<void>(parse_decoder_config(latent_config({change})));
                }),
                HasSubstr(expected));
  }
  const std::string heads = R"("kind": "full", "window": 0, "num_qo_heads": 2, "num_kv_heads": 1,
    "head_dim": 8, "scale": 1, "soft_cap": 0, "rope": 0, "has_qk_norm": false,
    "has_qkv_bias": false, "has_o_bias": false, "kv_source": 0},
    "mlp": {"intermediate": 64, "activation": "silu", "has_bias": false}}]})";
  const auto with_heads = [&](const std::vector<Edit>& edits) {
    std::string json = latent_config();
    json = json.substr(0, json.rfind("\"kind\"")) + heads;
    for (const Edit& edit : edits) testing::apply_edit(json, edit);
    return message_of<InvalidArgument>([&] { static_cast<void>(parse_decoder_config(json)); });
  };
  EXPECT_THAT(with_heads({{", \"kv_source\": 0", ""}}),
              HasSubstr("layers[1].attention.rope is 0; allowed: a rope that is not interleaved"));
  EXPECT_THAT(with_heads({{", \"interleaved\": true", ""}, {"\"scale\": 1.25", "\"scale\": 1"}}),
              HasSubstr("layers[1].attention.kv_source is 0; allowed: a layer of the same kind"));
}

TEST(DecoderConfig, ReadsGatesAndPartsThatAreRotated) {
  const DecoderConfig plain = parse_decoder_config(tiny_config());
  const auto& without = std::get<MultiHeadAttention>(plain.layers[0].attention);
  EXPECT_FALSE(without.has_output_gate);
  EXPECT_EQ(without.rope_head_dim, 4);

  const Edit gate = {"\"has_o_bias\": false",
                     "\"has_o_bias\": false, \"has_output_gate\": true, \"rope_head_dim\": 2"};
  const Edit rope = {"\"rope\": 0", "\"rope\": 1"};
  const DecoderConfig config = parse_decoder_config(tiny_config({gate, rope}));
  const auto& attention = std::get<MultiHeadAttention>(config.layers[0].attention);
  EXPECT_TRUE(attention.has_output_gate);
  EXPECT_EQ(attention.rope_head_dim, 2);

  const auto refusal = [&](const std::string& json) {
    return message_of<InvalidArgument>([&] { static_cast<void>(parse_decoder_config(json)); });
  };
  EXPECT_THAT(refusal(tiny_config({gate})),
              HasSubstr("layers[0].attention.rope is 0; allowed: a rope with 1 inv_freq, "
                        "rope_head_dim / 2"));
  const auto with_size = [&](const char* size) {
    return tiny_config({{"\"has_o_bias\": false",
                         std::string("\"has_o_bias\": false, \"rope_head_dim\": ") + size}});
  };
  EXPECT_THAT(refusal(with_size("3")), HasSubstr("rope_head_dim is 3; allowed: an even number"));
  EXPECT_THAT(refusal(with_size("6")), HasSubstr("rope_head_dim is 6; allowed: an integer from"));

  const Edit shared_gate = {"\"per_expert\": true", "\"per_expert\": true, \"shared_gate\": true"};
  const DecoderConfig mixture = parse_decoder_config(deepseek_config({shared_gate}));
  EXPECT_TRUE(std::get<MoeMlp>(mixture.layers[0].mlp).has_shared_gate);
  const Edit shared = {R"(, "shared": {"intermediate": 40, "activation": "gelu_tanh",
         "has_bias": true})",
                       ""};
  EXPECT_THAT(refusal(deepseek_config({shared_gate, shared})),
              HasSubstr("layers[0].mlp.shared_gate is true; allowed: false without shared"));
  const Edit router_bias = {"\"has_router_bias\": false", "\"has_router_bias\": true"};
  EXPECT_THAT(refusal(deepseek_config({shared_gate, router_bias})),
              HasSubstr("allowed: false without shared, and with has_router_bias"));
}

TEST(DecoderConfig, ReadsSigmoidRoutersAndSharedExperts) {
  const DecoderConfig config = parse_decoder_config(deepseek_config());
  const auto& mixture = std::get<MoeMlp>(config.layers[0].mlp);
  EXPECT_EQ(mixture.router, RouterRule::kSigmoid);
  EXPECT_EQ(mixture.scoring.num_groups, 3);
  EXPECT_EQ(mixture.scoring.top_groups, 2);
  EXPECT_TRUE(mixture.scoring.normalises);
  EXPECT_EQ(mixture.scoring.scale, 2.5f);
  EXPECT_TRUE(mixture.is_per_expert);
  EXPECT_EQ(mixture.expert.intermediate, 96);
  ASSERT_TRUE(mixture.shared);
  EXPECT_EQ(mixture.shared->intermediate, 40);
  EXPECT_EQ(mixture.shared->activation, Activation::kGeluTanh);
  EXPECT_TRUE(mixture.shared->has_bias);

  const DecoderConfig plain = parse_decoder_config(deepseek_config(
      {{R"("num_groups": 3, "top_groups": 2, "normalises_weights": true, "weight_scale": 2.5,
         "per_expert": true, "shared": {"intermediate": 40, "activation": "gelu_tanh",
         "has_bias": true},)",
        ""}}));
  const auto& defaults = std::get<MoeMlp>(plain.layers[0].mlp);
  EXPECT_EQ(defaults.scoring.num_groups, 1);
  EXPECT_EQ(defaults.scoring.top_groups, 1);
  EXPECT_FALSE(defaults.scoring.normalises || defaults.is_per_expert || defaults.shared);
  EXPECT_EQ(defaults.scoring.scale, 1);
}

// A mixture of the description of DeepSeek-V3's kind, with `edits`, beside a dense MLP.
std::string parallel_config(const std::vector<Edit>& edits = {}) {
  std::string json = deepseek_config();
  const size_t begin = json.find("\"mlp\": {") + 7;
  size_t end = begin;
  for (int depth = 0;; ++end) {
    depth += json[end] == '{' ? 1 : json[end] == '}' ? -1 : 0;
    if (depth == 0) break;
  }
  json.replace(begin, end + 1 - begin,
               R"({"dense": {"intermediate": 40, "activation": "silu", "has_bias": false},
                   "mixture": {"num_experts": 6, "top_k": 3, "intermediate": 96, "router": "softmax",
                   "activation": "silu", "has_bias": false, "has_router_bias": false,
                   "logit_scale": 0.5, "has_expert_scales": true, "per_expert": true,
                   "gate_up": {"format": "fp8", "scales": "row"}}})");
  for (const Edit& edit : edits) testing::apply_edit(json, edit);
  return json;
}

TEST(DecoderConfig, ReadsADenseMlpBesideAMixture) {
  const DecoderConfig config = parse_decoder_config(parallel_config());
  const auto& mlp = std::get<ParallelMlp>(config.layers[0].mlp);
  EXPECT_EQ(mlp.dense.intermediate, 40);
  EXPECT_EQ(mlp.projected_width(), 2 * 3 * 96);
  EXPECT_EQ(mlp.mixture.router, RouterRule::kSoftmax);
  EXPECT_EQ(mlp.mixture.logit_scale, 0.5f);
  EXPECT_TRUE(mlp.mixture.has_expert_scales);
  EXPECT_EQ(mlp.mixture.expert.gate_up.format, WeightFormat::kFp8);
  const std::vector<std::pair<Edit, std::string>> table = {
      {{"\"dense\": {\"intermediate\"", "\"dens\": {\"intermediate\""},
       "layers[0].mlp.dens is an unknown key; allowed: dense, mixture"},
      {{"\"has_expert_scales\"", "\"shared\": {}, \"has_expert_scales\""},
       "layers[0].mlp.mixture.shared is an object of 0 keys; allowed: no such key beside"},
      {{"\"per_expert\": true,", ""},
       "layers[0].mlp.mixture.gate_up.format is 'fp8'; allowed: 'mxfp4', 'nvfp4', 'int4'"},
  };
  for (const auto& [edit, expected] : table) {
    EXPECT_THAT(message_of<InvalidArgument>(
                    [&] { static_cast<void>(parse_decoder_config(parallel_config({edit}))); }),
                HasSubstr(expected));
  }
}

TEST(DecoderConfig, RefusesRoutersThatCannotBe) {
  const std::vector<std::pair<Edit, std::string>> table = {
      {{"\"num_groups\": 3", "\"num_groups\": 4"},
       "layers[0].mlp.num_groups is 4; allowed: divisors of num_experts, 6, with at least two "
       "experts to a group"},
      {{"\"num_groups\": 3", "\"num_groups\": 6"}, "num_groups is 6; allowed: divisors"},
      {{"\"num_groups\": 3", "\"num_groups\": 33"}, "allowed: an integer from 1 to 32"},
      {{"\"num_groups\": 3, ", ""}, "layers[0].mlp.num_groups is missing"},
      {{"\"top_groups\": 2, ", ""}, "layers[0].mlp.top_groups is missing"},
      {{"\"top_groups\": 2", "\"top_groups\": 4"}, "allowed: an integer from 1 to 3"},
      {{"\"top_groups\": 2", "\"top_groups\": 1"},
       "layers[0].mlp.top_groups is 1; allowed: groups that together have top_k experts, 3; a "
       "group has 2"},
      {{"\"weight_scale\": 2.5", "\"weight_scale\": 0"}, "layers[0].mlp.weight_scale is 0"},
      {{"\"normalises_weights\": true", "\"normalises_weights\": 1"},
       "layers[0].mlp.normalises_weights is 1; allowed: true or false"},
      {{"\"sigmoid\"", "\"softmax_of_chosen\""},
       "layers[0].mlp.num_groups is 3; allowed: no such key where router is 'softmax_of_chosen'"},
      {{"\"sigmoid\"", "\"sqrtsoftplus\""},
       "layers[0].mlp.router is 'sqrtsoftplus'; allowed: 'softmax_of_chosen', 'softmax', "
       "'sigmoid'"},
      {{"\"sigmoid\"", "\"sigmoid\", \"logit_scale\": 2"},
       "layers[0].mlp.logit_scale is 2; allowed: no such key where router is 'sigmoid'"},
      {{"\"has_bias\": false, \"router\"", "\"has_bias\": true, \"router\""},
       "layers[0].mlp.has_bias is true; allowed: false with per_expert"},
      {{"\"per_expert\": true", "\"per_expert\": true, \"interleaved\": true"},
       "layers[0].mlp.interleaved is true; allowed: false with per_expert"},
      {{"\"intermediate\": 40", "\"intermediate\": 0"}, "layers[0].mlp.shared.intermediate is 0"},
      {{"\"intermediate\": 40", "\"intermediate\": 40, \"top_k\": 2"},
       "layers[0].mlp.shared.top_k is an unknown key"},
  };
  for (const auto& [edit, expected] : table) {
    const std::string message =
        message_of<InvalidArgument>([&] { (void)parse_decoder_config(deepseek_config({edit})); });
    EXPECT_THAT(message, HasSubstr(expected)) << edit.from << " -> " << edit.to;
  }
}

TEST(DecoderConfig, RefusesMixturesAndFormatsThatCannotBe) {
  const std::vector<std::pair<Edit, std::string>> table = {
      {{"\"num_experts\": 6", "\"num_experts\": 0"},
       "layers[0].mlp.num_experts is 0; allowed: an integer from 1 to 1024"},
      {{"\"num_experts\": 6", "\"num_experts\": 1025"}, "num_experts is 1025"},
      {{"\"num_experts\": 6, ", ""}, "layers[0].mlp.num_experts is missing"},
      {{"\"top_k\": 3", "\"top_k\": 7"},
       "layers[0].mlp.top_k is 7; allowed: an integer from 1 to 6"},
      {{"\"num_experts\": 6, \"top_k\": 3", "\"num_experts\": 64, \"top_k\": 33"},
       "layers[0].mlp.top_k is 33; allowed: an integer from 1 to 32"},
      {{"\"intermediate\": 96", "\"intermediate\": 80"},
       "layers[0].mlp.down.format is 'mxfp4'; allowed: a format only where intermediate is a "
       "multiple of 32; it is 80"},
      {{"\"hidden_size\": 160", "\"hidden_size\": 72"},
       "layers[0].attention.qkv.format is 'fp8'; allowed: a format only where hidden_size is a "
       "multiple of 32; it is 72"},
      {{"\"num_qo_heads\": 10, \"num_kv_heads\": 2", "\"num_qo_heads\": 9, \"num_kv_heads\": 3"},
       "layers[0].attention.o.format is 'fp8'; allowed: a format only where num_qo_heads * "
       "head_dim is a multiple of 32; it is 144"},
      {{"\"intermediate\": 64", "\"intermediate\": 131104"},
       "layers[1].mlp.down.format is 'mxfp4'; allowed: a format only where intermediate is at "
       "most 131072; it is 131104"},
      {{"\"softmax_of_chosen\"", "\"softmax_of_all\""},
       "layers[0].mlp.router is 'softmax_of_all'; allowed: 'softmax_of_chosen', 'softmax'"},
      {{"\"softmax_of_chosen\"", "\"softmax\", \"normalises_weights\": true"},
       "layers[0].mlp.normalises_weights is true; allowed: no such key where router is 'softmax'"},
      {{"\"softmax_of_chosen\"", "\"softmax\", \"logit_scale\": 0"},
       "layers[0].mlp.logit_scale is 0; allowed: a number above 0"},
      {{"\"swiglu_oai\"", "\"swiglu\""},
       "layers[0].mlp.activation is 'swiglu'; allowed: 'silu', 'gelu_tanh', 'swiglu_oai'"},
      {{"\"swiglu_oai\"", "\"silu\""},
       "layers[0].mlp.alpha is 1.702; allowed: no such key where activation is 'silu'"},
      {{"\"alpha\": 1.702, ", ""}, "layers[0].mlp.alpha is missing"},
      {{"\"limit\": 7.0", "\"limit\": 0"}, "layers[0].mlp.limit is 0; allowed: a number above 0"},
      {{"\"interleaved\": true", "\"transposed\": true"},
       "layers[0].mlp.gate_up is an object of 1 keys; allowed: no such key with transposed"},
      {{"\"gate_up\": {\"format\": \"mxfp4\"}", "\"gate_up\": {\"format\": \"fp8\"}"},
       "layers[0].mlp.gate_up.format is 'fp8'; allowed: 'mxfp4', 'nvfp4', 'int4'"},
      {{"\"format\": \"fp8\", \"scales\": \"row\"", "\"format\": \"nf4\""},
       "layers[0].attention.o.format is 'nf4'; allowed: 'mxfp4', 'nvfp4', 'fp8', 'int4'"},
      {{", \"scales\": \"row\"", ""}, "layers[0].attention.o.scales is missing"},
      {{"\"row\"", "\"column\""},
       "layers[0].attention.o.scales is 'column'; allowed: 'tensor', 'row', [128, 128]"},
      {{"[128, 128]", "[128, 64]"}, "layers[0].attention.qkv.scales[1] is 64; allowed: 128"},
      {{"[128, 128]", "[128]"}, "layers[0].attention.qkv.scales is a list of 1; allowed: 'tensor'"},
      {{"{\"format\": \"mxfp4\"}", "{\"format\": \"mxfp4\", \"scales\": \"row\"}"},
       "layers[0].mlp.gate_up.scales is an unknown key; allowed: format"},
      {{"{\"format\": \"mxfp4\"}", "{\"format\": \"nvfp4\", \"group\": 16}"},
       "layers[0].mlp.gate_up.group is an unknown key; allowed: format"},
      {{"\"has_bias\": false, \"gate_up\"",
        "\"has_bias\": false, \"interleaved\": true, \"gate_up\""},
       "layers[1].mlp.interleaved is an unknown key"},
      {{"\"has_sinks\": true", "\"has_sinks\": 1"}, "layers[0].attention.has_sinks is 1"},
  };
  for (const auto& [edit, expected] : table) {
    const std::string message =
        message_of<InvalidArgument>([&] { (void)parse_decoder_config(mixture_config({edit})); });
    EXPECT_THAT(message, HasSubstr(expected)) << edit.from << " -> " << edit.to;
  }
  const Edit plain_experts = {
      "\"gate_up\": {\"format\": \"mxfp4\"}, \"down\": {\"format\": \"mxfp4\"}",
      "\"transposed\": true"};
  const Edit plain_qkv = {"\"qkv\": {\"format\": \"fp8\", \"scales\": [128, 128]},", ""};
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                (void)parse_decoder_config(mixture_config(
                    {{"\"intermediate\": 96", "\"intermediate\": 100"}, plain_experts}));
              }),
              HasSubstr("layers[0].mlp.intermediate is 100; allowed: a multiple of 8"));
  EXPECT_THAT(
      message_of<InvalidArgument>([&] {
        (void)parse_decoder_config(
            mixture_config({{"\"hidden_size\": 160", "\"hidden_size\": 36"}, plain_qkv}));
      }),
      HasSubstr("layers[0].mlp.num_experts is 6; allowed: no such key unless hidden_size is "
                "a multiple of 8; it is 36"));
}

TEST(DecoderConfig, RefusesReadersAndInputsThatCannotBe) {
  const std::vector<std::pair<Edit, std::string>> table = {
      {{"\"kv_source\": 1", "\"kv_source\": 2"},
       "layers[2].attention.kv_source is 2; allowed: an integer from 0 to 1"},
      {{"\"kv_source\": 1", "\"kv_source\": 0"},
       "kv_source is 0; allowed: a layer of the same kind"},
      {{"\"kv_source\": 1", "\"kv_source\": 1, \"k_eq_v\": true"},
       "layers[2].attention.k_eq_v is true; allowed: false where there is a kv_source"},
      {{"\"k_eq_v\": true", "\"kv_source\": 0"},
       "layers[0].attention.kv_source is 0; allowed: no such key in the first layer"},
      {{"\"k_eq_v\": true", "\"k_eq_v\": 1"}, "layers[0].attention.k_eq_v is 1"},
      {{"\"size\": 4", "\"size\": 0"}, "per_layer_inputs.size is 0"},
      {{"\"size\": 4, ", ""}, "per_layer_inputs.size is missing"},
      {{"\"proj_scale\": 0.5", "\"proj_scale\": -1"}, "per_layer_inputs.proj_scale is -1"},
      {{"\"embed_scale\": 2,", "\"embed_scale\": 2, \"x\": 1,"},
       "per_layer_inputs.x is an unknown"},
  };
  for (const auto& [edit, expected] : table) {
    const std::string message =
        message_of<InvalidArgument>([&] { (void)parse_decoder_config(shared_config({edit})); });
    EXPECT_THAT(message, HasSubstr(expected)) << edit.from << " -> " << edit.to;
  }
}

TEST(DecoderConfig, RefusesWhatIsOutOfRange) {
  const std::string many_layers = [] {
    std::string layer = tiny_config();
    layer = layer.substr(layer.find("{\"attention\""));
    layer = layer.substr(0, layer.find("}},") + 2);
    std::string list;
    for (int i = 0; i < 4096; ++i) list += layer + ",";
    return list;
  }();
  const std::vector<std::pair<Edit, std::string>> table = {
      {{"paceline-decoder-1", "paceline-decoder-2"}, "format is 'paceline-decoder-2'"},
      {{"\"tiny\"", "\"\""}, "name is ''"},
      {{"\"tiny\"", "7"}, "name is 7; allowed: a string"},
      {{"\"vocab_size\": 5,", ""}, "vocab_size is missing"},
      {{"\"vocab_size\": 5", "\"vocab_size\": 0"}, "vocab_size is 0; allowed: an integer from 1"},
      {{"\"vocab_size\": 5", "\"vocab_size\": 4294967297"}, "vocab_size is 4294967297"},
      {{"\"vocab_size\": 5", "\"vocab_size\": 8388609"}, "allowed: an integer from 1 to 8388608"},
      {{"\"vocab_size\": 5", "\"vocab_size\": 5.0"}, "vocab_size is 5.0"},
      {{"\"vocab_size\"", "\"vocab\""}, "vocab is an unknown key; allowed: format, name,"},
      {{"\"hidden_size\": 6", "\"hidden_size\": 1048577"}, "hidden_size is 1048577"},
      {{"\"hidden_size\": 6", "\"hidden_size\": -1"}, "hidden_size is -1"},
      {{"128", "1073741825"}, "max_position is 1073741825"},
      {{"1e-6", "0"}, "norm_eps is 0; allowed: a number above 0"},
      {{"1e-6", "1e-60"}, "norm_eps is 1e-60"},
      {{"1e-6", "1e-320"}, "norm_eps is 1e-320; allowed: a number above 0 that a float32 holds"},
      {{"1e-6", "1e-400"}, "norm_eps is 1e-400; allowed: a number above 0 that a float32 holds"},
      {{"1e-6", "1e999"}, "norm_eps is 1e999; allowed: a number that a double holds"},
      {{"128", std::string(5000, '9')}, "max_position is " + std::string(40, '9') + "...; allowed"},
      {{"\"tiny\"", "\"" + std::string(5000, 'x') + "\""}, "xxx...'; allowed: 1 to 256 bytes"},
      {{"1e-6", "1e39"}, "norm_eps is 1e39"},
      {{"1e-6", "\"1e-6\""}, "norm_eps is '1e-6'; allowed: a number"},
      {{"\"norm_weight_offset\": 1", "\"norm_weight_offset\": 0.5"}, "norm_weight_offset is 0.5"},
      {{"2.5", "1e300"}, "embed_scale is 1e300"},
      {{"30.0", "-1"}, "logit_soft_cap is -1"},
      {{"\"ties_lm_head\": false", "\"ties_lm_head\": 0"}, "ties_lm_head is 0; allowed: true or"},
      {{"[1, 0.5]", "[1, 0.5, 1]"}, "layers[0].attention.rope is 0; allowed: a rope with 2"},
      {{"[1, 0.5]", "[]"}, "ropes[0].inv_freq is a list of 0"},
      {{"[1, 0.5]", "[1, 1e30]"}, "ropes[0].inv_freq[1] is 1e30"},
      {{"[1, 0.5]", "[1, -1]"}, "ropes[0].inv_freq[1] is -1"},
      {{"\"scale\": 1.0}", "\"scale\": 0}"}, "ropes[0].scale is 0"},
      {{"\"scale\": 1.0}", "\"scale\": 1.0, \"x\": 1}"}, "ropes[0].x is an unknown key"},
      {{"\"full\"", "\"linear\""}, "layers[0].attention.kind is 'linear'; allowed: 'full', 's"},
      {{"\"window\": 0", "\"window\": 4"}, "layers[0].attention.window is 4; allowed: 0"},
      {{"\"window\": 9", "\"window\": 0"}, "layers[1].attention.window is 0; allowed: an integer"},
      {{"\"num_qo_heads\": 4", "\"num_qo_heads\": 5"}, "num_kv_heads is 2; allowed: divisors"},
      {{"\"num_kv_heads\": 2", "\"num_kv_heads\": 0"}, "layers[0].attention.num_kv_heads is 0"},
      {{"\"num_kv_heads\": 2", "\"num_kv_heads\": 8"}, "layers[0].attention.num_kv_heads is 8"},
      {{"\"head_dim\": 4", "\"head_dim\": 3"}, "head_dim is 3; allowed: an even number"},
      {{"\"head_dim\": 4", "\"head_dim\": 8"}, "rope is 0; allowed: a rope with 4"},
      {{"\"scale\": 0.5", "\"scale\": -0.5"}, "layers[0].attention.scale is -0.5"},
      {{"\"soft_cap\": 50", "\"soft_cap\": -50"}, "layers[1].attention.soft_cap is -50"},
      {{"\"rope\": 1", "\"rope\": 2"}, "layers[1].attention.rope is 2; allowed: an integer from"},
      {{"\"rope\": 1", "\"rope\": -1"}, "layers[1].attention.rope is -1"},
      {{"\"has_qk_norm\": true", "\"has_qk_norm\": null"}, "has_qk_norm is null"},
      {{"\"silu\"", "\"relu\""}, "layers[0].mlp.activation is 'relu'; allowed: 'silu'"},
      {{"\"intermediate\": 3", "\"intermediate\": 0"}, "layers[1].mlp.intermediate is 0"},
      {{"\"layers\": [", "\"layers\": [" + many_layers}, "layers is a list of 4098"},
      {{"\"layers\": [", "\"layers\": [], \"extra\": ["}, "extra is an unknown key"},
  };
  for (const auto& [edit, expected] : table) {
    const std::string message =
        message_of<InvalidArgument>([&] { (void)parse_decoder_config(tiny_config({edit})); });
    EXPECT_THAT(message, HasSubstr(expected)) << edit.from << " -> " << edit.to.substr(0, 40);
    EXPECT_THAT(message, HasSubstr("decoder config: "));
    EXPECT_LT(message.size(), 500U);
  }
  for (std::string_view text : {"", "[]", "{}", "{\"layers\": []}"}) {
    EXPECT_THROW((void)parse_decoder_config(text), InvalidArgument) << text;
  }
}

TEST(DecoderConfig, RefusesWeightsThatOverflowBytes) {
  const std::string config = tiny_config();
  const size_t begin = config.find("{\"attention\"");
  std::string layer = config.substr(begin, config.find("}},", begin) + 2 - begin);
  const auto edit = [&](std::string_view from, std::string_view to) {
    layer.replace(layer.find(from), from.size(), to);
  };
  edit("\"num_qo_heads\": 4", "\"num_qo_heads\": 4096");
  edit("\"num_kv_heads\": 2", "\"num_kv_heads\": 4096");
  edit("\"head_dim\": 4", "\"head_dim\": 4096");
  edit("\"intermediate\": 7", "\"intermediate\": 16777216");
  std::string frequencies = "1";
  for (int i = 1; i < 2048; ++i) frequencies += ",1";
  std::string layers = layer;
  for (int i = 1; i < 4096; ++i) layers += "," + layer;
  std::string json = config.substr(0, config.find("\"ropes\"")) + "\"ropes\": [{\"inv_freq\": [" +
                     frequencies + "], \"scale\": 1}], \"layers\": [" + layers + "]}";
  json.replace(json.find("\"hidden_size\": 6"), 16, "\"hidden_size\": 1048576");
  EXPECT_THAT(message_of<InvalidArgument>([&] { check_weight_bytes(parse_decoder_config(json)); }),
              HasSubstr("decoder config: layers is a list of 4096, hidden_size is 1048576 and "
                        "vocab_size is 5: the weights take more than"));
}

TEST(DecoderConfig, CountsEveryExpert) {
  const std::string config =
      mixture_config({{"\"hidden_size\": 160", "\"hidden_size\": 1048576"},
                      {"\"num_experts\": 6", "\"num_experts\": 1024"},
                      {"\"intermediate\": 96", "\"intermediate\": 16777216"},
                      {"\"qkv\": {\"format\": \"fp8\", \"scales\": [128, 128]},", ""},
                      {"\"gate_up\": {\"format\": \"mxfp4\"}, \"down\": {\"format\": \"mxfp4\"}",
                       "\"transposed\": true"}});
  const size_t begin = config.find("{\"attention\"");
  const std::string layer =
      config.substr(begin, config.rfind(",", config.rfind("{\"attention\"")) - begin);
  const auto parse = [&](int num_layers) {
    std::string layers = layer;
    for (int i = 1; i < num_layers; ++i) layers += "," + layer;
    check_weight_bytes(parse_decoder_config(config.substr(0, begin) + layers + "]}"));
  };
  parse(5);  // of 3 * 2^56 bytes each as float32, and little more
  EXPECT_THAT(message_of<InvalidArgument>([&] { parse(6); }),
              HasSubstr("the weights take more than 1152921504606846976 bytes"));
}

}  // namespace
}  // namespace paceline
