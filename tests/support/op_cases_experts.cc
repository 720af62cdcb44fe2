// SPDX-License-Identifier: Apache-2.0
//
// Builders of the products of experts and of whole mixtures.

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "support/expert_arrays.h"
#include "support/op_cases_moe.h"
#include "support/row_arrays.h"

namespace paceline::testing {
namespace {

// Tensor cores cut what they add below the last bit instead of rounding it: half an ulp of bias for
// each of K / 16 steps.
constexpr double kTensorCoreBound = 5e-5;

// The arrays of a case of expert_gemm.
struct ExpertProduct {
  ExpertProduct(OpInstance& op, const ExpertGemmSpec& s, const Rows& rows, uint64_t seed)
      : routing(expert_rows_of(s.routed, s.num_experts, s.top_k, rows, seed)),
        capacity(rows.max_rows * s.top_k),
        x_stride(s.k + s.x_padding),
        y_stride(s.n + s.y_padding),
        num_x_rows(s.is_gathered ? rows.max_rows : capacity),
        expert_begin(op.add(int_array("expert_begin", Role::kInput, routing.expert_begin))),
        x(op.add(x_array(s, rows, seed))),
        x_rows(s.is_gathered ? op.add(int_array("x_rows", Role::kInput, routing.source_row))
                             : kNoArray),
        weight(op, s.weight, s.n, s.k, seed, "weight", s.num_experts, s.shift),
        bias(s.has_bias
                 ? op.add(constant_normals("bias", int64_t{s.num_experts} * s.n, seed, kExpertBias))
                 : kNoArray),
        y(op.add(y_array(s, rows))) {
    op.num_rows = static_cast<int32_t>(rows.ids.size());
  }

  ExpertRows routing;
  int32_t capacity;
  int64_t x_stride;
  int64_t y_stride;
  int32_t num_x_rows;
  Handle expert_begin;
  Handle x;
  Handle x_rows;
  WeightArrays weight;
  Handle bias;
  Handle y;

 private:
  [[nodiscard]] OpArray x_array(const ExpertGemmSpec& s, const Rows& rows, uint64_t seed) const {
    const Element element = element_of(s.weight.dtype);
    return s.is_gathered ? normal_x_rows("x", element, rows, s.k, x_stride, seed)
                         : expert_row_values("x", element, rows, routing, s.k, x_stride, seed);
  }
  [[nodiscard]] OpArray y_array(const ExpertGemmSpec& s, const Rows& rows) const {
    OpArray array =
        output_array("y", Element::kF32, element_of(s.y_dtype), capacity * y_stride, y_stride);
    if (s.weight.dtype == DType::kBFloat16) {
      array.rms_bound = std::max(array.rms_bound, kTensorCoreBound);
    }
    for (size_t i = 0; i < rows.ids.size(); ++i) {
      const auto place = static_cast<size_t>(rows.ids[i] % s.top_k);
      array.row_at.push_back(routing.expert_row[i * static_cast<size_t>(s.top_k) + place]);
    }
    return array;
  }
};

}  // namespace

OpInstance make_expert_gemm(const ExpertGemmSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const ExpertProduct product(op, s, rows, seed);
  op.set_run([s, p = product](auto& ctx, const Addresses& at) {
    expert_gemm(ctx, ExpertGemmParams{.expert_begin = at.get<int32_t>(p.expert_begin),
                                      .max_rows = p.capacity,
                                      .x = at.raw(p.x),
                                      .x_stride = p.x_stride,
                                      .x_rows = at.get<int32_t>(p.x_rows),
                                      .num_x_rows = p.num_x_rows,
                                      .weight = p.weight.experts(ctx, at),
                                      .bias = at.get<float>(p.bias),
                                      .y = at.raw(p.y),
                                      .y_stride = p.y_stride,
                                      .x_dtype = activation_dtype(ctx, s.weight.dtype),
                                      .y_dtype = activation_dtype(ctx, s.y_dtype),
                                      .follows_product = !s.is_gathered,
                                      .shared_expert = s.num_experts - 1});
  });
  return op;
}

OpInstance make_gemms_of_expert_rows(const ExpertGemmSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const ExpertProduct product(op, s, rows, seed);
  const Handle one = op.add(int_array<int32_t>("one", Role::kInput, {1}));
  op.set_run([s, one, p = product](auto& ctx, const Addresses& at) {
    const DType x_dtype = activation_dtype(ctx, s.weight.dtype);
    const DType y_dtype = activation_dtype(ctx, s.y_dtype);
    for (int32_t e = 0; e < s.num_experts; ++e) {
      const int32_t begin = p.routing.expert_begin[static_cast<size_t>(e)];
      const int32_t end = p.routing.expert_begin[static_cast<size_t>(e) + 1];
      for (int32_t i = begin; i < end; ++i) {
        const int64_t x_row = s.is_gathered ? p.routing.source_row[static_cast<size_t>(i)] : i;
        gemm(ctx,
             GemmParams{.num_rows = at.get<int32_t>(one),
                        .max_rows = 1,
                        .x = at.raw(p.x) + x_row * p.x_stride * dtype_bytes(x_dtype),
                        .x_stride = p.x_stride,
                        .weight = p.weight.matrix(ctx, at, e),
                        .bias = s.has_bias ? at.get<float>(p.bias) + int64_t{e} * s.n : nullptr,
                        .y = at.raw(p.y) + i * p.y_stride * dtype_bytes(y_dtype),
                        .y_stride = p.y_stride,
                        .x_dtype = x_dtype,
                        .y_dtype = y_dtype});
      }
    }
  });
  return op;
}

OpInstance make_mixture(const MixtureSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const DType dtype = s.weight.dtype;
  const Element element = element_of(dtype);
  const int64_t capacity = int64_t{rows.max_rows} * s.top_k;
  const Handle num_rows = add_num_rows(op, rows);
  // Logits are inputs, since a near tie may go either way after a product.
  const Handle logits = op.add(row_array(
      "logits", Element::kF32, Element::kF32, rows, s.num_experts, [=](int64_t id, float* to) {
        Stream(seed, kChoice, static_cast<uint64_t>(id)).fill(to, s.num_experts);
        if (s.routed == Routed::kRandom) return;
        const std::vector<int32_t> chosen =
            experts_of_row(s.routed, s.num_experts, s.top_k, id, seed);
        for (const int32_t expert : chosen) to[expert] += 8.0f;
      }));
  // Large enough for the limit of the activation.
  const Handle x = op.add(normal_x_rows("x", element, rows, s.hidden, s.hidden, seed, 3.0f));
  const WeightArrays gate_up(op, s.weight, 2 * s.intermediate, s.hidden, seed, "gate_up",
                             s.num_experts, s.shift);
  const Handle gate_up_bias = op.add(constant_normals(
      "gate_up_bias", int64_t{s.num_experts} * 2 * s.intermediate, seed, kExpertBias, 0.1f));
  const WeightArrays down(op, s.weight, s.hidden, s.intermediate, seed + 1, "down", s.num_experts,
                          s.shift);
  const Handle down_bias = op.add(
      constant_normals("down_bias", int64_t{s.num_experts} * s.hidden, seed, kExpertBias, 0.1f));
  const auto ints = [&](const char* name, int64_t count) {
    return op.add(intermediate_array(name, Element::kI32, count));
  };
  const Handle experts = ints("experts", capacity);
  const Handle expert_begin = ints("expert_begin", s.num_experts + 1);
  const Handle source_row = ints("source_row", capacity);
  const Handle expert_row = ints("expert_row", capacity);
  const auto floats = [&](const char* name, Element on_cuda, int64_t count) {
    return op.add(intermediate_array(name, on_cuda, count));
  };
  const Handle weights = floats("weights", Element::kF32, capacity);
  const Handle halves = floats("gate_and_up", element, capacity * 2 * s.intermediate);
  const Handle activated = floats("activated", element, capacity * s.intermediate);
  const Handle expert_out = floats("expert_out", element, capacity * s.hidden);
  OpArray out =
      output_array("y", Element::kF32, element, int64_t{rows.max_rows} * s.hidden, s.hidden);
  out.rms_bound *= 2;  // three intermediate results are rounded
  const Handle y = op.add(std::move(out));
  const int32_t max_rows = rows.max_rows;
  const auto num_expert_rows = static_cast<int32_t>(capacity);
  op.set_run([=](auto& ctx, const Addresses& at) {
    const DType on_device = activation_dtype(ctx, dtype);
    route_and_sort(ctx, RouteAndSortParams{.route = {.num_rows = at.get<int32_t>(num_rows),
                                                     .max_rows = max_rows,
                                                     .logits = at.get<float>(logits),
                                                     .logits_stride = s.num_experts,
                                                     .num_experts = s.num_experts,
                                                     .top_k = s.top_k,
                                                     .rule = RouterRule::kSoftmaxOfChosen,
                                                     .experts = at.get<int32_t>(experts),
                                                     .weights = at.get<float>(weights)},
                                           .sort = {.num_rows = at.get<int32_t>(num_rows),
                                                    .max_rows = max_rows,
                                                    .experts = at.get<int32_t>(experts),
                                                    .num_experts = s.num_experts,
                                                    .top_k = s.top_k,
                                                    .expert_begin = at.get<int32_t>(expert_begin),
                                                    .source_row = at.get<int32_t>(source_row),
                                                    .expert_row = at.get<int32_t>(expert_row),
                                                    .counters = nullptr}});
    const ActivatedExpertsParams first = {
        .product = {.expert_begin = at.get<int32_t>(expert_begin),
                    .max_rows = num_expert_rows,
                    .x = at.raw(x),
                    .x_stride = s.hidden,
                    .x_rows = at.get<int32_t>(source_row),
                    .num_x_rows = max_rows,
                    .weight = gate_up.experts(ctx, at),
                    .bias = at.get<float>(gate_up_bias),
                    .y = at.raw(halves),
                    .y_stride = 2 * int64_t{s.intermediate},
                    .x_dtype = on_device,
                    .y_dtype = on_device},
        .activation = {.num_rows = at.get<int32_t>(expert_begin) + s.num_experts,
                       .max_rows = num_expert_rows,
                       .x = at.raw(halves),
                       .y = at.raw(activated),
                       .intermediate = s.intermediate,
                       .activation = s.activation,
                       .dtype = on_device,
                       .alpha = 1.702f,
                       .limit = 7.0f,
                       .is_interleaved = s.is_interleaved}};
    if (s.activates_alone) {
      expert_gemm(ctx, first.product);
      gated_activation(ctx, first.activation);
    } else {
      activated_experts(ctx, first);
    }
    expert_gemm(ctx, ExpertGemmParams{.expert_begin = at.get<int32_t>(expert_begin),
                                      .max_rows = num_expert_rows,
                                      .x = at.raw(activated),
                                      .x_stride = s.intermediate,
                                      .x_rows = nullptr,
                                      .num_x_rows = num_expert_rows,
                                      .weight = down.experts(ctx, at),
                                      .bias = at.get<float>(down_bias),
                                      .y = at.raw(expert_out),
                                      .y_stride = s.hidden,
                                      .x_dtype = on_device,
                                      .y_dtype = on_device,
                                      .follows_product = s.weight.format != WeightFormat::kFp8});
    combine_experts(ctx, CombineExpertsParams{.num_rows = at.get<int32_t>(num_rows),
                                              .max_rows = max_rows,
                                              .top_k = s.top_k,
                                              .x = at.raw(expert_out),
                                              .expert_row = at.get<int32_t>(expert_row),
                                              .weights = at.get<float>(weights),
                                              .y = at.raw(y),
                                              .hidden = s.hidden,
                                              .dtype = on_device});
  });
  return op;
}

}  // namespace paceline::testing
