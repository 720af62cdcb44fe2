// SPDX-License-Identifier: Apache-2.0
// Where the tensors of mixtures and of scaled formats lie in the arena, row-major and packed.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "base/check.h"
#include "model/weights/linear.h"
#include "model/weights/linear_costs.h"
#include "model/weights/visit_weights.h"
#include "model/weights/weight_layout.h"
#include "support/described_model.h"
#include "support/format_tensors.h"
#include "support/packed_weights.h"

namespace paceline {
namespace {

using testing::deepseek_config;
using ::testing::ElementsAre;
using testing::latent_config;
using testing::lay_out_on_gpu;
using testing::mixture_config;
using testing::nvfp4_config;

// Name, shape and place of every tensor of a mixture and of scaled formats, written out by hand.
TEST(WeightLayout, GivesTensorsOfFormatsTheirShapesAndScales) {
  const DecoderConfig config = parse_decoder_config(mixture_config());
  DecoderWeights weights;
  Carver counting(DType::kBFloat16, Device::kCpu, /*base=*/nullptr);
  lay_out(config, counting, weights);
  std::vector<std::byte> arena(static_cast<size_t>(counting.bytes()));
  Carver carver(DType::kBFloat16, Device::kCpu, arena.data());
  lay_out(config, carver, weights);
  std::map<std::string, NamedWeight> named;
  for (NamedWeight& weight : carver.take_named_weights()) named[weight.name] = std::move(weight);
  const auto expect = [&](const std::string& name, const std::vector<int64_t>& shape, DType dtype,
                          WeightKind kind, int64_t bytes) {
    SCOPED_TRACE(name);
    ASSERT_TRUE(named.contains(name));
    const NamedWeight& weight = named[name];
    EXPECT_THAT(weight.dims(), ::testing::ElementsAreArray(shape));
    EXPECT_EQ(weight.dtype, dtype);
    EXPECT_EQ(weight.kind, kind);
    EXPECT_EQ(weight.arena_elements() * dtype_bytes(dtype), bytes);
  };
  const auto offset_of = [&](const void* data) {
    return static_cast<const std::byte*>(data) - arena.data();
  };
  constexpr DType kCode = DType::kFloat8E4M3;
  // q has 160 rows and k 32: tiles of 32 rows lie in one part, and a scale for 128 comes four
  // times.
  expect("layers.0.attn.q.weight", {160, 160}, kCode, WeightKind::kCodes, 160 * 160);
  expect("layers.0.attn.k.weight", {32, 160}, kCode, WeightKind::kCodes, 32 * 160);
  expect("layers.0.attn.q.scales", {2, 2}, DType::kFloat32, WeightKind::kFp8Scales, 5 * 2 * 4);
  expect("layers.0.attn.v.scales", {1, 2}, DType::kFloat32, WeightKind::kFp8Scales, 1 * 2 * 4);
  EXPECT_EQ(named["layers.0.attn.q.scales"].repeats, 4);
  expect("layers.0.attn.o.scales", {160, 1}, DType::kFloat32, WeightKind::kFp8Scales, 160 * 4);
  EXPECT_EQ(named["layers.0.attn.o.scales"].repeats, 1);
  expect("layers.0.attn.sinks", {10}, DType::kFloat32, WeightKind::kNumbers, 40);
  expect("layers.0.mlp.router.weight", {6, 160}, DType::kBFloat16, WeightKind::kNumbers, 1920);
  expect("layers.0.mlp.router.bias", {6}, DType::kFloat32, WeightKind::kNumbers, 24);
  expect("layers.0.mlp.experts.gate_up.weight", {6, 192, 5, 16}, DType::kUInt8, WeightKind::kCodes,
         6 * 192 * 80);
  expect("layers.0.mlp.experts.gate_up.scales", {6, 192, 5}, DType::kUInt8,
         WeightKind::kMxfp4Scales, 6 * 192 * 5);
  expect("layers.0.mlp.experts.gate_up.bias", {6, 192}, DType::kFloat32, WeightKind::kNumbers,
         6 * 192 * 4);
  expect("layers.0.mlp.experts.down.weight", {6, 160, 3, 16}, DType::kUInt8, WeightKind::kCodes,
         6 * 160 * 48);
  expect("layers.0.mlp.experts.down.bias", {6, 160}, DType::kFloat32, WeightKind::kNumbers,
         6 * 160 * 4);
  expect("layers.1.mlp.gate.scales", {1}, DType::kFloat32, WeightKind::kFp8Scales, 64 * 4);
  EXPECT_EQ(named["layers.1.mlp.gate.scales"].repeats, 64);
  expect("layers.1.mlp.down.weight", {160, 2, 16}, DType::kUInt8, WeightKind::kCodes, 160 * 32);
  expect("layers.1.mlp.down.scales", {160, 2}, DType::kUInt8, WeightKind::kMxfp4Scales, 320);
  EXPECT_EQ(named.size(), 38U);

  const LayerWeights& layer = weights.layers[0];
  const auto& attention = std::get<MultiHeadAttentionWeights>(layer.attention);
  const WeightMatrix& qkv = attention.qkv.weight;
  EXPECT_EQ(offset_of(qkv.data), named["layers.0.attn.q.weight"].offset);
  EXPECT_EQ(offset_of(qkv.scales), named["layers.0.attn.q.scales"].offset);
  EXPECT_EQ(named["layers.0.attn.k.scales"].offset, named["layers.0.attn.q.scales"].offset + 40);
  EXPECT_EQ(std::tuple(qkv.n, qkv.k, qkv.scale_rows, qkv.scale_cols),
            std::tuple(224, 160, 32, 128));
  EXPECT_EQ(qkv.dtype, DType::kBFloat16);
  EXPECT_EQ(qkv.bytes(), 224 * 160 + 7 * 2 * 4);
  const WeightMatrix& o = attention.o.weight;
  EXPECT_EQ(std::tuple(o.scale_rows, o.scale_cols), std::tuple(1, 160));
  EXPECT_EQ(offset_of(attention.sinks), named["layers.0.attn.sinks"].offset);
  const auto& mixture = std::get<MoeMlpWeights>(layer.mlp);
  EXPECT_EQ(offset_of(mixture.router.bias), named["layers.0.mlp.router.bias"].offset);
  const ExpertMatrices& gate_up = mixture.gate_up.weight;
  EXPECT_EQ(gate_up.num_experts, 6);
  EXPECT_EQ(std::tuple(gate_up.first.n, gate_up.first.k), std::tuple(192, 160));
  EXPECT_EQ(gate_up.data_stride, 192 * 80);
  EXPECT_EQ(gate_up.scales_stride, 192 * 5);
  EXPECT_EQ(offset_of(gate_up.first.scales), named["layers.0.mlp.experts.gate_up.scales"].offset);
  EXPECT_EQ(offset_of(mixture.down.bias), named["layers.0.mlp.experts.down.bias"].offset);

  std::vector<std::string> linears;
  for_each_linear(config, weights, [&](const auto& linear, const LinearShape& shape) {
    static_cast<void>(linear);
    linears.push_back(concat(shape.name, " ", shape.num_experts()));
  });
  EXPECT_THAT(linears,
              ElementsAre("lm_head 0", "layers.0.attn.qkv 0", "layers.0.attn.o 0",
                          "layers.0.mlp.router 0", "layers.0.mlp.experts.gate_up 6",
                          "layers.0.mlp.experts.down 6", "layers.1.attn.qkv 0", "layers.1.attn.o 0",
                          "layers.1.mlp.gate_up 0", "layers.1.mlp.down 0"));
}

// The elements and scales of nvfp4 are packed in bfloat16, with the bytes of row-major ones where
// tiles are whole.
TEST(WeightLayout, HasNvfp4InRowsOrTiles) {
  const DecoderConfig config = parse_decoder_config(nvfp4_config());
  DecoderWeights weights;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const bool is_packed = dtype == DType::kBFloat16;
    const std::map<std::string, NamedWeight> named = lay_out_on_gpu(config, dtype, weights);
    const NamedWeight& elements = named.at("layers.0.attn.k.weight");
    const NamedWeight& scales = named.at("layers.0.attn.k.scales");
    EXPECT_THAT(elements.dims(), ElementsAre(32, 10, 8));
    EXPECT_THAT(scales.dims(), ElementsAre(32, 10));
    EXPECT_EQ(std::tuple(elements.dtype, elements.kind),
              std::tuple(DType::kUInt8, WeightKind::kCodes));
    EXPECT_EQ(std::tuple(scales.dtype, scales.kind),
              std::tuple(DType::kFloat32, WeightKind::kNvfp4Scales));
    const WeightMatrix& qkv =
        std::get<MultiHeadAttentionWeights>(weights.layers[0].attention).qkv.weight;
    EXPECT_EQ(std::tuple(qkv.format, qkv.scale_rows, qkv.scale_cols),
              std::tuple(WeightFormat::kNvfp4, 1, 16));
    EXPECT_EQ(qkv.is_packed(), is_packed);
    const ExpertMatrices& gate_up = std::get<MoeMlpWeights>(weights.layers[0].mlp).gate_up.weight;
    const NamedWeight& q = named.at("layers.0.attn.q.weight");
    const NamedWeight& q_scales = named.at("layers.0.attn.q.scales");
    if (!is_packed) {
      for (const auto& [name, weight] : named) EXPECT_FALSE(weight.packed) << name;
      // The rows of k follow those of q.
      EXPECT_EQ(elements.offset, q.offset + 160 * 80);
      EXPECT_EQ(scales.offset, q_scales.offset + 160 * 10 * 4);
      EXPECT_EQ(gate_up.data_stride, 192 * 80);
      EXPECT_EQ(gate_up.scales_stride, 192 * 10 * 4);
      continue;
    }
    ASSERT_TRUE(elements.packed && scales.packed);
    EXPECT_EQ(elements.packed->kind, PackedKind::kMxfp4);
    EXPECT_EQ(scales.packed->kind, PackedKind::kNvfp4Scales);
    EXPECT_EQ(std::tuple(elements.offset, scales.offset), std::tuple(q.offset, q_scales.offset));
    EXPECT_EQ(
        std::tuple(scales.packed->first_row, scales.packed->num_rows, scales.packed->row_bytes),
        std::tuple(160, 32, 10 * 4));
    EXPECT_EQ(qkv.scales_bytes(), 14 * 3 * 256);   // 224 x 160
    EXPECT_EQ(gate_up.data_stride, 12 * 3 * 512);  // 192 x 160
    EXPECT_EQ(gate_up.scales_stride, 12 * 3 * 256);
    const NamedWeight& of_experts = named.at("layers.0.mlp.experts.gate_up.scales");
    ASSERT_TRUE(of_experts.packed);
    EXPECT_EQ(of_experts.packed->matrix_stride, gate_up.scales_stride);
    for (const LinearCost& cost : linear_costs(config, dtype, Device::kCuda)) {
      if (cost.name != "layers.0.mlp.experts.gate_up") continue;
      EXPECT_EQ(cost.bytes, 12 * 3 * (512 + 256));
    }
  }
}

TEST(LinearCosts, AreThoseOfTheFormats) {
  const std::vector<LinearCost> costs =
      linear_costs(parse_decoder_config(mixture_config()), DType::kBFloat16, Device::kCpu);
  std::map<std::string, std::tuple<int64_t, int64_t, int64_t, int32_t>> by_name;
  for (const LinearCost& cost : costs) {
    by_name[cost.name] = {cost.rows, cost.cols, cost.bytes, cost.num_experts};
  }
  EXPECT_EQ(by_name["layers.0.attn.qkv"], std::tuple(224, 160, 224 * 160 + 14 * 4, 0));
  EXPECT_EQ(by_name["layers.0.mlp.router"], std::tuple(6, 160, 6 * 160 * 2, 0));
  // Of one expert.
  EXPECT_EQ(by_name["layers.0.mlp.experts.down"], std::tuple(160, 96, 160 * (48 + 3), 6));
  EXPECT_EQ(by_name["layers.1.mlp.gate_up"], std::tuple(128, 160, 128 * 160 + 128 * 4, 0));
  EXPECT_EQ(by_name["layers.1.mlp.down"], std::tuple(160, 64, 160 * (32 + 2), 0));
  EXPECT_EQ(by_name.size(), 10U);
}

TEST(WeightLayout, LinearsHaveTheirShardAxis) {
  const DecoderConfig config = parse_decoder_config(mixture_config());
  DecoderWeights weights;
  Carver carver(DType::kBFloat16, Device::kCpu, /*base=*/nullptr);
  lay_out(config, carver, weights);
  const std::map<std::string, ShardAxis> axes = {
      {"qkv", ShardAxis::kRows},     {"o", ShardAxis::kRows},    {"router", ShardAxis::kNone},
      {"gate_up", ShardAxis::kRows}, {"down", ShardAxis::kRows}, {"lm_head", ShardAxis::kRows}};
  for_each_linear(config, weights, [&](const auto& linear, const LinearShape& shape) {
    EXPECT_EQ(linear.shard, axes.at(shape.name.substr(shape.name.rfind('.') + 1))) << shape.name;
  });
}

TEST(WeightLayout, LatentAttention) {
  const DecoderConfig config = parse_decoder_config(latent_config());
  DecoderWeights weights;
  Carver carver(DType::kBFloat16, Device::kCpu, /*base=*/nullptr);
  lay_out(config, carver, weights);
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const NamedWeight& named : carver.take_named_weights()) {
    if (!named.name.starts_with("layers.")) continue;
    shapes[named.name] = {named.dims().begin(), named.dims().end()};
  }
  const std::map<std::string, std::vector<int64_t>> expected = {
      {"layers.0.attn_norm.weight", {160}},      {"layers.0.attn.q_a.weight", {96, 160}},
      {"layers.0.attn.q_a.scales", {1, 2}},      {"layers.0.attn.q_a_norm.weight", {96}},
      {"layers.0.attn.q_b.weight", {80, 3, 16}}, {"layers.0.attn.q_b.scales", {80, 3}},
      {"layers.0.attn.kv_a.weight", {32, 160}},  {"layers.0.attn.kv_a.scales", {1, 2}},
      {"layers.0.attn.kv_a_norm.weight", {24}},  {"layers.0.attn.kv_b.weight", {112, 24}},
      {"layers.0.attn.o.weight", {160, 64}},     {"layers.0.attn.o.scales", {160, 1}},
      {"layers.0.mlp_norm.weight", {160}},       {"layers.0.mlp.gate.weight", {64, 160}},
      {"layers.0.mlp.up.weight", {64, 160}},     {"layers.0.mlp.down.weight", {160, 64}},
      {"layers.1.attn_norm.weight", {160}},      {"layers.1.attn.q.weight", {39, 160}},
      {"layers.1.attn.kv_a.weight", {26, 160}},  {"layers.1.attn.kv_a_norm.weight", {20}},
      {"layers.1.attn.kv_b.weight", {36, 20}},   {"layers.1.attn.o.weight", {160, 15}},
      {"layers.1.mlp_norm.weight", {160}},       {"layers.1.mlp.gate.weight", {64, 160}},
      {"layers.1.mlp.up.weight", {64, 160}},     {"layers.1.mlp.down.weight", {160, 64}},
  };
  EXPECT_EQ(shapes, expected);

  const auto& attention = std::get<LatentAttentionWeights>(weights.layers[0].attention);
  EXPECT_EQ(std::tuple(attention.qkv_a.weight.n, attention.qkv_a.weight.k), std::tuple(128, 160));
  EXPECT_EQ(std::tuple(attention.kv_b.weight.n, attention.kv_b.weight.k), std::tuple(112, 24));
  std::vector<std::string> by_head;
  for_each_linear(config, weights, [&](const auto& linear, const LinearShape& shape) {
    static_cast<void>(linear);
    if (shape.is_by_head) by_head.push_back(shape.name);
  });
  EXPECT_THAT(by_head, ElementsAre("layers.0.attn.kv_b", "layers.1.attn.kv_b"));
}

// The tensors of an expert are joined by lying side by side, in the order of the experts.
TEST(WeightLayout, JoinsTheTensorsOfEveryExpert) {
  const DecoderConfig config = parse_decoder_config(deepseek_config());
  DecoderWeights weights;
  Carver carver(DType::kBFloat16, Device::kCpu, /*base=*/nullptr);
  lay_out(config, carver, weights);
  std::map<std::string, NamedWeight> named;
  for (NamedWeight& weight : carver.take_named_weights()) named[weight.name] = weight;
  const std::string experts = "layers.0.mlp.experts.";
  const auto offset = [&](const std::string& name) {
    EXPECT_TRUE(named.contains(name)) << name;
    return named[name].offset;
  };
  for (int64_t e = 0; e < 6; ++e) {
    const std::string gate = concat(experts, "gate.", e);
    EXPECT_THAT(named[gate + ".weight"].dims(), ElementsAre(96, 5, 16));
    EXPECT_THAT(named[gate + ".scales"].dims(), ElementsAre(96, 5));
    EXPECT_THAT(named[concat(experts, "down.", e, ".weight")].dims(), ElementsAre(160, 3, 16));
    const int64_t first = offset(gate + ".weight");
    EXPECT_EQ(first, offset(experts + "gate.0.weight") + e * 192 * 80);
    EXPECT_EQ(offset(concat(experts, "up.", e, ".weight")), first + 96 * 80);
    EXPECT_EQ(offset(concat(experts, "up.", e, ".scales")),
              offset(experts + "gate.0.scales") + e * 192 * 5 + 96 * 5);
  }
  const auto& mixture = std::get<MoeMlpWeights>(weights.layers[0].mlp);
  EXPECT_EQ(mixture.gate_up.weight.num_experts, 6);
  EXPECT_EQ(mixture.gate_up.weight.data_stride, 192 * 80);
  EXPECT_EQ(mixture.gate_up.weight.scales_stride, 192 * 5);
  const NamedWeight& correction = named["layers.0.mlp.router.correction.bias"];
  EXPECT_THAT(correction.dims(), ElementsAre(6));
  EXPECT_EQ(correction.dummy, DummyKind::kZero);
  EXPECT_EQ(mixture.shared.gate_up.weight.n, 80);
  EXPECT_EQ(mixture.shared.down.weight.k, 40);
  EXPECT_THAT(named["layers.0.mlp.shared.down.weight"].dims(), ElementsAre(160, 40));
  EXPECT_THAT(named["layers.0.mlp.shared.up.bias"].dims(), ElementsAre(40));

  std::map<std::string, LinearCost> costs;
  for (const LinearCost& cost : linear_costs(config, DType::kBFloat16, Device::kCpu))
    costs[cost.name] = cost;
  EXPECT_EQ(costs["layers.0.mlp.experts.gate_up"].rows, 192);
  EXPECT_EQ(costs["layers.0.mlp.experts.gate_up"].num_experts, 6);
  EXPECT_EQ(costs["layers.0.mlp.shared.gate_up"].bytes, 80 * 160 * 2);
  EXPECT_EQ(costs["layers.0.mlp.shared.gate_up"].num_experts, 0);
}

TEST(WeightLayout, TheGateOfASharedExpertIsTheLastRowOfTheRouter) {
  const DecoderConfig config = parse_decoder_config(
      deepseek_config({{"\"per_expert\": true", "\"per_expert\": true, \"shared_gate\": true"}}));
  DecoderWeights weights;
  Carver carver(DType::kBFloat16, Device::kCpu, /*base=*/nullptr);
  lay_out(config, carver, weights);
  std::map<std::string, NamedWeight> named;
  for (NamedWeight& weight : carver.take_named_weights()) named[weight.name] = weight;
  const NamedWeight& router = named["layers.0.mlp.router.weight"];
  const NamedWeight& gate = named["layers.0.mlp.shared_gate.weight"];
  EXPECT_THAT(router.dims(), ElementsAre(6, 160));
  EXPECT_THAT(gate.dims(), ElementsAre(1, 160));
  EXPECT_EQ(gate.offset, router.offset + 6 * 160 * 2);
  EXPECT_EQ(std::get<MoeMlpWeights>(weights.layers[0].mlp).router.weight.n, 7);
}

TEST(WeightLayout, TransposesPlainExperts) {
  const DecoderConfig config = parse_decoder_config(mixture_config(
      {{"\"interleaved\": true,", "\"transposed\": true"},
       {"\"gate_up\": {\"format\": \"mxfp4\"}, \"down\": {\"format\": \"mxfp4\"}", ""}}));
  DecoderWeights weights;
  Carver carver(DType::kFloat32, Device::kCpu, /*base=*/nullptr);
  lay_out(config, carver, weights);
  for (const NamedWeight& named : carver.take_named_weights()) {
    if (named.name == "layers.0.mlp.experts.gate_up.weight") {
      EXPECT_THAT(named.dims(), ElementsAre(6, 160, 192));
      EXPECT_EQ(named.kind, WeightKind::kTransposed);
    } else if (named.name == "layers.0.mlp.experts.down.weight") {
      EXPECT_THAT(named.dims(), ElementsAre(6, 96, 160));
      EXPECT_EQ(named.kind, WeightKind::kTransposed);
    } else {
      EXPECT_NE(named.kind, WeightKind::kTransposed) << named.name;
    }
  }
  const ExpertMatrices& down = std::get<MoeMlpWeights>(weights.layers[0].mlp).down.weight;
  EXPECT_EQ(std::tuple(down.first.n, down.first.k), std::tuple(160, 96));
  EXPECT_EQ(down.data_stride, 160 * 96 * 4);
}

// On a GPU, matrices of bfloat16 models with scales lie packed: in tiles of 16 x 64, padded.
TEST(WeightLayout, IsPackedOnAGpu) {
  const DecoderConfig config = parse_decoder_config(mixture_config());
  DecoderWeights weights;
  std::map<std::string, NamedWeight> named = lay_out_on_gpu(config, DType::kBFloat16, weights);
  const WeightMatrix& qkv =
      std::get<MultiHeadAttentionWeights>(weights.layers[0].attention).qkv.weight;
  EXPECT_TRUE(qkv.is_packed());
  EXPECT_EQ(qkv.data_bytes(), 14 * 3 * 1024);  // 224 x 160
  EXPECT_EQ(qkv.scales_bytes(), 7 * 2 * 4);
  const NamedWeight& k = named.at("layers.0.attn.k.weight");
  ASSERT_TRUE(k.packed);
  EXPECT_EQ(k.offset, named.at("layers.0.attn.q.weight").offset);
  EXPECT_EQ(std::tuple(k.packed->first_row, k.packed->num_rows, k.packed->row_bytes),
            std::tuple(160, 32, 160));
  EXPECT_EQ(k.packed->kind, PackedKind::kFp8);
  EXPECT_FALSE(named.at("layers.0.attn.k.scales").packed);
  EXPECT_EQ(named.at("layers.0.attn.q.scales").offset, k.offset + qkv.data_bytes());
  const ExpertMatrices& gate_up =
      std::get<MoeMlpWeights>(weights.layers[0].mlp).gate_up.weight;  // 6 of 192 x 160
  EXPECT_EQ(gate_up.data_stride, 12 * 3 * 512);
  EXPECT_EQ(gate_up.scales_stride, 12 * 3 * 32);
  const NamedWeight& elements = named.at("layers.0.mlp.experts.gate_up.weight");
  const NamedWeight& scales = named.at("layers.0.mlp.experts.gate_up.scales");
  ASSERT_TRUE(elements.packed && scales.packed);
  EXPECT_EQ(elements.packed->kind, PackedKind::kMxfp4);
  EXPECT_EQ(elements.packed->matrix_stride, gate_up.data_stride);
  EXPECT_EQ(scales.offset, elements.offset + 6 * gate_up.data_stride);
  EXPECT_EQ(scales.packed->kind, PackedKind::kMxfp4Scales);
  EXPECT_EQ(std::tuple(scales.packed->row_bytes, scales.packed->matrix_stride),
            std::tuple(5, gate_up.scales_stride));
  EXPECT_EQ(named.at("layers.0.mlp.experts.down.weight").offset,
            scales.offset + 6 * gate_up.scales_stride);
  std::map<std::string, int64_t> bytes;
  for (const LinearCost& cost : linear_costs(config, DType::kBFloat16, Device::kCuda)) {
    bytes[cost.name] = cost.bytes;
  }
  EXPECT_EQ(bytes.at("layers.0.attn.qkv"), 14 * 3 * 1024 + 7 * 2 * 4);
  EXPECT_EQ(bytes.at("layers.0.mlp.experts.gate_up"), 12 * 3 * (512 + 32));
  for (const auto& [name, weight] : lay_out_on_gpu(config, DType::kFloat32, weights)) {
    EXPECT_FALSE(weight.packed) << name;
  }
}

// So do the tensors of every expert.
TEST(WeightLayout, PacksTheTensorsOfEveryExpert) {
  DecoderWeights weights;
  Carver carver(DType::kBFloat16, Device::kCuda, /*base=*/nullptr);
  lay_out(parse_decoder_config(deepseek_config()), carver, weights);
  std::map<std::string, NamedWeight> named;
  for (NamedWeight& weight : carver.take_named_weights()) named[weight.name] = weight;
  const std::string experts = "layers.0.mlp.experts.";
  constexpr int64_t kTiles = 12 * 3;  // of 192 x 160
  for (int64_t e = 0; e < 6; ++e) {
    for (const auto& [suffix, bytes] : {std::pair{".weight", 512}, {".scales", 32}}) {
      const NamedWeight& gate = named.at(concat(experts, "gate.", e, suffix));
      const NamedWeight& up = named.at(concat(experts, "up.", e, suffix));
      ASSERT_TRUE(gate.packed && up.packed);
      const int64_t first = named.at(concat(experts, "gate.0", suffix)).offset;
      EXPECT_EQ(gate.offset, first + e * kTiles * bytes);
      EXPECT_EQ(up.offset, gate.offset);
      EXPECT_EQ(std::tuple(gate.packed->first_row, gate.packed->num_rows), std::tuple(0, 96));
      EXPECT_EQ(std::tuple(up.packed->first_row, up.packed->num_rows), std::tuple(96, 96));
    }
  }
  EXPECT_EQ(named.at(experts + "down.0.weight").offset,
            named.at(experts + "gate.0.scales").offset + 6 * kTiles * 32);
}

// A shared expert of the others' form is their last matrix. Its tensors keep their place in the
// list, which decides dummy values.
TEST(WeightLayout, PutsASharedExpertBehindTheOthers) {
  const DecoderConfig config = parse_decoder_config(
      deepseek_config({{R"("intermediate": 40, "activation": "gelu_tanh",
         "has_bias": true)",
                        R"("intermediate": 96, "activation": "silu", "has_bias": false,
         "gate_up": {"format": "mxfp4"}, "down": {"format": "mxfp4"})"}}));
  for (const Device device : {Device::kCpu, Device::kCuda}) {
    DecoderWeights weights;
    Carver carver(DType::kBFloat16, device, /*base=*/nullptr);
    lay_out(config, carver, weights);
    const auto& mixture = std::get<MoeMlpWeights>(weights.layers[0].mlp);
    std::map<std::string, NamedWeight> named;
    std::vector<std::string> names;
    for (NamedWeight& weight : carver.take_named_weights()) {
      if (weight.name.starts_with("layers.0.mlp.")) names.push_back(weight.name.substr(13));
      named[weight.name] = weight;
    }
    const auto at = [&](const std::string& name) { return named.at("layers.0.mlp." + name); };
    for (const auto& [first, part, all] :
         {std::tuple{"experts.gate.0", "shared.gate", mixture.gate_up.weight},
          {"experts.gate.0", "shared.up", mixture.gate_up.weight},
          {"experts.down.0", "shared.down", mixture.down.weight}}) {
      const bool is_up = part == std::string("shared.up");
      const bool is_second = is_up && device == Device::kCpu;
      EXPECT_EQ(
          at(concat(part, ".weight")).offset,
          at(concat(first, ".weight")).offset + 6 * all.data_stride + (is_second ? 96 * 80 : 0));
      EXPECT_EQ(
          at(concat(part, ".scales")).offset,
          at(concat(first, ".scales")).offset + 6 * all.scales_stride + (is_second ? 96 * 5 : 0));
      ASSERT_EQ(at(concat(part, ".weight")).packed.has_value(), device == Device::kCuda);
      if (is_up && device == Device::kCuda) {
        EXPECT_EQ(at("shared.up.weight").packed->first_row, 96);
      }
    }
    const WeightMatrix& expert = mixture.gate_up.weight.first;
    EXPECT_EQ(mixture.gate_up.weight.num_experts, 6);
    EXPECT_EQ(mixture.shared.gate_up.weight.bytes(), expert.bytes());
    // Regions follow each other: seven matrices, seven times their scales, the next matrices.
    const auto next_region = [](int64_t end) { return (end + 63) / 64 * 64; };
    EXPECT_EQ(at("experts.gate.0.scales").offset,
              next_region(at("experts.gate.0.weight").offset + 7 * expert.data_bytes()));
    EXPECT_EQ(at("experts.down.0.weight").offset,
              next_region(at("experts.gate.0.scales").offset + 7 * expert.scales_bytes()));
    EXPECT_THAT(std::vector(names.end() - 6, names.end()),
                ElementsAre("shared.gate.weight", "shared.up.weight", "shared.gate.scales",
                            "shared.up.scales", "shared.down.weight", "shared.down.scales"));
    for (const LinearCost& cost : linear_costs(config, DType::kBFloat16, device)) {
      if (cost.name == "layers.0.mlp.experts.gate_up") {
        EXPECT_EQ(cost.num_experts, 6);
      }
      if (cost.name != "layers.0.mlp.shared.gate_up") continue;
      EXPECT_EQ(cost.num_experts, 0);
      EXPECT_EQ(cost.bytes, expert.bytes());
    }
  }
}

// The packer that tests compare a GPU's with.

uint32_t word_at(const std::vector<uint8_t>& bytes, size_t word) {
  uint32_t bits = 0;
  std::memcpy(&bits, bytes.data() + 4 * word, sizeof(bits));
  return bits;
}

// Single elements of a tile, at the places of cuda/gemm/packed_weights.h.
TEST(PackedReference, HasTheDocumentedBits) {
  const auto mxfp4 = [](int64_t row, int64_t col, int32_t element) {
    std::vector<uint8_t> rows(16 * 32);
    rows[static_cast<size_t>(row * 32 + col / 2)] =
        static_cast<uint8_t>(col % 2 == 0 ? element : element << 4);
    return testing::packed(PackedKind::kMxfp4, rows, 32);
  };
  const auto int4 = [](int64_t row, int64_t col, int32_t code) {
    std::vector<uint8_t> rows(16 * 32);
    rows[static_cast<size_t>(row * 32 + col / 2)] =
        static_cast<uint8_t>(col % 2 == 0 ? code : code << 4);
    return testing::packed(PackedKind::kInt4, rows, 32);
  };
  const auto fp8 = [](int64_t row, int64_t col, uint8_t element) {
    std::vector<uint8_t> rows(16 * 64);
    rows[static_cast<size_t>(row * 64 + col)] = element;
    return testing::packed(PackedKind::kFp8, rows, 64);
  };
  EXPECT_EQ(word_at(mxfp4(0, 0, 15), 0), 0x81c0u);                // a0 of lane 0
  EXPECT_EQ(word_at(mxfp4(9, 23, 15), 7 * 4 + 1), 0x1c000008u);   // a1 of lane 7, step 1
  EXPECT_EQ(word_at(mxfp4(9, 22, 10), 7 * 4 + 1), 0x00080800u);   // a1: sign 19, exponent 01
  EXPECT_EQ(word_at(mxfp4(3, 40, 10), 12 * 4 + 2), 0x0202u);      // a2: sign 9, exponent 01
  EXPECT_EQ(word_at(mxfp4(12, 63, 6), 19 * 4 + 3), 0x40200000u);  // a3: exponent 14 and 5
  EXPECT_EQ(word_at(mxfp4(12, 63, 9), 19 * 4 + 3), 0x20100000u);  // a3: sign 13, mantissa 4
  EXPECT_EQ(word_at(int4(0, 0, 13), 0), 0xdu);                    // a0 of lane 0
  EXPECT_EQ(word_at(int4(9, 23, 6), 7 * 4 + 1), 0x00600000u);     // a1 of lane 7, step 1
  EXPECT_EQ(word_at(int4(3, 40, 10), 12 * 4 + 2), 0x0a00u);       // a2 of lane 12, step 2
  EXPECT_EQ(word_at(int4(12, 63, 7), 19 * 4 + 3), 0x70000000u);   // a3 of lane 19, step 3
  EXPECT_EQ(word_at(fp8(8, 0, 0xff), 1), 0x87f0u);                // a1 of lane 0
  EXPECT_EQ(word_at(fp8(0, 41, 0x88), 128), 0x08080000u);         // a2: sign 11, exponent 0001
  EXPECT_EQ(word_at(fp8(5, 30, 0x77), 23 * 4 + 2), 0x7007u);      // a2: exponent 1110
  std::vector<uint8_t> scales(16 * 2);
  scales[10 * 2 + 1] = 77;
  EXPECT_EQ(testing::packed(PackedKind::kMxfp4Scales, scales, 2)[2 * 4 + 3], 77);
  // Of int4 the second byte of the scale of row 10, and of a second group.
  EXPECT_EQ(testing::packed(PackedKind::kInt4Scales, scales, 2)[2 * 4 + 3], 77);
  std::vector<uint8_t> of_two(16 * 4);
  of_two[3 * 4 + 2] = 78;
  EXPECT_EQ(testing::packed(PackedKind::kInt4Scales, of_two, 4)[32 + 3 * 4], 78);
  // The scale of the last 16 columns of row 13 of nvfp4, 1.5, and 1.5 times it, 2.25: the slope 1.5
  // and the offset 0. Then one between bfloat16 numbers: 1 + 2^-8 and a bit, and 1.5 times it.
  std::vector<float> floats(16 * 4);
  floats[13 * 4 + 3] = 1.5f;
  floats[2 * 4] = 0x1.011p0f;
  const auto* const bytes = reinterpret_cast<const uint8_t*>(floats.data());
  const std::vector<uint8_t> lines = testing::packed(
      PackedKind::kNvfp4Scales, {bytes, floats.size() * sizeof(float)}, 4 * sizeof(float));
  EXPECT_EQ(word_at(lines, (5 * 4 + 3) * 2), 0x3fc00000u);
  EXPECT_EQ(word_at(lines, (5 * 4 + 3) * 2 + 1), 0u);
  // r1 = 1 + 2^-7, r15 = 1.5 + 2^-7: the slope 1 and the offset 2^-7.
  EXPECT_EQ(word_at(lines, 2 * 4 * 2), 0x3f80u);
  EXPECT_EQ(word_at(lines, 2 * 4 * 2 + 1), 0x3c00u);
}

TEST(PackedReference, UnpacksWhatItPacked) {
  std::mt19937_64 random(1);
  for (const PackedKind kind : {PackedKind::kFp8, PackedKind::kMxfp4, PackedKind::kMxfp4Scales,
                                PackedKind::kInt4, PackedKind::kInt4Scales}) {
    for (const int64_t rows : {1, 8, 15, 16, 17, 40, 70}) {
      for (const int64_t row_bytes : {1, 2, 16, 31, 32, 33, 64, 80, 90, 160}) {
        std::vector<uint8_t> bytes(static_cast<size_t>(rows * row_bytes));
        for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
        const std::vector<uint8_t> packed = testing::packed(kind, bytes, row_bytes);
        EXPECT_EQ(testing::unpacked(kind, packed, rows, row_bytes), bytes);
        // No bit is lost, and padding is zero: there are as many ones.
        const auto num_ones = [](const std::vector<uint8_t>& all) {
          int64_t ones = 0;
          for (const uint8_t byte : all) ones += std::popcount(byte);
          return ones;
        };
        EXPECT_EQ(num_ones(packed), num_ones(bytes));
      }
    }
  }
}

}  // namespace
}  // namespace paceline
