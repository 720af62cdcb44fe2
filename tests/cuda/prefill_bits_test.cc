// SPDX-License-Identifier: Apache-2.0
//
// Paged attention on a GPU, bit for bit: rows of a prompt have the same bits from the prefill
// kernel and from the kernel of decoding rows. Planned for few multiprocessors, a prompt has the
// former; planned for very many, it has the latter. As many multiprocessors as the plan has share
// the tiles, so parts of tiles begin and end elsewhere.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "support/cuda_fixture.h"
#include "support/op_cases.h"
#include "support/seed.h"

namespace paceline::testing {
namespace {

constexpr int32_t kFewSms[] = {1, 2, 5, 11, 29, 64};
constexpr int32_t kManySms = 1 << 20;

std::vector<std::byte> y_of(const AttentionSpec& spec, AttentionBatch batch, int32_t num_sms) {
  batch.num_sms = num_sms;
  const OpInstance op = make_attention(spec, batch, base_seed());
  CudaTestContext& ctx = cuda_test_context();
  ctx.poison_workspace();
  const DeviceInstance device(op);
  device.run(ctx);
  EXPECT_EQ(device.broken_guard(), "");
  EXPECT_TRUE(ctx.are_counters_zero());
  return device.download(static_cast<size_t>(op.find("y")));
}

class PrefillBits : public GpuTest, public ::testing::WithParamInterface<AttentionSpec> {};

TEST_P(PrefillBits, AreThoseOfDecodingRows) {
  TRACE_SEED();
  // Lengths at the edges of chunks and elsewhere; prompts of one tile and of several, from the
  // start and behind a context; rows that see nothing.
  const std::vector<AttentionBatch> batches = {
      {.sequences = {{0, 2500, 2500, 0}}},
      {.sequences = {{0, 5000, 700, 0}}, .extra_rows = 100},
      // The last row of the first tile sees nothing.
      {.sequences = {{0, 1000, 9, 8}}, .extra_rows_per_seq = 500},
      {.sequences = {{0, 384, 256, 0},
                     {1, 1, 1, 0},
                     {2, 1025, 300, 20},
                     {3, 1, 0, 200},
                     {4, 90, 4, 1},
                     {5, 3000, 193, 0}},
       .extra_seqs = 3}};
  for (const AttentionBatch& batch : batches) {
    const std::vector<std::byte> decode = y_of(GetParam(), batch, kManySms);
    const int64_t row = int64_t{GetParam().num_qo_heads} * GetParam().head_dim * 2;
    for (const int32_t num_sms : kFewSms) {
      const std::vector<std::byte> prefill = y_of(GetParam(), batch, num_sms);
      ASSERT_EQ(prefill.size(), decode.size());
      int64_t num_different = 0;
      int64_t first = -1;
      for (size_t i = 0; i < prefill.size(); ++i) {
        if (prefill[i] == decode[i]) continue;
        if (num_different++ == 0) first = static_cast<int64_t>(i);
      }
      EXPECT_EQ(num_different, 0) << "bytes; the first in row " << first / row << ", element "
                                  << first % row / 2 << ", of a batch of " << batch.sequences.size()
                                  << " sequences, shared by " << num_sms;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, PrefillBits,
                         ::testing::Values(AttentionSpec{32, 8, 128},
                                           AttentionSpec{8, 4, 128, 16, 1024},
                                           AttentionSpec{4, 4, 128, 256, 100, 5.0f, true},
                                           AttentionSpec{6, 2, 128, 24},
                                           AttentionSpec{16, 1, 128, 1}, AttentionSpec{8, 4, 256},
                                           AttentionSpec{4, 1, 256, 24, 512, 50.0f},
                                           AttentionSpec{64, 8, 64, 16, 0, 0.0f, true},
                                           AttentionSpec{64, 8, 64, 16, 128, 0.0f, true},
                                           AttentionSpec{4, 4, 64, 16, 0, 30.0f}),
                         [](const auto& info) {
                           const AttentionSpec& s = info.param;
                           return std::to_string(s.num_qo_heads) + "x" +
                                  std::to_string(s.num_kv_heads) + "_d" +
                                  std::to_string(s.head_dim) + "_b" + std::to_string(s.block_size) +
                                  "_w" + std::to_string(s.window) + (s.soft_cap > 0 ? "_cap" : "") +
                                  (s.has_sinks ? "_sinks" : "");
                         });

}  // namespace
}  // namespace paceline::testing
