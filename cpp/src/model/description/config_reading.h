// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads the parts of a decoder description. Every function throws InvalidArgument, which names the
// key, the value seen and the values allowed.

#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/json.h"
#include "model/description/decoder_config.h"

namespace paceline {

// Larger than those of any known model, and small enough that row counts and products of two sizes
// fit the int32 or int64 that holds them.
inline constexpr int64_t kMaxVocab = int64_t{1} << 23;  // sample/logits.h: kMaxTruncatedVocab
inline constexpr int64_t kMaxHidden = int64_t{1} << 20;
inline constexpr int64_t kMaxIntermediate = int64_t{1} << 24;
inline constexpr int64_t kMaxPosition = int64_t{1} << 30;
inline constexpr int64_t kMaxHeads = int64_t{1} << 12;
inline constexpr int64_t kMaxHeadDim = int64_t{1} << 12;
inline constexpr int64_t kMaxPerLayerSize = int64_t{1} << 14;  // times kMaxLayers it fits an int32
inline constexpr int64_t kMaxLayers = 4096;
inline constexpr int64_t kMaxRopes = 256;
inline constexpr int64_t kMaxAuxLayers = 16;
inline constexpr int64_t kMaxDraftBlock = 64;  // rows of a block drafter's block
inline constexpr size_t kMaxNameBytes = 256;
inline constexpr double kMaxFrequency = 1e6;  // times kMaxPosition it is far below FLT_MAX

[[nodiscard]] inline int32_t read_int(const Json& object, std::string_view key, int64_t low,
                                      int64_t high) {
  return static_cast<int32_t>(object.at(key).as_int(low, high));
}

[[nodiscard]] inline float read_float(const Json& number, double low, double high) {
  const double value = number.as_double();
  if (!(value >= low && value <= high)) number.refuse(concat("a number from ", low, " to ", high));
  return static_cast<float>(value);
}

[[nodiscard]] inline float read_finite(const Json& number) {
  constexpr double kMax = std::numeric_limits<float>::max();
  return read_float(number, -kMax, kMax);
}

[[nodiscard]] inline float read_positive(const Json& number) {
  const float value = read_finite(number);
  if (!(value > 0)) number.refuse("a number above 0 that a float32 holds");
  return value;
}

[[nodiscard]] inline float read_cap(const Json& number) {
  const float value = read_finite(number);
  if (value < 0) number.refuse("0 for no cap, or a number above 0");
  return value;
}

[[nodiscard]] inline bool read_switch(const Json& object, std::string_view key) {
  const std::optional<Json> value = object.find(key);
  return value && value->as_bool();
}

// 'silu' and 'gelu_tanh', and in an MLP 'swiglu_oai' and 'clamped_silu'.
[[nodiscard]] Activation read_activation(const Json& activation, bool allows_limits);

// The format under `key` of a matrix, which has as many columns as `width` says; plain without the
// key. Of experts: one tensor has the matrices of all experts, which cannot be fp8.
struct Width {
  std::string_view name;
  int64_t columns;
};
[[nodiscard]] MatrixFormat read_format(const Json& object, std::string_view key, const Width& width,
                                       bool is_of_experts);

// The index of a rope with a frequency for each pair of `width` elements; `name` is that of the
// width.
[[nodiscard]] int32_t read_rope_index(const Json& json, const std::vector<RopeConfig>& ropes,
                                      int32_t width, std::string_view name,
                                      bool allows_interleaved);

// The next layer of `config`, whose other keys but the layers after it have been read.
[[nodiscard]] LayerConfig read_layer(const Json& json, const DecoderConfig& config);

// `hidden` and `vocab_size` are those of the draft head.
[[nodiscard]] DrafterConfig read_drafter(const Json& json, int32_t hidden, int32_t vocab_size);

}  // namespace paceline
