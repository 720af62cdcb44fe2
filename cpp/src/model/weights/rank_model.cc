// SPDX-License-Identifier: Apache-2.0
#include "model/weights/rank_model.h"

#include <paceline/config.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/boundary.h"
#include "base/check.h"
#include "model/description/decoder_config.h"
#include "model/weights/linear_costs.h"
#include "model/weights/rank_weights.h"

namespace paceline {
namespace {

// Why ranks cannot share a layer, or empty.
[[nodiscard]] std::string layer_refusal(const LayerConfig& layer, const LayerWeights& weights,
                                        int32_t num_ranks) {
  const bool reads_target =
      std::visit([](const auto& attention) { return attention.reads_target; }, layer.attention);
  if (reads_target) return "attention over the KV of the target, of which each rank has a part";
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

// The matrices outside of layers that ranks share, each with its name. `weights`: const or not.
template <class Weights, class Function>
void for_outer_linears(Weights& weights, const Function& f) {
  // Of a draft head that uses its target's, the target's is shared.
  if (weights.lm_head.is_present()) f("lm_head", weights.lm_head);
  if (weights.head.fc.is_present()) f("fc", weights.head.fc);
  if (weights.head.fc_hidden.is_present()) f("fc_hidden", weights.head.fc_hidden);
}

// Why ranks cannot share a model, or empty.
[[nodiscard]] std::string model_refusal(const Model& whole, int32_t num_ranks) {
  if (num_ranks == 1) return {};
  const DecoderConfig& config = whole.config;
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const std::string why = layer_refusal(config.layers[i], whole.weights.layers[i], num_ranks);
    if (!why.empty()) return concat("layer ", i, " has ", why);
  }
  std::string why;
  for_outer_linears(whole.weights, [&](const char* name, const Linear& linear) {
    if (why.empty()) why = rows_refusal(name, linear.weight, linear.weight.n, num_ranks);
  });
  return why;
}

// The numbers of ranks that can share a model.
[[nodiscard]] std::string possible_ranks(const Model& whole) {
  std::string possible;
  for (int32_t n = 1; n <= largest::tensor_parallel_size; ++n) {
    if (model_refusal(whole, n).empty()) possible += concat(possible.empty() ? "" : ", ", n);
  }
  return possible;
}

// Bytes of weights that a GPU reads in 6 us, which is what an exchange of few rows takes.
constexpr int64_t kExchangeBytes = int64_t{24} << 20;

}  // namespace

void check_ranks(const Model& whole, int32_t num_ranks) {
  const std::string why = model_refusal(whole, num_ranks);
  if (why.empty()) return;
  throw Unsupported(concat("tensor_parallel_size is ", num_ranks, ", but ", why, " (",
                           whole.config.name,
                           "); allowed for this model: ", possible_ranks(whole)));
}

bool is_faster_shared(const DecoderConfig& draft, DType dtype, int32_t num_ranks) {
  const bool owns_lm_head = !draft.drafter || draft.drafter->owns_lm_head;
  int64_t bytes = 0;
  int64_t num_exchanges = 4 * std::ssize(draft.layers);
  for (const LinearCost& cost : linear_costs(draft, dtype, Device::kCpu)) {
    const bool is_of_target = cost.name == "lm_head" && !owns_lm_head;
    if (cost.shard != ShardAxis::kRows || is_of_target) continue;
    bytes += cost.bytes * std::max(cost.top_k, 1);
    if (!cost.name.starts_with("layers.")) ++num_exchanges;
  }
  return bytes / num_ranks * (num_ranks - 1) > num_exchanges * kExchangeBytes;
}

bool shares_drafter(const Model& whole, int32_t num_ranks, int32_t draft_tensor_parallel_size) {
  const std::string named = concat("draft_tensor_parallel_size is ", draft_tensor_parallel_size);
  if (draft_tensor_parallel_size < 0 ||
      (draft_tensor_parallel_size > 1 && draft_tensor_parallel_size != num_ranks)) {
    throw InvalidArgument(concat(named, " and tensor_parallel_size is ", num_ranks,
                                 "; allowed: 1, where each rank computes the whole drafter, ",
                                 num_ranks, ", where the ranks share it, or 0, which chooses"));
  }
  if (num_ranks == 1 || draft_tensor_parallel_size == 1) return false;
  const std::string why = model_refusal(whole, num_ranks);
  if (draft_tensor_parallel_size == 0) {
    return why.empty() && is_faster_shared(whole.config, whole.weights.dtype, num_ranks);
  }
  if (why.empty()) return true;
  throw Unsupported(concat(named, ", but ", why, " (", whole.config.name,
                           "); allowed with tensor_parallel_size ", num_ranks, ": 1; both can be ",
                           possible_ranks(whole)));
}

GpuShare drafter_share(const Model& drafter, int32_t num_ranks,
                       int32_t draft_tensor_parallel_size) {
  return at_boundary([&] {
    return shares_drafter(drafter, num_ranks, draft_tensor_parallel_size) ? GpuShare::kPart
                                                                          : GpuShare::kCopy;
  });
}

GpuShare drafter_share(std::string_view config_json, DType weight_dtype, int32_t num_ranks,
                       int32_t draft_tensor_parallel_size) {
  return at_boundary([&] {
    const WholeLayout layout(parse_decoder_config(config_json), weight_dtype);
    return drafter_share(layout.model, num_ranks, draft_tensor_parallel_size);
  });
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
  for_outer_linears(model->weights,
                    [&](const char*, Linear& linear) { split_outputs(linear, share); });
  return model;
}

int64_t exchanged_width(const DecoderConfig& rank_config) {
  return std::max(
      {rank_config.gathered_width, int64_t{rank_config.hidden}, int64_t{rank_config.num_logits()}});
}

}  // namespace paceline
