// SPDX-License-Identifier: Apache-2.0
#pragma once

// Random values of the arrays of ops whose rows are independent, by the identity of a row.

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "support/op_cases.h"
#include "support/row_arrays.h"

namespace paceline::testing {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr int32_t kMinInt = std::numeric_limits<int32_t>::min();
inline constexpr int32_t kMaxInt = std::numeric_limits<int32_t>::max();

// Purposes of random streams.
enum Purpose : uint64_t {
  kX = 1,
  kWeight,
  kBias,
  kResidual,
  kXWeight,
  kKeys,
  kIndex,
  kNoise,
  kScale,
  kUp,
  kOrdering
};

// Tensor cores cut what they add below the last bit instead of rounding it: half an ulp of bias for
// each of K / 16 steps.
inline constexpr double kTensorCoreBound = 5e-5;

// Most rows are of order one, some are tiny or large.
inline float scale_of_row(int64_t id) { return id % 7 == 3 ? 1e-3f : id % 11 == 5 ? 50.0f : 1.0f; }

inline OpArray normal_rows(std::string name, Element cuda, const Rows& rows, int64_t width,
                           int64_t stride, uint64_t seed, Purpose purpose,
                           bool varies_in_scale = false, Role role = Role::kInput) {
  const auto values = [=](int64_t id, float* to) {
    Stream(seed, purpose, static_cast<uint64_t>(id))
        .fill(to, width, varies_in_scale ? scale_of_row(id) : 1.0f);
  };
  return row_array(std::move(name), Element::kF32, cuda, rows, stride, values, role);
}

inline OpArray normal_constant(std::string name, Element element, int64_t count, uint64_t seed,
                               Purpose purpose, float scale = 1.0f) {
  OpArray array = float_array(std::move(name), element, element, count,
                              [=](float* to) { Stream(seed, purpose).fill(to, count, scale); });
  array.is_constant = true;
  return array;
}

// One integer for each row, by identity.
template <class T, class OfRow>
OpArray row_ints(std::string name, const Rows& rows, const OfRow& of_row) {
  std::vector<T> values(static_cast<size_t>(rows.max_rows), static_cast<T>(of_row(kLeftRowId)));
  for (size_t i = 0; i < rows.ids.size(); ++i) values[i] = static_cast<T>(of_row(rows.ids[i]));
  return int_array<T>(std::move(name), Role::kInput, values);
}

inline uint64_t id_hash(uint64_t seed, int64_t id) {
  return Stream(seed, kIndex, static_cast<uint64_t>(id)).next() >> 1;
}

}  // namespace paceline::testing
