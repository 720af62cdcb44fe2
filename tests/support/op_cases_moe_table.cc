// SPDX-License-Identifier: Apache-2.0
//
// The table of op cases of a mixture of experts.

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "support/op_case_table.h"
#include "support/op_cases_moe.h"

namespace paceline::testing {
namespace {

constexpr DType kB = DType::kBFloat16;
constexpr DType kF = DType::kFloat32;
constexpr WeightSpec kPlainF32 = {.dtype = kF};
constexpr WeightSpec kPlainBf16 = {.dtype = kB};
constexpr WeightSpec kMxfp4 = {.dtype = kB, .format = WeightFormat::kMxfp4};
constexpr WeightSpec kFp8Rows = {.dtype = kB, .format = WeightFormat::kFp8, .scale_rows = 1};
constexpr WeightSpec kFp8Tiles = {
    .dtype = kB, .format = WeightFormat::kFp8, .scale_rows = 128, .scale_cols = 128};
constexpr WeightSpec kFp8Exact = {.dtype = kB,
                                  .format = WeightFormat::kFp8,
                                  .scale_rows = 64,
                                  .scale_cols = 128,
                                  .has_exact_scales = true};
constexpr WeightSpec kMxfp4F32 = {.dtype = kF, .format = WeightFormat::kMxfp4};
constexpr WeightSpec kFp8TilesF32 = {
    .dtype = kF, .format = WeightFormat::kFp8, .scale_rows = 128, .scale_cols = 128};
constexpr WeightSpec kNvfp4 = {.dtype = kB, .format = WeightFormat::kNvfp4};
constexpr WeightSpec kNvfp4F32 = {.dtype = kF, .format = WeightFormat::kNvfp4};
constexpr WeightSpec kInt4 = {.dtype = kB, .format = WeightFormat::kInt4, .scale_cols = 64};
constexpr WeightSpec kInt4Zeros = {.dtype = kB,
                                   .format = WeightFormat::kInt4,
                                   .scale_cols = 32,
                                   .scale_dtype = DType::kFloat16,
                                   .has_zeros = true};
constexpr WeightSpec kInt4Ordered = {.dtype = kB,
                                     .format = WeightFormat::kInt4,
                                     .scale_cols = 64,
                                     .has_zeros = true,
                                     .has_order = true};
constexpr WeightSpec kInt4F32 = {.dtype = kF,
                                 .format = WeightFormat::kInt4,
                                 .scale_cols = 32,
                                 .has_zeros = true,
                                 .has_order = true};
constexpr WeightSpec kFormats[] = {kPlainF32,    kPlainBf16, kMxfp4,       kFp8Rows, kFp8Tiles,
                                   kFp8Exact,    kMxfp4F32,  kFp8TilesF32, kInt4,    kInt4Zeros,
                                   kInt4Ordered, kInt4F32,   kNvfp4,       kNvfp4F32};

// GPT-OSS: 2,880 wide throughout, the best 4 of 32 or 128 experts. The matrices of experts overlap.
constexpr int32_t kHidden = 2880;
constexpr int32_t kTopK = 4;
constexpr int32_t kShift = 16;

ExpertGemmSpec gate_up_of(int32_t num_experts, const WeightSpec& weight) {
  return {.num_experts = num_experts,
          .top_k = kTopK,
          .n = 2 * kHidden,
          .k = kHidden,
          .weight = weight,
          .has_bias = true,
          .shift = kShift};
}
ExpertGemmSpec down_of(int32_t num_experts, const WeightSpec& weight) {
  return {.num_experts = num_experts,
          .top_k = kTopK,
          .n = kHidden,
          .k = kHidden,
          .weight = weight,
          .has_bias = true,
          .is_gathered = false,
          .shift = kShift};
}
MixtureSpec gpt_oss(int32_t num_experts, const WeightSpec& weight) {
  return {.hidden = kHidden,
          .num_experts = num_experts,
          .top_k = kTopK,
          .intermediate = kHidden,
          .weight = weight,
          .shift = kShift};
}

// The logits of some cases have a gate after those of the experts.
int32_t padding_of(int32_t num_experts) { return num_experts == 33 || num_experts == 256 ? 1 : 0; }

const char* routed_suffix(Routed routed) {
  switch (routed) {
    case Routed::kRandom:
      return "";
    case Routed::kTogether:
      return "_together";
    case Routed::kSpread:
      return "_spread";
  }
  return "";
}

std::string name_of(const ExpertGemmSpec& s) {
  return "expert_gemm_" + std::to_string(s.top_k) + "of" + std::to_string(s.num_experts) + "_n" +
         std::to_string(s.n) + "_k" + std::to_string(s.k) + weight_suffix(s.weight) +
         (s.y_dtype == kF ? "_to_f32" : "") + (s.has_bias ? "_bias" : "") +
         (s.is_gathered ? "" : "_own_x") + (s.x_padding + s.y_padding > 0 ? "_strided" : "") +
         routed_suffix(s.routed);
}
std::string name_of(const MixtureSpec& s) {
  return "mixture_" + std::to_string(s.top_k) + "of" + std::to_string(s.num_experts) + "_h" +
         std::to_string(s.hidden) + "_i" + std::to_string(s.intermediate) +
         weight_suffix(s.weight) + (s.is_interleaved ? "" : "_halves") + routed_suffix(s.routed);
}

template <class Spec>
RowWiseCase row_wise(std::string name, OpInstance (*make)(const Spec&, const Rows&, uint64_t),
                     const Spec& spec, bool is_invariance_case) {
  return {.name = std::move(name),
          .make = [make, spec](const Rows& rows, uint64_t seed) { return make(spec, rows, seed); },
          .is_invariance_case = is_invariance_case};
}

template <class Spec>
OpCase of_rows(std::string name, OpInstance (*make)(const Spec&, const Rows&, uint64_t),
               const Spec& spec, int32_t num_rows, int32_t max_rows) {
  name += "_rows" + std::to_string(num_rows) + "of" + std::to_string(max_rows);
  return {.name = std::move(name),
          .make = [=](uint64_t seed) { return make(spec, first_rows(num_rows, max_rows), seed); }};
}

}  // namespace

std::vector<ExpertGemmCase> expert_gemm_cases() {
  std::vector<ExpertGemmCase> cases;
  const auto add = [&](const ExpertGemmSpec& spec) { cases.push_back({name_of(spec), spec}); };
  for (const WeightSpec& weight : kFormats) {
    const DType y_dtype = weight.dtype;
    const auto of = [&](int32_t num_experts, int32_t top_k, int32_t n, int32_t k) {
      return ExpertGemmSpec{.num_experts = num_experts,
                            .top_k = top_k,
                            .n = n,
                            .k = k,
                            .weight = weight,
                            .y_dtype = y_dtype};
    };
    const auto with = [](ExpertGemmSpec s, bool has_bias, bool is_gathered,
                         Routed routed = Routed::kRandom) {
      s.has_bias = has_bias;
      s.is_gathered = is_gathered;
      s.routed = routed;
      return s;
    };
    add(with(of(1, 1, 7, 64), true, true));
    add(with(of(3, 2, 33, 96), true, true));
    add(with(of(3, 3, 1, 128), false, false));
    add(with(of(8, 3, 130, 160), true, false));
    add(with(of(5, 1, 64, 32), false, true));
    add(with(of(32, 4, 72, 256), true, true, Routed::kSpread));
    add(with(of(32, 4, 256, 128), true, false, Routed::kTogether));
    add(with(of(128, 4, 96, 320), true, true));
    add(with(of(200, 32, 40, 64), false, true));
    ExpertGemmSpec strided = with(of(6, 2, 100, 192), true, true);
    strided.x_padding = 8;
    strided.y_padding = 3;
    add(strided);
    strided.is_gathered = false;
    strided.y_padding = 8;
    add(strided);
    if (weight.dtype != kF) {
      ExpertGemmSpec to_float = with(of(8, 2, 144, 512), true, true);
      to_float.y_dtype = kF;
      add(to_float);
    }
    // K that is no multiple of 32.
    if (weight.format == WeightFormat::kPlain) {
      add(with(of(5, 2, 40, 72), true, true));
      add(with(of(3, 1, 9, 8), false, false));
    }
  }
  add(gate_up_of(32, kPlainBf16));
  add(gate_up_of(32, kMxfp4));
  add(gate_up_of(32, kFp8Tiles));
  add(down_of(32, kPlainBf16));
  add(down_of(32, kMxfp4));
  add(down_of(32, kFp8Rows));
  add(gate_up_of(128, kMxfp4));
  return cases;
}

std::vector<RowWiseCase> moe_row_wise_cases() {
  std::vector<RowWiseCase> cases;
  for (const RouterSpec& spec :
       {RouterSpec{.num_experts = 4, .top_k = 4, .k = 72},
        RouterSpec{.num_experts = 32, .top_k = 4, .k = 320, .x_padding = 8},
        RouterSpec{.num_experts = 32, .top_k = 4, .k = 100, .dtype = kF},
        RouterSpec{.num_experts = 128, .top_k = 4, .k = 192, .logits = LogitKind::kHoles},
        RouterSpec{.num_experts = 64,
                   .top_k = 4,
                   .k = 128,
                   .rule = RouterRule::kSigmoid,
                   .scoring = {.num_groups = 8, .top_groups = 4, .scale = 1.8f}},
        RouterSpec{.num_experts = 128,
                   .top_k = 8,
                   .k = 256,
                   .has_bias = false,
                   .rule = RouterRule::kSoftmax},
        RouterSpec{.num_experts = 128,
                   .top_k = 8,
                   .k = 704,
                   .has_bias = false,
                   .logit_scale = 0.02f,
                   .has_expert_scales = true},
        RouterSpec{.num_experts = 32, .top_k = 4, .k = 256, .has_gate = true},
        RouterSpec{.num_experts = 100, .top_k = 4, .k = 64, .has_bias = false, .has_gate = true},
        RouterSpec{.num_experts = 128, .top_k = 8, .k = 320, .has_bias = false, .has_gate = true},
        RouterSpec{
            .num_experts = 256, .top_k = 8, .k = 2048, .has_bias = false, .has_gate = true}}) {
    cases.push_back(row_wise("router_" + std::to_string(spec.top_k) + "of" +
                                 std::to_string(spec.num_experts) + "_k" + std::to_string(spec.k) +
                                 (spec.has_gate ? "_gate" : ""),
                             make_router, spec, spec.logits == LogitKind::kPlain));
  }
  for (const auto& [num_experts, top_k] : {std::pair{1, 1},
                                           {2, 2},
                                           {3, 1},
                                           {31, 31},
                                           {32, 4},
                                           {33, 7},
                                           {64, kMaxTopK},
                                           {100, 8},
                                           {128, 4},
                                           {1000, kMaxTopK},
                                           {kMaxExperts, 1},
                                           {kMaxExperts, kMaxTopK}}) {
    for (const auto& [logits, suffix] : kUsualLogits) {
      const std::string name = std::to_string(top_k) + "of" + std::to_string(num_experts) + suffix;
      const RouteSpec spec = {.num_experts = num_experts,
                              .top_k = top_k,
                              .logits = logits,
                              .logits_padding = padding_of(num_experts)};
      const bool is_invariance_case =
          num_experts == 32 || num_experts == 128 || num_experts == 1000;
      cases.push_back(row_wise("route_" + name, make_route, spec, is_invariance_case));
      cases.push_back(
          row_wise("route_and_sort_" + name, make_route_and_sort, spec, is_invariance_case));
    }
  }
  // Weights of a softmax over all experts (Qwen3-MoE), and with scales (Gemma 4).
  for (const auto& [num_experts, top_k] :
       {std::pair{1, 1}, {31, 31}, {33, 7}, {128, 8}, {kMaxExperts, kMaxTopK}}) {
    for (const auto& [logits, suffix] : kUsualLogits) {
      const std::string name = std::to_string(top_k) + "of" + std::to_string(num_experts) + suffix;
      const RouteSpec of_all = {num_experts, top_k, logits, RouterRule::kSoftmax};
      RouteSpec scaled = {num_experts, top_k, logits};
      scaled.logit_scale = 0.25f;
      scaled.logits_padding = padding_of(num_experts);
      scaled.has_expert_scales = true;
      for (const auto& [spec, prefix] : {std::pair{of_all, "by_softmax_"}, {scaled, "scaled_"}}) {
        cases.push_back(row_wise("route_" + (prefix + name), make_route, spec, num_experts == 128));
        cases.push_back(row_wise("route_and_sort_" + (prefix + name), make_route_and_sort, spec,
                                 num_experts == 128));
      }
    }
  }
  // The best experts by their scores, of the best groups: experts, experts that are chosen,
  // groups, groups that are chosen.
  for (const auto& [num_experts, top_k, num_groups, top_groups] :
       {std::array{1, 1, 1, 1},
        {64, 4, 1, 1},
        {33, 7, 1, 1},
        {256, 8, 8, 4},
        {16, 4, 4, 2},
        {6, 3, 3, 2},
        {100, 5, 5, 1},
        {64, 32, 32, 16},
        {kMaxExperts, kMaxTopK, 32, 1}}) {
    for (const auto& [rule, rule_name] : {std::pair{RouterRule::kSigmoid, "by_sigmoid_"},
                                          {RouterRule::kSqrtSoftplus, "by_softplus_"}}) {
      for (const auto& [logits, suffix] : kUsualLogits) {
        const RouteSpec spec = {.num_experts = num_experts,
                                .top_k = top_k,
                                .logits = logits,
                                .rule = rule,
                                .scoring = {.num_groups = num_groups,
                                            .top_groups = top_groups,
                                            .normalises = num_experts != 33,
                                            .scale = 1.8f},
                                .logits_padding = padding_of(num_experts)};
        std::string name = rule_name + std::to_string(top_k) + "of" + std::to_string(num_experts);
        if (num_groups > 1) {
          name += "_groups" + std::to_string(top_groups) + "of" + std::to_string(num_groups);
        }
        const bool is_invariance_case = num_experts == 64 || num_experts == 256;
        cases.push_back(row_wise("route_" + name + suffix, make_route, spec, is_invariance_case));
        if (is_invariance_case || num_experts == kMaxExperts) {
          cases.push_back(row_wise("route_and_sort_" + name + suffix, make_route_and_sort, spec,
                                   is_invariance_case));
        }
      }
    }
  }
  // Experts by token.
  for (const auto& [num_experts, top_k, vocab_size] :
       {std::array{1, 1, 1}, {256, 6, 211}, {kMaxExperts, kMaxTopK, 37}}) {
    for (const auto& [logits, suffix] : kUsualLogits) {
      const RouteSpec spec = {.num_experts = num_experts,
                              .top_k = top_k,
                              .logits = logits,
                              .rule = RouterRule::kSqrtSoftplus,
                              .scoring = {.normalises = true, .scale = 1.5f},
                              .vocab_size = vocab_size,
                              .logits_padding = padding_of(num_experts)};
      const std::string name =
          "by_token_" + std::to_string(top_k) + "of" + std::to_string(num_experts) + suffix;
      cases.push_back(row_wise("route_" + name, make_route, spec, num_experts == 256));
      if (num_experts == 256) {
        cases.push_back(row_wise("route_and_sort_" + name, make_route_and_sort, spec, true));
      }
    }
  }
  for (const DType dtype : {kF, kB}) {
    for (const auto& [hidden, top_k] : {std::pair{37, 3}, {2048, 4}, {7168, 8}}) {
      CombineSpec spec = {.hidden = hidden, .top_k = top_k, .dtype = dtype, .has_base = true};
      const std::string name = "h" + std::to_string(hidden) + "_of" + std::to_string(top_k) +
                               (dtype == kF ? "_f32" : "_bf16");
      cases.push_back(row_wise("combine_with_base_" + name, make_combine, spec, true));
      cases.push_back(
          row_wise("combine_and_norm_with_base_" + name, make_combine_and_norm, spec, true));
      spec.only_adds = true;
      cases.push_back(
          row_wise("combine_and_add_with_base_" + name, make_combine_and_norm, spec, true));
      spec = {.hidden = hidden, .top_k = top_k, .dtype = dtype, .has_shared = true};
      cases.push_back(row_wise("combine_shared_" + name, make_combine, spec, true));
      cases.push_back(
          row_wise("combine_and_norm_shared_" + name, make_combine_and_norm, spec, true));
      spec.base_gate_stride = 65;
      cases.push_back(row_wise("combine_gated_shared_" + name, make_combine, spec, true));
      cases.push_back(
          row_wise("combine_and_norm_gated_shared_" + name, make_combine_and_norm, spec, true));
      spec.has_shared = false;
      spec.has_base = true;
      spec.base_gate_stride = 1;
      cases.push_back(row_wise("combine_with_gated_base_" + name, make_combine, spec, true));
    }
  }
  for (const DType dtype : {kF, kB}) {
    for (const auto& [hidden, top_k] : {std::pair{1, 1},
                                        {37, 3},
                                        {64, 1},
                                        {640, 2},
                                        {1003, 4},
                                        {2880, 4},
                                        {2880, 8},
                                        {5376, 2},
                                        {96, 32}}) {
      cases.push_back(row_wise("combine_h" + std::to_string(hidden) + "_of" +
                                   std::to_string(top_k) + (dtype == kF ? "_f32" : "_bf16"),
                               make_combine, CombineSpec{hidden, top_k, dtype},
                               hidden == 1003 || hidden == 2880));
      for (const bool only_adds : {false, true}) {
        cases.push_back(row_wise(
            "combine_and_" + std::string(only_adds ? "add_h" : "norm_h") + std::to_string(hidden) +
                "_of" + std::to_string(top_k) + (dtype == kF ? "_f32" : "_bf16"),
            make_combine_and_norm, CombineSpec{hidden, top_k, dtype, only_adds},
            hidden == 1003 || hidden == 2880));
      }
    }
  }
  for (const ExpertGemmCase& c : expert_gemm_cases()) {
    cases.push_back(row_wise(c.name, make_expert_gemm, c.spec, /*is_invariance_case=*/true));
  }
  for (const WeightSpec& weight : kFormats) {
    for (const bool is_interleaved : {false, true}) {
      for (const MixtureSpec& shape :
           {MixtureSpec{.hidden = 64, .num_experts = 8, .top_k = 3, .intermediate = 32},
            MixtureSpec{.hidden = 96, .num_experts = 32, .top_k = 4, .intermediate = 160},
            MixtureSpec{.hidden = 256, .num_experts = 4, .top_k = 4, .intermediate = 128}}) {
        MixtureSpec spec = shape;
        spec.weight = weight;
        spec.is_interleaved = is_interleaved;
        cases.push_back(row_wise(name_of(spec), make_mixture, spec, /*is_invariance_case=*/true));
      }
    }
  }
  cases.push_back(row_wise(name_of(gpt_oss(32, kMxfp4)), make_mixture, gpt_oss(32, kMxfp4),
                           /*is_invariance_case=*/true));
  return cases;
}

std::vector<OpCase> moe_op_cases() {
  std::vector<OpCase> cases;
  // Sorting.
  for (const auto& [num_experts, top_k] :
       {std::pair{1, 1}, {3, 3}, {32, 4}, {33, 2}, {128, 4}, {300, 8}, {kMaxExperts, kMaxTopK}}) {
    for (const Routed routed : {Routed::kRandom, Routed::kTogether, Routed::kSpread}) {
      const bool has_counters = num_experts != 33;
      const SortSpec spec = {num_experts, top_k, routed, has_counters};
      const std::string name = "sort_" + std::to_string(top_k) + "of" +
                               std::to_string(num_experts) + routed_suffix(routed);
      for (const auto& [num_rows, max_rows] : {std::pair{0, 4},
                                               {1, 1},
                                               {3, 8},
                                               {4, 4},
                                               {12, 9},
                                               {17, 64},
                                               {256, 256},
                                               {300, 2048},
                                               {2048, 2048},
                                               {8192, 8192}}) {
        if (top_k > 8 && max_rows > 2048) continue;
        cases.push_back(of_rows(name, make_sort, spec, num_rows, max_rows));
        if (max_rows > 64) continue;
        SortSpec shared = spec;
        shared.has_shared = true;
        cases.push_back(of_rows(name + "_shared", make_sort, shared, num_rows, max_rows));
      }
    }
  }
  for (const int32_t num_experts : {32, 128}) {
    cases.push_back(of_rows("route_4of" + std::to_string(num_experts), make_route,
                            RouteSpec{num_experts, kTopK}, 2048, 2048));
  }
  cases.push_back(
      of_rows("combine_h2880_of4_bf16", make_combine, CombineSpec{kHidden, kTopK}, 2048, 2048));
  // The products of GPT-OSS 20B and 120B, from one row to a chunk of a prompt. Sanitizers leave out
  // the large ones, which are slow under them.
  const auto prefix_of = [](int32_t n) { return std::string(n >= 256 ? "large_" : ""); };
  const auto add = [&](ExpertGemmSpec spec, std::initializer_list<int32_t> rows,
                       Routed routed = Routed::kRandom) {
    spec.routed = routed;
    for (const int32_t n : rows) {
      cases.push_back(of_rows(prefix_of(n) + name_of(spec), make_expert_gemm, spec, n, n));
    }
  };
  for (const WeightSpec& weight : {kPlainBf16, kMxfp4, kFp8Rows, kFp8Tiles}) {
    add(gate_up_of(32, weight), {4, 64, 256});
    add(down_of(32, weight), {4, 64, 256});
  }
  for (const WeightSpec& weight : {kPlainBf16, kMxfp4}) {
    add(gate_up_of(32, weight), {2048});
    add(down_of(32, weight), {2048});
    add(gate_up_of(32, weight), {4, 64, 256}, Routed::kTogether);
    add(gate_up_of(32, weight), {8, 64}, Routed::kSpread);
    add(down_of(32, weight), {256}, Routed::kTogether);
    add(down_of(128, weight), {4, 64, 256});
  }
  add(gate_up_of(128, kMxfp4), {4, 64, 256, 2048});
  add(gate_up_of(128, kMxfp4), {32, 2048}, Routed::kSpread);
  add(gate_up_of(128, kMxfp4), {2048}, Routed::kTogether);
  add(down_of(128, kMxfp4), {2048});
  // Whole mixtures.
  for (const Routed routed : {Routed::kRandom, Routed::kTogether, Routed::kSpread}) {
    MixtureSpec spec = gpt_oss(128, kMxfp4);
    spec.routed = routed;
    for (const int32_t n : {1, 4, 64, 256}) {
      cases.push_back(of_rows(prefix_of(n) + name_of(spec), make_mixture, spec, n, n));
    }
  }
  return cases;
}

}  // namespace paceline::testing
