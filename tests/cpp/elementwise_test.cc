// SPDX-License-Identifier: Apache-2.0
// The CPU ops that work element by element or move whole rows: embed, per_layer_inputs,
// gated_activation, gather_rows, soft_cap and copy_rows.

#include "ops/ops.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/float_types.h"
#include "device/cpu_context.h"
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

TEST(Embed, ScalesRowsAndZeroesTokensOutsideTheTable) {
  TRACE_SEED();
  constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int32_t hidden : {1, 16, 33, 256}) {
      Random random(3);
      const int32_t vocab_size = 11;
      const TypedArray table = typed_array(dtype, random.normals(int64_t{vocab_size} * hidden));
      const std::vector<int32_t> tokens = {0, 10, 11, -1, 5, kMin, kMax, 3};
      const int32_t max_rows = static_cast<int32_t>(tokens.size());
      for (const int32_t num_rows : {0, 1, max_rows}) {
        std::vector<float> y(static_cast<size_t>(max_rows) * static_cast<size_t>(hidden), -7.0f);
        CpuContext ctx = context_of(2);
        embed(ctx, {.num_rows = &num_rows,
                    .max_rows = max_rows,
                    .token_ids = tokens.data(),
                    .table = table.bytes.data(),
                    .table_dtype = dtype,
                    .scale = 1.5f,
                    .y = y.data(),
                    .vocab_size = vocab_size,
                    .hidden = hidden});
        for (int32_t row = 0; row < max_rows; ++row) {
          const int32_t token = tokens[static_cast<size_t>(row)];
          for (int32_t i = 0; i < hidden; ++i) {
            float want = 0.0f;
            if (token >= 0 && token < vocab_size) {
              want = 1.5f * table.rounded[static_cast<size_t>(token * hidden + i)];
            }
            if (row >= num_rows) want = -7.0f;
            ASSERT_EQ(y[static_cast<size_t>(row * hidden + i)], want) << row << ", " << i;
          }
        }
      }
    }
  }
}

TEST(PerLayerInputs, MatchesReference) {
  TRACE_SEED();
  constexpr int32_t kVocab = 7;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int32_t size : {1, 8, 16, 20, 256}) {
      for (const int num_threads : {1, 2}) {
        Random random(43);
        const int32_t num_layers = 5;
        const int32_t num_rows = 4;
        const int64_t width = int64_t{num_layers} * size;
        const std::vector<int32_t> tokens = {3, -1, 0, kVocab, 6};  // the last is beyond num_rows
        const std::vector<float> before = random.normals(5 * width, 3.0f);
        const std::vector<float> weight = random.normals(size);
        const std::vector<float> table = random.normals(kVocab * width);
        std::vector<uint16_t> narrow;
        for (const float value : table) narrow.push_back(float_to_bf16(value));
        std::vector<float> x = before;
        CpuContext ctx = context_of(num_threads);
        const bool is_bf16 = dtype == DType::kBFloat16;
        per_layer_inputs(ctx, {.num_rows = &num_rows,
                               .max_rows = 5,
                               .x = x.data(),
                               .token_ids = tokens.data(),
                               .table = is_bf16 ? static_cast<const void*>(narrow.data())
                                                : static_cast<const void*>(table.data()),
                               .table_dtype = dtype,
                               .vocab_size = kVocab,
                               .weight = weight.data(),
                               .weight_offset = 1,
                               .eps = 1e-3f,
                               .x_scale = 0.3f,
                               .table_scale = 2.5f,
                               .scale = 0.7f,
                               .num_layers = num_layers,
                               .size = size});
        for (int64_t i = 0; i < 5 * width; ++i) {
          const int64_t row = i / width;
          if (row >= num_rows) {
            ASSERT_EQ(x[static_cast<size_t>(i)], before[static_cast<size_t>(i)]);
            continue;
          }
          double squares = 0.0;
          const int64_t first = i / size * size;
          for (int64_t j = first; j < first + size; ++j) {
            const double value = 0.3f * double{before[static_cast<size_t>(j)]};
            squares += value * value;
          }
          const double normed = 0.3f * double{before[static_cast<size_t>(i)]} /
                                std::sqrt(squares / size + 1e-3f) *
                                (double{weight[static_cast<size_t>(i % size)]} + 1);
          const int32_t token = tokens[static_cast<size_t>(row)];
          double entry = 0.0;
          if (token >= 0 && token < kVocab) {
            const auto at = static_cast<size_t>(token * width + i % width);
            entry = is_bf16 ? bf16_to_float(narrow[at]) : table[at];
          }
          ASSERT_TRUE(
              is_near(x[static_cast<size_t>(i)], 0.7f * (normed + 2.5 * entry), 2e-6, 2e-6));
        }
      }
    }
  }
}

TEST(PerLayerInputs, RowBitsDependOnTheRowAlone) {
  TRACE_SEED();
  Random random(44);
  constexpr int32_t kVocab = 50;
  const int32_t num_layers = 4;
  const int32_t size = 24;
  const int64_t width = int64_t{num_layers} * size;
  const std::vector<float> weight = random.normals(size);
  const std::vector<float> table = random.normals(kVocab * width);
  const auto run = [&](std::vector<float> x, std::vector<int32_t> tokens, int num_threads) {
    const auto num_rows = static_cast<int32_t>(tokens.size());
    CpuContext ctx = context_of(num_threads);
    per_layer_inputs(ctx, {.num_rows = &num_rows,
                           .max_rows = num_rows,
                           .x = x.data(),
                           .token_ids = tokens.data(),
                           .table = table.data(),
                           .table_dtype = DType::kFloat32,
                           .vocab_size = kVocab,
                           .weight = weight.data(),
                           .weight_offset = 0,
                           .eps = 1e-6f,
                           .x_scale = 0.2f,
                           .table_scale = 4,
                           .scale = 0.7f,
                           .num_layers = num_layers,
                           .size = size});
    return x;
  };
  const std::vector<float> probe = random.normals(width);
  const std::vector<float> alone = run(probe, {11}, 1);
  for (const int32_t num_rows : kBatchSizes) {
    std::vector<float> x = random.normals(num_rows * width);
    std::vector<int32_t> tokens(static_cast<size_t>(num_rows));
    for (int32_t& token : tokens) token = random.below(kVocab);
    const int32_t place = random.below(num_rows);
    std::copy(probe.begin(), probe.end(), x.begin() + place * width);
    tokens[static_cast<size_t>(place)] = 11;
    const std::vector<float> y = run(x, tokens, 3);
    ASSERT_EQ(std::memcmp(alone.data(), y.data() + place * width, alone.size() * sizeof(float)), 0);
  }
}

TEST(GatedActivation, TakesAnUpFromElsewhere) {
  TRACE_SEED();
  for (const int32_t intermediate : {1, 16, 33}) {
    Random random(45);
    const int32_t num_rows = 3;
    const int64_t up_stride = 4 * int64_t{intermediate} + 5;
    const std::vector<float> gate = random.normals(num_rows * int64_t{intermediate});
    const std::vector<float> up = random.normals(num_rows * up_stride);
    std::vector<float> fused;
    for (int32_t row = 0; row < num_rows; ++row) {
      fused.insert(fused.end(), gate.begin() + row * intermediate,
                   gate.begin() + (row + 1) * intermediate);
      const auto first = up.begin() + row * up_stride + 5;
      fused.insert(fused.end(), first, first + intermediate);
    }
    std::vector<float> expected(gate.size());
    std::vector<float> y(gate.size());
    CpuContext ctx = context_of(1);
    GatedActivationParams params = {.num_rows = &num_rows,
                                    .max_rows = num_rows,
                                    .x = fused.data(),
                                    .y = expected.data(),
                                    .intermediate = intermediate,
                                    .activation = Activation::kGeluTanh};
    gated_activation(ctx, params);
    params.x = gate.data();
    params.y = y.data();
    params.up = up.data() + 5;
    params.up_stride = up_stride;
    gated_activation(ctx, params);
    ASSERT_EQ(y, expected);
  }
}

TEST(GatedActivation, MatchesReference) {
  TRACE_SEED();
  for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh}) {
    for (const int32_t intermediate : {1, 16, 33, 250, 3000}) {
      Random random(5);
      const int32_t num_rows = 6;
      std::vector<float> x = random.normals(int64_t{num_rows} * 2 * intermediate, 3.0f);
      x[0] = -150.0f;
      x[static_cast<size_t>(2 * intermediate)] = 150.0f;
      x[static_cast<size_t>(4 * intermediate)] = 0.0f;
      x[static_cast<size_t>(6 * intermediate)] = -1e-6f;
      std::vector<float> y(static_cast<size_t>(num_rows * intermediate));
      CpuContext ctx = context_of(2);
      gated_activation(ctx, {.num_rows = &num_rows,
                             .max_rows = num_rows,
                             .x = x.data(),
                             .y = y.data(),
                             .intermediate = intermediate,
                             .activation = activation});
      for (int32_t row = 0; row < num_rows; ++row) {
        for (int32_t i = 0; i < intermediate; ++i) {
          const double gate = x[static_cast<size_t>(row * 2 * intermediate + i)];
          const double up = x[static_cast<size_t>((row * 2 + 1) * intermediate + i)];
          const double cube = gate + 0.044715 * gate * gate * gate;
          const double want = activation == Activation::kSilu
                                  ? gate / (1.0 + std::exp(-gate)) * up
                                  : 0.5 * gate * up * (1.0 + std::tanh(std::sqrt(2 / M_PI) * cube));
          // 1 + tanh cancels below: an ulp of 1 times |gate * up| is what float can give.
          ASSERT_TRUE(is_near(y[static_cast<size_t>(row * intermediate + i)], want,
                              4e-7 * std::fabs(gate * up) + 1e-30, 1e-6))
              << "gate " << gate << " up " << up;
        }
      }
    }
  }
}

TEST(GatedActivation, AnOutputGateMultipliesInPlace) {
  TRACE_SEED();
  for (const int32_t width : {1, 16, 33, 4096}) {
    Random random(48);
    const int32_t num_rows = 4;
    std::vector<float> gate = random.normals(int64_t{num_rows} * width, 4.0f);
    const float edges[] = {-150.0f, 150.0f, 0.0f, -88.0f};
    for (size_t i = 0; i < 4; ++i) gate[i * static_cast<size_t>(width)] = edges[i];
    const std::vector<float> before = random.normals(int64_t{num_rows} * width);
    std::vector<float> y = before;
    CpuContext ctx = context_of(2);
    gated_activation(ctx, {.num_rows = &num_rows,
                           .max_rows = num_rows,
                           .x = gate.data(),
                           .y = y.data(),
                           .intermediate = width,
                           .activation = Activation::kSigmoid,
                           .up = y.data(),
                           .up_stride = width});
    for (size_t i = 0; i < y.size(); ++i) {
      const double want = before[i] / (1 + std::exp(-double{gate[i]}));
      ASSERT_TRUE(is_near(y[i], want, 1e-30, 1e-6)) << "gate " << gate[i] << " up " << before[i];
    }
  }
}

// Gates and ups at and beyond the limit, infinite and NaN.
TEST(GatedActivation, ActivationsWithALimitMatchReference) {
  TRACE_SEED();
  constexpr float kAlpha = 1.702f;
  constexpr float kLimit = 7.0f;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const float edges[][2] = {{7.0f, 7.0f},   {7.5f, -7.5f},  {kInf, -kInf}, {-150.0f, 150.0f},
                            {0.0f, kInf},   {kNan, 1.0f},   {1.0f, kNan},  {-7.5f, -1.0f},
                            {-1e-6f, 3.0f}, {-88.0f, -8.0f}};
  for (const int32_t intermediate : {10, 16, 33, 2880}) {
    Random random(46);
    const int32_t num_rows = 5;
    const int64_t count = int64_t{num_rows} * intermediate;
    std::vector<float> gates = random.normals(count, 5.0f);
    std::vector<float> ups = random.normals(count, 5.0f);
    for (size_t i = 0; i < std::size(edges); ++i) {
      gates[gates.size() - 1 - i] = edges[i][0];
      ups[ups.size() - 1 - i] = edges[i][1];
    }
    for (const auto& [activation, is_interleaved] :
         {std::pair(Activation::kSwigluOai, false), std::pair(Activation::kSwigluOai, true),
          std::pair(Activation::kClampedSilu, false)}) {
      const bool is_oai = activation == Activation::kSwigluOai;
      std::vector<float> x(gates.size() * 2);
      for (size_t i = 0; i < gates.size(); ++i) {
        const size_t row = i / static_cast<size_t>(intermediate);
        const size_t column = i % static_cast<size_t>(intermediate);
        float* const of_row = x.data() + row * 2 * static_cast<size_t>(intermediate);
        of_row[is_interleaved ? 2 * column : column] = gates[i];
        of_row[is_interleaved ? 2 * column + 1 : column + static_cast<size_t>(intermediate)] =
            ups[i];
      }
      std::vector<float> y(gates.size());
      CpuContext ctx = context_of(2);
      gated_activation(ctx, {.num_rows = &num_rows,
                             .max_rows = num_rows,
                             .x = x.data(),
                             .y = y.data(),
                             .intermediate = intermediate,
                             .activation = activation,
                             .alpha = kAlpha,
                             .limit = kLimit,
                             .is_interleaved = is_interleaved});
      for (size_t i = 0; i < gates.size(); ++i) {
        if (std::isnan(gates[i]) || std::isnan(ups[i])) {
          ASSERT_TRUE(std::isnan(y[i])) << "gate " << gates[i] << " up " << ups[i];
          continue;
        }
        const double gate = std::min<double>(gates[i], kLimit);
        const double up = std::clamp<double>(ups[i], -kLimit, kLimit);
        const double want =
            (is_oai ? up + 1 : up) * gate / (1 + std::exp(-(is_oai ? double{kAlpha} : 1) * gate));
        ASSERT_TRUE(is_near(y[i], want, 1e-30, 2e-6))
            << "gate " << gates[i] << " up " << ups[i] << " interleaved " << is_interleaved;
      }
    }
  }
}

// With any activation, a row of alternating elements has the bits of one of two halves.
TEST(GatedActivation, InterleavedGivesTheBitsOfHalves) {
  TRACE_SEED();
  Random random(47);
  for (const Activation activation :
       {Activation::kSilu, Activation::kGeluTanh, Activation::kSwigluOai, Activation::kClampedSilu,
        Activation::kSigmoid}) {
    for (const int32_t intermediate : {1, 15, 16, 33, 64}) {
      const int32_t num_rows = 3;
      const std::vector<float> halves = random.normals(int64_t{2} * num_rows * intermediate, 5.0f);
      std::vector<float> interleaved(halves.size());
      for (int32_t row = 0; row < num_rows; ++row) {
        for (int32_t i = 0; i < 2 * intermediate; ++i) {
          const int32_t to = 2 * (i % intermediate) + i / intermediate;
          interleaved[static_cast<size_t>(row * 2 * intermediate + to)] =
              halves[static_cast<size_t>(row * 2 * intermediate + i)];
        }
      }
      std::vector<float> expected(static_cast<size_t>(num_rows * intermediate));
      std::vector<float> y(expected.size());
      CpuContext ctx = context_of(1);
      GatedActivationParams params = {.num_rows = &num_rows,
                                      .max_rows = num_rows,
                                      .x = halves.data(),
                                      .y = expected.data(),
                                      .intermediate = intermediate,
                                      .activation = activation,
                                      .alpha = 1.702f,
                                      .limit = 7.0f};
      gated_activation(ctx, params);
      params.x = interleaved.data();
      params.y = y.data();
      params.is_interleaved = true;
      gated_activation(ctx, params);
      ASSERT_TRUE(same_bits(y.data(), expected.data(), std::ssize(expected))) << intermediate;
    }
  }
}

TEST(GatherRows, CopiesRowsInAnyOrder) {
  TRACE_SEED();
  Random random(6);
  const int32_t hidden = 37;
  const std::vector<float> x = random.normals(9 * hidden);
  const std::vector<int32_t> index = {8, 0, 0, 3, 7};
  for (const int32_t num_rows : {0, 1, 5}) {
    std::vector<float> y(5 * hidden, -1.0f);
    CpuContext ctx = context_of(2);
    gather_rows(ctx, {.num_rows = &num_rows,
                      .max_rows = 5,
                      .row_index = index.data(),
                      .x = x.data(),
                      .y = y.data(),
                      .hidden = hidden});
    for (int32_t row = 0; row < 5; ++row) {
      for (int32_t i = 0; i < hidden; ++i) {
        const float want =
            row < num_rows ? x[static_cast<size_t>(index[static_cast<size_t>(row)] * hidden + i)]
                           : -1.0f;
        ASSERT_EQ(y[static_cast<size_t>(row * hidden + i)], want);
      }
    }
  }
}

TEST(SoftCap, MatchesReference) {
  TRACE_SEED();
  Random random(7);
  const int32_t num_rows = 3;
  const int32_t n = 1003;
  const std::vector<float> before = random.normals(num_rows * n, 40.0f);
  std::vector<float> logits = before;
  CpuContext ctx = context_of(2);
  soft_cap(ctx,
           {.num_rows = &num_rows, .max_rows = 4, .logits = logits.data(), .cap = 30.0f, .n = n});
  for (size_t i = 0; i < logits.size(); ++i) {
    ASSERT_TRUE(is_near(logits[i], 30.0 * std::tanh(before[i] / 30.0), 1e-30, 5e-7));
  }
}

TEST(CopyRows, TakesRowsOfAnyStride) {
  const std::vector<float> x = {0, 1, 2, -1, 10, 11, 12, -1, 20, 21, 22, -1};
  const std::vector<int32_t> index = {2, 0};
  const int32_t two = 2;
  CpuContext ctx = context_of(1);
  for (const bool has_index : {false, true}) {
    std::vector<float> y(10, 9);
    copy_rows(ctx, {.num_rows = &two,
                    .max_rows = 3,
                    .row_index = has_index ? index.data() : nullptr,
                    .x = x.data(),
                    .x_stride = 4,
                    .y = y.data(),
                    .y_stride = 5,
                    .width = 3});
    EXPECT_EQ(y, has_index ? (std::vector<float>{20, 21, 22, 9, 9, 0, 1, 2, 9, 9})
                           : (std::vector<float>{0, 1, 2, 9, 9, 10, 11, 12, 9, 9}));
  }
}

}  // namespace
}  // namespace paceline::testing
