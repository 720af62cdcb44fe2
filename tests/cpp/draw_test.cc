// SPDX-License-Identifier: Apache-2.0
// Noise and draws: philox against published answers, draw on the CPU against a reference without
// pruning and against the distribution that it must follow.

#include "ops/ops.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/philox.h"
#include "device/cpu_context.h"
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

// Random123's kat_vectors for philox4x32-10: counter words, key words, result.
TEST(Philox, KnownAnswers) {
  struct Kat {
    std::array<uint32_t, 4> counter;
    std::array<uint32_t, 2> key;
    std::array<uint32_t, 4> result;
  };
  const Kat kats[] = {{{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
                      {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
                       {0xffffffff, 0xffffffff},
                       {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
                      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                       {0xa4093822, 0x299f31d0},
                       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
  for (const Kat& kat : kats) {
    const NoiseKey key = {.seed = kat.key[0] | uint64_t{kat.key[1]} << 32,
                          .stream = static_cast<NoiseStream>(kat.counter[2]),
                          .position = kat.counter[1],
                          .salt = kat.counter[3]};
    EXPECT_EQ(philox(key, kat.counter[0]), kat.result);
  }
}

TEST(Philox, UniformIsOpenAtBothEnds) {
  EXPECT_GT(uniform_open(0), 0.0f);
  EXPECT_LT(uniform_open(0xffffffffu), 1.0f);
  EXPECT_LT(uniform_open(0xffffff7fu), 1.0f);
}

int32_t reference_draw(const float* logits, int32_t n, float temperature, uint64_t seed,
                       int32_t position) {
  int32_t token = -2;
  double best = -std::numeric_limits<double>::infinity();
  for (int32_t id = 0; id < n; ++id) {
    double key = logits[id];
    if (temperature > 0.0f) {
      const NoiseKey noise = {.seed = seed,
                              .stream = NoiseStream::kTarget,
                              .position = static_cast<uint32_t>(position) + 1,
                              .salt = 0};
      const auto words = philox(noise, static_cast<uint32_t>(id) / 4);
      const double u = uniform_open(words[static_cast<size_t>(id % 4)]);
      key = key / double{temperature} - std::log(-std::log1p(-u));
    }
    if (key > best) {
      best = key;
      token = id;
    }
  }
  return token;
}

struct DrawRows {
  std::vector<float> logits;
  int64_t stride;
  int32_t vocab_limit;
  std::vector<int32_t> row_index;
  std::vector<int32_t> seq_slot;
  std::vector<int32_t> positions;
  std::vector<uint64_t> seeds;
  std::vector<float> temperatures;

  std::vector<int32_t> draw_all(int num_threads) const {
    const int32_t num_rows = static_cast<int32_t>(row_index.size());
    std::vector<int32_t> tokens(row_index.size(), -99);
    CpuContext ctx = context_of(num_threads);
    draw(ctx, {.num_rows = &num_rows,
               .max_rows = num_rows,
               .logits = logits.data(),
               .logits_stride = stride,
               .vocab_limit = vocab_limit,
               .row_index = row_index.data(),
               .seq_slot = seq_slot.data(),
               .positions = positions.data(),
               .seeds = seeds.data(),
               .temperatures = temperatures.data(),
               .tokens = tokens.data()});
    return tokens;
  }
};

TEST(Draw, PruningChangesNothing) {
  TRACE_SEED();
  Random random(25);
  for (const int32_t vocab : {1, 3, 17, 63, 64, 65, 1000, 5003}) {
    for (const float spread : {0.0f, 0.1f, 1.0f, 5.0f, 20.0f, 1000.0f, 1e6f, 1e31f}) {
      for (const float temperature : {0.0f, 1e-5f, 0.01f, 0.3f, 1.0f, 2.0f, 100.0f}) {
        const int32_t num_rows = vocab > 500 ? 3 : 8;
        DrawRows rows = {.logits = random.normals(int64_t{num_rows} * (vocab + 5), spread),
                         .stride = vocab + 5,
                         .vocab_limit = vocab,
                         .row_index = {},
                         .seq_slot = {},
                         .positions = {},
                         .seeds = {},
                         .temperatures = {}};
        for (float& logit : rows.logits) {
          const int32_t dice = random.below(40);
          if (dice == 0) logit = -kInf;
          if (dice == 1) logit = kNan;
          if (dice == 2) logit = rows.logits[0];  // ties at temperature 0
        }
        for (int32_t row = 0; row < num_rows; ++row) {
          rows.row_index.push_back(row);
          rows.seq_slot.push_back(row);
          rows.positions.push_back(random.below(100000));
          rows.seeds.push_back(random.engine()());
          rows.temperatures.push_back(temperature);
          for (int32_t i = 0; i < 5; ++i) {
            rows.logits[static_cast<size_t>(row * rows.stride + vocab + i)] = kInf;  // not drawable
          }
        }
        const std::vector<int32_t> tokens = rows.draw_all(2);
        for (int32_t row = 0; row < num_rows; ++row) {
          const size_t r = static_cast<size_t>(row);
          ASSERT_EQ(tokens[r], reference_draw(rows.logits.data() + row * rows.stride, vocab,
                                              temperature, rows.seeds[r], rows.positions[r]))
              << "vocab " << vocab << " spread " << spread << " temperature " << temperature;
        }
      }
    }
  }
}

// With this seed token 2058 at position 100 has the word 0, and so the largest noise there is:
// 33 log 2. One token in 2^32 has it, too few for random cases to meet.
TEST(Draw, TheLargestNoiseIsNotPruned) {
  constexpr uint64_t kSeed = 1066635;
  constexpr int32_t kPosition = 100;
  constexpr int32_t kFirst = 0;
  constexpr int32_t kLucky = 2058;
  const auto noise_of = [](int32_t token) {
    const NoiseKey key = {
        .seed = kSeed, .stream = NoiseStream::kTarget, .position = kPosition, .salt = 0};
    const uint32_t word = philox(key, static_cast<uint32_t>(token) / 4)[token % 4];
    return -std::log(-std::log1p(-double{uniform_open(word)}));
  };
  ASSERT_NEAR(noise_of(kLucky), 33 * std::log(2.0), 1e-6);
  for (const float temperature : {0.5f, 1.0f, 2.0f}) {
    for (const double margin : {0.01, -0.01}) {
      // Whole blocks of 64 ids, since a block that the vocabulary cuts short is never pruned.
      DrawRows rows = {.logits = std::vector<float>(2112, -1000.0f),
                       .stride = 2112,
                       .vocab_limit = 2112,
                       .row_index = {0},
                       .seq_slot = {0},
                       .positions = {kPosition - 1},
                       .seeds = {kSeed},
                       .temperatures = {temperature}};
      const double behind = noise_of(kFirst) - noise_of(kLucky) + margin;
      rows.logits[kFirst] = 0;
      rows.logits[kLucky] = static_cast<float>(behind * temperature);
      const int32_t expected = margin > 0 ? kLucky : kFirst;
      EXPECT_EQ(rows.draw_all(1), std::vector<int32_t>{expected}) << "T " << temperature;

      const float logits[] = {0, rows.logits[kLucky]};
      const int32_t map[] = {kFirst, kLucky};
      const int32_t one = 1;
      int32_t token = -99;
      CpuContext ctx = context_of(1);
      draw(ctx, {.num_rows = &one,
                 .max_rows = 1,
                 .logits = logits,
                 .logits_stride = 2,
                 .vocab_limit = 2,
                 .row_index = rows.row_index.data(),
                 .seq_slot = rows.seq_slot.data(),
                 .positions = rows.positions.data(),
                 .seeds = rows.seeds.data(),
                 .temperatures = rows.temperatures.data(),
                 .tokens = &token,
                 .token_map = map,
                 .token_limit = 2112});
      EXPECT_EQ(token, expected) << "mapped, T " << temperature;
    }
  }
}

TEST(Draw, ADraftVocabularyDrawsWhatItsLogitsDrawAmongAllTokens) {
  TRACE_SEED();
  Random random(27);
  constexpr int32_t kTokens = 300;
  constexpr int32_t kLimit = 280;  // tokens of the target
  for (int i = 0; i < 400; ++i) {
    std::vector<int32_t> map;
    for (int32_t token = 0; token < kTokens; ++token) {
      if (random.below(3) == 0) map.push_back(token);
    }
    const auto num_ids = static_cast<int32_t>(map.size());
    std::vector<float> logits = random.normals(num_ids, i % 2 == 0 ? 1.0f : 6.0f);
    for (float& logit : logits) {
      if (random.below(30) == 0) logit = random.below(2) == 0 ? kNan : -kInf;
      if (random.below(30) == 0) logit = logits[0];
    }
    std::vector<float> scattered(kLimit, -kInf);
    for (int32_t id = 0; id < num_ids; ++id) {
      const auto token = static_cast<size_t>(map[static_cast<size_t>(id)]);
      if (token < scattered.size()) scattered[token] = logits[static_cast<size_t>(id)];
    }
    const int32_t one = 1;
    const int32_t row = 0;
    const int32_t position = random.below(1000);
    const int32_t position_before = position - 1;
    const uint64_t seed = random.engine()();
    const float temperature = std::array{0.0f, 1e-5f, 0.3f, 1.0f, 3.0f}[static_cast<size_t>(i % 5)];
    CpuContext ctx = context_of(1);
    const auto draw_from = [&](const std::vector<float>& from, const int32_t* token_map) {
      int32_t token = -99;
      float probability = -1;
      // The row is one position earlier and draws one further ahead: the same token's position.
      draw(ctx, {.num_rows = &one,
                 .max_rows = 1,
                 .logits = from.data(),
                 .logits_stride = static_cast<int64_t>(from.size()),
                 .vocab_limit = static_cast<int32_t>(from.size()),
                 .row_index = &row,
                 .seq_slot = &row,
                 .positions = token_map != nullptr ? &position_before : &position,
                 .seeds = &seed,
                 .temperatures = &temperature,
                 .tokens = &token,
                 .probabilities = &probability,
                 .draw_ahead = token_map != nullptr ? 2 : 1,
                 .token_map = token_map,
                 .token_limit = token_map != nullptr ? kLimit : 0});
      return std::pair{token, probability};
    };
    const auto mapped = draw_from(logits, map.data());
    const auto all = draw_from(scattered, nullptr);
    ASSERT_EQ(mapped.first, all.first) << "temperature " << temperature;
    ASSERT_FLOAT_EQ(mapped.second, all.second);
  }
}

// Rows with logits of a few tokens each, in any order, at fixed positions.
TEST(Draw, RowsOfTheirOwnTokensDrawWhatTheirLogitsDrawAmongAllTokens) {
  TRACE_SEED();
  Random random(28);
  constexpr int32_t kTokens = 300;
  constexpr int32_t kLimit = 280;  // tokens of the target
  constexpr int32_t kIds = 90;     // of a row; some are not drawable
  constexpr int32_t kStride = kIds + 6;
  constexpr int32_t kRows = 3;
  const std::vector<int32_t> identity = {0, 1, 2};
  for (int i = 0; i < 200; ++i) {
    DrawRows all = {.logits = std::vector<float>(kRows * kLimit, -kInf),
                    .stride = kLimit,
                    .vocab_limit = kLimit,
                    .row_index = identity,
                    .seq_slot = identity,
                    .positions = {},
                    .seeds = {},
                    .temperatures = {}};
    std::vector<float> logits(kRows * kStride, kInf);
    std::vector<int32_t> maps(kRows * kStride, 0);
    std::vector<int32_t> tokens(kTokens);
    std::iota(tokens.begin(), tokens.end(), 0);
    const int32_t steps = random.below(16);
    std::vector<int32_t> positions;
    for (int32_t row = 0; row < kRows; ++row) {
      std::shuffle(tokens.begin(), tokens.end(), random.engine());
      for (int32_t id = 0; id < kIds; ++id) {
        const int32_t token = tokens[static_cast<size_t>(id)];
        const float logit = random.below(30) == 0 ? kNan : random.normal();
        logits[static_cast<size_t>(row * kStride + id)] = logit;
        maps[static_cast<size_t>(row * kStride + id)] = token;
        if (token < kLimit) all.logits[static_cast<size_t>(row * kLimit + token)] = logit;
      }
      positions.push_back(random.below(1000));
      all.positions.push_back(positions.back() + 1 + steps);  // draw_ahead is 1 there
      all.seeds.push_back(random.engine()());
      all.temperatures.push_back(std::array{0.0f, 0.3f, 1.0f}[static_cast<size_t>((i + row) % 3)]);
    }
    const int32_t num_rows = kRows;
    std::vector<int32_t> drawn(kRows, -99);
    CpuContext ctx = context_of(2);
    draw(ctx, {.num_rows = &num_rows,
               .max_rows = kRows,
               .logits = logits.data(),
               .logits_stride = kStride,
               .vocab_limit = kIds,
               .row_index = identity.data(),
               .seq_slot = identity.data(),
               .positions = positions.data(),
               .seeds = all.seeds.data(),
               .temperatures = all.temperatures.data(),
               .tokens = drawn.data(),
               .draw_ahead = 2,
               .token_map = maps.data(),
               .token_limit = kLimit,
               .token_map_stride = kStride,
               .steps_ahead = &steps});
    ASSERT_EQ(drawn, all.draw_all(1));
  }
}

TEST(Draw, EdgeCases) {
  const auto draw_one = [](std::vector<float> logits, float temperature, int32_t slot = 0) {
    DrawRows rows = {.logits = logits,
                     .stride = 0,
                     .vocab_limit = static_cast<int32_t>(logits.size()),
                     .row_index = {0},
                     .seq_slot = {slot},
                     .positions = {3},
                     .seeds = {7},
                     .temperatures = {temperature}};
    return rows.draw_all(1)[0];
  };
  for (const float temperature : {0.0f, 1.0f, 1e-6f}) {
    EXPECT_EQ(draw_one({-kInf, kNan, -kInf}, temperature), -2) << "no valid logit";
    EXPECT_EQ(draw_one({-kInf, kNan, -3e38f, -kInf}, temperature), 2);
    EXPECT_EQ(draw_one({0.0f, kInf, 5.0f, kInf}, temperature), 1) << "first infinity";
    EXPECT_EQ(draw_one({0.0f, 1.0f}, temperature, /*slot=*/-1), -1) << "inert";
    EXPECT_EQ(draw_one({}, temperature), -2);
  }
  std::vector<float> ties(100, 1.0f);
  ties[3] = ties[97] = ties[40] = ties[35] = 2.0f;
  EXPECT_EQ(draw_one(ties, 0.0f), 3) << "ties go to the lowest id";
  ties[3] = ties[35] = 1.0f;
  EXPECT_EQ(draw_one(ties, 0.0f), 40);
  EXPECT_EQ(draw_one({-0.0f, 0.0f}, 0.0f), 0);
  DrawRows none = {.logits = {},
                   .stride = 0,
                   .vocab_limit = 10,
                   .row_index = {},
                   .seq_slot = {},
                   .positions = {},
                   .seeds = {},
                   .temperatures = {}};
  EXPECT_TRUE(none.draw_all(2).empty());
}

TEST(Draw, FollowsTheSoftmax) {
  TRACE_SEED();
  constexpr int32_t kVocab = 64;
  constexpr int32_t kNumDraws = 1 << 18;
  for (const float temperature : {0.7f, 1.0f, 1.5f}) {
    Random random(26);
    // Evenly spaced over [-3, 2], so that the rarest id is expected a dozen times.
    std::vector<float> logits(kVocab);
    for (float& logit : logits) logit = -3.0f + 5e-4f * static_cast<float>(random.below(10001));
    DrawRows rows = {.logits = logits,
                     .stride = 0,
                     .vocab_limit = kVocab,
                     .row_index = std::vector<int32_t>(kNumDraws),
                     .seq_slot = std::vector<int32_t>(kNumDraws, 0),
                     .positions = std::vector<int32_t>(kNumDraws),
                     .seeds = {base_seed()},
                     .temperatures = {temperature}};
    std::iota(rows.row_index.begin(), rows.row_index.end(), 0);
    std::iota(rows.positions.begin(), rows.positions.end(), 0);
    std::vector<int64_t> counts(kVocab, 0);
    for (const int32_t token : rows.draw_all(2)) ++counts.at(static_cast<size_t>(token));
    double sum = 0.0;
    for (const float logit : rows.logits) sum += std::exp(double{logit} / temperature);
    double g = 0.0;
    for (size_t id = 0; id < kVocab; ++id) {
      const double expected = kNumDraws * std::exp(double{rows.logits[id]} / temperature) / sum;
      ASSERT_GT(expected, 5.0);
      if (counts[id] > 0) {
        g += 2.0 * static_cast<double>(counts[id]) *
             std::log(static_cast<double>(counts[id]) / expected);
      }
    }
    std::printf("temperature %.1f: G = %.1f on %d degrees of freedom\n", double{temperature}, g,
                kVocab - 1);
    // 139.6 has probability 1e-7 under chi-square(63); 22 has the same below.
    EXPECT_LT(g, 139.6);
    EXPECT_GT(g, 22.0) << "too good to be random";
  }
}

TEST(Draw, SameSeedPositionAndLogitsGiveTheSameToken) {
  TRACE_SEED();
  Random random(27);
  constexpr int32_t kVocab = 777;
  const std::vector<float> probe = random.normals(kVocab, 2.0f);
  int32_t num_distinct = 0;
  int32_t previous = -1;
  for (int32_t trial = 0; trial < 20; ++trial) {
    const uint64_t seed = random.engine()();
    const int32_t position = random.below(1 << 20);
    const int32_t want = reference_draw(probe.data(), kVocab, 0.8f, seed, position);
    num_distinct += want != previous;
    previous = want;
    for (const int32_t num_rows : kBatchSizes) {
      DrawRows rows = {.logits = random.normals(int64_t{num_rows} * kVocab, 2.0f),
                       .stride = kVocab,
                       .vocab_limit = kVocab,
                       .row_index = {},
                       .seq_slot = {},
                       .positions = {},
                       .seeds = {},
                       .temperatures = {}};
      // Logits row i belongs to pass row num_rows - 1 - i, which has sequence slot 2 * that.
      const int32_t place = random.below(num_rows);
      rows.seeds.resize(static_cast<size_t>(2 * num_rows));
      rows.temperatures.resize(static_cast<size_t>(2 * num_rows));
      for (int32_t row = 0; row < num_rows; ++row) {
        const bool is_probe = num_rows - 1 - row == place;
        rows.row_index.push_back(num_rows - 1 - row);
        rows.seq_slot.push_back(2 * row);
        rows.positions.push_back(is_probe ? position : random.below(1000));
        rows.seeds[static_cast<size_t>(2 * row)] = is_probe ? seed : random.engine()();
        rows.temperatures[static_cast<size_t>(2 * row)] =
            is_probe ? 0.8f : 0.1f * static_cast<float>(random.below(20));
      }
      std::copy(probe.begin(), probe.end(), rows.logits.begin() + int64_t{place} * kVocab);
      // place is a logits row; its pass row is num_rows - 1 - place.
      for (const int num_threads : {1, 2, 3}) {
        ASSERT_EQ(rows.draw_all(num_threads)[static_cast<size_t>(place)], want)
            << "rows " << num_rows << " threads " << num_threads;
      }
    }
  }
  EXPECT_GT(num_distinct, 10);
}

}  // namespace
}  // namespace paceline::testing
