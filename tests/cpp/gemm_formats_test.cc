// SPDX-License-Identifier: Apache-2.0
// Products on the CPU whose weights have scales: the bits of the plain product on dequantised
// weights where those are exact, a reference in double precision elsewhere. And gemm_columns: any
// piece of a product, of any rows, has the bits of gemm.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "base/float_types.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/dequantize.h"
#include "ops/dequantize_x86.h"
#include "ops/fp8_dot_tile.h"
#include "ops/gemm_columns.h"
#include "ops/ops.h"
#include "support/op_checks.h"
#include "support/scaled_weights.h"

namespace paceline::testing {
namespace {

// --- The formats' values ------------------------------------------------------------------------

// sign * 2^(exponent - bias) * (1 + mantissa / 2^bits), or without the 1 where exponent is 0.
double value_by_definition(int bits, int exponent_bits, int mantissa_bits, int bias) {
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const double sign = (bits >> (mantissa_bits + exponent_bits) & 1) != 0 ? -1.0 : 1.0;
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  return exponent == 0 ? sign * std::ldexp(fraction, 1 - bias)
                       : sign * std::ldexp(1 + fraction, exponent - bias);
}

void expect_value(float got, double want, int bits) {
  EXPECT_EQ(got, want) << "bits " << bits;
  EXPECT_EQ(std::signbit(got), std::signbit(want)) << "bits " << bits;
}

TEST(FloatTypes, EveryBitPatternHasItsValue) {
  for (int bits = 0; bits < 256; ++bits) {
    const float e4m3 = e4m3_to_float(static_cast<uint8_t>(bits));
    const float e8m0 = e8m0_to_float(static_cast<uint8_t>(bits));
    const float e2m1 = e2m1_to_float(static_cast<uint8_t>(bits));
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(e4m3)) << "bits " << bits;
    } else {
      expect_value(e4m3, value_by_definition(bits, 4, 3, 7), bits);
    }
    if (bits == 255) {
      EXPECT_TRUE(std::isnan(e8m0));
    } else {
      expect_value(e8m0, std::ldexp(1.0, bits - 127), bits);
    }
    expect_value(e2m1, value_by_definition(bits & 15, 2, 1, 1), bits);
  }
  EXPECT_EQ(e4m3_to_float(0x7e), 448.0f);
  EXPECT_EQ(e2m1_to_float(0x0f), -6.0f);
}

// The rows of `matrix` as floats; `guard` elements behind them stay as they are.
template <class Value>
std::vector<float> rows_of(const WeightMatrix& matrix) {
  const auto size = static_cast<size_t>(matrix.n) * static_cast<size_t>(matrix.k);
  std::vector<Value> values(size + 1, Value{77});
  dequantize_rows(matrix, 0, matrix.n, values.data(), nullptr);
  EXPECT_EQ(values[size], Value{77});
  std::vector<float> floats(size);
  for (size_t i = 0; i < size; ++i) {
    if constexpr (std::is_same_v<Value, float>) {
      floats[i] = values[i];
    } else {
      floats[i] = bf16_to_float(values[i]);
    }
  }
  return floats;
}

void expect_rows(const WeightMatrix& matrix, const std::vector<float>& want) {
  WeightMatrix as_bf16 = matrix;
  as_bf16.dtype = DType::kBFloat16;
  for (const std::vector<float>& got : {rows_of<float>(matrix), rows_of<uint16_t>(as_bf16)}) {
    for (size_t i = 0; i < want.size(); ++i) {
      if (std::isnan(want[i])) {
        ASSERT_TRUE(std::isnan(got[i])) << "element " << i;
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(want[i]))
            << "element " << i << ": " << got[i] << ", expected " << want[i];
      }
    }
  }
}

// Every element under every scale, of which the largest give infinities and the smallest subnormal
// values.
TEST(Dequantize, EveryMxfp4Value) {
  constexpr int32_t kRows = 256;
  std::vector<uint8_t> data;
  std::vector<uint8_t> scales(kRows);
  std::vector<float> want;
  std::iota(scales.begin(), scales.end(), uint8_t{0});
  for (int scale = 0; scale < kRows; ++scale) {
    for (int element = 0; element < 32; element += 2) {
      const int low = element * 7 % 16;
      const int high = (element + 1) * 7 % 16;
      data.push_back(static_cast<uint8_t>(low | high << 4));
      for (const int bits : {low, high}) {
        want.push_back(e2m1_to_float(static_cast<uint8_t>(bits)) *
                       e8m0_to_float(static_cast<uint8_t>(scale)));
      }
    }
  }
  WeightMatrix matrix = plain_matrix(data.data(), kRows, 32, DType::kFloat32);
  matrix.format = WeightFormat::kMxfp4;
  matrix.scales = reinterpret_cast<const std::byte*>(scales.data());
  expect_rows(matrix, want);
}

// Every element under scales that are rounded up, down and to even, of the whole range.
TEST(Dequantize, EveryNvfp4Value) {
  constexpr int32_t kCols = 64;
  std::vector<uint8_t> data;
  std::vector<float> scales;
  std::vector<float> want;
  for (int row = 0; row <= 250; ++row) {
    for (int column = 0; column < kCols; column += 2) {
      if (column % kNvfp4Columns == 0) {
        const float mantissa =
            1.0f + 0x1p-23f * static_cast<float>((row * 977 + column) * 6151 % (1 << 23));
        const float magnitude =
            std::ldexp(row % 5 == 0 ? 1.0f : mantissa, std::min(row - 125, 124));
        scales.push_back(row % 3 == 0 ? -magnitude : row % 7 == 0 ? 0.0f : magnitude);
      }
      const int low = (column * 7 + row) % 16;
      const int high = (column * 5 + 3 + row) % 16;
      data.push_back(static_cast<uint8_t>(low | high << 4));
      for (const int bits : {low, high}) {
        want.push_back(bf16_to_float(
            float_to_bf16(e2m1_to_float(static_cast<uint8_t>(bits)) * scales.back())));
      }
    }
  }
  WeightMatrix matrix = plain_matrix(data.data(), 251, kCols, DType::kFloat32);
  matrix.format = WeightFormat::kNvfp4;
  matrix.scale_rows = 1;
  matrix.scale_cols = kNvfp4Columns;
  matrix.scales = reinterpret_cast<const std::byte*>(scales.data());
  expect_rows(matrix, want);
}

// Every element under every power of two that gives a bfloat16, normal or not; and without scales.
// The rows are of odd lengths and not aligned.
TEST(Dequantize, EveryFp8Value) {
  constexpr int32_t kCols = 255;
  for (const bool is_exact : {true, false}) {
    std::vector<uint8_t> data;
    std::vector<float> scales;
    std::vector<float> want;
    for (int exponent = -124; exponent <= 119; ++exponent) {
      scales.push_back(std::ldexp(1.0f, exponent));
      for (int element = 0; element < kCols; ++element) {
        const auto bits = static_cast<uint8_t>(element + exponent + 124);
        data.push_back(bits);
        want.push_back(e4m3_to_float(bits) * (is_exact ? scales.back() : 1.0f));
      }
    }
    WeightMatrix matrix =
        plain_matrix(data.data(), static_cast<int32_t>(scales.size()), kCols, DType::kFloat32);
    matrix.format = WeightFormat::kFp8;
    matrix.scale_rows = 1;
    matrix.scale_cols = kCols;
    matrix.has_exact_scales = is_exact;
    matrix.scales = reinterpret_cast<const std::byte*>(scales.data());
    expect_rows(matrix, want);
  }
}

// Every code with every zero point, under scales of both dtypes that are rounded up, down and to
// even, and whose signs differ; every row has another scale.
TEST(Dequantize, EveryInt4Value) {
  constexpr int32_t kCols = 64;
  for (const DType scale_dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int32_t group : {32, kCols}) {
      std::vector<uint8_t> data;
      std::vector<uint8_t> zeros;
      std::vector<float> scales;
      std::vector<int> codes;
      const int32_t rows = 16 * 40;
      for (int32_t row = 0; row < rows; ++row) {
        for (int32_t column = 0; column < kCols; column += 2) {
          codes.push_back((column * 7 + row) % 16);
          codes.push_back((column * 5 + 3 + row) % 16);
          data.push_back(static_cast<uint8_t>(codes[codes.size() - 2] | codes.back() << 4));
        }
        for (int32_t begin = 0; begin < kCols; begin += group) {
          zeros.push_back(static_cast<uint8_t>((row + begin / group) % 16));
          const float magnitude = std::ldexp(1.0f + 0.0009765625f * static_cast<float>(row),
                                             -16 + row % 20 + begin / group);
          scales.push_back(row % 3 == 0 ? -magnitude : magnitude);
        }
      }
      const TypedArray typed = typed_array(scale_dtype, scales);
      for (const bool has_zeros : {true, false}) {
        std::vector<float> want;
        for (size_t i = 0; i < codes.size(); ++i) {
          const size_t its = i / static_cast<size_t>(group);
          const int difference = codes[i] - (has_zeros ? zeros[its] : 8);
          want.push_back(
              bf16_to_float(float_to_bf16(static_cast<float>(difference) * typed.rounded[its])));
        }
        WeightMatrix matrix = plain_matrix(data.data(), rows, kCols, DType::kFloat32);
        matrix.format = WeightFormat::kInt4;
        matrix.scale_rows = 1;
        matrix.scale_cols = group;
        matrix.scale_dtype = scale_dtype;
        matrix.scales = typed.bytes.data();
        matrix.has_zeros = has_zeros;
        matrix.zeros = has_zeros ? zeros.data() : nullptr;
        expect_rows(matrix, want);
      }
    }
  }
}

#if defined(__x86_64__)
TEST(Dequantize, BytesOfEveryFp8Value) {
  for (int scale = kMinFp8Exponent + 127; scale <= kMaxFp8Exponent + 127; ++scale) {
    for (int bits = 0; bits < 128; ++bits) {
      const Fp8Bytes& bytes = kFp8Bytes[static_cast<size_t>(scale)];
      const auto at = static_cast<size_t>(bits);
      const float got = bf16_to_float(static_cast<uint16_t>(bytes.lows[at] | bytes.highs[at] << 8));
      const float want = e4m3_to_float(static_cast<uint8_t>(bits)) * std::ldexp(1.0f, scale - 127);
      ASSERT_TRUE(got == want || (std::isnan(got) && std::isnan(want)))
          << "bits " << bits << " scale 2^" << scale - 127 << ": " << got << ", expected " << want;
    }
  }
}

// Processors with AVX-512 do not run the code for AVX2 otherwise.
TEST(Dequantize, Avx2HasTheSameBits) {
  if (best_isa() == Isa::kBaseline) return;
  TRACE_SEED();
  Random random(11);
  constexpr int32_t kCols = 320;
  for (const ScaledFormat& format : exact_formats()) {
    if (format.format == WeightFormat::kFp8) continue;
    const ScaledArray array = scaled_array(random, format, 40, kCols, DType::kBFloat16);
    const WeightMatrix& m = array.matrix;
    std::vector<uint16_t> want(40 * kCols);
    dequantize_rows(m, 0, m.n, want.data(), nullptr);
    std::vector<uint16_t> got(want.size());
    for (int64_t row = 0; row < m.n; ++row) {
      const uint8_t* const data = array.data.data() + row * m.row_bytes();
      const int64_t first = row * m.num_scale_cols();
      uint16_t* const to = got.data() + row * kCols;
      if (m.format == WeightFormat::kMxfp4) {
        mxfp4_row_avx2(data, reinterpret_cast<const uint8_t*>(m.scales) + first, to, kCols / 32,
                       nullptr);
      } else if (m.format == WeightFormat::kNvfp4) {
        nvfp4_row_avx2(data, reinterpret_cast<const float*>(m.scales) + first, to, kCols / 32,
                       nullptr);
      } else {
        std::vector<float> scales(static_cast<size_t>(m.num_scale_cols()));
        int4_scales(m, first, static_cast<int32_t>(scales.size()), scales.data());
        int4_row_avx2(data, scales.data(), m.has_zeros ? m.zeros + first : nullptr, to,
                      static_cast<int32_t>(scales.size()), m.scale_cols / 32, nullptr);
      }
    }
    EXPECT_EQ(got, want) << name_of(format);
  }
}
#endif

// --- Products -----------------------------------------------------------------------------------

struct Product {
  int32_t num_rows;
  const std::vector<float>* x;
  const std::vector<float>* bias;  // or null
  int num_threads;
};

std::vector<float> product(const Product& p, const WeightMatrix& weight) {
  std::vector<float> y(static_cast<size_t>(p.num_rows) * static_cast<size_t>(weight.n));
  CpuContext ctx = context_of(p.num_threads);
  gemm(ctx, {.num_rows = &p.num_rows,
             .max_rows = p.num_rows,
             .x = p.x->data(),
             .x_stride = weight.k,
             .weight = weight,
             .bias = p.bias == nullptr ? nullptr : p.bias->data(),
             .y = y.data(),
             .y_stride = weight.n});
  return y;
}

struct Shape {
  int32_t n;
  int32_t k;
};

// Tails of 16 and 32 columns, narrow tiles, several threads, several blocks of rows, and the widths
// of GPT-OSS.
std::vector<Shape> shapes_of(const ScaledFormat& format) {
  if (format.format != WeightFormat::kFp8) {
    return {{1, 32}, {7, 64}, {37, 96}, {130, 160}, {272, 2880}, {24, 5024}};
  }
  return {{1, 1}, {7, 33}, {37, 127}, {130, 160}, {131, 300}, {272, 2880}, {24, 5000}};
}

TEST(GemmFormats, ExactScalesHaveTheBitsOfDequantisedWeights) {
  TRACE_SEED();
  Random random(3);
  for (const ScaledFormat& format : exact_formats()) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const Shape& shape : shapes_of(format)) {
        const ScaledArray array = scaled_array(random, format, shape.n, shape.k, dtype);
        const TypedArray plain = dequantized(array);
        const WeightMatrix plain_weight = plain_matrix(plain.bytes.data(), shape.n, shape.k, dtype);
        const std::vector<float> bias = random.normals(shape.n);
        for (const int32_t num_rows : {1, 2, 3, 5, 8, 13, 65}) {
          const std::vector<float> x = random.normals(int64_t{num_rows} * shape.k);
          const Product p = {num_rows, &x, num_rows % 2 == 0 ? &bias : nullptr,
                             1 + random.below(3)};
          const std::vector<float> got = product(p, array.matrix);
          const std::vector<float> ordered_x = in_order(array, x);
          const Product ordered = {num_rows, &ordered_x, p.bias, p.num_threads};
          const std::vector<float> want = product(ordered, plain_weight);
          ASSERT_TRUE(same_bits(got.data(), want.data(), static_cast<int64_t>(got.size())))
              << name_of(format) << " " << dtype_name(dtype) << " rows " << num_rows << " n "
              << shape.n << " k " << shape.k << " threads " << p.num_threads;
        }
      }
    }
  }
}

TEST(GemmFormats, OtherScalesMultiplySums) {
  TRACE_SEED();
  Random random(4);
  for (const ScaledFormat& format : inexact_formats()) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const Shape& shape : shapes_of(format)) {
        const int32_t num_rows = 7;
        const ScaledArray array = scaled_array(random, format, shape.n, shape.k, dtype);
        const std::vector<float> bias = random.normals(shape.n);
        // Rounded, because some machines round x to bfloat16.
        const std::vector<float> x =
            typed_array(DType::kBFloat16, random.normals(int64_t{num_rows} * shape.k)).rounded;
        const std::vector<float> got =
            product({num_rows, &x, &bias, 1 + random.below(3)}, array.matrix);
        for (int32_t row = 0; row < num_rows; ++row) {
          for (int32_t column = 0; column < shape.n; ++column) {
            double want = bias[static_cast<size_t>(column)];
            double magnitude = std::fabs(want);
            for (int32_t i = 0; i < shape.k; ++i) {
              const double term = x[static_cast<size_t>(row * shape.k + i)] *
                                  array.values[static_cast<size_t>(int64_t{column} * shape.k + i)];
              want += term;
              magnitude += std::fabs(term);
            }
            const double bound = (shape.k / 16.0 + 8.0) * kFloatEpsilon * magnitude;
            ASSERT_TRUE(is_near(got[static_cast<size_t>(row * shape.n + column)], want, bound, 0.0))
                << name_of(format) << " " << dtype_name(dtype) << " n " << shape.n << " k "
                << shape.k << " row " << row << " column " << column;
          }
        }
      }
    }
  }
}

// Matrices whose tiles of four rows, or of one row, are all that the scratch memory holds.
TEST(GemmFormats, WideMatrices) {
  TRACE_SEED();
  Random random(5);
  const ScaledFormat format = {WeightFormat::kFp8, 128, 128, true};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int32_t k : {43648, 43680, 70016, kMaxScaledColumns}) {
      const ScaledArray array = scaled_array(random, format, 5, k, dtype);
      const TypedArray plain = dequantized(array);
      const std::vector<float> x = random.normals(int64_t{3} * k);
      const Product p = {3, &x, nullptr, 1};
      EXPECT_EQ(product(p, array.matrix), product(p, plain_matrix(plain.bytes.data(), 5, k, dtype)))
          << dtype_name(dtype) << " k " << k;
    }
  }
}

// Pieces of a product, of rows in any order and any number, have the bits that gemm gives each row
// alone.
TEST(GemmColumns, AnyPieceHasTheBitsOfGemm) {
  TRACE_SEED();
  Random random(6);
  std::vector<ScaledFormat> formats = exact_formats();
  for (const ScaledFormat& format : inexact_formats()) formats.push_back(format);
  formats.push_back({WeightFormat::kPlain});
  CpuContext ctx = context_of(2);
  const GemmScratch scratch(ctx);
  const CpuContext no_pool;
  const GemmScratch own_scratch(no_pool);
  for (const ScaledFormat& format : formats) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      // In float32, rows of 24,000 columns are too long to be gathered by more than one.
      for (const Shape& shape : {Shape{67, 96}, {50, 2880}, {5, 24000}}) {
        ScaledArray array;
        TypedArray plain;
        WeightMatrix weight;
        if (format.format == WeightFormat::kPlain) {
          plain = typed_array(dtype, random.normals(int64_t{shape.n} * shape.k, 0.05f));
          weight = plain_matrix(plain.bytes.data(), shape.n, shape.k, dtype);
        } else {
          array = scaled_array(random, format, shape.n, shape.k, dtype);
          weight = array.matrix;
        }
        constexpr int32_t kXRows = 9;
        const std::vector<float> bias = random.normals(shape.n);
        const std::vector<float> x = random.normals(int64_t{kXRows} * shape.k);
        std::vector<std::vector<float>> alone;  // of each row of x
        for (int32_t row = 0; row < kXRows; ++row) {
          const std::vector<float> row_x(x.begin() + row * shape.k,
                                         x.begin() + (row + 1) * shape.k);
          alone.push_back(product({1, &row_x, &bias, 1}, weight));
        }
        for (const int32_t num_rows : {1, 2, 5, 13, 30}) {
          std::vector<int32_t> x_rows(static_cast<size_t>(num_rows));
          for (int32_t& row : x_rows) row = random.below(kXRows);
          std::vector<float> y(static_cast<size_t>(num_rows * shape.n), kNan);
          const GemmColumns columns = {.num_rows = num_rows,
                                       .x = x.data(),
                                       .x_stride = shape.k,
                                       .x_rows = x_rows.data(),
                                       .weight = weight,
                                       .bias = bias.data(),
                                       .y = y.data(),
                                       .y_stride = shape.n};
          const int32_t cut = random.below(shape.n + 1);
          gemm_columns(columns, 0, cut, scratch.of_thread());
          gemm_columns(columns, cut, shape.n, own_scratch.of_thread());
          for (int32_t row = 0; row < num_rows; ++row) {
            const std::vector<float>& want =
                alone[static_cast<size_t>(x_rows[static_cast<size_t>(row)])];
            ASSERT_TRUE(same_bits(y.data() + row * shape.n, want.data(), shape.n))
                << name_of(format) << " " << dtype_name(dtype) << " n " << shape.n << " k "
                << shape.k << " row " << row << " of " << num_rows << " cut " << cut;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace paceline::testing
