// SPDX-License-Identifier: Apache-2.0

// The exchange of ranks on GPUs: each writes its columns to memory of the others, which copy them
// from there. A rank never reads the memory of another GPU: that would take twice as long. All
// exchanges of a group are numbered alike on all ranks, by a count in device memory, so a captured
// graph can be launched again. There are two places that exchanges use by turns: a rank that has
// received exchange e from all others knows that they have read all of exchange e - 1.
//
// Few bytes are written as packets of 8 bytes with the number of the exchange: a packet is stored
// and loaded at once (16 bytes, relaxed at the scope of the system), so its arrival needs no fence
// and no flag. Many bytes are written as they are, with one flag for each block and peer behind a
// fence.

#include <algorithm>
#include <cstdint>

#include "base/check.h"
#include "common/launch.cuh"
#include "gather/exchange.cuh"
#include "ops/gather.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kPacketThreads = 256;

constexpr int32_t kSegmentThreads = 512;
constexpr int32_t kSegmentBytes = 8192;
constexpr int32_t kMaxSegmentBlocks = GpuExchange::kMaxBlocks;

// The bytes of a packet: a whole one at once, or in pairs of bytes.
template <bool kIsAligned>
__device__ __forceinline__ uint64_t load_value(const std::byte* from, int32_t num_bytes) {
  if constexpr (kIsAligned) {
    return *reinterpret_cast<const uint64_t*>(from);
  } else {
    uint64_t value = 0;
    for (int32_t i = 0; i < min(num_bytes, 8); i += 2) {
      value |= static_cast<uint64_t>(*reinterpret_cast<const uint16_t*>(from + i)) << (8 * i);
    }
    return value;
  }
}
template <bool kIsAligned>
__device__ __forceinline__ void store_value(std::byte* to, int32_t num_bytes, uint64_t value) {
  if constexpr (kIsAligned) {
    *reinterpret_cast<uint64_t*>(to) = value;
  } else {
    for (int32_t i = 0; i < min(num_bytes, 8); i += 2) {
      *reinterpret_cast<uint16_t*>(to + i) = static_cast<uint16_t>(value >> (8 * i));
    }
  }
}

// Calls body(row, the packet's place among those of the row, its bytes' place in y's row, how many
// bytes are left there) for the packets of a rank that this thread has.
template <class Body>
__device__ __forceinline__ void for_packets(const GatherArgs& a, int32_t num_rows, int32_t of_rank,
                                            const Body& body) {
  const int32_t first_packet = a.first_packet[of_rank];
  const int32_t num_packets = a.first_packet[of_rank + 1] - first_packet;
  const int32_t begin = a.begin[of_rank];
  const auto stride = static_cast<int32_t>(gridDim.x * blockDim.x);
  for (auto i = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
       i < num_rows * num_packets; i += stride) {
    const int32_t row = i / num_packets;
    const int32_t packet = i % num_packets;
    const int32_t byte = begin + packet * static_cast<int32_t>(kPacketBytes);
    body(row, first_packet + packet, byte, a.begin[of_rank + 1] - byte);
  }
}

template <bool kIsAligned>
__global__ void __launch_bounds__(kPacketThreads)
    gather_packets_kernel(const __grid_constant__ GatherArgs a) {
  let_successor_start();
  wait_for_predecessor();
  const uint64_t count = load_exchange_count(a);
  const int32_t num_rows = min(*a.num_rows, a.max_rows);
  if (num_rows <= 0) return;
  const uint64_t number = begin_exchange(a, count);
  for_packets(a, num_rows, a.rank, [&](int32_t row, int32_t packet, int32_t byte, int32_t left) {
    const uint64_t value =
        load_value<kIsAligned>(a.x + row * a.x_stride + (byte - a.begin[a.rank]), left);
    send_packet(a, number, row, packet, value);
    if (!a.is_in_place) store_value<kIsAligned>(a.y + row * a.row_bytes + byte, left, value);
  });
  for (int32_t next = 1; next < a.num_ranks; ++next) {
    const int32_t peer = (a.rank + next) % a.num_ranks;
    for_packets(a, num_rows, peer, [&](int32_t row, int32_t packet, int32_t byte, int32_t left) {
      uint64_t value[1];
      receive_packets(a, number, peer, row, packet, value);
      store_value<kIsAligned>(a.y + row * a.row_bytes + byte, left, value[0]);
    });
  }
}

// Calls body(row, first byte in y's row, its bytes) for the segments of a rank's columns that this
// block has; they are the same on all ranks.
template <class Body>
__device__ __forceinline__ void for_segments(const GatherArgs& a, int32_t num_rows, int32_t of_rank,
                                             const Body& body) {
  const int32_t end = a.begin[of_rank + 1];
  const int32_t num_segments = (end - a.begin[of_rank] + kSegmentBytes - 1) / kSegmentBytes;
  for (auto i = static_cast<int32_t>(blockIdx.x); i < num_rows * num_segments;
       i += static_cast<int32_t>(gridDim.x)) {
    const int32_t byte = a.begin[of_rank] + i % num_segments * kSegmentBytes;
    body(i / num_segments, byte, min(end - byte, kSegmentBytes));
  }
}

// Item: what a thread copies at once.
template <class Item>
__global__ void __launch_bounds__(kSegmentThreads)
    gather_segments_kernel(const __grid_constant__ GatherArgs a) {
  let_successor_start();
  wait_for_predecessor();
  const uint64_t count = load_exchange_count(a);
  const int32_t num_rows = min(*a.num_rows - a.first_row, a.max_rows);
  if (num_rows <= 0) return;
  const uint64_t number = begin_exchange(a, count);
  const int64_t turn = static_cast<int64_t>(number % 2) * a.exchange.segment_bytes;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const auto for_items = [&](int32_t num_bytes, const auto& body) {
    for (int32_t i = thread; i < num_bytes / static_cast<int32_t>(sizeof(Item));
         i += kSegmentThreads) {
      body(i);
    }
  };
  const auto y_row = [&](int32_t row) { return a.y + (a.first_row + row) * a.row_bytes; };
  for_segments(a, num_rows, a.rank, [&](int32_t row, int32_t byte, int32_t num_bytes) {
    const auto* const from = reinterpret_cast<const Item*>(a.x + (a.first_row + row) * a.x_stride +
                                                           (byte - a.begin[a.rank]));
    for_items(num_bytes, [&](int32_t i) {
      const Item item = from[i];
      for (int32_t peer = 0; peer < a.num_ranks; ++peer) {
        if (peer == a.rank) continue;
        std::byte* const place = a.exchange.segments[peer] + turn + row * a.row_bytes + byte;
        reinterpret_cast<Item*>(place)[i] = item;
      }
      if (!a.is_in_place) reinterpret_cast<Item*>(y_row(row) + byte)[i] = item;
    });
  });
  __syncthreads();
  if (thread < a.num_ranks && thread != a.rank) {
    const auto flag = static_cast<int32_t>(blockIdx.x) * kMaxRanks;
    __threadfence_system();
    store_release(a.exchange.arrivals[thread] + flag + a.rank, number);
    const uint64_t* const of_peer = a.exchange.arrivals[a.rank] + flag + thread;
    await(a, thread, [&] { return load_acquire(of_peer) >= number; });
  }
  __syncthreads();
  for (int32_t next = 1; next < a.num_ranks; ++next) {
    const int32_t peer = (a.rank + next) % a.num_ranks;
    for_segments(a, num_rows, peer, [&](int32_t row, int32_t byte, int32_t num_bytes) {
      const auto* const place = reinterpret_cast<const Item*>(a.exchange.segments[a.rank] + turn +
                                                              row * a.row_bytes + byte);
      for_items(num_bytes, [&](int32_t i) {
        reinterpret_cast<Item*>(y_row(row) + byte)[i] = __ldcg(place + i);
      });
    });
  }
}

void gather_packets(CudaContext& ctx, GatherArgs& a) {
  const int32_t most = count_packets(a);
  const auto blocks = static_cast<uint32_t>(
      std::clamp((a.max_rows * most + kPacketThreads - 1) / kPacketThreads, 1, kMaxPacketBlocks));
  const auto kernel =
      is_aligned(a, kPacketBytes) ? &gather_packets_kernel<true> : &gather_packets_kernel<false>;
  launch(ctx, "gather", kernel, dim3(blocks), dim3(kPacketThreads), 0, a);
}

void gather_segments(CudaContext& ctx, GatherArgs& a) {
  const auto kernel = is_aligned(a, 16)  ? &gather_segments_kernel<uint4>
                      : is_aligned(a, 4) ? &gather_segments_kernel<uint32_t>
                                         : &gather_segments_kernel<uint16_t>;
  const int32_t all_rows = a.max_rows;
  const auto rows_a_step =
      static_cast<int32_t>(std::min<int64_t>(a.exchange.segment_bytes / a.row_bytes, all_rows));
  PACELINE_CHECK(rows_a_step > 0, "rows of ", a.row_bytes, " bytes are exchanged in ",
                 a.exchange.segment_bytes);
  for (int32_t first = 0; first < all_rows; first += rows_a_step) {
    a.first_row = first;
    a.max_rows = std::min(rows_a_step, all_rows - first);
    launch(ctx, "gather", kernel, dim3(kMaxSegmentBlocks), dim3(kSegmentThreads), 0, a);
  }
}

}  // namespace

GatherArgs gather_args(const GatherColumnsParams& p) {
  PACELINE_CHECK(p.ranks.group != nullptr, "columns are gathered without other ranks");
  const auto item_bytes = static_cast<int32_t>(dtype_bytes(p.dtype));
  GatherArgs args = {.num_rows = p.num_rows,
                     .first_row = 0,
                     .max_rows = p.max_rows,
                     .x = static_cast<const std::byte*>(p.x),
                     .x_stride = p.x_stride * item_bytes,
                     .y = static_cast<std::byte*>(p.y),
                     .row_bytes = int64_t{p.columns.total()} * item_bytes,
                     .is_in_place = false,
                     .rank = p.ranks.rank,
                     .num_ranks = p.columns.num_ranks,
                     .begin = {},
                     .first_packet = {},
                     .exchange = p.ranks.group->gpu_exchange()};
  for (int32_t rank = 0; rank < args.num_ranks; ++rank) {
    PACELINE_CHECK(p.columns.of(rank).count > 0, "rank ", rank, " has no columns");
    args.begin[rank + 1] = p.columns.first[static_cast<size_t>(rank) + 1] * item_bytes;
  }
  args.is_in_place = args.x == args.y + args.begin[args.rank] && args.x_stride == args.row_bytes;
  return args;
}

bool is_aligned(const GatherArgs& a, int64_t bytes) {
  const auto is_multiple = [&](int64_t value) { return value % bytes == 0; };
  return is_multiple(reinterpret_cast<intptr_t>(a.x)) &&
         is_multiple(reinterpret_cast<intptr_t>(a.y)) && is_multiple(a.x_stride) &&
         std::all_of(a.begin, a.begin + a.num_ranks + 1, is_multiple);
}

int32_t count_packets(GatherArgs& a) {
  int32_t most = 0;
  for (int32_t rank = 0; rank < a.num_ranks; ++rank) {
    const int64_t bytes = a.begin[rank + 1] - a.begin[rank];
    const auto packets = static_cast<int32_t>((bytes + kPacketBytes - 1) / kPacketBytes);
    a.first_packet[rank + 1] = a.first_packet[rank] + packets;
    most = std::max(most, packets);
  }
  return most;
}

}  // namespace cuda

void gather_columns(CudaContext& ctx, const GatherColumnsParams& p) {
  cuda::GatherArgs args = cuda::gather_args(p);
  if (p.max_rows <= 0) return;
  if (cuda::goes_in_packets(args)) {
    cuda::gather_packets(ctx, args);
  } else {
    cuda::gather_segments(ctx, args);
  }
}

}  // namespace paceline
