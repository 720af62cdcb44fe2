// SPDX-License-Identifier: Apache-2.0
#include "model/block_drafter.h"

#include <utility>

#include "base/check.h"
#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "model/layer_ops.h"

namespace paceline {

BlockDrafter::BlockDrafter(std::shared_ptr<const Model> model, const Decoder& target,
                           const KvLayout& layout, std::byte* kv_pool, int32_t max_positions,
                           DeviceArena& arena)
    : decoder_(std::move(model), layout, KvOwner::kDraft, kv_pool, max_positions, arena,
               target.shareable_weights()) {
  PACELINE_CHECK(config().drafter.has_value() && block().size > 0, config().name,
                 " is not a block drafter");
}

template <class Ctx>
void BlockDrafter::write_context(Ctx& ctx, const PassRows& rows,
                                 std::span<const GroupMetadata> groups,
                                 const Activations& activations, const void* target_hidden) const {
  const DecoderConfig& c = config();
  const DraftHeadWeights& w = decoder_.weights().head;
  project(ctx, row_count(rows), w.fc,
          {.x = target_hidden,
           .y = activations.residual,
           .x_dtype = activations.dtype,
           .y_dtype = DType::kFloat32});
  normalise(ctx, row_count(rows), c,
            {.x = activations.residual,
             .x_stride = c.hidden,
             .weight = w.hidden_norm,
             .y = activations.normed,
             .y_stride = c.hidden,
             .hidden = c.hidden,
             .y_dtype = activations.dtype});
  for (int32_t layer = 0; layer < static_cast<int32_t>(c.layers.size()); ++layer) {
    decoder_.write_keys_values(ctx, layer, activations.normed, rows, groups, activations);
  }
}

template <class Ctx>
void BlockDrafter::forward(Ctx& ctx, const PassRows& rows, std::span<const GroupMetadata> groups,
                           const Activations& activations) const {
  decoder_.forward(ctx, rows, groups, activations);
}

template <class Ctx>
void BlockDrafter::logits(Ctx& ctx, const int32_t* num_rows, int32_t max_rows,
                          const int32_t* row_index, const Activations& activations, float* gathered,
                          float* logits) const {
  decoder_.logits(ctx, num_rows, max_rows, row_index, activations, gathered, logits);
}

template <class Ctx>
void BlockDrafter::add_markov(Ctx& ctx, const int32_t* num_rows, int32_t max_rows,
                              const int32_t* previous, const Activations& activations, float* bias,
                              float* logits) const {
  if (block().markov == MarkovHead::kNone) return;
  const DecoderConfig& c = config();
  const DraftHeadWeights& w = decoder_.weights().head;
  const int32_t rank = block().markov_rank;
  ctx.run(embed, EmbedParams{.num_rows = num_rows,
                             .max_rows = max_rows,
                             .token_ids = previous,
                             .table = w.markov_table,
                             .table_dtype = decoder_.weights().dtype,
                             .scale = 1,
                             .y = activations.residual,
                             .vocab_size = c.vocab_size,
                             .hidden = rank});
  ctx.run(copy_rows, CopyRowsParams{.num_rows = num_rows,
                                    .max_rows = max_rows,
                                    .row_index = nullptr,
                                    .x = activations.residual,
                                    .x_stride = rank,
                                    .y = activations.normed,
                                    .y_stride = rank,
                                    .width = rank,
                                    .x_dtype = DType::kFloat32,
                                    .y_dtype = activations.dtype});
  project(ctx, {.num_rows = num_rows, .max_rows = max_rows}, w.markov,
          {.x = activations.normed,
           .y = bias,
           .x_dtype = activations.dtype,
           .y_dtype = DType::kFloat32});
  ctx.run(
      add_rows,
      AddRowsParams{
          .num_rows = num_rows, .max_rows = max_rows, .x = bias, .y = logits, .n = c.num_logits()});
}

// Instantiates every member template for one context.
#define PACELINE_INSTANTIATE_BLOCK_DRAFTER(Ctx)                                                   \
  template void BlockDrafter::write_context<Ctx>(                                                 \
      Ctx&, const PassRows&, std::span<const GroupMetadata>, const Activations&, const void*)     \
      const;                                                                                      \
  template void BlockDrafter::forward<Ctx>(Ctx&, const PassRows&, std::span<const GroupMetadata>, \
                                           const Activations&) const;                             \
  template void BlockDrafter::logits<Ctx>(Ctx&, const int32_t*, int32_t, const int32_t*,          \
                                          const Activations&, float*, float*) const;              \
  template void BlockDrafter::add_markov<Ctx>(Ctx&, const int32_t*, int32_t, const int32_t*,      \
                                              const Activations&, float*, float*) const;
PACELINE_INSTANTIATE_BLOCK_DRAFTER(CpuContext)
#ifdef PACELINE_CUDA
PACELINE_INSTANTIATE_BLOCK_DRAFTER(CudaContext)
#endif
#undef PACELINE_INSTANTIATE_BLOCK_DRAFTER

}  // namespace paceline
