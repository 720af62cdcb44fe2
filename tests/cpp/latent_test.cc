// SPDX-License-Identifier: Apache-2.0
// The ops of latent attention on the CPU against its definition in double precision, which has keys
// and values for every head, over sequences whose blocks lie anywhere in a pool of NaN.

#include "ops/latent.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "device/cpu_context.h"
#include "support/kv_pool.h"
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

struct Shape {
  int32_t num_heads;
  int32_t nope;
  int32_t rope;
  int32_t v_dim;
  int32_t rank;
  int32_t block_size;
  int32_t q_width;  // of the first part of qkv_a
  DType weights;
  DType entries;
  bool is_interleaved;
  bool has_q_norm;
  float norm_weight_offset;

  [[nodiscard]] int32_t width() const { return rank + rope; }
  [[nodiscard]] int32_t q_rows() const { return num_heads * (nope + rope); }
};

constexpr int32_t kMaxPosition = 400;
constexpr float kEps = 1e-3f;
constexpr int32_t kOffset = 1;  // position_offset

// Random weights and sequences of one shape, and a pool whose unwritten bytes are NaN.
struct World {
  World(const Shape& shape, const std::vector<int32_t>& lengths, Random& random)
      : s(shape),
        lengths(lengths),
        stride((*std::max_element(lengths.begin(), lengths.end()) - 1) / s.block_size + 1),
        kv_b(typed_array(s.weights,
                         random.normals(int64_t{s.num_heads} * (s.nope + s.v_dim) * s.rank,
                                        1.0f / std::sqrt(static_cast<float>(s.rank))))),
        q_norm(random.normals(s.q_width)),
        latent_norm(random.normals(s.rank)),
        pool(s.entries, s.block_size, stride * static_cast<int32_t>(lengths.size()) + 1,
             /*kv_heads=*/1, s.width()) {
    pool.view.v_offset = pool.view.k_offset;
    for (int32_t position = 0; position < kMaxPosition + kOffset; ++position) {
      for (int32_t i = 0; i < s.rope / 2; ++i) {
        const double angle = position * std::pow(100.0, -2.0 * i / s.rope);
        cos.push_back(static_cast<float>(std::cos(angle)));
        sin.push_back(static_cast<float>(std::sin(angle)));
      }
    }
    std::vector<int32_t> free(static_cast<size_t>(stride) * lengths.size());
    std::iota(free.begin(), free.end(), 1);
    std::shuffle(free.begin(), free.end(), random.engine());
    table.assign(free.size(), 0);
    for (size_t i = 0; i < lengths.size(); ++i) {
      for (int32_t b = 0; b * s.block_size < lengths[i]; ++b) {
        table[i * static_cast<size_t>(stride) + static_cast<size_t>(b)] = free.back();
        free.pop_back();
      }
    }
  }

  [[nodiscard]] int64_t slot(int32_t sequence, int32_t position) const {
    const int32_t block = table[static_cast<size_t>(sequence * stride + position / s.block_size)];
    return int64_t{block} * s.block_size + position % s.block_size;
  }
  [[nodiscard]] LatentRope rope(const int32_t* positions) const {
    return {.positions = positions,
            .cos = cos.data(),
            .sin = sin.data(),
            .position_offset = kOffset,
            .is_interleaved = s.is_interleaved};
  }
  [[nodiscard]] LatentHeads heads() const {
    return {.kv_b = plain_matrix(kv_b.bytes.data(), s.num_heads * (s.nope + s.v_dim), s.rank,
                                 s.weights),
            .num_heads = s.num_heads,
            .qk_nope_head_dim = s.nope,
            .v_head_dim = s.v_dim};
  }
  // Element i of an entry in the pool.
  [[nodiscard]] float entry(int32_t sequence, int32_t position, int32_t i) {
    return element(s.entries, pool.token(slot(sequence, position), false), i);
  }
  [[nodiscard]] float weight(int32_t row, int32_t column) const {
    return kv_b.rounded[static_cast<size_t>(int64_t{row} * s.rank + column)];
  }
  // `in` rotated to the position of a row.
  [[nodiscard]] std::vector<double> rotated(const float* in, int32_t position) const {
    std::vector<double> out(in, in + s.rope);
    for (int32_t i = 0; i < s.rope / 2; ++i) {
      const auto at = static_cast<size_t>((position + kOffset) * (s.rope / 2) + i);
      const int32_t a = s.is_interleaved ? 2 * i : i;
      const int32_t b = s.is_interleaved ? 2 * i + 1 : i + s.rope / 2;
      out[static_cast<size_t>(a)] = double{in[a]} * cos[at] - double{in[b]} * sin[at];
      out[static_cast<size_t>(b)] = double{in[b]} * cos[at] + double{in[a]} * sin[at];
    }
    return out;
  }

  Shape s;
  std::vector<int32_t> lengths;
  int32_t stride;
  TypedArray kv_b;
  std::vector<float> q_norm;
  std::vector<float> latent_norm;
  std::vector<float> cos;
  std::vector<float> sin;
  Pool pool;
  std::vector<int32_t> table;
};

// Rows of a pass.
struct Batch {
  std::vector<int32_t> sequence;  // -1: inert
  std::vector<int32_t> position;
  std::vector<float> qkv_a;

  [[nodiscard]] int32_t size() const { return static_cast<int32_t>(sequence.size()); }
};

void append(World& world, Batch& batch, int num_threads) {
  const Shape& s = world.s;
  const int32_t num_rows = batch.size();
  std::vector<int64_t> slots;
  for (int32_t row = 0; row < num_rows; ++row) {
    const auto at = static_cast<size_t>(row);
    slots.push_back(batch.sequence[at] < 0 ? 0
                                           : world.slot(batch.sequence[at], batch.position[at]));
  }
  CpuContext ctx = context_of(num_threads);
  append_latents(ctx, {.num_rows = &num_rows,
                       .max_rows = num_rows,
                       .qkv_a = batch.qkv_a.data(),
                       .q_width = s.q_width,
                       .slot_mapping = slots.data(),
                       .q_norm = s.has_q_norm ? world.q_norm.data() : nullptr,
                       .latent_norm = world.latent_norm.data(),
                       .norm_weight_offset = s.norm_weight_offset,
                       .norm_eps = kEps,
                       .rope = world.rope(batch.position.data()),
                       .entries = world.pool.view,
                       .kv_lora_rank = s.rank,
                       .qk_rope_head_dim = s.rope});
}

constexpr float kScale = 0.7f;

// The outputs of all heads, [rows, heads, v_dim]. `q`: rows q_stride apart.
std::vector<float> attend(World& world, const Batch& batch, const std::vector<float>& q,
                          int64_t q_stride, int num_threads) {
  const Shape& s = world.s;
  const int32_t num_rows = batch.size();
  const int64_t row_heads = int64_t{num_rows} * s.num_heads;
  std::vector<int32_t> ends;
  for (int32_t row = 0; row < num_rows; ++row) {
    const auto at = static_cast<size_t>(row);
    ends.push_back(batch.sequence[at] < 0 ? 0 : batch.position[at] + 1);
  }
  std::vector<float> absorbed(static_cast<size_t>(row_heads * s.width()), kNan);
  std::vector<float> mean(static_cast<size_t>(row_heads * s.rank), kNan);
  std::vector<float> y(static_cast<size_t>(row_heads * s.v_dim), kNan);
  CpuContext ctx = context_of(num_threads);
  absorb_queries(ctx, {.num_rows = &num_rows,
                       .max_rows = num_rows,
                       .q = q.data(),
                       .q_stride = q_stride,
                       .heads = world.heads(),
                       .rope = world.rope(batch.position.data()),
                       .y = absorbed.data(),
                       .qk_rope_head_dim = s.rope});
  latent_attention(ctx, {.num_rows = &num_rows,
                         .max_rows = num_rows,
                         .q = absorbed.data(),
                         .seq_slot = batch.sequence.data(),
                         .kv_end = ends.data(),
                         .block_table = world.table.data(),
                         .block_table_stride = world.stride,
                         .entries = world.pool.view,
                         .scale = kScale / std::sqrt(static_cast<float>(s.nope + s.rope)),
                         .y = mean.data(),
                         .num_heads = s.num_heads,
                         .kv_lora_rank = s.rank,
                         .qk_rope_head_dim = s.rope});
  project_values(ctx, {.num_rows = &num_rows,
                       .max_rows = num_rows,
                       .x = mean.data(),
                       .heads = world.heads(),
                       .y = y.data()});
  return y;
}

// A norm of `size` elements in double precision.
std::vector<double> normed(const float* x, const std::vector<float>& weight, const Shape& s,
                           int32_t size) {
  double squares = 0;
  for (int32_t i = 0; i < size; ++i) squares += double{x[i]} * x[i];
  std::vector<double> y;
  for (int32_t i = 0; i < size; ++i) {
    y.push_back(x[i] / std::sqrt(squares / size + kEps) *
                (double{weight[static_cast<size_t>(i)]} + s.norm_weight_offset));
  }
  return y;
}

// The output of one head, from the entries as the pool has them.
std::vector<double> expected_head(World& world, int32_t sequence, int32_t position, int32_t head,
                                  const float* q) {
  const Shape& s = world.s;
  std::vector<double> query(q, q + s.nope);
  for (const double value : world.rotated(q + s.nope, position)) query.push_back(value);
  const int32_t first_row = head * (s.nope + s.v_dim);
  std::vector<double> scores;
  std::vector<std::vector<double>> values;
  for (int32_t at = 0; at <= position; ++at) {
    std::vector<double> latent;
    for (int32_t i = 0; i < s.rank; ++i) latent.push_back(world.entry(sequence, at, i));
    const auto product = [&](int32_t row) {
      double sum = 0;
      for (int32_t i = 0; i < s.rank; ++i) {
        sum += latent[static_cast<size_t>(i)] * world.weight(row, i);
      }
      return sum;
    };
    double score = 0;
    for (int32_t i = 0; i < s.nope; ++i) {
      score += query[static_cast<size_t>(i)] * product(first_row + i);
    }
    for (int32_t i = 0; i < s.rope; ++i) {
      score += query[static_cast<size_t>(s.nope + i)] * world.entry(sequence, at, s.rank + i);
    }
    scores.push_back(score * kScale / std::sqrt(static_cast<double>(s.nope + s.rope)));
    std::vector<double>& value = values.emplace_back();
    for (int32_t i = 0; i < s.v_dim; ++i) value.push_back(product(first_row + s.nope + i));
  }
  const double highest = *std::max_element(scores.begin(), scores.end());
  std::vector<double> y(static_cast<size_t>(s.v_dim));
  double sum = 0;
  for (size_t at = 0; at < scores.size(); ++at) {
    const double weight = std::exp(scores[at] - highest);
    sum += weight;
    for (size_t i = 0; i < y.size(); ++i) y[i] += weight * values[at][i];
  }
  for (double& value : y) value /= sum;
  return y;
}

// Every token of every sequence, in random order, and some inert rows.
Batch all_tokens(const World& world, Random& random) {
  std::vector<std::pair<int32_t, int32_t>> rows = {{-1, 0}};
  for (size_t i = 0; i < world.lengths.size(); ++i) {
    for (int32_t at = 0; at < world.lengths[i]; ++at)
      rows.emplace_back(static_cast<int32_t>(i), at);
  }
  std::shuffle(rows.begin(), rows.end(), random.engine());
  Batch batch;
  for (const auto& [sequence, position] : rows) {
    batch.sequence.push_back(sequence);
    batch.position.push_back(position);
  }
  batch.qkv_a = random.normals(int64_t{batch.size()} * (world.s.q_width + world.s.width()));
  return batch;
}

TEST(LatentOps, MatchTheDefinitionOn500RandomCases) {
  for (uint64_t which = 0; which < 500; ++which) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(base_seed()) + ", case " +
                 std::to_string(which));
    Random random(1000 + which);
    const bool is_large = which % 50 == 0;  // GLM-4.7-Flash's heads
    Shape s = {.num_heads = random.one_of({1, 2, 3, 4, 5, 7}),
               .nope = is_large ? 192 : 1 + random.below(40),
               .rope = is_large ? 64 : 2 * (1 + random.below(20)),
               .v_dim = is_large ? 256 : 1 + random.below(40),
               .rank = is_large ? 512 : 1 + random.below(150),
               .block_size = random.one_of({1, 3, 16, 32}),
               .q_width = 1 + random.below(90),
               .weights = random.one_of({DType::kFloat32, DType::kBFloat16}),
               .entries = random.one_of({DType::kFloat32, DType::kBFloat16}),
               .is_interleaved = random.one_in(2),
               .has_q_norm = random.one_in(2),
               .norm_weight_offset = random.one_in(3) ? 1.0f : 0.0f};
    const int32_t longest = is_large ? 140 : random.one_in(8) ? 300 : 30;
    World world(s, {1 + random.below(longest), 1 + random.below(20)}, random);
    Batch tokens = all_tokens(world, random);
    const std::vector<float> before = tokens.qkv_a;
    append(world, tokens, 2);
    const int64_t row_width = s.q_width + s.width();
    for (int32_t row = 0; row < tokens.size(); ++row) {
      const auto at = static_cast<size_t>(row);
      const float* const in = before.data() + row * row_width;
      const float* const out = tokens.qkv_a.data() + row * row_width;
      const std::vector<double> q = s.has_q_norm ? normed(in, world.q_norm, s, s.q_width)
                                                 : std::vector<double>(in, in + s.q_width);
      for (int32_t i = 0; i < s.q_width; ++i) {
        ASSERT_TRUE(is_near(out[i], q[static_cast<size_t>(i)], 1e-5, 1e-5)) << "q " << i;
      }
      ASSERT_TRUE(same_bits(in + s.q_width, out + s.q_width, s.width()));
      if (tokens.sequence[at] < 0) continue;
      std::vector<double> entry = normed(in + s.q_width, world.latent_norm, s, s.rank);
      const float* const k = in + s.q_width + s.rank;
      for (const double value : world.rotated(k, tokens.position[at])) entry.push_back(value);
      const double rounding = s.entries == DType::kFloat32 ? 1e-5 : 0x1p-8;
      for (int32_t i = 0; i < s.width(); ++i) {
        ASSERT_TRUE(is_near(world.entry(tokens.sequence[at], tokens.position[at], i),
                            entry[static_cast<size_t>(i)], 1e-5, rounding))
            << "element " << i << " of an entry";
      }
    }
    for (int64_t slot = 0; slot < s.block_size; ++slot) {  // inert rows leave no trace
      ASSERT_TRUE(std::isnan(element(s.entries, world.pool.token(slot, false), 0)));
    }

    Batch queries;
    for (int32_t row = 0; row < 4; ++row) {
      const int32_t sequence = row == 2 ? -1 : random.below(2);
      queries.sequence.push_back(sequence);
      queries.position.push_back(
          sequence < 0 ? 0 : random.below(world.lengths[static_cast<size_t>(sequence)]));
    }
    const int64_t q_stride = s.q_rows() + random.below(3);
    const std::vector<float> q = random.normals(queries.size() * q_stride);
    const std::vector<float> y = attend(world, queries, q, q_stride, 2);
    for (int32_t row = 0; row < queries.size(); ++row) {
      const auto at = static_cast<size_t>(row);
      for (int32_t head = 0; head < s.num_heads; ++head) {
        const float* const got = y.data() + (int64_t{row} * s.num_heads + head) * s.v_dim;
        if (queries.sequence[at] < 0) {
          for (int32_t i = 0; i < s.v_dim; ++i) ASSERT_EQ(got[i], 0) << "inert";
          continue;
        }
        const float* const of_head = q.data() + row * q_stride + int64_t{head} * (s.nope + s.rope);
        const std::vector<double> want =
            expected_head(world, queries.sequence[at], queries.position[at], head, of_head);
        double largest = 0;
        for (const double value : want) largest = std::max(largest, std::fabs(value));
        // With bfloat16 weights, project_values may round its input, whose elements exceed y.
        const double error = s.weights == DType::kFloat32 ? 2e-5 : 0x1p-6;
        for (int32_t i = 0; i < s.v_dim; ++i) {
          ASSERT_NEAR(got[i], want[static_cast<size_t>(i)], error * std::max(largest, 1.0))
              << "row " << row << " head " << head << " element " << i;
        }
      }
    }
  }
}

TEST(LatentOps, RowBitsDependOnTheRowAlone) {
  TRACE_SEED();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int32_t rank : {40, 64}) {
      Random random(31);
      const Shape s = {.num_heads = 5,
                       .nope = 24,
                       .rope = 8,
                       .v_dim = 20,
                       .rank = rank,
                       .block_size = 16,
                       .q_width = 33,
                       .weights = dtype,
                       .entries = dtype,
                       .is_interleaved = true,
                       .has_q_norm = true,
                       .norm_weight_offset = 0};
      World world(s, {300, 129}, random);
      Batch tokens = all_tokens(world, random);
      const Batch raw = tokens;
      append(world, tokens, 1);
      const std::vector<std::byte> pool = world.pool.bytes;
      // Entries and the first part, token by token.
      const int64_t row_width = s.q_width + s.width();
      for (int32_t row = 0; row < tokens.size(); row += 13) {
        const auto at = static_cast<size_t>(row);
        const float* const from = raw.qkv_a.data() + row * row_width;
        Batch one = {.sequence = {raw.sequence[at]},
                     .position = {raw.position[at]},
                     .qkv_a = {from, from + row_width}};
        append(world, one, 2);
        ASSERT_TRUE(same_bits(one.qkv_a.data(), tokens.qkv_a.data() + row * row_width, row_width));
      }
      ASSERT_EQ(pool, world.pool.bytes);
      for (const auto& [sequence, position] : {std::pair{0, 299}, {1, 128}, {0, 5}}) {
        const std::vector<float> probe = random.normals(s.q_rows());
        const Batch single = {.sequence = {sequence}, .position = {position}, .qkv_a = {}};
        const std::vector<float> alone = attend(world, single, probe, s.q_rows(), 1);
        for (const int32_t num_rows : kBatchSizes) {
          Batch batch;
          for (int32_t row = 0; row < num_rows; ++row) {
            batch.sequence.push_back(random.below(3) - 1);
            batch.position.push_back(random.below(129));
          }
          std::vector<float> q = random.normals(int64_t{num_rows} * s.q_rows());
          const int64_t place = random.below(num_rows);
          batch.sequence[static_cast<size_t>(place)] = sequence;
          batch.position[static_cast<size_t>(place)] = position;
          std::copy(probe.begin(), probe.end(), q.begin() + place * s.q_rows());
          for (const int num_threads : {1, 3}) {
            const std::vector<float> y = attend(world, batch, q, s.q_rows(), num_threads);
            const int64_t y_width = int64_t{s.num_heads} * s.v_dim;
            ASSERT_TRUE(same_bits(alone.data(), y.data() + place * y_width, y_width))
                << dtype_name(dtype) << " rows " << num_rows << " place " << place;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace paceline::testing
