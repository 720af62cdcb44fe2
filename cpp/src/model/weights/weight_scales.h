// SPDX-License-Identifier: Apache-2.0
#pragma once

// The scales of weights: which values are allowed, and which make products exact.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <paceline/dtype.h>

#include "device/device_memory.h"
#include "model/weights/weight_layout.h"

namespace paceline {

// Throws InvalidArgument, which names the tensor and the index, when a scale is NaN. `first`: the
// element of the tensor that the first of `scales` is.
void check_mxfp4_scales(const NamedWeight& named, int64_t first, std::span<const std::byte> scales);
void check_mxfp4_scales(const NamedWeight& named, int64_t first, const SourceMatrix& source);

// The scales of a tensor in host memory as they lie in the arena, [arena_rows, scale_cols]. Throws
// InvalidArgument, which names the tensor and the index, when a scale is NaN or infinite.
[[nodiscard]] std::vector<float> read_fp8_scales(const NamedWeight& named,
                                                 const SourceMatrix& source, DType dtype);

// Whether every scale is a power of two whose product with any element but zero is a normal
// bfloat16.
[[nodiscard]] bool are_exact_scales(std::span<const float> scales);

}  // namespace paceline
