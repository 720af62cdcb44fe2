// SPDX-License-Identifier: Apache-2.0
//
// Mixtures on a GPU, bit for bit: an expert row has the bits that `gemm` gives it alone, and
// weights in a format whose scales are exact give the bits of the plain weights that they stand
// for. Every shape of the op table is tried.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/cuda_fixture.h"
#include "support/op_cases_moe.h"
#include "support/seed.h"

namespace paceline::testing {
namespace {

// The output of the instance on the GPU.
std::vector<std::byte> y_of(const OpInstance& op) {
  CudaTestContext& ctx = cuda_test_context();
  ctx.poison_workspace();
  const DeviceInstance device(op);
  device.run(ctx);
  EXPECT_EQ(device.broken_guard(), "");
  return device.download(static_cast<size_t>(op.find("y")));
}

// The row of the first element that differs, or -1.
int64_t first_different_row(const OpInstance& op, const std::vector<std::byte>& a,
                            const std::vector<std::byte>& b) {
  if (a.size() != b.size()) return 0;
  const OpArray& y = op.arrays[static_cast<size_t>(op.find("y"))];
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) return static_cast<int64_t>(i) / element_bytes(y.cuda) / y.row_length;
  }
  return -1;
}

class ExpertBits : public GpuTest, public ::testing::WithParamInterface<ExpertGemmCase> {};

TEST_P(ExpertBits, RowsHaveTheBitsOfGemm) {
  TRACE_SEED();
  for (const int32_t num_rows : {1, 5, 40}) {
    const Rows rows = first_rows(num_rows, num_rows + 2);
    const OpInstance experts = make_expert_gemm(GetParam().spec, rows, base_seed());
    const OpInstance alone = make_gemms_of_expert_rows(GetParam().spec, rows, base_seed());
    ASSERT_EQ(first_different_row(experts, y_of(experts), y_of(alone)), -1)
        << "of " << num_rows << " rows";
  }
}

INSTANTIATE_TEST_SUITE_P(Table, ExpertBits, ::testing::ValuesIn(expert_gemm_cases()),
                         [](const auto& info) { return info.param.name; });

std::vector<ExpertGemmCase> exact_cases() {
  std::vector<ExpertGemmCase> cases = expert_gemm_cases();
  std::erase_if(cases, [](const ExpertGemmCase& c) { return !c.spec.weight.is_exact(); });
  return cases;
}

class ExactFormatBits : public GpuTest, public ::testing::WithParamInterface<ExpertGemmCase> {};

TEST_P(ExactFormatBits, AreThoseOfPlainWeights) {
  TRACE_SEED();
  for (const int32_t num_rows : {1, 3, 17, 100}) {
    const Rows rows = first_rows(num_rows, num_rows);
    ExpertGemmSpec plain = GetParam().spec;
    plain.weight.is_dequantized = true;
    const OpInstance scaled = make_expert_gemm(GetParam().spec, rows, base_seed());
    ASSERT_EQ(
        first_different_row(scaled, y_of(scaled), y_of(make_expert_gemm(plain, rows, base_seed()))),
        -1)
        << "of " << num_rows << " rows";
  }
}

INSTANTIATE_TEST_SUITE_P(Table, ExactFormatBits, ::testing::ValuesIn(exact_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace paceline::testing
