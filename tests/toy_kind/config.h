// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "kv/kv_layout.h"
#include "model/description/matrix_format.h"

namespace paceline {

struct DecoderConfig;

// The smallest kind of attention: one matrix projects queries, keys and values of heads that are
// together as wide as the residual stream, and the heads are the output, without a second matrix.
// No model has it; it shows how many files a kind needs.
struct ToyAttention {
  static constexpr std::array<std::string_view, 1> kNames = {"toy"};
  static constexpr bool reads_target = false;
  static constexpr bool kPicksRows = false;
  static constexpr bool kWritesContext = false;

  int32_t num_heads = 0;
  int32_t head_dim = 0;  // even; num_heads * head_dim is DecoderConfig::hidden
  int32_t rope = 0;      // index into DecoderConfig::ropes
  MatrixFormat m;

  [[nodiscard]] static ToyAttention read(const Json& json, const DecoderConfig& config);
  [[nodiscard]] constexpr int64_t output_width() const { return int64_t{num_heads} * head_dim; }
  [[nodiscard]] constexpr int64_t projected_width() const { return 3 * output_width(); }
  void append_stores(std::vector<KvLayerShape>& shapes) const;
  [[nodiscard]] static bool writes_context() { return false; }
  [[nodiscard]] static bool scores_entries() { return false; }
  [[nodiscard]] static std::string unsupported_on_gpu() { return {}; }
};

}  // namespace paceline
