// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "device/cuda_context.h"
#include "ops/ops.h"

namespace paceline::cuda {

// The number of rows from which on a sequence of the batch is for prefill_attention; 0 if none is.
[[nodiscard]] int32_t prefill_min_rows(const CudaContext& ctx, const PagedAttentionParams& p);

// Paged attention in bfloat16 of the sequences of at least `min_rows` rows, with the bits of
// paged_attention_kernel.cuh. Rows of other sequences are left alone.
void prefill_attention(CudaContext& ctx, const char* name, const PagedAttentionParams& p,
                       int32_t min_rows);

}  // namespace paceline::cuda
