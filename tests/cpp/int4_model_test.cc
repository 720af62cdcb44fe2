// SPDX-License-Identifier: Apache-2.0
// Models with int4 weights: what memory holds, what is refused, updates, dummy weights and bytes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <paceline/error.h>
#include <paceline/model.h>

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/overloaded.h"
#include "model/weights/linear_costs.h"
#include "model/weights/visit_weights.h"
#include "model/weights/weight_layout.h"
#include "support/described_model.h"
#include "support/errors.h"
#include "support/format_tensors.h"

namespace paceline {
namespace {

using testing::described_value;
using testing::Edit;
using testing::expect_about_normal;
using testing::format_tensors;
using testing::FormatTensor;
using testing::FormatTensors;
using ::testing::HasSubstr;
using testing::int4_config;
using testing::lay_out_on_gpu;
using testing::message_of;
using testing::put_all;
using testing::value_in_memory;

std::shared_ptr<const Model> build(const FormatTensors& tensors, DType dtype = DType::kBFloat16) {
  ModelBuilder builder(int4_config(), dtype);
  put_all(builder, tensors);
  return builder.finish();
}

// The order that the tensors give a matrix.
void expect_order(const WeightMatrix& matrix, const FormatTensors& tensors, const std::string& name,
                  int64_t expert) {
  if (!matrix.has_order) {
    EXPECT_EQ(tensors.count(name + ".order"), 0u) << name;
    EXPECT_EQ(matrix.order, nullptr) << name;
    return;
  }
  const FormatTensor& order = tensors.at(name + ".order");
  EXPECT_EQ(std::memcmp(matrix.order, order.bytes.data() + expert * matrix.k * 4,
                        static_cast<size_t>(matrix.k) * 4),
            0)
      << name;
}

void expect_values(const Model& model, const FormatTensors& tensors) {
  const auto expect_matrix = [&](const WeightMatrix& matrix, const LinearShape& shape,
                                 int64_t expert) {
    expect_order(matrix, tensors, shape.name, expert);
    int64_t first_row = 0;
    for (const WeightPart& part : shape.parts) {
      for (int64_t row = 0; row < part.rows; ++row) {
        for (int64_t col = 0; col < shape.cols; ++col) {
          ASSERT_EQ(value_in_memory(matrix, first_row + row, col),
                    described_value(tensors, part.name, shape.format, false, expert, row, col))
              << part.name << " expert " << expert << " row " << row << " col " << col;
        }
      }
      first_row += part.rows;
    }
  };
  for_each_linear(model.config, model.weights,
                  Overloaded{[&](const Linear& linear, const LinearShape& shape) {
                               expect_matrix(linear.weight, shape, 0);
                             },
                             [&](const ExpertLinears& experts, const LinearShape& shape) {
                               for (int32_t e = 0; e < experts.weight.num_experts; ++e) {
                                 expect_matrix(experts.weight.of(e), shape, e);
                               }
                             }});
}

TEST(Int4Model, MemoryHoldsWhatTheTensorsSay) {
  for (const DType stored : {DType::kBFloat16, DType::kFloat16}) {
    const FormatTensors tensors = format_tensors(int4_config(), 1, stored);
    EXPECT_EQ(tensors.at("layers.0.attn.q.scales").dtype, stored);
    expect_values(*build(tensors, DType::kFloat32), tensors);
    if (stored == DType::kBFloat16) expect_values(*build(tensors), tensors);
  }
}

TEST(Int4Model, PiecesAndStridesGiveTheSameBytes) {
  const FormatTensors tensors = format_tensors(int4_config(), 3);
  const std::vector<std::byte> want = model_weight_arena(*build(tensors));
  ModelBuilder read(int4_config(), DType::kBFloat16);
  ModelBuilder transposed(int4_config(), DType::kBFloat16);
  for (const auto& [name, t] : tensors) {
    read.put(name, t.dtype, t.shape, [&](int64_t first, std::span<std::byte> to) {
      std::memcpy(to.data(), t.bytes.data() + first, to.size());
    });
    if (t.shape.size() != 2 || name.ends_with(".weight")) {
      transposed.put(name, t.dtype, t.shape, {}, t.bytes.data());
      continue;
    }
    // As GPTQ stores scales: [columns, rows].
    const auto size = static_cast<size_t>(dtype_bytes(t.dtype));
    std::string bytes(t.bytes.size(), '\0');
    for (int64_t row = 0; row < t.shape[0]; ++row) {
      for (int64_t col = 0; col < t.shape[1]; ++col) {
        std::memcpy(bytes.data() + static_cast<size_t>(col * t.shape[0] + row) * size,
                    t.bytes.data() + static_cast<size_t>(row * t.shape[1] + col) * size, size);
      }
    }
    transposed.put(name, t.dtype, t.shape, std::vector<int64_t>{1, t.shape[0]}, bytes.data());
  }
  EXPECT_TRUE(model_weight_arena(*read.finish()) == want);
  EXPECT_TRUE(model_weight_arena(*transposed.finish()) == want);
}

struct Refusal {
  std::string name;
  void (*edit)(FormatTensor&);
  std::string message;
};

template <class Value>
void set_element(FormatTensor& tensor, size_t index, Value value) {
  std::memcpy(tensor.bytes.data() + index * sizeof(value), &value, sizeof(value));
}

std::vector<Refusal> refusals() {
  return {
      {"layers.0.attn.q.scales", [](FormatTensor& t) { set_element(t, 7, uint16_t{0x7f80}); },
       "'layers.0.attn.q.scales'[1, 2] is inf; allowed: finite scales"},
      {"layers.0.attn.q.scales", [](FormatTensor& t) { set_element(t, 0, uint16_t{0x0001}); },
       "'layers.0.attn.q.scales'[0, 0] is 9.18355e-41; allowed: finite scales, of at least 2^-126"},
      {"layers.0.attn.q.zeros", [](FormatTensor& t) { set_element(t, 7, uint8_t{16}); },
       "'layers.0.attn.q.zeros'[1, 2] is 16; allowed: 0 to 15"},
      {"layers.0.attn.q.zeros", [](FormatTensor& t) { t.shape[1] = 4; },
       "has shape [160, 4]; allowed: [160, 5]"},
      {"layers.0.attn.q.zeros", [](FormatTensor& t) { t.dtype = DType::kInt32; },
       "is int32; allowed: uint8"},
      {"layers.0.attn.q.weight", [](FormatTensor& t) { t.shape = {160 * 80}; },
       "has shape [12800]; allowed: [160, 80]"},
      {"layers.0.attn.q.scales", [](FormatTensor& t) { t.dtype = DType::kUInt8; },
       "is uint8; allowed: bfloat16, float16"},
      {"layers.1.mlp.gate_up.order", [](FormatTensor& t) { set_element(t, 3, int32_t{160}); },
       "'layers.1.mlp.gate_up.order'[3] is 160; allowed: 0 to 159 (inputs)"},
      {"layers.0.mlp.experts.down.order", [](FormatTensor& t) { set_element(t, 97, int32_t{0}); },
       "'layers.0.mlp.experts.down.order'[1, 1] is 0; allowed: each input once"}};
}

TEST(Int4Model, RefusesMistakes) {
  const FormatTensors tensors = format_tensors(int4_config(), 6);
  for (const Refusal& refusal : refusals()) {
    ModelBuilder builder(int4_config(), DType::kBFloat16);
    FormatTensor tensor = tensors.at(refusal.name);
    refusal.edit(tensor);
    EXPECT_THAT(message_of<InvalidArgument>([&] {
                  builder.put(refusal.name, tensor.dtype, tensor.shape, {}, tensor.bytes.data());
                }),
                HasSubstr(refusal.message));
  }
}

TEST(Int4Model, PartsOfAMatrixHaveScalesOfOneDtype) {
  FormatTensors tensors = format_tensors(int4_config(), 6);
  tensors.at("layers.0.attn.k.scales").dtype = DType::kFloat16;
  EXPECT_THAT(message_of<InvalidArgument>([&] { static_cast<void>(build(tensors)); }),
              HasSubstr("'layers.0.attn.k.scales' is float16, but 'layers.0.attn.q.scales' of the "
                        "same matrix is bfloat16; allowed: one dtype for both"));
}

TEST(Int4Model, RefusesDescriptions) {
  struct Case {
    Edit edit;
    std::string message;
  };
  const std::vector<Case> cases = {
      {{R"("group": 160)", R"("group": 48)"},
       "layers[0].mlp.gate_up.group is 48; allowed: 'row', a multiple of 32 that divides "
       "hidden_size (160)"},
      {{R"("group": 160)", R"("group": 64)"}, "gate_up.group is 64; allowed: 'row', a multiple"},
      {{R"("group": 160)", R"("group": "column")"}, "gate_up.group is 'column'; allowed: 'row'"},
      {{R"("group": 160, )", ""}, "layers[0].mlp.gate_up.group is missing"},
      {{R"("group": 160)", R"("group": 160, "scales": "row")"},
       "layers[0].mlp.gate_up.scales is an unknown key"}};
  for (const Case& one : cases) {
    EXPECT_THAT(message_of<InvalidArgument>([&] {
                  static_cast<void>(ModelBuilder(int4_config({one.edit}), DType::kBFloat16));
                }),
                HasSubstr(one.message));
  }
}

TEST(Int4Model, UpdatesEqualANewModel) {
  const auto model = build(format_tensors(int4_config(), 7));
  const FormatTensors tensors = format_tensors(int4_config(), 8);
  update_models(std::vector<ModelUpdate>{{.model = model, .tensors = named_tensors(tensors)}});
  EXPECT_TRUE(model_weight_arena(*model) == model_weight_arena(*build(tensors)));
  expect_values(*model, tensors);

  FormatTensors others = tensors;
  for (auto& [name, t] : others) {
    if (name.ends_with(".scales")) t.dtype = DType::kFloat16;
  }
  EXPECT_THAT(
      message_of<InvalidArgument>([&] {
        update_models(std::vector<ModelUpdate>{{.model = model, .tensors = named_tensors(others)}});
      }),
      HasSubstr("'layers.0.attn.q.scales' is float16, but the model was loaded with "
                "bfloat16; allowed: an update of the same form"));
  expect_values(*model, tensors);
}

TEST(Int4Model, DummyWeightsAreAboutNormal) {
  ModelBuilder builder(int4_config(), DType::kBFloat16);
  builder.fill_dummy(1);
  const auto model = builder.finish();
  for_each_linear(model->config, model->weights,
                  Overloaded{[&](const Linear& linear, const LinearShape& shape) {
                               expect_about_normal(linear.weight, shape.name);
                             },
                             [&](const ExpertLinears& experts, const LinearShape& shape) {
                               expect_about_normal(experts.weight.of(5), shape.name);
                             }});
}

TEST(Int4Model, CostsCountEveryByte) {
  for (const LinearCost& cost :
       linear_costs(parse_decoder_config(int4_config()), DType::kBFloat16, Device::kCpu)) {
    const int64_t elements = int64_t{cost.rows} * cost.cols;
    if (cost.name == "layers.0.attn.qkv") {
      EXPECT_EQ(cost.bytes, elements / 2 + elements / 32 * 3);
    } else if (cost.name == "layers.0.attn.o") {
      EXPECT_EQ(cost.bytes, elements / 2 + cost.rows * 2);
    } else if (cost.name == "layers.0.mlp.experts.gate_up") {
      EXPECT_EQ(cost.bytes, elements / 2 + cost.rows * 3 + cost.cols * 4);
    }
  }
}

// On a GPU codes, scales and zero points lie in tiles, padded with zeros.
TEST(Int4Model, ABfloat16GpuHasItPacked) {
  const DecoderConfig config = parse_decoder_config(int4_config());
  DecoderWeights weights;
  std::map<std::string, NamedWeight> named = lay_out_on_gpu(config, DType::kBFloat16, weights);
  const WeightMatrix& qkv =
      std::get<MultiHeadAttentionWeights>(weights.layers[0].attention).qkv.weight;  // 224 x 160
  EXPECT_TRUE(qkv.is_packed());
  EXPECT_EQ(qkv.data_bytes(), 14 * 3 * 512);
  EXPECT_EQ(qkv.scales_bytes(), 14 * 5 * 32);
  EXPECT_EQ(qkv.zeros_bytes(), 14 * 3 * 32);
  const NamedWeight& codes = named.at("layers.0.attn.k.weight");
  const NamedWeight& scales = named.at("layers.0.attn.k.scales");
  const NamedWeight& zeros = named.at("layers.0.attn.k.zeros");
  ASSERT_TRUE(codes.packed && scales.packed && zeros.packed);
  EXPECT_EQ(codes.packed->kind, PackedKind::kInt4);
  EXPECT_EQ(std::tuple(scales.packed->kind, scales.packed->first_row, scales.packed->row_bytes),
            std::tuple(PackedKind::kInt4Scales, 160, 10));
  EXPECT_EQ(std::tuple(zeros.packed->kind, zeros.packed->num_rows, zeros.packed->row_bytes),
            std::tuple(PackedKind::kMxfp4Scales, 32, 5));
  EXPECT_EQ(scales.offset, codes.offset + qkv.data_bytes());
  EXPECT_GE(named.at("layers.0.attn.o.weight").offset, zeros.offset + qkv.zeros_bytes());
  const ExpertMatrices& gate_up =
      std::get<MoeMlpWeights>(weights.layers[0].mlp).gate_up.weight;  // 6 of 192 x 160
  EXPECT_EQ(gate_up.scales_stride, 12 * 32);
  EXPECT_EQ(named.at("layers.0.mlp.experts.gate_up.zeros").packed->matrix_stride, 12 * 32);
  EXPECT_FALSE(named.at("layers.0.mlp.experts.gate_up.order").packed);
  for (const auto& [name, weight] : lay_out_on_gpu(config, DType::kFloat32, weights)) {
    EXPECT_FALSE(weight.packed) << name;
  }
}

}  // namespace
}  // namespace paceline
