// SPDX-License-Identifier: Apache-2.0
//
// Products of weights with scales, and products by expert, have the bits of the reference of
// gemm_order_test.cu on dequantised weights: at every number of rows, with every routing. Scales
// that are not powers of two multiply the reference's sums. PACELINE_SEED overrides the seed.

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "device/device_memory.h"
#include "ops/moe.h"
#include "ops/ops.h"
#include "support/cuda_fixture.h"
#include "support/gemm_reference.cuh"
#include "support/packed_weights.h"
#include "support/seed.h"

namespace paceline::testing {
namespace {

enum class Scales : uint8_t {
  kNone,
  kPowers,      // as checkpoints have them
  kWidePowers,  // also such that the kernels need a second multiplication
  kAny          // not powers of two, so they multiply sums
};

struct Format {
  const char* name;
  WeightFormat format;
  Scales scales = Scales::kNone;
  int32_t scale_rows = 1;
  int32_t scale_cols = 0;  // 0: all of K
  // Of int4.
  DType scale_dtype = DType::kBFloat16;
  bool has_zeros = false;
  bool has_order = false;
};
constexpr Format kPlain = {"plain", WeightFormat::kPlain};
constexpr Format kMxfp4 = {"mxfp4", WeightFormat::kMxfp4, Scales::kPowers};
constexpr Format kMxfp4Wide = {"mxfp4_wide", WeightFormat::kMxfp4, Scales::kWidePowers};
constexpr Format kFp8Row = {"fp8_row", WeightFormat::kFp8, Scales::kAny};
constexpr Format kFp8Block = {"fp8_block", WeightFormat::kFp8, Scales::kAny, 128, 128};
constexpr Format kFp8Joined = {"fp8_joined", WeightFormat::kFp8, Scales::kAny, 32, 128};
constexpr Format kFp8RowPowers = {"fp8_row_powers", WeightFormat::kFp8, Scales::kPowers};
constexpr Format kFp8BlockPowers = {"fp8_block_powers", WeightFormat::kFp8, Scales::kPowers, 128,
                                    128};
constexpr Format kFp8Wide = {"fp8_wide", WeightFormat::kFp8, Scales::kWidePowers, 64, 128};

constexpr Format kNvfp4 = {"nvfp4", WeightFormat::kNvfp4, Scales::kAny, 1, kNvfp4Columns};
constexpr Format kNvfp4Wide = {"nvfp4_wide", WeightFormat::kNvfp4, Scales::kWidePowers, 1,
                               kNvfp4Columns};

constexpr Format int4(const char* name, int32_t scale_cols, DType scale_dtype, bool has_zeros,
                      bool has_order = false) {
  return {.name = name,
          .format = WeightFormat::kInt4,
          .scale_cols = scale_cols,
          .scale_dtype = scale_dtype,
          .has_zeros = has_zeros,
          .has_order = has_order};
}
constexpr Format kInt4 = int4("int4", 128, DType::kBFloat16, false);
constexpr Format kInt4Zeros = int4("int4_zeros", 128, DType::kFloat16, true);
constexpr Format kInt4Row = int4("int4_row", 0, DType::kFloat16, false);
constexpr Format kInt4Wide = int4("int4_wide", 64, DType::kBFloat16, true);
constexpr Format kInt4Narrow = int4("int4_narrow", 32, DType::kFloat16, true);
constexpr Format kInt4Ordered = int4("int4_ordered", 32, DType::kFloat16, true, true);
constexpr Format kInt4OrderedWide = int4("int4_ordered_wide", 128, DType::kBFloat16, false, true);

// Random elements; without the NaN of fp8.
__global__ void fill_elements(uint8_t* to, int64_t count, uint64_t seed, bool is_fp8) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const auto byte = static_cast<uint8_t>(mix(mix(seed) + static_cast<uint64_t>(i)));
    to[i] = is_fp8 && (byte & 0x7f) == 0x7f ? static_cast<uint8_t>(byte & 0x80) : byte;
  }
}

// The values that products multiply: elements times scales; elements alone where scales is null.
// zeros: of int4, row-major, or null.
__global__ void dequantize(const uint8_t* from, const float* scales, const uint8_t* zeros,
                           WeightMatrix w, int64_t matrix_bytes, int64_t matrix_scales,
                           int32_t num_matrices, __nv_bfloat16* to) {
  const int64_t elements = int64_t{w.n} * w.k;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  const int32_t tiles = (w.k + w.scale_cols - 1) / w.scale_cols;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < num_matrices * elements;
       i += step) {
    const int64_t matrix = i / elements;
    const auto row = static_cast<int32_t>(i % elements / w.k);
    const auto column = static_cast<int32_t>(i % elements % w.k);
    const uint8_t* const bytes = from + matrix * matrix_bytes;
    float value;
    const int64_t scale_at =
        matrix * matrix_scales + int64_t{row / w.scale_rows} * tiles + column / w.scale_cols;
    if (w.format == WeightFormat::kInt4) {
      const uint8_t byte = bytes[i % elements / 2];
      const int zero = zeros != nullptr ? zeros[scale_at] : kInt4Zero;
      value = static_cast<float>((column % 2 == 0 ? byte & 15 : byte >> 4) - zero);
    } else if (w.format == WeightFormat::kMxfp4 || w.format == WeightFormat::kNvfp4) {
      const uint8_t byte = bytes[i % elements / 2];
      const int bits = column % 2 == 0 ? byte & 15 : byte >> 4;
      const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
      value = (bits & 8) != 0 ? -magnitudes[bits & 7] : magnitudes[bits & 7];
    } else {
      const int byte = bytes[i % elements];
      const int exponent = byte >> 3 & 15;
      const auto mantissa = static_cast<float>(exponent == 0 ? byte & 7 : 8 + (byte & 7));
      value = ldexpf((byte & 0x80) != 0 ? -mantissa : mantissa, max(exponent, 1) - 10);
    }
    if (scales != nullptr) value *= scales[scale_at];
    to[i] = __float2bfloat16_rn(value);
  }
}

// Rows of x in the order of the columns of W.
__global__ void put_in_order(const __nv_bfloat16* x, const int32_t* order, int64_t count, int32_t k,
                             __nv_bfloat16* to) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    to[i] = x[i / k * k + order[i % k]];
  }
}

__global__ void add_bias(float* y, const float* bias, int64_t count, int32_t n) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    y[i] += bias[i % n];
  }
}

// Matrices of `n` rows, one after the other, packed.
DeviceVector<uint8_t> packed_on_gpu(PackedKind kind, const DeviceVector<uint8_t>& rows,
                                    int32_t num_matrices, int32_t n, int64_t row_bytes) {
  const int64_t bytes = packed_bytes(kind, n, row_bytes);
  DeviceVector<uint8_t> packed(num_matrices * bytes);
  packed.fill_bytes(0);
  const PackedTensor to = {.matrix = reinterpret_cast<std::byte*>(packed.data()),
                           .matrix_stride = bytes,
                           .num_rows = n,
                           .row_bytes = row_bytes,
                           .kind = kind};
  cuda_memory().pack(to, 0, int64_t{num_matrices} * n,
                     reinterpret_cast<const std::byte*>(rows.data()));
  cuda_memory().finish();
  return packed;
}

// Matrices of a format, packed as a model has them on a GPU, and what they are dequantised.
struct Weights {
  ExpertMatrices matrices;
  DeviceVector<uint8_t> data;
  DeviceVector<uint8_t> scale_bytes;  // mxfp4, nvfp4 and int4
  DeviceVector<uint8_t> zeros;        // int4, as are the orders
  DeviceVector<int32_t> orders;
  DeviceVector<float> scales;
  DeviceVector<__nv_bfloat16> values;
  int64_t matrix_scales = 0;

  Weights(CudaTestContext& ctx, const Format& format, int32_t num_matrices, int32_t n, int32_t k) {
    WeightMatrix& w = matrices.first;
    w = plain_matrix(nullptr, n, k, DType::kBFloat16);
    w.format = format.format;
    matrices.num_experts = num_matrices;
    values = DeviceVector<__nv_bfloat16>(int64_t{num_matrices} * n * k);
    if (format.format == WeightFormat::kPlain) {
      fill_normal<<<1024, 256, 0, ctx.stream()>>>(values.data(), values.size(), base_seed() + 1,
                                                  0.02f);
      w.data = reinterpret_cast<const std::byte*>(values.data());
      matrices.data_stride = int64_t{n} * k * 2;
      return;
    }
    const bool is_fp8 = format.format == WeightFormat::kFp8;
    const bool is_int4 = format.format == WeightFormat::kInt4;
    const bool is_mxfp4 = format.format == WeightFormat::kMxfp4;
    const bool is_nvfp4 = format.format == WeightFormat::kNvfp4;
    w.scale_rows = format.scale_rows;
    w.scale_cols = is_mxfp4 ? kMxfp4Columns : format.scale_cols == 0 ? k : format.scale_cols;
    w.scale_dtype = format.scale_dtype;
    w.has_zeros = format.has_zeros;
    w.has_order = format.has_order;
    w.has_exact_scales = is_fp8 && format.scales != Scales::kAny;
    const int64_t matrix_bytes = n * w.row_bytes();
    const DeviceVector<uint8_t> rows(num_matrices * matrix_bytes);
    fill_elements<<<1024, 256, 0, ctx.stream()>>>(rows.data(), rows.size(), base_seed() + 1,
                                                  is_fp8);
    ctx.synchronize();
    data = packed_on_gpu(packed_kind(w.format), rows, num_matrices, n, w.row_bytes());
    w.layout = layout_on(Device::kCuda, w.format, w.dtype);
    w.data = reinterpret_cast<const std::byte*>(data.data());
    matrices.data_stride = w.data_bytes();
    matrix_scales =
        int64_t{(n + w.scale_rows - 1) / w.scale_rows} * ((k + w.scale_cols - 1) / w.scale_cols);
    std::mt19937_64 random(base_seed() + 2);
    const auto between = [&](int low, int high) {
      return low + static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
    };
    if (is_int4) {
      set_int4(ctx, rows, matrix_bytes, random);
      return;
    }
    std::vector<float> host(static_cast<size_t>(num_matrices * matrix_scales));
    std::vector<uint8_t> bytes(host.size());
    for (size_t i = 0; i < host.size(); ++i) {
      // Elements of fp8 are up to 448, and products must stay in the range of float32.
      const int least = is_fp8 ? -30 : is_nvfp4 ? -125 : -127;
      const int exponent =
          format.scales == Scales::kWidePowers ? between(least, 40) : between(-12, is_fp8 ? 0 : 1);
      host[i] = std::ldexp(1.0f, exponent);
      bytes[i] = static_cast<uint8_t>(exponent + 127);
      if (format.scales == Scales::kAny || is_nvfp4) {
        host[i] *= 1.0f + static_cast<float>(between(1, 999)) / 999;
      }
      if (is_nvfp4 && between(0, 1) != 0) host[i] = -host[i];
    }
    scales = DeviceVector<float>(host);
    if (is_fp8) {
      w.scales = reinterpret_cast<const std::byte*>(scales.data());
      matrices.scales_stride = matrix_scales * 4;
    } else {
      if (is_nvfp4) {
        bytes.resize(4 * host.size());
        std::memcpy(bytes.data(), host.data(), bytes.size());
      }
      scale_bytes = packed_on_gpu(is_nvfp4 ? PackedKind::kNvfp4Scales : PackedKind::kMxfp4Scales,
                                  DeviceVector<uint8_t>(bytes), num_matrices, n,
                                  w.num_scale_cols() * (is_nvfp4 ? 4 : 1));
      w.scales = reinterpret_cast<const std::byte*>(scale_bytes.data());
      matrices.scales_stride = w.scales_bytes();
    }
    dequantize<<<1024, 256, 0, ctx.stream()>>>(
        rows.data(), is_fp8 && format.scales == Scales::kAny ? nullptr : scales.data(), nullptr, w,
        matrix_bytes, matrix_scales, num_matrices, values.data());
    ctx.synchronize();
  }

  // x in the order of a matrix's columns; `room` has as much memory.
  [[nodiscard]] const __nv_bfloat16* in_order(CudaTestContext& ctx, int32_t matrix,
                                              const DeviceVector<__nv_bfloat16>& x,
                                              DeviceVector<__nv_bfloat16>& room) const {
    const WeightMatrix& w = matrices.first;
    if (!w.has_order) return x.data();
    put_in_order<<<1024, 256, 0, ctx.stream()>>>(x.data(), orders.data() + int64_t{matrix} * w.k,
                                                 x.size(), w.k, room.data());
    return room.data();
  }

  [[nodiscard]] ReferenceExtras extras(int32_t matrix) const {
    const WeightMatrix& w = matrices.first;
    if (w.format != WeightFormat::kFp8 || w.has_exact_scales) return {};
    return {.scales = scales.data() + matrix * matrix_scales,
            .scale_rows = w.scale_rows,
            .part = w.scale_cols};
  }

 private:
  // The scales, zero points and orders of int4, and the values. rows: of codes.
  void set_int4(CudaTestContext& ctx, const DeviceVector<uint8_t>& rows, int64_t matrix_bytes,
                std::mt19937_64& random) {
    WeightMatrix& w = matrices.first;
    const int32_t num_matrices = matrices.num_experts;
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); };
    const auto count = static_cast<size_t>(num_matrices * matrix_scales);
    std::vector<float> host(count);
    std::vector<uint8_t> bytes(2 * count);
    for (size_t i = 0; i < count; ++i) {
      // Random mantissas and signs; exponents that both dtypes have.
      const bool is_half = w.scale_dtype == DType::kFloat16;
      const int mantissa_bits = is_half ? 10 : 7;
      const int mantissa = below(1 << mantissa_bits);
      const int exponent = -9 + below(6);
      const bool is_negative = below(2) != 0;
      host[i] =
          std::ldexp(static_cast<float>((1 << mantissa_bits) + mantissa), exponent - mantissa_bits);
      if (is_negative) host[i] = -host[i];
      const int bias = is_half ? 15 : 127;
      const int bits = (is_negative ? 0x8000 : 0) | (exponent + bias) << mantissa_bits | mantissa;
      bytes[2 * i] = static_cast<uint8_t>(bits & 0xff);
      bytes[2 * i + 1] = static_cast<uint8_t>(bits >> 8);
    }
    scales = DeviceVector<float>(host);
    const int64_t groups = w.num_scale_cols();
    scale_bytes = packed_on_gpu(PackedKind::kInt4Scales, DeviceVector<uint8_t>(bytes), num_matrices,
                                w.n, 2 * groups);
    w.scales = reinterpret_cast<const std::byte*>(scale_bytes.data());
    matrices.scales_stride = w.scales_bytes();
    std::vector<uint8_t> host_zeros(count);
    for (uint8_t& zero : host_zeros) zero = static_cast<uint8_t>(below(16));
    const DeviceVector<uint8_t> zero_rows(host_zeros);
    if (w.has_zeros) {
      zeros = packed_on_gpu(PackedKind::kMxfp4Scales, zero_rows, num_matrices, w.n, groups);
      w.zeros = zeros.data();
    }
    if (w.has_order) {
      std::vector<int32_t> order(static_cast<size_t>(num_matrices) * static_cast<size_t>(w.k));
      for (size_t i = 0; i < order.size(); ++i) {
        const auto column = static_cast<int32_t>(i % static_cast<size_t>(w.k));
        order[i] = column;
        std::swap(order[i], order[i - static_cast<size_t>(below(column + 1))]);
      }
      orders = DeviceVector<int32_t>(order);
      w.order = orders.data();
    }
    dequantize<<<1024, 256, 0, ctx.stream()>>>(
        rows.data(), scales.data(), w.has_zeros ? zero_rows.data() : nullptr, w, matrix_bytes,
        matrix_scales, num_matrices, values.data());
    ctx.synchronize();
  }
};

std::vector<float> random_bias(int64_t count) {
  std::vector<float> bias(static_cast<size_t>(count));
  Stream(base_seed(), 3).fill(bias.data(), count);
  return bias;
}

// --- One matrix ----------------------------------------------------------------------------------

struct DenseCase {
  Format format;
  int32_t n;
  int32_t k;
};
void PrintTo(const DenseCase& c, std::ostream* out) {
  *out << c.format.name << " N" << c.n << " K" << c.k;
}

class GemmFormats : public GemmComparison, public ::testing::WithParamInterface<DenseCase> {};

constexpr int32_t kMostRows = 1025;
constexpr int32_t kNumRows[] = {1, 7, 16, 17, 32, 33, 64, 65, 128, 130, 300, kMostRows};

TEST_P(GemmFormats, EqualTheReferenceOnDequantizedWeights) {
  TRACE_SEED();
  CudaTestContext& ctx = cuda_test_context();
  const auto [format, n, k] = GetParam();
  const int64_t outputs = int64_t{kMostRows} * n;
  const Weights weights(ctx, format, 1, n, k);
  DeviceVector<__nv_bfloat16> x(int64_t{kMostRows} * k);
  const DeviceVector<float> bias(random_bias(n));
  DeviceVector<float> reference(outputs);
  GemmOutputs y(outputs);
  fill_normal<<<1024, 256, 0, ctx.stream()>>>(x.data(), x.size(), base_seed(), 1.0f);
  DeviceVector<__nv_bfloat16> ordered(weights.matrices.first.has_order ? x.size() : 1);
  reference_gemm<<<dim3((n + 31) / 32, (kMostRows + 15) / 16), 128, 0, ctx.stream()>>>(
      weights.in_order(ctx, 0, x, ordered), weights.values.data(), reference.data(), kMostRows, n,
      k, weights.extras(0));
  ctx.synchronize();
  int64_t num_different = 0;
  for (const int32_t num_rows : kNumRows) {
    const DeviceVector<int32_t> num_rows_at(std::vector<int32_t>{num_rows});
    for (const int32_t max_rows : {num_rows, std::min(num_rows + 70, kMostRows)}) {
      const float* const added = max_rows == num_rows ? bias.data() : nullptr;
      const GemmParams p{.num_rows = num_rows_at.data(),
                         .max_rows = max_rows,
                         .x = x.data(),
                         .x_stride = k,
                         .weight = weights.matrices.first,
                         .bias = added,
                         .y_stride = n,
                         .x_dtype = DType::kBFloat16};
      const int64_t tail = std::min<int64_t>(outputs - int64_t{num_rows} * n, 4 * int64_t{n});
      num_different += count_both(p, y, reference, added, num_rows, n, tail, format.name);
    }
  }
  EXPECT_EQ(num_different, 0);
  expect_intact_guards(y);
}

// Shapes of models, then tails of N, and tails of K in a stage of 128 columns and a step of 16.
INSTANTIATE_TEST_SUITE_P(
    Shapes, GemmFormats,
    ::testing::Values(DenseCase{kMxfp4, 5760, 2880}, DenseCase{kMxfp4, 2880, 2880},
                      DenseCase{kMxfp4, 97, 2848}, DenseCase{kMxfp4, 4001, 352},
                      DenseCase{kMxfp4, 1, 32}, DenseCase{kMxfp4, 11000, 96},
                      DenseCase{kMxfp4Wide, 640, 1024}, DenseCase{kNvfp4, 6144, 4096},
                      DenseCase{kNvfp4, 24576, 4096}, DenseCase{kNvfp4, 4096, 12288},
                      DenseCase{kNvfp4, 97, 2848}, DenseCase{kNvfp4, 4001, 352},
                      DenseCase{kNvfp4, 1, 32}, DenseCase{kNvfp4, 11000, 96},
                      DenseCase{kNvfp4Wide, 640, 1024}, DenseCase{kFp8Row, 6144, 4096},
                      DenseCase{kFp8Row, 97, 144}, DenseCase{kFp8Block, 4096, 12288},
                      DenseCase{kFp8Block, 321, 1360}, DenseCase{kFp8Block, 130, 112},
                      DenseCase{kFp8Joined, 1120, 2880}, DenseCase{kFp8RowPowers, 640, 1024},
                      DenseCase{kFp8RowPowers, 11000, 144}, DenseCase{kFp8Block, 11000, 272},
                      DenseCase{kFp8BlockPowers, 4096, 4096}, DenseCase{kFp8BlockPowers, 321, 1360},
                      DenseCase{kFp8BlockPowers, 8192, 4096}, DenseCase{kFp8RowPowers, 6001, 656},
                      DenseCase{kFp8Wide, 1000, 656}, DenseCase{kFp8Wide, 5000, 656},
                      DenseCase{kInt4, 4096, 4096}, DenseCase{kInt4, 6144, 4096},
                      DenseCase{kInt4Zeros, 24576, 4096}, DenseCase{kInt4Zeros, 4096, 12288},
                      DenseCase{kInt4Zeros, 97, 384}, DenseCase{kInt4Row, 321, 352},
                      DenseCase{kInt4Row, 1000, 1024}, DenseCase{kInt4Wide, 130, 2880},
                      DenseCase{kInt4Wide, 11000, 192}, DenseCase{kInt4Narrow, 321, 352},
                      DenseCase{kInt4Narrow, 4096, 1376}, DenseCase{kInt4Narrow, 1, 32},
                      DenseCase{kInt4, 12288, 640}, DenseCase{kInt4Narrow, 24001, 1376},
                      DenseCase{kInt4Row, 20000, 352}, DenseCase{kInt4Wide, 30000, 5376},
                      DenseCase{kInt4Ordered, 321, 352}, DenseCase{kInt4OrderedWide, 4096, 1024}));

// --- Mixtures ------------------------------------------------------------------------------------

enum class Routing : uint8_t { kRandom, kOneExpert, kLastExpert, kNobody };

struct MixtureCase {
  Format format;
  int32_t num_experts;
  int32_t n;
  int32_t k;
  int32_t num_rows;  // expert rows
  Routing routing = Routing::kRandom;
};
void PrintTo(const MixtureCase& c, std::ostream* out) {
  *out << c.format.name << " E" << c.num_experts << " N" << c.n << " K" << c.k << ", " << c.num_rows
       << " rows, routing " << static_cast<int>(c.routing);
}

class ExpertGemm : public GemmComparison, public ::testing::WithParamInterface<MixtureCase> {};

TEST_P(ExpertGemm, EqualsTheReferenceOfEveryExpert) {
  TRACE_SEED();
  CudaTestContext& ctx = cuda_test_context();
  const auto [format, num_experts, n, k, num_rows, routing] = GetParam();
  const Weights weights(ctx, format, num_experts, n, k);
  std::mt19937_64 random(base_seed() + 4);
  std::vector<int32_t> begin(static_cast<size_t>(num_experts) + 1);
  for (int32_t row = 0; row < num_rows && routing != Routing::kNobody; ++row) {
    const int32_t expert = routing == Routing::kOneExpert ? num_experts / 2
                           : routing == Routing::kLastExpert
                               ? num_experts - 1
                               : static_cast<int32_t>(random() % num_experts);
    ++begin[static_cast<size_t>(expert) + 1];
  }
  for (int32_t e = 0; e < num_experts; ++e) begin[e + 1] += begin[e];
  const int32_t routed = begin.back();
  const int32_t num_x_rows = num_rows / 4 + 1;
  std::vector<int32_t> sources(static_cast<size_t>(num_rows));
  for (int32_t& source : sources) source = static_cast<int32_t>(random() % num_x_rows);
  const DeviceVector<int32_t> expert_begin(begin);
  const DeviceVector<int32_t> x_rows(sources);
  const DeviceVector<float> bias(random_bias(int64_t{num_experts} * n));
  const int64_t outputs = int64_t{num_rows} * n;
  DeviceVector<__nv_bfloat16> x(int64_t{num_rows} * k);
  DeviceVector<float> reference(outputs);
  GemmOutputs y(outputs);
  DeviceVector<__nv_bfloat16> ordered(weights.matrices.first.has_order ? x.size() : 1);
  fill_normal<<<1024, 256, 0, ctx.stream()>>>(x.data(), x.size(), base_seed(), 1.0f);
  int64_t num_different = 0;
  for (const bool is_gathered : {true, false}) {
    for (int32_t e = 0; e < num_experts; ++e) {
      const int32_t first = begin[e];
      const int32_t rows = begin[e + 1] - first;
      if (rows == 0) continue;
      ReferenceExtras extras = weights.extras(e);
      if (is_gathered) extras.x_rows = x_rows.data() + first;
      const __nv_bfloat16* const its_x = weights.in_order(ctx, e, x, ordered);
      reference_gemm<<<dim3((n + 31) / 32, (rows + 15) / 16), 128, 0, ctx.stream()>>>(
          is_gathered ? its_x : its_x + int64_t{first} * k,
          weights.values.data() + int64_t{e} * n * k, reference.data() + int64_t{first} * n, rows,
          n, k, extras);
      if (is_gathered) {
        add_bias<<<256, 256, 0, ctx.stream()>>>(reference.data() + int64_t{first} * n,
                                                bias.data() + int64_t{e} * n, int64_t{rows} * n, n);
      }
    }
    const ExpertGemmParams p{.expert_begin = expert_begin.data(),
                             .max_rows = num_rows,
                             .x = x.data(),
                             .x_stride = k,
                             .x_rows = is_gathered ? x_rows.data() : nullptr,
                             .num_x_rows = is_gathered ? num_x_rows : num_rows,
                             .weight = weights.matrices,
                             .bias = is_gathered ? bias.data() : nullptr,
                             .y_stride = n,
                             .x_dtype = DType::kBFloat16};
    num_different +=
        count_both(p, y, reference, nullptr, routed, n, outputs - int64_t{routed} * n, format.name);
  }
  EXPECT_EQ(num_different, 0);
  expect_intact_guards(y);
}

// Every width of a tile in every format, tails of N and K, experts without rows, more experts than
// a warp has lanes, and all rows to one expert.
INSTANTIATE_TEST_SUITE_P(
    Mixtures, ExpertGemm,
    ::testing::Values(
        MixtureCase{kMxfp4, 32, 5760, 2880, 16}, MixtureCase{kMxfp4, 32, 704, 2880, 256},
        MixtureCase{kMxfp4, 32, 704, 2880, 1024}, MixtureCase{kMxfp4, 32, 704, 2880, 8192},
        MixtureCase{kMxfp4, 5, 97, 352, 60}, MixtureCase{kMxfp4, 128, 160, 352, 4000},
        MixtureCase{kMxfp4, 1000, 64, 96, 300},
        MixtureCase{kMxfp4, 33, 96, 96, 500, Routing::kLastExpert},
        MixtureCase{kMxfp4, 32, 320, 2880, 700, Routing::kOneExpert},
        MixtureCase{kMxfp4, 32, 96, 96, 64, Routing::kNobody},
        MixtureCase{kMxfp4, 1, 320, 352, 200}, MixtureCase{kMxfp4Wide, 4, 160, 352, 40},
        MixtureCase{kNvfp4, 128, 1536, 2048, 8}, MixtureCase{kNvfp4, 128, 768, 2048, 512},
        MixtureCase{kNvfp4, 8, 321, 640, 900}, MixtureCase{kNvfp4, 5, 97, 352, 60},
        MixtureCase{kNvfp4, 4, 320, 352, 600, Routing::kOneExpert},
        MixtureCase{kNvfp4Wide, 4, 160, 352, 40}, MixtureCase{kPlain, 32, 704, 2880, 100},
        MixtureCase{kPlain, 8, 97, 328, 200}, MixtureCase{kPlain, 4, 320, 136, 600},
        MixtureCase{kPlain, 16, 97, 328, 300, Routing::kOneExpert},
        MixtureCase{kFp8Row, 8, 321, 656, 50}, MixtureCase{kFp8Row, 4, 321, 656, 900},
        MixtureCase{kFp8Block, 8, 321, 656, 50}, MixtureCase{kFp8Block, 8, 321, 656, 200},
        MixtureCase{kFp8Block, 4, 321, 656, 900}, MixtureCase{kFp8BlockPowers, 8, 321, 656, 200},
        MixtureCase{kInt4, 128, 1536, 2048, 8}, MixtureCase{kInt4Zeros, 128, 768, 2048, 512},
        MixtureCase{kInt4Zeros, 8, 321, 640, 900}, MixtureCase{kInt4Narrow, 5, 97, 352, 60},
        MixtureCase{kInt4Narrow, 4, 320, 352, 600, Routing::kOneExpert},
        MixtureCase{kInt4Ordered, 8, 97, 352, 100}, MixtureCase{kInt4Ordered, 3, 64, 96, 200}));

}  // namespace
}  // namespace paceline::testing
