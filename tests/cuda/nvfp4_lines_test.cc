// SPDX-License-Identifier: Apache-2.0
//
// The products of nvfp4 on a GPU multiply by bfloat16 numbers that a line through two rounded
// scales gives (cuda/gemm/nvfp4_elements.cuh). They are those of the definition, whatever the
// scale. PACELINE_TEST_LEVEL=3 tries every mantissa of a scale.

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ios>

#include "base/float_types.h"
#include "gemm/nvfp4_elements.cuh"
#include "support/packed_weights.h"
#include "support/seed.h"

namespace paceline::testing {
namespace {

// The line of a scale gives every element the value of the definition. Rounding does not depend on
// the exponent of a scale, so all mantissas are tried with a few: the limits and what lies between.
TEST(Nvfp4Lines, GiveTheValuesOfTheDefinition) {
  // A word whose elements are `low` in row g and `high` in row g + 8.
  const auto word_of = [](int32_t low, int32_t high) {
    uint32_t word = 0;
    for (const size_t is_odd : {0, 1}) {
      for (const size_t i : {0, 1, 2, 3}) {
        word |= kMxfp4Words[i][is_odd].of[static_cast<size_t>(i % 2 == 0 ? low : high)];
      }
    }
    return word;
  };
  int64_t num_wrong = 0;
  const auto check = [&](float scale, int32_t element) {
    const Nvfp4Line line = nvfp4_line(scale);
    const Nvfp4Line negative = nvfp4_line(-scale);
    uint32_t a[4];
    cuda::convert_nvfp4(word_of(element, element ^ 8),
                        {.slope = line.slope | uint32_t{negative.slope} << 16,
                         .offset = line.offset | uint32_t{negative.offset} << 16},
                        a);
    const uint32_t expected = float_to_bf16(e2m1_to_float(static_cast<uint8_t>(element)) * scale);
    for (const uint32_t pair : a) {
      for (const uint32_t got : {pair & 0xffffu, pair >> 16}) {
        // Zeros may have either sign.
        if (got == expected || ((got | expected) & 0x7fffu) == 0) continue;
        if (++num_wrong > 4) continue;
        ADD_FAILURE() << e2m1_to_float(static_cast<uint8_t>(element)) << " * " << std::hexfloat
                      << scale << " is " << bf16_to_float(static_cast<uint16_t>(got))
                      << "; expected " << bf16_to_float(static_cast<uint16_t>(expected));
      }
    }
  };
  const int32_t step = test_level() >= 3 ? 1 : 61;
  for (int32_t mantissa = 0; mantissa < 1 << 23; mantissa += step) {
    const float scale = 1.0f + std::ldexp(static_cast<float>(mantissa), -23);
    for (const int exponent : {-125, 0, 124}) {
      for (int32_t element = 0; element < 16; ++element) {
        check(std::ldexp(scale, exponent), element);
      }
    }
  }
  // Around every number where the bfloat16 of the scale, or of 1.5 times it, changes.
  for (int32_t i = 0; i < 1 << 9; ++i) {
    const float middle = 1.0f + std::ldexp(static_cast<float>(i), -9);
    for (const float at : {middle, middle / 1.5f, 2 * middle / 1.5f}) {
      float scale = std::nextafter(std::nextafter(at, 0.0f), 0.0f);
      for (int32_t j = 0; j < 5; ++j, scale = std::nextafter(scale, 4.0f)) {
        for (int32_t element = 0; element < 16; ++element) check(scale, element);
      }
    }
  }
  for (const float scale : {0.0f, 0x1p-125f, 0x1p125f, -0x1p125f}) {
    for (int32_t element = 0; element < 16; ++element) check(scale, element);
  }
  EXPECT_EQ(num_wrong, 0);
}

}  // namespace
}  // namespace paceline::testing
