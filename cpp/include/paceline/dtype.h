// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include <paceline/export.h>

namespace paceline {

// Element types of weights and caches. kInt32 and kInt64 occur only in tables of token ids; kUInt8
// and kFloat8E4M3 only in tensors of weights that have scales (mxfp4, fp8), as they are stored.
enum class DType : uint8_t {
  kFloat32,
  kBFloat16,
  kFloat16,
  kInt32,
  kInt64,
  kUInt8,
  kFloat8E4M3,  // no infinity; 0x7f and 0xff are NaN
};

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
    case DType::kUInt8:
    case DType::kFloat8E4M3:
      return 1;
  }
  return 0;
}

// "float32", "bfloat16", "float16", "int32", "int64", "uint8" or "float8_e4m3".
[[nodiscard]] PACELINE_API std::string_view dtype_name(DType dtype);

// "float32", "bfloat16" or "float16" as a DType; throws InvalidArgument for any other name.
[[nodiscard]] PACELINE_API DType parse_dtype(std::string_view name);

}  // namespace paceline
