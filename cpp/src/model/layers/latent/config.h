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

// Latent attention (MLA). An entry of the KV cache, which all heads share, is a row's latent and
// its rotated key: [norm(c) ; rope(k)] with [c ; k] = kv_a x. With one matrix K_h
// [qk_nope_head_dim, kv_lora_rank] and one V_h [v_head_dim, kv_lora_rank] for each head, from kv_b,
// head h scores an entry with the absorbed query [K_h^T q_nope ; rope(q_rope)], and its output is
// V_h times the weighted sum of latents. q = q_b norm(q_a x) or, without a q_lora_rank, q x.
struct LatentAttention {
  static constexpr std::array<std::string_view, 1> kNames = {"latent"};
  static constexpr bool reads_target = false;
  static constexpr bool kPicksRows = true;
  static constexpr bool kWritesContext = false;

  int32_t num_qo_heads = 0;
  int32_t q_lora_rank = 0;  // 0: q is projected from x
  int32_t kv_lora_rank = 0;
  int32_t qk_nope_head_dim = 0;  // the first elements of a head of q, which are not rotated
  int32_t qk_rope_head_dim = 0;  // even; the rest of a head of q, and the rotated key
  int32_t v_head_dim = 0;
  float scale = 0;     // scores are multiplied by it; > 0
  float norm_eps = 0;  // of the norms of q_a x and of c
  int32_t rope = 0;    // index into DecoderConfig::ropes
  MatrixFormat qkv_a;  // q_a (or q) rows, then kv_a rows
  MatrixFormat q_b;
  MatrixFormat o;

  // Rows of q_b, or of q.
  [[nodiscard]] constexpr int64_t q_rows() const {
    return int64_t{num_qo_heads} * (qk_nope_head_dim + qk_rope_head_dim);
  }
  // Elements of a row of qkv_a: q_a x (or q x), c and k.
  [[nodiscard]] constexpr int64_t qkv_a_rows() const {
    return (q_lora_rank > 0 ? q_lora_rank : q_rows()) + entry_width();
  }
  // Elements of an entry and of an absorbed query.
  [[nodiscard]] constexpr int32_t entry_width() const { return kv_lora_rank + qk_rope_head_dim; }
  // Rows of kv_b: those of K_h and then those of V_h, head by head.
  [[nodiscard]] constexpr int64_t kv_b_rows() const {
    return int64_t{num_qo_heads} * (qk_nope_head_dim + v_head_dim);
  }

  [[nodiscard]] static LatentAttention read(const Json& json, const DecoderConfig& config);
  [[nodiscard]] constexpr int64_t projected_width() const { return qkv_a_rows(); }
  [[nodiscard]] constexpr int64_t output_width() const {
    return int64_t{num_qo_heads} * v_head_dim;
  }
  void append_stores(std::vector<KvLayerShape>& shapes) const;
  [[nodiscard]] static bool writes_context() { return false; }
  [[nodiscard]] static bool scores_entries() { return false; }
  [[nodiscard]] std::string unsupported_on_gpu() const;
};

}  // namespace paceline
