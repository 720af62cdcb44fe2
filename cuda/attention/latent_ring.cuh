// SPDX-License-Identifier: Apache-2.0
#pragma once

// The ring of slices of the latent attention kernel and the warps that fill it. A slice is copied
// once, and is an operand of the scores' product and then of the values'.

#include <cstddef>
#include <cstdint>

#include "attention/latent_shape.cuh"
#include "common/mma.cuh"
#include "gemm/wgmma.cuh"

namespace paceline::cuda::latent {

struct Ring {
  uint32_t slots;   // address of the first one
  uint64_t* full;   // [slots] kProducers arrivals
  uint64_t* empty;  // [slots] one arrival of each warp of one group
};

// A place in the ring, which goes round and round.
template <class S>
struct RingPlace {
  int32_t slot = 0;
  uint32_t parity = 0;

  // The place `count` slots further on, at most one round.
  __device__ __forceinline__ RingPlace after(int32_t count) const {
    const bool wraps = slot + count >= S::kSlots;
    return {wraps ? slot + count - S::kSlots : slot + count, wraps ? parity ^ 1u : parity};
  }
};

// Copies the entries of this block's pieces; called by all threads of the producer warpgroup. Eight
// lanes copy the 128 bytes of an entry. Entries that no row sees are not read and become zero.
template <class S>
__device__ __forceinline__ void produce(const PagedAttentionParams& p, const Work& work,
                                        const TileKeys& keys, int32_t split, const Ring& ring,
                                        RingPlace<S>& place) {
  constexpr int32_t kCopies = kChunk / (kProducers / 8);  // of a thread for a slice
  const int32_t thread = static_cast<int32_t>(threadIdx.x) - kConsumers;
  const int32_t first = thread / 8;
  const int32_t unit = thread % 8;
  const int32_t* const blocks = p.block_table + keys.seq_slot * p.block_table_stride;
  const std::byte* const base = p.kv.base + p.kv.k_offset + unit * 16;
  // Entries are 16 apart, so all of a thread's have the same place in the swizzle.
  static_assert(kProducers / 8 % 8 == 0);
  const uint32_t to = static_cast<uint32_t>(first * 128 + (unit ^ (first % 8)) * 16);
  for (int32_t piece = split; piece < work.num_pieces; piece += work.num_splits) {
    const int32_t end = work.end_chunk(piece);
    for (int32_t chunk = work.first_chunk(piece); chunk < end; ++chunk) {
      const std::byte* from[kCopies];
#pragma unroll
      for (int32_t i = 0; i < kCopies; ++i) {
        const int32_t key = chunk * kChunk + first + i * (kProducers / 8);
        from[i] = nullptr;
        if (key < keys.end) {
          const int32_t index = key / p.kv.block_size;
          from[i] = base + int64_t{blocks[index]} * p.kv.block_bytes +
                    int64_t{key - index * p.kv.block_size} * (kWidth * 2);
        }
      }
#pragma unroll 1
      for (int32_t slice = 0; slice < kSlices; ++slice) {
        barrier_wait(&ring.empty[place.slot], place.parity ^ 1u);
        const uint32_t slot = ring.slots + static_cast<uint32_t>(place.slot * kSliceBytes) + to;
#pragma unroll
        for (int32_t i = 0; i < kCopies; ++i) {
          const bool is_live = from[i] != nullptr;
          cp_async_16(slot + static_cast<uint32_t>(i * (kProducers / 8) * 128),
                      is_live ? from[i] + slice * 128 : base, is_live);
        }
        arrive_after_copies(&ring.full[place.slot]);
        place = place.after(1);
      }
    }
  }
}

}  // namespace paceline::cuda::latent
