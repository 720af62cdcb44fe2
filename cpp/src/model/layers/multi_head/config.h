// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/json.h"
#include "kv/kv_layout.h"
#include "model/description/matrix_format.h"
#include "ops/ops.h"

namespace paceline {

struct DecoderConfig;

// K and V of their own for every KV head.
struct MultiHeadAttention {
  static constexpr std::array<std::string_view, 2> kNames = {"full", "sliding"};
  static constexpr bool kPicksRows = true;
  static constexpr bool kWritesContext = true;

  KvKind kind;  // FullKv or SlidingKv
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;   // divides num_qo_heads
  int32_t head_dim = 0;       // even
  float scale = 0;            // scores are multiplied by it; > 0
  float soft_cap = 0;         // scores become soft_cap * tanh(score / soft_cap); 0 is off
  int32_t rope = 0;           // index into DecoderConfig::ropes
  int32_t rope_head_dim = 0;  // the first elements of a head, which are rotated; even
  bool has_qk_norm = false;
  bool has_v_norm = false;  // v is divided by its root mean square, without a weight
  bool has_qkv_bias = false;
  bool has_o_bias = false;
  bool k_eq_v = false;     // no v projection: v is k before its norm and rotation
  int32_t kv_source = -1;  // a reader's earlier layer whose KV it reads; -1: it has its own KV
  // A reader in a drafter: it reads the KV of the target's last layer of the same kind that has its
  // own KV.
  bool reads_target = false;
  bool has_sinks =
      false;  // each query head has a further logit in its softmax sum, without a value
  // The output is multiplied by sigmoid(gate x) before o; gate has the format of qkv.
  bool has_output_gate = false;
  MatrixFormat qkv;
  MatrixFormat o;

  [[nodiscard]] static MultiHeadAttention read(const Json& json, const DecoderConfig& config);
  // What the qkv projection yields beside q.
  [[nodiscard]] constexpr KvInputs kv_inputs() const {
    if (kv_source >= 0 || reads_target) return KvInputs::kNone;
    return k_eq_v ? KvInputs::kKeys : KvInputs::kKeysAndValues;
  }
  [[nodiscard]] constexpr int64_t projected_width() const {
    return qkv_heads(num_qo_heads, num_kv_heads, kv_inputs()) * head_dim;
  }
  [[nodiscard]] constexpr int64_t output_width() const { return int64_t{num_qo_heads} * head_dim; }
  void append_stores(std::vector<KvLayerShape>& shapes) const;
  [[nodiscard]] bool writes_context() const {
    return kv_source < 0 && qkv.format == WeightFormat::kPlain;
  }
  [[nodiscard]] static bool scores_entries() { return false; }
  [[nodiscard]] static std::string unsupported_on_gpu() { return {}; }
};

}  // namespace paceline
