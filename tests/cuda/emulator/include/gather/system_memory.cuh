// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stands in for cuda/gather/system_memory.cuh.

#include <cstdint>

namespace paceline::cuda {

struct Packet {
  uint64_t value;
  uint64_t exchange;
};

inline void store_packet(Packet* to, const Packet& packet) { *to = packet; }
inline Packet load_packet(const Packet* from) { return *from; }
inline void store_release(uint64_t* to, uint64_t value) { *to = value; }
inline uint64_t load_acquire(const uint64_t* from) { return *from; }
inline uint64_t load_here(const uint64_t* from) { return *from; }

}  // namespace paceline::cuda
