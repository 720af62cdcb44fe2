// SPDX-License-Identifier: Apache-2.0
//
// Mixtures on a GPU, bit for bit: an expert row has the bits that `gemm` gives it alone, and
// weights in a format whose scales are exact give the bits of the plain weights that they stand
// for. Every shape of the op table is tried.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "support/cuda_fixture.h"
#include "support/op_cases_moe.h"
#include "support/seed.h"
#include "support/weight_spec.h"

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

// Plans kernels for another number of multiprocessors: with one, two blocks compute all tiles of a
// mixture. 0: for those that there are.
class PlannedFor {
 public:
  explicit PlannedFor(int32_t num_sms) : context_(cuda_test_context().context()) {
    if (num_sms > 0) context_.num_sms = num_sms;
  }
  ~PlannedFor() { context_.num_sms = num_sms_; }
  PlannedFor(const PlannedFor&) = delete;
  PlannedFor& operator=(const PlannedFor&) = delete;

 private:
  CudaContext& context_;
  int32_t num_sms_ = context_.num_sms;
};
constexpr int32_t kNumSms[] = {0, 1};

class ExpertBits : public GpuTest, public ::testing::WithParamInterface<ExpertGemmCase> {};

TEST_P(ExpertBits, RowsHaveTheBitsOfGemm) {
  TRACE_SEED();
  for (const int32_t num_rows : {1, 5, 40}) {
    const Rows rows = first_rows(num_rows, num_rows + 2);
    const OpInstance experts = make_expert_gemm(GetParam().spec, rows, base_seed());
    const OpInstance alone = make_gemms_of_expert_rows(GetParam().spec, rows, base_seed());
    const std::vector<std::byte> y_alone = y_of(alone);
    for (const int32_t num_sms : kNumSms) {
      const PlannedFor planned(num_sms);
      ASSERT_EQ(first_different_row(experts, y_of(experts), y_alone), -1)
          << "of " << num_rows << " rows, planned for " << num_sms;
    }
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

class DenseActivationBits : public GpuTest {};

class ActivationBits : public GpuTest, public ::testing::WithParamInterface<WeightSpec> {};

TEST_P(ActivationBits, AreThoseOfTheOpAlone) {
  TRACE_SEED();
  for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh,
                                      Activation::kSwigluOai, Activation::kClampedSilu}) {
    // Few and many rows of an expert; the last of 64 and of 128 weights of a tile do not exist.
    for (const auto& [num_rows, num_experts] :
         {std::pair{1, 8}, {40, 32}, {40, 2}, {100, 8}, {100, 2}, {300, 4}}) {
      for (const bool is_interleaved : {true, false}) {
        MixtureSpec spec = {.hidden = 160,
                            .num_experts = num_experts,
                            .top_k = 2,
                            .intermediate = 416,
                            .weight = GetParam(),
                            .is_interleaved = is_interleaved,
                            .activation = activation};
        const Rows rows = first_rows(num_rows, num_rows + 2);
        const OpInstance together = make_mixture(spec, rows, base_seed());
        spec.activates_alone = true;
        const std::vector<std::byte> y_alone = y_of(make_mixture(spec, rows, base_seed()));
        for (const int32_t num_sms : kNumSms) {
          const PlannedFor planned(num_sms);
          ASSERT_EQ(first_different_row(together, y_of(together), y_alone), -1)
              << "of " << num_rows << " rows, activation " << static_cast<int>(activation)
              << ", planned for " << num_sms;
        }
      }
    }
  }
}

constexpr WeightSpec kInt4 = {.dtype = DType::kBFloat16,
                              .format = WeightFormat::kInt4,
                              .scale_cols = 128,
                              .scale_dtype = DType::kFloat16,
                              .has_zeros = true};

// Weights as rows of tiles, and with many weights and 50 rows tokens; of int4, in registers with
// many weights and few rows.
TEST_F(DenseActivationBits, AreThoseOfTheOpAlone) {
  TRACE_SEED();
  const auto expect_equal = [](ActivatedGemmSpec spec, int32_t num_rows) {
    const Rows rows = first_rows(num_rows, num_rows + (num_rows == 6 ? 1 : 2));
    const OpInstance together = make_activated_gemm(spec, rows, base_seed());
    spec.activates_alone = true;
    ASSERT_EQ(first_different_row(together, y_of(together),
                                  y_of(make_activated_gemm(spec, rows, base_seed()))),
              -1)
        << num_rows << " rows of " << spec.intermediate << ", activation "
        << static_cast<int>(spec.activation) << weight_suffix(spec.weight);
  };
  for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh,
                                      Activation::kSwigluOai, Activation::kClampedSilu}) {
    for (const int32_t intermediate : {424, 12288}) {
      for (const int32_t num_rows : {1, 13, 20, 50, 100}) {
        expect_equal({.intermediate = intermediate,
                      .k = 160,
                      .activation = activation,
                      .weight = {DType::kBFloat16}},
                     num_rows);
      }
    }
    for (const int32_t intermediate : {432, 6144, 12288, 21504}) {
      for (const int32_t num_rows : {1, 6, 13, 50}) {
        expect_equal(
            {.intermediate = intermediate, .k = 640, .activation = activation, .weight = kInt4},
            num_rows);
      }
    }
  }
}

class JoinedProductBits : public GpuTest {};

// The shapes of layers, and tiles of each width that one launch may have.
TEST_F(JoinedProductBits, OfNormsAreThoseOfTheOpsAlone) {
  TRACE_SEED();
  for (const NormedGemmSpec& joined :
       {NormedGemmSpec{6144, 4096}, NormedGemmSpec{.n = 12288, .k = 4096, .has_activation = true},
        NormedGemmSpec{5120, 2560, false, {}, true}, NormedGemmSpec{16384, 5120},
        NormedGemmSpec{.n = 424, .k = 128, .has_activation = true}, NormedGemmSpec{4104, 768}}) {
    for (const int32_t num_rows : {1, 2, 9}) {
      for (const int32_t num_sms : kNumSms) {
        if (num_sms > 0 && joined.k > 1000) continue;
        const Rows rows = first_rows(num_rows, num_rows);
        NormedGemmSpec alone = joined;
        alone.norms_alone = true;
        const OpInstance together = make_normed_gemm(joined, rows, base_seed());
        const std::vector<std::byte> expected = y_of(make_normed_gemm(alone, rows, base_seed()));
        const PlannedFor planned(num_sms);
        ASSERT_EQ(first_different_row(together, y_of(together), expected), -1)
            << num_rows << " rows of " << joined.n << " by " << joined.k << ", planned for "
            << num_sms;
      }
    }
  }
}

TEST_F(JoinedProductBits, OfResidualsAreThoseOfTheOpsAlone) {
  TRACE_SEED();
  for (const AddedGemmSpec& joined :
       {AddedGemmSpec{4096, 12288}, AddedGemmSpec{2880, 4096, {}, true}, AddedGemmSpec{5120, 6144},
        AddedGemmSpec{1032, 136}, AddedGemmSpec{24576, 128}, AddedGemmSpec{4096, 640, kInt4},
        AddedGemmSpec{24576, 640, kInt4}}) {
    for (const int32_t num_rows : {1, 4, 8, 9, 16, 17}) {
      const Rows rows = first_rows(num_rows, num_rows + (num_rows == 4 ? 3 : 0));
      AddedGemmSpec alone = joined;
      alone.adds_alone = true;
      const OpInstance together = make_added_gemm(joined, rows, base_seed());
      ASSERT_EQ(first_different_row(together, y_of(together),
                                    y_of(make_added_gemm(alone, rows, base_seed()))),
                -1)
          << num_rows << " rows of " << joined.n << " by " << joined.k;
    }
  }
}

constexpr WeightSpec kFp8Rows = {.format = WeightFormat::kFp8, .scale_rows = 1};
constexpr WeightSpec kFp8Tiles = {
    .format = WeightFormat::kFp8, .scale_rows = 128, .scale_cols = 128};
INSTANTIATE_TEST_SUITE_P(Formats, ActivationBits,
                         ::testing::Values(WeightSpec{}, WeightSpec{.format = WeightFormat::kMxfp4},
                                           kFp8Rows, kFp8Tiles),
                         [](const auto& info) { return "of" + weight_suffix(info.param); });

}  // namespace
}  // namespace paceline::testing
