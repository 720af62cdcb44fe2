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
#include "ops/recurrent.h"

namespace paceline {

struct DecoderConfig;

// A recurrent layer of the gated delta rule, in place of attention (Qwen3-Next, Qwen3.5). With
// [u ; z] = in x and [b ; a] = ba x, where u are the channels q, k, v, it is o y with the y of
// ops/recurrent.h. It has no positions, and its KV is a state and the records since.
struct RecurrentAttention {
  static constexpr std::array<std::string_view, 1> kNames = {"gated_delta"};
  static constexpr bool reads_target = false;
  static constexpr bool kPicksRows = false;
  static constexpr bool kWritesContext = false;

  RecurrentShape shape;
  float norm_eps = 0;  // of the gated norm
  MatrixFormat in;     // of q, k, v and z
  MatrixFormat o;

  // Rows of q, k, v and z.
  [[nodiscard]] constexpr int64_t in_rows() const {
    return int64_t{shape.num_channels()} + shape.values_width();
  }
  // Rows of b and a.
  [[nodiscard]] constexpr int64_t ba_rows() const { return int64_t{2} * shape.num_value_heads; }
  // Whether b and a are rows of the same matrix as q, k, v and z. They have no other format than
  // plain, and rows of its output then begin at 16 bytes.
  [[nodiscard]] constexpr bool joins_ba() const {
    return in.format == WeightFormat::kPlain && (in_rows() + ba_rows()) % 8 == 0;
  }

  [[nodiscard]] static RecurrentAttention read(const Json& json, const DecoderConfig& config);
  [[nodiscard]] constexpr int64_t projected_width() const {
    return in_rows() + (joins_ba() ? ba_rows() : 0);
  }
  [[nodiscard]] constexpr int64_t output_width() const { return shape.values_width(); }
  void append_stores(std::vector<KvLayerShape>& shapes) const;
  [[nodiscard]] static bool writes_context() { return false; }
  [[nodiscard]] static bool scores_entries() { return false; }
  [[nodiscard]] static std::string unsupported_on_gpu() { return {}; }
};

}  // namespace paceline
