// SPDX-License-Identifier: Apache-2.0
#pragma once

// The arrays of a rotary embedding, for op cases.

#include <cmath>
#include <cstdint>
#include <utility>

#include "ops/latent.h"
#include "support/op_cases.h"
#include "support/row_values.h"
#include "support/store_arrays.h"

namespace paceline::testing {

struct RopeArrays {
  // Of `width` rotated elements: the positions of rows, both ends among them and 0 for inert rows,
  // and tables of all positions and of as many more as the offset.
  RopeArrays(OpInstance& op, const Rows& rows, uint64_t seed, int32_t width, int32_t num_positions,
             int32_t offset)
      : position_offset(offset) {
    positions = op.add(row_ints<int32_t>("positions", rows, [&](int64_t id) -> int32_t {
      if (id < 2) return id == 0 ? 0 : num_positions - 1;
      return is_inert(id) ? 0 : static_cast<int32_t>(id_hash(seed, id) % num_positions);
    }));
    const int64_t half = width / 2;
    const int64_t length = num_positions + offset;
    const auto table = [&](const char* name, bool is_sin) {
      const auto fill = [=](float* to) {
        for (int64_t position = 0; position < length; ++position) {
          for (int64_t i = 0; i < half; ++i) {
            const double exponent = -static_cast<double>(i) / static_cast<double>(half);
            const double angle = static_cast<double>(position) * std::pow(10000.0, exponent);
            *to++ = static_cast<float>(is_sin ? std::sin(angle) : std::cos(angle));
          }
        }
      };
      OpArray angles = float_array(name, Element::kF32, Element::kF32, length * half, fill);
      angles.is_constant = true;
      return op.add(std::move(angles));
    };
    cos = table("cos", false);
    sin = table("sin", true);
  }
  [[nodiscard]] LatentRope at(const Addresses& at, bool is_interleaved) const {
    return {.positions = at.get<int32_t>(positions),
            .cos = at.get<float>(cos),
            .sin = at.get<float>(sin),
            .position_offset = position_offset,
            .is_interleaved = is_interleaved};
  }

  int32_t position_offset;
  Handle positions;
  Handle cos;
  Handle sin;
};

}  // namespace paceline::testing
