// SPDX-License-Identifier: Apache-2.0
// The ops of compressed attention on the CPU against their definition in double precision, over
// sequences whose blocks lie anywhere in pools of NaN.

#include "ops/compressed.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "device/cpu_context.h"
#include "support/compressed_layer.h"
#include "support/kv_pool.h"
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

using compressed_layer::Answers;
using compressed_layer::append;
using compressed_layer::append_all;
using compressed_layer::attend;
using compressed_layer::Batch;
using compressed_layer::kEps;
using compressed_layer::kIndexScale;
using compressed_layer::kScale;
using compressed_layer::Layer;
using compressed_layer::Queries;
using compressed_layer::random_queries;
using compressed_layer::Shape;
using compressed_layer::Store;
using compressed_layer::Vector;

Vector normed(const Vector& x, const std::vector<float>& weight) {
  double squares = 0;
  for (const double value : x) squares += value * value;
  Vector y;
  for (size_t i = 0; i < x.size(); ++i) {
    y.push_back(x[i] / std::sqrt(squares / static_cast<double>(x.size()) + kEps) *
                (1.0 + weight[i]));
  }
  return y;
}

// Entry e of a sequence from the inputs of its tokens.
Vector expected_entry(const Layer& layer, int32_t sequence, int32_t e, int32_t dim, int32_t offset,
                      const std::vector<float>& bias, const std::vector<float>& norm) {
  const Shape& s = layer.s;
  const int32_t width = s.parts() * dim;
  Vector channels;
  for (int32_t i = 0; i < dim; ++i) {
    std::vector<std::pair<double, double>> terms;  // gate, kv
    const auto add = [&](int32_t entry, int32_t channel) {
      for (int32_t t = 0; entry >= 0 && t < s.ratio; ++t) {
        const float* const token = layer.tails[static_cast<size_t>(sequence)].data() +
                                   int64_t{entry * s.ratio + t} * s.tail_width() + offset;
        terms.emplace_back(
            double{token[width + channel]} + bias[static_cast<size_t>(t * width + channel)],
            token[channel]);
      }
    };
    if (s.overlaps) add(e - 1, i);
    add(e, s.overlaps ? dim + i : i);
    double highest = -1e300;
    for (const auto& [gate, kv] : terms) highest = std::max(highest, gate);
    double sum = 0;
    double weighted = 0;
    for (const auto& [gate, kv] : terms) {
      sum += std::exp(gate - highest);
      weighted += std::exp(gate - highest) * kv;
    }
    channels.push_back(weighted / sum);
  }
  Vector entry = normed(channels, norm);
  layer.rotate(entry.data(), dim, e * s.ratio);
  return entry;
}

// The output of one head, from the entries as the pools have them.
Vector expected_head(Layer& layer, int32_t sequence, int32_t position,
                     const std::vector<int32_t>& entries, int32_t head, const float* q) {
  const Shape& s = layer.s;
  std::vector<Vector> keys;
  for (int32_t at = std::max(position - s.window + 1, 0); at <= position; ++at) {
    Vector& key = keys.emplace_back();
    for (int32_t i = 0; i < s.head_dim; ++i) key.push_back(layer.window.at(sequence, at, i));
  }
  for (const int32_t entry : entries) {
    Vector& key = keys.emplace_back();
    for (int32_t i = 0; i < s.head_dim; ++i) key.push_back(layer.entries.at(sequence, entry, i));
  }
  const double sink = layer.sinks[static_cast<size_t>(head)];
  double highest = sink;
  Vector scores;
  for (const Vector& key : keys) {
    double score = 0;
    for (size_t i = 0; i < key.size(); ++i) score += key[i] * q[i];
    scores.push_back(score * kScale);
    highest = std::max(highest, scores.back());
  }
  double sum = std::exp(sink - highest);
  Vector y(static_cast<size_t>(s.head_dim));
  for (size_t j = 0; j < keys.size(); ++j) {
    const double weight = std::exp(scores[j] - highest);
    sum += weight;
    for (size_t i = 0; i < y.size(); ++i) y[i] += weight * keys[j][i];
  }
  for (double& value : y) value /= sum;
  return y;
}

// The first k of the scores, the highest first and of equal ones the lower entry; then ascending.
std::vector<int32_t> expected_choice(const float* scores, int32_t count, int32_t k) {
  std::vector<int32_t> entries(static_cast<size_t>(count));
  std::iota(entries.begin(), entries.end(), 0);
  const auto value = [&](int32_t e) { return std::isnan(scores[e]) ? -kInf : scores[e]; };
  if (count > k) {
    std::stable_sort(entries.begin(), entries.end(),
                     [&](int32_t a, int32_t b) { return value(a) > value(b); });
    entries.resize(static_cast<size_t>(k));
    std::sort(entries.begin(), entries.end());
  }
  return entries;
}

Shape random_shape(Random& random, bool is_large) {
  Shape s = {.num_heads = random.one_of({1, 2, 3, 4, 5, 7}),
             .head_dim = 8 + random.below(60),
             .rope = 2 * (1 + random.below(4)),
             .q_width = 1 + random.below(50),
             .window = random.one_of({1, 5, 8, 130}),
             .ratio = random.one_of({2, 3, 4, 8}),
             .block_size = random.one_of({1, 3, 16}),
             .overlaps = random.one_in(2),
             .is_interleaved = random.one_in(2),
             .entries = random.one_of({DType::kFloat32, DType::kBFloat16})};
  if (is_large) {  // DeepSeek-V4-Flash
    s.head_dim = 512;
    s.rope = 64;
    s.window = 128;
    s.overlaps = random.one_in(2);
    s.ratio = s.overlaps ? 4 : 128;
  }
  if (random.one_in(2)) {
    s.index_heads = random.one_of({1, 3, 4, 9});
    s.index_dim = is_large ? 128 : s.rope + random.below(30);
    s.top_k = 1 + random.below(9);
  }
  return s;
}

TEST(CompressedOps, MatchTheDefinitionOn300RandomCases) {
  for (uint64_t which = 0; which < 300; ++which) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(base_seed()) + ", case " +
                 std::to_string(which));
    Random random(2000 + which);
    const bool is_large = which % 50 == 0;
    const Shape s = random_shape(random, is_large);
    const int32_t longest = is_large ? 300 : random.one_in(6) ? 300 : 40;
    Layer layer(s, {1 + random.below(longest), 1 + random.below(20)}, random);
    append_all(layer, random);
    const double rounding = s.entries == DType::kFloat32 ? 1e-4 : 0x1p-7;
    for (int32_t sequence = 0; sequence < layer.size(); ++sequence) {
      const auto of = static_cast<size_t>(sequence);
      for (int32_t position = 0; position < layer.lengths[of]; position += 1 + random.below(5)) {
        const float* const in =
            layer.qkv_a[of].data() + int64_t{position} * (s.q_width + s.head_dim);
        Vector entry =
            normed(Vector(in + s.q_width, in + s.q_width + s.head_dim), layer.window_norm);
        layer.rotate(entry.data(), s.head_dim, position);
        for (int32_t i = 0; i < s.head_dim; ++i) {
          ASSERT_TRUE(is_near(layer.window.at(sequence, position, i), entry[static_cast<size_t>(i)],
                              1e-4, rounding))
              << "element " << i << " of a window entry";
        }
      }
      for (int32_t e = 0; e < layer.lengths[of] / s.ratio; ++e) {
        const Vector entry =
            expected_entry(layer, sequence, e, s.head_dim, 0, layer.bias, layer.entry_norm);
        for (int32_t i = 0; i < s.head_dim; ++i) {
          ASSERT_TRUE(is_near(layer.entries.at(sequence, e, i), entry[static_cast<size_t>(i)], 1e-4,
                              rounding))
              << "element " << i << " of entry " << e;
        }
        if (!s.has_index()) continue;
        const Vector key = expected_entry(layer, sequence, e, s.index_dim, s.index_offset(),
                                          layer.key_bias, layer.key_norm);
        for (int32_t i = 0; i < s.index_dim; ++i) {
          ASSERT_TRUE(
              is_near(layer.keys.at(sequence, e, i), key[static_cast<size_t>(i)], 1e-4, rounding))
              << "element " << i << " of key " << e;
        }
      }
    }
    for (Store* const store : {&layer.window, &layer.tail, &layer.entries}) {
      for (int64_t slot = 0; slot < s.block_size; ++slot) {  // inert rows leave no trace
        ASSERT_TRUE(std::isnan(element(store->pool.view.dtype, store->pool.token(slot, false), 0)));
      }
    }

    const Queries queries = random_queries(layer, 5, random);
    const Answers a = attend(layer, queries, 2);
    for (int32_t row = 0; row < 5; ++row) {
      const auto at = static_cast<size_t>(row);
      const int32_t sequence = queries.batch.sequence[at];
      const int64_t row_width = int64_t{s.num_heads} * s.head_dim;
      if (sequence < 0) {
        for (int64_t i = 0; i < row_width; ++i) ASSERT_EQ(a.y[at * row_width + i], 0) << "inert";
        ASSERT_EQ(a.num_chosen[at], s.has_index() ? 0 : -1);
        continue;
      }
      const int32_t position = queries.batch.position[at];
      const int32_t visible = (position + 1) / s.ratio;
      const float* const scores = a.scores.data() + row * a.stride;
      std::vector<int32_t> entries(static_cast<size_t>(visible));
      std::iota(entries.begin(), entries.end(), 0);
      if (s.has_index()) {
        for (int32_t e = 0; visible > s.top_k && e < visible; ++e) {
          double score = 0;
          for (int32_t h = 0; h < s.index_heads; ++h) {
            const float* const q =
                queries.index_q.data() + (int64_t{row} * s.index_heads + h) * s.index_dim;
            double product = 0;
            for (int32_t i = 0; i < s.index_dim; ++i)
              product += q[i] * layer.keys.at(sequence, e, i);
            score += queries.weights[static_cast<size_t>(row * (s.index_heads + 3) + h)] *
                     std::max(product, 0.0);
          }
          ASSERT_NEAR(scores[e], score * kIndexScale, 1e-4 * std::max(1.0, std::fabs(score)));
        }
        entries = expected_choice(scores, visible, s.top_k);
        ASSERT_EQ(a.num_chosen[at], static_cast<int32_t>(entries.size()));
        const auto chosen = a.chosen.begin() + row * s.top_k;
        ASSERT_TRUE(std::equal(entries.begin(), entries.end(), chosen));
      }
      for (int32_t head = 0; head < s.num_heads; ++head) {
        const int64_t from = row * row_width + int64_t{head} * s.head_dim;
        const Vector want =
            expected_head(layer, sequence, position, entries, head, queries.q.data() + from);
        for (int32_t i = 0; i < s.head_dim; ++i) {
          ASSERT_NEAR(a.y[static_cast<size_t>(from + i)], want[static_cast<size_t>(i)], 1e-4)
              << "row " << row << " head " << head << " element " << i;
        }
      }
    }
  }
}

TEST(CompressedOps, HeadsAreNormedRotatedAndRotatedBack) {
  for (uint64_t which = 0; which < 60; ++which) {
    Random random(4000 + which);
    const Shape s = random_shape(random, which % 20 == 0);
    const Layer layer(s, {50}, random);
    const std::vector<int32_t> positions = {7, 0, 49};
    const int32_t num_rows = 3;
    const std::vector<float> x = random.normals(int64_t{num_rows} * s.num_heads * s.head_dim, 3);
    CpuContext ctx = context_of(2);
    for (const bool has_norm : {false, true}) {
      for (const bool is_inverse : {false, true}) {
        std::vector<float> y = x;
        rotate_heads(ctx, {.num_rows = &num_rows,
                           .max_rows = num_rows,
                           .x = y.data(),
                           .has_norm = has_norm,
                           .norm_eps = kEps,
                           .rope = layer.rope(positions.data()),
                           .is_inverse = is_inverse,
                           .num_heads = s.num_heads,
                           .head_dim = s.head_dim,
                           .rope_head_dim = s.rope});
        for (int32_t i = 0; i < num_rows * s.num_heads; ++i) {
          const float* const from = x.data() + int64_t{i} * s.head_dim;
          Vector head(from, from + s.head_dim);
          if (has_norm) head = normed(head, std::vector<float>(head.size()));
          layer.rotate(head.data(), s.head_dim, positions[static_cast<size_t>(i / s.num_heads)],
                       is_inverse ? -1 : 1);
          for (int32_t d = 0; d < s.head_dim; ++d) {
            ASSERT_NEAR(y[static_cast<size_t>(int64_t{i} * s.head_dim + d)],
                        head[static_cast<size_t>(d)], 1e-5 * std::max(1.0f, std::fabs(from[d])));
          }
        }
      }
    }
  }
}

// Scores of all kinds that comparisons could get wrong.
TEST(CompressedOps, ChoiceBreaksTiesByTheLowerEntry) {
  TRACE_SEED();
  Random random(77);
  for (int32_t round = 0; round < 400; ++round) {
    const int32_t count = random.below(400);
    const int32_t top_k = 1 + random.below(100);
    std::vector<float> scores;
    for (int32_t e = 0; e < count; ++e) {
      switch (random.below(8)) {
        case 0:
          scores.push_back(random.one_of({kNan, -kNan, kInf, -kInf}));
          break;
        case 1:
          scores.push_back(random.one_of({0.0f, -0.0f}));
          break;
        case 2:
          scores.push_back(random.normal(1e-41f));
          break;
        case 3:
          scores.push_back(random.normal(1e30f));
          break;
        default:
          scores.push_back(static_cast<float>(random.below(5) - 2));
      }
    }
    const int32_t seq_slot = random.one_in(20) ? -1 : 0;
    const int32_t num_rows = 1;
    std::vector<int32_t> chosen(static_cast<size_t>(top_k), -1);
    int32_t num_chosen = -1;
    CpuContext ctx = context_of(1);
    choose_entries(ctx, {.num_rows = &num_rows,
                         .max_rows = 1,
                         .scores = scores.data(),
                         .scores_stride = 400,
                         .seq_slot = &seq_slot,
                         .entry_end = &count,
                         .top_k = top_k,
                         .chosen = chosen.data(),
                         .num_chosen = &num_chosen});
    if (seq_slot < 0) {
      ASSERT_EQ(num_chosen, 0);
      continue;
    }
    chosen.resize(static_cast<size_t>(num_chosen));
    ASSERT_EQ(chosen, expected_choice(scores.data(), count, top_k)) << "round " << round;
  }
}

TEST(CompressedOps, RowBitsDependOnTheRowAlone) {
  TRACE_SEED();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Random random(31);
    const Shape s = {.num_heads = 5,
                     .head_dim = 40,
                     .rope = 8,
                     .q_width = 33,
                     .window = 128,
                     .ratio = 4,
                     .block_size = 16,
                     .overlaps = true,
                     .is_interleaved = true,
                     .entries = dtype,
                     .index_heads = 6,
                     .index_dim = 20,
                     .top_k = 40};
    Layer layer(s, {600, 129}, random);
    append_all(layer, random);
    // Written again one row at a time, in order: the stores keep their bits.
    const auto pools = [&] {
      return std::vector{layer.window.pool.bytes, layer.tail.pool.bytes, layer.entries.pool.bytes,
                         layer.keys.pool.bytes};
    };
    const auto before = pools();
    for (int32_t position = 0; position < 600; ++position) {
      Batch one;
      one.add(0, position);
      append(layer, one, 1);
    }
    ASSERT_EQ(before, pools());
    for (const auto& [sequence, position] : {std::pair{0, 599}, {0, 161}, {1, 128}, {0, 2}}) {
      Queries single = random_queries(layer, 1, random);
      single.batch = {.sequence = {sequence}, .position = {position}};
      const Answers alone = attend(layer, single, 1);
      for (const int32_t num_rows : kBatchSizes) {
        Queries queries = random_queries(layer, num_rows, random);
        const auto place = static_cast<size_t>(random.below(num_rows));
        queries.batch.sequence[place] = sequence;
        queries.batch.position[place] = position;
        const auto set = [&](std::vector<float>& rows, const std::vector<float>& row) {
          std::copy(row.begin(), row.end(),
                    rows.begin() + static_cast<int64_t>(place * row.size()));
        };
        set(queries.q, single.q);
        set(queries.index_q, single.index_q);
        set(queries.weights, single.weights);
        for (const int num_threads : {1, 3}) {
          const Answers a = attend(layer, queries, num_threads);
          ASSERT_TRUE(same_bits(alone.y.data(), a.y.data() + place * alone.y.size(),
                                static_cast<int64_t>(alone.y.size())))
              << dtype_name(dtype) << " rows " << num_rows << " place " << place;
          ASSERT_TRUE(same_bits(alone.scores.data(), a.scores.data() + place * alone.scores.size(),
                                static_cast<int64_t>(alone.scores.size())));
        }
      }
      // A list of all visible entries is as good as no list.
      if ((position + 1) / s.ratio <= s.top_k) {
        layer.s.index_heads = 0;
        const Answers all = attend(layer, single, 1);
        ASSERT_TRUE(same_bits(alone.y.data(), all.y.data(), static_cast<int64_t>(all.y.size())));
        layer.s.index_heads = s.index_heads;
      }
    }
  }
}

}  // namespace
}  // namespace paceline::testing
