// SPDX-License-Identifier: Apache-2.0
// The CPU op markov_draft: the product of a Markov head and the draw behind it.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "device/cpu_context.h"
#include "ops/markov.h"
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

size_t at(int64_t index) { return static_cast<size_t>(index); }

constexpr int32_t kNumTokens = 50;  // rows of W1
constexpr int32_t kNumIds = 64;     // identities of rows

// A Markov head, and rows that pass through it, by identity.
struct Chain {
  Chain(Random& random, int32_t rank, int32_t n, DType dtype, bool has_factors)
      : rank(rank),
        n(n),
        dtype(dtype),
        has_factors(has_factors),
        table(typed_array(dtype, random.normals(int64_t{kNumTokens} * rank))),
        weight(typed_array(dtype, random.normals(int64_t{n} * rank, 0.2f))),
        factors(typed_array(DType::kBFloat16, random.normals(int64_t{kNumIds} * rank)).rounded),
        logits(random.normals(int64_t{kNumIds} * n, 2.0f)),
        temperatures(kNumIds),
        seeds(kNumIds),
        token_map(at(n)) {
    for (int32_t i = 0; i < kNumIds; ++i) {
      previous.push_back(random.below(kNumTokens + 4) - 2);
      positions.push_back(random.below(1000));
      slots.push_back(i % 11 == 5 ? -1 : i);
      temperatures[at(i)] = random.one_of({0.0f, 0.3f, 1.0f, 2.0f});
      seeds[at(i)] = random.engine()();
    }
    std::iota(token_map.begin(), token_map.end(), 0);
    for (int32_t& token : token_map) token = 3 * token + 1;
  }

  // Row of f of an identity, as the op should read it.
  [[nodiscard]] std::vector<float> f_of(int32_t id) const {
    const float* const all = has_factors ? factors.data() : table.rounded.data();
    const int32_t row = has_factors ? id : previous[at(id)];
    if (!has_factors && (row < 0 || row >= kNumTokens)) return std::vector<float>(at(rank), 0.0f);
    return {all + int64_t{row} * rank, all + int64_t{row + 1} * rank};
  }
  [[nodiscard]] std::vector<float> logits_of(std::span<const int32_t> ids) const {
    std::vector<float> rows;
    for (const int32_t id : ids) {
      const auto first = logits.begin() + int64_t{id} * n;
      rows.insert(rows.end(), first, first + n);
    }
    return rows;
  }
  [[nodiscard]] WeightMatrix matrix() const {
    return plain_matrix(weight.bytes.data(), n, rank, dtype);
  }
  // The draw of rows `index`, the identities.
  [[nodiscard]] DrawParams draw_params(const int32_t* num_rows, const int32_t* index,
                                       const float* from, bool is_mapped, int32_t* tokens) const {
    return {.num_rows = num_rows,
            .max_rows = *num_rows,
            .logits = from,
            .logits_stride = n,
            .vocab_limit = n - n / 7,
            .row_index = index,
            .seq_slot = slots.data(),
            .positions = positions.data(),
            .seeds = seeds.data(),
            .temperatures = temperatures.data(),
            .tokens = tokens,
            .draw_ahead = 2,
            .token_map = is_mapped ? token_map.data() : nullptr,
            .token_limit = 2 * n,
            .stream = NoiseStream::kDraft,
            .salts = previous.data()};
  }

  int32_t rank;
  int32_t n;
  DType dtype;
  bool has_factors;
  TypedArray table, weight;
  std::vector<float> factors, logits, temperatures;
  std::vector<uint64_t> seeds;
  std::vector<int32_t> previous, positions, slots, token_map;
};

// What the op makes of rows with these identities: the logits without a draw, and the tokens with.
struct Drafted {
  std::vector<float> logits;
  std::vector<int32_t> tokens;
};
constexpr int32_t kNothing = -77;
Drafted run_draft(const Chain& chain, const std::vector<int32_t>& ids, bool is_mapped,
                  int num_threads, int32_t num_beyond = 0) {
  const auto num_rows = static_cast<int32_t>(ids.size());
  const int32_t computed = num_rows - num_beyond;
  std::vector<float> factors;
  std::vector<int32_t> previous;
  for (const int32_t id : ids) {
    const std::vector<float> f = chain.f_of(id);
    factors.insert(factors.end(), f.begin(), f.end());
    previous.push_back(chain.previous[at(id)]);
  }
  Drafted result{.logits = chain.logits_of(ids),
                 .tokens = std::vector<int32_t>(ids.size(), kNothing)};
  std::vector<float> undefined = result.logits;
  MarkovDraftParams p{.num_rows = &computed,
                      .max_rows = num_rows,
                      .weight = chain.matrix(),
                      .logits = result.logits.data()};
  if (chain.has_factors) {
    p.factors = factors.data();
  } else {
    p.previous = previous.data();
    p.table = chain.table.bytes.data();
    p.vocab_size = kNumTokens;
  }
  CpuContext ctx = context_of(num_threads);
  markov_draft(ctx, p);
  p.logits = undefined.data();
  p.draws = true;
  p.draw = chain.draw_params(&computed, ids.data(), p.logits, is_mapped, result.tokens.data());
  p.draw.max_rows = num_rows;
  markov_draft(ctx, p);
  return result;
}

std::vector<int32_t> random_ids(Random& random, int32_t count) {
  return random.tokens(count, kNumIds);
}

TEST(MarkovDraft, LogitsMatchTheReference) {
  TRACE_SEED();
  Random random(91);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const bool has_factors : {false, true}) {
      for (const int32_t rank : {1, 16, 40, 96, 256, 700}) {
        for (const int32_t n : {1, 37, 300}) {
          const Chain chain(random, rank, n, dtype, has_factors);
          constexpr int32_t kBeyond = 2;
          const std::vector<int32_t> ids = random_ids(random, 7);
          const Drafted got = run_draft(chain, ids, /*is_mapped=*/false, 2, kBeyond);
          for (size_t row = 0; row < ids.size(); ++row) {
            const std::vector<float> f = chain.f_of(ids[row]);
            const bool is_computed = row + kBeyond < ids.size();
            ASSERT_EQ(is_computed, got.tokens[row] != kNothing);
            for (int32_t v = 0; v < n; ++v) {
              const float before = chain.logits[at(int64_t{ids[row]} * n + v)];
              const float after = got.logits[row * at(n) + at(v)];
              if (!is_computed) {
                ASSERT_EQ(after, before);
                continue;
              }
              double sum = before;
              for (int32_t i = 0; i < rank; ++i) {
                sum += double{chain.weight.rounded[at(int64_t{v} * rank + i)]} * f[at(i)];
              }
              ASSERT_TRUE(is_near(after, sum, 2e-5, 1e-5))
                  << dtype_name(dtype) << ", rank " << rank << ", row " << row << ", id " << v;
            }
          }
        }
      }
    }
  }
}

// The product as `gemm` computes it, the sum, and `draw`.
Drafted run_apart(const Chain& chain, const std::vector<int32_t>& ids, bool is_mapped) {
  const auto num_rows = static_cast<int32_t>(ids.size());
  CpuContext ctx = context_of(2);
  std::vector<float> f;
  for (const int32_t id : ids) {
    const std::vector<float> own = chain.f_of(id);
    f.insert(f.end(), own.begin(), own.end());
  }
  std::vector<float> products(ids.size() * at(chain.n));
  gemm(ctx, {.num_rows = &num_rows,
             .max_rows = num_rows,
             .x = f.data(),
             .x_stride = chain.rank,
             .weight = chain.matrix(),
             .y = products.data(),
             .y_stride = chain.n});
  Drafted result{.logits = chain.logits_of(ids),
                 .tokens = std::vector<int32_t>(ids.size(), kNothing)};
  for (size_t i = 0; i < products.size(); ++i) result.logits[i] += products[i];
  draw(ctx, chain.draw_params(&num_rows, ids.data(), result.logits.data(), is_mapped,
                              result.tokens.data()));
  return result;
}

TEST(MarkovDraft, LogitsAndTokensAreThoseOfAProductAndADraw) {
  TRACE_SEED();
  Random random(92);
  for (int32_t i = 0; i < 60; ++i) {
    const auto rank = random.one_of({1, 16, 40, 96, 256, 700});
    const auto n = random.one_of({2, 128, 300, 5003});
    const DType dtype = random.one_in(2) ? DType::kFloat32 : DType::kBFloat16;
    const Chain chain(random, rank, n, dtype, random.one_in(2));
    const std::vector<int32_t> ids = random_ids(random, random.one_of({1, 2, 8, 70, 200}));
    const bool is_mapped = random.one_in(2);
    const Drafted got = run_draft(chain, ids, is_mapped, random.one_of({1, 2, 3}));
    const Drafted want = run_apart(chain, ids, is_mapped);
    const std::string where = "case " + std::to_string(i) + ", rank " + std::to_string(rank) +
                              ", n " + std::to_string(n) + ", rows " + std::to_string(ids.size());
    ASSERT_TRUE(
        same_bits(got.logits.data(), want.logits.data(), static_cast<int64_t>(want.logits.size())))
        << where;
    for (size_t row = 0; row < ids.size(); ++row) {
      ASSERT_EQ(got.tokens[row], want.tokens[row]) << where << ", row " << row;
      ASSERT_EQ(got.tokens[row] == -1, chain.slots[at(ids[row])] < 0) << where << ", row " << row;
    }
  }
}

TEST(MarkovDraft, ARowDependsOnItsSequenceAlone) {
  TRACE_SEED();
  Random random(93);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const bool has_factors : {false, true}) {
      const Chain chain(random, 40, 1003, dtype, has_factors);
      for (const int32_t count : {2, 7, 8, 9, 70, 130}) {
        const std::vector<int32_t> ids = random_ids(random, count);
        const Drafted all = run_draft(chain, ids, /*is_mapped=*/true, 2);
        for (const size_t row : {size_t{0}, at(count / 2), at(count - 1)}) {
          const Drafted alone = run_draft(chain, {ids[row]}, /*is_mapped=*/true, 1);
          ASSERT_TRUE(
              same_bits(all.logits.data() + row * at(chain.n), alone.logits.data(), chain.n))
              << "row " << row << " of " << count;
          ASSERT_EQ(all.tokens[row], alone.tokens[0]) << "row " << row << " of " << count;
        }
      }
    }
  }
}

TEST(MarkovDraft, ContradictoryParametersAreRefused) {
  Random random(94);
  const Chain chain(random, 8, 30, DType::kFloat32, /*has_factors=*/true);
  const int32_t num_rows = 1;
  const int32_t index = 0;
  int32_t token = kNothing;
  std::vector<float> logits(30);
  const MarkovDraftParams good{
      .num_rows = &num_rows,
      .max_rows = 1,
      .factors = chain.factors.data(),
      .weight = chain.matrix(),
      .logits = logits.data(),
      .draws = true,
      .draw = chain.draw_params(&num_rows, &index, logits.data(), false, &token)};
  EXPECT_NO_THROW(check_markov_draft(good));
  const auto refuses = [&](const auto& change) {
    MarkovDraftParams p = good;
    change(p);
    EXPECT_ANY_THROW(check_markov_draft(p));
  };
  float probability = 0.0f;
  refuses([&](MarkovDraftParams& p) { p.factors = nullptr; });
  refuses([&](MarkovDraftParams& p) { p.table = chain.table.bytes.data(); });
  refuses([&](MarkovDraftParams& p) { p.draw.probabilities = &probability; });
  refuses([&](MarkovDraftParams& p) { p.draw.logit_rows = &index; });
  refuses([&](MarkovDraftParams& p) { p.draw.logits_stride = 31; });
  refuses([&](MarkovDraftParams& p) { p.draw.max_rows = 2; });
  refuses([&](MarkovDraftParams& p) { p.weight.format = WeightFormat::kFp8; });
}

}  // namespace
}  // namespace paceline::testing
