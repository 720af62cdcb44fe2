// SPDX-License-Identifier: Apache-2.0
//
// The CUDA ops against the CPU ops, which are the specification, on the whole op table; and the
// property that the runtime relies on, bit for bit on the GPU: a row's bits depend only on that
// row's inputs. PACELINE_SEED overrides the seed; failures print it.
// PACELINE_DEVICE_ONLY=1 leaves out the CPU op, for compute-sanitizer.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/describe_device.h"
#include "support/cuda_fixture.h"
#include "support/op_cases.h"
#include "support/op_comparison.h"
#include "support/seed.h"

namespace paceline::testing {
namespace {

bool is_device_only() {
  const char* const value = std::getenv("PACELINE_DEVICE_ONLY");
  return value != nullptr && std::string_view(value) == "1";
}

// Runs the op with scratch bits that differ from those the last op left.
CudaTestContext& fresh_context() {
  CudaTestContext& ctx = cuda_test_context();
  ctx.poison_workspace();
  return ctx;
}

void expect_clean(CudaTestContext& ctx, const DeviceInstance& device) {
  EXPECT_EQ(device.broken_guard(), "") << "written beyond its ends";
  EXPECT_TRUE(ctx.are_guards_intact()) << "written beyond the workspace or the counters";
  if (!ctx.are_counters_zero()) {
    ADD_FAILURE() << "counters are not back at zero";
    ctx.reset_counters();
  }
}

// --- CPU and GPU ---------------------------------------------------------------------------------

class OpParity : public GpuTest, public ::testing::WithParamInterface<OpCase> {
 protected:
  static void TearDownTestSuite() {
    if (!is_device_only()) return;
    std::printf("PACELINE_DEVICE_ONLY=1: %d cases, NONE compared with the CPU\n", num_skipped_);
  }

  static void compare_with_cpu(const OpInstance& op, const BeforeAndAfter& cuda) {
    if (is_device_only() && ++num_skipped_ > 0) return;
    expect_agreement(op, run_on_cpu(op), cuda);
  }

 private:
  static inline int32_t num_skipped_ = 0;
};

TEST_P(OpParity, MatchesTheCpu) {
  TRACE_SEED();
  const OpInstance op = GetParam().make(base_seed());
  CudaTestContext& ctx = fresh_context();
  DeviceInstance device(op);
  BeforeAndAfter cuda;
  for (const OpArray& array : op.arrays) cuda.before.push_back(initial_bytes(array, true));
  device.run(ctx);
  cuda.after = device.download_all();
  compare_with_cpu(op, cuda);
  expect_clean(ctx, device);
  // In a recorded graph, and with other scratch bits, the result is the same.
  device.reset();
  ctx.poison_workspace();
  const CapturedGraph graph(ctx, [&] { device.enqueue(ctx); });
  graph.launch();
  ctx.synchronize();
  for (size_t i = 0; i < op.arrays.size(); ++i) {
    EXPECT_TRUE(device.download(i) == cuda.after[i])
        << op.arrays[i].name << " of a graph differs from that of a plain call";
  }
  expect_clean(ctx, device);
}

INSTANTIATE_TEST_SUITE_P(Table, OpParity, ::testing::ValuesIn(op_cases()),
                         [](const auto& info) { return info.param.name; });

// --- kernels of sm_90a and of every GPU ----------------------------------------------------------

class PortableBits : public GpuTest, public ::testing::WithParamInterface<OpCase> {};

TEST_P(PortableBits, AreThoseOfSm90a) {
  TRACE_SEED();
  if (!cuda::runs_sm90a()) GTEST_SKIP() << "this GPU has no kernels of sm_90a to compare with";
  const OpInstance op = GetParam().make(base_seed());
  CudaTestContext& ctx = fresh_context();
  DeviceInstance device(op);
  std::vector<ArrayBytes> results;
  for (const bool is_portable : {false, true}) {
    const KernelChoice choice(ctx, is_portable);
    device.reset();
    ctx.poison_workspace();
    device.run(ctx);
    expect_clean(ctx, device);
    results.push_back(device.download_all());
  }
  for (size_t i = 0; i < op.arrays.size(); ++i) {
    // A kernel that ends in the next op does not store what lies between.
    if (op.arrays[i].compare == Compare::kByCase) continue;
    EXPECT_TRUE(results[0][i] == results[1][i]) << op.arrays[i].name << " differs";
  }
}

INSTANTIATE_TEST_SUITE_P(Table, PortableBits, ::testing::ValuesIn(op_cases()),
                         [](const auto& info) { return info.param.name; });

class DrawRate : public GpuTest {};

// Two keys that differ by less than float32 resolves are rare.
TEST_F(DrawRate, AtATemperatureNearlyAllDrawsAreEqual) {
  TRACE_SEED();
  int64_t num_compared = 0;
  int64_t num_different = 0;
  const auto compare = [&](const DrawSpec& spec, int32_t num_rows, uint64_t seed) {
    const OpInstance op = make_draw(spec, first_rows(num_rows, num_rows), seed);
    const BeforeAndAfter cpu = run_on_cpu(op);
    CudaTestContext& ctx = fresh_context();
    DeviceInstance device(op);
    device.run(ctx);
    EXPECT_EQ(op.check(cpu.after, device.download_all(), &num_different), "");
    num_compared += op.num_compared;
  };
  for (uint64_t i = 0; i < 6; ++i) {
    const float temperature = i % 3 == 0 ? 0.3f : i % 3 == 1 ? 1.0f : 1.5f;
    compare({.vocab_limit = 5003, .temperature = temperature}, 1000, base_seed() + i);
  }
  compare({.vocab_limit = 151936, .padding = 64, .temperature = 1.0f}, 64, base_seed());
  std::printf("%lld of %lld draws differ\n", static_cast<long long>(num_different),
              static_cast<long long>(num_compared));
  EXPECT_GT(num_compared, 5000);
  EXPECT_LE(num_different * 1000, num_compared);
}

// --- a row in any batch --------------------------------------------------------------------------

using RowBytes = std::vector<std::vector<std::byte>>;  // rows of every array that the op writes

RowBytes row_bytes(const OpInstance& op, const ArrayBytes& arrays, size_t row) {
  RowBytes bytes;
  for (size_t i = 0; i < op.arrays.size(); ++i) {
    const OpArray& array = op.arrays[i];
    if (array.role == Role::kInput || array.row_length == 0) continue;
    const int64_t at = array.row_at.empty() ? static_cast<int64_t>(row) : array.row_at[row];
    const int64_t length = array.row_length * element_bytes(array.cuda);
    bytes.emplace_back(arrays[i].begin() + at * length, arrays[i].begin() + (at + 1) * length);
  }
  return bytes;
}

// Downloads only the arrays that the op writes.
ArrayBytes download_written(const OpInstance& op, const DeviceInstance& device) {
  ArrayBytes bytes(op.arrays.size());
  for (size_t i = 0; i < op.arrays.size(); ++i) {
    if (op.arrays[i].role != Role::kInput) bytes[i] = device.download(i);
  }
  return bytes;
}

std::vector<RowWiseCase> invariance_cases() {
  std::vector<RowWiseCase> cases;
  std::copy_if(row_wise_cases().begin(), row_wise_cases().end(), std::back_inserter(cases),
               [](const RowWiseCase& c) { return c.is_invariance_case; });
  return cases;
}

class RowInvariance : public GpuTest, public ::testing::WithParamInterface<RowWiseCase> {};

TEST_P(RowInvariance, RowBitsDependOnTheRowAlone) {
  TRACE_SEED();
  const RowWiseCase& c = GetParam();
  Stream stream(base_seed(), 1000);
  ConstantCache constants;
  CudaTestContext& ctx = fresh_context();
  // Some numbers of rows are tiny, some large, some at the limits of the case.
  const std::vector<int64_t> probes = {0, 1, 3, 5, 7, 20, 333};
  std::map<int64_t, RowBytes> alone;
  for (const int64_t id : probes) {
    const OpInstance op = c.make({.ids = {id}, .claimed = 1, .max_rows = 1}, base_seed());
    const DeviceInstance device(op, &constants);
    device.run(ctx);
    alone[id] = row_bytes(op, download_written(op, device), 0);
    ASSERT_FALSE(alone[id].empty());
  }
  for (const int32_t num_rows : {1, 2, 8, 9, 16, 17, 33, 63, 64, 65, 128, 129, 161, 256, 512}) {
    std::vector<int32_t> rooms = {num_rows, num_rows + 1 + stream.below(500)};
    if (c.roomy_rows > num_rows && num_rows % 32 == 1) rooms.push_back(c.roomy_rows);
    for (const int32_t max_rows : rooms) {
      // Other rows in any order, then as many of the probes as fit.
      std::vector<int64_t> ids;
      for (int64_t id = 0; id < kMaxRowId; ++id) {
        if (std::find(probes.begin(), probes.end(), id) == probes.end()) ids.push_back(id);
      }
      shuffle(ids, stream);
      ids.resize(static_cast<size_t>(num_rows));
      const size_t first_probe = static_cast<size_t>(stream.below(7));
      for (size_t i = 0; i < std::min(ids.size(), probes.size()); ++i) {
        ids[i] = probes[(first_probe + i) % probes.size()];
      }
      shuffle(ids, stream);
      const OpInstance op =
          c.make({.ids = ids, .claimed = num_rows, .max_rows = max_rows}, base_seed());
      const DeviceInstance device(op, &constants);
      device.run(ctx);
      const ArrayBytes written = download_written(op, device);
      for (size_t row = 0; row < ids.size(); ++row) {
        const auto expected = alone.find(ids[row]);
        if (expected == alone.end()) continue;
        ASSERT_TRUE(row_bytes(op, written, row) == expected->second)
            << "row " << row << " of " << num_rows << ", max_rows " << max_rows << ", identity "
            << ids[row] << " differs from itself alone";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Table, RowInvariance, ::testing::ValuesIn(invariance_cases()),
                         [](const auto& info) { return info.param.name; });

// A row of attention decoded alone, in a verify window, in a chunk of a prompt.
class AttentionInvariance : public GpuTest, public ::testing::WithParamInterface<AttentionSpec> {
 protected:
  using RowName = std::pair<int64_t, int32_t>;  // sequence, position

  // Runs the batch. Stores its rows in `alone_` if `is_reference`, and compares those that `alone_`
  // has.
  void run(const AttentionBatch& batch, bool is_reference, const std::string& what) {
    const OpInstance op = make_attention(GetParam(), batch, base_seed());
    const DeviceInstance device(op);
    CudaTestContext& ctx = cuda_test_context();
    device.run(ctx);
    const ArrayBytes written = download_written(op, device);
    size_t row = 0;
    for (const AttentionSequence& sequence : batch.sequences) {
      for (int32_t r = 0; r < sequence.num_rows + sequence.num_inert; ++r, ++row) {
        if (r >= sequence.num_rows) continue;
        const RowName name = {sequence.id, sequence.length - sequence.num_rows + r};
        if (is_reference) alone_[name] = row_bytes(op, written, row);
        const auto expected = alone_.find(name);
        if (expected == alone_.end()) continue;
        ++num_compared_;
        ASSERT_TRUE(row_bytes(op, written, row) == expected->second)
            << what << ": sequence " << name.first << " position " << name.second << " as row "
            << row << " of " << op.num_rows << " (" << batch.sequences.size()
            << " sequences) differs from itself alone; max_model_len " << op.max_model_len
            << ", extra rows, sequences and rows a sequence " << batch.extra_rows << ", "
            << batch.extra_seqs << ", " << batch.extra_rows_per_seq;
      }
    }
  }

  std::map<RowName, RowBytes> alone_;
  int64_t num_compared_ = 0;
};

TEST_P(AttentionInvariance, RowBitsDependOnTheRowAlone) {
  TRACE_SEED();
  fresh_context();
  Stream stream(base_seed(), 1001);
  // Three segments of latent attention.
  const int32_t longest = GetParam().value_dim > 0 ? 2300 : 1100;
  const int32_t lengths[] = {longest, 300, 129, 18, 640};
  constexpr int32_t kNumSequences = 5;
  for (int32_t id = 0; id < kNumSequences; ++id) {
    const int32_t length = lengths[id];
    std::vector<int32_t> positions = {0, 1, 15, 16, 31, 63, 64, 127, 128, 129, 255, 256, 500};
    for (int32_t j = 1; j <= 17; ++j) positions.push_back(length - j);
    for (const int32_t position : positions) {
      if (position >= length) continue;
      run({.sequences = {{id, position + 1, 1, 0}}}, /*is_reference=*/true, "alone");
      if (HasFatalFailure()) return;
    }
  }
  // Every batch with other bounds, which select the tile and the number of splits.
  const auto vary = [&](AttentionBatch batch) {
    const int32_t lens[] = {0, 2048, 8192, 40000};
    const int32_t seqs[] = {0, 1, 15, 63, 255};
    const int32_t rows[] = {0, 1, 3, 15, 100, 500};
    batch.max_model_len = lens[stream.below(4)];
    batch.extra_seqs = seqs[stream.below(5)];
    batch.extra_rows_per_seq = rows[stream.below(6)];
    batch.extra_rows = rows[stream.below(6)];
    const int32_t num_sms[] = {0, 1, 7};  // on few, prompts have the prefill kernel
    batch.num_sms = num_sms[stream.below(3)];
    return batch;
  };
  for (const int32_t rows : {1, 2, 3, 4, 5, 8, 9, 16, 17}) {
    AttentionBatch together;
    for (int32_t id = 0; id < kNumSequences; ++id) {
      const AttentionSequence window = {id, lengths[id], rows, 0};
      together.sequences.push_back(window);
      run(vary({.sequences = {window}}), false, "verify window");
      // Inert rows at the end: drafts that do not exist.
      run(vary({.sequences = {{id, lengths[id], rows, 17 - rows}}}), false,
          "window with inert rows");
      if (HasFatalFailure()) return;
    }
    run(vary(together), false, "verify windows");
    // Among other rows: ended sequences, decodes and prompts before and after.
    for (const int32_t crowd : {3, 40, 120}) {
      AttentionBatch mixed;
      for (int32_t i = 0; i < crowd; ++i) {
        const int32_t length = 1 + stream.below(200);
        const int32_t most = std::min(length, crowd > 100 ? 2 : 30);
        const bool is_ended = stream.one_in(5);
        mixed.sequences.push_back({100 + i, length, is_ended ? 0 : 1 + stream.below(most),
                                   is_ended ? 1 + stream.below(3) : 0});
        if (i < kNumSequences && i < crowd - 1) {
          mixed.sequences.push_back({i, lengths[i], rows, stream.below(2)});
        }
      }
      run(vary(mixed), false, "in a crowd");
      if (HasFatalFailure()) return;
    }
  }
  for (int trial = 0; trial < 8; ++trial) {
    for (int32_t id = 0; id < kNumSequences; ++id) {
      // A prompt in chunks, each in its own batch with other rows.
      for (int32_t at = 0; at < lengths[id];) {
        const int32_t wanted =
            trial == 0 ? lengths[id] : 1 + stream.below(1 << (3 + stream.below(8)));
        const int32_t rows = std::min(lengths[id] - at, wanted);
        AttentionBatch batch = {.sequences = {{id, at + rows, rows, 0}}};
        if (stream.one_in(2)) batch.sequences.push_back({77, 50, 1 + stream.below(20), 0});
        if (stream.one_in(2)) batch.sequences.insert(batch.sequences.begin(), {78, 200, 5, 1});
        run(vary(batch), false, "chunk");
        if (HasFatalFailure()) return;
        at += rows;
      }
    }
  }
  EXPECT_GT(num_compared_, 1000);
}

std::string attention_name(const AttentionSpec& s) {
  return std::to_string(s.num_qo_heads) + "x" + std::to_string(s.num_kv_heads) + "_d" +
         std::to_string(s.head_dim) + "_b" + std::to_string(s.block_size) + "_w" +
         std::to_string(s.window) + (s.soft_cap > 0 ? "_cap" : "") + (s.has_sinks ? "_sinks" : "") +
         (s.dtype == DType::kFloat32 ? "_f32" : "_bf16");
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, AttentionInvariance,
    ::testing::Values(AttentionSpec{4, 4, 64, 16}, AttentionSpec{8, 2, 128, 16},
                      AttentionSpec{8, 1, 128, 256}, AttentionSpec{2, 1, 128, 16, 1024},
                      AttentionSpec{4, 1, 256, 16, 512}, AttentionSpec{4, 1, 512, 16},
                      AttentionSpec{4, 2, 128, 24, 100, 5.0f, true},
                      AttentionSpec{4, 2, 64, 1, 0, 0.0f, true},
                      AttentionSpec{16, 2, 64, 16, 128, 0.0f, true},
                      AttentionSpec{.num_qo_heads = 20,
                                    .num_kv_heads = 1,
                                    .head_dim = 576,
                                    .kv_inputs = KvInputs::kNone,
                                    .value_dim = 512},
                      AttentionSpec{.num_qo_heads = 16,
                                    .num_kv_heads = 1,
                                    .head_dim = 576,
                                    .kv_inputs = KvInputs::kNone,
                                    .value_dim = 512},
                      AttentionSpec{8, 2, 128, 16, 0, 0.0f, false, DType::kFloat32},
                      AttentionSpec{4, 2, 64, 24, 100, 5.0f, true, DType::kFloat32}),
    [](const auto& info) { return attention_name(info.param); });

}  // namespace
}  // namespace paceline::testing
