// SPDX-License-Identifier: Apache-2.0
// Mixtures of experts and attention sinks in a whole model. Each model here is made so that its
// hidden states must have the bits of a plain model.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <paceline/executor.h>
#include <paceline/model.h>

#include "base/check.h"
#include "cpp/engine_options.h"
#include "device/counting_memory.h"
#include "device/device_arena.h"
#include "model/description/decoder_config.h"
#include "model/forward/activations.h"
#include "support/raw_models.h"
#include "support/reference_model.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

namespace reference = testing::reference;
using testing::make_mixture;
using testing::random_raw_model;
using testing::RawModel;
using testing::small_engine_options;
using testing::tiny_config_json;
using testing::TinyModel;

constexpr int32_t kHidden = 16;
constexpr int32_t kIntermediate = 24;

// What description says about every MLP, and what takes its place in models of DeepSeek-V3's kind.
const std::string kDenseMlp = R"("activation": "swiglu_oai", "alpha": 1.7, "limit": 2,
                     "has_bias": true)";
const std::string kSilu = R"("activation": "silu", "has_bias": false)";

std::string description(const std::string& mlp, const std::string& sinks) {
  std::string layers;
  for (const char* kind : {"\"sliding\", \"window\": 6", "\"full\", \"window\": 0"}) {
    layers += concat(layers.empty() ? "" : ",", R"({"attention": {"kind": )", kind,
                     R"(, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 4, "scale": 0.5,
                     "soft_cap": 0, "rope": 0, "has_qk_norm": false, "has_qkv_bias": false,
                     "has_o_bias": false)",
                     sinks, R"(}, "mlp": {"intermediate": 24, )", kDenseMlp, mlp, "}}");
  }
  return concat(R"({"format": "paceline-decoder-1", "name": "mixture", "vocab_size": 32,
    "hidden_size": 16, "max_position": 256, "norm_eps": 1e-5, "norm_weight_offset": 0,
    "embed_scale": 40, "logit_soft_cap": 0, "ties_lm_head": false, "has_post_norms": false,
    "ropes": [{"inv_freq": [1, 0.5], "scale": 1}], "layers": [)",
                layers, "]}");
}

std::string mixture(int32_t num_experts, int32_t top_k, const char* more = "") {
  return concat(", \"num_experts\": ", num_experts, ", \"top_k\": ", top_k,
                ", \"router\": \"softmax_of_chosen\", \"has_router_bias\": true", more);
}

std::vector<float> random_values(uint64_t seed, int64_t count) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, 0.5f);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

// The MLP of `layer`, of one expert.
struct Mlp {
  std::vector<float> gate_up;  // [2 * intermediate, hidden]
  std::vector<float> gate_up_bias;
  std::vector<float> down;
  std::vector<float> down_bias;
};
Mlp random_mlp(uint64_t seed) {
  return {.gate_up = random_values(4 * seed, int64_t{2} * kIntermediate * kHidden),
          .gate_up_bias = random_values(4 * seed + 1, 2 * kIntermediate),
          .down = random_values(4 * seed + 2, int64_t{kHidden} * kIntermediate),
          .down_bias = random_values(4 * seed + 3, kHidden)};
}

// Rows of gate and up in turn.
std::vector<float> interleaved(const std::vector<float>& rows, int64_t width) {
  std::vector<float> out;
  for (int64_t i = 0; i < kIntermediate; ++i) {
    for (const int64_t row : {i, kIntermediate + i}) {
      out.insert(out.end(), rows.begin() + row * width, rows.begin() + (row + 1) * width);
    }
  }
  return out;
}

void put(ModelBuilder& builder, const std::string& name, const std::vector<int64_t>& shape,
         const std::vector<float>& values) {
  builder.put(name, DType::kFloat32, shape, {}, values.data());
}

// Everything but the MLPs.
void put_rest(ModelBuilder& builder) {
  uint64_t seed = 1000;
  const auto matrix = [&](const std::string& name, int64_t rows, int64_t cols) {
    put(builder, name + ".weight", {rows, cols}, random_values(++seed, rows * cols));
  };
  matrix("embed", 32, kHidden);
  matrix("lm_head", 32, kHidden);
  for (int64_t layer = 0; layer < 2; ++layer) {
    const std::string name = concat("layers.", layer, ".attn.");
    matrix(name + "q", 16, kHidden);
    matrix(name + "k", 8, kHidden);
    matrix(name + "v", 8, kHidden);
    matrix(name + "o", kHidden, 16);
  }
  builder.fill_dummy(1);  // norms
}

std::shared_ptr<const Model> dense_model(const std::string& sinks = "",
                                         const std::vector<float>& sink_values = {}) {
  ModelBuilder builder(description("", sinks), DType::kFloat32);
  for (int64_t layer = 0; layer < 2; ++layer) {
    const std::string name = concat("layers.", layer, ".mlp.");
    const Mlp mlp = random_mlp(static_cast<uint64_t>(layer));
    constexpr int64_t kRows = kIntermediate;
    for (const auto& [part, first] : {std::pair("gate", int64_t{0}), std::pair("up", kRows)}) {
      const auto begin = mlp.gate_up.begin() + first * kHidden;
      put(builder, name + part + ".weight", {kRows, kHidden}, {begin, begin + kRows * kHidden});
      const auto bias = mlp.gate_up_bias.begin() + first;
      put(builder, name + part + ".bias", {kRows}, {bias, bias + kRows});
    }
    put(builder, name + "down.weight", {kHidden, kRows}, mlp.down);
    put(builder, name + "down.bias", {kHidden}, mlp.down_bias);
    if (!sinks.empty()) put(builder, concat("layers.", layer, ".attn.sinks"), {4}, sink_values);
  }
  put_rest(builder);
  return builder.finish();
}

// Experts are the dense model's MLP where `is_copy` says so, otherwise other random ones. Every row
// has the router's logits `router_bias`.
std::shared_ptr<const Model> mixture_model(const std::vector<bool>& is_copy, int32_t top_k,
                                           const std::vector<float>& router_bias,
                                           bool is_interleaved) {
  const auto num_experts = static_cast<int64_t>(is_copy.size());
  ModelBuilder builder(description(mixture(static_cast<int32_t>(num_experts), top_k,
                                           is_interleaved ? ", \"interleaved\": true" : ""),
                                   ""),
                       DType::kFloat32);
  for (int64_t layer = 0; layer < 2; ++layer) {
    Mlp all;
    for (int64_t expert = 0; expert < num_experts; ++expert) {
      Mlp mlp = random_mlp(static_cast<uint64_t>(is_copy[expert] ? layer : 10 + expert));
      if (is_interleaved) {
        mlp.gate_up = interleaved(mlp.gate_up, kHidden);
        mlp.gate_up_bias = interleaved(mlp.gate_up_bias, 1);
      }
      const auto append = [](std::vector<float>& to, const std::vector<float>& from) {
        to.insert(to.end(), from.begin(), from.end());
      };
      append(all.gate_up, mlp.gate_up);
      append(all.gate_up_bias, mlp.gate_up_bias);
      append(all.down, mlp.down);
      append(all.down_bias, mlp.down_bias);
    }
    const std::string name = concat("layers.", layer, ".mlp.");
    constexpr int64_t kRows = 2 * kIntermediate;
    put(builder, name + "router.weight", {num_experts, kHidden},
        std::vector<float>(static_cast<size_t>(num_experts * kHidden)));
    put(builder, name + "router.bias", {num_experts}, router_bias);
    put(builder, name + "experts.gate_up.weight", {num_experts, kRows, kHidden}, all.gate_up);
    put(builder, name + "experts.gate_up.bias", {num_experts, kRows}, all.gate_up_bias);
    put(builder, name + "experts.down.weight", {num_experts, kHidden, kIntermediate}, all.down);
    put(builder, name + "experts.down.bias", {num_experts, kHidden}, all.down_bias);
  }
  put_rest(builder);
  return builder.finish();
}

// A mixture of DeepSeek-V3's kind, whose experts' tensors are their own if `is_per_expert`. The
// dense model's MLP is the shared expert or, with `is_in_experts`, every expert; the other is zero.
std::shared_ptr<const Model> deepseek_model(bool is_per_expert, bool is_in_experts) {
  constexpr int64_t kNumExperts = 4;
  constexpr int64_t kRows = kIntermediate;
  std::string json = description(
      concat(R"(, "num_experts": 4, "top_k": 1, "router": "sigmoid", "has_router_bias": true,
             "num_groups": 2, "top_groups": 1, "normalises_weights": true,
             "per_expert": )",
             is_per_expert ? "true" : "false",
             R"(, "shared": {"intermediate": 24, "activation": "silu", "has_bias": false})"),
      "");
  for (size_t at = 0; (at = json.find(kDenseMlp, at)) != std::string::npos;) {
    json.replace(at, kDenseMlp.size(), kSilu);
  }
  ModelBuilder builder(json, DType::kFloat32);
  for (int64_t layer = 0; layer < 2; ++layer) {
    const std::string name = concat("layers.", layer, ".mlp.");
    const Mlp mlp = random_mlp(static_cast<uint64_t>(layer));
    const Mlp zero = {.gate_up = std::vector<float>(mlp.gate_up.size()),
                      .down = std::vector<float>(mlp.down.size())};
    put(builder, name + "router.weight", {kNumExperts, kHidden},
        random_values(70, kNumExperts * kHidden));
    put(builder, name + "router.bias", {kNumExperts}, random_values(71, kNumExperts));
    put(builder, name + "router.correction.bias", {kNumExperts}, random_values(72, kNumExperts));
    const auto put_unit = [&](const Mlp& from, const std::string& gate, const std::string& up,
                              const std::string& down) {
      const auto middle = from.gate_up.begin() + kRows * kHidden;
      put(builder, gate, {kRows, kHidden}, {from.gate_up.begin(), middle});
      put(builder, up, {kRows, kHidden}, {middle, from.gate_up.end()});
      put(builder, down, {kHidden, kRows}, from.down);
    };
    const Mlp& shared = is_in_experts ? zero : mlp;
    const Mlp& expert = is_in_experts ? mlp : zero;
    put_unit(shared, name + "shared.gate.weight", name + "shared.up.weight",
             name + "shared.down.weight");
    Mlp all;
    for (int64_t e = 0; e < kNumExperts; ++e) {
      const auto own = [&](const char* which) {
        return concat(name, "experts.", which, ".", e, ".weight");
      };
      if (is_per_expert) put_unit(expert, own("gate"), own("up"), own("down"));
      all.gate_up.insert(all.gate_up.end(), expert.gate_up.begin(), expert.gate_up.end());
      all.down.insert(all.down.end(), expert.down.begin(), expert.down.end());
    }
    if (is_per_expert) continue;
    put(builder, name + "experts.gate_up.weight", {kNumExperts, 2 * kRows, kHidden}, all.gate_up);
    put(builder, name + "experts.down.weight", {kNumExperts, kHidden, kRows}, all.down);
  }
  put_rest(builder);
  return builder.finish();
}

// The dense model with that MLP.
std::shared_ptr<const Model> dense_silu_model() {
  std::string json = description("", "");
  for (size_t at = 0; (at = json.find(kDenseMlp, at)) != std::string::npos;) {
    json.replace(at, kDenseMlp.size(), kSilu);
  }
  ModelBuilder builder(json, DType::kFloat32);
  for (int64_t layer = 0; layer < 2; ++layer) {
    const std::string name = concat("layers.", layer, ".mlp.");
    const Mlp mlp = random_mlp(static_cast<uint64_t>(layer));
    const auto middle = mlp.gate_up.begin() + int64_t{kIntermediate} * kHidden;
    put(builder, name + "gate.weight", {kIntermediate, kHidden}, {mlp.gate_up.begin(), middle});
    put(builder, name + "up.weight", {kIntermediate, kHidden}, {middle, mlp.gate_up.end()});
    put(builder, name + "down.weight", {kHidden, kIntermediate}, mlp.down);
  }
  put_rest(builder);
  return builder.finish();
}

// The prompt of hidden_states.
std::vector<int32_t> prompt_of(int32_t vocab_size) {
  std::vector<int32_t> prompt;
  for (int32_t i = 0; i < 40; ++i) prompt.push_back(i * 7 % vocab_size);
  return prompt;
}

// The residual stream that enters layer 1, which is the work of layer 0, and the output of the
// final norm, of a prompt. `last`: the number of layers.
std::vector<float> hidden_states(const std::shared_ptr<const Model>& model, int32_t last = 2,
                                 int32_t hidden = kHidden) {
  ExecutorOptions options = small_engine_options(0);
  Executor executor(model, nullptr, options);
  Request request;
  request.prompt = prompt_of(32);
  request.hidden_layers = {1, last};
  EXPECT_TRUE(executor.add_request(std::move(request)).has_value());
  for (;;) {
    for (const RequestEvent& event : executor.poll(1000)) {
      EXPECT_EQ(event.error, "");
      if (event.finish_reason == FinishReason::kNone) continue;
      const float* data = event.hidden_states.data.get();
      return {data, data + int64_t{2} * 40 * hidden};
    }
  }
}

TEST(Mixture, OfOneExpertEqualsItsMlp) {
  const std::vector<float> expected = hidden_states(dense_model());
  EXPECT_EQ(hidden_states(mixture_model({true}, 1, {3}, false)), expected);
  EXPECT_EQ(hidden_states(mixture_model({true}, 1, {3}, true)), expected);
}

TEST(Mixture, OfTwoEqualExpertsThatShareTheWeightEqualsTheirMlp) {
  const std::vector<float> expected = hidden_states(dense_model());
  for (const bool is_interleaved : {false, true}) {
    EXPECT_EQ(hidden_states(
                  mixture_model({false, true, false, true}, 2, {1, 2, 1.5f, 2}, is_interleaved)),
              expected);
    // Another expert has a part in the sum.
    EXPECT_NE(hidden_states(
                  mixture_model({false, true, false, true}, 2, {1, 2, 2.5f, 2}, is_interleaved)),
              expected);
  }
}

TEST(Mixture, WithAnExpertOrASharedExpertOfZerosEqualsTheOther) {
  const std::vector<float> expected = hidden_states(dense_silu_model());
  for (const bool is_per_expert : {false, true}) {
    for (const bool is_in_experts : {false, true}) {
      EXPECT_EQ(hidden_states(deepseek_model(is_per_expert, is_in_experts)), expected);
    }
  }
}

// A model of three layers against the equations in double precision.
void expect_reference(const std::string& json, uint64_t seed) {
  const RawModel raw = random_raw_model(json, seed);
  const auto hidden = static_cast<size_t>(raw.config.hidden);
  const std::vector<float> got = hidden_states(raw.build(), /*last=*/3, raw.config.hidden);
  const reference::TargetStates want = reference::run_target(raw, prompt_of(32));
  int64_t num_far = 0;
  for (size_t row = 0; row < 40; ++row) {
    double worst = 0;
    for (size_t i = 0; i < hidden; ++i) {
      const size_t at = row * hidden + i;
      const size_t half = got.size() / 2;
      worst = std::max(worst, std::fabs(got[at] - want.entering[1][row][i]) / 10);
      worst = std::max(worst, std::fabs(got[half + at] - want.normed[row][i]));
    }
    num_far += worst > 1e-4 ? 1 : 0;
  }
  // A row whose experts are almost equally good may choose another.
  EXPECT_LE(num_far, 1) << "seed " << seed;
}

// Whole models of random shapes.
TEST(Mixture, MatchesReference) {
  int32_t num_deepseek = 0;
  for (uint64_t seed = 1; seed <= 24; ++seed) {
    std::mt19937_64 random(seed);
    TinyModel shape{.vocab_size = 32, .windows = {8, 0, 8}};
    make_mixture(shape, random);
    num_deepseek += shape.is_deepseek ? 1 : 0;
    expect_reference(tiny_config_json(shape), seed);
  }
  EXPECT_GE(num_deepseek, 8);
}

TEST(Mixture, BesideADenseMlpMatchesReference) {
  const std::string dense = R"({"intermediate":48,"activation":"silu","has_bias":false})";
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    std::string json =
        tiny_config_json({.vocab_size = 32, .windows = {8, 0, 8}, .is_gemma = false});
    const std::string both =
        concat(R"({"dense": )", dense, R"(, "mixture": {"num_experts": 8, "top_k": )", 1 + seed % 4,
               R"(, "intermediate": 24, "activation": "gelu_tanh", "has_bias": false, "router": )",
               seed % 2 == 0 ? R"("softmax")" : R"("softmax_of_chosen")",
               R"(, "has_router_bias": false, "logit_scale": 0.3, "has_expert_scales": true}})");
    int32_t num_layers = 0;
    for (size_t at = 0; (at = json.find(dense, at)) != std::string::npos; at += both.size()) {
      json.replace(at, dense.size(), both);
      ++num_layers;
    }
    ASSERT_EQ(num_layers, 3);
    expect_reference(json, seed);
  }
}

TEST(Mixture, HasActivationsForEveryPlace) {
  ActivationWidths widths;
  constexpr int64_t kMaxTokens = 100;
  widths.merge(parse_decoder_config(description("", "")), kMaxTokens);
  EXPECT_EQ(widths.gate_up, 2 * kIntermediate);
  EXPECT_EQ(std::get<MoeWidths>(widths.kinds).top_k, 0);
  // Both models of an engine use the same buffers.
  widths.merge(parse_decoder_config(description(mixture(6, 3), "")), kMaxTokens);
  widths.merge(parse_decoder_config(description(mixture(8, 2), "")), kMaxTokens);
  EXPECT_EQ(widths.gate_up, 3 * 2 * kIntermediate);
  EXPECT_EQ(std::get<MoeWidths>(widths.kinds).expert_output, 3 * kHidden);
  EXPECT_EQ(std::get<MoeWidths>(widths.kinds).num_experts, 8);
  EXPECT_EQ(std::get<MoeWidths>(widths.kinds).top_k, 3);
  // A shared expert is computed in the buffers of the others.
  ActivationWidths with_shared;
  with_shared.merge(parse_decoder_config(description(
                        mixture(4, 2, R"(, "shared": {"intermediate": 100, "activation": "silu",
                                   "has_bias": false})"),
                        "")),
                    kMaxTokens);
  EXPECT_EQ(with_shared.gate_up, 200);
  CountingMemory memory;
  DeviceArena arena(memory);
  static_cast<void>(allocate_activations(arena, /*rows=*/10, widths, DType::kFloat32));
  // residual, normed, branch; qkv, attention; gate_up, activated; experts' outputs; the logits,
  // numbers, weights and rows of the experts; and rounding of each buffer.
  const int64_t per_row = 3 * kHidden + 32 + 16 + 3 * 3 * kIntermediate + 3 * kHidden + 8 + 4 * 3;
  const int64_t bytes = arena.bytes_by_purpose().find("activations")->second;
  EXPECT_GE(bytes, (10 * per_row + 9) * 4);
  EXPECT_LT(bytes, (10 * per_row + 9) * 4 + 14 * 256);
}

TEST(Sinks, AddToTheSumOfTheSoftmaxInEveryKindOfAttention) {
  const std::string sinks = ", \"has_sinks\": true";
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  {
    const std::vector<float> expected = hidden_states(dense_model());
    const auto with_sinks = [&](float sink) {
      return hidden_states(dense_model(sinks, std::vector<float>(4, sink)));
    };
    EXPECT_EQ(with_sinks(-kInfinity), expected);
    // The sliding layer alone, and then both layers.
    const auto first_half = [](const std::vector<float>& all) {
      return std::vector<float>(all.begin(), all.begin() + std::ssize(all) / 2);
    };
    const std::vector<float> with_zeros = with_sinks(0);
    EXPECT_NE(first_half(with_zeros), first_half(expected));
    EXPECT_NE(with_zeros, expected);
    for (const float value : with_sinks(50)) EXPECT_TRUE(std::isfinite(value));
  }
}

}  // namespace
}  // namespace paceline
