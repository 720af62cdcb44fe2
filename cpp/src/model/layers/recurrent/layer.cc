// SPDX-License-Identifier: Apache-2.0
#include "model/layers/recurrent/layer.h"

#include <algorithm>
#include <cstddef>
#include <variant>

#include "base/check.h"
#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "model/forward/activations.h"
#include "model/forward/layer_ops.h"
#include "ops/recurrent.h"

namespace paceline {

void RecurrentWidths::merge(const RecurrentAttention& attention, const ScratchSizes&) {
  if (!attention.joins_ba()) ba = std::max(ba, attention.ba_rows());
}

RecurrentScratch RecurrentWidths::allocate(DeviceArena& arena, int64_t rows, DType dtype) const {
  if (ba == 0) return {.ba = nullptr};
  return {.ba = arena.allocate<std::byte>(rows * ba * dtype_bytes(dtype), "activations")};
}

template <class Ctx>
void run_attention(Ctx& ctx, const RecurrentAttention& attention,
                   const RecurrentAttentionWeights& w, const AttentionPass& pass) {
  const PassRows& rows = pass.rows;
  const Activations& activations = pass.activations;
  const DType dtype = activations.dtype;
  const auto* const states = std::get_if<CompressedMetadata>(&pass.metadata(pass.groups, 0));
  const auto* const records = std::get_if<FullMetadata>(&pass.metadata(pass.groups, 1));
  PACELINE_CHECK(states != nullptr && records != nullptr && pass.output == nullptr,
                 "a recurrent layer has states, records and the output of all rows");
  project_input(ctx, row_count(rows), w.in,
                {.x = pass.input, .y = activations.qkv, .x_dtype = dtype, .y_dtype = dtype},
                activations, pass.ends);
  const bool is_joined = attention.joins_ba();
  const auto& own = activations.of<RecurrentScratch>();
  if (!is_joined) {
    project(ctx, row_count(rows), w.ba,
            {.x = pass.input, .y = own.ba, .x_dtype = dtype, .y_dtype = dtype});
  }
  const int64_t ba_offset = attention.in_rows() * dtype_bytes(dtype);
  ctx.run(gated_delta,
          GatedDeltaParams{
              .num_rows = rows.num_rows,
              .max_rows = rows.capacity,
              .x = activations.qkv,
              .x_stride = w.in.num_outputs(),
              .ba = is_joined ? static_cast<const std::byte*>(activations.qkv) + ba_offset : own.ba,
              .ba_stride = is_joined ? w.in.num_outputs() : attention.ba_rows(),
              .positions = rows.positions,
              .seq_slot = rows.seq_slot,
              .record_slots = records->slot_mapping,
              .record_table = records->table,
              .records = pass.stores[1],
              .entry_slots = states->slot_mapping,
              .entry_table = states->table,
              .entries = pass.stores[0],
              .conv = w.conv,
              .a_log = w.a_log,
              .dt_bias = w.dt_bias,
              .norm = w.norm,
              .norm_eps = attention.norm_eps,
              .y = activations.attention,
              .shape = attention.shape,
              .dtype = dtype,
              .num_seqs = rows.num_seqs,
              .row_indptr = rows.row_indptr,
              .max_seqs = rows.max_seqs,
              .max_rows_per_seq = rows.max_rows_per_seq});
  project_branch(
      ctx, row_count(rows), w.o,
      {.x = activations.attention, .y = activations.branch, .x_dtype = dtype, .y_dtype = dtype},
      activations, pass.ends);
}

template void run_attention<CpuContext>(CpuContext&, const RecurrentAttention&,
                                        const WeightsOf<RecurrentAttention>&, const AttentionPass&);
#ifdef PACELINE_CUDA
template void run_attention<CudaContext>(CudaContext&, const RecurrentAttention&,
                                         const WeightsOf<RecurrentAttention>&,
                                         const AttentionPass&);
#endif

}  // namespace paceline
