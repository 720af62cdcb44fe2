// SPDX-License-Identifier: Apache-2.0
// Weights in scaled formats, and experts whose tensors are transposed: what a model holds in memory
// is what its tensors say, however they arrive; what is refused; updates and dummy weights.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <paceline/error.h>
#include <paceline/model.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/overloaded.h"
#include "model/weights/linear_costs.h"
#include "model/weights/visit_weights.h"
#include "support/described_model.h"
#include "support/errors.h"
#include "support/format_tensors.h"

namespace paceline {
namespace {

using testing::apply_edit;
using testing::described_value;
using testing::Edit;
using testing::encode;
using testing::expect_about_normal;
using testing::expert_matrix;
using testing::format_tensors;
using testing::FormatTensor;
using testing::FormatTensors;
using ::testing::HasSubstr;
using testing::message_of;
using testing::mixture_config;
using testing::nvfp4_config;
using testing::put_all;
using testing::value_in_memory;

// mixture_config whose experts are plain and transposed.
std::string transposed_config() {
  return mixture_config({{R"("gate_up": {"format": "mxfp4"}, "down": {"format": "mxfp4"}}},)",
                          R"("transposed": true}},)"}});
}

std::shared_ptr<const Model> build(const std::string& json, const FormatTensors& tensors,
                                   DType dtype = DType::kBFloat16) {
  ModelBuilder builder(json, dtype);
  put_all(builder, tensors);
  return builder.finish();
}

// Every element of every matrix.
void expect_values(const Model& model, const FormatTensors& tensors) {
  const auto expect_part = [&](const WeightMatrix& matrix, const LinearShape& shape,
                               const WeightPart& part, int64_t first_row, int64_t expert) {
    for (int64_t row = 0; row < part.rows; ++row) {
      for (int64_t col = 0; col < shape.cols; ++col) {
        ASSERT_EQ(value_in_memory(matrix, first_row + row, col),
                  described_value(tensors, part.name, shape.format, shape.is_transposed, expert,
                                  row, col))
            << part.name << " expert " << expert << " row " << row << " col " << col;
      }
    }
  };
  const auto expect_linear = [&](const Linear& linear, const LinearShape& shape) {
    int64_t first_row = 0;
    for (const WeightPart& part : shape.parts) {
      expect_part(linear.weight, shape, part, first_row, 0);
      first_row += part.rows;
    }
  };
  const auto expect_experts = [&](const ExpertLinears& experts, const LinearShape& shape) {
    for (int32_t expert = 0; expert < experts.weight.num_experts; ++expert) {
      expect_part(expert_matrix(experts.weight, expert), shape, shape.parts[0], 0, expert);
    }
  };
  for_each_linear(model.config, model.weights, Overloaded{expect_linear, expect_experts});
}

TEST(ModelFormats, MemoryHoldsWhatTheTensorsSay) {
  for (const DType scale_dtype : {DType::kFloat32, DType::kBFloat16}) {
    const FormatTensors tensors =
        format_tensors(mixture_config(), 1, DType::kBFloat16, scale_dtype);
    expect_values(*build(mixture_config(), tensors), tensors);
  }
  for (const DType stored : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const FormatTensors tensors = format_tensors(transposed_config(), 2, stored);
    expect_values(*build(transposed_config(), tensors, DType::kFloat32), tensors);
    if (stored == DType::kFloat16) continue;
    expect_values(*build(transposed_config(), tensors, DType::kBFloat16), tensors);
  }
  const FormatTensors tensors = format_tensors(nvfp4_config(), 3);
  expect_values(*build(nvfp4_config(), tensors, DType::kFloat32), tensors);
  expect_values(*build(nvfp4_config(), tensors, DType::kBFloat16), tensors);
}

// Tensors that are read in pieces, and tensors whose rows lie apart, give the same bytes.
TEST(ModelFormats, EveryWayOfPuttingGivesTheSameBytes) {
  for (const std::string& json : {mixture_config(), transposed_config(), nvfp4_config()}) {
    const FormatTensors tensors = format_tensors(json, 3);
    const std::vector<std::byte> want = model_weight_arena(*build(json, tensors));
    ModelBuilder read(json, DType::kBFloat16);
    ModelBuilder strided(json, DType::kBFloat16);
    ModelBuilder sliced(json, DType::kBFloat16);
    ModelBuilder grouped(json, DType::kBFloat16);
    for (const auto& [name, t] : tensors) {
      read.put(name, t.dtype, t.shape, [&](int64_t first, std::span<std::byte> to) {
        std::memcpy(to.data(), t.bytes.data() + first, to.size());
      });
      // Every element is followed by two others, and every expert of transposed tensors by more.
      const auto size = static_cast<size_t>(dtype_bytes(t.dtype));
      std::vector<int64_t> strides(t.shape.size());
      int64_t step = 3;
      for (size_t axis = t.shape.size(); axis-- > 0;) {
        strides[axis] = step;
        step *= t.shape[axis];
      }
      std::string apart(static_cast<size_t>(step) * size, '\xff');
      for (size_t i = 0; i < t.bytes.size() / size; ++i) {
        std::memcpy(apart.data() + 3 * i * size, t.bytes.data() + i * size, size);
      }
      strided.put(name, t.dtype, t.shape, strides, apart.data());
      // Only the outermost axis, of rows or of experts, lies apart.
      const int64_t inner = testing::product(t.shape) / t.shape[0];
      std::vector<int64_t> sliced_strides(t.shape.size());
      step = 1;
      for (size_t axis = t.shape.size(); axis-- > 0; step *= t.shape[axis]) {
        sliced_strides[axis] = step;
      }
      sliced_strides[0] = inner + 7;
      std::string slices(static_cast<size_t>((inner + 7) * t.shape[0]) * size, '\xff');
      for (int64_t i = 0; i < t.shape[0]; ++i) {
        std::memcpy(slices.data() + static_cast<size_t>(i * (inner + 7)) * size,
                    t.bytes.data() + static_cast<size_t>(i * inner) * size,
                    static_cast<size_t>(inner) * size);
      }
      sliced.put(name, t.dtype, t.shape, sliced_strides, slices.data());
      // fp8 matrices and their scales in two groups of rows, which lie apart.
      const bool is_fp8 =
          json != nvfp4_config() && (t.dtype == DType::kFloat8E4M3 ||
                                     (name.ends_with(".scales") && t.dtype != DType::kUInt8));
      if (!is_fp8 || t.shape.size() != 2 || t.shape[0] % 2 != 0) {
        grouped.put(name, t.dtype, t.shape, {}, t.bytes.data());
        continue;
      }
      const size_t half = t.bytes.size() / 2;
      const std::string groups =
          t.bytes.substr(0, half) + std::string(5 * size, '\xff') + t.bytes.substr(half);
      grouped.put(name, t.dtype, std::vector<int64_t>{2, t.shape[0] / 2, t.shape[1]},
                  std::vector<int64_t>{t.shape[0] / 2 * t.shape[1] + 5, t.shape[1], 1},
                  groups.data());
    }
    EXPECT_TRUE(model_weight_arena(*grouped.finish()) == want);
    EXPECT_TRUE(model_weight_arena(*sliced.finish()) == want);
    EXPECT_TRUE(model_weight_arena(*read.finish()) == want);
    EXPECT_TRUE(model_weight_arena(*strided.finish()) == want);
  }
}

// Tensors of several pieces, which several threads read.
TEST(ModelFormats, LargeTensorsAreReadInPieces) {
  for (std::string json : {mixture_config(), transposed_config(), nvfp4_config()}) {
    apply_edit(json, {R"("intermediate": 96)", R"("intermediate": 1600)"});
    const FormatTensors tensors = format_tensors(json, 4);
    ModelBuilder read(json, DType::kFloat32);
    for (const auto& [name, t] : tensors) {
      read.put(name, t.dtype, t.shape, [&](int64_t first, std::span<std::byte> to) {
        std::memcpy(to.data(), t.bytes.data() + first, to.size());
      });
    }
    EXPECT_TRUE(model_weight_arena(*read.finish()) ==
                model_weight_arena(*build(json, tensors, DType::kFloat32)));
  }
}

TEST(ModelFormats, ScalesAreExactIfAllArePowersOfTwo) {
  const auto flags = [](const Model& model) {
    const LayerWeights& layer = model.weights.layers[0];
    const auto& attention = std::get<MultiHeadAttentionWeights>(layer.attention);
    return std::vector<bool>{
        attention.qkv.weight.has_exact_scales, attention.o.weight.has_exact_scales,
        std::get<DenseMlpWeights>(model.weights.layers[1].mlp).gate_up.weight.has_exact_scales};
  };
  const auto with_scale = [](const std::string& name, float scale) {
    FormatTensors tensors =
        format_tensors(mixture_config(), 5, DType::kBFloat16, DType::kFloat32, true);
    if (!name.empty()) std::memcpy(tensors.at(name).bytes.data(), &scale, sizeof(scale));
    return build(mixture_config(), tensors);
  };
  using Flags = std::vector<bool>;
  EXPECT_EQ(flags(*build(mixture_config(), format_tensors(mixture_config(), 5))),
            (Flags{false, false, false}));
  EXPECT_EQ(flags(*with_scale("", 0.0f)), (Flags{true, true, true}));
  EXPECT_EQ(flags(*with_scale("layers.0.attn.k.scales", 0.75f)), (Flags{false, true, true}));
  EXPECT_EQ(flags(*with_scale("layers.0.attn.o.scales", -0.5f)), (Flags{true, false, true}));
  EXPECT_EQ(flags(*with_scale("layers.1.mlp.up.scales", 0.0f)), (Flags{true, true, false}));
  // 448 * 2^119 and 2^-9 * 2^-117 are the last that are finite and normal.
  for (const int exponent : {119, -117}) {
    const float scale = std::ldexp(1.0f, exponent);
    EXPECT_EQ(flags(*with_scale("layers.1.mlp.up.scales", scale)), (Flags{true, true, true}));
    const float beyond = exponent > 0 ? scale * 2 : scale / 2;
    EXPECT_EQ(flags(*with_scale("layers.1.mlp.up.scales", beyond)), (Flags{true, true, false}));
  }
}

// An edit of one tensor, and what the error says.
struct Refusal {
  std::string name;
  void (*edit)(FormatTensor&);
  std::string message;
};

template <class Value>
void set_element(FormatTensor& tensor, size_t index, Value value) {
  std::memcpy(tensor.bytes.data() + index * sizeof(value), &value, sizeof(value));
}

std::vector<Refusal> value_refusals() {
  return {{"layers.0.mlp.experts.gate_up.scales",
           [](FormatTensor& t) { set_element(t, (2 * 192 + 7) * 5 + 3, uint8_t{255}); },
           "'layers.0.mlp.experts.gate_up.scales'[2, 7, 3] is 255, which is NaN; allowed: 0 to "
           "254"},
          {"layers.1.mlp.down.scales",
           [](FormatTensor& t) { set_element(t, t.bytes.size() - 1, uint8_t{255}); },
           "'layers.1.mlp.down.scales'[159, 1] is 255"},
          {"layers.0.attn.q.scales",
           [](FormatTensor& t) { set_element(t, 2, std::numeric_limits<float>::quiet_NaN()); },
           "'layers.0.attn.q.scales'[1, 0] is nan; allowed: finite scales"},
          {"layers.0.attn.o.scales",
           [](FormatTensor& t) { set_element(t, 17, -std::numeric_limits<float>::infinity()); },
           "'layers.0.attn.o.scales'[17, 0] is -inf; allowed: finite scales"},
          {"layers.1.mlp.gate.scales",
           [](FormatTensor& t) { set_element(t, 0, std::numeric_limits<float>::infinity()); },
           "'layers.1.mlp.gate.scales'[0] is inf"}};
}

TEST(ModelFormats, RefusesMistakes) {
  std::vector<Refusal> refusals = value_refusals();
  refusals.push_back({"layers.0.mlp.experts.down.scales",
                      [](FormatTensor& t) { t.shape = {6, 160, 2}; },
                      "has shape [6, 160, 2]; allowed: [6, 160, 3]"});
  refusals.push_back({"layers.0.mlp.experts.down.weight", [](FormatTensor& t) { t.shape[0] = 5; },
                      "has shape [5, 160, 3, 16]; allowed: [6, 160, 3, 16]"});
  refusals.push_back({"layers.0.attn.q.scales", [](FormatTensor& t) { t.shape = {2}; },
                      "has shape [2]; allowed: [2, 2]"});
  refusals.push_back({"layers.0.attn.q.weight", [](FormatTensor& t) { t.dtype = DType::kUInt8; },
                      "'layers.0.attn.q.weight' is uint8; allowed: float8_e4m3"});
  refusals.push_back({"layers.1.mlp.down.weight",
                      [](FormatTensor& t) { t.dtype = DType::kFloat8E4M3; },
                      "is float8_e4m3; allowed: uint8"});
  refusals.push_back({"layers.1.mlp.gate.scales",
                      [](FormatTensor& t) { t.dtype = DType::kFloat16; },
                      "is float16; allowed: float32, bfloat16"});
  refusals.push_back({"layers.1.mlp_norm.weight", [](FormatTensor& t) { t.dtype = DType::kUInt8; },
                      "is uint8; allowed: float32, bfloat16, float16"});
  const FormatTensors tensors = format_tensors(mixture_config(), 6);
  for (const Refusal& refusal : refusals) {
    ModelBuilder builder(mixture_config(), DType::kBFloat16);
    FormatTensor tensor = tensors.at(refusal.name);
    refusal.edit(tensor);
    EXPECT_THAT(message_of<InvalidArgument>([&] {
                  builder.put(refusal.name, tensor.dtype, tensor.shape, {}, tensor.bytes.data());
                }),
                HasSubstr(refusal.message));
    EXPECT_THAT(message_of<InvalidArgument>([&] {
                  builder.put(refusal.name, tensor.dtype, tensor.shape,
                              [&](int64_t first, std::span<std::byte> to) {
                                std::memcpy(to.data(), tensor.bytes.data() + first, to.size());
                              });
                }),
                HasSubstr(refusal.message));
    // It may be put again.
    const FormatTensor& good = tensors.at(refusal.name);
    builder.put(refusal.name, good.dtype, good.shape, {}, good.bytes.data());
  }
  // Columns that lie apart are checked, too.
  ModelBuilder builder(mixture_config(), DType::kBFloat16);
  const std::vector<uint8_t> scales(2 * 320, 255);
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                builder.put("layers.1.mlp.down.scales", DType::kUInt8, std::vector<int64_t>{160, 2},
                            std::vector<int64_t>{4, 2}, scales.data());
              }),
              HasSubstr("[0, 0] is 255"));
  // Experts that lie apart, too; but rows and blocks may not both.
  std::vector<uint8_t> apart(6 * 1000, 120);
  apart[3 * 1000 + 7 * 5 + 2] = 255;
  const auto put_experts = [&](const std::vector<int64_t>& strides) {
    return message_of<InvalidArgument>([&] {
      builder.put("layers.0.mlp.experts.gate_up.scales", DType::kUInt8,
                  std::vector<int64_t>{6, 192, 5}, strides, apart.data());
    });
  };
  EXPECT_THAT(put_experts({1000, 5, 1}), HasSubstr("'[3, 7, 2] is 255"));
  EXPECT_THAT(put_experts({1000, 5}), HasSubstr("has 2 strides; allowed: 3"));
  apart[3 * 1000 + 7 * 5 + 2] = 120;
  EXPECT_EQ(put_experts({1000, 5, 1}), "");
  EXPECT_THAT(
      message_of<InvalidArgument>([&] {
        builder.put("layers.0.mlp.experts.gate_up.weight", DType::kUInt8,
                    std::vector<int64_t>{6, 192, 5, 16}, std::vector<int64_t>{1, 6, 1152, 5760},
                    apart.data());
      }),
      HasSubstr("'layers.0.mlp.experts.gate_up.weight' of shape [6, 192, 5, 16] has strides "
                "[1, 6, 1152, 5760], which"));
}

TEST(ModelFormats, RefusesScalesOfNvfp4ThatNoValueHolds) {
  const FormatTensors tensors = format_tensors(nvfp4_config(), 6);
  const std::string name = "layers.0.attn.q.scales";  // [160, 10]
  const auto put = [&](float scale) {
    FormatTensor tensor = tensors.at(name);
    set_element(tensor, 17, scale);
    ModelBuilder builder(nvfp4_config(), DType::kBFloat16);
    const std::string message = message_of<InvalidArgument>(
        [&] { builder.put(name, tensor.dtype, tensor.shape, {}, tensor.bytes.data()); });
    ModelBuilder reader(nvfp4_config(), DType::kBFloat16);
    EXPECT_EQ(message_of<InvalidArgument>([&] {
                reader.put(name, tensor.dtype, tensor.shape,
                           [&](int64_t first, std::span<std::byte> to) {
                             std::memcpy(to.data(), tensor.bytes.data() + first, to.size());
                           });
              }),
              message);
    return message;
  };
  for (const float good : {0.0f, -0.0f, 0x1p-125f, -0x1p125f}) EXPECT_EQ(put(good), "");
  const std::string allowed = "; allowed: 0, and magnitudes from 2^-125 to 2^125. The tensor";
  EXPECT_THAT(put(0x1.8p-126f),
              HasSubstr("'layers.0.attn.q.scales'[1, 7] is 1.76324e-38" + allowed));
  EXPECT_THAT(put(-0x1.8p125f), HasSubstr(allowed));
  EXPECT_THAT(put(std::numeric_limits<float>::infinity()), HasSubstr("[1, 7] is inf" + allowed));
  EXPECT_THAT(put(std::numeric_limits<float>::quiet_NaN()), HasSubstr("[1, 7] is nan" + allowed));
}

// Half a byte for an element, and four bytes of scales for sixteen.
TEST(ModelFormats, CostsOfNvfp4CountEveryByte) {
  int32_t num_seen = 0;
  for (const LinearCost& cost :
       linear_costs(parse_decoder_config(nvfp4_config()), DType::kBFloat16, Device::kCpu)) {
    const bool is_plain = cost.name == "lm_head" || cost.name.ends_with("router") ||
                          cost.name.starts_with("layers.1.attn");
    if (is_plain) continue;
    const int64_t elements = int64_t{cost.rows} * cost.cols;
    EXPECT_EQ(cost.bytes, elements / 2 + elements / 16 * 4) << cost.name;
    ++num_seen;
  }
  EXPECT_EQ(num_seen, 6);
}

TEST(ModelFormats, UpdatesEqualANewModel) {
  for (const std::string& json : {mixture_config(), transposed_config(), nvfp4_config()}) {
    const auto model = build(json, format_tensors(json, 7));
    const FormatTensors tensors = format_tensors(json, 8);
    update_models(std::vector<ModelUpdate>{{.model = model, .tensors = named_tensors(tensors)}});
    EXPECT_TRUE(model_weight_arena(*model) == model_weight_arena(*build(json, tensors)));
    expect_values(*model, tensors);
  }
}

TEST(ModelFormats, UpdatesAreRefusedBeforeTheyWrite) {
  const std::string json = mixture_config();
  const auto other = build(json, format_tensors(json, 7));
  for (const bool has_exact_scales : {true, false}) {
    const auto tensors_with = [&](bool are_exact) {
      return format_tensors(json, 9, DType::kBFloat16, DType::kFloat32, are_exact);
    };
    const auto model = build(json, tensors_with(has_exact_scales));
    const std::vector<std::byte> before = model_weight_arena(*model);
    const std::vector<std::byte> other_before = model_weight_arena(*other);
    const FormatTensors good = format_tensors(json, 10);
    const auto refused = [&](const FormatTensors& tensors) {
      const std::string message = message_of<InvalidArgument>([&] {
        update_models(
            std::vector<ModelUpdate>{{.model = other, .tensors = named_tensors(good)},
                                     {.model = model, .tensors = named_tensors(tensors)}});
      });
      EXPECT_TRUE(model_weight_arena(*model) == before) << message;
      EXPECT_TRUE(model_weight_arena(*other) == other_before) << message;
      return message;
    };
    for (const Refusal& refusal : value_refusals()) {
      FormatTensors bad = tensors_with(has_exact_scales);
      refusal.edit(bad.at(refusal.name));
      EXPECT_THAT(refused(bad), HasSubstr(refusal.message));
    }
    EXPECT_THAT(refused(tensors_with(!has_exact_scales)),
                HasSubstr(has_exact_scales
                              ? "'layers.0.attn.q.scales' does not have only powers of two as "
                                "scales, but the model was loaded with such; allowed: an update of "
                                "the same form"
                              : "'layers.0.attn.q.scales' has only powers of two as scales, but "
                                "the model was loaded with others"));
  }
}

TEST(ModelFormats, DummyWeightsAreAboutNormal) {
  const auto expect_dummy = [](std::string json, DType dtype) {
    apply_edit(json, {R"("intermediate": 96)", R"("intermediate": 480)"});
    const auto dummy = [&](uint64_t seed) {
      ModelBuilder builder(json, dtype);
      builder.fill_dummy(seed);
      return builder.finish();
    };
    const auto model = dummy(1);
    EXPECT_TRUE(model_weight_arena(*model) == model_weight_arena(*dummy(1)));
    EXPECT_FALSE(model_weight_arena(*model) == model_weight_arena(*dummy(2)));
    const auto expect_normal = [](const WeightMatrix& matrix, const std::string& name) {
      expect_about_normal(matrix, name);
      EXPECT_FALSE(matrix.has_exact_scales) << name;
    };
    for_each_linear(model->config, model->weights,
                    Overloaded{[&](const Linear& linear, const LinearShape& shape) {
                                 expect_normal(linear.weight, shape.name);
                               },
                               [&](const ExpertLinears& experts, const LinearShape& shape) {
                                 expect_normal(expert_matrix(experts.weight, 5), shape.name);
                               }});
  };
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    expect_dummy(mixture_config(), dtype);
    expect_dummy(nvfp4_config(), dtype);
  }
}

}  // namespace
}  // namespace paceline
