// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stands in for cuda/gemm/wgmma.cuh: mbarriers and copies of contiguous bytes. Products of
// warpgroups and copies of tensors have no stand-in.

#include <cstdint>
#include <cstring>

#include "common/mma.cuh"

namespace paceline::cuda {

struct EmulatedBarrier {
  uint8_t parity;  // of the phase that runs
  uint8_t num_expected;
  int16_t num_missing;
  int32_t num_bytes;  // that copies still have to deliver

  void complete() {
    if (num_missing > 0 || num_bytes != 0) return;
    parity ^= 1;
    num_missing = num_expected;
  }
};
static_assert(sizeof(EmulatedBarrier) == sizeof(uint64_t));

inline EmulatedBarrier& emulated(uint64_t* barrier) {
  return *reinterpret_cast<EmulatedBarrier*>(barrier);
}

inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  emulated(barrier) = {.parity = 0,
                       .num_expected = static_cast<uint8_t>(arrivals),
                       .num_missing = static_cast<int16_t>(arrivals),
                       .num_bytes = 0};
}
inline void barrier_init_fence() {}
inline void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  EmulatedBarrier& state = emulated(barrier);
  state.num_bytes += static_cast<int32_t>(bytes);
  --state.num_missing;
  state.complete();
}
inline void barrier_wait(uint64_t* barrier, uint32_t parity,
                         const emulator::Place& place = emulator::Place::current()) {
  while (emulated(barrier).parity == parity) emulator::let_others_run(place);
}

inline EmulatedBarrier& emulated_in_cluster(uint64_t* barrier, int32_t rank) {
  return emulated(static_cast<uint64_t*>(emulator::shared_of_block(barrier, rank)));
}
template <class T>
inline void store_async(T* to, int32_t rank, const T& value, uint64_t* barrier) {
  *static_cast<T*>(emulator::shared_of_block(to, rank)) = value;
  EmulatedBarrier& state = emulated_in_cluster(barrier, rank);
  state.num_bytes -= static_cast<int32_t>(sizeof(value));
  state.complete();
}
inline void barrier_arrive(uint64_t* barrier) {
  --emulated(barrier).num_missing;
  emulated(barrier).complete();
}
inline void barrier_arrive_in_cluster(uint64_t* barrier, int32_t rank) {
  EmulatedBarrier& state = emulated_in_cluster(barrier, rank);
  --state.num_missing;
  state.complete();
}
inline constexpr uint64_t kEvictNormal = 0;
inline constexpr uint64_t kEvictFirst = 1;

inline void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t) {
  std::memcpy(emulator::shared_pointer(to, bytes), from, bytes);
  EmulatedBarrier& state = emulated(barrier);
  state.num_bytes -= static_cast<int32_t>(bytes);
  state.complete();
}

}  // namespace paceline::cuda
