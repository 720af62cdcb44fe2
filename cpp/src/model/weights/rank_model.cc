// SPDX-License-Identifier: Apache-2.0
#include "model/weights/rank_model.h"

#include <paceline/config.h>

#include <algorithm>
#include <string>
#include <variant>
#include <vector>

#include "base/check.h"

namespace paceline {
namespace {

// Why ranks cannot share a layer, or empty.
[[nodiscard]] std::string layer_refusal(const LayerConfig& layer, const LayerWeights& weights,
                                        int32_t num_ranks) {
  const auto refusal = [&]<class Kind>(const Kind& kind, const auto& of_layer) {
    return split_refusal(kind, std::get<WeightsOf<Kind>>(of_layer), num_ranks);
  };
  const auto attention = std::visit(
      [&](const auto& kind) {
        const std::string why = refusal(kind, weights.attention);
        return why.empty() ? why : concat(why, " in its attention, ", kind.kNames.front());
      },
      layer.attention);
  if (!attention.empty()) return attention;
  return std::visit(
      [&](const auto& kind) {
        const std::string why = refusal(kind, weights.mlp);
        return why.empty() ? why : concat(why, " in its ", kind.has_experts() ? "mixture" : "MLP");
      },
      layer.mlp);
}

// Why ranks cannot share a model, or empty.
[[nodiscard]] std::string model_refusal(const Model& whole, int32_t num_ranks) {
  if (num_ranks == 1) return {};
  const DecoderConfig& config = whole.config;
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const std::string why = layer_refusal(config.layers[i], whole.weights.layers[i], num_ranks);
    if (!why.empty()) return concat("layer ", i, " has ", why);
  }
  const WeightMatrix& lm_head = whole.weights.lm_head.weight;
  return rows_refusal("lm_head", lm_head, lm_head.n, num_ranks);
}

}  // namespace

void check_ranks(const Model& whole, int32_t num_ranks) {
  const std::string why = model_refusal(whole, num_ranks);
  if (why.empty()) return;
  std::string allowed;
  for (int32_t n = 1; n <= largest::tensor_parallel_size; ++n) {
    if (model_refusal(whole, n).empty()) allowed += concat(allowed.empty() ? "" : ", ", n);
  }
  throw Unsupported(concat("tensor_parallel_size is ", num_ranks, ", but ", why, " (",
                           whole.config.name, "); allowed for this model: ", allowed));
}

std::shared_ptr<const Model> rank_model(const Model& whole, const RankShare& share) {
  auto model = std::make_shared<Model>();
  model->config = whole.config;
  model->device = whole.device;
  static_cast<WeightPointers&>(model->weights) = whole.weights;
  DecoderConfig& config = model->config;
  const auto split_kind = [&](auto& layer, auto& weights) {
    std::visit(
        [&]<class Kind>(Kind& kind) {
          const int64_t width = split_layer(kind, std::get<WeightsOf<Kind>>(weights), share);
          config.gathered_width = std::max(config.gathered_width, width);
        },
        layer);
  };
  for (size_t i = 0; i < config.layers.size(); ++i) {
    split_kind(config.layers[i].attention, model->weights.layers[i].attention);
    split_kind(config.layers[i].mlp, model->weights.layers[i].mlp);
  }
  split_outputs(model->weights.lm_head, share);
  return model;
}

int64_t exchanged_width(const DecoderConfig& rank_config) {
  return std::max(
      {rank_config.gathered_width, int64_t{rank_config.hidden}, int64_t{rank_config.num_logits()}});
}

}  // namespace paceline
