// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the kernels that exchange columns with other GPUs share. gather.cu has the protocol.

#include <algorithm>
#include <cstdint>

#include "base/check.h"
#include "common/launch.cuh"
#include "gather/system_memory.cuh"
#include "ops/gather.h"

namespace paceline::cuda {

inline constexpr int32_t kMaxPacketBlocks = 32;
inline constexpr int64_t kPacketBytes = 8;  // of columns
// Up to here the packets, which are twice as long, arrive sooner than bytes behind a fence.
inline constexpr int64_t kMostInPackets = int64_t{256} << 10;
static_assert(kMostInPackets <= GpuExchange::kPacketsAPlace * kPacketBytes);

// A thread waits in a loop of loads. Each time it has made this many, it looks whether the group
// has failed.
inline constexpr uint32_t kLoadsBetweenLooks = 1 << 10;
// When it has made this many, it tells the host which rank it waits for.
inline constexpr uint32_t kLoadsOfALongWait = 1 << 17;

struct GatherArgs {
  const int32_t* num_rows;  // [1]
  int32_t first_row;        // of this launch
  int32_t max_rows;         // of this launch
  const std::byte* x;
  int64_t x_stride;  // bytes
  std::byte* y;
  int64_t row_bytes;
  bool is_in_place;  // own columns are in y
  int32_t rank;
  int32_t num_ranks;
  int32_t begin[kMaxRanks + 1];         // the columns of each rank, in bytes
  int32_t first_packet[kMaxRanks + 1];  // of each rank in a row
  GpuExchange exchange;
};

// Whether the group has failed, which ends every wait. The word is in memory of the host.
__device__ __forceinline__ bool has_failed(const GpuExchange& exchange) {
  return *static_cast<const volatile int32_t*>(exchange.has_failed) != 0;
}

// Calls `has_come` until it is true or the group fails.
template <class HasCome>
__device__ __forceinline__ void await(const GatherArgs& a, int32_t peer, const HasCome& has_come) {
  for (uint32_t loads = 1; !has_come(); ++loads) {
    if (loads % kLoadsBetweenLooks != 0) continue;
    if (has_failed(a.exchange)) return;
    if (loads == kLoadsOfALongWait) a.exchange.waits_for[a.rank] = peer + 1;
  }
}

// The exchanges before this one, in the first thread of a block; 0 in others. A kernel loads it
// together with all else that it needs first.
__device__ __forceinline__ uint64_t load_exchange_count(const GatherArgs& a) {
  return threadIdx.x == 0 ? load_here(&a.exchange.states[a.rank]->num_exchanges) : 0;
}

// Called by one thread of each of the `num_blocks` blocks of an exchange, once they know its
// number. The last of them counts the exchange: so that takes no time at the end. The next exchange
// waits for the end of this kernel.
__device__ __forceinline__ void count_exchange(const GatherArgs& a, uint64_t number,
                                               uint32_t num_blocks) {
  GpuExchange::State* const state = a.exchange.states[a.rank];
  if (atomicInc(&state->num_begun_blocks, num_blocks - 1) == num_blocks - 1) {
    state->num_exchanges = number;
  }
}

// The number of this exchange, in all threads, each of which calls it once; and count_exchange of
// all blocks.
__device__ __forceinline__ uint64_t begin_exchange(const GatherArgs& a, uint64_t count) {
  __shared__ uint64_t number;
  if (threadIdx.x == 0) number = count + 1;
  __syncthreads();
  const uint64_t known = number;
  if (threadIdx.x == 0) count_exchange(a, known, gridDim.x);
  return known;
}

// The place of a packet in the memory of a rank.
__device__ __forceinline__ Packet* packet_place(const GatherArgs& a, uint64_t number, int32_t rank,
                                                int32_t row, int32_t packet) {
  const int64_t turn = static_cast<int64_t>(number % 2) * GpuExchange::kPacketsAPlace;
  return reinterpret_cast<Packet*>(a.exchange.packets[rank]) + turn +
         row * a.first_packet[a.num_ranks] + packet;
}

// Sends a packet to all other ranks.
__device__ __forceinline__ void send_packet(const GatherArgs& a, uint64_t number, int32_t row,
                                            int32_t packet, uint64_t value) {
  for (int32_t peer = 0; peer < a.num_ranks; ++peer) {
    if (peer != a.rank) store_packet(packet_place(a, number, peer, row, packet), {value, number});
  }
}

// Waits for packets of `peer` from `first` on; undefined if the group fails meanwhile.
template <int kPackets>
__device__ __forceinline__ void receive_packets(const GatherArgs& a, uint64_t number, int32_t peer,
                                                int32_t row, int32_t first,
                                                uint64_t (&values)[kPackets]) {
  const Packet* const at = packet_place(a, number, a.rank, row, first);
  await(a, peer, [&] {
    // All loads are on their way at once.
    bool have_come = true;
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      const Packet got = load_packet(at + i);
      values[i] = got.value;
      have_come &= got.exchange == number;
    }
    return have_come;
  });
}

// The arguments of an exchange. Throws InternalError where a rank has no columns.
GatherArgs gather_args(const GatherColumnsParams& p);

// Whether the columns of all ranks, in x and y, begin and end at multiples of `bytes`.
bool is_aligned(const GatherArgs& a, int64_t bytes);

// Whether the exchange is one of packets, which all ranks decide alike.
inline bool goes_in_packets(const GatherArgs& a) {
  return a.max_rows * a.row_bytes <= kMostInPackets;
}

// Numbers the packets of a row; returns the most that a rank has of one.
int32_t count_packets(GatherArgs& a);

}  // namespace paceline::cuda
