// SPDX-License-Identifier: Apache-2.0
#pragma once

// The ring of slices of the latent attention kernel and the warps that fill it. A slice is copied
// once, and is an operand of the scores' product and then of the values'.
//
// The copy engine brings chunks all of whose entries some row sees. The last chunk of a context,
// whose other entries must not be read, comes by cp.async, and so do all chunks where blocks have a
// size that no box fits.
//
// What cp.async has written must be fenced before tensor cores read it. A fence takes longer than
// the products of a slice, so one warp announces slices: it waits for the copies, fences them, and
// tells the warpgroups that multiply, which need no fence.

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "attention/latent_shape.cuh"
#include "common/mma.cuh"
#include "gemm/wgmma.cuh"

namespace paceline::cuda::latent {

struct Ring {
  uint32_t slots;                         // address of the first one
  uint64_t* landed;                       // [slots] an arrival of each copier, by cp.async
  uint64_t* full;                         // [slots] one arrival: landed and fenced, or brought
  uint64_t* empty;                        // [slots] one arrival of each warp of one group
  const std::byte* (*addresses)[kChunk];  // [2] of the entries of a chunk; null: no row sees it
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
  // The place of a slice of the chunk that begins here. The slice that is no part of the values is
  // first, since its slot is free first.
  __device__ __forceinline__ RingPlace of_slice(int32_t slice) const {
    return after(slice == kValueSlices ? 0 : slice + 1);
  }
};

// The slice that is `at` slices behind the place of its chunk; see RingPlace::of_slice.
__device__ __forceinline__ int32_t slice_at(int32_t at) { return at == 0 ? kValueSlices : at - 1; }

// The entries of a layer's cache, to the copy engine.
struct EntryMap {
  CUtensorMap map;
  int32_t box_tokens;
  int32_t num_boxes;  // of a chunk; 0: the copy engine cannot copy blocks of this size

  // Whether it brings a chunk of a tile of which no row sees an entry from `end` on.
  __device__ __forceinline__ bool brings(int32_t chunk, int32_t end) const {
    return num_boxes > 0 && (chunk + 1) * kChunk <= end;
  }
};

// Asks for slices `turn`, `turn` + kRequesters, ... of a chunk that the copy engine brings, one box
// a lane, and moves `place` behind the chunk. Each of kRequesters warps has a turn. Between two
// slices of a warp there are fewer than the ring has, so no slot is a phase further than it thinks.
template <class S>
__device__ __forceinline__ void request_slices(const PagedAttentionParams& p, const BlockTile& tile,
                                               const EntryMap& entries, const Ring& ring,
                                               int32_t chunk, int32_t turn, RingPlace<S>& place) {
  const int32_t lane = thread_here() % 32;
  const int32_t key = chunk * kChunk + min(lane, entries.num_boxes - 1) * entries.box_tokens;
  const int32_t of_key = key / p.kv.block_size;
  const int32_t token = key - of_key * p.kv.block_size;
  const int32_t block = __ldcg(p.block_table + tile.seq_slot * p.block_table_stride + of_key);
  static_assert(S::kSlots > 2 * kRequesters);
#pragma unroll 1
  for (int32_t at = 0; at < kSlices; ++at) {
    if (at % kRequesters == turn) {
      barrier_wait_idle(&ring.empty[place.slot], place.parity ^ 1u);
      uint64_t* const full = &ring.full[place.slot];
      if (lane == 0) barrier_expect(full, kSliceBytes);
      __syncwarp();
      if (lane < entries.num_boxes) {
        const int32_t to = place.slot * kSliceBytes + lane * entries.box_tokens * 128;
        copy_box(ring.slots + static_cast<uint32_t>(to), &entries.map, slice_at(at) * kSliceColumns,
                 /*head=*/0, token, block, full);
      }
    }
    place = place.after(1);
  }
}

// Walks the chunks of this block's pieces.
struct ChunkWalk {
  int32_t piece;
  int32_t chunk;
  int32_t end;

  __device__ __forceinline__ explicit ChunkWalk(const Work& work)
      : piece(static_cast<int32_t>(blockIdx.y)),
        chunk(work.first_chunk(piece)),
        end(work.end_chunk(piece)) {}
  __device__ __forceinline__ bool is_over(const Work& work) const {
    return piece >= work.num_pieces;
  }
  __device__ __forceinline__ void advance(const Work& work) {
    if (++chunk < end) return;
    piece += work.num_splits;
    chunk = work.first_chunk(piece);
    end = work.end_chunk(piece);
  }
};

// Brings the entries of this block's pieces; called by the copiers. With cp.async, eight lanes copy
// the 128 bytes of an entry. Entries that no row sees are not read and become zero.
template <class S>
__device__ __forceinline__ void produce(const PagedAttentionParams& p, const BlockTile& tile,
                                        const EntryMap& entries, const Ring& ring,
                                        RingPlace<S>& place) {
  const Work& work = tile.work;
  constexpr int32_t kStep = kCopiers / 8;
  constexpr int32_t kCopies = kChunk / kStep;  // of a thread for a slice
  constexpr bool kKeeps = S::kCopierRegisters >= 64;
  int32_t buffer = 0;
  for (ChunkWalk walk(work); !walk.is_over(work); walk.advance(work)) {
    if (entries.brings(walk.chunk, tile.end)) {
      request_slices<S>(p, tile, entries, ring, walk.chunk, (thread_here() - kConsumers) / 32,
                        place);
      continue;
    }
    const int32_t thread = thread_here() - kConsumers;
    const int32_t first = thread / 8;
    const int32_t unit = thread % 8;
    // Entries are a multiple of 8 apart, so all of a thread's have the same place in the swizzle.
    static_assert(kStep % 8 == 0);
    const uint32_t to = static_cast<uint32_t>(first * 128 + (unit ^ (first % 8)) * 16);
    const int32_t key = walk.chunk * kChunk + thread;
    const std::byte* entry = nullptr;
    if (key < tile.end) {
      const int32_t of_key = key / p.kv.block_size;
      const int32_t block = __ldcg(p.block_table + tile.seq_slot * p.block_table_stride + of_key);
      entry = p.kv.base + p.kv.k_offset + int64_t{block} * p.kv.block_bytes +
              int64_t{key - of_key * p.kv.block_size} * (kWidth * 2);
    }
    // Two buffers: what a thread writes here was read two chunks ago.
    ring.addresses[buffer][thread] = entry;
    sync_threads<kCopiers>(kCopierBarrier);
    const std::byte* const* const addresses = ring.addresses[buffer] + first;
    // In registers where there are enough. Else each is read behind the copy before it, which takes
    // longer than the copies.
    const std::byte* kept[kCopies];
    if constexpr (kKeeps) {
#pragma unroll
      for (int32_t i = 0; i < kCopies; ++i) kept[i] = addresses[i * kStep];
    }
    buffer ^= 1;
#pragma unroll 1
    for (int32_t at = 0; at < kSlices; ++at) {
      const int32_t byte = slice_at(at) * (kSliceColumns * 2) + unit * 16;
      barrier_wait(&ring.empty[place.slot], place.parity ^ 1u);
      const uint32_t slot = ring.slots + static_cast<uint32_t>(place.slot * kSliceBytes) + to;
#pragma unroll
      for (int32_t i = 0; i < kCopies; ++i) {
        const std::byte* const from = kKeeps ? kept[i] : addresses[i * kStep];
        const bool is_live = from != nullptr;
        cp_async_16(slot + static_cast<uint32_t>(i * kStep * 128),
                    is_live ? from + byte : p.kv.base, is_live);
      }
      arrive_after_copies(&ring.landed[place.slot]);
      place = place.after(1);
    }
  }
}

// Whether a slice has landed; unlike barrier_try_wait, this never waits.
__device__ __forceinline__ bool has_landed(const Ring& ring, int32_t slot, uint32_t parity) {
  uint32_t is_over;
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;\n"
      "selp.u32 %0, 1, 0, over;\n"
      "}\n"
      : "=r"(is_over)
      : "r"(shared_address(&ring.landed[slot])), "r"(parity)
      : "memory");
  return is_over != 0;
}

// Announces the slices of this block's pieces that come by cp.async, and asks for some of the
// others; called by one warp. All slices that have landed share a fence. phases: of each slot, the
// parity of the phase in which its next slice lands.
template <class S>
__device__ __forceinline__ void announce(const PagedAttentionParams& p, const BlockTile& tile,
                                         const EntryMap& entries, const Ring& ring,
                                         RingPlace<S>& place, uint32_t& phases) {
  static_assert(S::kSlots <= 32);
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  const auto parity_of = [&](int32_t slot) { return phases >> slot & 1u; };
  for (ChunkWalk walk(tile.work); !walk.is_over(tile.work); walk.advance(tile.work)) {
    if (entries.brings(walk.chunk, tile.end)) {
      request_slices<S>(p, tile, entries, ring, walk.chunk, kRequesters - 1, place);
      continue;
    }
    for (int32_t left = kSlices; left > 0;) {
      barrier_wait(&ring.landed[place.slot], parity_of(place.slot));
      RingPlace<S> next = place.after(1);
      while (--left > 0 &&
             __all_sync(kFullWarp, has_landed(ring, next.slot, parity_of(next.slot)))) {
        next = next.after(1);
      }
      fence_shared_for_wgmma();
      for (; place.slot != next.slot; place = place.after(1)) {
        phases ^= 1u << place.slot;
        if (lane == 0) barrier_arrive(&ring.full[place.slot]);
      }
    }
  }
}

}  // namespace paceline::cuda::latent
