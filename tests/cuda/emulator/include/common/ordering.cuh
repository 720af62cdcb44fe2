// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stands in for cuda/common/ordering.cuh.

#include <cstdint>

#include <cuda_runtime.h>

namespace paceline::cuda {

template <int kBarrier, int kThreads>
inline void sync_some_threads(const emulator::Place& place = emulator::Place::current()) {
  emulator::wait_for_block(kBarrier, kThreads, false, place);
}

template <int32_t kCount>
inline void sync_threads(int32_t number,
                         const emulator::Place& place = emulator::Place::current()) {
  emulator::wait_for_block(number, kCount, false, place);
}

template <uint32_t kAmount>
inline void add_relaxed(uint32_t* counter) {
  atomicAdd(counter, kAmount);
}
template <uint32_t kAmount>
inline uint32_t add_and_acquire(uint32_t* counter) {
  return atomicAdd(counter, kAmount);
}
inline uint32_t poll_and_acquire(const uint32_t* counter,
                                 const emulator::Place& place = emulator::Place::current()) {
  emulator::let_others_run(place);
  return *counter;
}

inline int32_t arrive_and_acquire(int32_t* counter) { return atomicAdd(counter, 1); }

inline float in_register(float value) { return value; }
inline int32_t in_register(int32_t value) { return value; }
inline const float* in_register(const float* value) { return value; }

}  // namespace paceline::cuda
