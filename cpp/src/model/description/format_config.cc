// SPDX-License-Identifier: Apache-2.0

// The formats of matrices in a decoder description.

#include <array>
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

}  // namespace

MatrixFormat read_format(const Json& object, std::string_view key, const Width& width,
                         bool is_of_experts) {
  const std::optional<Json> json = object.find(key);
  if (!json) return {};
  const Json name = json->at("format");
  MatrixFormat format;
  if (name.as_string() == "mxfp4") {
    format.format = WeightFormat::kMxfp4;
    constexpr std::array<std::string_view, 1> kKeys = {"format"};
    json->check_keys(kKeys);
  } else if (name.as_string() == "fp8" && !is_of_experts) {
    format.format = WeightFormat::kFp8;
    constexpr std::array<std::string_view, 2> kKeys = {"format", "scales"};
    constexpr std::array<std::string_view, 1> kOptional = {"exact_scales"};
    json->check_keys(kKeys, kOptional);
    format.scales = read_scales(json->at("scales"));
    format.has_exact_scales = read_switch(*json, "exact_scales");
  } else {
    name.refuse(is_of_experts ? "'mxfp4'" : "'mxfp4', 'fp8'");
  }
  if (width.columns % kMxfp4Columns != 0) {
    name.refuse(concat("a format only where ", width.name, " is a multiple of ", kMxfp4Columns,
                       "; it is ", width.columns));
  }
  if (width.columns > kMaxScaledColumns) {
    name.refuse(concat("a format only where ", width.name, " is at most ", kMaxScaledColumns,
                       "; it is ", width.columns));
  }
  return format;
}

}  // namespace paceline
