// SPDX-License-Identifier: Apache-2.0
//
// Builders of the ops on the rows of a mixture of experts.

#include "support/op_cases_moe.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/float_types.h"
#include "support/expert_arrays.h"
#include "support/row_arrays.h"
#include "support/row_values.h"

namespace paceline::testing {
namespace {

// What output arrays hold before an op. No op computes this NaN.
[[nodiscard]] bool is_poison(const std::byte* bytes, int64_t size) {
  return std::all_of(bytes, bytes + size, [](std::byte b) { return b == std::byte{0xff}; });
}

// The first element that only one of the backends has written, or that `agree(want, got)` refuses;
// or an empty string. NaN agrees with NaN.
template <class Agree>
std::string first_difference(const OpArray& array, const std::vector<std::byte>& cpu,
                             const std::vector<std::byte>& cuda, const Agree& agree) {
  const int64_t size = element_bytes(array.cuda);
  for (int64_t i = 0; i < array.count; ++i) {
    const bool is_left = is_poison(cpu.data() + 4 * i, 4);
    if (is_left != is_poison(cuda.data() + size * i, size)) {
      return array.name + "[" + std::to_string(i) + "] is " + (is_left ? "" : "not ") + "written";
    }
    const double want = float_at(array.cpu, cpu.data(), i);
    const double got = float_at(array.cuda, cuda.data(), i);
    if (std::isnan(want) ? std::isnan(got) : agree(want, got)) continue;
    return array.name + "[" + std::to_string(i) + "] is " + std::to_string(got) + ", the CPU has " +
           std::to_string(want);
  }
  return "";
}

// The logits of a case of route_experts.
OpArray logits_array(const RouteSpec& s, const Rows& rows, uint64_t seed) {
  return row_array("logits", Element::kF32, Element::kF32, rows, s.num_experts + s.logits_padding,
                   [=](int64_t id, float* to) {
                     fill_logits(s.logits, s.num_experts, id, seed, to);
                     std::fill_n(to + s.num_experts, s.logits_padding, kInf);
                   });
}

// The arrays of a case of route_experts.
struct RouteArrays {
  RouteArrays(OpInstance& op, const RouteSpec& spec, const Rows& rows, uint64_t seed,
              OpArray logits_of_rows)
      : s(spec), max_rows(rows.max_rows), num_rows(add_num_rows(op, rows)) {
    logits = op.add(std::move(logits_of_rows));
    const bool is_exact = !has_softmax(s.rule);
    if (s.vocab_size > 0) {
      token_ids = op.add(row_ints<int32_t>("token_ids", rows, [&](int64_t id) -> int32_t {
        const int32_t edges[] = {0, s.vocab_size - 1, s.vocab_size, -1, kMinInt, kMaxInt};
        return id < 6 ? edges[id]
                      : Stream(seed, kIndex, static_cast<uint64_t>(id)).below(s.vocab_size);
      }));
      std::vector<int32_t> experts_of_tokens;
      for (int32_t token = 0; token < s.vocab_size; ++token) {
        std::vector<int32_t> all(static_cast<size_t>(s.num_experts));
        std::iota(all.begin(), all.end(), 0);
        Stream stream(seed, kOrdering, static_cast<uint64_t>(token));
        shuffle(all, stream);
        experts_of_tokens.insert(experts_of_tokens.end(), all.begin(), all.begin() + s.top_k);
      }
      token_experts = op.add(int_array("token_experts", Role::kInput, experts_of_tokens));
    } else if (is_exact) {
      OpArray values = float_array("correction", Element::kF32, Element::kF32, s.num_experts,
                                   [=](float* to) { fill_correction(spec, seed, to); });
      values.is_constant = true;
      correction = op.add(std::move(values));
    } else if (s.has_expert_scales) {
      OpArray values = float_array(
          "expert_scales", Element::kF32, Element::kF32, s.num_experts,
          [=](float* to) { Stream(seed, kRouterCorrection).fill(to, spec.num_experts, 0.5f); });
      values.is_constant = true;
      expert_scales = op.add(std::move(values));
    }
    const int64_t count = int64_t{rows.max_rows} * s.top_k;
    experts = op.add(output_array("experts", Element::kI32, Element::kI32, count, s.top_k));
    OpArray out = output_array("weights", Element::kF32, Element::kF32, count, s.top_k);
    out.compare = Compare::kByCase;
    weights = op.add(out);
    op.check = [out, is_exact, at = static_cast<size_t>(weights)](
                   const ArrayBytes& cpu, const ArrayBytes& cuda, int64_t*) {
      return first_difference(out, cpu[at], cuda[at], [&](double want, double got) {
        return is_exact ? want == got : is_near(want, got, 1e-30 + 1e-5 * std::abs(want));
      });
    };
  }
  // Corrections of ties are few, so that corrected scores tie, too.
  static void fill_correction(const RouteSpec& spec, uint64_t seed, float* to) {
    Stream(seed, kRouterCorrection).fill(to, spec.num_experts, 0.3f);
    if (spec.logits != LogitKind::kTies) return;
    for (int32_t e = 0; e < spec.num_experts; ++e) to[e] = std::round(to[e] * 2) / 2;
  }
  [[nodiscard]] RouteExpertsParams params(const Addresses& at) const {
    return {.num_rows = at.get<int32_t>(num_rows),
            .max_rows = max_rows,
            .logits = at.get<float>(logits),
            .logits_stride = s.num_experts + s.logits_padding,
            .num_experts = s.num_experts,
            .top_k = s.top_k,
            .rule = s.rule,
            .experts = at.get<int32_t>(experts),
            .weights = at.get<float>(weights),
            .scoring = s.scoring,
            .correction = at.get<float>(correction),
            .token_experts = at.get<int32_t>(token_experts),
            .token_ids = at.get<int32_t>(token_ids),
            .vocab_size = s.vocab_size,
            .logit_scale = s.logit_scale,
            .expert_scales = at.get<float>(expert_scales)};
  }

  RouteSpec s;
  int32_t max_rows;
  Handle num_rows;
  Handle logits = kNoArray;
  Handle correction = kNoArray;
  Handle expert_scales = kNoArray;
  Handle token_ids = kNoArray;
  Handle token_experts = kNoArray;
  Handle experts = kNoArray;
  Handle weights = kNoArray;
};

// What sort_expert_rows writes.
struct SortArrays {
  SortArrays(OpInstance& op, const SortSpec& spec, const Rows& rows)
      : s(spec), max_rows(rows.max_rows) {
    const auto output = [&](const char* name, int64_t count) {
      return op.add(output_array(name, Element::kI32, Element::kI32, count, 0));
    };
    const int64_t capacity = int64_t{rows.max_rows} * s.top_k;
    expert_begin = output("expert_begin", s.num_experts + (s.has_shared ? 2 : 1));
    source_row = output("source_row", capacity + (s.has_shared ? rows.max_rows : 0));
    expert_row = output("expert_row", capacity);
    if (s.has_counters) {
      counters = op.add(int_array<int64_t>("counters", Role::kInOut, {(int64_t{1} << 40) - 1, 5}));
    }
  }
  [[nodiscard]] SortExpertRowsParams params(const Addresses& at, Handle num_rows,
                                            Handle experts) const {
    return {.num_rows = at.get<int32_t>(num_rows),
            .max_rows = max_rows,
            .experts = at.get<int32_t>(experts),
            .num_experts = s.num_experts,
            .top_k = s.top_k,
            .expert_begin = at.get<int32_t>(expert_begin),
            .source_row = at.get<int32_t>(source_row),
            .expert_row = at.get<int32_t>(expert_row),
            .counters = at.get<int64_t>(counters),
            .has_shared = s.has_shared};
  }

  SortSpec s;
  int32_t max_rows;
  Handle expert_begin = kNoArray;
  Handle source_row = kNoArray;
  Handle expert_row = kNoArray;
  Handle counters = kNoArray;
};

// The arrays of a case of combine_experts.
struct CombineArrays {
  CombineArrays(OpInstance& op, const CombineSpec& spec, const Rows& rows, uint64_t seed)
      : s(spec), max_rows(rows.max_rows), num_rows(add_num_rows(op, rows)) {
    const Element element = element_of(s.dtype);
    // Expert rows in any order: here that of random experts.
    const ExpertRows routing =
        expert_rows_of(Routed::kRandom, 2 * s.top_k, s.top_k, rows, seed, s.has_shared);
    x = op.add(expert_row_values("x", element, rows, routing, s.hidden, s.hidden, seed));
    expert_row = op.add(int_array("expert_row", Role::kInput, routing.expert_row));
    weights = op.add(row_array(
        "weights", Element::kF32, Element::kF32, rows, s.top_k, [=](int64_t id, float* to) {
          Stream(seed, kPlaceWeights, static_cast<uint64_t>(id)).fill(to, spec.top_k);
          if (id % 5 == 4) to[spec.top_k - 1] = 0.0f;
        }));
    OpArray out =
        output_array("y", Element::kF32, element, int64_t{rows.max_rows} * s.hidden, s.hidden);
    if (s.has_base) {
      const auto base = [=](int64_t id, float* to) {
        Stream(seed, kExpertBase, static_cast<uint64_t>(id)).fill(to, spec.hidden);
      };
      out = row_array("y", Element::kF32, element, rows, s.hidden, base, Role::kInOut);
    }
    if (s.base_gate_stride > 0) {
      base_gate =
          op.add(row_array("base_gate", Element::kF32, Element::kF32, rows, s.base_gate_stride,
                           [=](int64_t id, float* to) {
                             Stream(seed, kBaseGate, static_cast<uint64_t>(id)).fill(to, 1, 3.0f);
                           }));
    }
    out.compare = Compare::kByCase;
    y = op.add(out);
  }
  [[nodiscard]] CombineExpertsParams params(const Addresses& at, DType dtype) const {
    return {.num_rows = at.get<int32_t>(num_rows),
            .max_rows = max_rows,
            .top_k = s.top_k,
            .x = at.raw(x),
            .expert_row = at.get<int32_t>(expert_row),
            .weights = at.get<float>(weights),
            .y = at.raw(y),
            .hidden = s.hidden,
            .dtype = dtype,
            .base = s.has_base ? at.raw(y) : nullptr,
            .has_shared = s.has_shared,
            .base_gate = at.get<float>(base_gate),
            .base_gate_stride = s.base_gate_stride};
  }

  CombineSpec s;
  int32_t max_rows;
  Handle num_rows;
  Handle x = kNoArray;
  Handle expert_row = kNoArray;
  Handle weights = kNoArray;
  Handle base_gate = kNoArray;
  Handle y = kNoArray;
};

// The arrays of a case of run_router.
struct RouterArrays {
  RouterArrays(OpInstance& op, const RouterSpec& spec, const Rows& rows, uint64_t seed)
      : s(spec),
        x(op.add(x_array(spec, rows, seed))),
        weight(op.add(weight_array(spec, seed))),
        bias(spec.has_bias ? op.add(bias_array(spec, seed)) : kNoArray),
        routed(op,
               {.num_experts = spec.num_experts,
                .top_k = spec.top_k,
                .logits = spec.logits,
                .rule = spec.rule,
                .scoring = spec.scoring,
                .logit_scale = spec.logit_scale,
                .has_expert_scales = spec.has_expert_scales,
                .logits_padding = spec.outputs() - spec.num_experts},
               rows, seed, unwritten_logits(spec, rows)),
        sorted(op, {.num_experts = spec.num_experts, .top_k = spec.top_k}, rows) {}
  template <class Ctx>
  [[nodiscard]] RouterParams params(const Ctx& ctx, const Addresses& at) const {
    const RouteExpertsParams route = routed.params(at);
    return {.product = {.num_rows = route.num_rows,
                        .max_rows = route.max_rows,
                        .x = at.raw(x),
                        .x_stride = s.k + s.x_padding,
                        .weight = plain_matrix(at.raw(weight), s.outputs(), s.k, s.dtype),
                        .bias = at.get<float>(bias),
                        .y = at.get<float>(routed.logits),
                        .y_stride = s.outputs(),
                        .x_dtype = activation_dtype(ctx, s.dtype),
                        .y_dtype = DType::kFloat32},
            .route = route,
            .sort = sorted.params(at, routed.num_rows, routed.experts)};
  }

  RouterSpec s;
  Handle x;
  Handle weight;
  Handle bias;
  RouteArrays routed;
  SortArrays sorted;

 private:
  // Small integers.
  static OpArray x_array(const RouterSpec& s, const Rows& rows, uint64_t seed) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    return row_array("x", Element::kF32, element_of(s.dtype), rows, s.k + s.x_padding,
                     [=](int64_t id, float* to) {
                       Stream stream(seed, kRouterX, static_cast<uint64_t>(id));
                       for (int32_t i = 0; i < s.k; ++i) {
                         to[i] = static_cast<float>(stream.below(5) - 2);
                       }
                       if (s.logits == LogitKind::kHoles && id % 5 == 3) {
                         to[id % s.k] = std::numeric_limits<float>::quiet_NaN();
                       }
                       if (s.logits == LogitKind::kInfinite && id % 5 == 1) {
                         to[id % s.k] = id % 2 == 0 ? kInfinity : -kInfinity;
                       }
                     });
  }
  // Multiples of 1/64. With ties, neighbouring experts have the same.
  static OpArray weight_array(const RouterSpec& s, uint64_t seed) {
    OpArray array = float_array(
        "weight", element_of(s.dtype), element_of(s.dtype), int64_t{s.outputs()} * s.k,
        [=](float* to) {
          for (int32_t e = 0; e < s.outputs(); ++e, to += s.k) {
            Stream stream(seed, kRouterWeight,
                          static_cast<uint64_t>(s.logits == LogitKind::kTies ? e / 2 : e));
            for (int32_t i = 0; i < s.k; ++i) {
              to[i] = static_cast<float>(stream.below(17) - 8) / 64.0f;
            }
          }
        });
    array.is_constant = true;
    return array;
  }
  static OpArray bias_array(const RouterSpec& s, uint64_t seed) {
    OpArray array = float_array("bias", Element::kF32, Element::kF32, s.outputs(), [=](float* to) {
      constexpr float kInfinity = std::numeric_limits<float>::infinity();
      Stream stream(seed, kRouterBias);
      for (int32_t e = 0; e < s.outputs(); ++e) {
        to[e] = s.logits == LogitKind::kTies ? static_cast<float>(e / 2 % 3)
                                             : static_cast<float>(stream.below(65)) / 16;
        if (s.logits == LogitKind::kHoles && stream.one_in(3)) {
          to[e] = stream.one_in(2) ? std::numeric_limits<float>::quiet_NaN() : -kInfinity;
        }
        if (s.logits == LogitKind::kInfinite && stream.one_in(s.num_experts / 3 + 1)) {
          to[e] = kInfinity;
        }
      }
    });
    array.is_constant = true;
    return array;
  }
  static OpArray unwritten_logits(const RouterSpec& s, const Rows& rows) {
    OpArray array = output_array("logits", Element::kF32, Element::kF32,
                                 int64_t{rows.max_rows} * s.outputs(), 0);
    array.num_live = std::ssize(rows.ids) * s.outputs();
    array.compare = Compare::kByCase;  // only what follows from them is compared, and the gate
    return array;
  }
};

}  // namespace

OpInstance make_route(const RouteSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const RouteArrays arrays(op, s, rows, seed, logits_array(s, rows, seed));
  op.set_run([arrays](auto& ctx, const Addresses& at) { route_experts(ctx, arrays.params(at)); });
  return op;
}

OpInstance make_route_and_sort(const RouteSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const RouteArrays routed(op, s, rows, seed, logits_array(s, rows, seed));
  const SortArrays sorted(op, {.num_experts = s.num_experts, .top_k = s.top_k}, rows);
  op.set_run([routed, sorted](auto& ctx, const Addresses& at) {
    route_and_sort(ctx,
                   RouteAndSortParams{.route = routed.params(at),
                                      .sort = sorted.params(at, routed.num_rows, routed.experts)});
  });
  return op;
}

OpInstance make_router(const RouterSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const RouterArrays arrays(op, s, rows, seed);
  op.set_run([arrays](auto& ctx, const Addresses& at) { run_router(ctx, arrays.params(ctx, at)); });
  if (!s.has_gate) return op;
  op.check = [s, check = op.check, num_rows = std::ssize(rows.ids),
              logits = static_cast<size_t>(arrays.routed.logits)](
                 const ArrayBytes& cpu, const ArrayBytes& cuda, int64_t* num_different) {
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t i = row * s.outputs() + s.num_experts;
      const double want = float_at(Element::kF32, cpu[logits].data(), i);
      const double got = float_at(Element::kF32, cuda[logits].data(), i);
      if (want != got) return "the gate of row " + std::to_string(row) + " differs";
    }
    return check(cpu, cuda, num_different);
  };
  return op;
}

OpInstance make_sort(const SortSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const ExpertRows routing = expert_rows_of(s.routed, s.num_experts, s.top_k, rows, seed);
  const Handle num_rows = add_num_rows(op, rows);
  const Handle experts = op.add(int_array("experts", Role::kInput, routing.experts));
  const SortArrays sorted(op, s, rows);
  op.set_run([=](auto& ctx, const Addresses& at) {
    sort_expert_rows(ctx, sorted.params(at, num_rows, experts));
  });
  return op;
}

OpInstance make_combine(const CombineSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const CombineArrays arrays(op, s, rows, seed);
  op.set_run([=](auto& ctx, const Addresses& at) {
    combine_experts(ctx, arrays.params(at, activation_dtype(ctx, s.dtype)));
  });
  // Fused multiply-adds in a fixed order leave nothing open.
  const auto y = static_cast<size_t>(arrays.y);
  op.check = [out = op.arrays[y], y](const ArrayBytes& cpu, const ArrayBytes& cuda, int64_t*) {
    return first_difference(out, cpu[y], cuda[y], [&](double want, double got) {
      const auto value = static_cast<float>(want);
      return got == (out.cuda == Element::kBf16 ? bf16_to_float(float_to_bf16(value)) : value);
    });
  };
  return op;
}

OpInstance make_combine_and_norm(const CombineSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const CombineArrays arrays(op, s, rows, seed);
  const auto before = [=](int64_t id, float* to) {
    Stream(seed, kExpertResidual, static_cast<uint64_t>(id)).fill(to, s.hidden);
  };
  OpArray sum =
      row_array("residual", Element::kF32, Element::kF32, rows, s.hidden, before, Role::kInOut);
  OpArray out = output_array("normed", Element::kF32, element_of(s.dtype),
                             int64_t{rows.max_rows} * s.hidden, s.hidden);
  sum.rms_bound = out.rms_bound;  // what is added to it has been rounded
  const Handle residual = op.add(std::move(sum));
  Handle weight = kNoArray;
  Handle normed = kNoArray;
  if (!s.only_adds) {
    OpArray scale = float_array("weight", Element::kF32, Element::kF32, s.hidden,
                                [=](float* to) { Stream(seed, kExpertNorm).fill(to, s.hidden); });
    scale.is_constant = true;
    weight = op.add(std::move(scale));
    normed = op.add(std::move(out));
  }
  op.set_run([=](auto& ctx, const Addresses& at) {
    const DType dtype = activation_dtype(ctx, s.dtype);
    const CombineExpertsParams combine = arrays.params(at, dtype);
    combine_and_norm(ctx, CombineAndNormParams{.combine = combine,
                                               .norm = {.num_rows = combine.num_rows,
                                                        .max_rows = combine.max_rows,
                                                        .x = combine.y,
                                                        .x_stride = s.hidden,
                                                        .residual = at.get<float>(residual),
                                                        .weight = at.get<float>(weight),
                                                        .weight_offset = 0.0f,
                                                        .eps = 1e-5f,
                                                        .y = at.raw(normed),
                                                        .y_stride = s.hidden,
                                                        .hidden = s.hidden,
                                                        .x_dtype = dtype,
                                                        .y_dtype = dtype}});
  });
  return op;
}

}  // namespace paceline::testing
