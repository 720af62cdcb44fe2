// SPDX-License-Identifier: Apache-2.0
// qk_norm_rope_append on the CPU: the norms and rotations of queries and keys, and the bytes
// written to the KV pool.

#include "ops/ops.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "device/cpu_context.h"
#include "support/kv_pool.h"
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

struct RopeCase {
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  DType dtype;
  bool has_norm;
  KvInputs kv_inputs = KvInputs::kKeysAndValues;
  bool has_v_norm = false;
  int32_t rope_head_dim = 0;  // 0: the whole head
};

class RopeTest : public ::testing::TestWithParam<RopeCase> {};

std::vector<float> rope_table(int32_t max_positions, int32_t half, bool is_sin) {
  std::vector<float> table;
  for (int32_t position = 0; position < max_positions; ++position) {
    for (int32_t i = 0; i < half; ++i) {
      const double angle = position * std::pow(10000.0, -double(i) / half);
      table.push_back(static_cast<float>(is_sin ? std::sin(angle) : std::cos(angle)));
    }
  }
  return table;
}

std::vector<double> reference_rope(const float* head, const float* norm, float offset, double eps,
                                   const float* cos, const float* sin, int32_t dim,
                                   int32_t rotated) {
  std::vector<double> x(head, head + dim);
  if (norm != nullptr) {
    double squares = 0.0;
    for (const double value : x) squares += value * value;
    const double factor = 1.0 / std::sqrt(squares / dim + eps);
    for (size_t i = 0; i < x.size(); ++i) x[i] *= factor * (double{norm[i]} + offset);
  }
  std::vector<double> y = x;
  const auto half = static_cast<size_t>(rotated / 2);
  for (size_t i = 0; i < half; ++i) {
    y[i] = x[i] * cos[i] - x[i + half] * sin[i];
    y[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
  }
  return y;
}

TEST_P(RopeTest, MatchesReferenceAndWritesOnlyItsSlots) {
  TRACE_SEED();
  const RopeCase& c = GetParam();
  constexpr int32_t kBlockSize = 5;
  constexpr int32_t kNumBlocks = 8;
  constexpr int32_t kMaxPositions = 50;
  Random random(10);
  const int32_t row_heads = qkv_heads(c.num_qo_heads, c.num_kv_heads, c.kv_inputs);
  const int64_t width = int64_t{row_heads} * c.head_dim;
  const bool has_kv = c.kv_inputs != KvInputs::kNone;
  const int32_t num_rows = 6;
  const std::vector<float> before = random.normals(num_rows * width);
  std::vector<float> qkv = before;
  const std::vector<int32_t> positions = {0, 49, 7, 7, 13, 2};
  const std::vector<int64_t> slots = {5, 39, 0, 12, 24, 0};  // 0: inert
  const std::vector<float> q_norm = random.normals(c.head_dim);
  const std::vector<float> k_norm = random.normals(c.head_dim);
  const int32_t rotated = c.rope_head_dim > 0 ? c.rope_head_dim : c.head_dim;
  const std::vector<float> cos = rope_table(kMaxPositions, rotated / 2, false);
  const std::vector<float> sin = rope_table(kMaxPositions, rotated / 2, true);
  Pool pool(c.dtype, kBlockSize, kNumBlocks, c.num_kv_heads, c.head_dim);
  CpuContext ctx = context_of(2);
  qk_norm_rope_append(ctx, {.num_rows = &num_rows,
                            .max_rows = num_rows,
                            .qkv = qkv.data(),
                            .positions = positions.data(),
                            .slot_mapping = has_kv ? slots.data() : nullptr,
                            .q_norm = c.has_norm ? q_norm.data() : nullptr,
                            .k_norm = c.has_norm ? k_norm.data() : nullptr,
                            .norm_weight_offset = 1.0f,
                            .norm_eps = 1e-6f,
                            .rope_cos = cos.data(),
                            .rope_sin = sin.data(),
                            .kv = pool.view,
                            .num_qo_heads = c.num_qo_heads,
                            .num_kv_heads = c.num_kv_heads,
                            .head_dim = c.head_dim,
                            .kv_inputs = c.kv_inputs,
                            .has_v_norm = c.has_v_norm,
                            .rope_head_dim = c.rope_head_dim});
  const double kv_relative = c.dtype == DType::kFloat32 ? 1e-6 : 0x1p-8;
  for (int32_t row = 0; row < num_rows; ++row) {
    const int64_t slot = slots[static_cast<size_t>(row)];
    const int64_t table_row = int64_t{positions[static_cast<size_t>(row)]} * (rotated / 2);
    for (int32_t h = 0; h < c.num_qo_heads + (has_kv ? 2 * c.num_kv_heads : 0); ++h) {
      const int32_t source = h < row_heads ? h : h - c.num_kv_heads;  // v may be the raw k
      const int64_t at = row * width + int64_t{source} * c.head_dim;
      const float* const in = before.data() + at;
      const bool is_query = h < c.num_qo_heads;
      const bool is_value = h >= c.num_qo_heads + c.num_kv_heads;
      const float* norm = is_query ? q_norm.data() : k_norm.data();
      if (!c.has_norm) norm = nullptr;
      std::vector<double> want = is_value
                                     ? std::vector<double>(in, in + c.head_dim)
                                     : reference_rope(in, norm, 1.0f, 1e-6, cos.data() + table_row,
                                                      sin.data() + table_row, c.head_dim, rotated);
      if (is_value && c.has_v_norm) {
        double squares = 0.0;
        for (const double value : want) squares += value * value;
        for (double& value : want) value /= std::sqrt(squares / c.head_dim + 1e-6);
      }
      for (int32_t i = 0; i < c.head_dim; ++i) {
        if (is_query) {
          ASSERT_TRUE(
              is_near(qkv[static_cast<size_t>(at + i)], want[static_cast<size_t>(i)], 4e-6, 1e-6))
              << "q row " << row << " head " << h << " " << i;
          continue;
        }
        ASSERT_EQ(qkv[static_cast<size_t>(at + i)], in[i]) << "k and v are only read";
        if (slot == 0) continue;
        const int64_t head = (h - c.num_qo_heads) % c.num_kv_heads;
        std::byte* const token = pool.token(slot, is_value);
        const int64_t index = head * c.head_dim + i;
        ASSERT_TRUE(is_near(element(c.dtype, token, index), want[static_cast<size_t>(i)], 4e-6,
                            kv_relative))
            << "kv row " << row << " head " << h << " " << i;
        set_element(c.dtype, token, index, kNan);
        std::memset(token + index * dtype_bytes(c.dtype), 0xff,
                    static_cast<size_t>(dtype_bytes(c.dtype)));
      }
    }
  }
  // The written bytes have been poisoned again above; no others may have changed.
  for (const std::byte byte : pool.bytes) ASSERT_EQ(byte, std::byte{0xff});
}

INSTANTIATE_TEST_SUITE_P(
    Cases, RopeTest,
    ::testing::Values(
        RopeCase{4, 4, 16, DType::kFloat32, false}, RopeCase{4, 2, 64, DType::kBFloat16, true},
        RopeCase{5, 1, 128, DType::kFloat32, true}, RopeCase{8, 2, 256, DType::kBFloat16, false},
        RopeCase{3, 3, 10, DType::kFloat32, true}, RopeCase{2, 1, 32, DType::kBFloat16, true},
        RopeCase{2, 1, 2, DType::kFloat32, true},
        RopeCase{4, 2, 64, DType::kBFloat16, true, KvInputs::kKeysAndValues, true},
        RopeCase{4, 2, 34, DType::kFloat32, true, KvInputs::kKeys, true},
        RopeCase{4, 1, 512, DType::kBFloat16, true, KvInputs::kKeys, false},
        RopeCase{0, 1, 512, DType::kBFloat16, true, KvInputs::kKeys, true},
        RopeCase{0, 2, 34, DType::kFloat32, true, KvInputs::kKeysAndValues, false},
        RopeCase{4, 2, 64, DType::kFloat32, true, KvInputs::kNone},
        RopeCase{4, 2, 256, DType::kBFloat16, true, KvInputs::kKeysAndValues, false, 64},
        RopeCase{4, 2, 32, DType::kFloat32, true, KvInputs::kKeysAndValues, false, 8},
        RopeCase{2, 1, 34, DType::kFloat32, false, KvInputs::kKeysAndValues, false, 22}));

TEST(QkNormRopeAppend, ZeroFrequenciesLeaveTheirPairsAlone) {
  TRACE_SEED();
  constexpr int32_t kHeadDim = 64;
  constexpr int32_t kRotated = 8;  // pairs
  Random random(12);
  const int32_t num_rows = 1;
  const std::vector<int32_t> positions = {37};
  std::vector<float> cos = rope_table(50, kHeadDim / 2, false);
  std::vector<float> sin = rope_table(50, kHeadDim / 2, true);
  for (size_t i = 0; i < cos.size(); ++i) {
    if (i % (kHeadDim / 2) < kRotated) continue;
    cos[i] = 1.0f;
    sin[i] = 0.0f;
  }
  const std::vector<float> before = random.normals(2 * kHeadDim);
  std::vector<float> qkv = before;
  CpuContext ctx = context_of(1);
  qk_norm_rope_append(ctx, {.num_rows = &num_rows,
                            .max_rows = num_rows,
                            .qkv = qkv.data(),
                            .positions = positions.data(),
                            .slot_mapping = nullptr,
                            .q_norm = nullptr,
                            .k_norm = nullptr,
                            .norm_weight_offset = 0.0f,
                            .norm_eps = 1e-6f,
                            .rope_cos = cos.data(),
                            .rope_sin = sin.data(),
                            .kv = {},
                            .num_qo_heads = 2,
                            .num_kv_heads = 1,
                            .head_dim = kHeadDim,
                            .kv_inputs = KvInputs::kNone});
  for (size_t i = 0; i < qkv.size(); ++i) {
    if (i % (kHeadDim / 2) < kRotated) {
      ASSERT_NE(qkv[i], before[i]) << i;
    } else {
      ASSERT_EQ(qkv[i], before[i]) << i;
    }
  }
}

TEST(QkNormRopeAppend, AnOffsetRotatesRowsToALaterPosition) {
  TRACE_SEED();
  constexpr int32_t kHeadDim = 64;
  constexpr int32_t kPositions = 50;
  constexpr int32_t kRows = 3;
  constexpr int32_t kWidth = 4 * kHeadDim;  // two of q, one of k, one of v
  Random random(13);
  const std::vector<float> cos = rope_table(kPositions, kHeadDim / 2, false);
  const std::vector<float> sin = rope_table(kPositions, kHeadDim / 2, true);
  const std::vector<float> q_norm = random.normals(kHeadDim);
  const std::vector<float> k_norm = random.normals(kHeadDim);
  const std::vector<float> before = random.normals(kRows * kWidth);
  const std::vector<int64_t> slots = {1, 2, 3};  // blocks of one token
  // q, then the pool.
  const auto turn = [&](const std::vector<int32_t>& positions, int32_t offset) {
    std::vector<float> qkv = before;
    std::vector<float> pool(4 * 2 * kHeadDim, -9.0f);
    const int32_t num_rows = kRows;
    CpuContext ctx = context_of(1);
    qk_norm_rope_append(ctx, {.num_rows = &num_rows,
                              .max_rows = num_rows,
                              .qkv = qkv.data(),
                              .positions = positions.data(),
                              .slot_mapping = slots.data(),
                              .q_norm = q_norm.data(),
                              .k_norm = k_norm.data(),
                              .norm_weight_offset = 0.0f,
                              .norm_eps = 1e-6f,
                              .rope_cos = cos.data(),
                              .rope_sin = sin.data(),
                              .kv = {.base = reinterpret_cast<std::byte*>(pool.data()),
                                     .block_bytes = 2 * kHeadDim * 4,
                                     .k_offset = 0,
                                     .v_offset = kHeadDim * 4,
                                     .block_size = 1,
                                     .dtype = DType::kFloat32},
                              .num_qo_heads = 2,
                              .num_kv_heads = 1,
                              .head_dim = kHeadDim,
                              .position_offset = offset});
    qkv.insert(qkv.end(), pool.begin(), pool.end());
    return qkv;
  };
  for (const int32_t offset : {1, 5}) {
    const int32_t last = kPositions - 1;
    EXPECT_EQ(turn({0, 37, last - offset}, offset), turn({offset, 37 + offset, last}, 0));
    EXPECT_NE(turn({0, 37, last - offset}, offset), turn({0, 37, last - offset}, 0));
  }
}

TEST(QkNormRopeAppend, RowBitsDependOnTheRowAlone) {
  TRACE_SEED();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int32_t head_dim : {40, 64}) {
      constexpr int32_t kQoHeads = 4;
      constexpr int32_t kKvHeads = 2;
      const int64_t width = (kQoHeads + 2 * kKvHeads) * head_dim;
      Random random(11);
      const std::vector<float> norm = random.normals(head_dim);
      const std::vector<float> cos = rope_table(100, head_dim / 2, false);
      const std::vector<float> sin = rope_table(100, head_dim / 2, true);
      const int64_t token_bytes = kKvHeads * head_dim * dtype_bytes(dtype);
      // q of the row at `place`, then its K and V bytes.
      auto run = [&](std::vector<float> qkv, int32_t place, int num_threads) {
        const int32_t num_rows = static_cast<int32_t>(static_cast<int64_t>(qkv.size()) / width);
        Pool pool(dtype, 16, 40, kKvHeads, head_dim);
        std::vector<int32_t> positions(static_cast<size_t>(num_rows));
        std::vector<int64_t> slots(static_cast<size_t>(num_rows));
        for (int32_t row = 0; row < num_rows; ++row) {
          positions[static_cast<size_t>(row)] = row == place ? 77 : random.below(100);
          slots[static_cast<size_t>(row)] = 16 + 2 * row + 1;
        }
        CpuContext ctx = context_of(num_threads);
        qk_norm_rope_append(ctx, {.num_rows = &num_rows,
                                  .max_rows = num_rows,
                                  .qkv = qkv.data(),
                                  .positions = positions.data(),
                                  .slot_mapping = slots.data(),
                                  .q_norm = norm.data(),
                                  .k_norm = norm.data(),
                                  .norm_weight_offset = 0.0f,
                                  .norm_eps = 1e-6f,
                                  .rope_cos = cos.data(),
                                  .rope_sin = sin.data(),
                                  .kv = pool.view,
                                  .num_qo_heads = kQoHeads,
                                  .num_kv_heads = kKvHeads,
                                  .head_dim = head_dim});
        std::vector<std::byte> bits(static_cast<size_t>(kQoHeads * head_dim * 4 + 2 * token_bytes));
        std::memcpy(bits.data(), qkv.data() + place * width,
                    static_cast<size_t>(kQoHeads * head_dim * 4));
        for (const bool is_value : {false, true}) {
          std::memcpy(bits.data() + kQoHeads * head_dim * 4 + (is_value ? token_bytes : 0),
                      pool.token(slots[static_cast<size_t>(place)], is_value),
                      static_cast<size_t>(token_bytes));
        }
        return bits;
      };
      for (const int32_t num_rows : kBatchSizes) {
        const std::vector<float> probe = random.normals(width);
        const std::vector<std::byte> alone = run(probe, 0, 1);
        for (const int num_threads : {1, 2, 3}) {
          std::vector<float> qkv = random.normals(num_rows * width);
          const int32_t place = random.below(num_rows);
          std::copy(probe.begin(), probe.end(), qkv.begin() + place * width);
          ASSERT_EQ(alone, run(qkv, place, num_threads))
              << dtype_name(dtype) << " rows " << num_rows << " threads " << num_threads;
        }
      }
    }
  }
}

}  // namespace
}  // namespace paceline::testing
