// SPDX-License-Identifier: Apache-2.0
#pragma once

// Op calls that Decoder and DraftHead both make, with the parameters that those calls share.

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/check.h"
#include "metadata/pass_rows.h"
#include "model/description/decoder_config.h"
#include "model/forward/activations.h"
#include "model/forward/layer_pass.h"
#include "model/weights/linear.h"
#include "ops/gather.h"
#include "ops/ops.h"

namespace paceline {

// The rows of an op call: those of a pass, or those whose logits are computed.
struct RowCount {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
};

[[nodiscard]] inline RowCount row_count(const PassRows& rows) {
  return {.num_rows = rows.num_rows, .max_rows = rows.capacity};
}

// Pointer to element `offset` of `data`.
[[nodiscard]] inline void* element(void* data, int64_t offset, DType dtype) {
  return static_cast<std::byte*>(data) + offset * dtype_bytes(dtype);
}

// The operands of a product over contiguous rows.
struct Projection {
  const void* x;         // [max_rows, num_groups * k] x_dtype
  int64_t x_stride = 0;  // elements between rows of x; 0: num_groups * k
  void* y;               // [max_rows, n] y_dtype
  int64_t y_stride = 0;  // elements between rows of y; 0: n
  DType x_dtype;
  DType y_dtype;
  bool delays_successor = false;  // as in GemmParams
};

// y = x W^T (+ bias).
[[nodiscard]] inline GemmParams gemm_params(const RowCount& rows, const Linear& linear,
                                            const Projection& p) {
  PACELINE_CHECK(linear.rows.empty(), "the rows of a rank lie in several places: see project");
  const int64_t x_width = int64_t{linear.num_groups} * linear.weight.k;
  return {.num_rows = rows.num_rows,
          .max_rows = rows.max_rows,
          .x = p.x,
          .x_stride = p.x_stride > 0 ? p.x_stride : x_width,
          .weight = linear.weight,
          .bias = linear.bias,
          .y = p.y,
          .y_stride = p.y_stride > 0 ? p.y_stride : linear.weight.n,
          .x_dtype = p.x_dtype,
          .y_dtype = p.y_dtype,
          .num_groups = linear.num_groups,
          .delays_successor = p.delays_successor};
}
template <class Ctx>
void project(Ctx& ctx, const RowCount& rows, const Linear& linear, const Projection& p) {
  if (linear.rows.empty()) {
    ctx.run(gemm, gemm_params(rows, linear, p));
    return;
  }
  Projection part = p;
  part.y_stride = p.y_stride > 0 ? p.y_stride : linear.weight.n;
  for (const LinearRange& range : linear.rows) {
    ctx.run(gemm, gemm_params(rows, rows_of(linear, range), part));
    part.y = element(part.y, range.count, p.y_dtype);
  }
}

// The exchange of the columns of all ranks; `ranks` and the number of rows come from here.
[[nodiscard]] inline GatherColumnsParams gather_params(const RowCount& rows,
                                                       const Activations& activations,
                                                       GatherColumnsParams p) {
  p.num_rows = rows.num_rows;
  p.max_rows = rows.max_rows;
  p.ranks = activations.ranks;
  return p;
}
template <class Ctx>
void gather_ranks(Ctx& ctx, const RowCount& rows, const Activations& activations,
                  const GatherColumnsParams& p) {
  ctx.run(gather_columns, gather_params(rows, activations, p));
}

// The rank's part of a product, to its place in y [max_rows, all outputs], where the matrix is a
// rank's part of one whose outputs are gathered: x are then the inputs that this rank has computed
// itself. Returns the exchange of the outputs, which remains to be made. Of a whole matrix: the
// product, and nothing remains.
template <class Ctx>
[[nodiscard]] std::optional<GatherColumnsParams> project_own(Ctx& ctx, const RowCount& rows,
                                                             const Linear& linear,
                                                             const Projection& p,
                                                             const Activations& activations) {
  if (!linear.is_gathered()) {
    project(ctx, rows, linear, p);
    return std::nullopt;
  }
  const int32_t rank = activations.ranks.rank;
  Projection own = p;
  if (const RankColumns& inputs = linear.inputs; inputs.is_shared()) {
    gather_ranks(ctx, rows, activations,
                 {.x = p.x,
                  .x_stride = p.x_stride > 0 ? p.x_stride : inputs.of(rank).count,
                  .columns = inputs,
                  .y = activations.gathered,
                  .dtype = p.x_dtype});
    own.x = activations.gathered;
    own.x_stride = linear.weight.k;
  }
  own.y = element(p.y, linear.outputs.of(rank).first, p.y_dtype);
  own.y_stride = linear.outputs.total();
  project(ctx, rows, linear, own);
  return gather_params(rows, activations,
                       {.x = own.y,
                        .x_stride = own.y_stride,
                        .columns = linear.outputs,
                        .y = p.y,
                        .dtype = p.y_dtype});
}

// y [max_rows, all outputs] = the product of all ranks.
template <class Ctx>
void project_all(Ctx& ctx, const RowCount& rows, const Linear& linear, const Projection& p,
                 const Activations& activations) {
  const auto exchange = project_own(ctx, rows, linear, p, activations);
  if (exchange) ctx.run(gather_columns, *exchange);
}

// The first product of a branch, and the op that makes its input, if that is left to it.
template <class Ctx>
void project_input(Ctx& ctx, const RowCount& rows, const Linear& linear, const Projection& p,
                   const Activations& activations, const BranchEnds& ends) {
  if (!ends.norm) return project_all(ctx, rows, linear, p, activations);
  ctx.run(normed_gemm,
          NormedGemmParams{.norm = *ends.norm, .product = gemm_params(rows, linear, p)});
}

// The last product of a branch, whose y is activations.branch.
template <class Ctx>
void project_branch(Ctx& ctx, const RowCount& rows, const Linear& linear, const Projection& p,
                    const Activations& activations, const BranchEnds& ends) {
  if (ends.residual != nullptr) {
    ctx.run(added_gemm,
            AddedGemmParams{.product = gemm_params(rows, linear, p), .residual = ends.residual});
    return;
  }
  const auto exchange = project_own(ctx, rows, linear, p, activations);
  if (ends.exchange != nullptr) {
    *ends.exchange = exchange;
  } else if (exchange) {
    ctx.run(gather_columns, *exchange);
  }
}

// The last layer's queries of the rows whose output is read -> output.qkv, `width` wide.
template <class Ctx>
void pick_queries(Ctx& ctx, const OutputRows& output, const Activations& activations,
                  int32_t width) {
  ctx.run(copy_rows, CopyRowsParams{.num_rows = output.rows.num_rows,
                                    .max_rows = output.rows.capacity,
                                    .row_index = output.row_index,
                                    .x = activations.qkv,
                                    .x_stride = width,
                                    .y = output.qkv,
                                    .y_stride = width,
                                    .width = width,
                                    .x_dtype = activations.dtype,
                                    .y_dtype = activations.dtype});
}

// y = rms_norm(x), with no residual.
struct Norm {
  const void* x;  // [max_rows, hidden] x_dtype, rows x_stride apart
  int64_t x_stride;
  const float* weight;  // [hidden]
  void* y;              // [max_rows, hidden] y_dtype, rows y_stride apart
  int64_t y_stride;
  int32_t hidden;
  DType x_dtype = DType::kFloat32;
  DType y_dtype = DType::kFloat32;
};

template <class Ctx>
void normalise(Ctx& ctx, const RowCount& rows, const DecoderConfig& config, const Norm& n) {
  ctx.run(rms_norm, RmsNormParams{.num_rows = rows.num_rows,
                                  .max_rows = rows.max_rows,
                                  .x = n.x,
                                  .x_stride = n.x_stride,
                                  .residual = nullptr,
                                  .weight = n.weight,
                                  .weight_offset = config.norm_weight_offset,
                                  .eps = config.norm_eps,
                                  .y = n.y,
                                  .y_stride = n.y_stride,
                                  .hidden = n.hidden,
                                  .x_dtype = n.x_dtype,
                                  .y_dtype = n.y_dtype});
}

// Applies the factor and the soft cap of the logits, if the model has them. `ids`: those whose
// logits are there.
template <class Ctx>
void cap_logits(Ctx& ctx, const RowCount& rows, const DecoderConfig& config, LinearRange ids,
                float* logits) {
  if (!(config.logit_soft_cap > 0) && config.logit_scale == 1) return;
  ctx.run(soft_cap, SoftCapParams{.num_rows = rows.num_rows,
                                  .max_rows = rows.max_rows,
                                  .logits = logits + ids.first,
                                  .cap = config.logit_soft_cap,
                                  .n = ids.count,
                                  .scale = config.logit_scale,
                                  .stride = config.num_logits()});
}

}  // namespace paceline
