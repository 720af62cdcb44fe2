// SPDX-License-Identifier: Apache-2.0
#include <paceline/dtype.h>

#include "base/boundary.h"
#include "base/check.h"
#include "base/json.h"

namespace paceline {

std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kUInt8:
      return "uint8";
    case DType::kFloat8E4M3:
      return "float8_e4m3";
  }
  return "unknown";
}

DType parse_dtype(std::string_view name) {
  return at_boundary([&] {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      if (name == dtype_name(dtype)) return dtype;
    }
    throw InvalidArgument(
        concat("dtype is ", quoted(name), "; allowed: float32, bfloat16, float16"));
  });
}

}  // namespace paceline
