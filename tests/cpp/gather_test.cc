// SPDX-License-Identifier: Apache-2.0
// Ranks exchange columns: every rank gets all columns of every row, whatever the sizes, or the
// token that is drawn from them; and a rank that does not come, or fails, ends the wait of the
// others with one error.

#include "ops/gather.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.h>

#include "device/cpu_context.h"
#include "support/drawn_rows.h"
#include "support/errors.h"
#include "support/seed.h"

namespace paceline {
namespace {

using ::testing::AllOf;
using testing::DrawnRows;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::seed_from_env;

constexpr auto data_of = [](const auto& values) { return values.data(); };

// Calls body(rank) on a thread for each rank and returns what each throws; "" if nothing.
std::vector<std::string> on_ranks(int32_t num_ranks, const std::function<void(int32_t)>& body) {
  std::vector<std::string> messages(static_cast<size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      messages[static_cast<size_t>(rank)] = message_of<DeviceError>([&] { body(rank); });
    });
  }
  for (std::thread& thread : threads) thread.join();
  return messages;
}

struct Exchange {
  int32_t num_rows;
  std::vector<int32_t> widths;  // columns of each rank
  bool is_in_place;             // x has its place in y

  [[nodiscard]] int32_t total() const { return std::accumulate(widths.begin(), widths.end(), 0); }
  [[nodiscard]] int32_t first(int32_t rank) const {
    return std::accumulate(widths.begin(), widths.begin() + rank, 0);
  }
  [[nodiscard]] RankColumns columns() const {
    RankColumns shared = {.num_ranks = static_cast<int32_t>(widths.size())};
    for (int32_t rank = 0; rank <= shared.num_ranks; ++rank) {
      shared.first[static_cast<size_t>(rank)] = first(rank);
    }
    return shared;
  }
};

// What rank `rank` has of `whole` [num_rows, total] before the exchange, and its gather.
struct RankRows {
  std::vector<float> x;
  std::vector<float> y;
  GatherColumnsParams params{};

  RankRows(const Exchange& e, const std::vector<float>& whole, const RankHandle& ranks)
      : y(whole.size(), -1.0f) {
    const int32_t width = e.widths[static_cast<size_t>(ranks.rank)];
    const int32_t first = e.first(ranks.rank);
    x.resize(static_cast<size_t>(e.num_rows) * static_cast<size_t>(width));
    for (int32_t row = 0; row < e.num_rows; ++row) {
      const float* const from = whole.data() + int64_t{row} * e.total() + first;
      float* const to = e.is_in_place ? y.data() + int64_t{row} * e.total() + first
                                      : x.data() + int64_t{row} * width;
      std::copy_n(from, width, to);
    }
    params = {.num_rows = &e.num_rows,
              .max_rows = e.num_rows,
              .x = e.is_in_place ? y.data() + first : x.data(),
              .x_stride = e.is_in_place ? e.total() : width,
              .columns = e.columns(),
              .y = y.data(),
              .ranks = ranks};
  }
};

std::vector<float> random_rows(const Exchange& e, std::mt19937_64& random) {
  std::vector<float> whole(static_cast<size_t>(e.num_rows) * static_cast<size_t>(e.total()));
  for (float& value : whole) value = static_cast<float>(random() % 1000);
  return whole;
}

// Makes several exchanges one after the other and counts values that differ from the whole rows.
// `plant` may change the params of a rank.
int64_t num_wrong(const std::vector<Exchange>& exchanges, uint64_t seed,
                  const std::function<void(int32_t rank, GatherColumnsParams&)>& plant) {
  const auto num_ranks = static_cast<int32_t>(exchanges.front().widths.size());
  int64_t longest = 0;
  for (const Exchange& e : exchanges) longest = std::max<int64_t>(longest, e.total());
  RankGroup group(num_ranks, longest * 4, /*timeout_s=*/60);
  std::mt19937_64 random(seed);
  std::vector<std::vector<float>> wholes;
  for (const Exchange& e : exchanges) wholes.push_back(random_rows(e, random));
  std::vector<int64_t> wrong(static_cast<size_t>(num_ranks));
  const std::vector<std::string> messages = on_ranks(num_ranks, [&](int32_t rank) {
    CpuContext ctx;
    std::mt19937_64 own(seed + static_cast<uint64_t>(rank));
    for (size_t i = 0; i < exchanges.size(); ++i) {
      RankRows rows(exchanges[i], wholes[i], {.group = &group, .rank = rank});
      plant(rank, rows.params);
      if (own() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 200));
      ctx.run(gather_columns, rows.params);
      for (size_t j = 0; j < rows.y.size(); ++j) {
        wrong[static_cast<size_t>(rank)] += rows.y[j] != wholes[i][j] ? 1 : 0;
      }
    }
  });
  EXPECT_THAT(messages, Each(std::string()));
  return std::accumulate(wrong.begin(), wrong.end(), int64_t{0});
}

void sound(int32_t, GatherColumnsParams&) {}

TEST(Gather, EveryRankHasAllColumns) {
  const uint64_t first_seed = seed_from_env(1);
  for (uint64_t seed = first_seed; seed < first_seed + 12; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const size_t num_ranks = 1 + seed % 5;
    std::vector<Exchange> exchanges;
    for (int i = 0; i < 20; ++i) {
      Exchange e = {.num_rows = static_cast<int32_t>(random() % 20),
                    .widths = std::vector<int32_t>(num_ranks),
                    .is_in_place = random() % 2 == 0};
      // Long rows take several steps, and a rank may have none.
      const uint64_t longest = i % 5 == 0 ? 60000 : 40;
      for (int32_t& width : e.widths) width = static_cast<int32_t>(random() % longest);
      if (e.total() == 0) e.widths.front() = 1;
      exchanges.push_back(e);
    }
    EXPECT_EQ(num_wrong(exchanges, seed, sound), 0);
  }
}

// The rows of a branch, of which each rank has computed some columns, join the residual and are
// normed, in one op as in two. After a mixture a row is the sum of its places.
TEST(Gather, ANormThatFollowsHasTheBitsOfAnOpOfItsOwn) {
  const uint64_t first_seed = seed_from_env(1);
  for (uint64_t seed = first_seed; seed < first_seed + 24; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto num_ranks = static_cast<int32_t>(2 + random() % 3);
    Exchange e = {
        .num_rows = static_cast<int32_t>(1 + random() % 9), .widths = {}, .is_in_place = true};
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      e.widths.push_back(static_cast<int32_t>(1 + random() % 40));
    }
    const auto floats = [&](int64_t count) {
      std::vector<float> values(static_cast<size_t>(count));
      for (float& value : values) value = static_cast<float>(random() % 1000) / 500 - 1;
      return values;
    };
    std::vector<float> whole = floats(int64_t{e.num_rows} * e.total());
    const auto top_k = static_cast<int32_t>(1 + random() % 6);
    const bool has_places = random() % 2 == 0;
    const bool has_shared = random() % 2 == 0;  // else a base, which is there before the op
    const std::vector<float> of_places = floats(std::ssize(whole) * (top_k + 1));
    const std::vector<float> base = whole;
    const std::vector<float> place_weights = floats(int64_t{e.num_rows} * top_k);
    std::vector<int32_t> expert_row(place_weights.size());
    for (int32_t& row : expert_row) {
      row = static_cast<int32_t>(random() % static_cast<uint64_t>(e.num_rows * top_k));
    }
    const auto places_of = [&](float* y, const LinearRange& columns) {
      return CombineExpertsParams{.num_rows = &e.num_rows,
                                  .max_rows = e.num_rows,
                                  .top_k = top_k,
                                  .x = of_places.data() + columns.first,
                                  .expert_row = expert_row.data(),
                                  .weights = place_weights.data(),
                                  .y = y + columns.first,
                                  .hidden = columns.count,
                                  .base = has_shared ? nullptr : y + columns.first,
                                  .has_shared = has_shared,
                                  .stride = e.total()};
    };
    if (has_places) {
      CpuContext ctx;
      CombineExpertsParams all = places_of(whole.data(), {.first = 0, .count = e.total()});
      all.stride = 0;
      ctx.run(combine_experts, all);
    }
    const std::vector<float> residual = floats(std::ssize(whole));
    const std::vector<float> weight = floats(e.total());
    const std::vector<float> x_weight = floats(e.total());
    const float scale = 0.75f;
    RmsNormParams norm = {.num_rows = &e.num_rows,
                          .max_rows = e.num_rows,
                          .x = whole.data(),
                          .x_stride = e.total(),
                          .residual = nullptr,
                          .weight = random() % 4 == 0 ? nullptr : weight.data(),
                          .weight_offset = static_cast<float>(random() % 2),
                          .eps = 1e-5f,
                          .y = nullptr,
                          .y_stride = e.total(),
                          .hidden = e.total()};
    if (random() % 2 == 0) norm.x_weight = x_weight.data();
    if (random() % 2 == 0) norm.residual_scale = &scale;
    const bool has_y = random() % 4 != 0;
    const auto run_norm = [&](std::vector<float>& sum, std::vector<float>& y, const auto& run) {
      RmsNormParams own = norm;
      sum = residual;
      y.assign(whole.size(), -1.0f);
      own.residual = sum.data();
      own.y = has_y ? y.data() : nullptr;
      run(own);
    };
    std::vector<float> sum;
    std::vector<float> y;
    run_norm(sum, y, [](const RmsNormParams& own) {
      CpuContext ctx;
      ctx.run(rms_norm, own);
    });
    RankGroup group(num_ranks, int64_t{e.total()} * 4, /*timeout_s=*/60);
    const std::vector<std::string> messages = on_ranks(num_ranks, [&](int32_t rank) {
      CpuContext ctx;
      RankRows rows(e, has_places ? base : whole, {.group = &group, .rank = rank});
      std::vector<float> own_sum;
      std::vector<float> own_y;
      run_norm(own_sum, own_y, [&](RmsNormParams own) {
        own.x = rows.y.data();
        GatheredNormParams p = {.gather = rows.params, .norm = own};
        if (has_places) p.places = places_of(rows.y.data(), e.columns().of(rank));
        ctx.run(gathered_norm, p);
        p.places = places_of(whole.data(), e.columns().of(rank));
        EXPECT_THAT(message_of<InternalError>([&] { check_gathered(p); }),
                    HasSubstr("the gather does not read the sum of the places"));
        p.norm.x = whole.data();
        EXPECT_THAT(message_of<InternalError>([&] { check_gathered(p); }),
                    HasSubstr("the norm does not read what is gathered"));
      });
      EXPECT_EQ(own_sum, sum);
      EXPECT_EQ(own_y, y);
    });
    EXPECT_THAT(messages, Each(std::string()));
  }
}

// The tokens that every rank draws from the logits of its own ids.
std::vector<std::vector<int32_t>> tokens_of_ranks(
    const DrawnRows& drawn, const std::function<void(GatheredDrawParams&)>& plant) {
  const int32_t num_ranks = drawn.columns.num_ranks;
  RankGroup group(num_ranks, int64_t{drawn.columns.total()} * 4, /*timeout_s=*/60);
  std::vector<std::vector<int32_t>> tokens(static_cast<size_t>(num_ranks),
                                           std::vector<int32_t>(drawn.row_index.size(), -7));
  const std::vector<std::string> messages = on_ranks(num_ranks, [&](int32_t rank) {
    CpuContext ctx;
    ThreadPool threads(2);
    if (rank % 2 == 1) ctx = {.num_threads = 2, .threads = &threads};
    const std::vector<float> own = drawn.own_logits(rank);
    GatheredDrawParams p = {
        .draw = drawn.params(own.data(), tokens[static_cast<size_t>(rank)].data(), data_of),
        .columns = drawn.columns,
        .ranks = {.group = &group, .rank = rank}};
    plant(p);
    ctx.run(gathered_draw, p);
    float probability = 0;
    p.draw.probabilities = &probability;
    EXPECT_THAT(message_of<InternalError>([&] { check_gathered(p); }),
                HasSubstr("the draw reads the logits of all ids"));
    p.draw.probabilities = nullptr;
    p.draw.vocab_limit = p.columns.total() + 1;
    EXPECT_THAT(message_of<InternalError>([&] { check_gathered(p); }), HasSubstr("ranks have "));
  });
  EXPECT_THAT(messages, Each(std::string()));
  return tokens;
}

TEST(Gather, ADrawFromOwnIdsHasTheTokensOfADrawFromAll) {
  const uint64_t first_seed = seed_from_env(1);
  for (uint64_t seed = first_seed; seed < first_seed + 60; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    // Many rows take several steps.
    const bool is_long = seed % 20 == 0;
    const int32_t widest = is_long ? 4 : seed % 3 == 0 ? 700 : 30;
    const auto num_ranks = static_cast<int32_t>(2 + seed % 4);
    const DrawnRows drawn(num_ranks, widest, is_long ? 50000 : seed % 2 == 0 ? 30 : 6, random);
    std::vector<int32_t> expected(drawn.row_index.size(), -7);
    CpuContext ctx;
    ctx.run(draw, drawn.params(drawn.logits.data(), expected.data(), data_of));
    EXPECT_THAT(tokens_of_ranks(drawn, [](GatheredDrawParams&) {}), Each(expected));
    // A rank that takes the id before its own for one of them.
    const auto shift = [](GatheredDrawParams& p) {
      if (p.ranks.rank == 1) --p.columns.first[1];
    };
    const int32_t end = drawn.columns.first[1];
    if (end > 0 && drawn.vocab_limit >= end && drawn.max_rows >= 30 && drawn.token_map.empty()) {
      EXPECT_THAT(tokens_of_ranks(drawn, shift), Not(Each(expected)));
    }
  }
}

TEST(Gather, SwappedColumnsAreSeen) {
  const std::vector<Exchange> exchanges(5, {.num_rows = 3, .widths = {8, 8, 8}});
  EXPECT_EQ(num_wrong(exchanges, 3, sound), 0);
  const auto swaps = [](int32_t rank, GatherColumnsParams& p) {
    if (rank == 2) return;
    p.columns.first[static_cast<size_t>(rank)] = 8 * (1 - rank);
    p.columns.first[static_cast<size_t>(rank) + 1] = 8 * (2 - rank);
  };
  EXPECT_GT(num_wrong(exchanges, 3, swaps), 100);
}

TEST(Gather, ARankThatDoesNotComeIsNamed) {
  const Exchange e = {.num_rows = 2, .widths = {4, 4, 4}};
  const std::vector<float> whole(static_cast<size_t>(e.num_rows * e.total()));
  RankGroup group(3, e.total() * 4, /*timeout_s=*/0.05);
  EXPECT_EQ(group.awaited(), "");
  int num_failures = 0;
  group.set_on_failure([&] { ++num_failures; });
  const std::vector<std::string> messages = on_ranks(3, [&](int32_t rank) {
    if (rank == 1) return;
    CpuContext ctx;
    RankRows rows(e, whole, {.group = &group, .rank = rank});
    ctx.run(gather_columns, rows.params);
  });
  for (const size_t rank : {0, 2}) {
    EXPECT_THAT(messages[rank], AllOf(HasSubstr("rank 1 of 3: it has not come to an exchange for "),
                                      HasSubstr("hang_timeout_s is 0.05")));
  }
  EXPECT_EQ(num_failures, 1);
  EXPECT_EQ(group.awaited(), "rank 1 of 3");
}

TEST(Gather, ARankThatFailsEndsTheOthersAtOnce) {
  const Exchange e = {.num_rows = 2, .widths = {4, 4}};
  const std::vector<float> whole(static_cast<size_t>(e.num_rows * e.total()));
  RankGroup group(2, e.total() * 4, /*timeout_s=*/0);  // without a limit
  const std::vector<std::string> messages = on_ranks(2, [&](int32_t rank) {
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      group.fail(rank, std::make_exception_ptr(OutOfMemory("the planted cause")));
      group.fail(0, std::make_exception_ptr(OutOfMemory("a later cause")));
      return;
    }
    CpuContext ctx;
    RankRows rows(e, whole, {.group = &group, .rank = rank});
    ctx.run(gather_columns, rows.params);
  });
  EXPECT_EQ(messages[0], "rank 1 of 2: the planted cause");
  EXPECT_TRUE(group.has_failed());
}

}  // namespace
}  // namespace paceline
