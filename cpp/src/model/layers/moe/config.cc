// SPDX-License-Identifier: Apache-2.0
#include "model/layers/moe/config.h"

#include <algorithm>
#include <array>
#include <optional>
#include <span>

#include "model/description/config_reading.h"

namespace paceline {
namespace {

// Rows of experts' matrices then begin at 16 bytes and matrices at 64 bytes, without padding.
constexpr int32_t kExpertAlignment = 8;

[[nodiscard]] RouterRule read_router(const Json& router) {
  if (router.as_string() == "softmax_of_chosen") return RouterRule::kSoftmaxOfChosen;
  if (router.as_string() == "softmax") return RouterRule::kSoftmax;
  if (router.as_string() == "sigmoid") return RouterRule::kSigmoid;
  if (router.as_string() == "sqrt_softplus") return RouterRule::kSqrtSoftplus;
  router.refuse("'softmax_of_chosen', 'softmax', 'sigmoid', 'sqrt_softplus'");
}

[[nodiscard]] ScoreRouting read_score_routing(const Json& json, const MoeMlp& mlp) {
  ScoreRouting routing;
  if (json.find("num_groups") || json.find("top_groups")) {
    routing.num_groups = read_int(json, "num_groups", 1, kMaxExpertGroups);
    const int32_t size = mlp.num_experts / routing.num_groups;
    if (size * routing.num_groups != mlp.num_experts || (size < 2 && routing.num_groups > 1)) {
      json.at("num_groups")
          .refuse(concat("divisors of num_experts, ", mlp.num_experts,
                         ", with at least two experts to a group"));
    }
    routing.top_groups = read_int(json, "top_groups", 1, routing.num_groups);
    if (routing.top_groups * size < mlp.top_k) {
      json.at("top_groups")
          .refuse(concat("groups that together have top_k experts, ", mlp.top_k, "; a group has ",
                         size));
    }
  }
  routing.normalises = read_switch(json, "normalises_weights");
  if (const std::optional<Json> scale = json.find("weight_scale")) {
    routing.scale = read_positive(*scale);
  }
  return routing;
}

}  // namespace

MoeMlp read_mixture(const Json& json, int32_t hidden) {
  constexpr std::array<std::string_view, 7> kKeys = {"num_experts",    "top_k",    "intermediate",
                                                     "activation",     "has_bias", "router",
                                                     "has_router_bias"};
  constexpr std::array<std::string_view, 5> kOfScores = {
      "num_groups", "top_groups", "normalises_weights", "weight_scale", "has_token_experts"};
  constexpr std::array<std::string_view, 2> kOfSoftmax = {"logit_scale", "has_expert_scales"};
  constexpr std::array<std::string_view, 16> kOptional = {
      "alpha",      "limit",      "interleaved", "transposed", "gate_up",    "down",
      "per_expert", "shared",     "shared_gate", kOfScores[0], kOfScores[1], kOfScores[2],
      kOfScores[3], kOfScores[4], kOfSoftmax[0], kOfSoftmax[1]};
  json.check_keys(kKeys, kOptional);
  MoeMlp mlp;
  mlp.num_experts = read_int(json, "num_experts", 1, kMaxExperts);
  mlp.top_k = read_int(json, "top_k", 1, std::min(mlp.num_experts, kMaxTopK));
  if (hidden % kExpertAlignment != 0) {
    json.at("num_experts")
        .refuse(concat("no such key unless hidden_size is a multiple of ", kExpertAlignment,
                       "; it is ", hidden));
  }
  mlp.is_per_expert = read_switch(json, "per_expert");
  mlp.expert = read_gated_unit(json, hidden, /*is_joined=*/!mlp.is_per_expert);
  if (mlp.expert.intermediate % kExpertAlignment != 0) {
    json.at("intermediate").refuse(concat("a multiple of ", kExpertAlignment));
  }
  mlp.router = read_router(json.at("router"));
  const auto refuse_keys = [&](std::span<const std::string_view> keys) {
    for (const std::string_view key : keys) {
      if (const std::optional<Json> value = json.find(key)) {
        value->refuse(
            concat("no such key where router is ", quoted(json.at("router").as_string())));
      }
    }
  };
  if (has_softmax(mlp.router)) {
    refuse_keys(kOfScores);
    if (const std::optional<Json> scale = json.find("logit_scale")) {
      mlp.logit_scale = read_positive(*scale);
    }
    mlp.has_expert_scales = read_switch(json, "has_expert_scales");
  } else {
    refuse_keys(kOfSoftmax);
    mlp.scoring = read_score_routing(json, mlp);
    mlp.has_token_experts = read_switch(json, "has_token_experts");
  }
  if (mlp.has_token_experts &&
      (mlp.router != RouterRule::kSqrtSoftplus || mlp.scoring.num_groups > 1)) {
    json.at("has_token_experts")
        .refuse("true only where router is 'sqrt_softplus', without groups");
  }
  mlp.has_router_bias = json.at("has_router_bias").as_bool();
  mlp.is_interleaved = read_switch(json, "interleaved");
  mlp.is_transposed = read_switch(json, "transposed");
  for (const std::string_view key : {"gate_up", "down"}) {
    if (mlp.is_transposed && json.find(key)) {
      json.at(key).refuse("no such key with transposed, which is for plain tensors");
    }
  }
  for (const std::string_view key : {"interleaved", "transposed", "has_bias"}) {
    if (mlp.is_per_expert && read_switch(json, key)) json.at(key).refuse("false with per_expert");
  }
  if (const std::optional<Json> shared = json.find("shared")) {
    mlp.shared = read_dense(*shared, hidden);
  }
  mlp.has_shared_gate = read_switch(json, "shared_gate");
  if (mlp.has_shared_gate && (!mlp.shared || mlp.has_router_bias)) {
    json.at("shared_gate").refuse("false without shared, and with has_router_bias");
  }
  return mlp;
}

}  // namespace paceline
