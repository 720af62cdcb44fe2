// SPDX-License-Identifier: Apache-2.0
//
// The exchange of ranks on GPUs, emulated on the CPU (tests/cuda/emulator), which runs one kernel
// after the other. So the group counts as failed, which ends every wait, and each exchange runs
// twice on every rank: at first for what it sends, and then to receive what all have sent.
//
// PACELINE_SEED overrides the seed.

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/emulator/emulator.h"
#include "cuda/emulator/guarded_memory.h"
#include "device/cuda_context.h"
#include "device/device_memory.h"
#include "device/rank_group.h"
#include "ops/gather.h"
#include "support/drawn_rows.h"
#include "support/seed.h"

namespace paceline {
namespace {

using emulator::GuardedMemory;
using testing::DrawnRows;
using testing::seed_from_env;

// Arrays of one rank between guards.
class Arrays {
 public:
  template <class T>
  T* add(const std::vector<T>& values) {
    GuardedMemory& memory = memories_.emplace_back(values.size() * sizeof(T));
    std::memcpy(memory.data(), values.data(), memory.size());
    return reinterpret_cast<T*>(memory.data());
  }
  void check() const {
    for (const GuardedMemory& memory : memories_) ASSERT_TRUE(memory.are_guards_intact());
  }

 private:
  std::vector<GuardedMemory> memories_;
};

struct Case {
  RankColumns columns;
  int32_t max_rows;
  int32_t num_rows;
  DType dtype;
  std::vector<std::byte> whole;  // [max_rows, columns.total()] dtype
  std::vector<float> residual;
  std::vector<float> weight;
  std::vector<int32_t> expert_row;
  bool has_places, has_x_weight, has_norm;
};
constexpr int32_t kTopK = 6;
constexpr float kScale = 0.75f;

std::vector<float> random_floats(int64_t count, std::mt19937_64& random) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(random() % 1000) / 500 - 1;
  return values;
}

Case random_case(int32_t num_ranks, int32_t widest, int32_t max_rows, std::mt19937_64& random) {
  Case c = {.columns = {.num_ranks = num_ranks},
            .max_rows = max_rows,
            .num_rows = static_cast<int32_t>(random() % static_cast<uint64_t>(max_rows + 1)),
            .dtype = random() % 2 == 0 ? DType::kBFloat16 : DType::kFloat32};
  const int32_t unit = random() % 4 == 0 ? 1 : 8;
  for (size_t rank = 0; rank < static_cast<size_t>(num_ranks); ++rank) {
    const auto width = static_cast<int32_t>(1 + random() % static_cast<uint64_t>(widest / unit));
    c.columns.first[rank + 1] = c.columns.first[rank] + width * unit;
  }
  const int64_t count = int64_t{max_rows} * c.columns.total();
  const auto item = static_cast<size_t>(dtype_bytes(c.dtype));
  c.whole.resize(static_cast<size_t>(count) * item);
  size_t at = 0;
  for (const float value : random_floats(count, random)) {
    const auto bits = std::bit_cast<uint32_t>(value);
    // Little endian: the upper half is a bfloat16.
    std::memcpy(c.whole.data() + at, reinterpret_cast<const std::byte*>(&bits) + 4 - item, item);
    at += item;
  }
  c.residual = random_floats(count, random);
  c.weight = random_floats(std::max<int64_t>(c.columns.total(), max_rows * kTopK), random);
  for (int32_t i = 0; i < max_rows * kTopK; ++i) {
    c.expert_row.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(max_rows)));
  }
  c.has_places = random() % 2 == 0;
  c.has_x_weight = random() % 2 == 0;
  c.has_norm = random() % 4 != 0;
  return c;
}

// The arguments of a rank in arrays of its own.
GatheredNormParams params_of(const Case& c, const RankHandle& ranks, Arrays& arrays) {
  const LinearRange own = c.columns.of(ranks.rank);
  const int32_t hidden = c.columns.total();
  const int64_t item = dtype_bytes(c.dtype);
  std::vector<std::byte> partial(c.whole.size(), std::byte{0xff});
  for (int64_t row = 0; row < c.max_rows; ++row) {
    const int64_t at = (row * hidden + own.first) * item;
    std::copy_n(c.whole.begin() + at, own.count * item, partial.begin() + at);
  }
  std::byte* const y = arrays.add(partial);
  const int32_t* const num_rows = arrays.add(std::vector<int32_t>{c.num_rows});
  const float* const weight = arrays.add(c.weight);
  GatheredNormParams p = {.gather = {.num_rows = num_rows,
                                     .max_rows = c.max_rows,
                                     .x = y + own.first * item,
                                     .x_stride = hidden,
                                     .columns = c.columns,
                                     .y = y,
                                     .dtype = c.dtype,
                                     .ranks = ranks},
                          .norm = {.num_rows = num_rows,
                                   .max_rows = c.max_rows,
                                   .x = y,
                                   .x_stride = hidden,
                                   .residual = arrays.add(c.residual),
                                   .weight = c.has_norm ? weight : nullptr,
                                   .weight_offset = 1,
                                   .eps = 1e-5f,
                                   .y = arrays.add(c.residual),
                                   .y_stride = hidden,
                                   .hidden = hidden,
                                   .x_weight = c.has_x_weight ? weight : nullptr,
                                   .residual_scale = arrays.add(std::vector<float>{kScale}),
                                   .x_dtype = c.dtype,
                                   .y_dtype = c.dtype}};
  if (c.has_places) {
    p.places = CombineExpertsParams{.num_rows = num_rows,
                                    .max_rows = c.max_rows,
                                    .top_k = kTopK,
                                    .x = arrays.add(c.whole) + own.first * item,
                                    .expert_row = arrays.add(c.expert_row),
                                    .weights = weight,
                                    .y = y + own.first * item,
                                    .hidden = own.count,
                                    .dtype = c.dtype,
                                    .base = y + own.first * item,
                                    .stride = hidden};
  }
  return p;
}

constexpr int32_t kNumSms = 12;
constexpr int32_t kRowsOfADraw = kNumSms / 2;  // of a launch

// Ranks whose kernels are emulated.
class EmulatedRanks {
 public:
  EmulatedRanks(int32_t num_ranks, int64_t row_bytes)
      : group_(std::vector<DeviceMemory*>(static_cast<size_t>(num_ranks), &host_memory()),
               row_bytes) {
    const GpuExchange& exchange = group_.gpu_exchange();
    *exchange.has_failed = 1;
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      *exchange.states[rank] = {};
      std::memset(exchange.arrivals[rank], 0, sizeof(uint64_t) * kMaxRanks * exchange.kMaxBlocks);
      std::memset(exchange.packets[rank], 0, size_t{2} * 16 * exchange.kPacketsAPlace);
    }
  }
  [[nodiscard]] RankHandle handle(int32_t rank) { return {.group = &group_, .rank = rank}; }

  // Calls run(context, make(rank)) twice for every rank, which makes `num_exchanges` each time, at
  // most two. Returns the params of the second time.
  template <class Make, class Run>
  auto exchange(uint64_t num_exchanges, const Make& make, const Run& run) {
    std::vector<decltype(make(handle(0)))> all;
    const GpuExchange& exchange = group_.gpu_exchange();
    CudaContext ctx = {.num_sms = kNumSms,
                       .block_shared_bytes = 227 << 10,
                       .sm_shared_bytes = 228 << 10,
                       .is_portable = true,
                       .workspace = workspace_.data(),
                       .workspace_bytes = std::ssize(workspace_),
                       .counters = counters_.data(),
                       .num_counters = static_cast<int32_t>(counters_.size())};
    for (int32_t rank = 0; rank < group_.num_ranks(); ++rank) {
      const GpuExchange::State before = *exchange.states[rank];
      run(ctx, make(handle(rank)));
      *exchange.states[rank] = before;
    }
    for (int32_t rank = 0; rank < group_.num_ranks(); ++rank) {
      const uint64_t before = exchange.states[rank]->num_exchanges;
      all.push_back(make(handle(rank)));
      run(ctx, all.back());
      const uint64_t count = exchange.states[rank]->num_exchanges;
      EXPECT_EQ(count, before + num_exchanges);
      EXPECT_EQ(exchange.states[rank]->num_begun_blocks, 0U);
      // No flag is of an exchange that has not begun.
      for (int32_t i = 0; i < exchange.kMaxBlocks * kMaxRanks; ++i) {
        EXPECT_LE(exchange.arrivals[rank][i], exchange.states[0]->num_exchanges);
      }
    }
    return all;
  }

 private:
  RankGroup group_;
  std::vector<std::byte> workspace_ = std::vector<std::byte>(1 << 16);
  std::vector<int32_t> counters_ = std::vector<int32_t>(64);
};

std::string bytes_at(const void* from, size_t count) {
  return {static_cast<const char*>(from), count};
}

TEST(GatherEmulation, EveryRankHasAllColumnsAndTheNormOfThem) {
  const uint64_t first_seed = seed_from_env(1);
  for (uint64_t seed = first_seed; seed < first_seed + 8; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    emulator::set_options({.seed = seed});
    const auto num_ranks = static_cast<int32_t>(2 + random() % 3);
    constexpr int32_t kWidest = 5000;
    EmulatedRanks ranks(num_ranks, int64_t{num_ranks} * kWidest * 4);
    for (int32_t i = 0; i < 6; ++i) {
      // Packets and, with many wide rows, segments; norms of one kernel and of several ops.
      const bool is_wide = i == 4;
      const bool is_long = i == 5;
      const auto max_rows = static_cast<int32_t>(1 + random() % (is_long ? 40 : 6));
      const Case c = random_case(num_ranks,
                                 is_wide   ? kWidest
                                 : is_long ? 64
                                           : 300,
                                 is_wide ? 40 : max_rows, random);
      Arrays arrays;
      const auto make = [&](const RankHandle& of) { return params_of(c, of, arrays); };
      const uint64_t num_exchanges = c.num_rows > 0 ? 1 : 0;  // without rows there is none
      const auto joined = ranks.exchange(
          num_exchanges, make,
          [](CudaContext& ctx, const GatheredNormParams& p) { gathered_norm(ctx, p); });
      const auto apart =
          ranks.exchange(num_exchanges, make, [](CudaContext& ctx, const GatheredNormParams& p) {
            if (p.places) combine_experts(ctx, *p.places);
            gather_columns(ctx, p.gather);
            rms_norm(ctx, p.norm);
          });
      ASSERT_FALSE(HasFailure());
      arrays.check();
      const size_t row_bytes = c.whole.size() / static_cast<size_t>(c.max_rows);
      const size_t used = row_bytes * static_cast<size_t>(c.num_rows);
      const std::string sum = bytes_at(apart[0].norm.residual, c.residual.size() * 4);
      const std::string y = bytes_at(apart[0].norm.y, c.residual.size() * 4);
      if (c.num_rows > 0) {
        EXPECT_NE(sum, bytes_at(c.residual.data(), sum.size()));
      }
      for (size_t rank = 0; rank < apart.size(); ++rank) {
        if (!c.has_places) {
          EXPECT_TRUE(bytes_at(apart[rank].gather.y, used) == bytes_at(c.whole.data(), used));
        }
        EXPECT_TRUE(bytes_at(apart[rank].gather.y, used) == bytes_at(apart[0].gather.y, used));
        for (const GatheredNormParams& p : {joined[rank], apart[rank]}) {
          EXPECT_TRUE(bytes_at(p.norm.residual, sum.size()) == sum) << "exchange " << i;
          EXPECT_TRUE(bytes_at(p.norm.y, y.size()) == y) << "exchange " << i;
        }
      }
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST(GatherEmulation, ADrawFromOwnIdsHasTheTokensOfADrawFromAll) {
  const uint64_t first_seed = seed_from_env(1);
  int64_t num_drawn = 0;
  for (uint64_t seed = first_seed; seed < first_seed + 12; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    emulator::set_options({.seed = seed});
    const auto num_ranks = static_cast<int32_t>(2 + random() % 3);
    EmulatedRanks ranks(num_ranks, 1 << 12);
    for (int32_t i = 0; i < 4; ++i) {
      // Several blocks of a row, and two launches.
      const DrawnRows rows(num_ranks, i == 3 ? 6000 : 400, 2 * kRowsOfADraw, random);
      Arrays arrays;
      const auto add = [&](const auto& values) { return arrays.add(values); };
      const auto draw_of = [&](const std::vector<float>& logits) {
        const std::vector<int32_t> tokens(rows.row_index.size(), -7);
        return rows.params(arrays.add(logits), arrays.add(tokens), add);
      };
      const auto num_launches =
          static_cast<uint64_t>((rows.num_rows[0] + kRowsOfADraw - 1) / kRowsOfADraw);
      const auto drawn = ranks.exchange(
          num_launches,
          [&](const RankHandle& of) -> GatheredDrawParams {
            return {
                .draw = draw_of(rows.own_logits(of.rank)), .columns = rows.columns, .ranks = of};
          },
          [](CudaContext& ctx, const GatheredDrawParams& p) { gathered_draw(ctx, p); });
      const auto whole = ranks.exchange(
          0, [&](const RankHandle&) { return draw_of(rows.logits); },
          [](CudaContext& ctx, const DrawParams& p) { draw(ctx, p); });
      arrays.check();
      for (const GatheredDrawParams& p : drawn) {
        for (size_t row = 0; row < rows.row_index.size(); ++row) {
          EXPECT_EQ(p.draw.tokens[row], whole[0].tokens[row]) << "row " << row << ", draw " << i;
          num_drawn += p.draw.tokens[row] >= 0 ? 1 : 0;
        }
      }
      ASSERT_FALSE(HasFailure());
    }
  }
  EXPECT_GT(num_drawn, 100);
}

}  // namespace
}  // namespace paceline
