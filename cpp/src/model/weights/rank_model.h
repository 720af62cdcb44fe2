// SPDX-License-Identifier: Apache-2.0
#pragma once

// The part of a model that one of several ranks computes (docs/tensor-parallel.md). Its weights are
// those of the whole model, in the same memory: a rank only has other rows of each matrix.

#include <memory>

#include "model/weights/model_impl.h"
#include "model/weights/rank_split.h"

namespace paceline {

// Throws Unsupported if this many ranks cannot share the model. The message has the numbers that
// can.
void check_ranks(const Model& whole, int32_t num_ranks);

// Whether a draft step of one sequence takes less time if the ranks share the drafter: each reads
// less of the weights, and makes exchanges. `dtype`: of plain matrices.
[[nodiscard]] bool is_faster_shared(const DecoderConfig& draft, DType dtype, int32_t num_ranks);

// Whether the ranks share a drafter instead of computing all of it each.
// draft_tensor_parallel_size: see SpeculativeOptions. Throws as drafter_share() does.
[[nodiscard]] bool shares_drafter(const Model& whole, int32_t num_ranks,
                                  int32_t draft_tensor_parallel_size);

// `whole` must outlive the result, and passes check_ranks(). The description has the heads and MLP
// rows of the rank, the whole vocabulary and the whole hidden size.
[[nodiscard]] std::shared_ptr<const Model> rank_model(const Model& whole, const RankShare& share);

// Elements of the longest row that the ranks of a model exchange.
[[nodiscard]] int64_t exchanged_width(const DecoderConfig& rank_config);

}  // namespace paceline
