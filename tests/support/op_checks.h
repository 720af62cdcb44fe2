// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the tests of the CPU ops share: random inputs, arrays in the dtypes of weights, contexts and
// comparisons. PACELINE_SEED overrides the seed of the inputs; failures under TRACE_SEED print it.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include <gtest/gtest.h>
#include <paceline/dtype.h>

#include "base/float_types.h"
#include "base/ordered.h"
#include "device/cpu_context.h"
#include "support/seed.h"

namespace paceline::testing {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr double kFloatEpsilon = 0x1p-24;

// Row counts at which a row must have the bits that it has alone.
inline constexpr int32_t kBatchSizes[] = {1,  2,  3,  4,  5,  7,  8,  9,   16,
                                          17, 31, 32, 33, 63, 64, 65, 128, 256};

inline CpuContext context_of(int num_threads) {
  static std::map<int, ThreadPool> pools;
  return {.num_threads = num_threads,
          .threads = &pools.try_emplace(num_threads, num_threads).first->second};
}

class Random {
 public:
  explicit Random(uint64_t salt) : engine_(base_seed() * 1000003 + salt) {}
  float normal(float scale = 1.0f) { return scale * std::normal_distribution<float>()(engine_); }
  int32_t below(int32_t n) { return static_cast<int32_t>(engine_() % static_cast<uint64_t>(n)); }
  bool one_in(int32_t n) { return below(n) == 0; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int32_t>(values.size()))];
  }
  std::vector<int32_t> tokens(int32_t count, int32_t vocab) {
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (int32_t& token : tokens) token = below(vocab);
    return tokens;
  }
  std::vector<float> normals(int64_t n, float scale = 1.0f) {
    std::vector<float> values(static_cast<size_t>(n));
    for (float& value : values) value = scale * normal();
    return values;
  }
  std::mt19937_64& engine() { return engine_; }

 private:
  std::mt19937_64 engine_;
};

// Values as an array of float32 or bfloat16 bytes; `rounded` is what the array then holds.
struct TypedArray {
  std::vector<std::byte> bytes;
  std::vector<float> rounded;
};

// To the nearest float16, ties to even; of a value whose float16 is finite.
inline uint16_t float_to_fp16(float value) {
  int exponent = 0;
  std::frexp(value, &exponent);
  const int quantum = std::max(exponent - 11, -24);
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(std::fabs(value), -quantum)));
  // Of normal numbers the steps contain the leading bit, which adds 1 to the exponent.
  const int bits = steps + (quantum + 24) * 1024;
  return static_cast<uint16_t>(bits | (std::signbit(value) ? 0x8000 : 0));
}

inline TypedArray typed_array(DType dtype, const std::vector<float>& values) {
  TypedArray array = {
      .bytes = std::vector<std::byte>(values.size() * static_cast<size_t>(dtype_bytes(dtype))),
      .rounded = values};
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kFloat32) {
      std::memcpy(array.bytes.data() + 4 * i, &values[i], 4);
    } else if (dtype == DType::kFloat16) {
      const uint16_t bits = float_to_fp16(values[i]);
      std::memcpy(array.bytes.data() + 2 * i, &bits, 2);
      array.rounded[i] = fp16_to_float(bits);
    } else {
      const uint16_t bits = float_to_bf16(values[i]);
      std::memcpy(array.bytes.data() + 2 * i, &bits, 2);
      array.rounded[i] = bf16_to_float(bits);
    }
  }
  return array;
}

// Absolute or relative, whichever is wider; NaN and infinities must agree exactly.
inline ::testing::AssertionResult is_near(double got, double want, double absolute,
                                          double relative) {
  if (std::isnan(want) || std::isnan(got)) {
    if (std::isnan(want) && std::isnan(got)) return ::testing::AssertionSuccess();
  } else if (got == want ||
             std::fabs(got - want) <= std::max(absolute, relative * std::fabs(want))) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "got " << got << ", want " << want;
}

inline bool same_bits(const float* a, const float* b, int64_t n) {
  return std::memcmp(a, b, static_cast<size_t>(n) * sizeof(float)) == 0;
}

// Same bits; any NaN is like any other.
inline void expect_same(const std::vector<float>& got, const std::vector<float>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t id = 0; id < got.size(); ++id) {
    if (std::isnan(want[id])) {
      EXPECT_TRUE(std::isnan(got[id])) << "id " << id;
    } else {
      EXPECT_EQ(bits_of(got[id]), bits_of(want[id]))
          << "id " << id << ": " << got[id] << ", expected " << want[id];
    }
  }
}

}  // namespace paceline::testing
