// SPDX-License-Identifier: Apache-2.0
// The gated delta rule on the CPU against its definition in double precision, and its bits: in any
// cut of the rows into passes, for any block size, with rejected rows at any place. Whatever a pass
// may not read is NaN.

#include "ops/recurrent.h"

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
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

constexpr float kEps = 1e-3f;
constexpr int64_t kGap = 16;     // unused elements around each block
constexpr int32_t kPadding = 5;  // of the rows of x and ba

// Weights, and the inputs of the tokens of some sequences.
struct Layer {
  Layer(const RecurrentShape& shape, DType records_dtype, int32_t num_sequences, int32_t length,
        Random& random)
      : s(shape),
        records(records_dtype),
        max_len(length),
        conv(random.normals(int64_t{s.num_channels()} * s.num_taps, 0.5f)),
        a_log(random.normals(s.num_value_heads, 0.7f)),
        dt_bias(random.normals(s.num_value_heads)),
        norm(random.normals(s.value_dim)) {
    for (int32_t i = 0; i < num_sequences; ++i) {
      x.push_back(random.normals(int64_t{length} * x_width()));
      // Some gates are far from 0: decays near 0 and 1, softplus beyond its threshold.
      ba.push_back(
          random.normals(int64_t{length} * 2 * s.num_value_heads, random.one_of({1.0f, 12.0f})));
    }
  }
  [[nodiscard]] int32_t x_width() const { return s.num_channels() + s.values_width(); }

  RecurrentShape s;
  DType records;
  int32_t max_len;
  std::vector<float> conv;
  std::vector<float> a_log;
  std::vector<float> dt_bias;
  std::vector<float> norm;
  std::vector<std::vector<float>> x;   // [sequence][position, x_width]
  std::vector<std::vector<float>> ba;  // [sequence][position, 2 * num_value_heads]
};

// Rows of one sequence in a pass, then inert ones.
struct Part {
  int32_t sequence = 0;
  int32_t start = 0;
  int32_t num_rows = 0;
  int32_t num_inert = 0;
  int32_t num_rejected = 0;  // of the rows, the last ones: their inputs are NaN
  bool stores_nothing = false;
};

// What the passes of some sequences have stored.
class Stores {
 public:
  Stores(const Layer& layer, int32_t block_size, Random& random)
      : l_(layer), block_size_(block_size), stride_(layer.max_len / block_size + 3) {
    const auto num_sequences = static_cast<int32_t>(layer.x.size());
    const int32_t num_blocks = num_sequences * stride_ + 1;
    table_.resize(static_cast<size_t>(num_blocks) - 1);
    std::iota(table_.begin(), table_.end(), 1);
    std::shuffle(table_.begin(), table_.end(), random.engine());
    records_.assign(static_cast<size_t>(num_blocks * record_block_bytes()), std::byte{0xff});
    entries_.assign(static_cast<size_t>(num_blocks * entry_block()), kNan);
  }

  // Runs a pass and returns y, which is NaN beyond its rows.
  std::vector<float> run(const std::vector<Part>& parts, int num_threads) {
    const RecurrentShape& s = l_.s;
    const int64_t x_stride = l_.x_width() + kPadding;
    const int64_t ba_stride = 2 * s.num_value_heads + kPadding;
    std::vector<float> x;
    std::vector<float> ba;
    std::vector<int32_t> positions;
    std::vector<int32_t> seq_slot;
    std::vector<int64_t> record_slots;
    std::vector<int64_t> entry_slots;
    std::vector<int32_t> indptr = {0};
    const auto add_row = [&](const Part& part, int32_t position, bool is_live, bool is_known) {
      x.resize(x.size() + static_cast<size_t>(x_stride), kNan);
      ba.resize(ba.size() + static_cast<size_t>(ba_stride), kNan);
      if (is_known) {
        const auto of = static_cast<size_t>(part.sequence);
        std::copy_n(l_.x[of].data() + int64_t{position} * l_.x_width(), l_.x_width(),
                    x.end() - x_stride);
        std::copy_n(l_.ba[of].data() + int64_t{position} * 2 * s.num_value_heads,
                    2 * s.num_value_heads, ba.end() - ba_stride);
      }
      const int32_t offset = position % block_size_;
      const bool stores = is_live && !part.stores_nothing;
      positions.push_back(is_live ? position : 1 << 30);
      seq_slot.push_back(is_live ? part.sequence : -1);
      record_slots.push_back(stores ? block(part.sequence, position) * block_size_ + offset
                                    : offset);
      entry_slots.push_back(stores && offset == block_size_ - 1 ? block(part.sequence, position)
                                                                : 0);
    };
    for (const Part& part : parts) {
      for (int32_t r = 0; r < part.num_rows; ++r) {
        add_row(part, part.start + r, true, r < part.num_rows - part.num_rejected);
      }
      for (int32_t r = 0; r < part.num_inert; ++r) add_row(part, 0, false, false);
      indptr.push_back(static_cast<int32_t>(positions.size()));
    }
    const auto num_rows = static_cast<int32_t>(positions.size());
    const auto num_seqs = static_cast<int32_t>(parts.size());
    // Stale rows of a larger pass.
    for (int32_t r = 0; r < 2; ++r) add_row({.sequence = 0}, r, true, true);
    indptr.push_back(num_rows + 2);
    std::vector<float> y(positions.size() * static_cast<size_t>(s.values_width()), kNan);
    CpuContext ctx = context_of(num_threads);
    gated_delta(
        ctx,
        {.num_rows = &num_rows,
         .max_rows = num_rows + 2,
         .x = x.data(),
         .x_stride = x_stride,
         .ba = ba.data(),
         .ba_stride = ba_stride,
         .positions = positions.data(),
         .seq_slot = seq_slot.data(),
         .record_slots = record_slots.data(),
         .record_table = {.blocks = table_.data(), .stride = stride_, .block_size = block_size_},
         .records = {.base = records_.data(),
                     .block_bytes = record_block_bytes(),
                     .k_offset = kGap * dtype_bytes(l_.records),
                     .v_offset = kGap * dtype_bytes(l_.records),
                     .block_size = block_size_,
                     .dtype = l_.records},
         .entry_slots = entry_slots.data(),
         .entry_table = {.blocks = table_.data(),
                         .stride = stride_,
                         .block_size = 1,
                         .tokens_per_entry = block_size_},
         .entries = {.base = reinterpret_cast<std::byte*>(entries_.data()),
                     .block_bytes = entry_block() * 4,
                     .k_offset = kGap * 4,
                     .v_offset = kGap * 4,
                     .block_size = 1,
                     .dtype = DType::kFloat32},
         .conv = l_.conv.data(),
         .a_log = l_.a_log.data(),
         .dt_bias = l_.dt_bias.data(),
         .norm = l_.norm.data(),
         .norm_eps = kEps,
         .y = y.data(),
         .shape = s,
         .num_seqs = &num_seqs,
         .row_indptr = indptr.data(),
         .max_seqs = num_seqs + 1,
         .max_rows_per_seq = num_rows});
    return y;
  }

  // The state after the first (index + 1) * block_size tokens.
  [[nodiscard]] float* entry(int32_t sequence, int32_t index) {
    return entries_.data() + block(sequence, index * block_size_) * entry_block() + kGap;
  }
  // Fills with NaN what no row from `length` on may read of the sequence.
  void forget(int32_t sequence, int32_t length) {
    const int32_t first = length / block_size_ * block_size_;
    for (int32_t t = 0; t < stride_ * block_size_; ++t) {
      if (t >= first - l_.s.num_taps + 1 && t < length) continue;
      std::fill_n(record(sequence, t), l_.s.record_width() * dtype_bytes(l_.records),
                  std::byte{0xff});
    }
    for (int32_t e = 0; e < stride_; ++e) {
      if (e != first / block_size_ - 1) std::fill_n(entry(sequence, e), l_.s.state_width(), kNan);
    }
  }
  [[nodiscard]] std::vector<std::byte> bytes() const {
    std::vector<std::byte> all = records_;
    const auto* const entries = reinterpret_cast<const std::byte*>(entries_.data());
    all.insert(all.end(), entries, entries + entries_.size() * 4);
    return all;
  }
  [[nodiscard]] std::byte* record(int32_t sequence, int32_t position) {
    return records_.data() + block(sequence, position) * record_block_bytes() +
           (kGap + position % block_size_ * l_.s.record_width()) * dtype_bytes(l_.records);
  }
  [[nodiscard]] int32_t block_size() const { return block_size_; }

 private:
  [[nodiscard]] int64_t block(int32_t sequence, int32_t position) const {
    return table_[static_cast<size_t>(sequence * stride_ + position / block_size_)];
  }
  [[nodiscard]] int64_t record_block_bytes() const {
    return (int64_t{block_size_} * l_.s.record_width() + 2 * kGap) * dtype_bytes(l_.records);
  }
  [[nodiscard]] int64_t entry_block() const { return l_.s.state_width() + 2 * kGap; }

  const Layer& l_;
  int32_t block_size_;
  int32_t stride_;
  std::vector<int32_t> table_;
  std::vector<std::byte> records_;
  std::vector<float> entries_;
};

// The definition, one value head at a time.
struct Reference {
  std::vector<double> y;                    // [position, values_width]
  std::vector<std::vector<double>> states;  // after each position, as an entry has them
};

Reference reference(const Layer& layer, int32_t sequence) {
  const RecurrentShape& s = layer.s;
  const auto of = static_cast<size_t>(sequence);
  const auto stored = [&](float value) -> double {
    return layer.records == DType::kFloat32 ? value : bf16_to_float(float_to_bf16(value));
  };
  const auto u = [&](int32_t t, int32_t channel) -> double {
    if (t < 0) return 0;
    return stored(layer.x[of][static_cast<size_t>(int64_t{t} * layer.x_width() + channel)]);
  };
  const auto convolved = [&](int32_t t, int32_t channel) {
    double sum = 0;
    for (int32_t j = 0; j < s.num_taps; ++j) {
      sum += double{layer.conv[static_cast<size_t>(channel * s.num_taps + j)]} *
             u(t - s.num_taps + 1 + j, channel);
    }
    return sum / (1 + std::exp(-sum));
  };
  Reference all = {
      .y = std::vector<double>(static_cast<size_t>(int64_t{layer.max_len} * s.values_width())),
      .states = std::vector<std::vector<double>>(
          static_cast<size_t>(layer.max_len),
          std::vector<double>(static_cast<size_t>(s.state_width())))};
  for (int32_t h = 0; h < s.num_value_heads; ++h) {
    const int32_t key_head = h / (s.num_value_heads / s.num_key_heads);
    std::vector<std::vector<double>> state(static_cast<size_t>(s.key_dim),
                                           std::vector<double>(static_cast<size_t>(s.value_dim)));
    for (int32_t t = 0; t < layer.max_len; ++t) {
      std::vector<double> q;
      std::vector<double> k;
      double q_squares = 0;
      double k_squares = 0;
      for (int32_t i = 0; i < s.key_dim; ++i) {
        q.push_back(convolved(t, key_head * s.key_dim + i));
        k.push_back(convolved(t, s.keys_width() + key_head * s.key_dim + i));
        q_squares += q.back() * q.back();
        k_squares += k.back() * k.back();
      }
      for (double& value : q) value /= std::sqrt(q_squares + 1e-6) * std::sqrt(s.key_dim);
      for (double& value : k) value /= std::sqrt(k_squares + 1e-6);
      const float* const ba = layer.ba[of].data() + int64_t{t} * 2 * s.num_value_heads;
      const double a = stored(ba[s.num_value_heads + h]) + layer.dt_bias[static_cast<size_t>(h)];
      const double beta = 1 / (1 + std::exp(-stored(ba[h])));
      const double decay = std::exp(-std::exp(double{layer.a_log[static_cast<size_t>(h)]}) *
                                    (a > 20 ? a : std::log1p(std::exp(a))));
      const int32_t first = h * s.value_dim;
      double squares = 0;
      std::vector<double> out;
      for (int32_t j = 0; j < s.value_dim; ++j) {
        const auto column = static_cast<size_t>(j);
        double read = 0;
        for (int32_t i = 0; i < s.key_dim; ++i) {
          const auto key = static_cast<size_t>(i);
          state[key][column] *= decay;
          read += state[key][column] * k[key];
        }
        const double d = beta * (convolved(t, 2 * s.keys_width() + first + j) - read);
        double o = 0;
        for (int32_t i = 0; i < s.key_dim; ++i) {
          const auto key = static_cast<size_t>(i);
          state[key][column] += k[key] * d;
          o += state[key][column] * q[key];
          all.states[static_cast<size_t>(t)][static_cast<size_t>((first + j) * s.key_dim + i)] =
              state[key][column];
        }
        squares += o * o;
        out.push_back(o);
      }
      const double factor = 1 / std::sqrt(squares / s.value_dim + double{kEps});
      const float* const z =
          layer.x[of].data() + int64_t{t} * layer.x_width() + s.num_channels() + first;
      for (int32_t j = 0; j < s.value_dim; ++j) {
        all.y[static_cast<size_t>(int64_t{t} * s.values_width() + first + j)] =
            out[static_cast<size_t>(j)] * factor * layer.norm[static_cast<size_t>(j)] * z[j] /
            (1 + std::exp(-double{z[j]}));
      }
    }
  }
  return all;
}

// Row `row` of y.
std::vector<float> row_of(const std::vector<float>& y, int32_t row, const RecurrentShape& s) {
  const auto begin = y.begin() + int64_t{row} * s.values_width();
  return {begin, begin + s.values_width()};
}

// The rows of a sequence in one pass, and its states at multiples of the block size.
struct OnePass {
  std::vector<float> y;
  std::vector<std::vector<float>> entries;
};
OnePass in_one_pass(const Layer& layer, int32_t sequence, int32_t block_size, Random& random) {
  Stores stores(layer, block_size, random);
  OnePass all = {
      .y = stores.run({{.sequence = sequence, .start = 0, .num_rows = layer.max_len}}, 1)};
  for (int32_t e = 0; (e + 1) * block_size <= layer.max_len; ++e) {
    const float* const entry = stores.entry(sequence, e);
    all.entries.emplace_back(entry, entry + layer.s.state_width());
  }
  return all;
}

void expect_rows(const std::vector<float>& y, int32_t first_row, const OnePass& want,
                 int32_t position, int32_t count, const RecurrentShape& s) {
  for (int32_t r = 0; r < count; ++r) {
    SCOPED_TRACE("position " + std::to_string(position + r));
    expect_same(row_of(y, first_row + r, s), row_of(want.y, position + r, s));
    if (::testing::Test::HasFailure()) return;
  }
}

// Every entry that a sequence of `length` tokens may still read, and the one before.
void expect_entries(Stores& stores, int32_t sequence, const OnePass& want, int32_t length) {
  const int32_t last = length / stores.block_size() - 1;
  if (last < 0) return;
  const std::vector<float>& entry = want.entries[static_cast<size_t>(last)];
  const float* const got = stores.entry(sequence, last);
  EXPECT_TRUE(same_bits(got, entry.data(), static_cast<int64_t>(entry.size())))
      << "entry " << last << " of sequence " << sequence;
}

// {key heads, value heads, key_dim, value_dim, taps}
const RecurrentShape kTiny = {2, 6, 16, 24, 4};

TEST(Recurrent, EqualsItsDefinition) {
  TRACE_SEED();
  Random random(1);
  const RecurrentShape shapes[] = {kTiny,
                                   {1, 1, 1, 1, 2},
                                   {1, 3, 33, 20, 4},
                                   {2, 2, 17, 3, 8},
                                   {3, 3, 16, 64, 3},
                                   {1, 2, 128, 128, 4}};
  for (const RecurrentShape& shape : shapes) {
    for (const DType records : {DType::kFloat32, DType::kBFloat16}) {
      SCOPED_TRACE(std::to_string(shape.num_value_heads) + " heads of " +
                   std::to_string(shape.key_dim) + " x " + std::to_string(shape.value_dim) + ", " +
                   std::to_string(shape.num_taps) + " taps, " + std::string(dtype_name(records)));
      const Layer layer(shape, records, 2, 37, random);
      Stores stores(layer, 8, random);
      const std::vector<float> y =
          stores.run({{.sequence = 1, .start = 0, .num_rows = layer.max_len},
                      {.sequence = 0, .start = 0, .num_rows = layer.max_len}},
                     3);
      for (int32_t i = 0; i < 2; ++i) {
        const int32_t sequence = 1 - i;
        const Reference want = reference(layer, sequence);
        const int64_t count = int64_t{layer.max_len} * shape.values_width();
        for (int64_t at = 0; at < count; ++at) {
          ASSERT_TRUE(is_near(y[static_cast<size_t>(i * count + at)],
                              want.y[static_cast<size_t>(at)], 1e-4, 1e-4))
              << "position " << at / shape.values_width() << ", element "
              << at % shape.values_width();
        }
        for (int32_t e = 0; (e + 1) * 8 <= layer.max_len; ++e) {
          for (int32_t at = 0; at < shape.state_width(); ++at) {
            ASSERT_TRUE(is_near(
                stores.entry(sequence, e)[at],
                want.states[static_cast<size_t>(8 * e + 7)][static_cast<size_t>(at)], 1e-5, 1e-5))
                << "entry " << e << ", element " << at;
          }
        }
      }
    }
  }
}

TEST(Recurrent, BitsDependNeitherOnPassesNorOnTheBlockSize) {
  TRACE_SEED();
  Random random(2);
  for (const DType records : {DType::kFloat32, DType::kBFloat16}) {
    const int32_t length = 53;
    const Layer layer(kTiny, records, 3, length, random);
    std::vector<OnePass> first;  // of the first block size
    for (const int32_t block_size : {16, 3, 8}) {
      SCOPED_TRACE("block size " + std::to_string(block_size));
      std::vector<OnePass> want;
      for (int32_t sequence = 0; sequence < 3; ++sequence) {
        want.push_back(in_one_pass(layer, sequence, block_size, random));
      }
      if (first.empty()) first = want;
      for (int32_t sequence = 0; sequence < 3; ++sequence) {
        expect_same(want[static_cast<size_t>(sequence)].y, first[static_cast<size_t>(sequence)].y);
      }
      for (int32_t trial = 0; trial < 12; ++trial) {
        // Three sequences at their own paces, in any order; memory that is no longer needed is NaN.
        Stores stores(layer, block_size, random);
        const int32_t most = trial == 0 ? 1 : random.one_of({2, 5, 30});
        int32_t known[3] = {0, 0, 0};
        while (known[0] < length || known[1] < length || known[2] < length) {
          std::vector<int32_t> order = {0, 1, 2};
          std::shuffle(order.begin(), order.end(), random.engine());
          std::vector<Part> parts;
          for (const int32_t sequence : order) {
            const int32_t left = length - known[sequence];
            const int32_t count = std::min(left, random.below(most + 1));
            if (count == 0 && random.one_in(2)) continue;
            parts.push_back({.sequence = sequence,
                             .start = known[sequence],
                             .num_rows = count,
                             .num_inert = random.below(3)});
          }
          const std::vector<float> y = stores.run(parts, random.one_of({1, 3}));
          int32_t row = 0;
          for (const Part& part : parts) {
            const OnePass& one = want[static_cast<size_t>(part.sequence)];
            expect_rows(y, row, one, part.start, part.num_rows, layer.s);
            row += part.num_rows;
            for (int32_t r = 0; r < part.num_inert; ++r, ++row) {
              expect_same(row_of(y, row, layer.s),
                          std::vector<float>(static_cast<size_t>(layer.s.values_width()), 0.0f));
            }
            const int32_t end = part.start + part.num_rows;
            known[part.sequence] = end;
            expect_entries(stores, part.sequence, one, end);
            stores.forget(part.sequence, end);
            if (HasFailure()) return;
          }
          // Nothing is written for rows beyond the pass.
          EXPECT_TRUE(std::all_of(y.begin() + int64_t{row} * layer.s.values_width(), y.end(),
                                  [](float value) { return std::isnan(value); }));
        }
      }
    }
  }
}

TEST(Recurrent, RejectedRowsLeaveNoTrace) {
  TRACE_SEED();
  Random random(3);
  constexpr int32_t kDrafts = 4;
  for (const int32_t block_size : {3, 8, 16}) {
    const int32_t length = 2 * block_size + 3;
    const Layer layer(kTiny, DType::kBFloat16, 1, length + kDrafts + 2, random);
    const OnePass want = in_one_pass(layer, 0, block_size, random);
    // A window at every place: `accepted` rows of it stay, and what the others have stored is NaN.
    for (int32_t start = 0; start < length; ++start) {
      for (int32_t accepted = 0; accepted <= kDrafts; ++accepted) {
        SCOPED_TRACE("blocks of " + std::to_string(block_size) + ", a window at " +
                     std::to_string(start) + ", " + std::to_string(accepted) + " accepted");
        Stores stores(layer, block_size, random);
        if (start > 0) stores.run({{.sequence = 0, .start = 0, .num_rows = start}}, 1);
        const int32_t window = std::min(kDrafts + 1, layer.max_len - start);
        const int32_t kept = std::min(accepted, window);
        expect_rows(stores.run({{.sequence = 0,
                                 .start = start,
                                 .num_rows = window,
                                 .num_rejected = window - kept}},
                               1),
                    0, want, start, kept, layer.s);
        const int32_t at = start + kept;
        const int32_t rest = std::min(kDrafts + 1, layer.max_len - at);
        expect_rows(stores.run({{.sequence = 0, .start = at, .num_rows = rest}}, 1), 0, want, at,
                    rest, layer.s);
        expect_entries(stores, 0, want, at + rest);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(Recurrent, RowsHandOnWhatTheNullBlockDoesNotStore) {
  TRACE_SEED();
  Random random(4);
  for (const int32_t block_size : {3, 8}) {
    const int32_t length = 3 * block_size + 2;
    const Layer layer(kTiny, DType::kFloat32, 1, length, random);
    const OnePass want = in_one_pass(layer, 0, block_size, random);
    for (int32_t start = 0; start < length; ++start) {
      SCOPED_TRACE("blocks of " + std::to_string(block_size) + ", from " + std::to_string(start));
      Stores stores(layer, block_size, random);
      if (start > 0) stores.run({{.sequence = 0, .start = 0, .num_rows = start}}, 1);
      stores.forget(0, start);
      const std::vector<std::byte> before = stores.bytes();
      const std::vector<float> y = stores.run(
          {{.sequence = 0, .start = start, .num_rows = length - start, .stores_nothing = true}}, 1);
      expect_rows(y, 0, want, start, length - start, layer.s);
      EXPECT_TRUE(stores.bytes() == before) << "something was stored";
      if (HasFailure()) return;
    }
  }
}

TEST(Recurrent, RecordsAreTheInputsOfLiveRows) {
  TRACE_SEED();
  Random random(5);
  for (const DType records : {DType::kFloat32, DType::kBFloat16}) {
    const Layer layer(kTiny, records, 2, 11, random);
    Stores stores(layer, 8, random);
    stores.run({{.sequence = 1, .start = 0, .num_rows = 9, .num_inert = 2}}, 3);
    const RecurrentShape& s = layer.s;
    for (int32_t t = 0; t < layer.max_len; ++t) {
      std::vector<float> inputs(
          layer.x[1].begin() + int64_t{t} * layer.x_width(),
          layer.x[1].begin() + int64_t{t} * layer.x_width() + s.num_channels());
      const auto ba = layer.ba[1].begin() + int64_t{t} * 2 * s.num_value_heads;
      inputs.insert(inputs.end(), ba, ba + 2 * s.num_value_heads);
      std::vector<std::byte> want = typed_array(records, inputs).bytes;
      if (t >= 9) std::fill(want.begin(), want.end(), std::byte{0xff});
      EXPECT_EQ(std::memcmp(stores.record(1, t), want.data(), want.size()), 0) << "position " << t;
    }
  }
}

}  // namespace
}  // namespace paceline::testing
