// SPDX-License-Identifier: Apache-2.0
// A value head of the gated delta rule on the CPU passes from sequence to sequence: none of them
// sees what another one has left, NaN least of all.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "ops/recurrent.h"
#include "support/op_checks.h"

namespace paceline::testing {
namespace {

constexpr int32_t kBlockSize = 4;
constexpr int32_t kBlocks = 3;  // of each sequence

// One row each of some sequences in their second block, of which the first `num_nan` have NaN
// inputs.
std::vector<float> outputs(const RecurrentShape& s, int32_t num_sequences, int32_t num_nan) {
  Random random(1);
  const int64_t x_stride = s.num_channels() + s.values_width();
  const int32_t num_blocks = num_sequences * kBlocks + 1;
  std::vector<float> x = random.normals(num_sequences * x_stride);
  std::vector<float> ba = random.normals(int64_t{num_sequences} * 2 * s.num_value_heads);
  std::vector<float> records = random.normals(int64_t{num_blocks} * kBlockSize * s.record_width());
  std::vector<float> entries = random.normals(int64_t{num_blocks} * s.state_width());
  const std::vector<float> conv = random.normals(int64_t{s.num_channels()} * s.num_taps);
  const std::vector<float> a_log = random.normals(s.num_value_heads);
  const std::vector<float> dt_bias = random.normals(s.num_value_heads);
  const std::vector<float> norm = random.normals(s.value_dim);
  std::fill_n(x.begin(), num_nan * x_stride, kNan);
  std::fill_n(ba.begin(), num_nan * 2 * s.num_value_heads, kNan);
  std::vector<int32_t> table(static_cast<size_t>(num_blocks) - 1);
  std::iota(table.begin(), table.end(), 1);
  std::vector<int32_t> sequences(static_cast<size_t>(num_sequences));
  std::iota(sequences.begin(), sequences.end(), 0);
  std::vector<int32_t> indptr(static_cast<size_t>(num_sequences) + 1);
  std::iota(indptr.begin(), indptr.end(), 0);
  const std::vector<int32_t> positions(sequences.size(), kBlockSize + 2);
  const std::vector<int64_t> no_slots(sequences.size(), 0);
  std::vector<float> y(static_cast<size_t>(num_sequences * s.values_width()));
  const auto store = [](std::vector<float>& values, int32_t block_size, int64_t width) {
    return KvLayerView{.base = reinterpret_cast<std::byte*>(values.data()),
                       .block_bytes = block_size * width * 4,
                       .k_offset = 0,
                       .v_offset = 0,
                       .block_size = block_size,
                       .dtype = DType::kFloat32};
  };
  CpuContext ctx = context_of(1);
  gated_delta(
      ctx, {.num_rows = &num_sequences,
            .max_rows = num_sequences,
            .x = x.data(),
            .x_stride = x_stride,
            .ba = ba.data(),
            .ba_stride = 2 * s.num_value_heads,
            .positions = positions.data(),
            .seq_slot = sequences.data(),
            .record_slots = no_slots.data(),
            .record_table = {.blocks = table.data(), .stride = kBlocks, .block_size = kBlockSize},
            .records = store(records, kBlockSize, s.record_width()),
            .entry_slots = no_slots.data(),
            .entry_table = {.blocks = table.data(),
                            .stride = kBlocks,
                            .block_size = 1,
                            .tokens_per_entry = kBlockSize},
            .entries = store(entries, 1, s.state_width()),
            .conv = conv.data(),
            .a_log = a_log.data(),
            .dt_bias = dt_bias.data(),
            .norm = norm.data(),
            .norm_eps = 1e-6f,
            .y = y.data(),
            .shape = s,
            .num_seqs = &num_sequences,
            .row_indptr = indptr.data(),
            .max_seqs = num_sequences,
            .max_rows_per_seq = 1});
  return y;
}

TEST(RecurrentHeads, SequencesOfNanLeaveNothingToTheNext) {
  for (const int32_t dim : {5, 16, 18}) {
    const RecurrentShape shape = {.num_key_heads = 2,
                                  .num_value_heads = 4,
                                  .key_dim = dim,
                                  .value_dim = dim + 1,
                                  .num_taps = 4};
    const std::vector<float> sound = outputs(shape, 4, 0);
    const std::vector<float> beside_nan = outputs(shape, 4, 2);
    const auto first = static_cast<size_t>(2 * shape.values_width());
    for (size_t i = 0; i < sound.size(); ++i) {
      if (i < first) {
        EXPECT_TRUE(std::isnan(beside_nan[i])) << i;
      } else {
        ASSERT_EQ(beside_nan[i], sound[i]) << "key_dim " << dim << ", element " << i;
      }
    }
  }
}

}  // namespace
}  // namespace paceline::testing
