// SPDX-License-Identifier: Apache-2.0
#pragma once

// The values of weights that are checked: numbers that must be finite; scales, which values of them
// are allowed, and which make products exact.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <paceline/dtype.h>

#include "device/device_memory.h"
#include "model/weights/weight_layout.h"

namespace paceline {

// All of these throw InvalidArgument, which names the tensor and the index. `source` is in host
// memory, and its first value is element `first` of the tensor.

// Refuses numbers that are NaN or infinite.
void check_finite(const NamedWeight& named, int64_t first, const SourceMatrix& source, DType dtype);

// Refuses scales that are NaN.
void check_mxfp4_scales(const NamedWeight& named, int64_t first, std::span<const std::byte> scales);
void check_mxfp4_scales(const NamedWeight& named, int64_t first, const SourceMatrix& source);

// Refuses scales that a value of a bfloat16 overflows or underflows with.
void check_nvfp4_scales(const NamedWeight& named, int64_t first, const SourceMatrix& source);

// Writes scales to where they lie in the arena, [arena_rows, scale_cols]. Refuses those that are
// NaN or infinite.
void read_fp8_scales(const NamedWeight& named, int64_t first, const SourceMatrix& source,
                     DType dtype, std::span<float> scales);

// Writes the scales, zero points or orders of int4 (WeightKind) to where they lie in the arena,
// from `first` on. Refuses scales that are NaN or infinite, zero points above 15, and orders that
// are no permutation of the columns.
void read_int4_bytes(const NamedWeight& named, int64_t first, const SourceMatrix& source,
                     DType dtype, std::span<std::byte> bytes);

// Whether every scale is a power of two whose product with any element but zero is a normal
// bfloat16.
[[nodiscard]] bool are_exact_scales(std::span<const float> scales);

}  // namespace paceline
