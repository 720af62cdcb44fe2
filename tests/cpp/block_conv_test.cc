// SPDX-License-Identifier: Apache-2.0
// The convolution over the rows of blocks, on the CPU.

#include "ops/block_conv.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include <paceline/error.h>

#include "device/cpu_context.h"
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

size_t at(int64_t index) { return static_cast<size_t>(index); }

struct Shape {
  int32_t hidden;
  int32_t group;
  int32_t num_taps;
};
constexpr Shape kShapes[] = {{64, 16, 2}, {48, 8, 3}, {33, 11, 4},
                             {20, 1, 1},  {7, 7, 16}, {40, 40, 2}};

struct Blocks {
  Shape shape;
  std::vector<int32_t> row_indptr;
  std::vector<float> x, delta, base;

  [[nodiscard]] int32_t num_groups() const { return shape.hidden / shape.group; }
  // Half of a row of deltas is of another convolution.
  [[nodiscard]] int64_t stride() const { return int64_t{2} * shape.num_taps * num_groups(); }
  [[nodiscard]] std::vector<float> convolved(int32_t num_seqs, int num_threads) const {
    std::vector<float> y = x;
    CpuContext ctx = context_of(num_threads);
    convolve_blocks(ctx, {.num_seqs = &num_seqs,
                          .max_seqs = static_cast<int32_t>(row_indptr.size()) - 1,
                          .row_indptr = row_indptr.data(),
                          .max_rows_per_seq = 20,
                          .x = y.data(),
                          .base = base.data(),
                          .delta = delta.data() + stride() / 2,
                          .delta_stride = stride(),
                          .num_taps = shape.num_taps,
                          .group = shape.group,
                          .hidden = shape.hidden});
    return y;
  }
};

Blocks random_blocks(const Shape& shape, const std::vector<int32_t>& row_indptr, uint64_t seed) {
  Random random(seed);
  Blocks blocks{.shape = shape, .row_indptr = row_indptr, .x = {}, .delta = {}, .base = {}};
  const int32_t rows = row_indptr.back();
  blocks.x = random.normals(int64_t{rows} * shape.hidden);
  blocks.delta = random.normals(rows * blocks.stride());
  blocks.base = random.normals(int64_t{shape.num_taps} * shape.hidden);
  return blocks;
}

TEST(ConvolveBlocks, MatchesTheSumOverRowsOfTheOwnBlock) {
  TRACE_SEED();
  const std::vector<int32_t> starts = {0, 1, 6, 6, 26, 29};  // one block has no rows
  for (const Shape& shape : kShapes) {
    const Blocks blocks = random_blocks(shape, starts, 71);
    constexpr int32_t kComputed = 4;  // the last block is beyond num_seqs
    const std::vector<float> got = blocks.convolved(kComputed, /*num_threads=*/2);
    for (size_t s = 0; s + 1 < starts.size(); ++s) {
      for (int32_t row = starts[s]; row < starts[s + 1]; ++row) {
        for (int32_t i = 0; i < shape.hidden; ++i) {
          const size_t own = at(int64_t{row} * shape.hidden + i);
          if (static_cast<int32_t>(s) >= kComputed) {
            ASSERT_EQ(got[own], blocks.x[own]);
            continue;
          }
          double want = 0.0;
          for (int32_t t = 0; t < shape.num_taps && row - t >= starts[s]; ++t) {
            const double delta = blocks.delta[at(row * blocks.stride() + blocks.stride() / 2 +
                                                 t * blocks.num_groups() + i / shape.group)];
            want += blocks.x[at(int64_t{row - t} * shape.hidden + i)] *
                    (blocks.base[at(int64_t{t} * shape.hidden + i)] + delta);
          }
          ASSERT_TRUE(is_near(got[own], want, 1e-5, 1e-5))
              << shape.hidden << ": block " << s << " row " << row << " element " << i;
        }
      }
    }
  }
}

// Neither other blocks nor rows behind a row change its bits.
TEST(ConvolveBlocks, RowsAreInvariant) {
  TRACE_SEED();
  const std::vector<int32_t> starts = {0, 5, 10, 15};
  for (const Shape& shape : kShapes) {
    const Blocks blocks = random_blocks(shape, starts, 72);
    const std::vector<float> all = blocks.convolved(3, /*num_threads=*/2);
    for (int32_t s = 0; s < 3; ++s) {
      for (const int32_t num_rows : {1, 3, 5}) {
        Blocks alone = blocks;
        alone.row_indptr = {0, num_rows};
        alone.x.erase(alone.x.begin(), alone.x.begin() + int64_t{5} * s * shape.hidden);
        alone.delta.erase(alone.delta.begin(), alone.delta.begin() + 5 * s * blocks.stride());
        const std::vector<float> got = alone.convolved(1, /*num_threads=*/1);
        for (int64_t i = 0; i < int64_t{num_rows} * shape.hidden; ++i) {
          ASSERT_EQ(got[at(i)], all[at(int64_t{5} * s * shape.hidden + i)]);
        }
      }
    }
  }
}

TEST(ConvolveBlocks, WrongSizesAreErrors) {
  EXPECT_THROW(random_blocks({8, 3, 2}, {0, 2}, 73).convolved(1, 1), InternalError);
  EXPECT_THROW(random_blocks({8, 4, 17}, {0, 2}, 73).convolved(1, 1), InternalError);
}

}  // namespace
}  // namespace paceline::testing
