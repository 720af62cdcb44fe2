// SPDX-License-Identifier: Apache-2.0
// paged_attention on the CPU, over sequences whose blocks lie anywhere in a pool
// of NaN: only bytes of the row's own sequence may be read.

#include "ops/ops.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "device/cpu_context.h"
#include "support/kv_pool.h"
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

struct AttentionShape {
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  DType dtype;
};

// Sequences in a pool, in blocks handed out at random; every byte that no sequence owns is NaN, the
// null block included.
class Sequences {
 public:
  Sequences(const AttentionShape& shape, const std::vector<int32_t>& lengths, uint64_t salt)
      : shape_(shape),
        stride_((*std::max_element(lengths.begin(), lengths.end()) + shape.block_size - 1) /
                    shape.block_size +
                2),
        pool_(shape.dtype, shape.block_size, stride_ * static_cast<int32_t>(lengths.size()) + 1,
              shape.num_kv_heads, shape.head_dim) {
    Random random(salt);
    std::vector<int32_t> free(static_cast<size_t>(stride_) * lengths.size());
    std::iota(free.begin(), free.end(), 1);
    std::shuffle(free.begin(), free.end(), random.engine());
    block_table_.assign(static_cast<size_t>(stride_) * lengths.size(), 0);
    const int64_t token = int64_t{shape.num_kv_heads} * shape.head_dim;
    for (size_t s = 0; s < lengths.size(); ++s) {
      keys_.push_back(random.normals(lengths[s] * token));
      values_.push_back(random.normals(lengths[s] * token));
      for (int32_t b = 0; b * shape.block_size < lengths[s]; ++b) {
        block_table_[s * static_cast<size_t>(stride_) + static_cast<size_t>(b)] = free.back();
        free.pop_back();
      }
      for (int32_t position = 0; position < lengths[s]; ++position) {
        write(static_cast<int32_t>(s), position);
      }
    }
  }

  [[nodiscard]] int64_t slot(int32_t sequence, int32_t position) const {
    const int32_t block =
        block_table_[static_cast<size_t>(sequence * stride_ + position / shape_.block_size)];
    return int64_t{block} * shape_.block_size + position % shape_.block_size;
  }

  // The float values of one token, rounded to the cache's dtype.
  float* key(int32_t sequence, int32_t position) { return token(&keys_, sequence, position); }
  float* value(int32_t sequence, int32_t position) { return token(&values_, sequence, position); }

  // Puts a token into the pool again after its floats were changed.
  void write(int32_t sequence, int32_t position) {
    const int64_t at = slot(sequence, position);
    for (const bool is_value : {false, true}) {
      float* const from = is_value ? value(sequence, position) : key(sequence, position);
      std::byte* const to = pool_.token(at, is_value);
      for (int64_t i = 0; i < int64_t{shape_.num_kv_heads} * shape_.head_dim; ++i) {
        set_element(shape_.dtype, to, i, from[i]);
        from[i] = element(shape_.dtype, to, i);
      }
    }
  }

  void poison(int32_t sequence, int32_t position) {
    for (const bool is_value : {false, true}) {
      std::memset(pool_.token(slot(sequence, position), is_value), 0xff,
                  static_cast<size_t>(int64_t{shape_.num_kv_heads} * shape_.head_dim *
                                      dtype_bytes(shape_.dtype)));
    }
  }

  [[nodiscard]] const AttentionShape& shape() const { return shape_; }
  [[nodiscard]] const std::vector<int32_t>& block_table() const { return block_table_; }
  [[nodiscard]] int32_t stride() const { return stride_; }
  [[nodiscard]] const KvLayerView& view() const { return pool_.view; }

 private:
  float* token(std::vector<std::vector<float>>* from, int32_t sequence, int32_t position) {
    return (*from)[static_cast<size_t>(sequence)].data() +
           int64_t{position} * shape_.num_kv_heads * shape_.head_dim;
  }

  AttentionShape shape_;
  int32_t stride_;
  Pool pool_;
  std::vector<int32_t> block_table_;
  std::vector<std::vector<float>> keys_;
  std::vector<std::vector<float>> values_;
};

struct AttentionRow {
  int32_t sequence;  // -1: inert
  int32_t begin;
  int32_t end;
};

struct AttentionOptions {
  float soft_cap = 0.0f;
  const float* sinks = nullptr;
  int num_threads = 1;
};

int64_t qkv_width(const AttentionShape& s) {
  return int64_t{s.num_qo_heads + 2 * s.num_kv_heads} * s.head_dim;
}

float scale_of(const AttentionShape& s) { return 1.0f / std::sqrt(static_cast<float>(s.head_dim)); }

std::vector<float> run_attention(Sequences& sequences, const std::vector<AttentionRow>& rows,
                                 const std::vector<float>& qkv, const AttentionOptions& options) {
  const AttentionShape& s = sequences.shape();
  const int32_t num_rows = static_cast<int32_t>(rows.size());
  std::vector<int32_t> slots;
  std::vector<int32_t> begins;
  std::vector<int32_t> ends;
  for (const AttentionRow& row : rows) {
    slots.push_back(row.sequence);
    begins.push_back(row.begin);
    ends.push_back(row.end);
  }
  std::vector<float> y(static_cast<size_t>(int64_t{num_rows} * s.num_qo_heads * s.head_dim), kNan);
  const bool is_windowed =
      std::any_of(begins.begin(), begins.end(), [](int32_t begin) { return begin > 0; });
  CpuContext ctx = context_of(options.num_threads);
  paged_attention(ctx, {.num_rows = &num_rows,
                        .max_rows = num_rows,
                        .qkv = qkv.data(),
                        .seq_slot = slots.data(),
                        .kv_begin = is_windowed ? begins.data() : nullptr,
                        .kv_end = ends.data(),
                        .block_table = sequences.block_table().data(),
                        .block_table_stride = sequences.stride(),
                        .kv = sequences.view(),
                        .scale = scale_of(s),
                        .soft_cap = options.soft_cap,
                        .sinks = options.sinks,
                        .y = y.data(),
                        .num_qo_heads = s.num_qo_heads,
                        .num_kv_heads = s.num_kv_heads,
                        .head_dim = s.head_dim});
  return y;
}

// One head over the given positions, in double.
std::vector<double> reference_attention(Sequences& sequences, const AttentionRow& row,
                                        const float* q, int32_t head,
                                        const AttentionOptions& options) {
  const AttentionShape& s = sequences.shape();
  const int32_t kv_head = head / (s.num_qo_heads / s.num_kv_heads);
  std::vector<double> y(static_cast<size_t>(s.head_dim), 0.0);
  if (row.sequence < 0 || row.begin >= row.end) return y;
  std::vector<double> scores;
  double highest = options.sinks != nullptr ? options.sinks[head] : -1e300;
  for (int32_t position = row.begin; position < row.end; ++position) {
    const float* const key = sequences.key(row.sequence, position) + int64_t{kv_head} * s.head_dim;
    double score = 0.0;
    for (int32_t i = 0; i < s.head_dim; ++i) score += double{q[i]} * key[i];
    score *= scale_of(s);
    if (options.soft_cap > 0.0f) score = options.soft_cap * std::tanh(score / options.soft_cap);
    scores.push_back(score);
    highest = std::max(highest, score);
  }
  double sum = options.sinks != nullptr ? std::exp(options.sinks[head] - highest) : 0.0;
  for (int32_t position = row.begin; position < row.end; ++position) {
    const double weight = std::exp(scores[static_cast<size_t>(position - row.begin)] - highest);
    sum += weight;
    const float* const value =
        sequences.value(row.sequence, position) + int64_t{kv_head} * s.head_dim;
    for (int32_t i = 0; i < s.head_dim; ++i) y[static_cast<size_t>(i)] += weight * value[i];
  }
  for (double& out : y) out /= sum;
  return y;
}

void expect_attention(Sequences& sequences, const std::vector<AttentionRow>& rows,
                      const std::vector<float>& qkv, const std::vector<float>& y,
                      const AttentionOptions& options) {
  const AttentionShape& s = sequences.shape();
  for (size_t row = 0; row < rows.size(); ++row) {
    for (int32_t head = 0; head < s.num_qo_heads; ++head) {
      const float* const q =
          qkv.data() + static_cast<int64_t>(row) * qkv_width(s) + int64_t{head} * s.head_dim;
      const std::vector<double> want = reference_attention(sequences, rows[row], q, head, options);
      for (int32_t i = 0; i < s.head_dim; ++i) {
        const int64_t at = (static_cast<int64_t>(row) * s.num_qo_heads + head) * s.head_dim + i;
        // Scores of a few units with errors of 1e-6, values of order one.
        ASSERT_TRUE(is_near(y[static_cast<size_t>(at)], want[static_cast<size_t>(i)], 1e-5, 1e-5))
            << "row " << row << " [" << rows[row].begin << ", " << rows[row].end << ") head "
            << head << " element " << i;
      }
    }
  }
}

struct AttentionCase {
  AttentionShape shape;
  float soft_cap;
  bool has_sinks;
  int32_t window;  // 0: none
};

class AttentionTest : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(AttentionTest, MatchesReference) {
  TRACE_SEED();
  const AttentionCase& c = GetParam();
  const std::vector<int32_t> lengths = {1, 2, 17, 127, 128, 129, 255, 256, 257, 400};
  Sequences sequences(c.shape, lengths, 12);
  Random random(13);
  const std::vector<float> sinks = random.normals(c.shape.num_qo_heads);
  std::vector<AttentionRow> rows;
  for (size_t s = 0; s < lengths.size(); ++s) {
    const int32_t length = lengths[s];
    rows.push_back({.sequence = static_cast<int32_t>(s),
                    .begin = c.window == 0 ? 0 : std::max(0, length - c.window),
                    .end = length});
  }
  rows.insert(rows.begin() + 3, {.sequence = -1, .begin = 0, .end = 5});
  rows.insert(rows.begin() + 5, {.sequence = 2, .begin = 0, .end = 0});
  const std::vector<float> qkv =
      random.normals(static_cast<int64_t>(rows.size()) * qkv_width(c.shape));
  const AttentionOptions options = {
      .soft_cap = c.soft_cap, .sinks = c.has_sinks ? sinks.data() : nullptr, .num_threads = 2};
  // Keys before the window must not be read either.
  for (const AttentionRow& row : rows) {
    for (int32_t position = 0; position < row.begin; ++position) {
      sequences.poison(row.sequence, position);
    }
  }
  const std::vector<float> y = run_attention(sequences, rows, qkv, options);
  expect_attention(sequences, rows, qkv, y, options);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, AttentionTest,
    ::testing::Values(AttentionCase{{4, 4, 16, 16, DType::kFloat32}, 0.0f, false, 0},
                      AttentionCase{{4, 2, 32, 16, DType::kBFloat16}, 0.0f, false, 0},
                      AttentionCase{{8, 1, 64, 16, DType::kFloat32}, 0.0f, true, 0},
                      AttentionCase{{5, 1, 128, 32, DType::kBFloat16}, 5.0f, false, 0},
                      AttentionCase{{6, 2, 256, 16, DType::kFloat32}, 2.0f, true, 0},
                      AttentionCase{{3, 1, 10, 7, DType::kFloat32}, 0.0f, true, 0},
                      AttentionCase{{2, 2, 40, 1, DType::kBFloat16}, 0.0f, false, 0},
                      AttentionCase{{2, 1, 80, 200, DType::kFloat32}, 0.0f, false, 0},
                      AttentionCase{{4, 2, 64, 16, DType::kFloat32}, 0.0f, false, 1},
                      AttentionCase{{4, 1, 64, 16, DType::kBFloat16}, 0.0f, true, 128},
                      AttentionCase{{7, 1, 64, 16, DType::kFloat32}, 0.0f, false, 100},
                      AttentionCase{{4, 2, 128, 16, DType::kBFloat16}, 30.0f, false, 129}));

TEST(PagedAttention, RowBitsDependOnTheRowAlone) {
  TRACE_SEED();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int32_t head_dim : {40, 64}) {
      const AttentionShape shape = {4, 2, head_dim, 16, dtype};
      const std::vector<int32_t> lengths = {300, 200, 90, 129};
      Sequences sequences(shape, lengths, 14);
      Random random(15);
      const int64_t y_width = int64_t{shape.num_qo_heads} * head_dim;
      for (const AttentionRow& probe : {AttentionRow{0, 0, 300}, {1, 70, 200}, {3, 0, 129}}) {
        const std::vector<float> probe_qkv = random.normals(qkv_width(shape));
        const std::vector<float> alone = run_attention(sequences, {probe}, probe_qkv, {});
        for (const int32_t num_rows : kBatchSizes) {
          std::vector<AttentionRow> rows;
          for (int32_t row = 0; row < num_rows; ++row) {
            const int32_t s = random.below(5) - 1;
            const int32_t end = s < 0 ? 0 : 1 + random.below(lengths[static_cast<size_t>(s)]);
            rows.push_back({s, s < 0 ? 0 : random.below(end), end});
          }
          std::vector<float> qkv = random.normals(num_rows * qkv_width(shape));
          const int64_t place = random.below(num_rows);
          rows[static_cast<size_t>(place)] = probe;
          std::copy(probe_qkv.begin(), probe_qkv.end(), qkv.begin() + place * qkv_width(shape));
          for (const int num_threads : {1, 2, 3}) {
            const std::vector<float> y =
                run_attention(sequences, rows, qkv, {.num_threads = num_threads});
            ASSERT_TRUE(same_bits(alone.data(), y.data() + place * y_width, y_width))
                << dtype_name(dtype) << " rows " << num_rows << " place " << place << " threads "
                << num_threads;
          }
        }
      }
    }
  }
}

TEST(PagedAttention, BitsDoNotDependOnBlocks) {
  TRACE_SEED();
  Random random(16);
  std::vector<float> first;
  for (const int32_t block_size : {16, 1, 7, 128, 333}) {
    const AttentionShape shape = {4, 1, 64, block_size, DType::kFloat32};
    Sequences sequences(shape, {333, 20}, 17);
    // The same tokens in each layout.
    Random tokens(18);
    for (int32_t position = 0; position < 333; ++position) {
      std::generate_n(sequences.key(0, position), 64, [&] { return tokens.normal(); });
      std::generate_n(sequences.value(0, position), 64, [&] { return tokens.normal(); });
      sequences.write(0, position);
    }
    Random queries(19);
    const std::vector<float> qkv = queries.normals(qkv_width(shape));
    const std::vector<float> y = run_attention(sequences, {{0, 30, 333}}, qkv, {});
    if (first.empty()) first = y;
    ASSERT_TRUE(same_bits(first.data(), y.data(), static_cast<int64_t>(y.size())))
        << "block_size " << block_size;
  }
}

// A key with weight zero before the window adds nothing and shifts nothing: chunks lie at absolute
// positions, so the bits are those of the window alone.
TEST(PagedAttention, ChunksLieAtAbsolutePositions) {
  TRACE_SEED();
  const AttentionShape shape = {1, 1, 64, 16, DType::kFloat32};
  for (const int32_t begin : {1, 15, 64, 100, 127, 128, 129, 200}) {
    Sequences sequences(shape, {400}, 20);
    Random random(21);
    const std::vector<float> qkv = random.normals(qkv_width(shape));
    const std::vector<float> windowed = run_attention(sequences, {{0, begin, 400}}, qkv, {});
    for (int32_t position = 0; position < begin; ++position) {
      for (int32_t i = 0; i < 64; ++i) {
        sequences.key(0, position)[i] = -1000.0f * qkv[static_cast<size_t>(i)];
      }
      sequences.write(0, position);
    }
    const std::vector<float> full = run_attention(sequences, {{0, 0, 400}}, qkv, {});
    EXPECT_TRUE(same_bits(windowed.data(), full.data(), 64)) << "kv_begin " << begin;
  }
}

TEST(PagedAttention, ZeroRowsTouchNothing) {
  const AttentionShape shape = {1, 1, 16, 16, DType::kFloat32};
  Sequences sequences(shape, {4}, 22);
  EXPECT_TRUE(run_attention(sequences, {}, {}, {}).empty());
}

}  // namespace
}  // namespace paceline::testing
