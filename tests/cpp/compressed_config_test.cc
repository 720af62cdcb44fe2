// SPDX-License-Identifier: Apache-2.0
// Descriptions with compressed attention, residual streams and experts by token: what is read, the
// weights that follow, and refusals.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <paceline/error.h>
#include <paceline/model.h>

#include "base/check.h"
#include "model/description/decoder_config.h"
#include "model/weights/linear_costs.h"
#include "model/weights/model_impl.h"
#include "model/weights/weight_layout.h"
#include "support/described_model.h"
#include "support/errors.h"

namespace paceline {
namespace {

using testing::Edit;
using ::testing::HasSubstr;
using testing::message_of;

std::string compressed_config(const std::vector<Edit>& edits = {}) {
  std::string json = R"({
    "format": "paceline-decoder-1", "name": "tiny", "vocab_size": 50, "hidden_size": 64,
    "max_position": 128, "norm_eps": 1e-6, "norm_weight_offset": 0, "embed_scale": 1,
    "logit_soft_cap": 0, "ties_lm_head": false, "has_post_norms": false,
    "streams": {"count": 4, "sinkhorn_iterations": 20, "eps": 1e-5},
    "ropes": [{"inv_freq": [1, 0.5, 0.25, 0.125], "scale": 1.0, "interleaved": true}],
    "layers": [
      {"attention": {"kind": "compressed", "num_qo_heads": 6, "head_dim": 32, "rope_head_dim": 8,
         "q_lora_rank": 96, "window": 16, "o_groups": 3, "o_lora_rank": 32, "scale": 0.25,
         "rope": 0, "qkv_a": {"format": "fp8", "scales": [128, 128]},
         "o_a": {"format": "mxfp4"},
         "compressor": {"tokens_per_entry": 4, "overlaps": true},
         "indexer": {"num_heads": 8, "head_dim": 10, "top_k": 12, "q": {"format": "mxfp4"}}},
       "mlp": {"intermediate": 32, "activation": "clamped_silu", "limit": 7, "has_bias": false,
         "num_experts": 8, "top_k": 3, "router": "sqrt_softplus", "has_router_bias": false,
         "has_token_experts": true, "normalises_weights": true, "per_expert": true,
         "gate_up": {"format": "mxfp4"}}},
      {"attention": {"kind": "compressed", "num_qo_heads": 2, "head_dim": 16, "rope_head_dim": 8,
         "q_lora_rank": 24, "window": 8, "o_groups": 1, "o_lora_rank": 5, "scale": 1, "rope": 0,
         "compressor": {"tokens_per_entry": 32, "overlaps": false}},
       "mlp": {"intermediate": 8, "activation": "silu", "has_bias": false}}]})";
  for (const Edit& edit : edits) testing::apply_edit(json, edit);
  return json;
}

TEST(CompressedConfig, IsRead) {
  const DecoderConfig config = parse_decoder_config(compressed_config());
  EXPECT_EQ(config.streams.count, 4);
  EXPECT_EQ(config.streams.sinkhorn_iterations, 20);
  EXPECT_EQ(config.streams.eps, 1e-5f);
  EXPECT_EQ(config.residual_width(), 256);
  const auto& a = std::get<CompressedAttention>(config.layers[0].attention);
  EXPECT_EQ(std::tuple(a.num_qo_heads, a.head_dim, a.rope_head_dim, a.q_lora_rank, a.window),
            std::tuple(6, 32, 8, 96, 16));
  EXPECT_EQ(std::tuple(a.o_groups, a.o_lora_rank, a.scale, a.rope), std::tuple(3, 32, 0.25f, 0));
  EXPECT_EQ(a.qkv_a.scales, Fp8Scales::kBlock);
  EXPECT_EQ(a.q_b.format, WeightFormat::kPlain);
  EXPECT_EQ(a.o_a.format, WeightFormat::kMxfp4);
  ASSERT_TRUE(a.compressor && a.indexer);
  EXPECT_EQ(std::tuple(a.compressor->tokens_per_entry, a.compressor->overlaps),
            std::tuple(4, true));
  EXPECT_EQ(std::tuple(a.indexer->num_heads, a.indexer->head_dim, a.indexer->top_k),
            std::tuple(8, 10, 12));
  EXPECT_EQ(a.indexer->q.format, WeightFormat::kMxfp4);
  EXPECT_EQ(a.q_rows(), 192);
  EXPECT_EQ(a.o_group_width(), 64);
  EXPECT_EQ(a.tail_width(), 2 * (64 + 20));
  EXPECT_EQ(a.compress_rows(), 2 * (64 + 20) + 8);
  const auto& mixture = std::get<MoeMlp>(config.layers[0].mlp);
  EXPECT_EQ(mixture.router, RouterRule::kSqrtSoftplus);
  EXPECT_TRUE(mixture.has_token_experts && mixture.scoring.normalises);
  EXPECT_EQ(mixture.expert.activation, Activation::kClampedSilu);
  EXPECT_EQ(mixture.expert.limit, 7);
  const auto& b = std::get<CompressedAttention>(config.layers[1].attention);
  EXPECT_FALSE(b.indexer);
  EXPECT_EQ(b.tail_width(), 32);
}

TEST(CompressedConfig, HasItsWeights) {
  const DecoderConfig config = parse_decoder_config(compressed_config());
  DecoderWeights weights;
  Carver carver(DType::kBFloat16, Device::kCpu, /*base=*/nullptr);
  lay_out(config, carver, weights);
  std::map<std::string, std::vector<int64_t>> shapes;
  std::map<std::string, DType> dtypes;
  for (const NamedWeight& named : carver.take_named_weights()) {
    dtypes[named.name] = named.dtype;
    if (named.name.find("attn.") == std::string::npos &&
        named.name.find("mix") == std::string::npos &&
        named.name.find("router") == std::string::npos) {
      continue;
    }
    shapes[named.name] = {named.dims().begin(), named.dims().end()};
  }
  const std::map<std::string, std::vector<int64_t>> expected = {
      {"end_mix.matrix", {4, 256}},
      {"end_mix.bias", {4}},
      {"end_mix.scale", {1}},
      {"layers.0.attn.q_a.weight", {96, 64}},
      {"layers.0.attn.q_a.scales", {1, 1}},
      {"layers.0.attn.kv.weight", {32, 64}},
      {"layers.0.attn.kv.scales", {1, 1}},
      {"layers.0.attn.q_a_norm.weight", {96}},
      {"layers.0.attn.kv_norm.weight", {32}},
      {"layers.0.attn.q_b.weight", {192, 96}},
      {"layers.0.attn.sinks", {6}},
      {"layers.0.attn.o_a.weight", {96, 2, 16}},
      {"layers.0.attn.o_a.scales", {96, 2}},
      {"layers.0.attn.o_b.weight", {64, 96}},
      {"layers.0.attn.compressor.kv.weight", {64, 64}},
      {"layers.0.attn.compressor.gate.weight", {64, 64}},
      {"layers.0.attn.compressor.position_bias", {4, 64}},
      {"layers.0.attn.compressor.norm.weight", {32}},
      {"layers.0.attn.indexer.kv.weight", {20, 64}},
      {"layers.0.attn.indexer.gate.weight", {20, 64}},
      {"layers.0.attn.indexer.weights.weight", {8, 64}},
      {"layers.0.attn.indexer.position_bias", {4, 20}},
      {"layers.0.attn.indexer.norm.weight", {10}},
      {"layers.0.attn.indexer.q.weight", {80, 3, 16}},
      {"layers.0.attn.indexer.q.scales", {80, 3}},
      {"layers.0.attn_mix.matrix", {24, 256}},
      {"layers.0.attn_mix.bias", {24}},
      {"layers.0.attn_mix.scale", {3}},
      {"layers.0.mlp_mix.matrix", {24, 256}},
      {"layers.0.mlp_mix.bias", {24}},
      {"layers.0.mlp_mix.scale", {3}},
      {"layers.0.mlp.router.weight", {8, 64}},
      {"layers.0.mlp.router.token_experts", {50, 3}},
      {"layers.1.attn.q_a.weight", {24, 64}},
      {"layers.1.attn.kv.weight", {16, 64}},
      {"layers.1.attn.q_a_norm.weight", {24}},
      {"layers.1.attn.kv_norm.weight", {16}},
      {"layers.1.attn.q_b.weight", {32, 24}},
      {"layers.1.attn.sinks", {2}},
      {"layers.1.attn.o_a.weight", {5, 32}},
      {"layers.1.attn.o_b.weight", {64, 5}},
      {"layers.1.attn.compressor.kv.weight", {16, 64}},
      {"layers.1.attn.compressor.gate.weight", {16, 64}},
      {"layers.1.attn.compressor.position_bias", {32, 16}},
      {"layers.1.attn.compressor.norm.weight", {16}},
      {"layers.1.attn_mix.matrix", {24, 256}},
      {"layers.1.attn_mix.bias", {24}},
      {"layers.1.attn_mix.scale", {3}},
      {"layers.1.mlp_mix.matrix", {24, 256}},
      {"layers.1.mlp_mix.bias", {24}},
      {"layers.1.mlp_mix.scale", {3}},
  };
  EXPECT_EQ(shapes, expected);
  EXPECT_EQ(dtypes.at("layers.0.attn_mix.matrix"), DType::kFloat32);
  EXPECT_EQ(dtypes.at("layers.0.mlp.router.token_experts"), DType::kInt32);
  const auto& its = std::get<CompressedAttentionWeights>(weights.layers[0].attention);
  EXPECT_EQ(its.o_a.num_groups, 3);
  EXPECT_EQ(std::tuple(its.o_a.weight.n, its.o_a.weight.k), std::tuple(96, 64));
  EXPECT_EQ(its.compress.weight.n, 176);
  int64_t mix_bytes = 0;
  for (const LinearCost& cost : linear_costs(config, DType::kBFloat16, Device::kCpu)) {
    if (cost.name.ends_with("mix.matrix")) mix_bytes += cost.bytes;
  }
  EXPECT_EQ(mix_bytes, (4 * 24 + 4) * 256 * 4);
}

// A block drafter of two stages for a target with four streams.
std::string block_config(const std::vector<Edit>& edits = {}) {
  std::vector<Edit> all = {
      {"\"ropes\"", R"("drafter": {"kind": "dspark", "target_hidden_size": 64,
         "aux_layers": [2, 5], "norm_before_residual": false, "norm_before_fc": false,
         "fc_norm": false, "norm_output": false, "has_fc_bias": false, "has_attn_norm": true,
         "has_final_norm": true, "owns_embedding": false, "owns_lm_head": false,
         "draft_vocab_size": 50, "fc": {"format": "fp8", "scales": [128, 128]},
         "block": {"size": 5, "mask_token": 49, "samples_from_anchor": true,
           "full": {"is_causal": false}, "sliding": {"is_causal": false, "is_anchored": true},
           "markov": {"kind": "vanilla", "rank": 6}}}, "ropes")"},
      {"\"compressor\": {\"tokens_per_entry\": 4, \"overlaps\": true},", "\"none\": 0"},
      {"\"none\": 0\n         \"indexer\": {\"num_heads\": 8, \"head_dim\": 10, \"top_k\": 12, "
       "\"q\": {\"format\": \"mxfp4\"}}}",
       "\"q_b\": {\"format\": \"mxfp4\"}}"},
      {", \"rope\": 0,\n         \"compressor\": {\"tokens_per_entry\": 32, \"overlaps\": false}}",
       ", \"rope\": 0}"}};
  all.insert(all.end(), edits.begin(), edits.end());
  return compressed_config(all);
}

TEST(CompressedConfig, CanBeThatOfABlockDrafter) {
  const DecoderConfig config = parse_decoder_config(block_config());
  ASSERT_TRUE(config.drafter);
  EXPECT_EQ(config.drafter->aux_layers, (std::vector<int32_t>{2, 5}));
  EXPECT_TRUE(config.drafter->averages_streams());
  DecoderWeights weights;
  Carver carver(DType::kBFloat16, Device::kCpu, /*base=*/nullptr);
  lay_out(config, carver, weights);
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const NamedWeight& named : carver.take_named_weights()) {
    if (named.name.find("layers.") != std::string::npos) continue;
    shapes[named.name] = {named.dims().begin(), named.dims().end()};
  }
  // fc reads one vector of each layer, the mean of its streams.
  const std::map<std::string, std::vector<int64_t>> expected = {
      {"fc.weight", {64, 128}},     {"fc.scales", {1, 1}},
      {"hidden_norm.weight", {64}}, {"final_norm.weight", {64}},
      {"end_mix.matrix", {4, 256}}, {"end_mix.bias", {4}},
      {"end_mix.scale", {1}},       {"markov.table.weight", {50, 6}},
      {"markov.weight", {50, 6}},
  };
  EXPECT_EQ(shapes, expected);
  const std::vector<std::pair<Edit, std::string>> refused = {
      {{"\"rope\": 0}",
        "\"rope\": 0, \"compressor\": {\"tokens_per_entry\": 4, "
        "\"overlaps\": true}}"},
       "layers[1].attention is an object of 11 keys; allowed: multi-head attention with keys and "
       "values of its own and qkv in plain format, or compressed attention without a compressor"},
      {{"\"streams\": {\"count\": 4, \"sinkhorn_iterations\": 20, \"eps\": 1e-5},", ""},
       "drafter.fc is an object of 2 keys; allowed: no such key without streams"},
      {{"\"kind\": \"dspark\"", "\"kind\": \"eagle3\""}, "drafter.fc is an unknown key"},
      {{"\"rank\": 6}", "\"rank\": 6}, \"confidence\": {\"before_norm\": true}"},
       "drafter.block.confidence.reads_token is missing"},
  };
  for (const auto& [edit, message] : refused) {
    EXPECT_THAT(message_of<InvalidArgument>([&, &change = edit] {
                  static_cast<void>(parse_decoder_config(block_config({change})));
                }),
                HasSubstr(message));
  }
}

TEST(CompressedConfig, CanNeedScalesThatArePowersOfTwo) {
  const std::string json = compressed_config(
      {{"\"scales\": [128, 128]", "\"scales\": [128, 128], \"exact_scales\": true"}});
  ModelBuilder dummy(json, DType::kBFloat16, Device::kCpu);
  dummy.fill_dummy(1);
  const std::shared_ptr<const Model> model = dummy.finish();
  const auto& layer = std::get<CompressedAttentionWeights>(model->weights.layers[0].attention);
  EXPECT_TRUE(layer.qkv_a.weight.has_exact_scales);
  ModelBuilder builder(json, DType::kBFloat16, Device::kCpu);
  const std::array<int64_t, 2> shape = {1, 1};
  const float scale = 0.3f;
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                builder.put("layers.0.attn.q_a.scales", DType::kFloat32, shape, {}, &scale);
              }),
              HasSubstr("'layers.0.attn.q_a.scales'[0, 0] is 0.3; allowed: powers of two"));
  const uint8_t exact = 120;  // e8m0
  builder.put("layers.0.attn.q_a.scales", DType::kUInt8, shape, {}, &exact);
}

TEST(CompressedConfig, RefusesWhatCannotBe) {
  const std::vector<std::pair<Edit, std::string>> table = {
      {{"\"o_groups\": 3", "\"o_groups\": 4"}, "o_groups is 4; allowed: divisors of num_qo_heads"},
      {{"\"head_dim\": 32", "\"head_dim\": 31"}, "head_dim is 31; allowed: an even number"},
      {{"\"head_dim\": 32", "\"head_dim\": 2000"}, "head_dim is 2000; allowed: an integer from 2"},
      {{"\"rope_head_dim\": 8", "\"rope_head_dim\": 6"},
       "rope is 0; allowed: a rope with 3 inv_freq, rope_head_dim / 2; this one has 4"},
      {{"\"num_heads\": 8", "\"num_heads\": 6"}, "num_heads is 6; allowed: a multiple of 4"},
      {{"\"head_dim\": 10", "\"head_dim\": 6"},
       "indexer.head_dim is 6; allowed: an integer from 8"},
      {{"\"top_k\": 12", "\"top_k\": 33"},
       "indexer.top_k is 33; allowed: 1 to 32, the entries of max_position (128) tokens"},
      {{"\"tokens_per_entry\": 4", "\"tokens_per_entry\": 1"}, "tokens_per_entry is 1; allowed"},
      {{"\"compressor\": {\"tokens_per_entry\": 4, \"overlaps\": true},", ""},
       "indexer is an object of 4 keys; allowed: no such key without a compressor"},
      {{"\"q_lora_rank\": 96", "\"q_lora_rank\": 90"},
       "q.format is 'mxfp4'; allowed: a format only where q_lora_rank is a multiple of 32"},
      {{"\"count\": 4", "\"count\": 1"}, "streams.count is 1; allowed: an integer from 2 to 8"},
      {{"\"has_post_norms\": false", "\"has_post_norms\": true"},
       "streams is an object of 3 keys; allowed: no such key with has_post_norms"},
      {{"\"router\": \"sqrt_softplus\"", "\"router\": \"sigmoid\""},
       "has_token_experts is true; allowed: true only where router is 'sqrt_softplus'"},
      {{"\"limit\": 7, ", ""}, "limit is missing"},
      {{"\"limit\": 7", "\"limit\": 7, \"alpha\": 1"}, "alpha is 1; allowed: no such key where"},
  };
  for (const auto& [edit, expected] : table) {
    EXPECT_THAT(message_of<InvalidArgument>([&, &change = edit] {
                  static_cast<void>(parse_decoder_config(compressed_config({change})));
                }),
                HasSubstr(expected));
  }
}

TEST(CompressedConfig, CanHaveAConfidenceHeadOfTheSumOfTheStreams) {
  using Dims = std::vector<int64_t>;
  for (const bool reads_token : {false, true}) {
    for (const bool has_bias : {false, true}) {
      const std::string head =
          concat(R"("rank": 6}, "confidence": {"before_norm": true, "reads_token": )",
                 reads_token ? "true" : "false", has_bias ? "}" : R"(, "lacks_bias": true})");
      const DecoderConfig config = parse_decoder_config(block_config({{"\"rank\": 6}", head}}));
      const BlockConfig& block = config.drafter->block;
      EXPECT_EQ(block.confidence,
                reads_token ? ConfidenceHead::kHiddenAndToken : ConfidenceHead::kHidden);
      EXPECT_TRUE(block.confidence_before_norm);
      DecoderWeights weights;
      Carver carver(DType::kBFloat16, Device::kCpu, /*base=*/nullptr);
      lay_out(config, carver, weights);
      std::map<std::string, std::pair<DType, Dims>> found;
      for (const NamedWeight& named : carver.take_named_weights()) {
        if (!named.name.starts_with("confidence")) continue;
        found[named.name] = {named.dtype, {named.dims().begin(), named.dims().end()}};
      }
      std::map<std::string, std::pair<DType, Dims>> expected = {
          {"confidence.weight", {DType::kFloat32, {1, reads_token ? 70 : 64}}}};
      if (has_bias) expected["confidence.bias"] = {DType::kFloat32, {1}};
      EXPECT_EQ(found, expected);
    }
  }
}

}  // namespace
}  // namespace paceline
