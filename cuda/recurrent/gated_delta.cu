// SPDX-License-Identifier: Apache-2.0

// The launch of gated_delta.

#include "recurrent/gated_delta_kernel.cuh"
#include "recurrent/key_head_kernel.cuh"

#include <algorithm>
#include <cstdint>

namespace paceline {
namespace cuda {
namespace {

template <class V>
void launch_variant(CudaContext& ctx, const GatedDeltaParams& p) {
  const int32_t num_blocks = (p.shape.value_dim + V::kColumns - 1) / V::kColumns;
  static_assert(V::kPieces * kPiece <= kMaxBlocks * V::kColumns);
  const size_t bytes = SharedRows<V>::num_bytes((V::kChunk + num_blocks - 1) / num_blocks);
  constexpr auto* kKernel = &gated_delta_kernel<V>;
  static const bool is_allowed = [] {
    allow_shared_bytes(kKernel, SharedRows<V>::num_bytes(V::kChunk), "gated_delta");
    return true;
  }();
  static_cast<void>(is_allowed);
  launch_clusters(
      ctx, "gated_delta", kKernel,
      dim3(static_cast<uint32_t>(num_blocks), static_cast<uint32_t>(p.shape.num_value_heads),
           static_cast<uint32_t>(p.max_seqs)),
      dim3(kThreads), dim3(static_cast<uint32_t>(num_blocks)), bytes, p);
}

template <class V>
void launch_key_heads(CudaContext& ctx, const GatedDeltaParams& p) {
  static_assert(sizeof(KeyHeadShared<V>) <= 48 << 10);
  launch_clusters(ctx, "gated_delta", &key_head_kernel<V>,
                  dim3(kHeadBlocks, static_cast<uint32_t>(p.shape.num_key_heads),
                       static_cast<uint32_t>(p.max_seqs)),
                  dim3(V::kNumThreads), dim3(kHeadBlocks), sizeof(KeyHeadShared<V>), p);
}

// Whether all rows of four elements are aligned vectors.
template <class T>
bool has_vectors(const GatedDeltaParams& p) {
  const auto are_multiples = [](int64_t size, std::initializer_list<int64_t> offsets) {
    return std::all_of(offsets.begin(), offsets.end(),
                       [size](int64_t offset) { return offset % (4 * size) == 0; });
  };
  return is_vector_aligned(p.x) && is_vector_aligned(p.y) && is_vector_aligned(p.conv) &&
         is_vector_aligned(p.norm) && is_vector_aligned(p.records.base) &&
         is_vector_aligned(p.entries.base) &&
         are_multiples(sizeof(T), {p.x_stride * static_cast<int64_t>(sizeof(T)),
                                   p.records.block_bytes, p.records.k_offset,
                                   p.shape.record_width() * static_cast<int64_t>(sizeof(T))}) &&
         are_multiples(sizeof(float), {p.entries.block_bytes, p.entries.k_offset});
}

template <class Input, class Stored>
void launch(CudaContext& ctx, const GatedDeltaParams& p) {
  const RecurrentShape& s = p.shape;
  if constexpr (std::is_same_v<Input, Stored>) {
    if (s.key_dim == kHeadDim && s.value_dim == kHeadDim && s.num_taps == kTaps &&
        has_vectors<Input>(p)) {
      switch (s.num_value_heads / s.num_key_heads) {
        case 1:
          return launch_key_heads<KeyHeadVariant<Input, 1>>(ctx, p);
        case 2:
          return launch_key_heads<KeyHeadVariant<Input, 2>>(ctx, p);
        case 3:
          return launch_key_heads<KeyHeadVariant<Input, 3>>(ctx, p);
        case kMaxHeadsOfKey:
          return launch_key_heads<KeyHeadVariant<Input, kMaxHeadsOfKey>>(ctx, p);
        default:
          break;
      }
    }
  }
  if (std::max(s.key_dim, s.value_dim) <= kPiece) {
    launch_variant<Variant<Input, Stored, 16, 2>>(ctx, p);
  } else {
    launch_variant<Variant<Input, Stored, 32, 2>>(ctx, p);
  }
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
  with_element_type(p.dtype, "rows", [&](auto input) {
    with_element_type(p.records.dtype, "records",
                      [&](auto stored) { launch<decltype(input), decltype(stored)>(ctx, p); });
  });
}

}  // namespace paceline
