// SPDX-License-Identifier: Apache-2.0
//
// The op cases of the ops around latent_attention, whose own cases are those of paged attention
// (op_cases_attention.cc).

#include "support/op_cases_latent.h"

#include <cmath>

#include "ops/latent.h"
#include "support/op_case_table.h"
#include "support/rope_arrays.h"
#include "support/row_arrays.h"
#include "support/row_values.h"
#include "support/store_arrays.h"

namespace paceline::testing {
namespace {

constexpr int32_t kMaxPositions = 777;
constexpr int32_t kOffset = 1;

Handle add_kv_b(OpInstance& op, const LatentSpec& s, uint64_t seed) {
  const int64_t rows = int64_t{s.num_heads} * (s.qk_nope_head_dim + s.v_head_dim);
  return op.add(normal_constant("kv_b", element_of(s.dtype), rows * s.kv_lora_rank, seed, kWeight,
                                1.0f / std::sqrt(static_cast<float>(s.kv_lora_rank))));
}

LatentHeads heads_at(const Addresses& at, Handle kv_b, const LatentSpec& s) {
  return {.kv_b = plain_matrix(at.raw(kv_b), s.num_heads * (s.qk_nope_head_dim + s.v_head_dim),
                               s.kv_lora_rank, s.dtype),
          .num_heads = s.num_heads,
          .qk_nope_head_dim = s.qk_nope_head_dim,
          .v_head_dim = s.v_head_dim};
}

}  // namespace

OpInstance make_append_latents(const LatentSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const Element element = element_of(s.dtype);
  const int64_t entry = s.kv_lora_rank + s.qk_rope_head_dim;
  const int64_t width = s.q_width + entry;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle qkv_a = op.add(normal_rows("qkv_a", element, rows, width, width, seed, kX,
                                          /*varies_in_scale=*/true, Role::kInOut));
  const RopeArrays rope(op, rows, seed, s.qk_rope_head_dim, kMaxPositions, kOffset);
  const Handle slots = add_slots(op, "slot_mapping", rows, s.block_size);
  const Handle q_norm =
      s.has_q_norm ? op.add(normal_constant("q_norm", Element::kF32, s.q_width, seed, kWeight))
                   : kNoArray;
  const Handle latent_norm =
      op.add(normal_constant("latent_norm", Element::kF32, s.kv_lora_rank, seed, kXWeight));
  const WrittenStore entries(op, "pool", element, entry, s.block_size, rows);
  const int32_t max_rows = rows.max_rows;
  op.set_run([=](auto& ctx, const Addresses& at) {
    append_latents(ctx, AppendLatentsParams{.num_rows = at.get<int32_t>(num_rows),
                                            .max_rows = max_rows,
                                            .qkv_a = at.raw(qkv_a),
                                            .q_width = s.q_width,
                                            .slot_mapping = at.get<int64_t>(slots),
                                            .q_norm = at.get<float>(q_norm),
                                            .latent_norm = at.get<float>(latent_norm),
                                            .norm_weight_offset = 1.0f,
                                            .norm_eps = 1e-6f,
                                            .rope = rope.at(at, s.is_interleaved),
                                            .entries = entries.view(at),
                                            .kv_lora_rank = s.kv_lora_rank,
                                            .qk_rope_head_dim = s.qk_rope_head_dim,
                                            .dtype = activation_dtype(ctx, s.dtype)});
  });
  return op;
}

OpInstance make_absorb_queries(const LatentSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const Element element = element_of(s.dtype);
  const int64_t width = int64_t{s.num_heads} * (s.qk_nope_head_dim + s.qk_rope_head_dim);
  const int64_t stride = width + s.q_padding;
  const int64_t y_width = int64_t{s.num_heads} * (s.kv_lora_rank + s.qk_rope_head_dim);
  const Handle num_rows = add_num_rows(op, rows);
  const Handle q = op.add(normal_rows("q", element, rows, width, stride, seed, kX));
  const RopeArrays rope(op, rows, seed, s.qk_rope_head_dim, kMaxPositions, kOffset);
  const Handle kv_b = add_kv_b(op, s, seed);
  const int32_t max_rows = rows.max_rows;
  const Handle y = op.add(output_array("y", Element::kF32, element, max_rows * y_width, y_width));
  op.set_run([=](auto& ctx, const Addresses& at) {
    absorb_queries(ctx, AbsorbQueriesParams{.num_rows = at.get<int32_t>(num_rows),
                                            .max_rows = max_rows,
                                            .q = at.raw(q),
                                            .q_stride = stride,
                                            .heads = heads_at(at, kv_b, s),
                                            .rope = rope.at(at, s.is_interleaved),
                                            .y = at.raw(y),
                                            .qk_rope_head_dim = s.qk_rope_head_dim,
                                            .dtype = activation_dtype(ctx, s.dtype)});
  });
  return op;
}

OpInstance make_project_values(const LatentSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const Element element = element_of(s.dtype);
  const int64_t width = int64_t{s.num_heads} * s.kv_lora_rank;
  const int64_t y_width = int64_t{s.num_heads} * s.v_head_dim;
  const Handle num_rows = add_num_rows(op, rows);
  const Handle x = op.add(normal_rows("x", element, rows, width, width, seed, kX));
  const Handle kv_b = add_kv_b(op, s, seed);
  const int32_t max_rows = rows.max_rows;
  const Handle y = op.add(output_array("y", Element::kF32, element, max_rows * y_width, y_width));
  op.set_run([=](auto& ctx, const Addresses& at) {
    project_values(ctx, ProjectValuesParams{.num_rows = at.get<int32_t>(num_rows),
                                            .max_rows = max_rows,
                                            .x = at.raw(x),
                                            .heads = heads_at(at, kv_b, s),
                                            .y = at.raw(y),
                                            .dtype = activation_dtype(ctx, s.dtype)});
  });
  return op;
}

std::vector<RowWiseCase> latent_row_wise_cases() {
  TableBuilder table;
  const auto name = [](const char* op, const LatentSpec& s) {
    return std::string(op) + "_" + std::to_string(s.num_heads) + "x" +
           std::to_string(s.qk_nope_head_dim) + "_" + std::to_string(s.qk_rope_head_dim) + "_" +
           std::to_string(s.v_head_dim) + "_rank" + std::to_string(s.kv_lora_rank) +
           (s.is_interleaved ? "_pairs" : "") + (s.has_q_norm ? "_norm" : "") +
           dtype_suffix(s.dtype);
  };
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const LatentSpec specs[] = {// GLM-4.7-Flash
                                {.num_heads = 20,
                                 .qk_nope_head_dim = 192,
                                 .qk_rope_head_dim = 64,
                                 .v_head_dim = 256,
                                 .kv_lora_rank = 512,
                                 .q_width = 768,
                                 .dtype = dtype},
                                // DeepSeek-V2-Lite, whose q has no low rank
                                {.num_heads = 16,
                                 .qk_nope_head_dim = 128,
                                 .qk_rope_head_dim = 64,
                                 .v_head_dim = 128,
                                 .kv_lora_rank = 512,
                                 .q_width = 3072,
                                 .dtype = dtype,
                                 .has_q_norm = false},
                                {.num_heads = 3,
                                 .qk_nope_head_dim = 40,
                                 .qk_rope_head_dim = 16,
                                 .v_head_dim = 24,
                                 .kv_lora_rank = 72,
                                 .q_width = 48,
                                 .q_padding = 8,
                                 .block_size = 1,
                                 .dtype = dtype,
                                 .is_interleaved = false},
                                // Of odd sizes, which no vector load fits.
                                {.num_heads = 2,
                                 .qk_nope_head_dim = 7,
                                 .qk_rope_head_dim = 6,
                                 .v_head_dim = 5,
                                 .kv_lora_rank = 77,
                                 .q_width = 33,
                                 .q_padding = 3,
                                 .block_size = 1,
                                 .dtype = dtype}};
    for (const LatentSpec& s : specs) {
      // With other slots, the rows of the pool belong to several rows of the batch.
      table.add(name("append_latents", s), make_append_latents, s, s.block_size == 1);
      table.add(name("absorb_queries", s), make_absorb_queries, s, true);
      table.add(name("project_values", s), make_project_values, s, true);
    }
  }
  return table.cases;
}

}  // namespace paceline::testing
