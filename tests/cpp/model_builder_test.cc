// SPDX-License-Identifier: Apache-2.0
// Models built tensor by tensor: where weights are stored and in which dtype, refused tensors, and
// dummy weights for missing ones.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <paceline/error.h>
#include <paceline/model.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/float_types.h"
#include "model/weights/model_impl.h"
#include "support/described_model.h"
#include "support/errors.h"
#include "support/recurrent_models.h"
#include "support/safetensors_writer.h"

namespace paceline {
namespace {

using test::bytes_of;
using testing::build_tiny;
using testing::encode;
using ::testing::HasSubstr;
using testing::latent_config;
using testing::message_of;
using ::testing::Not;
using testing::shared_config;
using ::testing::SizeIs;
using testing::tiny_config;
using testing::tiny_shapes;
using testing::tiny_values;

// Compares a matrix of the model with the tensors whose rows it holds.
void expect_rows(const std::byte* weight, DType dtype, const std::vector<std::string>& names) {
  ASSERT_NE(weight, nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(weight) % 64, 0u);
  std::string expected;
  for (const std::string& name : names) expected += encode(tiny_values().at(name), dtype);
  EXPECT_EQ(std::string_view(reinterpret_cast<const char*>(weight), expected.size()), expected)
      << names[0];
}
void expect_vector(const float* weight, const std::vector<std::string>& names) {
  expect_rows(reinterpret_cast<const std::byte*>(weight), DType::kFloat32, names);
}

TEST(ModelBuilder, AsksOnlyForWhatALayerHas) {
  ModelBuilder builder(shared_config(), DType::kFloat32);
  const std::vector<std::string> names = builder.missing();
  const auto has = [&](const char* name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  EXPECT_TRUE(has("layers.0.attn.k.weight") && !has("layers.0.attn.v.weight"));
  EXPECT_TRUE(has("layers.2.attn.q.weight") && has("layers.2.attn.q.bias"));
  for (const char* absent : {"layers.2.attn.k.weight", "layers.2.attn.v.weight",
                             "layers.2.attn.k.bias", "layers.2.attn.k_norm.weight"}) {
    EXPECT_FALSE(has(absent)) << absent;
  }
  EXPECT_TRUE(has("layers.2.attn.q_norm.weight"));
  for (const char* present :
       {"per_layer.embed.weight", "per_layer.proj.weight", "per_layer.norm.weight",
        "layers.1.per_layer.gate.weight", "layers.1.per_layer.proj.weight",
        "layers.1.per_layer.norm.weight", "layers.1.scale"}) {
    EXPECT_TRUE(has(present)) << present;
  }
  const std::vector<float> table(9 * 12, 1.0f);
  builder.put("per_layer.embed.weight", DType::kFloat32, std::vector<int64_t>{9, 12}, {},
              table.data());
  builder.fill_dummy(1);
  const auto model = builder.finish();
  EXPECT_EQ(*model->weights.layers[2].scale, 1.0f);  // neutral
  EXPECT_EQ(std::get<MultiHeadAttentionWeights>(model->weights.layers[2].attention).k_norm,
            nullptr);
  EXPECT_EQ(model->weights.layers[2].per_layer_norm[0], 0.0f);  // neutral where norms add 1
}

TEST(ModelBuilder, RefusesWideLatentAttentionOnAGpu) {
  const std::string wide = latent_config({{"\"kv_lora_rank\": 24", "\"kv_lora_rank\": 520"}});
  EXPECT_THAT(message_of<Unsupported>(
                  [&] { static_cast<void>(ModelBuilder(wide, DType::kBFloat16, Device::kCuda)); }),
              HasSubstr("layer 0 of latent has latent attention with kv_lora_rank 520 and "
                        "qk_rope_head_dim 8; supported on a GPU: kv_lora_rank up to 512"));
}

TEST(ModelBuilder, ReadsInPiecesTheSameAsAtOnce) {
  // Enough elements for several pieces and threads, and a last piece that is not full.
  const std::vector<int64_t> shape = {100'001, 6};
  const std::string config = tiny_config({{"\"vocab_size\": 5", "\"vocab_size\": 100001"}});
  std::vector<float> values(static_cast<size_t>(shape[0] * shape[1]));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(static_cast<int64_t>(i * 7 % 255) - 127) / 4;
  }
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (DType stored : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      if (dtype == DType::kBFloat16 && stored == DType::kFloat16) continue;
      SCOPED_TRACE(concat(dtype_name(stored), " to ", dtype_name(dtype)));
      const std::string bytes = encode(values, stored);
      ModelBuilder at_once(config, dtype);
      ModelBuilder in_pieces(config, dtype);
      const std::string shifted = "x" + bytes;  // at an address that suits no type
      at_once.put("embed.weight", stored, shape, /*strides=*/{}, shifted.data() + 1);
      std::atomic<int64_t> num_bytes = 0;
      in_pieces.put("embed.weight", stored, shape, [&](int64_t first, std::span<std::byte> to) {
        std::memcpy(to.data(), bytes.data() + first, to.size());
        num_bytes += static_cast<int64_t>(to.size());
      });
      EXPECT_EQ(num_bytes, std::ssize(bytes));
      at_once.fill_dummy(1);
      in_pieces.fill_dummy(1);
      EXPECT_TRUE(std::ranges::equal(model_weight_arena(*at_once.finish()),
                                     model_weight_arena(*in_pieces.finish())));

      ModelBuilder failing(config, dtype);
      const auto put_failing = [&](int64_t first_missing) {
        failing.put("embed.weight", stored, shape, [&](int64_t first, std::span<std::byte> to) {
          if (first + std::ssize(to) > first_missing) throw ModelFileError("the file has shrunk");
        });
      };
      for (const int64_t first_missing :
           {int64_t{0}, std::ssize(bytes) / 2, std::ssize(bytes) - 1}) {
        EXPECT_EQ(message_of<ModelFileError>([&] { put_failing(first_missing); }),
                  "the file has shrunk");
      }
      EXPECT_THAT(failing.missing(), ::testing::Contains("embed.weight"));
    }
  }
}

TEST(ModelBuilder, PlacesEveryTensorForEveryPairOfDtypes) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (DType stored : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      if (dtype == DType::kBFloat16 && stored == DType::kFloat16) continue;
      SCOPED_TRACE(concat(dtype_name(stored), " to ", dtype_name(dtype)));
      const std::shared_ptr<const Model> model = build_tiny(stored, dtype);
      const DecoderWeights& weights = model->weights;
      EXPECT_EQ(model_weight_dtype(*model), dtype);
      EXPECT_EQ(model_vocab_size(*model), 5);
      EXPECT_EQ(model_max_position(*model), 128);
      EXPECT_EQ(model_weight_bytes(*model),
                static_cast<int64_t>(model_weight_arena(*model).size()));
      expect_rows(weights.embed, dtype, {"embed.weight"});
      expect_rows(weights.lm_head.weight.data, dtype, {"lm_head.weight"});
      expect_vector(weights.final_norm, {"final_norm.weight"});
      for (int i : {0, 1}) {
        const LayerWeights& layer = weights.layers[i];
        const auto& attention = std::get<MultiHeadAttentionWeights>(layer.attention);
        const auto& mlp = std::get<DenseMlpWeights>(layer.mlp);
        const auto name = [&](const char* rest) { return concat("layers.", i, ".", rest); };
        expect_vector(layer.attn_norm, {name("attn_norm.weight")});
        expect_rows(attention.qkv.weight.data, dtype,
                    {name("attn.q.weight"), name("attn.k.weight"), name("attn.v.weight")});
        expect_rows(attention.o.weight.data, dtype, {name("attn.o.weight")});
        expect_vector(layer.attn_post_norm, {name("attn_post_norm.weight")});
        expect_vector(layer.mlp_norm, {name("mlp_norm.weight")});
        expect_rows(mlp.gate_up.weight.data, dtype,
                    {name("mlp.gate.weight"), name("mlp.up.weight")});
        expect_rows(mlp.down.weight.data, dtype, {name("mlp.down.weight")});
        expect_vector(layer.mlp_post_norm, {name("mlp_post_norm.weight")});
        if (i == 0) {
          for (const float* absent : {attention.qkv.bias, attention.q_norm, attention.k_norm,
                                      attention.o.bias, mlp.gate_up.bias, mlp.down.bias}) {
            EXPECT_EQ(absent, nullptr);
          }
        } else {
          expect_vector(attention.qkv.bias,
                        {name("attn.q.bias"), name("attn.k.bias"), name("attn.v.bias")});
          expect_vector(attention.q_norm, {name("attn.q_norm.weight")});
          expect_vector(attention.k_norm, {name("attn.k_norm.weight")});
          expect_vector(attention.o.bias, {name("attn.o.bias")});
          expect_vector(mlp.gate_up.bias, {name("mlp.gate.bias"), name("mlp.up.bias")});
          expect_vector(mlp.down.bias, {name("mlp.down.bias")});
        }
      }
    }
  }
}

TEST(ModelBuilder, TiesTheHeadAndDropsPostNorms) {
  ModelBuilder builder(tiny_config({{"\"ties_lm_head\": false", "\"ties_lm_head\": true"},
                                    {"\"has_post_norms\": true", "\"has_post_norms\": false"}}),
                       DType::kFloat32);
  EXPECT_THAT(builder.missing(), SizeIs(tiny_shapes().size() - 5));
  builder.fill_dummy(1);
  const auto model = builder.finish();
  EXPECT_EQ(model->weights.lm_head.weight.data, model->weights.embed);
  EXPECT_EQ(model->weights.layers[1].attn_post_norm, nullptr);
  EXPECT_EQ(model->weights.layers[1].mlp_post_norm, nullptr);
}

TEST(ModelBuilder, HonoursStrides) {
  // Every element at its index in a larger array: rows reversed, columns spread, or transposed;
  // vectors reversed.
  const auto expected = build_tiny(DType::kFloat32, DType::kFloat32);
  struct Strides {
    int64_t row;
    int64_t col;
  };
  for (int variant : {0, 1, 2}) {
    for (DType stored : {DType::kFloat32, DType::kBFloat16}) {
      ModelBuilder builder(tiny_config(), DType::kFloat32);
      for (const auto& [name, values] : tiny_values()) {
        const std::vector<int64_t>& shape = tiny_shapes().at(name);
        const int64_t rows = shape.size() == 2 ? shape[0] : 1;
        const int64_t cols = shape.back();
        const Strides strides = variant == 0   ? Strides{cols + 3, 1}
                                : variant == 1 ? Strides{1, rows}
                                               : Strides{-cols * 2, -2};
        const int64_t origin = variant == 2 ? (rows - 1) * cols * 2 + (cols - 1) * 2 : 0;
        std::vector<float> spread(static_cast<size_t>(rows * (cols + 3) * 2), 1e9f);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < cols; ++c) {
            spread[static_cast<size_t>(origin + r * strides.row + c * strides.col)] =
                values[static_cast<size_t>(r * cols + c)];
          }
        }
        const std::string data = "x" + encode(spread, stored);  // at an odd address, too
        const std::vector<int64_t> given = shape.size() == 2
                                               ? std::vector<int64_t>{strides.row, strides.col}
                                               : std::vector<int64_t>{strides.col};
        builder.put(name, stored, shape, given, data.data() + 1 + origin * dtype_bytes(stored));
      }
      const auto model = builder.finish();
      EXPECT_TRUE(std::ranges::equal(model_weight_arena(*model), model_weight_arena(*expected)))
          << "variant " << variant << " " << dtype_name(stored);
    }
  }
}

// Rows of groups that lie apart, as those of q among the gates of each head.
TEST(ModelBuilder, TakesRowsInGroups) {
  const auto expected = build_tiny(DType::kFloat32, DType::kFloat32);
  for (const int64_t groups : {1, 2, 4}) {
    for (const DType stored : {DType::kFloat32, DType::kBFloat16}) {
      ModelBuilder builder(tiny_config(), DType::kFloat32);
      for (const auto& [name, values] : tiny_values()) {
        const std::vector<int64_t>& shape = tiny_shapes().at(name);
        if (shape.size() != 2 || shape[0] % groups != 0) {
          const std::string data = encode(values, stored);
          builder.put(name, stored, shape, {}, data.data());
          continue;
        }
        const int64_t each = shape[0] / groups;
        const int64_t cols = shape[1];
        const int64_t apart = (each + 3) * cols;
        std::vector<float> spread(static_cast<size_t>(groups * apart), 1e9f);
        for (int64_t i = 0; i < shape[0] * cols; ++i) {
          spread[static_cast<size_t>(i / (each * cols) * apart + i % (each * cols))] =
              values[static_cast<size_t>(i)];
        }
        const std::string data = encode(spread, stored);
        builder.put(name, stored, std::vector<int64_t>{groups, each, cols},
                    std::vector<int64_t>{apart, cols, 1}, data.data());
      }
      const auto model = builder.finish();
      EXPECT_TRUE(std::ranges::equal(model_weight_arena(*model), model_weight_arena(*expected)))
          << groups << " groups, " << dtype_name(stored);
    }
  }
}

// A model whose embedding is [65536, 1].
std::string wide_config() {
  return tiny_config({{"\"vocab_size\": 5", "\"vocab_size\": 65536"},
                      {"\"hidden_size\": 6", "\"hidden_size\": 1"}});
}

TEST(ModelBuilder, ConvertsEveryHalfAndRoundsToNearestEven) {
  const std::vector<int64_t> shape = {65536, 1};
  std::vector<uint16_t> halves(65536);
  std::iota(halves.begin(), halves.end(), uint16_t{0});
  const auto embedding = [&](DType stored, DType weights, const void* data) {
    ModelBuilder builder(wide_config(), weights);
    builder.put("embed.weight", stored, shape, {}, data);
    builder.fill_dummy(0);
    const auto model = builder.finish();
    const auto* begin = reinterpret_cast<const char*>(model->weights.embed);
    return std::string(begin, static_cast<size_t>(65536 * dtype_bytes(weights)));
  };
  std::vector<uint32_t> from_fp16;
  std::vector<uint32_t> from_bf16;
  std::vector<uint32_t> odd_floats;
  std::vector<uint16_t> rounded;
  for (uint32_t i = 0; i < 65536; ++i) {
    from_fp16.push_back(std::bit_cast<uint32_t>(fp16_to_float(static_cast<uint16_t>(i))));
    from_bf16.push_back(i << 16);
    // Every upper half with a lower half below, at and above the middle.
    constexpr std::array<uint32_t, 4> kLower = {0x7fffu, 0x8000u, 0x8001u, 0x0001u};
    odd_floats.push_back(i << 16 | kLower[i / 2 % 4]);
    rounded.push_back(float_to_bf16(std::bit_cast<float>(odd_floats.back())));
  }
  EXPECT_EQ(embedding(DType::kFloat16, DType::kFloat32, halves.data()), bytes_of(from_fp16));
  EXPECT_EQ(embedding(DType::kBFloat16, DType::kFloat32, halves.data()), bytes_of(from_bf16));
  EXPECT_EQ(embedding(DType::kFloat32, DType::kBFloat16, odd_floats.data()), bytes_of(rounded));
  // Independent of float_types.h: 1 + 2^-8 is a tie and goes to even, 1 + 3 * 2^-8 as well.
  EXPECT_EQ(float_to_bf16(1 + 0x1p-8f), 0x3f80);
  EXPECT_EQ(float_to_bf16(1 + 3 * 0x1p-8f), 0x3f82);
  EXPECT_EQ(float_to_bf16(1 + 0x1.01p-8f), 0x3f81);
  EXPECT_EQ(fp16_to_float(0x0001), 0x1p-24f);
  EXPECT_EQ(fp16_to_float(0x7bff), 65504.0f);
  EXPECT_TRUE(std::isinf(fp16_to_float(0xfc00)));
}

TEST(ModelBuilder, RefusesMistakes) {
  ModelBuilder builder(tiny_config(), DType::kBFloat16);
  const std::vector<float> data(100);
  const auto put = [&](std::string_view name, std::vector<int64_t> shape,
                       std::vector<int64_t> strides = {}, DType dtype = DType::kFloat32) {
    return message_of<InvalidArgument>(
        [&] { builder.put(name, dtype, shape, strides, data.data()); });
  };
  EXPECT_THAT(put("layers.2.attn.q.weight", {6, 6}), HasSubstr("no weight is named 'layers.2."));
  EXPECT_THAT(put("layers.0.attn.q.bias", {16}), HasSubstr("no weight is named"));
  EXPECT_THAT(put(std::string(5000, '\n'), {6}), HasSubstr("..."));
  EXPECT_THAT(put("embed.weight", {6, 5}), HasSubstr("has shape [6, 5]; allowed: [5, 6]"));
  EXPECT_THAT(put("embed.weight", {30}), HasSubstr("has shape [30]; allowed: [5, 6]"));
  EXPECT_THAT(put("embed.weight", {}), HasSubstr("has shape []; allowed: [5, 6]"));
  EXPECT_THAT(put("embed.weight", {5, 6, 1}), HasSubstr("allowed: [5, 6]"));
  EXPECT_THAT(put("embed.weight", {5, 6}, {6}), HasSubstr("has 1 strides; allowed: 2"));
  EXPECT_THAT(put("embed.weight", {5, 6}, {}, DType::kFloat16), HasSubstr("float32"));
  for (const DType dtype : {DType::kUInt8, DType::kFloat8E4M3}) {
    EXPECT_EQ(dtype_bytes(dtype), 1);
    EXPECT_THAT(put("embed.weight", {5, 6}, {}, dtype),
                HasSubstr(concat("is ", dtype == DType::kUInt8 ? "uint8" : "float8_e4m3",
                                 "; allowed: float32, bfloat16, float16")));
  }
  EXPECT_EQ(put("final_norm.weight", {6}, {}, DType::kFloat16), "");  // norms are float32
  EXPECT_EQ(put("embed.weight", {5, 6}), "");
  EXPECT_THAT(put("embed.weight", {5, 6}), HasSubstr("'embed.weight' is put twice"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                builder.put("lm_head.weight", DType::kFloat32, std::vector<int64_t>{5, 6}, {},
                            nullptr);
              }),
              HasSubstr("null data"));
  EXPECT_THROW(ModelBuilder(tiny_config(), DType::kFloat16), InvalidArgument);
}

// A decay that is no number makes every later state none, so it is refused in every dtype, also
// where the tensor is read in pieces.
TEST(ModelBuilder, RefusesDecaysThatAreNotFinite) {
  const std::vector<int64_t> shape = {4};
  for (const char* name : {"layers.1.attn.a_log", "layers.1.attn.dt_bias"}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const auto& [value, shown] : std::vector<std::pair<float, const char*>>{
               {std::numeric_limits<float>::quiet_NaN(), "nan"},
               {std::numeric_limits<float>::infinity(), "inf"},
               {-std::numeric_limits<float>::infinity(), "-inf"}}) {
        SCOPED_TRACE(concat(name, " ", dtype_name(dtype), " ", shown));
        ModelBuilder builder(testing::recurrent_json({}), DType::kFloat32);
        std::string bytes = encode({0.5f, -2.0f, std::isnan(value) ? 1.0f : value, 1.0f}, dtype);
        const auto size = static_cast<size_t>(dtype_bytes(dtype));
        // All bits but the sign are NaN in every one of these dtypes; `encode` knows neither.
        const uint16_t infinity = value > 0 ? 0x7c00 : 0xfc00;
        if (std::isnan(value)) {
          bytes.replace(2 * size, size, std::string(size - 1, '\xff') + '\x7f');
        } else if (dtype == DType::kFloat16) {
          std::memcpy(bytes.data() + 2 * size, &infinity, size);
        }
        const std::string expected = concat("'", name, "'[2] is ", shown,
                                            "; allowed: finite numbers. The tensor is "
                                            "damaged: download or convert it again");
        EXPECT_EQ(
            message_of<InvalidArgument>([&] { builder.put(name, dtype, shape, {}, bytes.data()); }),
            expected);
        EXPECT_EQ(message_of<InvalidArgument>([&] {
                    builder.put(name, dtype, shape, [&](int64_t first, std::span<std::byte> to) {
                      std::memcpy(to.data(), bytes.data() + first, to.size());
                    });
                  }),
                  expected);
        const std::string good = encode({0.5f, -2.0f, 3.0f, 1.0f}, dtype);
        builder.put(name, dtype, shape, {}, good.data());
      }
    }
  }
}

TEST(ModelBuilder, ListsWhatIsMissingAndEndsEmpty) {
  ModelBuilder builder(tiny_config(), DType::kFloat32);
  std::vector<std::string> names;
  for (const auto& [name, shape] : tiny_shapes()) names.push_back(name);  // a map: sorted
  EXPECT_EQ(builder.missing(), names);
  const std::vector<float> zeros(100);
  builder.put("embed.weight", DType::kFloat32, tiny_shapes().at("embed.weight"), {}, zeros.data());
  const std::string message = message_of<InvalidArgument>([&] { (void)builder.finish(); });
  EXPECT_THAT(message, HasSubstr("33 of 34 weights of tiny are missing: final_norm.weight, "));
  EXPECT_EQ(std::count(message.begin(), message.end(), ','), 8);  // 8 names and "..."
  EXPECT_THAT(message, Not(HasSubstr("embed")));
  for (const auto& [name, shape] : tiny_shapes()) {
    if (name != "embed.weight") builder.put(name, DType::kFloat32, shape, {}, zeros.data());
  }
  EXPECT_THAT(builder.missing(), SizeIs(0));
  EXPECT_NE(builder.finish(), nullptr);
  EXPECT_THROW((void)builder.finish(), InvalidArgument);
  EXPECT_THROW((void)builder.missing(), InvalidArgument);
  EXPECT_THROW(builder.fill_dummy(0), InvalidArgument);
}

// --- Dummy weights -----------------------------------------------------------------------------

TEST(DummyWeights, AreNormalAndNeutral) {
  const std::string json = tiny_config({{"\"vocab_size\": 5", "\"vocab_size\": 50001"},
                                        {"\"hidden_size\": 6", "\"hidden_size\": 31"}});
  ModelBuilder builder(json, DType::kFloat32);
  builder.fill_dummy(7);
  const auto model = builder.finish();
  const auto* embed = reinterpret_cast<const float*>(model->weights.embed);
  const int64_t count = 50001 * 31;
  std::array<double, 5> moments = {};
  double lag = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double z = embed[i] / 0.02;
    for (int power = 1; power <= 4; ++power) moments[power] += std::pow(z, power) / count;
    if (i + 1 < count) lag += z * (embed[i + 1] / 0.02) / count;
  }
  // Bounds: five standard errors of 1.55 million draws.
  EXPECT_NEAR(moments[1], 0, 0.004);
  EXPECT_NEAR(moments[2], 1, 0.006);
  EXPECT_NEAR(moments[3], 0, 0.016);
  EXPECT_NEAR(moments[4], 3, 0.04);
  EXPECT_NEAR(lag, 0, 0.004);
  const auto [least, most] = std::minmax_element(embed, embed + count);
  EXPECT_LT(*least, -0.08f);
  EXPECT_GT(*most, 0.08f);
  EXPECT_NE(std::memcmp(model->weights.embed, model->weights.lm_head.weight.data, 4096), 0);

  const LayerWeights& layer = model->weights.layers[1];
  for (const float* norm : {model->weights.final_norm, layer.attn_norm, layer.mlp_post_norm}) {
    EXPECT_TRUE(std::all_of(norm, norm + 31, [](float w) { return w == 0; }));  // (1 + 0)
  }
  const float* const bias = std::get<MultiHeadAttentionWeights>(layer.attention).qkv.bias;
  EXPECT_TRUE(std::all_of(bias, bias + 10, [](float b) { return b == 0; }));
  ModelBuilder plain(tiny_config({{"\"norm_weight_offset\": 1", "\"norm_weight_offset\": 0"}}),
                     DType::kBFloat16);
  plain.fill_dummy(7);
  EXPECT_EQ(plain.finish()->weights.final_norm[0], 1);
}

TEST(DummyWeights, DependOnTheSeedAndNotOnThreads) {
  const std::string json = tiny_config({{"\"vocab_size\": 5", "\"vocab_size\": 30001"}});
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    // The builder uses one thread for each core that the process may run on.
    const auto arena = [&](uint64_t seed, bool on_one_core) {
      cpu_set_t before;
      sched_getaffinity(0, sizeof(before), &before);
      if (on_one_core) {
        cpu_set_t one_core;
        CPU_ZERO(&one_core);
        CPU_SET(sched_getcpu(), &one_core);
        sched_setaffinity(0, sizeof(one_core), &one_core);
      }
      ModelBuilder builder(json, dtype);
      builder.fill_dummy(seed);
      const auto model = builder.finish();
      sched_setaffinity(0, sizeof(before), &before);
      const auto bytes = model_weight_arena(*model);
      return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    };
    const std::string one = arena(3, /*on_one_core=*/true);
    EXPECT_TRUE(one == arena(3, false));
    EXPECT_FALSE(one == arena(4, false));
    EXPECT_FALSE(one == arena(3 + (uint64_t{1} << 40), false));
  }
}

TEST(DummyWeights, LeavePutTensorsAlone) {
  ModelBuilder builder(tiny_config(), DType::kFloat32);
  const std::string name = "layers.0.attn.k.weight";
  builder.put(name, DType::kFloat32, tiny_shapes().at(name), {}, tiny_values().at(name).data());
  builder.fill_dummy(0);
  const auto model = builder.finish();
  const auto* qkv = reinterpret_cast<const float*>(
      std::get<MultiHeadAttentionWeights>(model->weights.layers[0].attention).qkv.weight.data);
  EXPECT_EQ(std::memcmp(qkv + 16 * 6, tiny_values().at(name).data(), 8 * 6 * 4), 0);
  EXPECT_LT(std::abs(qkv[16 * 6 - 1]), 0.1f);
  EXPECT_NE(qkv[16 * 6 - 1], 0);
  EXPECT_NE(qkv[24 * 6], 0);
}

}  // namespace
}  // namespace paceline
