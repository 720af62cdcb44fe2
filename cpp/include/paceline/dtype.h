// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include <paceline/export.h>

namespace paceline {

// Element types of weights and caches. Integers occur only in tables of token ids.
enum class DType : uint8_t { kFloat32, kBFloat16, kFloat16, kInt32, kInt64 };

// Bytes of one element.
[[nodiscard]] constexpr int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
  }
  return 0;
}

// "float32", "bfloat16", "float16", "int32" or "int64".
[[nodiscard]] PACELINE_API std::string_view dtype_name(DType dtype);

// "float32", "bfloat16" or "float16" as a DType; throws InvalidArgument for any other name.
[[nodiscard]] PACELINE_API DType parse_dtype(std::string_view name);

}  // namespace paceline
