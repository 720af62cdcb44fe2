// SPDX-License-Identifier: Apache-2.0

// The formats of matrices in a decoder description.

#include <array>
#include <limits>
#include <optional>

#include "model/description/config_reading.h"

namespace paceline {
namespace {

[[nodiscard]] Fp8Scales read_scales(const Json& json) {
  if (json.kind() == JsonKind::kString) {
    if (json.as_string() == "tensor") return Fp8Scales::kTensor;
    if (json.as_string() == "row") return Fp8Scales::kRow;
  } else if (json.kind() == JsonKind::kList && json.size() == 2) {
    for (const Json& size : json.elements()) {
      static_cast<void>(size.as_int(kFp8Block, kFp8Block));
    }
    return Fp8Scales::kBlock;
  }
  json.refuse(concat("'tensor', 'row', [", kFp8Block, ", ", kFp8Block, "]"));
}

// The columns that share a scale of int4; 0: those of a row.
[[nodiscard]] int32_t read_group(const Json& json, const Width& width) {
  if (json.kind() == JsonKind::kString && json.as_string() == "row") return 0;
  const bool is_number = json.kind() == JsonKind::kNumber;
  const int64_t group = is_number ? json.as_int(1, std::numeric_limits<int32_t>::max()) : 0;
  if (group == 0 || group % kInt4Columns != 0 || width.columns % group != 0) {
    json.refuse(concat("'row', a multiple of ", kInt4Columns, " that divides ", width.name, " (",
                       width.columns, ")"));
  }
  return static_cast<int32_t>(group);
}

}  // namespace

MatrixFormat read_format(const Json& object, std::string_view key, const Width& width,
                         bool is_of_experts) {
  const std::optional<Json> json = object.find(key);
  if (!json) return {};
  const Json name = json->at("format");
  MatrixFormat format;
  if (name.as_string() == "mxfp4" || name.as_string() == "nvfp4") {
    const bool is_mxfp4 = name.as_string() == "mxfp4";
    format.format = is_mxfp4 ? WeightFormat::kMxfp4 : WeightFormat::kNvfp4;
    constexpr std::array<std::string_view, 1> kKeys = {"format"};
    json->check_keys(kKeys);
  } else if (name.as_string() == "fp8" && !is_of_experts) {
    format.format = WeightFormat::kFp8;
    constexpr std::array<std::string_view, 2> kKeys = {"format", "scales"};
    constexpr std::array<std::string_view, 1> kOptional = {"exact_scales"};
    json->check_keys(kKeys, kOptional);
    format.scales = read_scales(json->at("scales"));
    format.has_exact_scales = read_switch(*json, "exact_scales");
  } else if (name.as_string() == "int4") {
    format.format = WeightFormat::kInt4;
    constexpr std::array<std::string_view, 2> kKeys = {"format", "group"};
    constexpr std::array<std::string_view, 2> kOptional = {"has_zeros", "has_order"};
    json->check_keys(kKeys, kOptional);
    format.has_zeros = read_switch(*json, "has_zeros");
    format.has_order = read_switch(*json, "has_order");
  } else {
    name.refuse(is_of_experts ? "'mxfp4', 'nvfp4', 'int4'" : "'mxfp4', 'nvfp4', 'fp8', 'int4'");
  }
  if (width.columns % kMxfp4Columns != 0) {
    name.refuse(concat("a format only where ", width.name, " is a multiple of ", kMxfp4Columns,
                       "; it is ", width.columns));
  }
  if (width.columns > kMaxScaledColumns) {
    name.refuse(concat("a format only where ", width.name, " is at most ", kMaxScaledColumns,
                       "; it is ", width.columns));
  }
  if (format.format == WeightFormat::kInt4) format.group = read_group(json->at("group"), width);
  return format;
}

}  // namespace paceline
