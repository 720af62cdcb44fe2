// SPDX-License-Identifier: Apache-2.0
// Weight updates in place, the idle engine that they need, and the ownership of hidden states.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <paceline/error.h>
#include <paceline/executor.h>
#include <paceline/model.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "cpp/engine_options.h"
#include "model/weights/model_impl.h"
#include "support/described_model.h"
#include "support/errors.h"
#include "support/raw_models.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

using testing::build_tiny;
using testing::encode;
using ::testing::HasSubstr;
using testing::message_of;
using testing::random_raw_model;
using testing::RawModel;
using testing::small_engine_options;
using testing::tiny_config;
using testing::tiny_config_json;
using testing::tiny_model;
using testing::tiny_shapes;
using testing::tiny_values;
using testing::TinyModel;

// All tensors of tiny_config with other values, in memory that lives as long as the object.
struct NewWeights {
  explicit NewWeights(DType stored) {
    for (auto [name, values] : tiny_values()) {
      for (float& value : values) value = -value / 2;
      bytes.push_back(encode(values, stored));
      tensors.push_back({.name = name, .dtype = stored, .shape = tiny_shapes().at(name)});
    }
    for (size_t i = 0; i < bytes.size(); ++i) tensors[i].data = bytes[i].data();
  }

  std::vector<std::string> bytes;
  std::vector<NamedTensor> tensors;
};

std::vector<std::byte> arena_of(const NewWeights& weights, DType dtype) {
  ModelBuilder builder(tiny_config(), dtype);
  for (const NamedTensor& t : weights.tensors) builder.put(t.name, t.dtype, t.shape, {}, t.data);
  return model_weight_arena(*builder.finish());
}

TEST(WeightUpdate, EqualsANewModel) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const auto model = build_tiny(DType::kFloat32, dtype);
    const NewWeights weights(DType::kBFloat16);
    EXPECT_NE(model_weight_arena(*model), arena_of(weights, dtype));
    update_models(std::vector<ModelUpdate>{{.model = model, .tensors = weights.tensors}});
    EXPECT_EQ(model_weight_arena(*model), arena_of(weights, dtype));
  }
}

// A shared expert lies behind the other experts.
TEST(WeightUpdate, EqualsANewModelWithASharedExpert) {
  const std::string json = tiny_config_json({.is_gemma = false,
                                             .num_experts = 4,
                                             .is_interleaved = false,
                                             .is_deepseek = true,
                                             .shared_intermediate = 48,
                                             .is_per_expert = true});
  const auto model = random_raw_model(json, 1).build();
  const RawModel other = random_raw_model(json, 2);
  ASSERT_TRUE(std::get<MoeMlp>(model->config.layers[0].mlp).joins_shared());
  std::vector<NamedTensor> tensors;
  for (const auto& [name, tensor] : other.tensors) {
    tensors.push_back({.name = name,
                       .dtype = DType::kFloat32,
                       .shape = tensor.shape,
                       .data = tensor.values.data()});
  }
  update_models(std::vector<ModelUpdate>{{.model = model, .tensors = tensors}});
  EXPECT_EQ(model_weight_arena(*model), model_weight_arena(*other.build()));
}

TEST(WeightUpdate, RefusesBeforeItWrites) {
  const auto first = build_tiny(DType::kFloat32, DType::kFloat32);
  const auto second = build_tiny(DType::kFloat32, DType::kFloat32);
  const std::vector<std::byte> before = model_weight_arena(*first);
  const NewWeights good(DType::kFloat32);
  const auto refused = [&](auto edit) {
    NewWeights bad(DType::kFloat32);
    edit(bad.tensors);
    // The first model's tensors are fine.
    const std::string message = message_of<InvalidArgument>([&] {
      update_models(std::vector<ModelUpdate>{{.model = first, .tensors = good.tensors},
                                             {.model = second, .tensors = bad.tensors}});
    });
    EXPECT_EQ(model_weight_arena(*first), before) << message;
    EXPECT_EQ(model_weight_arena(*second), before) << message;
    return message;
  };
  using Tensors = std::vector<NamedTensor>;
  EXPECT_THAT(refused([](Tensors& t) { t.pop_back(); }), HasSubstr("are missing: "));
  EXPECT_THAT(refused([](Tensors& t) { t.push_back(t[0]); }), HasSubstr("is put twice"));
  EXPECT_THAT(refused([](Tensors& t) { t[3].shape[0] += 1; }), HasSubstr("has shape "));
  EXPECT_THAT(refused([](Tensors& t) { t[3].name = "x"; }), HasSubstr("no weight is named 'x'"));
  EXPECT_THAT(refused([](Tensors& t) { t[3].dtype = DType::kInt32; }), HasSubstr("is int32"));
  EXPECT_THAT(refused([](Tensors& t) { t[3].data = nullptr; }), HasSubstr("null data pointer"));
}

// The last event of a request.
RequestEvent finish(Executor& executor) {
  for (;;) {
    for (RequestEvent& event : executor.poll(100)) {
      if (event.finish_reason != FinishReason::kNone) return std::move(event);
    }
  }
}

TEST(WeightUpdate, WaitsForTheDeviceAndHoldsRequests) {
  const auto model = tiny_model(TinyModel{}, 3);
  for (const int32_t lateness : {0, 2}) {
    ExecutorOptions options = small_engine_options(0);
    options.device_lateness = lateness;
    Executor executor(model, nullptr, options);
    const Request request = {.prompt = {1, 2, 3}, .sampling = {.max_tokens = 200}};
    ASSERT_TRUE(executor.add_request(request));
    bool has_run = false;
    EXPECT_EQ(executor.while_idle([&] { has_run = true; }), 1);
    EXPECT_FALSE(has_run) << "while a request runs";
    (void)finish(executor);
    // Launches ahead of the last result are still under way.
    EXPECT_EQ(executor.while_idle([&] {
      has_run = true;
      const int64_t num_iterations = executor.stats().num_iterations;
      ASSERT_TRUE(executor.add_request(request));
      EXPECT_THAT(message_of<InvalidArgument>([&] { (void)executor.while_idle([] {}); }),
                  HasSubstr("another update of the weights or of the drafter is under way"));
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      EXPECT_TRUE(executor.poll(0).empty());
      EXPECT_EQ(executor.stats().num_iterations, num_iterations);
    }),
              0);
    EXPECT_TRUE(has_run);
    if (HasFailure()) return;  // the events below may have been read already
    EXPECT_EQ(finish(executor).finish_reason, FinishReason::kLength);
    EXPECT_EQ(executor.check_integrity(), "");
    // What the function throws reaches the caller, and the engine goes on.
    EXPECT_THROW((void)executor.while_idle([] { throw std::runtime_error("mine"); }),
                 std::runtime_error);
    ASSERT_TRUE(executor.add_request(request));
    EXPECT_EQ(finish(executor).finish_reason, FinishReason::kLength);
  }
}

TEST(WeightUpdate, RefusesASharedModel) {
  const auto model = tiny_model(TinyModel{}, 3);
  // Target and drafter of one executor may be the same.
  Executor first(model, model, small_engine_options(2));
  EXPECT_EQ(first.while_idle([&] {
    EXPECT_THAT(
        message_of<InvalidArgument>([&] { Executor(model, nullptr, small_engine_options(0)); }),
        HasSubstr("are being updated"));
  }),
            0);
  {
    Executor second(model, nullptr, small_engine_options(0));
    EXPECT_THAT(message_of<InvalidArgument>([&] { (void)first.while_idle([] {}); }),
                HasSubstr("are shared by 2 engines"));
  }
  EXPECT_EQ(first.while_idle([] {}), 0);
}

TEST(HiddenStates, AreWholeAndTheCallers) {
  const auto model = tiny_model(TinyModel{}, 3);
  ExecutorOptions options = small_engine_options(0);
  options.prefill_chunk_size = 8;
  options.host_delay_max_us = 500;
  std::optional<Executor> executor;
  executor.emplace(model, nullptr, options);
  const std::vector<int32_t> prompt(200, 1);
  for (const bool is_cancelled : {true, false}) {
    const int64_t num_iterations = executor->stats().num_iterations;
    const RequestId id =
        executor->add_request({.prompt = prompt, .hidden_layers = {0, 1, 0}}).value();
    if (is_cancelled) {
      while (executor->stats().num_iterations < num_iterations + 3) std::this_thread::yield();
      EXPECT_TRUE(executor->cancel(id));
    }
    const RequestEvent event = finish(*executor);
    EXPECT_EQ(executor->check_integrity(), "");
    EXPECT_EQ(event.logits, nullptr);
    if (is_cancelled) {
      EXPECT_EQ(event.finish_reason, FinishReason::kCancelled);
      EXPECT_EQ(event.hidden_states.data, nullptr);
      continue;
    }
    EXPECT_EQ(event.finish_reason, FinishReason::kLength);
    const DeviceValues& states = event.hidden_states;
    ASSERT_NE(states.data, nullptr);
    EXPECT_EQ(states.data.use_count(), 1) << "the engine holds on to them";
    ASSERT_EQ(states.shape.size(), 3U);
    EXPECT_EQ(states.shape[0], 3);
    EXPECT_EQ(states.shape[1], 200);
    executor.reset();  // the values outlive the engine
    const int64_t layer = states.shape[1] * states.shape[2];
    EXPECT_TRUE(
        std::equal(states.data.get(), states.data.get() + layer, states.data.get() + 2 * layer));
    EXPECT_FALSE(
        std::equal(states.data.get(), states.data.get() + layer, states.data.get() + layer));
  }
}

}  // namespace
}  // namespace paceline
