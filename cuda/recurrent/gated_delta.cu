// SPDX-License-Identifier: Apache-2.0

// The launch of gated_delta, and its kernels with clusters.

#include "recurrent/chunk_kernel.cuh"
#include "recurrent/gated_delta_kernel.cuh"
#include "recurrent/gated_delta_portable.h"

#include <algorithm>
#include <cstdint>

namespace paceline {
namespace cuda {
namespace {

// Whether the kernel of chunks takes the layer. This does not depend on the pass.
bool has_chunks(const GatedDeltaParams& p) {
  const RecurrentShape& s = p.shape;
  const auto are_multiples = [](int64_t size, std::initializer_list<int64_t> values) {
    return std::all_of(values.begin(), values.end(),
                       [size](int64_t value) { return value % size == 0; });
  };
  return p.dtype == DType::kBFloat16 && p.records.dtype == DType::kBFloat16 &&
         s.key_dim == kHeadDim && s.value_dim == kHeadDim && s.num_taps == kTaps &&
         p.record_table.block_size % kChunkRows == 0 && is_vector_aligned(p.x) &&
         is_vector_aligned(p.y) && is_vector_aligned(p.conv) && is_vector_aligned(p.norm) &&
         is_vector_aligned(p.records.base) && is_vector_aligned(p.entries.base) &&
         are_multiples(4, {p.x_stride, s.record_width()}) &&
         are_multiples(sizeof(RawChannels), {p.records.block_bytes, p.records.k_offset}) &&
         are_multiples(kVectorBytes, {p.entries.block_bytes, p.entries.k_offset});
}

template <class Input, class Stored>
void launch_rows(CudaContext& ctx, const GatedDeltaParams& p) {
  if (std::max(p.shape.key_dim, p.shape.value_dim) <= kPiece) {
    launch_variant<Variant<Input, Stored, 16, 2>>(ctx, p);
  } else {
    launch_variant<Variant<Input, Stored, 32, 2>>(ctx, p);
  }
}

// Whether shared memory has room for all chunks of a sequence with `num_rows` rows.
bool is_window(const GatedDeltaParams& p) {
  const int32_t num_rows = p.record_table.block_size - 1 + p.max_rows_per_seq;
  return (num_rows + kChunkRows - 1) / kChunkRows <= WindowVariant::kPlaces;
}

}  // namespace
}  // namespace cuda

void gated_delta(CudaContext& ctx, const GatedDeltaParams& p) {
  using namespace cuda;
  const RecurrentShape& s = p.shape;
  PACELINE_CHECK(s.num_taps >= 2 && s.num_taps <= kMaxConvTaps, s.num_taps, " taps");
  PACELINE_CHECK(s.num_key_heads > 0 && s.num_value_heads % s.num_key_heads == 0, s.num_value_heads,
                 " value heads for ", s.num_key_heads, " key heads");
  PACELINE_CHECK(s.key_dim > 0 && s.key_dim <= kMaxRecurrentHeadDim && s.value_dim > 0 &&
                     s.value_dim <= kMaxRecurrentHeadDim,
                 "heads of ", s.key_dim, " and ", s.value_dim, " elements");
  PACELINE_CHECK(p.entry_table.block_size == 1 &&
                     p.entry_table.tokens_per_entry >= s.num_taps - 1 &&
                     p.entry_table.tokens_per_entry == p.record_table.block_size,
                 "a state for ", p.entry_table.tokens_per_entry, " tokens");
  if (has_chunks(p)) {
    if (!ctx.has_clusters) return gated_delta_of_chunks(ctx, p);
    if (is_window(p)) return launch_chunks<WindowVariant>(ctx, p);
    return launch_chunks<PromptVariant>(ctx, p);
  }
  if (!ctx.has_clusters) return gated_delta_of_any_size(ctx, p);
  with_element_type(p.dtype, "rows", [&](auto input) {
    with_element_type(p.records.dtype, "records",
                      [&](auto stored) { launch_rows<decltype(input), decltype(stored)>(ctx, p); });
  });
}

}  // namespace paceline
