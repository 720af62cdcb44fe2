// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include <paceline/export.h>

namespace paceline {

// Element types of weights and caches.
enum class DType : uint8_t { kFloat32, kBFloat16, kFloat16 };

// Bytes of one element.
[[nodiscard]] constexpr int64_t dtype_bytes(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : 2;
}

// "float32", "bfloat16" or "float16".
[[nodiscard]] PACELINE_API std::string_view dtype_name(DType dtype);

// The inverse of dtype_name; throws InvalidArgument that lists the names.
[[nodiscard]] PACELINE_API DType parse_dtype(std::string_view name);

}  // namespace paceline
