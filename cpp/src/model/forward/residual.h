// SPDX-License-Identifier: Apache-2.0
#pragma once

// The residual stream that connects the branches of a pass (attention, MLP, per-layer inputs), or
// several streams that every branch mixes (ops/streams.h). The decoder only says which branch
// joins and what the next one reads.

#include <cstddef>
#include <cstdint>
#include <optional>

#include "metadata/pass_rows.h"
#include "model/description/decoder_config.h"
#include "model/forward/activations.h"
#include "model/forward/layer_ops.h"
#include "model/weights/weights.h"
#include "ops/gather.h"
#include "ops/moe.h"
#include "ops/ops.h"
#include "ops/streams.h"

namespace paceline {

// A branch whose output, in activations.branch, joins the residual.
struct Branch {
  const float* norm;   // norm after the branch, or null
  const float* scale;  // scale of the residual after the branch is added, or null
  std::optional<CombineExpertsParams> places = std::nullopt;  // what remains to be summed to it
  // The exchange that then remains to be made of it (BranchEnds::exchange). The sum of places is
  // that of this rank's columns.
  std::optional<GatherColumnsParams> exchange = std::nullopt;
};

// What is made of the residual once a branch has joined.
struct BranchInput {
  // null: no norm, y is a copy. Several streams always have one.
  const float* norm = nullptr;
  void* y = nullptr;          // [rows, hidden] dtype of the activations; null: nothing
  StreamMixWeights mix = {};  // of the branch that reads y, with several streams
};

template <class Ctx>
class Residual {
 public:
  Residual(Ctx& ctx, const RowCount& rows, const DecoderConfig& config,
           const Activations& activations)
      : ctx_(ctx), rows_(rows), config_(config), activations_(activations) {}

  // Adds a branch (null: there is none yet) and computes the input of the next one. One op, or two
  // where the places of experts join several streams.
  void join(const Branch* branch, const BranchInput& next) const {
    if (config_.streams.count > 1) return join_several(branch, next);
    const RmsNormParams norm = join_params(branch, next);
    if (branch != nullptr && branch->exchange.has_value()) {
      ctx_.run(
          gathered_norm,
          GatheredNormParams{.gather = *branch->exchange, .norm = norm, .places = branch->places});
    } else if (branch != nullptr && branch->places.has_value()) {
      ctx_.run(combine_and_norm, CombineAndNormParams{.combine = *branch->places, .norm = norm});
    } else {
      ctx_.run(rms_norm, norm);
    }
  }

  // The op of `join` with one stream, without the places of experts and without an exchange.
  [[nodiscard]] RmsNormParams join_params(const Branch* branch, const BranchInput& next) const {
    const bool has_branch = branch != nullptr;
    return {.num_rows = rows_.num_rows,
            .max_rows = rows_.max_rows,
            .x = has_branch ? activations_.branch : activations_.residual,
            .x_stride = config_.hidden,
            .residual = has_branch ? activations_.residual : nullptr,
            .weight = next.norm,
            .weight_offset = config_.norm_weight_offset,
            .eps = config_.norm_eps,
            .y = next.y,
            .y_stride = config_.hidden,
            .hidden = config_.hidden,
            .x_weight = has_branch ? branch->norm : nullptr,
            .residual_scale = has_branch ? branch->scale : nullptr,
            .x_dtype = has_branch ? activations_.dtype : DType::kFloat32,
            .y_dtype = activations_.dtype};
  }

  // Copies the residual as it is, with all its streams, to y [rows, residual_width], rows y_stride
  // apart.
  void copy_to(void* y, int64_t y_stride) const {
    const auto width = static_cast<int32_t>(config_.residual_width());
    ctx_.run(copy_rows, CopyRowsParams{.num_rows = rows_.num_rows,
                                       .max_rows = rows_.max_rows,
                                       .row_index = nullptr,
                                       .x = activations_.residual,
                                       .x_stride = width,
                                       .y = y,
                                       .y_stride = y_stride,
                                       .width = width,
                                       .y_dtype = activations_.dtype});
  }

  // Copies the mean of the streams to y [rows, hidden], rows y_stride apart.
  void average_to(void* y, int64_t y_stride) const {
    ctx_.run(mean_streams, MeanStreamsParams{.num_rows = rows_.num_rows,
                                             .max_rows = rows_.max_rows,
                                             .x = activations_.residual,
                                             .y = y,
                                             .y_stride = y_stride,
                                             .num_streams = config_.streams.count,
                                             .hidden = config_.hidden,
                                             .y_dtype = activations_.dtype});
  }

  // y [rows, hidden] = the sum of the streams x that `finish` has normed; runs right after it.
  void sum_to(const float* x, float* y) const {
    ctx_.run(sum_streams,
             SumStreamsParams{.num_rows = rows_.num_rows,
                              .max_rows = rows_.max_rows,
                              .x = x,
                              .mix = activations_.mix,
                              .mix_stride = mix_width(config_.streams.count, /*is_end=*/true),
                              .y = y,
                              .num_streams = config_.streams.count,
                              .hidden = config_.hidden});
  }

  // y = the final norm of the residual x [rows, residual_width], with several streams of their sum
  // at the end of the model.
  void finish(const DecoderWeights& weights, const float* x, void* y, DType y_dtype) const {
    if (config_.streams.count == 1) {
      return normalise(ctx_, rows_, config_,
                       {.x = x,
                        .x_stride = config_.hidden,
                        .weight = weights.final_norm,
                        .y = y,
                        .y_stride = config_.hidden,
                        .hidden = config_.hidden,
                        .y_dtype = y_dtype});
    }
    ctx_.run(join_streams,
             JoinStreamsParams{.write = std::nullopt,
                               .mix = mix(weights.end_mix, x, /*is_end=*/true),
                               .read = read(x, weights.final_norm, /*is_end=*/true, y, y_dtype)});
  }

 private:
  void join_several(const Branch* branch, const BranchInput& next) const {
    std::optional<WriteStreamsParams> write;
    if (branch != nullptr) {
      if (branch->places.has_value()) ctx_.run(combine_experts, *branch->places);
      if (branch->exchange.has_value()) ctx_.run(gather_columns, *branch->exchange);
      write = {.num_rows = rows_.num_rows,
               .max_rows = rows_.max_rows,
               .x = activations_.branch,
               .mix = activations_.mix,
               .y = activations_.residual,
               .num_streams = config_.streams.count,
               .hidden = config_.hidden,
               .x_dtype = activations_.dtype};
    }
    if (next.y == nullptr) {
      if (write) ctx_.run(write_streams, *write);
      return;
    }
    const float* const x = activations_.residual;
    ctx_.run(join_streams, JoinStreamsParams{.write = write,
                                             .mix = mix(next.mix, x, /*is_end=*/false),
                                             .read = read(x, next.norm, /*is_end=*/false, next.y,
                                                          activations_.dtype)});
  }

  [[nodiscard]] MixStreamsParams mix(const StreamMixWeights& weights, const float* x,
                                     bool is_end) const {
    return {.num_rows = rows_.num_rows,
            .max_rows = rows_.max_rows,
            .x = x,
            .weight = weights.weight,
            .base = weights.base,
            .scale = weights.scale,
            .mix = activations_.mix,
            .num_streams = config_.streams.count,
            .hidden = config_.hidden,
            .is_end = is_end,
            .sinkhorn_iterations = config_.streams.sinkhorn_iterations,
            .norm_eps = config_.norm_eps,
            .eps = config_.streams.eps};
  }

  [[nodiscard]] ReadStreamsParams read(const float* x, const float* norm, bool is_end, void* y,
                                       DType y_dtype) const {
    return {.num_rows = rows_.num_rows,
            .max_rows = rows_.max_rows,
            .x = x,
            .mix = activations_.mix,
            .mix_stride = mix_width(config_.streams.count, is_end),
            .weight = norm,
            .eps = config_.norm_eps,
            .y = y,
            .num_streams = config_.streams.count,
            .hidden = config_.hidden,
            .y_dtype = y_dtype};
  }

  Ctx& ctx_;
  RowCount rows_;
  const DecoderConfig& config_;
  const Activations& activations_;
};

}  // namespace paceline
