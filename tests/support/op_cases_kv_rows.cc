// SPDX-License-Identifier: Apache-2.0
//
// Builders of the ops whose rows are independent and that write or read the KV cache.

#include <algorithm>
#include <cmath>

#include "support/op_cases.h"
#include "support/op_weights.h"
#include "support/rope_arrays.h"
#include "support/row_arrays.h"
#include "support/row_values.h"
#include "support/store_arrays.h"

namespace paceline::testing {

OpInstance make_rope(const RopeSpec& s, const Rows& rows, uint64_t seed) {
  constexpr int32_t kMaxPositions = 777;
  OpInstance op;
  const Element element = element_of(s.dtype);
  const int64_t width =
      int64_t{qkv_heads(s.num_qo_heads, s.num_kv_heads, s.kv_inputs)} * s.head_dim;
  const int64_t part = int64_t{s.block_size} * s.num_kv_heads * s.head_dim;
  const int64_t block = 2 * part + 3 * kGap;  // gaps before, between and after K and V

  const Handle num_rows = add_num_rows(op, rows);
  OpArray projected = normal_rows("qkv", element, rows, width, width, seed, kX,
                                  /*varies_in_scale=*/s.has_norms, Role::kInOut);
  if (s.reads_early) projected.late = {{0, projected.count}};
  const Handle qkv = op.add(std::move(projected));
  const int32_t rotated = s.rope_head_dim > 0 ? s.rope_head_dim : s.head_dim;
  const RopeArrays rope(op, rows, seed, rotated, kMaxPositions, s.position_offset);
  const Handle slots =
      s.kv_inputs == KvInputs::kNone ? kNoArray : add_slots(op, "slot_mapping", rows, s.block_size);
  Handle q_norm = kNoArray;
  Handle k_norm = kNoArray;
  if (s.has_norms) {
    q_norm = op.add(normal_constant("q_norm", Element::kF32, s.head_dim, seed, kWeight));
    k_norm = op.add(normal_constant("k_norm", Element::kF32, s.head_dim, seed, kXWeight));
  }
  const Handle pool = add_written_pool(op, "pool", element, block, s.block_size, rows);
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    const int64_t bytes = element_bytes(element);
    qk_norm_rope_append(ctx, QkNormRopeAppendParams{.num_rows = at.get<int32_t>(num_rows),
                                                    .max_rows = max_rows,
                                                    .qkv = at.raw(qkv),
                                                    .positions = at.get<int32_t>(rope.positions),
                                                    .slot_mapping = at.get<int64_t>(slots),
                                                    .q_norm = at.get<float>(q_norm),
                                                    .k_norm = at.get<float>(k_norm),
                                                    .norm_weight_offset = 1.0f,
                                                    .norm_eps = 1e-6f,
                                                    .rope_cos = at.get<float>(rope.cos),
                                                    .rope_sin = at.get<float>(rope.sin),
                                                    .kv = {.base = at.raw(pool),
                                                           .block_bytes = block * bytes,
                                                           .k_offset = kGap * bytes,
                                                           .v_offset = (2 * kGap + part) * bytes,
                                                           .block_size = s.block_size,
                                                           .dtype = s.dtype},
                                                    .num_qo_heads = s.num_qo_heads,
                                                    .num_kv_heads = s.num_kv_heads,
                                                    .head_dim = s.head_dim,
                                                    .qkv_dtype = activation_dtype(ctx, s.dtype),
                                                    .kv_inputs = s.kv_inputs,
                                                    .has_v_norm = s.has_v_norm,
                                                    .position_offset = s.position_offset,
                                                    .rope_head_dim = s.rope_head_dim,
                                                    .reads_early = s.reads_early});
  });
  return op;
}

}  // namespace paceline::testing
